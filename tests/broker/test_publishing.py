"""Producers: names, receipts, refusals, and that nothing is stored behind a failure."""

from __future__ import annotations

import logging

import pytest

from cepheid_wire import ServerError, add_checksum
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import full, message, send_frame
from tests.support import wait_until


async def test_trap_15_producer_success_has_every_field_that_some_client_requires() -> None:
    """A name unique in the cluster; schema_version present even when empty."""
    async with BrokerWorld() as world, await world.client() as client:
        answers = [await client.produce_on("t", producer_id) for producer_id in range(3)]
        assert len({answer.producer_name for answer in answers}) == 3
        for answer in answers:
            assert answer.producer_name
            assert answer.last_sequence_id == -1
            assert answer.HasField("schema_version")
            assert answer.schema_version == b""
            assert answer.producer_ready
        assert (await client.produce_on("t", 9, producer_name="mine")).producer_name == "mine"


async def test_trap_17_and_18_receipts_come_in_order_with_the_ids_of_the_sends() -> None:
    """Entry ids rise by one, whatever the sequence ids are."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.produce_on("t", 1)
        receipts = await client.publish(50, first_sequence_id=1000)
        assert [receipt.position[1] for receipt in receipts] == list(range(50))
        assert all(not receipt.body.HasField("highest_sequence_id") for receipt in receipts)
        send = pb.CommandSend(producer_id=1, sequence_id=7, highest_sequence_id=9, num_messages=3)
        client.send_bytes(send_frame(send, message(7, messages=3)))
        receipt = await client.expect(pb.CommandSendReceipt)
        assert (receipt.producer_id, receipt.sequence_id, receipt.highest_sequence_id) == (1, 7, 9)


async def test_trap_34_stored_bytes_are_those_of_the_send() -> None:
    """From 0x0e01 on, with fields that the broker does not know."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        unknown_field = b"\xfa\x3f\x03abc"  # number 1023, which no schema has
        plain = message(0, b"hello")
        metadata = plain[10:-5] + unknown_field
        odd = add_checksum(len(metadata).to_bytes(4, "big") + metadata + b"hello")
        batch_of_one = message(1, b"\x00\x00\x00\x04\x18\x05\x40\x00hello", messages=1)
        encrypted = message(2, b"\x07" * 40, encryption_keys=[pb.EncryptionKeys(key="k", value=b"v")], encryption_algo="a")
        compressed = message(3, b"zz", compression=pb.LZ4, uncompressed_size=100)
        tails = [odd, batch_of_one, encrypted, compressed]
        for sequence_id, tail in enumerate(tails):
            client.send_message(sequence_id, tail=tail)
            await client.expect(pb.CommandSendReceipt)
        await client.subscribe("t", "s", permits=100)
        assert [(await client.expect_message()).tail for _ in tails] == tails


