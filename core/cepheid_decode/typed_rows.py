"""Rows in the columns of a topic's schema: values of messages, decoded by kind of schema, and the broker's metadata of each.

MessageDecoder ──► values, keys, schema versions ──► TypedColumns ──► the schema's columns
              └──► positions, times, properties … ───────────────────► `__name` columns, and `_error`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cepheid_decode.columns import arrow_schema
from cepheid_decode.counters import ScanCounters
from cepheid_decode.errors import BadRecordError
from cepheid_decode.history import Piece
from cepheid_decode.message_decoder import MessageDecoder
from cepheid_decode.scan_request import OnBadRecord, ReadMode, ScanSpec
from cepheid_decode.shared_schema import base_of
from cepheid_decode.typed import TypedColumns, typed_fields
from cepheid_rpc import EntryGroup
from cepheid_wire.payload_decryption import PayloadDecryptor

ERROR_COLUMN = "_error"
METADATA_PREFIX = "__"
_NEEDED = ("value", "key_bytes", "ledger_id", "entry_id", "batch_index")


class Messages(Protocol):
    """The part of DecodedMessages that typed rows use."""

    def __len__(self) -> int: ...

    def keep(self, wanted: npt.NDArray[np.bool_]) -> None: ...

    def column(self, name: str) -> pa.Array: ...

    def readable_values(self) -> pa.BinaryArray: ...

    def errors(self) -> pa.StringArray | None: ...

    @property
    def versions(self) -> list[bytes]: ...

    @property
    def version_codes(self) -> npt.NDArray[np.int32]: ...


class TypedRows:
    """A decoder with the same interface as MessageDecoder."""

    def __init__(
        self,
        spec: ScanSpec,
        counters: ScanCounters,
        look_back: Callable[[Piece, int], Iterator[EntryGroup]],
        decryptor: PayloadDecryptor | None = None,
    ) -> None:
        fields = {field.name for field in typed_fields(spec.schemas, spec.reader_version)}
        self._schema = arrow_schema(spec)
        self._of_schema = [name for name in spec.columns if name in fields]
        metadata = [name.removeprefix(METADATA_PREFIX) for name in spec.columns if name not in fields and name != ERROR_COLUMN]
        inner = replace(spec, mode=ReadMode.MESSAGES, columns=tuple(dict.fromkeys((*_NEEDED, *metadata))))
        self._messages = MessageDecoder(inner, counters, look_back, decryptor)
        self._spec = spec
        self._writers = dict(spec.writers)
        self._counters = counters
        self._by_topic: dict[str, TypedColumns] = {}

    def decode(self, piece: Piece, groups: Iterable[EntryGroup]) -> Iterator[pa.RecordBatch]:
        for messages in self._messages.decode_messages(piece, groups):
            yield from self.rows(piece, messages)
            del messages

    def rows(self, piece: Piece, messages: Messages) -> Iterator[pa.RecordBatch]:
        """Yield rows of messages that were already counted. Raises BadRecordError, after the rows before that message."""
        try:
            rows = self._rows(piece, messages)
        except BadRecordError as error:
            # The rows before it first: a reader that stops early may not get the error.
            row = error.facts.get("row")
            if isinstance(row, int) and row > 0:
                self._counters.messages -= len(messages) - row
                messages.keep(np.arange(len(messages)) < row)
                yield self._rows(piece, messages)
            raise
        yield rows

    def finish(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        for messages in self._messages.finish_messages(piece):
            yield self._rows(piece, messages)

    def _rows(self, piece: Piece, messages: Messages) -> pa.RecordBatch:
        try:
            typed = self._typed(piece.topic).columns(
                messages.readable_values(), messages.column("key_bytes"), messages.version_codes, messages.versions
            )
        except BadRecordError as error:
            raise _placed(error, piece, messages) from error
        by_name = dict(zip(self._of_schema, typed.arrays, strict=True))
        arrays = [by_name[name] if name in by_name else self._beside(name, messages, typed.errors) for name in self._schema.names]
        rows: pa.RecordBatch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if self._spec.on_bad_record is OnBadRecord.SKIP and typed.bad is not None and typed.bad.any():
            rows = rows.filter(pa.array(~typed.bad))
            self._counters.messages -= int(typed.bad.sum())
        return rows

    def _typed(self, topic: str) -> TypedColumns:
        """Each topic has its own numbering of versions."""
        base = base_of(topic)
        writers = self._writers.get(base)
        key = "" if writers is None else base
        if key not in self._by_topic:
            spec = self._spec
            self._by_topic[key] = TypedColumns(
                spec.schemas, spec.reader_version, spec.on_bad_record, self._counters, self._of_schema, writers
            )
        return self._by_topic[key]

    def _beside(self, name: str, messages: Messages, errors: pa.Array | None) -> pa.Array:
        if name != ERROR_COLUMN:
            return messages.column(name.removeprefix(METADATA_PREFIX))
        texts = [text for text in (messages.errors(), errors) if text is not None]
        return pc.coalesce(*texts) if texts else pa.nulls(len(messages), pa.string())


def _placed(error: BadRecordError, piece: Piece, messages: Messages) -> BadRecordError:
    """Return the same error with the position of the message, if the error names its row."""
    row = error.facts.get("row")
    if not isinstance(row, int):
        return BadRecordError(f"{piece.topic}: {error.args[0]}", topic=piece.topic, ledger_id=piece.ledger_id, **error.facts)
    place = [messages.column(name)[row].as_py() for name in ("ledger_id", "entry_id", "batch_index")]
    text = ":".join(str(number) for number in place if number is not None)
    return BadRecordError(f"{piece.topic} at {text}: {error.args[0]}", topic=piece.topic, position=text, **error.facts)
