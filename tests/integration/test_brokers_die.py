"""The broker that owns a topic killed, and put to sleep for longer than its session: the other one takes over."""

from __future__ import annotations

import time

from tests.integration.chaos_cluster import SESSION_TIMEOUT_S, ChaosCluster

TAKEOVER_S = 15.0


def test_the_other_broker_takes_over_from_a_sigkilled_one(chaos: ChaosCluster) -> None:
    with chaos.workload("kill-broker") as work:
        owner = chaos.owner(work.topic)
        with work.connections_end("SIGKILL"):
            chaos.processes.kill(owner)
            work.goes_on(within_s=TAKEOVER_S)
        assert chaos.owner(work.topic) != owner
        work.fault("start")
        chaos.processes.start(owner)
        work.goes_on(within_s=10)
        waits = work.ends_well()
    assert waits["SIGKILL"] < TAKEOVER_S, waits


def test_a_broker_that_sleeps_longer_than_its_session_wakes_up_without_its_topics(chaos: ChaosCluster) -> None:
    """What it was sent before it slept it may store still, or not; what it says when it wakes nobody may take for true."""
    with chaos.workload("pause-broker") as work:
        owner = chaos.owner(work.topic)
        with work.connections_end("SIGSTOP"):
            chaos.processes.pause(owner)
            chaos.wait_until(lambda: chaos.owner(work.topic) != owner, "another broker owns the topic", TAKEOVER_S)
            time.sleep(SESSION_TIMEOUT_S)  # the length of the sleep is what is tried
        with work.connections_end("SIGCONT"):
            chaos.processes.resume(owner)
            # A client cannot see that a broker sleeps: until it wakes, its clients wait for it (their keep-alive takes a minute).
            work.goes_on(within_s=TAKEOVER_S)
        assert chaos.owner(work.topic) != owner
        work.ends_well()
