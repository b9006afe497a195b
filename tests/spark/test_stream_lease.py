"""Leases at a real broker: made, renewed, moved and found again; retention respects them, also while they are moved."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pulsar
import pytest

from cepheid_decode import MessagePosition, PlanSource, TopicSelection
from cepheid_scan.admin_http import AdminHttp
from cepheid_scan.plan_service import PlanServicePlanner
from cepheid_spark.batch_lease import pin_batch
from cepheid_spark.lease import LEASE_PROPERTY, Held, Lease, new_lease_name
from cepheid_spark.lease_holder import Holder, LeaseTakenError, wall_ms
from cepheid_spark.lease_keeper import LeaseKeeper
from cepheid_testkit import ProcessCluster
from tests.spark.streams import StreamedTopic

pytestmark = pytest.mark.slow


@pytest.fixture
def streamed(server: ProcessCluster, client: pulsar.Client, topic: str) -> Iterator[StreamedTopic]:
    with StreamedTopic(server, client, topic) as streamed:
        yield streamed


@pytest.fixture
def http(server: ProcessCluster) -> Iterator[AdminHttp]:
    http = AdminHttp(PlanSource(service_url=server.service_url))
    yield http
    http.close()


def wait_until(condition, what: str) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def first(ledger_id: int, entry_id: int = 0) -> MessagePosition:
    return MessagePosition(ledger_id, entry_id)


def mark(streamed: StreamedTopic, name: str) -> str:
    position: str = streamed.admin("GET", "/internalStats")["cursors"][name]["markDeletePosition"]
    return position


def test_a_lease_is_made_once_found_again_and_renewed(streamed: StreamedTopic, http: AdminHttp) -> None:
    streamed.send(range(5))
    (ledger_id,) = streamed.ledgers()
    clock_ms = [1_000]
    lease = Lease(http, "spark-a/b?c", 10.0, lambda: clock_ms[0])
    assert lease.hold(streamed.topic, first(ledger_id, 3)) is Held.MADE
    assert mark(streamed, lease.name) == f"{ledger_id}:2"
    path = "/subscription/spark-a%2Fb%3Fc/properties"
    assert streamed.admin("GET", path) == {LEASE_PROPERTY: "11000"}
    streamed.admin("PUT", path, {LEASE_PROPERTY: "11000", "mine": "kept"})
    clock_ms[0] = 5_000
    assert lease.hold(streamed.topic, first(ledger_id, 4)) is Held.FOUND
    assert mark(streamed, lease.name) == f"{ledger_id}:2", "it stays where it is"
    assert streamed.admin("GET", path) == {LEASE_PROPERTY: "15000", "mine": "kept"}
    assert lease.move(streamed.topic, first(ledger_id, 4))
    assert mark(streamed, lease.name) == f"{ledger_id}:3"
    assert lease.hold(streamed.topic, first(ledger_id, 1)) is Held.MOVED_BACK
    assert mark(streamed, lease.name) == f"{ledger_id}:0", "else nothing would hold what lies between"
    lease.drop(streamed.topic)
    assert not lease.renew(streamed.topic)
    assert not lease.move(streamed.topic, first(ledger_id, 4))
    lease.drop(streamed.topic)


def test_a_lease_on_an_empty_ledger_that_went_with_its_owner_is_found(streamed: StreamedTopic, http: AdminHttp) -> None:
    streamed.admin("PUT", "")
    (ledger_id,) = streamed.ledgers()
    lease = Lease(http, new_lease_name(), 10.0, holder=Holder.this_process(wall_ms()))
    assert lease.hold(streamed.topic, first(ledger_id)) is Held.MADE
    streamed.roll()
    assert ledger_id not in streamed.ledgers()
    assert lease.hold(streamed.topic, first(ledger_id)) is Held.FOUND, "it holds all there is: there was no gap"
    lease.drop(streamed.topic)
    assert lease.hold(streamed.topic, first(ledger_id)) is Held.MADE
    assert lease.hold(streamed.topic, first(ledger_id)) is Held.FOUND_LATER, "there was one"


def test_a_lease_that_was_skipped_is_moved_back_by_its_renewal(streamed: StreamedTopic, http: AdminHttp) -> None:
    streamed.send(range(5))
    ledger_id = streamed.ledgers()[0]
    lease = Lease(http, new_lease_name(), 10.0, holder=Holder.this_process(wall_ms()))
    lease.hold(streamed.topic, first(ledger_id, 1))
    assert lease.hold_on(streamed.topic, first(ledger_id, 1)) is Held.FOUND
    streamed.admin("POST", f"/subscription/{lease.name}/skip_all")
    assert mark(streamed, lease.name) == f"{ledger_id}:4"
    assert lease.hold_on(streamed.topic, first(ledger_id, 1)) is Held.MOVED_BACK
    assert mark(streamed, lease.name) == f"{ledger_id}:0"


def test_a_subscription_of_somebody_else_gets_no_end(streamed: StreamedTopic, http: AdminHttp) -> None:
    streamed.send(range(5))
    streamed.admin("PUT", "/subscription/theirs", {"ledgerId": -1, "entryId": -1, "properties": {"a": "b"}})
    lease = Lease(http, "theirs", 10.0)
    assert lease.hold(streamed.topic, first(streamed.ledgers()[0])) is Held.FOUND
    assert lease.renew(streamed.topic)
    assert streamed.admin("GET", "/subscription/theirs/properties") == {"a": "b"}
    assert lease.move(streamed.topic, first(streamed.ledgers()[0], 3))


def test_one_of_two_queries_has_a_name_and_takes_it_along(streamed: StreamedTopic, http: AdminHttp) -> None:
    streamed.send(range(5))
    place = first(streamed.ledgers()[0])
    one, other = (Lease(http, "shared", 10.0, holder=Holder(name, "elsewhere", 1, wall_ms(), wall_ms())) for name in "ab")
    one.hold(streamed.topic, place)
    with pytest.raises(LeaseTakenError, match="process 1 on elsewhere"):
        other.hold(streamed.topic, place)
    assert one.renew(streamed.topic)
    assert other.hold(streamed.topic, place, takes=True) is Held.FOUND
    with pytest.raises(LeaseTakenError):
        one.renew(streamed.topic)


def test_a_batch_read_pins_where_it_starts(server: ProcessCluster, streamed: StreamedTopic) -> None:
    streamed.send(range(5))
    streamed.roll()
    ledger_id = streamed.ledgers()[0]
    name = pin_batch(PlanSource(admin_url=server.admin_url), {streamed.topic: first(ledger_id, 2)}, ttl_s=3600.0)
    streamed.trim()
    assert streamed.ledgers()[0] == ledger_id
    assert streamed.admin("GET", "/subscriptions") == [name]


def test_moves_and_trims_at_one_time_never_take_what_is_held(streamed: StreamedTopic, http: AdminHttp) -> None:
    for number in range(0, 20, 2):
        streamed.send(range(number, number + 2))
        if number == 0:
            lease = Lease(http, new_lease_name(), 3600.0)
            lease.hold(streamed.topic, first(streamed.ledgers()[0]))
        streamed.roll()
    ledgers = streamed.ledgers()
    assert len(ledgers) >= 10
    ended = threading.Event()

    def trim_all_the_time() -> None:
        while not ended.is_set():
            streamed.trim()

    trimmer = threading.Thread(target=trim_all_the_time)
    trimmer.start()
    try:
        for ledger_id in ledgers[:9]:
            for entry_id in (0, 1):
                assert lease.move(streamed.topic, first(ledger_id, entry_id))
                assert ledger_id in streamed.ledgers()
    finally:
        ended.set()
        trimmer.join()
    streamed.trim()
    assert streamed.ledgers()[0] == ledgers[8]


def test_the_keeper_moves_forward_only_and_makes_again_what_vanished(streamed: StreamedTopic, http: AdminHttp) -> None:
    streamed.send(range(10))
    (ledger_id,) = streamed.ledgers()
    keeper = LeaseKeeper(Lease(http, new_lease_name(), 3600.0), renew_s=0.2)
    try:
        keeper.hold({streamed.topic: first(ledger_id, 2)})
        assert keeper.has_held(streamed.topic)
        keeper.move({streamed.topic: first(ledger_id, 5)})
        keeper.move({streamed.topic: first(ledger_id, 4)})
        wait_until(lambda: mark(streamed, keeper.name) == f"{ledger_id}:4", "moved to 5, and not back to 4")
        streamed.admin("DELETE", f"/subscription/{keeper.name}")
        wait_until(lambda: keeper.name in streamed.admin("GET", "/subscriptions"), "made again by the next renewal")
        assert mark(streamed, keeper.name) == f"{ledger_id}:4"
        wait_until(lambda: not keeper.has_held(streamed.topic), "there was a gap")
        assert keeper.covers(streamed.topic)
    finally:
        keeper.close()
    assert keeper.name in streamed.admin("GET", "/subscriptions"), "closing leaves it"
    again = LeaseKeeper(Lease(http, keeper.name, 3600.0))
    again.hold({streamed.topic: first(ledger_id, 5)}, must_exist=True)
    assert again.has_held(streamed.topic)
    again.drop()
    assert streamed.admin("GET", "/subscriptions") == []


def test_a_lease_follows_the_topic_that_is_wanted_in_the_background(streamed: StreamedTopic, http: AdminHttp) -> None:
    streamed.send(range(3))
    keeper = LeaseKeeper(Lease(http, new_lease_name(), 3600.0))
    assert not keeper.covers(streamed.topic)
    keeper.want(streamed.topic, first(streamed.ledgers()[0]))
    wait_until(lambda: keeper.covers(streamed.topic), "covered")
    assert keeper.name in streamed.admin("GET", "/subscriptions")
    keeper.close()


def test_a_topic_that_was_deleted_stays_deleted_though_its_lease_is_renewed(
    server: ProcessCluster, streamed: StreamedTopic, http: AdminHttp
) -> None:
    """The broker makes a topic for whoever makes a subscription in it."""
    streamed.send(range(3))
    keeper = LeaseKeeper(Lease(http, new_lease_name(), 3600.0), renew_s=0.05)
    try:
        keeper.hold({streamed.topic: first(streamed.ledgers()[0])})
        streamed.delete_topic()
        renewed = threading.Event()
        work = keeper._work

        def work_and_say() -> None:
            work()
            renewed.set()

        keeper._work = work_and_say  # type: ignore[method-assign]
        assert renewed.wait(120)
        renewed.clear()
        assert renewed.wait(120)
        with closing(PlanServicePlanner(PlanSource(service_url=server.service_url))) as planner:
            assert streamed.topic not in planner.topics(TopicSelection(pattern=".*", fail_on_missing=False))
    finally:
        keeper.close()
