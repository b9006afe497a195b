"""The consumer that applications use: one queue for the messages of all its topics and partitions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Generic, Self, TypeVar

from cepheid.ending import Ending
from cepheid.errors import ClosedError, Error, NotFoundError, TimedOutError, UnreadableMessageError, UsageError
from cepheid.message import Message
from cepheid.message_id import EARLIEST, LATEST, MessageId
from cepheid.producer import Producer, to_ms
from cepheid.schemas import TopicSchema
from cepheid.topic_consumer import TopicConsumer
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)

T = TypeVar("T")

SeekTarget = MessageId | datetime | str
_ATTEMPTS = "RECONSUMETIMES"  # names used by the Java and Go clients (RetryMessageUtil)
_REAL_TOPIC = "REAL_TOPIC"
_ORIGIN_ID = "ORIGIN_MESSAGE_ID"
_DELAY = "DELAY_TIME"
WAITING_PER_HANDLER = 10
"""Messages that `run` takes ahead per handler while they wait for one with the same key."""


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Handling of messages that fail repeatedly, for shared and key_shared subscriptions.

    A message that is given back after more than `after` redeliveries is published to `topic` and acknowledged.
    One whose payload cannot be unpacked is redelivered instead.
    `topic`: by default `<topic>-<subscription>-DLQ`. `subscription`: created there, so that the topic keeps the messages.
    """

    after: int = 3
    topic: str | None = None
    subscription: str | None = None

    def __post_init__(self) -> None:
        if self.after < 1:
            raise UsageError(f"DeadLetters.after must be 1 or more redeliveries, got {self.after}")


OpenRawProducer = Callable[[str, str | None, TopicSchema | None], Awaitable[Producer[bytes]]]
"""Opens a producer of payloads: topic, subscription to create, the schema that they were written with."""


