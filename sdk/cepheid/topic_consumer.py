"""The consumer of one unpartitioned topic, or of one partition.

    MESSAGE ──► unpack ──► messages ──► queue of the whole consumer ──receive──► application
                              └── permits go back to the broker as messages are taken, half a queue at a time

Rules
 1. Queued messages are dropped when the topic moves or the connection breaks: the broker redelivers them. Messages that the
    application has received can still be acknowledged.
 2. A message of a batch that was acknowledged here is not delivered again, even if the broker sends the whole batch again. This
    ends when the broker closes the consumer: the subscription may have been moved back.
 3. Every received message costs a permit and gives it back: when it is taken, or at once if it is not for the application.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from cepheid.acks import AckTracker, DeliveredMessages, bits_of
from cepheid.connection import Connection, Request
from cepheid.encryption import MessageDecryptor, OnDecryptionFailure, encrypted_payload
from cepheid.entry_reader import ChunkBuffer, Single, split_batch, split_plain_batch, unpack
from cepheid.errors import (
    ClosedError,
    ConnectError,
    Error,
    RefusedError,
    TimedOutError,
    UnreadableMessageError,
    UsageError,
    refused,
)
from cepheid.lookup import Lookup
from cepheid.message import EntryFacts, Message, messages_of
from cepheid.message_id import EARLIEST, LATEST, MessageId, as_protobuf
from cepheid.schemas import Schema, TopicSchema, topic_schema_of
from cepheid.topic_link import TopicLink
from cepheid_wire import (
    ServerError,
    TopicName,
    WireError,
    encode_body,
    messages_in,
    parse_metadata,
    signed64,
    split_tail,
    verify_tail,
)
from cepheid_wire import pulsar_api_pb2 as pb

log = logging.getLogger(__name__)

ACK_GROUP_S = 0.1
ACK_GROUP_ENTRIES = 1000
NACK_GROUP_S = 0.01
ACK_TIMEOUT_GROUP_S = 0.05
QUEUE_GROWTH = 8
QUEUE_GROWTH_BYTES = 32 << 20
"""Limit of the queue's size, estimated from the average size of received messages."""
_TYPES = {
    "exclusive": pb.CommandSubscribe.Exclusive,
    "shared": pb.CommandSubscribe.Shared,
    "failover": pb.CommandSubscribe.Failover,
    "key_shared": pb.CommandSubscribe.Key_Shared,
}
_NO_EPOCH = -1
MAX_UNCOUNTED = 10_000
"""Limit of entries whose cancelled deliveries are remembered, for consumers with dead letters."""


@dataclass(frozen=True, slots=True)
class NackBackoff:
    """Delay before a message that was given back: `first_s`, twice as long after each delivery, at most `limit_s`."""

    first_s: float = 1.0
    limit_s: float = 60.0

    def delay_s(self, redelivery_count: int) -> float:
        return min(self.limit_s, self.first_s * 2.0 ** min(redelivery_count, 60))


@dataclass(frozen=True, slots=True)
class KeyShared:
    """Sharing of keys among the consumers of a key_shared subscription. All of them must use the same mode.

    `hash_ranges`: the hashes of keys that this consumer gets, as pairs of first and last, from 0 to 65,535. The ranges of the
    consumers must not overlap, and keys without a consumer are not delivered. None: the broker assigns the keys.
    `out_of_order`: a consumer that joins gets new messages of a key while another one still has earlier ones.
    """

    hash_ranges: tuple[tuple[int, int], ...] | None = None
    out_of_order: bool = False

    def __post_init__(self) -> None:
        if self.hash_ranges is not None and not (
            self.hash_ranges and all(0 <= first <= last < 1 << 16 for first, last in self.hash_ranges)
        ):
            raise UsageError(f"hash_ranges must be pairs of first and last between 0 and 65,535, got {self.hash_ranges}")


@dataclass(slots=True)
class ConsumerOptions:
    """Options shared by the topics of one consumer."""

    subscription: str
    type: str
    schema: Schema[Any]
    name: str
    durable: bool = True
    start: MessageId = LATEST
    start_inclusive: bool = False
    receiver_queue: int = 1000
    priority: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    batch_index_acks: bool = True
    read_compacted: bool = False
    nack_backoff: NackBackoff = field(default_factory=NackBackoff)
    dead_letters_after: int | None = None  # deliveries after the first
    ack_timeout_s: float | None = None
    intercept: Callable[[Message[Any]], AbstractContextManager[None]] | None = None
    key_shared: KeyShared = field(default_factory=KeyShared)
    decryptor: MessageDecryptor = field(default_factory=lambda: MessageDecryptor(None))
    on_decryption_failure: OnDecryptionFailure = "fail"

    def __post_init__(self) -> None:
        if self.type not in _TYPES:
            raise UsageError(f"type must be one of {', '.join(_TYPES)}, got {self.type!r}")
        if self.receiver_queue < 1:
            raise UsageError(f"receiver_queue must be 1 or more messages, got {self.receiver_queue}")
        if self.ack_timeout_s is not None and self.ack_timeout_s <= 0:
            raise UsageError(f"ack_timeout_s must be more than 0 seconds, or None for no limit, got {self.ack_timeout_s}")
        if not self.subscription:
            raise UsageError("the subscription must have a name")
        if self.on_decryption_failure not in ("fail", "discard", "consume"):
            raise UsageError(f"on_decryption_failure must be fail, discard or consume, got {self.on_decryption_failure!r}")

    @property
    def is_shared(self) -> bool:
        return self.type in ("shared", "key_shared")


