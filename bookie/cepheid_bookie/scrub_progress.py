"""Small files of the data disk that are kept over restarts: how far the scrubber is (`SCRUB`), and which ledgers garbage collection
saw as deleted (`DELETED`).

Each: magic (4), CRC32C of the rest (4, little-endian), JSON. With the magic "CPS1" that is the fields of `ScrubProgress`; with
"CPD1", a list of ledger ids.

A file is written beside, synced, renamed, and its directory synced. What is lost with it costs one more reading of the blocks, or a
confirmation by an operator, so a damaged file counts as none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from crc32c import crc32c

from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.disk import Disk

log = logging.getLogger(__name__)

_SCRUB = ("SCRUB", b"CPS1")
_DELETED = ("DELETED", b"CPD1")


@dataclass(slots=True)
class ScrubProgress:
    """One pass over all blocks, in the order of the index, and the damaged blocks that are known."""

    after: BlockRef | None = None  # the last block that was checked; None: the pass is at its beginning
    began_at_ms: int = 0  # wall clock: when this pass began; 0: no pass began yet
    ended_at_ms: int = 0  # wall clock: when the last complete pass ended; 0: there was none
    pass_bytes: int = 0  # read in this pass
    damaged: list[BlockRef] = field(default_factory=list)


def load_progress(disk: Disk) -> ScrubProgress:
    """Blocking. Return a fresh progress if there is none, or it is damaged."""
    try:
        fields = _load(disk, _SCRUB)
        if fields is None:
            return ScrubProgress()
        after, damaged = fields.pop("after"), fields.pop("damaged")
        return ScrubProgress(
            after=None if after is None else BlockRef(*after), damaged=[BlockRef(*block) for block in damaged], **fields
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("scrub.progress_lost", extra={"error": str(error), "hint": "SCRUB is damaged; scrubbing begins again"})
        return ScrubProgress()


def save_progress(disk: Disk, progress: ScrubProgress) -> None:
    """Blocking. Raises OSError; then the file is as it was before."""
    _save(disk, _SCRUB, asdict(progress))


def load_ledger_ids(disk: Disk) -> frozenset[int]:
    """Blocking. Return the ledgers that were seen as deleted; none if the file is damaged."""
    try:
        return frozenset(map(int, _load(disk, _DELETED) or ()))
    except (OSError, ValueError, TypeError) as error:
        hint = "DELETED is damaged; a mass of ledgers deleted before the restart may have to be confirmed"
        log.warning("gc.deleted_lost", extra={"error": str(error), "hint": hint})
        return frozenset()


def save_ledger_ids(disk: Disk, ledger_ids: Collection[int]) -> None:
    """Blocking. Raises OSError; then the file is as it was before."""
    _save(disk, _DELETED, sorted(ledger_ids))


def _load(disk: Disk, kind: tuple[str, bytes]) -> Any:
    """Return the content of a file, or None if there is none. Raises OSError, and ValueError for a damaged one."""
    name, magic = kind
    if not disk.exists(name):
        return None
    file = disk.open(name)
    try:
        data = file.pread(file.size(), 0)
    finally:
        file.close()
    body = memoryview(data)[8:]
    if data[:4] != magic or crc32c(body) != int.from_bytes(data[4:8], "little"):
        raise ValueError("it does not match its checksum")
    return json.loads(bytes(body))


def _save(disk: Disk, kind: tuple[str, bytes], content: object) -> None:
    name, magic = kind
    body = json.dumps(content, separators=(",", ":")).encode()
    file = disk.open(name + ".new", create=True)
    try:
        file.truncate(0)
        file.pwrite(magic + crc32c(body).to_bytes(4, "little") + body, 0)
        file.sync()
    finally:
        file.close()
    disk.rename(name + ".new", name)
    disk.sync_dir("")
