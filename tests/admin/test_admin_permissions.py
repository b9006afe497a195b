"""Pulsar's permission calls, and what they change for the roles concerned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.admin.secured_world import SecuredWorld, bearer, running_secured

NAMESPACE = "/admin/v2/namespaces/b/n"
TOPIC = "/admin/v2/persistent/b/n/t"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredWorld]:
    with running_secured(tmp_path_factory.mktemp("permissions") / "data") as found:
        found.do("b-admin", "PUT", TOPIC)
        found.do("b-admin", "PUT", f"{TOPIC}s/partitions", json=2)
        yield found


def may(world: SecuredWorld, role: str, path: str) -> bool:
    return world.ask(role, "GET", path).status_code != 403


def wait_may(world: SecuredWorld, role: str, path: str, allowed: bool) -> None:
    """Changes reach the broker by its watches, within a moment."""

    async def is_so() -> bool:
        answer = await world.admin.send("GET", path, headers=bearer(role))
        return (answer.status_code != 403) == allowed

    async def wait() -> None:
        async with asyncio.timeout(5):
            while not await is_so():  # noqa: ASYNC110 - the broker tells nobody
                await asyncio.sleep(0.01)

    world.admin.run(wait())


def test_a_grant_on_a_namespace_replaces_what_the_role_had(world: SecuredWorld) -> None:
    path = f"{NAMESPACE}/permissions"
    world.do("b-admin", "POST", f"{path}/ann", json=["produce", "consume"])
    wait_may(world, "ann", f"{TOPIC}/stats", True)
    world.do("b-admin", "POST", f"{path}/ann", json=["sinks"])
    assert world.do("b-admin", "GET", path) == {"ann": ["sinks"]}
    wait_may(world, "ann", f"{TOPIC}/stats", False)
    world.do("b-admin", "DELETE", f"{path}/ann")
    world.do("b-admin", "DELETE", f"{path}/ann")  # no error when it has none
    assert world.do("b-admin", "GET", path) == {}


def test_a_grant_on_a_topic_is_for_that_topic_and_its_partitions(world: SecuredWorld) -> None:
    world.do("b-admin", "POST", f"{TOPIC}s/permissions/bob", json=["consume"])
    world.do("b-admin", "POST", f"{NAMESPACE}/permissions/bob", json=["functions"])
    assert world.do("b-admin", "GET", f"{TOPIC}s/permissions")["bob"] == ["consume", "functions"], "of both levels"
    assert world.do("b-admin", "GET", f"{TOPIC}s-partition-1/permissions")["bob"] == ["consume", "functions"]
    wait_may(world, "bob", f"{TOPIC}s-partition-1/stats", True)
    assert may(world, "bob", f"{TOPIC}s/partitions")
    assert not may(world, "bob", f"{TOPIC}/stats")
    world.do("b-admin", "DELETE", f"{TOPIC}s/permissions/bob")
    wait_may(world, "bob", f"{TOPIC}s-partition-1/stats", False)
    assert world.ask("b-admin", "DELETE", f"{TOPIC}s/permissions/bob").status_code == 412, "it has nothing on the topic"
    world.do("b-admin", "DELETE", f"{NAMESPACE}/permissions/bob")


def test_non_persistent_topics_have_grants_of_their_own(world: SecuredWorld) -> None:
    path = TOPIC.replace("/persistent/", "/non-persistent/")
    world.do("b-admin", "PUT", path)
    world.do("b-admin", "POST", f"{path}/permissions/cid", json=["produce"])
    assert world.do("b-admin", "GET", f"{path}/permissions") == {"cid": ["produce"]}
    wait_may(world, "cid", f"{path}/stats", True)
    assert not may(world, "cid", f"{TOPIC}/stats")
    world.do("b-admin", "DELETE", f"{path}/permissions/cid")


def test_a_reserved_subscription_is_closed_to_other_roles(world: SecuredWorld) -> None:
    for role in ("dan", "eve"):
        world.do("b-admin", "POST", f"{NAMESPACE}/permissions/{role}", json=["consume"])
    world.do("b-admin", "POST", f"{NAMESPACE}/permissions/subscription/a%2Bb", json=["dan"])
    assert world.do("b-admin", "GET", f"{NAMESPACE}/permissions/subscription") == {"a+b": ["dan"]}
    subscription = f"{TOPIC}/subscription/a%252Bb"
    wait_may(world, "eve", f"{subscription}/position/1", False)
    assert may(world, "dan", f"{subscription}/position/1")
    assert may(world, "eve", f"{TOPIC}/subscription/other/position/1")
    world.do("b-admin", "DELETE", f"{NAMESPACE}/permissions/a%2Bb/dan")
    assert world.do("b-admin", "GET", f"{NAMESPACE}/permissions/subscription") == {}
    wait_may(world, "eve", f"{subscription}/position/1", True)


def test_the_mode_prefix_asks_for_subscriptions_that_begin_with_the_role(world: SecuredWorld) -> None:
    world.do("b-admin", "POST", f"{NAMESPACE}/permissions/fay", json=["consume"])
    assert world.ask("b-admin", "POST", f"{NAMESPACE}/subscriptionAuthMode", json="Suffix").status_code == 412
    world.do("b-admin", "POST", f"{NAMESPACE}/subscriptionAuthMode", json="Prefix")
    assert world.do("b-admin", "GET", f"{NAMESPACE}/subscriptionAuthMode") == "Prefix"
    wait_may(world, "fay", f"{TOPIC}/subscription/mine/position/1", False)
    assert may(world, "fay", f"{TOPIC}/subscription/fay-1/position/1")
    found = world.do("b-admin", "GET", NAMESPACE)
    assert (found["subscription_auth_mode"], found["auth_policies"]["namespace_auth"]["fay"]) == ("Prefix", ["consume"])
    world.do("b-admin", "POST", f"{NAMESPACE}/subscriptionAuthMode", json="None")


def test_many_topics_at_once_need_an_administrator_of_each(world: SecuredWorld) -> None:
    grants = [{"topic": f"persistent://b/n/{name}", "role": "gus", "actions": ["produce"]} for name in ("t", "u")]
    foreign = [*grants, {"topic": "persistent://a/n/mine", "role": "gus", "actions": ["produce"]}]
    assert world.ask("b-admin", "POST", "/admin/v2/namespaces/grantPermissionsOnTopics", json=foreign).status_code == 403
    assert "gus" not in world.do("b-admin", "GET", f"{TOPIC}/permissions"), "nothing was granted"
    world.do("b-admin", "POST", "/admin/v2/namespaces/grantPermissionsOnTopics", json=grants)
    assert world.do("b-admin", "GET", f"{TOPIC}/permissions")["gus"] == ["produce"]
    revoked = [{"topic": each["topic"], "role": "gus"} for each in grants]
    world.do("b-admin", "POST", "/admin/v2/namespaces/revokePermissionsOnTopics", json=revoked)
    assert "gus" not in world.do("b-admin", "GET", f"{TOPIC}/permissions")


def test_administrators_of_a_tenant_are_changed_by_super_users(world: SecuredWorld) -> None:
    tenant = "/admin/v2/tenants/b"
    body = world.do("root", "GET", tenant)
    assert world.ask("b-admin", "POST", tenant, json=body).status_code == 403
    world.do("root", "POST", tenant, json={**body, "adminRoles": ["b-admin", "hal"]})
    wait_may(world, "hal", f"{NAMESPACE}/retention", True)
    world.do("root", "POST", tenant, json=body)
    wait_may(world, "hal", f"{NAMESPACE}/retention", False)


def test_changes_at_the_same_time_all_count(world: SecuredWorld) -> None:
    async def grant(number: int) -> httpx.Response:
        return await world.admin.send("POST", f"{NAMESPACE}/permissions/role-{number}", json=["produce"], headers=bearer("b-admin"))

    async def all_at_once() -> list[httpx.Response]:
        return await asyncio.gather(*map(grant, range(8)))

    assert {answer.status_code for answer in world.admin.run(all_at_once())} == {204}
    found = world.do("b-admin", "GET", f"{NAMESPACE}/permissions")
    assert {f"role-{number}" for number in range(8)} <= found.keys()


def test_grants_on_a_topic_go_with_it(world: SecuredWorld) -> None:
    for name, path in (("plain", f"{TOPIC}-plain"), ("parts", f"{TOPIC}-parts/partitions")):
        world.do("b-admin", "PUT", path, **({"json": 2} if name == "parts" else {}))
        permissions = f"{TOPIC}-{name}/permissions"
        world.do("b-admin", "POST", f"{permissions}/ida", json=["consume"])
        assert "ida" in world.do("b-admin", "GET", permissions)
        world.do("b-admin", "DELETE", path)
        assert world.ask("b-admin", "GET", permissions).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (f"{NAMESPACE}/permissions/r", ["fly"], 400),
        (f"{NAMESPACE}/permissions/r", "produce", 400),
        (f"{NAMESPACE}/permissions/%20", ["produce"], 412),
        (f"{NAMESPACE}/permissions/a%00b", ["produce"], 412),
        (f"{NAMESPACE}/permissions/%ff", ["produce"], 412),
        (f"{NAMESPACE}/permissions/subscription/s", [""], 412),
        ("/admin/v2/namespaces/b/missing/permissions/r", ["produce"], 404),
    ],
)
def test_bad_input_is_refused(world: SecuredWorld, path: str, body: object, status: int) -> None:
    answer = world.ask("b-admin", "POST", path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["reason"]


def test_why_names_the_rule(world: SecuredWorld) -> None:
    why = "/cepheid/v1/permissions/why"
    asked = {"topic": "persistent://a/n/mine", "action": "consume"}
    assert world.do("root", "GET", why, params={**asked, "role": "root"})["rule"].startswith("role 'root' is a super-user")
    assert world.do("a-admin", "GET", why, params={**asked, "role": "a-reader"}) == {
        "allowed": True,
        "rule": "role 'a-reader' has consume on the topic persistent://a/n/mine",
    }
    assert world.do("a-admin", "GET", why, params={**asked, "role": "a-reader", "action": "produce"}) == {
        "allowed": False,
        "rule": "role 'a-reader' has produce neither on the topic nor on its namespace",
    }
    assert world.do("nobody", "GET", why, params={**asked, "role": "nobody"})["allowed"] is False, "about itself"
    assert world.ask("b-admin", "GET", why, params={**asked, "role": "a-reader"}).status_code == 403
    assert world.ask("root", "GET", why, params={**asked, "role": "root", "action": "fly"}).status_code == 400
