"""Sends the messages of one task with the client of `sdk/cepheid`: a loop in a thread, while the task's own thread builds messages.

    send(messages) ──► each row's topic partition ──► a producer for each, opened on demand ──► sent, unless stored
    finish()       ──► every receipt has arrived    abandon() ──► nothing more is sent

A message with a key is sent to the partition that the official clients choose for it. Those without a key are sent to the
partitions in turn, by runs of one batch, beginning with one chosen by the task's number: the same when the task is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import cepheid
from cepheid.loop_thread import LoopThread
from cepheid.routing import PartitionChooser
from cepheid.schemas import Schema
from cepheid_decode import BadOptionError
from cepheid_ports import CepheidError
from cepheid_spark.sink_identity import MOST_ROWS, SinkIdentity, SinkNameTakenError
from cepheid_spark.sink_options import SinkOptions, full_topic_name
from cepheid_spark.sink_rows import Messages
from cepheid_wire import pulsar_api_pb2 as pb

if TYPE_CHECKING:
    from cepheid.compression import Compression
    from cepheid.routing import KeyHash

BATCH_MESSAGES = 1000
BATCH_BYTES = 256 << 10
WINDOW_MESSAGES = 20 * BATCH_MESSAGES
WINDOW_BYTES = 8 << 20
"""Per topic partition: limit of messages that wait for receipts."""
_CEPHEID = "Cepheid"
"""Prefix of the versions of brokers that support claims to names. Others ignore them."""
_BUSY_BEYOND_S = 30.0
"""Extra time to wait for names: an attempt whose JVM is gone ends at its `sendTimeout` at the latest."""
_BUSY_PAUSE_S = 0.2
_OF_ANOTHER = "the name belongs to"
"""Text in a broker's refusal of a name that another owner has claimed."""
OWNER_PROPERTY = "cepheid-name-owner"
MEMORY_PROPERTY = "cepheid-name-memory-s"
CONTENT_PROPERTY = "cepheid-name-content"
"""Properties of a producer (docs/producers.md): how long its name is remembered, for one owner; and deduplication must be on."""

T = TypeVar("T")


class SinkError(CepheidError):
    """Rows could not be stored."""

    hint: ClassVar[str] = "a streaming query that is restarted with its checkpoint continues with this micro-batch"


class PayloadSchema(Schema[bytes]):
    """Payloads that are already encoded with this schema. None: no schema is registered."""

    def __init__(self, schema: cepheid.TopicSchema | None) -> None:
        self._schema = schema

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, payload: bytes, writer: cepheid.TopicSchema | None = None) -> bytes:
        return payload

    def describe(self) -> pb.Schema | None:
        return None if self._schema is None else self._schema.describe()


@dataclass(slots=True)
class _Partition:
    """A topic partition to which the task sends."""

    where: str
    producer: cepheid.Producer[bytes]
    first_sequence_id: int | None  # None: at least once
    stored: int = 0
    rows: int = 0


@dataclass(slots=True)
class _Topic:
    name: str
    count: int  # number of partitions; 0: it is not partitioned
    chooser: PartitionChooser
    partitions: dict[int, _Partition]
    keyless_rows: int = 0


