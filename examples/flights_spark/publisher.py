"""Publishes the flights with their Avro schema, at full speed or at a steady rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pulsar
from pulsar.schema import AvroSchema

from cepheid_ports import CepheidError
from examples.flight_data import FlightEvent
from examples.flights_spark.flight_schema import SCHEMA, record_of
from examples.pulsar_connection import connect, create_producer

PACED_MESSAGES = 50  # a paced publisher looks at the clock once per this many messages


class PublishFailedError(CepheidError):
    """An event could not be published."""


class FlightPublisher:
    """Publishes events to one topic; counts receipts and records errors."""

    def __init__(self, service_url: str, topic: str, log_path: Path) -> None:
        self._client = connect(service_url, log_path)
        self._producer = create_producer(self._client, topic, schema=AvroSchema(None, SCHEMA))
        self.receipts = 0
        self.errors: list[str] = []

    def publish(self, events: Sequence[FlightEvent]) -> None:
        """Publish `events` at full speed and wait for the last receipt."""
        for event in events:
            self._send(event)
        self._producer.flush()

    def start_paced(self, parts: Sequence[tuple[threading.Event, Sequence[FlightEvent]]], rate_per_s: float) -> threading.Thread:
        """Publish `parts` one after the other in a thread, each of them only when its gate is open. Returns the thread."""

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

    def check_errors(self) -> None:
        """Raise PublishFailedError if publishing has failed."""
        if self.errors:
            raise PublishFailedError(f"publishing failed: {self.errors[0]}")

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

    def _on_result(self, result: Any, _message_id: Any) -> None:
        if result == pulsar.Result.Ok:
            self.receipts += 1
        else:
            self.errors.append(str(result))
