"""Wires between brokers and bookies: partitions in one or both directions, bookies that answer many times later."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.nemesis_machines import some_bookie, some_broker

if TYPE_CHECKING:
    from tests.simulation.world import World


class WireFaults:
    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._random = rng

    def acts(self) -> dict[Callable[[], None], float]:
        return {self._cut: 1.0, self._slow_bookie: 1.0, self._hit_ensemble: 2.0}

    def _cut(self) -> None:
        broker, bookie = some_broker(self._world, self._random), some_bookie(self._world, self._random)
        if broker is None or bookie is None:
            return
        network = self._world.network
        there, back = (broker.name, bookie.id), (bookie.id, broker.name)
        ways = self._random.choice(((there,), (back,), (there, back)))
        if not self._world.plan.deals("partition, one way" if len(ways) == 1 else "partition"):
            return
        for way in ways:
            network.block(*way)
        self._world.later(self._random.choice((0.2, 1.0, 6.0)), lambda: [network.unblock(*way) for way in ways])

    def _slow_bookie(self) -> None:
        """It answers, many times later."""
        if (bookie := some_bookie(self._world, self._random)) is not None and self._world.plan.deals("slow bookie"):
            network, name = self._world.network, bookie.id
            network.slow[name] = self._random.choice((50.0, 50.0, 1_000.0))
            self._world.later(self._random.choice((0.5, 2.0, 8.0)), lambda: network.slow.pop(name, None))

    def _hit_ensemble(self) -> None:
        """What chance alone brings together too rarely: in one ensemble some bookies are late while another one ends, and metadata
        takes its time to hear of it."""
        world, rng = self._world, self._random
        open_ledgers = [record for record in world.history.ledgers.values() if not record.is_closed]
        if not open_ledgers or not world.plan.deals("ensemble hit"):
            return
        ensemble = list(rng.choice(open_ledgers).last_fragment.ensemble)
        rng.shuffle(ensemble)
        ends, late = ensemble[0], ensemble[1 : rng.randrange(len(ensemble)) + 1]
        world.tree.slow = rng.choice((50.0, 300.0))
        world.later(rng.choice((1.0, 5.0)), world.tree.recover)
        for name in late:
            world.network.slow[name] = 100.0
            world.later(1.0, lambda name=name: world.network.slow.pop(name, None))
        bookie, power = world.bookies[ends], rng.random() < 0.3
        world.later(rng.choice((0.005, 0.02, 0.1)), lambda: bookie.serving and world.plan.active and bookie.crash(power=power))
