"""The client for programs without asyncio: the same calls, blocking. A loop in a thread does the work.

with cepheid.sync.connect("pulsar://localhost:6650") as client:
    with client.producer("greetings") as producer:
        producer.send(b"hello")

Arguments, results and errors are those of the calls of the same name in `cepheid`. Every object may be used by several threads.

    _Opened ──► its LoopThread and async object ◄── opened again by the first call in a forked child
       └──► Client ──► its LoopThread and async client ◄── likewise created again

Rules for forks
 1. The child has its own thread, connections, producers and consumers. It does not affect those of the parent.
 2. Locks are replaced in the child: a thread that held one does not exist there to release it.
 3. A message that was received before the fork is acknowledged by the parent.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack, overload

import cepheid
from cepheid.arguments import ConsumerArguments, ProducerArguments
from cepheid.client import Topics
from cepheid.consumer import SeekTarget
from cepheid.encryption import KeyReader
from cepheid.errors import BusyError, ClosedError, UsageError
from cepheid.forks import keep_inherited, sever_in_children
from cepheid.interceptors import Interceptor
from cepheid.loop_thread import LoopThread
from cepheid.message import Message
from cepheid.message_id import EARLIEST, LATEST, MessageId
from cepheid.schemas import Schema, TopicSchema

T = TypeVar("T")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741 - the async object
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


class _Opened(_Blocking, Generic[O]):
    """An object opened by a client. In a forked child the first call opens it again, with the same arguments."""

    _not_again = ""
    """The reason why it is not opened again in a forked child; None: it is opened."""

    def __init__(self, client: Client, open_it: Callable[[cepheid.Client], Coroutine[Any, Any, O]]) -> None:
        self._client = client
        self._open = open_it
        self._is_closed = False
        self._thread, made = client._here()
        self._opened = self._thread.run(open_it(made))
        self.sever()

    def __repr__(self) -> str:
        return repr(self._opened)

    def sever(self) -> None:
        self._lock = threading.Lock()
        sever_in_children(self)

    def close(self) -> None:
        self._is_closed = True
        if self._thread.is_of_parent:
            return  # what is open belongs to the parent
        try:
            self._thread.run(self._opened.close())  # type: ignore[attr-defined]  # all that clients open have it
        except ClosedError:
            pass  # with its client

    def _here(self) -> tuple[LoopThread, O]:
        """Return the thread and the object of this process. Raises the errors of opening."""
        if self._thread.is_of_parent:
            with self._lock:
                if self._thread.is_of_parent:
                    self._reopen()
        return self._thread, self._opened

    def _reopen(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self!r} was closed before this process was forked")
        if self._not_again:
            raise UsageError(self._not_again)
        thread, client = self._client._here()
        try:
            opened = thread.run(self._open_again(client))
        except BusyError as error:
            why = "the process that this one was forked from has it: in the child, open one under another name, or of a shared type"
            raise BusyError(f"{error.args[0]} ({why})", code=error.code) from None
        keep_inherited(self._opened)
        self._opened = opened
        self._thread = thread  # last: other threads read it without the lock

    async def _open_again(self, client: cepheid.Client) -> O:
        return await self._open(client)

    def _run(self, work: Callable[[O], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine function with the object of this process and return its result."""
        thread, opened = self._here()
        return thread.run(work(opened))

    def _call(self, work: Callable[[O], R]) -> R:
        """Run a function on the loop with the object of this process and return its result."""
        thread, opened = self._here()
        return thread.call(lambda: work(opened))


