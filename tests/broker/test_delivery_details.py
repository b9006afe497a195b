"""What a subscription does besides delivering: moves without acknowledgements, epochs, policies, the end of a topic, statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cepheid_broker.dispatch.key_hash import hash_of_key
from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError, SubscriptionNotFoundError
from cepheid_broker.topics.subscription import Subscription
from cepheid_metadata import Position, cursor_records
from cepheid_wire import ServerError, TopicName, split_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import PUBLISH_TIME_MS, ScriptedClient, ident, message, subscribe
from tests.support import wait_until

EXCLUSIVE, SHARED, FAILOVER = pb.CommandSubscribe.Exclusive, pb.CommandSubscribe.Shared, pb.CommandSubscribe.Failover
EARLIEST, LATEST = (-1, -1), ((1 << 63) - 1, (1 << 63) - 1)
TOPIC = TopicName.parse("persistent://public/default/t")


def entries(received: list[Any]) -> list[int]:
    return [m.position[1] for m in received]


def flow(client: ScriptedClient, permits: int, consumer_id: int = 0) -> None:
    client.send(pb.CommandFlow(consumer_id=consumer_id, messagePermits=permits))


def subscription(world: BrokerWorld, name: str = "s") -> Subscription:
    return world.topic("t").subscriptions[name]


async def java_client(world: BrokerWorld) -> ScriptedClient:
    client = await world.client(handshake=False)
    await client.ask(pb.CommandConnect(client_version="Pulsar-Java-v4.1.0", protocol_version=21), pb.CommandConnected)
    return client


# Moves without acknowledgements


async def test_an_entry_that_nobody_may_read_yet_is_neither_skipped_nor_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that broke was recovered, and what it has is not in the chain's record yet (seed 0x10b9af849)."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(5)
        await client.subscribe("t", "s", permits=0)
        ledger = world.topic("t").ledger
        last = ledger.last_confirmed
        with monkeypatch.context() as earlier:
            earlier.setattr(ledger, "last_confirmed", Position(last.ledger_id, 2))
            assert await subscription(world).skip(1) == 1
            assert await subscription(world).skip(3) == 2
            assert await subscription(world).skip(1) == 0
            assert await subscription(world).expire_until(last) == 0
        assert await subscription(world).skip(10) == 2


async def test_an_exclusive_consumer_goes_on_behind_what_was_skipped() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(20)
        await client.subscribe("t", "s", permits=3)
        got = await client.expect_messages(3)
        client.acknowledge(got[1].position)
        await client.ping()
        assert await subscription(world).skip(5) == 5  # 0, 2, 3, 4, 5
        flow(client, 2)
        assert entries(await client.expect_messages(2)) == [6, 7]
        assert await subscription(world).expire_until(Position(got[0].position[0], 9)) == 4
        assert await subscription(world).expire_until(Position(got[0].position[0], 3)) == 0, "never back"
        flow(client, 2)
        assert entries(await client.expect_messages(2)) == [10, 11]
        assert await subscription(world).skip(0) == 0
        assert await subscription(world).skip(1_000) == 10
        assert await subscription(world).clear_backlog() == 0
        figures = subscription(world).figures()
        assert (figures.backlog_entries, figures.expired_entries) == (0, 4)
        flow(client, 10)
        await client.publish(1, first_sequence_id=20)
        assert entries(await client.expect_messages(1)) == [20]


async def test_a_shared_consumer_is_free_of_what_was_cleared_and_gets_what_comes() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        world.topic("t").on_policies(replace(world.topic("t").policies, max_unacked_per_consumer=4))
        await client.publish(4)
        await client.subscribe("t", "s", permits=100, subType=SHARED)
        await client.expect_messages(4)
        await client.publish(6, first_sequence_id=4)
        assert subscription(world).figures().consumers[0].is_blocked
        assert await subscription(world).clear_backlog() == 10
        consumer = subscription(world).figures().consumers[0]
        assert (consumer.unacked_messages, consumer.is_blocked) == (0, False)
        await client.publish(1, first_sequence_id=10)
        assert entries(await client.expect_messages(1)) == [10]


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER])
async def test_what_was_cleared_is_not_read(kind: int) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(5)
        await client.subscribe("t", "s", subType=kind)
        await subscription(world).clear_backlog()
        flow(client, 10)
        await wait_until(lambda: "appended" in subscription(world).figures().idle)
        figures = subscription(world).figures()
        assert figures.read_position == Position(figures.mark_delete.ledger_id, 5)
        assert figures.delivered.entries == 0


async def test_moves_are_durable_when_they_return() -> None:
    """The record is what a crash leaves."""
    async with BrokerWorld() as world, await world.client() as client:

        async def recorded() -> Position:
            found = await cursor_records(world.store).get((TOPIC, "s"))
            assert found is not None
            return found.record.mark_delete

        await client.produce_on("t")
        await client.publish(10)
        await client.subscribe("t", "s")
        ledger_id = world.topic("t").ledger.last_confirmed.ledger_id
        await subscription(world).skip(4)
        assert await recorded() == Position(ledger_id, 3)
        await subscription(world).expire_until(Position(ledger_id, 6))
        assert await recorded() == Position(ledger_id, 6)
        await subscription(world).clear_backlog()
        assert await recorded() == Position(ledger_id, 9)


async def test_moves_are_refused_during_a_seek_and_outlive_a_takeover() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(10)
        await client.subscribe("t", "s")
        await subscription(world).skip(4)
        await world.fence("t")  # what crashes: nothing can be saved any more
        assert subscription(world).cursor.backlog_entries == 6
        subscription(world).begin_seek()
        for move in (subscription(world).skip(1), subscription(world).clear_backlog()):
            with pytest.raises(ServiceNotReadyError):
                await move
        subscription(world).end_seek()
        await world.broker.topics.unload(TOPIC)
        topic = await world.broker.topics.get(TOPIC, may_create=False)
        assert topic.subscriptions["s"].cursor.backlog_entries == 6


async def test_subscription_properties_come_with_the_first_subscribe_and_can_be_replaced() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        first = [pb.KeyValue(key="team", value="a")]
        await client.subscribe("t", "s", 0, subType=SHARED, subscription_properties=first)
        await client.subscribe("t", "s", 1, subType=SHARED, subscription_properties=[pb.KeyValue(key="team", value="b")])
        assert subscription(world).cursor.properties == {"team": "a"}
        await world.topic("t").set_subscription_properties("s", {"owner": "ü"})
        with pytest.raises(SubscriptionNotFoundError):
            await world.topic("t").set_subscription_properties("other", {})
        with pytest.raises(NotAllowedError, match="65536 bytes"):
            await world.topic("t").set_subscription_properties("s", {"k": "v" * 65_536})
        await world.broker.topics.unload(TOPIC)
        topic = await world.broker.topics.get(TOPIC, may_create=False)
        assert topic.subscriptions["s"].cursor.properties == {"owner": "ü"}


async def test_properties_of_a_readers_subscription_are_kept_while_it_lives() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        first = [pb.KeyValue(key="team", value="a")]
        await client.subscribe("t", "r", durable=False, subscription_properties=first)
        assert subscription(world, "r").cursor.properties == {"team": "a"}
        await world.topic("t").set_subscription_properties("r", {"owner": "b"})
        assert subscription(world, "r").figures().properties == {"owner": "b"}
        await client.ask(pb.CommandCloseConsumer(consumer_id=0, request_id=5), pb.CommandSuccess)
        await client.subscribe("t", "r", durable=False)
        assert subscription(world, "r").cursor.properties == {}


# Readers of some keys


def key_hash_range(first: int, last: int) -> pb.KeySharedMeta:
    """As `keyHashRange` of a Java reader."""
    return pb.KeySharedMeta(keySharedMode=pb.STICKY, hashRanges=[pb.IntRange(start=first, end=last)])


@pytest.mark.parametrize("topic", ["t", "non-persistent://public/default/t"])
async def test_readers_of_hash_ranges_share_a_topic_without_gap_or_overlap(topic: str) -> None:
    """Some keys come before the readers, which read them from storage (a topic that stores nothing has none), the others after."""
    middle, keys = 30_000, [b"key-%d" % n for n in range(40)]
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on(topic)

        async def publish(first: int) -> None:
            for n in range(first, first + 20):
                client.send_message(n, tail=message(n, keys[n], partition_key=keys[n].decode()))
                await client.expect(pb.CommandSendReceipt)

        if topic == "t":
            await publish(0)
        readers = [await world.client(), await world.client()]
        for reader, (first, last) in zip(readers, [(0, middle - 1), (middle, 65_535)], strict=True):
            sharing = key_hash_range(first, last)
            name = f"reader-{first}"
            await reader.subscribe(topic, name, durable=False, start_message_id=ident(EARLIEST), keySharedMeta=sharing, permits=100)
        await publish(20)
        expected = keys if topic == "t" else keys[20:]
        for reader, is_lower in zip(readers, (True, False), strict=True):
            mine = [key for key in expected if (hash_of_key(key) < middle) is is_lower]
            assert mine
            got = await reader.expect_messages(len(mine))
            assert [bytes(split_tail(each.tail)[1]) for each in got] == mine
            await reader.ping()
            await reader.close()


# Counts


async def test_delivery_counts_outlive_the_broker_and_end_with_the_acknowledgement() -> None:
    """Trap 33, through an unload: the topic is opened again from its records."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "s", permits=100, subType=SHARED)
        got = await client.expect_messages(3)
        for count in (1, 2):
            client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, message_ids=[ident(got[1].position)]))
            assert (await client.expect_message()).body.redelivery_count == count
        await world.broker.topics.unload(TOPIC)
        for _ in range(2):
            assert isinstance((await client.receive()).body, pb.CommandCloseConsumer | pb.CommandCloseProducer)  # type: ignore[union-attr]
        await client.subscribe("t", "s", permits=100, subType=SHARED)
        again = await client.expect_messages(3)
        assert [m.body.redelivery_count for m in again] == [0, 2, 0]
        client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, message_ids=[ident(got[1].position)]))
        assert (await client.expect_message()).body.redelivery_count == 3
        await client.acknowledge_saved(got[1].position)
        assert not subscription(world).cursor.redelivery_counts_in(got[1].position[0])


