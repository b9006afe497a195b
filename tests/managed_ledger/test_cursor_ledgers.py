"""The cursor ledgers of a topic while no ledger can be written: nothing is left behind, and nobody hammers bookies and metadata."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import NotEnoughBookiesError
from cepheid_managed_ledger import CursorLedgerError, ManagedLedgerFencedError
from cepheid_managed_ledger.cursor_ledgers import FIRST_PAUSE_S
from cepheid_rpc import Status
from tests.managed_ledger.topic_world import SETTINGS, append_all, topic_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

TINY = SETTINGS.model_copy(update={"cursor_inline_bytes": 100, "cursor_part_bytes": 40})


async def test_attempts_that_fail_leave_no_ledgers_and_grow_rarer() -> None:
    async with topic_world(settings=TINY) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        made = 0
        create = broker.client.create

        async def counted(**options: object) -> object:
            nonlocal made
            made += 1
            return await create(**options)

        broker.client.create = counted
        world.cluster["a"].refuse = Status.READ_ONLY
        cursor.acknowledge(positions[1:399:2])
        with pytest.raises(CursorLedgerError):
            await cursor.saved()
        assert made == 1, "a second new ledger would do no better"
        await asyncio.sleep(2 * FIRST_PAUSE_S)
        assert 2 <= made <= 4, "the flusher tries every 20 ms"
        with pytest.raises(CursorLedgerError, match="next attempt in"):
            await cursor.saved()
        assert len(await world.ledger_records()) == 1, "that of the entries"
        assert ledger.chain.deletions == ()

        world.cluster["a"].refuse = None
        await wait_until(lambda: not ledger._cursors._saved["sub"].is_dirty, timeout_s=10, what="the flusher")
        assert len(await world.ledger_records()) == 2
        cursor.acknowledge(positions[0:1])
        await cursor.saved()


@pytest.mark.deadline(60)
async def test_a_full_ledger_goes_on_while_no_new_one_can_be_made() -> None:
    async with topic_world(settings=TINY.model_copy(update={"cursor_ledger_max_bytes": 200})) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        cursor.acknowledge(positions[1:399:2])
        await cursor.saved()
        full = ledger._cursors.ledger_ids["sub"]
        create = broker.client.create

        async def refused(**options: object) -> object:
            raise NotEnoughBookiesError("planted: there are too few bookies", needed=3, available=2)

        broker.client.create = refused
        for position in positions[0:8:2]:
            cursor.acknowledge([position])
            await cursor.saved()
        assert ledger._cursors.ledger_ids["sub"] == full
        broker.client.create = create

        def moved() -> bool:
            cursor.acknowledge(positions[8 : 2 * cursor.mark_delete.entry_id : 2][:1])
            return ledger._cursors.ledger_ids["sub"] != full

        await wait_until(moved, timeout_s=20, what="a new ledger")
        await cursor.saved()
        await broker.crash()
        ledger = await world.broker(seed=2).open()
        assert ledger.cursors["sub"].mark_delete == cursor.mark_delete


async def test_a_deposed_owner_leaves_no_cursor_ledger_behind() -> None:
    async with topic_world(settings=TINY) as world:
        deposed = await world.broker().open()
        cursor = await deposed.create_cursor("sub", deposed.first_position())
        positions = await append_all(deposed, 400)
        reigning = await world.broker(seed=2).open()
        cursor.acknowledge(positions[1:399:2])
        with pytest.raises(ManagedLedgerFencedError):
            await cursor.saved()
        await deposed.aclose()
        entries = [listed.ledger_id for listed in reigning.chain.ledgers]
        assert list(await world.ledger_records()) == entries
