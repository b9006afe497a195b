"""The position of an entry in a topic, as used by records and everything above them."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """(ledger id, entry id). Entry id -1: just before the ledger's first entry.

    Compared by ledger id, then entry id: Pulsar's clients do the same, so the ids of a topic's ledgers rise along its chain.
    """

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"


EARLIEST = Position(-1, -1)
LATEST = Position((1 << 63) - 1, (1 << 63) - 1)
"""Positions at which a subscription may start without naming an entry (Pulsar protocol)."""
