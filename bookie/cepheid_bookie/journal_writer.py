"""The blocking half of the journal: appends batches to preallocated segments. Runs in the journal's worker thread only.

    write_batch ──► [roll: create, preallocate, header, sync, sync_dir] ──► pwritev at an aligned offset ──► sync ──► position

Rule 1: one batch is in flight. A batch is written only after the one before was synced, so a damaged batch that has a later one
behind it was synced once (`journal_replay.py` relies on it).
Rule 2: a write that failed for want of space leaves the position where it was: the next batch goes over the remains, with the same
sequence, so nothing is ever behind half a batch. A failed *sync* is final.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cepheid_bookie.disk import Disk, DiskFile
from cepheid_bookie.errors import BookieError
from cepheid_bookie.journal_format import (
    ALIGNMENT,
    BATCH_HEADER_BYTES,
    BatchHeader,
    SegmentHeader,
    align,
    encode_batch_header,
    encode_segment_header,
    segment_path,
)
from cepheid_rpc import Buffer

_ZEROS = bytes(ALIGNMENT)


@dataclass(frozen=True, slots=True, order=True)
class JournalPosition:
    """A place between two batches: everything below it, and nothing at or above, is meant. Ordered by `sequence`."""

    sequence: int  # of the batch that is or will be here
    segment_id: int
    offset: int


class JournalSpaceError(BookieError):
    """The journal's disk is full. Nothing of the batch was kept, and the journal can go on."""

    hint = "free space on the journal's disk; nothing acknowledged is lost, and adds succeed again when there is room"


class JournalWriter:
    """Opens a new segment for its first batch; `start` is where replay ended."""

    def __init__(self, disk: Disk, start: JournalPosition, *, segment_bytes: int, new_nonce: Callable[[], bytes]) -> None:
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._new_nonce = new_nonce
        self._segment_id = start.segment_id
        self._sequence = start.sequence
        self._offset = 0
        self._file: DiskFile | None = None
        self._nonce = b""

    def write_batch(self, parts: Sequence[Buffer], size_bytes: int, records: int) -> JournalPosition:
        """Makes the records durable and returns the position behind them.

        Raises JournalSpaceError (nothing happened) or OSError (the journal must not be used again).
        """
        total = align(BATCH_HEADER_BYTES + size_bytes)
        if self._file is None or self._offset + total > max(self._segment_bytes, ALIGNMENT + total):
            self._roll(total)
        assert self._file is not None
        header = encode_batch_header(self._segment_id, self._nonce, BatchHeader(self._sequence, size_bytes, records))
        padding = _ZEROS[: total - BATCH_HEADER_BYTES - size_bytes]
        try:
            self._file.pwritev([header, *parts, padding], self._offset)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise JournalSpaceError(f"journal segment {self._segment_id:016x} cannot grow: {error}") from error
            raise
        self._file.sync()
        self._offset += total
        self._sequence += 1
        return JournalPosition(self._sequence, self._segment_id, self._offset)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _roll(self, first_batch_bytes: int) -> None:
        """A segment exists for replay once its name is durable, and by then its header is: no batch is answered before."""
        segment_id = self._segment_id + 1
        path, nonce = segment_path(segment_id), self._new_nonce()
        header = encode_segment_header(SegmentHeader(segment_id, self._sequence, nonce))
        file: DiskFile | None = None
        try:
            file = self._disk.open(path, create=True)
            file.preallocate(max(self._segment_bytes, ALIGNMENT + first_batch_bytes))
            file.pwrite(header, 0)
        except OSError as error:
            if file is not None:
                file.close()
                self._disk.unlink(path)
            if error.errno == errno.ENOSPC:
                raise JournalSpaceError(f"no space for journal segment {segment_id:016x}: {error}") from error
            raise
        file.sync()
        self._disk.sync_dir("journal")
        self.close()
        self._file, self._segment_id, self._nonce, self._offset = file, segment_id, nonce, ALIGNMENT
