"""Progress of the scrubber, kept over restarts in the file `SCRUB` of the data disk.

File: magic "CPS1" (4), CRC32C of the rest (4, little-endian), JSON of the fields of `ScrubProgress`.

A new file is written, synced and renamed, and the directory synced. Losing it costs one more pass over the blocks, so a
damaged file is treated as missing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field

from crc32c import crc32c

from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.disk import Disk

log = logging.getLogger(__name__)

_FILE = "SCRUB"
_MAGIC = b"CPS1"
_MOST_BYTES = 1 << 20


@dataclass(slots=True)
class ScrubProgress:
    """Progress of one pass over all blocks in the order of the index, and the known damaged blocks."""

    after: BlockRef | None = None  # the last block that was checked; None: the pass is at its beginning
    began_at_ms: int = 0  # wall clock: when this pass began; 0: no pass began yet
    ended_at_ms: int = 0  # wall clock: when the last complete pass ended; 0: there was none
    pass_bytes: int = 0  # read in this pass
    damaged: list[BlockRef] = field(default_factory=list)


def load_progress(disk: Disk) -> ScrubProgress:
    """Load the progress, blocking; return a new one if there is none, or it is damaged."""
    try:
        if not disk.exists(_FILE):
            return ScrubProgress()
        file = disk.open(_FILE)
        try:
            data = file.pread(_MOST_BYTES, 0)
        finally:
            file.close()
        return _decode(data)
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("scrub.progress_lost", extra={"error": str(error), "hint": f"{_FILE} is damaged; scrubbing begins again"})
        return ScrubProgress()


def save_progress(disk: Disk, progress: ScrubProgress) -> None:
    """Save the progress, blocking. If it raises OSError, the file is unchanged."""
    body = json.dumps(asdict(progress), separators=(",", ":")).encode()
    file = disk.open(_FILE + ".new", create=True)
    try:
        file.truncate(0)
        file.pwrite(_MAGIC + crc32c(body).to_bytes(4, "little") + body, 0)
        file.sync()
    finally:
        file.close()
    disk.rename(_FILE + ".new", _FILE)
    disk.sync_dir("")


def _decode(data: bytes) -> ScrubProgress:
    body = memoryview(data)[8:]
    if data[:4] != _MAGIC or crc32c(body) != int.from_bytes(data[4:8], "little"):
        raise ValueError("it does not match its checksum")
    fields = json.loads(bytes(body))
    after, damaged = fields.pop("after"), fields.pop("damaged")
    return ScrubProgress(
        after=None if after is None else BlockRef(*after), damaged=[BlockRef(*block) for block in damaged], **fields
    )
