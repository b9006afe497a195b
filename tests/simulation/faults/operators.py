"""What operators do to a cluster that runs, and what several of its processes do to one ledger at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cepheid_wire import NamespaceName, TopicName
from tests.simulation.workloads.ledgers import EXPECTED, Quorums
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_operator import Operator

if TYPE_CHECKING:
    from tests.simulation.world.world import World

_PATIENCE_S = 8.0
"""After which the next machine's turn comes, whatever became of this one."""

_ROUNDS = 2
"""Of a rolling restart."""


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

    @property
    def is_rolling(self) -> bool:
        return self._rolling is not None and not self._rolling.done()

    def _roll_bookies(self) -> None:
        """One after the other, all of them twice: gracefully, or not."""
        world, gracefully = self._world, self._random.random() < 0.6
        restarts = [partial(self._restart_bookie, bookie, gracefully=gracefully) for bookie in world.bookies.values()]
        self._roll("rolling restart of bookies" if gracefully else "rolling restart of bookies, killed", restarts)

    def _roll_brokers(self) -> None:
        world, gracefully = self._world, self._random.random() < 0.6
        restarts = [partial(self._restart_broker, broker, gracefully=gracefully) for broker in world.brokers.values()]
        self._roll("rolling restart of brokers" if gracefully else "rolling restart of brokers, killed", restarts)

    def _roll(self, kind: str, restarts: Sequence[Callable[[], Awaitable[bool]]]) -> None:
        """A round counts when each machine has been restarted in it."""
        world = self._world

        async def rounds() -> None:
            for _ in range(_ROUNDS):
                restarted = [await restart() for restart in restarts]
                if all(restarted):
                    world.plan.saw(kind)

        if not self.is_rolling and world.plan.begins():
            self._rolling = world.start_outside(rounds(), kind)

    async def _restart_bookie(self, bookie: SimBookie, *, gracefully: bool) -> bool:
        await self._until(lambda: bookie.serving)
        if self._ended or not bookie.serving:
            return False
        before = bookie.node
        if gracefully:
            bookie.stop()
            await self._until(lambda: not before.alive)
        else:
            bookie.crash(power=False)
        if not bookie.node.alive and not self._ended and not bookie.gone:
            bookie.start()
        await self._until(lambda: bookie.serving)
        return bookie.serving and bookie.node is not before

    async def _restart_broker(self, broker: SimBroker, *, gracefully: bool) -> bool:
        await self._until(lambda: broker.node.alive and not broker.node.paused)
        if self._ended or not broker.node.alive:
            return False
        before = broker.node
        if gracefully:
            await broker.stop()
        else:
            broker.crash()
        if not broker.node.alive and not self._ended:
            self._world.begin(broker)
        await asyncio.sleep(self._random.choice((0.1, 1.0)))
        return broker.node.alive and broker.node is not before

    async def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = self._world.loop.time() + _PATIENCE_S
        while not is_so() and not self._ended and self._world.loop.time() < deadline:  # noqa: ASYNC110 - machines tell nobody
            await asyncio.sleep(0.05)

    def _change_quorums(self) -> None:
        """For ledgers that are made from now on. Where clients use topics, as policies of one of these or of their namespace."""
        world, rng = self._world, self._random
        quorums = world.other_quorums(rng)
        if quorums is None:
            return
        if world.clients is None:
            if world.plan.deals("quorums changed"):
                world.change_quorums(quorums)
            return
        topics = world.clients.topics
        of = rng.choice((topics[0].namespace, *topics))
        if world.plan.begins():
            world.start_outside(self._set_policy(of, quorums), f"set quorums of {of}")

    async def _set_policy(self, of: NamespaceName | TopicName, quorums: Quorums) -> None:
        """Again and again, until somebody says that it is done: from then on it counts."""
        world = self._world
        operator = Operator(world.brokers, world.plan.stream(f"quorums of {of}"))
        while not self._ended:
            try:
                await operator.set_quorums(of, quorums.ensemble_size, quorums.write_quorum, quorums.ack_quorum)
                world.change_quorums(quorums)
                world.plan.saw("quorums changed")
                return
            except EXPECTED as error:
                world.history.note(lambda error=error: f"an operator cannot set quorums of {of}: {error!r}")
                await asyncio.sleep(0.3)

    def _recover_at_once(self) -> None:
        """Two or three processes recover one ledger, whose writer may live. One process alone would make one recovery of them."""
        world, rng = self._world, self._random
        open_ledgers = [ledger_id for ledger_id, record in world.history.ledgers.items() if not record.is_closed]
        up = [broker for broker in world.brokers.values() if broker.node.alive and not broker.node.paused]
        if not open_ledgers or len(up) < 2:
            return
        several = rng.sample(up, rng.randint(2, len(up)))
        if not world.plan.deals("two recover one ledger" if len(several) == 2 else "three recover one ledger"):
            return
        victim = rng.choice(open_ledgers)
        for broker in several:
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
        if not written or len(living) < 2 or not world.plan.deals("recovered amid late answers"):
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