class TaskSender:
    """Sends the messages of a task. `identity` None: at least once. `counts`: partitions by topic, as looked up by the driver."""

    def __init__(
        self, options: SinkOptions, identity: SinkIdentity | None, schema: PayloadSchema, counts: dict[str, int], task: int
    ) -> None:
        self._content: str | None = None
        self._options = options
        self._identity = identity
        self._schema = schema
        self._counts = counts
        self._task = task
        self._topics: dict[str, _Topic] = {}
        self._client = connect(options)
        self._thread = LoopThread("cepheid-sink")

    def send(self, messages: Messages) -> None:
        """Accept messages for sending. Raises SinkError, BadOptionError and the client's errors."""
        self._thread.run(self._send(messages))

    def announce(self, content: str) -> None:
        """Announce all rows of this task, by a text that other rows would not have. Call it before the first `send`."""
        self._content = content

    def finish(self) -> tuple[int, int]:
        """Return when everything is stored: the number of rows, and of those stored earlier. Raises the errors of `send`."""
        return self._thread.run(self._finish())

    def prepare(self, topics: list[str]) -> None:
        """Look up topics, so that an unwritable one fails the task before it sends anything. Raises the errors of `send`."""
        for name in topics:
            self._thread.run(self._topic(name))

    def close(self) -> None:
        """Close, and send nothing more. After `finish` nothing is left to send."""
        try:
            self._thread.run(self._close())
        finally:
            self._thread.stop()

    async def _send(self, messages: Messages) -> None:
        options = self._options
        fixed = None if options.topic is None else await self._topic(options.topic)
        for row, payload in enumerate(messages.payloads):
            topic = fixed
            if topic is None:
                assert messages.topics is not None, "rows name their topics"
                topic = self._topics.get(messages.topics[row]) or await self._topic(messages.topics[row])
            key = None if messages.keys is None else messages.keys[row]
            index = self._choose(topic, key)
            partition = topic.partitions.get(index) or await self._open(topic, index)
            sequence_id = None
            if partition.first_sequence_id is not None:
                if partition.rows < partition.stored:
                    partition.rows += 1
                    continue
                if partition.rows == partition.stored:  # later ones follow without a gap, so the client numbers them by itself
                    sequence_id = partition.first_sequence_id + partition.rows
                if partition.rows >= MOST_ROWS:
                    raise SinkError(f"{partition.where}: a task may send {MOST_ROWS:,} rows to a topic partition: use more tasks")
            ordering_key = None if messages.ordering_keys is None else messages.ordering_keys[row]
            properties = None if messages.properties is None else messages.properties[row]
            event_time = None if messages.event_times is None else messages.event_times[row]
            deliver_at = None if messages.deliver_at is None else messages.deliver_at[row]
            while True:
                try:
                    partition.producer.send_nowait(
                        payload, key=key, ordering_key=ordering_key, properties=properties, event_time=event_time,
                        deliver_at=deliver_at, sequence_id=sequence_id,
                    )  # fmt: skip
                    break
                except cepheid.WindowFullError:
                    await self._in_time(partition.producer.drain(), partition.where)
                except cepheid.MessageTooLargeError as error:
                    raise SinkError(
                        f"{error.args[0]}: row {partition.rows:,} of this task for the topic partition; give onTooLarge=chunk, or "
                        "raise the broker's max_message_bytes"
                    ) from None
            partition.rows += 1

    async def _finish(self) -> tuple[int, int]:
        everything = [partition for topic in self._topics.values() for partition in topic.partitions.values()]
        for partition in everything:
            if self._identity is not None:
                self._identity.check_rows(partition.rows, partition.stored, partition.where)
        await asyncio.gather(*(self._in_time(partition.producer.flush(), partition.where) for partition in everything))
        await asyncio.gather(*(partition.producer.close() for partition in everything))
        return sum(partition.rows for partition in everything), sum(partition.stored for partition in everything)

    async def _close(self) -> None:
        partitions = [partition for topic in self._topics.values() for partition in topic.partitions.values()]
        await asyncio.gather(*(partition.producer.abandon() for partition in partitions))
        await self._client.close()

    def _choose(self, topic: _Topic, key: str | None) -> int:
        if not topic.count:
            return 0
        if key is not None:
            return topic.chooser.choose(key)
        turn, topic.keyless_rows = topic.keyless_rows // BATCH_MESSAGES, topic.keyless_rows + 1
        return (self._task + turn) % topic.count

    async def _topic(self, name: str) -> _Topic:
        found = self._topics.get(name)
        if found is None:
            full = full_topic_name(name)
            found = self._topics.get(full)
            if found is None:
                count = self._counts[full] if full in self._counts else await self._client.partitions(full)
                chooser = PartitionChooser(max(count, 1), "round_robin", cast("KeyHash", self._options.key_hash))
                found = _Topic(full, count, chooser, {})
            self._topics[name] = self._topics[full] = found
        return found

    async def _open(self, topic: _Topic, index: int) -> _Partition:
        name = f"{topic.name}-partition-{index}" if topic.count else topic.name
        identity = self._identity
        producer_name = None if identity is None else identity.producer_name(topic.count)
        claim = {} if identity is None else claim_properties(self._options, identity.owner)
        if identity is not None and self._options.name is not None:
            await self._claim_sink(name, identity, claim)
        if identity is not None and self._content is not None:
            claim[CONTENT_PROPERTY] = f"{identity.first_sequence_id}/{self._content}"
        producer = await open_producer(self._client, self._options, name, self._schema, producer_name, claim)
        where = name if producer_name is None else f"{name}, producer {producer_name}"
        partition = _Partition(where, producer, None if identity is None else identity.first_sequence_id)
        topic.partitions[index] = partition  # before the check, so that it is closed with the others
        if identity is not None:
            partition.stored = identity.stored_rows(producer.last_sequence_id, where)
        return partition

    async def _claim_sink(self, topic: str, identity: SinkIdentity, claim: dict[str, str]) -> None:
        """Fence the topic partition for this query. Otherwise another live query with this sinkName could send under the names of
        tasks that this one does not have. Raises SinkNameTakenError.
        """
        try:
            producer = await open_producer(self._client, self._options, topic, self._schema, identity.query_name, dict(claim))
        except cepheid.NotAllowedError as error:
            if _OF_ANOTHER not in error.args[0]:
                raise
            raise SinkNameTakenError(
                f"another query writes under the sinkName {identity.sink!r}: {error.args[0]}", sink=identity.sink
            ) from None
        await producer.close()

    async def _in_time(self, work: Coroutine[Any, Any, T], where: str) -> T:
        limit_s = self._options.send_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await work
        except cepheid.SendFailedError as error:
            raise SinkError(f"{where}: {error.args[0]}") from None
        except TimeoutError as error:
            if isinstance(error, cepheid.Error) or not limit.expired():
                raise
            raise SinkError(
                f"{where}: no receipt within {limit_s:g} s (sendTimeout): brokers or bookies are down, slow, or have no room"
            ) from None


