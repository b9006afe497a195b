"""Mistakes of repair: names of bookies that lack copies, marks that vanish, writers that are fenced, entries that are given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock
from unittest.mock import AsyncMock

from cepheid_bookie.bookie import Bookie
from cepheid_bookie.checkpoint import Checkpointer
from cepheid_ledger import entry_copy, is_finished, recovery
from cepheid_metadata import Fragment, LedgerMetadata
from cepheid_recovery import decommissions, repair_plan, replication_worker
from cepheid_recovery.replication_worker import ReplicationWorker
from cepheid_rpc import AddRequest, BookieUnavailableError, Status
from tests.simulation.mutants.registry import mutant, scenario_mutant


def _replaced(ledger: LedgerMetadata, replaced: Mapping[tuple[int, str], str]) -> LedgerMetadata:
    """As `bookies_replaced`, and nothing stops it."""
    fragments = tuple(
        Fragment.model_construct(
            first_entry_id=fragment.first_entry_id,
            ensemble=tuple(replaced.get((fragment.first_entry_id, bookie), bookie) for bookie in fragment.ensemble),
        )
        for fragment in ledger.fragments
    )
    return ledger.model_copy(update={"fragments": fragments})


@mutant("R1", "R3")
@contextlib.contextmanager
def claim_before_the_copies_are_synced() -> Iterator[None]:
    """A worker names the new bookie as soon as everything is sent to it."""

    async def do_not_wait(self: Any) -> None:
        pass

    with mock.patch.object(entry_copy._Target, "wait_synced", do_not_wait):
        yield


@mutant("R1")
@contextlib.contextmanager
def replace_a_bookie_of_the_open_fragment() -> Iterator[None]:
    """A worker treats the last fragment of an open ledger like any other (apache/bookkeeper#3917, turned round)."""
    entries_of = repair_plan.entries_of

    def as_far_as_known(ledger: LedgerMetadata, fragment: Fragment) -> tuple[int, int]:
        return entries_of(ledger, fragment) if is_finished(ledger, fragment) else (fragment.first_entry_id, -1)

    with (
        mock.patch.multiple(repair_plan, is_finished=lambda ledger, fragment: True, entries_of=as_far_as_known),
        mock.patch.object(replication_worker, "bookies_replaced", _replaced),
    ):
        yield


@mutant("R2")
@contextlib.contextmanager
def name_a_bookie_of_the_ensemble_again() -> Iterator[None]:
    """The place of a lost bookie is given to one that has another copy already (apache/bookkeeper, BOOKKEEPER-106)."""
    plan_repair = repair_plan.plan_repair

    def plan(ledger: LedgerMetadata, mark: Any, registered: Any, draining: Any, choose: Any, racks: Any, *, lost: Any) -> Any:
        def choose_inside(ensemble: Sequence[str], excluded: Any, position: int) -> str | None:
            return next((bookie for bookie in ensemble if bookie in registered and bookie not in excluded), None)

        return plan_repair(ledger, mark, registered, draining, choose_inside, racks, lost=lost)

    with mock.patch.multiple(replication_worker, plan_repair=plan, bookies_replaced=_replaced):
        yield


@mutant("R3", "V5")
@contextlib.contextmanager
def remove_a_mark_when_something_is_left() -> Iterator[None]:
    """What a worker could not do it forgets: its mark is removed when the rest is done."""
    carry_out = ReplicationWorker._carry_out

    async def forget(self: ReplicationWorker, *args: Any) -> Any:
        attempt = await carry_out(self, *args)
        attempt.left.clear()
        return attempt

    with mock.patch.object(ReplicationWorker, "_carry_out", forget):
        yield


@scenario_mutant
@contextlib.contextmanager
def remove_a_mark_whatever_its_version() -> Iterator[None]:
    """A mark that was renewed during the copy goes with what was found earlier.

    Random worlds take hundreds of seeds: another bookie of the same ledger has to fail while a worker copies.
    """
    write = ReplicationWorker._write

    async def write_anyway(self: ReplicationWorker, ledger: Any, mark: Any, attempt: Any) -> bool:
        newest = await self._marks.get(ledger.record.ledger_id)
        return await write(self, ledger, mark if newest is None else newest, attempt)

    with mock.patch.object(ReplicationWorker, "_write", write_anyway):
        yield


@mutant("R4")
@contextlib.contextmanager
def recover_an_open_ledger_at_once() -> Iterator[None]:
    """A worker that finds a lost bookie in an open ledger does not wait for the writer to replace it."""

    def may(self: ReplicationWorker, ledger: Any, mark: Any, open_bookies: Sequence[str]) -> bool:
        return bool(open_bookies)

    with mock.patch.object(ReplicationWorker, "_may_recover", may):
        yield


@mutant("R1")
@contextlib.contextmanager
def take_silence_for_a_lost_copy() -> Iterator[None]:
    """A source that does not answer has nothing: entries of bookies that restart are called lost."""
    ask = entry_copy._Source._ask

    async def ask_or_deny(self: Any, *args: Any) -> Any:
        try:
            return await ask(self, *args)
        except (BookieUnavailableError, TimeoutError):
            return Status.NO_ENTRY

    with mock.patch.object(entry_copy._Source, "_ask", ask_or_deny):
        yield


@mutant("V5")
@contextlib.contextmanager
def copy_without_the_recovery_flag() -> Iterator[None]:
    """A bookie takes a copy like an add of the writer: one that lost its disk, or was fenced, refuses it for ever
    (apache/bookkeeper#3783)."""

    def regular(*args: Any, **fields: Any) -> AddRequest:
        return AddRequest(*args, **{**fields, "recovery": False})

    with mock.patch.object(entry_copy, "AddRequest", regular):
        yield


@mutant("V5")
@contextlib.contextmanager
def leave_a_lock_whose_answer_was_lost() -> Iterator[None]:
    """A worker that was not told that it has a lock waits for its end, which is that of its own session."""

    async def never(self: ReplicationWorker, ledger_id: int) -> bool:
        return False

    with mock.patch.object(ReplicationWorker, "_is_left_over", never):
        yield


@scenario_mutant
@contextlib.contextmanager
def recover_and_have_nothing_checked() -> Iterator[None]:
    """What only the writer of a ledger knew of missing copies dies with it."""
    with mock.patch.object(recovery, "to_check", return_value=[]):
        yield


@scenario_mutant
@contextlib.contextmanager
def leave_all_fragments_of_an_open_ledger() -> Iterator[None]:
    """Nothing of a ledger is copied before it is closed (apache/bookkeeper#3917).

    Random worlds miss it: no ledger stays open in the end.
    """

    def closed(ledger: LedgerMetadata, fragment: Fragment) -> bool:
        return ledger.is_closed

    with mock.patch.object(repair_plan, "is_finished", closed):
        yield


@scenario_mutant
@contextlib.contextmanager
def trust_copies_that_are_in_memory_alone() -> Iterator[None]:
    """A bookie that is asked for what is on its disk returns an entry before its journal is synced, and the mark is removed.

    Random worlds take hundreds of seeds: the journal must be slow at the moment of a copy, and the worker must check it again.
    """
    with mock.patch.object(Bookie, "_status_of_memory", AsyncMock(return_value=Status.OK)):
        yield


@scenario_mutant
@contextlib.contextmanager
def trust_copies_that_the_journal_refused() -> Iterator[None]:
    """A bookie counts an entry of its cache as stored although its journal had no room for it.

    Random worlds take hundreds of seeds: the disk must be full at the moment of a copy.
    """
    with mock.patch.object(Checkpointer, "keeps_refused", False):
        yield


@scenario_mutant
@contextlib.contextmanager
def drain_a_bookie_that_may_have_the_only_copy() -> Iterator[None]:
    """No record names it any more, so it counts as empty, whatever a mark remembers it for.

    Random worlds rarely get there: all other copies of an entry must be unreadable while its bookie is decommissioned.
    """
    with mock.patch.object(decommissions, "marks_remembering", AsyncMock(return_value=[])):
        yield


@scenario_mutant
@contextlib.contextmanager
def drain_a_bookie_with_the_last_copies_of_deleted_ledgers() -> Iterator[None]:
    """A ledger that is deleted needs no copies, although it can still be brought back.

    Random worlds take hundreds of seeds: a ledger must be deleted shortly before its bookie counts as drained, because it can be
    brought back for 1.5 s only.
    """
    with mock.patch.object(decommissions, "last_copies_of_deleted", AsyncMock(return_value={})):
        yield
