"""The positions that a cursor has acknowledged: a pure core.

    5:0 5:1 5:2 | 8:0 8:1 8:2 8:3 …                  mark-delete 5:1: it and everything before is acknowledged
     ■   ■   □     ■   □   ■   ◧                      above it: one bitmap per ledger (8: {0, 2}), and 8:3 in part

A partly acknowledged batch is kept as the mask of its messages *not* acknowledged (bit i: message i), as in the protocol
(ack_set of PulsarApi.proto).

Rules:
1. The entry after the mark-delete position is never acknowledged: it would have moved the position. Runs cross the ends of ledgers.
2. Only existing entries are acknowledged; others are refused, not stored.
3. Only a reset, which creates a new set, takes an acknowledgement back. The mask of a batch only loses bits.
4. An entry is in a bitmap, or has a mask, or neither; it is never in either at or below the mark-delete position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import pack, unpack

from pyroaring import BitMap

from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_metadata import Position

MAX_BATCH_MESSAGES = 1 << 17
"""Messages in one entry. An entry has at most 5 MiB, a message in it at least 10 bytes of metadata and size; clients batch
1,000."""

MAX_BATCH_BITS = 1 << 27
"""Messages of all partly acknowledged batches of a cursor (16 MiB of masks): clients state the size of a batch."""

Batch = tuple[int, int]
"""(mask of messages not acknowledged, messages in the batch)."""


class AckSet:
    __slots__ = ("_acked", "_acked_entries", "_batch_bits", "_batches", "_ledgers", "mark_delete", "revision")

    def __init__(self, ledgers: LedgerList, mark_delete: Position) -> None:
        self._ledgers = ledgers
        self.mark_delete = mark_delete
        self.revision = 0  # counts changes, so that a save knows which state it saved
        self._acked: dict[int, BitMap] = {}
        self._acked_entries = 0
        self._batches: dict[int, dict[int, Batch]] = {}
        self._batch_bits = 0

    def __repr__(self) -> str:
        batches = sum(map(len, self._batches.values()))
        return f"<AckSet to {self.mark_delete}, {self._acked_entries} entries and parts of {batches} above>"

    @classmethod
    def starting_at(cls, ledgers: LedgerList, position: Position, unacked_words: Sequence[int] = ()) -> AckSet:
        """Return a set with everything before the entry acknowledged, and with `unacked_words` the messages whose bit is clear."""
        self = cls(ledgers, ledgers.previous_position(position))
        if unacked_words and ledgers.is_valid(position):
            self.acknowledge_messages(position, mask_of(unacked_words), 64 * len(unacked_words))
        return self

    @classmethod
    def restored(
        cls,
        ledgers: LedgerList,
        mark_delete: Position,
        acked: Iterable[tuple[int, BitMap]],
        batches: Iterable[tuple[Position, Batch]],
    ) -> AckSet:
        """Return the set of a saved state.

        Ledgers that the chain does not have any more are left out. A mark-delete position above the end is moved back to the end,
        so that nothing written later is acknowledged.
        """
        self = cls(ledgers, ledgers.normalise(mark_delete))
        for ledger_id, entries in acked:
            count = ledgers.entries_of(ledger_id)
            if count is not None:
                self._add(ledger_id, entries & _span(self._floor(ledger_id) + 1, count))
        for position, (mask, messages) in batches:
            if ledgers.is_valid(position) and not self.is_acknowledged(position):
                self._batches.setdefault(position.ledger_id, {})[position.entry_id] = (mask, messages)
                self._batch_bits += messages
        self._absorb()
        self.revision = 0
        return self

    # Acknowledging

    def acknowledge(self, positions: Iterable[Position]) -> list[Position]:
        """Acknowledge whole entries. Return those refused because they do not exist (in this topic, or not yet)."""
        by_ledger: dict[int, list[int]] = {}
        for ledger_id, entry_id in positions:
            entries = by_ledger.get(ledger_id)
            if entries is None:
                by_ledger[ledger_id] = [entry_id]
            else:
                entries.append(entry_id)
        refused: list[Position] = []
        for ledger_id, entries in by_ledger.items():
            count = self._ledgers.entries_of(ledger_id)
            floor = self._floor(ledger_id)
            if count is None or min(entries) <= floor or max(entries) >= count:
                refused += [Position(ledger_id, entry) for entry in entries if entry > floor and (count is None or entry >= count)]
                refused += [Position(ledger_id, entry) for entry in entries if entry < 0]
                entries = [entry for entry in entries if entry > floor and count is not None and entry < count]
            if entries and not self._extend_run(ledger_id, entries):
                self._add(ledger_id, entries)
        self._absorb()
        return refused

    def acknowledge_cumulative(self, position: Position) -> bool:
        """Acknowledge everything up to this entry. False: refused, there is no such entry."""
        if not (self._ledgers.is_valid(position) or (position.ledger_id in self._ledgers and position.entry_id == -1)):
            return self._is_trimmed(position)
        if self._ledgers.rank(position) > self._ledgers.rank(self.mark_delete):
            self._move_to(position)
            self._absorb()
        return True

    def acknowledge_messages(self, position: Position, unacked_mask: int, messages: int) -> bool:
        """Acknowledge the messages of a batch whose bit is not set.

        False: refused, because there is no such entry or batch, or too many batches are partly acknowledged.
        """
        if not 0 < messages <= MAX_BATCH_MESSAGES:
            return False
        if not self._ledgers.is_valid(position):
            return self._is_trimmed(position)
        if self.is_acknowledged(position):
            return True
        known = self.unacked_messages(position)
        before, messages = ((1 << messages) - 1, messages) if known is None else known
        after = before & unacked_mask
        if after == 0:
            self._add(position.ledger_id, (position.entry_id,))
            self._absorb()
        elif after != before:
            if known is None:
                if self._batch_bits + messages > MAX_BATCH_BITS:
                    return False
                self._batch_bits += messages
            self._batches.setdefault(position.ledger_id, {})[position.entry_id] = (after, messages)
            self.revision += 1
        return True

    def acknowledge_messages_cumulative(self, position: Position, unacked_mask: int, messages: int) -> bool:
        """Acknowledge every entry before this one, and the messages of it whose bit is not set. False: refused."""
        if not (0 < messages <= MAX_BATCH_MESSAGES and self._ledgers.is_valid(position)):
            return self._is_trimmed(position)
        return self.acknowledge_cumulative(self._ledgers.previous_position(position)) and self.acknowledge_messages(
            position, unacked_mask, messages
        )

    def skip_to(self, position: Position) -> None:
        """Move the mark-delete position to `position` if it is further on, or the same gap: the chain lost what is before."""
        if position > self.mark_delete and self._ledgers.rank(position) >= self._ledgers.rank(self.mark_delete):
            self._move_to(position)
            self._absorb()

    # Queries

    @property
    def acked_entries(self) -> int:
        """Acknowledged entries above the mark-delete position."""
        return self._acked_entries

    @property
    def backlog_entries(self) -> int:
        """Entries that are not, or only partly, acknowledged."""
        return self._ledgers.total_entries - self._ledgers.rank(self.mark_delete) - self._acked_entries

    @property
    def acked(self) -> dict[int, BitMap]:
        """Acknowledged entries by ledger, to be saved; the caller must not change them."""
        return self._acked

    @property
    def batches(self) -> dict[int, dict[int, Batch]]:
        return self._batches

    def is_acknowledged(self, position: Position) -> bool:
        if position <= self.mark_delete:
            return True
        entries = self._acked.get(position.ledger_id)
        return entries is not None and position.entry_id in entries

    def unacked_messages(self, position: Position) -> Batch | None:
        """Return the batch's mask; None: the batch is not partly acknowledged."""
        batches = self._batches.get(position.ledger_id)
        return None if batches is None else batches.get(position.entry_id)

    def first_unacknowledged(self) -> Position:
        return self._ledgers.next_position(self.mark_delete)  # rule 1

    def unacknowledged_from(self, position: Position) -> Position:
        """Return the first entry at or after `position` that is not, or only partly, acknowledged; it may not be written yet."""
        position = self._ledgers.next_position(self._ledgers.previous_position(position))
        while True:
            if position <= self.mark_delete:
                return self.first_unacknowledged()
            acked = self._acked.get(position.ledger_id)
            if acked is None or position.entry_id not in acked:
                return position
            position = self._ledgers.next_position(Position(position.ledger_id, _end_of_run(acked, position.entry_id)))

    def unacknowledged_runs(self, ledger_id: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the runs of entries in `first..last` (inclusive) of a ledger that are not, or only partly, acknowledged."""
        first = max(first, self._floor(ledger_id) + 1)
        if first > last:
            return []
        entries = self._acked.get(ledger_id)
        if entries is None or not entries.range_cardinality(first, last + 1):
            return [(first, last)]
        runs: list[tuple[int, int]] = []
        run_first = first
        for entry in entries & BitMap(range(first, last + 1)):
            if entry > run_first:
                runs.append((run_first, entry - 1))
            run_first = entry + 1
        if run_first <= last:
            runs.append((run_first, last))
        return runs

    def nth_unacknowledged(self, number: int) -> Position | None:
        """Return the entry with `number - 1` unacknowledged ones before it, `number` >= 1. None: there are fewer."""
        assert number >= 1
        if number > self.backlog_entries:
            return None
        ledgers = self._ledgers
        start = ledgers.rank(self.mark_delete)
        low, high = start + 1, ledgers.total_entries
        while low < high:
            middle = (low + high) // 2
            if middle - start - self._acked_through(ledgers.at_rank(middle)) < number:
                low = middle + 1
            else:
                high = middle
        return ledgers.at_rank(low)

    def _acked_through(self, position: Position) -> int:
        """Return the acknowledged entries above the mark-delete position, up to this one."""
        return sum(
            len(acked) if ledger_id < position.ledger_id else acked.rank(position.entry_id)
            for ledger_id, acked in self._acked.items()
            if ledger_id <= position.ledger_id
        )

    def unacknowledged_among(self, ledger_id: int, entries: BitMap) -> BitMap:
        """Return which of these entries of a ledger exist and are not, or only partly, acknowledged."""
        there = entries & _span(self._floor(ledger_id) + 1, self._ledgers.entries_of(ledger_id) or 0)
        acked = self._acked.get(ledger_id)
        return there if acked is None else there - acked

    # Changing

    def _floor(self, ledger_id: int) -> int:
        """Return the last entry of this ledger at or below the mark-delete position; -1: none."""
        mark_ledger_id, mark_entry_id = self.mark_delete
        if ledger_id == mark_ledger_id:
            return mark_entry_id
        return -1 if ledger_id > mark_ledger_id else (1 << 62)

    def _is_trimmed(self, position: Position) -> bool:
        """Whether the entry's ledger left the chain after it was acknowledged: a late acknowledgement, which changes nothing."""
        return position.ledger_id not in self._ledgers and position <= self.mark_delete

    def _add(self, ledger_id: int, entries: Iterable[int]) -> None:
        acked = self._acked.get(ledger_id)
        before = 0
        if acked is None:
            acked = self._acked[ledger_id] = BitMap(entries)
        else:
            before = len(acked)
            acked.update(entries)
        added = len(acked) - before
        if not acked:
            del self._acked[ledger_id]
        if not added:
            return
        self._acked_entries += added
        self.revision += 1
        batches = self._batches.get(ledger_id)
        if batches:
            candidates = batches if len(batches) < added else entries
            self._forget_batches(ledger_id, [entry for entry in candidates if entry in batches and entry in acked])

    def _extend_run(self, ledger_id: int, entries: list[int]) -> bool:
        """Acknowledge the entries right after the mark-delete position without a bitmap, for a consumer that acknowledges in order.

        False: they are not those.
        """
        first, last = entries[0], entries[-1]
        if self.mark_delete != (ledger_id, first - 1) or last - first != len(entries) - 1:
            return False
        if len(entries) > 1 and entries != list(range(first, last + 1)):
            return False
        self._move_to(Position(ledger_id, last))
        return True

    def _move_to(self, mark_delete: Position) -> None:
        self.mark_delete = mark_delete
        self.revision += 1
        ledger_id, entry_id = mark_delete
        for acked_id in [acked_id for acked_id in self._acked if acked_id <= ledger_id]:
            acked = self._acked[acked_id]
            before = len(acked)
            if acked_id < ledger_id:
                acked.clear()
            else:
                acked.remove_range(0, entry_id + 1)
            self._acked_entries -= before - len(acked)
            if not acked:
                del self._acked[acked_id]
        for batch_id in [batch_id for batch_id in self._batches if batch_id <= ledger_id]:
            gone = [entry for entry in self._batches[batch_id] if batch_id < ledger_id or entry <= entry_id]
            self._forget_batches(batch_id, gone)

    def _forget_batches(self, ledger_id: int, entries: Iterable[int]) -> None:
        batches = self._batches[ledger_id]
        for entry in dict.fromkeys(entries):  # a client may list an entry twice
            _, messages = batches.pop(entry)
            self._batch_bits -= messages
        if not batches:
            del self._batches[ledger_id]

    def _absorb(self) -> None:
        """Move the mark-delete position over the acknowledged entries right after it (rule 1)."""
        while self._acked:
            ledger_id, entry_id = self.mark_delete
            first = entry_id + 1
            acked = self._acked.get(ledger_id)
            if acked is None or first not in acked:
                count = self._ledgers.entries_of(ledger_id)
                if count is not None and first < count:
                    return
                ledger_id, first = self._ledgers.next_position(self.mark_delete)
                acked = self._acked.get(ledger_id)
                if acked is None or first not in acked:
                    return
            self._move_to(Position(ledger_id, _end_of_run(acked, first)))


def _span(start: int, end: int) -> BitMap:
    return BitMap(range(start, end)) if start < end else BitMap()


def _end_of_run(entries: BitMap, first: int) -> int:
    """Return the last entry of the run that starts at `first`; steps double, since a run may be millions long."""
    last, step = first, 1
    while entries.contains_range(last + 1, last + step + 1):
        last += step
        step *= 2
    while step > 1:
        step //= 2
        if entries.contains_range(last + 1, last + step + 1):
            last += step
    return last


def mask_of(words: Sequence[int]) -> int:
    """Return the wire's 64-bit words, signed or not, first word lowest, as one mask."""
    # All at once: word by word, the cost is quadratic, and a client may send half a million words.
    return int.from_bytes(pack(f"<{len(words)}Q", *(word & 0xFFFF_FFFF_FFFF_FFFF for word in words)), "little")


def words_of(batch: Batch) -> tuple[int, ...]:
    """Return a batch's mask as the wire's signed 64-bit words."""
    mask, messages = batch
    count = (messages + 63) // 64
    return unpack(f"<{count}q", mask.to_bytes(8 * count, "little"))
