"""Free space of the journal and data disks: refuses adds before a disk is full, takes them again when there is space.

    writable ──free below the minimum, or a write found the disk full──► full ──free above the minimum again──► writable

Looked at while adds come in, and by a timer only while the disk is full.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cepheid_bookie.cookie import is_stamped
from cepheid_bookie.disk import Disk, RealDisk
from cepheid_bookie.errors import DiskTooSmallError
from cepheid_bookie.settings import StorageSettings
from cepheid_ports import Worker

log = logging.getLogger(__name__)


class DiskSpace:
    """`full` is what admission asks; `on_change(full)` tells whoever registers this bookie."""

    def __init__(
        self, journal: Disk, data: Disk, worker: Worker, settings: StorageSettings, on_change: Callable[[bool], None]
    ) -> None:
        self._journal = journal
        self._data = data
        self._worker = worker
        self._settings = settings
        self._on_change = on_change
        self._checked_at = float("-inf")
        self._checking = False
        self._flush_full = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self.full = False
        self.free_journal_bytes = 0
        self.free_data_bytes = 0

    @property
    def reason(self) -> str:
        """Why adds are refused; empty while they are not."""
        if not self.full:
            return ""
        settings = self._settings
        disks = (
            ("journal", self.free_journal_bytes, settings.min_free_journal_bytes),
            ("data", self.free_data_bytes, settings.min_free_data_bytes),
        )
        low = [
            f"its {use} disk has {free:,} bytes free, fewer than storage.min_free_{use}_bytes ({minimum:,})"
            for use, free, minimum in disks
            if free < minimum
        ]
        if self._journal is self._data:
            del low[1:]  # one disk: once is enough
        return " and ".join(low) or "a write found its disk full"

    def look_now(self) -> None:
        """At start, blocking."""
        self._take(self._look())

    def touch(self) -> None:
        """An add came in: looks again if the last look is too old. Cheap."""
        now = asyncio.get_running_loop().time()
        if now - self._checked_at >= self._settings.disk_check_interval_s:
            self._check()

    def on_journal_full(self) -> None:
        """A journal write was refused for want of space: whatever the figures said."""
        self._set(True)
        self._check()

    def on_flush_full(self, full: bool) -> None:
        """A flush found the data disk full, or went through again."""
        if full != self._flush_full:
            self._flush_full = full
            self._set(full or self._below())

    def stop(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if self._checking or self._closed:
            return
        self._checking = True
        self._checked_at = asyncio.get_running_loop().time()

        def on_done(free: tuple[int, int] | None, error: BaseException | None) -> None:
            self._checking = False
            if free is not None:
                self._take(free)
            else:
                log.warning("disk.space_unknown", extra={"error": repr(error)})
            if self.full and not self._closed:
                self._timer = asyncio.get_running_loop().call_later(self._settings.disk_check_interval_s, self._check)

        self._worker.submit(self._look, on_done)

    def _look(self) -> tuple[int, int]:
        return self._journal.free_bytes(), self._data.free_bytes()

    def _take(self, free: tuple[int, int]) -> None:
        self.free_journal_bytes, self.free_data_bytes = free
        self._set(self._flush_full or self._below())

    def _below(self) -> bool:
        return (
            self.free_journal_bytes < self._settings.min_free_journal_bytes
            or self.free_data_bytes < self._settings.min_free_data_bytes
        )

    def _set(self, full: bool) -> None:
        if full == self.full:
            return
        self.full = full
        facts = {"free_journal_bytes": self.free_journal_bytes, "free_data_bytes": self.free_data_bytes}
        if full:
            hint = "free space on the bookie's disks, or add bookies; reads, fences and recovery go on"
            log.warning("bookie.read_only", extra={**facts, "hint": hint})
        else:
            log.info("bookie.writable", extra=facts)
        self._on_change(full)


def check_disk_size(journal: RealDisk, data: RealDisk, settings: StorageSettings) -> None:
    """Refuse a new bookie on disks that could not take one entry, however empty they are. Raises DiskTooSmallError.

    A bookie that has data starts, read-only: others need what it holds.
    """
    if is_stamped(data):
        return
    segment, log = ("journal_segment_bytes", settings.journal_segment_bytes), ("block_bytes", settings.block_bytes)
    for use, disk, minimum, (name, needed) in (
        ("journal", journal, settings.min_free_journal_bytes, segment),
        ("data", data, settings.min_free_data_bytes, log),
    ):
        size = disk.size_bytes()
        if 0 < size < minimum + needed:  # 0: the file system does not say
            message = (
                f"the {use} disk of {disk.root} has {size:,} bytes, and a bookie needs {minimum + needed:,} there: "
                f"storage.min_free_{use}_bytes ({minimum:,}) and storage.{name} ({needed:,})"
            )
            raise DiskTooSmallError(message, path=str(disk.root), size_bytes=size, needed_bytes=minimum + needed)
