"""A query's lease over several topics and several runs, against a broker of the test's making: no threads, no sleep."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import pytest

from cepheid_decode import AdminRefusedError, MessagePosition, PlanUnavailableError
from cepheid_spark.lease import Held
from cepheid_spark.lease_holder import Holder
from cepheid_spark.lease_keeper import LeaseKeeper
from tests.spark.stream_courses import Course, ModelLease, World

A, B, C = (f"persistent://public/default/{name}" for name in "abc")


class Refusing(ModelLease):
    """For some topics every call fails."""

    refused: frozenset[str] = frozenset()
    renewals: list[str]

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.renewals = []

    def hold(self, topic: str, first: MessagePosition, *, takes: bool = False) -> Held:
        self._ask(topic)
        return super().hold(topic, first)

    def hold_on(self, topic: str, first: MessagePosition) -> Held | None:
        self._ask(topic)
        self.renewals.append(topic)
        return super().hold_on(topic, first)

    def move(self, topic: str, first: MessagePosition) -> bool:
        self._ask(topic)
        return super().move(topic, first)

    def _ask(self, topic: str) -> None:
        if topic in self.refused:
            raise AdminRefusedError("403, not you", status=403)


def bench() -> tuple[World, Refusing, LeaseKeeper]:
    world = World(random.Random(0))
    for topic in (A, B, C):
        world.create(topic)
        world.write(topic, 9)
        world.settle(topic)
    lease = Refusing(world, "s")
    keeper = LeaseKeeper(lease, renew_s=0.0, at_once=1)  # type: ignore[arg-type]
    keeper._start = lambda: None  # type: ignore[method-assign]
    return world, lease, keeper


def place(world: World, topic: str, entry_id: int) -> MessagePosition:
    return MessagePosition(world.chains[topic][0].ledger_id, entry_id)


def test_what_is_refused_for_one_topic_is_done_for_the_others() -> None:
    world, lease, keeper = bench()
    keeper.hold({A: place(world, A, 0), C: place(world, C, 0)})
    keeper.want(B, place(world, B, 0))
    lease.refused = frozenset((A, B))
    keeper.move({A: place(world, A, 3), C: place(world, C, 3)})
    lease.renewals.clear()
    with pytest.raises(AdminRefusedError):
        keeper._work()
    assert world.cursors[C, "s"] == place(world, C, 3)
    assert lease.renewals == [C]
    lease.refused = frozenset()
    keeper._work()
    assert world.cursors[A, "s"] == place(world, A, 3)
    assert keeper.covers(B)


def test_a_topic_that_was_deleted_is_not_made_again_for_its_lease() -> None:
    world, _, keeper = bench()
    keeper.hold({A: place(world, A, 0)})
    keeper.want(B, place(world, B, 0))
    world.delete(A)
    world.delete(B)
    keeper._work()
    assert not world.cursors
    assert not keeper.covers(B)
    world.create(A)
    keeper._work()
    assert (A, "s") in world.cursors
    assert not keeper.has_held(A), "there was a gap"


def test_a_lease_that_is_found_moves_with_the_first_commit() -> None:
    """Each run of AvailableNow is told of the batch before it alone: without this move nothing would ever be let go."""
    world, _, keeper = bench()
    keeper.hold({A: place(world, A, 0)})
    again = LeaseKeeper(ModelLease(world, "s"), at_once=1)  # type: ignore[arg-type]
    again._start = lambda: None  # type: ignore[method-assign]
    again.hold({A: place(world, A, 8)}, must_exist=True)
    assert world.cursors[A, "s"] == place(world, A, 0), "it stays where it is"
    again.move({A: place(world, A, 5)})
    again._work()
    assert world.cursors[A, "s"] == place(world, A, 5)
    again.move({A: place(world, A, 4)})
    again._work()
    assert world.cursors[A, "s"] == place(world, A, 5), "forward only"


def test_runs_of_available_now_let_go_what_earlier_runs_have_read() -> None:
    world = World(random.Random(0))
    world.create(A)
    course = Course(world, from_latest=False, disturb=lambda _: None)
    for _ in range(5):
        world.write(A, 5)
        world.roll(A)
        course.begin()
        course.run(9, available_now=True)
        keeper = course.query._keeper
        assert keeper is not None
        keeper._work()
        world.trim(A)
    assert len(course.offsets) == 5
    assert course.rows(A) == course.expected(A) == list(range(1, 26))
    assert len(world.chains[A]) <= 3, "of the last two batches, and the open one"


@pytest.mark.parametrize("died", [False, True])
def test_a_named_lease_that_is_missing_after_the_first_offset_is_known_for_a_gap(died: bool) -> None:
    """The driver dies before its first commit, the lease expires, and the same start is asked for again, elsewhere by then."""
    world = World(random.Random(0))
    world.create(A)
    course = Course(world, from_latest=True, disturb=lambda _: None, subscription="mine")
    initial = course.query.initial()
    world.write(A, 5)
    world.settle(A)
    course.state.look()
    end = course.query.latest(initial, is_limited=True)
    assert end.ends != initial.ends
    if died:
        del world.cursors[A, "mine"]
        world.roll(A)
        world.trim(A)
        course.begin()
        course.query.initial()
    course.query._adopt(end, initial)
    assert course.query._keeper is not None
    assert course.query._keeper.has_held(A) is not died


def test_a_named_lease_that_is_missing_holds_the_batch_that_is_done_again() -> None:
    """Not where the new start is, which is further on by then, and is not used."""
    world = World(random.Random(0))
    world.create(A)
    course = Course(world, from_latest=True, disturb=lambda _: None, subscription="mine")
    initial = course.query.initial()
    world.write(A, 3)
    world.settle(A)
    course.state.look()
    end = course.query.latest(initial, is_limited=True)
    world.roll(A)
    world.write(A, 3)
    world.settle(A)
    del world.cursors[A, "mine"]
    course.begin()
    again = course.query.initial()
    assert world.cursors[A, "mine"] > end.starts[A]
    course.query.plan(again, end)
    assert world.cursors[A, "mine"] == end.starts[A]
    world.trim(A)
    course.offsets = [json.dumps(end.to_json())]
    course.run(1)
    assert course.rows(A)[:3] == [1, 2, 3]


def test_the_lease_of_a_start_that_is_not_used_goes_again() -> None:
    world = World(random.Random(0))
    world.create(A)
    world.write(A, 5)
    world.settle(A)
    course = Course(world, from_latest=False, disturb=lambda _: None)
    initial = course.query.initial()
    end = course.query.latest(initial, is_limited=True)
    course.begin()
    again = course.query.initial()
    assert len(world.cursors) == 2
    course.query.plan(again, end)
    assert list(world.cursors) == [(A, end.subscription)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_keeper_whose_lease_is_taken_rests_until_it_is_taken_back() -> None:
    """Spark commits once more behind the question that ends the query, and may take its time to end it."""
    world, lease, _ = bench()
    keeper = LeaseKeeper(lease, renew_s=0.0, at_once=1)  # type: ignore[arg-type]
    rounds: list[float] = []
    work = keeper._work
    keeper._work = lambda: (rounds.append(0.0), work())[1]  # type: ignore[method-assign, func-returns-value]
    keeper.hold({A: place(world, A, 0)})
    keeper._on_taken(Holder("o", "h", 1, 1, 1).taken("s", A, 1))
    keeper.move({A: place(world, A, 5)})
    keeper.want(B, place(world, B, 0))
    rounds.clear()
    time.sleep(0.3)
    assert len(rounds) <= 1, "the one that was under way"
    renewals = len(lease.renewals)
    keeper.take({})
    wait_until(lambda: len(lease.renewals) > renewals)
    keeper.close()


class Away(Refusing):
    """Brokers of some topics are away: each call to them waits until it gives up."""

    def _ask(self, topic: str) -> None:
        if topic in self.refused:
            self.waited += 1
            raise PlanUnavailableError("nobody answers")

    waited = 0


def test_what_cannot_be_held_is_said_after_the_first_wait() -> None:
    world, _, _ = bench()
    lease = Away(world, "s")
    topics = [f"persistent://public/default/t-partition-{number}" for number in range(160)]
    lease.refused = frozenset(topics)
    keeper = LeaseKeeper(lease)  # type: ignore[arg-type]
    with pytest.raises(PlanUnavailableError):
        keeper.hold({topic: MessagePosition(7, 0) for topic in topics})
    assert lease.waited <= 16, "those that run at once"


def test_topics_whose_brokers_are_away_are_renewed_behind_the_others() -> None:
    world, _, _ = bench()
    lease = Away(world, "s")
    keeper = LeaseKeeper(lease, renew_s=0.0, at_once=1)  # type: ignore[arg-type]
    keeper._start = lambda: None  # type: ignore[method-assign]
    keeper.hold({topic: place(world, topic, 0) for topic in (A, B, C)})
    lease.refused = frozenset((A,))
    asked: list[str] = []
    ask = lease._ask
    lease._ask = lambda topic: (asked.append(topic), ask(topic))[1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(2):
        with pytest.raises(PlanUnavailableError):
            keeper._work()
    lease.refused = frozenset()
    keeper._work()
    keeper._work()
    assert asked == [A, B, C, B, C, A, B, C, A, A, B, C], "the first round shows whose"
