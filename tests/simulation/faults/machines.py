"""Machines and processes that end or stop, at any moment and before any of their steps, and clocks that are wrong by days."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.node import Node
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_clock import JUMPS_MS

if TYPE_CHECKING:
    from tests.simulation.world.world import World

SESSION_S = 3.0
"""How long the metadata store keeps the session of a broker of which it hears nothing."""
_PAUSES_S = (0.001, 0.02, 0.2, 1.0, 4.0, 9.0)
_MOST_STEPS = 4_000
"""Within so many steps of all processes a step is struck; a second of a busy world has about as many."""


def some_bookie(world: World, rng: random.Random) -> SimBookie | None:
    serving = [bookie for bookie in world.bookies.values() if bookie.serving]
    return rng.choice(serving) if serving else None


def some_broker(world: World, rng: random.Random) -> SimBroker | None:
    up = [broker for broker in world.brokers.values() if broker.node.alive and not broker.node.paused]
    return rng.choice(up) if up else None


class MachineFaults:
    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._random = rng

    def acts(self) -> dict[Callable[[], None], float]:
        return {
            self._lose_power: 1.0,
            self._lose_power_everywhere: 0.3,
            self._crash_bookie: 1.0,
            self._crash_broker: 1.0,
            self._pause_bookie: 1.0,
            self._pause_broker: 1.0,
            self._crash_at_a_step: 2.0,
            self._pause_at_a_step: 1.0,
            self._set_a_clock: 1.2,
            self._bend_a_clock: 0.4,
        }

    def _lose_power(self) -> None:
        if (bookie := some_bookie(self._world, self._random)) is not None and self._world.plan.deals("power loss"):
            bookie.crash(power=True)

    def _lose_power_everywhere(self) -> None:
        if self._world.plan.deals("power loss everywhere"):
            for bookie in self._world.bookies.values():
                if bookie.node.alive:
                    bookie.crash(power=True)

    def _crash_bookie(self) -> None:
        if (bookie := some_bookie(self._world, self._random)) is not None and self._world.plan.deals("bookie crash"):
            bookie.crash(power=False)

    def _crash_broker(self) -> None:
        power = self._random.random() < 0.3
        kind = "power loss of a broker" if power else "broker crash"
        if (broker := some_broker(self._world, self._random)) is not None and self._world.plan.deals(kind):
            self._end_broker(broker, power=power)

    def _end_broker(self, broker: SimBroker, *, power: bool) -> None:
        broker.crash(power=power, lingers=self._random.random() < 0.5)
        self._world.later(self._random.choice((0.1, 0.5, 2.0)), lambda: self._world.come_back(broker))

    def _pause_bookie(self) -> None:
        bookie = some_bookie(self._world, self._random)
        if bookie is not None and not bookie.node.paused and self._world.plan.deals("bookie paused"):
            bookie.pause(self._random.choice(_PAUSES_S))

    def _pause_broker(self) -> None:
        """Perhaps for longer than its session lives: it wakes up, and does not know."""
        if (broker := some_broker(self._world, self._random)) is not None and self._world.plan.deals("broker paused"):
            self._stop_steps_of(broker, self._random.choice(_PAUSES_S))

    def _stop_steps_of(self, broker: SimBroker, pause_s: float) -> None:
        node, store = broker.node, broker.store
        node.pause()
        if pause_s > SESSION_S:
            self._world.later(SESSION_S, lambda: node.paused and store.expire())
            self._world.later(pause_s + 0.1, store.renew)
        self._world.later(pause_s, lambda: node.paused and node.resume())

    def _crash_at_a_step(self) -> None:
        """The process whose step comes next takes it no more."""
        world, rng = self._world, self._random
        steps, power = rng.randrange(_MOST_STEPS), rng.random() < 0.5

        def strike(node: Node) -> bool:
            if not world.plan.active:
                return True
            if (bookie := world.bookies.get(node.name)) is not None and bookie.node is node:
                if world.plan.deals("power loss before a step" if power else "crash before a step"):
                    bookie.crash(power=power)
                return True
            if (broker := world.brokers.get(node.name)) is not None and broker.node is node:
                if world.plan.deals("broker crash before a step"):
                    self._end_broker(broker, power=power)
                return True
            return False

        world.loop.strike(steps, strike)

    def _pause_at_a_step(self) -> None:
        world, rng = self._world, self._random
        steps, pause_s = rng.randrange(_MOST_STEPS), rng.choice(_PAUSES_S)

        def strike(node: Node) -> bool:
            if not world.plan.active:
                return True
            if (bookie := world.bookies.get(node.name)) is not None and bookie.node is node:
                if world.plan.deals("bookie paused before a step"):
                    bookie.pause(pause_s)
                return True
            if (broker := world.brokers.get(node.name)) is not None and broker.node is node:
                if world.plan.deals("broker paused before a step"):
                    self._stop_steps_of(broker, pause_s)
                return True
            return False

        world.loop.strike(steps, strike)

    def _some_machine(self) -> str:
        return self._random.choice([*self._world.bookies, *self._world.brokers])

    def _set_a_clock(self) -> None:
        machine, by_ms = self._some_machine(), self._random.choice(JUMPS_MS)
        if self._world.plan.deals("clock set ahead" if by_ms > 0 else "clock set back"):
            self._world.history.note(f"the clock of {machine} jumps by {by_ms} ms")
            self._world.plan.clocks.of(machine).jump(by_ms)

    def _bend_a_clock(self) -> None:
        machine, rate = self._some_machine(), self._random.choice((0.0, 0.5, 2.0, 1000.0))
        if self._world.plan.deals("clock too fast" if rate > 1 else "clock too slow"):
            self._world.history.note(f"the clock of {machine} shows {rate} s a second")
            self._world.plan.clocks.of(machine).drift(rate)
