"""Moving subscriptions over the API, and what each call does on each kind of name (docs/reference/behaviours.md §5)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.admin.admin_world import NAMESPACE, AdminWorld

FULL = "persistent://public/default"
LATEST = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1, "partitionIndex": -1}
EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}


def filled(admin: AdminWorld, name: str, entries: int, *subscriptions: str) -> list[tuple[int, int]]:
    """A topic with subscriptions that have all of its entries before them."""
    assert admin.put(f"{NAMESPACE}/{name}").status_code == 204
    for subscription in subscriptions or ("s",):
        assert admin.put(f"{NAMESPACE}/{name}/subscription/{subscription}", json=EARLIEST).status_code == 204
    return admin.publish(f"{FULL}/{name}", [b"%d" % number for number in range(entries)])


def backlog(admin: AdminWorld, name: str, subscription: str = "s") -> int:
    return int(admin.get(f"{NAMESPACE}/{name}/stats").json()["subscriptions"][subscription]["msgBacklog"])


def next_body(admin: AdminWorld, name: str, number: int = 1) -> bytes:
    return admin.get(f"{NAMESPACE}/{name}/subscription/s/position/{number}").content


def ident(position: tuple[int, int], **more: Any) -> dict[str, Any]:
    return {"ledgerId": position[0], "entryId": position[1], "partitionIndex": -1, **more}


def test_skipping_counts_entries_that_are_not_acknowledged(admin: AdminWorld) -> None:
    filled(admin, "skipped", 10)
    path = f"{NAMESPACE}/skipped/subscription/s"
    assert admin.post(f"{path}/skip/3").status_code == 204
    assert (backlog(admin, "skipped"), next_body(admin, "skipped")) == (7, b"3")
    assert admin.post(f"{path}/skip/0").status_code == 204
    assert backlog(admin, "skipped") == 7
    assert admin.post(f"{path}/skip/-1").status_code == 412
    assert admin.post(f"{path}/skip/99999999999999999999").status_code == 204, "fewer are left: success"
    assert backlog(admin, "skipped") == 0


def test_skipping_all_clears_the_backlog_and_outlasts_an_unload(admin: AdminWorld) -> None:
    filled(admin, "cleared", 5)
    assert admin.post(f"{NAMESPACE}/cleared/subscription/s/skip_all").status_code == 204
    assert admin.put(f"{NAMESPACE}/cleared/unload").status_code == 204
    assert backlog(admin, "cleared") == 0


def test_consumers_stay_connected_when_a_backlog_is_skipped(admin: AdminWorld) -> None:
    client = admin.in_thread(lambda: admin.wire_client(f"{FULL}/watched"))
    try:
        admin.in_thread(lambda: client.subscribe("s", shared=False, earliest=True))
        admin.publish(f"{FULL}/watched", [b"a"])
        assert admin.post(f"{NAMESPACE}/watched/subscription/s/skip_all").status_code == 204
        assert len(admin.get(f"{NAMESPACE}/watched/stats").json()["subscriptions"]["s"]["consumers"]) == 1
    finally:
        client.close()


@pytest.mark.slow
def test_expiring_by_age_takes_what_is_older(admin: AdminWorld) -> None:
    filled(admin, "aged", 3, "s", "other")
    path = f"{NAMESPACE}/aged"
    assert admin.post(f"{path}/subscription/s/expireMessages/3600").status_code == 204, "nothing is that old"
    assert backlog(admin, "aged") == 3
    old = time.monotonic() + 1.1
    while time.monotonic() < old:  # the age is in whole seconds
        admin.get("/status.html")
    assert admin.post(f"{path}/subscription/s/expireMessages/1").status_code == 204
    assert (backlog(admin, "aged"), backlog(admin, "aged", "other")) == (0, 3)
    assert admin.post(f"{path}/subscription/s/expireMessages/1").status_code == 409, "no backlog"
    assert admin.post(f"{path}/all_subscription/expireMessages/1").status_code == 204
    assert backlog(admin, "aged", "other") == 0
    assert admin.post(f"{path}/all_subscription/expireMessages/1").status_code == 204, "for all: nothing left is success"
    assert admin.post(f"{path}/subscription/s/expireMessages/-1").status_code == 412


def test_a_small_young_backlog_that_is_consumed_is_not_expired(admin: AdminWorld) -> None:
    """As in Pulsar: 409 while a consumer is nearly done, so that tools do not take it for expired."""
    filled(admin, "consumed", 3)
    client = admin.in_thread(lambda: admin.wire_client(f"{FULL}/consumed"))
    try:
        admin.in_thread(lambda: client.subscribe("s", shared=True, earliest=True, permits=1))
        assert admin.post(f"{NAMESPACE}/consumed/subscription/s/expireMessages/3600").status_code == 409
    finally:
        client.close()
    assert backlog(admin, "consumed") == 3


def test_expiring_by_id_ends_with_that_message(admin: AdminWorld) -> None:
    positions = filled(admin, "expired", 5)
    path = f"{NAMESPACE}/expired/subscription/s/expireMessages"
    assert admin.post(path, json=ident(positions[1])).status_code == 204
    assert next_body(admin, "expired") == b"2"
    assert admin.post(path, json=ident(positions[3], isExcluded=True)).status_code == 204
    assert next_body(admin, "expired") == b"3", "the message itself is left"
    assert admin.post(path, json=ident(positions[0])).status_code == 204, "it never goes back"
    assert next_body(admin, "expired") == b"3"
    beyond = (positions[4][0], positions[4][1] + 1)
    assert admin.post(path, json=ident(beyond)).status_code == 409, "after the end of the topic"
    assert next_body(admin, "expired") == b"3"
    assert admin.post(path, json=ident(positions[4], partitionIndex=2)).status_code == 412, "a message of a partition"
    assert admin.post(path).status_code == 400


def test_resetting_by_id_goes_there_or_behind(admin: AdminWorld) -> None:
    positions = filled(admin, "reset", 5)
    path = f"{NAMESPACE}/reset/subscription/s/resetcursor"
    for body, left in (
        (ident(positions[3]), 2),
        (ident(positions[0], isExcluded=True), 4),
        (LATEST, 0),
        (EARLIEST, 5),
        (ident(positions[4], excluded=True), 0),
        ({"ledgerId": 0, "entryId": 0}, 5),  # trimmed long ago, or never there: the beginning
    ):
        assert admin.post(path, json=body).status_code == 204, body
        assert backlog(admin, "reset") == left, body
    assert admin.post(path, json=ident((positions[0][0] + 1000, 0))).status_code == 412, "a message of another topic"
    assert backlog(admin, "reset") == 5
    assert admin.post(f"{NAMESPACE}/reset/subscription/none/resetcursor", json=EARLIEST).status_code == 404


def test_resetting_by_time_finds_the_first_message_of_that_time(admin: AdminWorld) -> None:
    filled(admin, "timed", 2)
    path = f"{NAMESPACE}/timed"
    published_ms = admin.get(f"{path}/stats").json()["lastPublishTimeStamp"]
    between_ms = published_ms + 2
    while time.time() * 1000 < between_ms + 1:
        admin.get("/status.html")
    (later, *_) = admin.publish(f"{FULL}/timed", [b"later"])
    found = admin.get(f"{path}/messageid/{between_ms}").json()
    assert (found["ledgerId"], found["entryId"]) == later
    for time_ms, left in ((between_ms, 1), (0, 3), (-5, 3), (2**70, 0)):
        assert admin.post(f"{path}/subscription/s/resetcursor/{time_ms}").status_code == 204
        assert backlog(admin, "timed") == left


def test_a_reset_closes_consumers_and_gives_them_the_messages_again(admin: AdminWorld) -> None:
    filled(admin, "again", 2)
    client = admin.in_thread(lambda: admin.wire_client(f"{FULL}/again"))
    try:
        admin.in_thread(lambda: client.subscribe("s", shared=False, earliest=True))
        assert admin.post(f"{NAMESPACE}/again/subscription/s/resetcursor", json=EARLIEST).status_code == 204
        assert admin.get(f"{NAMESPACE}/again/stats").json()["subscriptions"]["s"]["consumers"] == []
    finally:
        client.close()


def test_subscription_properties_are_replaced_and_kept(admin: AdminWorld) -> None:
    body = {**EARLIEST, "properties": {"owner": "billing"}}
    assert admin.put(f"{NAMESPACE}/labelled/subscription/s", json=body).status_code == 204
    path = f"{NAMESPACE}/labelled/subscription/s/properties"
    assert admin.get(path).json() == {"owner": "billing"}
    assert admin.put(path, json={"ü": "…"}).status_code == 204
    assert admin.put(f"{NAMESPACE}/labelled/unload").status_code == 204
    assert admin.get(path).json() == {"ü": "…"}
    assert admin.get(f"{NAMESPACE}/labelled/stats").json()["subscriptions"]["s"]["subscriptionProperties"] == {"ü": "…"}
    assert admin.put(path, json={"a": 1}).status_code == 400


def test_the_analysis_of_a_backlog_counts_it_exactly(admin: AdminWorld) -> None:
    positions = filled(admin, "analysed", 4)
    admin.post(f"{NAMESPACE}/analysed/subscription/s/skip/1")
    path = f"{NAMESPACE}/analysed/subscription/s/analyzeBacklog"
    found = admin.post(path).json()
    assert (found["entries"], found["messages"], found["aborted"]) == (3, 3, False)
    assert (found["filterAcceptedEntries"], found["filterRejectedMessages"]) == (3, 0)
    assert found["firstMessageId"] == "{}:{}".format(*positions[1])
    assert found["lastMessageId"] == "{}:{}".format(*positions[3])
    admin.post(f"{NAMESPACE}/analysed/subscription/s/skip_all")
    assert "firstMessageId" not in admin.post(path, json=EARLIEST).json()
    assert admin.post(path, json=ident(positions[2])).status_code == 501


def test_the_bytes_behind_a_message_are_exact(admin: AdminWorld) -> None:
    positions = filled(admin, "sized", 3)
    path = f"{NAMESPACE}/sized/backlogSize"
    whole = admin.put(path, json=EARLIEST).json()
    assert whole == admin.get(f"{NAMESPACE}/sized/stats").json()["storageSize"]
    assert admin.put(path, json=ident(positions[0])).json() == whole * 2 // 3
    assert admin.put(path, json=ident(positions[2])).json() == admin.put(path, json=LATEST).json() == 0
    assert admin.put(path).status_code == 400


def test_why_a_subscription_does_not_deliver(admin: AdminWorld) -> None:
    filled(admin, "still", 2)
    path = "/cepheid/v1/topics/persistent/public/default/still/subscription"
    found = admin.get(f"{path}/s/why").json()
    assert (found["delivering"], found["backlog_entries"], found["consumers"]) == (False, 2, [])
    assert [(reason["reason"], reason["until"]) for reason in found["reasons"]] == [
        ("no consumer is connected", "a consumer subscribes")
    ]
    assert admin.get(f"{path}/none/why").status_code == 404
    client = admin.in_thread(lambda: admin.wire_client(f"{FULL}/still"))
    try:
        admin.in_thread(lambda: client.subscribe("s", shared=False, earliest=True))
        deadline = time.monotonic() + 10
        nothing_more = "there is nothing more to send"
        while nothing_more not in str(found := admin.get(f"{path}/s/why").json()) and time.monotonic() < deadline:
            pass  # it is delivering, or reading
        assert (found["type"], found["delivering"], len(found["consumers"])) == ("Exclusive", False, 1)
        assert found["reasons"][0]["reason"] == nothing_more
        assert (found["reasons"][0]["consumer"], found["backlog_entries"]) == (found["consumers"][0]["name"], 2)
        assert "negative acknowledgement" in found["reasons"][0]["until"]
    finally:
        client.close()


CALLS = [
    ("POST", "subscription/s/skip_all", None),
    ("POST", "subscription/s/skip/1", None),
    ("POST", "subscription/s/expireMessages/0", None),
    ("POST", "subscription/s/expireMessages", LATEST),
    ("POST", "all_subscription/expireMessages/0", None),
    ("POST", "subscription/s/resetcursor/0", None),
    ("POST", "subscription/s/resetcursor", EARLIEST),
    ("GET", "subscription/s/properties", None),
    ("GET", "subscription/s/position/1", None),
    ("GET", "examinemessage", None),
    ("GET", "messageid/0", None),
    ("GET", "lastMessageId", None),
    ("PUT", "backlogSize", EARLIEST),
    ("POST", "subscription/s/analyzeBacklog", None),
    ("POST", "trim", None),
    ("GET", "properties", None),
]


@pytest.mark.parametrize(("method", "call", "body"), CALLS)
def test_each_call_on_a_partitioned_name_fans_out_or_is_405(admin: AdminWorld, method: str, call: str, body: Any) -> None:
    """docs/reference/behaviours.md §5, column B."""
    name = f"fan-{call.replace('/', '-')}"
    admin.put(f"{NAMESPACE}/{name}/partitions", json=2)
    admin.put(f"{NAMESPACE}/{name}/subscription/s", json=EARLIEST)
    for index in range(2):
        admin.publish(f"{FULL}/{name}-partition-{index}", [b"a", b"b"])
    answer = admin.ask(method, f"{NAMESPACE}/{name}/{call}", **({} if body is None else {"json": body}))
    fans_out = call.startswith("all_") or (call.endswith(("skip_all", "/0", "properties", "trim")) and "messageid" not in call)
    assert answer.status_code in ((200, 204) if fans_out else (405,)), answer.text
    expected = 0 if fans_out and ("skip" in call or "expire" in call) else 2
    for index in range(2):
        assert backlog(admin, f"{name}-partition-{index}") == expected
    assert admin.ask(method, f"{NAMESPACE}/none/{call}", **({} if body is None else {"json": body})).status_code == 404


@pytest.mark.parametrize(("method", "call", "body"), CALLS)
def test_each_call_on_a_non_persistent_name_is_refused(admin: AdminWorld, method: str, call: str, body: Any) -> None:
    """docs/reference/behaviours.md §5, column N."""
    path = f"/admin/v2/non-persistent/public/default/n/{call}"
    answer = admin.ask(method, path, **({} if body is None else {"json": body}))
    assert answer.status_code == (406 if call == "properties" else 405), answer.text
    assert "non-persistent" in answer.json()["reason"]


def test_a_message_id_names_one_partition(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/one-of/partitions", json=2)
    ((ledger_id, entry_id),) = admin.publish(f"{FULL}/one-of-partition-1", [b"a"])
    path = f"{NAMESPACE}/one-of-partition-1/subscription"
    admin.put(f"{NAMESPACE}/one-of/subscription/s", json=EARLIEST)
    body = {"ledgerId": ledger_id, "entryId": entry_id}
    assert admin.post(f"{path}/s/resetcursor", json={**body, "partitionIndex": 0}).status_code == 412
    assert admin.post(f"{path}/s/resetcursor", json={**body, "partitionIndex": 1}).status_code == 204
    assert admin.put(f"{NAMESPACE}/one-of/subscription/t", json=body).status_code == 412, "on the other it means nothing"


def test_a_namespace_and_a_bundle_are_cleared_at_once(admin: AdminWorld) -> None:
    assert admin.put("/admin/v2/namespaces/public/whole").status_code == 204
    for name in ("a", "b"):
        for subscription in ("s", "t"):
            path = f"/admin/v2/persistent/public/whole/{name}/subscription/{subscription}"
            assert admin.put(path, json=EARLIEST).status_code == 204
        admin.publish(f"persistent://public/whole/{name}", [b"x"])

    def backlogs() -> list[int]:
        stats = [admin.get(f"/admin/v2/persistent/public/whole/{name}/stats").json() for name in ("a", "b")]
        return [each["subscriptions"][name]["msgBacklog"] for each in stats for name in sorted(each["subscriptions"])]

    path = "/admin/v2/namespaces/public/whole"
    assert admin.post(f"{path}/clearBacklog/s").status_code == 204
    assert backlogs() == [0, 1, 0, 1]
    bundle = admin.get("/lookup/v2/topic/persistent/public/whole/a/bundle").text
    same = admin.get("/lookup/v2/topic/persistent/public/whole/b/bundle").text == bundle
    assert admin.post(f"{path}/{bundle}/clearBacklog/t").status_code == 204
    assert backlogs() == [0, 0, 0, 0 if same else 1]
    assert admin.post(f"{path}/clearBacklog").status_code == 204
    assert backlogs() == [0, 0, 0, 0]
    assert admin.post(f"{path}/unsubscribe/s").status_code == 204
    assert len(backlogs()) == 2
    assert admin.post(f"{path}/unsubscribe/s").status_code == 204, "as in Pulsar: nothing left is success"
    assert admin.post(f"{path}/{bundle}/unsubscribe/s").status_code == 204
    assert admin.put(f"{path}/{bundle}/unload").status_code == 204
    assert admin.delete(f"{path}/{bundle}").status_code == 409, "it has topics"
    for word in ("nonsense", "0x00000000_0x00000001", "topics"):
        assert admin.delete(f"{path}/{word}").status_code == 412
    assert admin.put(f"{path}/0x1_0x2/unload").status_code == 412
    assert admin.delete(f"{path}/entryFilters").status_code == 501, "a policy of Pulsar's that is not served"


def test_a_bundle_is_unloaded_to_the_only_broker(admin: AdminWorld) -> None:
    path = "/admin/v2/namespaces/public/default/0x00000000_0x40000000/unload"
    own = admin.get("/admin/v2/brokers").json()[0]
    assert admin.put(path, params={"destinationBroker": own}).status_code == 204
    refused = admin.put(path, params={"destinationBroker": "nowhere:1"})
    assert (refused.status_code, own in refused.text) == (412, True)
