"""Readers of open ledgers of other processes: they wait at the bookies, follow the record, and end where the ledger ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from cepheid_ledger import LedgerReader, LedgerWriter, NoSuchLedgerError
from cepheid_metadata import Fragment, StoreUnavailableError
from cepheid_rpc import Status
from tests.ledger.faulty_store import FaultyStore
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world, payloads_of
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

SETTINGS = FAST.model_copy(update={"long_poll_s": 20.0, "long_poll_pause_s": 0.01, "explicit_lac_interval_s": 0.0})


@contextlib.asynccontextmanager
async def reader_elsewhere(world: LedgerWorld, ledger_id: int) -> AsyncIterator[LedgerReader]:
    client = world.another_client(SETTINGS)
    try:
        yield await client.open_reader(ledger_id)
    finally:
        await client.aclose()


def wait(reader: LedgerReader, above: int, timeout_s: float = 15.0) -> asyncio.Task[int]:
    return asyncio.ensure_future(reader.wait_for_lac(above, timeout_s))


async def parked(world: LedgerWorld, *tasks: asyncio.Task[int], count: int = 1) -> None:
    """Until each bookie was asked `count` times by those who wait."""
    await wait_until(lambda: all(len(b.lac_requests) >= count for b in world.cluster.bookies.values()), what="polls")
    assert not any(task.done() for task in tasks)


async def set_fragments(world: LedgerWorld, writer: LedgerWriter, fragments: dict[int, str]) -> None:
    found = await world.records.get(writer.ledger_id)
    assert found is not None
    changed = tuple(Fragment(first_entry_id=first, ensemble=tuple(ensemble)) for first, ensemble in fragments.items())
    await world.records.replace(writer.ledger_id, found.record.replace(fragments=changed), found.version)


async def test_a_tailing_reader_sees_every_entry_and_the_end() -> None:
    async with ledger_world(settings=SETTINGS) as world:
        writer = await world.create()
        seen: list[bytes] = []

        async def tail() -> None:
            async with reader_elsewhere(world, writer.ledger_id) as reader:
                end = -1
                while True:
                    end = await reader.wait_for_lac(len(seen) - 1, 15.0)
                    if end < len(seen):
                        return
                    seen.extend(payloads_of(await reader.read(len(seen), end, max_bytes=1 << 20)))

        tailing = asyncio.create_task(tail())
        for n in range(30):
            await append(writer, [b"%d" % n])
            if n % 7 == 0:
                await wait_until(lambda n=n: len(seen) >= n, what="the reader")  # the newest is seen with the next add
        await writer.close()
        await tailing
        assert seen == [b"%d" % n for n in range(30)]


async def test_an_idle_reader_sends_one_request_a_bookie() -> None:
    async with ledger_world(settings=SETTINGS) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        await append(writer, [b"0"])
        async with reader_elsewhere(world, writer.ledger_id) as reader:
            waiting = wait(reader, -1)
            await parked(world, waiting)
            await asyncio.sleep(20 * SETTINGS.long_poll_pause_s)
            assert [len(bookie.lac_requests) for bookie in world.cluster.bookies.values()] == [1, 1, 1]
            world.cluster["b"].explicit_lacs[writer.ledger_id] = 0
            assert await waiting == 0


@pytest.mark.parametrize("fault", ["down", "limbo", "refuse_polls", "full_of_readers", "lac_down"])
async def test_one_bookie_that_tells_is_enough(fault: str) -> None:
    async with ledger_world(settings=SETTINGS) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        await append(writer, [b"0"])
        for bookie in "ab":
            setattr(world.cluster[bookie], fault, True)
        async with reader_elsewhere(world, writer.ledger_id) as reader:
            waiting = wait(reader, -1)
            await wait_until(lambda: bool(world.cluster["c"].lac_requests))
            world.cluster["c"].explicit_lacs[writer.ledger_id] = 0
            assert await waiting == 0


@pytest.mark.parametrize("fault", ["refuse_polls", "full_of_readers"])
async def test_bookies_that_let_nobody_wait_are_asked_without_waiting(fault: str) -> None:
    async with ledger_world(settings=SETTINGS) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        await append(writer, [b"0"])
        for bookie in world.cluster.bookies.values():
            setattr(bookie, fault, True)
        async with reader_elsewhere(world, writer.ledger_id) as reader:
            waiting = wait(reader, -1)
            await parked(world, waiting)
            world.cluster["a"].explicit_lacs[writer.ledger_id] = 0
            assert await waiting == 0


async def test_the_time_is_over_and_nothing_is_left_behind() -> None:
    async with ledger_world(settings=SETTINGS) as world:
        writer = await world.create()
        await append(writer, [b"0"])
        async with reader_elsewhere(world, writer.ledger_id) as reader:
            before = len(asyncio.all_tasks())
            assert await reader.wait_for_lac(0, 0.05) == -1
            assert len(asyncio.all_tasks()) == before
            assert len(world.tree.watches if hasattr(world.tree, "watches") else ()) == 0


@pytest.mark.parametrize("end", ["close", "recover", "delete"])
async def test_the_end_of_the_ledger_ends_the_wait(end: str) -> None:
    async with ledger_world(settings=SETTINGS) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        await append(writer, [b"0"])
        await append(writer, [b"1"])
        async with reader_elsewhere(world, writer.ledger_id) as reader:
            waiting = wait(reader, 0)
            await parked(world, waiting)
            if end == "close":
                await writer.close()
                assert await waiting == 1
            elif end == "recover":
                await world.another_client().recover(writer.ledger_id)
                assert await waiting == 1
            else:
                await world.client.delete(writer.ledger_id)  # which recovers first: the reader may see either
                (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
                assert outcome == 1 or isinstance(outcome, NoSuchLedgerError)


async def test_a_reader_follows_the_writer_to_another_ensemble() -> None:
    async with ledger_world("a", "b", "c", "d", "e", "f", settings=SETTINGS) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        await append(writer, [b"0"])
        await append(writer, [b"1"])
        async with reader_elsewhere(world, writer.ledger_id) as reader:
            waiting = wait(reader, 1)
            await wait_until(lambda: len(world.cluster["a"].lac_requests) == 1)
            await set_fragments(world, writer, {0: "abc", 2: "def"})
            await wait_until(lambda: len(world.cluster["d"].lac_requests) == 1, what="a poll at the new ensemble")
            assert reader.known_end == 1, "what is before the last fragment is confirmed"
            world.cluster["e"].explicit_lacs[writer.ledger_id] = 2
            assert await waiting == 2


async def test_an_outage_of_metadata_does_not_keep_entries_from_readers() -> None:
    class AwayStore(FaultyStore):
        away = False

        async def watch(self, key: str) -> object:
            if self.away:
                raise StoreUnavailableError("no connection")
            return await self._store.watch(key)

    async with ledger_world(settings=SETTINGS, store_of=AwayStore) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        await append(writer, [b"0"])
        client = world.client
        reader = await client.open_reader(writer.ledger_id)
        reader._writer = None  # as in another process, over the same store
        world.store.away, world.store.unreadable = True, 1_000
        waiting = wait(reader, -1)
        await parked(world, waiting)
        await append(writer, [b"1"])
        assert await waiting == 0
        assert payloads_of(await reader.read(0, 0, max_bytes=1)) == [b"0"]


async def test_a_reader_beside_a_failed_writer_hears_of_the_end_that_others_gave() -> None:
    async with ledger_world(settings=SETTINGS) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"0"])
        reader = await world.client.open_reader(writer.ledger_id)
        for bookie in "ab":
            world.cluster[bookie].drop_adds = True
        pending = append(writer, [b"1"])  # on all of them, acknowledged by none but c
        await wait_until(lambda: all(world.cluster[b].ids(writer.ledger_id) == [0, 1] for b in "abc"))
        assert reader.known_end == 0
        world.cluster["a"].drop_adds = world.cluster["b"].drop_adds = False
        await world.another_client().recover(writer.ledger_id)
        await writer.aclose()
        await asyncio.gather(pending, return_exceptions=True)
        assert await reader.wait_for_lac(0, 5.0) == 1
        assert payloads_of(await reader.read(1, 1, max_bytes=1)) == [b"1"]


@pytest.mark.parametrize("turns", range(0, 24, 2))
async def test_a_wait_cancelled_anywhere_leaves_no_task(turns: int) -> None:
    async with ledger_world(settings=SETTINGS) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        await append(writer, [b"0"])
        world.cluster["a"].refuse = Status.OK  # a bookie that acknowledges without keeping: only b and c know more
        async with reader_elsewhere(world, writer.ledger_id) as reader:
            before = len(asyncio.all_tasks())
            waiting = wait(reader, 5)
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert len(asyncio.all_tasks()) == before
