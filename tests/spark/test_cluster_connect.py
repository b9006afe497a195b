"""Spark Connect: the server runs everything, and a client needs neither this package nor Java."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest

from cepheid_dev.free_ports import free_port
from cepheid_spark.java_check import NoJavaError, find_java
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import publish
from tests.spark.standalone_master import SPARK_HOME, Started, spark_environment

pytestmark = pytest.mark.slow

NUMBERS = list(range(300))
CLIENT = Path(__file__).with_name("connect_client.py")
CLIENT_S = 800.0


@pytest.fixture(scope="module")
def connect_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server in its own process, which knows of this package by what is installed, and by nothing else."""
    try:
        find_java()
    except NoJavaError as error:
        pytest.skip(f"NO SPARK: {error}")
    for needed in ("grpc_status", "google.rpc", "zstandard", "pandas"):
        pytest.importorskip(needed, reason="NO SPARK: a client of Spark Connect needs pip install 'pyspark[connect]'")
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
    }
    flags = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[2]", *flags]
    server = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    log = tmp_path_factory.mktemp("connect") / "server.log"
    started = Started([*command, *server], log, spark_environment(PYSPARK_PYTHON=sys.executable))
    try:
        started.wait_for(r"Spark Connect server started at:? *(\S+)")
        yield f"sc://127.0.0.1:{port}"
    finally:
        started.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_batch_and_stream_over_connect(
    connect_url: str, server: ProcessCluster, client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    publish(client, topic, [b"%d" % number for number in NUMBERS], batching_enabled=False)
    command = [sys.executable, "-I", str(CLIENT), connect_url, server.service_url, topic, str(tmp_path / "checkpoint")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_", "JAVA_"))}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CLIENT_S, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["batch"] == NUMBERS
    assert (found["stream"], found["batches"], found["lag"]) == (len(NUMBERS), 2, 0)
    assert "did you mean readMode?" in found["typo"]
