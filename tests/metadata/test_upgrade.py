"""The storage format of a cluster: old until every bookie that runs knows the new one and an operator says so."""

from __future__ import annotations

import pytest

from cepheid_metadata import (
    BookieRegistration,
    BrokerRegistration,
    ClusterIdentity,
    MemoryStore,
    MemoryTree,
    available_bookies,
    broker_records,
    cluster_identity,
    found_cluster,
    readonly_bookies,
)
from cepheid_metadata.process_reports import ProcessReport, broker_reports, report
from cepheid_metadata.upgrade import (
    NEWEST_STORAGE_FORMAT,
    NewerStorageFormatError,
    StorageFormat,
    UpgradeNotPossibleError,
    finish_upgrade,
    read_storage_format,
    report_known_format,
    storage_format_record,
    upgrade_state,
)
from cepheid_ports import Ports
from tests.metadata.store_harness import Harness


async def cluster_of_an_older_release(store: MemoryStore, *processes: str) -> None:
    """Its bookies b1, b2, … run, each as this process."""
    await cluster_identity(store).create(None, ClusterIdentity(cluster_id="1", name="old", created_at_ms=1))
    for number, process in enumerate(processes, start=1):
        place = available_bookies(store) if number % 2 else readonly_bookies(store)
        record = BookieRegistration(bookie_id=f"b{number}", incarnation="i", addresses={}, process=process or None)
        await place.create(f"b{number}", record, ephemeral=True)


async def test_a_new_cluster_begins_with_the_newest_format_and_an_old_one_keeps_its_own(harness: Harness) -> None:
    async with harness.session() as store:
        await found_cluster(store, "new", Ports())
        assert await read_storage_format(store) == NEWEST_STORAGE_FORMAT
        assert await finish_upgrade(store) == await upgrade_state(store)
    store = MemoryStore(MemoryTree())
    await cluster_of_an_older_release(store)
    await found_cluster(store, "old", Ports())  # as every start of a standalone server does
    assert await read_storage_format(store) == 1


@pytest.mark.parametrize(
    ("running", "reported", "older"),
    [
        (("p1", "p2"), {"b1": "p1", "b2": "p2"}, ()),
        (("p1", "p2"), {"b1": "p1"}, ("b2",)),
        (("p1", "p2"), {"b1": "p1", "b2": "an earlier process, of this release"}, ("b2",)),  # it was downgraded
        (("", "p2"), {"b2": "p2"}, ("b1",)),
        (("",), {"b1": ""}, ()),  # of a standalone server, whose registrations name no process
        ((), {"b1": "p1"}, ()),
    ],
)
async def test_an_upgrade_ends_only_when_no_bookie_of_an_older_release_runs(
    running: tuple[str, ...], reported: dict[str, str], older: tuple[str, ...]
) -> None:
    store = MemoryStore(MemoryTree())
    await cluster_of_an_older_release(store, *running)
    for bookie_id, process in reported.items():
        await report_known_format(store, bookie_id, process)
    if older:
        with pytest.raises(UpgradeNotPossibleError, match=f"{', '.join(older)} runs an older release"):
            await finish_upgrade(store)
        assert await read_storage_format(store) == 1
        return
    assert (await finish_upgrade(store)).storage_format == 1
    assert await read_storage_format(store) == NEWEST_STORAGE_FORMAT


@pytest.mark.parametrize(
    ("reported", "older"),
    [
        (None, ("broker-1",)),
        (ProcessReport(process="1000", storage_format=NEWEST_STORAGE_FORMAT), ()),
        (ProcessReport(process="1000", storage_format=NEWEST_STORAGE_FORMAT - 1), ("broker-1",)),
        (
            ProcessReport(process="999", storage_format=NEWEST_STORAGE_FORMAT),
            ("broker-1",),
        ),  # an earlier process: it was downgraded
    ],
)
async def test_an_upgrade_ends_only_when_no_broker_of_an_older_release_runs(
    reported: ProcessReport | None, older: tuple[str, ...]
) -> None:
    """It would pass on plans that its readers do not understand."""
    store = MemoryStore(MemoryTree())
    await cluster_of_an_older_release(store)
    broker = BrokerRegistration(broker_id="broker-1", addresses={}, started_at_ms=1000)
    await broker_records(store).create("broker-1", broker, ephemeral=True)
    if reported is not None:
        await report(broker_reports(store), "broker-1", reported)
    assert (await upgrade_state(store)).older == older


def test_a_report_of_a_process_without_tls_to_zookeeper_can_be_read_by_older_releases() -> None:
    assert ProcessReport(process="1", storage_format=1).format == 1
    assert b"zookeeper_tls" not in ProcessReport(process="1", storage_format=1).encode()
    assert ProcessReport(process="1", storage_format=1, zookeeper_tls=True).format == 2
    assert ProcessReport(process="1", storage_format=1, revocation_lists=True).format == 3


async def test_a_release_that_does_not_know_the_format_is_refused() -> None:
    store = MemoryStore(MemoryTree())
    await storage_format_record(store).create(None, StorageFormat(storage_format=NEWEST_STORAGE_FORMAT + 1))
    with pytest.raises(NewerStorageFormatError, match=f"knows formats up to {NEWEST_STORAGE_FORMAT}.*no way back"):
        await read_storage_format(store)
