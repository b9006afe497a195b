"""Whatever happens between any two of Spark's calls, the batches together are the topic: thousands of courses over a model."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from cepheid_scan import DataLossError
from tests.spark.stream_courses import MANY, Course, ProcessDied, World

COURSES = 100  # of each kind
PARTS = 4
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


def course_of(
    seed: int,
    harm: Callable[[Course], None] = lambda _: None,
    *,
    by_time: bool = False,
    kind: type[Course] = Course,
    **options: str,
) -> tuple[Course, Disturbance]:
    chance = random.Random(seed)
    world = World(chance)
    for topic in (A, B)[: chance.randrange(1, 3)]:
        world.create(topic)
        world.write(topic, chance.randrange(9))
    disturbance = Disturbance(world, harm)
    given = {**some_options(chance), **options}
    return kind(world, from_latest=chance.random() < 0.5, disturb=disturbance, by_time=by_time, **given), disturbance


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


def trim_some(course: Course, often: float = 0.3) -> None:
    for topic in sorted(course.world.chains):
        if course.world.chance.random() < often and course.offsets:
            course.world.trim(topic, course.world.chance.randrange(1, 4))


def trim_and_blink(course: Course) -> None:
    """A few are trimmed, and some are written, ended and trimmed before anybody looks."""
    world, chance = course.world, course.world.chance
    trim_some(course, 0.002)
    for topic in sorted(world.chains):
        if chance.random() < 0.003 and course.offsets:
            for _ in range(chance.randrange(1, 3)):
                world.write(topic, chance.randrange(1, 4))
                world.roll(topic)
            world.trim(topic)


def harm_of_all_kinds(course: Course) -> None:
    """Trimmed without a lease, deleted and made anew, by a broker with lower ledger ids too."""
    world, chance = course.world, course.world.chance
    trim_some(course, 0.01)
    for topic in sorted(world.chains):
        if chance.random() < 0.01:
            world.delete(topic)
            if chance.random() < 0.7:
                world.create(topic, low_id=chance.random() < 0.5)


def make_some_anew(course: Course) -> None:
    """With ledgers of the same ids only while no process looks: tasks and plans know ledgers by their ids alone."""
    world, chance = course.world, course.world.chance
    for topic in sorted(world.chains):
        if chance.random() < 0.02:
            before = world.chains[topic][-1].ledger_id
            world.delete(topic)
            has_same_id = chance.random() < 0.4
            world.create(topic, low_id=chance.random() < 0.5, ledger_id=before if has_same_id else None)
            if has_same_id:
                course.begin()
                raise ProcessDied


def courses(
    part: int,
    harm: Callable[[Course], None],
    judge: Callable[[Course, Disturbance], None],
    *,
    by_time: bool = False,
    **options: str,
) -> None:
    for seed in range(part * COURSES // PARTS, (part + 1) * COURSES // PARTS):
        course, disturbance = course_of(seed, harm, by_time=by_time, **options)
        try:
            judge(course, disturbance)
        except Exception as error:
            error.add_note(f"course {seed}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_batches_together_are_the_topic_whenever_the_process_dies(part: int) -> None:
    """The lease is all that keeps what is not read yet; nothing is lost, nothing is said to be."""

    def judge(course: Course, disturbance: Disturbance) -> None:
        live(course, disturbance)
        check_whole(course)

    courses(part, trim_some, judge)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_start_by_time_is_that_of_the_checkpoint_though_each_process_gives_another(part: int) -> None:
    left_out = 0

    def judge(course: Course, disturbance: Disturbance) -> None:
        nonlocal left_out
        live(course, disturbance)
        check_whole(course)
        left_out += sum(course.since > number for numbers in course.world.written.values() for number in numbers)

    courses(part, trim_some, judge, by_time=True)
    assert left_out, "some were older than the start"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_without_a_lease_nothing_is_left_out_without_a_word(part: int) -> None:
    losses = 0

    def judge(course: Course, disturbance: Disturbance) -> None:
        nonlocal losses
        said: list[str] = []
        try:
            live(course, disturbance)
        except DataLossError as error:
            said.append(str(error))
            losses += 1
        lost: set[int] = set()
        for topic, chain in course.world.chains.items():
            rows, expected = course.rows(topic), course.expected(topic)
            assert rows == (expected[: len(rows)] if said else expected), topic
            lost |= set(expected[len(rows) :]) - {number for ledger in chain for number in ledger.numbers}
        came_back_to_an_unread_ledger = re.compile("unknown number of entries after [0-9]+:-1 ")
        assert lost or all(map(came_back_to_an_unread_ledger.search, said)), f"{said}, and nothing is lost"

    courses(part, trim_and_blink, judge, subscription="none")
    assert 0 < losses < COURSES // PARTS, "some have losses, not all"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_without_a_lease_idle_topics_whose_brokers_restart_end_no_query(part: int) -> None:
    """Each restart takes the empty ledger away that the position is in; nothing is trimmed."""
    restarts = 0

    def disturb(course: Course) -> None:
        nonlocal restarts
        world, chance = course.world, course.world.chance
        course.background()
        for topic in sorted(world.chains):
            if chance.random() < 0.1:
                world.lose_owner(topic)
                restarts += len(world.chains[topic]) == 1
            elif chance.random() < 0.01:
                world.write(topic, 1)
        if chance.random() < 0.02 and not any(world.written.values()):
            raise ProcessDied

    for seed in range(part * COURSES // PARTS, (part + 1) * COURSES // PARTS):
        world = World(random.Random(seed))
        for topic in (A, B):
            world.create(topic)
        course = Course(world, from_latest=seed % 2 == 0, disturb=disturb, subscription="none")
        for _ in range(10):
            try:
                course.run(30)
            except ProcessDied:
                course.begin()
        course.disturb = lambda course: course.background()
        for topic in world.chains:
            world.settle(topic)
        course.run(MANY)
        check_whole(course)
    assert restarts > COURSES // PARTS


@pytest.mark.parametrize("lease", ["none", "auto"])
@pytest.mark.parametrize("part", range(PARTS))
def test_topics_are_read_without_a_hole_to_their_end_or_to_a_loss_that_is_said(part: int, lease: str) -> None:
    """They are made anew, with all kinds of ledger ids: what was written to the new one counts as the old one's."""

    def judge(course: Course, disturbance: Disturbance) -> None:
        is_said = False
        try:
            live(course, disturbance)
        except DataLossError:
            is_said = True
        for topic, written in course.world.written.items():
            rows = course.rows(topic)
            if rows:
                first = written.index(rows[0])
                assert rows == written[first : first + len(rows)], topic
                assert is_said or rows[-1] == written[-1], topic

    options = {"subscription": "none"} if lease == "none" else {}
    courses(part, make_some_anew, judge, **options)


@pytest.mark.slow
@pytest.mark.parametrize("lease", ["none", "auto"])
@pytest.mark.parametrize("part", range(PARTS))
def test_where_losses_are_accepted_what_is_left_is_read_once_and_to_its_end(part: int, lease: str) -> None:
    def judge(course: Course, disturbance: Disturbance) -> None:
        live(course, disturbance)
        for topic, chain in course.world.chains.items():
            rows = course.rows(topic)
            assert rows == sorted(set(rows)), topic
            kept = [number for ledger in chain for number in ledger.numbers[: ledger.confirmed]]
            if course.offsets and kept:
                assert rows[-1:] == kept[-1:], f"{topic} goes to {kept[-1:]}"

    options = {"subscription": "none"} if lease == "none" else {}
    courses(part, harm_of_all_kinds, judge, failOnDataLoss="false", **options)


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