class Consumer(Generic[T]):
    """A consumer, created by `client.consumer(…)`. `async for message in consumer` ends when the consumer is closed."""

    def __init__(
        self,
        subscription: str,
        *,
        dead_letters: DeadLetters | None,
        open_producer: OpenRawProducer,
        survives_lost_topics: bool,
        on_closed: Callable[[Any], None],
    ) -> None:
        self.subscription = subscription
        self.links: dict[str, TopicConsumer] = {}  # by the full name of the topic or partition
        self.is_paused = False  # read by the links, also by those that are added later
        self._queue: deque[Message[T]] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        # Permits were written, but some loops pass them to the system only at the end of their turn. An application that takes
        # messages without a pause then lets the loop run, so that the broker sends more while the next ones are processed.
        self._owes_turn = False
        self._failure: Error | None = None
        self._closed = False
        self._ending = Ending(self._close)
        self._dead_letters = dead_letters
        self._open_producer = open_producer
        self._producers: dict[tuple[str, TopicSchema | None], asyncio.Task[Producer[bytes]]] = {}
        self._survives_lost_topics = survives_lost_topics  # and does not create them again
        self._on_closed = on_closed
        self._tasks = TaskOwner(f"cepheid/consumer {subscription}")

    def __repr__(self) -> str:
        return f"<Consumer {self.subscription} of {len(self.links)} topics, {len(self._queue)} messages queued>"

    @property
    def topics(self) -> list[str]:
        """Full names of the topics and partitions that it consumes now."""
        return list(self.links)

    @property
    def queued_messages(self) -> int:
        """Number of messages that `receive` returns without waiting."""
        return len(self._queue)

    @property
    def is_active(self) -> bool:
        """Whether a failover subscription delivers to this consumer for at least one topic. True for other types."""
        return any(link.is_active for link in self.links.values())

    def may_create(self, topic: str) -> bool:
        """Return whether to create a topic that does not exist. With a pattern only the subscription's own retry topics are."""
        return not self._survives_lost_topics or _without_partition(topic).endswith(f"-{self.subscription}-RETRY")

    # Receiving

    async def receive(self, timeout: float | None = None) -> Message[T]:
        """Return the next message.

        Raises TimedOutError after `timeout` seconds, ClosedError, and the error that ended the consumer.
        """
        queue = self._queue
        if not queue or self._owes_turn:
            await self._wait_for_message(timeout)
        message = queue.popleft()
        if message._source.on_taken(message):
            self._owes_turn = True
        return message

    async def receive_many(self, max_messages: int = 100, timeout: float | None = None) -> list[Message[T]]:
        """Return the queued messages, at most `max_messages`; wait for the first one.

        Raises the errors of `receive`. Cancelled: no message is lost.
        """
        if max_messages < 1:
            raise UsageError(f"max_messages must be 1 or more, got {max_messages}")
        messages = [await self.receive(timeout)]
        while self._queue and len(messages) < max_messages:
            message = self._queue.popleft()
            if message._source.on_taken(message):
                self._owes_turn = True
            messages.append(message)
        return messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message[T]:
        queue = self._queue
        if not queue or self._owes_turn:
            try:
                await self._wait_for_message(None)
            except ClosedError:
                raise StopAsyncIteration from None
        message = queue.popleft()
        if message._source.on_taken(message):
            self._owes_turn = True
        return message

    async def _wait_for_message(self, timeout: float | None) -> None:
        """Return when the queue is not empty. The caller takes the message without awaiting anything."""
        if self._owes_turn:
            self._owes_turn = False
            await asyncio.sleep(0)
            if self._queue:
                return
        try:
            async with asyncio.timeout(timeout):
                for link in self.links.values():
                    link.check_process()
                    link.on_starved()
                while not self._queue:
                    if self._failure is not None:
                        raise self._failure.with_traceback(None)
                    if self._closed:
                        raise ClosedError(f"the consumer of {self.subscription} is closed")
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    try:
                        await waiter
                    except asyncio.CancelledError:
                        if waiter.done() and not waiter.cancelled():
                            self._wake(1)  # it was woken for a message that another caller can have
                        elif waiter in self._waiters:
                            self._waiters.remove(waiter)
                        raise
        except TimeoutError as error:
            if isinstance(error, Error):
                raise
            if not self._queue:
                raise TimedOutError(f"no message of {self.subscription} came within {timeout} s") from None

    def _wake(self, count: int) -> None:
        while count and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    async def run(
        self, handler: Callable[[Message[T]], Awaitable[object]], *, concurrency: int = 1, drain_timeout_s: float | None = 30.0
    ) -> None:
        """Call `handler` with each message, for at most `concurrency` messages at a time, until the consumer is closed.

        A message is acknowledged when its handler returns. If the handler raises, the error is logged and the message is
        redelivered
        with back-off. Except on shared subscriptions, messages with the same key are handled one after the other. Up to ten times
        `concurrency` messages may wait for their key without counting towards it: a key with many messages does not stop the
        others.

        Cancelled: takes no further message, waits for the running handlers, at most `drain_timeout_s` (None: without a limit), and
        for the broker's confirmation of their acknowledgements. Handlers that are cancelled, after that time or because `run` is
        cancelled again, give their messages back at once, like messages that wait for their key. Raises UsageError, and the error
        that ended the consumer.
        """
        if concurrency < 1:
            raise UsageError(f"concurrency must be 1 or more messages, got {concurrency}")
        workers = _Workers(handler, concurrency, self.subscription)
        try:
            while True:
                await workers.wait_for_room()
                try:
                    message = await self.receive()
                except ClosedError:
                    if self._closed:
                        return
                    raise
                workers.start(message, None if message._source.is_unordered else message.ordering_key or message.key)
        finally:
            await workers.drain(drain_timeout_s)
            confirming = (link.acks_confirmed(lambda: None) for link in self.links.values() if link.connection is not None)
            await asyncio.gather(*confirming, return_exceptions=True)  # failed confirmations: the messages are redelivered

    def pause(self) -> None:
        """Request no more messages from the broker until `resume`. Messages that are fetched or in flight are still received.

        Acknowledging, giving back and seeking continue. The pause survives lost connections and applies to topics that are added.
        Raises ClosedError. A second call does nothing.
        """
        self._check_open()
        self.is_paused = True

    def resume(self) -> None:
        """Request messages from the broker again, after `pause`. Raises ClosedError. Does nothing without `pause`."""
        self._check_open()
        if self.is_paused:
            self.is_paused = False
            for link in self.links.values():
                link.resume()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the consumer of {self.subscription} is closed")
        for link in self.links.values():
            link.check_process()

    # Acknowledging

    async def ack(self, message: Message[T] | MessageId) -> None:
        """Acknowledge a message, and return when the broker has confirmed it. Concurrent calls share a command.

        The broker can track a single message of a batch only with `batch_index_acks`, which is the default. Raises ConnectError if
        the connection breaks meanwhile: the message may be redelivered. Cancelled: it is acknowledged all the same.
        """
        await self._source_of(message).acks_confirmed(lambda: self.ack_nowait(message))

    def ack_nowait(self, message: Message[T] | MessageId) -> None:
        """Acknowledge a message. It is sent with others, within a tenth of a second, and before the consumer is closed."""
        if isinstance(message, Message):
            message._source.ack_nowait(message)
        else:
            source = self._source_of(message)
            source.check_usable()
            source.ack_id_nowait(message)

    def ack_cumulative_nowait(self, message: Message[T] | MessageId) -> None:
        """Acknowledge a message and all before it in its topic or partition. Not for shared and key_shared subscriptions."""
        source = self._source_of(message)
        source.check_usable()
        source.ack_cumulative_nowait(message.message_id if isinstance(message, Message) else message)

    async def ack_cumulative(self, message: Message[T] | MessageId) -> None:
        """Acknowledge like `ack_cumulative_nowait`, and wait for the broker's confirmation, like `ack`."""
        await self._source_of(message).acks_confirmed(lambda: self.ack_cumulative_nowait(message))

    def nack(self, message: Message[T], delay: timedelta | float | None = None) -> None:
        """Give a message back. It is redelivered after `delay`, by default after the back-off for its redelivery count.

        If it is in a batch, all unacknowledged messages of the batch are redelivered. On exclusive and failover subscriptions
        everything unacknowledged is redelivered from the first such message on, so that the order is kept.
        """
        source = self._source_of(message)
        source.check_usable()
        source.nack(message, delay.total_seconds() if isinstance(delay, timedelta) else delay)

    async def retry_later(self, message: Message[T], delay: timedelta | float) -> None:
        """Publish the message again to this subscription's retry topic, to be delivered after `delay`, and acknowledge it.

        The consumer must have been opened with `retry=True`. Raises UnreadableMessageError for a payload that cannot be unpacked,
        and ClosedError. If it raises, the message is not acknowledged.
        """
        self._check_open()
        topic = retry_topic_of(message.topic, self.subscription)
        if not self._consumes(topic):
            base = message.properties.get(_REAL_TOPIC)
            topic = retry_topic_of(base, self.subscription) if base else topic
            if not self._consumes(topic):
                raise UsageError("open the consumer with retry=True to use retry_later")
        delay_s = delay.total_seconds() if isinstance(delay, timedelta) else delay
        attempts = int(message.properties.get(_ATTEMPTS, "0")) + 1
        more = {_ATTEMPTS: str(attempts), _DELAY: str(int(delay_s * 1000))}
        if self._dead_letters is not None and attempts > self._dead_letters.after:
            await self._publish_dead(message)
        else:
            await self._republish(message, topic, None, more, int(time.time() * 1000 + delay_s * 1000))
        self.ack_nowait(message)

    def _consumes(self, topic: str) -> bool:
        """Return whether the consumer has this topic, or partitions of it."""
        return topic in self.links or any(_without_partition(name) == topic for name in self.links)

    # Moving

    async def seek(self, to: SeekTarget, *, inclusive: bool = False) -> None:
        """Move the subscription for all its consumers: to "earliest", "latest", a time, or a message id.

        By id, the next message is the one after it; with `inclusive`, that message. By time, it is the first one published then or
        later. Messages that were received and not acknowledged may be redelivered. Raises UsageError, TimedOutError, RefusedError,
        ConnectError; after the last two the subscription may or may not have moved.
        """
        message_id, at_ms = seek_target(to)
        if message_id is not None and message_id not in (EARLIEST, LATEST):
            if len(self.links) > 1:
                links = [link for link in self.links.values() if link.partition == message_id.partition and link.partition >= 0]
                if len(links) != 1:
                    raise UsageError(
                        f"message id {message_id} does not say which of {len(self.links)} topics it is of: seek by time, or "
                        "consume one topic"
                    )
            else:
                links = list(self.links.values())
        else:
            links = list(self.links.values())
        await asyncio.gather(*(link.seek(message_id, at_ms, inclusive=inclusive) for link in links))

    async def unsubscribe(self) -> None:
        """Delete the subscription with its position, and close. Refused while a shared one has other consumers."""
        for link in list(self.links.values()):
            await link.unsubscribe()
        await self.close()

    async def close(self) -> None:
        """Send waiting acknowledgements, and leave. Unacknowledged messages are delivered to other consumers, or redelivered later.

        Cancelled: closing continues, and another call waits for its end.
        """
        self._closed = True
        await self._ending.reach()

    async def _close(self) -> None:
        await self._tasks.aclose()
        producers = [
            task.result() for task in self._producers.values() if task.done() and not task.cancelled() and not task.exception()
        ]
        await asyncio.gather(*(link.close() for link in self.links.values()))
        await asyncio.gather(*(producer.close() for producer in producers), return_exceptions=True)
        self._queue.clear()
        self._wake(len(self._waiters))
        self._on_closed(self)

    # Callbacks of its topics

    def on_messages(self, messages: list[Message[Any]]) -> None:
        if self._closed:
            return
        self._queue.extend(messages)
        if self._waiters:
            self._wake(len(messages))

    def drop_messages_of(self, source: TopicConsumer) -> int:
        """Remove the queued messages of one topic; return how many."""
        before = len(self._queue)
        if before:
            kept = [message for message in self._queue if message._source is not source]
            self._queue.clear()
            self._queue.extend(kept)
        return before - len(self._queue)

    def on_link_failed(self, source: TopicConsumer, error: Error) -> None:
        if self._survives_lost_topics and isinstance(error, NotFoundError):
            self.links.pop(source.topic, None)  # a topic of a pattern was deleted
            self._tasks.start(source.close(), name="lost topic")
            return
        if self._failure is None:
            self._failure = error
        self._wake(len(self._waiters))

    def on_dead_letter(self, source: TopicConsumer, message: Message[Any]) -> None:
        self._tasks.start(self._bury(source, message), name="dead letter")

    async def _bury(self, source: TopicConsumer, message: Message[Any]) -> None:
        while True:
            try:
                await self._publish_dead(message)
                break
            except Error as error:
                log.warning("client.dead_letter_failed", extra={"message_id": str(message.message_id), "error": str(error)})
                await asyncio.sleep(source.options.nack_backoff.limit_s)
        source.ack_nowait(message)

    async def _publish_dead(self, message: Message[Any]) -> None:
        policy = self._dead_letters
        assert policy is not None, "messages are buried only with a policy"
        base = message.properties.get(_REAL_TOPIC, _without_partition(message.topic))
        topic = policy.topic or f"{base}-{self.subscription}-DLQ"
        await self._republish(message, topic, policy.subscription, {}, None)

    async def _republish(
        self, message: Message[Any], topic: str, subscription: str | None, more: dict[str, str], deliver_at_ms: int | None
    ) -> None:
        if not message._facts.unpacked:
            encrypted = UnreadableMessageError(
                f"message {message.message_id} of {message.topic} is encrypted: it cannot be published again"
            )
            raise message._facts.problem or encrypted
        properties = {
            _REAL_TOPIC: _without_partition(message.topic),
            _ORIGIN_ID: f"{message.message_id.ledger_id}:{message.message_id.entry_id}:{message.message_id.partition}",
            **message.properties,
            **more,
        }
        schema = await self._source_of(message).written_with(message)
        if self._closed:
            raise ClosedError(f"the consumer of {self.subscription} is closed")
        task = self._producers.get((topic, schema))
        if task is not None and task.done() and not task.cancelled() and not task.exception() and task.result().has_failed:
            self._tasks.start(_close_failed(task.result()), name=f"failed producer {topic}")
            task = None
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            opening = self._raw_producer(topic, subscription, schema)
            task = self._producers[topic, schema] = self._tasks.start(opening, name=f"producer {topic}")
        key: str | bytes | None = message.key
        if message.has_base64_key:
            with suppress(UnreadableMessageError):  # as text if it is not base64
                key = message.key_bytes
        try:
            producer = await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                raise ClosedError(f"the consumer of {self.subscription} was closed before the message could be published") from None
            raise
        await producer.send(
            None if message.is_null else message._data,  # also if its schema is not available: `data` would raise
            key=key,
            ordering_key=message.ordering_key,
            properties=properties,
            event_time=int(message.event_time.timestamp() * 1000) if message.event_time else None,
            deliver_at=deliver_at_ms,
        )

    async def _raw_producer(self, topic: str, subscription: str | None, schema: TopicSchema | None) -> Producer[bytes]:
        return await self._open_producer(topic, subscription, schema)

    def _source_of(self, message: Message[T] | MessageId) -> TopicConsumer:
        """Return the link of a message. Raises UsageError."""
        if isinstance(message, Message):
            source = message._source
            assert isinstance(source, TopicConsumer)
            return source
        if len(self.links) == 1:
            return next(iter(self.links.values()))
        for link in self.links.values():
            if (
                link.partition == message.partition
                and len({one.topic.rpartition("-partition-")[0] for one in self.links.values()}) == 1
            ):
                return link
        raise UsageError(f"message id {message} does not say which topic it is of: acknowledge with the message")


