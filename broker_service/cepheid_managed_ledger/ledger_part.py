"""One ledger from a cursor's view at one moment: the entries that it has not acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cepheid_managed_ledger.ack_set import Batch
from cepheid_managed_ledger.ledger_counts import Amount, LedgerCounts
from cepheid_metadata import Position

if TYPE_CHECKING:
    from pyroaring import BitMap


@dataclass(frozen=True, slots=True)
class LedgerPart:
    """The entries from `start` on, without those in `acked` and the acknowledged messages of `batches`."""

    ledger_id: int
    start: int
    entries: int
    messages: int | None
    """Messages of the whole ledger; None: they are not counted."""
    size_bytes: int
    acked: BitMap | None
    batches: dict[int, Batch]

    @property
    def first_needed(self) -> int | None:
        """The first entry whose own figures matter; None: the ledger's totals are enough."""
        if self.start or self.messages is None:
            return self.start
        firsts = [*self.batches, *(() if self.acked is None else (self.acked.min(),))]
        return min(firsts, default=None)

    @property
    def is_single_run(self) -> bool:
        """Whether this is one run of entries with one message each: their bytes follow from one header (message_counts.py, rule
        4)."""
        return self.messages == self.entries and self.start > 0 and not self.batches and not self.acked

    @property
    def before_start(self) -> Position:
        return Position(self.ledger_id, self.start - 1)

    def whole(self, counts: LedgerCounts) -> Amount:
        """Return the totals of all entries from `start` on, acknowledged or not."""
        if self.start or self.messages is None:
            return counts.between(self.start, self.entries)
        return Amount(self.entries, self.messages, self.size_bytes)

    def holes(self) -> list[int]:
        return [] if self.acked is None else list(self.acked)

    def holes_of(self, counts: LedgerCounts, holes: list[int], *, batches: bool = True) -> Amount:
        """Return the totals of what is acknowledged: these entries, and messages of batches."""
        amount = counts.of(holes)
        if not batches:
            return amount
        acked = sum(_acked_in(counts.messages_of(entry), mask) for entry, (mask, _) in self.batches.items())
        return amount.plus(Amount(messages=acked))


def _acked_in(messages: int, unacked_mask: int) -> int:
    """Return the acknowledged messages of a batch. Bits beyond its last message are ignored: clients state the size of a batch."""
    return messages - (unacked_mask & ((1 << messages) - 1)).bit_count()