def connect(options: SinkOptions) -> cepheid.Client:
    """Return a client, not connected yet. Raises UsageError."""
    security = options.security
    return cepheid.connect(
        options.service_url,
        token=security.secrets.token,
        password=security.secrets.password,
        tls_ca_file=security.ca_file,
        tls_certificate_file=security.certificate_file,
        tls_key_file=security.key_file,
        tls_check_hostname=security.check_hostname,
    )


def claim_properties(options: SinkOptions, owner: str) -> dict[str, str]:
    return {OWNER_PROPERTY: owner, MEMORY_PROPERTY: str(int(options.memory_s))}


async def open_producer(
    client: cepheid.Client,
    options: SinkOptions,
    topic: str,
    schema: PayloadSchema,
    name: str | None,
    claim: dict[str, str],
    *,
    waits: bool = True,
) -> cepheid.Producer[bytes]:
    """Open a producer of one topic partition, waiting for an attempt of the same task that still has its name.

    `waits` False: a name in use is an error at once. Raises the client's errors.
    """

    async def attempt() -> cepheid.Producer[bytes]:
        return await client.producer(
            topic,
            schema=schema,
            name=name,
            properties=claim,
            repeatable=True,
            batch_messages=BATCH_MESSAGES,
            batch_bytes=BATCH_BYTES,
            window_messages=WINDOW_MESSAGES,
            window_bytes=WINDOW_BYTES,
            chunking=options.chunks_large,
            compression=cast("Compression", options.compression),
            send_timeout_s=0,
        )

    producer = await _while_busy(attempt, options.send_timeout_s + _BUSY_BEYOND_S if waits else 0.0)
    if claim and not producer.server_version.startswith(_CEPHEID):
        await producer.abandon()
        raise BadOptionError(
            f"the broker of {topic} is {producer.server_version or 'unknown'}, and does not say whether it stores rows once: "
            "write with exactlyOnce=false",
            option="exactlyOnce",
        )
    return producer


async def _while_busy(attempt: Callable[[], Coroutine[Any, Any, T]], limit_s: float) -> T:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        try:
            return await attempt()
        except cepheid.BusyError:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_BUSY_PAUSE_S)
