"""Closes a ledger whose writer is gone, or is to be gone.

    metadata: IN_RECOVERY ──► fence ──► read on from LAC, write back what is there ──► metadata: CLOSED at what was found

Rules (the numbers are those of the README):
6. IN_RECOVERY is written first: from then on the writer can neither change the ensemble nor close. The last fragment of
   *that* version of the record is what is fenced and read, to the end.
7. Nothing is read before the fence covers every window; recovery reads fence as well.
8. Entries present are written back, byte for byte, before the ledger may end at or after them: presence was judged from
   one copy. A bookie that fails meanwhile is replaced in memory only.
9. One compare-and-set closes. Who loses it adopts what the record says.
A recovery that dies or gives up leaves IN_RECOVERY behind; the next one continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from cepheid_ledger.add_pipeline import AddPipeline
from cepheid_ledger.bookie_channel import BookieChannel
from cepheid_ledger.errors import InvalidQuorumsError, LedgerError, RecoveryFailedError
from cepheid_ledger.ledger_writer import ClosedLedger
from cepheid_ledger.master_key import master_key_of
from cepheid_ledger.metadata_edits import closed, in_recovery
from cepheid_ledger.metadata_loop import FoundLedger, LedgerRecords, change_ledger, read_ledger
from cepheid_ledger.placement import Placement
from cepheid_ledger.recovery_state import FenceCoverage, RecoveryReads
from cepheid_ledger.replica_read import answers_of, read_entry
from cepheid_ledger.settings import LedgerSettings
from cepheid_ledger.writer_state import ChangeEnsemble, WriterState
from cepheid_metadata import Fragment, LedgerMetadata, LedgerState
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
"""Recovered entries on their way back at a time: beyond this, reading on waits."""


class Recovery:
    """One attempt."""

    def __init__(
        self,
        ledger_id: int,
        records: LedgerRecords,
        connection_of: Callable[[str], BookieConnection],
        channel_of: Callable[[str], BookieChannel],
        placement: Placement,
        settings: LedgerSettings,
    ) -> None:
        self._ledger_id = ledger_id
        self._records = records
        self._connection_of = connection_of
        self._channel_of = channel_of
        self._placement = placement
        self._settings = settings
        self._unknown: dict[str, str] = {}  # bookie → why it could not answer, for the error
        self._highest: EntryHeader | None = None  # of the entry with the largest id that any bookie showed

    async def run(self) -> ClosedLedger:
        """Raises NoSuchLedgerError, RecoveryFailedError, EntryUnavailableError, TimeoutError, MetadataError."""
        found = await read_ledger(self._records, self._ledger_id)
        found = await change_ledger(self._records, found, _plan_in_recovery, self._settings)
        if found.record.is_closed:
            return _end_of(found)
        if found.record.ensemble_size != found.record.write_quorum:
            raise InvalidQuorumsError(f"ledger {self._ledger_id} is striped over {found.record.ensemble_size} bookies")
        last_add_confirmed = await self._fence(found.record)
        # A LAC below the fragment's start is possible (the fragment is empty): what is before it is confirmed by rule.
        start = max(last_add_confirmed, found.record.last_fragment.first_entry_id - 1) + 1
        write_back = WriteBack(found.record, start, self._channel_of, self._placement)
        try:
            last_entry_id = await self._read_on(found.record, start, write_back)
            await write_back.wait_below(0)
        finally:
            write_back.close()
        length = await self._length_through(found.record, last_entry_id, write_back)
        fragments = [fragment for fragment in write_back.fragments if fragment.first_entry_id <= last_entry_id]

        def plan_closed(ledger: LedgerMetadata) -> LedgerMetadata | None:
            return None if ledger.is_closed else closed(ledger, last_entry_id, length, fragments)

        found = await change_ledger(self._records, found, plan_closed, self._settings)
        end = _end_of(found)
        fields = {"ledger_id": self._ledger_id, "first_recovered": start, "last_entry_id": end.last_entry_id}
        log.debug("ledger.recovered", extra=fields)
        return end

    # Fencing

    async def _fence(self, ledger: LedgerMetadata) -> int:
        """Returns a LAC, which may be too low, once no writer can reach Qa any more."""
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

        async with Calls() as calls:
            for position in range(len(ensemble)):
                calls.start(position, fence(position))
            while not coverage.is_covered:
                if coverage.is_impossible:
                    raise self._failed("its writer cannot be fenced")
                await calls.wait_next()
        return last_add_confirmed

    async def _read_lac(self, bookie: str, request: LacRequest) -> LacAnswer | None:
        """None: unknown."""
        try:
            async with asyncio.timeout(self._settings.recovery_timeout_s):
                answer = await self._connection_of(bookie).read_lac(request)
        except (BookieUnavailableError, TimeoutError) as error:
            self._unknown[bookie] = str(error) or "no answer in time"
            return None
        if answer.status is Status.OK or answer.status.certain_no:
            return answer
        self._unknown[bookie] = answer.status.name
        return None

    def _take_lac(self, answer: LacAnswer) -> int:
        """Only a LAC under a digest counts: one that is too high would leave entries out."""
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

    async def _read_on(self, ledger: LedgerMetadata, start: int, write_back: WriteBack) -> int:
        """Returns the last entry id of the ledger; everything up to it is in the hands of `write_back`."""
        ensemble = ledger.last_fragment.ensemble
        reads = RecoveryReads(ledger.ensemble_size, ledger.write_quorum, ledger.ack_quorum, start)
        async with Calls() as calls:
            while reads.last_entry_id is None:
                for position in range(len(ensemble)):
                    if position not in calls and not reads.is_heard(position):
                        calls.start(position, self._read(reads, ledger, position))
                if not calls:
                    raise self._failed(f"nobody knows whether entry {reads.next_entry_id} was confirmed")
                await calls.wait_next()
                for group in reads.take_present():
                    write_back.push(group)
                await write_back.wait_below(_WRITE_BACK_BYTES)
        return reads.last_entry_id

    async def _read(self, reads: RecoveryReads, ledger: LedgerMetadata, position: int) -> None:
        """Asks one bookie for the next batch, and tells `reads` of every id it was asked for, as far as the answer goes."""
        first = reads.next_entry_id
        last = first + self._settings.recovery_batch_entries - 1
        bookie = ledger.last_fragment.ensemble[position]
        request = ReadRequest(self._ledger_id, first, last, MAX_MESSAGE_BYTES, fence=True, master_key=master_key_of(ledger))
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
            self._unknown[bookie] = str(error) or "no answer in time"
            reads.on_unknown(position, reached, last)
        else:
            if reads.next_entry_id == first and not reads.is_heard(position):  # it left out what it was asked first
                self._unknown[bookie] = "an answer that says nothing of the entry"
                reads.on_unknown(position, first, last)

    def _take_answer(self, reads: RecoveryReads, bookie: str, position: int, answer: ReadAnswer, covered: tuple[int, int]) -> None:
        """Believes only what is about the ids that this chunk covers."""
        for group in answer.groups:
            if group.ledger_id != self._ledger_id or not _inside(group.first_entry_id, group.last_entry_id, covered):
                continue
            for part, is_valid in _verified_parts(group):
                if is_valid:
                    reads.on_copies(part)
                else:
                    self._unknown[bookie] = f"entry {part.first_entry_id} is damaged"
                    reads.on_unknown(position, part.first_entry_id, part.last_entry_id)
        for missing in answer.missing:
            if not _inside(missing.first_entry_id, missing.last_entry_id, covered):
                continue
            if missing.status.certain_no:
                reads.on_no(position, missing.first_entry_id, missing.last_entry_id)
            else:
                self._unknown[bookie] = missing.status.name
                reads.on_unknown(position, missing.first_entry_id, missing.last_entry_id)

    # Closing

    async def _length_through(self, ledger: LedgerMetadata, last_entry_id: int, write_back: WriteBack) -> int:
        """From the last entry's header. An empty last fragment shows none: then the entry is read where it lies."""
        if last_entry_id < 0:
            return 0
        if write_back.last_header is not None:
            return write_back.last_header.length
        if self._highest is not None and self._highest.entry_id == last_entry_id:
            return self._highest.length
        group = await read_entry(ledger, last_entry_id, self._connection_of, self._settings)
        return group.header(last_entry_id).length

    def _failed(self, what: str) -> RecoveryFailedError:
        unknown = ", ".join(f"{bookie}: {why}" for bookie, why in self._unknown.items())
        message = f"ledger {self._ledger_id} cannot be recovered now, {what} (bookies without an answer: {unknown or 'none'})"
        return RecoveryFailedError(message, ledger_id=self._ledger_id, bookies=tuple(self._unknown))


