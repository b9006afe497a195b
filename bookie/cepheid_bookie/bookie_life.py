"""Detects whether directories are as their last process left them, or an older copy that was put back.

    on each disk: LIFE n                in metadata: n

    start, and now and then while it serves:   n + 1 on every disk, synced ──► n + 1 in metadata
    start on a disk whose n is below metadata's: an old copy, without what was acknowledged since it was made

Rule 1: disks first. A crash leaves metadata's number or a higher one on a disk, so a lower one is never due to a crash.
Rule 2: metadata accepts each number once. If two processes run on copies of one disk, the second does not serve, or stops.
A copy that is younger than the last count (`gc_interval_s` apart) cannot be told from the original.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from typing import Protocol

from cepheid_bookie.cookie import Cookie
from cepheid_bookie.disk import Disk
from cepheid_bookie.errors import CookieError
from cepheid_ports import Worker

log = logging.getLogger(__name__)

_FILE = "LIFE"


class LifeRecords(Protocol):
    """The number in metadata. Methods raise if they cannot tell."""

    async def load_life(self, bookie_id: str) -> int:
        """Return the number; 0: none was ever written."""

    async def save_life(self, bookie_id: str, life: int) -> None:
        """Store the number. Raises CookieError if metadata already has this number or a higher one."""


class BookieLife:
    """The life counter of a bookie. `disks`: by the names used in messages."""

    def __init__(self, cookie: Cookie, disks: Mapping[str, Disk], records: LifeRecords, worker: Worker) -> None:
        self._bookie_id = cookie.bookie_id
        self._disks = disks
        self._records = records
        self._worker = worker
        self.life = 0

    async def old_copies(self) -> str | None:
        """Return which disks are out of date, for a message; None: every disk is as it was left."""
        recorded = await self._records.load_life(self._bookie_id)
        found = await self._worker.run(lambda: {where: load_life(disk, where) for where, disk in self._disks.items()})
        self.life = max(recorded, *found.values())
        behind = [f"{where} was left at life {life}" for where, life in found.items() if life < recorded]
        return f"{', '.join(behind)}, metadata knows {recorded}" if behind else None

    async def count(self) -> None:
        """Count one more life. Raises CookieError if another process runs under this id.

        Errors of disk and metadata are raised, too; the next call then continues. A full disk is not counted on: the bookie must
        start, so that its data can be read.
        """
        life = self.life + 1
        try:
            await self._worker.run(lambda: self._save(life))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            hint = "an old copy of its disks that is made now would not be known as one; free space"
            log.warning("bookie.life_not_counted", extra={"bookie": self._bookie_id, "error": str(error), "hint": hint})
            return
        self.life = life
        await self._records.save_life(self._bookie_id, life)

    def _save(self, life: int) -> None:
        for disk in self._disks.values():
            save_life(disk, life)


def load_life(disk: Disk, where: str) -> int:
    if not disk.exists(_FILE):
        return 0
    file = disk.open(_FILE)
    try:
        text = file.pread(64, 0).decode("ascii", "replace").strip()
    finally:
        file.close()
    if not text.isdecimal():
        raise CookieError(f"the file {_FILE} in {where} cannot be read: {text!r}; restore it from a copy of this very directory")
    return int(text)


def save_life(disk: Disk, life: int) -> None:
    file = disk.open(_FILE + ".new", create=True)
    try:
        file.truncate(0)
        file.pwrite(f"{life}\n".encode(), 0)
        file.sync()
    finally:
        file.close()
    disk.rename(_FILE + ".new", _FILE)
    disk.sync_dir("")
