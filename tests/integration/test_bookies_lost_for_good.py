"""Bookies that never come back, disks that are lost and bookies that are decommissioned, in random order, under official clients.

Between two losses the cluster becomes whole by itself. At the end nothing acknowledged is missing, and every copy is valid.
"""

from __future__ import annotations

import random

import pytest

from tests.integration.chaos_cluster import ChaosWorkload
from tests.integration.repairing_cluster import RepairingCluster, repairing_cluster

pytestmark = pytest.mark.slow


def test_bookies_lost_for_good_one_after_the_other_lose_nothing(chaos_round: int) -> None:
    rng = random.Random(chaos_round)
    losses = [kill_for_good, lose_the_disk, decommission]
    rng.shuffle(losses)
    with repairing_cluster(bookies=5) as cluster, cluster.chaos.workload("lost-for-good") as work:
        for loss in losses:
            victim = rng.choice(cluster.chaos.ensemble(work.topic))
            work.fault(f"{loss.__name__} {victim}")
            loss(cluster, work, victim)
            work.goes_on()
        work.ends_well()
        cluster.chaos.wait_until(cluster.has_every_copy, f"every copy is valid: {cluster.outcome('ledgers', 'verify', '--all')[1]}")


def kill_for_good(cluster: RepairingCluster, work: ChaosWorkload, victim: str) -> None:
    cluster.processes.kill(victim)
    cluster.processes.add("bookie")
    work.goes_on()
    cluster.wait_until_unnamed(victim)


def lose_the_disk(cluster: RepairingCluster, work: ChaosWorkload, victim: str) -> None:
    cluster.processes.wipe(victim)
    work.goes_on()
    cluster.processes.start(victim, accept_empty_disk=True)
    cluster.wait_until_refilled(victim)


def decommission(cluster: RepairingCluster, work: ChaosWorkload, victim: str) -> None:
    cluster.decommission(victim)
