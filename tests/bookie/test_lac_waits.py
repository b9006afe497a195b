"""Long polls: who waits for a ledger's LAC hears of it once it may have moved, and nobody is kept for ever."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_bookie import Bookie
from cepheid_bookie.lac_waits import LacWaits
from cepheid_rpc import ExplicitLac, LacAnswer, LacRequest, Status
from tests.bookie.bookie_support import KEY, Machine, add, added, group_of, settle

HOUR_MS = 3_600_000


def poll(bookie: Bookie, ledger_id: int, above: int, wait_ms: int = HOUR_MS) -> asyncio.Task[LacAnswer]:
    return asyncio.ensure_future(bookie.connection().read_lac(LacRequest(ledger_id, KEY, above=above, wait_ms=wait_ms)))


async def parked(bookie: Bookie, *polls: asyncio.Task[LacAnswer]) -> None:
    await settle()
    assert not any(one.done() for one in polls), polls
    assert bookie.statistics().lac_waits == len(polls)


async def test_what_is_news_is_answered_at_once() -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0, 5, lac=3))
        answer = await poll(bookie, 7, above=2)
        assert (answer.last_add_confirmed, answer.highest_entry) == (3, group_of(7, 4, lac=3))


@pytest.mark.parametrize("first_entries", [0, 1])
async def test_adds_wake_the_readers_of_their_ledger_once_a_group(first_entries: int) -> None:
    async with Machine().bookie() as bookie:
        if first_entries:
            await added(bookie, group_of(7, 0))
        waiting, other = poll(bookie, 7, above=4), poll(bookie, 8, above=-1)  # 7 may be unknown here: it has no entry yet
        await parked(bookie, waiting, other)
        looks = bookie._reader.counters.cache_chunks
        await added(bookie, group_of(7, first_entries, 5, lac=-1))
        await parked(bookie, waiting, other)
        assert bookie._reader.counters.cache_chunks == looks + 1, "one look for five entries"
        await added(bookie, group_of(7, first_entries + 5, lac=5))
        assert (await waiting).last_add_confirmed == 5
        await parked(bookie, other)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert bookie.statistics().lac_waits == 0


async def test_an_explicit_lac_of_an_idle_writer_wakes() -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0, 5, lac=3))
        waiting = poll(bookie, 7, above=3)
        await parked(bookie, waiting)
        await bookie.write_lac(ExplicitLac(7, 4, KEY))
        assert (await waiting).explicit_lac == 4


@pytest.mark.parametrize("event", ["fence", "delete", "close", "fail"])
async def test_nobody_waits_for_what_cannot_come(event: str) -> None:
    machine = Machine()
    bookie = await machine.open()
    await added(bookie, group_of(7, 0, 5, lac=3))
    waiting = poll(bookie, 7, above=3)
    await parked(bookie, waiting)
    if event == "fence":
        await bookie.read_lac(LacRequest(7, KEY, fence=True))
    elif event == "delete":
        await bookie.delete_ledgers([7])
    elif event == "fail":
        bookie._fail(OSError("disk"))
    else:
        await bookie.aclose()
    answer = await asyncio.wait_for(waiting, 5)
    expected = {"fence": Status.OK, "delete": Status.NO_LEDGER, "close": Status.STOPPED, "fail": Status.STOPPED}
    assert answer.status is expected[event]
    if event in ("fence", "delete"):
        again = await asyncio.wait_for(poll(bookie, 7, above=3), 5)
        assert again.status is expected[event], "and who comes later does not wait either"
    await bookie.aclose()


async def test_a_wait_ends_with_its_time() -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0, 5, lac=3))
        assert (await poll(bookie, 7, above=3, wait_ms=20)).last_add_confirmed == 3
        assert (await poll(bookie, 9, above=3, wait_ms=20)).status is Status.NO_LEDGER
        assert (await poll(bookie, 7, above=3, wait_ms=20)).status is Status.OK
        assert bookie.ledgers() == [7], "a reader creates nothing"
        assert bookie.statistics().lac_waits == 0


async def test_more_readers_than_places_are_refused() -> None:
    async with Machine().bookie(lac_waits=2) as bookie:
        await added(bookie, group_of(7, 0))
        waiting = [poll(bookie, 7, above=5) for _ in range(2)]
        await parked(bookie, *waiting)
        assert (await poll(bookie, 7, above=5)).status is Status.OVERLOADED
        assert bookie.statistics().lac_waits_refused == 1
        waiting.pop().cancel()
        await settle()
        waiting.append(poll(bookie, 7, above=5))
        await parked(bookie, *waiting)
        await added(bookie, group_of(7, 1, 6, lac=0), group_of(7, 7, lac=6))
        assert [answer.last_add_confirmed for answer in await asyncio.gather(*waiting)] == [6, 6]


@pytest.mark.parametrize("turns", range(6))
async def test_a_reader_that_goes_leaves_nothing(turns: int) -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0))
        waiting = poll(bookie, 7, above=5)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert bookie.statistics().lac_waits == 0
        assert bookie._lac_waits._parked == {}


async def test_another_master_key_waits_for_nothing() -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0))
        answer = await bookie.read_lac(LacRequest(7, b"x" * 16, above=5, wait_ms=HOUR_MS))
        assert answer.status is Status.UNAUTHORIZED
        assert [a.status for a in await add(bookie, group_of(7, 1))] == [Status.OK]


async def test_what_happens_while_the_answer_is_made_up_is_not_missed() -> None:
    """The look may read from disk; the wake that comes meanwhile is of something that it has not seen."""
    waits = LacWaits(10, lambda _: False)
    looks: list[LacAnswer] = [LacAnswer(Status.OK, 3), LacAnswer(Status.OK, 4)]

    async def look(request: LacRequest) -> LacAnswer:
        answer = looks.pop(0)
        await asyncio.sleep(0)
        waits.wake(request.ledger_id)
        return answer

    answer = await waits.answer(LacRequest(7, KEY, above=3, wait_ms=HOUR_MS), look)
    assert answer.last_add_confirmed == 4
    assert waits.parked == 0


async def test_a_highest_entry_that_vanished_meanwhile_is_unknown_not_denied() -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0))
        bookie._cache.drop(7)  # as a deletion does, between the look at the ledger and the look at the entry
        assert (await bookie.connection().read_lac(LacRequest(7, KEY, fence=True))).status is Status.UNKNOWN
