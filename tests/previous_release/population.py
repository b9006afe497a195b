"""What a recorded cluster holds: every kind of topic, subscription, schema, policy and stored entry, written by official clients.

    population = Population(service_url, admin)
    population.fill()
    population.truth          receipts and acknowledgements, to be compared with what is read back

Messages lie in namespaces that keep acknowledged data forever, so that the recorded data does not change with its age.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pulsar
from pulsar.schema import AvroSchema, Integer, Record, String

from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, client_of
from tests.plain_admin import AdminClient, namespace_path, subscription_path, topic_path
from tests.previous_release import policies

TENANT = "recorded"
KEPT = f"{TENANT}/kept"
ONCE = f"{TENANT}/once"
TRIMMED = f"{TENANT}/trimmed"
GOVERNED = f"{TENANT}/governed"
FOREVER = {"retention_policies": {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}}

ODD_NAME = "Größe 50% & mehr"
DEDUPLICATED_PRODUCER = "app"
CHUNKED_BYTES = 5_300_000
"""More than the largest message, 5 MiB: two chunks."""
FAR_FUTURE_MS = 4_000_000_000_000
SHARED = pulsar.ConsumerType.Shared
CODECS = ("LZ4", "ZLib", "ZSTD", "SNAPPY")

Message = dict[str, Any]
"""Arguments of `Producer.send`."""


def kept(name: str) -> str:
    return f"persistent://{KEPT}/{name}"


DEDUPLICATED = f"persistent://{ONCE}/deduplicated"
TERMINATED = kept("terminated")
OPEN_WHEN_KILLED = kept("open-when-killed")
RECOVERED = kept("recovered")
ROLLED = kept("rolled")
LATE = kept("late")
HOLES = kept("holes")
SCHEMA_TOPICS = tuple(map(kept, ("flights", "json", "text", "renewed", "large")))


def numbered(count: int, prefix: str, first: int = 0) -> list[Message]:
    return [{"content": f"{prefix}-{number}".encode()} for number in range(first, first + count)]


def id_text(message_id: pulsar.MessageId) -> str:
    """`ledger:entry`, and `:index` for a message of a batch."""
    index = message_id.batch_index()
    return f"{message_id.ledger_id()}:{message_id.entry_id()}" + (f":{index}" if index >= 0 else "")


def payload_text(payload: bytes) -> str:
    """The payload itself when it is short text, else its size and hash."""
    if len(payload) <= 60 and payload.isascii() and payload.decode().isprintable():
        return payload.decode()
    return f"{len(payload)} bytes, sha256 {hashlib.sha256(payload).hexdigest()[:32]}"


@dataclass
class Truth:
    """Receipts by topic, as (id, payload), and acknowledged ids by (topic, subscription)."""

    published: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    acknowledged: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    undelivered: set[tuple[str, str]] = field(default_factory=set)
    """Subscriptions whose messages are all delayed until the far future."""


class Population:
    def __init__(self, service_url: str, admin: AdminClient, *, truth: Truth | None = None) -> None:
        self._service_url = service_url
        self._admin = admin
        self.truth = truth or Truth()

    def fill(self) -> None:
        """Write everything that clients and administrators can create in a healthy cluster."""
        self._namespaces()
        self._plain()
        self._batches_and_codecs()
        self._chunks()
        self._encrypted()
        self._cursors()
        self._delayed()
        self._partitions()
        self._rolled()
        self._deduplicated()
        self._schemas()
        self._ends()
        self._governed()

    # Publishing and consuming

    def publish(self, topic: str, messages: Iterable[Message], **producer: Any) -> list[str]:
        """Publish and wait for every receipt; return the ids."""
        with client_of(self._service_url) as client:
            receipts: list[tuple[str, str, str]] = []
            failures: list[str] = []
            writer = client.create_producer(topic, block_if_queue_full=True, **producer)

            def on_receipt(payload: bytes) -> Callable[[Any, Any], None]:
                def note(result: Any, message_id: Any) -> None:
                    if result != pulsar.Result.Ok:
                        failures.append(str(result))
                        return
                    partition = message_id.partition()
                    name = topic if partition < 0 else f"{topic}-partition-{partition}"
                    receipts.append((name, id_text(message_id), payload_text(payload)))

                return note

            for message in messages:
                content = message["content"]
                payload = content if isinstance(content, bytes) else b""
                writer.send_async(callback=on_receipt(payload), **message)
            writer.flush()
            writer.close()
        assert not failures, failures
        for name, message_id, payload_shown in receipts:
            self.truth.published.setdefault(name, []).append((message_id, payload_shown))
        return [message_id for _, message_id, _ in receipts]

    def take(
        self,
        topic: str,
        subscription: str,
        count: int,
        *,
        acknowledge: Callable[[int], bool] = lambda _: False,
        cumulative: int | None = None,
        redeliver: Sequence[int] = (),
        **consumer: Any,
    ) -> None:
        """Receive `count` messages of a subscription and acknowledge those numbers, or all up to `cumulative`.

        `redeliver`: numbers that are negatively acknowledged twice, so that they have a delivery count."""
        options = {"initial_position": EARLIEST, "consumer_type": SHARED, "batch_index_ack_enabled": True, **consumer}
        acknowledged = self.truth.acknowledged.setdefault((topic, subscription), set())
        with client_of(self._service_url) as client:
            reader = client.subscribe(topic, subscription, negative_ack_redelivery_delay_ms=100, **options)
            received = [reader.receive(TIMEOUT_MS) for _ in range(count)]
            for _ in range(2):
                for number in redeliver:
                    reader.negative_acknowledge(received[number])
                for _ in redeliver:
                    reader.receive(TIMEOUT_MS)
            if cumulative is not None:
                reader.acknowledge_cumulative(received[cumulative])
                acknowledged.update(id_text(message.message_id()) for message in received[: cumulative + 1])
            for number, message in enumerate(received):
                if acknowledge(number):
                    reader.acknowledge(message)
                    acknowledged.add(id_text(message.message_id()))
            reader.close()

    def reset(self, topic: str, subscription: str, to: int) -> None:
        """Reset a subscription through the admin API, so that it continues after message `to` of the topic."""
        message_id = self.truth.published[topic][to][0]
        ledger_id, entry_id, batch_index = map(int, message_id.split(":"))
        body = {"ledgerId": ledger_id, "entryId": entry_id, "batchIndex": batch_index, "partitionIndex": -1, "isExcluded": True}
        self._admin.post(f"{subscription_path(topic, subscription)}/resetcursor", body)
        self.truth.acknowledged[topic, subscription] = {message_id for message_id, _ in self.truth.published[topic][: to + 1]}

    def subscribe(self, topic: str, subscription: str, **properties: str) -> None:
        """Create a subscription at the earliest message through the admin API."""
        body = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1, "properties": properties}
        self._admin.put(subscription_path(topic, subscription), body)
        self.truth.acknowledged.setdefault((topic, subscription), set())

    # The kinds of data

    def _namespaces(self) -> None:
        admin = self._admin
        admin.put(
            "/admin/v2/clusters/elsewhere", {"serviceUrl": "http://elsewhere:8080", "brokerServiceUrl": "pulsar://elsewhere:6650"}
        )
        (cluster,) = [name for name in admin.get("/admin/v2/clusters") if name != "elsewhere"]
        admin.put(f"/admin/v2/tenants/{TENANT}", {"adminRoles": ["alice", "bob"], "allowedClusters": [cluster]})
        admin.put(namespace_path(KEPT), FOREVER)
        admin.put(namespace_path(ONCE), {**FOREVER, "deduplicationEnabled": True})
        admin.put(namespace_path(TRIMMED))
        admin.put(namespace_path(GOVERNED))

    def _plain(self) -> None:
        topic = kept("plain")
        details: Message = {
            "properties": {"a": "1", "b": "ü"},
            "partition_key": "key",
            "ordering_key": "order",
            "event_timestamp": 1_234,
        }
        messages = [{**message, **details} for message in numbered(10, "plain")]
        self.publish(topic, [*messages, *numbered(9, "bare"), {"content": None, "partition_key": "without a value"}])
        self.take(topic, "cumulative", 20, cumulative=9, consumer_type=pulsar.ConsumerType.Exclusive)
        self.subscribe(topic, "untouched", team="search")
        self.subscribe(topic, "a lease/of Spark", **{"cepheid-lease-expires": str(FAR_FUTURE_MS)})
        self.take(topic, "everything", 20, cumulative=19, consumer_type=pulsar.ConsumerType.Failover)
        odd = kept(ODD_NAME)
        self.publish(odd, numbered(3, "odd"))
        self.take(odd, "ein Abo: 100%/ü", 3, acknowledge=lambda number: number == 1)
        with_epoch = kept("exclusive")
        self.publish(with_epoch, numbered(3, "exclusive"), access_mode=pulsar.ProducerAccessMode.Exclusive)

    def _batches_and_codecs(self) -> None:
        batched = {"batching_enabled": True, "batching_max_messages": 10, "batching_max_publish_delay_ms": 10_000}
        self.publish(kept("batched"), numbered(40, "batched"), **batched)
        keyed = [
            {**message, "partition_key": f"key-{n % 3}", "properties": {"n": str(n)}}
            for n, message in enumerate(numbered(12, "keyed"))
        ]
        self.publish(kept("keyed"), keyed, **batched, batching_type=pulsar.BatchingType.KeyBased)
        self.take(kept("batched"), "parts", 40, acknowledge=lambda number: number < 13 or number % 2 == 0)
        for codec in CODECS:
            compression = {"compression_type": getattr(pulsar.CompressionType, codec)}
            repeated = [{"content": f"{codec} {number} ".encode() * 50} for number in range(5)]
            self.publish(kept("compressed"), repeated, **compression)
            self.publish(kept("compressed"), repeated, **compression, **batched)

    def _chunks(self) -> None:
        large: Message = {"content": b"0123456789" * (CHUNKED_BYTES // 10)}
        self.publish(kept("chunked"), [large, *numbered(2, "small")], chunking_enabled=True)
        self.subscribe(kept("chunked"), "whole")

    def _encrypted(self) -> None:
        """Readers have no key and receive the bytes as they are stored."""
        with tempfile.TemporaryDirectory() as directory:
            private, public = Path(directory) / "private.pem", Path(directory) / "public.pem"
            for command in (f"genrsa -out {private} 2048", f"rsa -in {private} -pubout -out {public}"):
                subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
            keys = pulsar.CryptoKeyReader(str(public), str(private))
            self.publish(kept("encrypted"), numbered(3, "secret"), encryption_key="key", crypto_key_reader=keys)

    def _cursors(self) -> None:
        """Acknowledgement states that are inline in the record, in a cursor ledger, and with delivery counts."""
        self.publish(HOLES, numbered(400, "holes"))
        self.take(HOLES, "few", 20, acknowledge=lambda number: number in (0, 3, 4, 17))
        self.take(HOLES, "many", 400, acknowledge=lambda number: number % 2 == 0)
        counted = kept("counted")
        self.publish(counted, numbered(5, "counted"))
        self.take(counted, "again", 5, redeliver=(1, 3), acknowledge=lambda number: number == 2)

    def _delayed(self) -> None:
        topic = kept("delayed")
        self.publish(topic, [{**message, "deliver_at": FAR_FUTURE_MS} for message in numbered(3, "delayed")])
        self.subscribe(topic, "patient")
        self.truth.undelivered.add((topic, "patient"))

    def _partitions(self) -> None:
        topic = kept("partitioned")
        self._admin.put(f"{topic_path(topic)}/partitions", 3)
        self._admin.put(f"{topic_path(topic)}/properties", {"owner": "search", "ü": "1"})
        self.publish(topic, [{**message, "partition_key": f"key-{n % 7}"} for n, message in enumerate(numbered(30, "part"))])
        for partition in range(3):
            self.subscribe(f"{topic}-partition-{partition}", "all")
        self._admin.put(f"/admin/v2/non-persistent/{KEPT}/fleeting/partitions", 2)

    def _rolled(self) -> None:
        """A chain of several ledgers, and a chain whose oldest ledger was trimmed."""
        self.publish(ROLLED, numbered(10, "rolled"))
        for first in (10, 20, 30):
            self._admin.put(f"{topic_path(ROLLED)}/unload")
            batch = {"batching_enabled": True, "batching_max_messages": 5, "batching_max_publish_delay_ms": 10_000}
            self.publish(ROLLED, numbered(10, "rolled", first), **batch)
        self.take(ROLLED, "middle", 40, acknowledge=lambda number: number < 14 or number == 35)
        self.take(ROLLED, "reset", 40, cumulative=39, consumer_type=pulsar.ConsumerType.Exclusive)
        self.reset(ROLLED, "reset", to=21)
        trimmed = f"persistent://{TRIMMED}/trimmed"
        self.publish(trimmed, numbered(10, "gone"))
        self.take(trimmed, "quick", 10, cumulative=9, consumer_type=pulsar.ConsumerType.Exclusive)
        self._admin.put(f"{topic_path(trimmed)}/unload")
        del self.truth.published[trimmed]
        self.publish(trimmed, numbered(5, "stays"))
        self._admin.post(f"{topic_path(trimmed)}/trim")

    def _deduplicated(self) -> None:
        messages = [{**message, "sequence_id": number} for number, message in enumerate(numbered(20, "once"))]
        self.publish(DEDUPLICATED, messages, producer_name=DEDUPLICATED_PRODUCER)
        self.publish(DEDUPLICATED, numbered(5, "other"), producer_name="another")

    def _schemas(self) -> None:
        flights = kept("flights")
        for number, city in enumerate((None, "BOS")):
            fields = {"number": Integer(required=True)} | ({"city": String(required_default=True)} if city else {})
            flight = type("Flight", (Record,), fields)
            values = {"number": number} | ({"city": city} if city else {})
            self.publish(flights, [{"content": flight(**values)}], schema=AvroSchema(flight))
        self.truth.published[flights] = [(message_id, "") for message_id, _ in self.truth.published[flights]]
        point = '{"type":"record","name":"Point","fields":[{"name":"x","type":"int"}]}'
        self._add_schema("json", "JSON", point, author="somebody")
        self._add_schema("text", "STRING", "")
        self._add_schema("renewed", "JSON", point)
        self._admin.delete(self._schema_path("renewed"))
        self._add_schema("renewed", "STRING", "")
        # Larger than one request to the metadata store may be, so the definition is stored in two parts.
        self._add_schema("large", "AVRO", point.replace('"fields"', f'"doc":"{"a long story " * 60_000}","fields"'))

    def _add_schema(self, name: str, kind: str, schema: str, **properties: str) -> None:
        self._admin.post(self._schema_path(name), {"type": kind, "schema": schema, "properties": properties})

    @staticmethod
    def _schema_path(name: str) -> str:
        return f"/admin/v2/schemas/{KEPT}/{name}/schema"

    def _ends(self) -> None:
        """A terminated topic, and a deleted topic whose ledger can be undeleted."""
        self.publish(TERMINATED, numbered(5, "last"))
        self.subscribe(TERMINATED, "rest")
        self._admin.post(f"{topic_path(TERMINATED)}/terminate")
        deleted = kept("deleted")
        self.publish(deleted, numbered(5, "deleted"))
        self._admin.delete(topic_path(deleted), force=True)
        del self.truth.published[deleted]

    def _governed(self) -> None:
        """A namespace and a topic with every policy."""
        topic = f"persistent://{GOVERNED}/topic"
        self._admin.put(topic_path(topic))
        for path, values in ((namespace_path(GOVERNED), policies.OF_A_NAMESPACE), (topic_path(topic), policies.OF_A_TOPIC)):
            for quota, value in policies.BACKLOG_QUOTAS.items():
                self._admin.post(f"{path}/backlogQuota", value, backlogQuotaType=quota)
            for word, value in values.items():
                method = "PUT" if word in policies.SET_BY_PUT else "POST"
                in_query = word in policies.IN_QUERY and path == topic_path(topic)
                self._admin.call(method, f"{path}/{word}", {word: value} if in_query else {}, None if in_query else value)
        self._admin.put(f"{namespace_path(GOVERNED)}/properties", {"team": "search", "cost": "12%"})