# Epochs (protocol.md §14, §16)


def epochs(received: list[Any]) -> list[int | None]:
    return [m.body.consumer_epoch if m.body.HasField("consumer_epoch") else None for m in received]


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])
async def test_messages_carry_the_newest_epoch_of_their_consumer(kind: int) -> None:
    async with BrokerWorld() as world, await java_client(world) as client:
        await client.produce_on("t")
        await client.publish(2)
        await client.subscribe("t", "s", subType=kind, consumer_epoch=0)
        if kind == FAILOVER:
            await client.expect(pb.CommandActiveConsumerChange)
        flow(client, 100)
        assert epochs(await client.expect_messages(2)) == [0, 0]
        for epoch in (1, 2):
            client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, consumer_epoch=epoch))
            assert epochs(await client.expect_messages(2)) == [epoch, epoch]
        client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, consumer_epoch=1))
        assert epochs(await client.expect_messages(2)) == [2, 2], "it never falls"


@pytest.mark.parametrize("fields", [{}, {"consumer_epoch": (1 << 64) - 1}])
async def test_without_an_epoch_nothing_is_stamped(fields: dict[str, int]) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(1)
        await client.subscribe("t", "s", permits=100, **fields)
        assert epochs(await client.expect_messages(1)) == [None]
        client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, consumer_epoch=5))
        assert epochs(await client.expect_messages(1)) == [None]


