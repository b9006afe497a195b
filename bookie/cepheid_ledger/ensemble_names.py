"""The bookies that a ledger's record names."""

from __future__ import annotations

from cepheid_metadata import LedgerMetadata


def bookies_of(ledger: LedgerMetadata) -> tuple[str, ...]:
    """Return the bookies that should have entries of this ledger, sorted. A fragment without entries has none."""
    end = ledger.last_entry_id
    fragments = [fragment for fragment in ledger.fragments if end is None or fragment.first_entry_id <= end]
    return tuple(sorted({bookie for fragment in fragments for bookie in fragment.ensemble}))
