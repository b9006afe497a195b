"""Labels, permissions and clusters of namespaces, and races between tenants and namespaces."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_broker.admin import clusters_tenants
from cepheid_metadata import MetadataStore, list_namespaces
from tests.admin.admin_world import AdminWorld

NAMESPACES, TENANTS = "/admin/v2/namespaces", "/admin/v2/tenants"
NAMESPACE = f"{NAMESPACES}/public/labels"
HERE = {"allowedClusters": ["standalone"]}


@pytest.fixture(scope="module", autouse=True)
def _namespace(admin: AdminWorld) -> None:
    assert admin.put(NAMESPACE).status_code == 204


@pytest.mark.slow
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


def test_a_tenant_does_not_go_while_a_namespace_is_made_in_it(admin: AdminWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace comes between the look for namespaces and the deletion: both succeeding would leave it without a tenant."""
    tenant, namespace = f"{TENANTS}/race", f"{NAMESPACES}/race/ns"
    assert admin.put(tenant, json=HERE).status_code == 204

    async def list_and_let_others_come(store: MetadataStore, name: str) -> list[str]:
        found = await list_namespaces(store, name)
        assert (await admin.send("PUT", namespace)).status_code == 204
        return found

    monkeypatch.setattr(clusters_tenants, "list_namespaces", list_and_let_others_come)
    assert admin.delete(tenant).status_code == 409
    monkeypatch.undo()
    assert admin.get(tenant).status_code == admin.get(namespace).status_code == 200
    assert admin.delete(tenant).status_code == 409
    assert admin.delete(namespace).status_code == 204
    assert admin.delete(tenant).status_code == 204
    assert admin.put(namespace).status_code == 404


def test_many_namespaces_of_one_tenant_are_made_at_once(admin: AdminWorld) -> None:
    admin.put(f"{TENANTS}/crowd", json=HERE)

    async def together() -> list[int]:
        calls = [admin.send("PUT", f"{NAMESPACES}/crowd/ns-{number}") for number in range(8)]
        return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert admin.run(together()) == [204] * 8
    assert len(admin.get(f"{NAMESPACES}/crowd").json()) == 8
