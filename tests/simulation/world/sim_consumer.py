"""A consumer of the simulated clients: permits, a queue of what came, acknowledgements of every kind, seeks.

    stay_connected ──► find ──► SUBSCRIBE ──► FLOW(queue) ──► MESSAGE … ──► queue ──take──► the application ──► ACK, REDELIVER
          └── connection lost, CLOSE_CONSUMER: what is in the queue is forgotten, SUBSCRIBE again

As the client libraries do (protocol.md §13): a message taken gives a permit back, in FLOWs of half a queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cepheid_broker.dispatch.key_hash import hash_of_metadata
from cepheid_wire import CommandType, TopicName, count_messages, parse_metadata, signed64
from cepheid_wire import pulsar_api_pb2 as pb
from tests.simulation.checks.client_notes import mask_of, words_of
from tests.simulation.world.sim_client import CLIENT_ERRORS, ClientConnection, SimClient
from tests.simulation.world.sim_producer import BACKOFF_S

_KINDS = {"Exclusive": 0, "Shared": 1, "Failover": 2, "Key_Shared": 3}


@dataclass(slots=True)
class Delivery:
    """One entry, as it came."""

    ledger_id: int
    entry_id: int
    messages: int
    left: int
    """Mask of the messages that are not acknowledged."""
    connection: ClientConnection

    @property
    def position(self) -> tuple[int, int]:
        return self.ledger_id, self.entry_id

    @property
    def is_batch(self) -> bool:
        return self.messages > 1


class SimConsumer:
    def __init__(
        self,
        client: SimClient,
        topic: TopicName,
        subscription: str,
        kind: str,
        name: str,
        *,
        queue: int = 10,
        ranges: tuple[tuple[int, int], ...] = (),
        at_the_end: bool = False,
    ) -> None:
        """`ranges`: of hashes of keys, which it asks for itself (sticky Key_Shared). `at_the_end`: where its subscription begins if
        it is new; else it begins with the topic."""
        self.client = client
        self.topic = topic
        self.subscription = subscription
        self.kind = kind
        self.name = name
        self.connection: ClientConnection | None = None
        self.waiting: deque[Delivery] = deque()
        self.arrived = asyncio.Event()
        self.ended = False
        self.at_end = False
        """The broker said that all of a terminated topic is acknowledged."""
        self._queue = queue
        self._ranges = ranges
        self._begins = pb.CommandSubscribe.Latest if at_the_end else pb.CommandSubscribe.Earliest
        self._id = client.next_id()
        self._permits_due = 0
        self._lost = asyncio.Event()
        self._closed_early = False

    def __repr__(self) -> str:
        return f"<SimConsumer {self.name} of {self.subscription}, {'connected' if self.connection else 'not connected'}>"

    @property
    def ordered(self) -> bool:
        return self.kind in ("Exclusive", "Failover")

    async def stay_connected(self) -> None:
        """Until it is closed."""
        attempts = 0
        while not self.ended:
            try:
                await self._subscribe()
            except CLIENT_ERRORS as error:
                self.client.history.note(lambda error=error: f"{self.name} cannot subscribe: {error!r}")
                await asyncio.sleep(BACKOFF_S[min(attempts, len(BACKOFF_S) - 1)])
                attempts += 1
                continue
            attempts = 0
            await self._lost.wait()

    async def _subscribe(self) -> None:
        connection = await self.client.find(self.topic)
        connection.consumers[self._id] = self
        self._closed_early = False
        ask = self._new_ask()
        try:
            await connection.request(ask)
            if self.ended or self._closed_early or connection.lost or connection.consumers.get(self._id) is not self:
                raise ConnectionResetError("closed or lost at once")
        except BaseException:
            self._close_at(connection)
            raise
        self._lost.clear()
        self._permits_due = 0
        self.connection = connection
        connection.send(pb.CommandFlow(consumer_id=self._id, messagePermits=self._queue))
        connection.ask(pb.CommandGetLastMessageId(consumer_id=self._id, request_id=0)).add_done_callback(self._on_last)

    def _on_last(self, answer: asyncio.Future[Any]) -> None:
        """As client libraries ask when they connect: what is the last message?"""
        if (
            not answer.cancelled()
            and answer.exception() is None
            and signed64((last := answer.result().last_message_id).ledgerId) >= 0
        ):
            index = last.batch_index if last.HasField("batch_index") else -1
            place = last.ledgerId, last.entryId
            self.client.history.told_last.setdefault((str(self.topic), place), {}).setdefault(index, self.name)

    def _new_ask(self) -> pb.CommandSubscribe:
        ask = pb.CommandSubscribe(
            topic=str(self.topic),
            subscription=self.subscription,
            consumer_id=self._id,
            request_id=0,
            consumer_name=self.name,
            durable=True,
            initialPosition=self._begins,
        )
        ask.subType = _KINDS[self.kind]  # type: ignore[assignment] # the enum's numbers
        for start, end in self._ranges:
            ask.keySharedMeta.keySharedMode = pb.STICKY
            ask.keySharedMeta.hashRanges.add(start=start, end=end)
        return ask

    def _close_at(self, connection: ClientConnection) -> None:
        """It may yet be opened there, or be open."""
        connection.consumers.pop(self._id, None)
        if not connection.lost:
            connection.ask(pb.CommandCloseConsumer(consumer_id=self._id, request_id=0)).add_done_callback(_hear)

    # What comes

    def on_command(self, kind: int, body: Any, tail: memoryview) -> None:
        if self.connection is None:
            self.at_end |= kind == CommandType.REACHED_END_OF_TOPIC
            self._closed_early |= kind == CommandType.CLOSE_CONSUMER  # behind the answer that it is open, in one read
            return
        if kind == CommandType.MESSAGE:
            self._on_message(body, tail)
        elif kind == CommandType.REACHED_END_OF_TOPIC:
            self.at_end = True
        elif kind == CommandType.CLOSE_CONSUMER:
            self.connection.consumers.pop(self._id, None)
            self._on_lost()

    def _on_message(self, message: pb.CommandMessage, tail: memoryview) -> None:
        assert self.connection is not None
        ident, messages = message.message_id, count_messages(tail)
        left = mask_of(message.ack_set) if message.ack_set else (1 << messages) - 1
        if self._ranges:
            key_hash = hash_of_metadata(parse_metadata(tail))
            is_own = any(first <= key_hash <= last for first, last in self._ranges)
            self.client.history.check("H10", is_own, lambda: f"{self!r} of the hashes {self._ranges} got one of {key_hash}")
        self.waiting.append(Delivery(ident.ledgerId, ident.entryId, messages, left, self.connection))
        self.arrived.set()

    def on_connection_lost(self, connection: ClientConnection) -> None:
        if self.connection is connection:
            self._on_lost()

    def _on_lost(self) -> None:
        self.connection = None
        self.waiting.clear()
        self._lost.set()
        self.arrived.set()

    # What the application does

    def take(self) -> Delivery | None:
        """The next entry, if one is here."""
        if not self.waiting:
            return None
        delivery = self.waiting.popleft()
        self.client.history.did("receive")
        self._permits_due += delivery.messages
        if self.connection is not None and self._permits_due >= max(1, self._queue // 2):
            self.connection.send(pb.CommandFlow(consumer_id=self._id, messagePermits=self._permits_due))
            self._permits_due = 0
        return delivery

    def acknowledge(
        self, deliveries: Sequence[Delivery], *, cumulative: bool = False, keep: int = 0, response: bool = False
    ) -> asyncio.Future[Any] | None:
        """Whole entries; with `keep`, all of their messages but those of this mask. The answer, if a response was asked for."""
        connection = self.connection
        if connection is None:
            return None
        self.client.history.did("acknowledge")
        ack = pb.CommandAck(consumer_id=self._id, ack_type=pb.CommandAck.Cumulative if cumulative else pb.CommandAck.Individual)
        for delivery in deliveries:
            ident = ack.message_id.add(ledgerId=delivery.ledger_id, entryId=delivery.entry_id)
            if keep:
                ident.ack_set.extend(words_of(keep))
        if response:
            return connection.ask(ack)
        connection.send(ack)
        return None

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Negative acknowledgement. Of ordered subscriptions everything unacknowledged comes again, and nothing is named."""
        if self.connection is None:
            return
        self.client.history.did("give back")
        ask = pb.CommandRedeliverUnacknowledgedMessages(consumer_id=self._id)
        for delivery in deliveries if not self.ordered else ():
            ask.message_ids.add(ledgerId=delivery.ledger_id, entryId=delivery.entry_id)
        self.connection.send(ask)

    async def seek(self, position: tuple[int, int], *, index: int = 0, messages: int = 1) -> bool:
        """To a message of a batch of so many: the words say what is left of it, as the Java client does. Whether the broker said
        that it was done."""
        ask = pb.CommandSeek(consumer_id=self._id, request_id=0)
        ask.message_id.ledgerId, ask.message_id.entryId = position
        if index:
            ask.message_id.ack_set.extend(words_of((1 << messages) - (1 << index)))
        return await self._seek(ask)

    async def seek_time(self, publish_time_ms: int) -> bool:
        """To the first message that was published then or later. No world does this: what is to come is known in scenarios only."""
        return await self._seek(pb.CommandSeek(consumer_id=self._id, request_id=0, message_publish_time=publish_time_ms))

    async def _seek(self, ask: pb.CommandSeek) -> bool:
        connection = self.connection
        if connection is None:
            return False
        self.client.history.did("seek")
        try:
            await connection.request(ask)
        except CLIENT_ERRORS:
            return False
        return True

    async def unsubscribe(self) -> None:
        """The subscription is to be gone, and this consumer ends, whatever the broker says."""
        if self.connection is None:
            return
        self.client.history.did("unsubscribe")
        try:
            await self.connection.request(pb.CommandUnsubscribe(consumer_id=self._id, request_id=0))
        except CLIENT_ERRORS as error:
            self.client.history.note(lambda error=error: f"{self.name} cannot unsubscribe: {error!r}")
        self.close()

    def close(self) -> None:
        """The application wants no more. What the broker says to it, nobody hears."""
        self.ended = True
        if self.connection is not None:
            self.client.history.did("close a consumer")
            connection = self.connection
            self._on_lost()
            self._close_at(connection)
        self._lost.set()


def _hear(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
