"""Bad days of a real cluster while a scan reads: every row that was planned comes, once, or an error says which cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from cepheid_decode import HistoryPlan, ReadMode, ReadSettings, ScanCounters, ScanRequest, ScanSpec, ScanTask, TopicSelection
from cepheid_scan import entry_source as source_module
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.ledger_ends import LacCalls, newest_ends
from cepheid_scan.plan_scan import plan_scan
from cepheid_scan.replica_order import Suspects
from cepheid_scan.scan_task import scan_task
from tests.scan.scan_cluster import FULL, ScanCluster, running_cluster

pytestmark = pytest.mark.slow

COUNT = 48
SMALL = ReadSettings(chunk_bytes=1 << 20, decode_bytes=1 << 20, read_timeout_s=2.0, unreachable_s=30.0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScanCluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as world:
        yield world
    close_channels()


@pytest.fixture(autouse=True)
def _no_memory_of_bookies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_suspects", Suspects())


@pytest.fixture(scope="module")
def large(world: ScanCluster) -> str:
    """A topic that is not on its way as a whole when its first rows are there."""
    filled(world, "large", COUNT, size_bytes=1 << 20)
    return "large"


def filled(world: ScanCluster, topic: str, count: int, first: int = 0, size_bytes: int = 100) -> set[int]:
    """Publishes numbers; the ledgers they are in."""
    placed = world.publish(topic, [str(number).encode().ljust(size_bytes, b"~") for number in range(first, first + count)])
    return {ledger_id for ledger_id, _ in placed}


def planned(world: ScanCluster, topic: str, tasks: int = 1) -> tuple[list[ScanTask], ScanSpec]:
    found, completed, _ = planned_with_history(world, topic, tasks)
    return found, completed


def planned_with_history(world: ScanCluster, topic: str, tasks: int = 1) -> tuple[list[ScanTask], ScanSpec, HistoryPlan]:
    spec = ScanSpec(ReadMode.MESSAGES, ("value",), settings=SMALL)
    return plan_scan(ScanRequest(world.source(), TopicSelection((f"{FULL}/{topic}",)), spec, min_tasks=tasks))


def rows_of(tasks: list[ScanTask], spec: ScanSpec, counters: ScanCounters | None = None) -> Iterator[Any]:
    for task in tasks:
        yield from scan_task(task, spec, counters)


def numbers(batches: Iterator[Any]) -> list[int]:
    return [int(value.rstrip(b"~")) for batch in batches for value in batch.column("value").to_pylist()]


def first_asked(counters: ScanCounters) -> str:
    (bookie,) = counters.by_bookie
    return bookie


@pytest.mark.parametrize("end", ["kill", "pause"])
def test_a_bookie_that_ends_in_the_middle_of_a_scan(world: ScanCluster, large: str, end: str) -> None:
    tasks, spec = planned(world, large, COUNT)
    assert len(tasks) > 20, "of which some would ask it first"
    counters = ScanCounters()
    batches = rows_of(tasks, spec, counters)
    read = numbers(iter([next(batches)]))
    assert len(read) < COUNT / 2, "the rest is still to come"
    bookie = member_of(world, first_asked(counters))
    getattr(world.cluster, end)(bookie)
    try:
        read += numbers(batches)
    finally:
        world.cluster.start(bookie) if end == "kill" else world.cluster.resume(bookie)
    assert read == list(range(COUNT))
    assert counters.retries >= 1
    assert len(counters.by_bookie) > 1


def member_of(world: ScanCluster, bookie: str) -> str:
    names = [name for name, port in world.cluster.bookie_ports.items() if name == bookie or bookie.endswith(f":{port}")]
    assert names, f"{bookie} is none of {world.cluster.bookie_ports}"
    return names[0]


def test_all_bookies_may_be_gone_for_five_seconds(world: ScanCluster, large: str) -> None:
    tasks, spec = planned(world, large, COUNT)
    assert len(tasks) > 20, "of which some would ask it first"
    counters = ScanCounters()
    batches = rows_of(tasks, spec, counters)
    read = numbers(iter([next(batches)]))
    bookies = list(world.cluster.bookie_ports)
    for bookie in bookies:
        world.cluster.kill(bookie)

    def bring_back() -> None:
        for bookie in bookies:
            world.cluster.start(bookie)

    timer = threading.Timer(5.0, bring_back)
    timer.start()
    try:
        read += numbers(batches)
    finally:
        timer.join()
    assert read == list(range(COUNT))
    assert counters.wait_s > 1


def test_an_ensemble_that_changes_between_planning_and_reading(world: ScanCluster) -> None:
    """A bookie of the ledger goes while it is written: what follows lies on others. The plan knows the place before it, or both."""
    filled(world, "moves", 50)
    before, spec = planned(world, "moves")
    with ensemble_changed(world, "moves", 50, bookie_of(before)) as (after, count):
        assert numbers(rows_of(before, spec)) == list(range(50))
        assert numbers(rows_of(after, spec)) == list(range(count))


def test_an_ensemble_that_changes_in_the_middle_of_a_scan(world: ScanCluster) -> None:
    """What was planned is read to its end. A stream hears of what came since, and reads that, before it hears where it lies."""
    filled(world, "grows", COUNT, size_bytes=1 << 20)
    tasks, spec, plan = planned_with_history(world, "grows", COUNT)
    (ledger,) = plan.topics[0].ledgers
    assert ledger.is_open
    counters = ScanCounters()
    batches = rows_of(tasks, spec, counters)
    read = numbers(iter([next(batches)]))
    assert len(read) < COUNT / 2, "the rest is still to come"
    with ensemble_changed(world, "grows", COUNT, first_asked(counters)) as (after, count):
        assert read + numbers(batches) == list(range(COUNT))
        assert counters.retries >= 1
        end = newest_ends([ledger], plan.bookies, SMALL.read_timeout_s, LacCalls())[0].last_entry_id
        assert end >= after[0].pieces[0].fragments[1].first_entry_id, "behind the change"
        further = replace(tasks[-1], pieces=(replace(tasks[-1].pieces[-1], first_entry_id=COUNT, last_entry_id=end),))
        assert numbers(rows_of([further], spec)) == list(range(COUNT, end + 1)), "a number is its entry's id"
        assert numbers(rows_of(after, spec)) == list(range(count))


@contextmanager
def ensemble_changed(world: ScanCluster, topic: str, count: int, bookie: str) -> Iterator[tuple[list[ScanTask], int]]:
    """`bookie` is down, and numbers from `count` on lie where its ledger went: a plan of that, and how many numbers there are."""
    if len(world.cluster.bookie_ports) < 4:
        world.cluster.add("bookie")
    name = member_of(world, bookie)
    world.cluster.kill(name)
    try:
        for _ in range(180):  # two of three bookies answer: entries go on being stored before the writer has found another third
            filled(world, topic, 10, count)
            count += 10
            (task,), _ = planned(world, topic)
            if len(task.pieces) > 1 or len(task.pieces[0].fragments) > 1:
                break
            time.sleep(0.5)
        else:
            pytest.fail("no entry went to another ensemble in a minute and a half")
        filled(world, topic, 10, count)
        after, _ = planned(world, topic)
        yield after, count + 10
    finally:
        world.cluster.start(name)


def bookie_of(tasks: list[ScanTask]) -> str:
    return tasks[0].pieces[0].fragments[0].ensemble[0]
