"""A backup that is read while metadata changes, and what a restore makes of it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cepheid_metadata import (
    UNDELETED,
    BookieRegistration,
    BrokerRegistration,
    BundleOwner,
    Chain,
    ChainLedger,
    CorruptRecordError,
    CursorRecord,
    DeletedLedgers,
    Found,
    LedgerIds,
    LedgerMetadata,
    LedgerState,
    MemoryStore,
    MemoryTree,
    MetadataStore,
    NewerFormatError,
    OffloadedLedger,
    PageLimits,
    Position,
    StoredChain,
    UnfinishedRestoreError,
    Versioned,
    available_bookies,
    broker_records,
    bundle_owners,
    chain_records,
    cluster_identity,
    cursor_records,
    found_cluster,
    keys,
    ledger_records,
    read_chain,
)
from cepheid_metadata.backup import MetadataBackup
from cepheid_metadata.backup_format import BackupDamagedError, BackupSummary, backup_entries, check_backup
from cepheid_metadata.chain_pages import changes, page_deletes, split
from cepheid_metadata.restore import LEDGER_VERSION_MARGIN, RestoreRefusedError, restore_metadata
from cepheid_metadata.restored_metadata import ID_MARGIN
from cepheid_ports import Ports
from cepheid_wire import NamespaceName, TopicName
from tests.metadata.store_harness import Harness
from tests.metadata.test_deleted_ledgers import closed

TOPIC = TopicName("persistent", NamespaceName("public", "default"), "orders")
INCARNATION = "c0ffee"
HOUR_MS = 3_600_000
PAGES = PageLimits(record_ledgers=3, page_ledgers=2)


def ledger(ledger_id: int, *, use: str = "entries", epoch: int = 1, is_open: bool = False) -> LedgerMetadata:
    custom = {"topic": str(TOPIC), "use": use, "incarnation": INCARNATION, "epoch": str(epoch)}
    made = closed(ledger_id).replace(custom=custom)
    return made.replace(state=LedgerState.OPEN, last_entry_id=None, length_bytes=None) if is_open else made


def chain(*ended: int, last: int, deletions: tuple[int, ...] = ()) -> Chain:
    ledgers = (*(ChainLedger(ledger_id=one, entries=10) for one in ended), ChainLedger(ledger_id=last))
    return Chain(incarnation=INCARNATION, epoch=1, ledgers=ledgers, deletions=deletions)


CURSOR = CursorRecord(
    chain_incarnation=INCARNATION,
    mark_delete=Position(1, 3),
    cursor_ledger_id=3,
    created_at_ms=1,
    subscription_properties={"ö": "ü"},
)


async def fill(store: MetadataStore) -> None:
    """A topic with ledgers 1 (ended), 2 (open) and 3 (of its cursor), and a deleted ledger 4."""
    await found_cluster(store, "test", Ports())
    ids = LedgerIds(store)
    for ledger_id in (1, 2, 3, 4):
        assert await ids.take() == ledger_id
        record = ledger(ledger_id, use="cursors" if ledger_id == 3 else "entries", is_open=ledger_id == 2)
        await ledger_records(store).create(ledger_id, record)
    version = await chain_records(store).create(TOPIC, chain(1, last=2))
    await chain_records(store).replace(TOPIC, chain(1, last=2, deletions=(9,)), version)
    await store.create(keys.incarnation_key(INCARNATION), b"orders")
    await cursor_records(store).create((TOPIC, "billing"), CURSOR)
    await store.create(keys.schemas_key(TOPIC), b'{"history": 1}')
    await store.create(keys.schema_part_key(TOPIC, "f00d", 0), b"\x00\xff")
    await DeletedLedgers(store).delete(Found(ledger(4), 0), 1000, HOUR_MS)


async def fill_pages(store: MetadataStore) -> None:
    """The topic gets 12 more ledgers, its chain gets pages. The first of all is only in an object store."""
    found = await read_chain(store, TOPIC)
    assert found is not None
    for ledger_id in range(10, 22):
        await ledger_records(store).create(ledger_id, ledger(ledger_id))
    more = tuple(ChainLedger(ledger_id=one, entries=10) for one in range(10, 22))
    gone = ChainLedger(ledger_id=5, entries=10)
    copy = OffloadedLedger(url="s3://b/5", started_at_ms=1, complete=True, on_bookies=False)
    ended = tuple(one.replace(entries=10) if one.is_open else one for one in found.record.ledgers)
    after = found.record.replace(ledgers=(gone, *ended, *more), offloaded={5: copy})
    before = StoredChain(found.record, found.record)
    await store.multi(changes(keys.chain_key(TOPIC), found.version, before, split(after, before, PAGES)))


async def backup_of(store: MetadataStore) -> list[bytes]:
    return [line async for line in MetadataBackup(store, Ports()).lines()]


async def restored(lines: list[bytes], store: MetadataStore) -> BackupSummary:
    summary = check_backup(lines)
    await restore_metadata(store, summary, backup_entries(lines), Ports())
    return summary


def values(lines: list[bytes]) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in backup_entries(lines)}


async def everything(store: MetadataStore) -> dict[str, Versioned]:
    found, pending = {}, ["/"]
    while pending:
        key = pending.pop()
        if key != "/" and (value := await store.get(key)) is not None and value.value:
            found[key] = value
        pending += [f"{key.rstrip('/')}/{name}" for name in await store.children(key)]
    return found


async def test_a_backup_comes_back_in_an_empty_store_without_what_belongs_to_running_processes(harness: Harness) -> None:
    source = MemoryStore(MemoryTree())
    await fill(source)
    persistent = await everything(source)
    await available_bookies(source).create(
        "b1", BookieRegistration(bookie_id="b1", incarnation="i", addresses={"grpc": "b1:1"}), ephemeral=True
    )
    await broker_records(source).create("x", BrokerRegistration(broker_id="x", addresses={}, started_at_ms=1), ephemeral=True)
    await bundle_owners(source).create(
        ("public", "default", "0x0_0x1"), BundleOwner(broker_id="x", incarnation="i", epoch=1, addresses={}), ephemeral=True
    )
    lines = await backup_of(source)
    async with harness.session() as store:
        summary = await restored(lines, store)
        found = await everything(store)
    assert (summary.cluster, summary.topics, summary.ledgers, summary.missing_ledgers) == ("test", 1, 3, ())
    assert found.pop(keys.RESTORED_KEY)
    assert json.loads(found.pop(keys.LEDGER_IDS_KEY).value)["next_ledger_id"] == 1_001 + ID_MARGIN
    del persistent[keys.LEDGER_IDS_KEY]
    assert {key: one.value for key, one in found.items()} == {key: one.value for key, one in persistent.items()}
    # A living process that holds an old version cannot overwrite what came back.
    assert found[keys.incarnation_key(INCARNATION)].version > persistent[keys.incarnation_key(INCARNATION)].version
    assert found[keys.ledger_key(2)].version == LEDGER_VERSION_MARGIN
    assert found[keys.ledger_key(1)].version == persistent[keys.ledger_key(1)].version


class BusyStore(MemoryStore):
    """`before` runs once, when this key is read for the first time: what others write at this moment."""

    def __init__(self, tree: MemoryTree, key: str, before: Callable[[MemoryStore], Awaitable[Any]]) -> None:
        super().__init__(tree)
        self._key = key
        self._before: Callable[[MemoryStore], Awaitable[Any]] | None = before

    async def get(self, key: str) -> Versioned | None:
        if key == self._key and self._before is not None:
            before, self._before = self._before, None
            await before(MemoryStore(self._tree))
        return await super().get(key)


async def trim(store: MemoryStore) -> None:
    """Ledger 1 leaves the chain, and is deleted."""
    await chain_records(store).replace(TOPIC, chain(last=2, deletions=(1,)), 1)
    await DeletedLedgers(store).delete(Found(ledger(1), 0), 1000, HOUR_MS)


async def roll_over(store: MemoryStore) -> None:
    """Ledger 2 ends, and ledger 5 follows."""
    await ledger_records(store).create(5, ledger(5, is_open=True))
    await ledger_records(store).replace(2, ledger(2), 0)
    await chain_records(store).replace(TOPIC, chain(1, 2, last=5), 1)


async def new_cursor_ledger(store: MemoryStore) -> None:
    """The cursor's state moves from ledger 3 to ledger 6, and 3 is deleted."""
    await ledger_records(store).create(6, ledger(6, use="cursors", is_open=True))
    await cursor_records(store).replace((TOPIC, "billing"), CURSOR.replace(cursor_ledger_id=6), 0)
    await chain_records(store).replace(TOPIC, chain(1, last=2, deletions=(3,)), 1)
    await ledger_records(store).delete(3, None)


