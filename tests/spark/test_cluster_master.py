"""Executors elsewhere: a standalone master, two workers, jobs by spark-submit. Their Python has this package from its wheel."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pulsar
import pytest

from cepheid_dev.free_ports import free_port
from cepheid_spark.java_check import NoJavaError, find_java
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import publish
from tests.spark.standalone_master import StandaloneMaster

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("cluster_job.py")
NUMBERS = list(range(800))


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, wheel_bin: Path) -> Iterator[StandaloneMaster]:
    try:
        find_java()
    except NoJavaError as error:
        pytest.skip(f"NO SPARK: {error}")
    with StandaloneMaster(tmp_path_factory.mktemp("spark"), python=wheel_bin / "python") as master:
        yield master


@contextmanager
def silent_address() -> Iterator[str]:
    """Connecting to it takes for ever: nobody accepts, and the queue of those who wait is full."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as listener:
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for one in waiting:
                one.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_workers_read_in_batch_and_as_a_stream_and_without_a_way_to_one_bookie(
    master: StandaloneMaster, wheel_bin: Path, server: ProcessCluster, client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    publish(client, topic, [b"%d" % number for number in NUMBERS], batching_enabled=False)
    result = tmp_path / "result"
    with silent_address() as silent:
        places = f"127.0.0.1:{free_port()}", silent
        said = master.submit(
            *(JOB, server.service_url, topic, result, tmp_path / "checkpoint", *places),
            conf={
                "spark.python.unix.domain.socket.enabled": "true",
                "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # both workers are there before the first task
                "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            },
        )
    found: dict[str, Any] = json.loads(result.read_text())
    assert {name: part["executors"] for name, part in found.items()} == dict.fromkeys(found, 2), said
    imported = {Path(file) for file in found.pop("imported")["rows"]}
    assert {file.parent.name for file in imported} == {"cepheid_scan", "cepheid_spark", "pyspark_cepheid"}
    assert all(file.is_relative_to(wheel_bin.parent) for file in imported), f"not of the wheel: {imported}"
    assert {name: part["rows"] == NUMBERS for name, part in found.items()} == {
        "batch": True,
        "stream": True,
        "refusing": True,
        "silent": True,
    }, said
    for name in ("refusing", "silent"):
        assert found[name]["failures"] >= found[name]["tasks"] >= 8, (name, found[name])
