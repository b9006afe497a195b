"""Mistakes of whoever recovers a ledger: fences that are left out, copies that are not waited for, ends that are made up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cepheid_ledger import ClosedLedger, LedgerClient, RecoveryFailedError, ensemble_change, recovery
from cepheid_ledger.recovery import Recovery
from cepheid_ledger.recovery_state import FenceCoverage, RecoveryReads
from cepheid_ledger.write_back import WriteBack
from cepheid_metadata import LedgerMetadata, LedgerState
from cepheid_rpc import EntryGroup, ReadRequest
from tests.simulation.mutants.registry import mutant, scenario_mutant


@mutant("L10", "L5")
@contextlib.contextmanager
def read_for_a_recovery_without_fencing() -> Iterator[None]:
    """The same mistake at the other end: whoever recovers does not ask for the fence."""

    def unfenced(*args: Any, **fields: Any) -> ReadRequest:
        return ReadRequest(*args, **{**fields, "fence": False})

    with mock.patch.object(recovery, "ReadRequest", unfenced):
        yield


@mutant("L10", "L5")
@contextlib.contextmanager
def count_a_timeout_as_a_negative() -> Iterator[None]:
    """Whoever does not answer a recovery read does not have the entry."""
    with mock.patch.object(RecoveryReads, "on_unknown", RecoveryReads.on_no):
        yield


@mutant("L10")
@contextlib.contextmanager
def recover_without_waiting_for_copies() -> Iterator[None]:
    """The ledger is closed as soon as its end is known, whatever holds its last entries."""

    async def do_not_wait(self: recovery.WriteBack, limit_bytes: int) -> None:
        pass

    with mock.patch.object(recovery.WriteBack, "wait_below", do_not_wait):
        yield


@mutant("L5", "L10")
@contextlib.contextmanager
def take_one_denial_for_enough() -> Iterator[None]:
    """What one bookie of the write set certainly never had, it thinks, nobody can have confirmed."""
    make = RecoveryReads.__init__

    def made(self: RecoveryReads, *args: Any) -> None:
        make(self, *args)
        self._noes_needed = 1

    with mock.patch.object(RecoveryReads, "__init__", made):
        yield


@scenario_mutant
@contextlib.contextmanager
def report_the_end_that_a_recovery_found_itself() -> Iterator[None]:
    """Somebody else has closed the ledger meanwhile, elsewhere (apache/bookkeeper#1712).

    Random worlds miss it: two processes have to meet in one moment of a third one's write.
    """
    run, length_through = Recovery.run, Recovery._length_through
    found: dict[Recovery, ClosedLedger] = {}

    async def note(self: Recovery, ledger: LedgerMetadata, last_entry_id: int, write_back: WriteBack) -> int:
        length = await length_through(self, ledger, last_entry_id, write_back)
        found[self] = ClosedLedger(last_entry_id, length)
        return length

    async def insist(self: Recovery) -> ClosedLedger:
        end = await run(self)
        return found.pop(self, end)

    with mock.patch.multiple(Recovery, run=insist, _length_through=note):
        yield


@mutant("L12")
@contextlib.contextmanager
def take_the_length_of_a_ledger_from_its_last_fragment() -> Iterator[None]:
    """Where nothing was written since, there is nothing to read it from: the end is right, and the length 0."""

    async def as_far_as_known(self: Recovery, ledger: LedgerMetadata, last_entry_id: int, write_back: WriteBack) -> int:
        return write_back.last_header.length if write_back.last_header is not None else 0

    with mock.patch.object(Recovery, "_length_through", as_far_as_known):
        yield


@scenario_mutant
@contextlib.contextmanager
def look_for_the_last_entry_in_the_last_fragment() -> Iterator[None]:
    """Nobody of an ensemble that got nothing can tell what is before it, today or ever: recovery fails each time.

    Random worlds miss it: everybody of an ensemble has to be replaced, and to get nothing.
    """
    read_entry = recovery.read_entry

    async def in_the_last(ledger: LedgerMetadata, entry_id: int, *others: Any) -> EntryGroup:
        last = ledger.last_fragment.model_copy(update={"first_entry_id": 0})
        return await read_entry(ledger.model_copy(update={"fragments": (last,)}), entry_id, *others)

    with mock.patch.object(recovery, "read_entry", in_the_last):
        yield


@mutant("V1", "L2", "L5", "L10", "AssertionError")  # AssertionError: what it writes again is not what the next writer expects
@contextlib.contextmanager
def begin_a_recovery_before_the_last_fragment() -> Iterator[None]:
    """Behind the LAC that it was told. Bookies that joined later know of none yet, and deny all that is before them: recovery walks
    through fragments that it has no business in, and ends in the wrong place or never (apache/bookkeeper#2615)."""
    fence, read_on = Recovery._fence, Recovery._read_on
    told: dict[Recovery, int] = {}

    async def fence_and_note(self: Recovery, ledger: LedgerMetadata) -> int:
        told[self] = await fence(self, ledger)
        return told[self]

    async def read_from_there(self: Recovery, ledger: LedgerMetadata, start: int, write_back: WriteBack) -> int:
        return await read_on(self, ledger, min(start, told.pop(self) + 1), write_back)

    with mock.patch.multiple(Recovery, _fence=fence_and_note, _read_on=read_from_there):
        yield


@scenario_mutant
@contextlib.contextmanager
def wait_for_an_append_before_a_bookie_that_is_gone_is_left() -> Iterator[None]:
    """An open ledger goes on naming bookies that are gone, until something is sent to them.

    Random worlds miss it: their ledgers are never idle for long, and bookies come back.
    """
    with mock.patch.object(LedgerClient, "leave_bookie", return_value=None):
        yield


@mutant("L1", "L2")
@contextlib.contextmanager
def insist_on_an_ensemble_whoever_recovers() -> Iterator[None]:
    """A writer whose change meets another version reads that, and writes its change into it."""
    plan_change = ensemble_change._plan_change

    def insist(ledger: LedgerMetadata, *change: Any) -> LedgerMetadata | None:
        return plan_change(ledger.replace(state=LedgerState.OPEN, last_entry_id=None, length_bytes=None), *change)

    with mock.patch.object(ensemble_change, "_plan_change", insist):
        yield


@mutant("L11", "L10", "L5")
@contextlib.contextmanager
def read_for_a_recovery_behind_the_first_fence() -> Iterator[None]:
    """Who may still acknowledge is not asked."""

    def is_covered(self: FenceCoverage) -> bool:
        return any(self._fenced)

    with mock.patch.object(FenceCoverage, "is_covered", property(is_covered)):
        yield


@mutant("V1", "V2", "V4", "V9")
@contextlib.contextmanager
def leave_a_recovery_to_whoever_began_it() -> Iterator[None]:
    """Who may be dead."""
    recover = LedgerClient.recover

    async def wait(self: LedgerClient, ledger_id: int, **options: Any) -> ClosedLedger:
        record = await self._records.get(ledger_id)
        if record is not None and record.record.state is LedgerState.IN_RECOVERY:
            raise RecoveryFailedError(f"somebody recovers ledger {ledger_id}", ledger_id=ledger_id)
        return await recover(self, ledger_id, **options)

    with mock.patch.object(LedgerClient, "recover", wait):
        yield
