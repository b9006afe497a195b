"""Reads what the tail cache does not have any more.

    read(7:10) ──► StoredCopies ──► 1 MB      remembered: a reader may continue at 7:900
    read(7:900) ─► StoredCopies ──► 1 MB      it did: from now on the next 4 MB are read while these are delivered
    read(7:1800) ◄── already in memory

Rules:
1. A closed ledger is bounded by the end that the chain records, the open ledger by the last confirmed entry.
2. Equal reads at the same time are one read.
3. Bytes read and not handed over yet are bounded over all topics (`CatchUpBudget`); there is no reading ahead when they run short.
   What is read ahead from objects, a row group at a time, has a smaller bound within that.
4. What was read ahead and not fetched is dropped after a while, sooner when other topics wait for memory. A failure ends reading
   ahead: the next caller reads for itself, and receives the error itself.
5. When a ledger leaves the chain, readers in the middle of it continue with the next one. What was read ahead for them belonged to
   the ledger that left, and is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque

from cepheid_managed_ledger.catch_up_budget import CatchUpBudget
from cepheid_managed_ledger.errors import EntryTrimmedError, ManagedLedgerClosedError
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.settings import MIB, ManagedLedgerSettings
from cepheid_managed_ledger.stored_copies import StoredCopies
from cepheid_managed_ledger.tail_cache import front_of
from cepheid_metadata import Position
from cepheid_ports import CepheidError, SingleFlight, TaskOwner
from cepheid_rpc import EntryGroup

log = logging.getLogger(__name__)

_MAX_READ_BYTES = 4 * MIB
_AHEAD_STEP_BYTES = MIB
_AHEAD_STEP_ENTRIES = 500
"""Verifying them takes half a millisecond of the loop, however small they are."""
_AHEAD_OBJECT_BYTES = 4 * MIB
"""Bytes read ahead from an object. A row group is read and verified as a whole; the rest waits in a cache shared by all readers.
The next row group is read late, because it is as large."""
_MAX_STREAMS = 64
"""Readers of one topic whose next read is anticipated; beyond that, the least recently active one is forgotten."""
_STREAM_IDLE_S = 5.0

ReadKey = tuple[Position, int, int]


class CatchUpReads:
    """The catch-up reads of one topic."""

    def __init__(
        self, topic: str, copies: StoredCopies, ledgers: LedgerList, budget: CatchUpBudget, settings: ManagedLedgerSettings
    ) -> None:
        self._topic = topic
        self._copies = copies
        self._ledgers = ledgers
        self._budget = budget
        self._settings = settings
        self._tasks = TaskOwner(f"catch-up {topic}")
        self._flights: SingleFlight[ReadKey, list[EntryGroup]] = SingleFlight(f"reads {topic}", self._closed_error)
        self._streams: OrderedDict[Position, _Stream] = OrderedDict()  # by where they continue, least recently used first
        self._reading: dict[int, int] = {}  # reads under way by ledger id
        self.reads = 0
        self.read_bytes = 0

    def __repr__(self) -> str:
        return f"<CatchUpReads {len(self._flights)} under way, {len(self._streams)} streams, {self.read_bytes} B read>"

    async def read(self, position: Position, *, max_entries: int, max_bytes: int) -> list[EntryGroup]:
        """Read from exactly this existing entry on: at least one entry, never past the last confirmed one.

        Raises LedgerError, SegmentError, MetadataError (retriable or not).
        """
        return await self._flights.run((position, max_entries, min(max_bytes, _MAX_READ_BYTES)), self._read)

    def is_reading(self, ledger_id: int) -> bool:
        return ledger_id in self._reading

    def forget(self, ledger_id: int) -> None:
        """Drop what is known about a ledger that has been closed, or leaves the chain."""
        self._copies.forget(ledger_id)

    def drop_idle(self, idle_s: float = _STREAM_IDLE_S) -> None:
        """Drop what was read ahead and not fetched (rule 4). Called periodically, and when memory runs short."""
        if self._streams:
            oldest_allowed = asyncio.get_running_loop().time() - idle_s
            for position in [position for position, stream in self._streams.items() if stream.used_at < oldest_allowed]:
                self._drop(self._streams.pop(position))
        if not self._streams:
            self._budget.holders.pop(self, None)

    async def aclose(self) -> None:
        await self._flights.aclose()
        await self._tasks.aclose()
        while self._streams:
            self._drop(self._streams.popitem()[1])
        self._budget.holders.pop(self, None)
        self._copies.clear()

    async def _read(self, key: ReadKey) -> list[EntryGroup]:
        position, max_entries, max_bytes = key
        stream = self._streams.pop(position, None)
        continues = stream is not None
        if stream is None:
            stream = _Stream(position)
        try:
            if not stream.groups and stream.filling is not None:
                await asyncio.shield(stream.filling)
            if stream.groups and not _begins_at(stream.groups[0], position):
                self._drop(stream)  # rule 5
                stream = _Stream(position)
            groups = self._take(stream, max_entries, max_bytes)
            if not groups:
                await self._budget.take(max_bytes)
                try:
                    groups = await self._fetch(position, max_entries, max_bytes)
                finally:
                    self._budget.give_back(max_bytes)
                stream.end = self._after(groups)
        except BaseException:
            self._drop(stream)
            raise
        self._remember(stream, self._after(groups))
        if continues:
            self._read_ahead(stream)
        return groups

    def _take(self, stream: _Stream, max_entries: int, max_bytes: int) -> list[EntryGroup]:
        """Take entries from what was read ahead."""
        taken: list[EntryGroup] = []
        while stream.groups and max_entries > 0:
            group = stream.groups[0]
            front = front_of(group, max_entries, max_bytes, at_least_one=not taken)
            if front is None:
                break
            if front is group:
                stream.groups.popleft()
            else:
                stream.groups[0] = group.slice(front.last_entry_id + 1, group.last_entry_id)
            taken.append(front)
            max_entries -= len(front.ends)
            max_bytes -= len(front.data)
            stream.size_bytes -= len(front.data)
            self._give_back_object(stream, len(front.data))
            self._budget.give_back(len(front.data))
        return taken

    def _remember(self, stream: _Stream, next_position: Position) -> None:
        stream.used_at = asyncio.get_running_loop().time()
        if next_position in self._streams:  # another reader is there: what was read ahead for it serves both
            self._drop(stream)
            return
        self._streams[next_position] = stream
        self._budget.holders[self] = None
        if len(self._streams) > _MAX_STREAMS:
            self._drop(self._streams.popitem(last=False)[1])

    def _read_ahead(self, stream: _Stream) -> None:
        low_bytes = self._settings.read_ahead_bytes // 4 if self._copies.is_object(stream.end.ledger_id) else self._room_for_step
        if stream.filling is None and not stream.dropped and stream.size_bytes <= low_bytes:
            stream.filling = self._tasks.start(self._fill(stream), name="read-ahead")

    @property
    def _room_for_step(self) -> int:
        """Bytes read ahead up to which the next step is read from bookies. Several steps in a row would delay publishing: they take
        the interpreter, with the threads that read blocks, from the thread of a journal in the same process."""
        limit_bytes = self._settings.read_ahead_bytes
        return max(limit_bytes // 2, limit_bytes - _AHEAD_STEP_BYTES)

    async def _fill(self, stream: _Stream) -> None:
        try:
            while self._ledgers.is_valid(stream.end):
                from_object = self._copies.is_object(stream.end.ledger_id)
                if stream.size_bytes > (self._settings.read_ahead_bytes if from_object else self._room_for_step):
                    return
                if from_object:
                    went_on = await self._fill_from_object(stream)
                else:
                    went_on = await self._fill_from_bookies(stream)
                if not went_on:
                    return
                if stream.dropped:
                    self._drop(stream)
                    return
                await asyncio.sleep(0)  # a bookie in this process answers from memory, without a pause
        except CepheidError as error:
            log.info("read_ahead.ended", extra={"topic": self._topic, "position": str(stream.end), "error": str(error)})
        finally:
            stream.filling = None

    async def _fill_from_bookies(self, stream: _Stream) -> bool:
        """False: there is no memory for it."""
        if not self._budget.take_nowait(_AHEAD_STEP_BYTES):
            return False
        try:
            groups = await self._fetch(stream.end, _AHEAD_STEP_ENTRIES, _AHEAD_STEP_BYTES)
        finally:
            self._budget.give_back(_AHEAD_STEP_BYTES)
        self._put(stream, groups)
        return True

    async def _fill_from_object(self, stream: _Stream) -> bool:
        if not self._budget.take_ahead_of_object(_AHEAD_OBJECT_BYTES):
            return False
        try:
            groups = await self._fetch(stream.end, _AHEAD_OBJECT_BYTES, _AHEAD_OBJECT_BYTES)
        finally:
            self._budget.give_back(_AHEAD_OBJECT_BYTES)
            self._budget.give_back_object(_AHEAD_OBJECT_BYTES)
        object_bytes = self._put(stream, groups)
        stream.object_bytes += object_bytes
        self._budget.object_bytes += object_bytes
        return True

    def _put(self, stream: _Stream, groups: list[EntryGroup]) -> int:
        size_bytes = sum(len(group.data) for group in groups)
        stream.groups += groups
        stream.size_bytes += size_bytes
        stream.end = self._after(groups)
        self._budget.charge(size_bytes)
        return size_bytes

    def _give_back_object(self, stream: _Stream, size_bytes: int) -> None:
        given = min(stream.object_bytes, size_bytes)
        stream.object_bytes -= given
        self._budget.give_back_object(given)

    def _drop(self, stream: _Stream) -> None:
        stream.dropped = True
        self._give_back_object(stream, stream.object_bytes)
        self._budget.give_back(stream.size_bytes)
        stream.size_bytes = 0
        stream.groups.clear()

    async def _fetch(self, position: Position, max_entries: int, max_bytes: int) -> list[EntryGroup]:
        ledger_id, first = position
        count = self._ledgers.entries_of(ledger_id)
        if count is None or not 0 <= first < count:
            raise EntryTrimmedError(f"{self._topic}: entry {position} left the chain while it was about to be read")
        self._reading[ledger_id] = self._reading.get(ledger_id, 0) + 1
        try:
            groups = await self._copies.read(ledger_id, first, min(count, first + max_entries) - 1, max_bytes=max_bytes)
        finally:
            self._reading[ledger_id] -= 1
            if not self._reading[ledger_id]:
                del self._reading[ledger_id]
        self.reads += 1
        self.read_bytes += sum(len(group.data) for group in groups)
        return groups

    def _after(self, groups: list[EntryGroup]) -> Position:
        last = groups[-1]
        return self._ledgers.next_position(Position(last.ledger_id, last.last_entry_id))

    def _closed_error(self) -> ManagedLedgerClosedError:
        return ManagedLedgerClosedError(f"{self._topic} was closed while it was read", topic=self._topic)


def _begins_at(group: EntryGroup, position: Position) -> bool:
    return (group.ledger_id, group.first_entry_id) == position


class _Stream:
    """One reader's progress through old entries, and what was read ahead of it."""

    __slots__ = ("dropped", "end", "filling", "groups", "object_bytes", "size_bytes", "used_at")

    def __init__(self, end: Position) -> None:
        self.end = end  # the entry after `groups`
        self.groups: deque[EntryGroup] = deque()
        self.size_bytes = 0
        self.object_bytes = 0  # of these, what is of an object
        self.filling: asyncio.Task[None] | None = None
        self.used_at = 0.0
        self.dropped = False
