"""Access modes without I/O: who is admitted, who waits, who stays out; against a model under random histories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cepheid_broker.publishing.producer_access import AccessMode, Admit, Close, ProducerAccess, Refuse, SaveEpoch, Wait, Why

SHARED, EXCLUSIVE = AccessMode.SHARED, AccessMode.EXCLUSIVE
WAITING, FENCING = AccessMode.WAIT_FOR_EXCLUSIVE, AccessMode.EXCLUSIVE_WITH_FENCING


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    name: str
    access_mode: AccessMode = SHARED
    shown_epoch: int | None = None


class Topic:
    """Does what the core says; saves epochs at once unless `hold_saves`."""

    def __init__(self, epoch: int | None = None) -> None:
        self.core: ProducerAccess[Client] = ProducerAccess(epoch)
        self.durable = epoch
        self.hold_saves = False
        self.saving: int | None = None
        self.log: list[str] = []

    def ask(self, name: str, mode: AccessMode = SHARED, shown: int | None = None, replaces: Client | None = None) -> Client:
        client = Client(name, mode, shown)
        self.perform(self.core.ask(client, replaces))
        return client

    def leave(self, client: Client) -> None:
        self.perform(self.core.leave(client))

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Admit(client, epoch):
                    self.log.append(f"admit {client.name} {epoch}")
                case Wait(client):
                    self.log.append(f"wait {client.name}")
                case Refuse(client, why):
                    self.log.append(f"refuse {client.name} {why.name}")
                case Close(client):
                    self.log.append(f"close {client.name}")
                case SaveEpoch(epoch):
                    assert self.saving is None
                    self.saving = epoch
        if self.saving is not None and not self.hold_saves:
            self.save()

    def save(self) -> None:
        self.durable, self.saving = self.saving, None
        self.perform(self.core.on_epoch_saved())

    def fail_save(self) -> None:
        self.saving = None
        self.perform(self.core.on_epoch_failed())

    def said(self) -> list[str]:
        log, self.log = self.log, []
        return log


def test_shared_producers_join_until_somebody_is_exclusive() -> None:
    topic = Topic()
    first, second = topic.ask("a"), topic.ask("b")
    topic.ask("x", EXCLUSIVE)
    assert topic.said() == ["admit a None", "admit b None", "refuse x FENCED"]
    topic.leave(first)
    topic.leave(second)
    holder = topic.ask("x", EXCLUSIVE)
    topic.ask("a")
    topic.ask("y", EXCLUSIVE)
    assert topic.said() == ["admit x 0", "refuse a HELD", "refuse y FENCED"]
    topic.leave(holder)
    topic.ask("a")
    assert topic.said() == ["admit a 0"]  # it is told the epoch too


def test_whoever_waits_is_admitted_in_order_each_with_its_own_epoch() -> None:
    topic = Topic()
    first = topic.ask("a", WAITING)
    second, third, fourth = (topic.ask(name, WAITING) for name in "bcd")
    topic.ask("s")
    assert topic.said() == ["admit a 0", "wait b", "wait c", "wait d", "refuse s HELD"]
    topic.leave(third)  # gave up
    topic.leave(first)
    assert topic.said() == ["admit b 1"]
    topic.leave(second)
    topic.leave(fourth)
    assert topic.said() == ["admit d 2"]


def test_a_shared_producer_waits_for_nobody_and_does_not_overtake_who_waits() -> None:
    topic = Topic()
    shared = topic.ask("s")
    topic.ask("w", WAITING)
    topic.ask("t")
    topic.leave(shared)
    assert topic.said() == ["admit s None", "wait w", "refuse t HELD", "admit w 0"]


def test_fencing_closes_the_connected_and_refuses_the_waiting() -> None:
    topic = Topic()
    topic.ask("a", EXCLUSIVE)
    topic.ask("b", WAITING)
    topic.ask("f", FENCING)
    assert topic.said() == ["admit a 0", "wait b", "close a", "refuse b FENCED", "admit f 1"]
    topic.ask("g", FENCING, shown=0)
    assert topic.said() == ["refuse g FENCED"]


def test_fencing_also_takes_the_name_from_who_has_it() -> None:
    topic = Topic()
    topic.ask("a", FENCING)
    topic.ask("a", EXCLUSIVE)
    topic.ask("a", FENCING)
    topic.ask("a", FENCING, shown=0)
    assert topic.said() == ["admit a 0", "refuse a NAME_IN_USE", "close a", "admit a 1", "refuse a FENCED"]


def test_who_was_replaced_cannot_come_back_and_who_was_not_keeps_its_epoch() -> None:
    topic = Topic()
    holder = topic.ask("a", EXCLUSIVE)
    topic.leave(holder)
    holder = topic.ask("a", EXCLUSIVE, shown=0)
    topic.leave(holder)
    other = topic.ask("b", WAITING)
    topic.leave(other)
    for mode in (EXCLUSIVE, WAITING, FENCING):
        topic.ask("a", mode, shown=0)
    assert topic.said() == ["admit a 0", "admit a 0", "admit b 1", *["refuse a FENCED"] * 3]


def test_the_epoch_survives_the_topic() -> None:
    topic = Topic(epoch=7)
    topic.ask("a", EXCLUSIVE, shown=6)
    topic.ask("b", EXCLUSIVE, shown=7)
    assert topic.said() == ["refuse a FENCED", "admit b 7"]


def test_nobody_is_admitted_before_its_epoch_is_saved() -> None:
    topic = Topic()
    topic.hold_saves = True
    topic.ask("a", EXCLUSIVE)
    topic.ask("b", WAITING)
    topic.ask("s")
    assert topic.said() == ["wait b", "refuse s HELD"]
    topic.ask("f", FENCING)  # while the epoch of a is being saved
    assert topic.said() == ["refuse a FENCED", "refuse b FENCED"]
    topic.save()
    assert topic.said() == []  # that was the epoch of a
    topic.save()
    assert topic.said() == ["admit f 1"]


def test_an_epoch_that_cannot_be_saved_refuses_everybody_who_is_not_connected() -> None:
    topic = Topic()
    topic.hold_saves = True
    topic.ask("a", EXCLUSIVE)
    topic.ask("b", WAITING)
    topic.fail_save()
    assert topic.said() == ["wait b", "refuse a NOT_SAVED", "refuse b NOT_SAVED"]
    topic.ask("s")
    assert topic.said() == ["admit s None"]


def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    topic = Topic()
    old = topic.ask("a", EXCLUSIVE)
    topic.ask("w", WAITING)
    topic.ask("a", EXCLUSIVE, 0, replaces=old)
    topic.leave(old)  # late news
    assert topic.said() == ["admit a 0", "wait w", "admit a 0"]
    topic.ask("a")
    assert topic.said() == ["refuse a NAME_IN_USE"]


class Histories(RuleBasedStateMachine):
    """The model knows who is connected from what was said, and what each may rely on; the core must never break it."""

    def __init__(self) -> None:
        super().__init__()
        self.core: ProducerAccess[Client] = ProducerAccess()
        self.durable: int | None = None
        self.saving: int | None = None
        self.connected: dict[Client, int | None] = {}
        self.waiting: list[Client] = []
        self.pending: list[Client] = []  # asked, not answered
        self.last_exclusive: tuple[str, int] | None = None

    def perform(self, effects: list[Any], asking: Client | None = None) -> None:
        answered = False
        for effect in effects:
            match effect:
                case Admit(client, epoch):
                    self.on_admitted(client, epoch)
                case Wait(client):
                    assert client.access_mode is WAITING
                    assert client is asking
                    self.waiting.append(client)
                case Refuse(client, why):
                    if why is Why.FENCED and client.access_mode is WAITING and client is asking:
                        assert client.shown_epoch is not None
                    self.drop(client)
                case Close(client):
                    assert asking is not None
                    assert asking.access_mode is FENCING
                    assert client in self.connected
                    self.drop(client)
                case SaveEpoch(epoch):
                    assert self.saving is None
                    assert epoch == (0 if self.durable is None else self.durable + 1)
                    self.saving = epoch
            answered |= not isinstance(effect, SaveEpoch) and effect.applicant is asking
        if asking is not None and not answered:
            assert asking.access_mode is not SHARED, "a Shared producer is answered at once"
            self.pending.append(asking)

    def on_admitted(self, client: Client, epoch: int | None) -> None:
        assert epoch == self.durable, "told before it was durable"
        if client in self.waiting:
            assert self.waiting[0] is client, "overtaken"
        self.drop(client)
        if client.access_mode is SHARED:
            assert all(other.access_mode is SHARED for other in self.connected)
            assert not self.waiting, "a Shared producer overtook"
        else:
            assert not self.connected, "exclusive"
            assert epoch is not None
            if client.shown_epoch is not None:
                assert client.shown_epoch <= epoch
            if self.last_exclusive is not None:
                name, before = self.last_exclusive
                assert epoch > before or (epoch == before and client.shown_epoch == before), (name, client.name)
            self.last_exclusive = (client.name, epoch)
        self.connected[client] = epoch

    def drop(self, client: Client) -> None:
        self.connected.pop(client, None)
        for group in (self.waiting, self.pending):
            if client in group:
                group.remove(client)

    @rule(name=st.sampled_from("abcdef"), mode=st.sampled_from(AccessMode), shown=st.none() | st.integers(0, 6))
    def ask(self, name: str, mode: AccessMode, shown: int | None) -> None:
        if shown is not None and shown > (-1 if self.durable is None else self.durable):
            shown = self.durable  # nobody was told a later one
        client = Client(name, mode, shown)
        self.perform(self.core.ask(client), client)

    @precondition(lambda self: self.connected or self.waiting or self.pending)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([*self.connected, *self.waiting, *self.pending]))
        self.drop(client)
        self.perform(self.core.leave(client))

    @precondition(lambda self: self.connected or self.waiting or self.pending)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from([*self.connected, *self.waiting, *self.pending]))
        place = self.waiting.index(old) if old in self.waiting else None
        had = self.connected.pop(old, "not connected")
        self.drop(old)
        new = Client(old.name, old.access_mode, old.shown_epoch)
        before = self.last_exclusive
        effects = self.core.ask(new, old)
        if place is not None:
            assert effects in ([Wait(new)], [])  # none: its epoch is being saved
            self.waiting.insert(place, new)
        elif had != "not connected":
            assert effects == [Admit(new, self.core.epoch)]
            self.connected[new] = self.core.epoch
            self.last_exclusive = before
        else:
            assert effects == []
            self.pending.append(new)

    @precondition(lambda self: self.saving is not None)
    @rule(saved=st.booleans())
    def save_ends(self, saved: bool) -> None:
        epoch, self.saving = self.saving, None
        if saved:
            self.durable = epoch
            self.perform(self.core.on_epoch_saved())
        else:
            self.perform(self.core.on_epoch_failed())

    @rule()
    def restart(self) -> None:
        """A crash: the record is what is left. A save under way may or may not have been done."""
        self.core = ProducerAccess(self.durable)
        self.connected, self.waiting, self.pending, self.saving = {}, [], [], None

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if self.waiting or self.pending:
            assert self.connected or self.saving is not None, "they wait, and nothing will happen"

    @invariant()
    def both_know_the_same(self) -> None:
        known = set(self.core.applicants)
        assert known == {*self.connected, *self.waiting, *self.pending}
        assert len({client.name for client in known}) == len(known)


Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
