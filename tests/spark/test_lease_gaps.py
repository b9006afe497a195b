"""What a lease did not hold is missed, though the query comes back to a lease that is there, or never saw it gone."""

from __future__ import annotations

import json
import random
from contextlib import suppress

import pytest

from cepheid_scan import DataLossError, MessagePosition
from cepheid_spark.stream_state import Snapshot
from tests.spark.stream_courses import MANY, Course, ProcessDied, World

COURSES = 150
A, B = (f"persistent://public/default/{name}" for name in "ab")


def read_of_a_alone(**options: str) -> tuple[World, Course]:
    """Nothing was written to b: it stands in the offset at [ledger,-1]."""
    world = World(random.Random(0))
    world.create(A)
    world.create(B)
    world.write(A, 3)
    world.settle(A)
    course = course_of(world, **options)
    course.run(1)
    assert json.loads(course.offsets[-1])["t"][B][1] == -1
    return world, course


def course_of(world: World, **options: str) -> Course:
    return Course(world, from_latest=False, disturb=lambda _: None, **options)


def write_and_trim(world: World, topic: str) -> None:
    for _ in range(2):
        world.write(topic, 4)
        world.roll(topic)
    world.trim(topic)


def write_more(world: World) -> None:
    for topic in (A, B):
        world.write(topic, 2)
        world.settle(topic)


@pytest.mark.parametrize("away", [False, True])
def test_what_was_acknowledged_on_a_lease_is_missed_though_the_lease_is_there(away: bool) -> None:
    """By time to live, a quota, a consumer, or somebody's `expireMessages`."""
    world, course = read_of_a_alone()
    if away:
        course.begin()
    world.write(B, 4)
    world.roll(B)
    ((key, _),) = [found for found in world.cursors.items() if found[0][0] == B]
    world.cursors[key] = MessagePosition(world.chains[B][-1].ledger_id, 0)
    world.trim(B)
    write_more(world)
    if not away:
        course.state.look()
    with pytest.raises(DataLossError, match="4 entries"):
        course.run(5)


@pytest.mark.parametrize("has_records", [True, False])
def test_each_start_misses_what_went_while_the_lease_was_gone(has_records: bool) -> None:
    """The first one makes it again; a supervisor starts the query once more, and that one finds it."""
    world, course = read_of_a_alone()
    world.cursors.clear()  # the query was away for longer than leaseTtl
    write_and_trim(world, B)
    write_more(world)
    if not has_records:
        world.records.clear()
    for _ in range(3):
        course.begin()
        with pytest.raises(DataLossError, match="8 entries" if has_records else "unknown number"):
            course.run(5)


@pytest.mark.parametrize("restarts", [1, 3])
def test_brokers_that_restart_while_a_query_with_a_lease_is_away_are_no_loss(restarts: int) -> None:
    world, course = read_of_a_alone()
    course.begin()
    for _ in range(restarts):
        world.lose_owner(B)
    write_more(world)
    course.run(5)
    assert course.rows(B) == course.expected(B) == [6, 7]


def test_what_is_trimmed_between_the_first_look_and_the_lease_is_missed() -> None:
    """The offsets name a start that is not there any more by then."""
    world = World(random.Random(0))
    world.create(A)
    for _ in range(2):
        world.write(A, 3)
        world.roll(A)
    course = course_of(world)
    resolve = course.query._resolve_start

    def resolve_and_trim(snapshot: Snapshot) -> dict[str, MessagePosition]:
        starts = resolve(snapshot)
        world.trim(A)
        return starts

    course.query._resolve_start = resolve_and_trim
    course.query.initial()
    course.state.look()
    with pytest.raises(DataLossError, match="6 entries"):
        course.run(3)


def gone_on(course: Course) -> Course:
    """Another query, which has the checkpoint of this one, and a lease."""
    later = course_of(course.world)
    later.offsets, later.committed, later.batches = course.offsets, course.committed, course.batches
    return later


def test_a_topic_that_is_deleted_before_it_is_held_is_not_made_again() -> None:
    world = World(random.Random(0))
    world.create(A)
    world.create(B)
    course = course_of(world)
    resolve = course.query._resolve_start

    def resolve_and_delete(snapshot: Snapshot) -> dict[str, MessagePosition]:
        starts = resolve(snapshot)
        world.delete(B)
        return starts

    course.query._resolve_start = resolve_and_delete
    course.query.initial()
    assert list(world.chains) == [A]
    assert [topic for topic, _ in world.cursors] == [A]


@pytest.mark.parametrize("has_records", [True, False])
def test_a_lease_taken_on_an_old_checkpoint_held_nothing_before(has_records: bool) -> None:
    """The query ran with subscription=none until now, or its lease is gone; records of ledgers are kept for an hour only."""
    world, course = read_of_a_alone(subscription="none")
    write_and_trim(world, B)
    write_more(world)
    if not has_records:
        world.records.clear()
    with pytest.raises(DataLossError, match="8 entries" if has_records else "unknown number"):
        gone_on(course).run(5)


def drop_and_move_leases(course: Course) -> None:
    """And trims what they held, now and then before anybody has looked at it."""
    world, chance = course.world, course.world.chance
    for topic, name in sorted(world.cursors):
        if chance.random() < 0.02 and course.offsets:
            for _ in range(chance.randrange(3)):
                world.write(topic, chance.randrange(1, 4))
                world.roll(topic)
            if chance.random() < 0.5:
                del world.cursors[topic, name]
            else:
                last = world.chains[topic][-1]
                world.cursors[topic, name] = MessagePosition(last.ledger_id, chance.randrange(last.confirmed + 1))
            world.trim(topic)


def disturb(course: Course) -> None:
    """Little is written: most of the time a topic stands in the offsets at a ledger of which nothing was read."""
    world, chance = course.world, course.world.chance
    course.background()
    for topic in sorted(world.chains):
        what = chance.random()
        if what < 0.02:
            world.write(topic, chance.randrange(1, 4))
        elif what < 0.05:
            world.lose_owner(topic)
    drop_and_move_leases(course)
    if chance.random() < 0.03:
        raise ProcessDied


@pytest.mark.slow
def test_whatever_becomes_of_leases_nothing_is_left_out_without_a_word() -> None:
    losses = 0
    for seed in range(COURSES):
        world = World(random.Random(seed))
        for topic in (A, B):
            world.create(topic)
        course, is_said = Course(world, from_latest=seed % 2 == 0, disturb=disturb), False
        try:
            for _ in range(5):
                with suppress(ProcessDied):
                    course.run(10)
                course.begin()
            course.disturb = lambda course: course.background()
            for topic in world.chains:
                world.settle(topic)
            course.run(MANY)
        except DataLossError:
            is_said = True
            losses += 1
        for topic in world.chains:
            rows, expected = course.rows(topic), course.expected(topic)
            assert rows == (expected[: len(rows)] if is_said else expected), f"course {seed}, {topic}"
    assert 0 < losses < COURSES, "some have losses, not all"