class Owner(Protocol):
    """The application's consumer, which owns topic consumers."""

    is_paused: bool

    def on_messages(self, messages: list[Message[Any]]) -> None: ...
    def drop_messages_of(self, source: TopicConsumer) -> int: ...
    def on_link_failed(self, source: TopicConsumer, error: Error) -> None: ...
    def on_dead_letter(self, source: TopicConsumer, message: Message[Any]) -> None: ...


class TopicConsumer(TopicLink):
    """The consumer of one topic or partition; see the module."""

    def __init__(
        self,
        topic: str,
        partition: int,
        consumer_id: int,
        options: ConsumerOptions,
        owner: Owner,
        lookup: Lookup,
        timeout_s: float,
        *,
        receiver_queue: int,
        from_start: bool = False,
        may_create: bool = True,
    ) -> None:
        super().__init__(topic, f"the consumer of {topic} ({options.subscription})", lookup, timeout_s)
        self.partition = partition
        self.options = options
        self.is_active = options.type != "failover"
        self.last_taken: Message[Any] | None = None  # by a reader, whose position the broker does not keep
        self._consumer_id = consumer_id
        self._may_create = may_create
        self._owner = owner
        self._permits = receiver_queue
        self._permits_limit = QUEUE_GROWTH * receiver_queue
        self._flow_at = _flow_at(receiver_queue)
        self._permits_back = 0
        self._flowed = 0
        self._received_messages = 0
        self._received_bytes = 0
        self._start = EARLIEST if from_start else options.start
        self._skip_to: tuple[int, int, int] | None = None  # after a seek, or for a reader: earlier messages are not delivered
        self._acks = AckTracker(batch_index=options.batch_index_acks)
        self._ack_timer: asyncio.Handle | None = None
        self._ack_waiters: list[asyncio.Future[None]] = []
        self._acks_soon = False  # whether they are sent at the end of the loop's turn
        self._confirming: set[asyncio.Task[None]] = set()
        self._delivered = None if options.ack_timeout_s is None else DeliveredMessages[Message[Any]](options.ack_timeout_s)
        self._ack_timeout_timer: asyncio.TimerHandle | None = None
        self._nacks: list[tuple[float, int, tuple[int, int]]] = []
        self._nack_order = itertools.count()
        self._uncounted: dict[tuple[int, int], tuple[int, int]] = {}  # by entry: the last cancelled delivery, how many were
        self._nack_timer: asyncio.TimerHandle | None = None
        self._epoch = 0 if not options.is_shared else _NO_EPOCH
        self._chunks = ChunkBuffer()
        self._held: list[list[Message[Any]]] | None = None  # messages that wait for the schema with which they were written
        self._writers: dict[bytes, TopicSchema | Error | None] = {}
        self._seek_ended: asyncio.Event | None = None
        self._attached: list[asyncio.Future[None]] = []
        self._started_by_time = False
        if not options.durable:
            self._set_start(self._start, options.start_inclusive)

    @property
    def is_unordered(self) -> bool:
        """Whether the broker delivers messages with the same key to several consumers."""
        return self.options.type == "shared"

    def intercepted(self, message: Message[Any]) -> AbstractContextManager[None]:
        """Return a context manager for the time in which the application processes a message."""
        intercept = self.options.intercept
        return nullcontext() if intercept is None else intercept(message)

    @property
    def receiver_queue(self) -> int:
        """How many messages the broker may send in advance."""
        return self._permits

    # Receiving

    def on_message(self, message: pb.CommandMessage, tail: memoryview) -> None:
        epoch = signed64(message.consumer_epoch) if message.HasField("consumer_epoch") else _NO_EPOCH
        place = (message.message_id.ledgerId, message.message_id.entryId)
        try:
            verify_tail(tail)
            metadata = parse_metadata(tail)
            payload = split_tail(tail)[1]
            count = messages_in(metadata, len(tail))
        except WireError as error:  # such an entry costs one permit, whatever count it claims
            metadata = pb.MessageMetadata()
            messages = [self._unreadable(place, message.redelivery_count, metadata, str(error))]
            self._deliver(messages, 1)
            return
        self._received_messages += count
        self._received_bytes += len(tail)
        if epoch < self._epoch and message.HasField("consumer_epoch"):
            self._give_back_permits(count)  # sent before the broker had our request for redelivery: it will be redelivered
            return
        if metadata.encryption_keys:
            try:
                payload = memoryview(self.options.decryptor.decrypt(metadata, payload))
            except UnreadableMessageError as error:
                self._on_undecrypted(message, place, metadata, payload, count, str(error.args[0]))
                return
        if metadata.num_chunks_from_msg > 1:
            self._on_chunk(message, place, metadata, payload)
            return
        try:
            unpacked = unpack(metadata, payload)
            is_batch = metadata.HasField("num_messages_in_batch")
            if is_batch and self._is_wanted_whole(message, place) and (payloads := split_plain_batch(unpacked, count)):
                facts = self._facts(place, message.redelivery_count, metadata)
                facts.batch_size = count
                self._on_place(place)
                self._deliver(messages_of(self, facts, range(count), itertools.repeat(None), payloads), count)
                return
            singles: list[Single] = split_batch(unpacked, count) if is_batch else [(-1, None, unpacked)]
        except UnreadableMessageError as error:
            self._deliver([self._unreadable(place, message.redelivery_count, metadata, str(error.args[0]))], count)
            return
        facts = self._facts(place, message.redelivery_count, metadata)
        facts.batch_size = count if is_batch else 0
        if is_batch:
            left = -1 if not message.ack_set else bits_of(list(message.ack_set))
            if (here := self._acks.left_of(place)) is not None:
                left &= here  # rule 2
            if left != -1:
                singles = [single for single in singles if left >> single[0] & 1]
        kept = singles
        if (skip := self._skip_to) is not None:
            kept = [single for single in singles if (*place, single[0]) >= skip]
            self._on_place(place)
        if self.options.durable and len(kept) < count:
            self._acknowledge_left_out(place, singles, kept, skip)
        self._deliver(messages_of(self, facts, *zip(*kept, strict=True)) if kept else [], count)

    def _is_wanted_whole(self, message: pb.CommandMessage, place: tuple[int, int]) -> bool:
        """Return whether every message of the batch must be delivered."""
        is_passed = self._skip_to is None or (*place, -1) >= self._skip_to
        return is_passed and not message.ack_set and self._acks.left_of(place) is None

    def _on_undecrypted(
        self,
        message: pb.CommandMessage,
        place: tuple[int, int],
        metadata: pb.MessageMetadata,
        payload: memoryview,
        permits: int,
        why: str,
    ) -> None:
        """Handle an entry that cannot be decrypted as the application has chosen."""
        if self._skip_to is not None and (*place, -1) < (*self._skip_to[:2], -1):
            self._give_back_permits(permits)
            return
        match self.options.on_decryption_failure:
            case "discard":
                log.warning("client.undecrypted_discarded", extra={"topic": self.topic, "entry": place, "error": why})
                if self.connection is not None:  # otherwise it is redelivered, and discarded then
                    discard = pb.CommandAck(
                        consumer_id=self._consumer_id,
                        ack_type=pb.CommandAck.Individual,
                        message_id=[pb.MessageIdData(ledgerId=place[0], entryId=place[1])],
                        validation_error=pb.CommandAck.DecryptionError,
                    )
                    self.connection.write(encode_body(discard))
                self._give_back_permits(permits)
            case "consume":
                facts = self._facts(place, message.redelivery_count, metadata)
                facts.encryption, facts.unpacked = encrypted_payload(metadata), False
                self._deliver([Message(self, facts, -1, None, bytes(payload))], permits)
            case "fail":
                self._deliver([self._unreadable(place, message.redelivery_count, metadata, why)], permits)

    def _on_place(self, place: tuple[int, int]) -> None:
        """Forget a seek's filter once it has been passed. A reader keeps it: it may begin there again."""
        if self.options.durable and self._skip_to is not None and (*place, -1) >= self._skip_to:
            self._skip_to = None

    def _acknowledge_left_out(
        self, place: tuple[int, int], singles: list[Single], kept: list[Single], skip: tuple[int, int, int] | None
    ) -> None:
        """Acknowledge messages of a batch that are not delivered (compacted, acknowledged, before a seek), so that it can end."""
        if kept:
            self._acks.deliver(place, sum(1 << index for index, _, _ in kept))
        elif not singles or (skip is not None and _begins_at(place, skip)):
            self._acks.ack(place, -1, 0)
            self._send_acks_later()

    def on_taken(self, message: Message[Any]) -> bool:
        """Note that the application took a message from the queue. Return whether permits were written to the broker."""
        if not self.options.durable:
            self.last_taken = message
        if self._delivered is not None:
            facts = message._facts
            loop = asyncio.get_running_loop()
            self._delivered.add((facts.ledger_id, facts.entry_id), message._index, message, loop.time())
            if self._ack_timeout_timer is None:
                self._ack_timeout_timer = loop.call_later(
                    self._delivered.timeout_s + ACK_TIMEOUT_GROUP_S, self._give_back_unacknowledged
                )
        self._permits_back = back = self._permits_back + 1
        if back < self._flow_at:
            return False
        self._flow()
        return True

    def on_active_change(self, is_active: bool) -> None:
        self.is_active = is_active

    def on_connection_lost(self) -> None:
        self._drop_queue()
        self._fail_ack_waiters()
        super().on_connection_lost()

    def on_closed_by_broker(self, broker_url: str) -> None:
        self._drop_queue()
        if self.options.durable and self._seek_ended is None:  # perhaps because the subscription was moved back
            self._skip_to = None
            self._acks.forget_parts()
        self._fail_ack_waiters()
        super().on_closed_by_broker(broker_url)

    def _fail_ack_waiters(self) -> None:
        """Fail the callers whose acknowledgement was about to be sent."""
        if self.connection is not None:
            _fail(self._ack_waiters, ConnectError(f"{self.what} lost its connection: acknowledgements are sent when it is back"))

    def _on_chunk(
        self, message: pb.CommandMessage, place: tuple[int, int], metadata: pb.MessageMetadata, payload: memoryview
    ) -> None:
        whole = self._chunks.add(metadata, place, payload)
        if self._chunks.given_up or self._chunks.repeated:
            self._leave_chunks(message, metadata)
        if whole is None:
            if self.options.durable and self._skip_to is not None and _begins_at(place, self._skip_to):
                self._acks.ack(place, -1, 0)  # the last chunk of the message of a seek: the earlier ones are not sent
                self._send_acks_later()
            self._give_back_permits(1)
            return
        facts = self._facts(place, message.redelivery_count, metadata)
        facts.chunk_ids = whole[1]
        if self._skip_to is not None:
            if (*place, -1) < self._skip_to:
                self._give_back_permits(1)
                return
            self._on_place(place)
        try:
            data = unpack(metadata, whole[0])
        except UnreadableMessageError as error:
            facts.problem, facts.unpacked, data = error, False, b""
        self._deliver([Message(self, facts, -1, None, data)], 1)

    def _leave_chunks(self, message: pb.CommandMessage, metadata: pb.MessageMetadata) -> None:
        """Acknowledge chunks that were received twice, and give back dropped ones, which the broker would keep as delivered."""
        repeated, self._chunks.repeated = self._chunks.repeated, []
        given_up, self._chunks.given_up = self._chunks.given_up, []
        if given_up:
            log.warning("client.chunks_given_up", extra={"topic": self.topic, "chunks": len(given_up), "first": given_up[0]})
        if not self.options.durable:
            return  # a reader acknowledges nothing, and would get everything again that it has read
        for place in repeated:
            self._acks.ack(place, -1, 0)
        if repeated:
            self._send_acks_later()
        if given_up:
            facts = self._facts(given_up[0], message.redelivery_count, metadata)
            facts.chunk_ids = tuple(given_up)
            self._nack(facts, None)

    def _facts(self, place: tuple[int, int], redelivery_count: int, metadata: pb.MessageMetadata) -> EntryFacts:
        return EntryFacts(self.topic, self.partition, *place, redelivery_count, metadata, self.options.schema)

    def _unreadable(self, place: tuple[int, int], redelivery_count: int, metadata: pb.MessageMetadata, why: str) -> Message[Any]:
        """Return an entry that cannot be unpacked as one message, whose data raises."""
        facts = self._facts(place, redelivery_count, metadata)
        facts.problem = UnreadableMessageError(f"entry {place[0]}:{place[1]} of {self.topic}: {why}")
        facts.unpacked = False
        return Message(self, facts, -1, None, b"")

    def _deliver(self, messages: list[Message[Any]], permits: int) -> None:
        """Deliver messages that took `permits` in all."""
        limit = self.options.dead_letters_after
        if limit is not None and messages and self._failures_of(messages[0]) > limit and messages[0]._facts.unpacked:
            for message in messages:  # their consumers were lost before they could give it back
                self._owner.on_dead_letter(self, message)
            messages = []
        if len(messages) < permits:
            self._give_back_permits(permits - len(messages))
        if not messages:
            return
        if self._held is not None:
            self._held.append(messages)
        elif self._lacks_writer(messages):
            self._held = [messages]
            self._tasks.start(self._fetch_writers(), name="schemas")
        else:
            self._owner.on_messages(messages)

    def _lacks_writer(self, messages: list[Message[Any]]) -> bool:
        """Return whether a writer schema must be fetched for these messages; set it if it is known."""
        facts = messages[0]._facts
        version = facts.metadata.schema_version
        if not self.options.schema.needs_writer_schema or not version:
            return False
        if version not in self._writers:
            return True
        writer = self._writers[version]
        if isinstance(writer, Error):
            facts.problem = self._without_schema(writer)
        else:
            facts.writer = writer
        return False

    def _without_schema(self, error: Error) -> UnreadableMessageError:
        return UnreadableMessageError(f"{self.topic}: the schema of a message cannot be fetched: {error}")

    async def _fetch_writers(self) -> None:
        """Release held messages in order; fetch each schema that they need."""
        while self._held:
            held = self._held
            if not self._lacks_writer(held[0]):
                self._owner.on_messages(held.pop(0))
                continue
            try:
                await self._writer_of(held[0][0]._facts.metadata.schema_version)
            except Error as error:
                lost = held.pop(0)  # the next message tries again
                lost[0]._facts.problem = self._without_schema(error)
                self._owner.on_messages(lost)
        self._held = None

    async def _writer_of(self, version: bytes) -> TopicSchema | Error | None:
        """Return the schema of a version of the topic, or the error; None if there is none. Raises Error."""
        if version not in self._writers:
            try:
                schema = await self._lookup.schema(str(TopicName.parse(self.topic).base), version)
                self._writers[version] = None if schema is None else topic_schema_of(schema)
            except Error as error:
                if error.retriable:
                    raise
                self._writers[version] = error
        return self._writers[version]

    async def written_with(self, message: Message[Any]) -> TopicSchema | None:
        """Return the schema with which a message was written; None: none, or an unknown one.

        Raises Error, which may be temporary.
        """
        version = message._facts.metadata.schema_version
        writer = await self._writer_of(version) if version else None
        return None if isinstance(writer, Error) else writer

    # Permits

    def on_starved(self) -> None:
        """Note that the application has emptied the queue. If this persists, the round trip to the broker is the bottleneck, and
        more messages in flight help. Not for shared types: messages held in advance are not available to other consumers.
        """
        if self._flowed < 2 * self._permits or self.options.is_shared or self._owner.is_paused:
            return
        self._flowed = 0
        more = min(self._permits, self._permits_limit - self._permits)
        average_bytes = self._received_bytes / max(self._received_messages, 1)
        if more > 0 and (self._permits + more) * average_bytes <= QUEUE_GROWTH_BYTES:
            self._permits += more
            self._flow_at = _flow_at(self._permits)
            self._give_back_permits(more)

    def _give_back_permits(self, count: int) -> None:
        self._permits_back += count
        if self._permits_back >= self._flow_at:
            self._flow()

    def resume(self) -> None:
        """Give back the permits that were kept during the pause."""
        if self._permits_back:
            self._flow()

    def _flow(self) -> None:
        if self.connection is not None and not self._owner.is_paused:
            count, self._permits_back = self._permits_back, 0
            self._flowed += count
            self.connection.write(encode_body(pb.CommandFlow(consumer_id=self._consumer_id, messagePermits=count)))

    def _drop_queue(self) -> int:
        """Rule 1."""
        self._chunks.clear()
        if self._delivered is not None:
            self._delivered.clear()  # they are redelivered anyway
        held, self._held = self._held, None if self._held is None else []
        return self._owner.drop_messages_of(self) + sum(map(len, held or ()))

    # Acknowledging

    def ack_nowait(self, message: Message[Any]) -> None:
        """Acknowledge a message. Raises ClosedError, or the error that ended the consumer: the message is then redelivered."""
        if self.is_closed or self.failure is not None:
            self.check_usable()
        facts = message._facts
        if self._delivered is not None:
            self._delivered.discard((facts.ledger_id, facts.entry_id), message._index)
        if (part := facts.part) is not None and part.ack(message._index):
            return  # its batch waits to be sent
        self.check_process()
        if facts.chunk_ids:
            for place in facts.chunk_ids:
                self._acks.ack(place, -1, 0)
        else:
            facts.part = self._acks.ack((facts.ledger_id, facts.entry_id), message._index, facts.batch_size)
        if self._ack_timer is None or self._acks.waiting_entries >= ACK_GROUP_ENTRIES:
            self._send_acks_later()

    def ack_id_nowait(self, message_id: MessageId) -> None:
        self._acks.ack(message_id[:2], message_id.batch_index, _batch_size(message_id))
        if self._delivered is not None:
            self._delivered.discard(message_id[:2], message_id.batch_index)
        self._send_acks_later()

    def ack_cumulative_nowait(self, message_id: MessageId) -> None:
        if self.options.is_shared:
            raise UsageError(f"{self.what}: a {self.options.type} subscription has no cumulative acknowledgement: use ack")
        self._acks.ack_cumulative(message_id[:2], message_id.batch_index, _batch_size(message_id))
        if self._delivered is not None:
            self._delivered.discard_through(message_id[:2], message_id.batch_index)
        self._send_acks_later()

    async def acks_confirmed(self, acknowledge: Callable[[], None]) -> None:
        """Call `acknowledge`, which calls the methods above, and return when the broker has confirmed what it acknowledged.

        Raises ConnectError if the connection breaks meanwhile: the messages may be redelivered. While there is no connection
        this waits for the next one, or raises TimedOutError; the acknowledgements are then sent later.
        """
        self.check_usable()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ack_waiters.append(waiter)  # before anything is sent: a full group is sent at once
        try:
            acknowledge()
            if self._ack_waiters and not self._acks_soon:
                if self._ack_timer is not None:
                    self._ack_timer.cancel()
                self._acks_soon = True
                self._ack_timer = asyncio.get_running_loop().call_soon(self._send_acks)  # together with those of the same turn
            if self.connection is None:
                await self._wait_attached()
            await waiter
        except BaseException:
            if waiter in self._ack_waiters:
                self._ack_waiters.remove(waiter)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # retrieved
            raise

    def _send_acks_later(self) -> None:
        if self._acks.waiting_entries >= ACK_GROUP_ENTRIES:
            self._send_acks()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_GROUP_S, self._send_acks)

    def _send_acks(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        self._acks_soon = False
        connection = self.connection
        if connection is None:
            return  # everything is kept, and sent once it is attached again
        waiters, self._ack_waiters = self._ack_waiters, []
        bodies = self._ack_bodies()
        if not waiters:
            for body in bodies:
                connection.write(encode_body(body))
            return
        what = f"acknowledging to {self.what}"
        try:
            requests = [connection.begin_request(body, what) for body in bodies]
        except ConnectError as error:
            _fail(waiters, error)
            return
        confirming = self._tasks.start(self._confirm(connection, requests, what, waiters), name="ack")
        self._confirming.add(confirming)
        confirming.add_done_callback(self._confirming.discard)
        unconfirmed = ClosedError(f"{self.what} was closed before its acknowledgements were confirmed")
        confirming.add_done_callback(lambda _: _fail(waiters, unconfirmed))  # also if it was cancelled before its first step

    def _ack_bodies(self) -> list[pb.CommandAck]:
        bodies = []
        if (cumulative := self._acks.take_cumulative()) is not None:
            bodies.append(pb.CommandAck(consumer_id=self._consumer_id, ack_type=pb.CommandAck.Cumulative, message_id=[cumulative]))
        if ids := self._acks.take_individual():
            bodies.append(pb.CommandAck(consumer_id=self._consumer_id, ack_type=pb.CommandAck.Individual, message_id=ids))
        return bodies

    async def _confirm(
        self, connection: Connection, requests: list[Request], what: str, waiters: list[asyncio.Future[None]]
    ) -> None:
        try:
            answers = (connection.answer_to(request, what, self._timeout_s) for request in requests)
            for answer in await asyncio.gather(*answers):
                if answer.HasField("error"):
                    raise refused(answer.error, answer.message, what)
        except Error as error:
            _fail(waiters, error)
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Giving back

    def nack(self, message: Message[Any], delay_s: float | None) -> None:
        """Give a message back: it is redelivered after `delay_s`, by default after the back-off for its number of deliveries."""
        limit = self.options.dead_letters_after
        facts = message._facts
        if self._delivered is not None:
            self._delivered.discard((facts.ledger_id, facts.entry_id), message._index)
        if limit is not None and self._failures_of(message) >= limit:
            if facts.unpacked:
                self._owner.on_dead_letter(self, message)
                return
            # A dead letter would be empty, and the only copy would be acknowledged: it waits for a consumer that can read it.
            log.warning(
                "client.unreadable_not_dead_lettered",
                extra={"message_id": str(message.message_id), "topic": self.topic, "error": str(facts.problem)},
            )
        self._nack(facts, delay_s)

    def give_back(self, message: Message[Any]) -> None:
        """Give a message back at once: its handler was cancelled and did not fail, so it does not count towards a dead letter."""
        facts = message._facts
        if self._delivered is not None:
            self._delivered.discard((facts.ledger_id, facts.entry_id), message._index)
        if self.options.dead_letters_after is not None:
            place = (facts.ledger_id, facts.entry_id)
            last, count = self._uncounted.pop(place, (-1, 0))
            self._uncounted[place] = facts.redelivery_count, count + (last != facts.redelivery_count)
            if len(self._uncounted) > MAX_UNCOUNTED:
                del self._uncounted[next(iter(self._uncounted))]
        self._nack(facts, 0.0)

    def _failures_of(self, message: Message[Any]) -> int:
        """Return how many deliveries before this one count."""
        facts = message._facts
        return facts.redelivery_count - self._uncounted.get((facts.ledger_id, facts.entry_id), (0, 0))[1]

    def _give_back_unacknowledged(self) -> None:
        """Redeliver messages that were not acknowledged within the acknowledgement timeout, as if they had failed."""
        self._ack_timeout_timer = None
        delivered, loop = self._delivered, asyncio.get_running_loop()
        assert delivered is not None, "the timer runs for consumers with an acknowledgement timeout"
        if (expired := delivered.take_expired(loop.time())) and self.connection is not None:
            extra = {"topic": self.topic, "subscription": self.options.subscription, "messages": len(expired)}
            log.info("client.ack_timed_out", extra=extra)
            for message in expired:
                self.nack(message, 0.0)
        if (deadline := delivered.next_deadline()) is not None:
            self._ack_timeout_timer = loop.call_at(deadline + ACK_TIMEOUT_GROUP_S, self._give_back_unacknowledged)

    def _nack(self, facts: EntryFacts, delay_s: float | None) -> None:
        if delay_s is None:
            delay_s = self.options.nack_backoff.delay_s(facts.redelivery_count)
        loop = asyncio.get_running_loop()
        at = loop.time() + delay_s
        for place in facts.chunk_ids or ((facts.ledger_id, facts.entry_id),):
            heapq.heappush(self._nacks, (at, next(self._nack_order), place))
        if self._nack_timer is None or at < self._nack_timer.when():
            if self._nack_timer is not None:
                self._nack_timer.cancel()
            self._nack_timer = loop.call_at(at + NACK_GROUP_S, self._ask_for_redelivery)

    def _ask_for_redelivery(self) -> None:
        loop = asyncio.get_running_loop()
        self._nack_timer = None
        due: dict[tuple[int, int], None] = {}
        while self._nacks and self._nacks[0][0] <= loop.time():
            due[heapq.heappop(self._nacks)[2]] = None
        if self._nacks:
            self._nack_timer = loop.call_at(self._nacks[0][0] + NACK_GROUP_S, self._ask_for_redelivery)
        if self.connection is None or not due:
            return  # everything unacknowledged is redelivered when it is attached
        ask = pb.CommandRedeliverUnacknowledgedMessages(consumer_id=self._consumer_id)
        if self.options.is_shared:
            for ledger_id, entry_id in due:
                ask.message_ids.add(ledgerId=ledger_id, entryId=entry_id)
        else:  # the broker starts again at the first unacknowledged message: queued messages would be delivered twice
            self._send_acks()
            self._epoch += 1
            ask.consumer_epoch = self._epoch
            self._permits_back += self._drop_queue()
            self._nacks.clear()
        self.connection.write(encode_body(ask))
        if self._permits_back:
            self._flow()

    # Moving

    async def seek(self, message_id: MessageId | None, at_ms: int | None, *, inclusive: bool) -> None:
        """Move the subscription, and return when messages from the new position are expected."""
        while not await self._seek_once(message_id, at_ms, inclusive):
            pass  # the broker forgot a reader's position with its connection

    async def _seek_once(self, message_id: MessageId | None, at_ms: int | None, inclusive: bool) -> bool:
        """Seek once; return whether it was moved, and a reader's new position is known here, too."""
        self.check_usable()
        if self._seek_ended is not None:
            raise UsageError(f"{self.what} is seeking already: await the first seek")
        await self._wait_attached()
        connection = self.connection
        if connection is None or self._seek_ended is not None:
            raise ConnectError(f"{self.what} lost its connection before the seek")
        ended = self._seek_ended = asyncio.Event()
        try:
            ask = pb.CommandSeek(consumer_id=self._consumer_id)
            if message_id is not None:
                place = MessageId(message_id.ledger_id, message_id.entry_id)
                ask.message_id.CopyFrom(as_protobuf(place))
            else:
                ask.message_publish_time = at_ms or 0
            await self._request(connection, ask, f"seek of {self.what}")
            self._acks.clear()
            self._nacks.clear()
            self.last_taken = None
            self._started_by_time = message_id is None
            self._set_start(message_id, inclusive)
            if self.connection is connection:  # the broker left it open: messages in flight belong to the old position
                connection.consumers.pop(self._consumer_id, None)
                try:
                    await self._request(connection, pb.CommandCloseConsumer(consumer_id=self._consumer_id), f"seek of {self.what}")
                except ConnectError:
                    pass  # it is closed in any case
                self.on_closed_by_broker("")
        finally:
            self._seek_ended = None
            ended.set()
        incarnation = self._incarnation
        await self._wait_attached()
        return self.options.durable or message_id is not None or await self._learn_place(incarnation)

    async def _learn_place(self, incarnation: int) -> bool:
        """Ask for the position that a seek by time reached. A non-durable subscription begins there after a lost connection."""
        connection = self.connection
        if connection is None or self._incarnation != incarnation:
            return False
        try:
            ask = pb.CommandGetLastMessageId(consumer_id=self._consumer_id)
            answer = await self._request(connection, ask, f"seek of {self.what}")
        except ConnectError:
            return False
        if answer.HasField("consumer_mark_delete_position"):
            mark = answer.consumer_mark_delete_position
            self._started_by_time = False
            self._set_start(MessageId(signed64(mark.ledgerId), signed64(mark.entryId)), inclusive=False)
        return True

    def _set_start(self, start: MessageId | None, inclusive: bool) -> None:
        """Set where delivery begins: the broker begins at the entry, and its first messages are filtered here."""
        self._start = start if start is not None else EARLIEST
        if start is None or start in (EARLIEST, LATEST):
            self._skip_to = None
        elif inclusive:
            self._skip_to = (start.ledger_id, start.entry_id, start.batch_index)
        elif start.batch_index < 0:
            self._skip_to = (start.ledger_id, start.entry_id + 1, -1)
        else:
            self._skip_to = (start.ledger_id, start.entry_id, start.batch_index + 1)

    async def has_message_available(self) -> bool:
        """Return whether the topic has a message after the last one taken, or after the start.

        Raises ConnectError if the topic moves meanwhile, and TimedOutError.
        """
        self.check_usable()
        await self._wait_attached()
        connection, incarnation = self.connection, self._incarnation
        if connection is None:
            raise ConnectError(f"{self.what} lost its connection")
        ask = pb.CommandGetLastMessageId(consumer_id=self._consumer_id)
        try:
            answer = await self._request(connection, ask, f"last message of {self.topic}")
        except RefusedError as error:
            # The broker refuses requests while it unloads the topic, and after it has closed the consumer.
            if error.code is ServerError.SERVICE_NOT_READY or incarnation != self._incarnation:
                raise ConnectError(f"{self.what} lost its broker: {error.args[0]}") from None
            raise
        last = answer.last_message_id
        at = (signed64(last.ledgerId), signed64(last.entryId), last.batch_index)
        if at[0] < 0:
            return False
        if self.last_taken is not None:
            return at > self.last_taken.message_id[:3]
        if self._started_by_time or self._start == LATEST:
            mark = answer.consumer_mark_delete_position
            known = answer.HasField("consumer_mark_delete_position")
            return known and (signed64(mark.ledgerId), signed64(mark.entryId)) < at[:2]
        return self._skip_to is None or at >= self._skip_to

    async def unsubscribe(self) -> None:
        """Delete the subscription."""
        self.check_usable()
        await self._wait_attached()
        if (connection := self.connection) is None:
            raise ConnectError(f"{self.what} lost its connection")
        ask = pb.CommandUnsubscribe(consumer_id=self._consumer_id)
        await self._request(connection, ask, f"unsubscribing {self.what}")

    async def close(self) -> None:
        """Send waiting acknowledgements and leave the subscription. The broker has received them when this returns."""
        if self.is_closed:
            return
        self._send_acks()
        self.is_closed = True  # nothing more may be acknowledged
        _fail(self._ack_waiters, ClosedError(f"{self.what} was closed before its acknowledgements could be sent"))
        connection = self.connection
        try:
            if self._confirming:
                await asyncio.wait(self._confirming)  # each has its time limit
        finally:
            await self.stop()
        for timer in (self._ack_timer, self._nack_timer, self._ack_timeout_timer):
            if timer is not None:
                timer.cancel()
        _fail(self._attached, ClosedError(f"{self.what} was closed"))
        if connection is not None:
            try:
                ask = pb.CommandCloseConsumer(consumer_id=self._consumer_id)
                await self._request(connection, ask, f"closing {self.what}")
            except Error:
                pass  # a broker that does not answer has dropped the consumer anyway
            connection.consumers.pop(self._consumer_id, None)
        self.connection = None

    # Being attached

    async def _attach(self, connection: Connection) -> None:
        options = self.options
        ask = pb.CommandSubscribe(
            topic=self.topic,
            subscription=options.subscription,
            subType=_TYPES[options.type],
            consumer_id=self._consumer_id,
            consumer_name=options.name,
            priority_level=options.priority,
            durable=options.durable,
            read_compacted=options.read_compacted,
            force_topic_creation=self._may_create,
            initialPosition=pb.CommandSubscribe.Earliest if self._start == EARLIEST else pb.CommandSubscribe.Latest,
        )
        if self._epoch != _NO_EPOCH:
            ask.consumer_epoch = self._epoch
        for key, value in options.properties.items():
            ask.metadata.add(key=key, value=value)
        if not options.durable and (start := self._restart()) is not None:
            ask.start_message_id.CopyFrom(as_protobuf(start))
        if options.type == "key_shared":
            policy = options.key_shared
            ask.keySharedMeta.keySharedMode = pb.AUTO_SPLIT if policy.hash_ranges is None else pb.STICKY
            ask.keySharedMeta.allowOutOfOrderDelivery = policy.out_of_order
            for first, last in policy.hash_ranges or ():
                ask.keySharedMeta.hashRanges.add(start=first, end=last)
        if (schema := options.schema.describe()) is not None:
            ask.schema.CopyFrom(schema)
        connection.consumers[self._consumer_id] = self
        try:
            await self._request(connection, ask, f"opening {self.what}")
        except BaseException:
            connection.consumers.pop(self._consumer_id, None)
            connection.tell(pb.CommandCloseConsumer(consumer_id=self._consumer_id))
            raise

    def _restart(self) -> MessageId | None:
        """Return where a non-durable subscription starts: after the last taken message, or at the given position."""
        if self.last_taken is not None:
            self._set_start(self.last_taken.message_id, inclusive=False)
            self.last_taken = None
            self._started_by_time = False
        return None if self._started_by_time else MessageId(self._start.ledger_id, self._start.entry_id)

    def _on_attached(self, connection: Connection) -> None:
        self._reattach_backoff.reset()
        if len(self._acks) or self._ack_waiters:
            self._send_acks()  # before it requests messages, so that acknowledged ones are not redelivered
        self._permits_back = self._permits
        self._flow()
        attached, self._attached = self._attached, []
        for waiter in attached:
            if not waiter.done():
                waiter.set_result(None)

    async def _before_reattach(self) -> None:
        if (ended := self._seek_ended) is not None:
            await ended.wait()
            return
        await super()._before_reattach()

    async def _wait_attached(self) -> None:
        """Wait until it is attached. Raises TimedOutError, or the error that prevents it."""
        if self.connection is not None:
            return
        if self.failure is not None:
            raise self.failure
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._attached.append(waiter)
        try:
            async with asyncio.timeout(self._timeout_s):
                await waiter
        except TimeoutError:
            raise TimedOutError(f"{self.what} was not back at a broker within {self._timeout_s} s") from None

    def _on_failed(self, error: Error) -> None:
        _fail(self._attached, error)
        _fail(self._ack_waiters, error)
        self._owner.on_link_failed(self, error)


def _flow_at(permits: int) -> int:
    """Return how many permits are given back together: half of them."""
    return (permits + 1) // 2


def _begins_at(place: tuple[int, int], skip: tuple[int, int, int]) -> bool:
    """Return whether the broker begins at this entry after a seek that filters what is before `skip`."""
    return place == (skip[:2] if skip[2] >= 0 else (skip[0], skip[1] - 1))


def _batch_size(message_id: MessageId) -> int:
    if message_id.batch_index >= 0 and message_id.batch_size <= message_id.batch_index:
        raise UsageError(f"message id {message_id} lacks the size of its batch: acknowledge with the message, or its whole id")
    return message_id.batch_size


def _fail(waiters: list[asyncio.Future[None]], error: Error) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error)
    waiters.clear()