class Producer(_Opened[cepheid.Producer[T]], Generic[T]):
    """See `cepheid.Producer`."""

    def __init__(
        self, client: Client, open_it: Callable[[cepheid.Client], Coroutine[Any, Any, cepheid.Producer[T]]], access: str
    ) -> None:
        super().__init__(client, open_it)
        self.topic = self._opened.topic
        self.name = self._opened.name
        if access in ("wait_for_exclusive", "exclusive_with_fencing"):  # it would wait for its parent, or take its place
            self._not_again = (
                f"the producer of {self.topic} was opened with access={access!r} before this process was forked, so it is not "
                "opened again by itself: call client.producer in the child"
            )

    async def _open_again(self, client: cepheid.Client) -> cepheid.Producer[T]:
        producer = await super()._open_again(client)
        self.name = producer.name
        return producer

    def send(self, value: T | None, **arguments: Unpack[SendArguments]) -> MessageId:
        return self._run(lambda producer: producer.send(value, **arguments))

    def send_all(self, values: Iterable[T]) -> int:
        """Publish many messages in batches; return their number when all are stored. Raises SendFailedError."""
        count, group = 0, []
        for value in values:
            group.append(value)
            count += 1
            if len(group) >= SEND_ALL_MESSAGES:
                self._take(group)
                group = []
        self._take(group)
        self.flush()
        return count

    def flush(self) -> None:
        self._run(lambda producer: producer.flush())

    def _take(self, values: list[T]) -> None:
        async def take(producer: cepheid.Producer[T]) -> None:
            for value in values:
                try:
                    producer.send_nowait(value)
                except cepheid.WindowFullError:
                    await producer.drain()
                    producer.send_nowait(value)

        self._run(take)


class Consumer(_Opened[cepheid.Consumer[T]], Generic[T]):
    """See `cepheid.Consumer`."""

    def __init__(self, client: Client, open_it: Callable[[cepheid.Client], Coroutine[Any, Any, cepheid.Consumer[T]]]) -> None:
        super().__init__(client, open_it)
        self.subscription = self._opened.subscription

    async def _open_again(self, client: cepheid.Client) -> cepheid.Consumer[T]:
        consumer = await super()._open_again(client)
        if self._opened.is_paused:
            consumer.pause()
        return consumer

    @property
    def topics(self) -> list[str]:
        return self._opened.topics

    def receive(self, timeout: float | None = None) -> Message[T]:
        return self._run(lambda consumer: consumer.receive(timeout))

    def receive_many(self, max_messages: int = 100, timeout: float | None = None) -> list[Message[T]]:
        return self._run(lambda consumer: consumer.receive_many(max_messages, timeout))

    def __iter__(self) -> Iterator[Message[T]]:
        try:
            while True:
                yield self.receive()
        except ClosedError:
            return

    def run(self, handler: Callable[[Message[T]], object], *, concurrency: int = 1, drain_timeout_s: float | None = 30.0) -> None:
        """Run like `cepheid.Consumer.run`, with handlers that block, in threads. Ctrl-C waits for the running handlers.

        A thread cannot be interrupted: a handler that takes longer than `drain_timeout_s` is waited for, but its message is given
        back.
        """
        with ThreadPoolExecutor(max(concurrency, 1), thread_name_prefix="cepheid-handler") as threads:

            async def handle(message: Message[T]) -> None:
                loop, context = asyncio.get_running_loop(), contextvars.copy_context()
                await loop.run_in_executor(threads, context.run, handler, message)

            self._run(lambda consumer: consumer.run(handle, concurrency=concurrency, drain_timeout_s=drain_timeout_s))

    def pause(self) -> None:
        self._call(lambda consumer: consumer.pause())

    def resume(self) -> None:
        self._call(lambda consumer: consumer.resume())

    def ack(self, message: Message[T] | MessageId) -> None:
        _check_received_here(message)
        self._run(lambda consumer: consumer.ack(message))

    def ack_nowait(self, message: Message[T] | MessageId) -> None:
        _check_received_here(message)
        self._call(lambda consumer: consumer.ack_nowait(message))

    def ack_cumulative(self, message: Message[T] | MessageId) -> None:
        _check_received_here(message)
        self._run(lambda consumer: consumer.ack_cumulative(message))

    def nack(self, message: Message[T], delay: timedelta | float | None = None) -> None:
        _check_received_here(message)
        self._call(lambda consumer: consumer.nack(message, delay))

    def retry_later(self, message: Message[T], delay: timedelta | float) -> None:
        _check_received_here(message)
        self._run(lambda consumer: consumer.retry_later(message, delay))

    @contextmanager
    def processing(self, message: Message[T]) -> Iterator[Message[T]]:
        """Acknowledge the message if the block ends; give it back if it raises: with back-off, or at once if interrupted."""
        _check_received_here(message)
        try:
            with message._source.intercepted(message):
                yield message
        except BaseException as error:
            if message._source.is_of_parent:
                pass  # forked inside the block: the parent finishes the message
            elif isinstance(error, Exception):
                self.nack(message)
            else:
                self._call(lambda _: message._source.give_back(message))
            raise
        self.ack_nowait(message)

    def seek(self, to: SeekTarget, *, inclusive: bool = False) -> None:
        self._run(lambda consumer: consumer.seek(to, inclusive=inclusive))

    def unsubscribe(self) -> None:
        self._run(lambda consumer: consumer.unsubscribe())


