"""Ownership histories without I/O: brokers' cores against one model of the metadata store, in every order of events.

The model answers when the machine says so, so acquisitions, releases and notices of watches overlap with ends of sessions and with
each other. `MUTANTS` are changes of the core that the same histories must find.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from cepheid_broker.ownership.bundle_states import BundleStates, Phase, Tenure
from cepheid_broker.ownership.bundles import Bundle, bundle_of, bundles_of, preference
from cepheid_metadata import BundleOwner
from cepheid_wire import NamespaceName, TopicName

NAMESPACE = NamespaceName("t", "n")
BUNDLES = bundles_of(NAMESPACE, 2)
STEPS = 80


@dataclass
class Model:
    """The store: per bundle the owner's record with the session that made it, and the history's epoch and version."""

    owners: dict[Bundle, tuple[BundleOwner, str]] = field(default_factory=dict)
    epochs: dict[Bundle, int] = field(default_factory=dict)
    versions: dict[Bundle, int] = field(default_factory=dict)


class Broker:
    """The core, and what it has under way: each is finished by a later event."""

    def __init__(self, name: str, model: Model, kind: type[BundleStates]) -> None:
        self.name = name
        self.model = model
        self.states = kind(name)
        self.expired = False  # at the server; the broker may not have heard
        self.acquiring: list[tuple[Tenure, str, tuple[int, int] | None]] = []
        self.answers: list[Callable[[], None]] = []
        self.releasing: list[Tenure] = []
        self.epochs_served: list[tuple[Bundle, int]] = []

    def session(self) -> str:
        return self.states.incarnation

    # What a driver does, one step at a time

    def start_acquiring(self, bundle: Bundle) -> None:
        if self.states.find(bundle) is None:
            tenure = self.states.begin_acquire(bundle)
            seen = (self.model.epochs.get(bundle, 0), self.model.versions.get(bundle, -1))
            taken = bundle in self.model.owners and not self.states.is_own(self.model.owners[bundle][0])
            self.acquiring.append((tenure, self.session(), None if taken else seen))

    def write(self, lose_answer: bool) -> None:
        """The oldest acquisition's multi reaches the store, or is refused."""
        if not self.acquiring:
            return
        tenure, session, seen = self.acquiring.pop(0)
        bundle, model = tenure.bundle, self.model
        alive = session == self.session() and not self.expired
        if seen is not None and bundle in model.owners and self.states.is_own(model.owners[bundle][0]):
            epoch, version = model.owners[bundle][0].epoch, model.versions[bundle]
            self.answers.append(lambda: self.acquired(tenure, session, epoch, version))
            return
        if seen is None or not alive or bundle in model.owners or seen[1] != model.versions.get(bundle, -1):
            self.answers.append(lambda: self.states.on_not_acquired(tenure))
            return
        epoch, version = seen[0] + 1, seen[1] + 1
        record = BundleOwner(broker_id=self.name, incarnation=session, epoch=epoch, addresses={})
        model.owners[bundle] = (record, session)
        model.epochs[bundle], model.versions[bundle] = epoch, version
        if lose_answer:
            self.answers.append(lambda: self.states.on_not_acquired(tenure))
        else:
            self.answers.append(lambda: self.acquired(tenure, session, epoch, version))

    def acquired(self, tenure: Tenure, session: str, epoch: int, version: int) -> None:
        if self.states.on_acquired(tenure, epoch, version):
            assert session == self.session(), "it serves by the word of a session that is over"
            self.epochs_served.append((tenure.bundle, epoch))

    def answer(self) -> None:
        if self.answers:
            self.answers.pop(0)()

    def start_releasing(self, bundle: Bundle) -> None:
        if (tenure := self.states.begin_release(bundle)) is not None:
            self.releasing.append(tenure)

    def finish_releasing(self, lose_answer: bool) -> None:
        if not self.releasing:
            return
        tenure = self.releasing.pop(0)
        bundle, model = tenure.bundle, self.model
        if self.expired:
            return  # the store refuses; the core hears of the session's end
        if model.versions.get(bundle, -1) == tenure.history_version and bundle in model.owners:
            del model.owners[bundle]
            model.versions[bundle] += 1
            if lose_answer:
                self.states.on_kept(tenure)
                return
        self.states.on_released(tenure)

    def look(self) -> None:
        """Watches fire, or somebody asks: the records as they are. Nothing is heard when the session is over."""
        if self.expired:
            return
        for tenure in list(self.states.owned()):
            found = self.model.owners.get(tenure.bundle)
            self.states.on_record(tenure, None if found is None else found[0])

    def expire(self) -> None:
        """At the server: ephemeral records go, others may take over."""
        self.expired = True
        for bundle, (record, _) in list(self.model.owners.items()):
            if record.incarnation == self.session():
                del self.model.owners[bundle]

    def hear_of_the_end(self) -> None:
        if self.expired:
            self.states.on_session_lost()
            self.acquiring = [(tenure, session, None) for tenure, session, _ in self.acquiring]
            self.releasing = []
            self.expired = False


