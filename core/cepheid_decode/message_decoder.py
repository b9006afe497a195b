"""Decodes stored entries to messages in Arrow columns.

    groups ─► one buffer ─► metadata of all entries ─► without markers, chunks and what the filter excludes
           ─► payloads decompressed, `decode_bytes` at a time ─► messages of all batches ─► rows ─► the requested columns

Rule 1: an entry that cannot be read as a whole is one bad record, however many messages it claims to have. Bad is: what protobuf or
a codec rejects, an inconsistent batch, a chunked message without its chunks, an encrypted payload without its key, a message of a
transaction (entries do not tell whether it was committed), text that is not UTF-8 in a requested column.
Rule 2: FAIL raises at the first one, with its position; SKIP omits it; NULL returns a row without what could not be read. For an
encrypted one that is the payload as stored, with what is needed to decrypt it in the properties. All are counted.
Rule 3: an entry outside the filter's publish times is not decoded, so it is never bad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa

from cepheid_decode.chunked import Chunk, ChunkAssembler
from cepheid_decode.columns import MESSAGE_COLUMNS, TYPED_PREFIX, arrow_schema
from cepheid_decode.counters import ScanCounters
from cepheid_decode.decode_batches import parse_batches
from cepheid_decode.decode_columns import DecodedMessages
from cepheid_decode.decode_entries import EntryPlan, plan_entries
from cepheid_decode.decode_fields import Ints
from cepheid_decode.decode_payloads import NOT_COMPRESSED, unpack_into
from cepheid_decode.decode_rows import Alone, MessageRows
from cepheid_decode.encryption import encryption_context
from cepheid_decode.entry_metadata import EntryTable, parse_entries
from cepheid_decode.errors import BadRecordError
from cepheid_decode.history import Piece
from cepheid_decode.row_pruning import keep_not_compacted, keep_wanted
from cepheid_decode.scan_request import OnBadRecord, ReadMode, ScanSpec
from cepheid_rpc import EntryGroup
from cepheid_wire.payload_decryption import PayloadDecryptor

__all__ = ["BATCH_BYTES", "DecodedMessages", "LookBack", "MessageDecoder"]

BATCH_BYTES = 4 << 20
"""Size of payloads that are decompressed at once, or `decode_bytes` if that is larger; exceeded by at most one entry. With messages
of 1 KB, 16 MB take a sixth less work than 4; with 100 B the same."""
BATCH_MESSAGES = 1 << 15
"""Number of messages decoded at once; exceeded by at most one entry. Larger arrays do not fit in the processor's cache."""
MAX_ROWS = 1 << 17
"""Number of rows of a record batch, whatever a batch holds: a topic's name in each of ten million rows is too much for a column."""
_BUNCH_BYTES = 64 << 20  # of stored entries in one buffer
_CHECKED = ("key", "key_bytes", "producer_name", "properties", "replicated_from")  # columns in which values may be invalid

LookBack = Callable[[Piece, int], Iterator[EntryGroup]]


