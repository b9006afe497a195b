"""The broker that owns a topic killed, and put to sleep for longer than its session: the other one takes over."""

from __future__ import annotations

import time

import pytest

from tests.integration.chaos_cluster import SESSION_TIMEOUT_S, ChaosCluster, new_topic
from tests.plain_admin import AdminClient

pytestmark = pytest.mark.slow

TAKEOVER_S = 30.0
"""The session ends after 4 s. A client that knows both brokers asks the dead one again and again, with pauses that double: the
attempt that succeeds may come after 12.7 s (benchmarks/broker_failover.py), and the next one after 25.5 s."""


@pytest.mark.parametrize("types", ["Shared,Failover", "Exclusive,Key_Shared"])
def test_the_other_broker_takes_over_from_a_sigkilled_one(chaos: ChaosCluster, types: str) -> None:
    with chaos.workload("kill-broker", types=types) as work:
        owner = chaos.owner(work.topic)
        with work.connections_end("SIGKILL"):
            chaos.processes.kill(owner)
            work.goes_on()
        assert chaos.owner(work.topic) != owner
        work.fault("start")
        chaos.processes.start(owner)
        work.goes_on()
        waits = work.ends_well()
    assert max(waits.values()) < TAKEOVER_S, waits


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
        work.ends_well()
