"""The driver of a writer: order, failures of bookies, closing, and what an interrupted close leaves."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import (
    ClosedLedger,
    LedgerClosedError,
    LedgerError,
    LedgerFencedError,
    LedgerWriteError,
    UnauthorizedLedgerError,
    WriterPhase,
)
from cepheid_ledger.metadata_edits import in_recovery
from cepheid_metadata import LedgerState, ShortReason, StoreUnavailableError, repair_marks
from cepheid_rpc import EntryGroup, Status
from tests.ledger.faulty_store import FaultyStore
from tests.ledger.ledger_world import FAST, append, ledger_world, payloads_of
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


async def test_groups_complete_in_order_each_once_after_lac_moved() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        for bookie in world.cluster.bookies.values():
            bookie.answer_per_request = True
        world.cluster["a"].delay_s = 0.01
        seen: list[tuple[int, int, int]] = []

        def on_done(outcome: EntryGroup | LedgerError) -> None:
            assert isinstance(outcome, EntryGroup)
            seen.append((outcome.first_entry_id, outcome.last_entry_id, writer.last_add_confirmed))

        for count in (1, 3, 2):
            writer.append([b"x"] * count, on_done)
        assert (writer.last_add_pushed, writer.length, writer.in_flight_bytes) == (5, 6, 6 * 37)
        await wait_until(lambda: len(seen) == 3)
        assert [(first, last) for first, last, _ in seen] == [(0, 0), (1, 3), (4, 5)]
        assert all(lac >= last for _, last, lac in seen)
        assert writer.in_flight_bytes == 0


async def test_each_entry_carries_a_lac_below_its_id_and_the_length_so_far() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        await append(writer, [b"aa", b"b"])
        group = await append(writer, [b"cc", b"d"])
        headers = [group.header(entry_id) for entry_id in (2, 3)]
        assert [(h.entry_id, h.last_add_confirmed, h.length) for h in headers] == [(2, 1, 5), (3, 1, 6)]


@pytest.mark.parametrize("fault", ["down", "hang", "broken", "io-error", "drops-answers"])
async def test_a_failed_bookie_costs_copies_but_no_progress(fault: str) -> None:
    async with ledger_world() as world:
        writer = await world.create()
        await append(writer, [b"before"])
        await wait_until(lambda: all(bookie.ids(writer.ledger_id) == [0] for bookie in world.cluster.bookies.values()))
        bad = world.cluster["b"]
        bad.down, bad.hang = fault in ("down", "broken"), fault == "hang"
        bad.refuse = Status.IO_ERROR if fault == "io-error" else None
        bad.drop_adds = fault == "drops-answers"
        if fault == "broken":
            bad.break_streams()
        for n in range(5):
            await append(writer, [b"%d" % n])
        await wait_until(lambda: writer.under_replicated == ("b",))
        await append(writer, [b"after"])
        assert await writer.close() == ClosedLedger(6, 16)
        reader = await world.client.open_reader(writer.ledger_id)
        bad.hang = False
        assert payloads_of(await reader.read(0, 6, max_bytes=1 << 20))[0] == b"before"


@pytest.mark.parametrize("closes_late", [False, True])
async def test_copies_that_a_bookie_refused_until_after_the_close_are_marked(closes_late: bool) -> None:
    """It was only slow when closing began, and fails while the record is written, or after that."""
    async with ledger_world(store_of=FaultyStore) as world:
        writer = await world.create()
        world.cluster["b"].refuse = Status.OVERLOADED
        await append(writer, [b"x"])
        world.store.delay_s = 2 * FAST.refusal_retry_s if closes_late else 0.0
        await writer.close()
        await asyncio.sleep(2 * FAST.refusal_retry_s)
        found = await repair_marks(world.store).get(writer.ledger_id)
        assert found is not None
        assert found.record.bookies == {"b": ShortReason.DAMAGED}


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_client_that_is_closed_supplies_a_slow_bookie_or_marks_what_it_lacks(hangs: bool) -> None:
    async with ledger_world() as world:
        writer = await world.create()
        world.cluster["b"].hang = True
        await append(writer, [b"x"])
        await writer.close()
        if not hangs:
            asyncio.get_running_loop().call_later(FAST.add_timeout_s / 2, setattr, world.cluster["b"], "hang", False)
        await world.client.aclose()
        found = await repair_marks(world.store).get(writer.ledger_id)
        assert (world.cluster["b"].ids(writer.ledger_id), found and found.record.bookies) == (
            ([], {"b": ShortReason.DAMAGED}) if hangs else ([0], None)
        )


async def test_a_client_is_closed_in_time_although_metadata_takes_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_ledger.client._MARKS_AT_ONCE", 1)
    async with ledger_world(store_of=FaultyStore) as world:
        for _ in range(5):
            writer = await world.create()
            world.cluster["b"].hang = True
            await append(writer, [b"x"])
            await writer.close()
        world.store.delay_s = 1000.0
        began = asyncio.get_running_loop().time()
        await world.client.aclose()
        assert asyncio.get_running_loop().time() - began < 2 * FAST.metadata_timeout_s


async def test_what_a_bookie_lacks_of_a_ledger_that_is_closed_while_its_client_closes_is_marked() -> None:
    async with ledger_world() as world:
        first, second = await world.create(), await world.create()
        assert set("bc") <= {*first.bookies} & {*second.bookies}
        world.cluster["b"].hang = True
        await append(first, [b"x"])
        await first.close()
        closing = asyncio.create_task(world.client.aclose())  # it waits for b, and for no other bookie
        await asyncio.sleep(0.1)
        world.cluster["b"].hang, world.cluster["c"].hang = False, True
        await append(second, [b"y"])
        await second.close()
        await closing
        assert world.cluster["c"].ids(second.ledger_id) == []
        found = await repair_marks(world.store).get(second.ledger_id)
        assert found is not None
        assert found.record.bookies == {"c": ShortReason.DAMAGED}


@pytest.mark.parametrize(("size", "ack_quorum", "broken"), [(1, 1, "a"), (3, 3, "b"), (3, 2, "bc")])
async def test_with_too_few_bookies_the_ledger_fails_and_says_why(size: int, ack_quorum: int, broken: str) -> None:
    async with ledger_world(*"abc"[:size]) as world:
        writer = await world.create(size, ack_quorum)
        await append(writer, [b"x"])
        for bookie in broken:
            world.cluster[bookie].refuse = Status.IO_ERROR
        pending = [append(writer, [b"y"]) for _ in range(3)]
        outcomes = await asyncio.gather(*pending, return_exceptions=True)
        assert all(isinstance(outcome, LedgerWriteError) for outcome in outcomes)
        assert f"{broken[0]}: answered IO_ERROR" in str(outcomes[0])
        assert (writer.state, writer.last_add_confirmed, writer.in_flight_bytes) == (WriterPhase.FAILED, 0, 0)
        with pytest.raises(LedgerWriteError):
            await append(writer, [b"z"])
        with pytest.raises(LedgerWriteError):
            await writer.close()
        assert (await world.record(writer.ledger_id)).state is LedgerState.OPEN, "its end is recovery's to decide"


async def test_appends_made_while_others_fail_are_answered_after_them() -> None:
    async with ledger_world("a") as world:
        writer = await world.create(1, 1)
        world.cluster["a"].refuse = Status.IO_ERROR
        order: list[str] = []

        def first(_: EntryGroup | LedgerError) -> None:
            order.append("first")
            writer.append([b"z"], lambda _: order.append("third"))

        writer.append([b"x"], first)
        writer.append([b"y"], lambda _: order.append("second"))
        await wait_until(lambda: len(order) == 3)
        assert order == ["first", "second", "third"]


async def test_an_overloaded_bookie_is_waited_for() -> None:
    async with ledger_world("a") as world:
        writer = await world.create(1, 1)
        world.cluster["a"].refuse = Status.OVERLOADED
        pending = [append(writer, [b"%d" % n]) for n in range(4)]
        await wait_until(lambda: len(world.cluster["a"].add_log) > 3, what="repeated adds")
        world.cluster["a"].refuse = None
        await asyncio.gather(*pending)
        assert writer.last_add_confirmed == 3
        assert world.cluster["a"].ids(writer.ledger_id) == [0, 1, 2, 3]


async def test_another_master_key_is_fatal() -> None:
    async with ledger_world("a") as world:
        writer = await world.create(1, 1)
        world.cluster["a"].keys[writer.ledger_id] = b"another"
        with pytest.raises(UnauthorizedLedgerError):
            await append(writer, [b"x"])


async def test_a_callback_that_raises_hurts_nobody_else() -> None:
    async with ledger_world() as world:
        writer = await world.create()

        def broken(_: EntryGroup | LedgerError) -> None:
            raise ValueError("a defect of the caller")

        writer.append([b"x"], broken)
        await append(writer, [b"y"])
        assert writer.last_add_confirmed == 1


async def test_close_ends_at_lac_and_fails_what_is_unconfirmed() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        await append(writer, [b"four"])
        pending = append(writer, [b"unconfirmed"])
        assert await writer.close() == ClosedLedger(0, 4)
        with pytest.raises(LedgerClosedError):
            await pending
        record = await world.record(writer.ledger_id)
        assert (record.state, record.last_entry_id, record.length_bytes) == (LedgerState.CLOSED, 0, 4)


async def test_a_bookie_that_lags_when_the_ledger_is_closed_still_gets_its_copies() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        world.cluster["c"].hang = True
        for n in range(5):
            await append(writer, [b"%d" % n])
        assert (await writer.close()).last_entry_id == 4
        assert world.client.statistics()["c"].lanes == 1
        world.cluster["c"].hang = False
        await wait_until(lambda: world.cluster["c"].ids(writer.ledger_id) == [0, 1, 2, 3, 4])
        await wait_until(lambda: world.client.statistics()["c"].lanes == 0)
        assert all(s.waiting_bytes == s.lanes == 0 for s in world.client.statistics().values())


async def test_a_broken_invariant_stops_its_own_ledger_only() -> None:
    async with ledger_world("a") as world:
        broken, well = await world.create(1, 1), await world.create(1, 1)
        pending = append(broken, [b"x"])
        broken._pipeline.state.last_add_pushed = -1  # a defect of ours: an answer beyond what was pushed
        assert len(await append(well, [b"x"])) == 1
        with pytest.raises(LedgerWriteError, match="invariant"):
            await pending
        assert broken.state is WriterPhase.FAILED


async def test_close_inside_a_group_counts_the_confirmed_part() -> None:
    async with ledger_world("a") as world:
        writer = await world.create(1, 1)
        pending = append(writer, [b"1", b"22", b"333"])
        writer._pipeline.on_added("a", 1)  # a bookie may answer a part of a group
        assert await writer.close() == ClosedLedger(1, 3)
        with pytest.raises(LedgerClosedError):
            await pending


async def test_a_close_whose_answer_was_lost_is_recognised() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        world.store.lose_answers = 1
        world.store.unreadable = 0
        assert await writer.close() == ClosedLedger(0, 1)


async def test_a_close_that_metadata_refused_can_be_tried_again() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        world.store.refuse = 1
        with pytest.raises(StoreUnavailableError):
            await writer.close()
        assert writer.state is WriterPhase.CLOSING
        assert await writer.close() == ClosedLedger(0, 1)


async def test_concurrent_closes_share_one_outcome_even_when_one_is_cancelled() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        before = len(world.store.writes)
        closes = [asyncio.create_task(writer.close()) for _ in range(3)]
        await asyncio.sleep(0)
        closes[0].cancel()
        outcomes = await asyncio.gather(*closes, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert outcomes[1:] == [ClosedLedger(0, 1)] * 2
        assert len(world.store.writes) == before + 1


async def test_a_ledger_in_recovery_is_not_closed_by_its_writer() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        await append(writer, [b"x"])
        found = await world.records.get(writer.ledger_id)
        assert found is not None
        await world.records.replace(writer.ledger_id, in_recovery(found.record), found.version)
        outcomes = await asyncio.gather(writer.close(), writer.close(), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [LedgerFencedError] * 2
        assert (await world.record(writer.ledger_id)).state is LedgerState.IN_RECOVERY


@pytest.mark.parametrize("by", ["writer", "client"])
async def test_a_close_during_which_the_writer_is_given_up_says_so(by: str) -> None:
    """Nobody cancelled those who wait for the close."""
    async with ledger_world(store_of=FaultyStore) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        world.store.hang = True
        closes = [asyncio.create_task(writer.close()) for _ in range(2)]
        await asyncio.sleep(0)
        await (writer.aclose() if by == "writer" else world.client.aclose())
        outcomes = await asyncio.gather(*closes, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [LedgerClosedError] * 2


async def test_closing_the_client_answers_what_is_pending() -> None:
    async with ledger_world(settings=FAST.model_copy(update={"add_timeout_s": 60.0})) as world:
        writer = await world.create()
        for bookie in world.cluster.bookies.values():
            bookie.hang = True
        pending = append(writer, [b"x"])
        await asyncio.sleep(0)
        await world.client.aclose()
        with pytest.raises(LedgerClosedError):
            await pending
        assert all(s.waiting_bytes == s.lanes == 0 for s in world.client.statistics().values())
