"""Publishes the flights with their schema, by the official client: as fast as it goes, or paced, with a last part held back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pulsar
from pulsar.schema import AvroSchema

from cepheid_cli.demo.flights import FlightEvent
from cepheid_cli.demo_spark.flight_schema import SCHEMA, record_of

PACED_MESSAGES = 50  # a paced publisher looks at the clock after so many


class FlightPublisher:
    def __init__(self, service_url: str, topic: str, log_path: Path) -> None:
        self._client = pulsar.Client(service_url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Warn, str(log_path)))
        self._producer = self._client.create_producer(
            topic,
            schema=AvroSchema(None, SCHEMA),
            send_timeout_millis=0,
            block_if_queue_full=True,
            batching_enabled=True,
            batching_max_messages=500,
            batching_max_allowed_size_in_bytes=128 * 1024,
            batching_max_publish_delay_ms=2,
        )
        self.sent = 0
        self.receipts = 0
        self.errors: list[str] = []

    def publish(self, events: Sequence[FlightEvent]) -> None:
        """Returns when every event has its receipt."""
        for event in events:
            self._send(event)
        self._producer.flush()

    def start_paced(self, parts: Sequence[tuple[threading.Event, Sequence[FlightEvent]]], rate_per_s: float) -> threading.Thread:
        """In a thread. Each part waits for its gate, so that something arrives after whatever the gate tells of."""

        def run() -> None:
            try:
                for gate, events in parts:
                    gate.wait()
                    self._publish_paced(events, rate_per_s)
                self._producer.flush()
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name="demo-spark-publisher", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self._client.close()

    def _publish_paced(self, events: Sequence[FlightEvent], rate_per_s: float) -> None:
        due_s = time.monotonic()
        for index, event in enumerate(events):
            if index % PACED_MESSAGES == 0:
                time.sleep(max(0.0, due_s - time.monotonic()))
                due_s += PACED_MESSAGES / rate_per_s
            self._send(event)

    def _send(self, event: FlightEvent) -> None:
        self._producer.send_async(
            record_of(event), self._on_result, partition_key=event.carrier, event_timestamp=event.scheduled_departure_ms
        )
        self.sent += 1

    def _on_result(self, result: Any, _message_id: Any) -> None:
        if result == pulsar.Result.Ok:
            self.receipts += 1
        else:
            self.errors.append(str(result))
