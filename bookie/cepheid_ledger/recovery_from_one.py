"""Closes a ledger at what is left of it, because an operator decided that the answer of one bookie is enough.

    preview ──► the answer of each bookie, and where the ledger would end     reads only: no fence, no change of the record
    run     ──► like every recovery: IN_RECOVERY, fence, read on, write back, CLOSED; but the named bookie decides alone

If so many disks were lost that it cannot be known whether an entry was confirmed, recovery stops (rule 8 of the README), and so
does the topic. An operator who knows that the disks are lost for good may accept that loss. It never happens automatically.

1. The named bookie must be in the last fragment's ensemble, must be fenced, and must answer for the entry at which the ledger ends.
   "Unknown" from a bookie in limbo is such an answer: it has nothing there, and accepts no more regular adds of the ledger. So a
   ledger of which no bookie has anything is closed at the start of its last fragment. The others are fenced and read as far as
   they answer. A writer that still reaches an ack quorum of bookies that do not answer may get OK for entries that are lost.
2. A valid copy from any bookie keeps an entry. The ledger ends before the first entry of which no bookie returns a copy.
3. What was found is written back as always (rule 9): the ledger ends only when an ack quorum holds it.
4. It does not end below the entry that the operator was shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cepheid_ledger.bookie_calls import BookieCalls
from cepheid_ledger.errors import RecoveryFailedError
from cepheid_ledger.ledger_writer import ClosedLedger
from cepheid_ledger.master_key import master_key_of
from cepheid_ledger.metadata_loop import read_ledger
from cepheid_ledger.recovery import Recovery
from cepheid_ledger.recovery_state import FenceCoverage, RecoveryReads, write_set_positions
from cepheid_metadata import LedgerMetadata
from cepheid_rpc import EntryGroup, LacRequest, Status


@dataclass(slots=True)
class RecoveryPreview:
    """What `run` would do now. `last_entry_id`: where the ledger would be closed, or is; -1: it would be empty.

    `needs_decision`: an ordinary recovery cannot close the ledger. `answers`: by bookie of the last fragment, its answer.
    `unheard`: the bookies that did not answer with certainty what they have. Entries above `last_entry_id` that only they have are
    lost. `needed_bookies`: how many more bookies must accept entries before the ledger can be closed there (rule 3).
    """

    ledger_id: int
    state: str
    bookie: str
    first_entry_id: int
    last_entry_id: int
    needs_decision: bool
    answers: dict[str, str] = field(default_factory=dict)
    unheard: tuple[str, ...] = ()
    needed_bookies: int = 0


class RecoveryFromOne(Recovery):
    """One recovery from a named bookie. `at_least`: the last entry that the operator was shown (rule 4)."""

    def __init__(self, ledger_id: int, *shared: Any, bookie: str, at_least: int = -1) -> None:
        super().__init__(ledger_id, *shared)
        self._bookie = bookie
        self._at_least = at_least
        self._answers: dict[str, str] = {}
        self._own_words: dict[str, Status | None] = {}  # each bookie's last answer other than yes or no
        self._is_covered = False
        self._silent: set[str] = set()  # the bookies that did not answer at all
        self._is_decided = True

    async def preview(self) -> RecoveryPreview:
        """Return what `run` would do. Raises NoSuchLedgerError, RecoveryFailedError (this bookie does not answer),
        MetadataError."""
        ledger = (await read_ledger(self._records, self._ledger_id)).record
        if ledger.last_entry_id is not None:
            return RecoveryPreview(self._ledger_id, ledger.state, self._bookie, 0, ledger.last_entry_id, needs_decision=False)
        self._require_member(ledger)
        self.fences = False
        last_add_confirmed = await self._fence(ledger)
        first = ledger.last_fragment.first_entry_id
        start = max(last_add_confirmed, first - 1) + 1
        end = await self._read_on(ledger, start, _Nowhere())
        return RecoveryPreview(
            self._ledger_id,
            ledger.state,
            self._bookie,
            first,
            end,
            needs_decision=not (self._is_covered and self._is_decided),
            answers=self._answers,
            unheard=tuple(self._unknown),
            needed_bookies=self._needed_bookies(ledger) if end >= start else 0,
        )

    def _needed_bookies(self, ledger: LedgerMetadata) -> int:
        """Return how many bookies an ack quorum of each write set lacks, of those that answered and their possible replacements."""
        ensemble = ledger.last_fragment.ensemble
        usable = [bookie not in self._silent for bookie in ensemble]
        windows = [write_set_positions(first, ledger.ensemble_size, ledger.write_quorum) for first in range(ledger.ensemble_size)]
        spares: list[str] = []
        needed = 0
        while short := [window for window in windows if sum(usable[position] for position in window) < ledger.ack_quorum]:
            usable[next(position for position in short[0] if not usable[position])] = True
            spare = self._placement.replacement(ensemble, spares) if not needed else None
            if spare is None:
                needed += 1
            else:
                spares.append(spare)
        return needed

    async def run(self) -> ClosedLedger:
        self._require_member((await read_ledger(self._records, self._ledger_id)).record)
        return await super().run()

    def _require_member(self, ledger: LedgerMetadata) -> None:
        ensemble = ledger.last_fragment.ensemble
        if self._bookie not in ensemble:
            message = (
                f"ledger {self._ledger_id} cannot be closed at what {self._bookie} holds: from entry "
                f"{ledger.last_fragment.first_entry_id} on it is on {', '.join(ensemble)}; name one of these"
            )
            raise RecoveryFailedError(message, ledger_id=self._ledger_id, bookie=self._bookie)

    async def _fence(self, ledger: LedgerMetadata) -> int:
        """Ask all bookies (rule 1). Return the largest LAC that any of them reports."""
        ensemble = ledger.last_fragment.ensemble
        coverage = FenceCoverage(ledger.ensemble_size, ledger.write_quorum, ledger.ack_quorum)
        request = LacRequest(self._ledger_id, master_key_of(ledger), fence=self.fences)
        last_add_confirmed = -1

        async def ask(position: int) -> None:
            nonlocal last_add_confirmed
            bookie = ensemble[position]
            if (answer := await self._read_lac(bookie, request)) is None:
                self._answers[bookie] = f"not known: {self._unknown[bookie]}"
                if self._own_words[bookie] is None:
                    self._silent.add(bookie)
                return
            coverage.on_fenced(position)
            last_add_confirmed = max(last_add_confirmed, self._take_lac(answer))
            highest = answer.highest_entry
            self._answers[bookie] = answer.status.name if highest is None else f"highest entry {highest.last_entry_id}"

        async with BookieCalls() as calls:
            for position in range(len(ensemble)):
                calls.start(position, ask(position))
            while calls:
                await calls.wait_next()
        if self._bookie in self._unknown and not self._has_answered():
            raise self._failed(f"{self._bookie}, whose answer is to decide, does not answer")
        self._answers = {bookie: self._answers[bookie] for bookie in ensemble}
        self._is_covered = coverage.is_covered
        return last_add_confirmed

    async def _read_on(self, ledger: LedgerMetadata, start: int, sink: Any) -> int:
        end = await super()._read_on(ledger, start, sink)
        if end < self._at_least:
            raise self._failed(f"it would end at entry {end}, below entry {self._at_least}, which was to be kept")
        return end

    def _end_undecided(self, reads: RecoveryReads, ledger: LedgerMetadata) -> int:
        """Return the end that the named bookie's answer decides (rule 2). Raises RecoveryFailedError if it gave none."""
        ensemble = ledger.last_fragment.ensemble
        position = ensemble.index(self._bookie)
        asked = write_set_positions(reads.next_entry_id, ledger.ensemble_size, ledger.write_quorum)
        if position not in asked:  # striped: its answer says nothing about this entry
            others = ", ".join(ensemble[other] for other in asked)
            raise self._failed(f"entry {reads.next_entry_id} is not stored on {self._bookie}, but on {others}: name one of these")
        if not (reads.has_said_no(position) or self._has_answered()):
            raise self._failed(f"{self._bookie} did not say whether it has entry {reads.next_entry_id}")
        self._is_decided = False
        return reads.next_entry_id - 1

    def _has_answered(self) -> bool:
        """Return whether the named bookie's last answer can decide. UNKNOWN can: the bookie lost its disk once, and has nothing of
        what was requested now."""
        return self._own_words.get(self._bookie) in (Status.UNKNOWN, Status.BAD_DIGEST)

    def _note_unknown(self, bookie: str, why: str, status: Status | None = None) -> None:
        super()._note_unknown(bookie, why, status)
        self._own_words[bookie] = status


class _Nowhere:
    """The destination of entries that a preview finds: they are dropped."""

    def push(self, group: EntryGroup) -> None:
        pass

    async def wait_below(self, limit_bytes: int) -> None:
        pass
