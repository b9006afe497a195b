"""Record every metadata node of a cluster on ZooKeeper whose brokers and bookies are running.

    record_zookeeper(directory) ──► {"nodes": [{"key", "version", "value", "kind", "fields"}, …], "listings": {…}}

`fields` is what the running code decodes from `value`. Later releases must decode the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cepheid_metadata
from cepheid_dev.local_cluster import LocalCluster
from cepheid_metadata import (
    BookieRegistration,
    Chain,
    ChainLedger,
    CursorRecord,
    DeletedLedger,
    Fragment,
    GrownRecord,
    LedgerMetadata,
    LedgerState,
    MetadataStore,
    NamespaceRecord,
    Position,
    Record,
    TopicRecord,
    Versioned,
    available_bookies,
    chain_records,
    cursor_records,
    deleted_ledger_records,
    ledger_records,
    namespace_records,
    topic_records,
)
from cepheid_metadata.open_store import open_store
from cepheid_ports import Ports
from cepheid_testkit.metadata_view import MetadataView
from cepheid_wire import TopicName
from tests.plain_admin import AdminClient, namespace_path
from tests.previous_release.population import KEPT, Population, kept, numbered
from tests.previous_release.settings import BROKER
from tests.previous_release.stored_records import decode_records, listings, read_nodes

BOOKIES, BROKERS = 4, 2
PATIENCE_S = 60.0
ALWAYS_FULL = {"storage": {"min_free_data_bytes": 1 << 60}}
HIGH_LEDGER_ID = 10**12 + 7


def record_zookeeper(directory: Path) -> dict[str, Any]:
    cluster = LocalCluster(directory)
    try:
        cluster.up(BOOKIES, BROKERS, settings={"broker": BROKER})
        population = Population(cluster.service_url, AdminClient(cluster.admin_urls[0]))
        population.fill()
        _change_an_ensemble(cluster, population)
        _restart_bookies(cluster)
        AdminClient(cluster.admin_urls[0]).put(
            f"{namespace_path(KEPT)}/0x40000000_0x80000000/unload", destinationBroker=f"broker-{BROKERS}"
        )
        return asyncio.run(_dump(cluster.metadata_url))
    finally:
        cluster.down()


def _change_an_ensemble(cluster: LocalCluster, population: Population) -> None:
    """Create a ledger with two fragments, and restart the bookie that it lost with an empty disk."""
    topic, view = kept("fragments"), MetadataView(cluster.metadata_url)
    population.publish(topic, numbered(10, "first"))
    (lost, *_) = view.ensemble(topic)
    cluster.kill(lost)
    population.publish(topic, numbered(10, "second"))
    _wait(lambda: len(view.ledgers(topic)[-1].fragments) == 2, f"{lost} is replaced")
    cluster.wipe(lost)
    cluster.start(lost, accept_empty_disk=True)


def _restart_bookies(cluster: LocalCluster) -> None:
    """Restart one bookie with a rack, and one as read-only."""
    view = MetadataView(cluster.metadata_url)
    for name, settings in (("bookie-3", {"rack": "east"}), ("bookie-4", ALWAYS_FULL)):
        cluster.up(settings={"broker": BROKER, "bookie": settings})
        cluster.stop(name)
        cluster.start(name)
    _wait(lambda: view.readonly_bookies() == ["bookie-4"], "bookie-4 is registered as read-only")


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.1)


async def _dump(url: str) -> dict[str, Any]:
    store = await open_store(url, Ports())
    try:
        await _create_rare_records(store)
        nodes, listed = await read_nodes(store), await listings(store)
    finally:
        await store.aclose()
    records = decode_records({key: node.value for key, node in nodes.items()})
    _check_kinds(records)
    return {"nodes": [_shown(key, node, records.get(key)) for key, node in nodes.items()], "listings": listed}


def _shown(key: str, node: Versioned, record: Record | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"key": key, "version": node.version, "value": node.value.decode()}
    if record is not None:
        shown |= {"kind": record.NAME, "fields": record.model_dump(mode="json")}
    return shown


async def _create_rare_records(store: MetadataStore) -> None:
    """Create records that exist only for moments, that only older releases write, or that need a trillion ledgers."""
    topic = TopicName.parse("persistent://rare/namespace/topic")
    closed = LedgerMetadata(
        ledger_id=HIGH_LEDGER_ID,
        ensemble_size=2,
        write_quorum=2,
        ack_quorum=1,
        state=LedgerState.CLOSED,
        fragments=(Fragment(first_entry_id=0, ensemble=("bookie-1", "bookie-2")),),
        last_entry_id=9,
        length_bytes=100,
        password=b"secret",
        creation_token=1,
        created_at_ms=1,
        custom={"topic": str(topic)},
    )
    unfinished = closed.replace(ledger_id=HIGH_LEDGER_ID + 1, state=LedgerState.IN_RECOVERY, last_entry_id=None, length_bytes=None)
    # Releases before the second format of deleted ledgers wrote no version.
    deleted = DeletedLedger(ledger=closed.replace(ledger_id=HIGH_LEDGER_ID + 2), deleted_at_ms=1, purge_after_ms=1 << 50)
    chain = Chain(
        incarnation="rare",
        epoch=3,
        ledgers=(ChainLedger(ledger_id=closed.ledger_id, entries=10, size_bytes=100, closed_at_ms=2),),
        deletions=(HIGH_LEDGER_ID + 2, HIGH_LEDGER_ID + 3),
        terminated_at=Position(closed.ledger_id, 9),
    )
    cursor = CursorRecord(
        chain_incarnation="rare", mark_delete=Position(closed.ledger_id, 4), properties={"offset": 7}, created_at_ms=1
    )
    await ledger_records(store).create(closed.ledger_id, closed)
    await ledger_records(store).create(unfinished.ledger_id, unfinished)
    await deleted_ledger_records(store).create(deleted.ledger.ledger_id, deleted)
    await chain_records(store).create(topic, chain)
    await cursor_records(store).create((topic, "subscription"), cursor)
    await topic_records(store).create(topic, TopicRecord(partitions=2, deleted=True, created_at_ms=1))
    await namespace_records(store).create(("rare", "namespace"), NamespaceRecord(deleted=True))
    standalone = BookieRegistration(bookie_id="bookie-9", incarnation="rare", addresses={"grpc": "127.0.0.1:1"})
    await available_bookies(store).create("bookie-9", standalone, ephemeral=True)


def _check_kinds(records: Mapping[str, Record]) -> None:
    """Raise AssertionError unless every kind of record is there, in each of its formats."""
    kinds = {kind for kind in vars(cepheid_metadata).values() if isinstance(kind, type) and issubclass(kind, Record)}
    wanted = {(kind.NAME, version) for kind in kinds - {Record, GrownRecord} for version in range(1, kind.FORMAT + 1)}
    missing = wanted - {(record.NAME, record.format) for record in records.values()}
    assert not missing, f"the dump has no record of these kinds and formats: {sorted(missing)}"
