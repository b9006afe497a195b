"""ZooKeeper restarted, and away for long: who needs no metadata notices nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.integration.chaos_cluster import ChaosCluster, SharedCluster, new_topic, own_cluster

pytestmark = pytest.mark.slow

SESSION_TIMEOUT_S = 15.0
"""A server that comes back ends the sessions of those who do not reach it for so long. Its JVM was seen to take 16 s to start, and
more than 4 s of them to take connections: then a restart is noticed, and should be."""
OUTAGE_S = 60.0 if os.environ.get("CEPHEID_CHAOS_LONG") else 1.2 * SESSION_TIMEOUT_S


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[SharedCluster]:
    shared = SharedCluster(SESSION_TIMEOUT_S)
    try:
        yield shared
    finally:
        shared.drop(keep=False)


def test_a_zookeeper_restart_is_not_noticed_by_publishers(chaos: ChaosCluster) -> None:
    with chaos.workload("zk-restart") as work:
        work.fault("restart of ZooKeeper")
        chaos.processes.kill("zookeeper")
        chaos.processes.start("zookeeper")
        work.goes_on(receipts=200)
        work.ends_well(longest_wait_s=OUTAGE_S / 2)


def test_open_topics_go_on_through_an_outage_of_zookeeper(chaos: ChaosCluster) -> None:
    """Longer than every session: nobody but the server ends a session, and it is not there to do so."""
    with chaos.workload("zk-outage") as work:
        work.fault("outage")
        chaos.processes.kill("zookeeper")
        ends_at = time.monotonic() + OUTAGE_S
        while time.monotonic() < ends_at:
            work.goes_on()
        work.fault("end of the outage")
        chaos.processes.start("zookeeper")
        work.goes_on(receipts=200)
        chaos.wait_until(lambda: len(chaos.writable()) == 4, "every bookie is registered")
        work.ends_well(longest_wait_s=OUTAGE_S / 2)


def test_a_bookie_killed_during_an_outage_of_zookeeper_is_done_without(chaos: ChaosCluster) -> None:
    """The ensemble cannot be changed now: two of three go on, and it is made whole afterwards."""
    with chaos.workload("zk-outage-kill", types="Exclusive,Key_Shared") as work:
        victim = chaos.ensemble(work.topic)[0]
        work.fault("outage")
        chaos.processes.kill("zookeeper")
        work.goes_on()
        work.fault("SIGKILL")
        chaos.processes.kill(victim)
        work.goes_on(receipts=200)
        work.fault("end of the outage")
        chaos.processes.start("zookeeper")
        work.goes_on(receipts=200)
        chaos.wait_until_replaced(victim, work.topic)
        work.ends_well(longest_wait_s=OUTAGE_S / 2)


def test_no_publish_is_lost_or_late_when_the_leader_of_an_ensemble_restarts() -> None:
    with own_cluster(bookies=3, brokers=2, zookeepers=3) as cluster:
        with cluster.workload("zk-leader") as work:
            for number in range(2):
                leader = cluster.processes.zookeeper_leader
                assert leader
                work.fault(f"restart {number} of the leader, {leader}")
                cluster.processes.kill(leader)
                cluster.wait_until(lambda: cluster.processes.zookeeper_leader != "", "the ensemble has a leader")
                work.goes_on(receipts=100)
                cluster.processes.start(leader)
                work.goes_on(receipts=100)
            assert cluster.owner(new_topic_in(cluster)) != "", "metadata is written again"
            work.ends_well(longest_wait_s=OUTAGE_S / 2)


def new_topic_in(cluster: ChaosCluster) -> str:
    topic = new_topic("after-leader")
    cluster.open_topic(topic, at="broker-1")
    return topic
