"""Wires between brokers and bookies: partitions in one or both directions, bookies that answer many times later."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from cepheid_metadata import LedgerMetadata
from tests.simulation.faults.machines import some_bookie, some_broker

if TYPE_CHECKING:
    from tests.simulation.world.world import World


class WireFaults:
    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._random = rng

    def acts(self) -> dict[Callable[[], None], float]:
        return {self._cut: 1.0, self._slow_bookie: 1.0, self._hit_ensemble: 3.0, self._strand_owner: 1.0}

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
        takes its time to hear of it; or whoever takes its place does."""
        world, rng = self._world, self._random
        written = self._written() or [record for record in world.history.ledgers.values() if not record.is_closed]
        if not written or not world.plan.deals("ensemble hit"):
            return
        ensemble = list(rng.choice(written).last_fragment.ensemble)
        rng.shuffle(ensemble)
        ends, late = ensemble[0], ensemble[1 : rng.randrange(len(ensemble)) + 1]
        if rng.random() < 0.5:
            late = ensemble[1:]
        slow = {name: rng.choice((100.0, 1_500.0)) for name in late}
        if rng.random() < 0.5:
            world.tree.slow = rng.choice((50.0, 300.0))
            world.later(rng.choice((1.0, 5.0)), world.tree.recover)
        else:
            slow |= {name: 2_000.0 for name in world.bookies if name not in ensemble}
        for name, times in slow.items():
            world.network.slow[name] = times
            world.later(1.0, lambda name=name: world.network.slow.pop(name, None))
        bookie, power = world.bookies.get(ends), rng.random() < 0.3
        world.later(
            rng.choice((0.005, 0.03, 0.1)),
            lambda: bookie is not None and bookie.serving and world.plan.active and bookie.crash(power=power),
        )

    def _written(self) -> list[LedgerMetadata]:
        """Ledgers of living writers who wait for answers."""
        history = self._world.history
        living = [broker.process for broker in self._world.brokers.values() if broker.node.alive and not broker.node.paused]
        return [
            record
            for ledger_id, record in history.ledgers.items()
            if not record.is_closed
            and history.creators[ledger_id] in living
            and len(history.sent.get(ledger_id, ())) > history.acked.get(ledger_id, 0)
        ]

    def _strand_owner(self) -> None:
        """A broker whose adds reach no bookie any more goes on for a moment, and ends: what it had sent was never stored."""
        world, rng = self._world, self._random
        broker = some_broker(world, rng)
        if broker is None or not world.plan.deals("broker cut off, then ended"):
            return
        ends_s = rng.choice((0.1, 0.3, 1.0))
        for name in world.bookies:
            world.network.block(broker.name, name, "add")
            world.later(ends_s + 4.0, lambda name=name: world.network.unblock(broker.name, name, "add"))

        def end() -> None:
            if world.plan.active and broker.node.alive and not broker.node.paused:
                broker.crash()
                world.later(0.5, lambda: world.come_back(broker))

        world.later(ends_s, end)
