"""SUBSCRIBE, FLOW, delivery, unsubscribe, close: what a consumer gets, when, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_broker.settings import DispatchSettings
from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full, ident, message, subscribe
from tests.support import wait_until

SHARED = pb.CommandSubscribe.Shared
EXCLUSIVE = pb.CommandSubscribe.Exclusive
LATEST_ID = pb.MessageIdData(ledgerId=(1 << 63) - 1, entryId=(1 << 63) - 1)
EARLIEST_ID = pb.MessageIdData(ledgerId=(1 << 64) - 1, entryId=(1 << 64) - 1)


async def subscribe_refused(client: ScriptedClient, topic: str = "t", subscription: str = "s", **fields: Any) -> pb.CommandError:
    fields.setdefault("subType", EXCLUSIVE)
    return await client.ask(subscribe(topic, subscription, 77, 500, **fields), pb.CommandError)


async def test_success_comes_before_messages_and_messages_only_with_permits() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(10)
        await client.subscribe("t", "s")
        await client.expect_nothing()
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=3))
        first = await client.expect_messages(3)
        await client.expect_nothing()
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=2), pb.CommandFlow(consumer_id=0, messagePermits=1))
        rest = await client.expect_messages(3)  # FLOW adds, it never sets (trap 24)
        await client.expect_nothing()
        assert [m.position[1] for m in first + rest] == list(range(6))
        for received in first + rest:
            assert not received.body.HasField("redelivery_count")
            assert not received.body.message_id.HasField("batch_index")
            assert not received.body.ack_set


async def test_trap_24_permits_count_messages_and_may_go_negative() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3, messages=10)
        await client.subscribe("t", "s", permits=1)
        await client.expect_message()
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=9))
        await client.expect_nothing()  # 1 - 10 + 9 = 0
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=1))
        await client.expect_message()


@pytest.mark.parametrize("permits", [0, (1 << 32) - 1])
async def test_absurd_permits_close_the_connection(permits: int) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s")
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=permits))
        await client.expect_closed()


async def test_permits_that_pile_up_are_cut_off() -> None:
    dispatch = DispatchSettings(max_permits=5000)
    async with BrokerWorld(dispatch=dispatch) as world, await world.client() as client:
        await client.subscribe("t", "s")
        client.send(*[pb.CommandFlow(consumer_id=0, messagePermits=(1 << 31) - 1)] * 3)
        await client.ping()
        assert world.topic("t").subscriptions["s"].figures().consumers[0].permits == 5000


async def test_commands_for_unknown_ids_are_ignored_or_refused_but_never_close() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        client.send(
            pb.CommandFlow(consumer_id=9, messagePermits=10),
            pb.CommandAck(consumer_id=9, ack_type=pb.CommandAck.Individual, message_id=[ident((1, 1))]),
            pb.CommandRedeliverUnacknowledgedMessages(consumer_id=9),
        )
        await client.ping()
        for body in (
            pb.CommandSeek(consumer_id=9, request_id=1, message_publish_time=0),
            pb.CommandGetLastMessageId(consumer_id=9, request_id=1),
            pb.CommandUnsubscribe(consumer_id=9, request_id=1),
        ):
            error = await client.ask(body, pb.CommandError)
            assert (error.request_id, error.error) == (1, ServerError.METADATA_ERROR)
        stats = await client.ask(pb.CommandConsumerStats(consumer_id=9, request_id=2), pb.CommandConsumerStatsResponse)
        assert stats.error_code == ServerError.CONSUMER_NOT_FOUND
        client.send(pb.CommandCloseConsumer(consumer_id=9, request_id=3))
        assert (await client.expect(pb.CommandSuccess)).request_id == 3


async def test_the_same_consumer_again_is_answered_again() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s")
        await client.subscribe("t", "s")
        assert len(world.topic("t").subscriptions["s"].consumers) == 1


async def test_a_second_exclusive_consumer_is_busy_while_the_first_lives() -> None:
    async with BrokerWorld(connection={"liveness_probe_s": 10.0}) as world:
        async with await world.client() as holder, await world.client() as other:
            await holder.subscribe("t", "s")
            other.send(subscribe("t", "s", 0, 4, subType=EXCLUSIVE))
            await holder.expect_nothing(0.1)
            assert (await other.expect(pb.CommandError)).error == ServerError.CONSUMER_BUSY
            other.send(subscribe("t", "s", 0, 5, subType=SHARED))
            await holder.expect_nothing(0.1)
            mismatch = await other.expect(pb.CommandError)
            assert mismatch.error == ServerError.CONSUMER_BUSY
            assert "of type Exclusive" in mismatch.message
            assert (await subscribe_refused(holder)).error == ServerError.CONSUMER_BUSY  # on one connection no probe is needed
            await other.subscribe("t", "another")


async def test_an_exclusive_slot_is_taken_over_from_a_holder_that_does_not_answer() -> None:
    async with BrokerWorld(connection={"liveness_probe_s": 0.1}) as world:
        async with await world.client() as dead, await world.client() as heir:
            await dead.subscribe("t", "s")
            await heir.subscribe("t", "s")
            dead.answer_pings = False
            await dead.expect_closed()


async def test_the_type_may_change_when_nobody_is_connected() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(4)
        await client.subscribe("t", "s", subType=SHARED, permits=10)
        await client.expect_messages(4)
        client.send(pb.CommandCloseConsumer(consumer_id=0, request_id=9))
        await client.expect(pb.CommandSuccess)
        await client.subscribe("t", "s", subType=EXCLUSIVE, permits=10)
        assert len(await client.expect_messages(4)) == 4


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"read_compacted": True, "subType": SHARED}, "read_compacted is for Exclusive and Failover"),
        ({"read_compacted": True, "topic": "non-persistent://public/default/t"}, "stores nothing to compact"),
        ({"subscription": ""}, "needs a name"),
    ],
)
async def test_what_consumers_cannot_have_yet_is_refused_at_once(fields: dict[str, Any], text: str) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        error = await subscribe_refused(client, **fields)
        assert error.error == ServerError.NOT_ALLOWED_ERROR
        assert text in error.message
        await client.expect_nothing(0.05)


@pytest.mark.parametrize("kind", [EXCLUSIVE, pb.CommandSubscribe.Failover])
async def test_a_topic_that_was_never_compacted_is_read_as_it_is(kind: Any) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        for sequence_id in range(4):
            client.send_message(sequence_id, tail=message(sequence_id, b"", partition_key="same"))
            await client.expect(pb.CommandSendReceipt)
        for consumer_id, durable in enumerate((True, False)):
            start = {} if durable else {"start_message_id": ident((-1, -1))}
            name = f"s{consumer_id}"
            await client.subscribe("t", name, consumer_id, subType=kind, durable=durable, read_compacted=True, permits=10, **start)
            assert [got.position[1] for got in await client.skim_messages(4)] == [0, 1, 2, 3]


async def test_trap_23_a_first_subscribe_that_may_succeed_later_is_told_to_try_again() -> None:
    """Trap 23: a retryable ERROR alone would hang a C++ consumer until its timeout."""
    async with BrokerWorld() as world, await world.client() as client:
        world.refuse_opening_topics(True)
        error = await subscribe_refused(client)
        assert error.error == ServerError.SERVICE_NOT_READY
        close = await client.expect(pb.CommandCloseConsumer)
        assert (close.consumer_id, close.request_id) == (77, (1 << 64) - 1)
        world.refuse_opening_topics(False)
        await client.subscribe("t", "s", 77)


async def test_trap_39_shared_consumers_on_one_connection_share_and_one_that_closes_gives_back() -> None:
    """Traps 37 and 39: equal and empty names are no conflict."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s", 0, subType=SHARED, permits=100, consumer_name="c")
        await client.subscribe("t", "s", 1, subType=SHARED, permits=100, consumer_name="c")
        await client.subscribe("t", "s", 2, subType=SHARED, consumer_name="")
        for sequence_id in range(100):
            client.send_message(sequence_id)
        got: dict[int, list[int]] = {0: [], 1: []}
        receipts = 0
        while receipts + sum(map(len, got.values())) < 200:
            received = await client.receive()
            assert received is not None
            if isinstance(received.body, pb.CommandMessage):
                got[received.body.consumer_id].append(received.position[1])
            else:
                receipts += 1
        assert sorted(got[0] + got[1]) == list(range(100))
        assert min(map(len, got.values())) >= 20
        client.send(pb.CommandCloseConsumer(consumer_id=0, request_id=50), pb.CommandFlow(consumer_id=1, messagePermits=100))
        await client.expect(pb.CommandSuccess)
        again = await client.expect_messages(len(got[0]))
        assert sorted(m.position[1] for m in again) == sorted(got[0])
        assert all(m.body.redelivery_count == 0 for m in again), "leaving does not raise the count"


