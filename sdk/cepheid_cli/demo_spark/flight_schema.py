"""The flights' Avro schema, and an event of the main demo as a record of it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from cepheid_cli.demo.flights import FlightEvent

_TEXT = ("tailnum", "origin", "dest")
_NUMBERS = ("flight", "dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "distance")

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Flight",
    "fields": [
        {"name": "event_id", "type": "long"},
        {"name": "carrier", "type": "string"},
        {"name": "scheduled_departure", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        *({"name": name, "type": ["null", "string"], "default": None} for name in _TEXT),
        *({"name": name, "type": ["null", "int"], "default": None} for name in _NUMBERS),
    ],
}
COLUMNS = [field["name"] for field in SCHEMA["fields"]]


def record_of(event: FlightEvent) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(event.payload)
    return {**body, "scheduled_departure": datetime.fromisoformat(body["scheduled_departure"])}
