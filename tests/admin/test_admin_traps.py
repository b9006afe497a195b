"""Each trap of docs/reference/behaviours.md by name: what clients rely on without saying so."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.admin.admin_world import NAMESPACE, TOPICS, AdminWorld
from tests.admin.hostile_requests import Answer, Request, send

FULL = "persistent://public/default"
EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}


def ask_raw(admin: AdminWorld, method: str, target: str, body: bytes | None = None) -> Answer:
    """As it is on the wire: the library would clean the path."""
    address = urlsplit(admin.standalone.admin_url)
    return admin.run(send(str(address.hostname), int(address.port or 0), Request(method, target, body)))


# §1 statuses


@pytest.mark.slow
def test_204_has_no_body(admin: AdminWorld) -> None:
    answer = admin.put(f"{NAMESPACE}/quiet")
    assert (answer.status_code, answer.content) == (204, b"")


def test_every_refusal_is_json_with_a_reason_also_for_schemas(admin: AdminWorld) -> None:
    for path in ("/admin/v2/schemas/public/default/none/schema", f"{NAMESPACE}/none/stats", "/admin/v2/tenants/none", "/nowhere"):
        answer = admin.get(path)
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["reason"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/admin/v2/tenants/public", {"allowedClusters": ["standalone"]}, 409),  # create what exists
        ("PUT", "/admin/v2/namespaces/public/default", None, 409),
        ("PUT", "/admin/v2/clusters/standalone", {"serviceUrl": "http://x:8080"}, 409),
        ("PUT", "/admin/v2/tenants/a%20b", {"allowedClusters": ["standalone"]}, 412),  # bad names
        ("PUT", "/admin/v2/namespaces/public/a%20b", None, 412),
        ("PUT", "/admin/v2/tenants/fresh", {"allowedClusters": []}, 412),
        ("PUT", "/admin/v2/tenants/fresh", {"allowedClusters": ["nowhere"]}, 412),
        ("PUT", "/admin/v2/namespaces/nobody/n", None, 404),  # under what is missing
        ("PUT", f"{TOPICS}/public/nowhere/t", None, 404),
        ("DELETE", "/admin/v2/tenants/public", None, 409),  # not empty
        ("DELETE", "/admin/v2/clusters/standalone", None, 412),  # in use
        ("DELETE", "/admin/v2/tenants/nobody", None, 404),
        ("DELETE", "/admin/v2/namespaces/public/default?force=true", None, 405),  # not enabled
    ],
)
def test_404_409_and_412_are_not_mixed_up(admin: AdminWorld, method: str, path: str, body: Any, status: int) -> None:
    admin.put(f"{NAMESPACE}/keeps-it-full")
    answer = admin.ask(method, path, **({} if body is None else {"json": body}))
    assert answer.status_code == status, answer.text


# §2 ownership


@pytest.mark.parametrize("value", ["true", "false", "", "nonsense"])
def test_authoritative_is_accepted_everywhere(admin: AdminWorld, value: str) -> None:
    query = {"authoritative": value}
    assert admin.put(f"{NAMESPACE}/authoritative-{value}", params=query).status_code == 204
    assert admin.get(f"{NAMESPACE}/authoritative-{value}/stats", params=query).status_code == 200
    assert admin.get(f"/lookup/v2/topic/persistent/public/default/authoritative-{value}", params=query).status_code == 200


# §3 names and encoding


def test_a_plus_in_a_topic_is_a_space_and_an_escaped_one_is_a_plus(admin: AdminWorld) -> None:
    for segment, name in (("a+b", "a b"), ("a%2Bb", "a+b")):
        assert ask_raw(admin, "PUT", f"{NAMESPACE}/{segment}").status == 204
        assert f"{FULL}/{name}" in admin.get(NAMESPACE).json()


def test_a_topic_is_decoded_once_so_a_percent_sign_survives(admin: AdminWorld) -> None:
    assert ask_raw(admin, "PUT", f"{NAMESPACE}/50%2525").status == 204
    assert f"{FULL}/50%25" in admin.get(NAMESPACE).json()


def test_an_escaped_slash_makes_no_other_call_of_it(admin: AdminWorld) -> None:
    """`t%2Fpartitions` is one segment. Decoded before routing it would be the partitions of `t`."""
    assert ask_raw(admin, "PUT", f"{NAMESPACE}/t%2Fpartitions", b"3").status == 412
    assert admin.get(f"{NAMESPACE}/t/partitions").status_code == 404


@pytest.mark.parametrize("segment", ["a%2Fb", "a%252Fb"])
def test_a_subscription_may_be_encoded_once_or_twice(admin: AdminWorld, segment: str) -> None:
    assert ask_raw(admin, "PUT", f"{NAMESPACE}/twice/subscription/{segment}", json.dumps(EARLIEST).encode()).status == 204
    assert admin.get(f"{NAMESPACE}/twice/subscriptions").json() == ["a/b"]
    for call in ("properties", "position/1"):
        assert ask_raw(admin, "GET", f"{NAMESPACE}/twice/subscription/{segment}/{call}").status in (200, 404)
    assert ask_raw(admin, "POST", f"{NAMESPACE}/twice/subscription/{segment}/skip_all").status == 204
    assert ask_raw(admin, "DELETE", f"{NAMESPACE}/twice/subscription/{segment}").status == 204


def test_a_literal_percent_in_a_subscription_needs_two_encodings(admin: AdminWorld) -> None:
    """Once encoded it is read as an escape, or refused when it is none."""
    assert ask_raw(admin, "PUT", f"{NAMESPACE}/percent/subscription/50%2525").status == 204
    assert admin.get(f"{NAMESPACE}/percent/subscriptions").json() == ["50%"]
    assert ask_raw(admin, "PUT", f"{NAMESPACE}/percent/subscription/%25FF").status == 412


@pytest.mark.parametrize("suffix", ["/", "//", "/?authoritative=false"])
def test_slashes_at_the_end_mean_nothing(admin: AdminWorld, suffix: str) -> None:
    assert ask_raw(admin, "GET", f"/admin/v2/tenants{suffix}").status == 200
    assert ask_raw(admin, "GET", f"/metrics{suffix}").status == 200
    assert ask_raw(admin, "PUT", f"{NAMESPACE}/slashed{len(suffix)}{suffix}").status == 204


@pytest.mark.parametrize(
    "target", ["/admin/v2//tenants", "/admin/v2/tenants/../clusters", "/admin/v2/./tenants", "/admin/v2/%2e%2e/x"]
)
def test_paths_are_not_cleaned(admin: AdminWorld, target: str) -> None:
    """A dot is a name like any other: nothing is reached by going up."""
    assert ask_raw(admin, "GET", target).status in (404, 412, 501)


@pytest.mark.parametrize("accept", ["application/json", "text/html", "image/png", "nonsense"])
def test_accept_never_decides(admin: AdminWorld, accept: str) -> None:
    for path in ("/status.html", "/metrics", "/admin/v2/brokers/version", "/lookup/v2/topic/persistent/public/default/t/bundle"):
        assert admin.get(path, headers={"accept": accept}).status_code == 200


# §3 bodies


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("bare-int/partitions", b"3", 204),
        ("bare-text/partitions", b'"3"', 204),  # lenient: it can mean one thing only
        ("bare-object/partitions", b'{"partitions":3}', 204),
        ("bare-null/partitions", b"null", 400),
        ("bare-nothing/partitions", b"", 400),
        ("bare-bool/partitions", b"[3]", 400),
        ("props-null", b"null", 204),
        ("props-empty", b"", 204),
        ("props-object", b"{}", 204),
        ("props-list", b"[]", 400),
    ],
)
def test_bodies_are_bare_values_null_or_nothing(admin: AdminWorld, path: str, body: bytes, status: int) -> None:
    assert ask_raw(admin, "PUT", f"{NAMESPACE}/{path}", body).status == status


@pytest.mark.parametrize(
    ("level", "path"), [("namespace", "/admin/v2/namespaces/public/bare"), ("topic", f"{TOPICS}/public/bare/t")]
)
def test_policies_are_bare_numbers_and_booleans(admin: AdminWorld, level: str, path: str) -> None:
    admin.put("/admin/v2/namespaces/public/bare")
    admin.put(f"{TOPICS}/public/bare/t")
    dedup = "deduplication" if level == "namespace" else "deduplicationEnabled"
    assert (admin.get(f"{path}/{dedup}").status_code, admin.get(f"{path}/{dedup}").content) == (204, b""), "not set: empty"
    assert admin.post(f"{path}/{dedup}", content=b"true").status_code == 204
    assert admin.get(f"{path}/{dedup}").content == b"true"
    assert admin.delete(f"{path}/{dedup}").status_code == 204
    assert admin.get(f"{path}/{dedup}").status_code == 204


# §4 partitioned or not


def test_counting_partitions_creates_nothing_unless_asked(admin: AdminWorld) -> None:
    for query in ("", "?checkAllowAutoCreation=false"):
        assert admin.get(f"{NAMESPACE}/never-made/partitions{query}").status_code == 404
    assert admin.get(f"{NAMESPACE}/never-made/partitions?checkAllowAutoCreation=true").json()["partitions"] == 0
    assert f"{FULL}/never-made" not in admin.get(NAMESPACE).json()


def test_looking_at_a_topic_that_is_not_there_creates_nothing(admin: AdminWorld) -> None:
    for call in ("stats", "internalStats", "internal-info", "subscriptions", "subscription/s/position/1", "lookup"):
        path = "/lookup/v2/topic/persistent/public/default/ghost" if call == "lookup" else f"{NAMESPACE}/ghost/{call}"
        admin.get(path)
    assert admin.post(f"{NAMESPACE}/ghost/subscription/s/resetcursor", json=EARLIEST).status_code == 404
    assert admin.get(f"{NAMESPACE}/ghost/partitions").status_code == 404


def test_a_partition_beyond_the_count_is_no_topic(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/two/partitions", json=2)
    assert admin.get(f"{NAMESPACE}/two-partition-1/stats").status_code == 200
    assert admin.get(f"{NAMESPACE}/two-partition-2/stats").status_code == 404
    assert admin.get(f"{NAMESPACE}/two-partition-01/stats").status_code == 404, "a number has one spelling"
    assert admin.post(f"{NAMESPACE}/two/createMissedPartitions").status_code == 204


# §6, §10 namespaces and lists


@pytest.mark.parametrize("word", ["nonsense", "0x00000000_0x00000001", "0x00000000", "stats"])
def test_deleting_an_unknown_word_of_a_namespace_is_412_about_a_bundle(admin: AdminWorld, word: str) -> None:
    answer = admin.delete(f"/admin/v2/namespaces/public/default/{word}")
    assert answer.status_code == 412
    assert "bundle" in answer.json()["reason"]


def test_both_domains_answer_both_lists(admin: AdminWorld) -> None:
    """Go's client makes four calls for one list, and takes 404 for a failure."""
    admin.put("/admin/v2/namespaces/public/listless")
    for domain in ("persistent", "non-persistent"):
        for call in ("", "/partitioned"):
            answer = admin.get(f"/admin/v2/{domain}/public/listless{call}")
            assert (answer.status_code, answer.json()) == (200, [])


