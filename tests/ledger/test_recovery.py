"""Recovery over bookies in memory: the scenarios of invariants.md by name, and what interruptions leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cepheid_ledger import (
    ClosedLedger,
    LedgerClient,
    LedgerFencedError,
    LedgerWriter,
    RecoveryFailedError,
    TailDamagedError,
    assert_legal_change,
)
from cepheid_ledger.master_key import master_key_of
from cepheid_metadata import Fragment, LedgerState, StoreUnavailableError
from cepheid_rpc import AddRequest, EntryGroup, MissingEntries, ReadAnswer, ReadRequest, Status, encode_group
from tests.ledger.faulty_store import FaultyStore
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world, payloads_of
from tests.ledger.memory_bookie import MemoryBookie
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

SLOW = FAST.model_copy(update={"recovery_timeout_s": 30.0, "add_timeout_s": 30.0, "read_timeout_s": 30.0})


def entries(writer: LedgerWriter, first: int, last: int, lac: int) -> EntryGroup:
    """One-byte entries as the writer would have sent them."""
    return encode_group(writer.ledger_id, first, lac, first, [b"x"] * (last - first + 1))


async def written_to(world: LedgerWorld, last: int, ack_quorum: int = 2, bookies: Sequence[str] = "abc") -> LedgerWriter:
    """A ledger with entries 0..last on all of its bookies."""
    writer = await world.create(len(bookies), ack_quorum)
    for _ in range(last + 1):
        await append(writer, [b"x"])
    await wait_until(lambda: all(world.cluster[b].ids(writer.ledger_id) == list(range(last + 1)) for b in bookies))
    return writer


async def replace_fragments(world: LedgerWorld, ledger_id: int, fragments: dict[int, str]) -> None:
    found = await world.records.get(ledger_id)
    assert found is not None
    changed = tuple(Fragment(first_entry_id=first, ensemble=tuple(ensemble)) for first, ensemble in fragments.items())
    await world.records.replace(ledger_id, found.record.replace(fragments=changed), found.version)


def fragments_of(record: object) -> dict[int, str]:
    return {fragment.first_entry_id: "".join(fragment.ensemble) for fragment in record.fragments}  # type: ignore[attr-defined]


async def assert_nothing_left(client: LedgerClient, *writers: LedgerWriter) -> None:
    """Apart from what the writers hold, which are given up first."""
    for writer in writers:
        await writer.aclose()
    for bookie, statistics in client.statistics().items():
        assert (statistics.lanes, statistics.waiting_bytes) == (0, 0), f"{bookie}: {statistics}"


async def test_half_written_fence_miss() -> None:
    """Scenario 1: an entry on one bookie, the fence lost to the third, a late add arrives there (#2614)."""
    async with ledger_world(settings=SLOW) as world:
        writer = await written_to(world, 0)
        late = AddRequest(entries(writer, 1, 1, lac=0), master_key_of(writer.metadata))
        world.cluster["a"].hold(late.group)
        world.cluster["a"].read_delay_s = 5.0  # b and c answer first: two noes
        world.cluster["c"].lac_down = True  # the fencing LAC read does not reach it
        other = world.another_client()
        assert await other.recover(writer.ledger_id) == ClosedLedger(0, 1)
        assert world.cluster["c"].add(late) is Status.FENCED, "entry 1 would be on a and c: acknowledged, then truncated"
        await other.aclose()


@pytest.mark.parametrize("last_ensemble", ["dbc", "def"])
@pytest.mark.parametrize("down", ["", "d", "b"])
async def test_empty_last_fragment(last_ensemble: str, down: str) -> None:
    """Scenario 2: the ensemble changed, nothing was written since, a bookie fails (#2615). The length is right, too (L12)."""
    async with ledger_world("a", "b", "c", "d", "e", "f") as world:
        writer = await world.create_on("abc")
        world.cluster["a"].hold(entries(writer, 0, 999, lac=-1))
        world.cluster["b"].hold(entries(writer, 0, 999, lac=-1))
        await replace_fragments(world, writer.ledger_id, {0: "abc", 1000: last_ensemble})
        if down:
            world.cluster[down].down = True
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(999, 1000)
        record = await world.record(writer.ledger_id)
        assert fragments_of(record) == {0: "abc", 1000: last_ensemble}
        await assert_nothing_left(world.client, writer)


async def test_recovery_changes_ensemble_then_dies() -> None:
    """Scenario 3: what the first recoverer replaced stays in its memory, so the second finds everything (BOOKKEEPER-355)."""
    async with ledger_world("a", "b", "c", "d", "e") as world:
        writer = await world.create_on("abc")
        for bookie in "ab":
            world.cluster[bookie].hold(entries(writer, 0, 4, lac=-1))
            world.cluster[bookie].refuse = Status.IO_ERROR  # they take no recovery adds
        for bookie in "de":
            world.cluster[bookie].hang = True  # and those who replace them answer nothing yet
        first = asyncio.create_task(world.client.recover(writer.ledger_id))
        await wait_until(lambda: len(world.client.statistics()) == 5, what="both replacements")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert fragments_of(await world.record(writer.ledger_id)) == {0: "abc"}
        await assert_nothing_left(world.client, writer)
        for bookie in world.cluster.bookies.values():
            bookie.hang, bookie.refuse = False, None
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(4, 5)


async def test_a_bookie_that_fails_during_recovery_is_replaced_in_the_closing_change_only() -> None:
    async with ledger_world("a", "b", "c", "d") as world:
        writer = await world.create_on("abc")
        for bookie in "abc":
            world.cluster[bookie].hold(entries(writer, 0, 4, lac=2))
        world.cluster["b"].refuse = Status.READ_ONLY
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(4, 5)
        record = await world.record(writer.ledger_id)
        assert fragments_of(record) == {0: "abc", 3: "adc"}
        assert world.cluster["d"].ids(writer.ledger_id) == [3, 4]


async def test_a_bookie_that_left_during_recovery_is_not_chosen_again() -> None:
    """Scenario 7, in the memory of a recovery: b fails, d replaces it and fails too, b is the only one left to choose."""
    async with ledger_world("a", "b", "c", "d") as world:
        writer = await world.create_on("abc")
        for bookie in "abc":
            world.cluster[bookie].hold(entries(writer, 0, 4, lac=2))
        world.cluster["b"].refuse = world.cluster["d"].refuse = Status.IO_ERROR
        world.cluster["a"].delay_s = world.cluster["c"].delay_s = 0.03  # the quorum comes after both failures
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(4, 5)
        assert fragments_of(await world.record(writer.ledger_id)) == {0: "abc", 3: "adc"}


async def test_a_change_behind_the_last_entry_leaves_no_empty_fragment() -> None:
    async with ledger_world("a", "b", "c", "d", settings=FAST.model_copy(update={"recovery_batch_entries": 5})) as world:
        writer = await world.create_on("abc")
        for bookie in "abc":
            world.cluster[bookie].hold(entries(writer, 0, 4, lac=-1))
            world.cluster[bookie].read_delay_s = 0.1  # the second batch, which finds the end, takes its time
        world.cluster["c"].refuse, world.cluster["c"].delay_s = Status.IO_ERROR, 0.02
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(4, 5)
        assert world.client.statistics().keys() == {"a", "b", "c", "d"}, "d was chosen"
        assert fragments_of(await world.record(writer.ledger_id)) == {0: "abc"}


@pytest.mark.parametrize("first_to_close", ["sees-nothing", "sees-copies"])
async def test_two_recoverers_one_copy(first_to_close: str) -> None:
    """Scenario 4: entries 6 and 7 on one bookie that only one recoverer reaches. One end for all (L8), honest LACs (L4)."""
    async with ledger_world(settings=SLOW) as world:
        writer = await written_to(world, 5)
        tail = entries(writer, 6, 7, lac=5)
        world.cluster["c"].hold(tail)
        blind, seeing = world.another_client(SLOW), world.another_client(SLOW)
        world.cluster["c"].hang = True
        for bookie in "ab":
            world.cluster[bookie].read_delay_s = 0.05
        one = asyncio.create_task(blind.recover(writer.ledger_id))
        await wait_until(lambda: len(world.cluster["b"].lac_requests) == 1, what="the fence of the blind one")
        if first_to_close == "sees-nothing":
            assert await one == ClosedLedger(5, 6)
            world.cluster["c"].hang = False
            assert await seeing.recover(writer.ledger_id) == ClosedLedger(5, 6)
        else:
            one.cancel()  # it died before it could decide
            world.cluster["c"].hang = False
            assert await seeing.recover(writer.ledger_id) == ClosedLedger(7, 8)
        await asyncio.gather(one, return_exceptions=True)
        for bookie in world.cluster.bookies.values():
            for entry_id, entry in bookie.entries[writer.ledger_id].items():
                header = entry.header(entry_id)
                assert header.last_add_confirmed <= min(5, entry_id - 1), f"{bookie} holds a LAC that is too high"
        await blind.aclose()
        await seeing.aclose()


async def test_the_loser_of_the_closing_change_adopts_what_the_winner_wrote() -> None:
    async with ledger_world(settings=SLOW, store_of=FaultyStore) as world:
        writer = await written_to(world, 5)
        world.cluster["c"].hold(entries(writer, 6, 7, lac=5))
        for bookie in "ab":
            world.cluster[bookie].read_delay_s = 0.05
        loser = asyncio.create_task(world.client.recover(writer.ledger_id))
        await wait_until(lambda: world.cluster["b"].ids(writer.ledger_id)[-1] == 7, what="write-backs of the loser")
        found = await world.records.get(writer.ledger_id)
        assert found is not None
        won = found.record.replace(state=LedgerState.CLOSED, last_entry_id=5, length_bytes=6)
        await world.records.replace(writer.ledger_id, won, found.version)
        assert await loser == ClosedLedger(5, 6)


async def test_a_damaged_copy_is_unknown_and_never_a_no() -> None:
    """Scenario 12: with Qw = Qa = 2 one no ends the ledger; a damaged copy must not (#2908)."""
    async with ledger_world("a", "b") as world:
        writer = await world.create(2, 2)
        for bookie in "ab":
            world.cluster[bookie].hold(entries(writer, 0, 2, lac=-1))
        world.cluster["a"].damage(writer.ledger_id, 1)
        world.cluster["b"].read_delay_s = 0.05
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(2, 3)


async def test_what_a_bookie_in_limbo_does_not_have_is_unknown() -> None:
    async with ledger_world("a", "b") as world:
        writer = await world.create_on("ab", ack_quorum=2)
        for bookie in "ab":
            world.cluster[bookie].hold(entries(writer, 0, 2, lac=-1))
        world.cluster["a"].limbo = True
        del world.cluster["a"].entries[writer.ledger_id][2]
        world.cluster["b"].read_delay_s = 0.05
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(2, 3)


async def test_damage_everywhere_stops_recovery_and_decides_nothing() -> None:
    async with ledger_world("a", "b") as world:
        writer = await world.create(2, 2)
        for bookie in "ab":
            world.cluster[bookie].hold(entries(writer, 0, 2, lac=-1))
            world.cluster[bookie].damage(writer.ledger_id, 1)
        with pytest.raises(RecoveryFailedError, match="entry 1"):
            await world.client.recover(writer.ledger_id)
        assert (await world.record(writer.ledger_id)).state is LedgerState.IN_RECOVERY
        await assert_nothing_left(world.client, writer)


@pytest.mark.parametrize("damaged", ["ab", "a"])
async def test_what_is_damaged_on_every_disk_may_be_given_up(damaged: str) -> None:
    async with ledger_world("a", "b") as world:
        writer = await world.create(2, 2)
        for bookie in "ab":
            world.cluster[bookie].hold(entries(writer, 0, 2, lac=-1))
            world.cluster[bookie].checks_disk = True
        for bookie in damaged:
            world.cluster[bookie].damage(writer.ledger_id, 1)
        if damaged == "a":
            world.cluster["b"].down = True  # it may have a good copy
            with pytest.raises(RecoveryFailedError) as told:
                await world.client.recover(writer.ledger_id, despite_damage=True)
            assert not isinstance(told.value, TailDamagedError)
            world.cluster["b"].down = False
            assert await world.client.recover(writer.ledger_id, despite_damage=True) == ClosedLedger(2, 3)
            return
        with pytest.raises(TailDamagedError, match="entry 1"):
            await world.client.recover(writer.ledger_id)
        assert await world.client.recover(writer.ledger_id, despite_damage=True) == ClosedLedger(0, 1)
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(0, 1)
        await assert_nothing_left(world.client, writer)


async def test_a_ledger_with_a_damaged_tail_can_be_deleted() -> None:
    async with ledger_world("a", "b") as world:
        writer = await world.create(2, 2)
        for bookie in "ab":
            world.cluster[bookie].hold(entries(writer, 0, 2, lac=-1))
            world.cluster[bookie].checks_disk = True
            world.cluster[bookie].damage(writer.ledger_id, 1)
        await world.client.delete(writer.ledger_id)
        assert await world.records.get(writer.ledger_id) is None


async def test_a_bookie_whose_highest_entry_is_damaged_is_fenced_all_the_same() -> None:
    async with ledger_world("a", "b", "c") as world:
        writer = await world.create(3, 2)
        for bookie in "abc":
            world.cluster[bookie].hold(entries(writer, 0, 2, lac=1))
            world.cluster[bookie].checks_disk = True
        for bookie in "ab":
            world.cluster[bookie].damage(writer.ledger_id, 2)
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(2, 3)


async def test_a_lac_under_a_bad_digest_fences_but_is_not_believed() -> None:
    async with ledger_world("a") as world:
        writer = await world.create(1, 1)
        world.cluster["a"].hold(entries(writer, 0, 3, lac=-1))
        world.cluster["a"].lie_about_lac = 100
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(3, 4)


@pytest.mark.deadline(10)
@pytest.mark.parametrize("fault", ["hang", "down"])
async def test_one_bookie_without_answers_does_not_delay_recovery(fault: str) -> None:
    """V1. The timeouts of this client are longer than the test may take."""
    async with ledger_world(settings=SLOW) as world:
        writer = await written_to(world, 3)
        setattr(world.cluster["b"], fault, True)
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(3, 4)
        world.cluster["b"].hang = False


@pytest.mark.parametrize(("size", "ack_quorum", "down"), [(3, 2, "ab"), (2, 1, "a"), (1, 1, "a")])
async def test_without_coverage_nothing_is_decided_and_the_next_attempt_continues(size: int, ack_quorum: int, down: str) -> None:
    """V2."""
    async with ledger_world(*"abc"[:size]) as world:
        writer = await written_to(world, 2, ack_quorum, "abc"[:size])
        for bookie in down:
            world.cluster[bookie].down = True
        with pytest.raises(RecoveryFailedError, match="cannot be fenced"):
            await world.client.recover(writer.ledger_id)
        assert (await world.record(writer.ledger_id)).state is LedgerState.IN_RECOVERY
        for bookie in down:
            world.cluster[bookie].down = False
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(2, 3)


@pytest.mark.parametrize(
    "status",
    [
        Status.FENCED,
        Status.UNAUTHORIZED,
        Status.READ_ONLY,
        Status.OVERLOADED,
        Status.NO_SPACE,
        Status.IO_ERROR,
        Status.UNKNOWN,
        Status.BAD_REQUEST,
        Status.STOPPED,
    ],
)
async def test_a_bookie_that_does_not_say_that_it_is_fenced_is_not(status: Status) -> None:
    """L11: nothing is read while the writer may still reach its quorum."""
    async with ledger_world() as world:
        writer = await written_to(world, 2)
        for bookie in "ab":
            world.cluster[bookie].lac_status = status
        with pytest.raises(RecoveryFailedError, match="its writer cannot be fenced"):
            await world.another_client().recover(writer.ledger_id)
        assert not any(bookie.reads for bookie in world.cluster.bookies.values())
        world.cluster["a"].lac_status = None
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(2, 3)


@pytest.mark.parametrize("next_entry_id", [1, 1 << 40])
async def test_an_answer_about_other_entries_than_asked_denies_nothing(next_entry_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(bookie: MemoryBookie, request: ReadRequest) -> ReadAnswer:
        bookie.fence(request.ledger_id)
        missing = MissingEntries(request.first_entry_id, max(request.first_entry_id, next_entry_id - 1), Status.NO_ENTRY)
        return ReadAnswer((), (missing,), next_entry_id)

    monkeypatch.setattr(MemoryBookie, "chunk", chunk)
    async with ledger_world() as world:
        writer = await written_to(world, 2)
        with pytest.raises(RecoveryFailedError, match="an answer without the entry"):
            await world.client.recover(writer.ledger_id)


async def test_an_entry_that_nobody_can_deny_stops_recovery() -> None:
    """Qw 3, Qa 2: one no and two unknown: the entry may be acknowledged."""
    async with ledger_world() as world:
        writer = await written_to(world, 2)
        for bookie in "bc":
            world.cluster[bookie].read_delay_s = 60.0
        world.cluster["a"].entries[writer.ledger_id].pop(2)  # as if it had never come there
        with pytest.raises(RecoveryFailedError, match="whether entry"):
            await world.client.recover(writer.ledger_id)


async def test_unconfirmed_entries_on_one_bookie_get_all_their_copies() -> None:
    """L10: closed at an entry only when Qa bookies hold it; here all three get the very same bytes (L7)."""
    async with ledger_world() as world:
        writer = await written_to(world, 1)
        world.cluster["a"].hold(entries(writer, 2, 40, lac=1))
        for bookie in "bc":
            world.cluster[bookie].read_delay_s = 0.05  # else their noes come first, which is right as well
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(40, 41)
        await wait_until(lambda: all(b.ids(writer.ledger_id) == list(range(41)) for b in world.cluster.bookies.values()))
        first = world.cluster["a"].entries[writer.ledger_id]
        assert all(b.entries[writer.ledger_id] == first for b in world.cluster.bookies.values())


async def test_a_bookie_that_lags_when_recovery_ends_still_gets_its_copies() -> None:
    async with ledger_world(settings=SLOW) as world:
        writer = await world.create_on("abc")
        for bookie in "ab":
            world.cluster[bookie].hold(entries(writer, 0, 9, lac=-1))
        world.cluster["c"].hang = True
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(9, 10)
        world.cluster["c"].hang = False
        await wait_until(lambda: world.cluster["c"].ids(writer.ledger_id) == list(range(10)))
        await wait_until(lambda: sum(s.lanes for s in world.client.statistics().values()) == 3, what="the writer's lanes only")


async def test_many_recoveries_take_turns() -> None:
    async with ledger_world("a", settings=FAST.model_copy(update={"recoveries": 3})) as world:
        writers = [await written_to(world, 0, 1, "a") for _ in range(12)]
        world.cluster["a"].delay_s = 0.005
        recoveries = [asyncio.create_task(world.client.recover(writer.ledger_id)) for writer in writers]
        await wait_until(lambda: len(world.cluster["a"].lac_requests) == 3)
        begun = [(await world.record(writer.ledger_id)).state is not LedgerState.OPEN for writer in writers]
        assert sum(begun) <= 3
        assert await asyncio.gather(*recoveries) == [ClosedLedger(0, 1)] * 12


async def test_a_long_tail_is_recovered_in_batches() -> None:
    settings = FAST.model_copy(update={"recovery_batch_entries": 7})
    async with ledger_world(settings=settings) as world:
        writer = await world.create()
        for bookie in "ac":
            world.cluster[bookie].hold(entries(writer, 0, 99, lac=-1))
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(99, 100)
        reader = await world.client.open_reader(writer.ledger_id)
        assert len(payloads_of(await reader.read(0, 99, max_bytes=1 << 20))) == 100


async def test_recovery_does_not_read_on_while_too_much_waits_to_be_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_ledger.recovery._WRITE_BACK_BYTES", 500)
    settings = FAST.model_copy(update={"recovery_batch_entries": 7, "refusal_retry_s": 30.0})
    async with ledger_world(settings=settings) as world:
        writer = await world.create()
        world.cluster["a"].hold(entries(writer, 0, 99, lac=-1))
        for bookie in "bc":
            world.cluster[bookie].refuse = Status.OVERLOADED
        recovery = asyncio.create_task(world.client.recover(writer.ledger_id))
        await wait_until(lambda: len(world.cluster["b"].add_log) > 3)
        assert len(world.cluster["a"].reads) <= 4, "7 entries of 37 bytes a time"
        for bookie in "bc":
            world.cluster[bookie].refuse = None
        assert await recovery == ClosedLedger(99, 100)


async def test_concurrent_callers_share_one_recovery() -> None:
    async with ledger_world() as world:
        writer = await written_to(world, 2)
        callers = [asyncio.create_task(world.client.recover(writer.ledger_id)) for _ in range(4)]
        await asyncio.sleep(0)
        callers[0].cancel()
        outcomes = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert outcomes[1:] == [ClosedLedger(2, 3)] * 3
        assert [len(bookie.lac_requests) for bookie in world.cluster.bookies.values()] == [1, 1, 1]


async def test_a_writer_of_the_same_process_is_fenced_like_any_other() -> None:
    async with ledger_world("a") as world:
        writer = await written_to(world, 2, 1, "a")
        pending = append(writer, [b"x"])
        end = await world.client.recover(writer.ledger_id)
        outcome = (await asyncio.gather(pending, return_exceptions=True))[0]
        if isinstance(outcome, EntryGroup):
            assert end == ClosedLedger(3, 4), "it was acknowledged, so it is in"
        else:
            assert isinstance(outcome, LedgerFencedError)
            assert end.last_entry_id in (2, 3)
        with pytest.raises(LedgerFencedError):
            await append(writer, [b"x"])


@pytest.mark.parametrize("lost_write", [1, 2])
async def test_metadata_changes_whose_answers_were_lost(lost_write: int) -> None:
    """Scenario 8, for both changes of a recovery."""
    async with ledger_world(store_of=FaultyStore) as world:
        writer = await written_to(world, 2)
        world.store.lose_answers = lost_write
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(2, 3)


async def test_a_metadata_store_that_refuses_decides_nothing() -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        writer = await written_to(world, 2)
        world.store.refuse = 1
        with pytest.raises(StoreUnavailableError):
            await world.client.recover(writer.ledger_id)
        assert await world.client.recover(writer.ledger_id) == ClosedLedger(2, 3)


async def test_a_repair_of_an_earlier_fragment_meanwhile_is_kept() -> None:
    async with ledger_world("a", "b", "c", "d") as world:
        writer = await world.create_on("abc")
        for bookie in "abc":
            world.cluster[bookie].hold(entries(writer, 0, 4, lac=3))
        await replace_fragments(world, writer.ledger_id, {0: "abc", 3: "abc"})
        world.cluster["a"].refuse = Status.OVERLOADED  # write-back waits for a quorum of b and c
        world.cluster["b"].refuse = Status.OVERLOADED
        recovery = asyncio.create_task(world.client.recover(writer.ledger_id))
        await wait_until(lambda: len(world.cluster["a"].add_log) > 0)
        await replace_fragments(world, writer.ledger_id, {0: "dbc", 3: "abc"})
        world.cluster["a"].refuse = world.cluster["b"].refuse = None
        assert await recovery == ClosedLedger(4, 5)
        assert fragments_of(await world.record(writer.ledger_id)) == {0: "dbc", 3: "abc"}


@pytest.mark.parametrize("turns", range(0, 40, 1))
async def test_a_recovery_cancelled_anywhere_leaves_nothing_and_the_next_one_ends_it(turns: int) -> None:
    async with ledger_world(store_of=FaultyStore) as world:
        writer = await written_to(world, 3)
        world.cluster["a"].hold(entries(writer, 4, 5, lac=3))
        before = await world.record(writer.ledger_id)
        recovery = asyncio.create_task(world.client.recover(writer.ledger_id))
        for _ in range(turns):
            await asyncio.sleep(0)
        recovery.cancel()
        await asyncio.gather(recovery, return_exceptions=True)
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert len(world.client._recoveries) == 0
        await asyncio.gather(*left, return_exceptions=True)
        await assert_nothing_left(world.client, writer)
        other = world.another_client()
        end = await other.recover(writer.ledger_id)
        assert end.last_entry_id in (3, 5)
        assert_legal_change(before, await world.record(writer.ledger_id))
        await assert_nothing_left(other)
        await other.aclose()
