"""Paths and bodies as hostile and sloppy clients send them: names like routes, slashes, double escapes, no content type."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import pytest

from tests.admin.admin_world import NAMESPACE, AdminWorld

FULL = "persistent://public/default"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("segment", "local_name"),
    [
        ("with%20space", "with space"),
        ("with+plus", "with plus"),  # form style, as the reference server decodes
        ("with%2Bplus", "with+plus"),
        ("100%25", "100%"),
        ("a%252Fb", "a%2Fb"),  # decoded once: the name holds a percent sign
        ("%E2%9C%93-%C3%A9", "✓-é"),
        ("a%3Fb%3Dc%26d", "a?b=c&d"),
        ("a%23b", "a#b"),
        ("partitions", "partitions"),
        ("stats", "stats"),
        ("%7Btopic%7D", "{topic}"),
        ("...", "..."),
        ("-partition-", "-partition-"),
        ("%3Cscript%3E%22'", "<script>\"'"),
    ],
)
def test_a_topic_may_have_any_name(admin: AdminWorld, segment: str, local_name: str) -> None:
    path = f"{NAMESPACE}/{segment}"
    assert admin.put(path).status_code == 204
    try:
        assert f"{FULL}/{local_name}" in admin.get(NAMESPACE).json()
        assert admin.get(f"{path}/partitions").json()["partitions"] == 0
        assert admin.get(f"{path}/subscriptions").json() == []
        assert admin.put(f"{path}/unload").status_code == 204
    finally:
        assert admin.delete(path).status_code == 204
    assert f"{FULL}/{local_name}" not in admin.get(NAMESPACE).json()


@pytest.mark.parametrize(
    "segment", ["a%2Fpartitions", "a%2Fb", "%00", "a%0Ab", "%FF", "x" * 1100, "a%2Fsubscription%2Fs", "%2E", "%2E%2E"]
)
def test_a_name_that_no_topic_can_have_is_412_and_reaches_no_other_route(admin: AdminWorld, segment: str) -> None:
    """Decoded before routing, the first would be a call on the partitions of `a`."""
    before = admin.get(NAMESPACE).json()
    for method in ("PUT", "DELETE"):
        answer = admin.ask(method, f"{NAMESPACE}/{segment}", content=b"{}")
        assert answer.status_code == 412, answer.text
    assert admin.get(NAMESPACE).json() == before


@pytest.mark.parametrize(
    ("segment", "name"),
    [
        ("a%2Fb", "a/b"),  # Java escapes once
        ("a%252Fb", "a/b"),  # Go escapes twice what needs it
        ("a%2520b", "a b"),
        ("per%2525cent", "per%cent"),
        ("permissions", "permissions"),
    ],
)
def test_a_subscription_is_decoded_twice(admin: AdminWorld, segment: str, name: str) -> None:
    path = f"{NAMESPACE}/decoded/subscription/{segment}"
    assert admin.put(path).status_code == 204
    assert admin.get(f"{NAMESPACE}/decoded/subscriptions").json() == [name]
    assert admin.delete(path).status_code == 204
    assert admin.get(f"{NAMESPACE}/decoded/subscriptions").json() == []


@pytest.mark.parametrize("path", ["/admin/v2/tenants", "/admin/v2/persistent/public/default", "/metrics", "/status.html"])
def test_a_trailing_slash_means_the_same(admin: AdminWorld, path: str) -> None:
    assert admin.get(f"{path}/").status_code == admin.get(path).status_code == 200


def test_authoritative_is_accepted_and_ignored(admin: AdminWorld) -> None:
    for value in ("true", "false", ""):
        assert admin.get(f"{NAMESPACE}/none/stats", params={"authoritative": value}).status_code == 404
        assert admin.get("/admin/v2/namespaces/public", params={"authoritative": value}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/admin/v2/persistent/public/default/t/compaction"),
        ("POST", "/admin/v2/namespaces/public/default/permissions/role"),
        ("POST", "/admin/v2/bookies/racks-info/127.0.0.1:3181"),
        ("GET", "/admin/v2/resource-quotas"),
        ("POST", "/admin/v2/tenants"),
        ("GET", "/admin/v2/no/such/thing"),
        ("GET", "/admin/v3/functions"),
        ("PATCH", "/admin/v2/tenants/public"),
    ],
)
def test_what_is_not_served_says_so(admin: AdminWorld, method: str, path: str) -> None:
    answer = admin.ask(method, path)
    assert answer.status_code == 501
    assert path in answer.json()["reason"]


def test_elsewhere_a_path_is_simply_not_found(admin: AdminWorld) -> None:
    assert admin.get("/favicon.ico").status_code == 404


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[1]", b'{"adminRoles": 1}'])
def test_a_broken_body_is_400(admin: AdminWorld, body: bytes) -> None:
    answer = admin.put("/admin/v2/tenants/broken", content=body)
    assert answer.status_code == 400
    assert "body" in answer.json()["reason"]


@pytest.mark.parametrize("content_type", ["application/json", "application/vnd.tenant+json", "nonsense", "", None])
def test_a_body_is_json_whatever_it_is_called_unless_a_web_form_could_send_it(admin: AdminWorld, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = admin.post("/admin/v2/tenants/public", content=b'{"allowedClusters": ["standalone"]}', headers=headers)
    assert answer.status_code == 204, answer.text


def test_accept_is_never_a_reason_to_refuse(admin: AdminWorld) -> None:
    assert admin.get("/status.html", headers={"accept": "application/json"}).status_code == 200
    assert admin.get("/metrics", headers={"accept": "image/png"}).status_code == 200


def test_a_body_without_end_is_cut_off(admin: AdminWorld) -> None:
    sent = 0

    async def endless() -> object:
        nonlocal sent
        while sent < 64 << 20:
            sent += 1 << 16
            yield b" " * (1 << 16)
            await asyncio.sleep(0)

    answer = admin.put("/admin/v2/tenants/large", content=endless())
    assert answer.status_code == 413
    assert admin.get("/status.html").status_code == 200, "the server goes on"


def test_a_long_name_is_refused_before_it_becomes_a_key(admin: AdminWorld) -> None:
    assert admin.put(f"/admin/v2/namespaces/public/{'n' * 256}").status_code == 412
    assert admin.put(f"{NAMESPACE}/t/subscription/{quote('é' * 501)}").status_code == 412
