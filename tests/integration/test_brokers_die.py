"""The broker that owns a topic killed, and put to sleep for longer than its session: the other one takes over."""

from __future__ import annotations

import time

import pulsar
import pytest

from tests.integration.chaos_cluster import PATIENCE_S, SESSION_TIMEOUT_S, ChaosCluster, new_topic, own_cluster
from tests.plain_admin import AdminClient

pytestmark = pytest.mark.slow


def test_the_other_broker_takes_over_from_a_sigkilled_one(chaos: ChaosCluster) -> None:
    with chaos.workload("kill-broker", types="Shared,Failover,Exclusive,Key_Shared") as work:
        owner = chaos.owner(work.topic)
        with work.connections_end("SIGKILL"):
            chaos.processes.kill(owner)
            work.goes_on()
        assert chaos.owner(work.topic) != owner
        work.fault("start")
        chaos.processes.start(owner)
        work.goes_on()
        work.ends_well()


def test_with_deduplication_what_is_sent_again_to_the_next_broker_is_stored_once(chaos: ChaosCluster) -> None:
    topic = new_topic("once")
    owner = next(iter(chaos.processes.broker_ports))
    chaos.open_topic(topic, at=owner)
    admin = AdminClient(chaos.processes.admin_urls[0])
    admin.post(f"/admin/v2/{topic.replace('://', '/')}/deduplicationEnabled", True)
    with chaos.workload("once", topic=topic, types="Shared", **{"messages-per-s": "600"}) as work:
        with work.connections_end("SIGKILL"):
            chaos.processes.kill(chaos.owner(topic))
            work.goes_on()
        work.ends_well(deduplication=True)


def test_a_broker_that_sleeps_longer_than_its_session_wakes_up_without_its_topics(chaos: ChaosCluster) -> None:
    """What it had in hand when it fell asleep it may not acknowledge once somebody else has opened the topic."""
    with chaos.workload("pause-broker") as work:
        owner = chaos.owner(work.topic)
        with work.connections_end("SIGSTOP"):
            chaos.processes.pause(owner)
            chaos.wait_until(lambda: chaos.owner(work.topic) == "", "the session of the owner has ended")
            heir = next(name for name in chaos.processes.broker_ports if name != owner)
            chaos.open_topic(work.topic, at=heir)  # the workload's clients cannot see that a broker sleeps, and stay with it
            assert chaos.owner(work.topic) == heir
            time.sleep(SESSION_TIMEOUT_S)  # the length of the sleep is what is tried
        with work.connections_end("SIGCONT"):
            chaos.processes.resume(owner)
            work.goes_on()
        assert chaos.owner(work.topic) == heir
        work.ends_well(longest_wait_s=PATIENCE_S)  # as long as the owner slept


def test_a_new_client_publishes_while_the_owner_is_stopped_and_its_session_lives() -> None:
    """The session is far longer than the test waits: only a challenge that is not answered makes the topic free."""
    with own_cluster(bookies=3, session_timeout_s=40.0) as cluster:
        topic = new_topic("hangs")
        cluster.open_topic(topic, at=next(iter(cluster.processes.broker_ports)))
        owner = cluster.owner(topic)
        heir = next(name for name in cluster.processes.broker_ports if name != owner)
        cluster.processes.pause(owner)
        # A client that asks before the owner is found gone is sent to it, and waits for its connection (10 s).
        noticed = f"broker.gone broker={owner} "
        cluster.wait_until(lambda: noticed in cluster.log_paths()[heir].read_text(), "the owner is found gone")
        began = time.monotonic()
        url = f"pulsar://127.0.0.1:{cluster.processes.broker_ports[heir]}"
        client = pulsar.Client(url, operation_timeout_seconds=25, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        try:
            client.create_producer(topic).send(b"x")
        finally:
            client.close()
        took_s = time.monotonic() - began
        print(f"published after {took_s:.2f} s")
        assert cluster.owner(topic) == heir
        assert took_s < 20.0
        cluster.processes.resume(owner)
        cluster.wait_until(lambda: cluster.shown(owner) == "ready", "the broker that was stopped is registered again")
        assert cluster.owner(topic) == heir