# Seek into a batch (protocol.md §17)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_seek_into_a_batch_with_words_hides_earlier_messages_and_with_an_index_alone_hides_none(durable: bool) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3, messages=4)
        await client.subscribe("t", "s", permits=100, durable=durable, start_message_id=ident(EARLIEST))
        batch = (await client.expect_messages(3))[1].position
        for fields, words in (({"ack_set": [0b1100]}, [0b1100]), ({"batch_index": 2}, []), ({"ack_set": [0, 0]}, [])):
            client.send(pb.CommandSeek(consumer_id=0, request_id=7, message_id=ident(batch, **fields)))
            await client.expect(pb.CommandCloseConsumer)
            await client.expect(pb.CommandSuccess)
            await client.subscribe("t", "s", permits=100, durable=durable, start_message_id=ident(LATEST))
            again = await client.expect_messages(2)
            assert entries(again) == [1, 2]
            assert [list(m.body.ack_set) for m in again] == [words, []]


@pytest.mark.parametrize("words", [[0b1100, 0b111111], [0, 0b100000]])
async def test_a_seek_into_a_batch_of_more_than_64_messages_hides_none_of_the_later_ones(words: list[int]) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(2, messages=70)
        await client.subscribe("t", "s", permits=1000)
        batch = (await client.expect_messages(2))[0].position
        client.send(pb.CommandSeek(consumer_id=0, request_id=7, message_id=ident(batch, ack_set=words)))
        await client.expect(pb.CommandCloseConsumer)
        await client.expect(pb.CommandSuccess)
        await client.subscribe("t", "s", permits=1000)
        again = await client.expect_messages(2)
        assert [list(m.body.ack_set) for m in again] == [words, []]