async def test_trap_27_32_and_38_readers_start_where_they_say_and_leave_nothing_behind() -> None:
    """Traps 27, 32, 38: the start entry itself is delivered; (ledger, -1) is before entry 0; no name is needed."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        ledger = (await client.publish(10))[0].position[0]
        expected = {
            "earliest": (EARLIEST_ID, 0),
            "middle": (ident((ledger, 4)), 4),
            "batch": (ident((ledger, 4), batch_index=2), 4),
            "before": (ident((ledger, -1)), 0),
            "gone": (ident((ledger - 1, 7)), 0),
        }
        for consumer_id, (name, (start, first)) in enumerate(expected.items()):
            await client.subscribe("t", name, consumer_id, durable=False, start_message_id=start, permits=100, consumer_name="")
            received = await client.expect_messages(10 - first)
            assert received[0].position == (ledger, first), name
        for consumer_id, start_fields in ((20, {"start_message_id": LATEST_ID}), (21, {})):
            await client.subscribe("t", f"latest-{consumer_id}", consumer_id, durable=False, permits=100, **start_fields)
        await client.expect_nothing()
        client.send(*[pb.CommandCloseConsumer(consumer_id=c, request_id=c) for c in range(5)])
        for _ in range(5):
            await client.expect(pb.CommandSuccess)
        assert sorted(world.topic("t").subscriptions) == ["latest-20", "latest-21"]


async def test_durable_and_reader_subscriptions_do_not_mix_under_one_name() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "durable")
        error = await subscribe_refused(client, subscription="durable", durable=False, start_message_id=EARLIEST_ID)
        assert error.error == ServerError.NOT_ALLOWED_ERROR
        await client.subscribe("t", "reader", 1, durable=False)
        error = await subscribe_refused(client, subscription="reader")
        assert error.error == ServerError.NOT_ALLOWED_ERROR


async def test_initial_position_counts_only_when_the_subscription_is_made() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "latest", 0, initialPosition=pb.CommandSubscribe.Latest, permits=10)
        await client.subscribe("t", "earliest", 1, permits=10)
        assert [m.body.consumer_id for m in await client.expect_messages(3)] == [1, 1, 1]
        client.send(pb.CommandCloseConsumer(consumer_id=0, request_id=9))
        await client.expect(pb.CommandSuccess)
        await client.subscribe("t", "latest", 0, permits=10)  # Earliest now says nothing
        await client.expect_nothing()


async def test_unsubscribe_deletes_and_is_refused_while_others_are_connected() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(2)
        await client.subscribe("t", "s", 0, subType=SHARED, permits=10)
        await client.expect_messages(2)
        await client.subscribe("t", "s", 1, subType=SHARED)
        refused = await client.ask(pb.CommandUnsubscribe(consumer_id=0, request_id=5), pb.CommandError)
        assert refused.error == ServerError.METADATA_ERROR
        client.send(pb.CommandCloseConsumer(consumer_id=1, request_id=6), pb.CommandUnsubscribe(consumer_id=0, request_id=7))
        assert {(await client.expect(pb.CommandSuccess)).request_id for _ in range(2)} == {6, 7}
        await client.expect_nothing(0.05)  # no CLOSE_CONSUMER follows (§19)
        assert "s" not in world.topic("t").subscriptions
        await client.subscribe("t", "s", 0, subType=SHARED, permits=10)
        await client.expect_messages(2)


async def test_the_last_message_id_may_be_asked_for_right_behind_a_subscribe() -> None:
    """C++ does so when it subscribes again, and an error would reach the application: hasMessageAvailable fails for nothing."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        client.send(
            subscribe("t", "s", 0, 40, subType=SHARED, initialPosition=pb.CommandSubscribe.Earliest),
            pb.CommandGetLastMessageId(consumer_id=0, request_id=41),
            pb.CommandGetLastMessageId(consumer_id=9, request_id=42),
        )
        error = await client.expect(pb.CommandError)
        assert (error.request_id, error.error) == (42, ServerError.METADATA_ERROR)
        assert (await client.expect(pb.CommandSuccess)).request_id == 40
        answer = await client.expect(pb.CommandGetLastMessageIdResponse)
        assert (answer.request_id, answer.last_message_id.entryId) == (41, 2)
        client.send(
            subscribe("t", "s", 1, 43, subType=pb.CommandSubscribe.Exclusive),
            pb.CommandGetLastMessageId(consumer_id=1, request_id=44),
        )
        assert (await client.expect(pb.CommandError)).error == ServerError.CONSUMER_BUSY
        error = await client.expect(pb.CommandError)
        assert (error.request_id, error.error) == (44, ServerError.METADATA_ERROR)


