"""Permissions that brokers follow in a real ZooKeeper: how soon a change is in force, and what a cut connection does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cepheid_broker.authorizer import Authorizer
from cepheid_metadata import (
    NamespacePermissions,
    NamespaceRecord,
    TenantRecord,
    change_permissions,
    namespace_records,
    tenant_records,
)
from cepheid_metadata.zookeeper_store import ZooKeeperStore
from cepheid_ports import Ports, TaskOwner
from cepheid_security import Need, Principal, Roles
from cepheid_wire import TopicName
from tests.support import wait_until
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_support import new_chroot, shared_zookeeper

TOPIC = TopicName.parse("persistent://t/n/x")
WRITER = Principal("writer", "token")
STALE_S = 2.0


@asynccontextmanager
async def store_at(address: str, root: str) -> AsyncIterator[ZooKeeperStore]:
    store = await ZooKeeperStore.open([address], Ports(), root=root, session_timeout_s=30.0)
    try:
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def broker_at(address: str, root: str) -> AsyncIterator[Authorizer]:
    async with store_at(address, root) as store:
        tasks = TaskOwner("broker")
        authorizer = Authorizer(Roles(), STALE_S, store, tasks)
        try:
            yield authorizer
        finally:
            await authorizer.aclose()
            await tasks.aclose()


def may_publish(authorizer: Authorizer) -> bool:
    decision = authorizer.check_now(WRITER, Need.PRODUCE, topic=TOPIC)
    assert decision is not None
    return decision.allowed


async def permit(store: ZooKeeperStore, *roles: str) -> None:
    grants = NamespacePermissions(namespace=dict.fromkeys(roles, ("produce",)))
    await change_permissions(store, "t", "n", lambda _: grants)


async def prepare(store: ZooKeeperStore) -> None:
    await tenant_records(store).create("t", TenantRecord())
    await namespace_records(store).create(("t", "n"), NamespaceRecord())
    await permit(store, "writer")


async def test_a_change_is_in_force_at_all_brokers_within_a_second() -> None:
    address, root = shared_zookeeper().address, new_chroot()
    async with store_at(address, root) as store, broker_at(address, root) as one, broker_at(address, root) as other:
        await prepare(store)
        for broker in (one, other):
            assert (await broker.check(WRITER, Need.PRODUCE, topic=TOPIC)).allowed
        for roles, expected in (((), False), (("writer",), True), (("somebody",), False)):
            since = time.monotonic()
            await permit(store, *roles)
            await wait_until(lambda expected=expected: [may_publish(one), may_publish(other)] == [expected] * 2)
            assert time.monotonic() - since < 1.0


async def test_a_broker_that_is_cut_off_denies_after_a_while_and_knows_what_it_missed() -> None:
    address, root = shared_zookeeper().address, new_chroot()
    with TcpProxy(address) as proxy:
        async with store_at(address, root) as store, broker_at(proxy.address, root) as broker:
            await prepare(store)
            assert (await broker.check(WRITER, Need.PRODUCE, topic=TOPIC)).allowed
            proxy.refuse()
            await permit(store, "somebody")
            await asyncio.sleep(0.2)
            assert may_publish(broker), "it cannot know better yet"
            await wait_until(lambda: not may_publish(broker), timeout_s=10 + STALE_S)
            decision = broker.check_now(WRITER, Need.PRODUCE, topic=TOPIC)
            assert decision is not None
            assert decision.temporary
            proxy.heal()
            await wait_until(
                lambda: (found := broker.check_now(WRITER, Need.PRODUCE, topic=TOPIC)) is not None and not found.temporary
            )
            assert not may_publish(broker)
            await permit(store, "writer")
            await wait_until(lambda: may_publish(broker))
