"""Bookies killed and stopped under load: clients notice nothing but a moment, and nothing is lost, repeated or swapped."""

from __future__ import annotations

import time

import pytest

from tests.integration.chaos_cluster import ADD_TIMEOUT_S, SESSION_TIMEOUT_S, ChaosCluster

pytestmark = pytest.mark.slow


def test_a_sigkilled_bookie_of_the_ensemble_is_replaced(chaos: ChaosCluster) -> None:
    with chaos.workload("kill-bookie") as work:
        victim = chaos.ensemble(work.topic)[0]
        work.fault("SIGKILL")
        chaos.processes.kill(victim)
        work.goes_on(receipts=200)
        chaos.wait_until_replaced(victim, work.topic)
        work.fault("start")
        chaos.processes.start(victim)
        work.goes_on()
        work.ends_well()


def test_a_topic_without_traffic_leaves_a_sigkilled_bookie(chaos: ChaosCluster) -> None:
    """Nothing is sent to the bookie: the broker goes by its registration (`ledger.unregistered_bookie_s`)."""
    victim = "bookie-1"
    topic = chaos.new_topic_on(victim)
    chaos.processes.kill(victim)
    chaos.wait_until_replaced(victim, topic)


def test_two_bookies_sigkilled_in_a_row_leave_too_few_and_publishing_goes_on(chaos: ChaosCluster) -> None:
    """Of four bookies the first is replaced, the second is not: the ack quorum goes on, and all is whole once they are back."""
    with chaos.workload("kill-two") as work:
        first, second = chaos.ensemble(work.topic)[:2]
        work.fault("first SIGKILL")
        chaos.processes.kill(first)
        work.goes_on()
        chaos.wait_until_replaced(first, work.topic)
        work.fault("second SIGKILL")
        chaos.processes.kill(second)
        work.goes_on(receipts=200)
        work.fault("starts")
        chaos.processes.start(first)
        chaos.processes.start(second)
        work.goes_on()
        chaos.wait_until(
            lambda: len(set(chaos.ensemble(work.topic)) & set(chaos.writable())) == 3,
            "three living bookies hold what is written",
        )
        work.ends_well()


def test_a_bookie_that_sleeps_longer_than_its_session_comes_back(chaos: ChaosCluster) -> None:
    asleep_s = max(ADD_TIMEOUT_S, SESSION_TIMEOUT_S) + 1.5
    with chaos.workload("pause-bookie") as work:
        victim = chaos.ensemble(work.topic)[0]
        work.fault("SIGSTOP")
        chaos.processes.pause(victim)
        began = time.monotonic()
        work.goes_on(receipts=200)
        chaos.wait_until(lambda: victim not in chaos.writable(), f"{victim} is no longer registered")
        time.sleep(max(0.0, began + asleep_s - time.monotonic()))  # the length of the sleep is what is tried
        work.fault("SIGCONT")
        chaos.processes.resume(victim)
        chaos.wait_until(lambda: victim in chaos.writable(), f"{victim} is registered again")
        work.goes_on()
        work.ends_well()
