"""The previous release and this one in one cluster: brokers of each release write to bookies of both; then all processes swap.

bookie-1, bookie-2, broker-1: old        bookie-3, broker-2: new        a topic at each broker, official clients at work
one process after the other is stopped, and started with the other release's code
bookie-1, bookie-2, broker-1: new        bookie-3, broker-2: old        the same topics, the same clients
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from cepheid_dev.local_cluster import LocalCluster
from cepheid_testkit.metadata_view import MetadataView
from tests.e2e.official_client import wait_for
from tests.integration.copies import bad_copies
from tests.plain_admin import AdminClient, namespace_path, topic_path
from tests.previous_release.old_code import OldCode
from tests.previous_release.recorded_files import EXPECTED, load_json
from tests.previous_release.traffic import Traffic

pytestmark = pytest.mark.slow

NAMESPACE = "public/releases"
FOREVER = {"retention_policies": {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}}
QUORUMS = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}
BOOKIES = {"bookie-1", "bookie-2", "bookie-3"}
BROKERS = ("broker-1", "broker-2")
OLD_AT_FIRST = {"bookie-1", "bookie-2", "broker-1"}
PATIENCE_S = 120.0
TOPICS_TRIED = 20


class TwoReleases:
    """A cluster of processes, each of which runs one of two releases."""

    def __init__(self, old: OldCode) -> None:
        self._old = old
        self.directory = Path(tempfile.mkdtemp(prefix="cepheid-releases-"))
        self.processes = LocalCluster(self.directory)
        self.view: MetadataView

    def __repr__(self) -> str:
        return f"<TwoReleases in {self.directory}>"

    def up(self) -> None:
        """Start the old members first: names are given in the order of starting."""
        with self._old.in_use():
            self.processes.up(2, 1, settings={"broker": QUORUMS}, timeout_s=PATIENCE_S)
        self.processes.add("bookie", PATIENCE_S)
        self.processes.add("broker", PATIENCE_S)
        self.view = MetadataView(self.processes.metadata_url)
        self.admin.put(namespace_path(NAMESPACE), FOREVER)

    def down(self) -> None:
        self.processes.down()
        shutil.rmtree(self.directory)

    @property
    def admin(self) -> AdminClient:
        return AdminClient(self.processes.admin_urls[0])

    def on_old_code(self) -> set[str]:
        """Return the members that run the previous release."""
        pids = {name: self.processes.pid(name) for name in (*BOOKIES, *BROKERS)}
        return {name for name, pid in pids.items() if pid is not None and self._old.is_run_by(pid)}

    def change_release(self, name: str) -> None:
        was_old = name in self.on_old_code()
        self.processes.stop(name)
        with nullcontext() if was_old else self._old.in_use():
            self.processes.start(name, timeout_s=PATIENCE_S)

    def bundle(self, topic: str) -> str:
        path = topic_path(topic).removeprefix("/admin/v2/")
        answer = self.admin.get(f"/lookup/v2/topic/{path}/bundle")
        return answer.decode() if isinstance(answer, bytes) else str(answer)

    def serve(self, topic: str, broker: str) -> None:
        """Move the topic's bundle to this broker, unless it is there already."""
        if self.view.owner(topic) != broker:
            wait_for(lambda: len(self.admin.get("/admin/v2/brokers")) == len(BROKERS), "all brokers are known", PATIENCE_S)
            self.admin.put(f"{namespace_path(NAMESPACE)}/{self.bundle(topic)}/unload", destinationBroker=broker)
            wait_for(lambda: self.view.owner(topic) == broker, f"{broker} serves {topic}", PATIENCE_S)

    def two_topics(self) -> tuple[str, str]:
        """Return names of topics in different bundles, so that different brokers can serve them."""
        first, *others = [f"persistent://{NAMESPACE}/topic-{number}" for number in range(TOPICS_TRIED)]
        return first, next(other for other in others if self.bundle(other) != self.bundle(first))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TwoReleases]:
    old = OldCode.from_history(load_json(EXPECTED)["release"], tmp_path / "old")
    places = old.places_of_packages()
    assert places, "the previous release has packages"
    assert all(places.values()), f"imported from elsewhere: {places}"
    cluster = TwoReleases(old)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_while_every_process_changes_between_the_releases(cluster: TwoReleases) -> None:
    assert cluster.on_old_code() == OLD_AT_FIRST
    topics = cluster.two_topics()
    url = cluster.processes.service_url
    with Traffic(url, topics[0]) as first, Traffic(url, topics[1]) as second:
        serve_both(cluster, first, second)
        for traffic in (first, second):
            traffic.acknowledge_half(50)
        for name in (*sorted(BOOKIES), *BROKERS):
            cluster.change_release(name)
            first.goes_on()
            second.goes_on()
        assert cluster.on_old_code() == {*BOOKIES, *BROKERS} - OLD_AT_FIRST
        serve_both(cluster, first, second)
        first.finish()
        second.finish()
    for topic in topics:
        assert {bookie for ledger in cluster.view.ledgers(topic) for bookie in ledger.last_fragment.ensemble} == BOOKIES
        assert bad_copies(cluster.view.url, topic) == []


def serve_both(cluster: TwoReleases, *traffic: Traffic) -> None:
    """Move each topic to a different broker, and so to a different release."""
    for each, broker in zip(traffic, BROKERS, strict=True):
        cluster.serve(each.topic, broker)
        each.goes_on()
