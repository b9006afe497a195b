"""Producers of a topic with deduplication: they send, lose their connection, and send again what they were not answered (H3, H4).

    client ──SENDs──► Producer, PersistentTopic, TopicDeduplication of a broker's process ──► its managed ledger
       ▲                                                   └── receipts: position, or -1:-1 for "you sent that before"
       └── reconnects, to whichever broker serves the topic or believes so, and resends from the first unanswered SEND on

Clients are in no process: they outlive every broker. Their messages are numbered, some are chunked; a message is stored when its
last chunk is.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.protobuf.message import Message

from cepheid_broker.dispatch import CatchUpTurns, ReadAheadBudget, SharedDispatch
from cepheid_broker.errors import BrokerError
from cepheid_broker.policies.topic_policies import TopicPolicies
from cepheid_broker.publish_window import PublishBudget, PublishWindow
from cepheid_broker.publishing.producer import Producer
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_broker.traffic import BrokerTraffic
from cepheid_managed_ledger import ManagedLedgerConfig, Retention
from cepheid_metadata import Position
from cepheid_ports import TaskOwner
from cepheid_ports.refusal_log import RefusalLog
from cepheid_wire import CommandType, FrameSplitter, SendCommand, ServerError, TopicName, encode_tail, parse_command, signed64
from cepheid_wire import pulsar_api_pb2 as pb
from tests.simulation.checks.history import History
from tests.simulation.workloads.ledgers import EXPECTED, Quorums
from tests.simulation.workloads.owners import OwnershipWorkload
from tests.simulation.world.node import Node
from tests.simulation.world.sim_broker import SimBroker

POLICIES = TopicPolicies(deduplication=True, dedup_snapshot_entries=5, dedup_snapshot_s=30)
REPEATED = Position(-1, -1)
_MOST_UNANSWERED = 8
_CONNECT_S = 6.0
_CLOSED = "closed"


class Send(NamedTuple):
    sequence_id: int
    is_last: bool  # the only or the last chunk of its message
    tail: bytes


class SimPeer:
    """A connection to one broker's process: what the client hears of it, until it breaks."""

    closed = False
    writable = True
    address = reached_host = client_version = "simulated"
    connected_at_ms = 0
    principal = None

    def __init__(self, node: Node) -> None:
        self.node = node
        self.window = PublishWindow(1 << 30, PublishBudget(1 << 30), lambda: None, lambda: None)
        self.heard: deque[tuple[int, Position] | str] = deque()
        self.producer: Producer | None = None
        self.admitted = False
        self.answered = asyncio.Event()
        self._splitter = FrameSplitter(1 << 24)

    def break_off(self) -> None:
        """The client is gone; the broker notices at its next step."""
        if not self.closed:
            self.closed = True
            self.heard.clear()
            if self.producer is not None:
                self.node.call_soon(self.producer.detach)

    def write(self, frames: bytes) -> None:
        if self.closed or not self.node.alive:
            return
        for frame in self._splitter.feed(frames):
            assert frame.type == CommandType.SEND_RECEIPT, f"an unexpected answer of type {frame.type}"
            receipt = parse_command(frame.command).send_receipt
            position = Position(signed64(receipt.message_id.ledgerId), signed64(receipt.message_id.entryId))
            self.heard.append((receipt.sequence_id, position))

    def write_buffers(self, buffers: Sequence[Any]) -> None:
        raise NotImplementedError

    def send(self, body: Message) -> None:
        raise NotImplementedError

    def send_error(self, request_id: int, error: ServerError, message: str) -> None:
        raise NotImplementedError

    def close(self, reason: str) -> None:
        raise NotImplementedError

    async def is_alive(self) -> bool:
        return not self.closed

    # ProducerOwner

    def on_admitted(self, producer: Producer) -> None:
        self.admitted = True
        self.answered.set()

    def on_waiting(self, producer: Producer) -> None:
        raise NotImplementedError

    def on_refused(self, producer: Producer, error: BrokerError) -> None:
        self.answered.set()  # the client tries again

    def on_closed_by_broker(self, producer: Producer) -> None:
        self.heard.append(_CLOSED)


@dataclass(slots=True)
class Client:
    name: str
    sent: int = 0  # messages so far
    unanswered: deque[Send] = field(default_factory=deque)
    answered: dict[int, Position] = field(default_factory=dict)  # by sequence id of whole messages
    peer: SimPeer | None = None


