"""Scenario 32, fifty-thousand-holes, in full size: as a text (scenarios/32b_holes.txt) it has a few of them. It stays in Python:
100,002 entries, looked at one by one as in every text, would take a minute.
"""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_bookie import StorageSettings
from cepheid_managed_ledger import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_metadata import Position
from cepheid_wire import TopicName
from tests.simulation.scenarios.scene import Scene

TOPIC = TopicName.parse("persistent://public/default/holes")
HOLES = 50_001


@pytest.mark.slow
def test_32_fifty_thousand_holes() -> None:
    """Every second of 100,002 entries is acknowledged and saved; the broker dies; the next one knows all of them."""
    scene = Scene("32_fifty_thousand_holes")
    scene.play(fifty_thousand_holes(scene))


async def fifty_thousand_holes(scene: Scene) -> None:
    await scene.raise_curtain(1, ("east", "west"))
    scene.tree.on_commit = None
    (b1,), (east, west) = scene.bookies.values(), scene.brokers.values()
    b1.observed = False
    b1.settings = StorageSettings(min_free_journal_bytes=0, min_free_data_bytes=0)
    b1.crash(power=True)
    await b1.start()
    for broker in (east, west):
        broker.crash()
        broker.observed, broker.settings = False, ManagedLedgerSettings()
        broker.start()
    ledger = await scene.at(east, east.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
    cursor = await scene.at(east, ledger.create_cursor("sub", ledger.last_confirmed))
    stored: list[Any] = []
    groups = 2 * HOLES // 1_000 + 1
    for _ in range(groups):
        east.node.context.run(ledger.append, [b""] * 1_000, lambda position, count: stored.append(position))
    await scene.wait_until(lambda: len(stored) == groups, "everything is stored")
    ledger_id = stored[0].ledger_id
    acked = [Position(ledger_id, entry_id) for entry_id in range(1, 2 * HOLES, 2)]

    async def acknowledge() -> None:
        assert cursor.acknowledge(acked) == []
        await cursor.saved()

    await scene.at(east, acknowledge())
    east.crash()
    b1.crash(power=True)
    await b1.start()
    ledger = await scene.at(west, west.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
    cursor = ledger.cursors["sub"]
    assert cursor.ack_set.acked_entries == HOLES
    assert all(cursor.is_acknowledged(position) for position in acked)
    assert not any(cursor.is_acknowledged(Position(ledger_id, entry_id)) for entry_id in range(0, 2 * HOLES, 2))
