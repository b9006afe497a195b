"""Reclaims the space of entry logs: deletes dead ones, and copies what is left in sparse ones into new logs (compaction).

    (the log that is being written is closed first if it is mostly dead)
    closed logs ► walk over the index ─┬─ no reference ─────────────────► sync the index ► delete
      (flush thread)  (log_usage.py)   └─ few live bytes ► walk: references ► copy ► move ► delete

    copy    read each live block, check it ► write it to a new log ► sync the file and its name      compaction's thread
    move    each block that is still in the index gets its new place, in synced batches              flush thread
    delete  sync the index, then remove the old logs                                                 flush thread, compaction's

Rule 1: only closed logs, determined in the flush thread before the walk begins (log_usage.py has the proof).
Rule 2: a block that fails its check, or cannot be read, is neither copied nor dropped. Its log stays (it is quarantined); the good
blocks of that log move, and other logs are not affected.
Rule 3: a move checks that the old place is still in the index: the ledger may have been deleted while its blocks were copied.
Rule 4: an old log is deleted only after the move is synced, and only if each reference that the walk found was copied.
Rule 5: a crash at any step needs no repair. Before the first batch is synced nothing refers to the new log; after the last one
nothing refers to the old ones: dead logs, which the next pass deletes. In between each block is in one of them, and both stay.
Rule 6: a new log for which there is no space is given up and its file deleted. While the disk is full, compaction may use the space
that adds leave free (`storage.min_free_data_bytes`), except `storage.compaction_reserve_bytes` and what a flush may need: this
frees a full disk. Otherwise it leaves that space, or compaction itself would make the bookie read-only.
Rule 7: a pass that is not urgent begins no other new log after `storage.gc_interval_s`: the collector, whose deletions free logs,
waits for its end. The next pass continues with the sparsest logs.

One pass at a time. An urgent one, or one that becomes urgent, does not wait for the pace.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cepheid_bookie.background_pace import BackgroundPace
from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.compaction_choice import LogFigures, is_major_due, logs_of_output, logs_of_round, sparse_logs
from cepheid_bookie.disk import Disk
from cepheid_bookie.entry_log import LOG_HEADER_BYTES, CopiedLog, EntryLogReader, EntryLogWriter, log_path
from cepheid_bookie.errors import BlockCorruptError
from cepheid_bookie.log_usage import LogContents, LogUsage, walk_blocks
from cepheid_bookie.settings import StorageSettings
from cepheid_ports import Worker

log = logging.getLogger(__name__)

T = TypeVar("T")

_PIECE_BYTES = 1 << 20
"""Size of the pieces that compaction's thread reads, writes and syncs in one step."""
_ROUND_BLOCKS = 100_000
"""Limit of references in memory at a time: about 25 MB."""
_MOVE_BLOCKS = 2_000
"""Limit of blocks that one batch of the index moves: a flush waits for it."""
_SMALL_LOGS = 16
"""Share of the log size from which on a log being written may be closed early, to be compacted."""
_LOGGED_BLOCKS = 20
"""Limit of damaged blocks of one log that are logged one by one."""

OnDamaged = Callable[[int, int, int], None]
"""`(ledger_id, first_entry_id, last_entry_id)`: this bookie cannot read these entries from its disk."""


@dataclass(slots=True)
class CollectionCounters:
    """Counters since the start; the bytes of logs are as of the last walk."""

    deleted_logs: int = 0
    runs: int = 0  # new logs written by compaction
    compacted_bytes: int = 0  # copied
    reclaimed_bytes: int = 0  # of deleted logs, minus what was copied from them
    damaged_blocks: int = 0
    log_bytes: int = 0
    live_bytes: int = 0


class _StoppedError(Exception):
    """The bookie is closing or has failed: no further step may begin."""


