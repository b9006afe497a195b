"""The producer that applications use: it encodes values, chooses partitions and keeps the window."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from cepheid.batching import NO_ATTRIBUTES, NO_VALUE, Attributes
from cepheid.ending import Ending
from cepheid.errors import TimedOutError, UsageError, WindowFullError
from cepheid.message_id import MessageId
from cepheid.routing import PartitionChooser
from cepheid.schemas import Schema
from cepheid.topic_producer import SendWindow, TopicProducer

T = TypeVar("T")


class Producer(Generic[T]):
    """A producer, created by `client.producer(…)`."""

    def __init__(
        self,
        topic: str,
        schema: Schema[T],
        window: SendWindow,
        chooser: PartitionChooser,
        partitions: list[TopicProducer],
        on_closed: Callable[[Producer[T]], None],
        *,
        flush_limit_s: float | None,
        repeatable: bool = False,
    ) -> None:
        self.topic = topic
        self._schema = schema
        self._encode = schema.encode
        self._gives_key = schema.gives_key
        self._window = window
        self._chooser = chooser
        self._partitions = partitions
        self._only = partitions[0] if len(partitions) == 1 else None
        self._on_closed = on_closed
        self._flush_limit_s = flush_limit_s
        self._repeatable = repeatable
        self._closed = False
        self._is_abandoned = False
        self._ending = Ending(self._close)

    def __repr__(self) -> str:
        return f"<Producer {self.topic}, {len(self._partitions)} partitions, {self._window.messages} messages unanswered>"

    @property
    def name(self) -> str:
        """The producer's name, from the application or the broker."""
        return self._partitions[0].name

    @property
    def last_sequence_id(self) -> int:
        """Sequence id of the last stored message; -1 if there is none.

        With a partitioned topic it is the lowest of all partitions. An application that resends everything after it loses nothing;
        with deduplication nothing is stored twice if each message gets the same partition again: route by key, or by a function.
        """
        return min(partition.last_sequence_id for partition in self._partitions)

    @property
    def server_version(self) -> str:
        """The version reported by the broker of the topic, or of its first partition."""
        return self._partitions[0].server_version

    @property
    def has_failed(self) -> bool:
        """Whether it was lost for good on at least one partition."""
        return any(partition.failure is not None for partition in self._partitions)

    @property
    def unanswered_messages(self) -> int:
        """Number of messages without a receipt yet."""
        return self._window.messages

    async def send(
        self,
        value: T | None,
        *,
        key: str | bytes | None = None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: datetime | int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: timedelta | float | None = None,
        sequence_id: int | None = None,
    ) -> MessageId:
        """Publish a message and return its id once it is stored.

        Times are datetimes or milliseconds since 1970, `deliver_after` a timedelta or seconds. A key of bytes is sent in base64,
        like Java's clients do. The value None creates a message without a value: for compaction it deletes its key. While the
        window is full this waits for room, after earlier calls that wait.

        Raises TimedOutError after the send timeout (the message may or may not be stored), MessageTooLargeError, UsageError,
        ClosedError, and the error that ended the producer. Cancelled while it waits for room: nothing is sent. Cancelled later: the
        message is sent all the same.
        """
        payload = b"" if value is None else self._encode(value)
        is_null, has_base64_key = value is None, False
        if self._gives_key and value is not None:
            key, is_null = self._key_of(value, key)
        if isinstance(key, bytes):
            key, has_base64_key = base64.b64encode(key).decode(), True
        if (
            key is None and properties is None and deliver_after is None and deliver_at is None and event_time is None
            and ordering_key is None
        ):  # fmt: skip
            attributes = NO_VALUE if is_null else NO_ATTRIBUTES
        else:
            attributes = _attributes(
                is_null, key, ordering_key, properties, event_time, deliver_at, deliver_after, has_base64_key=has_base64_key
            )
        if self._window.is_full or self._window.has_waiters:
            await self.drain()
        waiter: asyncio.Future[MessageId] = asyncio.get_running_loop().create_future()
        self._choose(key).add(payload, attributes, sequence_id, waiter)
        if self._window.has_waiters and self._window.is_full and not self._repeatable:
            self._seal_all()  # others wait for receipts: the open batch must not wait for more messages
        return await waiter

    def send_nowait(
        self,
        value: T | None,
        *,
        key: str | bytes | None = None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: datetime | int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: timedelta | float | None = None,
        sequence_id: int | None = None,
    ) -> None:
        """Accept a message for publishing and return at once. `flush` reports whether all of them were stored.

        Raises WindowFullError (await `drain()` and call again), MessageTooLargeError, UsageError, ClosedError, and the error that
        ended the producer; the message was then not accepted.
        """
        payload = b"" if value is None else self._encode(value)
        window = self._window
        if window.messages >= window.limit_messages or window.bytes >= window.limit_bytes:
            raise WindowFullError(
                f"{self.topic}: {window.messages:,} messages with {window.bytes:,} bytes wait for their receipts "
                f"(window_messages {window.limit_messages:,}, window_bytes {window.limit_bytes:,})"
            )
        is_null, has_base64_key = value is None, False
        if self._gives_key and value is not None:
            key, is_null = self._key_of(value, key)
        if isinstance(key, bytes):
            key, has_base64_key = base64.b64encode(key).decode(), True
        producer = self._only
        if producer is None:
            producer = self._choose(key)
        if (
            key is None and properties is None and sequence_id is None and deliver_after is None
            and deliver_at is None and event_time is None and ordering_key is None and not is_null
        ):  # fmt: skip
            producer.add_plain(payload)
        else:
            attributes = _attributes(
                is_null, key, ordering_key, properties, event_time, deliver_at, deliver_after, has_base64_key=has_base64_key
            )
            producer.add(payload, attributes, sequence_id, None)

    async def drain(self) -> None:
        """Wait until the window has room for at least one message. Cancelling has no effect."""
        self._check_usable()
        if self._window.is_full and not self._repeatable:  # a full window of a repeatable producer contains sealed batches
            self._seal_all()
        await self._window.wait_for_room()
        self._check_usable()

    async def flush(self) -> None:
        """Send the open batches, and wait until everything accepted so far is stored.

        Raises SendFailedError if messages of `send_nowait` were not stored since the last `flush`. Cancelling has no effect:
        the messages are sent all the same.
        """
        self._partitions[0].check_process()
        await _all(partition.wait_answered() for partition in self._partitions)
        self._window.raise_failures()

    async def close(self) -> None:
        """Flush, and leave the topic. Messages are refused from now on. A second call does nothing.

        Raises the errors of `flush` after it has closed. Cancelled: closing continues, and another call waits for its end.
        Without a send timeout it waits for receipts as long as for the answer to any request, and then raises TimedOutError.
        """
        if not self._closed:
            self._closed = True
            for partition in self._partitions:
                partition.refuse_more()
        await self._ending.reach()

    async def abandon(self) -> None:
        """Leave the topic at once: open batches are not sent, and messages without a receipt may or may not be stored.

        For an application that starts over. A later `close` does nothing.
        """
        if self._closed and not self._is_abandoned:
            return
        self._closed = self._is_abandoned = True
        await self._ending.reach()

    async def _close(self) -> None:
        try:
            if not self._is_abandoned:
                await self._flush_to_close()
        finally:
            await _all(partition.close() for partition in self._partitions)
            self._on_closed(self)

    async def _flush_to_close(self) -> None:
        try:
            async with asyncio.timeout(self._flush_limit_s):
                await self.flush()
        except TimeoutError as error:
            if isinstance(error, TimedOutError):
                raise
            raise TimedOutError(
                f"{self.topic}: {self._window.messages} messages had no receipt when the producer was closed"
            ) from None

    def add_partitions(self, partitions: list[TopicProducer]) -> None:
        """Add partitions of a topic that has grown. Keys may now belong to other partitions, as with the official clients."""
        if self._closed:
            for partition in partitions:
                partition.refuse_more()
        self._partitions.extend(partitions)
        self._only = self._partitions[0] if len(self._partitions) == 1 else None
        self._chooser.partitions = len(self._partitions)

    def _key_of(self, value: T, key: str | bytes | None) -> tuple[bytes | None, bool]:
        """Return the key of a message that has it in its value, and whether the rest of the value is missing."""
        if key is not None:
            raise UsageError("the schema takes the key of a message from its value: leave key out")
        return self._schema.key_of(value)

    def _choose(self, key: str | None) -> TopicProducer:
        if self._only is not None:
            return self._only
        chosen = self._partitions[self._chooser.choose(key)]
        if chosen.failure is not None and self._chooser.goes_by_turn(key):
            for _ in self._partitions:
                chosen = self._partitions[self._chooser.skip()]
                if chosen.failure is None:
                    break
        return chosen

    def _seal_all(self) -> None:
        for partition in self._partitions:
            partition.seal()

    def _check_usable(self) -> None:
        """Raise ClosedError, or the error that ended the producer if no partition is usable.

        The chosen one is checked separately.
        """
        for partition in self._partitions:
            if partition.failure is None:
                partition.check_usable()
                return
        self._partitions[0].check_usable()


