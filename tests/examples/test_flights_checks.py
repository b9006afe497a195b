"""The checks of `cepheid demo`, each of which must be able to fail, and its data, ports and percentiles."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from examples.flight_data import EXPECTED_FLIGHTS, FlightEvent, event_id_of, load_flights, source_rows
from examples.flights.checks import (
    check_all_published,
    check_order,
    check_receipts,
    check_subscription,
    check_totals,
)
from examples.flights.observations import DeliveryObservations, PublishObservations
from examples.flights.run import DemoOptions, run_demo
from examples.flights.server_process import PortTakenError
from examples.report import percentile

EVENTS = [FlightEvent(index, "AB"[index % 2], 0, b'{"event_id":%d,"x":1}' % index) for index in range(6)]


def published(receipts: Sequence[int]) -> PublishObservations:
    seen = PublishObservations(len(EVENTS))
    for event_id in receipts:
        seen.on_receipt(event_id)
    return seen


def test_a_receipt_without_its_event_in_the_topic_is_a_loss() -> None:
    assert check_receipts(published(range(6)), [0, 1, 2, 3, 4, 5]).held
    lost = check_receipts(published(range(6)), [0, 1, 2, 4, 5])
    assert not lost.held
    assert "first 3" in lost.detail


def test_no_receipt_at_all_is_not_a_success() -> None:
    assert not check_receipts(published([]), []).held
    assert not check_all_published(EVENTS, published([0, 1, 2])).held


@pytest.mark.parametrize(
    ("stored", "held"),
    [
        ([0, 1, 2, 3], True),
        ([0, 1, 2, 1, 2, 3], True),  # the client sent a suffix again
        ([0, 2, 1, 3], False),
        ([], False),
    ],
)
def test_order_is_judged_by_first_occurrences(stored: list[int], held: bool) -> None:
    assert check_order(stored).held is held


@pytest.mark.parametrize(
    ("delivered", "held"),
    [
        (["A0", "B1", "B1", "A2", "B3", "A4", "B5"], True),  # a copy does not count
        (["A0", "B1", "A2", "B3", "A4"], False),
        (["A0", "B1", "A2", "B3", "A4", "A5"], False),  # one event has the key of another carrier
    ],
)
def test_totals_count_each_event_once_by_the_key_it_came_with(delivered: list[str], held: bool) -> None:
    seen = DeliveryObservations("audit")
    for entry_id, (carrier, event_id) in enumerate(delivered):
        seen.on_delivery((1, entry_id, -1), int(event_id), [], carrier=carrier)
    assert check_totals(EVENTS, seen.carriers).held is held


def test_an_acknowledgement_forgotten_by_a_kill_is_found() -> None:
    seen = DeliveryObservations("exclusive")
    for event in EVENTS:
        seen.on_delivery((1, event.event_id, -1), event.event_id, [], carrier="A")
    seen.acknowledged_at_s[(1, 0, -1)] = 100.0
    assert all(check.held for check in check_subscription(EVENTS, seen, [103.0]))
    seen.on_delivery((1, 0, -1), 0, [101.0], carrier="A")  # acknowledged less than two seconds before the kill, so this is allowed
    assert all(check.held for check in check_subscription(EVENTS, seen, [103.0]))
    seen.on_delivery((1, 0, -1), 0, [103.0], carrier="A")
    assert [check.held for check in check_subscription(EVENTS, seen, [103.0])] == [True, False]
    assert seen.redelivered == 2


def test_a_missing_event_fails_the_subscription() -> None:
    seen = DeliveryObservations("shared")
    seen.on_delivery((1, 0, -1), 0, [], carrier="A")
    seen.acknowledged_at_s[(1, 0, -1)] = 100.0
    assert [check.held for check in check_subscription(EVENTS, seen, [103.0])] == [False, True]


def test_acknowledgements_too_young_to_judge_do_not_pass_the_check() -> None:
    seen = DeliveryObservations("shared")
    seen.on_delivery((1, 0, -1), 0, [], carrier="A")
    seen.acknowledged_at_s[(1, 0, -1)] = 102.0
    assert not check_subscription(EVENTS, seen, [103.0])[1].held
    assert not check_subscription(EVENTS, seen, [])[1].held


def test_the_demo_refuses_a_port_that_another_server_has_and_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with pytest.raises(PortTakenError, match=f"127.0.0.1:{port}.*choose another port with --port"):
            run_demo(DemoOptions(tmp_path, port, port, limit=1), Console())
    assert (tmp_path / "cluster").exists()


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(100))), 0.99) == 99.0
    assert percentile([], 0.5) == 0.0


@pytest.mark.slow
def test_the_input_is_the_year_of_flights() -> None:
    carriers = [row["carrier"] for _, row in source_rows()]
    assert len(carriers) == EXPECTED_FLIGHTS
    assert len(set(carriers)) == 16
    events = load_flights(3)
    assert [event_id_of(event.payload) for event in events] == [0, 1, 2]
    assert events[0].scheduled_departure_ms == 1357035300000  # 2013-01-01 05:15 in New York
