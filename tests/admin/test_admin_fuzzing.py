"""Every operation of the OpenAPI description, asked in every wrong way there is: refused with a reason, or answered; never 500.

`CEPHEID_FUZZ_EXAMPLES=2000 pytest tests/admin/test_admin_fuzzing.py` looks longer, with other requests each time.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cepheid_broker.admin.access_table import ACCESS
from cepheid_broker.admin.app import create_app
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.cross_site import AdminHosts
from cepheid_broker.settings import BrokerSettings
from cepheid_ports import CepheidError
from tests.admin.admin_world import AdminWorld, running_admin
from tests.admin.hostile_requests import Answer, Request, requests_for, send

EXAMPLES = os.environ.get("CEPHEID_FUZZ_EXAMPLES")
OPERATIONS = sorted(((method.lower(), path) for method, path in ACCESS), key=lambda each: each[0] != "get")
"""Those of the table of permissions, which has every route. Building the description takes a second in each process of a run."""
SLOW = ("/admin/v2/brokers/health",)


@cache
def description() -> dict[str, Any]:
    described: dict[str, Any] = create_app(cast(AdminContext, None))._app._app.openapi()  # type: ignore[attr-defined]
    return described


def requests_of(method: str, path: str) -> st.SearchStrategy[Request]:
    return requests_for(method, path, description()["paths"][path][method], description())


@pytest.mark.slow
def test_every_operation_of_the_description_is_asked() -> None:
    described = {(method, path) for path, operations in description()["paths"].items() for method in operations}
    assert described == set(OPERATIONS)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminWorld]:
    with running_admin(tmp_path_factory.mktemp("fuzz") / "data") as world:
        yield world


def make_objects(admin: AdminWorld) -> None:
    """What operations find; those before may have deleted or ended it."""
    admin.put("/admin/v2/namespaces/public/fuzzed")
    path = "/admin/v2/persistent/public/fuzzed"
    for topic in ("plain", "empty"):
        admin.delete(f"{path}/{topic}?force=true")
        admin.put(f"{path}/{topic}/subscription/s", json={"ledgerId": -1, "entryId": -1})
    admin.put(f"{path}/parts/partitions", json=2)
    admin.put(f"{path}/parts/subscription/s", json={"ledgerId": -1, "entryId": -1})
    admin.put("/admin/v2/non-persistent/public/fuzzed/plain")
    admin.put("/admin/v2/non-persistent/public/fuzzed/parts/partitions", json=2)
    with suppress(CepheidError):  # a policy may be in the way
        admin.publish("persistent://public/fuzzed/plain", [b"a", b"b"])


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[f"{method} {path}" for method, path in OPERATIONS])
def test_whatever_is_asked_the_answer_is_a_reason_or_a_success(fuzzed: AdminWorld, method: str, path: str) -> None:
    if method != "get" or (method, path) == OPERATIONS[0]:
        make_objects(fuzzed)  # reading left them as they were
    address = urlsplit(fuzzed.standalone.admin_url)
    assert address.hostname is not None
    assert address.port is not None
    examples = int(EXAMPLES or (3 if path in SLOW else 6))

    @settings(
        max_examples=examples,
        derandomize=EXAMPLES is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(request=requests_of(method, path))
    def ask(request: Request) -> None:
        check(request, fuzzed.run(send(address.hostname, address.port, request)))

    ask()
    assert fuzzed.get("/status.html").status_code == 200


@pytest.mark.slow
def test_requests_at_the_same_time_do_not_harm_each_other(fuzzed: AdminWorld) -> None:
    """A topic is deleted while it is looked at, grown while it is unloaded, and so on."""
    make_objects(fuzzed)
    address = urlsplit(fuzzed.standalone.admin_url)
    host, port = str(address.hostname), int(address.port or 0)
    kinds = [requests_of(method, path) for method, path in OPERATIONS if path not in SLOW and "/{topic}" in path]

    @settings(
        max_examples=int(EXAMPLES or 4),
        derandomize=EXAMPLES is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests=st.lists(st.one_of(kinds), min_size=20, max_size=40))
    def ask(requests: list[Request]) -> None:
        async def ask_together() -> list[Answer]:
            return await asyncio.gather(*(send(host, port, request) for request in requests))

        for request, answer in zip(requests, fuzzed.run(ask_together()), strict=True):
            check(request, answer)

    ask()
    assert fuzzed.get("/status.html").status_code == 200


DRAINED = "/admin/v2/persistent/public/fuzzed/plain/subscription/s/skip_all"
ALLOWED = ("admin.example.org", ".svc.cluster.local")


@pytest.fixture(scope="module")
def with_names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminWorld]:
    with running_admin(tmp_path_factory.mktemp("names") / "data", admin_allowed_hosts=ALLOWED) as world:
        make_objects(world)
        yield world


def ask_once(world: AdminWorld, request: Request) -> Answer:
    address = urlsplit(world.standalone.admin_url)
    return world.run(send("127.0.0.1", int(address.port or 0), request))


@pytest.mark.parametrize(
    ("status", "browser"),
    [
        (403, {"headers": (("Origin", "http://evil.example"),)}),
        (403, {"headers": (("Origin", "null"),)}),
        (403, {"headers": (("Origin", "http://127.0.0.1:3000"),)}),
        (403, {"headers": (("Origin", "http://127.0.0.1"), ("Origin", "http://evil.example"))}),
        (403, {"headers": (("Origin", "http://evil.svc.cluster.local.evil.example"),)}),
        (403, {"headers": (("Sec-Fetch-Site", "cross-site"),)}),
        (403, {"host": "evil.example"}),
        (403, {"host": "evil.example:8080", "headers": (("Origin", "http://evil.example:8080"),)}),
        (403, {"host": "127.0.0.1.evil.example"}),
        (403, {"host": "admin.example.org@evil.example"}),
        (403, {"host": "svc.cluster.local"}),
        (400, {"headers": (("Host", "localhost"),)}),
        (415, {"content_type": "text/plain", "body": b"{}"}),
        (415, {"content_type": "Text/Plain;charset=UTF-8", "body": b"{}"}),
        (415, {"content_type": "application/x-www-form-urlencoded", "body": b""}),
        (415, {"content_type": "multipart/form-data; boundary=x", "body": b"{}"}),
    ],
    ids=str,
)
def test_what_a_browser_sends_for_another_site_changes_nothing(
    with_names: AdminWorld, status: int, browser: dict[str, Any]
) -> None:
    for method, path in (
        ("POST", DRAINED),
        ("PUT", "/admin/v2/tenants/planted"),
        ("DELETE", "/admin/v2/tenants/public?force=true"),
    ):
        answer = ask_once(with_names, Request(method, path, **browser))
        assert answer.status == status, f"{method} {path}: {answer}"
        assert json.loads(answer.content)["reason"]
    stats = with_names.get("/admin/v2/persistent/public/fuzzed/plain/stats").json()
    assert stats["subscriptions"]["s"]["msgBacklog"] == 2
    assert sorted(with_names.get("/admin/v2/tenants").json()) == ["public", "pulsar"]


@pytest.mark.parametrize("browser", [{"host": "evil.example"}, {"headers": (("Sec-Fetch-Site", "cross-site"),)}], ids=str)
def test_a_page_of_another_site_reads_no_message(with_names: AdminWorld, browser: dict[str, Any]) -> None:
    path = "/admin/v2/persistent/public/fuzzed/plain/subscription/s/position/1"
    assert ask_once(with_names, Request("GET", path, **browser)).status == 403


@pytest.mark.parametrize(
    "tool",
    [
        *(
            {"host": host}
            for host in (
                *(
                    "127.0.0.1:1234",
                    "10.1.2.3",
                    "[::1]:8080",
                    "[fe80::1]",
                    "localhost",
                    "LOCALHOST.:80",
                ),
                *("admin.example.org", "broker.cepheid.svc.cluster.local:8080", socket.gethostname(), ""),
            )
        ),
        {"headers": (("Origin", "http://127.0.0.1"),)},  # the page is the broker's own
        {"headers": (("Origin", "https://admin.example.org"),)},
        {"headers": (("Sec-Fetch-Site", "same-origin"),)},
        {"headers": (("Sec-Fetch-Site", "none"),)},
        {"content_type": "application/json"},
        {"content_type": "application/vnd.partitioned-topic-metadata+json"},
        {"content_type": ""},
    ],
    ids=str,
)
def test_what_tools_send_is_served(with_names: AdminWorld, tool: dict[str, Any]) -> None:
    request = Request("POST", "/admin/v2/namespaces/public/fuzzed/messageTTL", b"60", **tool)
    assert ask_once(with_names, request).status == 204


def test_the_names_that_others_are_told_are_accepted() -> None:
    hosts = AdminHosts.of(BrokerSettings(host="broker-1", advertised_host="Broker-1.example.org"))
    assert all(map(hosts.accepts, ("broker-1", "broker-1.example.org", socket.gethostname().lower())))
    assert not hosts.accepts("example.org")


@pytest.mark.parametrize("path", ["/health", "/ready", "/status.html"])
def test_probes_are_answered_under_every_name(with_names: AdminWorld, path: str) -> None:
    assert ask_once(with_names, Request("GET", path, host="load-balancer.example.org")).status == 200


def check(request: Request, answer: Answer) -> None:
    assert answer.status in (501, 503) or 200 <= answer.status < 500, f"{request}: {answer}"
    if answer.status >= 300:
        assert json.loads(answer.content)["reason"].strip(), f"{request}: {answer} has no reason"
    elif answer.content and answer.content_type.startswith("application/json"):  # lines of JSON come in chunks
        json.loads(answer.content)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(500, "application/json", b'{"reason": "internal error"}'),
        Answer(404, "text/plain", b"Not Found"),
        Answer(412, "application/json", b'{"reason": " "}'),
        Answer(200, "application/json", b"{"),
    ],
    ids=lambda answer: str(answer.status),
)
def test_the_check_sees_what_it_looks_for(answer: Answer) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError)):
        check(Request("GET", "/"), answer)
