"""`profile: production`, scaled to one node: three of each, on one node instead of three, and with small requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.places import RunningNode
from tests.kubernetes.release import Release

TOPIC = "persistent://public/default/orders"
PARTS = ("zookeeper", "bookie", "broker")
SCALED = [
    *(f"--set={part}.spread.hosts=prefer" for part in PARTS),
    *(f"--set={part}.resources.requests.cpu=50m,{part}.resources.requests.memory=256Mi" for part in PARTS),
    "--set=zookeeper.jvmFlags=-Xms64m -Xmx192m -XX:+UseSerialGC -XX:TieredStopAtLevel=1",
]


@pytest.fixture(scope="module")
def production(node: RunningNode) -> Iterator[Release]:
    release = Release(node, "production", "--set=profile=production", *SCALED, secure=True)
    release.delete_namespace()
    release.create_namespace()
    yield release
    release.save_report()
    release.delete_namespace()


def test_three_of_each_serve_the_official_client(production: Release) -> None:
    production.install()
    assert [len(production.pods(part)) for part in PARTS] == [3, 3, 3]
    report = production.publish(TOPIC, 100)
    assert (report["received"], report["error_count"]) == (100, 0), report


def test_helm_test_passes(production: Release) -> None:
    production.helm("test", production.name, "--timeout=600s")


def test_each_zookeeper_server_may_be_deleted(production: Release, figures: dict[str, object]) -> None:
    with production.load(TOPIC + "-deleted") as report:
        for pod in production.pods("zookeeper"):
            uid = production.uid(pod)
            production.kubectl("delete", "pod", pod)
            production.wait_pod_replaced(pod, uid)
    figures["production: deletion of ZooKeeper's pods, longest gap s"] = report["longest_message_gap_s"]
    assert (report["lost"], report["error_count"]) == (0, 0), report