class LogCollection:
    """Runs the passes. `worker` is compaction's own thread, `flush_worker` the only thread that writes to the index.

    `free_data_bytes` returns the free space of the data disk at the last check.
    """

    def __init__(
        self,
        index: BlockIndex,
        disk: Disk,
        logs: EntryLogWriter,
        log_reader: EntryLogReader,
        worker: Worker,
        flush_worker: Worker,
        settings: StorageSettings,
        pace: BackgroundPace,
        free_data_bytes: Callable[[], int],
        is_full: Callable[[], bool],
        cached_bytes: Callable[[], int],
    ) -> None:
        self._index = index
        self._disk = disk
        self._logs = logs
        self._log_reader = log_reader
        self._source = EntryLogReader(  # a second reader, so that brokers' readers keep their open files
            disk, open_logs=settings.open_logs, on_error=log_reader.on_error
        )
        self._worker = worker
        self._flush_worker = flush_worker
        self._settings = settings
        self._pace = pace
        self._free_data_bytes = free_data_bytes
        self._is_full = is_full
        self._cached_bytes = cached_bytes
        self._lock = asyncio.Lock()
        self._urgent = 0
        self._began_urgent = False  # this pass
        self._stopped = False
        self._runs_before = 0  # this pass
        self._began_at = self._major_at = asyncio.get_running_loop().time()  # this pass; the last major one that was completed
        self._next_at = 0.0  # when the limit of the rate permits the next piece
        self._current_bytes = 0  # of the log being written
        self._sizes: dict[int, int] = {}  # of closed logs: they do not change
        self._deleted: list[int] = []  # in this pass
        self.quarantined: dict[int, frozenset[BlockRef]] = {}
        """Logs that stay because of damaged blocks, with these blocks."""
        self.on_damaged: OnDamaged = lambda ledger_id, first_entry_id, last_entry_id: None
        self.counters = CollectionCounters()

    def __repr__(self) -> str:
        counters = self.counters
        return f"<LogCollection: {counters.live_bytes} of {counters.log_bytes} B live, {len(self.quarantined)} quarantined>"

    async def collect(self, *, urgent: bool = False) -> list[int]:
        """Run one pass; return the logs that it deleted. `urgent`: major and at full speed, also for a pass already in progress.

        Raises the errors of index and disk. Nothing is lost then, and the next pass begins from the start.
        """
        self._urgent += urgent
        try:
            async with self._lock:
                self._deleted = []
                with suppress(_StoppedError):
                    await self._collect()
                return sorted(self._deleted)
        finally:
            self._urgent -= urgent

    def stop(self) -> None:
        """Begin no further step. A step in progress is completed."""
        self._stopped = True

    async def aclose(self) -> None:
        """Stop, and return when the current pass has ended. The threads must still run."""
        self.stop()
        async with self._lock:
            self._source.close()

    async def _collect(self) -> None:
        self._began_at, self._runs_before = asyncio.get_running_loop().time(), self.counters.runs
        self._began_urgent = self._is_urgent()
        closed, usage = await self._measure()
        is_major = self._is_major_due(usage)
        share = self._settings.compaction_major_share if is_major else self._settings.compaction_minor_share
        if await self._close_sparse(usage, share):
            closed, usage = await self._measure()  # by a walk that begins after the log was closed
        dead = [log.log_id for log in closed if not log.blocks]
        await self._delete(dead, copied_bytes=0)
        self.quarantined = {
            log.log_id: self.quarantined[log.log_id] for log in closed if log.blocks and log.log_id in self.quarantined
        }
        left = sparse_logs([log for log in closed if is_major or not self._holds_only_damage(log)], share)
        while left:
            chosen = logs_of_round(left, _ROUND_BLOCKS)
            left = left[len(chosen) :]
            if not await self._compact(chosen):
                return
        if is_major:
            self._major_at = self._began_at

    def _is_major_due(self, usage: LogUsage) -> bool:
        return is_major_due(
            self._began_at - self._major_at,
            self._settings.compaction_major_interval_s,
            low_space=self._is_urgent() or self._free_data_bytes() < 2 * self._settings.min_free_data_bytes,
            live_bytes=sum(usage.live_bytes.values()),
            log_bytes=self.counters.log_bytes,
        )

    async def _close_sparse(self, usage: LogUsage, share: float) -> bool:
        """Close the log being written if little of it is live; return whether it was closed. A small bookie has no other log."""

        def work() -> bool:
            log_id, size_bytes = self._logs.current_log_id, self._logs.current_bytes
            figures = LogFigures(log_id, size_bytes, usage.live_bytes.get(log_id, 0), 1)
            is_sparse = size_bytes >= self._settings.log_bytes // _SMALL_LOGS and bool(sparse_logs([figures], share))
            if is_sparse:
                self._logs.close()
            return is_sparse

        return await self._run(self._flush_worker, work)

    async def _measure(self) -> tuple[list[LogFigures], LogUsage]:
        """Return the closed logs with their figures, and the usage of all logs."""
        closed, usage = await self._closed_logs(), LogUsage()
        await self._walk(usage.visit)
        self._sizes = sizes = await self._run(self._worker, lambda: self._sizes_of(closed))
        self.counters.log_bytes = sum(sizes.values()) + self._current_bytes
        self.counters.live_bytes = sum(usage.live_bytes.values())
        figures = [
            LogFigures(log_id, size, usage.live_bytes.get(log_id, 0), usage.blocks.get(log_id, 0)) for log_id, size in sizes.items()
        ]
        return figures, usage

    async def _closed_logs(self) -> list[int]:
        def work() -> list[int]:
            self._current_bytes = self._logs.current_bytes
            return self._logs.closed_logs()

        return await self._run(self._flush_worker, work)

    async def _walk(self, visit: Callable[[Sequence[BlockRef]], None]) -> None:
        self._check_running()
        await walk_blocks(self._index, self._worker, visit, self._is_urgent)
        self._check_running()

    def _is_urgent(self) -> bool:
        self._check_running()  # between two slices
        return self._urgent > 0 or self._is_full()

    def _sizes_of(self, log_ids: Sequence[int]) -> dict[int, int]:
        """Return the sizes of those logs that exist: one begun by a cancelled pass may be gone."""
        sizes: dict[int, int] = {}
        for log_id in log_ids:
            if (known := self._sizes.get(log_id)) is not None:
                sizes[log_id] = known
                continue
            with suppress(FileNotFoundError):
                file = self._disk.open(log_path(log_id))
                try:
                    sizes[log_id] = file.size()
                finally:
                    file.close()
        return sizes

    def _holds_only_damage(self, log: LogFigures) -> bool:
        return log.blocks <= len(self.quarantined.get(log.log_id, ()))

    # -- compaction -----------------------------------------------------------------------------------------------------

    async def _compact(self, logs: Sequence[LogFigures]) -> bool:
        """Copy the logs into as many new ones as needed. Return False if there is no room on the disk, or no time, for more."""
        contents = LogContents([log.log_id for log in logs])
        await self._walk(contents.visit)

        def count() -> list[LogFigures]:
            return [
                log._replace(live_bytes=sum(block.length for block in blocks), blocks=len(blocks))
                for log in logs
                for blocks in [contents.by_log[log.log_id]]
            ]

        found = await self._run(self._worker, count)
        await self._delete([log.log_id for log in found if not log.blocks], copied_bytes=0)
        left = [log for log in found if log.blocks]
        while left:
            if self._runs_before < self.counters.runs and not self._is_urgent() and self._is_late():
                return False  # rule 7
            if self._is_urgent() and not self._began_urgent:
                return False  # the pass that follows at once frees more of a full disk
            free_bytes = await self._run(self._worker, self._disk.free_bytes)
            chosen = logs_of_output(left, self._settings.log_bytes, free_bytes - self._kept_free_bytes())
            if not chosen:
                self._warn_of_no_room(left, free_bytes)
                return False
            unsorted = [block for log in chosen for block in contents.by_log.pop(log.log_id)]
            # Puts together what a reader of one ledger reads next.
            blocks = await self._run(self._worker, partial(sorted, unsorted))
            if not await self._merge(blocks, [log.log_id for log in chosen]):
                self._warn_of_no_room(left, free_bytes)
                return False
            left = [log for log in left if log not in chosen]
        return True

    def _kept_free_bytes(self) -> int:
        """Return the free space that compaction leaves (rule 6)."""
        settings = self._settings
        if self._is_urgent():
            return settings.compaction_reserve_bytes + self._cached_bytes()  # a flush may need it meanwhile
        return settings.min_free_data_bytes + settings.space_margin_bytes

    def _is_late(self) -> bool:
        return asyncio.get_running_loop().time() - self._began_at > self._settings.gc_interval_s

    async def _merge(self, blocks: Sequence[BlockRef], log_ids: Sequence[int]) -> bool:
        """Copy these blocks, which are all that some logs hold, and delete the logs. Return False if the disk is full."""
        merge = _Merge(self._disk, self._logs, self._source)
        moving = False
        try:
            for piece in _pieces(blocks):
                await self._wait_for_turn(piece)
                await self._copy(merge, piece)
            await self._run(self._worker, merge.finish)
            self._check_running()
            moving = True
            await self._move(merge.moves)
        except OSError as error:
            if moving or error.errno != errno.ENOSPC:
                raise
            return False
        finally:
            if not moving:  # also if cancelled; the thread does this after its current task
                self._worker.submit(merge.abandon, _ignore)
        self._note_damage(log_ids, merge.damaged)
        self.counters.runs += bool(merge.moves)
        await self._delete([log_id for log_id in log_ids if log_id not in self.quarantined], copied_bytes=merge.size_bytes)
        return True

    async def _copy(self, merge: _Merge, piece: Sequence[BlockRef]) -> None:
        loop = asyncio.get_running_loop()
        size_bytes = sum(block.length for block in piece)
        self._pace.on_background_admitted(loop.time(), size_bytes)
        try:
            await self._run(self._worker, partial(merge.copy, piece))
        finally:
            self._pace.on_batch(loop.time(), None, size_bytes, synced=True)
        self.counters.compacted_bytes += size_bytes

    async def _wait_for_turn(self, piece: Sequence[BlockRef]) -> None:
        """Wait until the rate and the adds in progress permit the next piece; in an urgent pass return at once."""
        loop = asyncio.get_running_loop()
        size_bytes = sum(block.length for block in piece)
        while not self._is_urgent():
            now = loop.time()
            delay_s = max(self._next_at - now, self._pace.delay_s(now, size_bytes) or 0.0)
            if delay_s <= 0:
                break
            await asyncio.sleep(min(delay_s, 0.5))
        self._next_at = max(self._next_at, loop.time()) + size_bytes / self._settings.compaction_bytes_s

    async def _move(self, moves: Sequence[tuple[BlockRef, BlockRef]]) -> None:
        for start in range(0, len(moves), _MOVE_BLOCKS):
            batch = moves[start : start + _MOVE_BLOCKS]
            await self._run(self._flush_worker, partial(self._index.move, batch))

    async def _delete(self, log_ids: Sequence[int], *, copied_bytes: int) -> None:
        """Delete logs to which nothing refers any more."""
        if not log_ids:
            return
        await self._run(self._flush_worker, self._index.sync)  # a power loss would restore references whose removal is not synced

        def work() -> None:
            for log_id in log_ids:
                self._disk.unlink(log_path(log_id))
                self._log_reader.forget(log_id)
                self._source.forget(log_id)

        await self._run(self._worker, work)
        for log_id in log_ids:
            size_bytes = self._sizes.pop(log_id, 0)
            self.counters.log_bytes -= size_bytes
            self.counters.reclaimed_bytes += size_bytes
        self.counters.reclaimed_bytes -= copied_bytes
        self.counters.log_bytes += copied_bytes
        self.counters.deleted_logs += len(log_ids)
        self._deleted += log_ids
        facts = {"count": len(log_ids), "copied_bytes": copied_bytes, "logs": [f"{log_id:08x}" for log_id in log_ids]}
        log.info("entry_logs.deleted", extra=facts)

    async def _run(self, worker: Worker, work: Callable[[], T]) -> T:
        self._check_running()
        return await worker.run(work)

    def _check_running(self) -> None:
        if self._stopped:
            raise _StoppedError

    # -- logging --------------------------------------------------------------------------------------------------------

    def _note_damage(self, log_ids: Sequence[int], damaged: Sequence[tuple[BlockRef, str]]) -> None:
        for log_id in log_ids:
            known = self.quarantined.pop(log_id, frozenset())
            here = [(block, error) for block, error in damaged if block.log_id == log_id]
            if here:
                self.quarantined[log_id] = frozenset(block for block, _ in here)
            new = [(block, error) for block, error in here if block not in known]
            for place, (block, error) in enumerate(new):
                self.counters.damaged_blocks += 1
                self.on_damaged(block.ledger_id, block.first_entry_id, block.last_entry_id)
                if place < _LOGGED_BLOCKS:
                    hint = (
                        "its entries are read from other replicas; the file stays until they are repaired and its ledger is deleted"
                    )
                    facts = {
                        "ledger_id": block.ledger_id,
                        "first_entry_id": block.first_entry_id,
                        "last_entry_id": block.last_entry_id,
                        "file": log_path(log_id),
                        "offset": block.offset,
                        "damaged_blocks_of_file": len(here),
                    }
                    log.error("compaction.block_damaged", extra={**facts, "error": error, "hint": hint})

    def _warn_of_no_room(self, logs: Sequence[LogFigures], free_bytes: int) -> None:
        smallest = min(log.live_bytes for log in logs) + LOG_HEADER_BYTES
        facts = {
            "free_bytes": free_bytes,
            "needed_bytes": smallest + self._settings.compaction_reserve_bytes,
            "reclaimable_bytes": sum(log.size_bytes - log.live_bytes for log in logs),
        }
        hint = "free needed_bytes on the data disk, or lower storage.compaction_reserve_bytes; it is tried again in the next pass"
        log.warning("compaction.no_room", extra={**facts, "hint": hint})


