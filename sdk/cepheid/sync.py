"""The client for programs without asyncio: the same calls, blocking. A loop in a thread does the work.

with cepheid.sync.connect("pulsar://localhost:6650") as client:
    with client.producer("greetings") as producer:
        producer.send(b"hello")

Arguments, results and errors are those of the calls of the same name in `cepheid`. Every object may be used by several threads.
"""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack, overload

import cepheid
from cepheid.arguments import ConsumerArguments, ProducerArguments
from cepheid.client import Topics
from cepheid.consumer import SeekTarget
from cepheid.encryption import KeyReader
from cepheid.errors import ClosedError
from cepheid.interceptors import Interceptor
from cepheid.loop_thread import LoopThread
from cepheid.message import Message
from cepheid.message_id import MessageId
from cepheid.schemas import Schema, TopicSchema

T = TypeVar("T")
SEND_ALL_MESSAGES = 1000


class SendArguments(TypedDict, total=False):
    """Keyword arguments of `send`."""

    key: str | bytes | None
    ordering_key: bytes | None
    properties: Mapping[str, str] | None
    event_time: datetime | int | None
    deliver_at: datetime | int | None
    deliver_after: timedelta | float | None
    sequence_id: int | None


class _Blocking(ABC):
    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Producer(_Blocking, Generic[T]):
    """See `cepheid.Producer`."""

    def __init__(self, thread: LoopThread, producer: cepheid.Producer[T]) -> None:
        self._thread = thread
        self._producer = producer
        self.topic = producer.topic
        self.name = producer.name

    def __repr__(self) -> str:
        return repr(self._producer)

    def send(self, value: T | None, **arguments: Unpack[SendArguments]) -> MessageId:
        return self._thread.run(self._producer.send(value, **arguments))

    def send_all(self, values: Iterable[T]) -> int:
        """Publish many messages in batches, and return how many when all are stored. Raises SendFailedError."""
        count, group = 0, []
        for value in values:
            group.append(value)
            count += 1
            if len(group) >= SEND_ALL_MESSAGES:
                self._thread.run(self._take(group))
                group = []
        self._thread.run(self._take(group))
        self.flush()
        return count

    def flush(self) -> None:
        self._thread.run(self._producer.flush())

    def close(self) -> None:
        _close(self._thread, self._producer)

    async def _take(self, values: list[T]) -> None:
        for value in values:
            try:
                self._producer.send_nowait(value)
            except cepheid.WindowFullError:
                await self._producer.drain()
                self._producer.send_nowait(value)


class Consumer(_Blocking, Generic[T]):
    """See `cepheid.Consumer`."""

    def __init__(self, thread: LoopThread, consumer: cepheid.Consumer[T]) -> None:
        self._thread = thread
        self._consumer = consumer
        self.subscription = consumer.subscription

    def __repr__(self) -> str:
        return repr(self._consumer)

    @property
    def topics(self) -> list[str]:
        return self._consumer.topics

    def receive(self, timeout: float | None = None) -> Message[T]:
        return self._thread.run(self._consumer.receive(timeout))

    def receive_many(self, max_messages: int = 100, timeout: float | None = None) -> list[Message[T]]:
        return self._thread.run(self._consumer.receive_many(max_messages, timeout))

    def __iter__(self) -> Iterator[Message[T]]:
        try:
            while True:
                yield self.receive()
        except ClosedError:
            return

    def run(self, handler: Callable[[Message[T]], object], *, concurrency: int = 1, drain_timeout_s: float | None = 30.0) -> None:
        """As `cepheid.Consumer.run`, with handlers that block, in threads. Ctrl-C waits for the handlers that run.

        A thread cannot be interrupted: a handler that takes longer than `drain_timeout_s` is waited for, but its message is given
        back.
        """
        with ThreadPoolExecutor(max(concurrency, 1), thread_name_prefix="cepheid-handler") as threads:

            async def handle(message: Message[T]) -> None:
                loop, context = asyncio.get_running_loop(), contextvars.copy_context()
                await loop.run_in_executor(threads, context.run, handler, message)

            self._thread.run(self._consumer.run(handle, concurrency=concurrency, drain_timeout_s=drain_timeout_s))

    def pause(self) -> None:
        self._thread.call(self._consumer.pause)

    def resume(self) -> None:
        self._thread.call(self._consumer.resume)

    def ack(self, message: Message[T] | MessageId) -> None:
        self._thread.run(self._consumer.ack(message))

    def ack_nowait(self, message: Message[T] | MessageId) -> None:
        self._thread.call(lambda: self._consumer.ack_nowait(message))

    def ack_cumulative(self, message: Message[T] | MessageId) -> None:
        self._thread.run(self._consumer.ack_cumulative(message))

    def nack(self, message: Message[T], delay: timedelta | float | None = None) -> None:
        self._thread.call(lambda: self._consumer.nack(message, delay))

    def retry_later(self, message: Message[T], delay: timedelta | float) -> None:
        self._thread.run(self._consumer.retry_later(message, delay))

    @contextmanager
    def processing(self, message: Message[T]) -> Iterator[Message[T]]:
        """Acknowledge the message if the block ends; give it back if it raises: with back-off, or at once if it is interrupted."""
        try:
            with message._source.intercepted(message):
                yield message
        except BaseException as error:
            if isinstance(error, Exception):
                self.nack(message)
            else:
                self._thread.call(lambda: message._source.give_back(message))
            raise
        self.ack_nowait(message)

    def seek(self, to: SeekTarget, *, inclusive: bool = False) -> None:
        self._thread.run(self._consumer.seek(to, inclusive=inclusive))

    def unsubscribe(self) -> None:
        self._thread.run(self._consumer.unsubscribe())

    def close(self) -> None:
        _close(self._thread, self._consumer)


