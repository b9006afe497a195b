"""Trap 7 of protocol.md §27: a field that is 0 or empty says something else than one that is not there, both ways.

With the scripted client: the official one always leaves these fields out, or always sends them (tests/e2e/test_traps_connection.py
has its zeros).
"""

from __future__ import annotations

from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import full, ident, message, subscribe

MODE = pb.ProducerAccessMode


async def test_trap_07_every_id_may_be_0_at_the_same_time() -> None:
    """Go and Java begin elsewhere, so that their first request is not the one that shows a test for truth."""
    async with BrokerWorld() as world, await world.client() as client:
        create = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=0, producer_name="p")
        assert (await client.ask(create, pb.CommandProducerSuccess)).HasField("request_id")
        client.send_message(0)
        receipt = await client.expect(pb.CommandSendReceipt)
        assert all(receipt.HasField(name) for name in ("producer_id", "sequence_id", "message_id"))
        ask = subscribe("t", "s", 0, 0, subType=pb.CommandSubscribe.Exclusive, initialPosition=pb.CommandSubscribe.Earliest)
        assert (await client.ask(ask, pb.CommandSuccess)).HasField("request_id")
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=1))
        got = await client.expect_message()
        assert got.body.message_id.HasField("entryId")
        client.acknowledge(got.position, request_id=0)
        answer = await client.expect(pb.CommandAckResponse)
        assert (answer.HasField("request_id"), answer.HasField("error"), answer.HasField("message")) == (True, False, False)
        for body, kind in (
            (pb.CommandCloseConsumer(consumer_id=0, request_id=0), pb.CommandSuccess),
            (pb.CommandCloseProducer(producer_id=0, request_id=0), pb.CommandSuccess),
        ):
            assert (await client.ask(body, kind)).HasField("request_id")


async def test_trap_07_a_batch_is_told_by_the_presence_of_its_count() -> None:
    """The last message id of a batch of one has batch index 0, that of a plain message has none; both hold one message."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s")
        for sequence_id, messages in ((0, 0), (1, 1)):
            client.send_message(sequence_id, tail=message(sequence_id, b"x", messages=messages))
            await client.expect(pb.CommandSendReceipt)
            last = await client.ask(pb.CommandGetLastMessageId(consumer_id=0, request_id=1), pb.CommandGetLastMessageIdResponse)
            assert last.last_message_id.HasField("batch_index") == bool(messages)
            assert last.last_message_id.batch_index == (0 if messages else -1)


async def test_trap_07_a_start_of_0_is_a_position_and_none_is_latest() -> None:
    """Entry 0 of ledger 0 is before everything; it is what a client that lost its place may send."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(2)
        await client.subscribe("t", "r0", 0, durable=False, start_message_id=ident((0, 0)), permits=10)
        await client.expect_messages(2)
        await client.subscribe("t", "r1", 1, durable=False, permits=10)
        await client.expect_nothing(0.05)


async def test_trap_07_a_seek_to_time_0_is_one_and_a_seek_to_nothing_is_refused() -> None:
    """Applications seek to time 0 for the beginning."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(2)
        await client.subscribe("t", "s", permits=10)
        await client.expect_messages(2)
        refused = await client.ask(pb.CommandSeek(consumer_id=0, request_id=0), pb.CommandError)
        assert (refused.request_id, refused.error) == (0, ServerError.METADATA_ERROR)
        client.send(pb.CommandSeek(consumer_id=0, request_id=0, message_publish_time=0))
        await client.expect(pb.CommandCloseConsumer)
        await client.expect(pb.CommandSuccess)
        await client.subscribe("t", "s", permits=10)
        await client.expect_messages(2)


async def test_trap_07_an_epoch_of_0_is_the_first_and_none_is_no_epoch() -> None:
    """Go sends 0 when it has none, also for shared producers (§9.2): they do not lose a topic that has had exclusive ones."""
    async with BrokerWorld() as world, await world.client() as client:
        fresh = await client.produce_on("t", 0, producer_name="go")
        assert not fresh.HasField("topic_epoch")
        await client.ask(pb.CommandCloseProducer(producer_id=0, request_id=1), pb.CommandSuccess)
        for epoch in range(2):
            answer = await client.produce_on("t", 1, producer_name="x", producer_access_mode=MODE.Exclusive)
            assert (answer.HasField("topic_epoch"), answer.topic_epoch) == (True, epoch)
            await client.ask(pb.CommandCloseProducer(producer_id=1, request_id=1), pb.CommandSuccess)
        shared = await client.produce_on("t", 0, producer_name="go", epoch=1, topic_epoch=0)
        assert (shared.producer_name, shared.topic_epoch) == ("go", 1)
        await client.ask(pb.CommandCloseProducer(producer_id=0, request_id=1), pb.CommandSuccess)
        again = pb.CommandProducer(topic=full("t"), producer_id=2, request_id=2, producer_name="x", topic_epoch=0)
        again.producer_access_mode = MODE.Exclusive
        assert (await client.ask(again, pb.CommandError)).error == ServerError.PRODUCER_FENCED


async def test_trap_07_an_empty_producer_name_is_none() -> None:
    """Go sends the field always: two producers without a name are not two of one name."""
    async with BrokerWorld() as world, await world.client() as client:
        names = {(await client.produce_on("t", producer_id, producer_name="")).producer_name for producer_id in range(3)}
        assert len(names) == 3
        assert all(names)


async def test_trap_07_an_error_code_of_0_would_be_a_failure() -> None:
    """C++ takes CONSUMER_STATS_RESPONSE for failed when the code is there, even 0, and a schema's likewise (§5)."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s")
        stats = await client.ask(pb.CommandConsumerStats(consumer_id=0, request_id=0), pb.CommandConsumerStatsResponse)
        assert not stats.HasField("error_code")
        missing = await client.ask(pb.CommandConsumerStats(consumer_id=1, request_id=0), pb.CommandConsumerStatsResponse)
        assert (missing.error_code, bool(missing.error_message)) == (ServerError.CONSUMER_NOT_FOUND, True)
        ask = pb.CommandGetSchema(topic=full("t"), request_id=0)
        assert (await client.ask(ask, pb.CommandGetSchemaResponse)).error_code == ServerError.TOPIC_NOT_FOUND
        ask.schema_version = b""
        assert not (await client.ask(ask, pb.CommandGetSchemaResponse)).HasField("error_code")
        ask.schema_version = b"1"
        assert (await client.ask(ask, pb.CommandGetSchemaResponse)).error_code == ServerError.INCOMPATIBLE_SCHEMA
