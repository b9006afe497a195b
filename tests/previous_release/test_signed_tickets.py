"""A cluster with authentication of a release that knew no signed tickets, while its brokers, bookies and readers are replaced.

bookie-1, broker-1: old      broker-2: new       a topic with partitions at both; readers of both releases ask both brokers
bookie-1, broker-1: new      finish-upgrade      the new reader goes on, the old one is told to be upgraded
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pulsar
import pytest

from cepheid_dev.local_cluster import LocalCluster
from cepheid_security import token_keys
from cepheid_security.tokens import create_token
from cepheid_testkit.metadata_view import MetadataView
from tests.e2e.official_client import client_of, wait_for
from tests.plain_admin import AdminClient, namespace_path, topic_path
from tests.previous_release.old_code import OldCode

pytestmark = pytest.mark.slow

STAND_IN = "b737fc65310b355aac1725637880a46db448c6a0"
"""A commit with TLS and authentication of brokers, and without signed tickets."""
NAMESPACE = "public/upgraded"
TOPIC, PARTITIONS, MESSAGES = f"persistent://{NAMESPACE}/topic", 4, 200
FOREVER = {"retention_policies": {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}}
PATIENCE_S = 240.0


class Upgrading:
    """A cluster of processes with tokens, some of which run the stand-in for the previous release."""

    def __init__(self, old: OldCode) -> None:
        self.old = old
        self.directory = Path(tempfile.mkdtemp(prefix="cepheid-tickets-"))
        (self.directory / "token.key").write_bytes(b"k" * 64)
        key = token_keys.secret_key(str(self.directory / "token.key"))
        self.token = create_token(key, "admin", time.time_ns() // 1_000_000)
        (self.directory / "broker.token").write_text(self.token)
        self.processes = LocalCluster(self.directory / "cluster")

    def up(self) -> None:
        settings = {
            "ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1,
            "authentication": {
                "methods": ["token"],
                "secret_keys": [str(self.directory / "token.key")],
                "own_token_file": str(self.directory / "broker.token"),
            },
        }  # fmt: skip
        with self.old.in_use():
            self.processes.up(1, 1, settings={"broker": settings}, timeout_s=PATIENCE_S)
        self.processes.add("broker", PATIENCE_S)

    def down(self) -> None:
        self.processes.down()
        shutil.rmtree(self.directory)

    def replace(self, name: str) -> None:
        self.processes.stop(name)
        self.processes.start(name, timeout_s=PATIENCE_S)

    def serve(self, topic: str, broker: str) -> None:
        """Move the topic's bundle to this broker, unless it is there already."""
        admin, view = AdminClient(self.processes.admin_urls[0]), MetadataView(self.processes.metadata_url)
        path = topic_path(topic).removeprefix("/admin/v2/")
        bundle = admin.get(f"/lookup/v2/topic/{path}/bundle")
        name = bundle.decode() if isinstance(bundle, bytes) else str(bundle)

        def is_there() -> bool:
            admin.get(f"/lookup/v2/topic/{path}")  # a bundle is owned when somebody looks for it
            return view.owner(topic) == broker

        if not is_there():
            admin.put(f"{namespace_path(NAMESPACE)}/{name}/unload", destinationBroker=broker)
            wait_for(is_there, f"{broker} serves {topic}", PATIENCE_S)

    def cepheid(self, *words: str, broker: int = 0, old: bool = False) -> subprocess.CompletedProcess[str]:
        with self.old.in_use() if old else nullcontext():
            variables = {name: value for name, value in os.environ.items() if not name.startswith("CEPHEID_")}
        variables |= {"CEPHEID_TOKEN": self.token, "CEPHEID_ADMIN_URL": self.processes.admin_urls[broker]}
        command = [sys.executable, "-m", "cepheid_cli", *words]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE_S)

    def read(self, *, broker: int, old: bool) -> subprocess.CompletedProcess[str]:
        words = ("read", TOPIC, "--format", "csv", "--columns", "value", "--admin-url", self.processes.admin_urls[broker])
        return self.cepheid(*words, broker=broker, old=old)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upgrading]:
    made = Upgrading(OldCode.from_history(STAND_IN, tmp_path / "old"))
    monkeypatch.setenv("CEPHEID_TOKEN", made.token)
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.mark.timeout(1200)
def test_readers_of_both_releases_read_until_the_upgrade_is_finished(cluster: Upgrading) -> None:
    processes = cluster.processes
    AdminClient(processes.admin_urls[0]).put(namespace_path(NAMESPACE), FOREVER)
    AdminClient(processes.admin_urls[0]).put(f"{topic_path(TOPIC)}/partitions", PARTITIONS)
    with client_of(processes.service_url, authentication=pulsar.AuthenticationToken(cluster.token)) as client:
        producer = client.create_producer(TOPIC, message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution)
        for number in range(MESSAGES):
            producer.send(b"message %d" % number)
        producer.close()
    for partition, broker in ((0, "broker-1"), (1, "broker-2")):
        cluster.serve(f"{TOPIC}-partition-{partition}", broker)

    for broker in (0, 1):
        for old in (True, False):
            done = cluster.read(broker=broker, old=old)
            assert done.returncode == 0, (broker, old, done.stderr)
            assert len(done.stdout.splitlines()) == MESSAGES + 1, (broker, old)

    refused = cluster.cepheid("cluster", "finish-upgrade", "--yes", broker=1)
    assert refused.returncode != 0
    assert "bookie-1, broker-1 run an older release" in refused.stderr
    for name in ("bookie-1", "broker-1"):
        cluster.replace(name)
    finished = cluster.cepheid("cluster", "finish-upgrade", "--yes", broker=1)
    assert finished.returncode == 0, finished.stderr
    for broker in (0, 1):
        wait_for(lambda broker=broker: "format 3" in cluster.read(broker=broker, old=True).stderr, "plans have tickets alone")
        done = cluster.read(broker=broker, old=False)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == MESSAGES + 1
