"""The permissions that one broker knows: read once, watched, dropped when they are gone, and too old after a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cepheid_broker.authorizer import ABSENT_S, MAX_ABSENT, Authorizer
from cepheid_metadata import (
    MemoryStore,
    MemoryTree,
    MetadataError,
    NamespacePermissions,
    NamespaceRecord,
    TenantRecord,
    Versioned,
    change_permissions,
    keys,
    namespace_permissions,
    namespace_records,
    tenant_records,
)
from cepheid_ports import TaskOwner
from cepheid_security import Decision, Need, Principal, Roles, decide
from cepheid_wire import NamespaceName, TopicName
from tests.broker.broker_world import OutageStore
from tests.support import run_virtual

ROLES = Roles(frozenset({"root"}))
TOPIC = TopicName.parse("persistent://t/n/x")
STALE_S = 60.0


class CountingStore(OutageStore):
    reads = 0

    async def get(self, key: str) -> Versioned | None:
        self.reads += 1
        return await super().get(key)


class World:
    def __init__(self) -> None:
        tree = MemoryTree()
        self.store = CountingStore(tree)
        self.operator = MemoryStore(tree)
        self.tasks = TaskOwner("test")
        self.authorizer = Authorizer(ROLES, STALE_S, self.store, self.tasks)
        self.changed: list[str | None] = []
        self.authorizer.on_changed.append(self.changed.append)

    async def permit(self, role: str | None, namespace: str = "n") -> None:
        grants = {} if role is None else {role: ("produce",)}
        await change_permissions(
            self.operator, "t", namespace, lambda _: NamespacePermissions.model_validate({"namespace": grants})
        )

    async def may_publish(self, role: str, topic: TopicName = TOPIC) -> bool:
        return (await self.authorizer.check(Principal(role, "token"), Need.PRODUCE, topic=topic)).allowed

    async def settle(self) -> None:
        await asyncio.sleep(0.1)  # of virtual time: everything that is ready is done


@asynccontextmanager
async def world_of() -> AsyncIterator[World]:
    world = World()
    await tenant_records(world.operator).create("t", TenantRecord(admin_roles=("admin",)))
    for name in ("n", "m"):
        await namespace_records(world.operator).create(("t", name), NamespaceRecord())
    try:
        yield world
    finally:
        await world.authorizer.aclose()
        await world.tasks.aclose()
        await world.store.aclose()
        await world.operator.aclose()


def test_permissions_are_read_once_and_followed() -> None:
    async def course() -> None:
        async with world_of() as world:
            await world.permit("a")
            assert await asyncio.gather(*(world.may_publish("a") for _ in range(10))) == [True] * 10
            reads = world.store.reads
            assert reads == 2, "one of the tenant, one of the namespace"
            assert not await world.may_publish("b")
            assert world.store.reads == reads
            await world.permit("b")
            await world.settle()
            assert (await world.may_publish("a"), await world.may_publish("b")) == (False, True)
            assert world.changed == ["t"]

    run_virtual(course())


def test_what_has_no_permissions_is_soon_forgotten_and_a_first_grant_is_seen_at_once() -> None:
    async def course() -> None:
        async with world_of() as world:
            for number in range(2 * MAX_ABSENT):
                assert not await world.may_publish("a", TopicName.parse(f"persistent://t/made-up-{number}/x"))
                assert not await world.may_publish("a", TopicName.parse(f"persistent://made-up-{number}/n/x"))
            assert repr(world.authorizer).startswith(f"<Authorizer {MAX_ABSENT} namespaces, 1 tenants")
            await asyncio.sleep(ABSENT_S + 0.1)
            assert repr(world.authorizer).startswith("<Authorizer 0 namespaces, 1 tenants, <WatchedRecords 1,")
            assert not await world.may_publish("a")
            await world.permit("a")
            await world.settle()
            assert await world.may_publish("a")
            await asyncio.sleep(ABSENT_S + 0.1)
            await world.permit(None)
            await world.settle()
            assert not await world.may_publish("a"), "still followed"

    run_virtual(course())


def test_denials_where_there_are_no_permissions_cost_one_read_a_second() -> None:
    async def course() -> None:
        async with world_of() as world:
            assert not await world.may_publish("a")
            reads = world.store.reads
            for _ in range(100):
                assert not await world.may_publish("b")
            assert world.store.reads == reads
            await asyncio.sleep(ABSENT_S + 0.1)
            assert not await world.may_publish("a")
            assert world.store.reads == reads + 1

    run_virtual(course())


def test_only_denied_requests_are_counted() -> None:
    async def course() -> None:
        async with world_of() as world:
            stranger = Principal("stranger", "token")
            await world.authorizer.check(stranger, Need.PRODUCE, topic=TOPIC, is_request=False)
            assert world.authorizer.denied == 0
            await world.authorizer.check(stranger, Need.PRODUCE, topic=TOPIC)
            assert world.authorizer.denied == 1

    run_virtual(course())


def test_two_namespaces_of_a_tenant_can_be_read_at_the_same_time() -> None:
    async def course() -> None:
        async with world_of() as world:
            await world.permit("a", "n")
            await world.permit("a", "m")
            other = TopicName.parse("persistent://t/m/x")
            assert await asyncio.gather(world.may_publish("a"), world.may_publish("a", other)) == [True, True]

    run_virtual(course())


def test_administrators_need_no_permissions_and_super_users_no_metadata() -> None:
    async def course() -> None:
        async with world_of() as world:
            assert await world.may_publish("admin")
            reads = world.store.reads
            assert await world.may_publish("admin", TopicName.parse("persistent://t/m/x"))
            assert world.store.reads == reads
            world.store.set_away(True)
            assert await world.may_publish("root", TopicName.parse("persistent://other/n/x"))
            with pytest.raises(MetadataError):
                await world.may_publish("a", TopicName.parse("persistent://other/n/x"))

    run_virtual(course())


def test_deleted_permissions_are_gone() -> None:
    async def course() -> None:
        async with world_of() as world:
            await world.permit("a")
            assert await world.may_publish("a")
            await namespace_permissions(world.operator).delete(("t", "n"), None)
            await world.settle()
            assert not await world.may_publish("a")
            await tenant_records(world.operator).delete("t", None)
            await world.settle()
            assert not await world.may_publish("admin")

    run_virtual(course())


def test_permissions_that_cannot_be_read_are_used_for_a_while_and_again_once_they_were_read() -> None:
    async def course() -> None:
        async with world_of() as world:
            await world.permit("a")
            assert await world.may_publish("a")
            world.store.set_away(True)
            await asyncio.sleep(STALE_S - 5)
            assert await world.may_publish("a")
            assert world.changed == []
            await asyncio.sleep(10)
            decision = await world.authorizer.check(Principal("a", "token"), Need.PRODUCE, topic=TOPIC)
            assert (decision.allowed, decision.temporary) == (False, True)
            assert "used for 60 s (authorization.stale_s)" in decision.rule
            assert not await world.may_publish("admin")
            assert (world.authorizer.denied, world.authorizer.out_of_date) == (2, 2)
            assert world.changed[0] is None, "what is open is looked at when the time is over"
            world.store.set_away(False)
            await asyncio.sleep(3)
            assert await world.may_publish("a")
            assert world.authorizer.out_of_date == 0
            assert world.changed[-1] is None, "and when it can be read again"

    run_virtual(course(), timeout_s=600)


def test_what_is_open_is_looked_at_again_also_when_the_outage_comes_long_after_an_ordinary_change() -> None:
    async def course() -> None:
        async with world_of() as world:
            await world.permit("a")
            assert await world.may_publish("a")
            await world.permit("b")
            await asyncio.sleep(2 * STALE_S)  # the change was read at once: nothing is too old when the time is over
            assert world.changed == ["t"]
            world.store.set_away(True)
            await asyncio.sleep(STALE_S + 1)
            assert world.changed == ["t", None]

    run_virtual(course(), timeout_s=600)


def test_short_outages_do_not_add_up() -> None:
    async def course() -> None:
        async with world_of() as world:
            await world.permit("a")
            assert await world.may_publish("a")
            for _ in range(5):
                world.store.set_away(True)
                await asyncio.sleep(STALE_S / 2)
                world.store.set_away(False)
                await asyncio.sleep(3)
                assert await world.may_publish("a")
            assert world.changed == []

    run_virtual(course(), timeout_s=600)


def test_a_record_that_cannot_be_understood_counts_as_one_that_cannot_be_read() -> None:
    async def course() -> None:
        async with world_of() as world:
            await world.permit("a")
            assert await world.may_publish("a")
            key = keys.permissions_key("t", "n")
            found = await world.operator.get(key)
            assert found is not None
            await world.operator.put(key, b'{"format": 99}', found.version)
            await asyncio.sleep(STALE_S / 2)
            assert await world.may_publish("a")
            await asyncio.sleep(STALE_S)
            assert not await world.may_publish("a")
            await world.operator.put(key, found.value, found.version + 1)
            await asyncio.sleep(3)
            assert await world.may_publish("a")

    run_virtual(course(), timeout_s=600)


def test_a_long_list_is_not_decided_topic_by_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = []

    def counted(*arguments: Any, **facts: Any) -> Decision:
        decisions.append(facts)
        return decide(*arguments, **facts)

    async def course() -> None:
        async with world_of() as world:
            await world.permit("other")
            namespace = NamespaceName("t", "n")
            await world.authorizer.check(Principal("a", "token"), Need.NAMESPACE_READ, namespace=namespace)
            monkeypatch.setattr("cepheid_broker.authorizer.decide", counted)
            topics = [TopicName.parse(f"persistent://t/n/{number}") for number in range(100)]
            assert world.authorizer.visible(Principal("a", "token"), topics, namespace) == []
            assert len(decisions) < 10

    run_virtual(course())


def test_lists_contain_only_what_a_role_may_use() -> None:
    async def course() -> None:
        async with world_of() as world:
            topics = [TopicName.parse(f"persistent://t/n/{name}") for name in ("x-partition-0", "x-partition-1", "y")]
            permissions = NamespacePermissions(topics={str(TOPIC): {"a": ("consume",)}}, namespace={"b": ("functions", "consume")})
            await change_permissions(world.operator, "t", "n", lambda _: permissions)
            namespace = NamespaceName("t", "n")
            assert world.authorizer.visible(Principal("a", "token"), topics, namespace) == [], "not read yet"
            await world.authorizer.check(Principal("a", "token"), Need.NAMESPACE_READ, namespace=namespace)
            shown = {
                role: world.authorizer.visible(Principal(role, "token"), topics, namespace) for role in ("a", "b", "c", "admin")
            }
            assert shown == {"a": topics[:2], "b": topics, "c": [], "admin": topics}

    run_virtual(course())
