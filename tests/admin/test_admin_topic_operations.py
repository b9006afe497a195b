"""The end of topics, their labels, what metadata says of them; brokers and bookies."""

from __future__ import annotations

import pytest

from cepheid_metadata import BookieRegistration, available_bookies
from cepheid_ports import CepheidError
from tests.admin.admin_world import NAMESPACE, TOPICS, AdminWorld

FULL = "persistent://public/default"
EARLIEST = {"ledgerId": -1, "entryId": -1}


def test_a_terminated_topic_takes_nothing_more_and_can_be_read(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/ended/subscription/s", json=EARLIEST)
    (_, last) = admin.publish(f"{FULL}/ended", [b"a", b"b"])
    expected = {"ledgerId": last[0], "entryId": last[1], "partitionIndex": -1}
    assert admin.post(f"{NAMESPACE}/ended/terminate").json() == expected
    assert admin.post(f"{NAMESPACE}/ended/terminate").json() == expected, "again: the same answer"
    with pytest.raises(CepheidError):
        admin.publish(f"{FULL}/ended", [b"c"])
    assert admin.get(f"{NAMESPACE}/ended/subscription/s/position/2").content == b"b"
    assert admin.get(f"{NAMESPACE}/ended/internal-info").json()["terminatedPosition"] == {
        "ledgerId": last[0],
        "entryId": last[1],
    }
    assert admin.put(f"{NAMESPACE}/ended/unload").status_code == 204
    assert admin.get(f"{NAMESPACE}/ended/internalStats").json()["state"] == "Terminated"
    assert admin.post(f"{NAMESPACE}/ended/terminate/partitions").status_code == 405, "it is not partitioned"
    assert admin.delete(f"{NAMESPACE}/ended").status_code == 204


def test_every_partition_is_terminated_by_the_call_for_partitions_only(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/ended-parts/partitions", json=2)
    ((ledger_id, entry_id),) = admin.publish(f"{FULL}/ended-parts-partition-1", [b"a"])
    assert admin.post(f"{NAMESPACE}/ended-parts/terminate").status_code == 405
    found = admin.post(f"{NAMESPACE}/ended-parts/terminate/partitions").json()
    assert sorted(found) == ["0", "1"]
    assert found["1"] == {"ledgerId": ledger_id, "entryId": entry_id, "partitionIndex": 1}
    assert found["0"]["entryId"] == -1
    assert admin.post(f"{NAMESPACE}/no-parts/terminate/partitions").status_code == 404


def test_truncating_drops_everything_whatever_retention_says(admin: AdminWorld) -> None:
    admin.keep_everything("truncated")
    path = f"{TOPICS}/public/truncated/t"
    admin.put(f"{path}/subscription/s", json=EARLIEST)
    before = admin.publish("persistent://public/truncated/t", [b"a", b"b"])
    assert admin.post(f"{path}/trim").status_code == 204
    assert admin.get(f"{path}/internalStats").json()["numberOfEntries"] == 2, "trimming keeps what retention keeps"
    assert admin.delete(f"{path}/truncate").status_code == 204
    found = admin.get(f"{path}/internalStats").json()
    assert (found["numberOfEntries"], found["totalSize"]) == (0, 0)
    assert before[0][0] not in [ledger["ledgerId"] for ledger in found["ledgers"]]
    assert admin.get(f"{path}/stats").json()["subscriptions"]["s"]["msgBacklog"] == 0
    admin.publish("persistent://public/truncated/t", [b"c"])
    assert admin.get(f"{path}/subscription/s/position/1").content == b"c"
    assert admin.delete(f"{path}/truncate").status_code == 204, "a second time, with the consumerless backlog gone again"
    assert admin.get(f"{path}/stats").json()["subscriptions"]["s"]["msgBacklog"] == 0


def test_trimming_deletes_what_is_acknowledged_ledger_by_ledger(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/trimmed/subscription/s", json=EARLIEST)
    admin.publish(f"{FULL}/trimmed", [b"a"])
    admin.put(f"{NAMESPACE}/trimmed/unload")  # ends the ledger
    admin.post(f"{NAMESPACE}/trimmed/subscription/s/skip_all")
    assert admin.post(f"{NAMESPACE}/trimmed/trim").status_code == 204
    assert admin.get(f"{NAMESPACE}/trimmed/internalStats").json()["numberOfEntries"] == 0


def test_topic_properties_are_merged_by_name_and_removed_by_key(admin: AdminWorld) -> None:
    path = f"{NAMESPACE}/labels"
    assert admin.put(path, json={"a": "1"}).status_code == 204
    assert admin.get(f"{path}/properties").json() == {"a": "1"}
    assert admin.put(f"{path}/properties", json={"b": "2", "a": "3"}).status_code == 204
    assert admin.delete(f"{path}/properties?key=b").status_code == 204
    assert admin.delete(f"{path}/properties?key=b").status_code == 204, "gone already is success"
    assert admin.get(f"{path}/properties").json() == {"a": "3"}
    assert admin.delete(f"{path}/properties").status_code == 412
    assert admin.put(f"{path}/properties", json={"big": "x" * 70_000}).status_code == 412
    assert admin.put(f"{path}/properties", json=["a"]).status_code == 400
    assert admin.get(f"{NAMESPACE}/no-labels/properties").status_code == 404


def test_the_properties_of_a_partition_are_those_of_its_topic(admin: AdminWorld) -> None:
    path = f"{NAMESPACE}/labelled-parts"
    admin.put(f"{path}/partitions", json={"partitions": 1, "properties": {"a": "1"}})
    assert admin.get(f"{path}-partition-0/properties").json() == {"a": "1"}
    assert admin.put(f"{path}-partition-0/properties", json={"b": "2"}).status_code == 412
    assert admin.put(f"{path}/properties", json={"b": "2"}).status_code == 204
    assert admin.get(f"{path}/partitions").json()["properties"] == {"a": "1", "b": "2"}
    assert admin.post(f"{path}/partitions", json=2).status_code == 204
    assert admin.get(f"{path}/properties").json() == {"a": "1", "b": "2"}, "growing keeps them"


def test_internal_info_is_what_metadata_says_and_opens_nothing(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/inside")
    found = admin.get(f"{NAMESPACE}/inside/internal-info").json()
    assert (found["ledgers"], found["cursors"]) == ([], {})
    loaded = [topic.name.local_name for topic in admin.standalone.broker.topics.loaded()]
    assert "inside" not in loaded
    admin.put(f"{NAMESPACE}/inside/subscription/s")
    found = admin.get(f"{NAMESPACE}/inside/internal-info").json()
    assert len(found["ledgers"]) == 1
    assert found["cursors"]["s"]["cursorsLedgerId"] == -1
    admin.put(f"{NAMESPACE}/inside-parts/partitions", json=2)
    parts = admin.get(f"{NAMESPACE}/inside-parts/internal-info").json()["partitions"]
    assert sorted(parts) == [f"{FULL}/inside-parts-partition-{index}" for index in range(2)]


def test_settings_are_read_only_and_say_so(admin: AdminWorld) -> None:
    assert admin.get("/admin/v2/brokers/configuration").json() == [], "not a cluster of that name"
    assert admin.get("/admin/v2/brokers/configuration/values").json() == {}
    runtime = admin.get("/admin/v2/brokers/configuration/runtime").json()
    assert all(isinstance(value, str) for value in runtime.values())
    assert runtime["topic_creation.allowed"] == "true"
    for method, path in (("POST", "max_message_bytes/1"), ("POST", "a%2Fb/c%20d"), ("DELETE", "max_message_bytes")):
        answer = admin.ask(method, f"/admin/v2/brokers/configuration/{path}")
        assert answer.status_code == 412
        assert "while the broker runs" in answer.json()["reason"]


def test_the_one_broker_owns_every_bundle(admin: AdminWorld) -> None:
    (broker,) = admin.get("/admin/v2/brokers").json()
    owned = admin.get(f"/admin/v2/brokers/standalone/{broker}/ownedNamespaces").json()
    assert owned["public/default/0x00000000_0x40000000"]["is_active"] is True
    assert len([name for name in owned if name.startswith("public/default/")]) == 4
    assert admin.get("/admin/v2/brokers/standalone/elsewhere:8080/ownedNamespaces").status_code == 404
    assert admin.get(f"/admin/v2/brokers/nowhere/{broker}/ownedNamespaces").status_code == 404
    assert "RocksStore" in admin.get("/admin/v2/brokers/internal-configuration").json()["metadataStoreUrl"]


def test_racks_of_bookies_are_those_that_they_registered(admin: AdminWorld) -> None:
    path = "/admin/v2/bookies/racks-info"
    (bookie,) = admin.get("/admin/v2/bookies/all").json()["bookies"]
    assert admin.get(path).json() == {}
    assert admin.get(f"{path}/{bookie['bookieId']}").status_code == 404
    records = available_bookies(admin.standalone.broker.store)
    addresses = {"grpc": "[::1]:3181"}
    registration = BookieRegistration(bookie_id="host:3181", incarnation="i", addresses=addresses, rack="eu/r1")
    admin.run(records.create("host:3181", registration, ephemeral=True))
    try:
        rack = {"rack": "eu/r1", "hostname": "::1"}
        assert admin.get(path).json() == {"default": {"host:3181": rack}}
        assert admin.get(f"{path}/host:3181").json() == rack
        answer = admin.post(f"{path}/host:3181", params={"group": "default"}, json=rack)
        assert answer.status_code == 501
        assert "a rack is a setting of the bookie itself" in answer.json()["reason"]
    finally:
        admin.run(records.delete("host:3181", None))