def test_system_topics_and_heartbeats_are_hidden_unless_asked_for(admin: AdminWorld) -> None:
    assert admin.get("/admin/v2/brokers/health").text == "ok"
    admin.put(f"{NAMESPACE}/__hidden")
    assert f"{FULL}/__hidden" not in admin.get(NAMESPACE).json()
    assert f"{FULL}/__hidden" in admin.get(f"{NAMESPACE}?includeSystemTopic=true").json()
    assert admin.get(f"{TOPICS}/pulsar/system").json() == []


# §9 lookup


def test_lookup_answers_strings_for_tls_addresses(admin: AdminWorld) -> None:
    """The C++ client breaks where neither key is there."""
    found = admin.get("/lookup/v2/topic/persistent/public/default/looked-up").json()
    assert found["brokerUrlTls"] == found["brokerUrlSsl"] == ""
    assert found["brokerUrl"].startswith("pulsar://")
    assert admin.get("/lookup/v2/topic/nonsense/public/default/t").status_code == 412


def test_an_unknown_listener_is_no_address(admin: AdminWorld) -> None:
    path = "/lookup/v2/topic/persistent/public/default/looked-up"
    for refused in (admin.get(path, params={"listenerName": "inner"}), admin.get(path, headers={"X-Pulsar-ListenerName": "inner"})):
        assert refused.status_code == 405
        assert "listener 'inner'" in refused.json()["reason"]
    assert admin.get(path, params={"listenerName": ""}).status_code == 200