async def test_trap_31_last_message_id_of_empty_single_and_batched_topics() -> None:
    """Trap 31: -1:-1 when empty; batch_index 0 for a batch of one, none for a plain message; the mark-delete position is there."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s")
        ask = pb.CommandGetLastMessageId(consumer_id=0, request_id=3)
        answer = await client.ask(ask, pb.CommandGetLastMessageIdResponse)
        assert (answer.last_message_id.ledgerId, answer.last_message_id.entryId) == ((1 << 64) - 1, (1 << 64) - 1)
        for sequence_id, (messages, index) in enumerate([(0, None), (1, 0), (5, 4)]):
            client.send_message(sequence_id, tail=message(sequence_id, b"x", messages=messages))
            receipt = await client.expect(pb.CommandSendReceipt)
            answer = await client.ask(ask, pb.CommandGetLastMessageIdResponse)
            last = answer.last_message_id
            assert (last.ledgerId, last.entryId) == (receipt.message_id.ledgerId, receipt.message_id.entryId)
            assert (last.batch_index if last.HasField("batch_index") and index is not None else None) == index
            assert answer.HasField("consumer_mark_delete_position")
        await client.subscribe("t", "fresh", 1, durable=False, start_message_id=LATEST_ID)
        fresh = await client.ask(pb.CommandGetLastMessageId(consumer_id=1, request_id=4), pb.CommandGetLastMessageIdResponse)
        mark_delete = fresh.consumer_mark_delete_position
        assert (mark_delete.ledgerId, mark_delete.entryId) == (last.ledgerId, last.entryId), "nothing is available (§18)"


async def test_statistics_of_a_consumer() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "s", permits=10, subType=SHARED, consumer_name="me")
        await client.expect_messages(3)
        stats = await client.ask(pb.CommandConsumerStats(consumer_id=0, request_id=2), pb.CommandConsumerStatsResponse)
        assert not stats.HasField("error_code"), "its presence alone is a failure for C++ (§5)"
        assert (stats.consumerName, stats.availablePermits, stats.unackedMessages) == ("me", 7, 3)
        assert (stats.type, stats.msgBacklog) == ("Shared", 3)


async def test_delayed_messages_are_delivered_at_once() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s", permits=10)
        client.send_message(0, tail=message(0, b"x", deliver_at_time=1 << 50))
        got = {type((await client.receive()).body) for _ in range(2)}  # type: ignore[union-attr]
        assert got == {pb.CommandSendReceipt, pb.CommandMessage}


async def test_too_many_unacknowledged_messages_hold_a_shared_consumer_until_half_are_acknowledged() -> None:
    dispatch = DispatchSettings(max_unacked_messages=10)
    async with BrokerWorld(dispatch=dispatch) as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(20)
        await client.subscribe("t", "s", permits=1, subType=SHARED)
        positions = [(await client.expect_message()).position]
        for _ in range(9):
            client.send(pb.CommandFlow(consumer_id=0, messagePermits=1))
            positions.append((await client.expect_message()).position)
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=5))
        await client.expect_nothing()
        assert world.topic("t").subscriptions["s"].figures().consumers[0].is_blocked
        client.acknowledge(*positions[:4])
        await client.expect_nothing(0.05)
        client.acknowledge(positions[4])
        await client.expect_messages(5)


async def test_closing_while_opening_cancels_and_answers() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        client.send(
            subscribe("t", "s", 0, 1, subType=EXCLUSIVE),
            pb.CommandCloseConsumer(consumer_id=0, request_id=2),
            pb.CommandProducer(topic=full("t"), producer_id=0, request_id=3, producer_name="p"),
            pb.CommandCloseProducer(producer_id=0, request_id=4),
        )
        answers = [await client.receive() for _ in range(4)]
        found = {answer.body.request_id: type(answer.body) for answer in answers if answer is not None}
        assert found == {1: pb.CommandError, 2: pb.CommandSuccess, 3: pb.CommandError, 4: pb.CommandSuccess}
        await client.expect_nothing()
        await client.subscribe("t", "s", 0)
        await client.produce_on("t", 0, producer_name="p")


async def test_statistics_name_the_reason_for_silence() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s")
        subscription = world.topic("t").subscriptions["s"]
        assert "FLOW" in subscription.figures().idle
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=1))
        await wait_until(lambda: "appended" in subscription.figures().idle)
