"""What tests of every package share: running a coroutine with a deadline, in real or virtual time; waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cepheid_dev import free_ports
from tests.simulation.world.virtual_loop import VirtualLoop

T = TypeVar("T")

QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that live for seconds: without the second compiler and parallel collectors, short Spark jobs take half the CPU time."""


def run_async(work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
    """Runs `work` on a new loop; fails when it takes longer than `timeout_s` or leaves a task behind.

    A task that is about to end, as those of gRPC's server are when its `stop` has returned, has a second for it.
    """
    return asyncio.run(_guarded(work, timeout_s, grace_s=1.0))


def run_virtual(work: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
    """As `run_async`, on the simulator's loop: time stands still while anything is ready, and jumps to the next timer then.

    For tests without threads and sockets: timeouts of milliseconds mean what they say, however long the machine is away.
    """
    return VirtualLoop().run(_guarded(work, timeout_s, grace_s=0.0))


async def _guarded(work: Coroutine[Any, Any, T], timeout_s: float, grace_s: float) -> T:
    async with asyncio.timeout(timeout_s):
        result = await work
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left and grace_s:
        _, left = await asyncio.wait(left, timeout=grace_s)
    assert not left, f"tasks left running: {left}"
    return result


async def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0, what: str = "the condition") -> None:
    """Returns once `condition()` holds; fails with `what` when it does not within `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not hold within {timeout_s} s"
        await asyncio.sleep(0.002)


async def cancel_once_listening(start: Coroutine[Any, Any, Any], port: int) -> None:
    """Run `start`, and cancel it as soon as the port listens."""
    starting = asyncio.ensure_future(start)
    while not free_ports.is_taken(port):
        assert not starting.done(), f"it ended and {port} does not listen: {starting}"
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled(), "it ended before it could be cancelled"


_given_ports: set[int] = set()


def free_port() -> int:
    """A port of loopback that nobody has, that is not given out for outgoing connections, and that no other caller got."""
    port = free_ports.free_port(taken=_given_ports)
    _given_ports.add(port)
    return port
