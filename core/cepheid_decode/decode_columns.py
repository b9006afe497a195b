"""Rows of messages as Arrow columns, each created when it is requested."""

from __future__ import annotations

import base64
import binascii

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cepheid_decode import entry_metadata as entry_fields
from cepheid_decode.columns import MESSAGE_COLUMNS, PROPERTIES, TIMESTAMP
from cepheid_decode.decode_fields import Bools, Ints
from cepheid_decode.decode_gather import as_text, gather
from cepheid_decode.decode_rows import ALONE, EVENT_TIME, KEY, KEY_IS_BASE64, NULL_KEY, ORDERING_KEY, SEQUENCE_ID, MessageRows

_MAX_TIME_MS = 253_402_300_799_999  # the end of the year 9999, the largest timestamp of Spark and of Python


class DecodedMessages:
    """Some messages of a piece in order. Columns are created when they are first requested.

    `broken`: rows in which a requested column has an invalid value (text that is not UTF-8, a key that is not base64): null.
    """

    def __init__(self, rows: MessageRows) -> None:
        self._rows = rows
        self._columns: dict[str, pa.Array] = {}
        self.broken: dict[int, str] = {}
        self._used_entries: Ints | None = None
        self._entry_codes: Ints | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def keep(self, wanted: Bools) -> None:
        """Keep only the rows that are `wanted`: for callers that exclude rows later."""
        self._rows.keep(wanted)
        self._columns = {name: column.filter(pa.array(wanted)) for name, column in self._columns.items()}
        self.broken = {}
        self._used_entries = self._entry_codes = None

    def column(self, name: str) -> pa.Array:
        """Return a column, of the type in MESSAGE_COLUMNS."""
        found = self._columns.get(name)
        if found is None:
            found = self._columns[name] = getattr(self, f"_{name}")()
            assert found.type == MESSAGE_COLUMNS[name], (name, found.type)
        return found

    def position(self, row: int) -> str:
        """Return ledger:entry or ledger:entry:index, for errors."""
        index = int(self._rows.batch_index()[row])
        place = f"{self._rows.piece.ledger_id}:{self._rows.entries.entry_ids[self._rows.entry_rows()[row]]}"
        return place if index == ALONE else f"{place}:{index}"

    def readable_values(self) -> pa.BinaryArray:
        """Return the column `value`, null for payloads that are still encrypted."""
        values = self.column("value")
        if not self._rows.contexts:
            return values
        encrypted = np.isin(self._rows.entry_rows(), list(self._rows.contexts))
        return pc.if_else(pa.array(encrypted), pa.scalar(None, pa.binary()), values)

    def value_places(self) -> tuple[Ints, Ints]:
        """Return where the bytes of each value begin and end in the buffer of the entries that were decoded together.

        Values that were decompressed, joined or re-encoded are after these entries; null values that have bytes are at -1."""
        starts, ends, present = self._rows.payloads()
        hidden = ~present & (ends != starts)
        return np.where(hidden, -1, starts), np.where(hidden, -1, ends)

    def errors(self) -> pa.StringArray | None:
        """Return what is wrong with each row, null if nothing is; None if no row has errors. Only for columns created so far."""
        if not self.broken and not self._rows.reasons:
            return None
        texts = [self._rows.reasons.get(entry) for entry in self._rows.entry_rows().tolist()]
        for row, reason in self.broken.items():
            texts[row] = reason
        return pa.array(texts, pa.string())

    def undecoded(self) -> tuple[Bools, dict[int, str]] | None:
        """Return the rows of entries that could not be read as a whole, and why, by entry id. None: there are none."""
        if not self._rows.reasons:
            return None
        mask = np.isin(self._rows.entry_rows(), list(self._rows.reasons))
        ids = self._rows.entries.entry_ids
        return mask, {int(ids[entry]): reason for entry, reason in self._rows.reasons.items()}

    @property
    def versions(self) -> list[bytes]:
        """The schema versions that occur, as entries have them; b"": none."""
        return self._version_codes()[1]

    @property
    def version_codes(self) -> npt.NDArray[np.int32]:
        """For each row, an index into `versions`."""
        return self._version_codes()[0]

    def _version_codes(self) -> tuple[npt.NDArray[np.int32], list[bytes]]:
        used, codes = self._by_entry()
        named = self._entry_bytes(entry_fields.SCHEMA_VERSION, used).fill_null(b"").dictionary_encode()
        by_entry = named.indices.to_numpy(zero_copy_only=False).astype(np.int32)
        return by_entry[codes], named.dictionary.to_pylist()

    # One method per column; `column` finds it by its name.

    def _key(self) -> pa.Array:
        return self._text("key", self._raw_key())

    def _key_bytes(self) -> pa.Array:
        raw = self._raw_key()
        encoded = (self._rows.numbers(KEY_IS_BASE64) != 0) & raw.is_valid().to_numpy(zero_copy_only=False)
        if not encoded.any():
            return raw
        rows = np.flatnonzero(encoded)
        values = raw.take(pa.array(rows)).dictionary_encode()
        decoded = [_from_base64(value) for value in values.dictionary.to_pylist()]
        for row in rows[[decoded[code] is None for code in values.indices.to_pylist()]].tolist():
            self.broken[row] = "its key is marked as base64 but is not"
        shown = pa.array(decoded, pa.binary()).take(values.indices)
        return pc.replace_with_mask(raw, pa.array(encoded), shown)

    def _value(self) -> pa.Array:
        return gather(self._rows.data, *self._rows.payloads())

    def _topic(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._rows.piece.topic, pa.string()), len(self))

    def _partition(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._rows.piece.partition, pa.int32()), len(self))

    def _message_id(self) -> pa.Array:
        index = pa.array(self._rows.batch_index()).cast(pa.string())
        piece = self._rows.piece
        return pc.binary_join_element_wise(
            str(piece.ledger_id), self.column("entry_id").cast(pa.string()), str(piece.partition), index, ":"
        )

    def _ledger_id(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._rows.piece.ledger_id, pa.int64()), len(self))

    def _entry_id(self) -> pa.Array:
        return pa.array(self._rows.entries.entry_ids[self._rows.entry_rows()])

    def _batch_index(self) -> pa.Array:
        index = self._rows.batch_index()
        alone = index == ALONE
        return pa.array(index.astype(np.int32), mask=alone if alone.any() else None)

    def _publish_time(self) -> pa.Array:
        rows = self._rows.entry_rows()
        return times(self._rows.entries.fields.number(entry_fields.PUBLISH_TIME, default=-1)[rows])

    def _event_time(self) -> pa.Array:
        event_ms = self._rows.numbers(EVENT_TIME)
        return times(np.where(event_ms == 0, -1, event_ms))

    def _producer_name(self) -> pa.Array:
        return self._entry_text("producer_name", entry_fields.PRODUCER_NAME)

    def _sequence_id(self) -> pa.Array:
        of_entry = self._rows.entries.fields.number(SEQUENCE_ID.in_entry)[self._rows.entry_rows()]
        found = np.where(self._rows.present(SEQUENCE_ID), self._rows.numbers(SEQUENCE_ID), of_entry)
        readable = self._rows.entries.fields.present(SEQUENCE_ID.in_entry)[self._rows.entry_rows()]
        return pa.array(found, mask=None if readable.all() else ~readable)

    def _properties(self) -> pa.Array:
        rows = self._rows
        alone = np.full(len(rows.entries), -1)
        alone[rows.alone.entries[rows.alone.known]] = np.flatnonzero(rows.alone.known) + len(rows.batch_entries)
        owners = alone[rows.entries.properties.owners]
        shown = owners >= 0
        of_entries, of_batches = rows.entries.properties, rows.batch.properties
        owners = np.concatenate((of_batches.owners, owners[shown]))
        keys, values = (
            self._property_text(*(np.concatenate((in_batch[i], in_entry[i][shown])) for i in (0, 1)), owners=owners)
            for in_batch, in_entry in ((of_batches.keys, of_entries.keys), (of_batches.values, of_entries.values))
        )
        counts = np.bincount(owners, minlength=len(rows.batch_entries) + len(rows.alone.entries))
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        maps = pa.MapArray.from_arrays(pa.array(offsets), keys, values).cast(PROPERTIES)
        if rows.pick is not None:
            maps = maps.take(pa.array(rows.pick))
        return self._with_contexts(maps) if rows.contexts else maps

    def _ordering_key(self) -> pa.Array:
        return gather(self._rows.data, *self._rows.spans(ORDERING_KEY), self._rows.present(ORDERING_KEY))

    def _schema_version(self) -> pa.Array:
        used, codes = self._by_entry()
        return self._entry_bytes(entry_fields.SCHEMA_VERSION, used).take(pa.array(codes))

    def _replicated_from(self) -> pa.Array:
        return self._entry_text("replicated_from", entry_fields.REPLICATED_FROM)

    # Helpers.

    def _raw_key(self) -> pa.BinaryArray:
        present = self._rows.present(KEY) & (self._rows.numbers(NULL_KEY) == 0)
        return gather(self._rows.data, *self._rows.spans(KEY), present)

    def _text(self, name: str, raw: pa.BinaryArray) -> pa.StringArray:
        text, broken = as_text(raw)
        for row in broken:
            self.broken[row] = f"its {name} is not UTF-8"
        return text

    def _entry_text(self, name: str, number: int) -> pa.StringArray:
        used, codes = self._by_entry()
        text, broken = as_text(self._entry_bytes(number, used))
        for code in broken:
            for row in np.flatnonzero(codes == code).tolist():
                self.broken[row] = f"its {name} is not UTF-8"
        return text if len(used) == len(codes) else text.take(pa.array(codes))

    def _entry_bytes(self, number: int, used: Ints) -> pa.BinaryArray:
        fields = self._rows.entries.fields
        start, end = fields.span(number)
        return gather(self._rows.data, start[used], end[used], fields.present(number)[used])

    def _by_entry(self) -> tuple[Ints, Ints]:
        """Return the entries that have rows, and for each row the index of its entry among them."""
        if self._used_entries is None or self._entry_codes is None:
            rows = self._rows.entry_rows()
            new = np.ones(len(rows), bool)
            new[1:] = rows[1:] != rows[:-1]
            self._used_entries, self._entry_codes = rows[new], np.cumsum(new) - 1
        return self._used_entries, self._entry_codes

    def _property_text(self, starts: Ints, ends: Ints, *, owners: Ints) -> pa.StringArray:
        text, broken = as_text(gather(self._rows.data, starts, ends))
        if not broken:
            return text
        places = np.full(len(self._rows.batch_entries) + len(self._rows.alone.entries), -1)
        places[np.arange(len(places)) if self._rows.pick is None else self._rows.pick] = np.arange(len(self))
        for row in places[owners[broken]].tolist():
            if row >= 0:
                self.broken[row] = "a property is not UTF-8"
        return text.fill_null("")  # a key of a map is never null

    def _with_contexts(self, maps: pa.MapArray) -> pa.MapArray:
        """Encrypted messages are few, and shown only on request: a loop creates the maps one by one."""
        shown = maps.to_pylist()
        for row, entry in enumerate(self._rows.entry_rows().tolist()):
            if entry in self._rows.contexts:
                shown[row] = [*shown[row], *self._rows.contexts[entry].items()]
        return pa.array(shown, PROPERTIES)


def times(ms: Ints) -> pa.TimestampArray:
    """Return milliseconds since 1970 as timestamps; null if they are negative or after the year 9999."""
    outside = (ms < 0) | (ms > _MAX_TIME_MS)
    if outside.any():
        return pa.array(np.where(outside, 0, ms) * 1000, mask=outside).cast(TIMESTAMP)
    return pa.array(ms * 1000).cast(TIMESTAMP)


def _from_base64(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
