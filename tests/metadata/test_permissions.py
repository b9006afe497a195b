"""Permissions on a namespace: how they change, and what deletes them."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_metadata import (
    MemoryStore,
    MemoryTree,
    NamespacePermissions,
    NamespaceRecord,
    NoSuchKeyError,
    PermissionsFullError,
    TenantRecord,
    change_permissions,
    delete_permissions_ops,
    delete_topic_permissions,
    grants_of,
    namespace_permissions,
    namespace_records,
    permission_changes,
)
from cepheid_wire import TopicName

NOUN = ("t", "n")


async def store_with_namespace() -> MemoryStore:
    store = MemoryStore(MemoryTree())
    await namespace_records(store).create(NOUN, NamespaceRecord())
    return store


def granting(role: str) -> NamespacePermissions:
    return NamespacePermissions(namespace={role: ("produce",)})


async def test_changes_at_the_same_time_are_all_kept() -> None:
    store = await store_with_namespace()

    def grant(role: str) -> asyncio.Future[NamespacePermissions]:
        return asyncio.ensure_future(
            change_permissions(store, *NOUN, lambda before: before.replace(namespace={**before.namespace, role: ("consume",)}))
        )

    await asyncio.gather(*(grant(f"role-{number}") for number in range(5)))
    found = await namespace_permissions(store).get(NOUN)
    assert found is not None
    assert len(found.record.namespace) == 5


async def test_nothing_is_granted_in_a_namespace_that_is_not_there_or_is_being_deleted() -> None:
    store = await store_with_namespace()
    namespaces = namespace_records(store)
    with pytest.raises(NoSuchKeyError, match="namespace t/other does not exist"):
        await change_permissions(store, "t", "other", lambda _: granting("a"))

    found = await namespaces.get(NOUN)
    assert found is not None
    await namespaces.replace(NOUN, found.record.replace(deleted=True), found.version)
    with pytest.raises(NoSuchKeyError):
        await change_permissions(store, *NOUN, lambda _: granting("a"))
    assert await namespace_permissions(store).get(NOUN) is None


async def test_too_many_permissions_are_refused_and_the_old_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission_changes, "MAX_PERMISSIONS_BYTES", 200)
    store = await store_with_namespace()
    await change_permissions(store, *NOUN, lambda _: granting("a"))
    with pytest.raises(PermissionsFullError, match=r"would have \d+ bytes, the limit is 200"):
        await change_permissions(store, *NOUN, lambda _: granting("a" * 200))
    found = await namespace_permissions(store).get(NOUN)
    assert found is not None
    assert found.record == granting("a")


async def test_what_creates_or_deletes_a_namespace_deletes_its_permissions() -> None:
    store = await store_with_namespace()
    assert await delete_permissions_ops(store, *NOUN) == []
    await change_permissions(store, *NOUN, lambda _: granting("a"))
    await store.multi([namespace_records(store).delete_op(NOUN), *await delete_permissions_ops(store, *NOUN)])
    assert await namespace_permissions(store).get(NOUN) is None


async def test_a_topic_that_is_deleted_takes_the_permissions_on_it_along() -> None:
    store = await store_with_namespace()
    topics = {f"persistent://t/n/{name}": {"a": ("produce",)} for name in ("x", "y")}
    await delete_topic_permissions(store, TopicName.parse("persistent://t/n/x"))  # there are none
    await change_permissions(store, *NOUN, lambda before: before.replace(topics=topics, namespace={"a": ("consume",)}))
    await delete_topic_permissions(store, TopicName.parse("persistent://t/n/x"))
    found = await namespace_permissions(store).get(NOUN)
    assert found is not None
    assert (list(found.record.topics), found.record.namespace) == (["persistent://t/n/y"], {"a": ("consume",)})


def test_grants_are_what_the_records_say() -> None:
    tenant = TenantRecord(admin_roles=("admin",))
    permissions = NamespacePermissions(
        namespace={"a": ("produce", "consume")}, topics={"persistent://t/n/x": {"b": ("consume",)}}, subscriptions={"s": ("b",)}
    )
    grants = grants_of(tenant, permissions)
    assert grants.tenant_admins == {"admin"}
    assert grants.namespace == {"a": {"produce", "consume"}}
    assert grants.topics == {"persistent://t/n/x": {"b": {"consume"}}}
    assert grants.subscriptions == {"s": {"b"}}
    assert grants_of(None, None).namespace == {}