class Reader(_Opened[cepheid.Reader[T]], Generic[T]):
    """See `cepheid.Reader`. In a forked child it continues after the last message that was read before the fork."""

    def __init__(self, client: Client, open_it: Callable[[cepheid.Client], Coroutine[Any, Any, cepheid.Reader[T]]]) -> None:
        self._moves: dict[int, tuple[SeekTarget, bool]] = {}  # by partition; -1: all, and unpartitioned topics
        super().__init__(client, open_it)

    async def _open_again(self, client: cepheid.Client) -> cepheid.Reader[T]:
        reader = await super()._open_again(client)
        try:
            for to, inclusive in list(self._moves.values()):
                await reader.seek(to, inclusive=inclusive)
        except BaseException:
            await reader.close()
            raise
        return reader

    def read(self, timeout: float | None = None) -> Message[T]:
        message = self._run(lambda reader: reader.read(timeout))
        message_id = message.message_id
        self._moves[message_id.partition] = message_id, False
        return message

    def has_message_available(self) -> bool:
        return self._run(lambda reader: reader.has_message_available())

    def seek(self, to: SeekTarget, *, inclusive: bool = False) -> None:
        self._run(lambda reader: reader.seek(to, inclusive=inclusive))
        if isinstance(to, MessageId) and to not in (EARLIEST, LATEST):
            self._moves[to.partition] = to, inclusive
        else:
            self._moves = {-1: (to, inclusive)}

    def __iter__(self) -> Iterator[Message[T]]:
        try:
            while True:
                yield self.read()
        except ClosedError:
            return


class TableView(_Opened[cepheid.TableView[T]], Generic[T]):
    """See `cepheid.TableView`. It follows its topic automatically."""

    def __init__(self, client: Client, open_it: Callable[[cepheid.Client], Coroutine[Any, Any, cepheid.TableView[T]]]) -> None:
        super().__init__(client, open_it)
        self.topic = self._opened.topic

    def __getitem__(self, key: str) -> T:
        return self._call(lambda view: view[key])

    def __contains__(self, key: object) -> bool:
        return self._call(lambda view: key in view)

    def __len__(self) -> int:
        return self._call(lambda view: len(view))

    def __iter__(self) -> Iterator[str]:
        return self._call(lambda view: iter(view))

    def get(self, key: str, default: T | None = None) -> T | None:
        return self._call(lambda view: view.get(key, default))

    def keys(self) -> list[str]:
        return list(self)

    def items(self) -> list[tuple[str, T]]:
        """Return keys and values at one moment."""
        return self._call(lambda view: list(view.items()))

    def message(self, key: str) -> Message[T] | None:
        return self._call(lambda view: view.message(key))

    def watch(self) -> Iterator[cepheid.Change[T]]:
        """Yield the keys that change from the first `next` on, indefinitely; see `cepheid.TableView.watch`."""
        thread, view = self._here()
        changes = view.watch()
        try:
            while True:
                if thread.is_of_parent:
                    raise UsageError(f"this watch of {self.topic} began before the process was forked: call watch in the child")
                try:
                    yield thread.run(_next(changes))
                except ClosedError:
                    return
        finally:
            try:
                if thread.is_of_parent:
                    keep_inherited(changes)
                else:
                    thread.run(_end(changes))
            except ClosedError:
                pass  # with its client

    def refresh(self) -> None:
        self._run(lambda view: view.refresh())


