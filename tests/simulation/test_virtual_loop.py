"""The virtual loop keeps asyncio's promises, takes no wall time, and does the same in every process."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time

import pytest

from tests.simulation.world.node import Node, NodeCrashed
from tests.simulation.world.sim_worker import SimWorker, sim_workers
from tests.simulation.world.virtual_loop import START_S, SimulationError, VirtualLoop, run_simulated


def test_waiting_takes_virtual_time_only() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_simulated(main()) == START_S + 3600
    assert time.monotonic() - began < 1


def test_timeouts_groups_and_generators_work() -> None:
    async def main() -> list[str]:
        told: list[str] = []

        async def tell(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            told.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(tell("late", 2))
            group.create_task(tell("early", 1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await tell("never", 1)
        return told

    assert run_simulated(main()) == ["early", "late"]


def test_a_deadlock_is_named() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="the stuck one")

    with pytest.raises(SimulationError, match="the stuck one"):
        run_simulated(main())


def test_an_exception_in_a_callback_fails_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(SimulationError, match="division by zero"):
        run_simulated(main())


def test_an_endless_run_is_stopped() -> None:
    async def main() -> None:
        for _ in itertools.repeat(None):
            await asyncio.sleep(1)

    with pytest.raises(SimulationError, match="no end"):
        run_simulated(main(), max_steps=1000)


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.monotonic)

    with pytest.raises(SimulationError, match="Worker"):
        run_simulated(main())


def test_a_crashed_node_takes_no_further_step_not_even_its_finally() -> None:
    async def main() -> list[str]:
        told: list[str] = []
        node = Node("bookie-1")

        async def live() -> None:
            try:
                while True:
                    await asyncio.sleep(1)
                    told.append("tick")
            finally:
                told.append("cleaned up")

        node.start(live(), name="live")
        await asyncio.sleep(2.5)
        node.crash()
        await asyncio.sleep(10)
        return list(told)

    assert run_simulated(main()) == ["tick", "tick"]


def test_a_paused_node_goes_on_where_it_was() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        ticks: list[float] = []
        node = Node("broker-1")

        async def live() -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                ticks.append(loop.time() - START_S)

        node.start(live(), name="live")
        await asyncio.sleep(1.5)
        node.pause()
        await asyncio.sleep(8.5)
        node.resume()
        await asyncio.sleep(2)
        return ticks

    assert run_simulated(main()) == [1, 10, 11]


def test_a_worker_reports_in_order_and_apart_from_the_work() -> None:
    async def main() -> None:
        worker = sim_workers(random.Random(1))("journal", 1)
        done: list[int] = []
        reported: list[int] = []
        for number in range(20):
            worker.submit(lambda number=number: done.append(number), lambda _, __, number=number: reported.append(number))
        ahead = 0
        while len(reported) < 20:
            await asyncio.sleep(0.0001)
            ahead = max(ahead, len(done) - len(reported))
        assert done == reported == list(range(20))
        assert ahead > 0, "something was done and not yet told"
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 / 0)
        assert await worker.run(lambda: 7) == 7
        await worker.aclose()

    run_simulated(main())


def test_work_that_crashes_takes_its_node_down_and_never_reports() -> None:
    async def main() -> None:
        node = Node("bookie-1")
        reported: list[object] = []

        def crash() -> None:
            raise NodeCrashed("power")

        def begin() -> None:
            worker = SimWorker("journal", 1, lambda: 0.001)
            worker.submit(crash, lambda *outcome: reported.append(outcome))
            worker.submit(lambda: reported.append("work of the dead"), lambda *outcome: reported.append(outcome))

        node.call_soon(begin)
        await asyncio.sleep(1)
        assert not node.alive
        assert reported == []

    run_simulated(main())


_ORDER_OF_SETS = """
import asyncio, sys
from tests.simulation.world.virtual_loop import run_simulated

async def main():
    order = []
    async def wait_for_end(name):
        try:
            await asyncio.sleep(100)
        finally:
            order.append(name)
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(wait_for_end(number))
            await asyncio.sleep(1)
            raise ValueError
    except* ValueError:
        pass
    print(order)

run_simulated(main())
"""


def test_sets_of_tasks_iterate_alike_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _ORDER_OF_SETS],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in (1, 2, 3)
    }
    assert len(outputs) == 1
    assert "49" in outputs.pop()


@pytest.mark.parametrize("how", ["crash", "pause"])
def test_a_strike_comes_right_before_a_step_of_the_process_it_is_meant_for(how: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        meant, other, steps = Node("meant"), Node("other"), list[str]()

        async def walk(node: Node) -> None:
            for number in range(10):
                steps.append(f"{node.name} {number}")
                await asyncio.sleep(0)

        def strike(node: Node) -> bool:
            if node is not meant:
                return False
            node.crash() if how == "crash" else node.pause()
            return True

        meant.start(walk(meant), name="walk")
        other.start(walk(other), name="walk")
        loop.strike(5, strike)
        await asyncio.sleep(1)
        assert "other 9" in steps
        struck = [step for step in steps if step.startswith("meant")]
        assert 0 < len(struck) < 10
        if how == "pause":
            meant.resume()
            await asyncio.sleep(1)
            assert [step for step in steps if step.startswith("meant")] == [f"meant {number}" for number in range(10)]

    run_simulated(main())


def test_a_task_that_failed_in_the_step_in_which_its_process_ended_is_nobodys() -> None:
    async def course(crashes: bool) -> None:
        node = Node("east")

        async def fails() -> None:
            await asyncio.sleep(1)
            if crashes:
                node.crash()
            raise ValueError("a lost session")

        node.start(fails(), name="fails")
        await asyncio.sleep(2)

    run_simulated(course(crashes=True))
    with pytest.raises(SimulationError, match="nobody heard that task east/fails failed"):
        run_simulated(course(crashes=False))
