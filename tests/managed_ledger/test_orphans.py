"""Ledgers that nothing names and nobody can name any more are deleted, and only those."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_managed_ledger import ManagedLedger
from tests.managed_ledger.losing_store import LosingStore
from tests.managed_ledger.topic_world import SETTINGS, TOPIC, Broker, append, append_all, read_all, topic_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


async def make(broker: Broker, ledger: ManagedLedger, **fields: Any) -> int:
    """A ledger whose maker dies before it is recorded; by default one of the owner before."""
    custom = {
        "topic": str(TOPIC), "use": "entries", "incarnation": ledger.chain.incarnation, "epoch": str(ledger.chain.epoch - 1),
    }  # fmt: skip
    custom.update(fields)
    custom = {name: value for name, value in custom.items() if value is not None}
    writer = await broker.client.create(ensemble_size=1, write_quorum=1, ack_quorum=1, custom=custom)
    await writer.aclose()
    return int(writer.ledger_id)


async def test_what_an_earlier_owner_left_is_deleted_and_nothing_else() -> None:
    settings = SETTINGS.model_copy(update={"cursor_inline_bytes": 20})
    async with topic_world(settings=settings) as world:
        before = await world.broker().open()
        cursor = await before.create_cursor("sub", before.first_position())
        positions = await append_all(before, 40)
        cursor.acknowledge(positions[1::2])
        await cursor.saved()
        await before.aclose()
        broker = world.broker(seed=2)
        ledger = await broker.open()
        named = {*ledger.ledgers.ledger_ids, ledger.statistics().cursors["sub"].cursor_ledger_id}
        assert len(named) == 3
        orphans = [await make(broker, ledger), await make(broker, ledger, use="cursors")]
        kept = [
            await make(broker, ledger, epoch=str(ledger.chain.epoch)),
            await make(broker, ledger, epoch=str(ledger.chain.epoch + 1)),
            await make(broker, ledger, epoch=None),
            await make(broker, ledger, incarnation="another"),
            await make(broker, ledger, topic="persistent://public/default/closed"),
            await make(broker, ledger, topic="no topic"),
            await make(broker, ledger, topic=None),
        ]
        for _ in range(2):
            await broker.ledgers.orphans.run()
        assert broker.ledgers.orphans.found == 2
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        left = await world.ledger_records()
        assert not set(orphans) & set(left)
        assert {*kept, *named} <= set(left)
        await append(ledger, b"goes on")
        assert len(await read_all(ledger)) == 41


async def test_what_an_operator_brought_back_is_no_orphan() -> None:
    async with topic_world() as world:
        broker = world.broker()
        (position,) = await append_all(await broker.open(), 1)
        await (await broker.open()).aclose()
        ledger = await broker.open()
        await ledger.truncate()
        await append(ledger, b"b")
        await ledger.truncate()
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        await ledger.save_topic_epoch(1)  # a write that sweeps the deletion queue
        assert not ledger.chain.deletions
        assert position.ledger_id not in await world.ledger_records()
        await broker.client.undelete(position.ledger_id)
        await broker.ledgers.orphans.run()
        assert broker.ledgers.orphans.found == 0
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        assert position.ledger_id in await world.ledger_records()


async def test_what_an_operator_brought_back_stays_although_the_queue_still_names_it() -> None:
    """A ledger that was deleted leaves the queue with the next write of the chain, which on a quiet topic is the next owner's."""
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        (position,) = await append_all(ledger, 1)
        await ledger.truncate()
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        assert position.ledger_id in ledger.chain.deletions
        await broker.client.undelete(position.ledger_id)
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        assert position.ledger_id in await world.ledger_records()
        await ledger.delete()
        assert position.ledger_id in await world.ledger_records()


async def test_an_owner_who_was_replaced_deletes_nothing() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        await append(ledger, b"a")
        orphan = await make(broker, ledger)
        new = await world.broker(seed=2).open()
        await broker.ledgers.orphans.run()
        assert orphan in await world.ledger_records()
        assert not ledger.is_usable
        assert await read_all(new) == [b"a"]


async def test_a_scan_comes_by_itself_and_again_after_an_outage() -> None:
    async with topic_world(settings=SETTINGS.model_copy(update={"orphan_scan_s": 0.03})) as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        ledger = await broker.open()
        store.unreachable = True
        await asyncio.sleep(0.1)
        store.unreachable = False
        orphan = await make(broker, ledger)
        await wait_until(lambda: broker.ledgers.orphans.found == 1)
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        assert orphan not in await world.ledger_records()
