"""A producer of the simulated clients: sends in order, keeps what is not answered, and sends it again after each reconnect.

    publish ──► unanswered ──SEND──► receipt of the oldest ──► told: position, or -1:-1 for "sent before"
                    ├── SEND_ERROR ChecksumError for the oldest: it was damaged on its way, and is given up
                    └── connection lost, CLOSE_PRODUCER, SEND_ERROR: find the topic, PRODUCER, all of it again, same sequence ids

Facts are the client libraries' (protocol.md §9, §10): an answer is always for the oldest SEND; after every other SEND_ERROR the
connection goes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from cepheid_wire import CommandType, ServerError, TopicName, encode_batch, encode_command, encode_tail, signed64
from cepheid_wire import pulsar_api_pb2 as pb
from tests.history.events import Position
from tests.simulation.checks.client_notes import ClientNotes
from tests.simulation.world.sim_client import CLIENT_ERRORS, ClientConnection, SimClient
from tests.simulation.world.sim_clock import true_ms

MOST_CHUNKS = 8
BACKOFF_S = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True, slots=True)
class Sending:
    """One SEND: a message, a batch of some with one key, or a chunk."""

    sequence_id: int
    uids: tuple[str, ...]
    is_batch: bool
    tail: bytes
    chunk: int = 0


class SimProducer:
    def __init__(self, client: SimClient, topic: TopicName, name: str, notes: ClientNotes) -> None:
        self.client = client
        self.topic = topic
        self.name = name
        self._notes = notes
        self._id = client.next_id()
        self._epoch = 0
        self._sent = 0
        self._connection: ClientConnection | None = None
        self._lost = asyncio.Event()
        self._closed_early = False
        self.unanswered: deque[Sending] = deque()
        self.terminated = False

    def __repr__(self) -> str:
        state = "connected" if self.ready else "not connected"
        return f"<SimProducer {self.name} of {self.topic}, {state}, {len(self.unanswered)} of {self._sent} unanswered>"

    @property
    def ready(self) -> bool:
        return self._connection is not None

    def publish(
        self,
        messages: int,
        key: str,
        *,
        batch: bool,
        chunks: int = 1,
        padding: int = 0,
        delay_ms: int = 0,
        damaged: bool = False,
    ) -> None:
        """`messages` of one key, in one batch or one by one; or one message in `chunks` (at most MOST_CHUNKS). `damaged`: the first
        SEND does not have the checksum of what it carries, however often it is sent."""
        first, payloads = self._sent, [f"{self.name}/{self._sent + index}" for index in range(messages)]
        self._sent += messages
        if batch:
            sendings = [Sending(first, tuple(payloads), True, self._batch(first, payloads, key, padding))]
        elif chunks > 1:
            sendings = self._chunks(first, payloads[0], key, chunks)
        else:
            tails = (self._plain(first + index, uid, key, padding, delay_ms) for index, uid in enumerate(payloads))
            sendings = [Sending(first + index, (payloads[index],), False, tail) for index, tail in enumerate(tails)]
        if damaged:
            sendings[0] = replace(sendings[0], tail=_with_wrong_checksum(sendings[0].tail))
        for sending in sendings:
            for index, uid in enumerate(sending.uids):
                self._notes.send(self.topic, self.name, uid, key, order_of(sending.sequence_id + index, sending.chunk))
        self.unanswered += sendings
        self._transmit(sendings)

    async def stay_connected(self) -> None:
        """For the life of the client: reconnects, and sends again. Ends when the topic is terminated."""
        attempts = 0
        while not self.terminated:
            try:
                await self._connect()
            except CLIENT_ERRORS as error:
                self.client.history.note(lambda error=error: f"{self.name} cannot connect: {error!r}")
                self.terminated = getattr(error, "code", None) == ServerError.TOPIC_TERMINATED_ERROR
                await asyncio.sleep(BACKOFF_S[min(attempts, len(BACKOFF_S) - 1)])
                attempts += 1
                continue
            attempts = 0
            await self._lost.wait()

    async def _connect(self) -> None:
        connection = await self.client.find(self.topic)
        connection.producers[self._id] = self
        self._closed_early = False
        self._epoch += 1
        ask = pb.CommandProducer(
            topic=str(self.topic), producer_id=self._id, request_id=0, producer_name=self.name, epoch=self._epoch
        )
        try:
            await connection.request(ask)
            if connection.lost or self._closed_early:
                raise ConnectionResetError("lost at once")
        except BaseException as error:
            connection.producers.pop(self._id, None)
            if isinstance(error, TimeoutError):  # it may yet be opened there
                connection.ask(pb.CommandCloseProducer(producer_id=self._id, request_id=0)).add_done_callback(_hear)
            raise
        self._lost.clear()
        self._connection = connection
        self._transmit(self.unanswered, again=True)

    def _transmit(self, sendings: Any, *, again: bool = False) -> None:
        if self._connection is None or not sendings:
            return
        frames = []
        for sending in sendings:
            if again:
                self._notes.resend(self.topic, self.name, sending.uids)
            send = pb.CommandSend(producer_id=self._id, sequence_id=sending.sequence_id)
            if sending.is_batch:
                send.num_messages = len(sending.uids)
                send.highest_sequence_id = sending.sequence_id + len(sending.uids) - 1
            frames.append(encode_command(pb.BaseCommand(type=pb.BaseCommand.SEND, send=send), sending.tail))
        self._connection.write(b"".join(frames))

    # What comes

    def on_command(self, kind: int, body: Any, tail: memoryview) -> None:
        if kind == CommandType.SEND_RECEIPT:
            ident = body.message_id
            self._on_receipt(body.sequence_id, (signed64(ident.ledgerId), signed64(ident.entryId)))
        elif self._connection is None:
            self._closed_early |= kind == CommandType.CLOSE_PRODUCER  # behind the answer that it is open, in one read
        elif kind == CommandType.SEND_ERROR:
            self._on_refused(body)
        else:
            self._connection.producers.pop(self._id, None)
            self._on_lost()

    def _on_receipt(self, sequence_id: int, place: tuple[int, int]) -> None:
        if (answered := self._answered(sequence_id, place)) is not None:
            for index, uid in enumerate(answered.uids):
                position: Position = (*place, index if answered.is_batch else -1)
                self._notes.sent(self.topic, self.name, uid, position)

    def _on_refused(self, refusal: pb.CommandSendError) -> None:
        name = pb.ServerError.Name(refusal.error)
        self.client.history.note(lambda: f"{self.name} hears {name}: {refusal.message}")
        if refusal.error == pb.ChecksumError:
            if (answered := self._answered(refusal.sequence_id, name)) is not None:
                for uid in answered.uids:
                    self._notes.refused(self.topic, self.name, uid, name)
        elif self._connection is not None:
            self._connection.abort()

    def _answered(self, sequence_id: int, answer: object) -> Sending | None:
        oldest = self.unanswered[0] if self.unanswered else None
        in_turn = oldest is not None and oldest.sequence_id == sequence_id
        self.client.history.check(
            "H4", in_turn, lambda: f"{self.name} is answered {sequence_id} with {answer} and waits for {oldest}"
        )
        return self.unanswered.popleft() if self.unanswered else None

    def on_connection_lost(self, connection: ClientConnection) -> None:
        if self._connection is connection:
            self._on_lost()

    def _on_lost(self) -> None:
        self._connection = None
        self._lost.set()

    # Bytes

    def _metadata(self, sequence_id: int, key: str) -> pb.MessageMetadata:
        metadata = pb.MessageMetadata(producer_name=self.name, sequence_id=sequence_id, publish_time=true_ms())
        if key:
            metadata.partition_key = key
        return metadata

    def _plain(self, sequence_id: int, uid: str, key: str, padding: int, delay_ms: int) -> bytes:
        metadata = self._metadata(sequence_id, key)
        if delay_ms:
            metadata.deliver_at_time = metadata.publish_time + delay_ms
        return encode_tail(metadata, uid.encode() + b"." * padding)

    def _batch(self, first: int, uids: list[str], key: str, padding: int) -> bytes:
        metadata = self._metadata(first, key)
        metadata.num_messages_in_batch = len(uids)
        metadata.highest_sequence_id = first + len(uids) - 1
        singles = [
            (pb.SingleMessageMetadata(payload_size=0, partition_key=key, sequence_id=first + index), uid.encode() + b"." * padding)
            for index, uid in enumerate(uids)
        ]
        return encode_tail(metadata, encode_batch(singles))

    def _chunks(self, sequence_id: int, uid: str, key: str, chunks: int) -> list[Sending]:
        """All have one sequence id (protocol.md §10.5); for the history each is a message of its own, in the order of chunks."""
        sendings = []
        for index in range(chunks):
            part = f"{uid}#{index}"
            metadata = self._metadata(sequence_id, key)
            metadata.uuid, metadata.chunk_id = uid, index
            metadata.num_chunks_from_msg, metadata.total_chunk_msg_size = chunks, chunks * len(part)
            sendings.append(Sending(sequence_id, (part,), False, encode_tail(metadata, part.encode()), index))
        return sendings


def _with_wrong_checksum(tail: bytes) -> bytes:
    """It stands behind the two bytes that say that there is one (protocol.md §1)."""
    return tail[:2] + bytes([tail[2] ^ 1]) + tail[3:]


def order_of(sequence_id: int, chunk: int) -> int:
    """The place of a message, or of a chunk, among all that its producer sends."""
    return sequence_id * MOST_CHUNKS + chunk


def _hear(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
