"""ZooKeeper restarted, and away for long: who needs no metadata notices nothing."""

from __future__ import annotations

import os
import time

from tests.integration.chaos_cluster import SESSION_TIMEOUT_S, ChaosCluster

OUTAGE_S = 60.0 if os.environ.get("CEPHEID_CHAOS_LONG") else 1.5 * SESSION_TIMEOUT_S
GAP_S = 3.0


def test_a_zookeeper_restart_is_not_noticed_by_publishers(chaos: ChaosCluster) -> None:
    with chaos.workload("zk-restart") as work:
        work.fault("restart of ZooKeeper")
        chaos.processes.kill("zookeeper")
        chaos.processes.start("zookeeper")
        work.goes_on(within_s=15, receipts=200)
        waits = work.ends_well()
    assert max(waits.values()) < GAP_S, waits


def test_open_topics_go_on_through_an_outage_of_zookeeper(chaos: ChaosCluster) -> None:
    """Longer than every session: nobody but the server ends a session, and it is not there to do so."""
    with chaos.workload("zk-outage") as work:
        work.fault("outage")
        chaos.processes.kill("zookeeper")
        ends_at = time.monotonic() + OUTAGE_S
        while time.monotonic() < ends_at:
            work.goes_on(within_s=5)
        work.fault("end of the outage")
        chaos.processes.start("zookeeper")
        work.goes_on(within_s=15, receipts=200)
        chaos.wait_until(lambda: len(chaos.writable()) == 4, "every bookie is registered", 20)
        waits = work.ends_well()
    assert max(waits.values()) < GAP_S, waits


def test_a_bookie_killed_during_an_outage_of_zookeeper_is_done_without(chaos: ChaosCluster) -> None:
    """The ensemble cannot be changed now: two of three go on, and it is made whole afterwards."""
    with chaos.workload("zk-outage-kill", types="Exclusive,Key_Shared") as work:
        victim = chaos.ensemble(work.topic)[0]
        work.fault("outage")
        chaos.processes.kill("zookeeper")
        work.goes_on(within_s=5)
        work.fault("SIGKILL")
        chaos.processes.kill(victim)
        work.goes_on(within_s=10, receipts=200)
        work.fault("end of the outage")
        chaos.processes.start("zookeeper")
        work.goes_on(within_s=15, receipts=200)
        chaos.wait_until_replaced(victim, work.topic, 30)
        waits = work.ends_well()
    assert max(waits.values()) < GAP_S, waits
