"""What a bookie says of ledgers that it may have forgotten.

    ids given out:   0 ················ limbo_below ················►
                     "I do not have it" is unknown  │ "I do not have it" is certain

A bookie that starts on empty disks under a known id (`accept_empty_disk`), on an old copy of its disks, or without the end of its
journal (`opening.py`, rule 3) has lost entries that it acknowledged and fences that it promised. Both losses are dangerous: a
denied entry makes a recovery cut the ledger short, a lost fence lets an old writer finish.

Rule 1: of a ledger below the watermark nothing is denied. What is here (recovery and repair bring it back) is served as ever.
Rule 2: such a ledger takes no regular adds, whatever its writer says; recovery adds are taken. Fences are written as ever.
Rule 3: the watermark is the ledger id counter of metadata at the start that found the loss. Ids that brokers hold in blocks are
below it, and above it nothing can have been acknowledged here before. So it needs no list of ledgers, and it stays for the life of
the disks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cepheid_rpc import ReadAnswer, Status


@dataclass(frozen=True, slots=True)
class Limbo:
    """`below` 0: nothing was ever lost."""

    below: int = 0

    def sure(self, ledger_id: int, status: Status) -> Status:
        """The status as this bookie may say it."""
        return Status.UNKNOWN if status.certain_no and ledger_id < self.below else status

    def chunk(self, ledger_id: int, answer: ReadAnswer) -> ReadAnswer:
        if ledger_id >= self.below or not answer.missing:
            return answer
        missing = tuple(replace(run, status=self.sure(ledger_id, run.status)) for run in answer.missing)
        return replace(answer, missing=missing)
