"""The current code reads what the previous release wrote: a data directory after SIGKILL, and the metadata of a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_metadata import MemoryStore, MemoryTree, Record
from cepheid_metadata.open_store import open_store
from cepheid_ports import Ports
from cepheid_scan import scan
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import TIMEOUT_MS, client_of
from tests.plain_admin import AdminClient, topic_path
from tests.previous_release.observation import Observed, deleted_ledgers, last_sequence_id, observe
from tests.previous_release.population import DEDUPLICATED, DEDUPLICATED_PRODUCER, OPEN_WHEN_KILLED, TERMINATED, kept, payload_text
from tests.previous_release.recorded_files import EXPECTED, STANDALONE, ZOOKEEPER, load_json, unpack_directory
from tests.previous_release.stored_records import LAYOUT, decode_records, listings, matches, read_nodes


@pytest.fixture(scope="module")
def expected() -> Observed:
    return dict(load_json(EXPECTED))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("previous") / "data"
    unpack_directory(STANDALONE, directory)
    return directory


@pytest.fixture(scope="module")
def records(data: Path) -> dict[str, Record]:
    """All metadata records of the data directory, read before the shared server starts."""

    async def read() -> dict[str, Record]:
        store = await open_store(f"rocksdb://{data / 'metadata'}", Ports())
        try:
            return decode_records({key: node.value for key, node in (await read_nodes(store)).items()})
        finally:
            await store.aclose()

    return asyncio.run(read())


@pytest.fixture(scope="module")
def cluster(data: Path, records: dict[str, Record]) -> Iterator[ProcessCluster]:
    with ProcessCluster(data) as cluster:
        yield cluster
        assert "Traceback" not in cluster.log_text, cluster.log_text[-4000:]


@pytest.fixture(scope="module")
def found(cluster: ProcessCluster, expected: Observed) -> Observed:
    remaining = {name: len(messages) for name, messages in expected["remaining"].items()}
    return observe(cluster.service_url, cluster.admin_url, remaining)


# The data directory of a standalone server


def test_the_data_directory_has_every_record_of_a_standalone_server(records: dict[str, Record]) -> None:
    assert {record.NAME for record in records.values()} == {
        "bookie cookie", "bookie life", "chain", "cluster", "cluster identity", "cursor", "deleted ledger", "ledger id counter",
        "ledger metadata", "namespace", "schema definition", "schema history", "tenant", "topic",
    }  # fmt: skip


def test_tenants_namespaces_and_topics_are_listed(found: Observed, expected: Observed) -> None:
    assert found["clusters"] == expected["clusters"]
    for section in ("tenants", "namespaces", "partitioned", "policies", "messages", "remaining"):
        assert found[section].keys() == expected[section].keys(), section


@pytest.mark.parametrize("section", ["tenants", "namespaces", "partitioned", "policies", "schemas"])
def test_what_was_set_is_still_set(found: Observed, expected: Observed, section: str) -> None:
    assert differences(expected[section], found[section]) == []


def test_every_message_is_read_back_in_order(found: Observed, expected: Observed) -> None:
    assert differences(expected["messages"], found["messages"]) == []


@pytest.mark.parametrize("name", ["plain", "batched", "compressed", "chunked", "rolled", "recovered", "late"])
def test_readers_past_the_brokers_find_the_same(cluster: ProcessCluster, found: Observed, expected: Observed, name: str) -> None:
    topic = kept(name)
    rows = scan(topic, service_url=cluster.service_url).read_all().to_pylist()
    read = [(payload_text(row["value"] or b""), row["key"] or "", row["publish_time"]) for row in rows]
    wanted = [(row.get("data", ""), row.get("key", ""), row["publish_time"]) for row in expected["messages"][topic]]
    assert [(data, key, round(at.timestamp() * 1000)) for data, key, at in read] == wanted


def test_backlogs_are_counted_as_before(found: Observed, expected: Observed) -> None:
    assert differences(expected["backlogs"], found["backlogs"]) == []


def test_subscriptions_deliver_what_was_not_acknowledged(found: Observed, expected: Observed) -> None:
    assert found["remaining"] == expected["remaining"]


def test_deduplication_goes_on_after_the_last_message(cluster: ProcessCluster, found: Observed, expected: Observed) -> None:
    with client_of(cluster.service_url) as client:
        last = last_sequence_id(client, DEDUPLICATED, DEDUPLICATED_PRODUCER)
        assert last == expected["last sequence id"]
        producer = client.create_producer(DEDUPLICATED, producer_name=DEDUPLICATED_PRODUCER)
        producer.send(b"again", sequence_id=last)
        producer.send(b"new", sequence_id=last + 1)
        reader = client.create_reader(DEDUPLICATED, pulsar.MessageId.earliest)
        count = len(expected["messages"][DEDUPLICATED])
        assert [reader.read_next(TIMEOUT_MS).data() for _ in range(count + 1)][count:] == [b"new"]
        assert not reader.has_message_available()


def test_a_terminated_topic_stays_terminated_and_the_others_take_messages(cluster: ProcessCluster, found: Observed) -> None:
    with client_of(cluster.service_url) as client:
        with pytest.raises(pulsar.TopicTerminated):
            client.create_producer(TERMINATED)
        last_ledger_id = int(found["messages"][OPEN_WHEN_KILLED][-1]["id"].split(":")[0])
        stored = client.create_producer(OPEN_WHEN_KILLED).send(b"after the upgrade")
    assert stored.ledger_id() > last_ledger_id


def test_deleted_ledgers_come_back_and_every_copy_is_sound(cluster: ProcessCluster, found: Observed, expected: Observed) -> None:
    assert found["deleted ledgers"] == expected["deleted ledgers"]
    admin = AdminClient(cluster.admin_url)
    for ledger_id in expected["deleted ledgers"]:
        admin.post(f"/cepheid/v1/ledgers/{ledger_id}/undelete")
    assert deleted_ledgers(admin) == []
    done = CliRunner().invoke(app, ["ledgers", "verify", "--all", "--json", "--admin-url", cluster.admin_url])
    reports = {report["ledger_id"]: report for report in json.loads(done.stdout)}
    assert {*expected["deleted ledgers"]} < reports.keys()
    assert sum(report["copies_wanted"] for report in reports.values()) > 0
    assert [report for report in reports.values() if report["copies_wanted"] != report["copies_valid"]] == []
    assert done.exit_code == 0


def test_a_topic_with_old_ledgers_can_be_deleted(cluster: ProcessCluster, found: Observed) -> None:
    admin = AdminClient(cluster.admin_url)
    admin.delete(topic_path(TERMINATED), force=True)
    (deleted,) = deleted_ledgers(admin)
    assert deleted["ledger"]["custom"]["topic"] == TERMINATED


def test_the_old_journal_format_is_written_until_the_upgrade_is_finished(cluster: ProcessCluster, found: Observed) -> None:
    """Last: there is no way back."""
    journals = sorted((cluster.data_dir / "bookie-1" / "journal").glob("*.journal"))
    assert {journal.read_bytes()[8] for journal in journals} == {1}

    def ran(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--admin-url", cluster.admin_url])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert ran("cluster", "upgrade-status").startswith(
        "storage format  1; this release knows 3\nevery running broker and bookie supports it"
    )
    ran("cluster", "finish-upgrade", "--yes")
    assert ran("cluster", "upgrade-status") == "storage format  3; this release knows 3\n"
    cluster.stop()
    cluster.start()
    with client_of(cluster.service_url) as client:
        client.create_producer("after-the-upgrade").send(b"new")
    newest = max((cluster.data_dir / "bookie-1" / "journal").glob("*.journal"))
    assert newest.read_bytes()[8] == 2
    ran("ledgers", "verify", "--all")


# The metadata of a cluster on ZooKeeper


@pytest.fixture(scope="module")
def dump() -> Any:
    return load_json(ZOOKEEPER)


@pytest.fixture(scope="module")
def stored(dump: Any) -> dict[str, bytes]:
    return {node["key"]: node["value"].encode() for node in dump["nodes"]}


def test_every_node_of_the_cluster_is_a_record_that_is_known(dump: Any, stored: dict[str, bytes]) -> None:
    kinds = {node["key"]: node["kind"] for node in dump["nodes"] if "kind" in node}
    assert {key: record.NAME for key, record in decode_records(stored).items()} == kinds


def test_records_are_decoded_to_the_same_fields(dump: Any, stored: dict[str, bytes]) -> None:
    """A later release may have more fields; the recorded ones keep their values."""
    records = decode_records(stored)
    wanted = {node["key"]: node["fields"] for node in dump["nodes"] if "fields" in node}
    assert differences(wanted, {key: record.model_dump(mode="json") for key, record in records.items()}) == []


def test_unchanged_records_are_encoded_as_before(stored: dict[str, bytes]) -> None:
    """The previous release may run beside this one and must still be able to read them."""
    records = decode_records(stored)
    whole = {key: record for key, record in records.items() if not (key.endswith("-0") and f"{key[:-1]}1" in stored)}
    assert {key: record.encode() for key, record in whole.items()} == {key: stored[key] for key in whole}
    replaced = {key: record.replace() for key, record in whole.items()}
    assert {key: json.loads(record.encode()) for key, record in replaced.items()} == {key: json.loads(stored[key]) for key in whole}


def test_listings_find_everything_in_a_store_with_these_nodes(dump: Any, stored: dict[str, bytes]) -> None:
    async def load_and_list() -> dict[str, list[str]]:
        store = MemoryStore(MemoryTree())
        for key in sorted(stored):
            await store.create(key, stored[key])
        return await listings(store)

    assert asyncio.run(load_and_list()) == dump["listings"]


def test_the_dump_has_a_record_in_every_place_of_the_layout(stored: dict[str, bytes]) -> None:
    assert [pattern for pattern, _ in LAYOUT if not any(matches(key, pattern) for key in stored)] == []


def differences(recorded: Any, found: Any, where: str = "") -> list[str]:
    """Return what is recorded and not found. Additional fields of dictionaries are ignored, additional items of lists are not."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        return [text for name, value in recorded.items() for text in differences(value, found.get(name), f"{where}/{name}")]
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = enumerate(zip(recorded, found, strict=True))
        return [text for index, (before, after) in pairs for text in differences(before, after, f"{where}/{index}")]
    return [] if recorded == found else [f"{where}: recorded {recorded!r}, found {found!r}"]
