"""Reads of entries: from the write cache first, then blocks from disk, a chunk at a time.

    chunk at `position`:   cached?  ──► groups from memory, as they lie
                           else     ──► worker: index ──► pread whole blocks ──► check ──► groups; what no block has is missing

Rule 1: look in the cache first, in one turn, then in the index: a half leaves the cache only after the index has it, so an entry
that exists is found in one of the two.
Rule 2: three answers: here, certainly never acknowledged, unknown. Entries of a damaged block that match their own digests are
returned; the others are unknown (BAD_DIGEST). All entries of a block that cannot be read are unknown. Entries that are intact in
another block, where repair has put them, are returned from there. Damaged blocks are reported for repair (`on_damaged`).
Rule 3: reads of old data have their own queue, byte budget and threads; adds never wait for them. A read that has
waited longer than its client does is refused: the budget is for clients that still wait.
Rule 4: a caller that takes blocks as stored gets their location (`StoredRun`): they are neither parsed nor checked here, which the
reader does anyway. Only for blocks of which every entry was requested, and only for long runs.
Rule 5: when a reader continues where it stopped, the next blocks are read ahead (`BlockCache`), but only with
spare budget, never while a read waits for it.
Rule 6: a log may be deleted between the index lookup and the read. Its live blocks are then elsewhere, or their ledger is
deleted, so the index is read again. If the file that it then names is missing, too, the entries are unknown.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeAlias

from cepheid_bookie.block_cache import BlockCache
from cepheid_bookie.block_check import gaps_between, other_copies, whole_runs
from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.entry_log import EntryLogReader
from cepheid_bookie.errors import BlockCorruptError
from cepheid_bookie.watched_worker import ReadWork
from cepheid_bookie.write_cache import WriteCache
from cepheid_ports import Worker
from cepheid_rpc import (
    MAX_MESSAGE_BYTES,
    EntryGroup,
    MissingEntries,
    ReadAnswer,
    ReadRequest,
    Status,
)

log = logging.getLogger(__name__)

_MAX_BLOCKS = 256  # per chunk: bounds the index lookups when blocks are small
_FIRST_BLOCKS = 8  # in the first lookup
_WHOLE_BLOCK_BYTES = 8 << 20  # per chunk of a scan; with one more entry it must stay below gRPC's limit
_RUN_BYTES = 256 << 10  # fewer bytes are not worth a frame: blocks of a striped ledger have two or three entries
_MAX_PARTS = 512  # per chunk: cached runs and the gaps between them
_AHEAD_BYTES = 2 << 20  # the block in which a reader stopped, and what its next request needs beyond that
_AHEAD_BLOCKS = 64  # limit for the read-ahead: more small blocks cost more lookups than they save
_MAX_CONTINUING = 1024  # positions at which a reader may continue
_NO_BLOCKS = BlockCache(0)


@dataclass(slots=True)
class ReadCounters:
    """Counters of one reader. `disk_chunks` stays 0 while consumers tail: their entries come from the broker's cache."""

    requests: int = 0
    cache_chunks: int = 0
    disk_chunks: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    cached_blocks: int = 0  # found in memory, read ahead or by an earlier request
    blocks_ahead: int = 0  # read ahead; also counted in `disk_blocks`
    expired: int = 0  # reads refused because their clients no longer wait
    entries_missing: int = 0  # ranges answered "certainly not here"
    unreadable_blocks: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Adjacent blocks of one entry log that hold exactly the entries `first..last`."""

    first_entry_id: int
    last_entry_id: int
    log_id: int
    offset: int
    size_bytes: int
    blocks: int


class ReadingBudget:
    """Budget of bytes being read from disk, first come, first served. A request above the limit gets the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return f"<ReadingBudget {self.used_bytes} of {self.limit_bytes} B, {len(self._waiting)} waiting>"

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def take_nowait(self, size_bytes: int) -> bool:
        """Take the bytes if they are free and no caller waits, and return whether they were taken. `give_back` returns them."""
        if self._waiting or self.used_bytes + size_bytes > self.limit_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    async def take(self, size_bytes: int) -> int:
        size_bytes = min(size_bytes, self.limit_bytes)
        if self.take_nowait(size_bytes):
            return size_bytes
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (size_bytes, turn)
        self._waiting.append(waiter)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size_bytes)  # granted in the very turn in which the wait was cancelled
            else:
                with suppress(ValueError):  # `_grant` removed it in this very turn, as its wait had ended
                    self._waiting.remove(waiter)
                self._grant()
            raise
        return size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.used_bytes + self._waiting[0][0] <= self.limit_bytes:
            size_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self.used_bytes += size_bytes
                turn.set_result(None)


