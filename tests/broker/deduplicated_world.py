"""One named producer on topic `t`: connecting, publishing, what is stored, what the broker knows of its sequence ids."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cepheid_broker.publishing.topic_deduplication import TopicDeduplication
from cepheid_managed_ledger import ManagedLedger, TooManyAppendsError
from cepheid_metadata import Position
from cepheid_wire import TopicName, parse_metadata
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full

TOPIC = TopicName.parse("t")
NAME = "scripted"  # what scripted_client.message() says in the metadata
REPEATED = (-1, -1)


@asynccontextmanager
async def deduplicating(**settings: Any) -> Any:
    keep = {"retention_time_min": -1, "retention_size_mb": -1}
    policies = {"deduplication": True, "dedup_snapshot_entries": 10, **keep}
    async with BrokerWorld(policies=policies, **settings) as world, await world.client() as client:
        yield world, client


async def connect(client: ScriptedClient, *, epoch: int = 0, producer_id: int = 0) -> int:
    """The last sequence id that the broker says it has."""
    return int((await client.produce_on("t", producer_id, producer_name=NAME, epoch=epoch)).last_sequence_id)


async def reconnect(client: ScriptedClient, epoch: int) -> int:
    """After the broker has closed the producer."""
    for attempt in range(200):
        ask = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=attempt, producer_name=NAME, epoch=epoch)
        client.send(ask)
        received = await client.receive()
        assert received is not None
        if isinstance(received.body, pb.CommandProducerSuccess):
            return int(received.body.last_sequence_id)
        assert isinstance(received.body, pb.CommandError), received.body
        await asyncio.sleep(0.02)
    raise AssertionError("never admitted")


async def publish(client: ScriptedClient, *sequence_ids: int) -> list[tuple[int, int]]:
    for sequence_id in sequence_ids:
        client.send_message(sequence_id, b"payload %d" % sequence_id)
    positions = []
    for sequence_id in sequence_ids:
        receipt = await client.expect(pb.CommandSendReceipt)
        assert receipt.sequence_id == sequence_id, "in SEND order"
        positions.append(position_of(receipt))
    return positions


def position_of(receipt: pb.CommandSendReceipt) -> tuple[int, int]:
    ids = receipt.message_id.ledgerId, receipt.message_id.entryId
    return REPEATED if ids == ((1 << 64) - 1,) * 2 else ids


async def stored(world: BrokerWorld) -> list[int]:
    """Sequence ids of everything in the topic."""
    ledger = world.topic("t").ledger
    found: list[int] = []
    position = ledger.next_position(ledger.first_position())
    while ledger.is_valid(position):
        for group in await ledger.read(position, max_entries=1000, max_bytes=1 << 20):
            found += [parse_metadata(payload).sequence_id for payload in group.payloads()]
            position = ledger.next_position(Position(group.ledger_id, group.last_entry_id))
    return found


def deduplication(world: BrokerWorld) -> TopicDeduplication:
    found = world.topic("t").deduplication
    assert found is not None
    return found


class HeldAppends:
    """The topic's ledger takes appends, and does not do them until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ledger: ManagedLedger) -> None:
        self._append = ledger.append
        self.held: list[tuple[Any, ...]] = []
        monkeypatch.setattr(ledger, "append", lambda *args: self.held.append(args))

    def let_go(self) -> None:
        held, self.held = self.held, []
        for args in held:
            self._append(*args)

    def refuse(self) -> None:
        held, self.held = self.held, []
        for payloads, on_done, *_ in held:
            on_done(TooManyAppendsError("planted"), len(payloads))


def client_window(world: BrokerWorld) -> int:
    return world.broker.statistics().publish_buffer_bytes
