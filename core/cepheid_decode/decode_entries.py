"""Plans from its metadata alone what to do with each entry: skip, join, decompress, split into messages, or reject it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cepheid_decode import entry_metadata as entry_fields
from cepheid_decode.chunked import Chunk
from cepheid_decode.decode_fields import PADDING_BYTES, Bools, Bytes, Ints
from cepheid_decode.decode_payloads import MAX_CHUNKED_BYTES, MAX_COMPRESSION, MAX_PAYLOAD_BYTES, NOT_COMPRESSED, extended, refusal
from cepheid_decode.entry_metadata import EntryTable
from cepheid_decode.row_pruning import entries_wanted
from cepheid_decode.scan_request import RowFilter
from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.payload_decryption import PayloadDecryptor, UndecryptableError

MAX_BATCH_MESSAGES = 1 << 21  # two thousand times what clients put into a batch by default: a reader keeps numbers for each
_ENCRYPTED = "its payload is encrypted, and no decryption keys are given"
_TRANSACTION = "it belongs to a transaction, and whether that was committed is not written in the entries"


@dataclass(slots=True)
class EntryPlan:
    """By row of the entry table. `counts`: messages of a batch, 0: not a batch. `sizes`: of the decompressed payload. `moves`:
    payloads that are copied. `bad`: why entries are rejected (they are `alive`, too)."""

    alive: Bools
    counts: Ints
    sizes: Ints
    compressions: Ints
    moves: Bools
    chunks: list[int]
    encrypted: set[int]  # those to decrypt
    sealed: set[int]  # of the bad ones, those that stay encrypted: their payload is whole, so it can be shown as stored
    data_bytes: int  # of the buffer with the stored entries, without what is decompressed after them
    markers: int
    bad: dict[int, str] = field(default_factory=dict)
    joined: dict[int, bytes] = field(default_factory=dict)
    room: Bytes | None = None  # the stored entries, followed by the decompressed payloads of one slice at a time

    def slices(self, limit_bytes: int, limit_messages: int) -> Iterator[Ints]:
        """Yield the entries that are alive, in order, up to the limits of bytes and messages at a time, and at least one."""
        rows = np.flatnonzero(self.alive)
        bytes_to, messages_to = np.cumsum(self.sizes[rows]), np.cumsum(np.maximum(self.counts[rows], 1))
        start = bytes_done = messages_done = 0
        while start < len(rows):
            by_bytes = int(np.searchsorted(bytes_to, bytes_done + limit_bytes, side="right"))
            by_messages = int(np.searchsorted(messages_to, messages_done + limit_messages, side="right"))
            end = max(min(by_bytes, by_messages), start + 1)
            yield rows[start:end]
            start, bytes_done, messages_done = end, int(bytes_to[end - 1]), int(messages_to[end - 1])

    def room_for(self, size_bytes: int, data: Bytes, usual_bytes: int) -> tuple[Bytes, int]:
        """Return a buffer with the stored entries of `data` and `size_bytes` after them, and where these begin. It is the same
        buffer each time if it is large enough: the stored entries are copied once, and what was decompressed before is
        overwritten."""
        if self.room is None or len(self.room) - self.data_bytes < size_bytes:
            room_bytes = min(int(self.sizes[self.moves & self.alive].sum()), usual_bytes)
            self.room = extended(data[: self.data_bytes], max(room_bytes, size_bytes))
        return self.room, self.data_bytes - PADDING_BYTES

    def chunk(self, entries: EntryTable, row: int, decryptor: PayloadDecryptor | None) -> Chunk | str:
        """Return the chunk in this entry, decrypted if possible; or why it is not a chunk."""
        fields = entries.fields
        uuid_start, uuid_end = (int(bound[row]) for bound in fields.span(entry_fields.UUID))
        number = {name: int(fields.number(name)[row]) for name in (entry_fields.CHUNK_ID, entry_fields.NUM_CHUNKS)}
        total_bytes = int(fields.number(entry_fields.CHUNKED_BYTES)[row])
        chunk_id, num_chunks = number[entry_fields.CHUNK_ID], number[entry_fields.NUM_CHUNKS]
        if not fields.present(entry_fields.UUID)[row] or not 0 <= chunk_id < num_chunks:
            return f"it is chunk {chunk_id} of {num_chunks} of a message" + ("" if uuid_end > uuid_start else " without uuid")
        if not 0 <= total_bytes <= MAX_CHUNKED_BYTES:
            return f"its chunks have {total_bytes} bytes, the limit is {MAX_CHUNKED_BYTES}"
        uuid = entries.data[uuid_start:uuid_end].tobytes()
        payload, sealed = entries.payload_bytes(row), ""
        if fields.present(entry_fields.ENCRYPTION_KEYS)[row]:
            try:
                payload = decrypted(entries, row, decryptor)
            except UndecryptableError as error:
                sealed = str(error.args[0])
        return Chunk(uuid, chunk_id, num_chunks, total_bytes, payload, sealed)

    def refuse(self, row: int, reason: str) -> None:
        """Reject a chunk: the part of its message that is present is not a payload."""
        self.bad[row] = reason
        self.encrypted.discard(row)
        self.sealed.discard(row)
        self.sizes[row] = 0

    def keep_sealed(self, row: int, reason: str, size_bytes: int) -> None:
        """Keep a payload that cannot be decrypted: it is shown as stored, or joined."""
        self.bad[row] = reason
        self.sealed.add(row)
        self.compressions[row] = NOT_COMPRESSED
        self.sizes[row] = size_bytes
        self.moves[row] = row in self.joined

    def decrypt(self, entries: EntryTable, rows: Ints, decryptor: PayloadDecryptor) -> dict[int, bytes]:
        """Return the decrypted payloads of the encrypted `rows`, by row. Chunks were decrypted one by one."""
        opened: dict[int, bytes] = {}
        for row in rows.tolist():
            if row not in self.encrypted or row in self.bad or row in self.joined:
                continue
            try:
                opened[row] = decrypted(entries, row, decryptor)
            except UndecryptableError as error:
                self.keep_sealed(row, str(error.args[0]), int(entries.payload_ends[row] - entries.payload_starts[row]))
                continue
            self.moves[row] = True
            if self.compressions[row] == NOT_COMPRESSED:
                self.sizes[row] = len(opened[row])
        return opened

    def join(self, row: int, whole: bytes) -> None:
        """Replace the last chunk's payload with the payload of the whole message."""
        self.joined[row] = whole
        self.moves[row] = True
        if self.compressions[row] == NOT_COMPRESSED:
            self.sizes[row] = len(whole)


