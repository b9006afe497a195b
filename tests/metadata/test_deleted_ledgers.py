from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from cepheid_metadata import (
    UNDELETED,
    BadVersionError,
    DeletedLedger,
    DeletedLedgers,
    Found,
    Fragment,
    InGrace,
    LedgerMetadata,
    LedgerState,
    MemoryStore,
    MemoryTree,
    deleted_ledger_records,
    keys,
    ledger_records,
)
from tests.metadata.store_harness import Harness

IDS = (7, 10**12 + 5)
HOUR_MS = 3_600_000


def closed(ledger_id: int, last: int = 9) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=ledger_id,
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        state=LedgerState.CLOSED,
        fragments=(Fragment(first_entry_id=0, ensemble=("b1",)),),
        last_entry_id=last,
        length_bytes=100,
        creation_token=1,
        created_at_ms=5,
        custom={"topic": "t"},
    )


async def made(store: MemoryStore, ledger: LedgerMetadata) -> Found[LedgerMetadata]:
    return Found(ledger, await ledger_records(store).create(ledger.ledger_id, ledger))


async def test_a_deleted_ledger_can_be_brought_back_until_it_is_purged(harness: Harness) -> None:
    async with harness.session() as store:
        deleted, living = DeletedLedgers(store), ledger_records(store)
        for ledger_id in IDS:
            await deleted.delete(await made(store, closed(ledger_id)), 1000, HOUR_MS)
            assert await living.get(ledger_id) is None
            assert await deleted.is_kept(ledger_id)
        assert await deleted.listing() == set(IDS)
        assert await deleted.purge(1000 + HOUR_MS - 1) == []
        back = await deleted.undelete(IDS[0], 2000)
        assert back == closed(IDS[0]).replace(custom={"topic": "t", UNDELETED: "2000"})
        found = await living.get(IDS[0])
        assert found is not None
        assert found.record == back
        assert await deleted.purge(1000 + HOUR_MS) == [IDS[1]]
        assert not await deleted.is_kept(IDS[1])
        assert await deleted.undelete(IDS[1], 3000) is None
        assert await deleted.listing() == {IDS[0]}


async def test_a_deleted_ledger_is_read_when_it_is_first_seen_and_when_its_time_is_over() -> None:
    store = MemoryStore(MemoryTree())
    deleted = DeletedLedgers(store)
    await deleted.delete(await made(store, closed(7)), 1000, HOUR_MS)
    with mock.patch.object(store, "get", wraps=store.get) as get:
        for now_ms in (2000, 3000, 4000):
            assert await deleted.purge(now_ms) == []
        assert get.call_count == 1
        assert deleted.in_grace == {7: InGrace(1000 + HOUR_MS, 100)}
        assert await deleted.purge(1000 + HOUR_MS) == [7]
        assert get.call_count == 3, "its record, and the page that remembers it"
    assert deleted.in_grace == {}


async def test_a_ledger_that_is_given_up_is_purged_before_its_time() -> None:
    store = MemoryStore(MemoryTree())
    deleted = DeletedLedgers(store)
    for ledger_id in (7, 8):
        await deleted.delete(await made(store, closed(ledger_id)), 1000, HOUR_MS)
    assert await deleted.purge(2000) == []
    assert await deleted.purge(2000, give_up=[8, 9]) == [8]
    assert await deleted.listing() == {7}


async def test_who_held_a_version_from_before_the_deletion_cannot_change_what_came_back(harness: Harness) -> None:
    async with harness.session() as store:
        deleted, living = DeletedLedgers(store), ledger_records(store)
        before = closed(7).replace(state=LedgerState.OPEN, last_entry_id=None, length_bytes=None)
        opened = await made(store, before)
        found = Found(closed(7), await living.replace(7, closed(7), opened.version))
        versions = {opened.version, found.version}
        for _ in range(3):
            await deleted.delete(found, 1000, HOUR_MS)
            assert await deleted.undelete(7, 2000) is not None
            for version in sorted(versions):
                with pytest.raises(BadVersionError):
                    await living.replace(7, before, version)
            again = await living.get(7)
            assert again is not None
            found = again
            assert found.version not in versions
            versions.add(found.version)


