"""A topic is being deleted when its broker's session ends: whoever opens it next keeps what is published there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cepheid_broker.ownership.ownership import Here
from cepheid_ports import CepheidError
from cepheid_wire import TopicName
from tests.broker.brokers_world import BrokersWorld, OneBroker
from tests.broker.scripted_client import full


class Halt:
    """Whoever calls it stops there until `go` is set."""

    def __init__(self) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, *_: object) -> None:
        self.reached.set()
        await self.go.wait()

    def before(self, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def halted(*args: Any, **named: Any) -> Any:
            await self()
            return await work(*args, **named)

        return halted

    def behind(self, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def halted(*args: Any, **named: Any) -> Any:
            answer = await work(*args, **named)
            await self()
            return answer

        return halted


def halt_at(place: str, owner: OneBroker, monkeypatch: pytest.MonkeyPatch) -> Halt:
    halt, topics = Halt(), owner.broker.topics
    ledgers = owner.broker.managed_ledgers
    if place == "before the chain is read":
        monkeypatch.setattr(ledgers, "delete", halt.before(ledgers.delete))
    elif place == "when the chain was read":
        monkeypatch.setattr("cepheid_managed_ledger.managed_ledgers.ChainKeeper.load", halt.behind(_chain_load()))
    elif place == "when the chain was emptied":
        monkeypatch.setattr("cepheid_managed_ledger.chain_deletion.list_cursors", halt.before(_list_cursors()))
    elif place == "before the schemas go":
        topics.on_deleting.insert(0, halt)
    elif place == "before the record goes":
        topics.on_deleting.append(halt)
    return halt


def _chain_load() -> Callable[..., Awaitable[Any]]:
    from cepheid_managed_ledger.chain_keeper import ChainKeeper

    return ChainKeeper.load


def _list_cursors() -> Callable[..., Awaitable[Any]]:
    from cepheid_metadata import list_cursors

    return list_cursors


PLACES = (
    "before the chain is read",
    "when the chain was read",
    "when the chain was emptied",
    "before the schemas go",
    "before the record goes",
)


@pytest.mark.parametrize("place", PLACES)
async def test_what_the_next_owner_opened_is_not_deleted(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld() as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        name = TopicName.parse(full(topic))
        async with await owner.client() as client:
            await client.produce_on(topic)
            await client.publish(2)
        with monkeypatch.context() as planted:
            halt = halt_at(place, owner, planted)
            deleting = asyncio.ensure_future(owner.broker.topics.delete(name, force=True))
            await halt.reached.wait()
        owner.session.expire()
        owner.session.renew()
        assert await heir.ownership.locate(name, authoritative=True) == Here()
        async with await heir.client() as other:
            await other.produce_on(topic)
            receipts = [receipt.position for receipt in await other.publish(3)]
            halt.go.set()
            (outcome,) = await asyncio.gather(deleting, return_exceptions=True)
            assert isinstance(outcome, CepheidError), "it was not deleted, whoever asked for it hears that"
            assert outcome.retriable, outcome
            receipts += [receipt.position for receipt in await other.publish(1, first_sequence_id=3)]
            assert await heir.broker.catalog.partitions(name) == 0, "it has its record"
        await heir.broker.topics.unload(name)
        async with await heir.client() as reader:
            await reader.subscribe(topic, "s", permits=10)
            while receipts:
                position = (await reader.skim_messages(1))[0].position
                if position in receipts:  # what was there before the deletion may be there still
                    receipts.remove(position)


async def test_a_bundle_is_released_when_the_deletion_in_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokersWorld() as world:
        owner, heir = world.brokers
        name = TopicName.parse(full(await world.topic_on(owner)))
        await owner.broker.topics.get(name, may_create=True)
        halt = halt_at("when the chain was emptied", owner, monkeypatch)
        deleting = asyncio.ensure_future(owner.broker.topics.delete(name))
        await halt.reached.wait()
        releasing = asyncio.ensure_future(owner.ownership.release(await owner.ownership.bundle_of(name), to=heir.id))
        await asyncio.sleep(0.02)
        assert not releasing.done()
        halt.go.set()
        await asyncio.gather(deleting, releasing)
        assert await heir.broker.catalog.partitions(name) is None


@pytest.mark.parametrize("place", PLACES[3:])
async def test_a_partitioned_topic_that_another_broker_deleted_and_made_anew_stays(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one at it lost its session in the middle; the next one finished; a client made the topic anew."""
    async with BrokersWorld() as world:
        owner, heir = world.brokers
        topic = await world.topic_on(owner)
        name = TopicName.parse(full(topic))
        parts = [name.partition(index) for index in range(3)]
        await owner.broker.catalog.create(name, 3)
        with monkeypatch.context() as planted:
            for part in parts:
                await owner.ownership.locate(part, authoritative=True)
                if owner.ownership.owns(part):
                    await owner.broker.topics.get(part, may_create=False)
            halt = halt_at(place, owner, planted)
            deleting = asyncio.ensure_future(owner.broker.partitioned.delete(name, force=True))
            await halt.reached.wait()
        owner.session.expire()
        owner.session.renew()
        for known in (name, *parts):
            await heir.ownership.locate(known, authoritative=True)
        await heir.broker.partitioned.delete(name, force=True)
        await heir.broker.catalog.create(name, 3)
        opened = [await heir.broker.topics.get(part, may_create=False) for part in parts if heir.ownership.owns(part)]
        assert opened
        halt.go.set()
        (outcome,) = await asyncio.gather(deleting, return_exceptions=True)
        assert isinstance(outcome, CepheidError)
        assert await heir.broker.catalog.partitions(name) == 3
        for again in opened:
            assert not again.closed
            await heir.broker.topics.unload(again.name)
            assert not (await heir.broker.topics.get(again.name, may_create=False)).closed
