"""A lease's calls at a broker that refuses, loses answers, and drops subscriptions between two calls."""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_decode import AdminRefusedError, MessagePosition
from cepheid_spark.lease import FROM_PROPERTY, Held, Lease
from cepheid_spark.lease_holder import Holder
from cepheid_spark.lease_keeper import LeaseKeeper
from tests.spark.lease_broker import LeaseBroker

A = "persistent://public/default/a"
CLOCK_MS = 1_000_000_000


def at(entry_id: int, ledger_id: int = 7) -> MessagePosition:
    return MessagePosition(ledger_id, entry_id)


def lease(broker: LeaseBroker, name: str) -> Lease:
    """`name` of the query."""
    return Lease(broker, "s", 3600.0, lambda: CLOCK_MS, holder=Holder(name, "elsewhere", 4711, 1, 1))  # type: ignore[arg-type]


def keeper(broker: LeaseBroker, name: str) -> LeaseKeeper:
    made = LeaseKeeper(lease(broker, name), renew_s=0.0, at_once=1, patience_s=0.0)
    made._start = lambda: None  # type: ignore[method-assign]
    return made


class LosesAnswers(LeaseBroker):
    """What makes a subscription is done, and asked for once more."""

    def request(self, method: str, path: str, *, body: Any = None) -> Any:
        if method == "PUT" and not path.endswith("/properties"):
            super().request(method, path, body=body)
        return super().request(method, path, body=body)


@pytest.mark.parametrize("broker", [LeaseBroker(A), LosesAnswers(A)])
def test_a_lease_that_was_made_anew_behind_what_is_kept_has_not_held(broker: LeaseBroker) -> None:
    """Neither for the process that makes it nor for any later one, until it has read so far."""
    broker.first_kept[A] = at(0, 20)
    for name in ("first", "second", "third"):
        found = keeper(broker, name)
        found.hold({A: at(3)}, must_exist=True)
        assert found.covers(A)
        assert not found.has_held(A)
        found._work()
    later = keeper(broker, "fourth")
    later.hold({A: at(2, 20)}, must_exist=True)
    assert later.has_held(A)


def test_one_that_was_made_where_the_query_stands_has_held_what_is_not_read() -> None:
    broker = LosesAnswers(A)
    keeper(broker, "first").hold({A: at(3)})
    assert broker.properties[A, "s"][FROM_PROPERTY] == "7:3"
    broker.first_kept[A] = broker.stands[A, "s"] = at(0, 9)  # 7 was empty and went with its owner
    found = keeper(broker, "second")
    found.hold({A: at(3)}, must_exist=True)
    assert found.has_held(A)


def test_one_that_does_not_say_where_it_begins_begins_where_it_stands() -> None:
    """Of an earlier version, or made by hand."""
    broker = LeaseBroker(A)
    broker.first_kept[A] = broker.stands[A, "s"] = at(0, 9)
    broker.properties[A, "s"] = {FROM_PROPERTY: "before noon"}
    assert lease(broker, "x").hold(A, at(0), takes=True) is Held.FOUND_LATER
    assert broker.properties[A, "s"][FROM_PROPERTY] == "9:0"
    assert lease(broker, "y").hold(A, at(4, 9), takes=True) is Held.FOUND


class Drops(LeaseBroker):
    """The subscription's time is over between the look at its properties and their renewal."""

    drops = False

    def request(self, method: str, path: str, *, body: Any = None) -> Any:
        if self.drops and method == "PUT" and path.endswith("/properties"):
            self.drops = False
            self.stands.clear()
            self.properties.clear()
        return super().request(method, path, body=body)


def test_one_that_is_dropped_while_it_is_taken_up_is_made_again() -> None:
    broker = Drops(A)
    lease(broker, "before").hold(A, at(0))
    broker.drops = True
    assert lease(broker, "now").hold(A, at(3), takes=True) is Held.MADE
    assert broker.stands[A, "s"] == at(3)


class RefusesLedger9(LeaseBroker):
    """It was empty and has left the chain, which goes on behind it."""

    def request(self, method: str, path: str, *, body: Any = None) -> Any:
        if path.endswith("/resetcursor") and body["ledgerId"] == 9:
            raise AdminRefusedError("no ledger 9, or another seek is under way", status=412)
        return super().request(method, path, body=body)


def test_one_that_cannot_be_moved_back_to_the_start_holds_everything() -> None:
    broker = RefusesLedger9(A)
    lease(broker, "before").hold(A, at(0, 15))
    assert lease(broker, "now").hold(A, at(0, 9), takes=True) is Held.MOVED_BACK
    assert broker.stands[A, "s"] == at(0)


def test_one_that_cannot_be_moved_back_at_all_is_an_error() -> None:
    class RefusesAll(LeaseBroker):
        def request(self, method: str, path: str, *, body: Any = None) -> Any:
            if path.endswith("/resetcursor"):
                raise AdminRefusedError("another seek is under way", status=412)
            return super().request(method, path, body=body)

    broker = RefusesAll(A)
    lease(broker, "before").hold(A, at(9))
    with pytest.raises(AdminRefusedError, match="cannot be moved"):
        lease(broker, "now").hold(A, at(2), takes=True)


def test_no_topic_is_made_for_its_lease() -> None:
    broker = LeaseBroker()
    assert lease(broker, "x").hold(A, at(0)) is Held.NO_TOPIC
    found = keeper(broker, "x")
    found.hold({A: at(0)})
    assert not found.covers(A)
    assert not broker.stands


def test_a_renewal_moves_back_what_somebody_else_has_moved_on() -> None:
    """Time to live, a quota, a consumer."""
    broker = LeaseBroker(A)
    found = keeper(broker, "x")
    found.hold({A: at(10)})
    found._work()
    assert found.has_held(A)
    broker.stands[A, "s"] = at(50)
    found._work()
    assert broker.stands[A, "s"] == at(10)
    assert not found.has_held(A)
    found.move({A: at(20)})
    found._work()
    assert broker.stands[A, "s"] == at(20)
