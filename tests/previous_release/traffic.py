"""Publish and consume on one topic with the official client while a cluster changes, and check that nothing was lost."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import pulsar

from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, wait_for
from tests.previous_release.population import SHARED, id_text

PAUSE_S = 0.01
FINISHED_TIMEOUT_S = 60.0


class Traffic:
    """`with Traffic(url, topic) as traffic:` publishes until `finish`, which checks every promise made to the clients.

    The subscription `live` acknowledges everything at once. The subscription `half` consumes only in `acknowledge_half`.
    `options` are those of the client, as its credentials.
    """

    def __init__(self, service_url: str, topic: str, **options: Any) -> None:
        self.topic = topic
        self.receipts: dict[str, str] = {}
        """Ids of stored messages by payload."""
        self._client = pulsar.Client(
            service_url, operation_timeout_seconds=60, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error), **options
        )
        self._failures: list[str] = []
        self._received: set[str] = set()
        self._half: set[str] = set()
        self._sent = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish, name=f"publish {topic}", daemon=True)

    def __repr__(self) -> str:
        return f"<Traffic on {self.topic}: {self._sent} sent, {len(self.receipts)} acknowledged, {len(self._received)} received>"

    def __enter__(self) -> Self:
        self._consumer = self._client.subscribe(self.topic, "live", message_listener=self._on_message, initial_position=EARLIEST)
        self._client.subscribe(self.topic, "half", SHARED, initial_position=EARLIEST).close()
        self._producer = self._client.create_producer(self.topic, block_if_queue_full=True, send_timeout_millis=0)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._client.close()

    def goes_on(self, more: int = 50) -> None:
        """Wait until `more` further messages are stored and received."""
        acknowledged, received = len(self.receipts) + more, len(self._received) + more
        wait_for(lambda: len(self.receipts) >= acknowledged and len(self._received) >= received, f"{more} more of {self!r}", 120.0)
        assert not self._failures, self._failures

    def acknowledge_half(self, count: int) -> None:
        """Acknowledge every second one of the first `count` messages on the subscription `half`."""
        consumer = self._client.subscribe(self.topic, "half", SHARED, initial_position=EARLIEST)
        for number in range(count):
            message = consumer.receive(TIMEOUT_MS)
            if number % 2:
                consumer.acknowledge(message)
                self._half.add(id_text(message.message_id()))
        consumer.close()

    def finish(self) -> None:
        """Stop publishing. Raises AssertionError if a message is lost, out of order, or delivered after its acknowledgement."""
        self._stop.set()
        self._thread.join(FINISHED_TIMEOUT_S)
        self._producer.flush()
        wait_for(lambda: len(self.receipts) == self._sent and self._received >= self.receipts.keys(), f"the rest of {self!r}")
        self._consumer.close()
        assert not self._failures, self._failures
        stored = self._read_all()
        assert {message_id: stored.get(message_id) for message_id in self.receipts.values()} == {
            message_id: payload for payload, message_id in self.receipts.items()
        }
        # A producer that reconnected may have stored a message twice: deduplication is off.
        assert list(dict.fromkeys(stored.values())) == list(map(str, range(self._sent)))
        self._check_half(stored)

    def _read_all(self) -> dict[str, str]:
        """Return the payloads by id, in the order of the topic."""
        reader = self._client.create_reader(self.topic, pulsar.MessageId.earliest)
        stored: dict[str, str] = {}
        while reader.has_message_available():
            message = reader.read_next(TIMEOUT_MS)
            stored[id_text(message.message_id())] = message.data().decode()
        reader.close()
        return stored

    def _check_half(self, stored: dict[str, str]) -> None:
        consumer = self._client.subscribe(self.topic, "half", SHARED, initial_position=EARLIEST)
        left = [message_id for message_id in stored if message_id not in self._half]
        assert [id_text(consumer.receive(TIMEOUT_MS).message_id()) for _ in left] == left
        consumer.close()

    def _publish(self) -> None:
        while not self._stop.wait(PAUSE_S):
            payload = str(self._sent)
            self._sent += 1
            self._producer.send_async(
                payload.encode(), lambda result, message_id, payload=payload: self._on_receipt(result, message_id, payload)
            )

    def _on_receipt(self, result: Any, message_id: Any, payload: str) -> None:
        if result == pulsar.Result.Ok:
            self.receipts[payload] = id_text(message_id)
        else:
            self._failures.append(f"{payload}: {result}")

    def _on_message(self, consumer: pulsar.Consumer, message: pulsar.Message) -> None:
        self._received.add(message.data().decode())
        consumer.acknowledge(message)
