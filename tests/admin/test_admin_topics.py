"""Topics over HTTP: what exists, who may delete it, and what a partitioned topic is and is not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.admin.admin_world import NAMESPACE, TOPICS, AdminWorld

FULL = "persistent://public/default"


def fresh_namespace(admin: AdminWorld, name: str, policies: dict[str, Any] | None = None) -> str:
    assert admin.put(f"/admin/v2/namespaces/public/{name}", json=policies).status_code == 204
    return f"{TOPICS}/public/{name}"


@pytest.mark.parametrize(
    ("name", "body"), [("made-0", {}), ("made-1", {"json": {}}), ("made-2", {"content": b"null"}), ("made-3", {"json": {"a": "b"}})]
)
def test_a_topic_is_created_with_whatever_clients_send(admin: AdminWorld, name: str, body: dict[str, Any]) -> None:
    created = admin.put(f"{NAMESPACE}/{name}", **body)
    assert (created.status_code, created.content) == (204, b"")
    assert admin.put(f"{NAMESPACE}/{name}").status_code == 409
    assert f"{FULL}/{name}" in admin.get(NAMESPACE).json()
    assert admin.delete(f"{NAMESPACE}/{name}").status_code == 204
    assert admin.delete(f"{NAMESPACE}/{name}").status_code == 404


def test_lists_show_partitions_and_never_the_name_of_a_partitioned_topic(admin: AdminWorld) -> None:
    path = fresh_namespace(admin, "listed")
    admin.put(f"{path}/plain")
    admin.put(f"{path}/split/partitions", json=2)
    admin.put(f"{path}/__system")
    full = "persistent://public/listed"
    expected = [f"{full}/plain", f"{full}/split-partition-0", f"{full}/split-partition-1"]
    assert sorted(admin.get(path).json()) == expected
    assert sorted(admin.get("/admin/v2/namespaces/public/listed/topics").json()) == expected
    assert sorted(admin.get("/admin/v2/namespaces/public/listed/topics?mode=ALL").json()) == expected
    assert f"{full}/__system" in admin.get(f"{path}?includeSystemTopic=true").json()
    assert admin.get(f"{path}/partitioned").json() == [f"{full}/split"]
    assert admin.get(f"{TOPICS}/public/nowhere").status_code == 404
    assert admin.get("/admin/v2/namespaces/public/listed/topics?mode=SOME").status_code == 412


def test_the_bundles_cut_the_list_without_loss(admin: AdminWorld) -> None:
    path = fresh_namespace(admin, "hashed")
    for number in range(20):
        admin.put(f"{path}/t{number}")
    ends = admin.get("/admin/v2/namespaces/public/hashed/bundles").json()["boundaries"]
    parts = [admin.get(path, params={"bundle": f"{start}_{end}"}).json() for start, end in pairwise(ends)]
    assert sorted(topic for part in parts for topic in part) == sorted(admin.get(path).json())
    assert sum(bool(part) for part in parts) > 1, "one bundle holds all: nothing was cut"
    name = parts[0][0].rpartition("/")[2]
    assert admin.get(f"/lookup/v2/topic/persistent/public/hashed/{name}/bundle").text == f"{ends[0]}_{ends[1]}"


@pytest.mark.parametrize("path", ["/admin/v2/non-persistent/public/default", "/admin/v2/non-persistent/public/default/partitioned"])
def test_non_persistent_lists_are_empty_and_never_404(admin: AdminWorld, path: str) -> None:
    answer = admin.get(path)
    assert (answer.status_code, answer.json()) == (200, [])
    assert admin.get("/admin/v2/namespaces/public/default/topics?mode=NON_PERSISTENT").json() == []


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"3", {"content-type": "application/json"}),
        (b"3", {}),  # the Go client of old
        (b'{"partitions": 3}', {"content-type": "application/vnd.partitioned-topic-metadata+json"}),
        (b'{"partitions": 3, "properties": null, "deleted": false}', {"content-type": "application/json"}),
    ],
)
def test_a_partition_count_comes_bare_or_as_an_object(admin: AdminWorld, body: bytes, headers: dict[str, str]) -> None:
    created = admin.put(f"{NAMESPACE}/counted/partitions", content=body, headers=headers)
    assert (created.status_code, created.content) == (204, b""), created.text
    assert admin.get(f"{NAMESPACE}/counted/partitions").json() == {"partitions": 3, "deleted": False, "properties": {}}
    assert admin.delete(f"{NAMESPACE}/counted/partitions").status_code == 204
    assert admin.get(f"{NAMESPACE}/counted/partitions").status_code == 404


@pytest.fixture(scope="module")
def refusals(admin: AdminWorld) -> AdminWorld:
    admin.put(f"{NAMESPACE}/r-plain")
    admin.put(f"{NAMESPACE}/r-split/partitions", json=2)
    return admin


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "r-split", None, 409),  # plain over partitioned
        ("PUT", "r-plain/partitions", 2, 409),  # partitioned over plain
        ("PUT", "r-split/partitions", 2, 409),
        ("PUT", "r-new/partitions", 0, 406),
        ("PUT", "r-new/partitions", -1, 406),
        ("PUT", "r-new/partitions", 10_001, 406),
        ("PUT", "r-new/partitions", "many", 400),
        ("PUT", "r-new/partitions", None, 400),
        ("PUT", "r-new-partition-0/partitions", 2, 412),
        ("PUT", "r-new-partition-0", None, 412),  # would become a partition when r-new is made
        ("PUT", "r-split-partition-1", None, 409),  # is there
        ("PUT", "r-split-partition-2", None, 412),
        ("POST", "r-split/partitions", 1, 422),
        ("POST", "r-split/partitions", 10_001, 422),
        ("POST", "r-plain/partitions", 4, 409),
        ("POST", "r-none/partitions", 4, 404),
        ("POST", "r-split-partition-0/partitions", 4, 412),
        ("DELETE", "r-split", None, 409),
        ("DELETE", "r-plain/partitions", None, 409),
        ("DELETE", "r-none/partitions", None, 404),
        ("DELETE", "r-none", None, 404),
        ("GET", "r-none/partitions", None, 404),
        ("GET", "r-none/stats", None, 404),
        ("GET", "r-split/stats", None, 404),
        ("GET", "r-split/internalStats", None, 404),
        ("GET", "r-plain/partitioned-stats", None, 404),
        ("GET", "r-plain/partitioned-internalStats", None, 404),
        ("GET", "r-split-partition-0/partitioned-stats", None, 412),
        ("GET", "r-none/subscriptions", None, 404),
        ("GET", "r-split/lastMessageId", None, 405),
        ("GET", "r-none/lastMessageId", None, 404),
        ("PUT", "r-none/unload", None, 404),
        ("DELETE", "r-plain/subscription/none", None, 404),
        ("PUT", "r-plain/subscription/s", {"ledgerId": "x"}, 400),
    ],
)
def test_refusals_have_the_status_that_tools_test_for(refusals: AdminWorld, method: str, path: str, body: Any, status: int) -> None:
    answer = refusals.ask(method, f"{NAMESPACE}/{path}", **({} if body is None else {"json": body}))
    assert answer.status_code == status, answer.text
    assert answer.json()["reason"]
    listed = refusals.get(f"{NAMESPACE}/partitioned").json() + refusals.get(NAMESPACE).json()
    assert not any("r-new" in topic or "r-none" in topic for topic in listed), "a refused call created something"


@pytest.mark.parametrize("topic", ["r-split-partition-0", "r-plain"])
def test_a_plain_topic_has_0_partitions(refusals: AdminWorld, topic: str) -> None:
    assert refusals.get(f"{NAMESPACE}/{topic}/partitions").json()["partitions"] == 0


def test_counting_partitions_creates_only_what_was_asked_for(admin: AdminWorld) -> None:
    override = {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 3}
    path = fresh_namespace(admin, "auto-split", {"autoTopicCreationOverride": override})
    assert admin.get(f"{path}/t/partitions").status_code == 404, "without checkAllowAutoCreation nothing is created"
    assert admin.get(f"{path}/t/partitions?checkAllowAutoCreation=true").json()["partitions"] == 3
    assert admin.get(f"{path}/partitioned").json() == ["persistent://public/auto-split/t"]
    # plain topics: the answer is 0, and the topic appears when a client connects
    assert admin.get(f"{NAMESPACE}/to-come/partitions?checkAllowAutoCreation=true").json()["partitions"] == 0
    assert admin.get(f"{NAMESPACE}/to-come/partitions").status_code == 404
    path = fresh_namespace(admin, "auto-off", {"autoTopicCreationOverride": {"allowAutoTopicCreation": False}})
    assert admin.get(f"{path}/t/partitions?checkAllowAutoCreation=true").status_code == 404


def test_new_partitions_get_the_subscriptions_at_earliest(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/growing/partitions", json=1)
    assert admin.put(f"{NAMESPACE}/growing/subscription/s").status_code == 204
    assert admin.post(f"{NAMESPACE}/growing/partitions", json=3).status_code == 204
    assert admin.get(f"{NAMESPACE}/growing/partitions").json()["partitions"] == 3
    assert admin.get(f"{NAMESPACE}/growing-partition-2/subscriptions").json() == ["s"]
    admin.publish(f"{FULL}/growing-partition-2", [b"a"])
    assert admin.get(f"{NAMESPACE}/growing-partition-2/stats").json()["subscriptions"]["s"]["msgBacklog"] == 1
    assert admin.post(f"{NAMESPACE}/growing/partitions", json=3).status_code == 204, "an equal count changes nothing"


def test_a_stray_topic_does_not_become_a_partition(admin: AdminWorld) -> None:
    admin.publish(f"{FULL}/stray-partition-1", [b"a"])  # a client may create it by using it
    assert admin.put(f"{NAMESPACE}/stray/partitions", json=1).status_code == 409
    assert admin.delete(f"{NAMESPACE}/stray-partition-1").status_code == 204
    assert admin.put(f"{NAMESPACE}/stray/partitions", json=1).status_code == 204


@pytest.mark.parametrize(
    ("create", "topic", "delete"), [("busy", "busy", "busy"), ("busy2/partitions", "busy2-partition-1", "busy2/partitions")]
)
def test_force_closes_clients_and_without_it_they_are_in_the_way(admin: AdminWorld, create: str, topic: str, delete: str) -> None:
    admin.put(f"{NAMESPACE}/{create}", **({"json": 2} if "partitions" in create else {}))
    client = admin.in_thread(lambda: admin.wire_client(f"{FULL}/{topic}"))
    try:
        admin.in_thread(client.open_producer)
        refused = admin.delete(f"{NAMESPACE}/{delete}")
        assert refused.status_code == 412, refused.text
        assert "1 producers" in refused.json()["reason"]
        assert admin.get(f"{NAMESPACE}/{topic}/stats").json()["publishers"], "the refused call closed the client"
        assert admin.delete(f"{NAMESPACE}/{delete}?force=true").status_code == 204
        assert admin.get(f"{NAMESPACE}/{topic}/stats").status_code == 404
        assert f"{FULL}/{topic}" not in admin.get(NAMESPACE).json()
    finally:
        client.close()


def test_what_a_deleted_topic_held_is_gone(admin: AdminWorld) -> None:
    admin.publish(f"{FULL}/again", [b"a", b"b"])
    assert admin.get(f"{NAMESPACE}/again/internalStats").json()["numberOfEntries"] == 2
    assert admin.delete(f"{NAMESPACE}/again").status_code == 204
    assert admin.put(f"{NAMESPACE}/again").status_code == 204
    assert admin.get(f"{NAMESPACE}/again/internalStats").json()["numberOfEntries"] == 0


def test_an_unloaded_topic_keeps_everything(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/kept/subscription/s")
    (_, last) = admin.publish(f"{FULL}/kept", [b"a", b"b"])
    assert admin.put(f"{NAMESPACE}/kept/unload").status_code == 204
    assert admin.get(f"{NAMESPACE}/kept/lastMessageId").json() == {"ledgerId": last[0], "entryId": last[1], "partitionIndex": -1}
    assert admin.get(f"{NAMESPACE}/kept/stats").json()["subscriptions"]["s"]["msgBacklog"] == 2
    assert admin.put("/admin/v2/namespaces/public/default/unload").status_code == 204
    assert admin.get(f"{NAMESPACE}/kept/stats").json()["subscriptions"]["s"]["msgBacklog"] == 2


def test_the_last_message_of_a_partition_names_the_partition(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/lasting/partitions", json=2)
    ((ledger_id, entry_id),) = admin.publish(f"{FULL}/lasting-partition-1", [b"a"])
    expected = {"ledgerId": ledger_id, "entryId": entry_id, "partitionIndex": 1}
    assert admin.get(f"{NAMESPACE}/lasting-partition-1/lastMessageId").json() == expected
    empty = admin.get(f"{NAMESPACE}/lasting-partition-0/lastMessageId").json()
    assert (empty["entryId"], empty["partitionIndex"]) == (-1, 0)


def test_subscriptions_start_where_they_are_told(admin: AdminWorld) -> None:
    positions = admin.publish(f"{FULL}/told", [b"%d" % number for number in range(5)])
    ledger_id, entry_id = positions[2]
    ends = {
        "latest": None,
        "latest-too": {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1, "partitionIndex": -1},
        "earliest": {"ledgerId": -1, "entryId": -1, "partitionIndex": -1},
        "at": {"ledgerId": ledger_id, "entryId": entry_id},
        "after": {"ledgerId": ledger_id, "entryId": entry_id, "isExcluded": True},
    }
    for name, body in ends.items():
        assert admin.put(f"{NAMESPACE}/told/subscription/{name}", json=body).status_code == 204
        assert admin.put(f"{NAMESPACE}/told/subscription/{name}", json=body).status_code == 409
    subscriptions = admin.get(f"{NAMESPACE}/told/stats").json()["subscriptions"]
    backlog = {name: stats["msgBacklog"] for name, stats in subscriptions.items()}
    assert backlog == {"latest": 0, "latest-too": 0, "earliest": 5, "at": 3, "after": 2}
    assert admin.delete(f"{NAMESPACE}/told/subscription/at").status_code == 204
    assert sorted(admin.get(f"{NAMESPACE}/told/subscriptions").json()) == ["after", "earliest", "latest", "latest-too"]


def test_a_subscription_of_a_partitioned_topic_is_on_every_partition(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/every/partitions", json=2)
    admin.put(f"{NAMESPACE}/every-partition-1/subscription/s")
    assert admin.get(f"{NAMESPACE}/every/subscriptions").json() == ["s"], "the union over the partitions"
    assert admin.put(f"{NAMESPACE}/every/subscription/s").status_code == 204, "missing on one partition"
    assert admin.get(f"{NAMESPACE}/every-partition-0/subscriptions").json() == ["s"]
    assert admin.put(f"{NAMESPACE}/every/subscription/s").status_code == 409
    assert admin.delete(f"{NAMESPACE}/every/subscription/s").status_code == 204
    assert admin.get(f"{NAMESPACE}/every/subscriptions").json() == []


def test_a_subscription_with_consumers_is_deleted_by_force_only(admin: AdminWorld) -> None:
    client = admin.in_thread(lambda: admin.wire_client(f"{FULL}/held"))
    try:
        admin.in_thread(lambda: client.subscribe("s", shared=False, earliest=True))
        assert admin.delete(f"{NAMESPACE}/held/subscription/s").status_code == 412
        assert admin.delete(f"{NAMESPACE}/held").status_code == 412
        assert admin.delete(f"{NAMESPACE}/held/subscription/s?force=true").status_code == 204
        assert admin.get(f"{NAMESPACE}/held/subscriptions").json() == []
    finally:
        client.close()


def test_a_subscription_may_create_its_topic_where_that_is_allowed(admin: AdminWorld) -> None:
    assert admin.put(f"{NAMESPACE}/by-subscription/subscription/s").status_code == 204
    assert f"{FULL}/by-subscription" in admin.get(NAMESPACE).json()
    path = fresh_namespace(admin, "no-creation", {"autoTopicCreationOverride": {"allowAutoTopicCreation": False}})
    assert admin.put(f"{path}/t/subscription/s").status_code == 412
    assert admin.put(f"{TOPICS}/public/nowhere/t/subscription/s").status_code == 404


@pytest.mark.parametrize(
    ("method", "call", "body"),
    [
        ("PUT", "{topic}", {"PULSAR.SHADOW_SOURCE": "persistent://public/default/source"}),
        (
            "PUT",
            "{topic}/partitions",
            {"partitions": 2, "properties": {"PULSAR.SHADOW_SOURCE": "persistent://public/default/source"}},
        ),
        ("PUT", "plain/properties", {"PULSAR.SHADOW_SOURCE": "persistent://public/default/source"}),
    ],
)
def test_a_shadow_topic_is_refused(admin: AdminWorld, method: str, call: str, body: Any) -> None:
    """It would be an empty topic that looks like one with another topic's messages."""
    admin.put(f"{NAMESPACE}/plain")
    path = f"{NAMESPACE}/{call.format(topic='shadow')}"
    refused = admin.ask(method, path, json=body)
    assert (refused.status_code, "Shadow topics" in refused.text) == (501, True)
    assert not [name for name in admin.get(NAMESPACE).json() if "shadow" in name]
    assert admin.get(f"{NAMESPACE}/plain/properties").json() == {}
