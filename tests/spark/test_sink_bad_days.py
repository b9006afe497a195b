"""Writes on bad days, task by task and without Spark's JVM: each fails with an error that says why, or stores each row once."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from cepheid_ports import CepheidError
from cepheid_scan import scan
from cepheid_spark.sink_identity import TaskPlace
from cepheid_spark.sink_options import parse_sink_options
from cepheid_spark.sink_plan import SinkPlan, plan_sink
from cepheid_spark.sink_writer import TaskReceipt, write_task
from cepheid_testkit import ProcessCluster
from tests.admin.secured_world import SecuredWorld, running_secured, token
from tests.integration.test_full_disk_standalone import MIB, SETTINGS, publish, ready_page, small_disk
from tests.plain_admin import AdminClient
from tests.scan.scan_cluster import ScanCluster, running_cluster
from tests.wire_client import WireClient

TEXT = t.StructType([t.StructField("value", t.StringType())])
BY_TOPIC = t.StructType([*TEXT.fields, t.StructField("topic", t.StringType())])
RECORD = t.StructType([t.StructField("id", t.LongType())])
ID = {"name": "id", "type": "long"}
KEPT = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}

Write = Callable[..., TaskReceipt]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Write:
    """write(schema, columns, batch=0, **options): plan a micro-batch and write it by one task. Raises CepheidError."""

    def write(schema: t.StructType, columns: dict[str, Any], batch: int = 0, **options: Any) -> TaskReceipt:
        place = TaskPlace(0, {"sql.streaming.queryId": "query-1", "streaming.sql.batchId": str(batch)})
        monkeypatch.setattr(TaskPlace, "of_this_task", classmethod(lambda cls: place))
        given = {name.replace("_", "."): str(value) for name, value in options.items() if value is not None}
        plan: SinkPlan = plan_sink(schema, parse_sink_options(given, streaming=True))
        return write_task(plan, iter(pa.Table.from_pydict(columns).to_batches()), None)

    return write


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(CepheidError) as caught:
        work()
    return str(caught.value)


def call(url: str, method: str, path: str, body: Any = None) -> None:
    request = urllib.request.Request(f"{url}/admin/v2/{path}", json.dumps(body).encode(), method=method)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30):
        pass


def values(topic: str, **source: Any) -> list[bytes]:
    with scan(topic, columns=["value"], **source) as reader:
        return sorted(reader.read_all()["value"].to_pylist())


@pytest.fixture(scope="module")
def closed_namespace(server: ProcessCluster) -> str:
    """One whose topics are not created by use."""
    call(server.admin_url, "PUT", "namespaces/public/closed", {})
    call(server.admin_url, "POST", "namespaces/public/closed/autoTopicCreation", {"allowAutoTopicCreation": False})
    call(server.admin_url, "POST", "namespaces/public/closed/deduplication", True)
    return "persistent://public/closed"


def test_an_unknown_topic_where_none_is_created_is_named(server: ProcessCluster, closed_namespace: str, write: Write) -> None:
    topic = f"{closed_namespace}/nowhere"
    said = refused(lambda: write(TEXT, {"value": ["x"]}, service_url=server.service_url, topic=topic))
    assert topic in said


def test_an_unknown_topic_among_those_of_the_rows_fails_the_task_before_it_sends(
    server: ProcessCluster, closed_namespace: str, write: Write
) -> None:
    known, unknown = f"{closed_namespace}/known", f"{closed_namespace}/nowhere"
    call(server.admin_url, "PUT", "persistent/public/closed/known")
    rows = {"value": ["a", "b"], "topic": [known, unknown]}
    assert unknown in refused(lambda: write(BY_TOPIC, rows, service_url=server.service_url))
    assert values(known, service_url=server.service_url) == []


def test_a_schema_that_changes_in_mid_query_is_used_from_the_next_batch_on(
    server: ProcessCluster, write: Write, topic: str
) -> None:
    name = f"persistent://public/default/{topic}"
    call(server.admin_url, "PUT", f"persistent/public/default/{topic}")
    call(server.admin_url, "POST", f"persistent/public/default/{topic}/deduplicationEnabled", True)

    def set_schema(*fields: dict[str, Any]) -> None:
        definition = json.dumps({"type": "record", "name": "R", "fields": [ID, *fields]})
        call(
            server.admin_url,
            "POST",
            f"schemas/public/default/{topic}/schema",
            {"type": "AVRO", "schema": definition, "properties": {}},
        )

    def batch(number: int) -> TaskReceipt:
        return write(RECORD, {"id": pa.array([number], pa.int64())}, number, service_url=server.service_url, topic=name)

    set_schema()
    batch(0)
    set_schema({"name": "note", "type": "string", "default": "none"})
    batch(1)
    call(server.admin_url, "PUT", "namespaces/public/default/schemaCompatibilityStrategy", "ALWAYS_COMPATIBLE")
    try:
        set_schema({"name": "note", "type": "string", "default": "none"}, {"name": "must", "type": "string"})
    finally:
        call(server.admin_url, "PUT", "namespaces/public/default/schemaCompatibilityStrategy", "UNDEFINED")
    assert "has a field must without a default: give a column must" in refused(lambda: batch(2))
    with scan(name, service_url=server.service_url, columns=["schema_version"]) as reader:
        versions = [int.from_bytes(each, "big") for each in reader.read_all()["schema_version"].to_pylist()]
    assert versions == [0, 1], "nothing of the batch that does not fit is written"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredWorld]:
    with running_secured(tmp_path_factory.mktemp("secured")) as world:
        yield world


def test_a_permission_that_is_missing_on_one_of_ten_topics_fails_the_task_before_it_sends(
    secured: SecuredWorld, write: Write
) -> None:
    topics = [f"persistent://a/n/of-ten-{number}" for number in range(10)]
    for topic in topics:
        path = f"/admin/v2/{topic.replace('://', '/')}"
        secured.do("a-admin", "PUT", path)
        secured.do("a-admin", "POST", f"{path}/deduplicationEnabled", json=True)
        if topic != topics[7]:
            secured.do("a-admin", "POST", f"{path}/permissions/writer", json=["produce"])
    rows = {"value": [f"row {number}" for number in range(100)], "topic": [topics[number % 10] for number in range(100)]}
    url, in_thread = secured.admin.standalone.service_url, secured.admin.in_thread

    def stored() -> list[int]:
        return [len(values(topic, service_url=url, token=token("a-user"))) for topic in topics]

    def attempt() -> TaskReceipt:
        return write(BY_TOPIC, rows, service_url=url, token=token("writer"))

    assert topics[7] in in_thread(lambda: refused(attempt))
    assert in_thread(stored) == [0] * 10
    secured.do("a-admin", "POST", f"/admin/v2/{topics[7].replace('://', '/')}/permissions/writer", json=["produce"])
    assert in_thread(attempt).rows == 100
    assert in_thread(stored) == [10] * 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScanCluster]:
    """Processes: ZooKeeper, three bookies, two brokers."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as world:
        yield world