class DedupWorkload:
    def __init__(self, name: str, rng: random.Random, history: History, quorums: Quorums, *, clients: int = 2) -> None:
        self.topic = TopicName.parse(f"persistent://public/default/{name}")
        self.config = ManagedLedgerConfig(
            ensemble_size=quorums.ensemble_size,
            write_quorum=quorums.write_quorum,
            ack_quorum=quorums.ack_quorum,
            retention=Retention(time_ms=-1, size_bytes=-1),  # the audit reads everything
        )
        self._random = rng
        self._history = history
        self.clients = [Client(f"client-{number}") for number in range(1, clients + 1)]
        self.serving: dict[str, tuple[Node, PersistentTopic]] = {}  # by broker
        self.operations = 0
        self.owners: OwnershipWorkload | None = None  # None: brokers fight
        self.stopped = False
        """No new messages; what is unanswered is still sent again."""

    @property
    def is_quiet(self) -> bool:
        return all(not client.unanswered for client in self.clients)

    # Brokers

    async def own(self, broker: SimBroker) -> None:
        """As `TopicWorkload.own`: two brokers do this, and depose each other. In the end nobody gives it up any more."""
        rng = self._random
        while True:
            await asyncio.sleep(rng.choice((0.0, 0.1, 0.5, 2.0)))
            if self.owners is not None and not await self.owners.is_here(broker, self.topic):
                continue
            try:
                topic = await self.open(broker)
            except EXPECTED as error:
                self._history.note(f"{broker.process} cannot open {self.topic}: {error}")
                continue
            if self.owners is not None:
                self.owners.on_open(broker, self.topic, topic.ledger)
            self.serving[broker.name] = broker.node, topic
            try:
                await self._serve(topic)
            except EXPECTED as error:
                self._history.note(f"{broker.process} {self.topic}: {error!r}")

    async def _serve(self, topic: PersistentTopic) -> None:
        """Until it fails or is given up; one that is deposed goes on until it finds out."""
        rng = self._random
        while not topic.closed:
            await asyncio.sleep(rng.choice((0.01, 0.1)))
            topic.on_tick(1.0)
            if not topic.closed and not self.stopped and rng.random() < 0.02:
                await topic.unload("somebody else's turn")
                return
        await topic.ledger.aclose()

    async def open(self, broker: SimBroker) -> PersistentTopic:
        ledger = await broker.managed_ledgers.open(self.topic, self.config)
        tasks, traffic = TaskOwner(f"dedup {broker.process}"), BrokerTraffic()
        shared = SharedDispatch(ReadAheadBudget(1 << 20), CatchUpTurns(1.0, traffic, broker.ports.seconds))
        topic = PersistentTopic(
            self.topic, ledger, POLICIES, BrokerSettings(close_timeout_s=4.0), shared, tasks, traffic, on_failed=lambda *_: None
        )
        try:
            await topic.open()
        except Exception:
            await ledger.aclose()
            raise
        self._history.note(lambda: f"{broker.process} opened {topic.deduplication!r}, {topic.deduplication.sequences.snapshot()}")
        return topic

    # Clients

    async def produce(self, client: Client) -> None:
        """Outside of all processes, until everything is answered."""
        rng = self._random
        while not (self.stopped and not client.unanswered):
            await asyncio.sleep(rng.choice((0.0, 0.02, 0.2)))
            if client.peer is None:
                await self.connect(client)
                continue
            self.hear(client)
            if client.peer is not None and rng.random() < 0.02:
                self._did("lose a producer's connection")
                self.disconnect(client)
            elif client.peer is not None and not self.stopped and len(client.unanswered) < _MOST_UNANSWERED:
                self.publish(client, rng.choice((1, 1, 2, 3)))

    def publish(self, client: Client, messages: int = 1, *, chunks: int | None = None, arrive: int | None = None) -> None:
        """`arrive`: so many of its SENDs, if not all."""
        sends: list[Send] = []
        for _ in range(messages):
            self._did("publish once")
            sends += _message(client.name, client.sent, chunks or self._random.choice((1, 1, 1, 3)))
            client.sent += self._random.choice((1, 1, 5))
        client.unanswered += sends
        self._deliver(client, sends[:arrive])

    async def connect(self, client: Client) -> bool:
        """Resends what is unanswered. False: nobody serves, or not now."""
        places = [place for place in self.serving.values() if place[0].alive and not place[1].closed]
        if not places:
            return False
        node, topic = self._random.choice(places)
        peer = SimPeer(node)
        peer.producer = Producer(topic, peer, 0, client.name, owner=peer, refusals=RefusalLog())
        opening = node.start(_seat(topic, peer.producer, peer.answered), name=f"connect {client.name}")
        await asyncio.wait([opening], timeout=_CONNECT_S)
        if not peer.admitted:
            opening.cancel()
            peer.break_off()
            return False
        client.peer = peer
        self._deliver(client, list(client.unanswered))
        return True

    def disconnect(self, client: Client) -> None:
        assert client.peer is not None
        client.peer.break_off()
        client.peer = None

    def hear(self, client: Client) -> None:
        peer, history = client.peer, self._history
        assert peer is not None
        while peer.heard:
            heard = peer.heard.popleft()
            if isinstance(heard, str):
                self.disconnect(client)
                return
            sequence_id, position = heard
            send = client.unanswered[0] if client.unanswered else None
            in_turn = send is not None and send.sequence_id == sequence_id
            history.check("H4", in_turn, lambda s=sequence_id, e=send: f"{client.name} is answered {s} and waits for {e}")
            client.unanswered.popleft()
            if send is not None and send.is_last:
                client.answered[sequence_id] = position
                history.note(lambda s=sequence_id, p=position: f"{client.name} is told {s} at {p}")
        if not peer.node.alive:
            self.disconnect(client)

    def _deliver(self, client: Client, sends: list[Send]) -> None:
        assert client.peer is not None
        if client.peer.producer is None:
            return
        while sends:
            # Chunks come one by one: they are large, so that each has an append of its own.
            count = next((place for place, send in enumerate(sends) if not send.is_last), len(sends)) or 1
            client.peer.node.call_soon(_take, client.peer.producer, sends[:count])
            sends = sends[count:]

    def _did(self, operation: str) -> None:
        self.operations += 1
        self._history.did(operation)

    # Afterwards

    def check(self, entries: list[tuple[Position, bytes]]) -> None:
        """H3 (and H1, for what was answered): `entries` are all there are, in order."""
        for client in self.clients:
            self._check_client(client, entries)

    def _check_client(self, client: Client, entries: list[tuple[Position, bytes]]) -> None:
        history = self._history
        found: dict[int, Position] = {}
        chunks: dict[int, list[int]] = {}
        for position, payload in entries:
            name, sequence_id, is_last, chunk_id = _read(payload)
            if name == client.name:
                chunks.setdefault(sequence_id, []).append(chunk_id)
            if name == client.name and is_last:
                rises = sequence_id > max(found, default=-1)
                history.check("H3", rises, lambda p=position, s=sequence_id: f"{client.name}: {s} at {p} comes after {found}")
                found[sequence_id] = position
        for sequence_id, stored in chunks.items():
            # Consumers of the C++ library never deliver a message whose chunks they see twice, or in another order.
            once = stored == list(range(len(stored)))
            history.check("H3", once, lambda s=sequence_id, c=stored: f"{client.name}: {s} is stored as chunks {c}")
        for sequence_id, told in client.answered.items():
            place = found.get(sequence_id)
            history.check(
                "H3",
                place is not None and told in (place, REPEATED),
                lambda s=sequence_id, t=told, p=place: f"{client.name} was told that {s} is stored, at {t}; it is at {p}",
            )


