"""A batch read holds what it has still to read, by a subscription with a time to live."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pulsar
import pytest
from pyspark.sql import DataFrame

from cepheid_decode import AdminRefusedError, MessagePosition, PlanSource, ScanTask
from cepheid_decode.history import Fragment, Piece
from cepheid_spark import batch_lease
from cepheid_spark.batch_lease import LEASE_BYTES, BatchLease, first_positions, hold_lease, pin_batch, prolonging
from cepheid_spark.lease import LEASE_PROPERTY
from cepheid_spark.options import SourceOptions, parse_options
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import publish
from tests.spark.lease_broker import LeaseBroker
from tests.spark.test_lease_holder import refuse

Load = Callable[..., DataFrame]
T = "persistent://public/default/t"


def piece(topic: str, ledger_id: int, first: int) -> Piece:
    return Piece(topic, -1, ledger_id, first, first + 9, 1, 1, (Fragment(0, ("b",)),))


def options(url: str = "pulsar://127.0.0.1:1", **more: str) -> SourceOptions:
    return parse_options({"serviceUrl": url, "topic": "t", "metadataRetry": "100ms", **more}, streaming=False)


def test_it_starts_where_the_first_task_of_each_topic_does() -> None:
    tasks = [ScanTask((piece("a", 7, 10), piece("b", 3, 0)), ()), ScanTask((piece("a", 7, 0), piece("a", 9, 0)), ())]
    assert first_positions(tasks) == {"a": MessagePosition(7, 0), "b": MessagePosition(3, 0)}


@pytest.mark.parametrize(
    ("more", "size_bytes"),
    [({}, LEASE_BYTES - 1), ({"subscription": "none"}, 5 * LEASE_BYTES)],
)
def test_small_reads_and_those_that_want_none_hold_no_lease(more: dict[str, str], size_bytes: int) -> None:
    assert hold_lease(options(**more), [ScanTask((piece(T, 7, 10),), (), b"", size_bytes)]) is None


def test_without_brokers_there_is_nobody_to_hold_it() -> None:
    by_metadata = parse_options({"metadata": "zk://127.0.0.1:1", "topic": "t"}, streaming=False)
    assert hold_lease(by_metadata, [ScanTask((piece(T, 7, 10),), (), b"", 5 * LEASE_BYTES)]) is None


def test_a_read_goes_on_without_a_lease_unless_it_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    from cepheid_scan import PlanUnavailableError

    tasks = [ScanTask((piece(T, 7, 10),), (), b"", LEASE_BYTES)]
    assert hold_lease(options(), tasks) is None
    assert "scan.without_lease: nothing but retention keeps what is read: " in caplog.text
    with pytest.raises(PlanUnavailableError):
        hold_lease(options(subscription="mine"), tasks)


def test_one_that_cannot_be_held_on_all_topics_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {f"persistent://public/default/{name}": MessagePosition(7, 0) for name in "ab"}
    broker = LeaseBroker(*places)
    refuse(broker, "persistent://public/default/b")
    monkeypatch.setattr(batch_lease, "AdminHttp", lambda source: broker)
    with pytest.raises(AdminRefusedError):
        pin_batch(PlanSource(admin_url="http://nobody:1"), places, ttl_s=9.0)
    assert not broker.stands


@pytest.mark.slow
def test_a_long_read_is_held_under_a_name_of_its_own(
    topic: str, client: pulsar.Client, server: ProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cepheid_scan.plan_scan import plan_scan

    publish(client, topic, [b"x", b"y"])
    monkeypatch.setattr(batch_lease, "LEASE_BYTES", 1)
    parsed = parse_options({"serviceUrl": server.service_url, "topic": topic}, streaming=False)
    tasks, _, _ = plan_scan(parsed.reading(("value",)))
    lease = hold_lease(parsed, tasks)
    assert lease is not None
    assert lease.name.startswith("spark-batch-")
    assert list(subscriptions(server, topic)) == [lease.name]
    ends_ms = expiry_ms(server, topic, lease.name)
    later = BatchLease(lease.name, 48 * 3600.0, 0, topics=1)  # of which more than half is over
    assert prolonging(later, f"persistent://public/default/{topic}", parsed).look()
    assert expiry_ms(server, topic, lease.name) - ends_ms > 40 * 3600_000


def expiry_ms(server: ProcessCluster, topic: str, name: str) -> int:
    path = f"/admin/v2/persistent/public/default/{topic}/subscription/{name}/properties"
    with urllib.request.urlopen(f"{server.admin_url}{path}", timeout=30) as answer:
        return int(json.load(answer)[LEASE_PROPERTY])


def subscriptions(server: ProcessCluster, topic: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.admin_url}/admin/v2/persistent/public/default/{topic}/stats", timeout=30) as answer:
        return dict(json.load(answer)["subscriptions"])


@pytest.mark.slow
def test_a_named_lease_is_a_subscription_with_the_backlog_of_the_read(
    topic: str, client: pulsar.Client, server: ProcessCluster, load: Load
) -> None:
    publish(client, topic, [b"%d" % number for number in range(10)])
    frame = load(topic, subscription="report", leaseTtl="1h")
    assert frame.count() == 10
    assert subscriptions(server, topic)["report"]["msgBacklog"] == 10
    assert load(topic, startingOffsets="subscription", subscription="report").count() == 10
