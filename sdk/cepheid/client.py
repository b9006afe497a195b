"""The client, created by `connect`; it opens producers, consumers and readers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack, overload

from cepheid.admin.exchange import parse_admin_url
from cepheid.arguments import (
    ConsumerArguments,
    ConsumerPlan,
    ProducerArguments,
    ProducerPlan,
    plan_consumer,
    plan_producer,
)
from cepheid.connection import ConnectionPool
from cepheid.consumer import Consumer, SeekTarget, retry_topic_of, seek_target
from cepheid.credentials import Security
from cepheid.encryption import KeyReader, MessageDecryptor
from cepheid.ending import Ending
from cepheid.errors import ClosedError, Error, NotFoundError, SchemaError, UsageError
from cepheid.forks import generation
from cepheid.interceptors import InterceptedProducer, Interceptor, intercepted
from cepheid.lookup import Lookup
from cepheid.message_id import EARLIEST, LATEST
from cepheid.opening import Opening
from cepheid.producer import Producer
from cepheid.reader import Reader
from cepheid.routing import PartitionChooser
from cepheid.schemas import BYTES, EncodedSchema, Schema, TopicSchema, schema_of, topic_schema_of
from cepheid.service_url import parse_service_url
from cepheid.table_view import TableView
from cepheid.topic_consumer import ConsumerOptions, TopicConsumer
from cepheid.topic_producer import TopicProducer
from cepheid.topic_watcher import TopicWatcher
from cepheid_ports import TaskOwner
from cepheid_wire import InvalidTopicNameError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")
Topics = str | Sequence[str] | re.Pattern[str]
MAX_QUEUED_OVER_PARTITIONS = 50_000


class _Closeable(Protocol):
    async def close(self) -> None: ...


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
    """Return a client for the brokers at `url`: pulsar://HOST:PORT[,HOST:PORT…], or pulsar+ssl:// with TLS.

    It connects when something is opened. With http:// or https:// and the address of the admin API, brokers are looked up there.
    `request_timeout_s` limits each of: opening a producer, consumer or reader, a seek, a lookup, closing.
    `partition_refresh_s`: interval of checks for new partitions of partitioned topics, and for topics of patterns that brokers
    did not report.
    `token` (text, the Path of its file, or a function that returns it) or `password` (user name, password) is sent when a
    connection is opened, and again when the broker asks because it expires; `cepheid.ClientCredentials` fetches tokens from an
    OAuth2 issuer. `tls_ca_file` has the CAs that sign brokers' certificates (PEM; None: those of the system);
    `tls_certificate_file` and `tls_key_file` are the client's own certificate. `tls_crl`: file or folder of the revocation lists
    (CRLs) of the CAs in `tls_ca_file`; a broker whose certificate they name is refused.
    `interceptors` see what is published and processed, such as `cepheid.telemetry.Tracing()`.
    Raises UsageError.
    """
    return Client(
        url,
        request_timeout_s=request_timeout_s,
        connect_timeout_s=connect_timeout_s,
        keep_alive_s=keep_alive_s,
        partition_refresh_s=partition_refresh_s,
        security=Security(token, password, tls_ca_file, tls_certificate_file, tls_key_file, tls_check_hostname, tls_crl),
        interceptors=interceptors,
    )


class Client:
    """Connections to the brokers of one cluster, and the objects opened with it. Belongs to one event loop and one process.

    Use it with `async with`, or call `close`.
    """

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float,
        connect_timeout_s: float,
        keep_alive_s: float,
        partition_refresh_s: float,
        security: Security,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        for name, value in (
            ("request_timeout_s", request_timeout_s),
            ("connect_timeout_s", connect_timeout_s),
            ("keep_alive_s", keep_alive_s),
            ("partition_refresh_s", partition_refresh_s),
        ):
            if value <= 0:
                raise UsageError(f"{name} must be more than 0 seconds, got {value}")
        self._url = url
        self._addresses = () if _is_http(url) else parse_service_url(url)
        self._request_timeout_s = request_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._keep_alive_s = keep_alive_s
        self._partition_refresh_s = partition_refresh_s
        self._interceptors = tuple(interceptors)
        security.check()
        self._security = security
        self._pool: ConnectionPool | None = None
        self._lookup: Lookup
        self._loop: asyncio.AbstractEventLoop
        self._tasks = TaskOwner("cepheid/client")
        self._generation = generation()
        self._producer_ids = itertools.count()
        self._consumer_ids = itertools.count()
        self._topic_watcher_ids = itertools.count()
        self._opened: dict[_Closeable, None] = {}
        self._watchers: dict[_Closeable, asyncio.Task[None]] = {}
        self._closed = False
        self._ending = Ending(self._close)

    def __repr__(self) -> str:
        return f"<Client {self._url}, {'closed' if self._closed else f'{len(self._opened)} open'}>"

    async def __aenter__(self) -> Self:
        self._use()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all producers (they flush), consumers, readers and connections. A second call does nothing.

        Cancelled: closing continues, and another call waits for its end.
        """
        self._closed = True
        await self._ending.reach()

    async def _close(self) -> None:
        opened = list(self._opened)
        results = await asyncio.gather(*(each.close() for each in opened), return_exceptions=True)
        await self._tasks.aclose()
        if self._pool is not None:
            await self._pool.aclose()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    @overload
    def producer(
        self, topic: str, *, schema: type[T] | Schema[T], **options: Unpack[ProducerArguments]
    ) -> Opening[Producer[T]]: ...

    @overload
    def producer(self, topic: str, **options: Unpack[ProducerArguments]) -> Opening[Producer[bytes]]: ...

    def producer(self, topic: str, *, schema: Any = bytes, **options: Unpack[ProducerArguments]) -> Opening[Producer[Any]]:
        """Open a producer: `async with client.producer("orders") as producer`, or `await client.producer("orders")`.

        `schema`: bytes, str, a dataclass, TypedDict, pydantic model, or a Schema.
        `name`: for deduplication; a name may be used once at a time. By default the broker assigns one.
        `access`: "shared", "exclusive" (refused while there is another producer), "wait_for_exclusive" (opening waits, without a
        time limit), "exclusive_with_fencing" (others are closed).
        `batching`, `batch_messages` (1000), `batch_bytes` (128 KiB), `batch_delay_s` (0.01): how long messages wait for others
        while earlier ones are unanswered; a lone message does not wait.
        `batch_by_key`: a batch has messages of one key only, as consumers of type "key_shared" need.
        `compression`: "none", "zlib", "lz4", "zstd", "snappy". `chunking`: split messages above the broker's size limit.
        `routing`: the partition of messages without a key: "round_robin", "single", or a function (key, partitions) -> index for
        all. `key_hash`: how keys choose a partition: "java_string" as in Java and Go, "boost" as in C++, Python and Node,
        "murmur3". `window_messages` (50,000), `window_bytes` (64 MiB): limits of unanswered messages, above which `send` waits and
        `send_nowait` refuses.
        `send_timeout_s` (30): 0 means no time limit for receipts.
        `initial_subscription`: created at the start of the topic unless it exists.
        `encryption_keys`, `key_reader`: encrypt payloads for these keys; `key_reader` has the public keys, such as
        `cepheid.KeyFiles(public="key.pem")`.
        `repeatable`: close batches by count and bytes only, never by time, and let the first failure end the producer, with nothing
        after it stored. With a `name`, deduplication and the same messages in the same order, an application that restarts
        after `last_sequence_id` then repeats nothing. A partial batch waits for `flush`.

        Raises, when it is opened: UsageError, MissingExtraError, TimedOutError, and RefusedError with its subclasses.
        """
        plan = plan_producer(schema_of(schema), **options)
        return Opening(lambda: self._open_producer(full_name(topic), plan))

    @overload
    def consumer(
        self, topics: Topics, subscription: str, *, schema: type[T] | Schema[T], **options: Unpack[ConsumerArguments]
    ) -> Opening[Consumer[T]]: ...

    @overload
    def consumer(self, topics: Topics, subscription: str, **options: Unpack[ConsumerArguments]) -> Opening[Consumer[bytes]]: ...

    def consumer(
        self, topics: Topics, subscription: str, *, schema: Any = bytes, **options: Unpack[ConsumerArguments]
    ) -> Opening[Consumer[Any]]:
        """Open a consumer: `async with client.consumer("orders", "billing") as consumer`, or `await client.consumer(…)`.

        `topics`: a topic, several, or a compiled pattern for the topics of one namespace, such as
        `re.compile("public/default/orders-.*")`; topics that are created later are added.
        The subscription's own dead-letter and retry topics do not match.
        `type`: "exclusive" (the default), "failover", "shared" or "key_shared".
        `start`: where a subscription begins that does not exist yet: "latest" (the default) or "earliest".
        `receiver_queue` (1000): how many messages are fetched ahead. Exclusive and failover consumers that keep
        it empty get up to eight times as many.
        `nack_backoff`: how long messages wait after `nack`.
        `ack_timeout_s`: redeliver messages that are not acknowledged within this time after `receive`. By default
        there is no limit.
        `key_shared`: how the consumers of a key_shared subscription share its keys; by default the broker assigns them.
        `dead_letters`: what happens to messages that fail repeatedly.
        `retry`: also consume the subscription's retry topic, for `retry_later`.
        `key_reader`: has the private keys for encrypted messages. `on_decryption_failure`: "fail" (the message raises when it is
        read), "discard" (it is acknowledged but not delivered), "consume" (`message.data` is the encrypted payload).
        `encryption_keys`: encrypt dead letters and retries for these keys, whose public parts `key_reader` also has.
        `batch_index_acks`: acknowledge single messages of a batch at the broker, not only whole batches.

        Raises, when it is opened: UsageError, BusyError, NotFoundError, SchemaError, TimedOutError and other subclasses of
        RefusedError.
        """
        plan = plan_consumer(subscription, schema_of(schema), **options)
        if self._interceptors:
            plan.options.intercept = partial(intercepted, self._interceptors)
        return Opening(lambda: self._open_consumer(topics, plan))

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
    ) -> Opening[Reader[T]]: ...

    @overload
    def reader(
        self,
        topic: str,
        *,
        start: SeekTarget = ...,
        inclusive: bool = ...,
        receiver_queue: int = ...,
        key_reader: KeyReader | None = ...,
    ) -> Opening[Reader[bytes]]: ...

    def reader(
        self,
        topic: str,
        *,
        schema: Any = bytes,
        start: SeekTarget = "earliest",
        inclusive: bool = False,
        receiver_queue: int = 1000,
        key_reader: KeyReader | None = None,
    ) -> Opening[Reader[Any]]:
        """Open a reader: `async with client.reader("orders", start="earliest") as reader: async for message in reader`.

        `start`: "earliest" (the default), "latest", a datetime, or a message id: then the message after it is the first one,
        or with `inclusive` that message. A partitioned topic cannot start at a message id.
        `key_reader`: has the private keys for encrypted messages. Raises the errors of `consumer`.
        """
        made = schema_of(schema)
        message_id, _ = seek_target(start)
        options = ConsumerOptions(
            subscription=f"reader-{uuid.uuid4().hex[:10]}",
            type="exclusive",
            schema=made,
            name="",
            durable=False,
            start=EARLIEST if message_id is None else message_id,
            start_inclusive=inclusive,
            receiver_queue=receiver_queue,
            decryptor=MessageDecryptor(key_reader),
        )
        return Opening(lambda: self._open_reader(topic, ConsumerPlan(options, None, False), start))

    @overload
    def table_view(
        self, topic: str, *, schema: type[T] | Schema[T], key_reader: KeyReader | None = ...
    ) -> Opening[TableView[T]]: ...

    @overload
    def table_view(self, topic: str, *, key_reader: KeyReader | None = ...) -> Opening[TableView[bytes]]: ...

    def table_view(self, topic: str, *, schema: Any = bytes, key_reader: KeyReader | None = None) -> Opening[TableView[Any]]:
        """Open a table view, the latest value of each key: `async with client.table_view("prices") as prices: prices["tea"]`.

        Opening reads the topic from its start, so it may take long; it raises TimedOutError if no message arrives for
        `request_timeout_s`. Otherwise raises the errors of `reader`.
        """
        options = ConsumerOptions(
            subscription=f"table-view-{uuid.uuid4().hex[:10]}",
            type="exclusive",
            schema=schema_of(schema),
            name="",
            durable=False,
            start=EARLIEST,
            read_compacted=True,
            decryptor=MessageDecryptor(key_reader),
        )
        return Opening(lambda: self._open_table_view(topic, ConsumerPlan(options, None, False)))

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic, 0 if it is not partitioned."""
        self._use()
        return await self._lookup.partitions(full_name(topic))

    async def topic_schema(self, topic: str) -> TopicSchema | None:
        """Return the latest schema of a topic, None if it has none."""
        self._use()
        found = await self._lookup.schema(full_name(topic))
        return None if found is None else topic_schema_of(found)

    async def _open_producer(self, topic: str, plan: ProducerPlan, *, is_intercepted: bool = True) -> Producer[Any]:
        self._use()
        count = await self._lookup.partitions(topic)
        chooser = PartitionChooser(max(count, 1), plan.routing, plan.key_hash)

        def new_link(name: str, partition: int) -> TopicProducer:
            return TopicProducer(
                name, partition, next(self._producer_ids), plan.options, plan.window, self._lookup, self._request_timeout_s,
                chooser.on_batch_ended,
            )  # fmt: skip

        links = [new_link(topic, -1)] if count == 0 else [new_link(f"{topic}-partition-{i}", i) for i in range(count)]
        await open_all(links)
        new_producer: type[Producer[Any]] = InterceptedProducer if self._interceptors and is_intercepted else Producer
        producer: Producer[Any] = new_producer(
            topic, plan.schema, plan.window, chooser, links, self._forget,
            flush_limit_s=None if plan.options.send_timeout_s else self._request_timeout_s, repeatable=plan.options.repeatable,
        )  # fmt: skip
        if isinstance(producer, InterceptedProducer):
            producer.interceptors = self._interceptors
        if self._closed:
            await producer.close()
            raise ClosedError("the client was closed while a producer was opened")
        self._opened[producer] = None
        if count > 0:

            async def grow(known: int, now: int) -> None:
                new = [new_link(f"{topic}-partition-{index}", index) for index in range(known, now)]
                await open_all(new)
                producer.add_partitions(new)

            watching = self._watch_partitions(producer, topic, count, grow)
            self._watchers[producer] = self._tasks.start(watching, name=f"partitions of {topic}")
        return producer

    async def _open_reader(self, topic: str, plan: ConsumerPlan, start: SeekTarget) -> Reader[Any]:
        self._use()
        message_id, at_ms = seek_target(start)
        if message_id not in (None, EARLIEST, LATEST) and await self._lookup.partitions(full_name(topic)):
            raise UsageError(
                f"message id {message_id} does not say where to start in every partition of {topic}: start at a time, or read one "
                f"partition, such as {topic}-partition-0"
            )
        consumer = await self._open_consumer(topic, plan)
        try:
            if at_ms is not None:
                await consumer.seek(start)
        except BaseException:
            await consumer.close()
            raise
        return Reader(consumer)

    async def _open_table_view(self, topic: str, plan: ConsumerPlan) -> TableView[Any]:
        consumer = await self._open_consumer(topic, plan)
        view: TableView[Any] = TableView(full_name(topic), consumer, timeout_s=self._request_timeout_s, on_closed=self._forget)
        self._opened[view] = None
        try:
            await view.start()
        except BaseException:
            await view.close()
            raise
        return view

    async def _open_consumer(self, topics: Topics, plan: ConsumerPlan) -> Consumer[Any]:
        self._use()
        consumer: Consumer[Any] = Consumer(
            plan.options.subscription,
            dead_letters=plan.dead_letters,
            open_producer=partial(self._open_raw_producer, plan),
            survives_lost_topics=isinstance(topics, re.Pattern),
            on_closed=self._forget,
        )
        known: dict[str, int] = {}  # topics with their number of partitions
        pattern = None
        if isinstance(topics, re.Pattern):
            pattern = topics
            names = await self._topics_of(pattern, plan)
        else:
            names = [full_name(topic) for topic in ([topics] if isinstance(topics, str) else topics)]
            if not names:
                raise UsageError("a consumer needs a topic at least")
            if plan.retry:
                names = _with_retry_topics(names, plan)
        try:
            for name in dict.fromkeys(names):
                try:
                    known[name] = await self._lookup.partitions(name, may_create=consumer.may_create(name))
                    await self._add_topic(consumer, plan, name, 0, known[name])
                except NotFoundError:
                    if pattern is None:
                        raise
                    known.pop(name, None)  # deleted after the topics were listed
            if self._closed:
                raise ClosedError("the client was closed while a consumer was opened")
        except BaseException:
            await consumer.close()
            raise
        self._opened[consumer] = None
        if pattern is not None or any(known.values()):
            watching = self._watch_topics(consumer, plan, known, pattern)
            self._watchers[consumer] = self._tasks.start(watching, name=f"topics of {consumer.subscription}")
        return consumer

    async def _add_topic(
        self, consumer: Consumer[Any], plan: ConsumerPlan, topic: str, first: int, partitions: int, *, from_start: bool = False
    ) -> None:
        """Attach the partitions from `first` on that the consumer does not have, or the topic itself if it is not partitioned."""
        places = [(f"{topic}-partition-{index}", index) for index in range(first, partitions)] or [(topic, -1)]
        queue = plan.options.receiver_queue
        share = max(1, min(queue, MAX_QUEUED_OVER_PARTITIONS // max(partitions, 1)))
        links = [
            TopicConsumer(
                name, index, next(self._consumer_ids), plan.options, consumer, self._lookup, self._request_timeout_s,
                receiver_queue=share, from_start=from_start, may_create=consumer.may_create(name),
            )
            for name, index in places
            if name not in consumer.links
        ]  # fmt: skip
        consumer.links.update((link.topic, link) for link in links)
        try:
            await open_all(links)
        except BaseException:
            for link in links:
                consumer.links.pop(link.topic, None)
            raise

    async def _watch_topics(
        self, consumer: Consumer[Any], plan: ConsumerPlan, known: dict[str, int], pattern: re.Pattern[str] | None
    ) -> None:
        """Find new partitions, and new topics of a pattern. Both are read from their start, so nothing is missed."""
        if pattern is None:
            while consumer in self._opened:
                await asyncio.sleep(self._partition_refresh_s)
                await self._look_at(consumer, plan, known, list(known), is_pattern=False)
            return
        watcher = TopicWatcher(
            self._lookup, _namespace_of(pattern), pattern, next(self._topic_watcher_ids), self._request_timeout_s
        )
        watching = self._tasks.start(watcher.run(), name=f"watcher of {pattern.pattern}")
        try:
            await self._follow_pattern(consumer, plan, known, pattern, watcher)
        finally:
            watching.cancel()

    async def _follow_pattern(
        self, consumer: Consumer[Any], plan: ConsumerPlan, known: dict[str, int], pattern: re.Pattern[str], watcher: TopicWatcher
    ) -> None:
        """Check what the watcher finds, and all topics every `partition_refresh_s`."""
        loop = asyncio.get_running_loop()
        refresh_at = loop.time() + self._partition_refresh_s
        while consumer in self._opened:
            try:
                async with asyncio.timeout_at(refresh_at):
                    found = await watcher.wait_found()
                names = _matching(pattern, plan, (name for name in found if not _is_consumed(name, consumer, known)))
            except TimeoutError:
                refresh_at = loop.time() + self._partition_refresh_s
                try:
                    names = await self._topics_of(pattern, plan)
                except Error as error:
                    log.warning("client.topics_unknown", extra={"subscription": consumer.subscription, "error": str(error)})
                    continue
                for gone in known.keys() - set(names):
                    if not any(link == gone or link.startswith(f"{gone}-partition-") for link in consumer.links):
                        del known[gone]  # if it is created again, it is new
            await self._look_at(consumer, plan, known, names, is_pattern=True)

    async def _look_at(
        self, consumer: Consumer[Any], plan: ConsumerPlan, known: dict[str, int], names: list[str], *, is_pattern: bool
    ) -> None:
        for name in names:
            try:
                await self._look_again(consumer, plan, known, name, is_pattern=is_pattern)
            except Error as error:  # the other topics are checked all the same
                extra = {"subscription": consumer.subscription, "topic": name, "error": str(error)}
                log.warning("client.topic_not_added", extra=extra)

    async def _look_again(
        self, consumer: Consumer[Any], plan: ConsumerPlan, known: dict[str, int], name: str, *, is_pattern: bool
    ) -> None:
        before = known.get(name)
        now = await self._lookup.partitions(name, may_create=consumer.may_create(name))
        first = before or 0
        if is_pattern:  # a topic that was deleted and created again is new, whatever is known of it
            first = 0
            names = [f"{name}-partition-{index}" for index in range(now)] or [name]
            is_new = any(each not in consumer.links for each in names)
        else:
            is_new = before is None or now > before > 0
        if is_new:
            await self._add_topic(consumer, plan, name, first, now, from_start=True)
        known[name] = max(now, before or 0)

    async def _topics_of(self, pattern: re.Pattern[str], plan: ConsumerPlan) -> list[str]:
        """Return the current topics of a pattern. Raises UsageError, and the errors of a lookup."""
        return _matching(pattern, plan, await self._lookup.topics(_namespace_of(pattern)))

    async def _open_raw_producer(
        self, consumer: ConsumerPlan, topic: str, subscription: str | None, written_with: TopicSchema | None
    ) -> Producer[bytes]:
        """Open a producer for payloads that this consumer received.

        It registers the schema that they were written with, as Java's client does; without one that of the consumer, if payloads
        can be read with it alone. It is not intercepted: republished messages keep their properties, and the trace in them.
        """
        own = consumer.options.schema
        if written_with is not None:
            described: pb.Schema | None = written_with.describe()
        else:
            described = None if own.needs_writer_schema else own.describe()

        async def open_with(encoded: Schema[bytes]) -> Producer[bytes]:
            plan = plan_producer(
                encoded,
                initial_subscription=subscription,
                encryption_keys=consumer.encryption_keys,
                key_reader=consumer.key_reader,
            )
            return await self._open_producer(full_name(topic), plan, is_intercepted=False)

        try:
            return await open_with(EncodedSchema(described))
        except SchemaError:  # the topic has another schema: without one, payloads of any kind are accepted
            return await open_with(BYTES)

    async def _watch_partitions(
        self, owner: _Closeable, topic: str, known: int, grow: Callable[[int, int], Awaitable[None]]
    ) -> None:
        while owner in self._opened:
            await asyncio.sleep(self._partition_refresh_s)
            try:
                now = await self._lookup.partitions(topic)
                if now > known and owner in self._opened:
                    await grow(known, now)
                    known = now
            except Error as error:
                log.warning("client.partitions_unknown", extra={"topic": topic, "error": str(error)})

    def _forget(self, closed: _Closeable) -> None:
        self._opened.pop(closed, None)
        if (watcher := self._watchers.pop(closed, None)) is not None:
            watcher.cancel()

    def _use(self) -> None:
        """Check that the client is open and used in its own process and loop. Raises ClosedError, UsageError."""
        if self._closed:
            raise ClosedError("the client is closed")
        if self._generation != generation():
            raise UsageError("the client was created before this process was forked: call cepheid.connect in each process")
        loop = asyncio.get_running_loop()
        if self._pool is None:
            self._loop = loop
            self._pool = ConnectionPool(
                connect_timeout_s=self._connect_timeout_s, keep_alive_s=self._keep_alive_s, security=self._security
            )
            self._lookup = self._new_lookup(self._pool)
        elif self._loop is not loop:
            raise UsageError("the client is used by another event loop: call cepheid.connect in each loop")

    def _new_lookup(self, pool: ConnectionPool) -> Lookup:
        if not _is_http(self._url):
            return Lookup(self._addresses, pool, self._request_timeout_s)
        from cepheid.http_lookup import HttpLookup  # an HTTP client, which other clients do not need

        return HttpLookup(self._url, self._security, pool, self._request_timeout_s)


def _is_http(url: str) -> bool:
    """Return whether a service URL is an admin URL. Raises UsageError for an invalid one."""
    if not url.startswith(("http://", "https://")):
        return False
    parse_admin_url(url)
    return True


class _Link(Protocol):
    async def open(self) -> None: ...
    async def close(self) -> None: ...


async def open_all(links: list[Any]) -> None:
    """Open all, or close those that were opened and raise the first error."""
    each: list[_Link] = links
    try:
        results = await asyncio.gather(*(link.open() for link in each), return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.gather(*(link.close() for link in each), return_exceptions=True)
        raise
    failure = next((result for result in results if isinstance(result, BaseException)), None)
    if failure is not None:
        await asyncio.gather(*(link.close() for link in each), return_exceptions=True)
        raise failure


def _namespace_of(pattern: re.Pattern[str]) -> str:
    """Return the namespace at the beginning of a pattern. Raises UsageError."""
    namespace, _, _ = pattern.pattern.removeprefix("persistent://").rpartition("/")
    if not re.fullmatch(r"[-=:.\w]+/[-=:.\w]+", namespace):
        raise UsageError(f"pattern {pattern.pattern!r} must begin with a namespace, for example 'public/default/orders-.*'")
    return namespace


def _matching(pattern: re.Pattern[str], plan: ConsumerPlan, names: Iterable[str]) -> list[str]:
    """Return the topics of a pattern, partitioned ones once, without the subscription's own dead-letter and retry topics.

    Retry topics are added if the consumer has them. `names` are those of topics and partitions.
    """
    whole = re.compile(pattern.pattern.removeprefix("persistent://"), pattern.flags)
    own = (f"-{plan.options.subscription}-DLQ", f"-{plan.options.subscription}-RETRY")
    dead = plan.dead_letters.topic if plan.dead_letters is not None else None
    dead = None if dead is None else full_name(dead)
    bases = dict.fromkeys(str(TopicName.parse(name).base) for name in names)
    matching = [
        name for name in bases if whole.fullmatch(name.removeprefix("persistent://")) and not name.endswith(own) and name != dead
    ]
    return _with_retry_topics(matching, plan) if plan.retry else matching


def _is_consumed(name: str, consumer: Consumer[Any], known: dict[str, int]) -> bool:
    topic = TopicName.parse(name)
    return name in consumer.links and (str(topic.base) == name or str(topic.base) in known)


def _with_retry_topics(names: list[str], plan: ConsumerPlan) -> list[str]:
    return names + [retry_topic_of(name, plan.options.subscription) for name in names]


def full_name(topic: str) -> str:
    """Return the full name of a topic. Raises UsageError."""
    try:
        return str(TopicName.parse(topic))
    except InvalidTopicNameError as error:
        raise UsageError(str(error)) from None
