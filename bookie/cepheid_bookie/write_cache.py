"""Entries admitted and not yet flushed: two halves, one fills while the other is written to the entry log.

    admit ──► active ──swap──► flushing ──index batch visible──► released
                 └────────┬────────┘
     lookup: active, then flushing, taken as one snapshot in one turn of the loop; an entry in neither is in the index, or nowhere

Groups are kept as received (no copy). Within a ledger they are sorted by first entry id; a search steps back as far as the longest
group of the ledger reaches, since re-sent groups may overlap earlier ones.

Rule 1: a half is released only when its blocks can be found in the index. A half whose flush fails stays `flushing`.
"""

from __future__ import annotations

from bisect import bisect_right, insort

from cepheid_rpc import EntryGroup

_GROUP_OVERHEAD_BYTES = 256  # approximate size of a group's objects and its place in the lists
_ENTRY_OVERHEAD_BYTES = 8


def cached_size(group: EntryGroup) -> int:
    """Return what a group counts against the limit: memory, not only payload, or tiny entries would exceed it."""
    return len(group.data) + _GROUP_OVERHEAD_BYTES + _ENTRY_OVERHEAD_BYTES * len(group.ends)


def _first(group: EntryGroup) -> int:
    return group.first_entry_id


class CachedLedger:
    """Groups of one ledger in one half of the cache."""

    __slots__ = ("groups", "last_entry_id", "longest")

    def __init__(self) -> None:
        self.groups: list[EntryGroup] = []
        self.last_entry_id = -1
        self.longest = 0

    def add(self, group: EntryGroup) -> None:
        first, count = group.first_entry_id, len(group.ends)
        if first > self.last_entry_id:
            self.groups.append(group)
            self.last_entry_id = first + count - 1
        else:  # sent again, or overtaken on another stream
            insort(self.groups, group, key=_first)
            self.last_entry_id = max(self.last_entry_id, first + count - 1)
        if count > self.longest:
            self.longest = count

    def find(self, entry_id: int) -> EntryGroup | None:
        """Return the group with this entry."""
        groups = self.groups
        for index in range(bisect_right(groups, entry_id, key=_first) - 1, -1, -1):
            group = groups[index]
            if group.last_entry_id >= entry_id:
                return group
            if group.first_entry_id + self.longest <= entry_id:
                return None
        return None

    def first_from(self, entry_id: int) -> int | None:
        """Return the smallest first id of a group that begins above `entry_id`."""
        index = bisect_right(self.groups, entry_id, key=_first)
        return self.groups[index].first_entry_id if index < len(self.groups) else None


class Half:
    """One half: the ledgers' groups and their size."""

    __slots__ = ("ledgers", "used_bytes")

    def __init__(self) -> None:
        self.ledgers: dict[int, CachedLedger] = {}
        self.used_bytes = 0

    def add(self, group: EntryGroup) -> None:
        ledger = self.ledgers.get(group.ledger_id)
        if ledger is None:
            ledger = self.ledgers[group.ledger_id] = CachedLedger()
        ledger.add(group)
        self.used_bytes += cached_size(group)

    def drop(self, ledger_id: int) -> None:
        """Forget a deleted ledger."""
        ledger = self.ledgers.pop(ledger_id, None)
        if ledger is not None:
            self.used_bytes -= sum(map(cached_size, ledger.groups))


class WriteCache:
    """The write cache, changed on the loop only (and by replay, before the bookie serves)."""

    def __init__(self, limit_bytes: int) -> None:
        self.half_bytes = limit_bytes // 2
        self.active = Half()
        self.flushing: Half | None = None

    def __repr__(self) -> str:
        return f"<WriteCache {self.active.used_bytes} B active, {self.flushing.used_bytes if self.flushing else 0} B flushing>"

    @property
    def used_bytes(self) -> int:
        return self.active.used_bytes + (self.flushing.used_bytes if self.flushing is not None else 0)

    @property
    def half_full(self) -> bool:
        """Whether the active half has reached its limit; soft by one group, which admits a group larger than a half."""
        return self.active.used_bytes >= self.half_bytes

    def add(self, group: EntryGroup) -> None:
        self.active.add(group)

    def swap(self) -> Half:
        """Return the filled half, which is being flushed from now on."""
        assert self.flushing is None, "one half is still being flushed"
        self.flushing, self.active = self.active, Half()
        return self.flushing

    def release(self) -> None:
        self.flushing = None

    def drop(self, ledger_id: int) -> None:
        """Hide a deleted ledger in both halves. A flush in progress has its own references; the index is cleaned after it."""
        self.active.drop(ledger_id)
        if self.flushing is not None:
            self.flushing.drop(ledger_id)

    def find(self, ledger_id: int, entry_id: int) -> EntryGroup | None:
        for ledger in self._of(ledger_id):
            if (group := ledger.find(entry_id)) is not None:
                return group
        return None

    def first_from(self, ledger_id: int, entry_id: int) -> int | None:
        """Return where the next cached entries above `entry_id` (itself not cached) begin."""
        starts = [start for ledger in self._of(ledger_id) if (start := ledger.first_from(entry_id)) is not None]
        return min(starts, default=None)

    def holds(self, ledger_id: int) -> bool:
        """Return whether any entry of the ledger is cached."""
        return bool(self._of(ledger_id))

    def last_entry_id(self, ledger_id: int) -> int:
        return max((ledger.last_entry_id for ledger in self._of(ledger_id)), default=-1)

    def _of(self, ledger_id: int) -> list[CachedLedger]:
        halves = (self.active,) if self.flushing is None else (self.active, self.flushing)
        return [ledger for half in halves if (ledger := half.ledgers.get(ledger_id)) is not None]
