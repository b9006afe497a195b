"""Labels, permissions and clusters of namespaces, and races between tenants and namespaces."""

from __future__ import annotations

import asyncio

import pytest

from tests.admin.admin_world import AdminWorld

NAMESPACES, TENANTS = "/admin/v2/namespaces", "/admin/v2/tenants"
NAMESPACE = f"{NAMESPACES}/public/labels"
HERE = {"allowedClusters": ["standalone"]}


@pytest.fixture(scope="module", autouse=True)
def _namespace(admin: AdminWorld) -> None:
    assert admin.put(NAMESPACE).status_code == 204


def test_labels_are_merged_read_and_cleared(admin: AdminWorld) -> None:
    path = f"{NAMESPACE}/properties"
    assert admin.get(path).json() == {}
    assert admin.put(path, json={"a": "1", "b": "2"}).status_code == 204
    assert admin.put(path, json={"b": "3"}).status_code == 204
    assert admin.get(path).json() == admin.get(NAMESPACE).json()["properties"] == {"a": "1", "b": "3"}
    assert admin.delete(path).status_code == 204
    assert admin.get(path).json() == {}
    assert admin.put(path, json={"a": 1}).status_code == 400
    assert admin.put(path, json={"a": "x" * 65_536}).status_code == 412


def test_one_label_is_plain_text(admin: AdminWorld) -> None:
    path = f"{NAMESPACE}/property/odd%2Fname"
    assert (admin.get(path).status_code, admin.get(path).content) == (204, b"")
    assert admin.put(f"{path}/50%25+of%20%C3%B6").status_code == 204
    found = admin.get(path)
    assert (found.status_code, found.text, found.headers["content-type"]) == (200, "50% of ö", "text/plain; charset=utf-8")
    assert admin.get(f"{NAMESPACE}/properties").json() == {"odd/name": "50% of ö"}
    removed = admin.delete(path)
    assert (removed.status_code, removed.text) == (200, "50% of ö")
    assert admin.delete(path).status_code == 204


def test_nobody_has_permissions_and_none_are_granted(admin: AdminWorld) -> None:
    topic = "/admin/v2/persistent/public/labels/t"
    admin.put(topic)
    for path in (f"{NAMESPACE}/permissions", f"{NAMESPACE}/permissions/subscription", f"{topic}/permissions"):
        assert (admin.get(path).status_code, admin.get(path).json()) == (200, {})
    for path in (f"{NAMESPACE}/permissions/role", f"{topic}/permissions/role", f"{NAMESPACE}/permissions/subscription/s"):
        granted = admin.post(path, json=["produce"])
        assert granted.status_code == 501
        assert "authorization" in granted.json()["reason"]
    assert admin.delete(f"{NAMESPACE}/permissions/role").status_code == 204
    assert admin.delete(f"{topic}/permissions/role").status_code == 412
    assert admin.get("/admin/v2/persistent/public/labels/nothing/permissions").status_code == 404
    assert admin.get(f"{NAMESPACES}/public/nowhere/permissions").status_code == 404


def test_a_namespace_is_in_this_cluster(admin: AdminWorld) -> None:
    assert admin.get(f"{NAMESPACE}/replication").json() == ["standalone"]
    assert admin.post(f"{NAMESPACE}/replication", json=["elsewhere"]).status_code == 501


def test_a_namespace_is_not_made_in_a_tenant_that_goes(admin: AdminWorld) -> None:
    """Whoever comes first wins; both succeeding would leave a namespace without a tenant."""
    outcomes = set()
    for round_number in range(30):
        tenant, namespace = f"{TENANTS}/race-{round_number}", f"{NAMESPACES}/race-{round_number}/ns"
        assert admin.put(tenant, json=HERE).status_code == 204

        async def race(tenant: str = tenant, namespace: str = namespace, late_ms: float = round_number / 10) -> tuple[int, int]:
            deleting = asyncio.ensure_future(admin.send("DELETE", tenant))
            await asyncio.sleep(late_ms / 1000)
            return (await admin.send("PUT", namespace)).status_code, (await deleting).status_code

        outcomes.add(admin.run(race()))
        made = admin.get(namespace).status_code == 200
        assert made == (admin.get(tenant).status_code == 200)
    assert outcomes <= {(204, 409), (404, 204)}, outcomes


def test_many_namespaces_of_one_tenant_are_made_at_once(admin: AdminWorld) -> None:
    admin.put(f"{TENANTS}/crowd", json=HERE)

    async def together() -> list[int]:
        calls = [admin.send("PUT", f"{NAMESPACES}/crowd/ns-{number}") for number in range(8)]
        return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert admin.run(together()) == [204] * 8
    assert len(admin.get(f"{NAMESPACES}/crowd").json()) == 8
