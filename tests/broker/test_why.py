"""What `why` says in the situations that users complain of: the reason, whom it names, and the event that ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cepheid_broker.admin.why import answer
from cepheid_broker.dispatch.effects import Idle, Why
from cepheid_broker.policies.topic_policies import BacklogQuota, QuotaAction
from cepheid_broker.topics.subscription import Subscription
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.support import wait_until

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = (
    pb.CommandSubscribe.Exclusive,
    pb.CommandSubscribe.Shared,
    pb.CommandSubscribe.Failover,
    pb.CommandSubscribe.Key_Shared,
)


def subscription(world: BrokerWorld) -> Subscription:
    found = world.topic("t").subscriptions["s"]
    assert isinstance(found, Subscription)
    return found


def the_reason(world: BrokerWorld) -> Why:
    (why,) = subscription(world).why()
    return why


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER, SHARED, KEY_SHARED])
async def test_who_holds_the_backlog_once_everything_was_sent(kind: int) -> None:
    """The commonest complaint: a backlog that does not shrink, and a broker that has nothing left to send."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s", permits=10, subType=kind, consumer_name="forgets")
        if kind == FAILOVER:
            await client.expect(pb.CommandActiveConsumerChange)
        await client.publish(3)
        got = await client.expect_messages(3)
        client.acknowledge(got[0].position)
        await client.ping()
        why = the_reason(world)
        assert (why.idle, why.consumer, why.position) == (Idle.AT_END, "forgets", got[1].position)
        assert "not acknowledged" in why.details
        assert "negative acknowledgement" in why.until
        client.acknowledge(got[1].position, got[2].position)
        await client.ping()
        why = the_reason(world)
        assert (why.idle, why.consumer, why.position) == (Idle.AT_END, None, None)


async def test_nothing_is_promised_to_be_appended_to_a_topic_that_has_ended() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s", permits=10)
        await client.publish(1)
        await client.expect_messages(1)
        await world.topic("t").terminate()
        assert "terminated" in the_reason(world).until
        assert "an entry is appended" not in the_reason(world).until


async def test_a_seek_is_no_lack_of_consumers() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s", permits=10)
        subscription(world).begin_seek()
        assert the_reason(world).idle is Idle.SEEKING
        subscription(world).end_seek()
        assert the_reason(world).idle is Idle.NO_CONSUMER


async def test_a_quota_that_holds_producers_up_is_named_where_consumers_wait_for_them() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s", permits=10)
        topic = world.topic("t")
        await wait_until(lambda: the_reason(world).idle is Idle.AT_END)
        assert [each["reason"] for each in answer(topic, subscription(world))["reasons"]] == [Idle.AT_END.reason]
        topic.policies = replace(topic.policies, size_quota=BacklogQuota(10_000, QuotaAction.HOLD))
        topic.set_publish_blocked(QuotaAction.HOLD)
        quota = answer(topic, subscription(world))["reasons"][-1]
        assert quota["reason"] == Idle.PUBLISH_BLOCKED.reason
        assert "10000 bytes" in quota["details"]
        topic.set_publish_blocked(None)
        assert len(answer(topic, subscription(world))["reasons"]) == 1
