"""Closes a ledger whose writer is gone, or is to be shut out.

    metadata: IN_RECOVERY ──► fence ──► read on from LAC, write back what is there ──► metadata: CLOSED at what was found

Rules 6 to 10 of the README. The last fragment of that version of the record which says IN_RECOVERY is fenced, and read to its
end: from then on the writer can neither change the ensemble nor close. A recovery that dies or gives up leaves IN_RECOVERY,
and the next one continues. An entry of which there are only damaged copies, as reported by the bookies that store them, stops every
recovery; only one with `despite_damage`, for an owner that does not need the entry, closes the ledger before it.

Only the writer knew which bookies missed entries in the middle. So the write of the end also makes repair check each copy once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cepheid_ledger.bookie_calls import BookieCalls
from cepheid_ledger.bookie_channel import BookieChannel
from cepheid_ledger.errors import RecoveryFailedError, TailDamagedError
from cepheid_ledger.ledger_writer import ClosedLedger
from cepheid_ledger.master_key import master_key_of
from cepheid_ledger.metadata_edits import closed, in_recovery
from cepheid_ledger.metadata_loop import FoundLedger, LedgerRecords, Plan, change_ledger, read_ledger, to_check
from cepheid_ledger.placement import Placement
from cepheid_ledger.recovery_state import FenceCoverage, RecoveryReads
from cepheid_ledger.replica_read import answers_of, read_entry, verified_parts
from cepheid_ledger.settings import LedgerSettings
from cepheid_ledger.write_back import WriteBack
from cepheid_metadata import Create, LedgerMetadata, LedgerState, Put
from cepheid_rpc import (
    MAX_MESSAGE_BYTES,
    BookieConnection,
    BookieUnavailableError,
    DigestMismatchError,
    EntryGroup,
    EntryHeader,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    Status,
)

log = logging.getLogger(__name__)

_WRITE_BACK_BYTES = 8 * MAX_MESSAGE_BYTES
"""Recovered entries being written back at a time: above this limit, reading waits."""


class FoundEnd(NamedTuple):
    """The end of a fenced ledger, and the write that closes its record there; None: the record is closed already.

    `checks` belong into the same write: they make repair check each copy of the ledger once.
    """

    end: ClosedLedger
    closing: Put | None
    checks: tuple[Create, ...] = ()


class EntrySink(Protocol):
    """The destination of the entries that a recovery found, in order."""

    def push(self, group: EntryGroup) -> None: ...

    async def wait_below(self, limit_bytes: int) -> None: ...


class Recovery:
    """One attempt to recover a ledger."""

    fences = True
    """Whether its reads keep the writer out."""

    def __init__(
        self,
        ledger_id: int,
        records: LedgerRecords,
        connection_of: Callable[[str], BookieConnection],
        channel_of: Callable[[str], BookieChannel],
        placement: Placement,
        settings: LedgerSettings,
        *,
        despite_damage: bool = False,
    ) -> None:
        self._ledger_id = ledger_id
        self._despite_damage = despite_damage
        self._records = records
        self._connection_of = connection_of
        self._channel_of = channel_of
        self._placement = placement
        self._settings = settings
        self._unknown: dict[str, str] = {}  # bookie → why it could not answer, for error messages
        self._all_damage = True  # everything unknown is so because of damaged disks
        self._highest: EntryHeader | None = None  # header of the entry with the largest id that any bookie returned

    async def run(self) -> ClosedLedger:
        """Close the ledger; return its end. Raises NoSuchLedgerError, RecoveryFailedError, EntryUnavailableError, TimeoutError,
        MetadataError."""
        found, plan_closed = await self._find_end()
        if plan_closed is None:
            return _end_of(found.record)
        after = plan_closed(found.record)
        checks = [] if after is None else to_check(self._records.store, after)
        found = await change_ledger(self._records, found, plan_closed, self._settings, together=checks)
        return _end_of(found.record)

    async def find_end(self) -> FoundEnd:
        """Do all of `run` but its last write, which the caller does together with others (rule 10). Raises as `run` does."""
        found, plan_closed = await self._find_end()
        after = None if plan_closed is None else plan_closed(found.record)
        if after is None:
            return FoundEnd(_end_of(found.record), None)
        closing = self._records.replace_op(self._ledger_id, after, found.version)
        return FoundEnd(_end_of(after), closing, tuple(to_check(self._records.store, after)))

    async def _find_end(self) -> tuple[FoundLedger, Plan | None]:
        """Return the fenced record, and how to close it; None: it is closed."""
        found = await read_ledger(self._records, self._ledger_id)
        found = await change_ledger(self._records, found, _plan_in_recovery, self._settings)
        if found.record.is_closed:
            return found, None
        last_add_confirmed = await self._fence(found.record)
        # A LAC below the fragment's start is possible (the fragment is empty): what is before it is confirmed by rule.
        start = max(last_add_confirmed, found.record.last_fragment.first_entry_id - 1) + 1
        write_back = WriteBack(found.record, start, self._channel_of, self._placement)
        try:
            last_entry_id = await self._read_on(found.record, start, write_back)
            await write_back.wait_below(0)
            write_back.leave()
        finally:
            write_back.close()
        length = await self._length_through(found.record, last_entry_id, write_back)
        fragments = [fragment for fragment in write_back.fragments if fragment.first_entry_id <= last_entry_id]

        recovered = found.record.last_fragment

        def plan_closed(ledger: LedgerMetadata) -> LedgerMetadata | None:
            if ledger.is_closed:
                return None  # whoever closed it, the end is what the record says
            if ledger.state is not LedgerState.IN_RECOVERY or ledger.last_fragment != recovered:
                raise self._failed(f"its record changed where only recovery may change it ({ledger.state})")
            return closed(ledger, last_entry_id, length, fragments)

        fields = {"ledger_id": self._ledger_id, "first_recovered": start, "last_entry_id": last_entry_id}
        log.debug("ledger.recovered", extra=fields)
        return found, plan_closed

    # Fencing

    async def _fence(self, ledger: LedgerMetadata) -> int:
        """Fence the bookies until no writer can reach Qa any more. Return a LAC, which may be too low."""
        ensemble = ledger.last_fragment.ensemble
        coverage = FenceCoverage(ledger.ensemble_size, ledger.write_quorum, ledger.ack_quorum)
        request = LacRequest(self._ledger_id, master_key_of(ledger), fence=True)
        last_add_confirmed = -1

        async def fence(position: int) -> None:
            nonlocal last_add_confirmed
            if (answer := await self._read_lac(ensemble[position], request)) is None:
                coverage.on_unknown(position)
            else:
                coverage.on_fenced(position)
                last_add_confirmed = max(last_add_confirmed, self._take_lac(answer))

        async with BookieCalls() as calls:
            for position in range(len(ensemble)):
                calls.start(position, fence(position))
            while not coverage.is_covered:
                if coverage.is_impossible:
                    raise self._failed("its writer cannot be fenced")
                await calls.wait_next()
        return last_add_confirmed

    async def _read_lac(self, bookie: str, request: LacRequest) -> LacAnswer | None:
        """Ask one bookie for its LAC. None: unknown."""
        try:
            async with asyncio.timeout(self._settings.recovery_timeout_s):
                answer = await self._connection_of(bookie).read_lac(request)
        except (BookieUnavailableError, TimeoutError) as error:
            self._note_unknown(bookie, str(error) or "no answer in time")
            return None
        # A bad digest belongs to its highest entry, which it checked when it was fenced.
        if answer.status is Status.OK or answer.status.certain_no or answer.status is Status.BAD_DIGEST:
            return answer
        self._note_unknown(bookie, answer.status.name, answer.status)
        return None

    def _take_lac(self, answer: LacAnswer) -> int:
        """Return the LAC of an answer if it is under a digest: one that is too high would leave entries out."""
        group = answer.highest_entry
        if group is None or group.ledger_id != self._ledger_id or len(group) != 1:
            return -1
        try:
            group.verify()
        except (DigestMismatchError, MalformedGroupError):
            return -1
        header = group.header(group.first_entry_id)
        if self._highest is None or header.entry_id > self._highest.entry_id:
            self._highest = header
        return header.last_add_confirmed

    # Reading on

    async def _read_on(self, ledger: LedgerMetadata, start: int, sink: EntrySink) -> int:
        """Read entries from `start` on into `sink`. Return the ledger's last entry id."""
        ensemble = ledger.last_fragment.ensemble
        reads = RecoveryReads(ledger.ensemble_size, ledger.write_quorum, ledger.ack_quorum, start)
        async with BookieCalls() as calls:
            while reads.last_entry_id is None:
                for position in range(len(ensemble)):
                    if position not in calls and not reads.is_heard(position):
                        calls.start(position, self._read(reads, ledger, position))
                if not calls:
                    return self._end_undecided(reads, ledger)
                await calls.wait_next()
                for group in reads.take_present():
                    sink.push(group)
                await sink.wait_below(_WRITE_BACK_BYTES)
        return reads.last_entry_id

    def _end_undecided(self, reads: RecoveryReads, ledger: LedgerMetadata) -> int:
        """Return where the ledger ends if the answers do not decide it, or raise RecoveryFailedError."""
        if self._all_damage and self._despite_damage:
            log.error("ledger.cut_off", extra={"ledger_id": self._ledger_id, "entry_id": reads.next_entry_id})
            return reads.next_entry_id - 1
        error = TailDamagedError if self._all_damage else RecoveryFailedError
        raise self._failed(f"it is unknown whether entry {reads.next_entry_id} was confirmed", error)

    async def _read(self, reads: RecoveryReads, ledger: LedgerMetadata, position: int) -> None:
        """Ask one bookie for the next batch, and report each requested id to `reads`, as far as the answer covers them."""
        first = reads.next_entry_id
        last = first + self._settings.recovery_batch_entries - 1
        bookie = ledger.last_fragment.ensemble[position]
        request = ReadRequest(self._ledger_id, first, last, MAX_MESSAGE_BYTES, fence=self.fences, master_key=master_key_of(ledger))
        reached = first
        try:
            async with (
                asyncio.timeout(self._settings.recovery_timeout_s),
                answers_of(self._connection_of(bookie), request) as answers,
            ):
                async for answer in answers:
                    if not reached <= answer.next_entry_id <= last + 1:
                        break
                    self._take_answer(reads, bookie, position, answer, (reached, answer.next_entry_id - 1))
                    reached = answer.next_entry_id
                    if reads.decided:
                        break
        except (BookieUnavailableError, TimeoutError) as error:
            self._note_unknown(bookie, str(error) or "no answer in time")
            reads.on_unknown(position, reached, last)
        else:
            if reads.next_entry_id == first and not reads.is_heard(position):  # it left out the first requested entry
                self._note_unknown(bookie, "an answer without the entry")
                reads.on_unknown(position, first, last)

    def _take_answer(self, reads: RecoveryReads, bookie: str, position: int, answer: ReadAnswer, covered: tuple[int, int]) -> None:
        """Report what an answer says about the ids that it covers, and nothing else."""
        for group in answer.groups:
            if group.ledger_id != self._ledger_id or not _inside(group.first_entry_id, group.last_entry_id, covered):
                continue
            for part, is_valid in verified_parts(group):
                if is_valid:
                    reads.on_copies(part)
                else:
                    self._note_unknown(bookie, f"entry {part.first_entry_id} is damaged")
                    reads.on_unknown(position, part.first_entry_id, part.last_entry_id)
        for missing in answer.missing:
            if not _inside(missing.first_entry_id, missing.last_entry_id, covered):
                continue
            if missing.status.certain_no:
                reads.on_no(position, missing.first_entry_id, missing.last_entry_id)
            else:
                self._note_unknown(bookie, missing.status.name, missing.status)
                reads.on_unknown(position, missing.first_entry_id, missing.last_entry_id)

    # Closing

    async def _length_through(self, ledger: LedgerMetadata, last_entry_id: int, write_back: WriteBack) -> int:
        """Return the length from the last entry's header. An empty last fragment has none: then the entry is read where it is."""
        if last_entry_id < 0:
            return 0
        if write_back.last_header is not None:
            return write_back.last_header.length
        if self._highest is not None and self._highest.entry_id == last_entry_id:
            return self._highest.length
        group = await read_entry(ledger, last_entry_id, self._connection_of, self._settings)
        return group.header(last_entry_id).length

    def _note_unknown(self, bookie: str, why: str, status: Status | None = None) -> None:
        """Note why a bookie's answer is unknown.

        `status`: the bookie's own status for an entry; BAD_DIGEST means damage on its disk. What arrives damaged may be intact
        there.
        """
        self._unknown[bookie] = why
        self._all_damage = self._all_damage and status is Status.BAD_DIGEST

    def _failed(self, what: str, error: type[RecoveryFailedError] = RecoveryFailedError) -> RecoveryFailedError:
        unknown = ", ".join(f"{bookie}: {why}" for bookie, why in self._unknown.items())
        message = f"ledger {self._ledger_id} cannot be recovered now, {what} (bookies without an answer: {unknown or 'none'})"
        return error(message, ledger_id=self._ledger_id, bookies=tuple(self._unknown))


def _plan_in_recovery(ledger: LedgerMetadata) -> LedgerMetadata | None:
    return in_recovery(ledger) if ledger.state is LedgerState.OPEN else None


def _end_of(ledger: LedgerMetadata) -> ClosedLedger:
    assert ledger.last_entry_id is not None
    assert ledger.length_bytes is not None
    return ClosedLedger(ledger.last_entry_id, ledger.length_bytes)


def _inside(first: int, last: int, covered: Sequence[int]) -> bool:
    return covered[0] <= first <= last <= covered[1]
