"""Messages that a policy refuses: too large, too late, not encrypted."""

from __future__ import annotations

from cepheid_broker.policies.topic_policies import TopicPolicies
from cepheid_wire import ServerError, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.deduplicated_world import connect, publish, stored
from tests.broker.scripted_client import message


async def test_a_message_above_the_policys_size_is_refused_and_nothing_overtakes_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await connect(client)
        await publish(client, 0)
        world.topic("t").on_policies(TopicPolicies(max_message_bytes=1000))
        client.send_message(1, bytes(100))
        client.send_message(2, bytes(2000))
        client.send_message(3, bytes(100))
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 1
        error = await client.expect(pb.CommandSendError)
        assert (error.sequence_id, error.error) == (2, ServerError.NOT_ALLOWED_ERROR)
        assert "1000" in error.message
        assert (await client.expect(pb.CommandCloseProducer)).producer_id == 0
        await connect(client, epoch=1)
        await publish(client, 3)
        assert await stored(world) == [0, 1, 3]


async def test_a_message_that_asks_for_a_longer_delay_than_the_policy_allows_is_refused() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await connect(client)
        world.topic("t").on_policies(TopicPolicies(max_delay_ms=1000))
        for sequence_id, delay_ms in enumerate((1000, 1001)):
            tail = message(sequence_id, publish_time=10_000, deliver_at_time=10_000 + delay_ms)
            client.send_message(sequence_id, tail=tail)
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
        error = await client.expect(pb.CommandSendError)
        assert (error.sequence_id, error.error) == (1, ServerError.NOT_ALLOWED_ERROR)
        assert "1001 ms" in error.message
        await client.expect(pb.CommandCloseProducer)


async def test_a_message_that_is_not_encrypted_is_refused_where_the_policy_demands_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", encrypted=True)
        world.topic("t").on_policies(TopicPolicies(encryption_required=True))
        key = pb.EncryptionKeys(key="k", value=b"v")
        client.send_message(0, tail=message(0, encryption_keys=[key], encryption_algo="a"))
        client.send_message(1)
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
        assert (await client.expect(pb.CommandSendError)).sequence_id == 1
        await client.expect(pb.CommandCloseProducer)


async def test_a_batch_that_claims_more_messages_than_it_can_hold_is_refused_and_counted_nowhere() -> None:
    async with BrokerWorld() as world, await world.client() as client, await world.client() as consumer:
        await consumer.subscribe("t", "s", permits=2)
        await connect(client)
        await publish(client, 0)
        metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=(1 << 31) - 1)
        client.send_message(1, tail=encode_tail(metadata, bytes(100)))
        await client.expect_closed()
        await consumer.expect_message()
        figures = world.topic("t").figures()
        assert (figures.published.messages, figures.subscriptions[0].delivered.messages) == (1, 1)
        assert [held.permits for held in figures.subscriptions[0].consumers] == [1]
        assert await stored(world) == [0]
