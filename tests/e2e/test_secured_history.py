"""History of a secured standalone server, read past the broker: plans with tickets, and nothing that one ticket too many gives."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cepheid
from cepheid_cli import secure
from cepheid_decode import PlanSource
from cepheid_scan import EntriesUnreadableError, ReadSettings, ScanCounters, scan
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.open_planner import open_planner
from cepheid_scan.splits import fragments_of
from cepheid_security import ClientTls
from cepheid_security.client_environment import ClientSecrets
from cepheid_security.read_tickets import role_of_ticket
from cepheid_testkit import StandaloneCluster
from tests.e2e.test_security import secured, tls_url, token_of

QUICK = ReadSettings(read_attempts=1, unreachable_s=0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("secured")
    secure.init(directory)
    (directory / "users").write_text("")
    return directory


@pytest.fixture(autouse=True)
def _files_by_environment(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a reader is given them, in Spark's executors too."""
    for name, file in (("CA", "ca.pem"), ("CERTIFICATE", "client.pem"), ("KEY", "client-key.pem")):
        monkeypatch.setenv(f"CEPHEID_TLS_{name}_FILE", str(made / file))
    yield
    close_channels()


async def publish(cluster: StandaloneCluster, made: Path, topic: str, payloads: list[bytes]) -> None:
    async with cepheid.connect(tls_url(cluster), tls_ca_file=str(made / "ca.pem"), token=token_of(made)) as client:
        # A subscription keeps what is published.
        async with client.consumer(topic, "keeps"), client.producer(topic) as producer:
            for payload in payloads:
                await producer.send(payload)


def source_of(cluster: StandaloneCluster, made: Path) -> PlanSource:
    port = cluster.standalone._serving.tls_admin_port
    return PlanSource(admin_url=f"https://127.0.0.1:{port}", secrets=ClientSecrets(token_of(made)), retry_s=60.0)


def plan_text(source: PlanSource, topic: str) -> str:
    request = urllib.request.Request(
        f"{source.admin_url}/cepheid/v1/plan?topic={topic}", headers={"Authorization": f"Bearer {source.secrets.token}"}
    )
    with urllib.request.urlopen(request, context=ClientTls.from_environment().context(), timeout=60) as answer:
        return str(answer.read().decode())


async def test_a_plan_has_tickets_for_the_role_that_asks_and_no_master_key(made: Path) -> None:
    async with secured(made) as cluster:
        await publish(cluster, made, "orders", [b"1"])
        text = await cluster.blocking(lambda: plan_text(source_of(cluster, made), "orders"))
        plan: dict[str, Any] = json.loads(text)
        assert plan["format"] == 3
        assert "master_key" not in text
        assert plan["read_ticket"] == ""
        assert all(address.startswith("tls://") for address in plan["bookies"].values())
        (part,) = plan["plans"]
        assert [role_of_ticket(ledger["ticket"].encode()) for ledger in part["ledgers"]] == ["app"]


async def test_a_reader_reads_its_topic_and_a_ticket_reads_no_other(made: Path) -> None:
    async with secured(made) as cluster:
        await publish(cluster, made, "orders", [b"order %d" % number for number in range(50)])
        await publish(cluster, made, "salaries", [b"salary"])
        source = source_of(cluster, made)

        def read() -> list[bytes]:
            arguments = {"admin_url": source.admin_url, "token": source.secrets.token}
            with scan("orders", columns=["value"], **arguments) as reader:
                return [value for batch in reader for value in batch.column("value").to_pylist()]

        def read_with_the_ticket_of_another() -> None:
            planner = open_planner(source)
            topics = [f"persistent://public/default/{name}" for name in ("orders", "salaries")]
            orders, salaries = planner.plan(topics).topics
            bookies = planner.plan(topics).bookies
            planner.close()
            (mine,), (other,) = orders.ledgers, salaries.ledgers
            from cepheid_decode import Piece

            piece = Piece(salaries.topic, -1, other.ledger_id, 0, 0, 1, 1, fragments_of(other, 0, 0), ticket=other.ticket)
            entries = EntrySource(bookies, b"", QUICK, ScanCounters(), replan=None)
            assert sum(map(len, entries.read(piece))) == 1
            with pytest.raises(EntriesUnreadableError, match="the read ticket is not valid for these entries"):
                list(entries.read(replace(piece, ticket=mine.ticket)))

        assert await cluster.blocking(read) == [b"order %d" % number for number in range(50)]
        await cluster.blocking(read_with_the_ticket_of_another)
