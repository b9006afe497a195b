"""A lookup waits while the owner takes no connections, and no longer."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_broker.ownership import owner_reach
from cepheid_broker.ownership.bundles import Bundle
from cepheid_broker.ownership.owner_reach import BELIEVED_S, POLL_S, OwnerReach, takes_connections
from cepheid_broker.ownership.ownership import Here, Location, There
from cepheid_wire import NamespaceName
from tests.support import free_port

BUNDLE = Bundle(NamespaceName("t", "n"), 0, 1)
DEAD = There("dead", {"pulsar": "127.0.0.1:1"})
ALIVE = There("alive", {"pulsar": "127.0.0.1:2"})


class World:
    """What lookups find, and who takes connections."""

    def __init__(self, found: Location = DEAD, patience_s: float = 5.0) -> None:
        self.found = found
        self.answering = {"127.0.0.1:2"}
        self.looks = self.probes = 0
        self.reach = OwnerReach(patience_s, self._probe)

    async def locate(self) -> Location:
        return await self.reach.reachable(BUNDLE, self.found, self._look)

    async def _look(self) -> Location:
        self.looks += 1
        return self.found

    async def _probe(self, address: str) -> bool:
        self.probes += 1
        return address in self.answering


@pytest.mark.virtual_time
async def test_an_owner_that_takes_connections_is_told_at_once_and_asked_now_and_then() -> None:
    world = World(ALIVE)
    assert [await world.locate() for _ in range(10)] == [ALIVE] * 10
    assert (world.looks, world.probes) == (0, 1)
    await world.reach.aclose()


@pytest.mark.virtual_time
async def test_lookups_of_a_dead_owners_bundle_wait_together_for_the_next_one() -> None:
    world = World()
    waiting = [asyncio.ensure_future(world.locate()) for _ in range(20)]
    await asyncio.sleep(0.5)  # that nobody is answered meanwhile is the subject
    assert not any(task.done() for task in waiting)
    assert (world.reach.waiting, world.reach.waited) == (20, 20)
    world.found = Here()
    assert await asyncio.gather(*waiting) == [Here()] * 20
    assert (world.reach.waiting, world.reach.waited) == (0, 20)
    assert world.looks <= 10, "they look together"
    await world.reach.aclose()


@pytest.mark.virtual_time
async def test_an_owner_that_comes_back_is_told() -> None:
    world = World()
    waiting = asyncio.ensure_future(world.locate())
    await asyncio.sleep(0)
    world.answering.add("127.0.0.1:1")
    assert await waiting == DEAD
    await world.reach.aclose()


@pytest.mark.virtual_time
async def test_an_owner_that_cannot_be_reached_from_here_alone_costs_one_wait() -> None:
    """Its session lives: clients may reach it where brokers do not, and each lookup would wait."""
    world = World(patience_s=0.3)
    began = asyncio.get_running_loop().time()
    assert [await world.locate() for _ in range(10)] == [DEAD] * 10
    assert asyncio.get_running_loop().time() - began < 2 * 0.3 + POLL_S
    world.found = ALIVE
    assert await world.locate() == ALIVE
    await world.reach.aclose()


@pytest.mark.virtual_time
async def test_an_owner_that_stays_out_of_reach_is_waited_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_reach, "FIRST_REST_S", 0.5)
    monkeypatch.setattr(owner_reach, "LONGEST_REST_S", 2.0)
    world, began_s = World(patience_s=0.2), asyncio.get_running_loop().time()

    async def waits_until(time_s: float) -> int:
        before = world.reach.waited
        while asyncio.get_running_loop().time() < began_s + time_s:
            await world.locate()
            await asyncio.sleep(0.05)
        return world.reach.waited - before

    assert await waits_until(4.0) == 3, "at once, and after pauses of 0.5 s and 1 s"
    assert await waits_until(10.0) == 3, "after each further pause of 2 s"
    world.answering.add("127.0.0.1:1")
    await waits_until(13.0)
    world.answering.clear()
    assert await waits_until(14.5) == 2, "it was in reach meanwhile"
    await world.reach.aclose()


@pytest.mark.virtual_time
async def test_an_owner_is_not_believed_for_long() -> None:
    world = World(ALIVE)
    assert await world.locate() == ALIVE
    world.answering.clear()
    await asyncio.sleep(2 * BELIEVED_S)  # killed meanwhile: its clients, which look their topics up at once, are to wait
    waiting = asyncio.ensure_future(world.locate())
    await asyncio.sleep(POLL_S)
    assert not waiting.done()
    assert BELIEVED_S < 0.1 + POLL_S, "clients come back 0.1 s after their connection broke"
    waiting.cancel()
    await world.reach.aclose()


@pytest.mark.virtual_time
async def test_patience_ends() -> None:
    world = World(patience_s=0.3)
    assert await world.locate() == DEAD
    await world.reach.aclose()


async def test_only_who_listens_takes_connections() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await takes_connections(f"127.0.0.1:{port}")
    server.close()
    await server.wait_closed()
    assert not await takes_connections(f"127.0.0.1:{free_port()}")