@pytest.mark.slow
def test_bookies_that_are_lost_in_mid_query(cluster: ScanCluster, write: Write) -> None:
    """One is no error. Without any, or with full disks, the task ends at its limit, and its next attempt stores what is left."""
    topic = "persistent://public/default/bookies-lost"
    cluster.admin.request("PUT", "/admin/v2/persistent/public/default/bookies-lost")
    cluster.admin.request("POST", "/admin/v2/persistent/public/default/bookies-lost/deduplicationEnabled", body=True)
    rows = [f"{number:04d}" for number in range(200)]

    def batch(number: int, **options: Any) -> TaskReceipt:
        mine = {"value": rows[100 * number : 100 * number + 100]}
        return write(TEXT, mine, number, service_url=cluster.service_url, topic=topic, **options)

    cluster.cluster.kill("bookie-1")
    assert batch(0).rows == 100
    for name in ("bookie-2", "bookie-3"):
        cluster.cluster.pause(name)
    assert "no receipt within 2 s" in refused(lambda: batch(1, sendTimeout="2s"))
    for name in ("bookie-2", "bookie-3"):
        cluster.cluster.resume(name)
    cluster.cluster.start("bookie-1")
    assert batch(1).rows == 100
    assert values(topic, service_url=cluster.service_url) == [row.encode() for row in rows]


@pytest.mark.slow
def test_a_disk_that_fills_in_mid_query(tmp_path: Path, write: Write) -> None:
    """The micro-batch that finds no room fails by name. When there is room again, its next attempt stores what is left of it."""
    config, topic = tmp_path / "settings.toml", "persistent://public/default/filled"
    config.write_text(SETTINGS)
    with small_disk(tmp_path / "disk"), ProcessCluster(tmp_path / "disk" / "data", flags=("--config", str(config))) as server:
        call(server.admin_url, "POST", "namespaces/public/default/deduplication", True)
        call(server.admin_url, "POST", "namespaces/public/default/retention", KEPT)
        with WireClient(server.service_url, "old") as client:
            client.subscribe("reader", shared=False, earliest=True, permits=1)
        assert publish(server, "old", range(60)) == 60

        def batch(number: int) -> TaskReceipt:
            rows = [f"{row:05d}".ljust(MIB // 2, ".") for row in range(20 * number, 20 * number + 20)]
            return write(TEXT, {"value": rows}, number, service_url=server.service_url, topic=topic, sendTimeout="5s")

        def write_until_refused() -> tuple[int, str]:
            for number in range(20):
                try:
                    batch(number)
                except CepheidError as error:
                    return number, str(error)
            pytest.fail("the disk does not fill")

        last, said = write_until_refused()
        assert "no receipt within 5 s" in said
        assert "have no room" in said
        AdminClient(server.admin_url).delete("/admin/v2/persistent/public/default/old", force=True)
        deadline = time.monotonic() + 60
        while "read-only" in ready_page(server):
            assert time.monotonic() < deadline, server.log_text
            time.sleep(0.2)
        assert batch(last).rows == 20
        stored = [int(value[:5]) for value in values(topic, service_url=server.service_url)]
        assert stored == list(range(20 * last + 20))
