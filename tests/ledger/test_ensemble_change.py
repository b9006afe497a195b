"""Ensemble changes by a live writer: bookies, metadata and recoverers that get in the way. The decisions: test_writer_state.py."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import (
    ClosedLedger,
    EnsembleChangeStatistics,
    LedgerError,
    LedgerFencedError,
    LedgerWriteError,
    LedgerWriter,
    NoSuchLedgerError,
    WriterPhase,
)
from cepheid_ledger.metadata_edits import in_recovery
from cepheid_metadata import LedgerMetadata, MemoryStore, StoreClosedError, StoreUnavailableError, Versioned, ledger_records
from cepheid_rpc import Status
from tests.ledger.faulty_store import FaultyStore
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world, payloads_of
from tests.ledger.memory_bookie import MemoryBookie
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

QUICK = FAST.model_copy(update={"ensemble_retry_s": 0.01, "metadata_timeout_s": 0.1})


def fragments_of(writer: LedgerWriter) -> list[tuple[int, str]]:
    return fragments_of_record(writer.metadata)


def fragments_of_record(record: LedgerMetadata) -> list[tuple[int, str]]:
    return [(f.first_entry_id, "".join(f.ensemble)) for f in record.fragments]


async def check_copies(world: LedgerWorld, writer: LedgerWriter, but: str = "") -> None:
    """Every confirmed entry comes to be on every bookie that metadata names for it, those aside which failed: what they lack
    of earlier fragments is repair's to copy."""
    record = await world.record(writer.ledger_id)

    def complete() -> bool:
        return all(
            entry_id in world.cluster[bookie].entries.get(writer.ledger_id, {})
            for entry_id in range(writer.last_add_confirmed + 1)
            for bookie in record.fragment_of(entry_id).ensemble
            if bookie not in but
        )

    await wait_until(complete, what=f"full copies of {record.fragments}")


def fail(world: LedgerWorld, bookie: str, fault: str) -> None:
    bad = world.cluster[bookie]
    bad.down, bad.hang = fault in ("down", "broken"), fault == "hang"
    bad.refuse = {"io-error": Status.IO_ERROR, "read-only": Status.READ_ONLY}.get(fault)
    bad.drop_adds = fault == "drops-answers"
    if fault == "broken":
        bad.break_streams()


@pytest.mark.parametrize("fault", ["down", "hang", "broken", "io-error", "read-only", "drops-answers"])
async def test_a_failed_bookie_is_replaced_and_the_newcomer_gets_what_it_must(fault: str) -> None:
    async with ledger_world("a", "b", "c", "d", settings=QUICK) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"before"])
        await wait_until(lambda: all(world.cluster[bookie].ids(writer.ledger_id) == [0] for bookie in "abc"))
        fail(world, "b", fault)
        pending = [append(writer, [b"%d" % n]) for n in range(5)]
        await asyncio.gather(*pending)
        await wait_until(lambda: len(writer.metadata.fragments) == 2)
        await append(writer, [b"after"])
        start, ensemble = fragments_of(writer)[1]
        assert (ensemble, writer.under_replicated) == ("adc", ())
        await check_copies(world, writer, but="b")
        assert world.cluster["d"].ids(writer.ledger_id) == list(range(start, 7)), "the start of the fragment and all after"
        world.cluster["b"].hang = False
        assert await writer.close() == ClosedLedger(6, 16)
        assert payloads_of(await (await world.client.open_reader(writer.ledger_id)).read(0, 0, max_bytes=1)) == [b"before"]


async def fresh_loss(world: LedgerWorld, bookie: str = "b", ack_quorum: int = 2) -> LedgerWriter:
    """A writer on a, b, c with one entry everywhere, and this bookie refusing everything from now on."""
    writer = await world.create_on("abc", ack_quorum)
    await append(writer, [b"x"])
    await wait_until(lambda: all(world.cluster[b].ids(writer.ledger_id) == [0] for b in "abc"))
    fail(world, bookie, "io-error")
    return writer


