"""The same courses on sockets of the system and of the simulator: protocols hear the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from tests.simulation.faults.plan import CALM, FaultPlan
from tests.simulation.world.sim_network import Network
from tests.simulation.world.sim_sockets import Sockets
from tests.simulation.world.virtual_loop import VirtualLoop
from tests.support import wait_until

_MANY_BYTES = 8 << 20  # more than all buffers between two ends together


class Witness(asyncio.Protocol):
    """Writes down what it hears; data as one sum."""

    def __init__(self, reacts: Callable[[Witness, str], object]) -> None:
        self.heard: list[str] = []
        self.received_bytes = 0
        self._reacts = reacts

    def _hear(self, event: str) -> None:
        self.heard.append(event)
        self._reacts(self, event)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._hear("made")

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        if self.heard[-1] != "data":
            self._hear("data")

    def eof_received(self) -> None:
        self._hear("eof")

    def pause_writing(self) -> None:
        self._hear("pause")

    def resume_writing(self) -> None:
        self._hear("resume")

    def connection_lost(self, error: Exception | None) -> None:
        self._hear("lost" if error is None else "lost: reset")


class Pair:
    def __init__(self, client: Witness, server: Witness) -> None:
        self.client = client
        self.server = server

    @property
    def ended(self) -> bool:
        return self.client.heard[-1].startswith("lost") and self.server.heard[-1].startswith("lost")


Course = Callable[[Pair], Awaitable[object]]


def nothing(witness: Witness, event: str) -> None:
    pass


async def close(pair: Pair) -> None:
    pair.client.transport.close()
    pair.client.transport.close()
    await wait_until(lambda: pair.ended)


async def close_with_bytes_left(pair: Pair) -> None:
    pair.client.transport.write(bytes(_MANY_BYTES))
    pair.client.transport.close()
    assert pair.client.transport.is_closing()
    await wait_until(lambda: pair.ended)
    assert pair.server.received_bytes == _MANY_BYTES


async def abort(pair: Pair) -> None:
    pair.client.transport.write(b"hello")
    await wait_until(lambda: pair.server.received_bytes == 5)
    pair.client.transport.abort()
    await wait_until(lambda: pair.ended)


async def abort_with_bytes_left(pair: Pair) -> None:
    pair.server.transport.pause_reading()
    pair.client.transport.write(bytes(_MANY_BYTES))
    pair.client.transport.abort()
    pair.server.transport.resume_reading()
    await wait_until(lambda: pair.ended)
    assert pair.server.received_bytes < _MANY_BYTES


async def full_and_empty_again(pair: Pair) -> None:
    pair.client.transport.set_write_buffer_limits(1000)
    pair.server.transport.pause_reading()
    assert not pair.server.transport.is_reading()
    pair.client.transport.write(bytes(_MANY_BYTES))
    assert pair.client.transport.get_write_buffer_size() > 1000
    pair.server.transport.resume_reading()
    await wait_until(lambda: pair.server.received_bytes == _MANY_BYTES and pair.client.heard[-1] == "resume")
    assert pair.client.transport.get_write_buffer_size() == 0
    await close(pair)


async def close_while_the_other_does_not_read(pair: Pair) -> None:
    pair.server.transport.pause_reading()
    pair.client.transport.write(b"hello")
    pair.client.transport.close()
    await wait_until(lambda: pair.client.heard[-1] == "lost")
    await asyncio.sleep(0.05)
    assert pair.server.heard == ["made"]
    pair.server.transport.resume_reading()
    await wait_until(lambda: pair.ended)
    assert pair.server.received_bytes == 5


async def both_close(pair: Pair) -> None:
    pair.client.transport.close()
    pair.server.transport.close()
    pair.server.transport.write(b"too late")
    await wait_until(lambda: pair.ended)


async def write_to_an_end_that_is_gone(pair: Pair) -> None:
    """It closes before it has read: the system resets the connection, and says so to the one that goes on writing."""
    pair.server.transport.pause_reading()
    pair.client.transport.write(b"unread")
    await asyncio.sleep(0.02)
    pair.server.transport.abort()
    await wait_until(lambda: pair.server.heard[-1] == "lost")
    await wait_until(lambda: pair.ended)


async def close_from_within(pair: Pair) -> None:
    """`reacts` closes at the first data."""
    pair.client.transport.write(b"hello")
    await wait_until(lambda: pair.ended)


def closes_at_data(witness: Witness, event: str) -> None:
    if event == "data":
        witness.transport.write(b"good bye")
        witness.transport.close()


def closes_at_once(witness: Witness, event: str) -> None:
    if event == "made":
        witness.transport.close()


async def just_wait(pair: Pair) -> None:
    await wait_until(lambda: pair.ended)


COURSES: list[tuple[Course, Callable[[Witness, str], object]]] = [
    (close, nothing),
    (close_with_bytes_left, nothing),
    (abort, nothing),
    (abort_with_bytes_left, nothing),
    (full_and_empty_again, nothing),
    (close_while_the_other_does_not_read, nothing),
    (both_close, nothing),
    (write_to_an_end_that_is_gone, nothing),
    (close_from_within, closes_at_data),
    (just_wait, closes_at_once),
]


async def follow(course: Course, reacts: Callable[[Witness, str], object], host: str) -> tuple[list[str], list[str]]:
    loop = asyncio.get_running_loop()
    served: list[Witness] = []

    def serve() -> Witness:
        served.append(Witness(reacts))
        return served[-1]

    server = await loop.create_server(serve, host, 0)
    host, port = server.sockets[0].getsockname()[:2]
    _, client = await loop.create_connection(lambda: Witness(nothing), host, port)
    await wait_until(lambda: bool(served and served[0].heard))
    pair = Pair(client, served[0])
    await course(pair)
    server.close()
    return pair.client.heard, pair.server.heard


def simulated(course: Course, reacts: Callable[[Witness, str], object]) -> Any:
    loop = VirtualLoop()
    loop.sockets = Sockets(loop, Network(FaultPlan("contract", CALM)))
    return loop.run(follow(course, reacts, "east"))


@pytest.mark.parametrize(("course", "reacts"), COURSES, ids=lambda value: value.__name__)
def test_protocols_hear_the_same_from_the_system_and_from_the_simulator(
    course: Course, reacts: Callable[[Witness, str], object]
) -> None:
    assert simulated(course, reacts) == asyncio.run(follow(course, reacts, "127.0.0.1"))
