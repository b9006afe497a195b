"""Exports of a topic that grows: what is in the table after each run, through kills and beside other exports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pytest

import cepheid_lake
from cepheid.sync import Client, connect
from cepheid_decode import DataLossError, PlanSource
from cepheid_lake import ConcurrentExportError, LakeError, LakeTargetError
from cepheid_lake.parquet_target import ParquetTarget
from cepheid_lake.target import Committed
from cepheid_scan.admin_http import AdminHttp
from cepheid_testkit import ProcessCluster
from tests.tiered.s3_server import BUCKET, CREDENTIALS, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[ProcessCluster]:
    with ProcessCluster() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ProcessCluster) -> Iterator[Client]:
    with connect(server.service_url) as connected:
        yield connected


class Killed(BaseException):
    """The export's process ends here."""


def values(folder: Path) -> list[bytes]:
    table = ds.dataset(folder, format="parquet", exclude_invalid_files=False).to_table()
    return sorted(table["value"].to_pylist())


def publish(client: Client, topic: str, numbers: range) -> None:
    with client.producer(topic) as producer:
        for number in numbers:
            producer.send(b"%04d" % number)


def publish_batch(client: Client, topic: str, numbers: range) -> None:
    """All in one entry."""
    with client.producer(topic, batch_delay_s=10.0, batch_messages=len(numbers)) as producer:
        producer.send_all(b"%04d" % number for number in numbers)


def call(server: ProcessCluster, method: str, path: str, body: Any = None) -> None:
    with closing(AdminHttp(PlanSource(admin_url=server.admin_url))) as http:
        http.request(method, path, body=body)


def expected(count: int) -> list[bytes]:
    return [b"%04d" % number for number in range(count)]


@pytest.fixture
def export(server: ProcessCluster) -> Callable[..., Any]:
    def run(topic: str, to: str, **options: Any) -> Any:
        return cepheid_lake.export(topic, to, service_url=server.service_url, **options)

    return run


def test_each_run_adds_what_is_new(client: Client, export: Callable[..., Any], tmp_path: Path) -> None:
    to = f"parquet://{tmp_path}/table"
    publish(client, "growing", range(5))
    publish_batch(client, "growing", range(5, 12))
    assert export("growing", to).rows == 12
    assert export("growing", to).rows == 0
    publish(client, "growing", range(12, 20))
    assert export("growing", to).rows == 8
    assert values(tmp_path / "table") == expected(20)


def test_a_commit_may_end_inside_of_a_batch_of_messages(client: Client, export: Callable[..., Any], tmp_path: Path) -> None:
    publish_batch(client, "batches", range(100))
    for run in range(3):
        report = export("batches", f"parquet://{tmp_path}/table", commit_bytes=1)
        assert report.rows == (100 if run == 0 else 0)
    assert values(tmp_path / "table") == expected(100)


