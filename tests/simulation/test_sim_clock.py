"""Wall clocks of simulated machines: wrong by a little from the start, by much when somebody sets them, the same in every run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.faults.plan import CALM, FaultPlan, Faults
from tests.simulation.world.sim_clock import DAY_MS, MachineClock, MachineClocks, true_ms
from tests.simulation.world.sim_worker import sim_ports
from tests.simulation.world.virtual_loop import run_simulated


def play(script: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_simulated(script())


def test_a_calm_world_has_clocks_that_are_right() -> None:
    async def main() -> None:
        clock = FaultPlan("clocks", CALM).clocks.of("b1")
        await asyncio.sleep(3600)
        assert clock.wall_ms() == true_ms()

    play(main)


def test_machines_differ_and_a_machine_is_as_wrong_again_in_the_next_run() -> None:
    async def main() -> None:
        shown = [[MachineClocks("seed", 2.0, 0.01).of(name).wall_ms() for name in ("b1", "b2", "east")] for _ in range(2)]
        assert shown[0] == shown[1]
        assert len({*shown[0]}) == 3
        assert all(0 < abs(ms - true_ms()) <= 2000 for ms in shown[0])

    play(main)


def test_a_clock_belongs_to_the_machine_and_not_to_its_process() -> None:
    async def main() -> None:
        plan = FaultPlan("clocks", Faults())
        plan.clocks.of("b1").jump(DAY_MS)
        ports = sim_ports(plan.random, lambda _: 0.0, plan.clocks.of("b1"))  # of the process that is started next
        assert abs(ports.wall_ms() - true_ms() - DAY_MS) <= 2000

    play(main)


def test_a_clock_jumps_drifts_stands_still_and_is_set_right() -> None:
    async def main() -> None:
        clock = MachineClock()
        clock.jump(-365 * DAY_MS)
        assert clock.wall_ms() == true_ms() - 365 * DAY_MS
        clock.correct()
        clock.drift(2.0)
        await asyncio.sleep(10)
        assert clock.wall_ms() == true_ms() + 10_000
        clock.drift(0.0)
        before_ms = clock.wall_ms()
        await asyncio.sleep(10)
        assert clock.wall_ms() == before_ms
        clock.correct()
        assert clock.wall_ms() == true_ms()

    play(main)
