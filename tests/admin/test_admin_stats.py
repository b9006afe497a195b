"""Statistics in the shapes that clients and dashboards read."""

from __future__ import annotations

from pyroaring import BitMap

from cepheid_broker.admin.internal_stats import acked_ranges
from cepheid_broker.admin.summed_stats import summed_stats
from cepheid_broker.admin.topic_stats import StoredFigures, topic_stats
from cepheid_broker.topics.topic import TopicFigures
from cepheid_broker.traffic import TrafficFigures
from tests.admin.admin_world import NAMESPACE, AdminWorld

FULL = "persistent://public/default"


def test_a_topic_in_use(admin: AdminWorld) -> None:
    client = admin.in_thread(lambda: admin.wire_client(f"{FULL}/used"))
    reader = admin.in_thread(lambda: admin.wire_client(f"{FULL}/used"))
    try:
        admin.in_thread(lambda: reader.subscribe("s", shared=False, earliest=True, permits=100))
        name = admin.in_thread(client.open_producer)
        admin.in_thread(lambda: [client.send(number, b"x" * 1000) for number in range(3)])
        messages = reader.receive()
        admin.in_thread(lambda: [next(messages) for _ in range(3)])
        stats = admin.get(f"{NAMESPACE}/used/stats").json()
    finally:
        client.close()
        reader.close()
    assert (stats["msgInCounter"], stats["msgOutCounter"]) == (3, 3)
    assert 3000 < stats["bytesInCounter"] == stats["bytesOutCounter"] < 3500
    assert stats["averageMsgSize"] == stats["bytesInCounter"] / 3
    assert stats["storageSize"] >= 3000
    (publisher,) = stats["publishers"]
    assert publisher["producerName"] == name
    assert publisher["address"].startswith("/127.0.0.1:")
    assert publisher["connectedSince"].endswith("Z")
    subscription = stats["subscriptions"]["s"]
    assert (subscription["msgBacklog"], subscription["type"]) == (3, "Exclusive")
    assert subscription["consumersAfterMarkDeletePosition"] == {}, "clients read it without asking whether it is there"
    assert 0 < subscription["backlogSize"] <= stats["storageSize"]
    assert (subscription["isDurable"], subscription["durable"]) == (True, True), "both keys are on the wire"
    (consumer,) = subscription["consumers"]
    assert (consumer["availablePermits"], consumer["msgOutCounter"]) == (97, 3)
    assert stats["ownerBroker"] == admin.standalone.admin_url.removeprefix("http://")


def test_lists_of_clients_can_be_left_out(admin: AdminWorld) -> None:
    client = admin.in_thread(lambda: admin.wire_client(f"{FULL}/left-out"))
    try:
        admin.in_thread(client.open_producer)
        assert admin.get(f"{NAMESPACE}/left-out/stats?excludePublishers=true").json()["publishers"] == []
        assert len(admin.get(f"{NAMESPACE}/left-out/stats?getPreciseBacklog=true").json()["publishers"]) == 1
    finally:
        client.close()


def test_a_partitioned_topic_is_summed(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/summed/partitions", json=2)
    admin.put(f"{NAMESPACE}/summed/subscription/s")
    admin.publish(f"{FULL}/summed-partition-0", [b"a"])
    admin.publish(f"{FULL}/summed-partition-1", [b"b", b"c"])
    stats = admin.get(f"{NAMESPACE}/summed/partitioned-stats").json()
    assert stats["msgInCounter"] == 3
    assert stats["subscriptions"]["s"]["msgBacklog"] == 3
    assert stats["metadata"]["partitions"] == 2
    assert {name: part["msgInCounter"] for name, part in stats["partitions"].items()} == {
        f"{FULL}/summed-partition-0": 1,
        f"{FULL}/summed-partition-1": 2,
    }
    assert admin.get(f"{NAMESPACE}/summed/partitioned-stats?perPartition=false").json()["partitions"] == {}
    internal = admin.get(f"{NAMESPACE}/summed/partitioned-internalStats").json()
    assert sorted(internal["partitions"]) == sorted(stats["partitions"])


def test_what_lies_below_a_topic(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/below/subscription/s")
    first = admin.publish(f"{FULL}/below", [b"a", b"b"])
    admin.put(f"{NAMESPACE}/below/unload")  # ends the ledger
    last = admin.publish(f"{FULL}/below", [b"c"])[0]
    stats = admin.get(f"{NAMESPACE}/below/internalStats").json()
    assert stats["state"] == "LedgerOpened"
    assert stats["lastConfirmedEntry"] == f"{last[0]}:{last[1]}"
    assert (stats["numberOfEntries"], stats["currentLedgerEntries"], stats["entriesAddedCounter"]) == (3, 1, 1)
    ledgers = [(ledger["ledgerId"], ledger["entries"]) for ledger in stats["ledgers"]]
    assert ledgers == [(first[0][0], 2), (last[0], 0)], "the open one is last and shows nothing"
    cursor = stats["cursors"]["s"]
    assert cursor["readPosition"] == f"{first[0][0]}:{first[0][1]}"
    assert stats["entriesAddedCounter"] - cursor["messagesConsumedCounter"] == 3, "what tools take for the backlog"


def test_what_was_acknowledged_out_of_order_is_shown() -> None:
    assert acked_ranges({}) == []
    acked = {12: BitMap([4, 5, 7]), 13: BitMap([0])}
    assert acked_ranges(acked) == ["(12:3..12:5]", "(12:6..12:7]", "(13:-1..13:0]"]
    assert acked_ranges({1: BitMap(range(0, 5000, 2))})[-1] == "…"


def test_an_average_is_not_added_up() -> None:
    traffic = TrafficFigures(entries=1, messages=2, size_bytes=100, message_rate_per_s=1.0, byte_rate_per_s=50.0)
    part = topic_stats(TopicFigures("t", traffic, (), ()), StoredFigures(100, 7, "host:1"))
    total = summed_stats({"a": part, "b": part}, {"partitions": 2}, per_partition=False)
    assert (total["averageMsgSize"], total["msgRateIn"], total["bytesInCounter"]) == (50.0, 2.0, 200)
    assert total["topicCreationTimeStamp"] == 7
    assert total["backlogQuotaLimitSize"] == -1, "no limit stays no limit"