@pytest.mark.parametrize("step", ["upload", "create", "move"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_kill_at_any_step_neither_loses_nor_doubles_messages(
    client: Client, export: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, done: bool
) -> None:
    topic, to = f"killed-{step}-{done}", f"parquet://{tmp_path}/table"
    publish(client, topic, range(10))
    export(topic, to)
    publish(client, topic, range(10, 20))
    with monkeypatch.context() as patched:
        from cepheid_lake import parquet_target

        real = getattr(parquet_target._LocalFolder, step)

        def killed(*arguments: Any) -> None:
            if done:
                real(*arguments)
            raise Killed

        patched.setattr(parquet_target._LocalFolder, step, killed)
        with pytest.raises(Killed):
            export(topic, to)
    export(topic, to)
    assert values(tmp_path / "table") == expected(20)


def test_of_two_exports_at_the_same_time_one_is_refused(tmp_path: Path) -> None:
    batch = pa.record_batch({"value": [b"x"]})
    first, second = (ParquetTarget(f"parquet://{tmp_path}/table") for _ in range(2))
    for target in (first, second):
        assert target.open() is None
        target.add(batch)
    committed = Committed("persistent://public/default/t", "messages", {})
    first.commit(committed)
    with pytest.raises(ConcurrentExportError, match="another export has written commit 1"):
        second.commit(committed)
    second.close()
    assert values(tmp_path / "table") == [b"x"]


def test_a_partitioned_topic_that_grows(server: ProcessCluster, client: Client, export: Callable[..., Any], tmp_path: Path) -> None:
    to = f"parquet://{tmp_path}/table"
    call(server, "PUT", "/admin/v2/persistent/public/default/wide/partitions", 2)
    publish(client, "wide", range(10))
    report = export("wide", to)
    call(server, "POST", "/admin/v2/persistent/public/default/wide/partitions", 4)
    publish(client, "wide", range(10, 40))
    report = export("wide", to)
    assert values(tmp_path / "table") == expected(40)
    assert len(report.positions) == 4


def test_what_is_not_exported_yet_is_kept_though_every_consumer_is_done(
    server: ProcessCluster, client: Client, export: Callable[..., Any], tmp_path: Path
) -> None:
    to = f"parquet://{tmp_path}/table"
    publish(client, "held", range(5))
    subscription = export("held", to).subscription
    for _ in range(2):
        call(server, "PUT", "/admin/v2/persistent/public/default/held/unload")
        publish(client, "held", range(5, 10) if _ == 0 else range(10, 15))
    assert export("held", to).rows == 10
    assert values(tmp_path / "table") == expected(15)
    call(server, "DELETE", f"/admin/v2/persistent/public/default/held/subscription/{subscription}")


def test_a_topic_that_was_trimmed_is_an_error_and_not_a_gap(
    server: ProcessCluster, client: Client, export: Callable[..., Any], tmp_path: Path
) -> None:
    to, path = f"parquet://{tmp_path}/table", "/admin/v2/persistent/public/default/trimmed"
    publish(client, "trimmed", range(5))
    subscription = export("trimmed", to).subscription
    call(server, "DELETE", f"{path}/subscription/{subscription}")
    for numbers in (range(5, 10), range(10, 15)):
        publish(client, "trimmed", numbers)
        call(server, "PUT", f"{path}/unload")
    publish(client, "trimmed", range(15, 20))
    call(server, "POST", f"{path}/trim")
    with pytest.raises(DataLossError, match="is no longer kept"):
        export("trimmed", to)
    assert values(tmp_path / "table") == expected(5)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"topic": "other"}, LakeError, "holds the export of persistent://public/default/bad-input, not of"),
        ({"mode": "typed"}, LakeError, "was begun with mode messages"),
        ({"to": "csv:///tmp/x"}, LakeTargetError, "does not name a table: write parquet:///absolute/path"),
        ({"to": "iceberg://flights"}, LakeTargetError, "write iceberg://namespace.table"),
        ({"to": "parquet+s3://"}, LakeTargetError, "names no bucket"),
        ({"catalog": {"uri": "x"}}, LakeTargetError, "catalog properties are only for iceberg://"),
    ],
)
def test_bad_input(
    client: Client, export: Callable[..., Any], tmp_path: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    publish(client, "bad-input", range(1))
    publish(client, "other", range(1))
    to = f"parquet://{tmp_path}/table"
    export("bad-input", to)
    with pytest.raises(error, match=text):
        export(**{"topic": "bad-input", "to": to, **options})


def test_a_damaged_commit_is_named(client: Client, export: Callable[..., Any], tmp_path: Path) -> None:
    publish(client, "damaged", range(1))
    export("damaged", f"parquet://{tmp_path}/table")
    record = tmp_path / "table" / "_cepheid" / "0000000001.json"
    text = json.loads(record.read_text())
    record.write_text(json.dumps({**text, "format": 2}))
    with pytest.raises(LakeTargetError, match="format 2, and this release knows format 1: upgrade"):
        export("damaged", f"parquet://{tmp_path}/table")
    record.write_text("{")
    with pytest.raises(LakeTargetError, match=r"0000000001\.json is not a commit of an export"):
        export("damaged", f"parquet://{tmp_path}/table")


@pytest.mark.slow
def test_a_bucket(client: Client, export: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    publish(client, "to-bucket", range(10))
    with s3_server() as s3:
        to = f"parquet+{s3.url('lake/table')}"
        assert export("to-bucket", to).rows == 10
        publish(client, "to-bucket", range(10, 20))
        stale = ParquetTarget(to)
        stale.open()
        assert export("to-bucket", to).rows == 10
        stale.add(pa.record_batch({"value": [b"x"]}))
        with pytest.raises(ConcurrentExportError):
            stale.commit(Committed("persistent://public/default/to-bucket", "messages", {}))
        stale.close()
        store = pyarrow.fs.S3FileSystem(
            endpoint_override=s3.endpoint,
            access_key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )
        table = ds.dataset(f"{BUCKET}/lake/table", format="parquet", filesystem=store).to_table()
    assert sorted(table["value"].to_pylist()) == expected(20)
