"""Typed rows, and stored entries, of streams: Spark's calls made by the test, against a cluster and without a JVM."""

from __future__ import annotations

import json
import pickle
import time
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema
from pyspark.sql.types import StructType

from cepheid_scan import BadOptionError
from cepheid_spark.source import CepheidDataSource
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import publish

pytestmark = pytest.mark.slow

OLD = {"type": "record", "name": "Visit", "fields": [{"name": "id", "type": "int"}]}
DEFAULTED = {"name": "page", "type": "string", "default": "none"}
NEW = {**OLD, "fields": [*OLD["fields"], DEFAULTED]}
NEWEST = {**OLD, "fields": [*NEW["fields"], {"name": "ms", "type": "long", "default": -1}]}
WAIT_S = 60.0


class Play:
    """One query of its checkpoint. What tasks get goes through pickle, and their reader is a second one, as with Spark.

    `columns`: what the user says that there is; then nobody asks before the readers are made, of which the tasks' one is made with
    the first batch."""

    def __init__(self, server: ProcessCluster, columns: StructType | None = None, **options: str) -> None:
        self._columns = columns
        self._given = {"service.url": server.service_url, "startingOffsets": "earliest", "readMode": "typed", **options}
        self.offsets: list[str] = []
        self.begin()

    def begin(self) -> None:
        """A new process."""
        source = CepheidDataSource(self._given)
        self.schema = source.schema() if self._columns is None else self._columns
        self._again = pickle.loads(pickle.dumps(source))
        self.planning: Any = source.streamReader(self.schema)
        self.tasks: Any = None

    def offset(self, number: int) -> Any:
        return self.planning.initialOffset() if number < 0 else json.loads(self.offsets[number])

    def batch(self, number: int | None = None) -> list[dict[str, Any]]:
        """Rows of the next one, once there is something; or of that one, again."""
        if number is None:
            self._log_next()
            number = len(self.offsets) - 1
        if self.tasks is None:
            self.tasks = pickle.loads(pickle.dumps(self._again.streamReader(self.schema)))
        parts = pickle.loads(pickle.dumps(list(self.planning.partitions(self.offset(number - 1), self.offset(number)))))
        return [row for part in parts for each in self.tasks.read(part) for row in each.to_pylist()]

    def _log_next(self) -> None:
        start = self.offset(len(self.offsets) - 1)
        deadline = time.monotonic() + WAIT_S
        while (end := self.planning.latestOffset(start, self.planning.getDefaultReadLimit())) == start:
            assert time.monotonic() < deadline, "nothing new"
            time.sleep(0.005)
        self.offsets.append(json.dumps(end))

    def rows(self, count: int, *names: str) -> list[tuple[Any, ...]]:
        """Of as many batches as so many rows take, sorted."""
        found: list[tuple[Any, ...]] = []
        while len(found) < count:
            found += [tuple(row[name] for name in names) for row in self.batch()]
        assert len(found) == count
        return sorted(found)

    def stop(self) -> None:
        self.planning.stop()


def send(client: pulsar.Client, topic: str, schema: Any, *values: dict[str, Any]) -> None:
    producer = client.create_producer(topic, schema=schema)
    for value in values:
        producer.send(value)
    producer.close()


def test_columns_of_the_users_own_stay_when_the_schema_changes_before_the_first_batch(
    topic: str, client: pulsar.Client, server: ProcessCluster
) -> None:
    """The tasks' reader is made behind the change: it would find that the topic has other columns."""
    send(client, topic, AvroSchema(None, NEW), {"id": 1, "page": "start"})
    play = Play(server, StructType().add("page", "string").add("id", "integer"), topics=topic)
    assert play.planning.initialOffset()
    send(client, topic, AvroSchema(None, OLD), {"id": 2})
    assert play.rows(2, "id", "page") == [(1, "start"), (2, "none")]
    play.stop()


def test_columns_of_the_users_own_that_there_are_not_are_refused_at_the_start(
    topic: str, client: pulsar.Client, server: ProcessCluster
) -> None:
    send(client, topic, AvroSchema(None, OLD), {"id": 1})
    play = Play(server, StructType().add("page", "string"), topics=topic)
    with pytest.raises(BadOptionError, match="the schema names page, which is not a column here"):
        play.planning.initialOffset()
    play.stop()


def test_a_schema_that_changes_while_a_stream_runs_and_while_it_does_not(
    topic: str, client: pulsar.Client, server: ProcessCluster
) -> None:
    send(client, topic, AvroSchema(None, OLD), {"id": 1}, {"id": 2})
    play = Play(server, topics=topic)
    assert play.rows(2, "id") == [(1,), (2,)]
    send(client, topic, AvroSchema(None, NEW), {"id": 3, "page": "start"})
    assert play.rows(1, "id") == [(3,)], "in the columns of the start"
    assert "page" not in play.schema.names
    last = len(play.offsets) - 1
    play.stop()
    send(client, topic, AvroSchema(None, NEWEST), {"id": 4, "page": "end", "ms": 7})
    play.begin()
    assert [(row["id"], row["page"], row["ms"]) for row in play.batch(last)] == [(3, "start", -1)], "repeated"
    assert play.rows(1, "id", "page", "ms") == [(4, "end", 7)]
    play.stop()


def test_topics_of_which_some_are_upgraded_and_some_are_new(topic: str, client: pulsar.Client, server: ProcessCluster) -> None:
    send(client, f"{topic}-a", AvroSchema(None, OLD), {"id": 1})
    send(client, f"{topic}-a", AvroSchema(None, NEW), {"id": 2, "page": "a"})
    send(client, f"{topic}-b", AvroSchema(None, OLD), {"id": 3})
    play = Play(server, topicsPattern=f"{topic}-.*", topicDiscoveryInterval="100ms")
    assert play.rows(3, "id", "page") == [(1, "none"), (2, "a"), (3, "none")]
    send(client, f"{topic}-c", AvroSchema(None, NEW), {"id": 4, "page": "c"})  # its version 0 is the others' version 1
    assert play.rows(1, "id", "page") == [(4, "c")]
    client.subscribe(f"{topic}-d", "s").close()  # no schema, and no entry
    send(client, f"{topic}-b", AvroSchema(None, NEW), {"id": 5, "page": "b"})
    assert play.rows(1, "id", "page") == [(5, "b")]
    play.stop()
    play.begin()
    send(client, f"{topic}-b", AvroSchema(None, NEW), {"id": 6, "page": "b"})
    assert play.rows(1, "id", "page") == [(6, "b")]
    play.stop()


def test_stored_entries_of_a_stream(topic: str, client: pulsar.Client, server: ProcessCluster) -> None:
    publish(client, topic, [b"%d" % number for number in range(5)])
    play = Play(server, topics=topic, readMode="entries", maxEntriesPerTrigger="2")
    found = play.rows(5, "entry_id", "num_messages", "entry")
    assert [(entry_id, count) for entry_id, count, _ in found] == [(number, 1) for number in range(5)]
    assert [entry[-1:] for _, _, entry in found] == [b"%d" % number for number in range(5)]
    assert len(play.offsets) >= 3
    play.stop()
