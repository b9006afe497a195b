"""Offloaded topics with the official client: everything comes back as it was, by id and by time; and what the page shows runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pytest
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of, receive, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "tiered-storage.md"
SETTINGS = """
[managed_ledger]
ledger_max_bytes = 8000
ledger_min_age_s = 0.0
housekeeping_s = 0.2
"""
TOPIC = "/admin/v2/persistent/public/default"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = tmp_path_factory.mktemp("tiered") / "settings.toml"
    config.write_text(SETTINGS)
    with ProcessCluster(flags=("--config", str(config))) as cluster:
        yield cluster
        assert "Traceback" not in cluster.log_text, cluster.log_text[-4000:]


@pytest.fixture
def http(cluster: ProcessCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.admin_url, timeout=60) as client:
        yield client


def facts(message: pulsar.Message) -> tuple[Any, ...]:
    """What a consumer can see of a message."""
    place = message.message_id()
    ids = (place.ledger_id(), place.entry_id(), place.batch_index())
    return (
        ids,
        message.data(),
        message.partition_key(),
        message.properties(),
        message.publish_timestamp(),
        message.event_timestamp(),
    )


def before_newest(http: httpx.Client, topic: str, keep_bytes: int) -> dict[str, int]:
    """As Pulsar's command computes the message from which on everything stays."""
    newer_bytes, newer = 0, -1
    for ledger in reversed(http.get(f"{TOPIC}/{topic}/internalStats").json()["ledgers"]):
        newer_bytes += ledger["size"]
        if newer_bytes > keep_bytes:
            return {"ledgerId": newer, "entryId": 0}
        newer = ledger["ledgerId"]
    raise AssertionError(f"{topic} has less than {keep_bytes} bytes")


@pytest.mark.slow
def test_a_topic_comes_back_from_the_object_store_byte_by_byte(cluster: ProcessCluster, http: httpx.Client, tmp_path: Path) -> None:
    with client_of(cluster.service_url) as client:
        early = client.subscribe("archived", "early", initial_position=pulsar.InitialPosition.Earliest)
        producer = client.create_producer("archived", batching_enabled=True, compression_type=pulsar.CompressionType.ZSTD)
        for number in range(3000):
            producer.send_async(
                f"{number:06d} {'x' * (number % 97)}".encode(),
                lambda *_: None,
                partition_key=str(number % 7),
                properties={"n": str(number)},
                event_timestamp=1_700_000_000_000 + number,
            )
            if number % 100 == 99:
                producer.flush()
        producer.close()
        published = [facts(message) for message in receive(early, 3000, acknowledge=False)]
        early.close()
        assert http.put(f"{TOPIC}/archived/unload").status_code == 204
        policy = {
            "managedLedgerOffloadDriver": "filesystem",
            "fileSystemURI": f"file://{tmp_path}/archive",
            "managedLedgerOffloadDeletionLagInMillis": 0,
        }
        assert http.post(f"{TOPIC}/archived/offloadPolicies", json=policy).status_code == 204
        ended = http.get(f"{TOPIC}/archived/internalStats").json()["ledgers"][:-1]
        assert len(ended) >= 3
        assert http.put(f"{TOPIC}/archived/offload", json=before_newest(http, "archived", 0)).status_code == 204
        assert http.put(f"{TOPIC}/archived/offload", json=before_newest(http, "archived", 0)).status_code in (204, 409)
        wait_for(lambda: http.get(f"{TOPIC}/archived/offload").json()["status"] == "SUCCESS", "the command to end")
        row = "/cepheid/v1/topics/persistent/public/default/archived/tiered"
        wait_for(lambda: http.get(row).json()["objects"]["ledgers"] == len(ended), "the ledgers to leave the bookies")
        assert http.put(f"{TOPIC}/archived/unload").status_code == 204

        late = client.subscribe("archived", "late", initial_position=pulsar.InitialPosition.Earliest)
        assert [facts(message) for message in receive(late, 3000, acknowledge=False)] == published
        middle = published[1500]
        late.seek(middle[4])
        found = facts(receive(late, 1, acknowledge=False)[0])
        first = next(index for index, each in enumerate(published) if each[4] >= middle[4])
        assert published.index(found) <= first, "never after the first message of that time"
        assert published[published.index(found) : first + 1][0][0][:2] == published[first][0][:2], "in its batch"
        reader = client.create_reader("archived", pulsar.MessageId.earliest)
        assert facts(reader.read_next(30_000)) == published[0]
        late.close()
        reader.close()
    stats = http.get(f"{TOPIC}/archived/stats").json()
    assert stats["offloadedStorageSize"] == sum(ledger["size"] for ledger in ended)
    assert "cepheid_offload_reads_total 0" not in http.get("/metrics").text


@pytest.mark.slow
def test_what_the_page_shows_runs(cluster: ProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEPHEID_ADMIN_URL", cluster.admin_url)
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    commands = re.findall(r"^\$ cepheid (.*)\n((?:[^$\n].*\n)*)", "".join(blocks), flags=re.MULTILINE)
    assert len(commands) >= 10
    for command, shown in commands:
        words = shlex.split(command.replace("file:///mnt/archive", f"file://{tmp_path}/archive"))
        extra = ["--url", cluster.service_url] if words[0] == "produce" else []
        result = CliRunner().invoke(app, [*words, *extra])
        assert result.exit_code == 0, f"{command}: {result.output} {result.exception}"
        assert not shown or result.stdout == shown, command
    assert list((tmp_path / "archive" / "public" / "default" / "orders").glob("*.parquet"))
