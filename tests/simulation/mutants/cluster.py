"""Mistakes about bookies that fail or come back blank, and about brokers that take over from one another."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from cepheid_bookie.admission import Admission
from cepheid_bookie.bookie_life import BookieLife
from cepheid_bookie.cookie import Cookie
from cepheid_bookie.limbo import Limbo
from cepheid_broker.ownership.broker_liveness import BrokerLiveness, PeerSigns
from cepheid_broker.ownership.bundle_ownership import BundleOwnership
from cepheid_broker.ownership.bundle_split import BundleSplits
from cepheid_broker.ownership.bundle_states import BundleStates, Tenure
from cepheid_broker.ownership.bundle_tenures import BundleTenures
from cepheid_broker.ownership.bundles import Bundle
from cepheid_broker.ownership.owner_reach import OwnerReach
from cepheid_broker.ownership.ownership import There
from cepheid_broker.topics.topics import Topics
from cepheid_ledger import ClosedLedger
from cepheid_ledger.add_pipeline import AddPipeline
from cepheid_ledger.ensemble_change import EnsembleChanger
from cepheid_ledger.recovery import Recovery
from cepheid_ledger.write_back import WriteBack
from cepheid_ledger.writer_state import ChangeEnsemble, Confirm, SendAdd, WriterState
from cepheid_managed_ledger import ManagedLedgers, orphans
from cepheid_managed_ledger.appender import Appender
from cepheid_managed_ledger.failover import Failover
from cepheid_metadata import UNDELETED, Chain, Delete, DeletedLedgers, LedgerMetadata, list_ledgers
from cepheid_ports import CepheidError
from cepheid_rpc import EntryGroup, encode_group
from tests.simulation.mutants.registry import mutant, scenario_mutant


@mutant("O1")
@contextlib.contextmanager
def drain_before_topics_are_closed() -> Iterator[None]:
    """A broker that is drained lets go of its bundles first, and closes their topics afterwards."""
    release = BundleTenures._release

    async def let_go(self: BundleTenures, tenure: Tenure, to: str, reason: str) -> Any:
        if reason != "the broker is drained":
            return await release(self, tenure, to, reason)
        user, self.user = self.user, mock.Mock(hand_over=mock.AsyncMock(return_value=True), unload_bundle=mock.AsyncMock())
        try:
            error = await release(self, tenure, to, reason)
        finally:
            self.user = user
        await user.unload_bundle(tenure.bundle, reason)
        return error

    with mock.patch.object(BundleTenures, "_release", let_go):
        yield


@mutant("L3")
@contextlib.contextmanager
def confirm_below_the_ack_quorum() -> Iterator[None]:
    confirm = WriterState._confirm

    def early(self: WriterState) -> Any:
        quorum = self._ack_quorum
        self._ack_quorum = max(1, quorum - 1)
        try:
            return confirm(self)
        finally:
            self._ack_quorum = quorum

    with mock.patch.object(WriterState, "_confirm", early):
        yield


@mutant("S11", "S2", "S5")
@contextlib.contextmanager
def take_a_blank_bookie_for_a_new_one() -> Iterator[None]:
    """Empty disks under a known id, and no limbo: as if nothing had ever been there (apache/bookkeeper#4812)."""
    with mock.patch.object(Cookie, "reborn", lambda self, limbo_below: self):
        yield


@mutant("S2", "S5")
@contextlib.contextmanager
def limbo_answers_a_certain_no() -> Iterator[None]:
    """Regular adds are refused, but what was lost is denied."""
    with mock.patch.object(Limbo, "sure", lambda self, ledger_id, status: status):
        yield


@mutant("S3", "S11", "L5")
@contextlib.contextmanager
def limbo_takes_regular_adds() -> Iterator[None]:
    """What was lost is unknown to readers, and writers go on as if no fence could have been among it."""
    make = Admission.__init__

    def made(self: Admission, *args: Any) -> None:
        make(self, *args)
        self._limbo_below = 0

    with mock.patch.object(Admission, "__init__", made):
        yield


@mutant("S2", "S5", "L5", "L10")
@contextlib.contextmanager
def limbo_denies_to_readers() -> Iterator[None]:
    """Whoever asks for the end hears that it is unknown; whoever asks for an entry is denied it."""
    with mock.patch.object(Limbo, "chunk", lambda self, ledger_id, answer: answer):
        yield


@mutant("S8")
@contextlib.contextmanager
def count_lives_in_metadata_first() -> Iterator[None]:
    """A crash in between leaves disks that look like an old copy of themselves."""

    async def count(self: BookieLife) -> None:
        life = self.life + 1
        await self._records.save_life(self._bookie_id, life)
        await self._worker.run(lambda: self._save(life))
        self.life = life

    with mock.patch.object(BookieLife, "count", count):
        yield


@mutant("S10")
@contextlib.contextmanager
def collect_what_can_be_brought_back() -> Iterator[None]:
    """Bookies ask for the living alone."""

    async def living(self: DeletedLedgers) -> set[int]:
        return {ledger_id async for ledger_id in list_ledgers(self._store)}

    async def is_living(self: DeletedLedgers, ledger_id: int) -> bool:
        return await self._living.exists(ledger_id)

    with mock.patch.multiple(DeletedLedgers, listing=living, is_kept=is_living):
        yield


@scenario_mutant
@contextlib.contextmanager
def count_what_departed_bookies_acknowledged() -> Iterator[None]:
    """Whoever takes a place inherits what the one before had acknowledged.

    Random worlds miss it: a change has to be decided between two answers, and a third one has to be later.
    """
    on_ensemble_changed = WriterState.on_ensemble_changed

    def inherit(self: WriterState, replaced: Mapping[str, str], *, supplied: bool = True) -> Any:
        held = {new: self._acked_through[old] for old, new in replaced.items()}
        effects = on_ensemble_changed(self, replaced, supplied=supplied)
        self._acked_through.update({new: max(acked, self._acked_through[new]) for new, acked in held.items()})
        confirm = self._confirm()
        return [*effects, confirm] if confirm is not None else effects

    with mock.patch.object(WriterState, "on_ensemble_changed", inherit), _forgiving_lanes():
        yield


@scenario_mutant
@contextlib.contextmanager
def count_a_bookie_that_is_left_until_its_successor_is_in_force() -> Iterator[None]:
    """It is well, so what it acknowledges is counted, although metadata may name its successor by now.

    Random worlds miss it: a bookie has to answer that metadata has not known for a while, and another one has to be late.
    """
    confirm = WriterState._confirm

    def count(self: WriterState) -> Confirm | None:
        begun, self._begun = self._begun, None
        try:
            return confirm(self)
        finally:
            self._begun = begun

    with mock.patch.object(WriterState, "_confirm", count):
        yield


@mutant("L3")
@contextlib.contextmanager
def count_failed_bookies_while_they_are_replaced() -> Iterator[None]:
    """Until the change is in force, those that are to leave count as before (apache/bookkeeper#4097)."""

    def confirm(self: WriterState) -> Confirm | None:
        reached = sorted(self._acked_through.values(), reverse=True)[self._ack_quorum - 1]
        if reached <= self.last_add_confirmed:
            return None
        self.last_add_confirmed = reached
        return Confirm(reached)

    def on_added(self: WriterState, bookie: str, last: int) -> Confirm | None:
        acked = self._acked_through
        if bookie not in acked or bookie in self._dropped or self.failed_for_good:
            return None
        acked[bookie] = max(acked[bookie], last)
        return self._confirm()

    with mock.patch.multiple(WriterState, _confirm=confirm, on_added=on_added):
        yield


@mutant("L3")
@contextlib.contextmanager
def count_newcomers_before_metadata_names_them() -> Iterator[None]:
    """The ensemble changes in memory first, and in metadata when it comes to it (apache/bookkeeper#1591)."""
    begin = EnsembleChanger._begin
    change_ensemble, refuse_change = AddPipeline.change_ensemble, AddPipeline.refuse_change

    def begin_and_believe(self: EnsembleChanger) -> bool:
        found = begin(self)
        if found:
            assert self.proposed is not None
            change_ensemble(self._pipeline, self.proposed[1])
            self._pipeline.state._change_wanted = True  # the next change waits for this one's compare-and-set
        return found

    def is_in_place(self: AddPipeline, replaced: Mapping[str, str]) -> None:
        if self._recovery:
            change_ensemble(self, replaced)
            return
        self.state._change_wanted = False
        self._perform(self.state._go_on())

    def refuse_nothing(self: AddPipeline) -> None:
        if self._recovery:
            refuse_change(self)
            return
        self.unconfirmed.let_go()
        if self.state._begun is None:
            self.state._change_wanted = False
        else:
            self._perform(self.state.on_change_impossible())

    with (
        mock.patch.object(EnsembleChanger, "_begin", begin_and_believe),
        mock.patch.multiple(AddPipeline, change_ensemble=is_in_place, refuse_change=refuse_nothing),
    ):
        yield


@scenario_mutant
@contextlib.contextmanager
def resend_from_the_lac_at_the_end_of_the_change() -> Iterator[None]:
    """What was confirmed during the change is in the new fragment, and its newcomers never get it: no answer is wrong by that (Qa
    bookies of both ensembles have it), but copies are missing that nobody misses. Only a scenario finds it.

    Random worlds miss it: none of its answers is wrong.
    """
    on_ensemble_changed = WriterState.on_ensemble_changed

    def late(self: WriterState, replaced: Mapping[str, str], *, supplied: bool = True) -> Any:
        lac = self.last_add_confirmed
        effects = on_ensemble_changed(self, replaced, supplied=supplied)
        for new in replaced.values():
            self._acked_through[new] = max(self._acked_through[new], lac)
        return [
            SendAdd(effect.bookies, lac + 1, effect.last) if isinstance(effect, SendAdd) else effect
            for effect in effects
            if not isinstance(effect, SendAdd) or lac < effect.last
        ]

    with mock.patch.object(WriterState, "on_ensemble_changed", late):
        yield


@mutant("L3", "V3", "V9")
@contextlib.contextmanager
def replace_in_metadata_without_sending_again() -> Iterator[None]:
    """Newcomers get what is appended from now on; what they answer counts for everything before."""
    on_ensemble_changed = WriterState.on_ensemble_changed

    def silent(self: WriterState, replaced: Mapping[str, str], *, supplied: bool = True) -> Any:
        effects = on_ensemble_changed(self, replaced, supplied=supplied)
        return [effect for effect in effects if not isinstance(effect, SendAdd)]

    with mock.patch.object(WriterState, "on_ensemble_changed", silent):
        yield


@mutant("L2")
@contextlib.contextmanager
def choose_a_bookie_again_that_had_left() -> Iterator[None]:
    """A, then B, then A: late answers of its first stay count for its second (apache/bookkeeper#4459)."""
    with mock.patch.object(WriterState, "unusable", property(lambda self: self.ensemble)):
        yield


@scenario_mutant
@contextlib.contextmanager
def take_a_change_in_doubt_for_refused() -> Iterator[None]:
    """No answer in time is a no: the next attempt is for what is right by then, with other bookies.

    Random worlds take 40 to 200 seeds: a leader has to be elected for longer than a change may take, just when there is one, and
    its writer's connection has to outlast that.
    """
    take_failure = EnsembleChanger._take_failure

    def refused(self: EnsembleChanger, error: Exception, is_unknown: bool) -> bool:
        return take_failure(self, error, False)

    with mock.patch.object(EnsembleChanger, "_take_failure", refused):
        yield


@mutant("L2", "R1")  # R1: repair recovers ledgers, too, and never edits a fragment that is open
@contextlib.contextmanager
def publish_a_recoverys_ensemble_change_early() -> Iterator[None]:
    """Whoever recovers next asks bookies that never had the entries (BOOKKEEPER-355)."""
    read_on, on_change = Recovery._read_on, WriteBack._on_change
    recoveries: dict[WriteBack, Recovery] = {}

    async def note(self: Recovery, ledger: LedgerMetadata, start: int, write_back: WriteBack) -> int:
        recoveries[write_back] = self
        return await read_on(self, ledger, start, write_back)

    async def publish(recovery: Recovery, ensemble: tuple[str, ...]) -> None:
        found = await recovery._records.get(recovery._ledger_id)
        if found is not None and found.record.state == "IN_RECOVERY":
            early = (*found.record.fragments[:-1], found.record.last_fragment.replace(ensemble=ensemble))
            with contextlib.suppress(CepheidError):
                await recovery._records.replace(recovery._ledger_id, found.record.replace(fragments=early), found.version)

    def change(self: WriteBack, change: ChangeEnsemble) -> None:
        on_change(self, change)
        if self.fragments:
            asyncio.get_running_loop().create_task(publish(recoveries[self], self.fragments[-1].ensemble))

    with mock.patch.object(Recovery, "_read_on", note), mock.patch.object(WriteBack, "_on_change", change):
        yield


@mutant("L4", "L7")
@contextlib.contextmanager
def stamp_recovered_copies_anew() -> Iterator[None]:
    """Copies carry the recoverer's LAC, which nobody confirmed."""
    push = WriteBack.push

    def stamped(self: WriteBack, group: EntryGroup) -> None:
        for entry_id, payload in enumerate(group.payloads(), group.first_entry_id):
            before = group.header(entry_id).length - len(payload)
            push(self, encode_group(group.ledger_id, entry_id, entry_id - 1, before, [payload]))

    with mock.patch.object(WriteBack, "push", stamped):
        yield


@mutant("M3", "M4", "M5", "H2", "H3")
@contextlib.contextmanager
def append_again_what_recovery_found() -> Iterator[None]:
    """A broken ledger is recovered, and everything that was not answered goes to the next one (apache/pulsar#7490)."""

    def settle(self: Appender, confirmed: int, last: int) -> None:
        for item in self._pending:
            item.take_back()
        self._unsent = deque(self._pending)

    with mock.patch.object(Appender, "settle", settle):
        yield


@mutant("M3", "M4", "M5", "V9", "H3", "ValueError")  # ValueError: a publish group counts its answers
@contextlib.contextmanager
def answer_again_what_recovery_found() -> Iterator[None]:
    """It is answered, and stays in the queue."""
    settle = Appender.settle

    def twice(self: Appender, confirmed: int, last: int) -> None:
        before = list(self._pending)
        settle(self, confirmed, last)
        answered = before[: len(before) - len(self._pending)]
        for item in answered:
            item.take_back()
            self.waiting_bytes += item.size_bytes
        self._pending.extendleft(reversed(answered))
        self._unsent = deque(self._pending)

    with mock.patch.object(Appender, "settle", twice):
        yield


@mutant("M2", "M3")
@contextlib.contextmanager
def record_an_end_that_recovery_did_not_find() -> Iterator[None]:
    """The writer knows what it was told OK for: that is where the ledger ends (BookKeeper's handle after a failure)."""
    insist = Failover._insist

    async def believe(self: Failover, step: str, attempt: Any, *, cut: bool = True) -> Any:
        if step != "recover":
            return await insist(self, step, attempt, cut=cut)
        writer = inspect.getclosurevars(attempt).nonlocals["left"].linked
        return ClosedLedger(writer.last_add_confirmed, writer.length)

    with mock.patch.object(Failover, "_insist", believe):
        yield


# V7, C5: what came before the chain names its ledger is sent to nobody, and counted by nobody.
# AssertionError: the end of that ledger fits nothing, and an assertion of the broker says so.
@mutant("M3", "H1", "H3", "H5", "V7", "C5", "AssertionError")
@contextlib.contextmanager
def resume_before_the_chain_names_the_next_ledger() -> Iterator[None]:
    """Appends go to it at once, and are answered from a ledger that the next owner never hears of."""
    record, resume = Failover._record, Appender.resume

    async def late(self: Failover, left: Any, end: ClosedLedger, writer: Any) -> None:
        resume(self._appender, writer)
        await record(self, left, end, writer)

    def resume_once(self: Appender, writer: Any) -> None:
        if self.writer is not writer:
            resume(self, writer)

    with mock.patch.object(Failover, "_record", late), mock.patch.object(Appender, "resume", resume_once):
        yield


@mutant("M3", "H1", "H3", "H4", "H8")  # H8: a reader is given what the topic does not have
@contextlib.contextmanager
def answer_what_lies_above_the_recovered_end() -> Iterator[None]:
    """All that was sent to the broken ledger counts as stored there."""
    settle = Failover._settle

    def believe(self: Failover, broken: Any, end: ClosedLedger) -> None:
        settle(self, broken, ClosedLedger(broken.last_add_pushed, broken.length))

    with mock.patch.object(Failover, "_settle", believe):
        yield


@mutant("M7", "V4", "C2", "V9", "ValidationError")  # ValidationError: the chain refuses to name it twice
@contextlib.contextmanager
def take_ledgers_of_this_opening_for_orphans() -> Iterator[None]:
    """A rollover may be about to record them."""

    def is_unnamed(ledger: LedgerMetadata, chain: Chain) -> bool:
        return ledger.custom.get("incarnation") == chain.incarnation and UNDELETED not in ledger.custom

    with mock.patch.object(orphans, "is_of_an_earlier_epoch", is_unnamed):
        yield


@mutant("M8")
@contextlib.contextmanager
def look_for_no_orphans() -> Iterator[None]:
    """What a broker made and did not record stays for ever."""
    with mock.patch.object(orphans.OrphanScan, "_look_at"):
        yield


@scenario_mutant
@contextlib.contextmanager
def keep_what_is_open_when_the_session_is_lost() -> Iterator[None]:
    """Nobody fences it, so it goes on.

    Random worlds take 100 to 300 seeds: a session has to be lost, nobody to take over, and somebody to write.
    """
    with mock.patch.object(ManagedLedgers, "on_session"):
        yield


@mutant("O1", "V4", "H5")  # H5: consumers stay where nothing arrives any more
@contextlib.contextmanager
def serve_bundles_whose_record_is_gone() -> Iterator[None]:
    """Neither the end of a session nor another owner's record takes anything away."""

    def keep(self: BundleStates) -> list[Bundle]:
        self.sessions += 1
        return []

    with (
        mock.patch.object(BundleStates, "on_session_lost", keep),
        mock.patch.object(BundleStates, "on_record", return_value=False),
    ):
        yield


@mutant("O1")
@contextlib.contextmanager
def give_bundles_away_before_topics_are_unloaded() -> Iterator[None]:
    """The next owner opens them while producers of this one are still answered."""
    release_outcome = BundleTenures._release_outcome

    async def early(self: BundleTenures, tenure: Any, to: str, reason: str) -> Any:
        user, self.user = self.user, mock.Mock(wraps=self.user, unload_bundle=mock.AsyncMock())
        try:
            return await release_outcome(self, tenure, to, reason)
        finally:
            self.user = user
            await user.unload_bundle(tenure.bundle, reason)

    with mock.patch.object(BundleTenures, "_release_outcome", early):
        yield


@mutant("O1")
@contextlib.contextmanager
def say_that_topics_are_unloaded_before_they_are() -> Iterator[None]:
    """The topics of a bundle are unloaded behind the back of whoever gives it away."""
    unload_bundle = Topics.unload_bundle

    async def begin(self: Topics, bundle: Bundle, reason: str) -> None:
        asyncio.get_running_loop().create_task(unload_bundle(self, bundle, reason))

    with mock.patch.object(Topics, "unload_bundle", begin):
        yield


def _forgiving_lanes() -> contextlib.AbstractContextManager[Any]:
    """Answers of somebody who is believed to hold more than it answered."""
    on_added = WriterState.on_added

    def forgiving(self: WriterState, bookie: str, last: int) -> Confirm | None:
        if last < self._acked_through.get(bookie, last):
            return None
        return on_added(self, bookie, last)

    return mock.patch.object(WriterState, "on_added", forgiving)


@mutant("O6")
@contextlib.contextmanager
def leave_the_record_of_a_bundle_that_was_split() -> Iterator[None]:
    """The parts get records, and that of the whole stays: a broker that has not heard of the split sends clients by it."""
    plan = BundleSplits._plan

    def kept(self: BundleSplits, *given: Any) -> Any:
        parts, ops = plan(self, *given)
        return parts, [op for op in ops if not isinstance(op, Delete)]

    with mock.patch.object(BundleSplits, "_plan", kept):
        yield


@mutant("O6")
@contextlib.contextmanager
def acquire_a_bundle_that_was_split() -> Iterator[None]:
    """A broker goes by the division of the namespace that it knows, and does not look whether it is the present one."""

    async def current(self: BundleTenures, bundle: Bundle) -> bool:
        return True

    async def unchecked(self: BundleOwnership, bundle: Bundle) -> None:
        return

    with mock.patch.object(BundleTenures, "_is_current", current), mock.patch.object(BundleOwnership, "_check_current", unchecked):
        yield


@scenario_mutant
@contextlib.contextmanager
def take_over_without_a_challenge() -> Iterator[None]:
    """Silence is taken for a proof, and nobody looks whether the broker is registered.

    Random worlds miss it: their brokers seldom sleep for longer than silence may last and shorter than their session.
    """

    async def proven(self: BrokerLiveness, peer: Any, answer_s: float) -> bool:
        return True

    async def gone(self: BrokerLiveness, broker_id: str) -> bool:
        return False

    with mock.patch.object(BrokerLiveness, "_is_gone", proven), mock.patch.object(BrokerLiveness, "has_come_back", gone):
        yield


@scenario_mutant
@contextlib.contextmanager
def forget_lookups_that_wait() -> Iterator[None]:
    """A lookup of a dead owner's bundle waits, and is not answered when there is another owner.

    Random worlds miss it: their clients give the lookup up after a while and ask again.
    """

    async def forgotten(self: OwnerReach, bundle: Bundle, there: There, look: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    with mock.patch.object(OwnerReach, "_wait", forgotten):
        yield


@scenario_mutant
@contextlib.contextmanager
def believe_that_everybody_lives() -> Iterator[None]:
    """A broker that hangs serves its topics until its session ends.

    Random worlds miss it: their bound for an owner is a session and more.
    """
    with mock.patch.object(PeerSigns, "suspicion", return_value=""):
        yield
