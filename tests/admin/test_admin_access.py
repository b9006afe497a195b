"""Authorization of the admin API: the table of needs, and what each role sees of another tenant's things."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from cepheid_broker.admin import access, app
from cepheid_broker.admin.access_table import ACCESS
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.openapi import routes_of
from cepheid_broker.admin.path_names import noun_reader
from cepheid_metadata import keys
from tests.admin import admin_page
from tests.admin.secured_world import A_NAMESPACE, A_TOPICS, SecuredWorld, running_secured

SCHEMA = {"type": "STRING", "schema": "", "properties": {}}
RETENTION = {"retentionTimeInMinutes": 5, "retentionSizeInMB": 5}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredWorld]:
    with running_secured(tmp_path_factory.mktemp("secured") / "data") as found:
        yield found


def rows_of_routes() -> dict[tuple[str, str], APIRoute]:
    return {(method, route.path): route for route in admin_page.routes() for method in route.methods or ()}


def test_each_route_has_a_row_and_each_row_a_route() -> None:
    assert rows_of_routes().keys() == ACCESS.keys()


def test_a_need_for_a_tenant_a_namespace_or_a_topic_has_one_in_its_path() -> None:
    scoped = {row for row, found in ACCESS.items() if found.need in access.SCOPED_NEEDS}
    without = [row for row, route in rows_of_routes().items() if row in scoped and noun_reader(route.dependant) is None]
    assert not without


def test_what_is_no_route_of_the_table_is_only_the_description_of_the_api(world: SecuredWorld) -> None:
    """Routes of another kind would not pass the guard."""
    inner: Any = app.create_app(AdminContext(world.admin.standalone.broker))
    while not isinstance(inner, FastAPI):
        inner = inner._app
    others = [route for route in inner.routes if not isinstance(route, APIRoute) and not hasattr(route, "original_router")]
    assert [getattr(route, "path", route) for route in others] == ["/openapi.json"]
    included = [
        route for router in inner.routes if hasattr(router, "original_router") for route in routes_of(router.original_router)
    ]
    plain = [route for route in inner.routes if isinstance(route, APIRoute)]
    assert {route.path for route in (*included, *plain)} == {path for _, path in ACCESS}


def test_a_route_without_a_row_is_denied_to_everybody(world: SecuredWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ("GET", "/admin/v2/clusters")
    monkeypatch.setattr(access, "ACCESS", {each: found for each, found in ACCESS.items() if each != row})
    answer = world.ask("root", *row)
    assert answer.status_code == 403
    assert "no row for this call" in answer.json()["reason"]


EVERYBODY = {"root", "a-admin", "a-user", "a-reader", "b-admin", "nobody"}
ROOT, ADMINS = {"root"}, {"root", "a-admin"}
USERS, READERS = ADMINS | {"a-user"}, ADMINS | {"a-user", "a-reader"}
MATRIX: list[tuple[str, str, Any, set[str]]] = [
    ("GET", "/admin/v2/clusters", None, EVERYBODY),
    ("GET", "/admin/v2/clusters/standalone", None, ROOT),
    ("GET", "/admin/v2/brokers", None, ROOT),
    ("GET", "/admin/v2/brokers/configuration/runtime", None, ROOT),
    ("GET", "/admin/v2/bookies/all", None, ROOT),
    ("PUT", "/admin/v2/tenants/c", {"adminRoles": ["x"], "allowedClusters": ["standalone"]}, ROOT),
    ("GET", "/admin/v2/tenants/a", None, ADMINS),
    ("POST", "/admin/v2/tenants/a", {"adminRoles": ["a-admin"], "allowedClusters": ["standalone"]}, ROOT),
    ("GET", "/admin/v2/namespaces/a", None, ADMINS),
    ("PUT", "/admin/v2/namespaces/a/created", None, ADMINS),
    ("GET", A_NAMESPACE, None, ADMINS),
    ("GET", f"{A_NAMESPACE}/topics", None, READERS),
    ("GET", f"{A_NAMESPACE}/retention", None, ADMINS),
    ("POST", f"{A_NAMESPACE}/retention", RETENTION, ADMINS),
    ("POST", f"{A_NAMESPACE}/offloadPolicies", {"managedLedgerOffloadDriver": "aws-s3", "managedLedgerOffloadBucket": "x"}, ROOT),
    ("GET", f"{A_NAMESPACE}/offloadThreshold", None, ADMINS),
    ("PUT", f"{A_NAMESPACE}/offloadThreshold", 1, ROOT),
    ("PUT", f"{A_NAMESPACE}/offloadThresholdInSeconds", 1, ROOT),
    ("PUT", f"{A_NAMESPACE}/offloadDeletionLagMs", 1000, ROOT),
    ("DELETE", f"{A_NAMESPACE}/offloadDeletionLagMs", None, ROOT),
    ("GET", f"{A_NAMESPACE}/permissions", None, ADMINS),
    ("POST", f"{A_NAMESPACE}/permissions/x", ["consume"], ADMINS),
    ("POST", f"{A_NAMESPACE}/clearBacklog/s", None, ADMINS),
    ("GET", A_TOPICS, None, READERS),
    ("GET", f"{A_TOPICS}/partitioned", None, READERS),
    ("GET", "/admin/v2/non-persistent/a/n", None, READERS),
    ("GET", f"{A_TOPICS}/mine/stats", None, READERS),
    ("GET", f"{A_TOPICS}/other/stats", None, USERS),
    ("GET", f"{A_TOPICS}/parts/partitioned-stats", None, USERS),
    ("GET", f"{A_TOPICS}/parts-partition-0/internalStats", None, USERS),
    ("GET", f"{A_TOPICS}/mine/partitions", None, READERS),
    ("PUT", f"{A_TOPICS}/created", None, ADMINS),
    ("DELETE", f"{A_TOPICS}/created", None, ADMINS),
    ("POST", f"{A_TOPICS}/mine/retention", RETENTION, ADMINS),
    ("PUT", f"{A_TOPICS}/mine/subscription/s", None, READERS),
    ("POST", f"{A_TOPICS}/mine/subscription/s/skip_all", None, READERS),
    ("GET", f"{A_TOPICS}/mine/subscription/s/position/1", None, READERS),
    ("GET", f"{A_TOPICS}/mine/lastMessageId", None, READERS),
    ("POST", "/admin/v2/schemas/a/n/mine/schema", SCHEMA, USERS),
    ("GET", "/admin/v2/schemas/a/n/mine/schema", None, READERS),
    ("DELETE", "/admin/v2/schemas/a/n/mine/schema", None, ADMINS),
    ("GET", "/lookup/v2/topic/persistent/a/n/mine", None, READERS),
    ("GET", "/lookup/v2/topic/persistent/a/n/other", None, USERS),
    ("GET", "/cepheid/v1/plan?topic=persistent://a/n/mine", None, READERS),
    ("GET", "/cepheid/v1/plan?topic=persistent://a/n/other", None, USERS),
    ("GET", "/cepheid/v1/topics?namespace=a/n", None, READERS),
    ("GET", "/cepheid/v1/tiered/a/n", None, ADMINS),
    ("GET", "/cepheid/v1/repair", None, ROOT),
    ("GET", "/cepheid/v1/metadata/backup", None, ROOT),
    ("PUT", "/cepheid/v1/repair/off", None, ROOT),
    ("DELETE", "/cepheid/v1/repair/off", None, ROOT),
]


@pytest.mark.parametrize(("method", "path", "body", "allowed"), MATRIX, ids=[f"{row[0]} {row[1]}" for row in MATRIX])
def test_who_may_call(world: SecuredWorld, method: str, path: str, body: Any, allowed: set[str]) -> None:
    for role in sorted(EVERYBODY):
        answer = world.ask(role, method, path, **({} if body is None else {"json": body}))
        assert answer.status_code not in (401, 500), f"{role}: {answer.text}"
        assert (answer.status_code != 403) == (role in allowed), f"{role}: {answer.status_code} {answer.text}"
        if role not in allowed:
            assert repr(role) in answer.json()["reason"], "the reason names the role"
    assert world.ask("", method, path).status_code == 401


def test_probes_need_no_credentials_and_all_else_does(world: SecuredWorld) -> None:
    assert {world.ask("", "GET", path).status_code for path in ("/health", "/ready", "/status.html")} == {200}
    assert {world.ask("", "GET", path).status_code for path in ("/metrics", "/openapi.json", "/admin/v2/brokers/ready")} == {401}


def test_only_callers_with_valid_credentials_learn_what_is_wrong(world: SecuredWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_security.audit.REFUSALS_PER_WINDOW", 10_000)  # the tests before this one may have used them up
    problem = "bookie-7 is not registered"
    monkeypatch.setattr(world.admin.standalone._serving._bookies, "problems", lambda: [problem])
    assert world.ask("nobody", "GET", "/ready").text == f"ok\n{problem}"
    before = len(world.audited())
    wrong = {"Authorization": "Bearer x.y.z"}
    for path in ("/health", "/status.html"):
        assert world.ask("", "GET", path, wrong).status_code == 200
    assert len(world.audited()) == before, "probes without details judge nobody"
    for headers in (None, wrong, {"Authorization": "Basic ?"}):
        answer = world.ask("", "GET", "/ready", headers)
        assert (answer.status_code, answer.text) == (200, "ok")
    refused = world.audited()[before:]
    assert [(line["object"], line["result"]) for line in refused] == [("/ready", "denied")] * 2


def test_tokens_of_the_future_are_not_revoked(world: SecuredWorld) -> None:
    path, now_ms = "/cepheid/v1/revocations", time.time_ns() // 1_000_000
    late = {"kind": "role", "value": "later", "issued_up_to_ms": now_ms + 120_000}
    assert world.ask("root", "POST", path, json=late).status_code == 400
    # The caller's clock may be ahead, and so may be that of whoever made the token which has to end.
    world.do("root", "POST", path, json={**late, "issued_up_to_ms": now_ms + 30_000})
    (entry,) = (each for each in world.do("root", "GET", path) if each["value"] == "later")
    assert entry["issued_up_to_ms"] == now_ms + 30_000
    world.do("root", "DELETE", f"{path}?kind=role&value=later")


def test_lists_show_a_role_only_what_it_may_use(world: SecuredWorld) -> None:
    mine = "persistent://a/n/mine"
    assert world.do("a-admin", "GET", "/admin/v2/tenants") == ["a"]
    assert world.do("nobody", "GET", "/admin/v2/tenants") == []
    assert {"a", "b", "public"} <= set(world.do("root", "GET", "/admin/v2/tenants"))
    for path in (A_TOPICS, f"{A_NAMESPACE}/topics"):
        assert world.do("a-reader", "GET", path) == [mine]
        assert {mine, "persistent://a/n/other", "persistent://a/n/parts-partition-1"} <= set(world.do("a-user", "GET", path))
    assert world.do("a-reader", "GET", f"{A_TOPICS}/partitioned") == []
    assert world.do("a-reader", "GET", "/cepheid/v1/topics?namespace=a/n")["topics"] == {mine: 0}
    world.do("root", "GET", f"{A_TOPICS}/mine/lastMessageId")  # opens it, which makes a ledger
    ledgers = {role: world.do(role, "GET", "/cepheid/v1/ledgers")["ledgers"] for role in ("root", "a-reader", "b-admin")}
    assert {each["ledger"]["custom"]["topic"] for each in ledgers["a-reader"]} == {mine}
    assert ledgers["b-admin"] == []
    shown = f"/cepheid/v1/ledgers/{ledgers['a-reader'][0]['ledger']['ledger_id']}"
    assert world.ask("a-reader", "GET", shown).status_code == 200
    assert world.ask("b-admin", "GET", shown).status_code == 404


def wait_may(world: SecuredWorld, role: str, path: str, headers: dict[str, str] | None = None) -> None:
    """A grant reaches the broker by its watch, within a moment."""
    for _ in range(500):
        if world.ask(role, "GET", path, headers).status_code != 403:
            return
        world.admin.run(asyncio.sleep(0.01))
    raise AssertionError(f"{role} may not GET {path} after its grant")


def test_consumers_see_no_passwords_of_ledgers_no_damage_and_no_former_topics_of_the_same_name(world: SecuredWorld) -> None:
    path, store = f"{A_TOPICS}/recreated", world.admin.standalone.broker.store
    world.do("a-admin", "PUT", path)
    world.do("a-admin", "POST", f"{path}/permissions/a-former", json=["consume"])
    world.do("root", "PUT", f"{path}/subscription/s")
    wait_may(world, "a-former", f"{path}/stats")

    def ledgers_of(role: str) -> list[int]:
        views = world.do(role, "GET", "/cepheid/v1/ledgers")["ledgers"]
        assert all(("password" in view["ledger"]) == (role == "root") for view in views)
        return [view["ledger"]["ledger_id"] for view in views if view["ledger"]["custom"].get("topic", "").endswith("/recreated")]

    (former,) = ledgers_of("a-former")
    found = world.admin.run(store.get(keys.ledger_key(former)))
    assert found is not None
    world.do("a-admin", "DELETE", f"{path}?force=true")
    world.do("a-admin", "PUT", path)
    world.do("a-admin", "POST", f"{path}/permissions/a-later", json=["consume"])
    world.do("root", "PUT", f"{path}/subscription/s")
    wait_may(world, "a-later", f"{path}/stats")
    world.admin.run(store.create(keys.ledger_key(former), found.value))  # as while its deletion waits
    assert former in ledgers_of("root")
    assert former not in ledgers_of("a-later")
    assert len(ledgers_of("a-later")) == 1
    assert world.ask("a-later", "GET", f"/cepheid/v1/ledgers/{former}").status_code == 404
    (later,) = ledgers_of("a-later")
    assert "password" not in world.do("a-later", "GET", f"/cepheid/v1/ledgers/{later}")["ledger"]

    world.admin.run(store.put(keys.ledger_key(former), b"garbage", None))
    page = world.do("a-later", "GET", "/cepheid/v1/ledgers")
    assert (page["damaged"], page["incomplete"]) == ([], True)
    assert [each["ledger_id"] for each in world.do("root", "GET", "/cepheid/v1/ledgers")["damaged"]] == [former]
    world.admin.run(store.delete(keys.ledger_key(former), None))


def test_metrics_show_a_role_only_the_namespaces_that_it_may_use(world: SecuredWorld) -> None:
    world.do("a-user", "GET", f"{A_TOPICS}/mine/stats")  # opens it
    of_a = re.compile(r'pulsar_topics_count\{[^}]*namespace="a/n"')
    for role in ("root", "prometheus", "a-admin", "a-user", "b-admin", "nobody"):
        text = world.ask(role, "GET", "/metrics").text
        assert bool(of_a.search(text)) == (role in {*USERS, "prometheus"}), role
        assert "cepheid_broker_connections" in text


def test_a_name_is_decided_about_as_its_handler_decodes_it(world: SecuredWorld) -> None:
    """Schemas decode the topic twice: `%256Dine` is the topic `mine` there, and `%6Dine` everywhere else."""
    assert world.ask("a-reader", "GET", "/admin/v2/schemas/a/n/%256Dine/schemas").status_code == 404
    assert world.ask("a-reader", "GET", f"{A_TOPICS}/%256Dine/stats").status_code == 403
    for name in ("x%2F..%2Fmine", "..%2Fmine", "mine%00"):
        assert world.ask("b-admin", "GET", f"{A_TOPICS}/{name}/stats").status_code in (403, 412)


def test_an_offload_policy_of_a_new_namespace_needs_a_super_user(world: SecuredWorld) -> None:
    body = {"offload_policies": {"managedLedgerOffloadDriver": "aws-s3", "managedLedgerOffloadBucket": "archive"}}
    answer = world.ask("a-admin", "PUT", "/admin/v2/namespaces/a/offloaded", json=body)
    assert (answer.status_code, "super-user" in answer.json()["reason"]) == (403, True)
    assert "a/offloaded" not in world.do("root", "GET", "/admin/v2/namespaces/a")


def test_another_broker_works_on_parts_and_names_its_client(world: SecuredWorld) -> None:
    for_ann = {"X-Cepheid-Acting-For": "ann%40x"}
    assert world.ask("broker", "PUT", f"{A_TOPICS}/parts-partition-0/unload", for_ann).status_code == 204
    assert world.ask("broker", "GET", f"{A_TOPICS}/parts-partition-0/stats").status_code == 200
    assert world.ask("broker", "PUT", "/admin/v2/tenants/d", json={}).status_code == 403
    assert world.ask("broker", "POST", f"{A_NAMESPACE}/permissions/broker", json=["produce"]).status_code == 403
    refused = world.ask("a-admin", "PUT", f"{A_TOPICS}/parts-partition-0/unload", for_ann)
    assert refused.status_code == 403
    assert "which only brokers may" in refused.json()["reason"]
    line = next(line for line in world.audited() if line.get("role") == "broker" and line["result"] == "done")
    assert (line["original_role"], line["operation"]) == (
        "ann@x",
        "PUT /admin/v2/persistent/{tenant}/{namespace}/{topic}/unload",
    )


def test_a_proxy_needs_the_permissions_of_the_role_it_speaks_for_and_its_own(world: SecuredWorld) -> None:
    path = f"{A_TOPICS}/mine/stats"
    world.do("a-admin", "POST", f"{A_TOPICS}/mine/permissions/proxy", json=["consume"])
    wait_may(world, "proxy", path, {"X-Original-Principal": "a-reader"})
    assert world.ask("proxy", "GET", path, {"X-Original-Principal": "a-reader"}).status_code == 200
    assert world.ask("proxy", "GET", path, {"X-Original-Principal": "nobody"}).status_code == 403
    assert world.ask("proxy", "GET", path).status_code == 403
    assert world.ask("a-admin", "GET", path, {"X-Original-Principal": "root"}).status_code == 403
    assert world.ask("proxy", "GET", f"{A_TOPICS}/other/stats", {"X-Original-Principal": "a-user"}).status_code == 403


def test_a_revoked_role_cannot_come_through_a_proxy(world: SecuredWorld) -> None:
    path, speaking = f"{A_TOPICS}/mine/stats", {"X-Original-Principal": "a-reader"}
    world.do("a-admin", "POST", f"{A_TOPICS}/mine/permissions/proxy", json=["consume"])
    wait_may(world, "proxy", path, speaking)
    world.do("root", "POST", "/cepheid/v1/revocations", json={"kind": "role", "value": "a-reader", "issued_up_to_ms": 1})
    deadline = time.monotonic() + 10
    while (answer := world.ask("proxy", "GET", path, speaking)).status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert answer.status_code == 403
    assert "behind a proxy old ones cannot be told from new ones" in answer.json()["reason"]
    world.do("root", "DELETE", "/cepheid/v1/revocations?kind=role&value=a-reader")
    wait_may(world, "proxy", path, speaking)


def test_a_grant_on_a_topic_does_not_create_partitions_that_it_does_not_have(world: SecuredWorld) -> None:
    refused = world.ask("a-reader", "PUT", f"{A_TOPICS}/mine-partition-7/subscription/s")
    assert refused.status_code == 412
    assert "no grant on the namespace" in refused.json()["reason"]
    assert world.ask("a-admin", "GET", f"{A_TOPICS}/mine-partition-7/partitions").status_code == 404


def test_a_change_and_a_denial_are_lines_of_the_audit_log(world: SecuredWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_security.audit.REFUSALS_PER_WINDOW", 10_000)  # the tests before this one may have used them up
    before = len(world.audited())
    world.do("a-admin", "POST", f"{A_NAMESPACE}/retention", json=RETENTION)
    world.ask("b-admin", "GET", f"{A_TOPICS}/mine/stats?secret=1")
    world.ask("a-admin", "DELETE", f"{A_TOPICS}/missing")
    world.do("a-admin", "GET", A_NAMESPACE)
    world.ask("", "GET", A_NAMESPACE, {"Authorization": f"Bearer {'x' * 40}"})
    world.do("root", "GET", "/admin/v2/clusters")
    lines = world.audited()[before:]
    assert [(line.get("role"), line["operation"], line["object"], line["result"]) for line in lines] == [
        ("a-admin", "POST /admin/v2/namespaces/{tenant}/{namespace}/retention", f"{A_NAMESPACE}/retention", "done"),
        ("b-admin", "GET /admin/v2/persistent/{tenant}/{namespace}/{topic}/stats", "persistent://a/n/mine", "denied"),
        ("a-admin", "DELETE /admin/v2/persistent/{tenant}/{namespace}/{topic}", f"{A_TOPICS}/missing", "failed"),
        (None, f"GET {A_NAMESPACE}", A_NAMESPACE, "denied"),
    ]
    assert [line.get("method") for line in lines] == ["token", "token", "token", None]
    assert lines[2]["reason"] == "status 404"
    assert all(line["peer"].startswith("127.0.0.1") for line in lines)
    text = world.audit_file.read_text()
    assert "Bearer" not in text
    assert "eyJ" not in text, "no token"
    assert "secret" not in text, "no query"


def test_the_audit_log_has_no_values_of_properties_whoever_sent_them(world: SecuredWorld) -> None:
    before = len(world.audited())
    path = f"{A_NAMESPACE}/property/dbpass/hunter2"
    world.do("a-admin", "PUT", path)
    assert world.ask("b-admin", "PUT", path).status_code == 403
    assert world.ask("", "PUT", path).status_code == 401
    assert world.ask("", "PUT", "/admin/v2/namespaces/a/n/propertie/dbpass/hunter2").status_code == 401
    objects = [line["object"] for line in world.audited()[before:]]
    shown = f"{A_NAMESPACE}/property/dbpass/{{value}}"
    assert objects == [shown, "a/n", shown, "/admin/v2/…"]
    assert "hunter2" not in world.audit_file.read_text()


CHANGES: list[tuple[str, str, Any, str]] = [
    ("POST", f"{A_NAMESPACE}/permissions/x", ["produce", "consume"], "produce, consume"),
    ("POST", f"{A_TOPICS}/mine/permissions/x", [], "no actions"),
    ("POST", f"{A_NAMESPACE}/permissions/subscription/audited", ["x", "y"], "x, y"),
    (
        "POST",
        "/admin/v2/namespaces/grantPermissionsOnTopics",
        [{"topic": "persistent://a/n/mine", "role": "x", "actions": ["produce"]}],
        "x on persistent://a/n/mine: produce",
    ),
    (
        "POST",
        "/admin/v2/namespaces/revokePermissionsOnTopics",
        [{"topic": f"persistent://a/n/{'t' * 200}{n}", "role": "x"} for n in range(100)],
        "more",
    ),
    ("POST", "/cepheid/v1/revocations", {"kind": "id", "value": "3f9c2a71d0e4b586"}, "id 3f9c2a71d0e4b586"),
    ("DELETE", "/cepheid/v1/revocations?kind=id&value=3f9c2a71d0e4b586", None, "id 3f9c2a71d0e4b586"),
    ("PUT", "/admin/v2/tenants/e", {"adminRoles": ["ann"], "allowedClusters": ["standalone"]}, "admin ann, clusters standalone"),
]


@pytest.mark.parametrize(("method", "path", "body", "change"), CHANGES, ids=[row[1] for row in CHANGES])
def test_the_audit_log_says_what_was_changed(world: SecuredWorld, method: str, path: str, body: Any, change: str) -> None:
    world.do("root", method, path, **({} if body is None else {"json": body}))
    line = world.audited()[-1]
    assert line["result"] == "done"
    assert line["change"].endswith(change)
    assert len(line["change"]) <= 4000
