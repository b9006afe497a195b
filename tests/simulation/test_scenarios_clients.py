"""Scenarios of producers and cursors. Numbers and names are those of the list in the README; every answer and commit is
checked as in random worlds, what a script asserts beside is what it is about.
"""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest

from cepheid_bookie import BookieSettings
from cepheid_broker.deduplication import ProducerSequence
from cepheid_broker.managed_ledger import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_metadata import Position
from cepheid_wire import TopicName
from tests.simulation.audit import read_all
from tests.simulation.history import InvariantViolation
from tests.simulation.mutants import MUTANTS
from tests.simulation.script import Script, restart
from tests.simulation.virtual_loop import SimulationError
from tests.simulation.workload_dedup import POLICIES, Client, DedupWorkload
from tests.simulation.workload_ledgers import Quorums
from tests.support import wait_until

TOPIC = TopicName.parse("persistent://public/default/holes")

# 30. dedup-after-failure


async def dedup_after_failure(script: Script) -> None:
    """The client's view: three messages answered, three under way when every bookie falls silent; then it sends them again."""
    workload = DedupWorkload("payments", script.random, script.history, Quorums(1, 1, 1), clients=1)
    (client,) = workload.clients
    topic = await script.at(script.east, workload.open(script.east))
    workload.serving["east"] = script.east.node, topic
    assert await workload.connect(client)
    workload.publish(client, 3, chunks=1)
    await hear_until(workload, client, answered=3)
    await asyncio.sleep(POLICIES.dedup_snapshot_s + 0.1)  # a snapshot is due by time

    for bookie in script.bookies:
        script.network.block("east", bookie, "add")
    workload.publish(client, 3, chunks=1)
    script.east.node.call_soon(topic.on_tick, 1.0)  # it is taken while they are under way
    await asyncio.sleep(1.5)  # it is saved: metadata is well
    await wait_until(lambda: topic.closed)
    workload.hear(client)
    assert client.peer is None, "the client is told to come back"

    topic = await script.at(script.west, workload.open(script.west))
    workload.serving = {"west": (script.west.node, topic)}
    assert await workload.connect(client)
    await hear_until(workload, client, answered=6)
    workload.check(await script.at(script.west, read_all(topic.ledger)))


async def hear_until(workload: DedupWorkload, client: Client, *, answered: int) -> None:
    def heard() -> bool:
        workload.hear(client)
        return len(client.answered) == answered

    await wait_until(heard)


def test_30_dedup_after_failure() -> None:
    """What was never stored is stored when it is sent again."""
    Script(1).run(dedup_after_failure)


def test_30_a_snapshot_that_names_what_was_pushed_loses_messages() -> None:
    with MUTANTS["name what was pushed when saving sequence ids"](), pytest.raises(InvariantViolation, match=r"^H3"):
        Script(1).run(dedup_after_failure)


async def sent_and_never_appended(script: Script) -> None:
    """The connection breaks while a message waits for the append before it; the topic lives on, and the message comes again."""
    workload = DedupWorkload("payments", script.random, script.history, Quorums(1, 1, 1), clients=1)
    (client,) = workload.clients
    topic = await script.at(script.east, workload.open(script.east))
    workload.serving["east"] = script.east.node, topic
    assert await workload.connect(client)
    workload.publish(client, 1, chunks=1)
    await asyncio.sleep(0)
    workload.publish(client, 1, chunks=1)
    await asyncio.sleep(0)
    workload.disconnect(client)
    assert await workload.connect(client)
    await hear_until(workload, client, answered=2)
    assert workload.serving["east"][1] is topic
    assert not topic.closed
    workload.check(await script.at(script.east, read_all(topic.ledger)))


def test_30_what_was_taken_and_never_appended_is_new_when_it_comes_again() -> None:
    Script(1).run(sent_and_never_appended)


def test_30_a_producer_that_keeps_what_it_never_appended_is_stuck() -> None:
    with mock.patch.object(ProducerSequence, "abandon"), pytest.raises((AssertionError, SimulationError)):
        Script(1).run(sent_and_never_appended)


# 32. fifty-thousand-holes, half-a-batch

HOLES = 50_001


def test_32_fifty_thousand_holes() -> None:
    """Every second of 100,002 entries is acknowledged and saved; the broker dies; the next one knows all of them."""

    async def course(script: Script) -> None:
        script.tree.on_commit = None  # 100,002 entries, looked at one by one, would take a minute
        script.b1.observed = False
        script.b1.settings = BookieSettings(bookie_id="b1", cluster_id="simulated", min_free_journal_bytes=0, min_free_data_bytes=0)
        await restart(script.b1)
        for broker in (script.east, script.west):
            broker.crash()
            broker.observed, broker.settings = False, ManagedLedgerSettings()
            broker.start()
        ledger = await script.at(script.east, script.east.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        cursor = await script.at(script.east, ledger.create_cursor("sub", ledger.last_confirmed))
        stored: list[Any] = []
        for _ in range(2 * HOLES // 1_000 + 1):
            script.east.node.context.run(ledger.append, [b""] * 1_000, lambda position, count: stored.append((position, count)))
        await wait_until(lambda: len(stored) == 2 * HOLES // 1_000 + 1, timeout_s=60)
        (first, _), *_ = stored
        acked = [Position(first.ledger_id, entry_id) for entry_id in range(1, 2 * HOLES, 2)]

        async def acknowledge() -> None:
            assert cursor.acknowledge(acked) == []
            await cursor.saved()

        await script.at(script.east, acknowledge())
        script.east.crash()
        await restart(script.b1)
        ledger = await script.at(script.west, script.west.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        cursor = ledger.cursors["sub"]
        assert cursor.ack_set.acked_entries == HOLES
        assert all(cursor.is_acknowledged(position) for position in acked)
        assert not any(cursor.is_acknowledged(Position(first.ledger_id, entry_id)) for entry_id in range(0, 2 * HOLES, 2))

    Script(1).run(course)


@pytest.mark.parametrize("ending", ["crash", "close"])
def test_32_half_a_batch(ending: str) -> None:
    """Only a part of one batch is acknowledged: that part is saved, and survives a crash as well as an orderly close."""

    async def course(script: Script) -> None:
        ledger = await script.at(script.east, script.east.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        cursor = await script.at(script.east, ledger.create_cursor("sub", ledger.last_confirmed))
        stored: list[Position] = []
        script.east.node.context.run(ledger.append, [b"a batch of four"], lambda position, count: stored.append(position))
        await wait_until(lambda: bool(stored))

        async def acknowledge() -> None:
            assert cursor.acknowledge_indexes(stored[0], (0b1010,), 4)
            if ending == "crash":
                await cursor.saved()
            else:
                await ledger.aclose()

        await script.at(script.east, acknowledge())
        script.east.crash()
        ledger = await script.at(script.west, script.west.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        assert ledger.cursors["sub"].unacked_words(stored[0]) == (0b1010,)
        assert not ledger.cursors["sub"].is_acknowledged(stored[0])

    Script(1).run(course)