# Acknowledgements that mean nothing


async def test_acknowledgements_twice_of_others_and_of_the_future_are_counted_and_change_nothing() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "s", permits=100, subType=SHARED)
        got = await client.expect_messages(3)
        ledger = got[0].position[0]
        for _ in range(2):
            client.acknowledge(got[0].position, (ledger + 1, 0), (ledger, 3), (1 << 40, 7))
        part = pb.MessageIdData(ledgerId=ledger, entryId=99, ack_set=[1])
        client.send(pb.CommandAck(consumer_id=0, ack_type=pb.CommandAck.Individual, message_id=[part]))
        huge = pb.MessageIdData(ledgerId=ledger, entryId=1, ack_set=[1] * 5_000)
        client.send(pb.CommandAck(consumer_id=0, ack_type=pb.CommandAck.Individual, message_id=[huge]))
        await client.ping()
        figures = subscription(world).figures()
        assert (figures.acked_entries, figures.backlog_entries) == (1, 2)
        assert subscription(world).cursor.refused_acks == 8


async def test_a_cumulative_acknowledgement_ahead_of_delivery_is_taken_over() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(10)
        await client.subscribe("t", "s", permits=2)
        ledger = (await client.expect_messages(2))[0].position[0]
        client.acknowledge((ledger, 6), cumulative=True)
        flow(client, 100)
        assert entries(await client.expect_messages(3)) == [7, 8, 9]


# Policies and names


async def refused(client: ScriptedClient, name: str = "s", **fields: Any) -> pb.CommandError:
    client.send(subscribe("t", name, 0, 500, **{"subType": EXCLUSIVE, **fields}))
    return await client.expect(pb.CommandError)


@pytest.mark.parametrize(
    ("policy", "fields", "code", "text"),
    [
        (
            {"subscription_types": frozenset({"Shared", "Failover"})},
            {},
            ServerError.NOT_ALLOWED_ERROR,
            "allowed are Failover, Shared",
        ),
        ({"auto_subscription_creation": False}, {"name": "new"}, ServerError.NOT_ALLOWED_ERROR, "SubscriptionNotFound"),
        ({"max_consumers_per_subscription": 1}, {"subType": SHARED}, ServerError.CONSUMER_BUSY, "1 are allowed"),
        ({"max_consumers": 1}, {"name": "new"}, ServerError.CONSUMER_BUSY, "1 are allowed"),
        ({"max_subscriptions": 1}, {"name": "new"}, ServerError.CONSUMER_BUSY, "1 are allowed"),
        ({"max_subscriptions": 1}, {"name": "r", "durable": False}, ServerError.CONSUMER_BUSY, "1 are allowed"),
    ],
)
async def test_policies_refuse_with_a_code_that_fails_at_once(
    policy: dict[str, Any], fields: dict[str, Any], code: ServerError, text: str
) -> None:
    async with BrokerWorld() as world, await world.client() as client, await world.client() as other:
        await other.subscribe("t", "s", subType=SHARED)
        world.topic("t").on_policies(replace(world.topic("t").policies, **policy))
        error = await refused(client, **fields)
        assert error.error == code
        assert text in error.message
        await client.expect_nothing(0.05)  # no CLOSE_CONSUMER: the code alone is enough (§12.4)