class MessageDecoder:
    """Decodes the groups of a piece, in order and without gaps, to rows. Only one piece at a time."""

    def __init__(
        self, spec: ScanSpec, counters: ScanCounters, look_back: LookBack, decryptor: PayloadDecryptor | None = None
    ) -> None:
        self._spec = spec
        self._counters = counters
        self._look_back = look_back
        self._decryptor = decryptor
        self._batch_bytes = max(BATCH_BYTES, spec.settings.decode_bytes)
        self._wanted = wanted_columns(spec)
        self._schema = arrow_schema(spec) if spec.mode is ReadMode.MESSAGES else None
        self._chunks = ChunkAssembler()
        self._looked_back = False

    def decode(self, piece: Piece, groups: Iterable[EntryGroup]) -> Iterator[pa.RecordBatch]:
        """Yield rows of exactly `spec.columns`, in batches of about `BATCH_BYTES` of values. Raises BadRecordError."""
        assert self._schema is not None, "typed rows are made from decode_messages"
        for messages in self.decode_messages(piece, groups):
            yield pa.record_batch([messages.column(name) for name in self._spec.columns], self._schema)
            del messages

    def finish(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """End a piece. Chunks of messages that are incomplete are discarded: the reader of the last chunk returns the message."""
        self._chunks = ChunkAssembler()
        self._looked_back = False
        return iter(())

    def finish_messages(self, piece: Piece) -> Iterator[DecodedMessages]:
        """Like `finish`, for callers of `decode_messages`."""
        self.finish(piece)
        return iter(())

    def decode_messages(self, piece: Piece, groups: Iterable[EntryGroup]) -> Iterator[DecodedMessages]:
        """Like `decode`, but yields messages, never without rows. Get their columns before requesting the next messages."""
        for bunch in bunches(groups, _BUNCH_BYTES):
            entries = parse_entries(bunch)
            bunch.clear()
            plan = plan_entries(entries, self._spec.row_filter, has_keys=self._decryptor is not None)
            self._counters.markers += plan.markers
            self._join_chunks(piece, entries, plan)
            for chosen in plan.slices(self._batch_bytes, BATCH_MESSAGES):
                yield from self._decode_chosen(piece, entries, plan, chosen)

    def _decode_chosen(self, piece: Piece, entries: EntryTable, plan: EntryPlan, chosen: Ints) -> Iterator[DecodedMessages]:
        """Yield the messages of the `chosen` entries. Those before a bad record are yielded before it is raised, so a reader that
        stops early may not get the error."""
        try:
            rows = self._decode_slice(piece, entries, plan, chosen)
        except BadRecordError:
            first_bad = next(place for place, row in enumerate(chosen.tolist()) if row in plan.bad)
            if first_bad:
                yield from self._decode_chosen(piece, entries, plan, chosen[:first_bad])
            raise
        for part in rows.parts(MAX_ROWS):
            messages = DecodedMessages(part)
            failure = self._check_columns(piece, messages)
            if len(messages):
                self._counters.messages += len(messages)
                yield messages
            del messages  # free its columns before the next ones are created
            if failure is not None:
                raise failure

    def _decode_slice(self, piece: Piece, entries: EntryTable, plan: EntryPlan, chosen: Ints) -> MessageRows:
        starts, ends = self._unpack(entries, plan, chosen)
        good = np.ones(len(chosen), bool)
        if plan.bad:
            good[[i for i, row in enumerate(chosen.tolist()) if row in plan.bad]] = False
        is_batch = plan.counts[chosen] > 0
        in_batches = np.flatnonzero(good & is_batch)
        batches = parse_batches(entries.data, starts[in_batches], ends[in_batches], plan.counts[chosen[in_batches]])
        entries.data = batches.data
        for batch, reason in batches.refused.items():
            plan.bad[int(chosen[in_batches[batch]])] = reason
            good[in_batches[batch]] = False
        contexts = self._judge(piece, entries, plan, chosen[~good])
        alone = good & ~is_batch
        if self._spec.on_bad_record is OnBadRecord.NULL:
            alone |= ~good
        if len(contexts):  # returned as stored, so `starts` and `ends` are right: they were not decompressed
            good[np.isin(chosen, list(contexts))] = True
        rows = MessageRows(
            piece=piece,
            data=entries.data,
            entries=entries,
            batch_entries=chosen[in_batches][batches.batch],
            batch=batches,
            alone=Alone(chosen[alone], starts[alone], ends[alone], good[alone], ~is_batch[alone]),
            contexts=contexts,
            reasons={row: plan.bad[row] for row in chosen[alone].tolist() if row in plan.bad} if plan.bad else {},
        )
        self._counters.compacted_out += keep_not_compacted(rows)
        keep_wanted(rows, self._spec.row_filter)
        return rows

    def _unpack(self, entries: EntryTable, plan: EntryPlan, chosen: Ints) -> tuple[Ints, Ints]:
        """Return the offsets of the decompressed payloads of the `chosen` entries: payloads that were compressed, encrypted or
        chunked are copied after the stored entries."""
        starts, ends = entries.payload_starts[chosen], entries.payload_ends[chosen]
        opened = {} if self._decryptor is None else plan.decrypt(entries, chosen, self._decryptor)
        moved = [
            i
            for i in np.flatnonzero(plan.moves[chosen]).tolist()
            if int(chosen[i]) not in plan.bad or int(chosen[i]) in plan.sealed
        ]
        if not moved:
            return starts, ends
        sizes = plan.sizes[chosen]
        entries.data, at = plan.room_for(int(sizes[moved].sum()), entries.data, self._batch_bytes)
        for i in moved:
            row = int(chosen[i])
            target = entries.data[at : at + int(sizes[i])]
            source = opened.get(row, plan.joined.get(row))
            packed = entries.data[starts[i] : ends[i]] if source is None else np.frombuffer(source, np.uint8)
            if plan.compressions[row] == NOT_COMPRESSED:
                target[:] = packed
            elif (reason := unpack_into(target, int(plan.compressions[row]), packed)) is not None:
                plan.bad[row] = reason
            starts[i], ends[i] = at, at + len(target)
            at += len(target)
        return starts, ends

    def _judge(self, piece: Piece, entries: EntryTable, plan: EntryPlan, bad: Ints) -> dict[int, dict[str, str]]:
        """Count or raise bad entries; return the contexts of the encrypted ones that are shown."""
        contexts: dict[int, dict[str, str]] = {}
        for row in bad.tolist():
            if self._spec.on_bad_record is OnBadRecord.FAIL:
                raise _bad_record(piece, f"{piece.ledger_id}:{entries.entry_ids[row]}", plan.bad[row])
            self._counters.bad_records += 1
            if row in plan.sealed:
                contexts[row] = encryption_context(entries, row)
        return contexts if self._spec.on_bad_record is OnBadRecord.NULL else {}

    def _check_columns(self, piece: Piece, messages: DecodedMessages) -> BadRecordError | None:
        """Create the columns in which values may be invalid, so that such messages can be left out of all columns.

        Returns the error to raise after the messages that are kept."""
        for name in self._wanted:
            if name in _CHECKED:
                messages.column(name)
        if not messages.broken:
            return None
        if self._spec.on_bad_record is OnBadRecord.FAIL:
            row, reason = min(messages.broken.items())
            failure = _bad_record(piece, messages.position(row), reason)
            messages.keep(np.arange(len(messages)) < row)
            return failure
        self._counters.bad_records += len(messages.broken)
        if self._spec.on_bad_record is OnBadRecord.SKIP:
            wanted = np.ones(len(messages), bool)
            wanted[list(messages.broken)] = False
            messages.keep(wanted)
        return None

    def _join_chunks(self, piece: Piece, entries: EntryTable, plan: EntryPlan) -> None:
        """Replace the payload of a message's last chunk with the whole payload of the message."""
        for row in plan.chunks:
            chunk = plan.chunk(entries, row, self._decryptor)
            if isinstance(chunk, str):
                plan.refuse(row, chunk)
                continue
            if self._chunks.misses_start_of(chunk) and not self._looked_back:
                self._chunks.take_over(self._earlier_chunks(piece))
                self._looked_back = True
            whole = self._chunks.add(chunk)
            if isinstance(whole, bytes):
                plan.join(row, whole)
                if chunk.sealed:
                    plan.keep_sealed(row, chunk.sealed, len(whole))
            elif isinstance(whole, str):
                plan.refuse(row, whole)
            else:
                plan.alive[row] = False

    def _earlier_chunks(self, piece: Piece) -> ChunkAssembler:
        earlier = ChunkAssembler()
        for group in self._look_back(piece, self._spec.settings.chunk_lookback):
            entries = parse_entries([group])
            plan = plan_entries(entries, self._spec.row_filter)
            for row in plan.chunks:
                chunk = plan.chunk(entries, row, self._decryptor)
                if isinstance(chunk, Chunk):
                    earlier.add(chunk)
        return earlier


def _bad_record(piece: Piece, position: str, reason: str) -> BadRecordError:
    message = f"message {position} of {piece.topic} cannot be read: {reason}"
    return BadRecordError(message, topic=piece.topic, position=position)


def wanted_columns(spec: ScanSpec) -> list[str]:
    """Return the message columns that are needed for the rows of `spec`."""
    names = [name.removeprefix(TYPED_PREFIX) if spec.mode is ReadMode.TYPED else name for name in spec.columns]
    return [name for name in names if name in MESSAGE_COLUMNS]


def bunches(groups: Iterable[EntryGroup], limit_bytes: int) -> Iterator[list[EntryGroup]]:
    """Yield lists of groups that fit in one buffer: offsets in Arrow columns have 32 bits. The caller clears each list."""
    bunch: list[EntryGroup] = []
    size_bytes = 0
    for group in groups:
        if bunch and size_bytes + group.size_bytes > limit_bytes:
            yield bunch
            bunch, size_bytes = [], 0
        bunch.append(group)
        size_bytes += group.size_bytes
        del group
    if bunch:
        yield bunch