@pytest.mark.virtual_time
@pytest.mark.parametrize("key", [keys.incarnation_key(INCARNATION), keys.ledger_key(1), keys.ledger_key(2), keys.ledger_key(3)])
@pytest.mark.parametrize("change", [trim, roll_over, new_cursor_ledger])
async def test_each_ledger_that_a_chain_or_a_cursor_of_the_backup_names_is_in_the_backup(
    key: str, change: Callable[[MemoryStore], Awaitable[Any]]
) -> None:
    tree = MemoryTree()
    await fill(MemoryStore(tree))
    lines = await backup_of(BusyStore(tree, key, change))
    found = values(lines)
    record = Chain.decode(found[keys.chain_key(TOPIC)], "chain")
    cursor = CursorRecord.decode(found[keys.cursor_key(TOPIC, "billing")], "cursor")
    assert cursor.cursor_ledger_id is not None
    for ledger_id in (*(one.ledger_id for one in record.ledgers), cursor.cursor_ledger_id):
        assert keys.ledger_key(ledger_id) in found
    for one in record.ledgers[:-1]:
        assert LedgerMetadata.decode(found[keys.ledger_key(one.ledger_id)], "ledger").is_closed
    living = {ledger_id for name in found if (ledger_id := keys.ledger_id_of(name)) is not None}
    assert not [ledger_id for ledger_id in living if keys.deleted_ledger_key(ledger_id) in found]
    assert check_backup(lines).missing_ledgers == ()


