"""Offloading over the admin API and the command line, into a folder: by policy, by command, and what statistics say of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cepheid_broker.settings import TieredSettings
from cepheid_cli.app import app
from cepheid_managed_ledger import ManagedLedgerSettings
from cepheid_ports import CepheidError
from cepheid_wire import TopicName
from tests.admin.admin_world import NAMESPACE, AdminWorld, running_admin

SMALL = ManagedLedgerSettings(ledger_max_bytes=4000, ledger_min_age_s=0.0, housekeeping_s=0.1)
OFF = {"status": "NOT_RUN", "lastError": ""}


class World:
    def __init__(self, admin: AdminWorld, archive: Path) -> None:
        self.admin = admin
        self.archive = archive

    def cepheid(self, *words: str) -> str:
        """What the command prints; its error is raised."""
        arguments = [*words, "--admin-url", self.admin.standalone.admin_url]
        result = self.admin.in_thread(lambda: CliRunner().invoke(app, arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    def written(self, topic: str) -> list[bytes]:
        """A topic with a subscription and several ledgers, of which all but the last have ended."""
        assert self.admin.put(f"{NAMESPACE}/{topic}").status_code == 204
        assert self.admin.put(f"{NAMESPACE}/{topic}/subscription/all").status_code == 204
        payloads: list[bytes] = []
        while len(self.ledgers(topic)) < 4:
            more = [b"%d " % number * 300 for number in range(len(payloads), len(payloads) + 8)]
            self.admin.publish(topic, more)
            payloads += more
        return payloads

    def ledgers(self, topic: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.admin.get(f"{NAMESPACE}/{topic}/internalStats").json()["ledgers"]
        return found

    def recorded(self, topic: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.admin.get(f"{NAMESPACE}/{topic}/internal-info").json()["ledgers"]
        return found

    def status(self, topic: str) -> dict[str, Any]:
        (row,) = json.loads(self.cepheid("tiered", "status", topic, "--json"))
        return dict(row)

    def live(self, topic: str) -> dict[str, Any]:
        row: dict[str, Any] = self.admin.get(f"/cepheid/v1/topics/persistent/public/default/{topic}/tiered").json()
        return row

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """The server's loop runs only while it is asked something, or here."""
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline, f"after 20 s still not: {what}"
            self.admin.run(asyncio.sleep(0.05))

    def wait_for(self, topic: str, what: str, ledgers: int) -> dict[str, Any]:
        """Until so many ledgers lie there: bookies, both or objects."""
        self.wait(lambda: bool(self.live(topic)[what]["ledgers"] == ledgers), f"{ledgers} ledgers of {topic} in {what}")
        return self.live(topic)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tiered")
    with running_admin(folder / "data", managed_ledger=SMALL, tiered=TieredSettings(read_cache_bytes=1 << 20)) as admin:
        yield World(admin, folder / "archive")


def test_a_policy_moves_ledgers_to_the_store_and_off_the_bookies(world: World) -> None:
    payloads = world.written("moved")
    world.cepheid("topics", "set", "moved", "offload", f"file://{world.archive},after-size=0,keep=0s")
    ended = len(world.ledgers("moved")) - 1
    assert ended >= 3
    row = world.wait_for("moved", "objects", ended)
    assert row["due"] == {"ledgers": 0, "bytes": 0, "oldest_ended_at_ms": 0}
    assert row["object_bytes"] == sum(path.stat().st_size for path in world.archive.rglob("*.parquet"))
    assert [each["offloaded"] for each in world.ledgers("moved")] == [*([True] * ended), False]
    recorded = world.recorded("moved")
    assert [each["isOffloaded"] for each in recorded] == [*([True] * ended), False]
    assert recorded[0]["offloadedContextUuid"]
    assert recorded[0]["object"]["url"].startswith(f"file://{world.archive}/public/default/moved/")
    stats = world.admin.get(f"{NAMESPACE}/moved/stats").json()
    assert stats["offloadedStorageSize"] == row["objects"]["bytes"] > 0
    assert stats["lastOffloadLedgerId"] in [each["ledgerId"] for each in recorded]
    assert stats["lastOffloadSuccessTimeStamp"] > 0
    assert stats["lastOffloadFailureTimeStamp"] == 0
    assert stats["storageSize"] == row["objects"]["bytes"] + row["bookies"]["bytes"], "offloaded bytes count"
    for number in (1, 7, len(payloads)):
        found = world.admin.get(
            f"{NAMESPACE}/moved/examinemessage", params={"initialPosition": "earliest", "messagePosition": number}
        )
        assert found.content == payloads[number - 1]


def test_a_command_offloads_what_is_before_a_message(world: World) -> None:
    world.written("asked")
    path = f"{NAMESPACE}/asked/offload"
    assert world.admin.get(path).json() == OFF
    first, second = world.ledgers("asked")[:2]
    before = {"ledgerId": second["ledgerId"], "entryId": 0}
    refused = world.admin.put(path, json=before)
    assert refused.status_code == 412
    assert "set an offload policy" in refused.json()["reason"]
    world.cepheid("topics", "set", "asked", "offload", f"file://{world.archive},keep=1h")
    assert world.admin.put(path, json=before).status_code == 204
    row = world.wait_for("asked", "both", 1)
    assert row["objects"]["ledgers"] == 0
    assert [each["offloaded"] for each in world.ledgers("asked")][:2] == [True, False]

    world.wait(lambda: world.admin.get(path).json()["status"] != "RUNNING", "the command ends")
    assert world.admin.get(path).json() == {
        "status": "SUCCESS",
        "lastError": "",
        "firstUnoffloadedMessage": {**before, "partitionIndex": -1},
    }
    ended = len(world.ledgers("asked")) - 1
    assert "done; the first message that is not offloaded" in world.cepheid("topics", "offload", "asked", "--wait")
    assert world.wait_for("asked", "both", ended)["live"]["last_error"] is None
    assert "done" in world.cepheid("topics", "offload-status", "asked")
    assert first["ledgerId"] < second["ledgerId"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (None, 400),
        ({}, 400),
        ({"ledgerId": "x", "entryId": 0}, 400),
        ({"ledgerId": 1 << 40, "entryId": 0}, 412),
        ({"ledgerId": 1, "entryId": 0, "partitionIndex": 3}, 412),
    ],
)
def test_a_bad_place_is_refused(world: World, body: Any, status: int) -> None:
    world.admin.put(f"{NAMESPACE}/refusing")
    answer = world.admin.put(f"{NAMESPACE}/refusing/offload", content=json.dumps(body).encode() if body is not None else b"")
    assert answer.status_code == status, answer.text


