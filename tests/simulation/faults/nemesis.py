"""What breaks on purpose, beside what messages, requests and disk operations suffer by chance.

    World ──act──► Nemesis ──one of many, by weight──► machines, disks, wires, metadata, operators (nemesis_*.py)

Rule 1: a fault is counted, and may be left out, right before it happens: `plan.deals(kind)`. What would have no
effect is not dealt out; what takes long begins (`plan.begins()`) and is counted when it is done (`plan.saw(kind)`).
Rule 2: whatever lasts is ended by `heal`, or ends by itself; nothing begins after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.checks.audit_waits import STARTED_S
from tests.simulation.faults.connections import ConnectionFaults
from tests.simulation.faults.disks import DiskFaults
from tests.simulation.faults.machines import MachineFaults
from tests.simulation.faults.metadata import MetadataFaults
from tests.simulation.faults.operators import OperatorFaults
from tests.simulation.faults.repair import RepairFaults
from tests.simulation.faults.wires import WireFaults

if TYPE_CHECKING:
    from tests.simulation.world.world import World

_RATE = 0.11
"""Of a fault at each visit of the world's own loop."""


class Nemesis:
    def __init__(self, world: World) -> None:
        self._world = world
        self._random = rng = world.plan.stream("nemesis")  # its own: a fault left out does not change what others are drawn
        self._operators = OperatorFaults(world, rng)
        kinds = (
            MachineFaults(world, rng),
            DiskFaults(world, rng),
            WireFaults(world, rng),
            ConnectionFaults(world, rng),
            MetadataFaults(world, rng),
            self._operators,
            *(() if world.repairs is None else (RepairFaults(world, world.repairs, rng),)),
        )
        self._acts: dict[Callable[[], None], float] = {act: weight for kind in kinds for act, weight in kind.acts().items()}

    def act(self) -> None:
        if self._random.random() < _RATE:
            (act,) = self._random.choices(list(self._acts), list(self._acts.values()))
            act()

    @property
    def is_rolling(self) -> bool:
        """A rolling restart is under way; whatever else breaks goes on breaking."""
        return self._operators.is_rolling

    async def heal(self) -> None:
        """Ends every fault that lasts, and waits until every bookie serves (V8)."""
        world = self._world
        world.network.heal()
        world.tree.slow = 1.0
        world.tree.end_election(world.plan)
        if world.tree.out:
            world.tree.end_outage()
        await self._operators.end()
        if world.repairs is not None:
            await world.repairs.end_orders()
            world.repairs.end_lasting_faults()
        for bookie in world.bookies.values():
            bookie.end_lasting_faults()
        for broker in world.brokers.values():
            world.plan.clocks.of(broker.name).correct()
            if broker.node.paused:
                broker.node.resume()
            if broker.node.alive:
                broker.store.catch_up()
                broker.store.renew()
            else:
                world.begin(broker)
        await self._start_bookies()
        await asyncio.sleep(max(0.0, world.plan.ends_s - world.loop.time()))

    async def _start_bookies(self) -> None:
        world, bookies = self._world, list(self._world.bookies.values())
        deadline = max(world.loop.time(), world.plan.ends_s) + STARTED_S
        while not all(bookie.serving for bookie in bookies):
            if world.loop.time() > deadline:
                world.history.violated("V8", f"not everybody serves: {bookies}, {STARTED_S:g} s after the last fault")
                await asyncio.sleep(0)  # the end of the run, unless this rule is muted
                return
            for bookie in bookies:
                if not bookie.node.alive:
                    bookie.start()  # nobody waits for its task: a crash may end it, and then it takes no further step
            await asyncio.sleep(0.05)
        world.history.check("V8", True, "")
