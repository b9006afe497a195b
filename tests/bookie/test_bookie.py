"""The bookie's promises on a sane machine: adds, fences, keys, LACs, reads, order of answers, overload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cepheid_bookie import BookieState
from cepheid_rpc import AddAnswer, AddRequest, ExplicitLac, LacRequest, ReadRequest, Status
from tests.bookie.bookie_support import KEY, KiB, Machine, add, add_requests, added, entries_of, group_of, read_all, small_settings
from tests.support import wait_until

OTHER_KEY = b"x" * 16


async def test_answers_a_message_with_joined_ranges_after_one_sync() -> None:
    async with Machine().bookie() as bookie:
        groups = [group_of(7, 0, 3), group_of(9, 5, 2), group_of(7, 3, 3), group_of(9, 7, 1), group_of(7, 10, 1)]
        answers = await add(bookie, *groups)
        assert answers == [
            AddAnswer(7, 0, 5, Status.OK),
            AddAnswer(9, 5, 7, Status.OK),
            AddAnswer(7, 10, 10, Status.OK),
        ]
        assert bookie.statistics().journal_batches == 1


async def test_reads_from_cache_from_disk_and_across_both() -> None:
    async with Machine().bookie() as bookie:
        old, new = [group_of(7, 0, 5), group_of(7, 5, 5)], [group_of(7, 10, 5)]
        await added(bookie, *old)
        await bookie.checkpoint()
        await added(bookie, *new)
        assert bookie.statistics().read_disk_blocks == 0
        entries, missing = await read_all(bookie, 7, 0, 16)
        assert entries == entries_of(old + new)
        assert missing == {15: Status.NO_ENTRY, 16: Status.NO_ENTRY}
        assert bookie.statistics().read_disk_blocks == 1  # both old groups are one block


async def test_reads_of_cached_entries_touch_no_disk() -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0, 5))
        await read_all(bookie, 7, 1, 3)
        assert bookie.statistics().read_disk_chunks == 0
        assert bookie.statistics().read_cache_chunks == 1


async def test_a_small_budget_still_returns_one_entry_and_says_nothing_of_the_rest() -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0, 20, size=500))
        for _ in range(2):
            chunks = [chunk async for chunk in bookie.read(ReadRequest(7, 3, 19, max_bytes=1))]
            assert [(chunk.next_entry_id, chunk.missing) for chunk in chunks] == [(4, ())]
            chunks = [chunk async for chunk in bookie.read(ReadRequest(7, 3, 19, max_bytes=1_500))]
            assert sum(len(group) for chunk in chunks for group in chunk.groups) == 3
            await bookie.checkpoint()  # the second round reads the same from disk


@pytest.mark.parametrize("flushed", [False, True])
async def test_a_fence_refuses_regular_adds_and_lets_recovery_adds_pass(flushed: bool) -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0, 2, lac=-1), group_of(7, 2, lac=1))
        if flushed:
            await bookie.checkpoint()
        answer = await bookie.read_lac(LacRequest(7, KEY, fence=True))
        assert (answer.status, answer.last_add_confirmed, answer.explicit_lac) == (Status.OK, 1, -1)
        assert answer.highest_entry is not None
        answer.highest_entry.verify()
        assert answer.highest_entry == group_of(7, 2, lac=1)
        assert [a.status for a in await add(bookie, group_of(7, 3))] == [Status.FENCED]
        await added(bookie, group_of(7, 3), group_of(7, 2, lac=1), recovery=True)
        entries, _ = await read_all(bookie, 7, 0, 3)
        assert sorted(entries) == [0, 1, 2, 3]


async def test_a_fencing_read_of_an_unknown_ledger_fences_it() -> None:
    async with Machine().bookie() as bookie:
        entries, missing = await read_all(bookie, 7, 0, 0, fence=True)
        assert (entries, missing[0].certain_no) == ({}, True)
        assert [a.status for a in await add(bookie, group_of(7, 0))] == [Status.FENCED]
        assert (await bookie.read_lac(LacRequest(7, KEY))).status is Status.NO_ENTRY


async def test_a_fencing_read_sees_an_add_that_is_admitted_and_not_yet_synced() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        machine.workers["journal"].hold()
        pending = asyncio.ensure_future(add(bookie, group_of(7, 0)))
        await asyncio.sleep(0)
        fenced = asyncio.ensure_future(read_all(bookie, 7, 0, 1, fence=True))
        await asyncio.sleep(0)
        machine.workers["journal"].release()
        assert [a.status for a in await pending] == [Status.OK]
        entries, missing = await fenced
        assert entries == entries_of([group_of(7, 0)])
        assert missing == {1: Status.NO_ENTRY}


@pytest.mark.parametrize("request_kind", ["lac", "read"])
async def test_a_fence_is_answered_only_when_it_is_durable(request_kind: str) -> None:
    """Also negative answers, and also when another fence of the ledger is already under way."""
    machine = Machine()
    async with machine.bookie() as bookie:
        machine.workers["journal"].hold()
        asked: list[asyncio.Future[Any]] = []
        for _ in range(2):
            if request_kind == "lac":
                asked.append(asyncio.ensure_future(bookie.read_lac(LacRequest(7, KEY, fence=True))))
            else:
                asked.append(asyncio.ensure_future(read_all(bookie, 7, 0, 0, fence=True)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in asked), "answered before the sync"
        machine.workers["journal"].release()
        await asyncio.gather(*asked)


@pytest.mark.virtual_time
async def test_a_checkpoint_follows_whatever_a_slow_journal_held_back() -> None:
    """Found by seed 0x13 (V6): the checkpoint came while the batch was under way, and no other one until the next add."""
    machine = Machine(settings=small_settings(checkpoint_interval_s=1.0))
    async with machine.bookie() as bookie:
        machine.workers["journal"].hold()
        pending = asyncio.ensure_future(add(bookie, group_of(7, 0)))
        await asyncio.sleep(10)  # of a virtual clock
        machine.workers["journal"].release()
        assert [a.status for a in await pending] == [Status.OK]
        await asyncio.sleep(2)
        assert bookie._checkpointer.clean, f"{bookie._checkpointer!r}, {bookie!r}"


async def test_no_add_is_answered_before_the_sync() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        machine.workers["journal"].hold()
        pending = asyncio.ensure_future(add(bookie, group_of(7, 0)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not pending.done()
        assert bookie.statistics().journal_queued_bytes > 0
        machine.workers["journal"].release()
        await pending


async def test_the_first_key_owns_the_ledger() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
        assert [a.status for a in await add(bookie, group_of(7, 1), key=OTHER_KEY)] == [Status.UNAUTHORIZED]
        assert (await bookie.read_lac(LacRequest(7, OTHER_KEY, fence=True))).status is Status.UNAUTHORIZED
        refused = [chunk async for chunk in bookie.read(ReadRequest(7, 0, 5, fence=True, master_key=OTHER_KEY))]
        assert [(m.first_entry_id, m.last_entry_id, m.status) for m in refused[0].missing] == [(0, 5, Status.UNAUTHORIZED)]
        assert await bookie.write_lac(ExplicitLac(7, 0, OTHER_KEY)) is Status.UNAUTHORIZED
        await added(bookie, group_of(7, 1))  # the stranger's fence did nothing
    async with machine.bookie() as bookie:  # and the key survives
        assert [a.status for a in await add(bookie, group_of(7, 2), key=OTHER_KEY)] == [Status.UNAUTHORIZED]


@pytest.mark.parametrize("key", [b"", b"short", b"q" * 17])
async def test_a_malformed_key_is_a_bad_request(key: bytes) -> None:
    async with Machine().bookie() as bookie:
        assert [a.status for a in await add(bookie, group_of(7, 0), key=key)] == [Status.BAD_REQUEST]
        assert (await bookie.read_lac(LacRequest(7, key, fence=True))).status is Status.BAD_REQUEST
        assert bookie.ledgers() == []


async def test_an_explicit_lac_grows_only_and_survives() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 5, lac=-1))
        assert await bookie.write_lac(ExplicitLac(7, 4, KEY)) is Status.OK
        assert await bookie.write_lac(ExplicitLac(7, 2, KEY)) is Status.OK
        assert (await bookie.read_lac(LacRequest(7, KEY))).last_add_confirmed == 4
    machine.restart()
    async with machine.bookie() as bookie:
        answer = await bookie.read_lac(LacRequest(7, KEY))
        assert (answer.last_add_confirmed, answer.explicit_lac) == (4, 4)


async def test_unknown_ledgers_and_absurd_ranges() -> None:
    async with Machine().bookie() as bookie:
        _, missing = await read_all(bookie, 7, 3, 4)
        assert missing == {3: Status.NO_LEDGER, 4: Status.NO_LEDGER}
        assert (await bookie.read_lac(LacRequest(7, KEY))).status is Status.NO_LEDGER
        chunks = [chunk async for chunk in bookie.read(ReadRequest(7, 5, 2))]
        assert chunks[0].missing[0].status is Status.BAD_REQUEST
        await added(bookie, group_of(7, 0))
        chunks = [chunk async for chunk in bookie.read(ReadRequest(7, 1, (1 << 63) - 1))]
        assert [(m.last_entry_id, m.status) for m in chunks[0].missing] == [((1 << 63) - 1, Status.NO_ENTRY)]


async def test_answers_of_a_ledger_keep_the_order_of_its_requests_refusals_included() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        machine.workers["journal"].hold()
        requests = [
            AddRequest(group_of(7, 0), KEY),
            AddRequest(group_of(7, 1), OTHER_KEY),
            AddRequest(group_of(7, 2), KEY),
        ]
        pending = asyncio.ensure_future(add_requests(bookie, requests))
        await asyncio.sleep(0)
        fence = asyncio.ensure_future(bookie.read_lac(LacRequest(7, KEY, fence=True)))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(add(bookie, group_of(7, 3)))
        await asyncio.sleep(0)
        machine.workers["journal"].release()
        assert [(a.first_entry_id, a.status) for a in await pending] == [
            (0, Status.OK),
            (1, Status.UNAUTHORIZED),
            (2, Status.OK),
        ]
        assert [a.status for a in await late] == [Status.FENCED]
        assert (await fence).highest_entry == group_of(7, 2)


def collecting(order: list[tuple[int, Status]], ledger_id: int = 7) -> Callable[[Sequence[AddAnswer]], None]:
    """Answers of one ledger, entry by entry, in the order in which they come."""

    def on_answers(answers: Sequence[AddAnswer]) -> None:
        for answer in answers:
            if answer.ledger_id == ledger_id:
                order.extend((entry_id, answer.status) for entry_id in range(answer.first_entry_id, answer.last_entry_id + 1))

    return on_answers


async def test_an_add_in_the_turn_of_a_load_does_not_overtake_what_waited_for_the_load() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
    async with machine.bookie() as bookie:  # knows the ledger, and has not loaded it
        order: list[tuple[int, Status]] = []
        on_answers = collecting(order)
        bookie.add([AddRequest(group_of(7, 1), KEY)], on_answers)
        asyncio.get_running_loop().call_soon(bookie.add, [AddRequest(group_of(7, 2), KEY)], on_answers)  # after the load ended
        await wait_until(lambda: len(order) == 2)
        assert order == [(1, Status.OK), (2, Status.OK)]


async def test_refusals_of_what_waits_for_a_load_come_before_those_of_what_waits_for_room() -> None:
    machine = Machine(settings=small_settings(waiting_s=0.05))
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
    async with machine.bookie() as bookie:
        order: list[tuple[int, Status]] = []
        on_answers = collecting(order)
        machine.workers["look"].hold()
        machine.workers["flush"].hold()
        bookie.add([AddRequest(group_of(7, 1), KEY)], on_answers)
        bookie.add([AddRequest(group_of(8, i, size=2 * KiB), KEY) for i in range(12)], on_answers)
        assert bookie.is_full
        bookie.add([AddRequest(group_of(7, 2), KEY)], on_answers)
        await wait_until(lambda: len(order) == 2)
        machine.workers["look"].release()
        machine.workers["flush"].release()
        assert order == [(1, Status.OVERLOADED), (2, Status.OVERLOADED)]


async def test_a_burst_beyond_the_cache_waits_and_is_answered_in_order() -> None:
    async with Machine().bookie() as bookie:
        order: list[int] = []
        groups = [group_of(7, i, size=2 * KiB) for i in range(50)]  # 100 KiB through a cache of 16

        def on_answers(answers: Sequence[AddAnswer]) -> None:
            for answer in answers:
                assert answer.status is Status.OK
                order.extend(range(answer.first_entry_id, answer.last_entry_id + 1))

        bookie.add([AddRequest(group, KEY) for group in groups], on_answers)
        assert bookie.is_full
        assert bookie.statistics().cache_bytes < 24 * KiB
        await wait_until(lambda: len(order) == 50)
        assert order == list(range(50))
        assert not bookie.is_full
        assert bookie.statistics().waiting_bytes == 0
        entries, missing = await read_all(bookie, 7, 0, 49)
        assert (entries, missing) == (entries_of(groups), {})


async def test_beyond_the_waiting_bound_adds_are_refused_and_none_of_them_is_kept() -> None:
    machine = Machine(settings=small_settings(waiting_bytes=16 * KiB))
    async with machine.bookie() as bookie:
        machine.workers["flush"].hold()  # a data disk that hangs
        fate: dict[int, Status] = {}

        def on_answers(answers: Sequence[AddAnswer]) -> None:
            for answer in answers:
                fate.update(dict.fromkeys(range(answer.first_entry_id, answer.last_entry_id + 1), answer.status))

        for i in range(60):
            bookie.add([AddRequest(group_of(7, i, size=2 * KiB), KEY)], on_answers)
            assert bookie.statistics().waiting_bytes <= 16 * KiB + 4 * KiB
        await wait_until(lambda: Status.OVERLOADED in fate.values())
        kept = [i for i, status in fate.items() if status is Status.OK]
        refused = [i for i, status in fate.items() if status is Status.OVERLOADED]
        assert kept == list(range(len(kept)))
        assert refused[0] == len(kept)
        assert bookie.statistics().adds_overloaded == len(refused)
        machine.workers["flush"].release()
        await wait_until(lambda: len(fate) == 60)
        entries, _ = await read_all(bookie, 7, 0, 59)
        assert sorted(entries) == [i for i in range(60) if fate[i] is Status.OK]


async def test_an_add_waits_no_longer_than_it_may() -> None:
    machine = Machine(settings=small_settings(waiting_s=0.05))
    async with machine.bookie() as bookie:
        machine.workers["flush"].hold()
        answers = await add(bookie, *[group_of(7, i, size=2 * KiB) for i in range(12)])
        assert answers[-1].status is Status.OVERLOADED
        machine.workers["flush"].release()
        await wait_until(lambda: not bookie.is_full)
        await added(bookie, group_of(7, 20))


async def test_reads_beyond_the_bound_are_refused() -> None:
    machine = Machine(settings=small_settings(open_reads=1))
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 3))
        first = bookie.read(ReadRequest(7, 0, 5))
        await anext(first)
        chunks = [chunk async for chunk in bookie.read(ReadRequest(7, 0, 5))]
        assert chunks[0].missing[0].status is Status.OVERLOADED
        entries, _ = await read_all(bookie, 7, 0, 2, fence=True)  # recovery is never refused
        assert len(entries) == 3
        await first.aclose()
        assert bookie.statistics().open_reads == 0


async def test_a_closed_bookie_refuses_everything() -> None:
    bookie = await Machine().open()
    await added(bookie, group_of(7, 0))
    await bookie.aclose()
    assert bookie.state is BookieState.CLOSED
    assert [a.status for a in await add(bookie, group_of(7, 1))] == [Status.STOPPED]
    assert (await bookie.read_lac(LacRequest(7, KEY))).status is Status.STOPPED
    _, missing = await read_all(bookie, 7, 0, 0)
    assert missing == {0: Status.STOPPED}
    assert await bookie.write_lac(ExplicitLac(7, 0, KEY)) is Status.STOPPED
    await bookie.aclose()


async def test_a_close_answers_what_was_admitted_and_leaves_nothing_to_replay() -> None:
    machine = Machine()
    bookie = await machine.open()
    pending = asyncio.ensure_future(add(bookie, group_of(7, 0, 3)))
    await asyncio.sleep(0)
    await bookie.aclose()
    assert [a.status for a in await pending] == [Status.OK]
    machine.restart()
    async with machine.bookie() as bookie:
        entries, _ = await read_all(bookie, 7, 0, 2)
        assert len(entries) == 3
        assert bookie.statistics().read_disk_blocks == 1  # from the entry log, not replayed


async def test_evicted_ledgers_come_back_with_fence_key_and_last_entry() -> None:
    machine = Machine(settings=small_settings(loaded_ledgers=2))
    async with machine.bookie() as bookie:
        for ledger_id in range(1, 11):
            await added(bookie, group_of(ledger_id, 0, 2))
        assert (await bookie.read_lac(LacRequest(3, KEY, fence=True))).status is Status.OK
        await bookie.checkpoint()
        await wait_until(lambda: bookie.statistics().ledgers_loaded <= 2)
        answers = await add(bookie, *[group_of(ledger_id, 2) for ledger_id in range(1, 11)])
        assert {a.ledger_id: a.status for a in answers} == {
            ledger_id: Status.FENCED if ledger_id == 3 else Status.OK for ledger_id in range(1, 11)
        }
        for ledger_id in range(1, 11):
            answer = await bookie.read_lac(LacRequest(ledger_id, KEY))
            assert answer.highest_entry is not None
            assert answer.highest_entry.first_entry_id == (1 if ledger_id == 3 else 2)
        assert [a.status for a in await add(bookie, group_of(5, 3), key=OTHER_KEY)] == [Status.UNAUTHORIZED]


async def test_a_cancelled_fence_stays_a_fence() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
        machine.workers["journal"].hold()
        asked = asyncio.ensure_future(bookie.read_lac(LacRequest(7, KEY, fence=True)))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        machine.workers["journal"].release()
        assert [a.status for a in await add(bookie, group_of(7, 1))] == [Status.FENCED]
