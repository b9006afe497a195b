"""Deleting topics: interrupted at every write, repeated, raced by clients; nothing of them stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError
from cepheid_metadata import StoreUnavailableError, list_chains, list_cursors, list_ledgers, list_topics
from cepheid_ports import CepheidError
from cepheid_wire import ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import full

WRITES = ("create", "put", "delete", "multi")


async def traces(world: BrokerWorld) -> list[str]:
    """Everything that metadata still has of any topic."""
    found = [f"record {name}" for name in await list_topics(world.store, "public", "default", "persistent")]
    for name in await list_chains(world.store, "public", "default", "persistent"):
        found += [f"chain {name}", *(f"cursor {name} {cursor}" for cursor in await list_cursors(world.store, name))]
    return found + [f"ledger {ledger_id}" async for ledger_id in list_ledgers(world.store)]


class _Outage:
    """The metadata store is gone from write number `first` on, until it is back."""

    def __init__(self, world: BrokerWorld, first: int) -> None:
        self.struck = False
        self._left = first
        for name in WRITES:
            setattr(world.store, name, self._guarded(getattr(world.store, name)))

    def _guarded(self, write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._left == 0:
                self.struck = True
                raise StoreUnavailableError("planted")
            self._left -= 1
            return await write(*args, **kwargs)

        return call

    def end(self) -> None:
        self._left = 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_deletion_interrupted_at_any_write_leaves_nothing_when_repeated(
    partitions: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def deleted_with_outage_at(write: int) -> bool:
        async with BrokerWorld(close_timeout_s=0.5) as world, await world.client() as client:
            name = TopicName.parse("t")
            parts = [f"t-partition-{index}" for index in range(partitions)] or ["t"]
            await world.create_topic("t", partitions)
            for index, part in enumerate(parts):
                await client.subscribe(part, "s", index)
                await client.produce_on(part, index)
                await client.publish(3, producer_id=index)
            delete = world.broker.partitioned.delete if partitions else world.broker.topics.delete
            outage = _Outage(world, write)
            try:
                await delete(name, force=True)
            except CepheidError:
                assert outage.struck
            outage.end()
            for _ in range(3):  # ledgers whose deletion was refused go with a later attempt
                if await world.broker.catalog.find(name) is not None:
                    await delete(name, force=True)
            left = await traces(world)
            assert not left, f"after an outage at write {write}: {left}"
            return not outage.struck

    write = 0
    while not await deleted_with_outage_at(write):
        write += 1
    assert write >= 5, "the outage never struck"
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"], "an outage is no defect"


async def test_clients_of_a_deleted_topic_make_it_anew_where_that_is_allowed() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(2)
        await world.broker.topics.delete(TopicName.parse("t"), force=True)
        await client.expect(pb.CommandCloseProducer)
        await client.produce_on("t", 1)
        await client.subscribe("t", "s", permits=10)
        await client.publish(1, producer_id=1, first_sequence_id=7)
        assert (await client.receive()).body.message_id.entryId == 0  # type: ignore[union-attr]


async def test_a_deletion_without_force_and_a_client_that_connects() -> None:
    """Whoever was told that it is connected stays so: either it came first and the deletion is refused, or it comes later."""
    for delay in range(12):  # turns of the loop between the two
        async with BrokerWorld() as world, await world.client() as client:
            await world.create_topic("t")
            await client.subscribe("t", "s")
            await client.ask(pb.CommandCloseConsumer(consumer_id=0, request_id=1), pb.CommandSuccess)
            ask = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=2)

            async def delete(world: BrokerWorld = world, delay: int = delay) -> bool:
                for _ in range(delay):
                    await asyncio.sleep(0)
                try:
                    await world.broker.topics.delete(TopicName.parse("t"))
                except NotAllowedError:
                    return False
                return True

            client.send(ask)
            deleting = asyncio.ensure_future(delete())
            received = await client.receive()
            assert received is not None
            deleted = await deleting
            if isinstance(received.body, pb.CommandError):
                assert received.body.error == ServerError.SERVICE_NOT_READY
                assert deleted
            else:
                await client.publish(1)  # it was not thrown out


async def test_a_deletion_that_takes_long_answers_and_goes_on() -> None:
    async with BrokerWorld(request_timeout_s=0.5) as world:
        await world.create_topic("t")
        held = asyncio.Event()

        async def wait(name: TopicName) -> None:
            await held.wait()

        world.broker.topics.on_deleting.append(wait)
        with pytest.raises(ServiceNotReadyError, match="still being deleted"):
            await world.broker.topics.delete(TopicName.parse("t"))
        held.set()
        await world.broker.topics.wait_until_settled([TopicName.parse("t")])
        assert await traces(world) == []


async def test_two_deletions_at_one_time() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(1)
        delete = world.broker.topics.delete
        outcomes = await asyncio.gather(*(delete(TopicName.parse("t"), force=True) for _ in range(4)), return_exceptions=True)
        assert outcomes[0] is None
        assert await traces(world) == []