def test_partitions_are_asked_by_their_own_names(world: World) -> None:
    assert world.admin.put(f"{NAMESPACE}/split/partitions", json=2).status_code == 204
    assert world.admin.put(f"{NAMESPACE}/split/offload", json={"ledgerId": 0, "entryId": 0}).status_code == 405
    assert world.admin.get(f"{NAMESPACE}/split-partition-1/offload").json() == OFF
    assert world.cepheid("topics", "offload-status", "split").count("not requested") == 2
    assert world.admin.get(f"{NAMESPACE}/nowhere/offload").status_code == 404
    with pytest.raises(CepheidError, match="--before is a position in one"):
        world.cepheid("topics", "offload", "split", "--before", "1:0")


def test_a_failing_store_is_shown_and_nothing_leaves_the_bookies(world: World) -> None:
    world.written("failing")
    blocked = world.archive.parent / "a file"
    blocked.write_bytes(b"in the way")
    path = str(blocked).replace(" ", "-")
    Path(path).write_bytes(b"in the way")
    world.cepheid("topics", "set", "failing", "offload", f"file://{path}/x,after-size=0,keep=0s")

    world.wait(lambda: bool(world.live("failing")["live"]["last_error"]), "an upload fails")
    row = world.status("failing")
    assert row["both"]["ledgers"] == row["objects"]["ledgers"] == 0
    assert row["due"]["ledgers"] >= 3
    assert row["live"]["failing_since_ms"] > 0
    shown = world.cepheid("tiered", "status")
    assert "failing: offloading fails since" in shown
    assert world.admin.get(f"{NAMESPACE}/failing/stats").json()["lastOffloadFailureTimeStamp"] > 0
    metrics = world.admin.get("/metrics").text
    assert "cepheid_offload_failing_topics 1" in metrics
    assert 'cepheid_offload_failures_total{kind="upload"}' in metrics
    world.cepheid("topics", "unset", "failing", "offload")


def test_a_policy_is_read_back_as_it_was_typed(world: World) -> None:
    text = "s3://archive/cepheid?region=eu-west-1,after-size=1GB,after-age=1d,keep=1h"
    world.cepheid("namespaces", "set", "public/default", "offload", text)
    assert world.cepheid("namespaces", "get", "public/default", "offload").strip() == text
    world.admin.put(f"{NAMESPACE}/inherits")
    world.cepheid("topics", "set", "inherits", "offload", "after-age=2d")
    assert world.cepheid("topics", "get", "inherits", "offload").strip() == "after-age=2d"
    in_force = world.cepheid("topics", "get", "inherits", "offload", "--in-force").strip()
    assert in_force == "s3://archive/cepheid?region=eu-west-1,after-size=1GB,after-age=2d,keep=1h,read-from=bookies"
    world.cepheid("topics", "unset", "inherits", "offload")
    world.cepheid("namespaces", "unset", "public/default", "offload")
    assert world.cepheid("namespaces", "get", "public/default", "offload") == ""


def test_retention_and_quotas_count_offloaded_bytes(world: World) -> None:
    world.written("counted")
    world.cepheid("topics", "set", "counted", "offload", f"file://{world.archive},after-size=0,keep=0s")
    ended = len(world.ledgers("counted")) - 1
    row = world.wait_for("counted", "objects", ended)
    found = world.admin.get(f"{NAMESPACE}/counted/stats", params={"getPreciseBacklog": "true"}).json()
    assert found["backlogSize"] >= row["objects"]["bytes"], "a backlog in the object store counts for its quota"


def test_metrics_move(world: World) -> None:
    metrics = world.admin.get("/metrics").text
    values = {line.split()[0]: float(line.split()[1]) for line in metrics.splitlines() if line.startswith("cepheid_offload")}
    assert values["cepheid_offload_ledgers_total"] >= 3
    assert values["cepheid_offload_bytes_total"] > 0
    assert values["cepheid_offload_reads_total"] >= 1
    assert values["cepheid_offload_read_bytes_total"] > 0


def test_a_topic_that_is_deleted_takes_its_objects_along(world: World) -> None:
    world.written("gone")
    world.cepheid("topics", "set", "gone", "offload", f"file://{world.archive},after-size=0,keep=0s")
    world.wait_for("gone", "objects", len(world.ledgers("gone")) - 1)
    folder = world.archive / "public" / "default" / "gone"
    assert list(folder.glob("*.parquet"))
    world.cepheid("topics", "delete", "gone")
    topic = TopicName.parse("gone")
    assert world.admin.standalone.broker.topics.find(topic) is None
    world.wait(lambda: not list(folder.glob("*.parquet")), "the objects of a deleted topic are deleted")