def _attributes(
    is_null: bool,
    key: str | None,
    ordering_key: bytes | None,
    properties: Mapping[str, str] | None,
    event_time: datetime | int | None,
    deliver_at: datetime | int | None,
    deliver_after: timedelta | float | None,
    *,
    has_base64_key: bool,
) -> Attributes:
    if key is not None and not isinstance(key, str):
        raise UsageError(f"key must be str or bytes, got {type(key).__name__}")
    if properties is not None:
        for name, text in properties.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise UsageError(f"properties must map str to str, got {name!r}: {text!r}")
    if deliver_at is not None and deliver_after is not None:
        raise UsageError("give deliver_at or deliver_after, not both")
    deliver_at_ms = None if deliver_at is None else to_ms("deliver_at", deliver_at)
    if deliver_after is not None:
        after_s = deliver_after.total_seconds() if isinstance(deliver_after, timedelta) else float(deliver_after)
        if after_s < 0:
            raise UsageError(f"deliver_after must be 0 or more seconds, got {after_s:g}")
        deliver_at_ms = time.time_ns() // 1_000_000 + int(after_s * 1000)
    event_time_ms = None if event_time is None else to_ms("event_time", event_time)
    return Attributes(key, ordering_key, properties, event_time_ms, deliver_at_ms, is_null, has_base64_key)


def to_ms(name: str, when: datetime | int) -> int:
    """Return milliseconds since 1970. Raises UsageError."""
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise UsageError(f"{name}: the datetime {when} has no time zone: use datetime.now(UTC) or add one")
        return int(when.timestamp() * 1000)
    if isinstance(when, bool) or not isinstance(when, int) or when < 0:
        raise UsageError(f"{name} must be a datetime, or 0 or more milliseconds since 1970, got {when!r}")
    return when


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Wait for all, then raise the first error."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
