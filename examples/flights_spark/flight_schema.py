"""The Avro schema of the flights, and the conversion of events to its records."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from examples.flight_data import NUMBER_COLUMNS, TEXT_COLUMNS, FlightEvent

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Flight",
    "fields": [
        {"name": "event_id", "type": "long"},
        {"name": "carrier", "type": "string"},
        {"name": "scheduled_departure", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        *({"name": name, "type": ["null", "string"], "default": None} for name in TEXT_COLUMNS),
        *({"name": name, "type": ["null", "int"], "default": None} for name in NUMBER_COLUMNS),
    ],
}
COLUMNS = [field["name"] for field in SCHEMA["fields"]]


def record_of(event: FlightEvent) -> dict[str, Any]:
    """Return the event as a record of the schema."""
    body: dict[str, Any] = json.loads(event.payload)
    return {**body, "scheduled_departure": datetime.fromisoformat(body["scheduled_departure"])}
