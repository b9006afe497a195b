"""What operators do to a cluster that runs, and what several of its processes do to one ledger at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.nemesis_machines import some_broker

if TYPE_CHECKING:
    from tests.simulation.world import World

_PATIENCE_S = 8.0
"""After which the next machine's turn comes, whatever became of this one."""


class OperatorFaults:
    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._random = rng
        self._rolling: asyncio.Task[None] | None = None
        self._ended = False

    def acts(self) -> dict[Callable[[], None], float]:
        return {
            self._roll_bookies: 0.4,
            self._roll_brokers: 0.4,
            self._change_quorums: 0.8,
            self._recover_at_once: 1.0,
            self._recover_amid_late_answers: 1.0,
        }

    async def end(self) -> None:
        self._ended = True
        if self._rolling is not None:
            await self._rolling

    def _roll_bookies(self) -> None:
        """One after the other, all of them twice: gracefully, or not."""
        gracefully = self._random.random() < 0.6
        if self._may_roll() and self._world.plan.deals(f"rolling restart of bookies{'' if gracefully else ', killed'}"):
            self._rolling = self._world.start_outside(self._restart_bookies(gracefully=gracefully), "rolling restart of bookies")

    def _roll_brokers(self) -> None:
        gracefully = self._random.random() < 0.6
        if self._may_roll() and self._world.plan.deals(f"rolling restart of brokers{'' if gracefully else ', killed'}"):
            self._rolling = self._world.start_outside(self._restart_brokers(gracefully=gracefully), "rolling restart of brokers")

    def _may_roll(self) -> bool:
        return self._rolling is None or self._rolling.done()

    async def _restart_bookies(self, *, gracefully: bool) -> None:
        for bookie in [*self._world.bookies.values()] * 2:
            await self._until(lambda bookie=bookie: bookie.serving)
            if self._ended or not bookie.serving:
                continue
            if gracefully:
                bookie.stop()
                await self._until(lambda bookie=bookie: not bookie.node.alive)
            else:
                bookie.crash(power=False)
            if not bookie.node.alive and not self._ended:
                bookie.start()

    async def _restart_brokers(self, *, gracefully: bool) -> None:
        for broker in [*self._world.brokers.values()] * 2:
            await self._until(lambda broker=broker: broker.node.alive and not broker.node.paused)
            if self._ended or not broker.node.alive:
                continue
            if gracefully:
                await broker.stop()
            else:
                broker.crash()
            if not broker.node.alive and not self._ended:
                self._world.begin(broker)
            await asyncio.sleep(self._random.choice((0.1, 1.0)))

    async def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = self._world.loop.time() + _PATIENCE_S
        while not is_so() and not self._ended and self._world.loop.time() < deadline:  # noqa: ASYNC110 - machines tell nobody
            await asyncio.sleep(0.05)

    def _change_quorums(self) -> None:
        """For ledgers that are made from now on."""
        quorums = self._world.other_quorums(self._random)
        if quorums is not None and self._world.plan.deals("quorums changed"):
            self._world.change_quorums(quorums)

    def _recover_at_once(self) -> None:
        """Two or three processes recover one ledger, whose writer may live."""
        world, rng = self._world, self._random
        open_ledgers = [ledger_id for ledger_id, record in world.history.ledgers.items() if not record.is_closed]
        if not open_ledgers or not world.plan.deals("several recover one ledger"):
            return
        victim = rng.choice(open_ledgers)
        for _ in range(rng.choice((2, 3))):
            if (broker := some_broker(world, rng)) is not None:
                work = world.ledger_workload.recover(broker, victim)
                world.spawn(broker.node, work, f"recover {victim} with others")

    def _recover_amid_late_answers(self) -> None:
        """The ledger of a topic, whose owner hears too late what most bookies have taken."""
        world, rng, history = self._world, self._random, self._world.history
        living = [broker.process for broker in world.brokers.values() if broker.node.alive and not broker.node.paused]
        written = [
            record
            for ledger_id, record in history.ledgers.items()
            if not record.is_closed and "topic" in record.custom and history.creators[ledger_id] in living
        ]
        if not written or not world.plan.deals("recovered amid late answers"):
            return
        record = rng.choice(written[-4:])
        owner = history.creators[record.ledger_id].split("#")[0]
        ensemble = list(record.last_fragment.ensemble)
        rng.shuffle(ensemble)
        for name in ensemble[1:]:
            world.network.block(name, owner, "add answer")
            late_s = rng.choice((0.3, 0.8, 1.5))
            world.later(late_s, lambda name=name: world.network.unblock(name, owner, "add answer"))
        others = [broker for broker in world.brokers.values() if broker.name != owner]

        def recover() -> None:
            for broker in others:
                if broker.node.alive:
                    work = world.ledger_workload.recover(broker, record.ledger_id)
                    world.spawn(broker.node, work, f"recover {record.ledger_id}")

        world.later(rng.choice((0.02, 0.1)), recover)
