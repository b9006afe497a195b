"""The checks of `cepheid demo-spark`, each of which must be able to fail, and its data and pictures."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from examples.flight_data import load_flights
from examples.flights_spark import checks
from examples.flights_spark.checks import StreamSeen
from examples.flights_spark.expected import Expected, expect
from examples.flights_spark.flight_schema import COLUMNS, record_of
from examples.flights_spark.plots import plot_all

EVENTS = 2000


@pytest.fixture(scope="module")
def expected() -> Expected:
    return expect(EVENTS)


def delay_rows(expected: Expected) -> list[dict[str, Any]]:
    return [
        {"carrier": carrier, "hour": hour, **asdict(delays), "mean_minutes": delays.mean_minutes}
        for (carrier, hour), delays in expected.delays.items()
    ]


@pytest.mark.slow
def test_the_expected_figures_come_from_the_file() -> None:
    found = expect()
    assert found.events == 336_776
    assert sum(delays.flights for delays in found.delays.values()) == 328_521  # 8,255 were cancelled
    assert found.totals["UA"].events == 58_665
    hawaiian = {hour: delays.flights for (carrier, hour), delays in found.delays.items() if carrier == "HA"}
    assert sum(hawaiian.values()) == 342


def test_equal_delays_hold_and_every_difference_is_found(expected: Expected) -> None:
    rows = delay_rows(expected)
    assert checks.check_delays("p", rows, expected.delays).held
    assert not checks.check_delays("p", rows[1:], expected.delays).held
    assert not checks.check_delays("p", [*rows, rows[0]], expected.delays).held
    assert not checks.check_delays("p", [*rows, rows[0] | {"hour": 99}], expected.delays).held
    for name in ("flights", "minutes", "mean_minutes"):
        assert not checks.check_delays("p", [rows[0] | {name: rows[0][name] + 1}, *rows[1:]], expected.delays).held
    assert not checks.check_delays("p", [], {}).held, "comparing nothing must not pass"


def test_lost_and_doubled_events_that_leave_count_and_sum_equal_are_found(expected: Expected) -> None:
    found = {carrier: asdict(totals) for carrier, totals in expected.totals.items()}
    assert checks.check_totals(found, expected.totals).held
    # events 3 and 5 are lost, 2 and 6 are counted twice: count and sum are the same
    forged = found | {"UA": found["UA"] | {"id_square_sum": found["UA"]["id_square_sum"] - 9 - 25 + 4 + 36}}
    assert not checks.check_totals(forged, expected.totals).held
    assert not checks.check_totals({}, expected.totals).held
    assert not checks.check_totals({}, {}).held


GOOD = StreamSeen(
    published_at_kill=1200, counted_at_kill=300, batch_at_kill=1, exit_code=-9, published_at_restart=1700, first_batch_after=2
)


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({}, []),
        ({"first_batch_after": 1}, []),  # the last micro-batch was not committed, so it runs again
        ({"exit_code": 0}, [0]),
        ({"counted_at_kill": 0}, [0]),
        ({"counted_at_kill": EVENTS}, [0]),
        ({"published_at_restart": EVENTS}, [1]),
        ({"published_at_restart": 1200}, [1]),
        ({"first_batch_after": 0}, [2]),
        ({"first_batch_after": -1}, [2]),
    ],
)
def test_a_stream_whose_kill_shows_nothing_fails(expected: Expected, change: dict[str, Any], failing: list[int]) -> None:
    totals = {carrier: asdict(totals) for carrier, totals in expected.totals.items()}
    judged = checks.check_stream(replace(GOOD, totals=totals, **change), expected)
    assert [index for index, check in enumerate(judged) if not check.held] == failing


KILL: dict[str, Any] = {"acted_at": (0.5, 16, 64), "failed_tasks": 0, "errors": [], "finished": [(0.0, 0), (0.5, 16)]}


@pytest.mark.parametrize(
    ("change", "gone", "held"),
    [
        ({}, True, True),
        ({}, False, False),  # the bookie still runs
        ({"acted_at": None}, True, False),
        ({"acted_at": (0.5, 64, 64)}, True, False),
        ({"failed_tasks": 1}, True, False),
        ({"errors": ["no such member"]}, True, False),
    ],
)
def test_a_bookie_must_be_killed_during_the_scan(change: dict[str, Any], gone: bool, held: bool) -> None:
    assert checks.check_kill(KILL | change, gone, 2).held is held
    assert not checks.check_kill(KILL | change, gone, 0).held, "no task needed the killed bookie"


def test_ledgers_receipts_and_columns(expected: Expected) -> None:
    assert checks.check_ledgers(3, 1).held
    assert not checks.check_ledgers(2, 1).held
    assert not checks.check_ledgers(8, 0).held
    assert checks.check_published(expected, EVENTS, []).held
    assert not checks.check_published(expected, EVENTS - 1, []).held
    assert not checks.check_published(expected, EVENTS, ["Timeout"]).held
    assert checks.check_columns([*COLUMNS, "__key", "__publish_time"], COLUMNS).held
    assert not checks.check_columns(COLUMNS[1:], COLUMNS).held


def test_events_become_records_of_the_schema() -> None:
    (event,) = load_flights(1)
    record = record_of(event)
    assert sorted(record) == sorted(COLUMNS)
    assert (record["event_id"], record["carrier"], record["scheduled_departure"].isoformat()) == (
        0,
        "UA",
        "2013-01-01T10:15:00+00:00",
    )


@pytest.mark.slow
def test_pictures_are_png_files(tmp_path: Path, expected: Expected) -> None:
    seen = replace(GOOD, published=[(0.0, 0), (9.0, 5)], counted=[(0.0, 0), (9.0, 5)], killed_at_s=2.0, back_at_s=5.0)
    for path in plot_all(tmp_path, delay_rows(expected), seen, KILL):
        assert path.read_bytes().startswith(b"\x89PNG")
