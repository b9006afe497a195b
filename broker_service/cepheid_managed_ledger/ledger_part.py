"""One ledger as a cursor sees it at one moment: what of its entries it has not acknowledged."""

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
    """Of the whole ledger; None: nobody has counted them."""
    size_bytes: int
    acked: BitMap | None
    batches: dict[int, Batch]

    @property
    def first_needed(self) -> int | None:
        """The first entry whose own figures matter; None: the ledger's totals say it all."""
        if self.start or self.messages is None:
            return self.start
        firsts = [*self.batches, *(() if self.acked is None else (self.acked.min(),))]
        return min(firsts, default=None)

    @property
    def is_single_run(self) -> bool:
        """One run of entries with one message in each: their bytes follow from one header (message_counts.py, rule 4)."""
        return self.messages == self.entries and self.start > 0 and not self.batches and not self.acked

    @property
    def before_start(self) -> Position:
        return Position(self.ledger_id, self.start - 1)

    def whole(self, counts: LedgerCounts) -> Amount:
        """Acknowledged or not."""
        if self.start or self.messages is None:
            return counts.between(self.start, self.entries)
        return Amount(self.entries, self.messages, self.size_bytes)

    def holes(self) -> list[int]:
        return [] if self.acked is None else list(self.acked)

    def holes_of(self, counts: LedgerCounts, holes: list[int], *, batches: bool = True) -> Amount:
        """What of the whole is acknowledged: these entries, and messages of batches."""
        amount = counts.of(holes)
        if not batches:
            return amount
        acked = sum(_acked_in(counts.messages_of(entry), mask) for entry, (mask, _) in self.batches.items())
        return amount.plus(Amount(messages=acked))


def _acked_in(messages: int, unacked_mask: int) -> int:
    """Bits beyond the last message mean nothing: clients say how large a batch is."""
    return messages - (unacked_mask & ((1 << messages) - 1)).bit_count()
