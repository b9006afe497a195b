"""The admin API of two brokers: whichever is asked, the answer is that of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from cepheid_broker.ownership.ownership import Here
from cepheid_cli.admin import namespaces
from cepheid_metadata import topic_records
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.brokers_world import BrokersWorld, OneBroker
from tests.broker.scripted_client import full
from tests.plain_admin import AdminClient, AdminError
from tests.support import run_async, wait_until

pytestmark = pytest.mark.slow

TOPICS = "/admin/v2/persistent/public/default"
NAMESPACE = "/admin/v2/namespaces/public/default"
PARTS = 8


class Admin:
    """Of one broker; redirects are followed unless a test wants to see them."""

    def __init__(self, broker: OneBroker) -> None:
        self.client = httpx.AsyncClient(base_url=broker.admin_url, timeout=20, follow_redirects=True)

    async def __call__(self, method: str, path: str, **request: Any) -> httpx.Response:
        return await self.client.request(method, path, **request)


def two_brokers(test: Callable[[BrokersWorld, Admin, Admin], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with BrokersWorld(admin=True, **settings) as world:
            first, second = map(Admin, world.brokers)
            try:
                await test(world, first, second)
            finally:
                await first.client.aclose()
                await second.client.aclose()

    run_async(main())


async def partitioned(world: BrokersWorld, admin: Admin, name: str = "p") -> list[TopicName]:
    """A partitioned topic whose parts lie at both brokers, an entry in each."""
    assert (await admin("PUT", f"{TOPICS}/{name}/partitions", json=PARTS)).status_code == 204
    parts = [TopicName.parse(full(f"{name}-partition-{index}")) for index in range(PARTS)]
    for part in parts:
        owner = await world.owner_of(str(part))
        async with await owner.client() as client:
            await owner.ownership.locate(part, authoritative=True)
            await client.subscribe(str(part), "s")
            await client.produce_on(str(part), 1)
            await client.publish(1, producer_id=1)
    assert all(any(broker.ownership.owns(part) for part in parts) for broker in world.brokers)
    return parts


def test_a_call_on_another_brokers_topic_is_sent_there_with_its_query() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        owner, other = world.brokers
        topic = await world.topic_on(owner)
        assert (await second("PUT", f"{TOPICS}/{topic}")).status_code == 204, "a record: any broker makes it"
        asked = await second("GET", f"{TOPICS}/{topic}/stats?getPreciseBacklog=true", follow_redirects=False)
        assert asked.status_code == 307
        assert asked.headers["location"] == f"{owner.admin_url}{TOPICS}/{topic}/stats?getPreciseBacklog=true"
        followed = await second("GET", f"{TOPICS}/{topic}/stats")
        assert followed.status_code == 200
        assert f"http://{followed.json()['ownerBroker']}" == owner.admin_url
        assert not other.has_open(topic)
        start = {"ledgerId": -1, "entryId": -1, "properties": {"a": "b"}}
        assert (await second("PUT", f"{TOPICS}/{topic}/subscription/s", json=start)).status_code == 204, "the body goes along"
        properties = await first("GET", f"{TOPICS}/{topic}/subscription/s/properties")
        assert properties.json() == {"a": "b"}
        plan = await second("GET", f"/cepheid/v1/plan?topic={full(topic)}", follow_redirects=False)
        assert plan.headers["location"].startswith(f"{owner.admin_url}/cepheid/v1/plan?topic=")

    two_brokers(test)


def test_lookup_over_http() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        owner, other = world.brokers
        topic = await world.topic_on(owner)
        path = f"/lookup/v2/topic/persistent/public/default/{topic}"
        asked = await second("GET", path, follow_redirects=False)
        assert asked.status_code == 307
        assert asked.headers["location"] == f"{owner.admin_url}{path}?authoritative=false"
        found = (await second("GET", path)).json()
        assert (found["brokerUrl"], found["httpUrl"]) == (owner.service_url, owner.admin_url)
        bundle = await owner.ownership.bundle_of(TopicName.parse(full(topic)))
        await owner.ownership.release(bundle)
        chosen = await first("GET", path, follow_redirects=False)
        assert chosen.headers["location"] == f"{other.admin_url}{path}?authoritative=true"
        assert (await first("GET", path)).json()["brokerUrl"] == other.service_url

    two_brokers(test)


def test_a_partitioned_topic_is_one_topic_wherever_its_parts_lie() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        parts = await partitioned(world, first)
        for admin in (first, second):
            stats = (await admin("GET", f"{TOPICS}/p/partitioned-stats")).json()
            assert stats["msgInCounter"] == PARTS
            assert list(stats["partitions"]) == list(map(str, parts))
            assert stats["subscriptions"]["s"]["msgBacklog"] == PARTS
            owners = {part["ownerBroker"] for part in stats["partitions"].values()}
            assert owners == {urlsplit(broker.admin_url).netloc for broker in world.brokers}
            internal = (await admin("GET", f"{TOPICS}/p/partitioned-internalStats")).json()
            assert [part["numberOfEntries"] for part in internal["partitions"].values()] == [1] * PARTS
            assert (await admin("GET", f"{TOPICS}/p/subscriptions")).json() == ["s"]
            plan = (await admin("GET", f"/cepheid/v1/plan?topic={full('p')}")).json()
            assert [part["topic"] for part in plan["plans"]] == list(map(str, parts))
        assert (await second("PUT", f"{TOPICS}/p/subscription/new", json={"ledgerId": -1, "entryId": -1})).status_code == 204
        assert (await second("PUT", f"{TOPICS}/p/subscription/new")).status_code == 409
        assert (await first("PUT", f"{TOPICS}/p/subscription/new/properties", json={"k": "v"})).status_code == 204
        assert (await second("GET", f"{TOPICS}/p/subscription/new/properties")).json() == {"k": "v"}
        assert (await second("POST", f"{TOPICS}/p/subscription/s/skip_all")).status_code == 204
        stats = (await first("GET", f"{TOPICS}/p/partitioned-stats")).json()
        backlogs = {name: found["msgBacklog"] for name, found in stats["subscriptions"].items()}
        assert backlogs == {"s": 0, "new": PARTS}
        assert (await second("POST", f"{TOPICS}/p/subscription/new/expireMessages/0")).status_code in (204, 409)
        assert (await first("POST", f"{TOPICS}/p/subscription/s/resetcursor/0")).status_code == 204
        assert (await second("DELETE", f"{TOPICS}/p/subscription/new")).status_code == 204
        assert (await first("DELETE", f"{TOPICS}/p/subscription/new")).status_code == 404
        ends = await second("POST", f"{TOPICS}/p/terminate/partitions")
        assert sorted(map(int, ends.json())) == list(range(PARTS))
        assert (await first("PUT", f"{TOPICS}/p/unload")).status_code == 204
        assert not any(broker.has_open(str(part)) for broker in world.brokers for part in parts)

    two_brokers(test)


def test_a_subscription_with_a_consumer_at_another_broker_is_deleted_nowhere() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        parts = await partitioned(world, first)
        busy = next(part for part in parts if world.brokers[1].ownership.owns(part))
        async with await world.brokers[1].client() as client:
            await client.subscribe(str(busy), "s")
            refused = await first("DELETE", f"{TOPICS}/p/subscription/s")
            assert refused.status_code == 412, refused.text
            stats = (await first("GET", f"{TOPICS}/p/partitioned-stats")).json()
            assert all("s" in part["subscriptions"] for part in stats["partitions"].values())
            in_use = await first("DELETE", f"{TOPICS}/p/partitions")
            assert in_use.status_code == 412, in_use.text
            assert (await first("DELETE", f"{TOPICS}/p/subscription/s?force=true")).status_code == 204
            await client.expect(pb.CommandCloseConsumer)

    two_brokers(test)


def test_a_partitioned_topic_is_grown_and_deleted_by_any_broker() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        await partitioned(world, first)
        assert (await second("POST", f"{TOPICS}/p/partitions", json=2 * PARTS)).status_code == 204
        stats = (await first("GET", f"{TOPICS}/p/partitioned-stats")).json()
        assert len(stats["partitions"]) == 2 * PARTS
        assert all("s" in part["subscriptions"] for part in stats["partitions"].values()), "from the first entry on"
        busy = next(name for name, part in stats["partitions"].items() if world.brokers[0].ownership.owns(TopicName.parse(name)))
        async with await world.brokers[0].client() as client:
            await client.produce_on(busy)
            assert (await second("DELETE", f"{TOPICS}/p/partitions")).status_code == 412
            assert (await second("DELETE", f"{TOPICS}/p/partitions?force=true")).status_code == 204
            await client.expect(pb.CommandCloseProducer)
        assert (await first("GET", f"{TOPICS}/p/partitions")).status_code == 404
        assert not any(broker.has_open(name) for broker in world.brokers for name in stats["partitions"])

    two_brokers(test)


def test_two_brokers_create_grow_and_delete_the_same_topic_at_once() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        for number in range(5):
            path = f"{TOPICS}/same-{number}/partitions"
            made = await asyncio.gather(first("PUT", path, json=3), second("PUT", path, json=3))
            assert sorted(answer.status_code for answer in made) == [204, 409]
            grown = await asyncio.gather(first("POST", path, json=5), second("POST", path, json=6))
            assert {answer.status_code for answer in grown} <= {204, 409, 422}, "422: to fewer than there are by now"
            count = (await first("GET", path)).json()["partitions"]
            assert count == (await second("GET", path)).json()["partitions"]
            assert count in (5, 6)
            gone = await asyncio.gather(first("DELETE", f"{path}?force=true"), second("DELETE", f"{path}?force=true"))
            assert {answer.status_code for answer in gone} <= {204, 404}, [answer.text for answer in gone]
            assert await topic_records(world.store).get(TopicName.parse(full(f"same-{number}"))) is None

    two_brokers(test)


def test_unloading_a_namespace_and_a_bundle() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        parts = await partitioned(world, first)
        before = {part: open_at(world, part) for part in parts}
        assert (await second("PUT", f"{NAMESPACE}/unload")).status_code == 204
        assert not any(before[part] and open_at(world, part) == before[part] for part in parts), "each was handed over"
        target = world.brokers[1]
        bundles = (await first("GET", f"{NAMESPACE}/bundles")).json()["boundaries"]
        for start, end in pairwise(bundles):
            where = urlsplit(target.admin_url).netloc
            moved = await first("PUT", f"{NAMESPACE}/{start}_{end}/unload?destinationBroker={where}")
            assert moved.status_code == 204, moved.text
        for part in parts:
            assert await target.ownership.locate(part) == Here()
        nowhere = await first("PUT", f"{NAMESPACE}/{bundles[0]}_{bundles[1]}/unload?destinationBroker=nowhere:1")
        assert nowhere.status_code == 412
        assert "broker-1, broker-2" in nowhere.text
        owned = await first("GET", f"/admin/v2/brokers/standalone/{urlsplit(target.admin_url).netloc}/ownedNamespaces")
        assert len([name for name in owned.json() if name.startswith("public/default/")]) == 4
        world.brokers[0].ownership.drain()
        await wait_until(lambda: world.brokers[0].id in target.ownership.leaving)
        drained = await second("PUT", f"{NAMESPACE}/{bundles[0]}_{bundles[1]}/unload?destinationBroker={world.brokers[0].id}")
        assert (drained.status_code, "broker-1 is being drained" in drained.text) == (412, True)
        assert (await first("PUT", f"{NAMESPACE}/0x0_0x1/unload")).status_code == 412

    two_brokers(test)


def test_a_new_isolation_policy_unloads_what_its_scope_says() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        one, other = world.brokers
        path = "/admin/v2/clusters/standalone/namespaceIsolationPolicies/p"

        async def set_policy(broker: OneBroker, scope: str) -> None:
            body = {"namespaces": ["public/default"], "primary": [broker.id], "unload_scope": scope}
            answer = await first("POST", path, json=body)
            assert answer.status_code == 204, answer.text

        def unloads() -> int:
            return sum(broker.ownership.statistics().bundles_released for broker in world.brokers)

        parts = await partitioned(world, first)
        await set_policy(one, "none")
        assert unloads() == 0
        await set_policy(other, "changed")
        assert not any(one.ownership.owns(part) for part in parts)
        assert all([await other.ownership.locate(part) == Here() for part in parts])
        moved = unloads()
        await set_policy(other, "changed")
        assert unloads() == moved, "the same policy changes no namespace"
        await set_policy(other, "all_matching")
        assert unloads() > moved
        assert all([await other.ownership.locate(part) == Here() for part in parts])

    two_brokers(test)


def open_at(world: BrokersWorld, topic: object) -> list[str]:
    return [broker.ownership.broker_id for broker in world.brokers if broker.has_open(str(topic))]


def test_backlogs_and_subscriptions_of_a_whole_namespace() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        await partitioned(world, first)
        assert (await second("POST", f"{NAMESPACE}/clearBacklog/s")).status_code == 204
        stats = (await first("GET", f"{TOPICS}/p/partitioned-stats")).json()
        assert stats["subscriptions"]["s"]["msgBacklog"] == 0
        assert (await second("POST", f"{NAMESPACE}/clearBacklog")).status_code == 204
        assert (await first("POST", f"{NAMESPACE}/unsubscribe/s")).status_code == 204
        assert (await second("POST", f"{NAMESPACE}/unsubscribe/s")).status_code == 204, "as in Pulsar: nothing left is success"
        assert (await second("GET", f"{TOPICS}/p/subscriptions")).json() == []

    two_brokers(test)


def test_all_brokers_name_the_same_brokers_and_leader() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        addresses = [urlsplit(broker.admin_url).netloc for broker in world.brokers]
        for admin in (first, second):
            assert (await admin("GET", "/admin/v2/brokers")).json() == addresses
            assert (await admin("GET", "/admin/v2/brokers/standalone")).json() == addresses
            leader = (await admin("GET", "/admin/v2/brokers/leaderBroker")).json()
            assert leader == {"brokerId": addresses[0], "serviceUrl": f"http://{addresses[0]}"}
            assert (await admin("GET", "/admin/v2/brokers/health")).text == "ok", "each publishes to a topic of its own"
        world.brokers[0].session.expire()
        await wait_until(lambda: list(world.brokers[1].ownership.directory.brokers) == ["broker-2"])
        assert (await second("GET", "/admin/v2/brokers/leaderBroker")).json()["brokerId"] == addresses[1]
        world.brokers[0].session.renew()

    two_brokers(test)


def test_a_broker_counts_what_it_has_and_what_it_asks_of_others() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        await partitioned(world, first)
        assert (await first("GET", f"{TOPICS}/p/partitioned-stats")).status_code == 200

        async def figures(admin: Admin) -> dict[str, float]:
            lines = (await admin("GET", "/metrics")).text.splitlines()
            ours = [
                line.split()
                for line in lines
                if line.startswith(("cepheid_broker_b", "cepheid_broker_peer", "cepheid_broker_sess"))
            ]
            return {name.removeprefix("cepheid_broker_"): float(value) for name, value in ours}

        shown = [await figures(admin) for admin in (first, second)]
        assert [figure["brokers_known"] for figure in shown] == [2, 2]
        owned = [len(broker.ownership.owned_bundles()) for broker in world.brokers]
        assert [figure["bundles_owned"] for figure in shown] == owned
        assert shown[0]["peer_calls_total"] >= 1
        assert shown[0]["peer_calls_failed_total"] == shown[0]["bundles_lost_total"] == shown[0]["sessions_lost_total"] == 0
        world.brokers[0].session.expire()
        after = await figures(first)
        assert (after["bundles_lost_total"], after["sessions_lost_total"]) == (owned[0], 1)
        world.brokers[0].session.renew()

    two_brokers(test)


def test_a_part_whose_broker_does_not_answer_is_named() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        await partitioned(world, first)
        await world.brokers[1].admin.aclose()  # its records say that it is there
        failed = await first("GET", f"{TOPICS}/p/partitioned-stats")
        assert failed.status_code == 503
        assert "broker broker-2" in failed.json()["reason"]
        assert "p-partition-" in failed.json()["reason"]

    two_brokers(test, request_timeout_s=10.0)


def test_the_command_lines_client_follows_to_the_owner() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        owner, other = world.brokers
        topic = await world.topic_on(owner)
        await owner.broker.topics.get(TopicName.parse(full(topic)), may_create=True)
        client = AdminClient(other.admin_url)
        start = {"ledgerId": -1, "entryId": -1, "properties": {"a": "b"}}
        await asyncio.to_thread(client.put, f"{TOPICS}/{topic}/subscription/s", start)
        assert await asyncio.to_thread(client.get, f"{TOPICS}/{topic}/subscription/s/properties") == {"a": "b"}
        with pytest.raises(AdminError) as refused:
            await asyncio.to_thread(client.delete, f"{TOPICS}/{topic}/subscription/none")
        assert refused.value.status == 404

    two_brokers(test)


def test_a_bundle_is_moved_by_the_command_line() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        owner, other = world.brokers
        name = TopicName.parse(full(await world.topic_on(owner)))
        bundle = await owner.ownership.bundle_of(name)

        async def unload(*words: str) -> Result:
            asked = ["unload", "public/default", "--admin-url", other.admin_url, *words]
            return await asyncio.to_thread(CliRunner().invoke, namespaces.app, asked)

        for broker in (other, owner):
            done = await unload("--bundle", bundle.range, "--to", broker.id)
            assert done.exit_code == 0, done.output
            assert await broker.ownership.locate(name) == Here()
        assert (await unload("--to", other.id)).exit_code == 2, "brokers are given bundles, not namespaces"

    two_brokers(test)


def test_unused_partitions_of_both_brokers_go_together() -> None:
    async def test(world: BrokersWorld, first: Admin, second: Admin) -> None:
        assert (await first("PUT", f"{TOPICS}/p/partitions", json=PARTS)).status_code == 204
        policy = {
            "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
            "maxInactiveDurationSeconds": 1,
            "deleteWhileInactive": True,
        }
        nothing_is_kept = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
        assert (await first("POST", f"{NAMESPACE}/retention", json=nothing_is_kept)).status_code == 204
        assert (await first("POST", f"{NAMESPACE}/inactiveTopicPolicies", json=policy)).status_code == 204
        assert (await first("GET", f"{TOPICS}/p/partitioned-stats")).status_code == 200, "opens all"
        assert all(list(broker.broker.topics.loaded()) for broker in world.brokers)
        async with await world.brokers[1].client() as client:
            busy = next(topic.name for topic in world.brokers[1].broker.topics.loaded())
            await client.subscribe(str(busy), "s")
            await asyncio.sleep(2.5)
            assert (await first("GET", f"{TOPICS}/p/partitions")).json()["partitions"] == PARTS, "one of them has a client"
        await wait_until(lambda: sum(broker.broker.inactive.deleted for broker in world.brokers) > 0)
        assert (await first("GET", f"{TOPICS}/p/partitions")).status_code == 404
        assert not any(list(broker.broker.topics.loaded()) for broker in world.brokers)

    two_brokers(test, inactive_check_s=0.2, rate_window_s=0.1)