async def _seat(topic: PersistentTopic, producer: Producer, answered: asyncio.Event) -> None:
    """As a connection does (connection_producer.py), but that it gives up where that would ask again."""
    if not topic.closed and topic.admission.ask(producer) is None:
        await answered.wait()


def _take(producer: Producer, sends: list[Send]) -> None:
    """One loop turn of a connection."""
    for send in sends:
        producer.take(SendCommand(0, send.sequence_id, None, None, False, None, None, False), memoryview(send.tail))
    producer.flush()


def _message(name: str, sequence_id: int, chunks: int) -> list[Send]:
    payload = f"{name}-{sequence_id}".encode()
    if chunks == 1:
        metadata = pb.MessageMetadata(producer_name=name, sequence_id=sequence_id, publish_time=1)
        return [Send(sequence_id, True, encode_tail(metadata, payload))]
    sends = []
    for index in range(chunks):
        metadata = pb.MessageMetadata(producer_name=name, sequence_id=sequence_id, publish_time=1)
        metadata.uuid, metadata.chunk_id = payload.decode(), index
        metadata.num_chunks_from_msg, metadata.total_chunk_msg_size = chunks, len(payload)
        sends.append(Send(sequence_id, index + 1 == chunks, encode_tail(metadata, payload)))
    return sends


def _read(payload: bytes) -> tuple[str, int, bool, int]:
    """Producer, sequence id, whether the message is whole with it, and which chunk it is. Read from the bytes, not by what is
    tested."""
    metadata_bytes = int.from_bytes(payload[6:10], "big")
    metadata = pb.MessageMetadata.FromString(payload[10 : 10 + metadata_bytes])
    whole = not metadata.HasField("chunk_id") or metadata.chunk_id == metadata.num_chunks_from_msg - 1
    return metadata.producer_name, metadata.sequence_id, whole, metadata.chunk_id
