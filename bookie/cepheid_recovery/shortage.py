"""Decides which copies of a ledger are missing, from its record and the state of the bookies. A core without I/O.

record × bookies ──► bookies that lack copies, and why ──► how many copies are left, how much is short
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cepheid_ledger import entries_of, is_finished
from cepheid_metadata import BookieHoldings, Fragment, LedgerMetadata, RepairMark, ShortReason


@dataclass(frozen=True, slots=True)
class BookiesSeen:
    """The auditor's view of the bookies at one moment.

    `waiting`: not registered, but their grace period is not over. `emptied`: bookies that lost their disk and were not refilled
    yet, with the ledger id below which they lost everything.
    """

    registered: frozenset[str]
    waiting: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    emptied: Mapping[str, int] = field(default_factory=dict)

    def shortage_of(self, bookie: str, ledger_id: int) -> ShortReason | None:
        """Return why this bookie counts as lacking the ledger's copies; None: it has them, or may still return with them."""
        if bookie in self.draining:
            return ShortReason.DRAINING
        if bookie not in self.registered:
            return None if bookie in self.waiting else ShortReason.LOST
        return ShortReason.EMPTY_DISK if ledger_id < self.emptied.get(bookie, 0) else None


@dataclass(frozen=True, slots=True)
class Shortage:
    """What one ledger lacks. `copies_left` is the smallest number of copies of any of its entries."""

    bookies: dict[str, ShortReason]
    copies_left: int
    entries: int
    bytes: int
    last_copy_entries: int


def needed_fragments(ledger: LedgerMetadata) -> list[Fragment]:
    """Return the fragments whose bookies matter: those with entries, and the last one of a ledger that is not closed.

    The latter matters even while it is empty: its bookies decide where the ledger ends.
    """
    return [fragment for fragment in ledger.fragments if not is_finished(ledger, fragment) or _entry_count(ledger, fragment) > 0]


def find_shortage(ledger: LedgerMetadata, seen: BookiesSeen) -> Shortage | None:
    """Return what the ledger lacks, or None if every bookie in its record has its copies."""
    names = {bookie for fragment in needed_fragments(ledger) for bookie in fragment.ensemble}
    reasons = {bookie: reason for bookie in sorted(names) if (reason := seen.shortage_of(bookie, ledger.ledger_id)) is not None}
    return measure(ledger, reasons, seen.registered) if reasons else None


def measure(ledger: LedgerMetadata, reasons: Mapping[str, ShortReason], registered: Collection[str]) -> Shortage:
    """Return the figures of a ledger whose `reasons` are known. A draining bookie that runs still has its copies."""
    gone = {
        bookie
        for bookie, reason in reasons.items()
        if reason is not ShortReason.PLACEMENT and (reason is not ShortReason.DRAINING or bookie not in registered)
    }
    size, quorum = ledger.ensemble_size, ledger.write_quorum
    copies_left, entries, last_copy_entries = quorum, 0, 0
    for fragment in needed_fragments(ledger):
        left = [sum(fragment.ensemble[(start + i) % size] not in gone for i in range(quorum)) for start in range(size)]
        copies_left = min(copies_left, *left)
        if is_finished(ledger, fragment):
            count = _entry_count(ledger, fragment)
            lacking = sum(bookie in reasons for bookie in fragment.ensemble)
            entries += _share(count * lacking * quorum, size)
            last_copy_entries += _share(count * sum(one <= 1 for one in left), size)
    return Shortage(dict(reasons), copies_left, entries, _bytes_of(ledger, entries), last_copy_entries if gone else 0)


def new_mark(ledger_id: int, shortage: Shortage, now_ms: int) -> RepairMark:
    """Return the first mark of a ledger."""
    return RepairMark(
        ledger_id=ledger_id,
        bookies=shortage.bookies,
        copies_left=shortage.copies_left,
        short_entries=shortage.entries,
        short_bytes=shortage.bytes,
        last_copy_entries=shortage.last_copy_entries,
        since_ms=now_ms,
    )


def renewed_mark(mark: RepairMark, shortage: Shortage) -> RepairMark:
    """Return a mark with what is short now; what workers noted in it stays."""
    return mark.replace(
        bookies=shortage.bookies,
        copies_left=0 if mark.lost else shortage.copies_left,
        short_entries=shortage.entries,
        short_bytes=shortage.bytes,
        last_copy_entries=shortage.last_copy_entries,
    )


def add_holdings(holdings: dict[str, BookieHoldings], ledger: LedgerMetadata, shortage: Shortage | None) -> None:
    """Add the ledger to the sums of the bookies in its record. Entries of an open fragment are not known."""
    counts: dict[str, int] = {}
    for fragment in needed_fragments(ledger):
        count = _entry_count(ledger, fragment) if is_finished(ledger, fragment) else 0
        for bookie in fragment.ensemble:
            counts[bookie] = counts.get(bookie, 0) + _share(count * ledger.write_quorum, ledger.ensemble_size)
    lacking = () if shortage is None else shortage.bookies
    for bookie, entries in counts.items():
        before = holdings.get(bookie) or BookieHoldings()
        size = _bytes_of(ledger, entries)
        is_short = bookie in lacking
        holdings[bookie] = BookieHoldings.model_construct(
            ledgers=before.ledgers + 1,
            bytes=before.bytes + size,
            short_ledgers=before.short_ledgers + is_short,
            short_bytes=before.short_bytes + is_short * size,
        )


def _entry_count(ledger: LedgerMetadata, fragment: Fragment) -> int:
    first, last = entries_of(ledger, fragment)
    return last - first + 1


def _share(amount: int, parts: int) -> int:
    return -(-amount // parts)


def _bytes_of(ledger: LedgerMetadata, copies: int) -> int:
    """Return the estimated bytes of this many copies of entries; 0 while the length is not known."""
    if not ledger.is_closed or not ledger.length_bytes:
        return 0
    assert ledger.last_entry_id is not None
    return ledger.length_bytes * copies // (ledger.last_entry_id + 1)
