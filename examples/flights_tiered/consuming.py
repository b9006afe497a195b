"""Consume flights with the official client, and tell whether each came once, in order, and unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pulsar
from pulsar.schema import AvroSchema

from examples.flight_data import FlightEvent
from examples.flights_spark.flight_schema import SCHEMA, record_of

SILENCE_MS = 5_000


@dataclass
class Seen:
    """What one consumer got."""

    ids: list[int] = field(default_factory=list)
    changed: int = 0
    """Events whose content differs from the source file."""

    def missing(self, expected: Sequence[int]) -> int:
        return len(set(expected).difference(self.ids))

    def is_exactly(self, expected: Sequence[int]) -> bool:
        return self.ids == list(expected) and not self.changed


def consume(
    client: pulsar.Client, topic: str, subscription: str, events: Sequence[FlightEvent], *, up_to: int | None = None
) -> Seen:
    """Read from where the subscription stands (a new one: from the beginning), `up_to` events, or until none comes any more.

    All are acknowledged, and the acknowledgements are saved when this returns.
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
    while up_to is None or len(seen.ids) < up_to:
        try:
            last = consumer.receive(SILENCE_MS)
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


def _differs(body: dict[str, Any], event: FlightEvent) -> bool:
    expected = record_of(event)
    return any(_plain(body.get(name)) != _plain(value) for name, value in expected.items())


def _plain(value: Any) -> Any:
    """Times are compared as milliseconds."""
    return int(value.timestamp() * 1_000) if hasattr(value, "timestamp") else value
