"""Clients of a topic that has no ledger to append to, since its only bookie is read-only."""

from __future__ import annotations

from cepheid_broker.admin.pulsar_metrics import backlog_families
from cepheid_broker.admin.why import answer
from cepheid_broker.dispatch.effects import Idle
from cepheid_broker.topics.subscription import Subscription
from cepheid_wire import ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.support import wait_until


async def test_consumers_go_on_and_producers_are_told_the_reason() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s")
        await client.publish(3)
        world.writable.clear()
        await world.broker.topics.unload(TopicName.parse("t"))
        async with await world.client() as client:
            await client.subscribe("t", "s", permits=10)
            got = await client.expect_messages(3)
            await client.acknowledge_saved(got[0].position)
            refused = await client.ask(pb.CommandProducer(topic="t", producer_id=1, request_id=77), pb.CommandError)
            assert refused.error == ServerError.SERVICE_NOT_READY, "official clients try again"
            assert "no open ledger" in refused.message
            assert "0 are available" in refused.message

            topic = world.topic("t")
            subscription = topic.subscriptions["s"]
            assert isinstance(subscription, Subscription)
            client.acknowledge(got[1].position, got[2].position)
            await wait_until(lambda: subscription.figures().backlog_entries == 0)
            reason = answer(topic, subscription)["reasons"][-1]
            assert reason["reason"] == Idle.NO_OPEN_LEDGER.reason
            assert "0 are available" in reason["details"]

            assert gauge(world, "cepheid_broker_topics_without_open_ledger") == 1

            world.writable.append("bookie-1")
            await client.produce_on("t", 2)
            await client.publish(1, producer_id=2)
            await client.expect_message()
            assert Idle.NO_OPEN_LEDGER.reason not in str(answer(topic, subscription))
            assert gauge(world, "cepheid_broker_topics_without_open_ledger") == 0


async def test_a_consumer_may_come_first_to_a_topic_that_never_had_a_ledger() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        world.writable.clear()
        await client.subscribe("t", "s", permits=10)
        last = await client.ask(pb.CommandGetLastMessageId(consumer_id=0, request_id=78), pb.CommandGetLastMessageIdResponse)
        assert last.last_message_id.entryId == (1 << 64) - 1, "there is none"
        refused = await client.ask(pb.CommandProducer(topic="t", producer_id=1, request_id=77), pb.CommandError)
        assert "no open ledger" in refused.message

        world.writable.append("bookie-1")
        await client.produce_on("t", 2)
        await client.publish(1, producer_id=2)
        await client.acknowledge_saved((await client.expect_message()).position)


def gauge(world: BrokerWorld, name: str) -> float:
    (family,) = (family for family in backlog_families(world.broker) if family.name == name)
    (sample,) = family.samples
    return sample.value
