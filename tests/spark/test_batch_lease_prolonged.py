"""A batch read that lasts longer than its lease keeps it, by its tasks: a clock of the test, brokers in memory, no Spark."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cepheid_decode import MessagePosition, PlanUnavailableError, ReadMode, ScanSpec, ScanTask
from cepheid_spark import batch_lease
from cepheid_spark.batch_lease import BatchLease, Prolonging
from cepheid_spark.lease import LEASE_PROPERTY, Lease
from cepheid_spark.partitions import TaskPartition, partitions_of
from tests.spark.lease_broker import LeaseBroker

A, B, C = (f"persistent://public/default/{name}" for name in "abc")
TTL_S = 3600.0


class Read:
    """Pinned on A and B; C is a topic of the pattern that the read did not have."""

    def __init__(self) -> None:
        self.ms = 1_000_000_000
        self.broker = LeaseBroker(A, B, C)
        self.lease = BatchLease("s", TTL_S, self.ms, topics=2)
        self.listed = 0
        self.away = False
        for topic in (A, B):
            self._lease().hold(topic, MessagePosition(7, 0))

    def now_ms(self) -> int:
        return self.ms

    def _lease(self) -> Lease:
        return Lease(self.broker, "s", TTL_S, self.now_ms)  # type: ignore[arg-type]

    @contextmanager
    def _opened(self) -> Iterator[tuple[Lease, Callable[[], Sequence[str]]]]:
        if self.away:
            raise PlanUnavailableError("nobody answers")
        yield self._lease(), self._all_topics

    def _all_topics(self) -> list[str]:
        self.listed += 1
        return [A, B, C]

    def task(self, topic: str = A) -> Prolonging:
        return Prolonging(self.lease, topic, self._opened, self.now_ms)

    def left_s(self, topic: str) -> float:
        return (int(self.broker.properties[topic, "s"][LEASE_PROPERTY]) - self.ms) / 1000

    @property
    def held(self) -> list[str]:
        return sorted(topic for topic, _ in self.broker.stands)


@pytest.mark.parametrize("tasks_look", [True, False])
def test_a_read_that_lasts_ten_times_as_long_as_its_lease_keeps_it_on_all_topics(tasks_look: bool) -> None:
    """Tasks of a few minutes each, all of them of A: B's wait for the whole time."""
    read = Read()
    for _ in range(160):
        read.ms += int(TTL_S * 1000 / 16)
        task = read.task()
        if tasks_look and task.wait_s() == 0:
            assert task.look()
        read.broker.drop_expired(read.ms)
    assert read.held == ([A, B] if tasks_look else [])
    assert read.listed <= 20, "once in half of the time"


def test_one_task_of_many_hours_looks_often_enough() -> None:
    read = Read()
    task = read.task(B)
    pause_s = task.wait_s()
    for _ in range(100):
        read.ms += int(pause_s * 1000)
        read.broker.drop_expired(read.ms)
        assert task.look()
        assert min(read.left_s(A), read.left_s(B)) > TTL_S / 3
        pause_s = read.lease.look_s


def test_a_read_that_is_soon_over_asks_nobody() -> None:
    read = Read()
    calls = read.broker.calls
    assert list(read.task().rows(iter(["x", "y"]))) == ["x", "y"]  # type: ignore[list-item]
    assert read.broker.calls == calls
    assert read.task().wait_s() == TTL_S / 4


def test_what_failed_for_one_topic_is_tried_again_by_the_next_look() -> None:
    read = Read()
    read.ms += int(TTL_S * 600)
    request = read.broker.request
    refused = [True]

    def request_or_refuse(method: str, path: str, *, body: Any = None) -> Any:
        if "/b/" in path and refused:
            raise PlanUnavailableError("the broker of B is away")
        return request(method, path, body=body)

    read.broker.request = request_or_refuse  # type: ignore[method-assign]
    with pytest.raises(PlanUnavailableError):
        read.task().look()
    refused.clear()
    assert read.task().look()
    assert read.left_s(B) == read.left_s(A) == TTL_S