@pytest.mark.virtual_time
async def test_a_ledger_that_was_created_after_its_chain_was_read_is_kept_as_one_of_no_topic() -> None:
    tree = MemoryTree()
    await fill(MemoryStore(tree))
    await ledger_records(MemoryStore(tree)).create(8, ledger(8, epoch=0))  # left by an earlier opening: an orphan as before

    async def later(store: MemoryStore) -> None:
        await roll_over(store)
        await ledger_records(store).create(6, ledger(6, use="cursors", is_open=True))

    found = values(await backup_of(BusyStore(tree, keys.schemas_key(TOPIC), later)))
    assert [one.ledger_id for one in Chain.decode(found[keys.chain_key(TOPIC)], "chain").ledgers] == [1, 2]
    assert UNDELETED in LedgerMetadata.decode(found[keys.ledger_key(5)], "ledger").custom
    assert LedgerMetadata.decode(found[keys.ledger_key(8)], "ledger") == ledger(8, epoch=0)
    assert keys.ledger_key(6) not in found


@pytest.mark.virtual_time
async def test_a_ledger_that_the_cluster_itself_lacks_is_told_and_does_not_prevent_the_backup() -> None:
    store = MemoryStore(MemoryTree())
    await fill(store)
    await ledger_records(store).delete(1, None)
    assert check_backup(await backup_of(store)).missing_ledgers == (1,)


def _cut(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-2], lines[-2][:10]]


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda lines: [], "the backup is empty"),
        (lambda lines: lines[:-1], "ends after line"),
        (_cut, "cannot be read"),
        (lambda lines: [*lines[:3], *lines[4:]], "was changed: its checksum"),
        (lambda lines: [line.replace(b"c0ffee", b"c0ffed") for line in lines], "was changed: its checksum"),
        (lambda lines: [*lines, b"{}\n"], "comes after its last line"),
        (lambda lines: [b'{"a": 1}\n', *lines[1:]], "this is not a backup of metadata"),
    ],
)
async def test_a_backup_that_is_not_complete_and_unchanged_is_refused(
    damage: Callable[[list[bytes]], list[bytes]], error: str
) -> None:
    store = MemoryStore(MemoryTree())
    await fill(store)
    with pytest.raises(BackupDamagedError, match=error):
        check_backup(damage(await backup_of(store)))


