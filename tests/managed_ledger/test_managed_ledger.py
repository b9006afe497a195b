"""Append, read, roll over, close, reopen."""

from __future__ import annotations

import pytest

from cepheid_metadata import Position
from tests.managed_ledger.topic_world import TOPIC, append, append_all, read_all, topic_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


async def test_appends_are_read_back_in_order_from_cache_and_from_storage() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        assert ledger.read_cached(Position(-1, -1), max_entries=1, max_bytes=1) == []
        first = await append(ledger, b"a", b"b", b"c")
        assert first.entry_id == 0
        assert await append(ledger, b"d") == Position(first.ledger_id, 3)
        assert ledger.last_confirmed == Position(first.ledger_id, 3)
        assert await read_all(ledger) == [b"a", b"b", b"c", b"d"]
        assert broker.tail_cache.hits > 0
        assert world.cluster["a"].reads == []
        assert await read_all(ledger, cached=False) == [b"a", b"b", b"c", b"d"]
        assert len(world.cluster["a"].reads) > 0


async def test_a_reopened_topic_has_what_was_acknowledged_and_goes_on() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 10)
        cursor.acknowledge(positions[:3] + positions[5:7])
        await cursor.saved()
        await broker.crash()

        ledger = await world.broker().open()
        assert await read_all(ledger) == [f"m{number}".encode() for number in range(10)]
        cursor = ledger.cursors["sub"]
        assert cursor.mark_delete == positions[2]
        assert cursor.backlog_entries == 5
        more = await append_all(ledger, 5, "n")
        assert more[0].ledger_id > positions[-1].ledger_id
        assert ledger.count_between(positions[-1], more[-1]) == 5
        chain = await world.chain()
        assert [(item.ledger_id, item.entries) for item in chain.ledgers] == [
            (positions[0].ledger_id, 10),
            (more[0].ledger_id, None),
        ]


async def test_empty_ledgers_leave_the_chain_when_a_topic_is_reopened() -> None:
    async with topic_world() as world:
        for _ in range(3):
            broker = world.broker()
            ledger = await broker.open()
            assert [item.entries for item in (await world.chain()).ledgers] == [None]
            await wait_until(lambda ledger=ledger: ledger.statistics().waiting_deletions == 0)
            assert list(await world.ledger_records()) == [ledger.chain.ledgers[0].ledger_id]
            await broker.aclose()
        assert ledger.topic == TOPIC
