"""The log mark: journal records below it are also in synced entry log and index. Two generations, `mark.0` and `mark.1`.

File, 40 bytes, little-endian:
    0   4  magic "CPM1"
    4   4  CRC32C of bytes 8..39
    8   8  generation: the larger one is valid
    16  8  sequence   24  8  segment id   32  8  offset        (a `JournalPosition`)

Rule 1: a mark is written beside, synced, renamed, and its directory synced; it replaces the *older* generation.
Rule 2: marks never move back. Segments are kept down to the older generation, so that either one can be started from.
Rule 3: the first mark is saved before the first batch is written (journal_writer.py, rule 5). A journal without a mark is from an
older release, or has no batch yet.
"""

from __future__ import annotations

import struct

from crc32c import crc32c

from cepheid_bookie.disk import Disk
from cepheid_bookie.errors import MarkCorruptError
from cepheid_bookie.journal_writer import JournalPosition

_MAGIC = b"CPM1"
_BODY = struct.Struct("<QQQQ")
_BYTES = 8 + _BODY.size
FILES = ("mark.0", "mark.1")
START = JournalPosition(sequence=1, segment_id=0, offset=0)
"""Position of a journal that does not exist yet."""


class MarkFile:
    """Blocking; used by one thread at a time: the journal's thread saves the first mark, before there is anything to checkpoint."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._generation = 0
        self.current = START
        self.older = START

    @property
    def exists(self) -> bool:
        return self._generation > 0

    def load(self) -> None:
        """Read both generations. Raises MarkCorruptError if there are files and none is intact."""
        names = [name for name in FILES if self._disk.exists(name)]
        found = sorted(mark for name in names if (mark := self._read(name)) is not None)
        if names and not found:
            raise MarkCorruptError(f"no intact log mark in {', '.join(names)}", files=names)
        if found:
            self._generation, self.current = found[-1]
            self.older = found[0][1] if len(found) > 1 else START

    def save(self, mark: JournalPosition) -> None:
        assert mark >= self.current, f"the mark would move back from {self.current} to {mark}"
        generation = self._generation + 1
        body = _BODY.pack(generation, mark.sequence, mark.segment_id, mark.offset)
        file = self._disk.open("mark.new", create=True)
        try:
            file.truncate(0)
            file.pwrite(_MAGIC + struct.pack("<I", crc32c(body)) + body, 0)
            file.sync()
        finally:
            file.close()
        self._disk.rename("mark.new", f"mark.{generation % 2}")
        self._disk.sync_dir("")
        self._generation, self.older, self.current = generation, self.current, mark

    def _read(self, name: str) -> tuple[int, JournalPosition] | None:
        file = self._disk.open(name)
        try:
            data = file.pread(_BYTES, 0)
        finally:
            file.close()
        if len(data) < _BYTES or data[:4] != _MAGIC or crc32c(memoryview(data)[8:]) != int.from_bytes(data[4:8], "little"):
            return None
        generation, sequence, segment_id, offset = _BODY.unpack_from(data, 8)
        return generation, JournalPosition(sequence, segment_id, offset)