class Client(_Blocking):
    """See `cepheid.Client`. Objects are open when the call that opens them returns."""

    def __init__(self, new_client: Callable[[], cepheid.Client]) -> None:
        self._new_client = new_client
        self._client = new_client()
        self._thread = LoopThread("cepheid-client")
        self._is_closed = False
        self.sever()

    def __repr__(self) -> str:
        return repr(self._client)

    def sever(self) -> None:
        self._lock = threading.Lock()
        sever_in_children(self)

    def _here(self) -> tuple[LoopThread, cepheid.Client]:
        """Return the thread and the client of this process. The first call in a forked child creates them. Raises ClosedError."""
        if self._thread.is_of_parent:
            with self._lock:
                if self._thread.is_of_parent:
                    if self._is_closed:
                        raise ClosedError("the client is closed")
                    keep_inherited(self._client, self._thread)
                    self._client = self._new_client()
                    self._thread = LoopThread("cepheid-client")  # last: other threads read it without the lock
        return self._thread, self._client

    @overload
    def producer(self, topic: str, *, schema: type[T] | Schema[T], **options: Unpack[ProducerArguments]) -> Producer[T]: ...

    @overload
    def producer(self, topic: str, **options: Unpack[ProducerArguments]) -> Producer[bytes]: ...

    def producer(self, topic: str, *, schema: Any = bytes, **options: Unpack[ProducerArguments]) -> Producer[Any]:
        async def open_it(client: cepheid.Client) -> cepheid.Producer[Any]:
            return await client.producer(topic, schema=schema, **options)

        return Producer(self, open_it, options.get("access", "shared"))

    @overload
    def consumer(
        self, topics: Topics, subscription: str, *, schema: type[T] | Schema[T], **options: Unpack[ConsumerArguments]
    ) -> Consumer[T]: ...

    @overload
    def consumer(self, topics: Topics, subscription: str, **options: Unpack[ConsumerArguments]) -> Consumer[bytes]: ...

    def consumer(
        self, topics: Topics, subscription: str, *, schema: Any = bytes, **options: Unpack[ConsumerArguments]
    ) -> Consumer[Any]:
        async def open_it(client: cepheid.Client) -> cepheid.Consumer[Any]:
            return await client.consumer(topics, subscription, schema=schema, **options)

        return Consumer(self, open_it)

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
        async def open_it(client: cepheid.Client) -> cepheid.Reader[Any]:
            return await client.reader(
                topic, schema=schema, start=start, inclusive=inclusive, receiver_queue=receiver_queue, key_reader=key_reader
            )

        return Reader(self, open_it)

    @overload
    def table_view(self, topic: str, *, schema: type[T] | Schema[T], key_reader: KeyReader | None = ...) -> TableView[T]: ...

    @overload
    def table_view(self, topic: str, *, key_reader: KeyReader | None = ...) -> TableView[bytes]: ...

    def table_view(self, topic: str, *, schema: Any = bytes, key_reader: KeyReader | None = None) -> TableView[Any]:
        async def open_it(client: cepheid.Client) -> cepheid.TableView[Any]:
            return await client.table_view(topic, schema=schema, key_reader=key_reader)

        return TableView(self, open_it)

    def partitions(self, topic: str) -> int:
        thread, client = self._here()
        return thread.run(client.partitions(topic))

    def topic_schema(self, topic: str) -> TopicSchema | None:
        thread, client = self._here()
        return thread.run(client.topic_schema(topic))

    def close(self) -> None:
        """Close everything that this process opened, and end the thread. A second call does nothing.

        Objects that the parent of a forked child opened stay open.
        """
        self._is_closed = True
        if self._thread.is_of_parent:
            return
        try:
            self._thread.run(self._client.close())
        except ClosedError:
            pass  # it was already closed
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
    tls_crl: str | None = None,
    interceptors: Sequence[Interceptor] = (),
) -> Client:
    """Return a blocking client and start its thread; arguments as in `cepheid.connect`."""
    new_client = partial(
        cepheid.connect,
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
        tls_crl=tls_crl,
        interceptors=interceptors,
    )
    return Client(new_client)


async def _next(changes: AsyncIterator[T]) -> T:
    try:
        return await anext(changes)
    except StopAsyncIteration:
        raise ClosedError("the table view is closed") from None  # a coroutine cannot raise StopAsyncIteration to another thread


async def _end(changes: Any) -> None:
    await changes.aclose()


def _check_received_here(message: Message[Any] | MessageId) -> None:
    """Raise UsageError for a message that the parent of this process received."""
    if isinstance(message, Message) and message._source.is_of_parent:
        raise UsageError(
            f"message {message.message_id} of {message.topic} was received before this process was forked: acknowledge it, or give "
            "it back, in the process that received it"
        )