class EntryReader:
    """Reads entries with the reader threads of `worker`. A bookie has one for brokers and one for scans.

    `whole_blocks`: chunks end at block boundaries, so that no block is read twice, and all entries of a damaged block are returned:
    a scan checks each entry and uses the intact ones. `cached_groups`: maximum per chunk; small groups cost
    the loop more than their bytes do. `read_ahead_bytes`: memory for blocks kept for readers that continue; 0: none.
    """

    def __init__(
        self,
        cache: WriteCache,
        index: BlockIndex,
        logs: EntryLogReader,
        worker: Worker,
        *,
        reading_bytes: int,
        whole_blocks: bool = False,
        cached_groups: int = _MAX_BLOCKS * _MAX_PARTS,
        read_ahead_bytes: int = 0,
        on_damaged: Callable[[BlockRef], object] = lambda _: None,
    ) -> None:
        self._cache = cache
        self._index = index
        self._logs = logs
        self._worker = worker
        self._budget = ReadingBudget(reading_bytes)
        self._whole_blocks = whole_blocks
        self._cached_groups = cached_groups
        self._blocks = BlockCache(read_ahead_bytes) if read_ahead_bytes else _NO_BLOCKS
        self._continuing: OrderedDict[tuple[int, int], None] = OrderedDict()  # (ledger id, next entry id)
        self._ahead_of: set[int] = set()  # ledgers whose blocks are being read ahead
        self._loop = asyncio.get_running_loop()
        self._on_damaged = on_damaged
        self._stopped = False
        self.counters = ReadCounters()

    def stop(self) -> None:
        """Answer STOPPED to every read that needs the disk from now on."""
        self._stopped = True

    def forget(self, ledger_ids: Collection[int]) -> None:
        """Forget these ledgers: their entries were deleted."""
        self._blocks.forget(ledger_ids)

    async def read(
        self,
        ledger_id: int,
        first: int,
        last: int,
        max_bytes: int,
        *,
        urgent: bool,
        chunk_bytes: int = MAX_MESSAGE_BYTES,
        deadline: float | None = None,
        fresh: bool = False,
    ) -> AsyncGenerator[ReadAnswer, None]:
        """Yield chunks from `first` until `last` or `max_bytes` (soft by one entry). `urgent` reads (recovery) skip the queue.

        `fresh`: read blocks from disk even if they are in memory; entries in no block yet still come from the write cache.
        `deadline`: loop time after which nothing more is read from disk for this request; the rest is answered OVERLOADED.
        """
        position, left = first, max(max_bytes, 1)
        continues = self._continuing.pop((ledger_id, first), _NEW) is None
        while position <= last and left > 0:
            answer = self._from_cache(ledger_id, position, last, min(left, chunk_bytes))
            if answer is not None and position > first:
                await asyncio.sleep(0)  # a long run of cached entries is not read in one turn
            if answer is None:
                parts = self._stripes(ledger_id, position, last, min(left, chunk_bytes))
                answer = await self._from_disk(
                    ledger_id, parts, min(left, chunk_bytes), urgent=urgent, deadline=deadline, fresh=fresh
                )
                if answer is None:
                    self.counters.expired += 1
                    yield ReadAnswer((), (MissingEntries(position, last, Status.OVERLOADED),), last + 1)
                    return
                if answer.groups and not urgent and not fresh and self._blocks is not _NO_BLOCKS:
                    self._on_continuing(ledger_id, position, answer.next_entry_id, ahead=continues or position > first)
            left -= sum(len(group.data) for group in answer.groups)
            position = answer.next_entry_id
            yield answer

    def _on_continuing(self, ledger_id: int, position: int, next_entry_id: int, *, ahead: bool) -> None:
        """Record that a reader got entries from disk and may continue at `next_entry_id`. `ahead`: it has continued before."""
        self._continuing.pop((ledger_id, position), None)
        self._continuing[ledger_id, next_entry_id] = None
        if len(self._continuing) > _MAX_CONTINUING:
            self._continuing.popitem(last=False)
        if not ahead or self._stopped or ledger_id in self._ahead_of or not self._budget.take_nowait(_AHEAD_BYTES):
            return
        self._ahead_of.add(ledger_id)
        now = self._loop.time()

        def on_done(blocks: list[BlockRef] | None, _error: BaseException | None) -> None:
            """Ignore an error: the next read meets it itself."""
            self._ahead_of.discard(ledger_id)
            self._budget.give_back(_AHEAD_BYTES)
            for block in blocks or ():
                self.counters.blocks_ahead += 1
                self.counters.disk_blocks += 1
                self.counters.disk_bytes += block.length

        self._worker.submit(ReadWork(lambda: self._read_ahead(ledger_id, next_entry_id, now)), on_done)

    def _read_ahead(self, ledger_id: int, position: int, now: float) -> list[BlockRef]:
        """Read the blocks from `position` that are not in memory, in a reader thread; return those read."""
        read: list[BlockRef] = []

        def read_block(block: BlockRef) -> tuple[Status, EntryGroup | None]:
            read.append(block)
            return _read_block(self._logs, block, check=True, fresh=False)

        generation, size_bytes = self._blocks.generation, 0
        for block in self._index.find(ledger_id, position, _LAST_ENTRY_ID, _AHEAD_BLOCKS):
            if size_bytes + block.length > _AHEAD_BYTES + MAX_MESSAGE_BYTES // 2 or self._budget.has_waiting or self._stopped:
                break
            size_bytes += block.length
            if not self._blocks.read_ahead(block, read_block, generation=generation, now=now):
                break
        return read

    async def read_stored(
        self, ledger_id: int, first: int, last: int, max_bytes: int, *, chunk_bytes: int
    ) -> AsyncGenerator[ReadAnswer | StoredRun, None]:
        """Read like `read`, but return long runs of whole blocks as `StoredRun`s (rule 4)."""
        position, left = first, max(max_bytes, 1)
        while position <= last and left > 0:
            if self._cache.find(ledger_id, position) is None:
                run = await self._find_run(ledger_id, position, last, min(left, chunk_bytes))
                if run is not None:
                    left -= run.size_bytes
                    position = run.last_entry_id + 1
                    yield run
                    continue
            async with aclosing(
                self.read(ledger_id, position, last, min(left, chunk_bytes), urgent=False, chunk_bytes=chunk_bytes)
            ) as answers:
                async for answer in answers:
                    left -= sum(len(group.data) for group in answer.groups)
                    position = answer.next_entry_id
                    yield answer
                    break  # the entries after it may be on disk

    async def _find_run(self, ledger_id: int, position: int, last: int, max_bytes: int) -> StoredRun | None:
        if self._stopped:
            return None
        try:
            run = await self._worker.run(ReadWork(lambda: find_run(self._index, ledger_id, position, last, max_bytes)))
        except Exception:  # the index raises its database's errors; the next read reports this one
            return None
        if run is not None:
            self.counters.disk_chunks += 1
            self.counters.disk_blocks += run.blocks
            self.counters.disk_bytes += run.size_bytes
        return run

    async def read_one(self, ledger_id: int, entry_id: int) -> ReadAnswer:
        answer = self._from_cache(ledger_id, entry_id, entry_id, 1)
        if answer is None:
            answer = await self._from_disk(ledger_id, [(entry_id, entry_id)], 1, urgent=True)
            assert answer is not None, "without a deadline there is an answer"
        return answer

    def _from_cache(self, ledger_id: int, position: int, last: int, max_bytes: int) -> ReadAnswer | None:
        """Return cached entries from exactly `position` without a gap; None if `position` is not cached."""
        groups: list[EntryGroup] = []
        left = max_bytes
        while position <= last and left > 0 and (group := self._cache.find(ledger_id, position)) is not None:
            if len(groups) >= self._cached_groups:
                break
            part = cut_group(group, position, last, left)
            groups.append(part)
            left -= len(part.data)
            position = part.last_entry_id + 1
        if not groups:
            return None
        self.counters.cache_chunks += 1
        return ReadAnswer(tuple(groups), (), position)

    def _stripes(self, ledger_id: int, position: int, last: int, max_bytes: int) -> list[_Part]:
        """Return the gap at `position`, which is not cached, and in a striped ledger the cached runs and gaps after it.

        All gaps are then looked up together: a lookup for each would cost more than the entries.
        """
        parts: list[_Part] = []
        left = max_bytes
        while position <= last and left > 0 and len(parts) < min(_MAX_PARTS, self._cached_groups):
            group = self._cache.find(ledger_id, position)
            if group is not None:
                part = cut_group(group, position, last, left)
                parts.append(part)
                left -= len(part.data)
                position = part.last_entry_id + 1
            else:
                gap_end = self._cache.first_from(ledger_id, position)
                gap_last = last if gap_end is None else min(last, gap_end - 1)
                parts.append((position, gap_last))
                position = gap_last + 1
        return parts

    async def _from_disk(
        self,
        ledger_id: int,
        parts: Sequence[_Part],
        max_bytes: int,
        *,
        urgent: bool,
        deadline: float | None = None,
        fresh: bool = False,
    ) -> ReadAnswer | None:
        """Return a chunk read from disk; None if the deadline passed while it was queued."""
        if urgent:
            return await self._read_blocks(ledger_id, parts, max_bytes, None, fresh=fresh)
        try:
            async with asyncio.timeout_at(deadline):
                taken = await self._budget.take(max_bytes if self._whole_blocks else MAX_MESSAGE_BYTES)
        except TimeoutError:
            return None
        try:
            return await self._read_blocks(ledger_id, parts, max_bytes, deadline, fresh=fresh)
        finally:
            self._budget.give_back(taken)

    async def _read_blocks(
        self, ledger_id: int, parts: Sequence[_Part], max_bytes: int, deadline: float | None, *, fresh: bool
    ) -> ReadAnswer | None:
        """Read the parts, the first of which is a gap; return None if the deadline passed before a thread began."""
        gaps = [part for part in parts if not isinstance(part, EntryGroup)]
        first, last = gaps[0]
        if self._stopped:
            return ReadAnswer((), (MissingEntries(first, last, Status.STOPPED),), last + 1)
        given_up = False

        def work() -> list[_Chunk] | None:
            if given_up or (deadline is not None and self._loop.time() > deadline):
                return None
            return self._read_gaps(ledger_id, gaps, max_bytes, fresh=fresh)

        try:
            chunks = await self._worker.run(ReadWork(work))
        except asyncio.CancelledError:
            given_up = True  # not started yet: a slow disk must not read for clients that have timed out and asked again
            raise
        except Exception as error:  # the index raises its database's errors; in any case the entries are unknown
            log.error("read.failed", extra={"ledger_id": ledger_id, "entry_id": first, "error": repr(error)})
            return ReadAnswer((), (MissingEntries(first, last, Status.IO_ERROR),), last + 1)
        if chunks is None:
            return None
        counters = self.counters
        counters.disk_chunks += any(chunk.blocks or chunk.cached_blocks for chunk in chunks)
        for chunk in chunks:
            counters.cached_blocks += chunk.cached_blocks
            counters.disk_blocks += chunk.blocks
            counters.disk_bytes += chunk.read_bytes
            counters.unreadable_blocks += len(chunk.damaged)
            for block in chunk.damaged:
                self._on_damaged(block)
            counters.entries_missing += any(missing.status.certain_no for missing in chunk.answer.missing)
        return chunks[0].answer if len(parts) == 1 else _joined(parts, chunks, max_bytes)

    def _read_gaps(self, ledger_id: int, gaps: Sequence[tuple[int, int]], max_bytes: int, *, fresh: bool) -> list[_Chunk]:
        """Read one chunk per gap, in order, until `max_bytes`, in a reader thread; the last chunk may end before its gap."""
        chunks: list[_Chunk] = []
        left = max_bytes
        for first, last in gaps:
            chunk = _read_chunk(
                self._index,
                self._logs,
                _NO_BLOCKS if fresh else self._blocks,
                ledger_id,
                first,
                last,
                left,
                whole_blocks=self._whole_blocks,
                fresh=fresh,
                now=self._loop.time(),
            )
            chunks.append(chunk)
            left -= sum(len(group.data) for group in chunk.answer.groups)
            if left <= 0 or chunk.answer.next_entry_id <= last:
                break
        return chunks


