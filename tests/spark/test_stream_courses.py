"""Whatever happens between any two of Spark's calls, the batches together are the topic: thousands of courses over a model."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.spark.stream_courses import MANY, Course, ProcessDied, World

COURSES = 200  # of each kind
A, B, C = (f"persistent://public/default/{name}" for name in "abc")


class Disturbance:
    """`harm`: what else may happen to the world, given the course."""

    def __init__(self, world: World, harm: Callable[[Course], None] = lambda _: None, *, deadly: float = 0.03) -> None:
        self._world = world
        self._harm = harm
        self._deadly = deadly
        self.quiet = False

    def __call__(self, course: Course) -> None:
        world, chance = self._world, self._world.chance
        course.background()
        if self.quiet:
            return
        for topic in sorted(world.chains):
            what = chance.random()
            if what < 0.4:
                world.write(topic, chance.randrange(6))
            elif what < 0.5:
                world.roll(topic)
            elif what < 0.55:
                world.lose_owner(topic)
            elif what < 0.6:
                world.settle(topic)
        if len(world.chains) < 3 and chance.random() < 0.02:
            world.create(next(topic for topic in (A, B, C) if topic not in world.chains))
        self._harm(course)
        if chance.random() < self._deadly:
            raise ProcessDied


def some_options(chance: random.Random) -> dict[str, str]:
    options = {"targetPartitionBytes": "1mb"}
    if chance.random() < 0.4:
        options["maxEntriesPerTrigger"] = str(chance.randrange(1, 9))
    if chance.random() < 0.3:
        options["maxBytesPerTrigger"] = str(chance.randrange(1, 900))
    return options


def course_of(seed: int, harm: Callable[[Course], None] = lambda _: None, **options: str) -> tuple[Course, Disturbance]:
    chance = random.Random(seed)
    world = World(chance)
    for topic in (A, B)[: chance.randrange(1, 3)]:
        world.create(topic)
        world.write(topic, chance.randrange(9))
    disturbance = Disturbance(world, harm)
    given = {**some_options(chance), **options}
    return Course(world, from_latest=chance.random() < 0.5, disturb=disturbance, **given), disturbance


def live(course: Course, disturbance: Disturbance) -> None:
    """Runs that die, then one in peace, to the end of what there is. Raises DataLossError."""
    chance = course.world.chance
    for _ in range(chance.randrange(2, 8)):
        try:
            course.run(chance.randrange(1, 10))
        except ProcessDied:
            pass
        if chance.random() < 0.7:
            course.begin()
    disturbance.quiet = True
    for topic in course.world.chains:
        course.world.settle(topic)
    course.begin()
    course.run(MANY, available_now=chance.random() < 0.5)


def check_whole(course: Course) -> None:
    if course.offsets:
        for topic in course.world.written:
            assert course.rows(topic) == course.expected(topic), topic


@pytest.mark.parametrize("part", range(4))
def test_batches_together_are_the_topic_whenever_the_process_dies(part: int) -> None:
    """The lease is all that keeps what is not read yet; nothing is lost, nothing is said to be."""

    def harm(course: Course) -> None:
        for topic in sorted(course.world.chains):
            if course.world.chance.random() < 0.5 and course.offsets:
                course.world.trim(topic)

    for seed in range(part * COURSES // 4, (part + 1) * COURSES // 4):
        course, disturbance = course_of(seed, harm)
        try:
            live(course, disturbance)
            check_whole(course)
        except Exception as error:
            error.add_note(f"course {seed}")
            raise


def test_a_start_at_latest_keeps_its_ledger_until_something_newer_was_read() -> None:
    """Nothing of it is left to read, but whoever comes back finds that out from the ledger alone."""
    world = World(random.Random(0))
    world.create(A)
    world.write(A, 5)
    world.settle(A)
    course = Course(world, from_latest=True, disturb=lambda _: None)
    course.run(1)
    world.roll(A)
    world.trim(A)
    world.write(A, 5)
    world.settle(A)
    world.roll(A)

    def die(course: Course) -> None:
        if course.offsets:
            raise ProcessDied

    course.state.look()
    course.disturb = die
    with pytest.raises(ProcessDied):
        course.run(1)
    course.disturb = lambda _: world.trim(A)
    course.begin()
    course.run(1)
    assert course.rows(A) == course.expected(A) == list(range(6, 11))