class _Merge:
    """A new log and what was copied into it. Its methods block; use them in compaction's thread."""

    def __init__(self, disk: Disk, logs: EntryLogWriter, source: EntryLogReader) -> None:
        self._disk = disk
        self._logs = logs
        self._source = source
        self._output: CopiedLog | None = None
        self.moves: list[tuple[BlockRef, BlockRef]] = []
        self.damaged: list[tuple[BlockRef, str]] = []  # with a description: an exception would keep the block in memory

    @property
    def size_bytes(self) -> int:
        """Size of the new log; 0 if there is none."""
        return 0 if self._output is None else self._output.size_bytes

    def copy(self, piece: Sequence[BlockRef]) -> None:
        """Copy the intact blocks. Raises OSError if the new log cannot be written; abandon it then."""
        good: list[tuple[BlockRef, bytes]] = []
        for block in piece:
            try:
                good.append((block, self._source.read_checked(block)))
            except BlockCorruptError as error:
                self.damaged.append((block, str(error)))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise  # does not concern the disk
                self.damaged.append((block, str(error)))
        if good:
            if self._output is None:
                self._output = CopiedLog(self._disk, self._logs.ids.take())
            copies = self._output.append(good)
            self.moves += [(block, copy) for (block, _), copy in zip(good, copies, strict=True)]

    def finish(self) -> None:
        """Return when the copies are durable."""
        if self._output is not None:
            self._output.finish()

    def abandon(self) -> None:
        """Delete the new log, to which no block refers."""
        if self._output is not None:
            self._output.abandon()


def _pieces(blocks: Sequence[BlockRef]) -> Iterator[list[BlockRef]]:
    """Cut the blocks into pieces of one step: about a megabyte, at least one block."""
    piece: list[BlockRef] = []
    size_bytes = 0
    for block in blocks:
        if piece and size_bytes + block.length > _PIECE_BYTES:
            yield piece
            piece, size_bytes = [], 0
        piece.append(block)
        size_bytes += block.length
    if piece:
        yield piece


def _ignore(_: object, error: BaseException | None) -> None:
    if error is not None:
        log.warning("compaction.not_abandoned", extra={"error": repr(error), "hint": "the file is deleted in the next pass"})