def run(seed: int, kind: type[BundleStates] = BundleStates) -> None:
    rng = random.Random(seed)
    model = Model()
    brokers = [Broker(f"b{number}", model, kind) for number in range(3)]
    acts: list[tuple[int, Callable[[Broker, Bundle], None]]] = [
        (5, lambda broker, bundle: broker.start_acquiring(bundle)),
        (5, lambda broker, _: broker.write(lose_answer=rng.random() < 0.2)),
        (5, lambda broker, _: broker.answer()),
        (2, lambda broker, bundle: broker.start_releasing(bundle)),
        (3, lambda broker, _: broker.finish_releasing(lose_answer=rng.random() < 0.2)),
        (3, lambda broker, _: broker.look()),
        (1, lambda broker, _: broker.expire()),
        (2, lambda broker, _: broker.hear_of_the_end()),
    ]
    for _ in range(STEPS):
        (act,) = rng.choices([act for _, act in acts], [weight for weight, _ in acts])
        act(rng.choice(brokers), rng.choice(BUNDLES))
        check_always(model, brokers)
    for _ in range(3):
        for broker in brokers:
            broker.hear_of_the_end()
            while broker.acquiring or broker.answers or broker.releasing:
                broker.write(lose_answer=False)
                broker.answer()
                broker.finish_releasing(lose_answer=False)
            broker.look()
            check_always(model, brokers)
    check_quiet(model, brokers)
    for broker in brokers:  # liveness: whoever asks now gets what nobody has
        for bundle in BUNDLES:
            broker.start_acquiring(bundle)
            broker.write(lose_answer=False)
            broker.answer()
    check_quiet(model, brokers)
    assert all(sum(broker.states.owns(bundle) for broker in brokers) == 1 for bundle in BUNDLES)


def check_always(model: Model, brokers: list[Broker]) -> None:
    served = [pair for broker in brokers for pair in broker.epochs_served]
    for bundle in BUNDLES:
        owners = [broker for broker in brokers if broker.states.owns(bundle) and not broker.expired]
        holding = model.owners.get(bundle)
        for broker in owners:
            tenure = broker.states.find(bundle)
            assert tenure is not None
            if holding is None or holding[0].incarnation != broker.session():
                # It believes in vain: only for as long as its watch has not spoken.
                assert tenure.epoch <= model.epochs.get(bundle, 0)
        truly = [broker for broker in owners if holding is not None and holding[0].incarnation == broker.session()]
        assert len(truly) <= 1
        epochs = sorted(epoch for found, epoch in served if found == bundle)
        by_broker = {(broker.name, epoch) for broker in brokers for found, epoch in broker.epochs_served if found == bundle}
        assert len(by_broker) == len(set(epochs)), f"two owners with one epoch: {by_broker}"


def check_quiet(model: Model, brokers: list[Broker]) -> None:
    """Everything was heard: who believes to own it has the record, and nobody is stuck."""
    for broker in brokers:
        for bundle in BUNDLES:
            tenure, holding = broker.states.find(bundle), model.owners.get(bundle)
            if tenure is not None:
                assert tenure.phase is Phase.OWNED, f"{broker.name} is stuck in {tenure.phase}"
                assert holding is not None
                assert broker.states.is_own(holding[0]), f"{broker.name} serves what {holding[0].broker_id} owns"
                assert tenure.epoch == holding[0].epoch


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_histories_of_ownership(first: int) -> None:
    for seed in range(first, first + 250):
        try:
            run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


class ForgetsTheSession(BundleStates):
    """Tenures of an old session go on."""

    def on_session_lost(self) -> list[Bundle]:
        self.sessions += 1
        return [tenure.bundle for tenure in self.owned()]


class KeepsItsIncarnation(BundleStates):
    """A record of the old session is taken for its own: rule 1."""

    @property
    def incarnation(self) -> str:
        return "the same for all"


class BelievesLateAnswers(BundleStates):
    def on_acquired(self, tenure: Tenure, epoch: int, history_version: int) -> bool:
        self._tenures[tenure.bundle] = tenure
        tenure.phase, tenure.epoch, tenure.history_version = Phase.OWNED, epoch, history_version
        return True


class IgnoresRecords(BundleStates):
    def on_record(self, tenure: Tenure, record: BundleOwner | None) -> bool:
        return False


class ForgetsTheRelease(BundleStates):
    def on_released(self, tenure: Tenure) -> None:
        return


MUTANTS = [ForgetsTheSession, KeepsItsIncarnation, BelievesLateAnswers, IgnoresRecords, ForgetsTheRelease]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_histories_find_every_mutant(mutant: type[BundleStates]) -> None:
    for seed in range(2000):
        try:
            run(seed, mutant)
        except AssertionError:
            return
    pytest.fail(f"{mutant.__name__} lives")


def test_bundles_cut_the_hash_space_without_gap_or_overlap() -> None:
    for count in (1, 2, 3, 4, 7, 16, 128):
        bundles = bundles_of(NAMESPACE, count)
        assert bundles[0].first == 0
        assert bundles[-1].last == 0xFFFFFFFF
        assert all(before.last + 1 == after.first for before, after in pairwise(bundles))
        for number in range(200):
            topic = TopicName.parse(f"persistent://t/n/topic-{number}")
            assert [bundle for bundle in bundles if bundle.holds(topic)] == [bundle_of(topic, count)]
    assert not bundles[0].holds(TopicName.parse("persistent://t/other/topic"))


def test_all_brokers_choose_alike_and_evenly_and_a_broker_that_comes_moves_only_its_own() -> None:
    bundles = bundles_of(NAMESPACE, 128)
    before = {bundle: preference(bundle, ["a", "b", "c"])[0] for bundle in bundles}
    assert before == {bundle: preference(bundle, ["c", "a", "b"])[0] for bundle in bundles}
    assert min(list(before.values()).count(name) for name in "abc") > 20
    after = {bundle: preference(bundle, ["a", "b", "c", "d"])[0] for bundle in bundles}
    assert all(after[bundle] in (before[bundle], "d") for bundle in bundles)
    assert preference(bundles[0], ["a", "b", "c"], "c")[0] == "c"
    assert preference(bundles[0], ["a", "b"], "gone") == preference(bundles[0], ["a", "b"])
