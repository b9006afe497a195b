"""Terminating, truncating, trimming and closing that meet each other, or a change of policy: the chain records each ledger's own
end, and what goes goes by the policy of the moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cepheid_managed_ledger import Cursor, ManagedLedger, ManagedLedgerClosedError, ManagedLedgerError, State
from tests.managed_ledger.losing_store import SteppingStore
from tests.managed_ledger.test_ending import SMALL, rolled
from tests.managed_ledger.topic_world import ONE_BOOKIE, SETTINGS, TRIM, TopicWorld, append_all, read_all, topic_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


async def assert_ends_are_true(world: TopicWorld) -> None:
    """M2: every recorded end is the ledger's own; a terminated chain has no open ledger."""
    chain, records = await world.chain(), await world.ledger_records()
    for listed in chain.ledgers:
        record = records[listed.ledger_id]
        if listed.entries is not None:
            assert (record.is_closed, record.last_entry_id) == (True, listed.entries - 1), f"{listed} of {chain}"
    if chain.terminated_at is not None:
        assert not any(listed.is_open for listed in chain.ledgers)


OPERATIONS: dict[str, Callable[[ManagedLedger], Awaitable[object]]] = {
    "terminate": ManagedLedger.terminate,
    "truncate": ManagedLedger.truncate,
    "close": ManagedLedger.aclose,
}
PAIRS = [(first, second) for first in OPERATIONS for second in OPERATIONS if first != second]


@pytest.mark.slow
@pytest.mark.deadline(120)
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=map("-".join, PAIRS))
async def test_two_ends_at_once(first: str, second: str) -> None:
    patient = SETTINGS.model_copy(update={"metadata_timeout_s": 10.0})  # a loaded machine is no outage
    for turns in range(60):
        async with topic_world(settings=patient) as world:
            ledger = await world.broker(store=SteppingStore(world.tree)).open(ONE_BOOKIE)
            cursor = await ledger.create_cursor("sub", ledger.first_position())
            positions = await append_all(ledger, 3)
            begun = asyncio.ensure_future(OPERATIONS[first](ledger))
            for _ in range(turns):
                await asyncio.sleep(0)
            outcomes = await asyncio.gather(begun, OPERATIONS[second](ledger), return_exceptions=True)
            assert all(not isinstance(outcome, Exception) or isinstance(outcome, ManagedLedgerError) for outcome in outcomes)
            await assert_ends_are_true(world)
            assert cursor.backlog_entries == 3
            await ledger.aclose()
            await assert_ends_are_true(world)
            ledger = await world.broker(seed=2).open(ONE_BOOKIE)
            assert len(await read_all(ledger)) == 3, f"{second} after {turns} turns"
            assert ledger.cursors["sub"].backlog_entries == 3
            if "terminate" in (first, second) and "close" not in (first, second):
                assert ledger.state is State.TERMINATED
                assert ledger.last_confirmed == positions[-1]


async def test_a_terminated_topic_is_truncated_without_another_ledger() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open(ONE_BOOKIE)
        positions = await append_all(ledger, 3)
        await ledger.terminate()
        await ledger.truncate()
        assert [listed.ledger_id for listed in (await world.chain()).ledgers] == [positions[0].ledger_id]
        await assert_ends_are_true(world)


@pytest.mark.parametrize("moment", ["waiting for its turn", "saving cursors"])
async def test_a_trim_goes_by_the_retention_of_the_moment(moment: str) -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(ONE_BOOKIE)
        *_, third, _ = await rolled(ledger, 3)
        cursor = await ledger.create_cursor("sub", third[-1])  # which has to leave what goes
        wait_saved = ledger._cursors.wait_saved

        async def save_while_the_policy_changes(cursor: Cursor) -> None:
            ledger.config = ONE_BOOKIE
            await wait_saved(cursor)

        ledger.config = TRIM
        if moment == "saving cursors":
            ledger._cursors.wait_saved = save_while_the_policy_changes
            assert await ledger.trim() == 0
        else:
            async with ledger._positions:
                trimming = asyncio.ensure_future(ledger.trim())
                await asyncio.sleep(0.01)
                ledger.config = ONE_BOOKIE
            assert await trimming == 0
        assert len(ledger.chain.ledgers) == 4
        assert cursor.first_unacknowledged() == ledger.next_position(third[-1])


@pytest.mark.parametrize("asked", ["create_cursor", "reset", "trim"])
async def test_who_waits_for_his_turn_when_the_topic_is_closed_gets_an_answer(asked: str) -> None:
    """Not a cancellation, which nobody answers a client for."""
    async with topic_world() as world:
        ledger = await world.broker().open(ONE_BOOKIE)
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        ask = {
            "create_cursor": lambda: ledger.create_cursor("other", ledger.first_position()),
            "reset": lambda: cursor.reset(ledger.first_position()),
            "trim": ledger.trim,
        }[asked]
        async with ledger._positions:  # somebody decides on positions, for long
            asking = asyncio.ensure_future(ask())
            await asyncio.sleep(0.01)
            await ledger.aclose()
        with pytest.raises(ManagedLedgerClosedError):
            await asking


async def test_who_gives_up_is_cancelled_as_before() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open(ONE_BOOKIE)
        async with ledger._positions:
            asking = asyncio.ensure_future(ledger.create_cursor("sub", ledger.first_position()))
            await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await wait_until(lambda: "sub" in ledger.cursors)
