"""The official client against our server, broken while it works: the history breaks no rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from cepheid_testkit import ProcessCluster
from tests.history.checker import check
from tests.history.events import Event
from tests.history.told import ToldWorkload
from tests.history.verdict import Promises
from tests.history.waits import longest_waits
from tests.history.workload import Plan, run
from tests.plain_admin import AdminClient

pytestmark = pytest.mark.slow

NAMESPACE = "public/histories"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster() as cluster:
        limits = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}  # the audit needs everything
        AdminClient(cluster.admin_url).put(f"/admin/v2/namespaces/{NAMESPACE}", {"retention_policies": limits})
        yield cluster


def assert_lively(events: list[Event], restarts: int) -> None:
    """A history in which nothing happened proves nothing."""
    counts = Counter(event.kind for event in events)
    assert counts["restart"] == restarts
    assert min(counts[kind] for kind in ("send", "sent", "audit")) > 100, counts
    assert min(counts[kind] for kind in ("received", "ack", "nack")) > 10, counts
    assert min(counts[kind] for kind in ("open", "close")) > 3, counts


@pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
def test_every_kind_of_subscription_through_kills(cluster: ProcessCluster, batching: bool) -> None:
    def break_it() -> None:
        cluster.kill()
        cluster.start()

    topic = f"persistent://{NAMESPACE}/kills-{batching}"
    events = run(Plan(cluster.service_url, topic, seconds=9.0, breaks=(2.5, 5.5), batching=batching), break_it)
    assert_lively(events, restarts=2)
    assert check(events, Promises(key_batches=batching)) == []


def test_deduplication_through_kills(cluster: ProcessCluster) -> None:
    def break_it() -> None:
        cluster.kill()
        cluster.start()

    namespace = "public/histories-once"
    limits = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    policies = {"retention_policies": limits, "deduplicationEnabled": True}
    AdminClient(cluster.admin_url).put(f"/admin/v2/namespaces/{namespace}", policies)
    plan = Plan(
        cluster.service_url,
        f"persistent://{namespace}/once",
        seconds=9.0,
        producers=3,
        messages_per_s=1000,  # so that each kill finds messages on their way
        subscriptions=("Shared",),
        breaks=(1.5, 4.0, 6.5),
    )
    events = run(plan, break_it)
    assert_lively(events, restarts=3)
    assert check(events, Promises(deduplication=True)) == []


def test_every_kind_of_subscription_in_peace_with_seeks(cluster: ProcessCluster) -> None:
    topic = f"persistent://{NAMESPACE}/peace"
    events = run(Plan(cluster.service_url, topic, seconds=6.0, seed=1, seeks=True))
    assert_lively(events, restarts=0)
    assert check(events, Promises()) == []


def test_a_told_workload_goes_on_through_a_kill_and_says_how_long_it_waited(cluster: ProcessCluster) -> None:
    topic = f"persistent://{NAMESPACE}/told"
    with ToldWorkload("--url", cluster.service_url, "--topic", topic, "--types", "Shared", "--quiet-s", "1") as workload:
        workload.wait_for_receipts(50, within_s=60)
        workload.tell("restart")
        cluster.kill()
        cluster.start()
        workload.tell("restarted")
        workload.wait_for_receipts(50, within_s=60)
        events = workload.end()
    assert check(events) == []
    assert longest_waits(events)["restart"] > 0.1
    assert sum(event.kind == "audit" for event in events) > 100