def test_a_backup_of_a_newer_format_is_refused_by_that_name() -> None:
    with pytest.raises(NewerFormatError, match="the backup has format 2; this release reads format 1"):
        check_backup([b'{"cepheid_metadata_backup": 2}\n'])


@pytest.mark.virtual_time
async def test_a_store_that_is_not_empty_is_refused_and_nothing_is_written() -> None:
    source = MemoryStore(MemoryTree())
    await fill(source)
    lines = await backup_of(source)

    async def refusal(prepare: Callable[[MemoryStore], Awaitable[Any]]) -> str:
        store = MemoryStore(MemoryTree())
        await prepare(store)
        before = await everything(store)
        with pytest.raises(RestoreRefusedError) as refused:
            await restored(lines, store)
        assert await everything(store) == before
        return str(refused.value)

    async def registered(store: MemoryStore) -> None:
        await broker_records(store).create("b7", BrokerRegistration(broker_id="b7", addresses={}, started_at_ms=1), ephemeral=True)

    assert "holds the cluster 'other'" in await refusal(lambda store: found_cluster(store, "other", Ports()))
    assert "broker b7 is registered in this store: stop all brokers" in await refusal(registered)
    assert "has a record /tenants/t" in await refusal(lambda store: store.create("/tenants/t", b"{}"))


class EndsEarly(MemoryStore):
    """Takes so many groups of records, then the process dies."""

    def __init__(self, tree: MemoryTree, groups: int) -> None:
        super().__init__(tree)
        self._left = groups

    async def multi(self, ops: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ConnectionError("the restore was killed")
        return await super().multi(ops)


@pytest.mark.virtual_time
async def test_a_restore_that_was_cut_off_is_continued_by_the_same_backup_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_metadata.restore._GROUP_OPS", 3)
    source = MemoryStore(MemoryTree())
    await fill(source)
    lines = await backup_of(source)
    tree = MemoryTree()
    store = MemoryStore(tree)
    with pytest.raises(ConnectionError):
        await restored(lines, EndsEarly(tree, 2))
    assert await cluster_identity(store).get(None) is None, "no process starts on it"
    with pytest.raises(UnfinishedRestoreError):
        await found_cluster(store, "test", Ports())
    await store.create("/tenants/later", b"x")
    other = MemoryStore(MemoryTree())
    await found_cluster(other, "test", Ports())
    with pytest.raises(RestoreRefusedError, match="part of another backup"):
        await restored(await backup_of(other), store)
    await restored(lines, store)
    assert (await everything(store)).keys() >= (await everything(source)).keys()


async def test_the_pages_of_a_chain_and_the_ledgers_in_them_come_back() -> None:
    store, other = MemoryStore(MemoryTree()), MemoryStore(MemoryTree())
    await fill(store)
    await fill_pages(store)
    lines = await backup_of(store)
    summary = await restored(lines, other)
    assert (summary.topics, summary.missing_ledgers) == (1, ())
    before, after = await read_chain(store, TOPIC), await read_chain(other, TOPIC)
    assert before is not None
    assert after is not None
    assert after.record == before.record
    for each in after.record.ledgers[1:]:
        assert await ledger_records(other).exists(each.ledger_id)
    # An owner can go on: pages of a restored chain have the version that a keeper deletes.
    record = (await chain_records(other).get(TOPIC)).record  # type: ignore[union-attr]
    deletes = page_deletes(keys.chain_key(TOPIC), StoredChain(after.record, record))
    assert len(deletes) > 3
    await other.multi(deletes)


async def test_a_chain_whose_page_is_lost_is_kept_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    store, other = MemoryStore(MemoryTree()), MemoryStore(MemoryTree())
    await fill(store)
    await fill_pages(store)
    await store.delete(keys.chain_page_key(keys.chain_key(TOPIC), 1), 0)
    await restored(await backup_of(store), other)
    assert "backup.record_unreadable" in [record.message for record in caplog.records]
    assert await chain_records(other).get(TOPIC) is not None
    assert await ledger_records(other).exists(11)  # like ledgers that nothing names
    with pytest.raises(CorruptRecordError):
        await read_chain(other, TOPIC)