async def changed(writer: LedgerWriter, fragments: int = 2) -> None:
    await wait_until(lambda: len(writer.metadata.fragments) == fragments, what="the change")
    await wait_until(lambda: not writer._core.is_changing)


# Metadata in the way


async def test_a_failed_bookie_is_replaced_by_one_in_a_rack_without_another_copy() -> None:
    racks = dict(zip("abcdefghi", "123121214", strict=True))
    async with ledger_world(*racks, settings=QUICK, racks=racks) as world:
        writer = await world.create_on("abc")
        world.cluster["c"].down = True
        await append(writer, [b"x"])
        await wait_until(lambda: len(writer.metadata.fragments) == 2)
        assert fragments_of(writer)[1][1] == "abi"


async def test_strict_placement_leaves_a_ledger_short_of_a_copy_until_another_rack_has_a_bookie() -> None:
    racks = dict(zip("abcde", "12312", strict=True))
    async with ledger_world(*racks, settings=QUICK, racks=racks, strict=True) as world:
        writer = await world.create_on("abc")
        world.cluster["c"].down = True
        await append(writer, [b"x"])
        await wait_until(lambda: writer.under_replicated == ("c",))
        racks["e"] = "4"
        await wait_until(lambda: len(writer.metadata.fragments) == 2)
        assert fragments_of(writer)[1][1] == "abe"


async def test_a_change_whose_answer_was_lost_is_recognised() -> None:
    """Scenario 8 (cas-lost-answer): no double fragment, no false fence."""
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        world.store.lose_answers = 1
        await append(writer, [b"y"])
        await changed(writer)
        assert len((await world.record(writer.ledger_id)).fragments) == 2
        await append(writer, [b"z"])
        await check_copies(world, writer, but="b")


