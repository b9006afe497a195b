"""The ledger client over bookies in memory: from the first entry to a closed ledger that can be read."""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_ledger import (
    ClosedLedger,
    EntryBeyondEndError,
    InvalidQuorumsError,
    LedgerClosedError,
    LedgerFencedError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
)
from cepheid_metadata import LedgerState
from tests.ledger.ledger_world import append, ledger_world, payloads_of

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize(("size", "ack_quorum"), [(1, 1), (3, 2), (3, 3)])
async def test_what_was_appended_is_read_back_after_close(size: int, ack_quorum: int) -> None:
    async with ledger_world() as world:
        writer = await world.create(size, ack_quorum)
        group = await append(writer, [b"one", b"two"])
        assert (group.first_entry_id, group.last_entry_id) == (0, 1)
        await append(writer, [b"three"])
        assert await writer.close() == ClosedLedger(2, 11)
        reader = await world.client.open_reader(writer.ledger_id)
        assert payloads_of(await reader.read(0, 100, max_bytes=1 << 20)) == [b"one", b"two", b"three"]
        with pytest.raises(EntryBeyondEndError):
            await reader.read(3, 3, max_bytes=1)


@pytest.mark.parametrize(("size", "ack_quorum"), [(1, 1), (3, 2), (2, 2)])
async def test_recovery_ends_the_ledger_and_fences_its_writer(size: int, ack_quorum: int) -> None:
    async with ledger_world() as world:
        writer = await world.create(size, ack_quorum)
        await append(writer, [b"one", b"two"])
        await append(writer, [b"three"])
        other = world.another_client()
        assert await other.recover(writer.ledger_id) == ClosedLedger(2, 11)
        assert await other.recover(writer.ledger_id) == ClosedLedger(2, 11)
        with pytest.raises(LedgerFencedError):
            await append(writer, [b"too late"])
        with pytest.raises(LedgerFencedError):
            await writer.close()
        reader = await other.open_reader(writer.ledger_id)
        assert payloads_of(await reader.read(0, 2, max_bytes=1 << 20)) == [b"one", b"two", b"three"]
        await other.aclose()


async def test_a_ledger_without_entries_recovers_to_nothing() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(-1, 0)
        with pytest.raises(LedgerFencedError):
            await append(writer, [b"too late"])


async def test_close_is_final_and_shared() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        await append(writer, [b"x"])
        assert await writer.close() == await writer.close() == ClosedLedger(0, 1)
        with pytest.raises(LedgerClosedError):
            await append(writer, [b"y"])


async def test_delete_fences_first() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        await append(writer, [b"x"])
        await world.client.delete(writer.ledger_id)
        with pytest.raises(LedgerFencedError):
            await append(writer, [b"y"])
        with pytest.raises(NoSuchLedgerError):
            await world.client.open_reader(writer.ledger_id)
        with pytest.raises(NoSuchLedgerError):
            await world.client.delete(writer.ledger_id)


async def test_creation_refuses_what_cannot_work() -> None:
    async with ledger_world("a", "b") as world:
        with pytest.raises(NotEnoughBookiesError):
            await world.create(3, 2)
        with pytest.raises(InvalidQuorumsError):
            await world.client.create(ensemble_size=1, write_quorum=2, ack_quorum=1, custom={})
        with pytest.raises(InvalidQuorumsError):
            await world.client.create(ensemble_size=2, write_quorum=2, ack_quorum=3, custom={})


async def test_ids_lie_above_the_one_given() -> None:
    async with ledger_world() as world:
        one, other = world.client, world.another_client()
        quorums: dict[str, Any] = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1, "custom": {}}
        ids = [(await client.create(**quorums)).ledger_id for client in (one, other, one)]
        assert ids == [1, 1_001, 2]
        assert (await one.create(**quorums, above=2_000)).ledger_id == 2_001
        assert (await other.create(**quorums)).ledger_id == 1_002
        assert (await other.create(**quorums, above=None)).ledger_id == 3_001
        await other.aclose()


async def test_an_end_and_a_successor_are_written_together_by_the_caller() -> None:
    async with ledger_world() as world:
        before = await world.create()
        await append(before, [b"a", b"b"])
        end, closing, checks = await world.client.find_end(before.ledger_id)
        assert end.last_entry_id == 1
        assert (await world.record(before.ledger_id)).state is LedgerState.IN_RECOVERY
        new = await world.client.prepare(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={}, above=before.ledger_id)
        assert closing is not None
        await world.store.multi([closing, *checks, new.op])
        assert (await world.record(before.ledger_id)).last_entry_id == 1
        assert (await append(world.client.begin(new), [b"c"])).ledger_id == new.record.ledger_id
        assert await world.client.find_end(before.ledger_id) == (end, None, ())
