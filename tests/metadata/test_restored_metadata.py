"""The time after a restore: no ledger id is given out twice, and an operator ends it."""

from __future__ import annotations

import pytest

from cepheid_metadata import (
    BookieCookie,
    BookieRegistration,
    LedgerIds,
    MemoryStore,
    MemoryTree,
    RestoredMetadata,
    RestoreNotReportedError,
    available_bookies,
    bookie_cookies,
    keys,
    report_ledgers,
    restored_record,
)
from cepheid_metadata.restored_metadata import (
    ID_MARGIN,
    BookieNotMissingError,
    NothingRestoredError,
    confirm_restore,
    give_up_bookies,
    raise_counter,
    restored_view,
)
from cepheid_metadata.store import MetadataStore

pytestmark = pytest.mark.virtual_time


async def restored_store(*bookies: str) -> MemoryStore:
    """Metadata of a backup in which the id counter stood at 1."""
    store = MemoryStore(MemoryTree())
    restored = RestoredMetadata(backup_sha256="x", backup_created_at_ms=1, restored_at_ms=2)
    await restored_record(store).create(None, restored)
    await raise_counter(store, 1)
    for bookie in bookies:
        cookie = BookieCookie(layout_version=1, bookie_id=bookie, incarnation="i", cluster_id="c", directories={})
        await bookie_cookies(store).create(bookie, cookie)
    return store


async def report(store: MetadataStore, bookie: str, largest: int) -> bool:
    return await report_ledgers(store, bookie, "i", largest, 3, 5)


async def test_no_ledger_id_is_given_out_before_each_bookie_said_which_are_in_use() -> None:
    store = await restored_store("b1", "b2")
    ids = LedgerIds(store)
    with pytest.raises(RestoreNotReportedError, match="b1, b2 did not report yet which ledger ids are in use"):
        await ids.take()
    assert await report(store, "b1", 7_000)
    with pytest.raises(RestoreNotReportedError, match="and b2 did not report"):
        await ids.take()
    assert await report(store, "b2", 12)
    assert await ids.take() == 7_001 + ID_MARGIN


async def test_a_bookie_that_the_backup_does_not_know_is_waited_for_when_it_runs() -> None:
    store = await restored_store()
    registration = BookieRegistration(bookie_id="b9", incarnation="i", addresses={})
    await available_bookies(store).create("b9", registration, ephemeral=True)
    with pytest.raises(RestoreNotReportedError, match="b9 did not report"):
        await LedgerIds(store).take()


async def test_a_bookie_reports_once_so_that_new_ledgers_do_not_raise_the_counter_again_and_again() -> None:
    store = await restored_store("b1")
    await report(store, "b1", 10)
    first = await LedgerIds(store).take()
    await report(store, "b1", first)
    assert await LedgerIds(store, block=1).take() == first + 1_000


async def test_a_bookie_that_is_lost_is_given_up_by_its_name_and_counts_when_it_comes_back() -> None:
    store = await restored_store("b1", "b2")
    await report(store, "b1", 10)
    with pytest.raises(BookieNotMissingError, match="bookie b1 is not missing; missing are: b2"):
        await give_up_bookies(store, ["b1"], 6)
    await give_up_bookies(store, ["b2"], 6)
    await LedgerIds(store).take()
    await report(store, "b2", 1_000_000)
    assert await LedgerIds(store).take() > 1_000_000


async def test_a_bookie_that_runs_is_not_given_up() -> None:
    store = await restored_store("b1")
    registration = BookieRegistration(bookie_id="b1", incarnation="i", addresses={})
    await available_bookies(store).create("b1", registration, ephemeral=True)
    with pytest.raises(BookieNotMissingError, match="bookie b1 runs"):
        await give_up_bookies(store, ["b1"], 6)


async def test_a_restore_is_confirmed_once_and_only_when_no_bookie_is_missing() -> None:
    store = await restored_store("b1")
    with pytest.raises(RestoreNotReportedError):
        await confirm_restore(store)
    await report(store, "b1", 10)
    view = await restored_view(store)
    assert (view["missing"], view["reports"]["b1"]["largest_ledger_id"]) == ([], 10)
    await confirm_restore(store)
    assert not await store.exists(keys.RESTORED_KEY)
    counter = await store.get(keys.LEDGER_IDS_KEY)
    assert counter is not None
    assert b"restored" not in counter.value, "older releases read it again"
    with pytest.raises(NothingRestoredError):
        await confirm_restore(store)


async def test_a_report_that_comes_after_the_confirmation_leaves_nothing_behind() -> None:
    store = await restored_store("b1")
    await report(store, "b1", 10)

    class ConfirmedMeanwhile(MemoryStore):
        async def multi(self, ops):  # type: ignore[no-untyped-def]
            if await self.exists(keys.RESTORED_KEY):
                await confirm_restore(store)
            return await super().multi(ops)

    late = ConfirmedMeanwhile(store._tree)
    assert not await report(late, "b2", 20)
    assert not await store.exists(keys.RESTORED_KEY)
    assert await LedgerIds(store).take() > 20