async def test_a_send_without_checksum_is_delivered_with_one() -> None:
    """Go takes a message without checksum for damaged (protocol.md §1.2)."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        tail = message(0, b"hello")
        client.send_message(0, tail=tail[6:])
        await client.expect(pb.CommandSendReceipt)
        await client.subscribe("t", "s", permits=100)
        assert (await client.expect_message()).tail == tail


async def test_a_bad_checksum_fails_that_message_alone_and_in_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="cepheid_broker")
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        broken = bytearray(message(1, b"hello"))
        broken[-1] ^= 1
        client.send_message(0, b"before")
        client.send_message(1, tail=bytes(broken))
        client.send_message(2, b"after")
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
        error = await client.expect(pb.CommandSendError)
        assert (error.producer_id, error.sequence_id, error.error) == (0, 1, ServerError.CHECKSUM_ERROR)
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 2
        await client.subscribe("t", "s", permits=100)
        first, second = await client.expect_messages(2)
        assert first.tail.endswith(b"before")
        assert second.tail.endswith(b"after")
        await client.expect_nothing()
    assert [record.message for record in caplog.records] == ["publish.checksum_mismatch"]


async def test_metadata_that_no_consumer_can_read_closes_the_connection() -> None:
    async with BrokerWorld() as world:
        async with await world.client() as client:
            await client.produce_on("t")
            client.send_message(0, tail=add_checksum(b"\x00\x00\x00\x04\xff\xff\xff\xffhello"))
            await client.expect_closed()
        assert world.topic("t").ledger.last_confirmed.entry_id == -1


async def test_trap_09_a_message_of_the_largest_size_passes_and_a_larger_frame_closes() -> None:
    """The frame may exceed the message by its padding."""
    async with BrokerWorld(max_message_bytes=64 * 1024) as world:
        async with await world.client() as client:
            await client.produce_on("t")
            client.send_message(0, bytes(64 * 1024 + 9_000))
            await client.expect(pb.CommandSendReceipt)
            client.send_message(1, bytes(64 * 1024 + 11_000))
            await client.expect_closed()


async def test_a_name_in_use_is_refused_while_its_holder_lives() -> None:
    async with BrokerWorld() as world, await world.client() as holder, await world.client() as other:
        await holder.produce_on("t", producer_name="p")
        ask = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=3, producer_name="p")
        other.send(ask)
        await holder.expect_nothing(0.2)  # it answers the broker's PING
        refused = await other.expect(pb.CommandError)
        assert (refused.request_id, refused.error) == (3, ServerError.PRODUCER_BUSY)
        await other.produce_on("t2", producer_name="p")  # another topic


async def test_a_name_is_taken_over_from_a_holder_that_does_not_answer() -> None:
    settings = {"connection": {"liveness_probe_s": 0.2}}
    async with BrokerWorld(**settings) as world, await world.client() as dead, await world.client() as heir:
        await dead.produce_on("t", producer_name="p")
        assert (await heir.produce_on("t", producer_name="p")).producer_name == "p"
        dead.answer_pings = False
        await dead.expect_closed()
        await heir.publish(1)


async def test_the_same_producer_again_is_answered_again_and_a_greater_epoch_replaces_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        first = await client.produce_on("t")
        again = await client.produce_on("t")
        assert again.producer_name == first.producer_name
        replaced = await client.produce_on("t", epoch=1, producer_name=first.producer_name, user_provided_producer_name=False)
        assert replaced.producer_name == first.producer_name
        assert len(world.topic("t").producers) == 1
        await client.publish(1)


async def test_closing_waits_for_what_is_under_way_and_may_be_repeated() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", producer_name="p")
        for sequence_id in range(20):
            client.send_message(sequence_id)
        client.send(pb.CommandCloseProducer(producer_id=0, request_id=5))
        for sequence_id in range(20):
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == sequence_id
        assert (await client.expect(pb.CommandSuccess)).request_id == 5
        client.send(pb.CommandCloseProducer(producer_id=0, request_id=6))
        assert (await client.expect(pb.CommandSuccess)).request_id == 6
        await client.produce_on("t", producer_name="p")


async def test_trap_19_after_a_failed_append_nothing_is_stored_until_the_producer_is_opened_again() -> None:
    """Protocol §10.4: no SEND_ERROR, which would end the connection; the producer is closed and its SENDs dropped."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", producer_name="p")
        await client.publish(3)
        await client.subscribe("t", "s")
        await world.fence("t")
        for sequence_id in range(3, 8):
            client.send_message(sequence_id, b"lost %d" % sequence_id)
        assert (await client.expect(pb.CommandCloseProducer)).producer_id == 0
        assert (await client.expect(pb.CommandCloseConsumer)).consumer_id == 0
        await client.ping()  # the connection lives, and no receipt came
        await client.produce_on("t", producer_name="p", epoch=1, user_provided_producer_name=False)
        await client.publish(5, first_sequence_id=3)  # the client sends again from the first unanswered one on
        await client.subscribe("t", "s", permits=100)
        payloads = [m.tail.rsplit(b"payload ", 1)[1] for m in await client.expect_messages(8)]
        assert payloads == [b"%d" % n for n in range(8)]


async def test_an_unloaded_topic_answers_what_is_under_way_and_sends_its_clients_back() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s")
        for sequence_id in range(10):
            client.send_message(sequence_id)
        await client.drain()
        topic = world.topic("t")
        await wait_until(lambda: topic.published.entries + sum(p.pending_entries for p in topic.producers.values()) == 10)
        await world.broker.topics.unload(topic.name)
        for sequence_id in range(10):
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == sequence_id
        await client.expect(pb.CommandCloseProducer)
        await client.expect(pb.CommandCloseConsumer)
        await client.produce_on("t", epoch=1)
        await client.publish(1, first_sequence_id=10)


async def test_producing_to_a_deleted_topic_says_that_it_is_gone() -> None:
    async with BrokerWorld(topic_creation={"allowed": False}) as world, await world.client() as client:
        await world.create_topic("t")
        await client.produce_on("t")
        await client.publish(3)
        await world.broker.topics.delete(world.topic("t").name, force=True)
        await client.expect(pb.CommandCloseProducer)
        client.send_message(3)  # was on its way
        refused = await client.ask(pb.CommandProducer(topic=full("t"), producer_id=0, request_id=8, epoch=1), pb.CommandError)
        assert refused.error == ServerError.TOPIC_NOT_FOUND


async def test_a_producer_may_ask_for_a_first_subscription() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", initial_subscription_name="first")
        await client.publish(2)
        await client.subscribe("t", "first", permits=10, initialPosition=pb.CommandSubscribe.Latest)
        await client.expect_messages(2)
