"""One name of a lease, several queries: one of them has it, the others hear of it; and what a lease that is found holds."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import replace
from typing import Any

import pytest

from cepheid_decode import AdminRefusedError, MessagePosition, PlanUnavailableError
from cepheid_spark import lease as lease_module
from cepheid_spark import lease_holder
from cepheid_spark.lease import FROM_PROPERTY, LEASE_PROPERTY, Held, Lease, call_all
from cepheid_spark.lease_holder import HOLDER_PROPERTY, SILENCE_MS, Holder, LeaseTakenError, this_kernel
from cepheid_spark.lease_keeper import LeaseKeeper
from tests.spark.lease_broker import LeaseBroker
from tests.spark.stream_courses import Course, World

A, B = "persistent://public/default/a", "persistent://public/default/b"
TTL_S = 3600.0


class Clock:
    ms = 1_000_000_000

    def __call__(self) -> int:
        return self.ms


def holder(name: str, host: str = "elsewhere") -> Holder:
    return Holder(name, host, 4711, 1, 1)


def at(entry_id: int) -> MessagePosition:
    return MessagePosition(7, entry_id)


def lease(broker: LeaseBroker, clock: Clock, name: str | None, ttl_s: float = TTL_S) -> Lease:
    """`name` of the query; None: of a batch read."""
    return Lease(broker, "s", ttl_s, clock, holder=None if name is None else holder(name))  # type: ignore[arg-type]


def test_a_query_that_begins_is_refused_the_name_of_one_that_lives() -> None:
    broker, clock = LeaseBroker(A), Clock()
    one, other = lease(broker, clock, "one"), lease(broker, clock, "other")
    assert one.hold(A, at(5)) is Held.MADE
    clock.ms += 20_000
    with pytest.raises(
        LeaseTakenError, match=r"'s' of .*/a is the lease of another .*process 4711 on elsewhere.* last active 20 s ago"
    ):
        other.hold(A, at(2))
    assert broker.stands[A, "s"] == at(5), "untouched"
    assert one.renew(A)


def test_the_name_of_one_that_is_silent_is_free() -> None:
    broker, clock = LeaseBroker(A), Clock()
    lease(broker, clock, "one").hold(A, at(5))
    clock.ms += SILENCE_MS
    assert lease(broker, clock, "other").hold(A, at(5)) is Held.FOUND
    with pytest.raises(LeaseTakenError):
        lease(broker, clock, "one").renew(A)


def test_a_holder_on_this_host_lives_as_long_as_its_process() -> None:
    here = replace(holder("h", socket.gethostname()), pid=os.getppid(), kernel=this_kernel())
    assert here.lives(1)
    assert not here.lives(1 + SILENCE_MS)
    assert not replace(here, pid=2**22 + 1).lives(1), "no process has such a number"
    assert not replace(here, pid=os.getpid()).lives(1), "one query a process"
    elsewhere = replace(here, pid=2**22 + 1, kernel="another container")
    assert elsewhere.lives(1), "its processes cannot be seen from here, though its host has the same name"
    assert not elsewhere.lives(1 + SILENCE_MS)
    assert replace(elsewhere, kernel="").lives(1), "of an earlier version"
    assert Holder.parse(here.text(9)) == replace(here, seen_ms=9)


def test_processes_are_told_apart_by_kernel_and_namespace() -> None:
    mine = Holder.this_process(1)
    assert mine.kernel == this_kernel()
    assert Holder.parse(mine.text(7)) == replace(mine, seen_ms=7)
    if os.path.exists("/proc/self/ns/pid"):
        assert str(os.stat("/proc/self/ns/pid").st_ino) in mine.kernel


DAY_MS = 24 * 3600_000


def test_a_dead_holder_with_a_clock_of_tomorrow_loses_the_name_when_it_was_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, clock = LeaseBroker(A, B), Clock()
    one, other = lease(broker, Clock(), "one"), lease(broker, clock, "other")
    clock.ms -= DAY_MS
    for topic in (A, B):
        one.hold(topic, at(5))
    elapsed_s = [0.0]
    monkeypatch.setattr(other, "_elapsed_s", lambda: elapsed_s[0])
    for elapsed_s[0] in (0.0, SILENCE_MS / 1000 - 1):
        with pytest.raises(LeaseTakenError, match=r"whose clock is 86400 s ahead of the one here.*for 180 s"):
            other.hold(A, at(5))
    broker.properties[A, "s"][HOLDER_PROPERTY] = holder("one").text(Clock.ms + 1)  # renewed
    for elapsed_s[0] in (SILENCE_MS / 1000, 2 * SILENCE_MS / 1000 - 1):
        with pytest.raises(LeaseTakenError):
            other.hold(A, at(5))
    elapsed_s[0] = 2 * SILENCE_MS / 1000
    assert other.hold(A, at(5)) is Held.FOUND
    assert other.hold(B, at(5)) is Held.FOUND, "whoever is silent on one topic is dead on all"


def test_a_query_that_begins_watches_a_holder_whose_clock_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lease_module, lease_holder):
        monkeypatch.setattr(module, "SILENCE_MS", 300)
    broker, clock = LeaseBroker(A), Clock()
    lease(broker, Clock(), "one").hold(A, at(5))
    clock.ms -= DAY_MS
    keeper = LeaseKeeper(lease(broker, clock, "other"), at_once=1, patience_s=0.0)
    keeper._start = lambda: None  # type: ignore[method-assign]
    keeper.hold({A: at(5)}, takes=False)
    keeper.check()
    assert keeper.covers(A)


@pytest.mark.parametrize(
    "text", [None, "", "somebody", "[]", "3", '{"id": "x"}', '{"id":"x","host":"h","pid":"p","since_ms":1,"seen_ms":1}']
)
def test_what_is_no_mark_of_ours_is_nobodys(text: str | None) -> None:
    assert Holder.parse(text) is None


def test_a_query_that_goes_on_takes_the_name_and_the_one_before_hears_of_it() -> None:
    broker, clock = LeaseBroker(A), Clock()
    before = LeaseKeeper(lease(broker, clock, "before"), renew_s=0.0, at_once=1)
    before._start = lambda: None  # type: ignore[method-assign]
    before.hold({A: at(5)}, takes=False)
    before.check()
    assert lease(broker, clock, "now").hold(A, at(5), takes=True) is Held.FOUND
    before.move({A: at(6)})
    before._work()
    with pytest.raises(LeaseTakenError):
        before.check()
    place = broker.stands[A, "s"]
    before.move({A: at(8)})
    before._work()
    assert broker.stands[A, "s"] == place, "it is not its lease any more"


def test_a_query_that_lost_the_name_moves_nothing_on() -> None:
    """Its commits of the minute until its next renewal: the other one has still to read what lies before them."""
    broker, clock = LeaseBroker(A), Clock()
    before = LeaseKeeper(lease(broker, clock, "before"), at_once=1)
    before._start = lambda: None  # type: ignore[method-assign]
    before.hold({A: at(40)})
    lease(broker, clock, "now").hold(A, at(10), takes=True)
    assert broker.stands[A, "s"] == at(10)
    before.move({A: at(50)})
    before._work()
    assert broker.stands[A, "s"] == at(10)
    with pytest.raises(LeaseTakenError):
        before.check()


def test_what_stands_behind_the_start_is_moved_back_and_known_for_a_gap() -> None:
    broker, clock = LeaseBroker(A), Clock()
    lease(broker, clock, "gone").hold(A, at(50))
    clock.ms += SILENCE_MS
    keeper = LeaseKeeper(lease(broker, clock, "one"), at_once=1)
    keeper._start = lambda: None  # type: ignore[method-assign]
    keeper.hold({A: at(20)})
    assert broker.stands[A, "s"] == at(20)
    assert keeper.covers(A)
    assert not keeper.has_held(A), "until now nothing held what lies between"


def test_what_stands_at_the_head_holds_all_there_is() -> None:
    """A ledger without entries leaves the chain with its owner, and takes the subscription along: nothing was let go."""
    broker, clock = LeaseBroker(A), Clock()
    lease(broker, clock, "before").hold(A, at(0))
    broker.first_kept[A] = broker.stands[A, "s"] = MessagePosition(9, 0)
    clock.ms += SILENCE_MS
    keeper = LeaseKeeper(lease(broker, clock, "one"), at_once=1)
    keeper._start = lambda: None  # type: ignore[method-assign]
    keeper.hold({A: at(0)}, must_exist=True)
    assert keeper.has_held(A)


def test_a_batch_moves_back_a_lease_but_nobodys_own_subscription(caplog: pytest.LogCaptureFixture) -> None:
    broker, clock = LeaseBroker(A, B), Clock()
    lease(broker, clock, None).hold(A, at(50))
    assert lease(broker, clock, None).hold(A, at(20)) is Held.MOVED_BACK
    assert broker.stands[A, "s"] == at(20)
    assert lease(broker, clock, None).hold(A, at(30)) is Held.FOUND
    assert broker.stands[A, "s"] == at(20)
    broker.stands[B, "s"], broker.properties[B, "s"] = at(50), {"mine": "x"}
    assert lease(broker, clock, None).hold(B, at(20)) is Held.FOUND
    assert (broker.stands[B, "s"], broker.properties[B, "s"]) == (at(50), {"mine": "x"})
    assert "lease.moved_back: subscription s of" in caplog.text
    assert f"lease.holds_less: subscription s of {B} was at {at(50)}, after the start {at(20)}" in caplog.text


def test_a_batch_leaves_the_lease_of_a_stream_alone_and_shortens_none() -> None:
    broker, clock = LeaseBroker(A), Clock()
    lease(broker, clock, "stream").hold(A, at(50))
    with pytest.raises(LeaseTakenError):
        lease(broker, clock, None).hold(A, at(20))
    clock.ms += SILENCE_MS
    ends = broker.properties[A, "s"][LEASE_PROPERTY]
    lease(broker, clock, None, ttl_s=60.0).hold(A, at(50))
    assert broker.properties[A, "s"][LEASE_PROPERTY] == ends
    lease(broker, clock, "stream", ttl_s=60.0).renew(A)
    assert int(broker.properties[A, "s"][LEASE_PROPERTY]) == clock.ms + 60_000


def test_a_users_subscription_is_marked_and_gets_no_end() -> None:
    broker, clock = LeaseBroker(A), Clock()
    broker.stands[A, "s"], broker.properties[A, "s"] = at(50), {"mine": "x"}
    assert lease(broker, clock, "one").hold(A, at(20)) is Held.MOVED_BACK
    assert broker.stands[A, "s"] == at(20)
    assert broker.properties[A, "s"].keys() == {"mine", HOLDER_PROPERTY, FROM_PROPERTY}
    with pytest.raises(LeaseTakenError):
        lease(broker, clock, "other").hold(A, at(20))


class HeldCourse(Course):
    """A course whose lease is one at `broker`; each process is another holder."""

    def __init__(self, broker: LeaseBroker, world: World, name: str | None = "s") -> None:
        self.broker = broker
        self.processes = 0
        named = {} if name is None else {"subscription": name}
        super().__init__(world, from_latest=False, disturb=lambda _: None, **named)

    def _new_keeper(self, name: str) -> LeaseKeeper:
        self.processes += 1
        mine = holder(f"{id(self)}-{self.processes}")
        keeper = LeaseKeeper(Lease(self.broker, name, TTL_S, Clock(), holder=mine), at_once=1, patience_s=0.0)  # type: ignore[arg-type]
        keeper._start = lambda: None  # type: ignore[method-assign]
        return keeper


def world_of_one() -> tuple[World, LeaseBroker]:
    world, broker = World(random.Random(0)), LeaseBroker(A, B)
    world.create(A)
    world.write(A, 5)
    world.settle(A)
    return world, broker


def test_a_second_query_with_the_name_ends_before_its_first_batch() -> None:
    world, broker = world_of_one()
    first, second = HeldCourse(broker, world), HeldCourse(broker, world)
    first.run(1)
    with pytest.raises(LeaseTakenError):
        second.run(1)
    assert not second.offsets
    world.write(A, 5)
    world.settle(A)
    first.state.look()
    first.run(1)
    assert first.rows(A) == list(range(1, 11))


@pytest.mark.parametrize("committed", [False, True])
def test_the_query_itself_goes_on_from_its_checkpoint_at_once(committed: bool) -> None:
    """Its process of before was heard of a moment ago; a batch that is not committed makes Spark ask for the start again."""
    world, broker = world_of_one()
    course = HeldCourse(broker, world)
    course.run(1)
    course.committed = int(committed)
    before = course.query._keeper
    assert before is not None
    course.begin()
    world.write(A, 5)
    world.settle(A)
    course.run(1)
    assert course.rows(A) == list(range(1, 11))
    before._renew_s = 0.0
    before._work()
    with pytest.raises(LeaseTakenError):
        before.check()


def refuse(broker: LeaseBroker, topic: str) -> None:
    """No subscription can be made for it any more."""
    request, local_name = broker.request, topic.rpartition("/")[2]

    def request_or_refuse(method: str, path: str, *, body: Any = None) -> Any:
        if method == "PUT" and f"/{local_name}/" in path:
            raise AdminRefusedError("it has as many subscriptions as are allowed", status=403)
        return request(method, path, body=body)

    broker.request = request_or_refuse  # type: ignore[method-assign]


@pytest.mark.parametrize("name", [None, "s"])
def test_a_start_that_fails_leaves_no_lease_behind(name: str | None) -> None:
    """A supervisor starts it again and again, without a name under another one each time."""
    world, broker = world_of_one()
    world.create(B)
    refuse(broker, B)
    course = HeldCourse(broker, world, name)
    for _ in range(3):
        course.begin()
        with pytest.raises(AdminRefusedError):
            course.query.initial()
    assert not broker.stands


def test_a_start_that_is_not_used_leaves_no_lease_though_that_of_the_checkpoint_cannot_be_made() -> None:
    world, broker = world_of_one()
    world.create(B)
    course = HeldCourse(broker, world, None)
    initial = course.query.initial()
    end = course.query.latest(initial, is_limited=True)
    broker.stands.clear()
    course.begin()
    course.query.initial()
    refuse(broker, B)
    with pytest.raises(AdminRefusedError):
        course.query.plan(course.query.initial(), end)
    assert list(broker.stands) == [(A, end.subscription)], "which the query needs whenever it goes on"


def test_a_query_that_is_refused_its_name_leaves_it_on_no_other_topic() -> None:
    broker, clock = LeaseBroker(A, B), Clock()
    lease(broker, clock, "other").hold(B, at(5))
    keeper = LeaseKeeper(lease(broker, clock, "one"), at_once=1, patience_s=0.0)
    keeper._start = lambda: None  # type: ignore[method-assign]
    keeper.hold({A: at(0), B: at(0)}, takes=False)
    with pytest.raises(LeaseTakenError):
        keeper.check()
    assert list(broker.stands) == [(B, "s")]
    keeper.take({A: at(0), B: at(0)})
    assert sorted(broker.stands) == [(A, "s"), (B, "s")], "its checkpoint says that the name is its own"


def test_what_another_query_has_taken_meanwhile_is_not_dropped() -> None:
    broker, clock = LeaseBroker(A, B), Clock()
    one = LeaseKeeper(lease(broker, clock, "one"), at_once=1)
    one._start = lambda: None  # type: ignore[method-assign]
    one.hold({A: at(0), B: at(0)})
    lease(broker, clock, "other").hold(B, at(5), takes=True)
    one.drop()
    assert list(broker.stands) == [(B, "s")]


def test_what_cannot_be_dropped_is_told(caplog: pytest.LogCaptureFixture) -> None:
    broker, clock = LeaseBroker(A), Clock()
    keeper = LeaseKeeper(lease(broker, clock, "one"), at_once=1)
    keeper._start = lambda: None  # type: ignore[method-assign]
    keeper.hold({A: at(0)})

    def away(method: str, path: str, *, body: Any = None) -> Any:
        raise PlanUnavailableError("nobody answers")

    broker.request = away  # type: ignore[method-assign]
    keeper.drop()
    assert "lease.not_dropped" in caplog.text


def test_one_call_that_fails_keeps_no_other_from_being_made() -> None:
    made: list[int] = []

    def call(number: int) -> None:
        if number % 10 == 3:
            raise ValueError(number)
        made.append(number)

    failures = call_all([lambda number=number: call(number) for number in range(40)])  # type: ignore[misc]
    assert [error.args[0] for error in failures] == [3, 13, 23, 33]
    assert len(made) == 36
