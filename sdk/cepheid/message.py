"""A received message."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from itertools import repeat
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from cepheid.acks import BatchPart
from cepheid.encryption import EncryptedPayload
from cepheid.errors import UnreadableMessageError
from cepheid.message_id import MessageId
from cepheid.schemas import Schema, TopicSchema
from cepheid_wire import pulsar_api_pb2 as pb

T = TypeVar("T")


class MessageSource(Protocol):
    """The interface of a topic consumer for its messages."""

    @property
    def is_unordered(self) -> bool: ...
    @property
    def is_of_parent(self) -> bool: ...
    def intercepted(self, message: Message[Any]) -> AbstractContextManager[None]: ...

    def ack_nowait(self, message: Message[Any]) -> None: ...
    def nack(self, message: Message[Any], delay_s: float | None) -> None: ...
    def give_back(self, message: Message[Any]) -> None: ...
    def on_taken(self, message: Message[Any]) -> bool: ...


class EntryFacts:
    """Attributes shared by the messages of one entry."""

    __slots__ = (
        "batch_size", "chunk_ids", "encryption",
        "entry_id", "ledger_id", "metadata", "part", "partition", "problem", "redelivery_count", "schema",
        "topic", "unpacked", "writer",
    )  # fmt: skip

    def __init__(
        self,
        topic: str,
        partition: int,
        ledger_id: int,
        entry_id: int,
        redelivery_count: int,
        metadata: pb.MessageMetadata,
        schema: Schema[Any],
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.ledger_id = ledger_id
        self.entry_id = entry_id
        self.redelivery_count = redelivery_count
        self.metadata = metadata
        self.schema = schema
        self.batch_size = 0  # 0: not a batch
        self.part: BatchPart | None = None  # the unacknowledged rest of the batch, once one of its messages was acknowledged
        self.chunk_ids: tuple[tuple[int, int], ...] = ()  # all entries of a chunked message
        self.writer: TopicSchema | None = None  # the schema it was written with, if the consumer's schema needs it
        self.problem: UnreadableMessageError | None = None
        self.encryption: EncryptedPayload | None = None  # set if the payload is still encrypted, as the consumer requested
        self.unpacked = True  # False: the payload is not known, so the message must not be published again


class Message(Generic[T]):
    """One message. `value` decodes it; `data` is the payload as bytes."""

    __slots__ = ("_data", "_facts", "_index", "_single", "_source")

    def __init__(
        self, source: MessageSource, facts: EntryFacts, index: int, single: pb.SingleMessageMetadata | None, data: bytes
    ) -> None:
        self._source = source
        self._facts = facts
        self._index = index
        self._single = single
        self._data = data

    def __repr__(self) -> str:
        return f"<Message {self.message_id} of {self.topic}, {len(self._data)} bytes>"

    @property
    def value(self) -> T:
        """The decoded payload; None for a message without a value (a deletion for compaction). Raises UnreadableMessageError."""
        facts = self._facts
        if facts.problem is not None:
            raise facts.problem
        if facts.encryption is not None:
            raise UnreadableMessageError(f"message {self.message_id} of {self.topic} is encrypted: decrypt message.data")
        if self.is_null and not facts.schema.needs_key:
            return None  # type: ignore[return-value]  # rare, and a T | None would burden every use
        try:
            if facts.schema.needs_key:
                data = None if self.is_null else self._data
                return facts.schema.decode_with_key(data, self.key_bytes, facts.writer)  # type: ignore[no-any-return]
            return facts.schema.decode(self._data, facts.writer)  # type: ignore[no-any-return]  # the consumer's schema is of T
        except UnreadableMessageError as error:
            raise UnreadableMessageError(f"message {self.message_id} of {self.topic}: {error.args[0]}") from None

    @property
    def data(self) -> bytes:
        """The payload. Raises UnreadableMessageError if it cannot be unpacked."""
        if self._facts.problem is not None:
            raise self._facts.problem
        return self._data

    @property
    def encryption(self) -> EncryptedPayload | None:
        """How `data` is encrypted, for consumers with `on_decryption_failure="consume"`; None: it is not encrypted."""
        return self._facts.encryption

    @property
    def message_id(self) -> MessageId:
        facts = self._facts
        return MessageId(facts.ledger_id, facts.entry_id, self._index, facts.partition, facts.batch_size)

    @property
    def topic(self) -> str:
        """Full name of the topic, or of the partition of a partitioned one."""
        return self._facts.topic

    @property
    def key(self) -> str | None:
        """The key as text. If a Java client used bytes as the key, this is base64, and `key_bytes` has the bytes."""
        metadata = self._own
        return metadata.partition_key if metadata.HasField("partition_key") else None

    @property
    def key_bytes(self) -> bytes | None:
        """The key as bytes. Raises UnreadableMessageError if it is declared as base64 but is not."""
        if (key := self.key) is None:
            return None
        if not self.has_base64_key:
            return key.encode()
        try:
            return base64.b64decode(key, validate=True)
        except ValueError:
            raise UnreadableMessageError(f"message {self.message_id} of {self.topic}: its key {key!r} is not base64") from None

    @property
    def has_base64_key(self) -> bool:
        """Whether the key was given as bytes."""
        return self._own.partition_key_b64_encoded

    @property
    def ordering_key(self) -> bytes | None:
        metadata = self._own
        return metadata.ordering_key if metadata.HasField("ordering_key") else None

    @property
    def properties(self) -> Mapping[str, str]:
        return {each.key: each.value for each in self._own.properties}

    @property
    def event_time(self) -> datetime | None:
        """The time set by the application; None if it set none."""
        metadata = self._own
        return _as_datetime(metadata.event_time) if metadata.HasField("event_time") else None

    @property
    def publish_time(self) -> datetime:
        """When the producer sent it, by the producer's clock."""
        return _as_datetime(self._facts.metadata.publish_time)

    @property
    def producer_name(self) -> str:
        return self._facts.metadata.producer_name

    @property
    def sequence_id(self) -> int:
        """The producer's number for the message."""
        if self._single is not None and self._single.HasField("sequence_id"):
            return self._single.sequence_id
        return self._facts.metadata.sequence_id + max(self._index, 0)

    @property
    def redelivery_count(self) -> int:
        """How many times it was delivered before. The broker counts only for shared and key_shared subscriptions."""
        return self._facts.redelivery_count

    @property
    def is_null(self) -> bool:
        """Whether it was published without a value."""
        return self._own.null_value

    def processing(self) -> Processing[T]:
        """Process the message in a block: `async with message.processing():`.

        The message is acknowledged if the block ends, and given back with back-off if it raises. A cancelled block gives it back at
        once. Raises ClosedError if the consumer was closed meanwhile.
        """
        return Processing(self)

    @property
    def _own(self) -> pb.MessageMetadata | pb.SingleMessageMetadata:
        """The metadata of this message alone. In a batch it is never the entry's, which repeats the key of the first message."""
        if self._single is not None:
            return self._single
        return _PLAIN if self._index >= 0 else self._facts.metadata


def messages_of(
    source: MessageSource,
    facts: EntryFacts,
    indexes: Iterable[int],
    singles: Iterable[pb.SingleMessageMetadata | None],
    payloads: Sequence[bytes],
) -> list[Message[Any]]:
    """Return the messages of a batch, in half the time of separate calls of `Message`."""
    messages: list[Message[Any]] = list(map(object.__new__, repeat(Message, len(payloads))))
    for message, index, single, payload in zip(messages, indexes, singles, payloads, strict=False):
        message._source = source
        message._facts = facts
        message._index = index
        message._single = single
        message._data = payload
    return messages


class Processing(Generic[T]):
    """See `Message.processing`."""

    def __init__(self, message: Message[T]) -> None:
        self._message = message
        self._intercepted = message._source.intercepted(message)

    async def __aenter__(self) -> Message[T]:
        self._intercepted.__enter__()
        return self._message

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._intercepted.__exit__(kind, error, trace)
        source = self._message._source
        if error is None:
            source.ack_nowait(self._message)
        elif isinstance(error, Exception):
            source.nack(self._message, None)
        else:
            source.give_back(self._message)


_PLAIN = pb.SingleMessageMetadata(payload_size=0)


def _as_datetime(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)
