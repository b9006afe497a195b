"""Record the data of a release: `python -m tests.previous_release.record --release COMMIT`.

The data is written by the code that is running: check out the release that is to be recorded, and pass its commit.

    --standalone    standalone.tar.xz, a data directory after SIGKILL, and expected.json, what must be read back from it
    --zookeeper     zookeeper.json.xz, every node of a cluster's metadata
Both are recorded when neither option is given.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from cepheid_metadata import LedgerIdCounter, MetadataStore, keys
from cepheid_metadata.open_store import open_store
from cepheid_ports import Ports
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import SAVED_S, client_of
from tests.plain_admin import AdminClient
from tests.previous_release.cluster_metadata import record_zookeeper
from tests.previous_release.observation import Observed, last_sequence_id, observe
from tests.previous_release.population import (
    DEDUPLICATED,
    DEDUPLICATED_PRODUCER,
    LATE,
    OPEN_WHEN_KILLED,
    RECOVERED,
    ROLLED,
    Population,
    Truth,
    kept,
    numbered,
)
from tests.previous_release.recorded_files import EXPECTED, STANDALONE, ZOOKEEPER, pack_directory, save_json, unpack_directory
from tests.previous_release.settings import STANDALONE_TOML

T = TypeVar("T")

FIRST_HIGH_LEDGER_ID = 10**12
"""Ledgers from this id on have keys of a second layout."""
JOURNAL_ONLY = "only in the journal"
UNREADABLE_BY_TEXT = (kept("encrypted"), kept("flights"))
"""Topics whose stored payloads are not the ones that the application sent."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.previous_release.record", description=__doc__)
    parser.add_argument("--release", required=True, help="commit of the code that is running")
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--zookeeper", action="store_true")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="cepheid-recording-"))
    try:
        if options.standalone or not options.zookeeper:
            record_standalone(directory / "standalone", options.release)
        if options.zookeeper or not options.standalone:
            dump = record_zookeeper(directory / "cluster")
            save_json({"release": options.release, **dump}, ZOOKEEPER)
    finally:
        shutil.rmtree(directory)
    return 0


def record_standalone(directory: Path, release: str) -> None:
    data, settings = directory / "data", directory / "settings.toml"
    directory.mkdir()
    settings.write_text(STANDALONE_TOML)
    truth = Truth()
    with ProcessCluster(data, flags=("--config", str(settings))) as cluster:
        _population(cluster, truth).fill()
        cluster.stop()
        _raise_ledger_ids(data)
        cluster.start()
        _write_before_the_first_kill(_population(cluster, truth))
        cluster.kill()
        cluster.start()
        _write_before_the_last_kill(_population(cluster, truth))
        cluster.kill()
    _check_files(data)
    pack_directory(data, STANDALONE)
    observed = _observed(directory / "copy")
    _check_truth(truth, observed)
    save_json({"release": release, **observed}, EXPECTED)


def _population(cluster: ProcessCluster, truth: Truth) -> Population:
    return Population(cluster.service_url, AdminClient(cluster.admin_url), truth=truth)


def _raise_ledger_ids(data: Path) -> None:
    """Set the id counter so that the next ledgers have keys of both layouts."""

    async def raise_counter(store: MetadataStore) -> None:
        found = await store.get(keys.LEDGER_IDS_KEY)
        assert found is not None
        counter = LedgerIdCounter(next_ledger_id=FIRST_HIGH_LEDGER_ID - 2)
        await store.put(keys.LEDGER_IDS_KEY, counter.encode(), found.version)

    asyncio.run(_with_store(f"rocksdb://{data / 'metadata'}", raise_counter))


async def _with_store(url: str, work: Callable[[MetadataStore], Awaitable[T]]) -> T:
    store = await open_store(url, Ports())
    try:
        return await work(store)
    finally:
        await store.aclose()


def _write_before_the_first_kill(population: Population) -> None:
    population.publish(OPEN_WHEN_KILLED, numbered(10, "open"))
    population.publish(RECOVERED, numbered(10, "recovered"))
    population.subscribe(OPEN_WHEN_KILLED, "later")


def _write_before_the_last_kill(population: Population) -> None:
    """Recover one of the two ledgers that the kill left open, and leave the other one open."""
    population.publish(RECOVERED, numbered(5, "after recovery"))
    population.take(RECOVERED, "through", 15, acknowledge=lambda number: number in (0, 2, 12))
    population.publish(ROLLED, numbered(5, "rolled", 40))
    again = [{**message, "sequence_id": number} for number, message in enumerate(numbered(10, "once", 20), 20)]
    population.publish(DEDUPLICATED, again, producer_name=DEDUPLICATED_PRODUCER)
    population.publish(LATE, numbered(5, "late"))
    time.sleep(SAVED_S)  # until acknowledgements are saved
    population.publish(LATE, numbered(5, JOURNAL_ONLY))


def _check_files(data: Path) -> None:
    """Raise AssertionError unless some entries are in an entry log and others only in the journal."""
    logged = b"".join(path.read_bytes() for path in data.glob("bookie-1/entrylog/*"))
    journal = b"".join(path.read_bytes() for path in data.glob("bookie-1/journal/*"))
    assert b"plain-0" in logged
    assert JOURNAL_ONLY.encode() in journal
    assert JOURNAL_ONLY.encode() not in logged, "a checkpoint came between the last message and the kill: record again"


def _observed(copy: Path) -> Observed:
    unpack_directory(STANDALONE, copy)
    with ProcessCluster(copy) as cluster:
        observed = observe(cluster.service_url, cluster.admin_url)
        with client_of(cluster.service_url) as client:
            sequence_id = last_sequence_id(client, DEDUPLICATED, DEDUPLICATED_PRODUCER)
    return {**observed, "last sequence id": sequence_id}


def _check_truth(truth: Truth, observed: dict[str, Any]) -> None:
    """Raise AssertionError unless what is read back agrees with the receipts and acknowledgements of the clients."""
    for topic, published in truth.published.items():
        read = [(message["id"], message.get("data", "")) for message in observed["messages"][topic]]
        if topic in UNREADABLE_BY_TEXT:
            assert [message_id for message_id, _ in read] == [message_id for message_id, _ in published], topic
        else:
            assert read == published, topic
    for (topic, subscription), acknowledged in truth.acknowledged.items():
        if topic not in truth.published:
            continue
        left = [message_id for message_id, _ in truth.published[topic] if message_id not in acknowledged]
        delivered = [message_id for message_id, _ in observed["remaining"][f"{topic} {subscription}"]]
        expected = [] if (topic, subscription) in truth.undelivered else left
        assert delivered == expected, f"{topic} {subscription}: {delivered}, expected {expected}"
    assert observed["last sequence id"] == 29


if __name__ == "__main__":
    sys.exit(main())
