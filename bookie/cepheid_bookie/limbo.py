"""Answers of a bookie about ledgers that it may have forgotten.

    ids allocated:   0 ················ limbo_below ················►
                     "I do not have it" is unknown  │ "I do not have it" is certain

A bookie that starts on empty disks under a known id (`accept_empty_disk`), on an old copy of its disks, or without the end of its
journal (`opening.py`, rule 3) has lost entries and fences that it acknowledged. Both losses are dangerous: a
denied entry makes a recovery cut the ledger short, a lost fence lets an old writer continue.

Rule 1: nothing of a ledger below the watermark is denied. Entries that are here (recovery and repair restore them) are served as
usual.
Rule 2: such a ledger takes no regular adds, whatever its writer says; recovery adds are accepted. Fences are written as usual.
Rule 3: the watermark is the ledger id counter of metadata at the start that found the loss. Ids that brokers hold in blocks are
below it, and above it nothing can have been acknowledged here before. So it needs no list of ledgers, and it stays for the life of
the disks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cepheid_rpc import ReadAnswer, Status


@dataclass(frozen=True, slots=True)
class Limbo:
    """The watermark of lost ledgers. `below` 0: nothing was ever lost."""

    below: int = 0

    def sure(self, ledger_id: int, status: Status) -> Status:
        """Return the status, with "certainly not" replaced by unknown if this bookie may have lost the ledger."""
        return Status.UNKNOWN if status.certain_no and ledger_id < self.below else status

    def chunk(self, ledger_id: int, answer: ReadAnswer) -> ReadAnswer:
        if ledger_id >= self.below or not answer.missing:
            return answer
        missing = tuple(replace(run, status=self.sure(ledger_id, run.status)) for run in answer.missing)
        return replace(answer, missing=missing)