def test_a_lease_that_went_and_a_subscription_without_an_end_are_left_alone() -> None:
    read = Read()
    read.broker.properties[A, "s"] = {"mine": "x"}
    assert not read.task().look()
    assert read.broker.properties[A, "s"] == {"mine": "x"}
    read.broker.stands.clear()
    assert not read.task().look()
    assert not read.broker.stands, "what it held may be gone: nothing is made again"


def test_one_that_went_on_another_topic_is_told(caplog: pytest.LogCaptureFixture) -> None:
    read = Read()
    read.ms += int(TTL_S * 600)
    assert read.task().look()
    assert not caplog.records, "C was never part of it"
    read.ms += int(TTL_S * 600)
    del read.broker.stands[B, "s"], read.broker.properties[B, "s"]
    assert read.task().look()
    assert "scan.lease_is_gone" in caplog.text
    assert read.left_s(A) == TTL_S


def test_who_finds_topics_renewed_lately_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that look at one moment, before any of them has renewed anything."""
    read = Read()
    read.ms += int(TTL_S * 600)
    written: list[str] = []
    request = read.broker.request

    def noted(method: str, path: str, *, body: Any = None) -> Any:
        written.extend([path] if method == "PUT" else [])
        return request(method, path, body=body)

    read.broker.request = noted  # type: ignore[method-assign]
    renew = Lease.renew

    def another_task_first(lease: Lease, topic: str, *, below_s: float) -> bool:
        renew(lease, topic, below_s=below_s)
        return renew(lease, topic, below_s=below_s)

    monkeypatch.setattr(Lease, "renew", another_task_first)
    assert read.task().look()
    assert len(written) == 2, "A and B, once"


def test_tasks_that_begin_together_look_one_after_the_other() -> None:
    read = Read()
    paused: list[list[float]] = []
    for _ in range(20):
        task, pauses = read.task(), []
        task._ended.wait = lambda pause_s, pauses=pauses: pauses.append(pause_s) or len(pauses) > 3  # type: ignore[method-assign, misc]
        task._run()
        paused.append(pauses)
    for pauses, (least, most) in zip(
        zip(*paused, strict=True), [(900.0, 910.0), (225.0, 450.0), (225.0, 450.0), (225.0, 450.0)], strict=True
    ):
        assert least <= min(pauses) < max(pauses) <= most
        assert max(pauses) - min(pauses) > (most - least) / 3


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_it_is_prolonged_while_rows_are_waited_for_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lease, "_SPREAD_S", 0.0)
    read = Read()
    read.ms += int(TTL_S * 900)
    task = read.task()
    rows = task.rows(iter(["x", "y"]))  # type: ignore[list-item]
    assert next(rows) == "x"
    wait_until(lambda: read.left_s(A) == TTL_S)
    assert task._thread is not None
    assert task._thread.is_alive()
    rows.close()  # type: ignore[attr-defined]
    wait_until(lambda: not task._thread.is_alive())  # type: ignore[union-attr]


def test_rows_come_though_no_broker_can_be_reached(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(batch_lease, "_SPREAD_S", 0.0)
    read = Read()
    read.ms += int(TTL_S * 900)
    read.away = True
    told = threading.Event()

    def rows() -> Iterator[Any]:
        yield "x"
        wait_until(lambda: "scan.lease_not_prolonged: " in caplog.text)
        told.set()
        yield "y"

    assert list(read.task().rows(rows())) == ["x", "y"]
    assert told.is_set()


def test_partitions_take_the_lease_along() -> None:
    lease = BatchLease("s", TTL_S, 5, topics=1)
    (partition,) = partitions_of([ScanTask((), ())], ScanSpec(ReadMode.ENTRIES, ("topic",)), (), lease)
    travelled = pickle.loads(pickle.dumps(partition))
    assert isinstance(travelled, TaskPartition)
    assert travelled.lease == lease
