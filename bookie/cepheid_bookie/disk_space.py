"""Free space of the journal and data disks: refuses adds before a disk is full, accepts them again when there is space.

    writable ──free below the minimum, or a write found the disk full──► full ──free at the minimum plus a margin──► writable

Free space is checked at intervals, with or without traffic, since others may fill the disk or make room on it, and sooner when
much was admitted since the last check.

Rule 1: the threshold to become writable is higher than the one to become full, so that a small gain, such as a journal file
that is deleted before the next one is allocated, does not make the bookie flap.
Rule 2: `on_look` is called after each check of free space, full or not, for code that can make room.
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
from cepheid_rpc import Status

log = logging.getLogger(__name__)

_PARTS_OF_RESERVE = 4  # one of these parts may be admitted between two checks


class DiskLevel:
    """Decides whether the free space of one disk is enough."""

    def __init__(self, use: str, minimum_bytes: int, margin_bytes: int, warn_bytes: int) -> None:
        self.use = use
        self.minimum_bytes = minimum_bytes
        self.resume_bytes = minimum_bytes + margin_bytes if minimum_bytes else 0
        self.warn_bytes = warn_bytes
        self.free_bytes = 0
        self.short = False
        """Whether free space fell below the minimum and has not been sufficiently above it since."""
        self.low = False
        """Whether free space fell below the warning threshold and has not been sufficiently above it since."""

    def take(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.short = free_bytes < (self.resume_bytes if self.short else self.minimum_bytes)
        low_bytes = self.warn_bytes + self.resume_bytes - self.minimum_bytes if self.low else self.warn_bytes
        self.low = self.short or free_bytes < low_bytes

    @property
    def reason(self) -> str:
        """Return why the disk is short of space."""
        name = f"storage.min_free_{self.use}_bytes"
        if self.free_bytes < self.minimum_bytes:
            return f"its {self.use} disk has {self.free_bytes:,} bytes free, fewer than {name} ({self.minimum_bytes:,})"
        if self.free_bytes < self.resume_bytes:
            both = f"{name} and storage.space_margin_bytes together"
            return f"its {self.use} disk has {self.free_bytes:,} bytes free, and must have {self.resume_bytes:,} again: {both}"
        return f"a write found its {self.use} disk full"

    @property
    def warning(self) -> str:
        """Return a warning that space is low; empty if it is not."""
        if not self.low:
            return ""
        name = f"storage.warn_free_{self.use}_bytes"
        return f"its {self.use} disk has {self.free_bytes:,} bytes free, fewer than {name} ({self.warn_bytes:,})"


class DiskSpace:
    """Free space of the disks.

    Admission checks `read_only`; `on_change()` is called when it changes, `on_look()` after each check.
    """

    def __init__(
        self,
        journal: Disk,
        data: Disk,
        worker: Worker,
        settings: StorageSettings,
        on_change: Callable[[], None],
        on_look: Callable[[], None],
    ) -> None:
        self._disks = (journal, data)
        self._shared = journal is data
        self._worker = worker
        self._settings = settings
        self._on_change = on_change
        self._on_look = on_look
        margin = settings.space_margin_bytes
        self.journal = DiskLevel("journal", settings.min_free_journal_bytes, margin, settings.warn_free_journal_bytes)
        self.data = DiskLevel("data", settings.min_free_data_bytes, margin, settings.warn_free_data_bytes)
        reserves = [reserve for level in (self.journal, self.data) if (reserve := level.minimum_bytes)]
        self._look_after_bytes = min(reserves, default=settings.write_cache_bytes) // _PARTS_OF_RESERVE
        self._checked_at = float("-inf")
        self._checked_at_bytes = 0  # admitted bytes at the last check
        self._checking = False
        self._flush_full = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._unfit = ""
        self.full = False
        self.read_only = False
        """Whether regular adds are refused, for lack of space or another reason."""

    @property
    def refusal(self) -> Status:
        """Return the answer to regular adds while they are refused."""
        return Status.NO_SPACE if self.full else Status.READ_ONLY

    @property
    def data_short(self) -> bool:
        """Return whether the data disk has no room: collecting deleted ledgers then helps."""
        return self.data.short or self._flush_full or (self._shared and self.journal.short)

    @property
    def lacking_data_bytes(self) -> int:
        """Return how many bytes must be freed on the data disk before adds are accepted; at least 1 while it has no room."""
        if not self.data_short:
            return 0
        resume_bytes = max(self.data.resume_bytes, self.journal.resume_bytes if self._shared else 0)
        return max(1, resume_bytes - self.data.free_bytes)

    @property
    def reason(self) -> str:
        """Why adds are refused; empty while they are not."""
        if not self.full:
            return self._unfit
        return " and ".join(filter(None, (self._full_reason, self._unfit)))

    @property
    def _full_reason(self) -> str:
        low = [level.reason for level in (self.journal, self.data) if level.short]
        if self._shared:
            del low[1:]  # both are on one disk: report it once
        return " and ".join(low) or "a write found its data disk full"

    @property
    def warning(self) -> str:
        """Return which disk is nearly full, for a message; empty if none is, or adds are refused already."""
        if self.full:
            return ""
        low = [warning for level in (self.journal, self.data) if (warning := level.warning)]
        if self._shared:
            del low[1:]
        return " and ".join(low)

    def has_room_to_spare(self, size_bytes: int, *, kept: bool) -> bool:
        """Return whether the journal disk has room for files that are not needed, and take `size_bytes` if they are there.

        They are given up as soon as the disk is low or any disk of the bookie is full (`kept`), and are there again only when it
        would not be low with them.
        """
        levels = (self.journal, self.data) if self._shared else (self.journal,)
        if self.full or any(level.low for level in levels):
            return False
        margin_bytes = self._settings.space_margin_bytes
        return kept or all(level.free_bytes >= level.warn_bytes + margin_bytes + size_bytes for level in levels)

    def look_now(self) -> None:
        """Check the disks now, blocking."""
        self._take(self._look())
        self._look_again_later()

    def touch(self, admitted_bytes: int = 0) -> None:
        """Check again if the last check is too old, or much was admitted since. Cheap. `admitted_bytes` counts from the start."""
        now = asyncio.get_running_loop().time()
        if (
            now - self._checked_at >= self._settings.disk_check_interval_s
            or admitted_bytes - self._checked_at_bytes >= self._look_after_bytes
        ):
            self._checked_at_bytes = max(admitted_bytes, self._checked_at_bytes)
            self._check()

    def on_journal_full(self) -> None:
        """Note that a journal write was refused for lack of space, whatever the measured figures say."""
        self.journal.short = True
        self._decide()
        self._check()

    def on_flush_full(self, full: bool) -> None:
        """Note that a flush found the data disk full, or succeeded again."""
        if full != self._flush_full:
            self._flush_full = full
            self._decide()
            self._check()

    def on_unfit(self, reason: str) -> None:
        """Note the reason why the bookie is unfit (a slow or hanging disk, a damaged index); empty: no longer."""
        if reason != self._unfit:
            self._unfit = reason
            self.read_only = self.full or bool(reason)
            self._on_change()

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
            self._look_again_later()

        self._worker.submit(self._look, on_done)

    def _look_again_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._settings.disk_check_interval_s, self._check)

    def _look(self) -> tuple[int, int]:
        journal, data = self._disks
        return journal.free_bytes(), data.free_bytes()

    def _take(self, free: tuple[int, int]) -> None:
        was_low = self.journal.low or self.data.low
        for level, free_bytes in zip((self.journal, self.data), free, strict=True):
            level.take(free_bytes)
        self._decide()
        if self.warning and not was_low:
            hint = "free space on this disk, enlarge it, or add bookies before this one becomes read-only"
            log.warning("bookie.disk_low", extra={**self._facts(), "error": self.warning, "hint": hint})
        if not self._closed:
            self._on_look()

    def _decide(self) -> None:
        full = self._flush_full or self.journal.short or self.data.short
        if full == self.full:
            return
        self.full = full
        self.read_only = full or bool(self._unfit)
        if full:
            hint = "deleted data is collected now; free space on its disks, or add bookies; reads, fences and recovery continue"
            log.warning("bookie.read_only", extra={**self._facts(), "error": self.reason, "hint": hint})
        else:
            log.info("bookie.writable", extra=self._facts())
        self._on_change()

    def _facts(self) -> dict[str, int]:
        return {"free_journal_bytes": self.journal.free_bytes, "free_data_bytes": self.data.free_bytes}


def check_disk_size(journal: RealDisk, data: RealDisk, settings: StorageSettings) -> None:
    """Refuse a new bookie whose disks could not take one entry even when empty. Raises DiskTooSmallError.

    A bookie that has data starts read-only: others need its data.
    """
    if is_stamped(data):
        return
    segment, log = ("journal_segment_bytes", settings.journal_segment_bytes), ("block_bytes", settings.block_bytes)
    for use, disk, minimum, (name, needed) in (
        ("journal", journal, settings.min_free_journal_bytes, segment),
        ("data", data, settings.min_free_data_bytes, log),
    ):
        size = disk.size_bytes()
        if 0 < size < minimum + needed:  # 0: the file system does not tell
            message = (
                f"the {use} disk of {disk.root} has {size:,} bytes, and a bookie needs {minimum + needed:,} there: "
                f"storage.min_free_{use}_bytes ({minimum:,}) and storage.{name} ({needed:,})"
            )
            raise DiskTooSmallError(message, path=str(disk.root), size_bytes=size, needed_bytes=minimum + needed)
