"""Brokers killed, paused, drained, restarted and added in random order, while clients work on topics of all of them.

The number of the round is the seed: `CEPHEID_CHAOS_ROUNDS=20 pytest tests/integration/test_brokers_come_and_go.py`. A step that
breaks clients' connections is told to the history, and the cluster is whole again before the next one.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import pytest

from tests.integration.chaos_cluster import SESSION_TIMEOUT_S, ChaosCluster, ChaosWorkload, new_topic, own_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BROKERS = 3
MOST_BROKERS = 5
STEPS = 10 if "CEPHEID_CHAOS_ROUNDS" in os.environ else 0
"""A round has each kind of step once, and those of a campaign further ones up to this number."""
CEPHEID = (sys.executable, "-m", "cepheid_cli")


class Brokers:
    """What can happen to the brokers of a cluster, while a workload goes on."""

    def __init__(self, cluster: ChaosCluster, work: ChaosWorkload, rng: random.Random) -> None:
        self._cluster = cluster
        self._work = work
        self._rng = rng
        self._processes = cluster.processes
        self.steps: Mapping[str, Callable[[], None]] = {
            "kill the owner": self.kill_owner,
            "pause the owner": self.pause_owner,
            "restart a broker": self.restart,
            "unload": self.unload,
            "add a broker": self.add,
            "drain the owner": self.drain_owner,
        }

    def kill_owner(self) -> None:
        owner = self._owner()
        with self._work.connections_end(f"SIGKILL of {owner}"):
            self._processes.kill(owner)
            self._work.goes_on()
        self._work.fault(f"start of {owner}")
        self._processes.start(owner)

    def pause_owner(self) -> None:
        """For longer than its session. Its clients see nothing until it wakes up without its topics."""
        owner = self._owner()
        with self._work.connections_end(f"SIGSTOP of {owner}"):
            self._processes.pause(owner)
            time.sleep(self._rng.uniform(0.2, 2 * SESSION_TIMEOUT_S))  # the length of the sleep is what is tried
            self._processes.resume(owner)
            self._work.goes_on()

    def restart(self) -> None:
        name = self._rng.choice(list(self._processes.broker_ports))
        with self._work.connections_end(f"restart of {name}"):
            self._processes.stop(name)
            self._work.goes_on()
            self._processes.start(name)

    def unload(self) -> None:
        with self._work.connections_end("unload"):
            self._command("topics", "unload", self._work.topic)
            self._work.goes_on()

    def add(self) -> None:
        if len(self._processes.broker_ports) < MOST_BROKERS:
            with self._work.connections_end("a broker is added"):  # load may move to it
                self._processes.add("broker")
                self._work.goes_on()

    def drain_owner(self) -> None:
        owner = self._owner()
        with self._work.connections_end(f"drain of {owner}"):
            self._command("brokers", "drain", owner, "--wait")
            self._work.goes_on()
        assert self._cluster.owner(self._work.topic) != owner
        self._work.fault(f"restart of {owner}")
        self._processes.stop(owner)
        self._processes.start(owner)

    def _owner(self) -> str:
        self._cluster.wait_until(lambda: self._cluster.owner(self._work.topic) != "", "the topic has an owner")
        return self._cluster.owner(self._work.topic)

    def _command(self, *words: str) -> None:
        command = [*CEPHEID, *words, "--admin-url", self._processes.admin_urls[0]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self._cluster.last_words()}"


def test_clients_keep_all_they_were_promised_while_brokers_come_and_go(chaos_round: int) -> None:
    rng = random.Random(chaos_round)
    with (
        own_cluster(bookies=3, brokers=BROKERS) as cluster,
        cluster.workload("come-and-go", topic=new_topic("come-and-go")) as work,
    ):
        brokers = Brokers(cluster, work, rng)
        names = list(brokers.steps)
        plan = [*names, *rng.choices(names, k=max(0, STEPS - len(names)))]
        rng.shuffle(plan)
        print(f"round {chaos_round}: {', '.join(plan)}")
        for name in plan:
            brokers.steps[name]()
            cluster.heal()
            work.goes_on()
        work.ends_well()
