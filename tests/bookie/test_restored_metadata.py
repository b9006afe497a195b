"""A bookie whose metadata was restored from a backup that is older than its disks."""

from __future__ import annotations

import pytest

from cepheid_bookie import Bookie, GarbageCollector, MetadataCookies, MetadataLedgers
from cepheid_bookie.errors import CookieError
from cepheid_metadata import (
    LedgerIdCounter,
    LedgerIds,
    MemoryStore,
    MemoryTree,
    Records,
    RestoredMetadata,
    bookie_cookies,
    bookie_reports,
    keys,
    restored_record,
)
from cepheid_ports import Ports
from cepheid_rpc import Status
from tests.bookie.bookie_support import IDENTITY, Machine, add, added, group_of, read_all


class OldMetadata:
    """A machine with a bookie that holds ledgers 5 and 8, and metadata that the test makes older."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.store = MemoryStore(MemoryTree())

    async def start(self) -> Bookie:
        machine = self.machine
        machine.index.closed = False
        cookies = MetadataCookies(self.store, {"data": ("/d",)})
        return await Bookie.open(IDENTITY, machine.settings, machine.disk, machine.index, machine.ports(), cookies=cookies)

    async def live(self) -> None:
        bookie = await self.start()
        await added(bookie, group_of(5, 0, 3))
        await added(bookie, group_of(8, 0, 3))
        await bookie.delete_ledgers([8])
        await bookie.aclose()

    async def restore(self) -> None:
        restored = RestoredMetadata(backup_sha256="x", backup_created_at_ms=1, restored_at_ms=2)
        await restored_record(self.store).create(None, restored)
        ids: Records[None, LedgerIdCounter] = Records(self.store, lambda _: keys.LEDGER_IDS_KEY, LedgerIdCounter)
        await ids.create(None, LedgerIdCounter(next_ledger_id=1_001, restored=True))


async def test_a_bookie_that_is_newer_than_the_backup_starts_whole_while_the_restore_is_not_confirmed() -> None:
    world = OldMetadata()
    await world.live()
    name, incarnation = IDENTITY.bookie_id, (await cookie(world)).incarnation
    await bookie_cookies(world.store).delete(name, None)
    with pytest.raises(CookieError, match=f"metadata has no cookie of bookie {name}, but there is data"):
        await world.start()
    await world.restore()
    bookie = await world.start()
    assert ((await cookie(world)).incarnation, bookie.cookie.limbo_below) == (incarnation, 0)
    await added(bookie, group_of(9, 0))
    await bookie.aclose()


async def test_disks_that_are_others_than_those_of_the_backup_deny_nothing_of_ledgers_that_exist() -> None:
    world = OldMetadata()
    await world.live()
    backup = (await cookie(world)).replace(incarnation="of the backup")
    await bookie_cookies(world.store).replace(IDENTITY.bookie_id, backup, 0)
    with pytest.raises(CookieError, match="metadata knows incarnation of the backup"):
        await world.start()
    await world.restore()
    bookie = await world.start()
    assert bookie.cookie.limbo_below == 1_001
    _, missing = await read_all(bookie, 5, 0, 9)
    assert missing == dict.fromkeys(range(3, 10), Status.UNKNOWN)
    (refused,) = await add(bookie, group_of(9, 0))
    assert refused.status is Status.READ_ONLY
    await bookie.aclose()
    bookie = await world.start()  # the next start finds what it stamped
    assert bookie.cookie.limbo_below == 1_001
    await bookie.aclose()


async def test_a_pass_of_garbage_collection_reports_the_largest_id_and_deletes_nothing() -> None:
    world = OldMetadata()
    await world.live()
    await world.restore()
    bookie = await world.start()
    await added(bookie, group_of(5_000, 0))
    await bookie.delete_ledgers([5_000])  # its id stays refused here, so it must not be given out
    collector = GarbageCollector(bookie, MetadataLedgers(world.store, Ports()))
    assert (await collector.collect()).refused_restored
    assert (await collector.collect()).refused_restored
    assert bookie.ledgers() == [5]
    found = await bookie_reports(world.store).get(IDENTITY.bookie_id)
    assert found is not None
    assert (found.record.largest_ledger_id, found.record.ledgers) == (5_000, 1)
    assert await LedgerIds(world.store).take() > 5_000
    await bookie.aclose()


async def cookie(world: OldMetadata):  # type: ignore[no-untyped-def]
    found = await bookie_cookies(world.store).get(IDENTITY.bookie_id)
    assert found is not None
    return found.record
