"""Waits of producers belong to what made them wait."""

from __future__ import annotations

from tests.history.events import Event
from tests.history.waits import longest_waits


def test_a_wait_belongs_to_the_first_fault_while_it_lasted() -> None:
    events = [
        Event("send", 0.0, uid="a"),
        Event("sent", 0.2, uid="a"),
        Event("send", 0.9, uid="b"),
        Event("fault", 1.0, details={"what": "kill"}),
        Event("fault", 2.0, details={"what": "start"}),
        Event("sent", 2.5, uid="b"),
        Event("send", 2.6, uid="c"),
        Event("sent", 2.7, uid="c", error="Timeout"),
        Event("send", 3.0, uid="never answered"),
    ]
    found = {name: round(wait_s, 3) for name, wait_s in longest_waits(events).items()}
    assert found == {"": 0.2, "kill": 1.6, "start": 0.1}


def test_a_send_in_the_middle_of_a_restart_waits_because_of_the_restart() -> None:
    events = [
        Event("restart", 1.0),
        Event("send", 1.2, uid="a"),
        Event("restarted", 1.5),
        Event("sent", 2.0, uid="a"),
    ]
    assert longest_waits(events) == {"": 0.0, "restart": 0.8}