class Reader(_Blocking, Generic[T]):
    """See `cepheid.Reader`."""

    def __init__(self, thread: LoopThread, reader: cepheid.Reader[T]) -> None:
        self._thread = thread
        self._reader = reader

    def __repr__(self) -> str:
        return repr(self._reader)

    def read(self, timeout: float | None = None) -> Message[T]:
        return self._thread.run(self._reader.read(timeout))

    def has_message_available(self) -> bool:
        return self._thread.run(self._reader.has_message_available())

    def seek(self, to: SeekTarget, *, inclusive: bool = False) -> None:
        self._thread.run(self._reader.seek(to, inclusive=inclusive))

    def __iter__(self) -> Iterator[Message[T]]:
        try:
            while True:
                yield self.read()
        except ClosedError:
            return

    def close(self) -> None:
        _close(self._thread, self._reader)


class TableView(_Blocking, Generic[T]):
    """See `cepheid.TableView`. It follows its topic by itself."""

    def __init__(self, thread: LoopThread, view: cepheid.TableView[T]) -> None:
        self._thread = thread
        self._view = view
        self.topic = view.topic

    def __repr__(self) -> str:
        return repr(self._view)

    def __getitem__(self, key: str) -> T:
        return self._thread.call(lambda: self._view[key])

    def __contains__(self, key: object) -> bool:
        return self._thread.call(lambda: key in self._view)

    def __len__(self) -> int:
        return self._thread.call(lambda: len(self._view))

    def __iter__(self) -> Iterator[str]:
        return self._thread.call(lambda: iter(self._view))

    def get(self, key: str, default: T | None = None) -> T | None:
        return self._thread.call(lambda: self._view.get(key, default))

    def keys(self) -> list[str]:
        return list(self)

    def items(self) -> list[tuple[str, T]]:
        """Return keys and values of one moment."""
        return self._thread.call(lambda: list(self._view.items()))

    def message(self, key: str) -> Message[T] | None:
        return self._thread.call(lambda: self._view.message(key))

    def watch(self) -> Iterator[cepheid.Change[T]]:
        """Yield the keys that change from the first `next` on, without end; see `cepheid.TableView.watch`."""
        changes = self._view.watch()
        try:
            while True:
                try:
                    yield self._thread.run(_next(changes))
                except ClosedError:
                    return
        finally:
            try:
                if not self._thread.is_of_parent:
                    self._thread.run(_end(changes))
            except ClosedError:
                pass  # with its client

    def refresh(self) -> None:
        self._thread.run(self._view.refresh())

    def close(self) -> None:
        _close(self._thread, self._view)


