"""Consumes flights with the official client or Cepheid's, and records whether each arrived once, in order, and unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pulsar
from pulsar.schema import AvroSchema

import cepheid
import cepheid.sync
from examples.flight_data import FlightEvent
from examples.flights_spark.flight_schema import SCHEMA, record_of

SILENCE_MS = 3_000
STALL_MS = 90_000


@dataclass
class Seen:
    """The events received by one consumer."""

    ids: list[int] = field(default_factory=list)
    changed: int = 0
    """Events whose content differs from the source file."""

    def missing(self, expected: Sequence[int]) -> int:
        return len(set(expected).difference(self.ids))

    def is_exactly(self, expected: Sequence[int]) -> bool:
        return self.ids == list(expected) and not self.changed


def consume(
    client: pulsar.Client, topic: str, subscription: str, events: Sequence[FlightEvent], count: int, *, to_end: bool
) -> Seen:
    """Read `count` events from the subscription's position (the beginning for a new one), and acknowledge them.

    `to_end`: these should be all, so it waits a while for more. Fewer are returned if nothing arrives for a long time.
    """
    seen = Seen()
    consumer = client.subscribe(
        topic,
        subscription,
        schema=AvroSchema(None, SCHEMA),
        initial_position=pulsar.InitialPosition.Earliest,
        receiver_queue_size=2_000,
    )
    last: Any = None
    while to_end or len(seen.ids) < count:
        try:
            last = consumer.receive(STALL_MS if len(seen.ids) < count else SILENCE_MS)
        except pulsar.Timeout:
            break
        value = last.value()
        body = value if isinstance(value, dict) else vars(value)
        event_id = body["event_id"]
        seen.ids.append(event_id)
        seen.changed += _differs(body, events[event_id])
    if last is not None:
        consumer.acknowledge_cumulative(last)
    consumer.close()
    return seen


def consume_with_cepheid(service_url: str, topic: str, subscription: str, events: Sequence[FlightEvent], count: int) -> Seen:
    """Read all events with Cepheid's client, with the schema stored with the topic. Returns the same as `consume`."""
    seen = Seen()
    with (
        cepheid.sync.connect(service_url) as client,
        client.consumer(topic, subscription, schema=cepheid.AutoSchema(), start="earliest", receiver_queue=2_000) as consumer,
    ):
        last: cepheid.Message[Any] | None = None
        while True:
            try:
                messages = consumer.receive_many(500, timeout=(STALL_MS if len(seen.ids) < count else SILENCE_MS) / 1000)
            except cepheid.TimedOutError:
                break
            for last in messages:
                event_id = last.value["event_id"]
                seen.ids.append(event_id)
                seen.changed += _differs(last.value, events[event_id])
        if last is not None:
            consumer.ack_cumulative(last)
    return seen


def _differs(body: dict[str, Any], event: FlightEvent) -> bool:
    expected = record_of(event)
    return any(_plain(body.get(name)) != _plain(value) for name, value in expected.items())


def _plain(value: Any) -> Any:
    """Return a value for comparison: times in milliseconds."""
    return int(value.timestamp() * 1_000) if hasattr(value, "timestamp") else value
