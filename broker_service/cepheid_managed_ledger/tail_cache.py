"""The recent entries of all topics, in memory, under one budget.

    topic A   │ 7:0..9 │ 7:10..10 │ 7:11..40 │ ◄── added on completion          one FIFO over all topics, which evicts
    topic B            │ 9:0..2 │ 12:0..8 │  ◄──                                the oldest group first

Rules:
1. Only confirmed groups are added, in the topic's order; a topic's groups have no gap between them, up to its last entry.
2. Over the budget the oldest group of the process is evicted, even if it is needed: a slow consumer loses its own old entries
   first, never another topic's recent ones. That limits what pins can hold.
3. Within the budget a group is evicted once it is older than `keep_s`, unless an active consumer of its topic needs it (a pin).
4. A topic whose entries are not read while `idle_bytes` pass is not cached until a client reads at its end again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cepheid_managed_ledger.settings import MIB
from cepheid_metadata import Position
from cepheid_rpc import EntryGroup

_GROUP_OVERHEAD_BYTES = 400  # group, key, queue entry; measured with sys.getsizeof
_ENTRY_OVERHEAD_BYTES = 40  # one int in `ends`
_MAX_PINS_SEEN = 1_000  # per sweep, so that it stays short; later ones wait for their consumer


@dataclass(frozen=True, slots=True)
class TailCacheStatistics:
    used_bytes: int
    limit_bytes: int
    groups: int
    topics: int
    hits: int
    misses: int
    evicted_by_size: int
    evicted_by_age: int


class TailCache:
    """The tail cache of a process."""

    def __init__(self, limit_bytes: int, *, keep_s: float = 10.0, idle_bytes: int = 8 * MIB) -> None:
        assert limit_bytes > 0, f"a cache of {limit_bytes} bytes"
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.hits = self.misses = 0
        self.evicted_by_size = self.evicted_by_age = 0
        self.idle_bytes = idle_bytes
        self._keep_s = keep_s
        self._fifo: deque[tuple[float, TopicTail, int]] = deque()  # (when, topic, number of the group in its topic)
        self._topics = 0

    def __repr__(self) -> str:
        return f"<TailCache {self.used_bytes} of {self.limit_bytes} B, {self.hits} hits, {self.misses} misses>"

    def statistics(self) -> TailCacheStatistics:
        return TailCacheStatistics(
            self.used_bytes,
            self.limit_bytes,
            len(self._fifo),
            self._topics,
            self.hits,
            self.misses,
            self.evicted_by_size,
            self.evicted_by_age,
        )

    def open_tail(self, needed_from: Callable[[], Position | None]) -> TopicTail:
        """Return the tail of one topic. `needed_from`: where the slowest active consumer reads next; None: there is none."""
        self._topics += 1
        return TopicTail(self, needed_from)

    def close_tail(self, tail: TopicTail) -> None:
        tail.clear()
        self._topics -= 1

    def note(self, tail: TopicTail, number: int) -> None:
        """Record a group that a tail added, and evict until the budget is kept."""
        self._fifo.append((asyncio.get_running_loop().time(), tail, number))
        while self.used_bytes > self.limit_bytes:
            _, oldest, its_number = self._fifo.popleft()
            self.evicted_by_size += oldest.drop_through(its_number)

    def evict_old(self) -> None:
        """Evict groups older than `keep_s` that are not needed (rule 3). Called periodically; costs little when none is old."""
        fifo = self._fifo
        pinned: list[tuple[float, TopicTail, int]] = []
        oldest_allowed = asyncio.get_running_loop().time() - self._keep_s
        while fifo and fifo[0][0] < oldest_allowed and len(pinned) < _MAX_PINS_SEEN:
            item = fifo.popleft()
            _, tail, number = item
            if tail.is_needed(number):
                pinned.append(item)
            else:
                self.evicted_by_age += tail.drop_through(number)
        fifo.extendleft(reversed(pinned))


class TopicTail:
    """The cached end of one topic."""

    __slots__ = ("_base", "_cache", "_groups", "_head", "_keys", "_needed_from", "_unread_bytes")

    def __init__(self, cache: TailCache, needed_from: Callable[[], Position | None]) -> None:
        self._cache = cache
        self._needed_from = needed_from
        # Lists with a moving head: a search needs indexes, and those of a deque are slow in the middle.
        self._groups: list[EntryGroup | None] = []
        self._keys: list[tuple[int, int]] = []  # (ledger id, last entry id), rising
        self._head = 0
        self._base = 0  # number of the group at index 0: numbers are never reused
        self._unread_bytes = cache.idle_bytes + 1  # rule 4: nothing was read yet

    def __repr__(self) -> str:
        return f"<TopicTail {len(self)} groups>"

    def __len__(self) -> int:
        return len(self._groups) - self._head

    def add(self, group: EntryGroup, after: Position) -> None:
        """Add a confirmed group; `after` was the topic's last entry until now."""
        if self._unread_bytes > self._cache.idle_bytes:
            if self._head < len(self._groups):
                self.clear()
            return
        size = cost_of(group)
        self._unread_bytes += size
        if self._head < len(self._groups) and self._keys[-1] != after:
            self.clear()  # rule 1
        self._groups.append(group)
        self._keys.append((group.ledger_id, group.first_entry_id + len(group.ends) - 1))
        self._cache.used_bytes += size
        self._cache.note(self, self._base + len(self._groups) - 1)

    def read(self, position: Position, *, max_entries: int, max_bytes: int) -> list[EntryGroup] | None:
        """Return groups from exactly this entry on, about `max_bytes`, at least one entry; None: it is not cached."""
        self._unread_bytes = 0
        groups, keys = self._groups, self._keys
        index = len(keys) - 1
        if index < self._head or keys[index] < position:
            self._cache.misses += 1
            return None
        if index > self._head and keys[index - 1] >= position:  # otherwise it is in the last group, as for a reader that keeps up
            index = bisect_left(keys, position, lo=self._head)
        group = groups[index]
        assert group is not None
        ledger_id, entry_id = position
        if group.ledger_id != ledger_id or group.first_entry_id > entry_id:
            self._cache.misses += 1
            return None
        self._cache.hits += 1
        if group.first_entry_id < entry_id:
            group = group.slice(entry_id, group.last_entry_id)
        found: list[EntryGroup] = []
        while True:
            front = front_of(group, max_entries, max_bytes, at_least_one=not found)
            if front is None:
                return found
            found.append(front)
            max_entries -= len(front.ends)
            max_bytes -= len(front.data)
            index += 1
            # A group that was cut is the last: what did not fit precedes everything after it, however small that is.
            if front is not group or max_entries <= 0 or max_bytes <= 0 or index == len(groups):
                return found
            group = groups[index]
            assert group is not None

    def peek(self, position: Position) -> EntryGroup | None:
        """Return the group with exactly this entry. Not a reader's access: counts neither as a hit nor as interest (rule 4)."""
        index = bisect_left(self._keys, position, lo=self._head)
        group = self._groups[index] if index < len(self._groups) else None
        if group is None or group.ledger_id != position.ledger_id or group.first_entry_id > position.entry_id:
            return None
        return group

    def note_reader(self) -> None:
        """Note that a client reads at the end of the topic: the next entries will be needed (rule 4)."""
        self._unread_bytes = 0

    def is_needed(self, number: int) -> bool:
        index = number - self._base
        if index < self._head:
            return False
        needed_from = self._needed_from()
        return needed_from is not None and self._keys[index] >= needed_from

    def drop_through(self, number: int) -> int:
        """Drop the group of this number and all before it (rule 1). Return how many were dropped."""
        end = number - self._base + 1
        dropped = 0
        while self._head < end:
            group = self._groups[self._head]
            assert group is not None
            self._cache.used_bytes -= cost_of(group)
            self._groups[self._head] = None
            self._head += 1
            dropped += 1
        if self._head > 64 and self._head * 2 > len(self._groups):
            del self._groups[: self._head], self._keys[: self._head]
            self._base += self._head
            self._head = 0
        return dropped

    def clear(self) -> None:
        self.drop_through(self._base + len(self._groups) - 1)


def cost_of(group: EntryGroup) -> int:
    return len(group.data) + _GROUP_OVERHEAD_BYTES + _ENTRY_OVERHEAD_BYTES * len(group.ends)


def front_of(group: EntryGroup, max_entries: int, max_bytes: int, *, at_least_one: bool) -> EntryGroup | None:
    """Return as many whole entries from the group's start as fit both limits; None: not even one fits."""
    count = len(group.ends)
    if count <= max_entries and len(group.data) <= max_bytes:
        return group
    fits = min(max_entries, bisect_left(group.ends, max_bytes + 1))
    if fits <= 0:
        if not at_least_one:
            return None
        fits = 1
    return group.slice(group.first_entry_id, group.first_entry_id + fits - 1)
