"""The publisher and the consumers of the demo: threads that use the official `pulsar-client` or Cepheid's own client.

Both use the same topic: the official client publishes, and a subscription may have consumers of both.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pulsar

import cepheid
from examples.flight_data import FlightEvent, event_id_of
from examples.flights.observations import DeliveryObservations, MessageKey, PublishObservations
from examples.pulsar_connection import create_producer

POLL_MS = 200
RECEIVER_QUEUE = 5_000
PACED_MESSAGES = 100  # a paced consumer looks at the clock once per this many messages
Kind = Literal["official", "cepheid"]
"""The client of a consumer."""


class Publisher:
    """Sends every event once, in order, without waiting for one receipt before the next event."""

    def __init__(self, client: pulsar.Client, topic: str, seen: PublishObservations) -> None:
        self._seen = seen
        self._producer = create_producer(client, topic, producer_name="flights")

    def publish(self, events: Sequence[FlightEvent]) -> None:
        """Send `events` and wait for the last receipt. Each receipt is recorded as it arrives."""
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
    """One or more consumers of a subscription. Each is a thread that receives, records and acknowledges every message.

    `kinds` has the client of each. Those of the official client are opened at once, those of Cepheid when they start.
    `rate_per_s` limits all of them together, so that they are still busy when the server is killed.
    """

    def __init__(
        self,
        client: pulsar.Client,
        topic: str,
        seen: DeliveryObservations,
        *,
        shared: bool,
        kinds: Sequence[Kind],
        service_url: str,
        killed_at_s: Sequence[float],
        rate_per_s: float | None = None,
    ) -> None:
        self._topic = topic
        self._service_url = service_url
        self._is_shared = shared
        self._seen = seen
        self._killed_at_s = killed_at_s
        self._lock = threading.Lock()
        self._pause_s = 0.0 if rate_per_s is None else PACED_MESSAGES * len(kinds) / rate_per_s
        self._stopping = threading.Event()
        self._last_delivery_at_s = time.monotonic()
        self._failure: BaseException | None = None
        kind = pulsar.ConsumerType.Shared if shared else pulsar.ConsumerType.Exclusive
        self._consumers = [
            client.subscribe(
                topic,
                seen.name,
                consumer_type=kind,
                initial_position=pulsar.InitialPosition.Earliest,
                receiver_queue_size=RECEIVER_QUEUE,
                consumer_name=f"{seen.name}-{index}",
            )
            for index in range(kinds.count("official"))
        ]
        runs: list[Callable[[], None]] = [partial(self._receive, consumer) for consumer in self._consumers]
        runs += [self._run_cepheid] * kinds.count("cepheid")
        self._threads = [
            threading.Thread(target=self._noting_failure, args=(run,), name=f"demo-{seen.name}", daemon=True) for run in runs
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def quiet_for_s(self) -> float:
        """Seconds since the last delivery, or since this reader was created."""
        return time.monotonic() - self._last_delivery_at_s

    def check_alive(self) -> None:
        """Raise the error that ended a consumer, if one has ended."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the threads and close the consumers, which sends queued acknowledgements."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for consumer in self._consumers:
            consumer.close()

    def _noting_failure(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self._failure = error

    def _receive(self, consumer: Any) -> None:
        taken, due_s = 0, time.monotonic()
        while not self._stopping.is_set():
            if self._pause_s and taken and taken % PACED_MESSAGES == 0:
                due_s += self._pause_s
                time.sleep(max(0.0, due_s - time.monotonic()))
            try:
                message = consumer.receive(timeout_millis=POLL_MS)
            except pulsar.Timeout:
                continue
            message_id = message.message_id()
            key = (message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
            self._take(key, message.data(), message.partition_key(), partial(consumer.acknowledge, message))
            taken += 1

    def _run_cepheid(self) -> None:
        asyncio.run(self._receive_with_cepheid())

    async def _receive_with_cepheid(self) -> None:
        due_s = time.monotonic()
        async with (
            cepheid.connect(self._service_url) as client,
            client.consumer(
                self._topic,
                self._seen.name,
                type="shared" if self._is_shared else "exclusive",
                start="earliest",
                receiver_queue=RECEIVER_QUEUE,
            ) as consumer,
        ):
            while not self._stopping.is_set():
                try:
                    messages = await consumer.receive_many(PACED_MESSAGES, timeout=POLL_MS / 1000)
                except cepheid.TimedOutError:
                    continue
                for message in messages:
                    message_id = message.message_id
                    key = (message_id.ledger_id, message_id.entry_id, message_id.batch_index)
                    self._take(key, message.data, message.key or "", partial(consumer.ack_nowait, message))
                if self._pause_s:
                    due_s += self._pause_s * len(messages) / PACED_MESSAGES
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    def _take(self, key: MessageKey, payload: bytes, carrier: str, acknowledge: Callable[[], None]) -> None:
        event_id = event_id_of(payload)
        with self._lock:
            self._last_delivery_at_s = time.monotonic()
            self._seen.on_delivery(key, event_id, self._killed_at_s, carrier=carrier)
        acknowledge()
        with self._lock:
            self._seen.on_acknowledged(key)