class _Workers:
    """The running handlers of `Consumer.run`, and the messages that wait for one with the same key."""

    def __init__(self, handler: Callable[[Message[Any]], Awaitable[object]], limit: int, subscription: str) -> None:
        self._handler = handler
        self._limit = limit
        self._subscription = subscription
        self._running: set[asyncio.Task[None]] = set()
        self._waiting: dict[bytes | str, deque[Message[Any]]] = {}  # by each key with a running handler
        self._waiting_messages = 0
        self._is_draining = False

    async def wait_for_room(self) -> None:
        """Return when another message can be accepted: a handler is free, and few enough messages wait for their key."""
        while len(self._running) >= self._limit or self._waiting_messages >= self._limit * WAITING_PER_HANDLER:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)

    def start(self, message: Message[Any], key: bytes | str | None) -> None:
        """Handle a message after those with the same `key`; None: at once."""
        if key is not None:
            if key in self._waiting:
                self._waiting[key].append(message)
                self._waiting_messages += 1
                return
            self._waiting[key] = deque()
        self._run(message, key)

    def _run(self, message: Message[Any], key: bytes | str | None) -> None:
        name = f"cepheid/{self._subscription}/{message.message_id}"
        task = asyncio.get_running_loop().create_task(self._handle(message), name=name)
        self._running.add(task)
        task.add_done_callback(lambda ended: self._on_done(ended, key))

    def _on_done(self, task: asyncio.Task[None], key: bytes | str | None) -> None:
        self._running.discard(task)
        if key is None or self._is_draining:
            return
        if waiting := self._waiting[key]:
            self._waiting_messages -= 1
            self._run(waiting.popleft(), key)
        else:
            del self._waiting[key]

    async def _handle(self, message: Message[Any]) -> None:
        source = message._source
        try:
            with source.intercepted(message):
                await self._handler(message)
        except Exception as error:
            extra = {"subscription": self._subscription, "message_id": str(message.message_id), "error": repr(error)}
            log.warning("client.handler_failed", extra=extra, exc_info=error)
            finish = partial(source.nack, message, None)
        except BaseException:
            with suppress(Error):
                source.give_back(message)
            raise
        else:
            finish = partial(source.ack_nowait, message)
        with suppress(Error):  # the consumer was closed or lost meanwhile: the message is redelivered
            finish()

    async def drain(self, timeout_s: float | None) -> None:
        """Wait for the handlers, and cancel those that take longer than `timeout_s`.

        Then give back messages that wait for their key.
        """
        self._is_draining = True
        try:
            if self._running:
                await asyncio.wait(self._running, timeout=timeout_s)
        finally:
            if self._running:
                for task in self._running:
                    task.cancel()
                await asyncio.wait(self._running)
            for message in (message for waiting in self._waiting.values() for message in waiting):
                with suppress(Error):
                    message._source.give_back(message)


async def _close_failed(producer: Producer[bytes]) -> None:
    with suppress(Error):
        await producer.close()


def retry_topic_of(topic: str, subscription: str) -> str:
    """Return the name of a subscription's retry topic, as Java and Go clients name it."""
    return f"{_without_partition(topic)}-{subscription}-RETRY"


def _without_partition(topic: str) -> str:
    base, mark, index = topic.rpartition("-partition-")
    return base if mark and index.isdigit() else topic


def seek_target(to: SeekTarget) -> tuple[MessageId | None, int | None]:
    """Return a message id, or None and milliseconds since 1970. Raises UsageError."""
    match to:
        case "earliest":
            return EARLIEST, None
        case "latest":
            return LATEST, None
        case MessageId():
            return to, None
        case datetime():
            return None, to_ms("the time to seek to", to)
    raise UsageError(f"expected 'earliest', 'latest', a MessageId or a datetime, got {to!r}")
