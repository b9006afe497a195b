"""L6 by set arithmetic: every entry that counts is on Qa bookies of its write set, but for those that lost their disks.

What a disk takes along moves from one side to the other. So it is asked when a record says what counts, when a bookie deletes
something, and in the end.
"""

from __future__ import annotations

from cepheid_metadata import LedgerMetadata
from tests.simulation.checks.history import History


def check_copies(history: History, record: LedgerMetadata, why: str) -> None:
    """Of a closed ledger all entries count, of another one those that its writer was told OK. As long as fewer than Qa disks of a
    write set are lost, somebody has a copy."""
    ledger_id = record.ledger_id
    last = history.acked.get(ledger_id, 0) - 1 if record.last_entry_id is None else record.last_entry_id
    for entry_id in range(last + 1):
        write_set, holders = history.places_of(record, entry_id), history.holders(record, entry_id)
        lost = [bookie for bookie in write_set if bookie not in holders and ledger_id <= history.bookie(bookie).forgotten_through]
        history.check(
            "L6",
            len(holders) + len(lost) >= record.ack_quorum,
            lambda e=entry_id, h=holders, n=lost: (
                f"{why}: {ledger_id}:{e} is on {h}, and {n} lost their disks; {history.story(ledger_id)}"
            ),
        )
