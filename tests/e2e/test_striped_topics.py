"""Topics whose ledgers are striped, because a policy says so: official clients, a crash, and what lies at the bookies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pulsar
import pytest
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import EARLIEST, client_of, payloads_of, publish, receive
from tests.plain_admin import AdminClient

pytestmark = pytest.mark.slow

ENSEMBLE, WRITE_QUORUM, ACK_QUORUM = 5, 3, 2
TOPIC = "persistent://public/striped/orders"
COUNT = 1000
PERSISTENCE = {"bookkeeperEnsemble": ENSEMBLE, "bookkeeperWriteQuorum": WRITE_QUORUM, "bookkeeperAckQuorum": ACK_QUORUM}
KEEP = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}


def command(cluster: ProcessCluster, *words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "--admin-url", cluster.admin_url, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def payloads(first: int, count: int) -> list[bytes]:
    """Of sizes that spread over blocks and answers."""
    return [b"%d " % number + bytes(number % 7 * 500) for number in range(first, first + count)]


def test_a_namespace_is_striped_by_its_policy_and_survives_a_crash(tmp_path: Path) -> None:
    with ProcessCluster(tmp_path, bookies=ENSEMBLE) as cluster:
        admin = AdminClient(cluster.admin_url)
        admin.put("/admin/v2/namespaces/public/striped", {"retention_policies": KEEP})
        admin.post("/admin/v2/namespaces/public/striped/persistence", PERSISTENCE)
        assert PERSISTENCE.items() <= admin.get("/admin/v2/namespaces/public/striped/persistence").items()
        with client_of(cluster.service_url) as client:
            consumer = client.subscribe(TOPIC, "s", initial_position=EARLIEST)
            publish(client, TOPIC, payloads(0, COUNT))
            assert payloads_of(receive(consumer, COUNT // 2)) == payloads(0, COUNT // 2)
        cluster.kill()
        cluster.start()
        with client_of(cluster.service_url) as client:  # opening recovers the first ledger
            publish(client, TOPIC, payloads(COUNT, COUNT), batching_enabled=True)
            reader = client.create_reader(TOPIC, pulsar.MessageId.earliest)
            assert [reader.read_next(10_000).data() for _ in range(2 * COUNT)] == payloads(0, 2 * COUNT)
            assert not reader.has_message_available()
        check_ledgers(cluster)


def check_ledgers(cluster: ProcessCluster) -> None:
    ledgers = [item["ledger"] for item in command(cluster, "ledgers", "list", "--topic", TOPIC)]
    assert [ledger["state"] for ledger in ledgers] == ["CLOSED", "OPEN"]
    for ledger in ledgers:
        assert (ledger["ensemble_size"], ledger["write_quorum"], ledger["ack_quorum"]) == (ENSEMBLE, WRITE_QUORUM, ACK_QUORUM)
        (report,) = command(cluster, "ledgers", "verify", str(ledger["ledger_id"]))
        entries = report["last_entry_id"] + 1
        assert report["copies_valid"] == entries * WRITE_QUORUM, report