class WriteBack:
    """Sends recovered entries to the whole ensemble again, with the recovery flag, until Qa bookies hold each.

    A failed bookie is replaced in memory: published early, the change would send the next recoverer to bookies that never
    had the entries. `fragments` go into the closing compare-and-set.
    """

    def __init__(
        self, ledger: LedgerMetadata, start: int, channel_of: Callable[[str], BookieChannel], placement: Placement
    ) -> None:
        self.fragments: tuple[Fragment, ...] = ()
        self.last_header: EntryHeader | None = None
        self._placement = placement
        self._failure: LedgerError | None = None
        self._waiter: tuple[int, asyncio.Future[None]] | None = None
        self._make_pipeline: Callable[[], AddPipeline] = lambda: AddPipeline(
            ledger.ledger_id,
            WriterState(ledger.last_fragment.ensemble, ledger.ack_quorum, last_entry_id=start - 1),
            channel_of,
            master_key_of(ledger),
            recovery=True,
            on_change=self._on_change,
            on_failed=self._on_failed,
        )
        self._pipeline: AddPipeline | None = None  # made with the first entry: most recoveries of idle ledgers have none

    def push(self, group: EntryGroup) -> None:
        if self._failure is not None:
            return
        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
        self.last_header = group.header(group.last_entry_id)
        self._pipeline.push(group, self._on_done)

    async def wait_below(self, limit_bytes: int) -> None:
        """Until at most `limit_bytes` are unconfirmed. Raises RecoveryFailedError."""
        if self._pipeline is not None and self._pipeline.unconfirmed.size_bytes > limit_bytes:
            self._waiter = limit_bytes, asyncio.get_running_loop().create_future()
            try:
                await self._waiter[1]
            finally:
                self._waiter = None
        if self._failure is not None:
            raise RecoveryFailedError(f"recovered entries cannot be written back: {self._failure}") from self._failure

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.fail(RecoveryFailedError("the recovery ended"))

    def _on_done(self, outcome: EntryGroup | LedgerError) -> None:
        assert self._pipeline is not None
        if self._waiter is not None and not self._waiter[1].done():
            limit_bytes, future = self._waiter
            if self._failure is not None or self._pipeline.unconfirmed.size_bytes <= limit_bytes:
                future.set_result(None)

    def _on_failed(self, error: LedgerError) -> None:
        self._failure = error

    def _on_change(self, change: ChangeEnsemble) -> None:
        assert self._pipeline is not None
        state = self._pipeline.state
        replaced: dict[str, str] = {}
        for old in change.failed:
            self._placement.quarantine(old)
            new = self._placement.replacement(state.unusable, replaced.values())
            if new is not None:
                replaced[old] = new
        if not replaced:
            self._pipeline.refuse_change()
            return
        ensemble = tuple(replaced.get(bookie, bookie) for bookie in state.ensemble)
        kept = [fragment for fragment in self.fragments if fragment.first_entry_id < change.from_entry_id]
        self.fragments = (*kept, Fragment(first_entry_id=change.from_entry_id, ensemble=ensemble))
        self._pipeline.change_ensemble(replaced)