class Client(_Blocking):
    """See `cepheid.Client`. What is opened is open when the call returns."""

    def __init__(self, client: cepheid.Client) -> None:
        self._thread = LoopThread("cepheid-client")
        self._client = client

    def __repr__(self) -> str:
        return repr(self._client)

    @overload
    def producer(self, topic: str, *, schema: type[T] | Schema[T], **options: Unpack[ProducerArguments]) -> Producer[T]: ...

    @overload
    def producer(self, topic: str, **options: Unpack[ProducerArguments]) -> Producer[bytes]: ...

    def producer(self, topic: str, *, schema: Any = bytes, **options: Unpack[ProducerArguments]) -> Producer[Any]:
        async def open_it() -> cepheid.Producer[Any]:
            return await self._client.producer(topic, schema=schema, **options)

        return Producer(self._thread, self._thread.run(open_it()))

    @overload
    def consumer(
        self, topics: Topics, subscription: str, *, schema: type[T] | Schema[T], **options: Unpack[ConsumerArguments]
    ) -> Consumer[T]: ...

    @overload
    def consumer(self, topics: Topics, subscription: str, **options: Unpack[ConsumerArguments]) -> Consumer[bytes]: ...

    def consumer(
        self, topics: Topics, subscription: str, *, schema: Any = bytes, **options: Unpack[ConsumerArguments]
    ) -> Consumer[Any]:
        async def open_it() -> cepheid.Consumer[Any]:
            return await self._client.consumer(topics, subscription, schema=schema, **options)

        return Consumer(self._thread, self._thread.run(open_it()))

    @overload
    def reader(
        self,
        topic: str,
        *,
        schema: type[T] | Schema[T],
        start: SeekTarget = ...,
        inclusive: bool = ...,
        receiver_queue: int = ...,
        key_reader: KeyReader | None = ...,
    ) -> Reader[T]: ...

    @overload
    def reader(
        self,
        topic: str,
        *,
        start: SeekTarget = ...,
        inclusive: bool = ...,
        receiver_queue: int = ...,
        key_reader: KeyReader | None = ...,
    ) -> Reader[bytes]: ...

    def reader(
        self,
        topic: str,
        *,
        schema: Any = bytes,
        start: SeekTarget = "earliest",
        inclusive: bool = False,
        receiver_queue: int = 1000,
        key_reader: KeyReader | None = None,
    ) -> Reader[Any]:
        async def open_it() -> cepheid.Reader[Any]:
            return await self._client.reader(
                topic, schema=schema, start=start, inclusive=inclusive, receiver_queue=receiver_queue, key_reader=key_reader
            )

        return Reader(self._thread, self._thread.run(open_it()))

    @overload
    def table_view(self, topic: str, *, schema: type[T] | Schema[T], key_reader: KeyReader | None = ...) -> TableView[T]: ...

    @overload
    def table_view(self, topic: str, *, key_reader: KeyReader | None = ...) -> TableView[bytes]: ...

    def table_view(self, topic: str, *, schema: Any = bytes, key_reader: KeyReader | None = None) -> TableView[Any]:
        async def open_it() -> cepheid.TableView[Any]:
            return await self._client.table_view(topic, schema=schema, key_reader=key_reader)

        return TableView(self._thread, self._thread.run(open_it()))

    def partitions(self, topic: str) -> int:
        return self._thread.run(self._client.partitions(topic))

    def topic_schema(self, topic: str) -> TopicSchema | None:
        return self._thread.run(self._client.topic_schema(topic))

    def close(self) -> None:
        """Close everything that was opened, and end the thread. A second call does nothing, nor does one in a forked child."""
        if self._thread.is_of_parent:
            return
        try:
            self._thread.run(self._client.close())
        except ClosedError:
            pass  # it was closed before
        finally:
            self._thread.stop()


def connect(
    url: str,
    *,
    request_timeout_s: float = 30.0,
    connect_timeout_s: float = 10.0,
    keep_alive_s: float = 30.0,
    partition_refresh_s: float = 60.0,
    token: str | Path | Callable[[], str] | None = None,
    password: tuple[str, str] | None = None,
    tls_ca_file: str | None = None,
    tls_certificate_file: str | None = None,
    tls_key_file: str | None = None,
    tls_check_hostname: bool = True,
    interceptors: Sequence[Interceptor] = (),
) -> Client:
    """As `cepheid.connect`. Starts the thread of the client."""
    client = cepheid.connect(
        url,
        request_timeout_s=request_timeout_s,
        connect_timeout_s=connect_timeout_s,
        keep_alive_s=keep_alive_s,
        partition_refresh_s=partition_refresh_s,
        token=token,
        password=password,
        tls_ca_file=tls_ca_file,
        tls_certificate_file=tls_certificate_file,
        tls_key_file=tls_key_file,
        tls_check_hostname=tls_check_hostname,
        interceptors=interceptors,
    )
    return Client(client)


async def _next(changes: AsyncIterator[T]) -> T:
    try:
        return await anext(changes)
    except StopAsyncIteration:
        raise ClosedError("the table view is closed") from None  # a coroutine cannot raise StopAsyncIteration to another thread


async def _end(changes: Any) -> None:
    await changes.aclose()


def _close(thread: LoopThread, opened: Any) -> None:
    if thread.is_of_parent:
        return  # what is open is the parent's to close
    try:
        thread.run(opened.close())
    except ClosedError:
        pass  # with its client
