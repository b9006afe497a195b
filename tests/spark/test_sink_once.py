"""Exactly once, task by task and without Spark's JVM: attempts that end anywhere, and what a name may not be used for."""

from __future__ import annotations

import json
import random
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import pulsar
import pyarrow as pa
import pytest

from cepheid_ports import CepheidError
from cepheid_spark import sink_writer
from cepheid_spark.sink_identity import TaskPlace
from cepheid_spark.sink_options import parse_sink_options
from cepheid_spark.sink_plan import SinkPlan, plan_sink
from cepheid_spark.sink_sender import TaskSender
from cepheid_testkit import ProcessCluster
from tests.spark.spark_types import columns

ROWS = 3_000
RECEIVE_LIMIT_MS = 10_000
SCHEMA = columns("key string; value binary")


class Query:
    """A streaming query as its tasks see it. `fail_after`: of the next attempt, after so many slices of rows."""

    def __init__(self, server: ProcessCluster, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.topic = f"persistent://public/default/{topic}"
        self._server = server
        self._monkeypatch = monkeypatch
        self.query_id = "query-1"
        self.options: dict[str, str] = {}
        self._fail_after: int | None = None
        self.before_send: Callable[[], None] = lambda: None
        send = TaskSender.send
        sent = 0

        def send_or_fail(sender: TaskSender, messages: Any) -> None:
            nonlocal sent
            self.before_send()
            if self._fail_after is not None and sent >= self._fail_after:
                self._fail_after, sent = None, 0
                raise ConnectionAbortedError("the attempt ends here")
            sent += 1
            send(sender, messages)

        monkeypatch.setattr(TaskSender, "send", send_or_fail)
        monkeypatch.setattr(sink_writer, "SLICE_ROWS", 700)

    def admin(self, method: str, what: str, body: Any = None) -> None:
        path = self.topic.replace("://", "/")
        request = urllib.request.Request(
            f"{self._server.admin_url}/admin/v2/{path}{what}", json.dumps(body).encode(), method=method
        )
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30):
            pass

    def create(self, partitions: int = 0) -> None:
        self.admin("PUT", "/partitions" if partitions else "", partitions or None)
        self.admin("POST", "/deduplicationEnabled", True)

    def plan(self) -> SinkPlan:
        given = {"service.url": self._server.service_url, "topic": self.topic, **self.options}
        return plan_sink(SCHEMA, parse_sink_options(given, streaming=True))

    def attempt(self, batch: int, rows: list[dict[str, Any]], *, task: int = 0, fail_after: int | None = None) -> Any:
        """The receipt; None: it failed as it was to."""
        properties = {"sql.streaming.queryId": self.query_id, "streaming.sql.batchId": str(batch)}
        self._monkeypatch.setattr(TaskPlace, "of_this_task", classmethod(lambda cls: cls(task, properties)))
        schema = pa.schema({"key": pa.string(), "value": pa.binary()})
        batches = iter(pa.Table.from_pylist(rows, schema).to_batches(max_chunksize=1_000))
        self._fail_after = fail_after
        try:
            return sink_writer.write_task(self.plan(), batches, None)
        except ConnectionAbortedError:
            return None


def rows_of(first: int, count: int = ROWS) -> list[dict[str, Any]]:
    return [{"key": f"k{number % 50}" if number % 3 else None, "value": b"%d" % number} for number in range(first, first + count)]


@pytest.fixture
def query(server: ProcessCluster, topic: str, monkeypatch: pytest.MonkeyPatch) -> Query:
    return Query(server, topic, monkeypatch)


@pytest.fixture
def received(client: pulsar.Client, query: Query) -> Callable[[int], list[int]]:
    def receive(expected: int) -> list[int]:
        consumer = client.subscribe(query.topic, "check", initial_position=pulsar.InitialPosition.Earliest)
        found = [int(consumer.receive(RECEIVE_LIMIT_MS).data()) for _ in range(expected)]
        with pytest.raises(pulsar.Timeout):
            consumer.receive(300)
        consumer.close()
        return sorted(found)

    return receive


@pytest.mark.parametrize("partitions", [0, 3])
def test_attempts_that_end_anywhere_store_each_row_once(
    query: Query, received: Callable[[int], list[int]], partitions: int
) -> None:
    query.create(partitions)
    chance = random.Random(partitions)
    for batch in range(3):
        rows = rows_of(batch * ROWS)
        for fail_after in (0, 1, 3):
            chance.shuffle(rows)  # after a shuffle over machines their order differs
            assert query.attempt(batch, rows, fail_after=fail_after) is None
        assert query.attempt(batch, rows).rows == ROWS
        assert query.attempt(batch, rows).stored_before == ROWS, "the driver dies before it notes the batch"
    assert received(3 * ROWS) == list(range(3 * ROWS))


