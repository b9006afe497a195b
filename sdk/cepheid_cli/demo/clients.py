"""The demo's publisher and consumers: threads around the official `pulsar-client`, unmodified."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pulsar

from cepheid_cli.demo.flights import FlightEvent, event_id_of
from cepheid_cli.demo.observations import DeliveryObservations, MessageKey, PublishObservations

POLL_MS = 200
PACED_MESSAGES = 100  # a paced consumer looks at the clock after so many


def connect(service_url: str, log_path: Path) -> pulsar.Client:
    """A killed server makes the client talk a lot: it talks to a file."""
    return pulsar.Client(
        service_url,
        operation_timeout_seconds=60,
        io_threads=1,
        message_listener_threads=1,
        logger=pulsar.FileLogger(pulsar.LoggerLevel.Warn, str(log_path)),
    )


class Publisher:
    """Sends every event once, in order, without waiting for receipts; the client itself resends after a lost connection."""

    def __init__(self, client: pulsar.Client, topic: str, seen: PublishObservations) -> None:
        self._seen = seen
        self._producer = client.create_producer(
            topic,
            producer_name="flights",
            send_timeout_millis=0,  # the demo waits through the kills: a resend is the client's, a failure would be ours
            block_if_queue_full=True,
            max_pending_messages=1_500,
            batching_enabled=True,
            batching_max_messages=500,
            batching_max_allowed_size_in_bytes=128 * 1024,
            batching_max_publish_delay_ms=2,
        )

    def publish(self, events: Sequence[FlightEvent]) -> None:
        """Returns when every event was handed to the client; receipts come to the observations."""
        send, sent_at_s, now = self._producer.send_async, self._seen.sent_at_s, time.monotonic
        for event in events:
            sent_at_s[event.event_id] = now()
            send(
                event.payload,
                self._receipt(event.event_id),
                partition_key=event.carrier,
                event_timestamp=event.scheduled_departure_ms,
            )
        self._producer.flush()

    def _receipt(self, event_id: int) -> Callable[[Any, Any], None]:
        def on_result(result: Any, _message_id: Any) -> None:
            if result == pulsar.Result.Ok:
                self._seen.on_receipt(event_id)
            else:
                self._seen.errors.append(f"event {event_id}: {result}")

        return on_result


class SubscriptionReader:
    """One or more consumers of one subscription, each a thread that receives, notes, and acknowledges every message.

    `rate_per_s` bounds all of them together, for work that should last until something happens to the server.
    """

    def __init__(
        self,
        client: pulsar.Client,
        topic: str,
        seen: DeliveryObservations,
        *,
        shared: bool,
        consumers: int,
        killed_at_s: Sequence[float],
        rate_per_s: float | None = None,
    ) -> None:
        self._seen = seen
        self._killed_at_s = killed_at_s
        self._lock = threading.Lock()
        self._pause_s = 0.0 if rate_per_s is None else PACED_MESSAGES * consumers / rate_per_s
        self._stopping = threading.Event()
        self._last_delivery_at_s = time.monotonic()
        self.failure: BaseException | None = None
        kind = pulsar.ConsumerType.Shared if shared else pulsar.ConsumerType.Exclusive
        self._consumers = [
            client.subscribe(
                topic,
                seen.name,
                consumer_type=kind,
                initial_position=pulsar.InitialPosition.Earliest,
                receiver_queue_size=5_000,
                consumer_name=f"{seen.name}-{index}",
            )
            for index in range(consumers)
        ]
        self._threads = [
            threading.Thread(target=self._receive, args=(consumer,), name=f"demo-{seen.name}", daemon=True)
            for consumer in self._consumers
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def quiet_for_s(self) -> float:
        return time.monotonic() - self._last_delivery_at_s

    def stop(self) -> None:
        """Ends the threads and closes the consumers, which sends what they have acknowledged so far."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for consumer in self._consumers:
            consumer.close()

    def _receive(self, consumer: Any) -> None:
        taken, due_s = 0, time.monotonic()
        try:
            while not self._stopping.is_set():
                if self._pause_s and taken and taken % PACED_MESSAGES == 0:
                    due_s += self._pause_s
                    time.sleep(max(0.0, due_s - time.monotonic()))
                try:
                    message = consumer.receive(timeout_millis=POLL_MS)
                except pulsar.Timeout:
                    continue
                self._take(consumer, message)
                taken += 1
        except BaseException as error:
            self.failure = error

    def _take(self, consumer: Any, message: Any) -> None:
        message_id = message.message_id()
        key: MessageKey = (message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
        event_id, carrier = event_id_of(message.data()), message.partition_key()
        with self._lock:
            self._last_delivery_at_s = time.monotonic()
            self._seen.on_delivery(key, event_id, self._killed_at_s, carrier=carrier)
        consumer.acknowledge(message)
        with self._lock:
            self._seen.on_acknowledged(key)
