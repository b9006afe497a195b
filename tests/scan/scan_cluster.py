"""A cluster of processes for tests of planning: ZooKeeper, three bookies, two brokers, and entries in it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cepheid_decode import PlanSource
from cepheid_dev.local_cluster import LocalCluster
from cepheid_scan.admin_http import AdminHttp
from tests.wire_client import WireClient

FULL = "persistent://public/default"
ADMIN = "/admin/v2/persistent/public/default"


class ScanCluster:
    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.admin = AdminHttp(PlanSource(admin_url=cluster.admin_urls[0], retry_s=20))

    @property
    def service_url(self) -> str:
        return self.cluster.service_url

    def source(self, **fields: Any) -> PlanSource:
        return PlanSource(**{"service_url": self.service_url, "retry_s": 20.0, **fields})

    @property
    def by_zookeeper(self) -> PlanSource:
        return PlanSource(metadata=self.cluster.metadata_url, retry_s=20)

    def publish(self, topic: str, payloads: Sequence[bytes]) -> list[tuple[int, int]]:
        """One entry each; where they were stored."""
        with WireClient(self.service_url, f"{FULL}/{topic}") as client:
            client.open_producer()
            return [client.send(number, payload) for number, payload in enumerate(payloads)]

    def unload(self, topic: str) -> None:
        """Ends the topic's ledger."""
        self.admin.request("PUT", f"{ADMIN}/{topic}/unload")

    def close(self) -> None:
        self.admin.close()


@contextmanager
def running_cluster(directory: Path) -> Iterator[ScanCluster]:
    cluster = LocalCluster(directory)
    cluster.up(bookies=3, brokers=2, session_timeout_s=4.0)
    world = ScanCluster(cluster)
    try:
        world.admin.request(
            "POST",
            "/admin/v2/namespaces/public/default/retention",
            body={"retentionTimeInMinutes": -1, "retentionSizeInMB": -1},
        )
        yield world
    finally:
        world.close()
        for name in cluster.names():
            cluster.kill(name)


def ask_raw(url: str, method: str, path: str) -> tuple[int, str]:
    """Status and Location, of this address alone."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.getheader("Location", "")
    finally:
        connection.close()


def shown(value: Any) -> str:
    return json.dumps(value, default=str)