async def test_without_creation_by_use_what_exists_and_readers_are_served() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        topic = world.topic("t")
        topic.on_policies(replace(topic.policies, auto_subscription_creation=False))
        await topic.create_subscription("s", Position(*EARLIEST))
        await client.subscribe("t", "s", 0)
        await client.subscribe("t", "r", 1, durable=False)
        assert {name: found.durable for name, found in topic.subscriptions.items()} == {"s": True, "r": False}


async def test_what_would_be_too_large_is_refused() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        large = [pb.KeyValue(key="k", value="v" * 70_000)]
        for fields in ({"metadata": large}, {"subscription_properties": large}):
            error = await refused(client, **fields)
            assert error.error == ServerError.NOT_ALLOWED_ERROR
            assert "65536 bytes, not 70001" in error.message


async def test_trap_37_and_38_equal_and_empty_consumer_names_are_no_conflict() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        for consumer_id, name in enumerate(("same", "same", "", "")):
            await client.subscribe("t", "s", consumer_id, subType=SHARED, consumer_name=name)
        assert len(subscription(world).consumers) == 4


async def test_a_forced_unsubscribe_closes_the_others() -> None:
    async with BrokerWorld() as world, await world.client() as client, await world.client() as other:
        await client.subscribe("t", "s", 0, subType=SHARED)
        await other.subscribe("t", "s", 9, subType=SHARED)
        await client.ask(pb.CommandUnsubscribe(consumer_id=0, request_id=5, force=True), pb.CommandSuccess)
        assert (await other.expect(pb.CommandCloseConsumer)).consumer_id == 9
        assert "s" not in world.topic("t").subscriptions


async def test_a_readers_subscription_can_be_deleted_and_its_name_used_again() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "r", durable=False)
        await world.topic("t").delete_subscription("r")
        await client.expect(pb.CommandCloseConsumer)
        assert "r" not in world.topic("t").subscriptions
        await client.subscribe("t", "r", durable=False)
        assert len(world.topic("t").subscriptions["r"].consumers) == 1


# Where the end is (protocol.md §18, §22)


async def last_ids(client: ScriptedClient) -> tuple[tuple[int, int], tuple[int, int]]:
    answer = await client.ask(pb.CommandGetLastMessageId(consumer_id=0, request_id=4), pb.CommandGetLastMessageIdResponse)
    mark, last = answer.consumer_mark_delete_position, answer.last_message_id
    signed = [
        number - (1 << 64) if number >> 63 else number for number in (last.ledgerId, last.entryId, mark.ledgerId, mark.entryId)
    ]
    return (signed[0], signed[1]), (signed[2], signed[3])


async def test_every_id_of_a_partition_has_its_index() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t-partition-2")
        await client.subscribe("t-partition-2", "s", subType=SHARED, permits=10)
        (receipt,) = await client.publish(1)
        first = await client.expect_message()
        client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0))
        again = await client.expect_message()
        assert first.position == again.position == receipt.position
        assert (again.body.redelivery_count, again.body.message_id.partition, first.body.message_id.partition) == (1, 2, 2)
        last = await client.ask(pb.CommandGetLastMessageId(consumer_id=0, request_id=1), pb.CommandGetLastMessageIdResponse)
        assert last.last_message_id.partition == 2


