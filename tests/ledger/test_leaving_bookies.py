"""Open ledgers that leave a bookie which is gone or draining, without an append. The decisions: test_writer_state.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cepheid_ledger import ClosedLedger
from cepheid_ledger.departures import Departures
from tests.ledger.faulty_store import FaultyStore
from tests.ledger.ledger_world import FAST, append, ledger_world
from tests.ledger.memory_bookie import MemoryBookie
from tests.ledger.test_ensemble_change import QUICK, changed, check_copies, fail, fragments_of
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


async def nothing_happens() -> None:
    await asyncio.sleep(1.0)


async def test_an_idle_ledger_replaces_a_bookie_that_is_gone() -> None:
    async with ledger_world(*"abcd", settings=QUICK) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"x"])
        world.cluster["b"].down = True
        world.client.leave_bookie("b", "it is gone")
        await changed(writer)
        assert fragments_of(writer) == [(0, "abc"), (1, "adc")]
        assert (await world.record(writer.ledger_id)).last_fragment.ensemble == tuple("adc")
        await append(writer, [b"y"])
        await check_copies(world, writer, but="b")
        assert await writer.close() == ClosedLedger(1, 2)


async def test_a_ledger_without_entries_is_changed_in_place() -> None:
    async with ledger_world(*"abcd", settings=QUICK) as world:
        writer = await world.create_on("abc")
        world.client.leave_bookie("c", "it is gone")
        await wait_until(lambda: fragments_of(writer) == [(0, "abd")])


async def test_a_striped_ledger_is_left_too() -> None:
    async with ledger_world(*"abcde", settings=QUICK) as world:
        writer = await world.create_on("abcd", write_quorum=2)
        await append(writer, [b"0", b"1", b"2"])
        world.client.leave_bookie("a", "it is gone")
        await changed(writer)
        assert fragments_of(writer) == [(0, "abcd"), (3, "ebcd")]
        await append(writer, [b"3", b"4"])
        await wait_until(lambda: world.cluster["e"].ids(writer.ledger_id) == [3, 4], what="its share")


async def test_without_a_spare_a_bookie_that_answers_keeps_its_place() -> None:
    async with ledger_world(settings=QUICK) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        await append(writer, [b"x"])
        world.client.leave_bookie("b", "it drains")
        await nothing_happens()
        await append(writer, [b"y"])
        assert (fragments_of(writer), writer.under_replicated) == ([(0, "abc")], ())
        assert world.client.ensemble_change_statistics().ledgers_waiting == 0
        world.cluster.bookies["d"] = MemoryBookie("d")
        world.client.leave_bookie("b", "it drains")
        await changed(writer)
        assert fragments_of(writer) == [(0, "abc"), (2, "adc")]


async def test_a_spare_in_quarantine_is_not_taken_for_a_bookie_that_answers() -> None:
    async with ledger_world(*"abcd", settings=QUICK) as world:
        writer = await world.create_on("abc")
        world.placement.quarantine("d")
        world.client.leave_bookie("b", "it drains")
        await nothing_happens()
        assert fragments_of(writer) == [(0, "abc")]


async def test_metadata_that_refuses_the_change_costs_nothing() -> None:
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        world.store.refuse = 1_000_000
        world.client.leave_bookie("b", "it drains")
        await nothing_happens()
        await append(writer, [b"x"])
        assert (writer.under_replicated, world.cluster["b"].ids(writer.ledger_id)) == ((), [0])


async def test_entries_appended_during_the_change_reach_everybody() -> None:
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"before"])
        world.store.hang = True
        world.client.leave_bookie("b", "it drains")
        await wait_until(lambda: writer._changer is not None and writer._changer.proposed is not None)
        await asyncio.gather(*(append(writer, [b"%d" % n]) for n in range(5)))
        assert writer.last_add_confirmed == 5, "a and c are in both ensembles"
        await wait_until(lambda: world.cluster["b"].ids(writer.ledger_id) == [0, 1, 2, 3, 4, 5], what="b goes on")
        world.store.hang = False
        await changed(writer)
        await append(writer, [b"after"])
        await check_copies(world, writer)
        assert world.cluster["d"].ids(writer.ledger_id) == [1, 2, 3, 4, 5, 6]


async def test_a_bookie_is_left_after_another_one_failed_in_the_middle_of_its_change() -> None:
    async with ledger_world(*"abcde", settings=QUICK, store_of=FaultyStore) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"x"])
        world.store.hang = True
        fail(world, "a", "io-error")
        await append(writer, [b"y"])
        await wait_until(lambda: writer._changer is not None and writer._changer.proposed is not None)
        world.client.leave_bookie("b", "it is gone")
        await nothing_happens()
        world.store.hang = False
        await wait_until(lambda: set(writer.metadata.last_fragment.ensemble) == {"c", "d", "e"})
        await append(writer, [b"z"])
        await check_copies(world, writer, but="a")


@pytest.mark.deadline(600)
async def test_bookies_lost_one_after_the_other_leave_an_idle_ledger_recoverable() -> None:
    """Scenario 22 (idle-open-ledger-erosion)."""
    async with ledger_world(*"abcdef", settings=QUICK) as world:
        writer = await world.create_on("abc", write_quorum=2)
        await append(writer, [b"x"])
        for bookie in "ac":
            world.cluster[bookie].down = True
            world.client.leave_bookie(bookie, "it is gone")
            await wait_until(lambda bookie=bookie: bookie not in writer.metadata.last_fragment.ensemble)
        assert await world.another_client().recover(writer.ledger_id) == ClosedLedger(0, 1)


@pytest.mark.deadline(600)
async def test_many_ledgers_leave_a_bookie_some_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FAST.model_copy(update={"ensemble_changes": 64})
    async with ledger_world(*"abcd", settings=settings) as world:
        writers = [await world.create_on("abc") for _ in range(1_000)]
        asked: list[int] = []
        for writer in writers:
            leave = writer.leave_bookie

            def counted(bookie_id: str, reason: str, leave: Callable[[str, str], None] = leave) -> None:
                asked.append(turn)
                leave(bookie_id, reason)

            monkeypatch.setattr(writer, "leave_bookie", counted)
        turn = 0
        world.client.leave_bookie("b", "it is gone")
        while any("b" in writer.receivers for writer in writers):
            turn += 1
            await asyncio.sleep(0)
        assert [asked.count(number) for number in range(1, 11)] == [100] * 10
        assert world.client.ensemble_change_statistics().changed == 1_000


async def test_a_second_call_during_a_round_starts_no_other_and_the_next_one_does() -> None:
    class Writer:
        receivers = ("a", "b")
        asked = 0

        def leave_bookie(self, bookie_id: str, reason: str) -> bool:
            self.asked += 1
            return True

    idle, other = Writer(), Writer()
    other.receivers = ("c", "d")
    departures = Departures({1: idle, 2: other}, retry_s=10.0)
    departures.leave("a", "it is gone")
    departures.leave("a", "it is gone")
    departures.leave("b", "it is gone")
    await nothing_happens()
    assert (idle.asked, other.asked) == (2, 0)
    departures.leave("a", "it is gone")
    departures.close()
    departures.leave("a", "it is gone")
    await nothing_happens()
    assert idle.asked == 2


async def test_no_further_writer_is_asked_to_leave_a_bookie_that_came_back_during_the_round() -> None:
    class Writer:
        receivers = ("a",)
        asked = 0

        def leave_bookie(self, bookie_id: str, reason: str) -> bool:
            self.asked += 1
            return False

    writers = {ledger_id: Writer() for ledger_id in range(250)}
    departures = Departures(writers, retry_s=0.1)
    departures.leave("a", "it is gone")
    await asyncio.sleep(0)
    departures.stay("a")
    await nothing_happens()
    assert sum(writer.asked for writer in writers.values()) == 100, "those of the first turn, once"
    departures.leave("a", "it is gone")
    await nothing_happens()
    departures.close()
    assert all(writer.asked for writer in writers.values())