async def test_a_change_whose_request_was_lost_is_repeated_with_the_same_bookies() -> None:
    async with ledger_world(*"abcdef", settings=QUICK, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        world.store.lose_requests = 3
        pending = append(writer, [b"y"])
        await wait_until(lambda: writer._changer is not None and writer._changer.proposed is not None)
        assert writer._changer is not None
        proposed = writer._changer.proposed
        await pending
        await changed(writer)
        assert proposed is not None
        assert writer.metadata.last_fragment.ensemble[1] == proposed[1]["b"]


async def test_a_doubt_that_was_cleared_up_is_none_of_the_next_change() -> None:
    async with ledger_world(*"abcde", settings=QUICK, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        world.store.lose_answers, world.store.unreadable = 1, 1_000_000
        await append(writer, [b"y"])
        await wait_until(lambda: writer._changer is not None and writer._changer._in_doubt)
        world.store.unreadable = 0
        await changed(writer)
        world.store.refuse = 1_000_000
        fail(world, "c", "io-error")
        await append(writer, [b"z"])
        await wait_until(lambda: writer.under_replicated == ("c",), what="a change that is certainly refused")
        world.store.refuse = 0
        await changed(writer, 3)


async def test_an_outage_of_metadata_costs_copies_but_no_progress_and_ends_with_a_change() -> None:
    """V3, and design: open ledgers go on while metadata is away."""
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        world.store.refuse = 1_000_000
        for n in range(20):
            await append(writer, [b"%d" % n])
        assert writer.under_replicated == ("b",)
        assert len((await world.record(writer.ledger_id)).fragments) == 1
        await wait_until(lambda: not writer._core.is_changing)
        assert world.client._change_slots.kept_bytes.used_bytes == 0, "nobody will come for it"
        world.store.refuse = 0
        await changed(writer)
        await append(writer, [b"after"])
        assert writer.under_replicated == ()
        assert 20 in world.cluster["d"].ids(writer.ledger_id) or 21 in world.cluster["d"].ids(writer.ledger_id)


async def test_while_the_outcome_is_unknown_two_bookies_of_both_ensembles_confirm() -> None:
    """Scenario 5 (metadata-stall-during-change): nothing is confirmed that a reader of either version could not find."""
    settings = QUICK.model_copy(update={"metadata_timeout_s": 0.05})
    async with ledger_world(*"abcde", settings=settings, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        world.store.hang = True
        for n in range(10):
            await append(writer, [b"%d" % n])
        assert writer._core.is_changing
        fail(world, "c", "io-error")
        pending = append(writer, [b"only a is in both"])
        await wait_until(lambda: "c" not in writer._core.receivers)
        await asyncio.sleep(0.15)
        assert not pending.done(), "b is leaving and c failed: a alone is no quorum"
        assert writer.last_add_confirmed == 10
        world.store.hang = False
        await pending
        await changed(writer, 3)
        await check_copies(world, writer, but="bc")


async def test_without_a_quorum_a_ledger_waits_for_metadata_and_then_fails() -> None:
    settings = QUICK.model_copy(update={"ensemble_change_timeout_s": 0.1})
    async with ledger_world(*"abcde", settings=settings, store_of=FaultyStore) as world:
        writer = await fresh_loss(world, ack_quorum=3)
        world.store.refuse = 1_000_000
        began = asyncio.get_running_loop().time()
        with pytest.raises(LedgerWriteError, match="metadata could not be changed for"):
            await append(writer, [b"y"])
        assert asyncio.get_running_loop().time() - began >= 0.1
        assert writer.state is WriterPhase.FAILED


async def test_without_a_quorum_a_short_outage_of_metadata_is_latency() -> None:
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await fresh_loss(world, ack_quorum=3)
        world.store.refuse = 3
        await append(writer, [b"y"])
        assert fragments_of(writer) == [(0, "abc"), (1, "adc")]


class ClosingStore(FaultyStore):
    """Closed while a write is on its way: the write is applied, and its answer is the store's end."""

    is_closing = False

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        version = await super().put(key, value, expected_version)
        if self.is_closing:
            raise StoreClosedError("the metadata store was closed")
        return version

    async def get(self, key: str) -> Versioned | None:
        if self.is_closing:
            raise StoreClosedError("the metadata store was closed")
        return await super().get(key)


async def test_a_store_that_is_closed_under_a_change_leaves_it_in_doubt() -> None:
    """L3: what the replaced bookie holds must not count, since metadata may name its successor by now."""
    settings = QUICK.model_copy(update={"add_timeout_s": 10.0})
    async with ledger_world(*"abcd", settings=settings, store_of=ClosingStore) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"x"])
        await wait_until(lambda: all(world.cluster[b].ids(writer.ledger_id) == [0] for b in "abc"))
        world.cluster["c"].hang = world.cluster["a"].hang = True
        pending = append(writer, [b"on b alone"])
        await wait_until(lambda: writer._core.acked_through("b") == 1)
        world.store.is_closing = True
        fail(world, "b", "io-error")
        pending_too = append(writer, [b"z"])
        await wait_until(lambda: writer._changer is not None and writer._changer._last_error is not None)
        assert fragments_of_record(await record_of(world, writer)) == [(0, "abc"), (1, "adc")]
        world.cluster["a"].hang = False
        await wait_until(lambda: writer._core.acked_through("a") == 2)
        assert writer.last_add_confirmed == 0, "a alone holds it of those whom the record names"
        world.cluster["c"].hang = world.store.is_closing = False
        await asyncio.gather(pending, pending_too)


async def record_of(world: LedgerWorld, writer: LedgerWriter) -> LedgerMetadata:
    """As another session sees it."""
    found = await ledger_records(MemoryStore(world.tree)).get(writer.ledger_id)
    assert found is not None
    return found.record


# Failures around the change


async def test_a_second_failure_during_the_change_is_a_second_change() -> None:
    """Scenario 6 (second-failure-in-change), and the worked example of ledger-protocol §17."""
    async with ledger_world(*"abcde", settings=QUICK, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        world.store.hang = True
        pending = [append(writer, [b"y"])]
        await wait_until(lambda: writer._core.is_changing and len(world.store.writes) > 1)
        fail(world, "c", "io-error")
        pending.append(append(writer, [b"z"]))
        await wait_until(lambda: writer._core.receivers == ("a",))
        world.store.hang = False  # the write that hangs is lost; what comes after it goes through
        await asyncio.gather(*pending)
        await append(writer, [b"after"])
        await wait_until(lambda: not writer._core.is_changing)
        ensemble = writer.metadata.last_fragment.ensemble
        assert ensemble[0] == "a"
        assert set(ensemble[1:]) == {"d", "e"}
        await check_copies(world, writer, but="bc")


async def test_newcomers_that_fail_are_replaced_in_turn_and_nobody_comes_back() -> None:
    """Scenario 7 (aba-replacement)."""
    async with ledger_world(*"abcdef", settings=QUICK) as world:
        writer = await fresh_loss(world)
        for bookie in "de":
            fail(world, bookie, "io-error")
        for n in range(200):
            await append(writer, [b"%d" % n])
            world.placement._quarantines.clear()  # as if it were over at once
            if "b" not in writer.metadata.last_fragment.ensemble:
                world.cluster["b"].refuse = None  # well again, but it left
            if "f" in writer.metadata.last_fragment.ensemble:
                break
            await asyncio.sleep(0.002)
        await append(writer, [b"last"])
        await check_copies(world, writer, but="bde")
        assert "b" not in [bookie for f in writer.metadata.fragments[1:] for bookie in f.ensemble]
        assert writer.metadata.last_fragment.ensemble == ("a", "f", "c")


async def test_without_a_spare_the_writer_goes_on_and_takes_one_that_appears() -> None:
    async with ledger_world(settings=QUICK) as world:
        writer = await fresh_loss(world)
        for n in range(5):
            await append(writer, [b"%d" % n])
        await wait_until(lambda: writer.under_replicated == ("b",))
        world.cluster.bookies["d"] = MemoryBookie("d")
        await changed(writer)
        await append(writer, [b"after"])
        assert writer.under_replicated == ()
        assert writer.metadata.last_fragment.ensemble == ("a", "d", "c")
        await check_copies(world, writer, but="b")
        assert world.client._change_slots._waiting == {}


async def test_a_bookie_that_is_well_again_is_not_in_quarantine_anew_when_its_old_place_is_given_away() -> None:
    async with ledger_world(settings=QUICK) as world:
        writer = await fresh_loss(world)
        await append(writer, [b"y"])
        await wait_until(lambda: writer.under_replicated == ("b",))
        fail(world, "b", "none")
        world.placement._quarantines.clear()  # as if it were over
        world.cluster.bookies["d"] = MemoryBookie("d")
        await changed(writer)
        assert world.placement.quarantined() == []


async def test_one_spare_for_two_failed_bookies_is_taken_at_once_and_the_other_later() -> None:
    async with ledger_world(*"abcd", settings=QUICK) as world:
        writer = await world.create_on("abc", ack_quorum=1)
        fail(world, "b", "io-error")
        fail(world, "c", "io-error")
        await append(writer, [b"x"])
        await wait_until(lambda: "d" in writer.metadata.last_fragment.ensemble and len(writer.under_replicated) == 1)
        world.cluster.bookies["e"] = MemoryBookie("e")
        await wait_until(lambda: not writer.under_replicated)
        assert set(writer.metadata.last_fragment.ensemble) == {"a", "d", "e"}


async def test_a_quarantined_spare_is_taken_only_by_a_ledger_without_quorum() -> None:
    async with ledger_world(*"abcd", settings=QUICK) as world:
        with_quorum, without = await world.create_on("abc"), await world.create_on("abc", ack_quorum=3)
        world.placement.quarantine("d")
        fail(world, "b", "io-error")
        await append(with_quorum, [b"y"])
        await append(without, [b"y"])
        assert "d" in without.metadata.last_fragment.ensemble
        assert len(with_quorum.metadata.fragments) == 1


async def test_a_quarantined_spare_is_taken_at_once_when_it_came_back() -> None:
    async with ledger_world(*"abcd", settings=QUICK.model_copy(update={"ensemble_retry_s": 60.0})) as world:
        world.placement.quarantine("d")
        writer = await fresh_loss(world)
        await append(writer, [b"y"])
        await wait_until(lambda: writer.under_replicated == ("b",))
        world.client.on_bookie_back("d")
        await changed(writer)
        assert writer.metadata.last_fragment.ensemble == ("a", "d", "c")


async def test_a_ledger_that_lacked_copies_for_long_takes_a_quarantined_spare_and_each_but_once() -> None:
    settings = QUICK.model_copy(update={"quarantined_spare_after_s": 0.3})
    async with ledger_world(*"abcd", settings=settings) as world:
        world.placement.quarantine("d")
        writer = await fresh_loss(world)
        await append(writer, [b"y"])
        await wait_until(lambda: writer.under_replicated == ("b",))
        short_since = writer._changer._short_since
        assert short_since is not None
        await changed(writer)
        assert asyncio.get_running_loop().time() - short_since >= 0.3
        assert writer.metadata.last_fragment.ensemble == ("a", "d", "c")
        assert writer._changer._short_since is None
        fail(world, "d", "io-error")
        await append(writer, [b"z"])
        await wait_until(lambda: writer.under_replicated == ("d",))
        fail(world, "b", "none")
        fail(world, "d", "none")
        await asyncio.sleep(0.5)  # longer than it waits before it takes anybody
        assert len(writer.metadata.fragments) == 2, "who left never comes back"


# Others who change the record


@pytest.mark.parametrize("state", ["IN_RECOVERY", "CLOSED"])
@pytest.mark.parametrize("step", ["before the change", "while it is on its way", "after it"])
async def test_a_recoverer_wins_at_whatever_step_it_comes(state: str, step: str) -> None:
    """R4, L5: what was confirmed is in the closed ledger, and the writer confirms nothing after it."""
    async with ledger_world(*"abcde", settings=QUICK, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        other = world.another_client(QUICK)

        async def take_over() -> None:
            if state == "CLOSED":
                await other.recover(writer.ledger_id)
            else:
                await set_in_recovery(world, writer.ledger_id)

        if step == "before the change":
            await take_over()
        pending = append(writer, [b"y"])
        if step == "while it is on its way":
            world.store.hang = True
            await wait_until(lambda: writer._core.is_changing)
            await take_over()
            world.store.hang = False
        if step == "after it":
            await pending
            await changed(writer)
            await take_over()
            fail(world, "c", "io-error")
            pending = append(writer, [b"z"])
        outcome = (await asyncio.gather(pending, return_exceptions=True))[0]
        await wait_until(lambda: writer.state is WriterPhase.FAILED, what="the writer to notice")
        assert isinstance(writer.failure, LedgerFencedError)
        end = await other.recover(writer.ledger_id)
        if not isinstance(outcome, LedgerError):
            assert end.last_entry_id >= outcome.last_entry_id, "acknowledged, so it is in"
        await other.aclose()


async def set_in_recovery(world: LedgerWorld, ledger_id: int) -> None:
    """By another process, past the faults of ours."""
    records = ledger_records(MemoryStore(world.tree))
    found = await records.get(ledger_id)
    assert found is not None
    await records.replace(ledger_id, in_recovery(found.record), found.version)


async def test_a_deleted_ledger_is_not_brought_back_by_a_change() -> None:
    async with ledger_world(*"abcd", settings=QUICK) as world:
        writer = await fresh_loss(world, ack_quorum=3)
        await world.records.delete(writer.ledger_id, None)
        with pytest.raises(NoSuchLedgerError):
            await append(writer, [b"y"])


# Ending while a change is under way


async def stuck_change(world: LedgerWorld, proposed: bool = True) -> LedgerWriter:
    """A writer whose change hangs in metadata, with three entries that a and c confirmed meanwhile."""
    writer = await fresh_loss(world)
    world.store.hang = True
    for n in range(3):
        await append(writer, [b"%d" % n])
    await wait_until(lambda: writer._changer is not None and (writer._changer.proposed is not None) == proposed)
    return writer


@pytest.mark.parametrize("is_applied", [False, True])
async def test_close_abandons_a_change_and_is_right_either_way(is_applied: bool) -> None:
    """The one change of metadata ends before the other begins; newcomers that metadata names get what they must have."""
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        world.store.hang_after = is_applied
        world.store.hang = not is_applied
        for n in range(3):
            await append(writer, [b"%d" % n])
        await wait_until(lambda: writer._changer is not None and writer._changer.proposed is not None)
        closes = [asyncio.create_task(writer.close()) for _ in range(3)]
        await asyncio.sleep(0)
        world.store.hang = world.store.hang_after = False
        assert await asyncio.gather(*closes) == [ClosedLedger(3, 4)] * 3
        record = await world.record(writer.ledger_id)
        assert len(record.fragments) == 1 + is_applied
        await check_copies(world, writer, but="b")
        await wait_until(lambda: all(s.lanes == 0 for s in world.client.statistics().values()))
        assert world.client._change_slots.kept_bytes.used_bytes == 0


async def test_closing_the_client_while_changes_hang_leaves_nothing() -> None:
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await stuck_change(world)
        pending = append(writer, [b"z"])
        await world.client.aclose()
        await asyncio.gather(pending, return_exceptions=True)
        assert world.client._change_slots.kept_bytes.used_bytes == 0
        assert all(s.waiting_bytes == s.lanes == 0 for s in world.client.statistics().values())


async def test_a_writer_that_is_given_up_after_a_close_that_failed_leaves_nothing() -> None:
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await stuck_change(world)
        world.store.hang, world.store.refuse = False, 1_000_000
        with pytest.raises(StoreUnavailableError):
            await writer.close()
        assert world.client._change_slots.kept_bytes.used_bytes > 0, "for a close that succeeds"
        await writer.aclose()
        assert world.client._change_slots.kept_bytes.used_bytes == 0


async def test_a_writer_that_is_given_up_waits_for_no_spare() -> None:
    async with ledger_world(settings=QUICK) as world:
        writer = await fresh_loss(world)
        await append(writer, [b"y"])
        await wait_until(lambda: writer.under_replicated == ("b",) and not writer._core.is_changing)
        assert world.client.ensemble_change_statistics().ledgers_waiting == 1
        await writer.aclose()
        assert world.client.ensemble_change_statistics().ledgers_waiting == 0


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("how", ["close", "aclose"])
async def test_ending_at_every_turn_of_a_change_leaves_nothing(turns: int, how: str) -> None:
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        pending = [append(writer, [b"%d" % n]) for n in range(3)]
        await wait_until(lambda: writer._core.is_changing or len(writer.metadata.fragments) > 1)
        for _ in range(turns):
            await asyncio.sleep(0)
        confirmed = writer.last_add_confirmed
        if how == "close":
            end = await writer.close()
            assert end.last_entry_id >= confirmed
            await check_copies(world, writer, but="b")
        else:
            await writer.aclose()
            end = await world.another_client().recover(writer.ledger_id)
            assert end.last_entry_id >= confirmed
        outcomes = await asyncio.gather(*pending, return_exceptions=True)
        acknowledged = [outcome.last_entry_id for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert max(acknowledged, default=-1) <= end.last_entry_id
        await wait_until(lambda: all(s.lanes == 0 for s in world.client.statistics().values()))
        assert world.client._change_slots.kept_bytes.used_bytes == 0
        assert len(writer._tasks) == 0


async def test_a_close_that_others_forestalled_gives_back_what_was_kept() -> None:
    """Newcomers of a change in doubt wait for entries; the ledger is recovery's by now, and nobody will send them any."""
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await stuck_change(world)
        kept = world.client._change_slots.kept_bytes
        assert kept.used_bytes > 0
        await set_in_recovery(world, writer.ledger_id)
        world.store.hang = False
        with pytest.raises(LedgerFencedError):
            await writer.close()
        assert kept.used_bytes == 0


async def test_a_writer_that_is_fenced_during_a_change_gives_back_what_was_kept() -> None:
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await stuck_change(world)
        kept = world.client._change_slots.kept_bytes
        assert kept.used_bytes > 0
        for bookie in "ac":
            world.cluster[bookie].fence(writer.ledger_id)
        with pytest.raises(LedgerFencedError):
            await append(writer, [b"late"])
        assert kept.used_bytes == 0


async def test_a_close_between_two_attempts_gives_back_what_was_kept() -> None:
    """The first attempt failed for certain when the quorum was gone, so there is no proposal, and the next has not begun."""
    settings = QUICK.model_copy(update={"metadata_retry_s": 5.0, "metadata_timeout_s": 5.0})
    async with ledger_world(*"abcd", settings=settings, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        world.store.delay_s = 0.1
        world.store.lose_session_at_write = True
        for n in range(3):
            await append(writer, [b"%d" % n])
        fail(world, "c", "io-error")
        pending = append(writer, [b"lost"])
        await wait_until(lambda: writer._changer is not None and writer._changer._last_error is not None)
        kept = world.client._change_slots.kept_bytes
        assert writer._changer is not None
        assert writer._changer.proposed is None
        assert kept.used_bytes > 0
        world.store.lose_session_at_write = False
        await writer.close()
        assert kept.used_bytes == 0
        await asyncio.gather(pending, return_exceptions=True)


# Memory, and many ledgers at once


async def test_when_too_much_waits_for_the_newcomers_they_are_dropped_and_the_next_change_takes_others() -> None:
    settings = QUICK.model_copy(update={"channel_window_bytes": 2_000, "metadata_timeout_s": 5.0})
    async with ledger_world(*"abcde", settings=settings, store_of=FaultyStore) as world:
        writer = await fresh_loss(world)
        world.store.delay_s = 1.5  # the change outlasts the appends
        for n in range(50):
            await append(writer, [b"%d" % n * 50])
        kept = world.client._change_slots.kept_bytes
        assert kept.used_bytes <= 2_200
        world.store.delay_s = 0.0
        await wait_until(lambda: kept.overflows == 1)
        await wait_until(lambda: len(writer.metadata.fragments) >= 3 and not writer._core.is_changing)
        await append(writer, [b"after"])
        first, second, third = writer.metadata.fragments
        assert first.ensemble == ("a", "b", "c")
        assert {second.ensemble[1], third.ensemble[1]} == {"d", "e"}
        assert writer.under_replicated == ()
        assert kept.used_bytes == 0
        assert world.client.ensemble_change_statistics() == EnsembleChangeStatistics(2, 1, 0, 0, 1)
        lanes = {bookie: channel.lanes for bookie, channel in world.client.statistics().items()}
        assert {bookie for bookie, count in lanes.items() if count} == set(third.ensemble), "none to those let go"


@pytest.mark.deadline(60)
async def test_a_death_that_hits_hundreds_of_ledgers_changes_so_many_at_once_in_the_order_of_asking() -> None:
    settings = QUICK.model_copy(update={"ensemble_changes": 8, "metadata_timeout_s": 5.0})
    async with ledger_world(*"abcd", settings=settings, store_of=FaultyStore) as world:
        writers = [await world.create_on("abc") for _ in range(300)]
        fail(world, "b", "io-error")
        world.store.writes.clear()
        world.store.delay_s = 0.002
        world.store.most_at_once = 0
        await asyncio.gather(*(append(writer, [b"x"]) for writer in writers))
        await wait_until(lambda: all(not w._core.is_changing and len(w._tasks) == 0 for w in writers))
        assert world.store.most_at_once <= 8
        changed_ids = [int(key.rsplit("/", 3)[-1]) for key in world.store.writes]
        assert changed_ids == [writer.ledger_id % 10_000 for writer in writers], "first come, first served"


@pytest.mark.deadline(60)
async def test_while_metadata_is_away_one_ledger_asks_for_all() -> None:
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writers = [await world.create_on("abc") for _ in range(50)]
        fail(world, "b", "io-error")
        world.store.refuse = 1_000_000
        await asyncio.gather(*(append(writer, [b"x"]) for writer in writers))
        await wait_until(lambda: all(writer.under_replicated for writer in writers))
        world.store.writes.clear()
        await asyncio.sleep(0.2)
        assert 2 <= len(world.store.writes) <= 40, "about one write per pause of 10 ms, not one per ledger"
        world.store.refuse = 0
        await wait_until(lambda: not any(writer.under_replicated for writer in writers))


async def test_a_change_in_force_that_the_session_s_end_hid_is_not_taken_for_refused() -> None:
    """L3: entry 1 is on a and b, and b has left by metadata; b's copy must not make it confirmed."""
    async with ledger_world(*"abcd", settings=QUICK, store_of=FaultyStore) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"x"])
        await wait_until(lambda: all(world.cluster[b].ids(writer.ledger_id) == [0] for b in "abc"))
        world.cluster["a"].hang = world.cluster["c"].hang = True  # b alone takes entry 1, then dies
        pending = append(writer, [b"y"])
        await wait_until(lambda: world.cluster["b"].ids(writer.ledger_id) == [0, 1])
        await wait_until(lambda: writer._core.acked_through("b") == 1)
        world.store.lose_answers = world.store.lose_session = 1
        world.store.refuse_after_loss = 1_000_000
        world.cluster["b"].refuse = Status.IO_ERROR
        world.store.writes.clear()
        behind = append(writer, [b"z"])
        await wait_until(lambda: len(world.store.writes) > 1, what="the change, and another attempt")
        found = await ledger_records(MemoryStore(world.tree)).get(writer.ledger_id)
        assert found is not None
        assert found.record.last_fragment.ensemble == ("a", "d", "c")
        world.cluster["a"].hang = False
        await wait_until(lambda: writer._core.acked_through("a") >= 1)
        await asyncio.sleep(0.02)
        assert writer.last_add_confirmed == 0, "only a holds entry 1 of those whom metadata names"
        world.store.refuse = world.store.refuse_after_loss = 0
        await asyncio.gather(pending, behind)
        assert fragments_of(writer)[-1] == (1, "adc")
        world.cluster["c"].hang = False


async def test_a_ledger_without_quorum_does_not_wait_for_ever_behind_others() -> None:
    settings = QUICK.model_copy(update={"ensemble_changes": 1, "metadata_timeout_s": 5.0, "ensemble_change_timeout_s": 0.1})
    async with ledger_world(*"abcd", settings=settings, store_of=FaultyStore) as world:
        first, second = await world.create_on("abc"), await world.create_on("abc", ack_quorum=3)
        fail(world, "b", "io-error")
        world.store.hang = True
        await append(first, [b"x"])
        await wait_until(lambda: len(world.store.writes) > 0 and first._core.is_changing)
        with pytest.raises(LedgerWriteError, match="too many ledgers wait"):
            await append(second, [b"x"])
        await append(first, [b"y"])
        assert first.last_add_confirmed == 1


async def test_a_ledger_with_a_quorum_waits_for_its_turn_however_long() -> None:
    settings = QUICK.model_copy(update={"ensemble_changes": 1, "ensemble_change_timeout_s": 0.05})
    async with ledger_world(*"abcd", settings=settings) as world:
        slots = world.client._change_slots
        await slots.take()
        writer = await fresh_loss(world)
        until = asyncio.get_running_loop().time() + 0.2
        while asyncio.get_running_loop().time() < until:
            await append(writer, [b"y"])
            await asyncio.sleep(0.01)
        assert writer._core.is_changing
        slots.give_back()
        await changed(writer)
        await append(writer, [b"z"])


async def test_the_patience_of_a_ledger_begins_when_it_loses_its_quorum() -> None:
    settings = QUICK.model_copy(update={"metadata_timeout_s": 0.02, "ensemble_change_timeout_s": 0.5})
    async with ledger_world(*"abcde", settings=settings, store_of=FaultyStore) as world:
        writer = await stuck_change(world)
        await asyncio.sleep(0.6)
        fail(world, "c", "io-error")
        pending = append(writer, [b"z"])
        await wait_until(lambda: not writer._core.has_quorum)
        await asyncio.sleep(0.03)
        assert not pending.done()
        world.store.hang = False
        await pending