async def test_trap_31_a_fresh_latest_reader_and_one_after_a_seek_by_time_can_tell_whether_something_is_available() -> None:
    """Clients compare the mark-delete position with the last message: equal for a latest reader, and before the first match
    after a seek by time."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "r", durable=False, start_message_id=ident(LATEST))
        last, mark = await last_ids(client)
        assert last == (-1, -1), "an empty topic"
        assert mark[1] == -1
        for sequence_id in range(3):
            client.send_message(sequence_id, tail=message(sequence_id, b"x", publish_time=PUBLISH_TIME_MS + 10 * sequence_id))
            await client.expect(pb.CommandSendReceipt)
        last, mark = await last_ids(client)
        assert (last[1], mark[1]) == (2, -1), "three have come since"
        client.send(pb.CommandCloseConsumer(consumer_id=0, request_id=5))
        await client.expect(pb.CommandSuccess)
        await client.subscribe("t", "r2", durable=False, start_message_id=ident(LATEST))
        last, mark = await last_ids(client)
        assert mark == last
        for after_ms, before in ((0, -1), (10, 0), (11, 1), (21, 2)):
            client.send(pb.CommandSeek(consumer_id=0, request_id=7, message_publish_time=PUBLISH_TIME_MS + after_ms))
            await client.expect(pb.CommandCloseConsumer)
            await client.expect(pb.CommandSuccess)
            await client.subscribe("t", "r2", durable=False)
            assert (await last_ids(client))[1] == (last[0], before)


async def test_trap_04_java_consumers_hear_of_the_end_when_all_is_acknowledged_and_others_never() -> None:
    """It closes the connections of C++ and Go clients."""
    async with BrokerWorld() as world, await java_client(world) as java, await world.client() as other:
        await other.produce_on("t")
        await other.publish(2)
        await java.subscribe("t", "java", permits=10)
        await other.subscribe("t", "other", permits=10)
        got = await java.expect_messages(2)
        await other.expect_messages(2)
        last = await world.topic("t").terminate()
        assert last == got[1].position
        assert (await other.expect(pb.CommandCloseProducer)).producer_id == 0
        await java.expect_nothing(0.05)
        java.acknowledge(got[0].position)
        await java.expect_nothing(0.05)
        java.acknowledge(got[1].position)
        assert (await java.expect(pb.CommandReachedEndOfTopic)).consumer_id == 0
        java.acknowledge(got[1].position)
        await java.expect_nothing(0.05)  # once
        await java.subscribe("t", "java2", 1, initialPosition=pb.CommandSubscribe.Latest)
        assert (await java.expect(pb.CommandReachedEndOfTopic)).consumer_id == 1
        other.acknowledge(*(m.position for m in got))
        await other.ping()
        ask = pb.CommandProducer(topic="persistent://public/default/t", producer_id=0, request_id=3)
        assert (await other.ask(ask, pb.CommandError)).error == ServerError.TOPIC_TERMINATED_ERROR
        await other.subscribe("t", "late", 3, permits=10)
        assert entries(await other.expect_messages(2)) == [0, 1], "consumers go on to the end"


# Statistics


async def test_statistics_of_a_consumer_have_every_field() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(2, messages=2)
        await client.subscribe("t", "s", permits=10, subType=SHARED, consumer_name="me")
        got = await client.expect_messages(2)
        client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, message_ids=[ident(got[1].position)]))
        await client.expect_messages(1)
        await client.acknowledge_saved(got[0].position)
        await client.publish(1, first_sequence_id=2, messages=2)
        await client.expect_messages(1)
        await subscription(world).expire_until(Position(*got[1].position))
        await client.ping()
        world.topic("t").on_tick(2.0)
        stats = await client.ask(pb.CommandConsumerStats(consumer_id=0, request_id=2), pb.CommandConsumerStatsResponse)
        assert (stats.msgRateOut, stats.msgRateRedeliver, stats.messageAckRate) == (4.0, 1.0, 1.0)
        assert stats.msgThroughputOut > 0
        assert stats.msgRateExpired == 0.5
        assert (stats.consumerName, stats.type, stats.msgBacklog) == ("me", "Shared", 1)
        assert (stats.availablePermits, stats.unackedMessages, stats.blockedConsumerOnUnackedMsgs) == (2, 2, False)
        assert stats.connectedSince.endswith("Z")
        assert stats.connectedSince[4] == "-"
        assert stats.address.startswith("127.0.0.1:")
        figures = subscription(world).figures().consumers[0]
        assert figures.activity.last_flow_at_ms > 0
        assert figures.activity.last_acked_at_ms >= figures.activity.last_flow_at_ms
