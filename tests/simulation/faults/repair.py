"""What happens in worlds with repair: bookies that never come back, disks that are refilled, decommissions, operators' orders, and
processes that repair and end, sleep, lose their sessions or are cut off."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from cepheid_metadata import SessionState, draining_bookies
from cepheid_metadata.repair_views import RepairRefusedError, UnknownBookieError, decommission, request_recovery
from tests.simulation.faults.machines import some_bookie
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.repairs import Repairs
from tests.simulation.world.sim_directory import SESSION_S
from tests.simulation.world.sim_repairer import SimRepairer

if TYPE_CHECKING:
    from tests.simulation.world.world import World

_PAUSES_S = (0.02, 0.3, 1.0, 4.0, 9.0)


class RepairFaults:
    def __init__(self, world: World, repairs: Repairs, rng: random.Random) -> None:
        self._world = world
        self._repairs = repairs
        self._random = rng

    def acts(self) -> dict[Callable[[], None], float]:
        return {
            self._lose_bookie: 12.0,
            self._lose_disk: 4.0,
            self._decommission: 2.5,
            self._switch_off: 1.5,
            self._request: 3.0,
            self._crash: 2.0,
            self._pause: 2.0,
            self._expire_session: 2.5,
            self._cut: 1.5,
            self._lag: 1.0,
        }

    def _some_that_may_be_lost(self) -> SimBookie | None:
        bookie = some_bookie(self._world, self._random)
        return bookie if bookie is not None and self._repairs.may_lose(bookie) else None

    def _lose_bookie(self) -> None:
        bookie = self._some_that_may_be_lost()
        if bookie is not None and self._world.plan.deals("bookie lost for good"):
            self._repairs.lose_for_good(bookie)

    def _lose_disk(self) -> None:
        bookie = self._some_that_may_be_lost()
        if bookie is not None and self._world.plan.deals("disks lost, to be filled again"):
            bookie.lose_disk()
            self._repairs.count_loss()

    def _decommission(self) -> None:
        """Until it is empty; then its operator throws it away, or thinks better of it. Some think better of it before."""
        world, repairs, rng = self._world, self._repairs, self._random
        bookie, throws_away, gives_up = some_bookie(world, rng), rng.random() < 0.7, rng.random() < 0.2
        if bookie is None or not world.plan.begins():
            return
        records = draining_bookies(repairs.store)

        async def begin() -> None:
            try:
                await decommission(repairs.store, bookie.id, 0, world.quorums.ensemble_size)
            except (RepairRefusedError, UnknownBookieError) as error:
                world.history.note(f"{bookie.id} is not decommissioned: {error}")
                return
            world.plan.saw("bookie decommissioned")
            world.later(0.2, look)

        async def follow() -> None:
            found = await records.get(bookie.id)
            if found is None or not world.plan.active:
                return
            if found.record.drained_at_ms is None and not gives_up:
                world.later(0.2, look)
            elif throws_away and not gives_up and bookie.id in world.bookies and repairs.may_lose(bookie):
                world.plan.saw("bookie lost for good")
                repairs.lose_for_good(bookie)
            else:
                await repairs.cancel(bookie.id)

        def look() -> None:
            world.start_outside(follow(), f"look after {bookie.id}")

        world.start_outside(begin(), f"decommission {bookie.id}")

    def _switch_off(self) -> None:
        world, repairs = self._world, self._repairs
        if not world.plan.deals("repair switched off"):
            return
        world.start_outside(repairs.switch(off=True), "switch repair off")
        world.later(self._random.choice((0.5, 3.0)), lambda: world.start_outside(repairs.switch(off=False), "switch repair on"))

    def _request(self) -> None:
        """An operator does not want to wait for the grace period of a bookie that is away."""
        world, repairs = self._world, self._repairs
        away = [*repairs.gone, *(bookie.id for bookie in world.bookies.values() if not bookie.serving)]
        if not away or not world.plan.begins():
            return
        bookie = self._random.choice(away)

        async def request() -> None:
            try:
                await request_recovery(repairs.store, bookie, 0)
                world.plan.saw("recovery of a bookie requested")
            except (RepairRefusedError, UnknownBookieError) as error:
                world.history.note(f"{bookie} is not recovered: {error}")

        world.start_outside(request(), f"recover {bookie}")

    def _some_repairer(self) -> SimRepairer | None:
        up = [each for each in self._repairs.repairers.values() if each.node.alive and not each.node.paused]
        return self._random.choice(up) if up else None

    def _crash(self) -> None:
        """Between two of its steps, or before one that comes soon."""
        world, rng = self._world, self._random
        repairer, lingers = self._some_repairer(), rng.random() < 0.5
        if repairer is None or not world.plan.deals("process that repairs crashed"):
            return
        repairer.crash(lingers=lingers)
        world.later(rng.choice((0.1, 0.5, 2.0)), lambda: self._repairs.come_back(repairer))

    def _pause(self) -> None:
        """Perhaps for longer than its session lives: another auditor is elected, and two of them go on for a moment."""
        world, rng = self._world, self._random
        repairer = self._some_repairer()
        if repairer is None or not world.plan.deals("process that repairs paused"):
            return
        node, store, pause_s = repairer.node, repairer.store, rng.choice(_PAUSES_S)
        node.pause()
        if pause_s > SESSION_S:
            world.later(SESSION_S, lambda: node.paused and store.expire())
            world.later(pause_s + 0.1, store.renew)
        world.later(pause_s, lambda: node.paused and node.resume())

    def _expire_session(self) -> None:
        repairer = self._some_repairer()
        if repairer is None or repairer.store.memory.session_state is SessionState.LOST:
            return
        if self._world.plan.deals("session of a process that repairs expired"):
            repairer.store.expire()
            self._world.later(self._random.choice((0.1, 1.0, 3.0)), repairer.store.renew)

    def _cut(self) -> None:
        repairer, bookie = self._some_repairer(), some_bookie(self._world, self._random)
        if repairer is None or bookie is None or not self._world.plan.deals("process that repairs cut off from a bookie"):
            return
        network = self._world.network
        ways = ((repairer.name, bookie.id), (bookie.id, repairer.name))
        for way in ways:
            network.block(*way)
        self._world.later(self._random.choice((0.2, 1.0, 6.0)), lambda: [network.unblock(*way) for way in ways])

    def _lag(self) -> None:
        repairer = self._some_repairer()
        if repairer is not None and self._world.plan.deals("metadata follower of a process that repairs behind"):
            repairer.store.lag_s = self._random.choice((0.05, 0.3, 1.5))
            self._world.later(self._random.choice((0.5, 3.0)), repairer.store.catch_up)
