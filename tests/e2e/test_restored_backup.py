"""The metadata of a cluster is lost, and comes back from a backup that is older than what bookies hold."""

from __future__ import annotations

import asyncio
import json
import shutil
from asyncio import to_thread
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_ports import CepheidError
from cepheid_testkit import StandaloneCluster
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, assert_silent, client_of

OLD, NEW = "persistent://public/default/old", "persistent://public/default/new"


def cepheid(*words: str) -> str:
    """What a command prints; its error is raised."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None:
        raise result.exception
    return result.output


def subscribe(url: str) -> None:
    with client_of(url) as client:
        client.subscribe(OLD, "s", initial_position=EARLIEST)


def publish(url: str, topic: str, numbers: Iterable[int]) -> None:
    with client_of(url) as client:
        producer = client.create_producer(topic, batching_enabled=False)
        for number in numbers:
            producer.send(b"%d" % number)


def receive(url: str, count: int, *, acknowledged: int = 0) -> list[int]:
    """What the subscription has left; the first so many are acknowledged."""
    with client_of(url) as client:
        consumer = client.subscribe(OLD, "s", initial_position=EARLIEST)
        messages = [consumer.receive(TIMEOUT_MS) for _ in range(count)]
        assert_silent(consumer)
        for message in messages[:acknowledged]:
            consumer.acknowledge(message)
        return [int(message.data()) for message in messages]


async def admin_answers(cluster: StandaloneCluster) -> None:
    """Its port opens a moment after that of the protocol."""
    while True:
        try:
            await to_thread(cepheid, "bookies", "list", "--admin-url", cluster.admin_url)
            return
        except CepheidError:
            await asyncio.sleep(0.1)


def held(cluster: StandaloneCluster) -> set[int]:
    return {ledger_id for bookie in cluster.standalone.bookies.bookies() for ledger_id in bookie.ledgers()}


async def collected(cluster: StandaloneCluster) -> list[Any]:
    return [await collector.collect() for collector in cluster.standalone.bookies._collectors.values()]


@pytest.mark.slow
async def test_nothing_of_the_backup_is_lost_and_what_is_newer_is_named_and_kept_until_an_operator_confirms(tmp_path: Path) -> None:
    data, file = tmp_path / "data", tmp_path / "metadata.backup"
    async with StandaloneCluster(bookies=3, data_dir=data) as cluster:
        url, admin = cluster.service_url, ("--admin-url", cluster.admin_url)
        await admin_answers(cluster)
        await to_thread(subscribe, url)
        await to_thread(publish, url, OLD, range(10))
        await to_thread(receive, url, 10, acknowledged=3)
        await to_thread(cepheid, "topics", "unload", OLD, *admin)  # saves what is acknowledged
        await to_thread(publish, url, OLD, range(10, 15))
        assert "1 topic, " in await to_thread(cepheid, "metadata", "backup", str(file), *admin)
        in_backup = held(cluster)
        # An hour later: more in the ledger that was open, then a ledger and a topic that the backup does not know.
        await to_thread(publish, url, OLD, range(15, 20))
        await to_thread(cepheid, "topics", "unload", OLD, *admin)
        await to_thread(publish, url, OLD, range(20, 30))
        await to_thread(publish, url, NEW, range(5))
        before = held(cluster)
    newer = before - in_backup
    assert len(newer) >= 2
    shutil.move(data / "metadata", tmp_path / "lost")
    assert "metadata of cluster standalone" in cepheid("metadata", "check", str(file))
    await to_thread(cepheid, "metadata", "restore", str(file), "--metadata", f"rocksdb:{data / 'metadata'}")
    async with StandaloneCluster(bookies=3, data_dir=data) as cluster:
        url, admin = cluster.service_url, ("--admin-url", cluster.admin_url)
        await admin_answers(cluster)
        assert await to_thread(receive, url, 17) == list(range(3, 20)), "all of the backup, and what its open ledger got later"
        await to_thread(publish, url, OLD, [100])
        assert min(held(cluster) - before) > max(before), "no ledger id is given out twice"
        for _ in range(3):
            assert all(done.refused_restored for done in await collected(cluster))
        assert held(cluster) >= before
        report = json.loads(await to_thread(cepheid, "metadata", "report", "--json", *admin))
        assert set(map(int, report["unknown"])) == newer
        assert (report["missing"], report["moved"], report["silent"]) == ({}, {}, {})
        await to_thread(cepheid, "metadata", "confirm", "--yes", *admin)
        for _ in range(2):
            await collected(cluster)
        assert newer.isdisjoint(held(cluster))
        assert await to_thread(receive, url, 18) == [*range(3, 20), 100]
