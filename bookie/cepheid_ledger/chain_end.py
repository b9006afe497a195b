"""Where readers of a chain stop in each ledger. The one place of this rule, for brokers, offloaders and Spark.

    chain record:  [7: 120 entries] [9: 3 entries] [12: being written]
    ledgers:        7 ends at 119    9 ends at 4    12 has LAC 40        readable: 7:0..119, 9:0..2, 12:0..40

The *chain's* record of a ledger is its end, not the ledger's own: a writer that failed may have left entries that recovery
kept in ledger 9, and that were written again to the next one. Read past the record and they are seen twice.
"""

from __future__ import annotations

from cepheid_ledger.errors import LedgerTooShortError


def readable_end(recorded_entries: int | None, last_add_confirmed: int) -> int:
    """Return the last entry of a ledger that readers of its chain may see; -1: none.

    `recorded_entries` is the chain's count for a ledger that it lists as ended, None while the ledger is being written.
    `last_add_confirmed` is the ledger's end if it is closed, otherwise what is known to be confirmed.
    """
    return last_add_confirmed if recorded_entries is None else recorded_entries - 1


def check_end(ledger_id: int, recorded_entries: int | None, closed_at: int) -> int:
    """Return `readable_end` of a closed ledger. Raises LedgerTooShortError if the chain records more than the ledger has."""
    end = readable_end(recorded_entries, closed_at)
    if end > closed_at:
        message = f"the chain records {recorded_entries} entries of ledger {ledger_id}, which is closed at entry {closed_at}"
        raise LedgerTooShortError(message, ledger_id=ledger_id, recorded_entries=recorded_entries, closed_at=closed_at)
    return end