def test_two_tasks_of_a_batch_do_not_disturb_each_other(query: Query, received: Callable[[int], list[int]]) -> None:
    query.create()
    query.attempt(0, rows_of(0, 10), task=0)
    query.attempt(0, rows_of(10, 10), task=1)
    assert received(20) == list(range(20))


def test_a_topic_that_moves_in_mid_batch_has_each_row_once(query: Query, received: Callable[[int], list[int]]) -> None:
    query.create()
    query.before_send = lambda: query.admin("PUT", "/unload")
    query.attempt(0, rows_of(0))
    assert received(ROWS) == list(range(ROWS))


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(CepheidError) as caught:
        work()
    return str(caught.value)


def test_a_sink_name_is_for_one_checkpoint(query: Query) -> None:
    query.create()
    query.options = {"sinkName": "flights"}
    query.attempt(0, rows_of(0, 10))
    query.query_id = "query-2"
    assert "belongs to 'query-1', and 'query-2' asks for it" in refused(lambda: query.attempt(0, rows_of(0, 10)))


@pytest.mark.parametrize("task", [0, 1], ids=["a task that both have", "a task that the first one has not"])
def test_of_two_live_queries_with_one_sink_name_the_second_stores_nothing(
    query: Query, received: Callable[[int], list[int]], task: int
) -> None:
    """The first one is in the middle of its micro-batch, and has one task."""
    query.create()
    query.options = {"sinkName": "flights"}
    is_sending, may_go_on, slices = threading.Event(), threading.Event(), iter(range(ROWS))
    first = threading.Thread(target=query.attempt, args=(0, rows_of(0)))

    def wait_after_the_first_slice() -> None:
        if threading.current_thread() is first and next(slices) == 1:
            is_sending.set()
            may_go_on.wait(60)

    query.before_send = wait_after_the_first_slice
    first.start()
    assert is_sending.wait(60)
    query.query_id = "query-2"
    try:
        said = refused(lambda: query.attempt(0, rows_of(ROWS, 10), task=task))
    finally:
        may_go_on.set()
        first.join()
    assert said.startswith("another query writes under the sinkName 'flights'")
    assert "belongs to 'query-1', and 'query-2' asks for it" in said
    assert received(ROWS) == list(range(ROWS))


def test_a_batch_before_one_that_is_stored_is_refused(query: Query) -> None:
    query.create()
    query.attempt(5, rows_of(0, 10))
    assert "has stored batch 5, and this is batch 4" in refused(lambda: query.attempt(4, rows_of(10, 10)))


def test_other_rows_for_a_batch_that_was_begun_are_refused(query: Query, received: Callable[[int], list[int]]) -> None:
    """As after a restart with another number of tasks: they would be taken for stored."""
    query.create()
    query.attempt(0, rows_of(0, ROWS), fail_after=3)
    assert "are stored, of other content" in refused(lambda: query.attempt(0, rows_of(0, ROWS // 2)))
    query.attempt(0, rows_of(0, ROWS))
    assert received(ROWS) == list(range(ROWS))


def test_a_topic_without_deduplication_is_refused(query: Query) -> None:
    query.admin("PUT", "")
    assert "needs deduplication, which is off" in refused(lambda: query.attempt(0, rows_of(0, 10)))


@pytest.mark.slow  # the client tries for 30 s
def test_an_unknown_server_is_named(query: Query) -> None:
    query.options = {"service.url": "pulsar://127.0.0.1:1"}
    assert "127.0.0.1:1" in refused(query.plan)


def test_a_row_above_the_limit_is_refused_and_later_rows_are_not_stored(query: Query) -> None:
    query.create()
    large = {"key": "k", "value": b"9" * (6 << 20)}
    said = refused(lambda: query.attempt(0, [*rows_of(0, 5), large]))
    assert "the broker takes messages of up to" in said
    assert "onTooLarge=chunk" in said
    query.options = {"onTooLarge": "chunk"}
    assert query.attempt(0, [*rows_of(0, 5), large]).rows == 6


def test_a_null_value_is_a_message_without_value(query: Query, client: pulsar.Client) -> None:
    query.create()
    query.attempt(0, [{"key": "gone", "value": None}])
    reader = client.create_reader(query.topic, pulsar.MessageId.earliest)
    assert reader.read_next(RECEIVE_LIMIT_MS).partition_key() == "gone"
    reader.close()