class Calls:
    """Calls to several bookies at once, each by its position. A single one runs without a task of its own."""

    def __init__(self) -> None:
        self._waiting: dict[int, Coroutine[Any, Any, None]] = {}
        self._running: dict[asyncio.Task[None], int] = {}

    async def __aenter__(self) -> Calls:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancels what nobody waits for any more: a hung bookie must not delay a decision."""
        for call in self._waiting.values():
            call.close()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __contains__(self, position: int) -> bool:
        return position in self._waiting or position in self._running.values()

    def start(self, position: int, call: Coroutine[Any, Any, None]) -> None:
        self._waiting[position] = call

    async def wait_next(self) -> None:
        """Until at least one has ended. Raises what it raised."""
        if len(self._waiting) == 1 and not self._running:
            _, call = self._waiting.popitem()
            await call
            return
        for position, call in self._waiting.items():
            self._running[asyncio.get_running_loop().create_task(call)] = position
        self._waiting.clear()
        done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in self._running if task in done]:  # in the order of starting: `done` is a set
            del self._running[task]
            task.result()


def _plan_in_recovery(ledger: LedgerMetadata) -> LedgerMetadata | None:
    return in_recovery(ledger) if ledger.state is LedgerState.OPEN else None


def _end_of(found: FoundLedger) -> ClosedLedger:
    ledger = found.record
    assert ledger.last_entry_id is not None
    assert ledger.length_bytes is not None
    return ClosedLedger(ledger.last_entry_id, ledger.length_bytes)


def _inside(first: int, last: int, covered: Sequence[int]) -> bool:
    return covered[0] <= first <= last <= covered[1]


def _verified_parts(group: EntryGroup) -> Iterator[tuple[EntryGroup, bool]]:
    """The group and whether it is valid; one by one when it is not, so that a damaged entry spoils no other."""
    try:
        group.verify()
    except (DigestMismatchError, MalformedGroupError):
        if len(group) == 1:
            yield group, False
            return
        for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
            yield from _verified_parts(group.slice(entry_id, entry_id))
    else:
        yield group, True