# §13 health


@pytest.mark.parametrize("path", ["/status.html", "/metrics", "/admin/v2/brokers/ready", "/admin/v2/tenants/nobody"])
def test_head_is_get_without_a_body(admin: AdminWorld, path: str) -> None:
    """`curl -I` and some load balancers ask so."""
    answer = admin.ask("HEAD", path)
    assert (answer.status_code, answer.content) == (admin.get(path).status_code, b"")


# §14 client quirks


def test_go_sends_the_flag_of_encryption_as_text(admin: AdminWorld) -> None:
    path = "/admin/v2/namespaces/public/quirks"
    admin.put(path)
    assert admin.post(f"{path}/encryptionRequired", content=b'"false"').status_code == 204
    assert admin.get(f"{path}/encryptionRequired").content == b"false"


def test_ttl_of_a_topic_travels_in_the_query(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/mortal")
    assert admin.post(f"{NAMESPACE}/mortal/messageTTL?messageTTL=60").status_code == 204
    assert admin.get(f"{NAMESPACE}/mortal/messageTTL").content == b"60"
    assert admin.delete(f"{NAMESPACE}/mortal/messageTTL").status_code == 204
    assert admin.get(f"{NAMESPACE}/mortal/messageTTL").status_code == 204


def test_the_longest_delay_has_two_names(admin: AdminWorld) -> None:
    path = "/admin/v2/namespaces/public/default/delayedDelivery"
    for name, delay in (("maxDelayInMillis", 1000), ("maxDeliveryDelayInMillis", 2000)):
        assert admin.post(path, json={"active": True, "tickTime": 1000.0, name: delay}).status_code == 204
        found = admin.get(path).json()
        assert found["maxDelayInMillis"] == found["maxDeliveryDelayInMillis"] == delay
    assert admin.delete(path).status_code == 204


def test_limits_of_unacknowledged_messages_have_other_names_on_topics(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/limits")
    for path in (
        "/admin/v2/namespaces/public/default/maxUnackedMessagesPerConsumer",
        "/admin/v2/namespaces/public/default/maxUnackedMessagesPerSubscription",
        f"{NAMESPACE}/limits/maxUnackedMessagesOnConsumer",
        f"{NAMESPACE}/limits/maxUnackedMessagesOnSubscription",
    ):
        assert admin.post(path, content=b"7").status_code == 204
        assert admin.get(path).content == b"7"
        assert admin.delete(path).status_code == 204


def test_no_success_is_205_and_up(admin: AdminWorld) -> None:
    """Go knows 200 to 204 only, and 307."""
    description = admin.get("/openapi.json").json()
    declared = {
        status
        for operations in description["paths"].values()
        for operation in operations.values()
        for status in operation["responses"]
        if status.startswith("2")
    }
    assert declared <= {"200", "202", "204"}


def test_many_requests_travel_on_one_connection(admin: AdminWorld) -> None:
    address = urlsplit(admin.standalone.admin_url)

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for path in ("/status.html", f"{NAMESPACE}/none/stats", "/admin/v2/brokers/version"):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        writer.write(b"GET /status.html HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answered = await reader.read()
        while more := await reader.read():
            answered += more
        writer.close()
        return answered

    assert admin.run(ask()).count(b"HTTP/1.1 ") == 4