def decrypted(entries: EntryTable, row: int, decryptor: PayloadDecryptor | None) -> bytes:
    """Return the payload of an encrypted entry, still compressed. Raises UndecryptableError."""
    if decryptor is None:
        raise UndecryptableError(_ENCRYPTED)
    try:
        return decryptor.decrypt(pb.MessageMetadata.FromString(entries.metadata_bytes(row)), entries.payload_bytes(row))
    except UndecryptableError as error:
        raise UndecryptableError(f"its payload cannot be decrypted: {error.args[0]}") from error


def plan_entries(entries: EntryTable, row_filter: RowFilter, *, has_keys: bool = False) -> EntryPlan:
    """Plan all entries. `has_keys`: encrypted payloads are not rejected, because they may be decrypted."""
    fields = entries.fields
    readable = entries.readable
    bad = dict(entries.refused)
    marker = fields.present(entry_fields.MARKER_TYPE) & readable
    is_chunk = (fields.number(entry_fields.NUM_CHUNKS) > 1) & readable & ~marker
    encrypted = fields.present(entry_fields.ENCRYPTION_KEYS) & readable & ~marker
    compressions = np.where(encrypted & (not has_keys), NOT_COMPRESSED, fields.number(entry_fields.COMPRESSION))
    stored = entries.payload_ends - entries.payload_starts
    compressed = compressions != NOT_COMPRESSED
    sizes = np.where(compressed, fields.number(entry_fields.UNCOMPRESSED_SIZE), stored)
    is_batch = fields.present(entry_fields.NUM_MESSAGES) & readable
    counts = np.where(is_batch, fields.number(entry_fields.NUM_MESSAGES), 0)
    alive = entries_wanted(entries, row_filter) & ~marker
    plan = EntryPlan(
        alive=alive,
        counts=counts,
        sizes=sizes,
        compressions=compressions,
        moves=compressed & readable,
        chunks=np.flatnonzero(is_chunk).tolist(),
        encrypted=set(np.flatnonzero(encrypted & alive).tolist()),
        sealed=set(),
        data_bytes=len(entries.data),
        markers=int(np.count_nonzero(marker)),
        bad=bad,
    )
    _refuse_some(entries, plan, alive & readable, is_chunk)
    if has_keys:
        plan.encrypted -= plan.bad.keys()
    else:
        plan.bad |= dict.fromkeys(plan.encrypted, _ENCRYPTED)
        plan.sealed, plan.encrypted = plan.encrypted, set()
    for row in plan.bad.keys() - plan.sealed:
        plan.sizes[row] = 0
    return plan


def _refuse_some(entries: EntryTable, plan: EntryPlan, judged: Bools, is_chunk: Bools) -> None:
    """Reject entries because of their metadata. The Python loops run only over entries that may be invalid."""
    fields = entries.fields
    unfit = fields.present(entry_fields.NUM_MESSAGES) & ((plan.counts < 1) | (plan.counts > MAX_BATCH_MESSAGES))
    for row in np.flatnonzero(judged & unfit).tolist():
        plan.bad[row] = f"a batch of {plan.counts[row]} messages: only 1 to {MAX_BATCH_MESSAGES} are supported"
        plan.counts[row] = 1  # so that it counts as a batch
    limits = np.where(is_chunk, MAX_CHUNKED_BYTES, MAX_PAYLOAD_BYTES)
    unpacked = (plan.compressions > 0) & (plan.compressions <= MAX_COMPRESSION) & (plan.sizes <= limits)
    for row in np.flatnonzero(judged & plan.moves & ~unpacked).tolist():
        plan.bad[row] = refusal(int(plan.compressions[row]), int(plan.sizes[row]), int(limits[row]))
    if entry_fields.TRANSACTION in fields.numbers:
        for row in np.flatnonzero(judged & fields.present(entry_fields.TRANSACTION)).tolist():
            plan.bad[row] = _TRANSACTION
