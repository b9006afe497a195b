"""Counts exactly what a cursor has not acknowledged of a topic, in entries, messages and bytes.

    chain   [5: 3 entries, 40 messages, 9 kB] [8: …] [9: being written]      recorded when a ledger ends
    cursor         5:1 ■ mark-delete           8:4 ■ hole, 8:7 ◧ half a batch
    unacknowledged = 5:2 to the end of 5           LedgerCounts of 5, from 5:2 on        in memory if this opening appended it,
                   + 8 − 8:4 − part of 8:7         LedgerCounts of 8, from 8:4 on        else read back, and kept within a budget
                   + 9

Rules:
1. What was appended since the topic was opened is counted when it is confirmed; nothing is read for it.
2. Entries are read back only for callers that ask for exact figures; this never delays a publish, and shares the budget of
   catch-up reads.
3. The memory of all topics together is bounded (`CountBudget`): the least recently used counts are dropped, and read back on
   demand.
4. A ledger with as many messages as entries has one in each: then bytes need the header of one entry (its cumulative length).
5. An entry whose metadata cannot be parsed counts as one message, as in dispatch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import attrgetter, sub

from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.count_budget import CountBudget
from cepheid_managed_ledger.ended_totals import EndedTotals
from cepheid_managed_ledger.errors import EntryTrimmedError
from cepheid_managed_ledger.ledger_counts import Amount, LedgerCounts
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.ledger_part import LedgerPart
from cepheid_managed_ledger.position_numbers import PositionNumbers
from cepheid_metadata import Chain, Position
from cepheid_rpc import HEADER_BYTES, EntryGroup
from cepheid_wire import BadTailError, count_messages

_CHARGE_BYTES = 2048  # growth of a ledger before it is reported to the budget
_READ_ENTRIES = 2_000  # parsed in one go: about 2 ms of the loop
_READ_BYTES = 1 << 20
_SYNC_HOLES = 5_000  # summed in one go: under 1 ms of the loop
_NO_LEDGER = -1
_LEDGER_ID = attrgetter("ledger_id")

Read = Callable[[Position, int, int], Awaitable[list[EntryGroup]]]
"""(first entry, max entries, max bytes)"""


class MessageCounts:
    """The counts of one topic. `recorded`: messages of closed ledgers in the chain's record; `read`: reads entries from storage;
    `lengths`: payload bytes of ledgers up to and including an entry, shared by all topics."""

    def __init__(
        self,
        ledgers: LedgerList,
        recorded: Callable[[], Mapping[int, int]],
        read: Read,
        budget: CountBudget,
        lengths: PositionNumbers,
    ) -> None:
        self._ledgers = ledgers
        self._recorded = recorded
        self._read = read
        self._budget = budget
        self._open_id = ledgers.last_ledger_id if ledgers.last_is_open else _NO_LEDGER
        self._open = LedgerCounts()
        self._open_messages = 0
        self._uncharged = 0  # entries of the open ledger since it was last charged
        self._counts: dict[int, LedgerCounts] = {self._open_id: self._open}
        self._totals: dict[int, int] = {}  # messages of closed ledgers that the record does not have
        self._ended: EndedTotals | None = None  # None: to be computed again
        self._lengths = lengths
        self._loading = asyncio.Lock()
        self.read_entries = 0

    def __repr__(self) -> str:
        return f"<MessageCounts of ledgers {list(self._counts)}, {self._open_messages} messages in {self._open_id}>"

    # Appending

    def on_confirmed(self, group: EntryGroup, messages: Sequence[int] | None) -> None:
        """Count a confirmed group. `messages` in each entry; None: one."""
        if group.ledger_id != self._open_id:
            self._start_ledger(group.ledger_id)
        ends = group.ends
        count = len(ends)
        total = count if messages is None else sum(messages)
        if total == count:
            messages = None
        if count == 1:
            self._open.append((ends[0] - HEADER_BYTES,), messages)
        else:
            self._open.append(_sizes(group), messages)
        self._open_messages += total
        self._uncharged += count
        if self._uncharged * 4 >= _CHARGE_BYTES:
            self._uncharged = 0
            self._budget.charge(self, self._open_id, self._open.cost_bytes)

    def _start_ledger(self, ledger_id: int) -> None:
        self._budget.charge(self, self._open_id, self._open.cost_bytes)
        self._open_id, self._open, self._open_messages, self._uncharged = ledger_id, LedgerCounts(), 0, 0
        self._counts[ledger_id] = self._open

    def annotate(self, chain: Chain) -> Chain:
        """Return the chain with the messages of its closed ledgers, where they are known."""
        before = chain.messages or {}
        gone = before.keys() - set(map(_LEDGER_ID, chain.ledgers))
        counted = self._newly_counted(chain, before)
        if not gone and not counted:
            return chain
        known = {ledger_id: messages for ledger_id, messages in before.items() if ledger_id not in gone}
        return chain.replace(messages={**known, **counted} or None)

    def _newly_counted(self, chain: Chain, before: Mapping[int, int]) -> dict[int, int]:
        """Return messages of closed ledgers missing in the record. A chain may be long, and few of its ledgers are counted."""
        wanted = {ledger_id for ledger_id in (self._open_id, *self._totals) if ledger_id not in before}
        counted: dict[int, int] = {}
        for ledger in reversed(chain.ledgers):
            if not wanted:
                break
            if ledger.ledger_id not in wanted:
                continue
            wanted.remove(ledger.ledger_id)
            messages = self._counted(ledger.ledger_id, ledger.entries) if ledger.entries else None
            if messages is not None:
                counted[ledger.ledger_id] = messages
        return counted

    def _counted(self, ledger_id: int, entries: int) -> int | None:
        """Return the messages of a closed ledger; None: not all its entries are counted.

        A ledger may end after the last entry that was answered: those appends failed, and are stored.
        """
        if ledger_id == self._open_id:
            return self._open_messages if self._open.end == entries else None
        return self._totals.get(ledger_id)

    # Forgetting

    def forget(self, ledger_id: int) -> None:
        """Drop a ledger's counts, for the budget. A caller that is summing them up keeps its own reference."""
        if ledger_id == self._open_id:
            self._open = self._counts[ledger_id] = LedgerCounts(self._open.end)
        else:
            self._counts.pop(ledger_id, None)

    def drop_trimmed(self) -> None:
        """Drop the counts of ledgers that have left the chain."""
        self._ended = None
        for ledger_id in [ledger_id for ledger_id in self._counts if ledger_id not in self._ledgers]:
            if ledger_id != self._open_id:
                del self._counts[ledger_id]
                self._budget.charge(self, ledger_id, 0)
        self._totals = {ledger_id: total for ledger_id, total in self._totals.items() if ledger_id in self._ledgers}

    def close(self) -> None:
        for ledger_id in self._counts:
            self._budget.charge(self, ledger_id, 0)
        self._counts.clear()

    # Queries

    def unacknowledged_known(self, ack_set: AckSet) -> Amount | None:
        """Return the amount from memory, quickly; None: `unacknowledged` would have to read, or to sum up for long."""
        if ack_set.acked_entries > _SYNC_HOLES:
            return None
        amount, parts = self._parts(ack_set, copied=False)
        for part in parts:
            known = self._known(part)
            if known is None:
                return None
            amount = amount.plus(known)
        return amount

    async def unacknowledged(self, ack_set: AckSet) -> Amount:
        """Return the amount at one moment of this call. Raises LedgerError, MetadataError, ManagedLedgerError if a read fails."""
        while True:
            try:
                amount, parts = self._parts(ack_set, copied=True)  # the moment that counts
                for part in parts:
                    amount = amount.plus(await self._of(part))
                return amount
            except EntryTrimmedError:
                continue

    async def position_leaving(self, limit_bytes: int) -> Position:
        """Return the earliest position with at most `limit_bytes` after it. Raises as `unacknowledged` does."""
        while True:
            try:
                return await self._position_leaving(limit_bytes)
            except EntryTrimmedError:
                continue

    async def _position_leaving(self, limit_bytes: int) -> Position:
        after_bytes = self._ledgers.total_bytes
        for ledger_id, entries, size_bytes in list(self._ledgers.from_ledger(0)):
            after_bytes -= size_bytes
            if after_bytes > limit_bytes:
                continue
            wanted = after_bytes + size_bytes - limit_bytes  # bytes of this ledger before the gap, at least
            low, high = 0, entries  # entries before the gap
            while low < high:
                middle = (low + high) // 2
                if await self._length_before(ledger_id, middle, entries, size_bytes) >= wanted:
                    high = middle
                else:
                    low = middle + 1
            return Position(ledger_id, low - 1)
        return self._ledgers.last_position

    async def _length_before(self, ledger_id: int, entry_id: int, entries: int, size_bytes: int) -> int:
        counts = self._counts.get(ledger_id)
        if counts is not None and counts.first <= entry_id:
            return size_bytes - counts.between(entry_id, entries).size_bytes
        return await self._length_at(Position(ledger_id, entry_id - 1)) if entry_id else 0

    async def bytes_after(self, position: Position) -> int:
        """Return the bytes of all entries after this position, acknowledged or not; reads at most one header.

        Raises as `unacknowledged` does.
        """
        while True:
            known = self.bytes_after_known(position)
            if known is not None:
                return known
            try:
                await self._length_at(position)  # kept, so that it is known from now on
            except EntryTrimmedError:
                continue

    def bytes_after_known(self, position: Position) -> int | None:
        """Return `bytes_after` from memory; None: a header would have to be read."""
        ledgers, (ledger_id, start) = self._ledgers, (position.ledger_id, position.entry_id + 1)
        behind_bytes = self._totals_of_ended().behind(ledger_id).size_bytes
        if ledgers.last_is_open and ledger_id < ledgers.last_ledger_id:
            behind_bytes += ledgers.last_size_bytes
        entries = ledgers.entries_of(ledger_id)
        if entries is None or start >= entries:
            return behind_bytes
        counts = self._counts.get(ledger_id)
        if start <= 0:
            return behind_bytes + ledgers.size_of(ledger_id)
        if counts is not None and counts.first <= start:
            return behind_bytes + counts.between(start, entries).size_bytes
        length = self._lengths.get(position)
        return None if length is None else behind_bytes + ledgers.size_of(ledger_id) - length

    def _totals_of_ended(self) -> EndedTotals:
        if self._ended is None:
            self._ended = EndedTotals(
                (ledger_id, entries, self._messages_of(ledger_id, entries), size_bytes)
                for ledger_id, entries, size_bytes in self._ledgers.from_ledger(0)
                if self._ledgers.is_ended(ledger_id)
            )
        return self._ended

    def _messages_of(self, ledger_id: int, entries: int) -> int | None:
        recorded = self._recorded().get(ledger_id)
        return self._counted(ledger_id, entries) if recorded is None else recorded

    def _parts(self, ack_set: AckSet, *, copied: bool) -> tuple[Amount, list[LedgerPart]]:
        """Split what is unacknowledged into the sum of untouched ledgers and the parts that must be looked at one by one."""
        ledgers, ended = self._ledgers, self._totals_of_ended()
        mark_ledger_id, mark_entry_id = ack_set.mark_delete
        amount = ended.behind(mark_ledger_id)
        uncounted = ended.uncounted_behind(mark_ledger_id)
        parts: list[LedgerPart] = []
        for ledger_id in dict.fromkeys((mark_ledger_id, *ack_set.acked, *ack_set.batches, *uncounted, ledgers.last_ledger_id)):
            entries = ledgers.entries_of(ledger_id)
            if entries is None or ledger_id < mark_ledger_id:
                continue
            start = 0
            if ledger_id == mark_ledger_id:
                start = min(mark_entry_id + 1, entries)
            else:
                amount = amount.minus(ended.of(ledger_id))
            if start == entries:
                continue
            acked, batches = ack_set.acked.get(ledger_id), ack_set.batches.get(ledger_id, {})
            if copied:
                acked, batches = None if acked is None else acked.copy(), dict(batches)
            messages = self._messages_of(ledger_id, entries)
            parts.append(LedgerPart(ledger_id, start, entries, messages, ledgers.size_of(ledger_id), acked, batches))
        return amount, parts

    def _known(self, part: LedgerPart) -> Amount | None:
        counts = self._counts.get(part.ledger_id)
        needed = part.first_needed
        if needed is None:
            assert part.messages is not None
            return Amount(part.entries, part.messages, part.size_bytes)
        if counts is not None and counts.first <= needed:
            self._budget.note_used(self, part.ledger_id)
            holes = part.holes_of(counts, part.holes())
            return part.whole(counts).minus(holes)
        if part.is_single_run and (length := self._lengths.get(part.before_start)) is not None:
            return Amount(part.entries - part.start, part.entries - part.start, part.size_bytes - length)
        return None

    async def _of(self, part: LedgerPart) -> Amount:
        if part.acked is None or len(part.acked) <= _SYNC_HOLES:
            known = self._known(part)
            if known is not None:
                return known
            if part.is_single_run:
                length = await self._length_at(part.before_start)
                return Amount(part.entries - part.start, part.entries - part.start, part.size_bytes - length)
        counts = await self._load(part)
        amount, holes = part.whole(counts), part.holes()
        for start in range(0, max(1, len(holes)), _SYNC_HOLES):
            amount = amount.minus(part.holes_of(counts, holes[start : start + _SYNC_HOLES], batches=start == 0))
            await asyncio.sleep(0)
        return amount

    # Reading back

    async def _load(self, part: LedgerPart) -> LedgerCounts:
        """Load at least the entries needed of a ledger; the caller may use them after they were dropped here."""
        ledger_id, needed = part.ledger_id, part.first_needed or 0
        async with self._loading:
            counts = self._counts.get(ledger_id)
            if counts is not None and counts.first <= needed:
                return counts
            before = LedgerCounts(needed)
            while (end := self._known_from(part)) > before.end:
                max_entries = min(_READ_ENTRIES, end - before.end)
                for group in await self._read(Position(ledger_id, before.end), max_entries, _READ_BYTES):
                    before.append(_sizes(group), _messages(group))
                    self.read_entries += len(group)
                await asyncio.sleep(0)  # let other tasks run: queries answered from memory do not wait
            return self._keep(part, before)

    def _known_from(self, part: LedgerPart) -> int:
        """Return the first entry in memory, or the ledger's end. It may grow, as counts may be dropped at any time."""
        counts = self._counts.get(part.ledger_id)
        return part.entries if counts is None else min(counts.first, part.entries)

    def _keep(self, part: LedgerPart, before: LedgerCounts) -> LedgerCounts:
        ledger_id = part.ledger_id
        counts = self._counts.get(ledger_id)
        if counts is None:
            counts = self._counts[ledger_id] = before
        elif counts.first == before.end:
            counts.prepend(before)
        else:
            return before  # the open ledger's counts were dropped, and start further on now
        if counts.first == 0 and ledger_id != self._open_id:
            self._totals[ledger_id] = counts.between(0, counts.end).messages
            self._ended = None
        self._budget.charge(self, ledger_id, counts.cost_bytes)
        return counts

    async def _length_at(self, position: Position) -> int:
        """Return the payload bytes of a ledger up to and including this entry."""
        if (known := self._lengths.get(position)) is not None:
            return known
        (group, *_) = await self._read(position, 1, 1)
        return self._lengths.keep(position, group.header(position.entry_id).length)


def _sizes(group: EntryGroup) -> list[int]:
    ends = group.ends
    return [ends[0] - HEADER_BYTES, *[size - HEADER_BYTES for size in map(sub, ends[1:], ends)]]


def _messages(group: EntryGroup) -> list[int] | None:
    """Return the messages in each entry; None: one in each."""
    counts: list[int] = []
    for payload in group.payloads():
        try:
            counts.append(count_messages(payload))
        except BadTailError:
            counts.append(1)
    return None if sum(counts) == len(counts) else counts