async def test_a_ledger_whose_deletion_remembered_no_version_comes_back(harness: Harness) -> None:
    async with harness.session() as store:
        record = DeletedLedger(ledger=closed(7), deleted_at_ms=1000, purge_after_ms=1000 + HOUR_MS)
        assert record.format == 1
        await deleted_ledger_records(store).create(7, record)
        assert await DeletedLedgers(store).undelete(7, 2000) is not None
        assert await ledger_records(store).get(7) is not None


async def test_an_empty_ledger_and_one_without_grace_are_gone_at_once() -> None:
    store = MemoryStore(MemoryTree())
    deleted = DeletedLedgers(store)
    await deleted.delete(await made(store, closed(1, last=-1)), 1000, HOUR_MS)
    await deleted.delete(await made(store, closed(2)), 1000, 0)
    assert await deleted.listing() == set()


async def test_a_ledger_that_is_gone_for_good_is_remembered_however_it_went(harness: Harness) -> None:
    async with harness.session() as store:
        deleted = DeletedLedgers(store)
        for ledger_id in (1, 2, 3, 8191, 8192, IDS[1]):
            grace_ms = 0 if ledger_id == 3 else HOUR_MS
            await deleted.delete(await made(store, closed(ledger_id)), 1000, grace_ms)
        await deleted.undelete(2, 2000)
        assert await deleted.were_purged(range(1, 9000)) == {3}, "the others can still be brought back"
        assert await deleted.give_up(1)
        await deleted.purge(1000 + HOUR_MS)
        assert await deleted.were_purged([*range(9000), IDS[1], IDS[1] + 1]) == {1, 3, 8191, 8192, IDS[1]}


async def test_a_page_of_purged_ledgers_that_cannot_be_used_delays_no_deletion() -> None:
    store = MemoryStore(MemoryTree())
    deleted = DeletedLedgers(store)
    await store.create(keys.purged_ledgers_key(0), b"garbage")
    await deleted.delete(await made(store, closed(7)), 1000, 0)
    assert await deleted.were_purged([7]) == {7}, "it is replaced"
    await store.put(keys.purged_ledgers_key(0), b'{"format": 9}', 1)
    await deleted.delete(await made(store, closed(8)), 1000, 0)
    assert await deleted.were_purged([7, 8]) == set()
    assert not await deleted.is_kept(8)


async def test_of_many_pages_of_purged_ledgers_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_metadata.deleted_ledgers._MAX_PAGES", 2)
    store = MemoryStore(MemoryTree())
    deleted = DeletedLedgers(store)
    ids = [10**5, 10**6, 10**7, 7, 10**6 + 1]
    for ledger_id in ids:
        await deleted.delete(await made(store, closed(ledger_id)), 1000, 0)
    assert await deleted.were_purged(ids) == {10**6, 10**6 + 1, 10**7}
    assert not await deleted.is_kept(7)


class Racing(MemoryStore):
    """Runs `between` after the first answer to `exists`, or before the first `multi`."""

    between: Callable[[], object] | None = None

    async def exists(self, key: str) -> bool:
        answer = await super().exists(key)
        await self._run_between()
        return answer

    async def multi(self, ops):  # type: ignore[no-untyped-def]
        await self._run_between()
        return await super().multi(ops)

    async def _run_between(self) -> None:
        if self.between is not None:
            between, self.between = self.between, None
            await between()  # type: ignore[misc]


async def test_a_ledger_that_comes_back_while_it_is_looked_for_is_found() -> None:
    tree = MemoryTree()
    store, other = Racing(tree), MemoryStore(tree)
    await DeletedLedgers(other).delete(await made(other, closed(7)), 1000, HOUR_MS)
    store.between = lambda: DeletedLedgers(other).undelete(7, 2000)
    assert await DeletedLedgers(store).is_kept(7)


async def test_of_two_who_bring_it_back_or_purge_it_one_wins() -> None:
    tree = MemoryTree()
    store, other = Racing(tree), MemoryStore(tree)
    await DeletedLedgers(other).delete(await made(other, closed(7)), 1000, HOUR_MS)
    store.between = lambda: DeletedLedgers(other).purge(10**15)
    assert await DeletedLedgers(store).undelete(7, 2000) is None
    assert await DeletedLedgers(other).listing() == set()
