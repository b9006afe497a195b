"""Reads every block once per period, so that bit rot is found while other bookies still have the entries.

    pass: blocks in the order of the index, a slice at a time ──► checksum and header ──bad──► `damaged_blocks.py`
          after each piece of up to 256 KiB: wait until the rate allows the next one and the disk is idle

Rule 1: the rate lets the pass end within nine tenths of the period, at least 256 KiB a minute, and at most
`storage.scrub_bytes_s`. Before each piece the scrubber waits for reads, journal and flushes to be idle: half a second at most, and
at most half of the time that the rate allows for the piece. A bookie that is always busy is thus scrubbed in the same period, as
long as its disk can read the pieces in the other half: 4.5 TB a week at the default rate.
Rule 2: no cursor stays open: each slice begins after the last block of the slice before. Blocks that are written before that place
during a pass are read in the next pass.
Rule 3: progress is saved once a minute, when the set of damaged blocks changes, and at a stop. A restart continues from there.
Rule 4: a failure of the scrubber is logged, and the scrubber continues after a pause. Only a failed sync stops the bookie
(`fail_stop.py`).
Rule 5: a pass does not continue past a damaged block that cannot be remembered: it waits until others are repaired.
Rule 6: blocks in a damaged part of the index are skipped. The pass continues with the ledgers after it.
With `storage.scrub_period_s` 0 there are no passes; damage that readers find is repaired all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cepheid_bookie.block_check import BlockCheck
from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.damaged_blocks import DamagedBlocks, DamageReports, Outlook
from cepheid_bookie.disk import Disk
from cepheid_bookie.entry_log import EntryLogReader, list_logs, log_path
from cepheid_bookie.errors import IndexCorruptError
from cepheid_bookie.scrub_progress import ScrubProgress, load_progress, save_progress
from cepheid_bookie.settings import StorageSettings
from cepheid_ports import SteadyClock, TaskOwner, Worker

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10
"""Size of a piece; more at once would delay a sync of the journal on the same disk for longer."""
_SLICE_BLOCKS = 256
_LONGEST_PAUSE_S = 60.0  # so that a small bookie notices when it has grown
_SHARE_OF_PERIOD = 0.9
_PATIENCE_S = 0.5
_BUSY_PAUSE_S = 0.05
_SAVE_INTERVAL_S = 60.0
_SHORTEST_ROUND_S = 1.0
_RETRY_S = 30.0


_LEDGER_IDS = 1 << 63


class _NoRoomError(Exception):
    """There is no room to remember another damaged block (rule 5)."""


@dataclass(frozen=True, slots=True)
class ScrubFigures:
    """What the scrubber did since the start, and what is as of now."""

    blocks: int
    bytes: int
    found: int  # blocks that proved damaged
    mended: int  # those whose entries are intact in other blocks again
    damaged: dict[Outlook, int]
    progress: float  # of the current pass, 0..1
    last_pass_age_s: float  # since the last complete pass ended; before that, since the first one began


class Scrubber:
    """Runs the passes over all blocks, and the task that repairs damaged ones. `is_busy`: whether other work uses the disk now."""

    def __init__(
        self,
        disk: Disk,
        index: BlockIndex,
        logs: EntryLogReader,
        worker: Worker,
        damaged: DamagedBlocks,
        settings: StorageSettings,
        clock: SteadyClock,
        is_busy: Callable[[], bool],
        *,
        name: str,
    ) -> None:
        self._disk = disk
        self._index = index
        self._logs = logs
        self._worker = worker
        self._settings = settings
        self._clock = clock
        self._is_busy = is_busy
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner(f"{name}-scrub")
        self._name = name
        self._progress = ScrubProgress()
        self._loaded = False
        self._has_begun = False  # whether this process has begun the current pass
        self._saved_at = self._loop.time()
        self._saving = asyncio.Lock()  # both tasks save
        self._total_bytes = 0
        self.damaged = damaged
        self.blocks = 0
        self.bytes = 0

    def __repr__(self) -> str:
        return f"<Scrubber {self._name}: {self._share():.0%} of a pass, {self.damaged!r}>"

    def start(self, reports: DamageReports) -> None:
        """Begin, or continue where an earlier process stopped. Damage is reported to `reports`."""
        self.damaged.reports = reports
        self._tasks.start(self._run(), name="scrub")

    async def aclose(self) -> None:
        """End what is in progress and save the progress."""
        await self._tasks.aclose()
        if self._loaded:
            with suppress(OSError):
                await self._save()

    async def scrub_all(self) -> None:
        """Check the rest of the pass, or all blocks, without pauses, and report damage. For tests and tools."""
        await self._load()
        with suppress(_NoRoomError):
            while await self._scrub_slice(in_haste=True):
                pass
            await self._end_pass()
        await self.damaged.look_at_suspects()

    def figures(self) -> ScrubFigures:
        """Return counters since the start, and current gauges."""
        since_ms = self._progress.ended_at_ms or self._progress.began_at_ms
        return ScrubFigures(
            blocks=self.blocks,
            bytes=self.bytes,
            found=self.damaged.found,
            mended=self.damaged.mended,
            damaged={outlook: self.damaged.count(outlook) for outlook in Outlook},
            progress=self._share(),
            last_pass_age_s=max(0, self._clock.now_ms() - since_ms) / 1000 if since_ms else 0.0,
        )

    # the two tasks

    async def _run(self) -> None:
        await self._keep_trying(self._load)
        self._tasks.start(self._mend(), name="mend")
        while self._settings.scrub_period_s > 0:
            await self._keep_trying(self._pass)

    async def _mend(self) -> None:
        while True:
            due = self.damaged.next_look_at
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if due is None else max(due, self._loop.time() + _SHORTEST_ROUND_S)):
                    await self.damaged.wakeup.wait()
            await self._keep_trying(self._mend_once)

    async def _mend_once(self) -> None:
        await self.damaged.look_at_suspects()
        await self.damaged.look_again(now=self._loop.time())
        if self.damaged.is_changed:
            await self._save()

    async def _keep_trying(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Repeat the work after a pause until it succeeds (rule 4)."""
        while True:
            try:
                await work()
                return
            except _NoRoomError:  # `damaged_blocks.py` has logged it
                await asyncio.sleep(_RETRY_S)
            except Exception as error:  # any error of disk and database
                log.warning("scrub.failed", extra={"bookie": self._name, "error": repr(error)})
                await asyncio.sleep(_RETRY_S)

    # a pass

    async def _pass(self) -> None:
        """Wait until the next pass is due, or continue the current one to its end."""
        period_s, progress = self._settings.scrub_period_s, self._progress
        if progress.after is None and not self._has_begun:
            if progress.began_at_ms and progress.ended_at_ms:
                since_s = (self._clock.now_ms() - progress.began_at_ms) / 1000
                await asyncio.sleep(min(max(period_s - since_s, 0.0), period_s))
            self._progress = replace(self._progress, began_at_ms=self._clock.now_ms(), pass_bytes=0)
        self._has_begun = True
        self._total_bytes = await self._worker.run(self._bytes_in_logs)
        while await self._scrub_slice():
            pass
        if self._progress.pass_bytes == 0:
            await asyncio.sleep(min(period_s, _LONGEST_PAUSE_S))  # a new bookie: its first entries come soon
        await self._end_pass()

    async def _end_pass(self) -> None:
        self._has_begun = False
        ended_at_ms = self._clock.now_ms()
        facts = {"bookie": self._name, "bytes": self._progress.pass_bytes, "damaged": len(self.damaged.blocks)}
        if self._progress.pass_bytes:
            log.info("scrub.pass_ended", extra=facts)
        began_at_ms = self._progress.began_at_ms if self._progress.pass_bytes else 0
        self._progress = replace(self._progress, after=None, pass_bytes=0, began_at_ms=began_at_ms, ended_at_ms=ended_at_ms)
        await self._save()

    async def _scrub_slice(self, *, in_haste: bool = False) -> bool:
        """Check the next blocks; return False if there are none. Raises the errors of the index, and _NoRoomError."""
        blocks = await self._worker.run(self._next_blocks)
        checks = deque(map(BlockCheck, blocks))
        while checks:
            began = self._loop.time()
            if not in_haste:
                await self._wait_until_idle(min(_PATIENCE_S, PIECE_BYTES / self._rate_bytes_s() / 2))
            read_bytes, done = await self._worker.run(lambda: self._check_piece(checks))
            self._note(read_bytes, done)
            if not in_haste:
                await self._save_sometimes()
                pause_s = min(read_bytes / self._rate_bytes_s(), _LONGEST_PAUSE_S)
                await asyncio.sleep(max(0.0, began + pause_s - self._loop.time()))
        return bool(blocks)

    def _next_blocks(self) -> list[BlockRef]:
        """Return the blocks after those that were checked (rule 6). Runs in the worker."""
        after, limit, skipped = self._progress.after, _SLICE_BLOCKS, 1
        while True:
            try:
                return self._index.blocks_after(after, limit)
            except IndexCorruptError:
                if limit > 1:  # the blocks before the damage
                    limit //= 4
                    continue
            ledger_id = (self._progress.after.ledger_id if self._progress.after is not None else -1) + skipped
            if ledger_id >= _LEDGER_IDS:
                return []
            after, skipped = BlockRef(ledger_id, 0, -1, 0, 0, 0), 2 * skipped  # no block has this key

    def _check_piece(self, checks: deque[BlockCheck]) -> tuple[int, list[BlockCheck]]:
        """Read a piece of many blocks or a part of one. Runs in the worker."""
        done: list[BlockCheck] = []
        left = PIECE_BYTES
        while checks and left > 0:
            left -= checks[0].step(self._logs, left)
            if checks[0].is_done:
                done.append(checks.popleft())
        return PIECE_BYTES - left, done

    def _note(self, read_bytes: int, done: list[BlockCheck]) -> None:
        self.bytes += read_bytes
        self.blocks += len(done)
        self._progress.pass_bytes += read_bytes
        for check in done:
            if check.error and not self.damaged.suspect(check.block):
                raise _NoRoomError
            self._progress.after = check.block

    async def _wait_until_idle(self, patience_s: float) -> None:
        deadline = self._loop.time() + patience_s
        while self._is_busy() and self._loop.time() < deadline:  # noqa: ASYNC110 - a state of many parts, not an event
            await asyncio.sleep(_BUSY_PAUSE_S)

    def _rate_bytes_s(self) -> float:
        needed = self._total_bytes / (_SHARE_OF_PERIOD * self._settings.scrub_period_s)
        return min(max(needed, 1.0), self._settings.scrub_bytes_s)

    def _share(self) -> float:
        return min(1.0, self._progress.pass_bytes / self._total_bytes) if self._total_bytes else 0.0

    def _bytes_in_logs(self) -> int:
        total = 0
        for log_id in list_logs(self._disk):
            with suppress(FileNotFoundError):  # it was deleted at this moment
                file = self._disk.open(log_path(log_id))
                try:
                    total += file.size()
                finally:
                    file.close()
        return total

    # progress

    async def _load(self) -> None:
        if not self._loaded:
            self._progress = await self._worker.run(lambda: load_progress(self._disk))
            self._loaded = True
            self.damaged.remember(self._progress.damaged)

    async def _save_sometimes(self) -> None:
        if self._loop.time() - self._saved_at >= _SAVE_INTERVAL_S:
            self._total_bytes = await self._worker.run(self._bytes_in_logs)  # it grows during a pass
            await self._save()

    async def _save(self) -> None:
        async with self._saving:
            self._saved_at = self._loop.time()
            self.damaged.is_changed = False
            progress = replace(self._progress, damaged=list(self.damaged.blocks))
            try:
                await self._worker.run(lambda: save_progress(self._disk, progress))
            except OSError as error:
                self.damaged.is_changed = True
                log.warning("scrub.progress_not_saved", extra={"bookie": self._name, "error": str(error)})
