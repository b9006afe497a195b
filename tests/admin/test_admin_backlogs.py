"""Backlogs in statistics: exact in entries, bytes and, when asked for, messages and seconds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cepheid_broker.admin.summed_stats import summed_stats
from cepheid_broker.dispatch.key_hash import HASHES
from cepheid_broker.dispatch.key_owners import AutoSplit
from cepheid_broker.policies.topic_policies import BacklogQuota, QuotaAction
from cepheid_broker.topics.topic import Topic
from cepheid_metadata import EARLIEST, Position
from cepheid_ports import Ports
from cepheid_wire import TopicName, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.admin.admin_world import NAMESPACE, AdminWorld

FULL = "persistent://public/default"


@pytest.fixture
def now_ms() -> int:
    """When the test begins: the module may have been imported long before."""
    return Ports().wall_ms()


def entry(messages: int, size: int, published_ms: int = 0) -> bytes:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=published_ms or Ports().wall_ms())
    if messages > 1:
        metadata.num_messages_in_batch = messages
    return encode_tail(metadata, b"x" * size)


async def open_topic(admin: AdminWorld, name: str, *subscriptions: str) -> Topic:
    topic = await admin.standalone.broker.topics.get(TopicName.parse(f"{FULL}/{name}"), may_create=True)
    for subscription in subscriptions:
        await topic.create_subscription(subscription, EARLIEST)
    return topic


async def publish(topic: Topic, entries: list[bytes], messages: list[int]) -> list[Position]:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    topic.publish(entries, lambda outcome, _: done.set_result(outcome), messages)
    ledger_id, first = await done
    return [Position(ledger_id, first + index) for index in range(len(entries))]


@pytest.mark.slow
def test_a_backlog_of_batches_with_holes(admin: AdminWorld) -> None:
    entries = [entry(count, size) for count, size in ((5, 100), (1, 200), (70, 300), (2, 400))]

    async def prepare() -> None:
        topic = await open_topic(admin, "holes", "s", "caught-up")
        positions = await publish(topic, entries, [5, 1, 70, 2])
        cursor = topic.subscriptions["s"].cursor
        cursor.acknowledge([positions[1]])
        cursor.acknowledge_indexes(positions[2], [0b1110], 70)
        topic.subscriptions["caught-up"].cursor.acknowledge_cumulative(positions[-1])

    admin.run(prepare())
    stats = admin.get(f"{NAMESPACE}/holes/stats").json()
    backlog = stats["subscriptions"]["s"]
    assert backlog["msgBacklog"] == 3, "entries, as in Pulsar"
    assert backlog["backlogMessages"] == 5 + 3 + 2
    assert backlog["backlogSize"] == len(entries[0]) + len(entries[2]) + len(entries[3])
    assert backlog["backlogExact"] is True
    assert backlog["nonContiguousDeletedMessagesRanges"] == 1
    assert stats["nonContiguousDeletedMessagesRanges"] == 1
    assert stats["backlogSize"] == sum(map(len, entries)), "what must be kept for the slowest"
    caught_up = stats["subscriptions"]["caught-up"]
    assert (caught_up["msgBacklog"], caught_up["backlogMessages"], caught_up["backlogSize"]) == (0, 0, 0)
    assert "backlogAgeSeconds" not in caught_up


def test_what_memory_does_not_know_is_said_and_read_when_asked_for(admin: AdminWorld, now_ms: int) -> None:
    name = TopicName.parse(f"{FULL}/unknown")
    entries = [entry(3, 100, now_ms - 50_000), entry(4, 200, now_ms - 40_000), entry(5, 300, now_ms - 30_000)]

    async def prepare() -> None:
        topic = await open_topic(admin, "unknown", "s")
        positions = await publish(topic, entries, [3, 4, 5])
        topic.subscriptions["s"].cursor.acknowledge([positions[1]])
        await topic.subscriptions["s"].cursor.saved()
        await admin.standalone.broker.topics.unload(name)

    admin.run(prepare())
    cheap = admin.get(f"{NAMESPACE}/unknown/stats").json()["subscriptions"]["s"]
    assert (cheap["msgBacklog"], cheap["backlogExact"]) == (2, False)
    assert cheap["backlogSize"] == sum(map(len, entries)), "not less than it is"
    assert "backlogMessages" not in cheap
    exact = admin.get(f"{NAMESPACE}/unknown/stats?getPreciseBacklog=true").json()["subscriptions"]["s"]
    assert (exact["msgBacklog"], exact["backlogMessages"], exact["backlogExact"]) == (2, 8, True)
    assert exact["backlogSize"] == len(entries[0]) + len(entries[2])


def test_the_age_of_a_backlog(admin: AdminWorld, now_ms: int) -> None:
    async def prepare() -> None:
        topic = await open_topic(admin, "aged", "behind", "ahead")
        positions = await publish(topic, [entry(1, 1, now_ms - 500_000), entry(1, 1, now_ms - 100_000)], [1, 1])
        topic.subscriptions["ahead"].cursor.acknowledge([positions[0]])

    admin.run(prepare())
    stats = admin.get(f"{NAMESPACE}/aged/stats").json()
    assert 500 <= stats["oldestBacklogMessageAgeSeconds"] < 600
    assert stats["oldestBacklogMessageSubscriptionName"] == "behind"
    assert stats["earliestMsgPublishTimeInBacklogs"] == 0, "only when asked for"
    stats = admin.get(f"{NAMESPACE}/aged/stats?getEarliestTimeInBacklog=true").json()
    assert stats["earliestMsgPublishTimeInBacklogs"] == now_ms - 500_000
    assert stats["subscriptions"]["ahead"]["earliestMsgPublishTimeInBacklog"] == now_ms - 100_000
    assert 100 <= stats["subscriptions"]["ahead"]["backlogAgeSeconds"] < 200


def test_an_empty_backlog_has_no_age(admin: AdminWorld) -> None:
    admin.run(open_topic(admin, "empty", "s"))
    stats = admin.get(f"{NAMESPACE}/empty/stats?getEarliestTimeInBacklog=true").json()
    assert stats["oldestBacklogMessageAgeSeconds"] == -1
    assert "oldestBacklogMessageSubscriptionName" not in stats
    assert stats["lastPublishTimeStamp"] == 0


def test_a_check_of_the_quotas_can_be_asked_for(admin: AdminWorld) -> None:
    checks = admin.standalone.broker.backlog_checks
    before = checks.rounds
    answer = admin.get("/admin/v2/brokers/backlog-quota-check")
    assert (answer.status_code, answer.content) == (204, b"")
    assert checks.rounds > before


def test_quotas_and_what_they_did_are_shown(admin: AdminWorld, now_ms: int) -> None:
    async def prepare() -> None:
        topic = await open_topic(admin, "quota", "s")
        size, age = BacklogQuota(1 << 30, QuotaAction.HOLD), BacklogQuota(60, QuotaAction.EVICT)
        topic.on_policies(replace(topic.policies, size_quota=size, age_quota=age))
        await publish(topic, [entry(1, 1, now_ms - 500_000), entry(1, 1, now_ms - 1_000)], [1, 1])

    admin.run(prepare())
    for _ in range(500):
        stats = admin.get(f"{NAMESPACE}/quota/stats").json()
        if stats["subscriptions"]["s"]["totalMsgExpired"]:
            break
        admin.run(asyncio.sleep(0.01))
    assert (stats["backlogQuotaLimitSize"], stats["backlogQuotaLimitTime"]) == (1 << 30, 60)
    subscription = stats["subscriptions"]["s"]
    assert (subscription["msgBacklog"], subscription["totalMsgExpired"]) == (1, 1)
    assert subscription["lastExpireTimestamp"] >= now_ms
    assert subscription["lastMarkDeleteAdvancedTimestamp"] >= now_ms
    assert stats["lastPublishTimeStamp"] >= now_ms


def test_internal_statistics_with_a_reader_and_with_metadata(admin: AdminWorld) -> None:
    async def prepare() -> None:
        topic = await open_topic(admin, "internal", "s")
        await topic.open_reader("r", EARLIEST)
        await publish(topic, [entry(1, 1)], [1])

    admin.run(prepare())
    stats = admin.get(f"{NAMESPACE}/internal/internalStats?metadata=true").json()
    assert sorted(stats["cursors"]) == ["r", "s"]
    assert '"ensemble_size":1' in stats["ledgers"][0]["metadata"]
    assert "password" not in stats["ledgers"][0]["metadata"]
    assert "metadata" not in admin.get(f"{NAMESPACE}/internal/internalStats").json()["ledgers"][0]


def test_partitions_together() -> None:
    def part(age_s: int, messages: int | None, earliest_ms: int) -> dict[str, Any]:
        subscription: dict[str, Any] = {
            "msgBacklog": 2,
            "backlogSize": 10,
            "backlogExact": messages is not None,
            "backlogAgeSeconds": age_s,
            "blockedSubscriptionOnUnackedMsgs": messages is None,
            "lastAckedTimestamp": age_s,
        }
        if messages is not None:
            subscription["backlogMessages"] = messages
        return {
            "publishers": [],
            "subscriptions": {"s": subscription},
            "backlogQuotaLimitSize": -1,
            "oldestBacklogMessageAgeSeconds": age_s,
            "oldestBacklogMessageSubscriptionName": f"s{age_s}",
            "earliestMsgPublishTimeInBacklogs": earliest_ms,
        }

    total = summed_stats({"a": part(5, 7, 0), "b": part(9, 8, 300), "c": part(2, 9, 200)}, {}, per_partition=False)
    assert (total["oldestBacklogMessageAgeSeconds"], total["oldestBacklogMessageSubscriptionName"]) == (9, "s9")
    assert (total["earliestMsgPublishTimeInBacklogs"], total["backlogQuotaLimitSize"]) == (200, -1)
    assert total["subscriptions"]["s"] == {
        "msgBacklog": 6,
        "backlogSize": 30,
        "backlogExact": True,
        "backlogAgeSeconds": 9,
        "backlogMessages": 24,
        "blockedSubscriptionOnUnackedMsgs": False,
        "lastAckedTimestamp": 9,
    }
    unknown = summed_stats({"a": part(5, 7, 0), "b": part(9, None, 0)}, {}, per_partition=False)["subscriptions"]["s"]
    assert "backlogMessages" not in unknown, "a sum of what is known would look like all there is"
    assert (unknown["backlogExact"], unknown["blockedSubscriptionOnUnackedMsgs"]) == (False, True)


def test_consumers_of_keys_show_their_ranges() -> None:
    owners = AutoSplit()
    for consumer in range(3):
        owners.join(consumer)
    owners.leave(1)
    ranges = [owners.ranges_of(consumer) for consumer in (0, 2)]
    covered = sorted(one for some in ranges for one in some)
    assert covered[0][0] == 0
    assert covered[-1][1] == HASHES - 1
    assert all(before[1] + 1 == after[0] for before, after in pairwise(covered)), "all hashes, none twice"
    assert all(owners.owner(first) == owners.owner(last) == 0 for first, last in ranges[0])
    assert owners.ranges_of(1) == ()