_NEW = object()  # no reader was seen to stop here
_LAST_ENTRY_ID = (1 << 62) - 1

_Part: TypeAlias = EntryGroup | tuple[int, int]
"""Cached entries, or the ids `first..last` (inclusive) of a gap between them."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    answer: ReadAnswer
    blocks: int
    cached_blocks: int
    read_bytes: int
    damaged: Sequence[BlockRef]


def _joined(parts: Sequence[_Part], chunks: Sequence[_Chunk], max_bytes: int) -> ReadAnswer:
    """Join cached runs with what was found in the looked-up gaps between them, up to `max_bytes` in total.

    The limit matters: a full gap and a full cache exceed the size of a message. The first part is a gap.
    """
    groups: list[EntryGroup] = []
    missing: list[MissingEntries] = []
    found = iter(chunks)
    next_entry_id, left = -1, max_bytes
    for part in parts:
        if next_entry_id >= 0 and left <= 0:
            break
        if isinstance(part, EntryGroup):
            run = cut_group(part, part.first_entry_id, part.last_entry_id, left)
            groups.append(run)
            left -= len(run.data)
            next_entry_id, until = run.last_entry_id + 1, part.last_entry_id
        else:
            chunk = next(found, None)
            if chunk is None:
                break
            groups += chunk.answer.groups
            missing += chunk.answer.missing
            left -= sum(len(group.data) for group in chunk.answer.groups)
            next_entry_id, until = chunk.answer.next_entry_id, part[1]
        if next_entry_id <= until:
            break
    return ReadAnswer(tuple(groups), tuple(missing), next_entry_id)


def _read_chunk(
    index: BlockIndex,
    logs: EntryLogReader,
    cache: BlockCache,
    ledger_id: int,
    first: int,
    last: int,
    max_bytes: int,
    *,
    whole_blocks: bool,
    fresh: bool,
    now: float,
) -> _Chunk:
    """In a reader thread: read whole blocks with `first..last`, up to `max_bytes` (at least one entry); cut them to the range.

    With `whole_blocks`, return the first block whole, and another one only if it fits completely.
    """
    groups: list[EntryGroup] = []
    missing: list[MissingEntries] = []
    damaged: list[BlockRef] = []
    position, left, read_blocks, cached_blocks, read_bytes = first, max_bytes, 0, 0, 0
    generation = cache.generation

    def read_block(block: BlockRef) -> tuple[Status, EntryGroup | None]:
        return _read_block(logs, block, check=not whole_blocks, fresh=fresh)

    looked_again_at = -1
    lookup = _Lookup(index, ledger_id, first, last)
    for block in lookup:
        if block is None or left <= 0 or (whole_blocks and groups and block.length > left):
            break
        if block.first_entry_id > position:
            missing.append(MissingEntries(position, block.first_entry_id - 1, Status.NO_ENTRY))
            position = block.first_entry_id
        try:
            status, group, was_cached = cache.fetch(block, read_block)
        except FileNotFoundError:  # rule 6
            if looked_again_at < position:
                looked_again_at = position
                lookup.look_again(position)
                continue
            status, group, was_cached = Status.IO_ERROR, None, False
        cached_blocks += was_cached
        read_blocks += not was_cached
        if group is None:
            damaged.append(block)
            until = min(last, block.last_entry_id)
            was_cut = False  # cut for size: the rest of the block is neither here nor missing
            runs = list(_whole_entries(logs, block, position, until)) if status is Status.BAD_DIGEST else []
            runs += other_copies(index, logs, block, gaps_between(runs, position, until))
            for whole in sorted(runs, key=lambda run: run.first_entry_id):
                if left <= 0:
                    was_cut = True
                    break
                if whole.first_entry_id > position:
                    missing.append(MissingEntries(position, whole.first_entry_id - 1, status))
                    position = whole.first_entry_id
                part = cut_group(whole, position, until, left)
                groups.append(part)
                left -= len(part.data)
                position = part.last_entry_id + 1
                if position <= whole.last_entry_id:
                    was_cut = True
                    break
            if was_cut:
                break
            if position <= until:
                missing.append(MissingEntries(position, until, status))
                position = until + 1
        else:
            room = max(left, min(block.length, _WHOLE_BLOCK_BYTES)) if whole_blocks else left
            part = cut_group(group, position, last, room)
            groups.append(part)
            left -= len(part.data)
            read_bytes += 0 if was_cached else block.length
            position = part.last_entry_id + 1
            if cache is not _NO_BLOCKS:
                cache.settle(block, group, finished=position > block.last_entry_id, generation=generation, now=now)
            if position <= min(last, block.last_entry_id):  # cut for size: the rest of the block is neither here nor missing
                break
    else:
        if position <= last:
            missing.append(MissingEntries(position, last, Status.NO_ENTRY))
            position = last + 1
    return _Chunk(ReadAnswer(tuple(groups), tuple(missing), position), read_blocks, cached_blocks, read_bytes, damaged)


def find_run(index: BlockIndex, ledger_id: int, first: int, last: int, max_bytes: int) -> StoredRun | None:
    """Return the blocks from exactly `first`; None if they are too few bytes or begin elsewhere. Runs in a reader thread."""
    begin: BlockRef | None = None
    next_entry_id, offset, count = first, 0, 0
    for block in _blocks(index, ledger_id, first, last):
        if block is None or block.first_entry_id != next_entry_id or block.last_entry_id > last:
            break
        if begin is None:
            begin, offset = block, block.offset
        elif (block.log_id, block.offset) != (begin.log_id, offset) or offset + block.length - begin.offset > max_bytes:
            break
        next_entry_id, offset, count = block.last_entry_id + 1, offset + block.length, count + 1
    if begin is None or offset - begin.offset < _RUN_BYTES:
        return None
    return StoredRun(first, next_entry_id - 1, begin.log_id, begin.offset, offset - begin.offset, count)


def _blocks(index: BlockIndex, ledger_id: int, first: int, last: int) -> Iterator[BlockRef | None]:
    """Yield blocks in order, then None after `_MAX_BLOCKS`, when there may be more.

    The first lookup is small: it mostly fills a chunk, and 256 blocks cost a seventh of reading a chunk of 2 MiB.
    """
    found, wanted = 0, _FIRST_BLOCKS
    while found < _MAX_BLOCKS:
        blocks = index.find(ledger_id, first, last, wanted)
        yield from blocks
        if len(blocks) < wanted or blocks[-1].last_entry_id >= last:
            return
        found += wanted
        first = blocks[-1].last_entry_id + 1
        wanted = min(4 * wanted, _MAX_BLOCKS - found)
    yield None


class _Lookup:
    """Iterates over `_blocks`, and can ask the index again."""

    def __init__(self, index: BlockIndex, ledger_id: int, first: int, last: int) -> None:
        self._index = index
        self._ledger_id = ledger_id
        self._last = last
        self.look_again(first)

    def __iter__(self) -> _Lookup:
        return self

    def __next__(self) -> BlockRef | None:
        return next(self._blocks)

    def look_again(self, first: int) -> None:
        """Continue with the blocks that the index has from `first` on now."""
        self._blocks = _blocks(self._index, self._ledger_id, first, self._last)


def _read_block(logs: EntryLogReader, block: BlockRef, *, check: bool, fresh: bool) -> tuple[Status, EntryGroup | None]:
    """Read one block. Raises FileNotFoundError if its log was deleted."""
    try:
        return Status.OK, logs.read_block(block, check=check, fresh=fresh)
    except FileNotFoundError:
        raise
    except BlockCorruptError:
        return Status.BAD_DIGEST, None
    except OSError:
        return Status.IO_ERROR, None


def _whole_entries(logs: EntryLogReader, block: BlockRef, first: int, last: int) -> Iterator[EntryGroup]:
    """Yield the entries `first..last` of a damaged block that match their own digests, as runs without gaps."""
    try:
        group = logs.read_block(block, check=False).slice(first, last)
    except (BlockCorruptError, OSError):
        return
    yield from whole_runs(group)


def cut_group(group: EntryGroup, first: int, last: int, max_bytes: int) -> EntryGroup:
    """Return the entries from `first` (in the group) up to `last`, about `max_bytes` of them: soft by one entry."""
    start_index = first - group.first_entry_id
    start = group.ends[start_index - 1] if start_index else 0
    reached = bisect_left(group.ends, start + max_bytes, start_index)
    return group.slice(first, min(last, group.first_entry_id + reached, group.last_entry_id))


def split_answer(answer: ReadAnswer, piece_bytes: int) -> Iterator[ReadAnswer]:
    """Yield the answer as consecutive answers of about `piece_bytes` each, soft by one entry."""
    groups: list[EntryGroup] = []
    missing = deque(answer.missing)
    left = piece_bytes
    for whole in answer.groups:
        group = whole
        while True:
            part = cut_group(group, group.first_entry_id, group.last_entry_id, left)
            groups.append(part)
            left -= len(part.data)
            if left > 0 or (part.last_entry_id == group.last_entry_id and whole is answer.groups[-1]):
                break  # what is missing after the last group belongs to it
            next_entry_id = part.last_entry_id + 1
            told: list[MissingEntries] = []
            while missing and missing[0].first_entry_id < next_entry_id:
                told.append(missing.popleft())
            yield ReadAnswer(tuple(groups), tuple(told), next_entry_id)
            groups, left = [], piece_bytes
            if part.last_entry_id == group.last_entry_id:
                break
            group = group.slice(next_entry_id, group.last_entry_id)
    yield ReadAnswer(tuple(groups), tuple(missing), answer.next_entry_id, answer.retry_after_ms)


def refuse_range(request: ReadRequest, status: Status, *, retry_after_ms: int = 0) -> ReadAnswer:
    """Refuse a whole request: one chunk whose `missing` covers the whole range."""
    first, last = request.first_entry_id, max(request.first_entry_id, request.last_entry_id)
    return ReadAnswer((), (MissingEntries(first, last, status),), last + 1, retry_after_ms)
