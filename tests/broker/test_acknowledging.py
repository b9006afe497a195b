"""ACK, redelivery, seek: what comes again, what never does, and in which order the frames of a seek come."""

from __future__ import annotations

import pytest

from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import PUBLISH_TIME_MS, ScriptedClient, ident, message
from tests.support import wait_until

SHARED = pb.CommandSubscribe.Shared
EARLIEST = (-1, -1)
LATEST = ((1 << 63) - 1, (1 << 63) - 1)


async def reconnect(client: ScriptedClient, subscription: str = "s", consumer_id: int = 0, **fields: object) -> None:
    client.send(pb.CommandCloseConsumer(consumer_id=consumer_id, request_id=900))
    assert (await client.expect(pb.CommandSuccess)).request_id == 900
    await client.subscribe("t", subscription, consumer_id, permits=1000, **fields)


def entries(received: list) -> list[int]:  # type: ignore[type-arg]
    return [m.position[1] for m in received]


@pytest.mark.parametrize("kind", [pb.CommandSubscribe.Exclusive, SHARED])
async def test_what_was_acknowledged_and_answered_does_not_come_again(kind: int) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(6)
        await client.subscribe("t", "s", permits=100, subType=kind)
        got = await client.expect_messages(6)
        await client.acknowledge_saved(*[got[i].position for i in (0, 2, 3)])
        await reconnect(client, subType=kind)
        assert entries(await client.expect_messages(3)) == [1, 4, 5]
        await client.expect_nothing(0.05)


async def test_cumulative_acknowledgement_covers_everything_up_to_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(5)
        await client.subscribe("t", "s", permits=100)
        got = await client.expect_messages(5)
        await client.acknowledge_saved(got[2].position, cumulative=True)
        await client.acknowledge_saved(got[0].position, cumulative=True)  # never backwards
        await reconnect(client)
        assert entries(await client.expect_messages(2)) == [3, 4]


async def test_trap_28_cumulative_acknowledgement_of_entry_minus_one_is_normal() -> None:
    """Trap 28: a reader in the middle of a batch in entry 0 acknowledges (ledger, -1)."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "s", permits=100)
        ledger = (await client.expect_messages(3))[0].position[0]
        await client.acknowledge_saved((ledger, -1), cumulative=True)
        await client.acknowledge_saved((ledger, 0), cumulative=True)
        await client.acknowledge_saved((ledger, -1), cumulative=True)
        await reconnect(client)
        assert entries(await client.expect_messages(2)) == [1, 2]


async def test_a_cumulative_acknowledgement_on_shared_is_ignored_and_answered_as_success() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "s", permits=100, subType=SHARED)
        got = await client.expect_messages(3)
        await client.acknowledge_saved(got[2].position, cumulative=True)
        await reconnect(client, subType=SHARED)
        assert entries(await client.expect_messages(3)) == [0, 1, 2]


async def test_acknowledgements_of_unknown_positions_change_nothing() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(2)
        await client.subscribe("t", "s", permits=100)
        ledger = (await client.expect_messages(2))[0].position[0]
        for position in [(ledger, 5), (ledger + 1000, 0), (ledger, -7), EARLIEST, LATEST, (ledger, 1 << 40)]:
            client.acknowledge(position)
            client.acknowledge(position, cumulative=True)
        await client.acknowledge_saved((ledger, 0))
        await reconnect(client)
        assert entries(await client.expect_messages(1)) == [1]


async def test_trap_29_and_30_parts_of_a_batch_are_acknowledged_and_the_rest_is_delivered_with_its_ack_set() -> None:
    """Traps 29 and 30: bit 1 = not acknowledged; missing words = acknowledged; successive sets are ANDed."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3, messages=4)
        await client.subscribe("t", "s", permits=100, subType=SHARED)
        got = await client.expect_messages(3)
        batch, other, whole = (m.position for m in got)
        ids = [ident(batch, ack_set=[0b1011]), ident(other, ack_set=[0]), ident(whole)]
        client.send(pb.CommandAck(consumer_id=0, ack_type=pb.CommandAck.Individual, message_id=ids))
        client.send(pb.CommandAck(consumer_id=0, ack_type=pb.CommandAck.Individual, message_id=[ident(batch, ack_set=[0b1110])]))
        await client.acknowledge_saved((batch[0], 10_000))
        await reconnect(client, subType=SHARED)
        received = await client.expect_message()
        assert received.position == batch
        assert list(received.body.ack_set) == [0b1010]
        await client.expect_nothing(0.05)
        client.send(pb.CommandAck(consumer_id=0, ack_type=pb.CommandAck.Individual, message_id=[ident(batch, ack_set=[0b0101])]))
        await wait_until(lambda: world.topic("t").subscriptions["s"].cursor.backlog_entries == 0)
        figures = world.topic("t").subscriptions["s"].figures()
        assert figures.unacked_messages == 0


async def test_a_cumulative_acknowledgement_inside_a_batch() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3, messages=4)
        await client.subscribe("t", "s", permits=100)
        got = await client.expect_messages(3)
        part = ident(got[1].position, ack_set=[0b1100])
        client.send(pb.CommandAck(consumer_id=0, ack_type=pb.CommandAck.Cumulative, message_id=[part]))
        await client.ping()
        await reconnect(client)
        again = await client.expect_messages(2)
        assert entries(again) == [1, 2]
        assert [list(m.body.ack_set) for m in again] == [[0b1100], []]


@pytest.mark.parametrize("how", [pb.CommandAck.Individual, pb.CommandAck.Cumulative])
async def test_every_word_counts_that_acknowledges_a_part_of_a_batch_of_more_than_64_messages(how: pb.CommandAck.AckType) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(2, messages=70)
        await client.subscribe("t", "s", permits=1000)
        batch = (await client.expect_messages(2))[0].position
        for left in ([0b110, 0b100001], [0, 0b100000]):
            client.send(pb.CommandAck(consumer_id=0, ack_type=how, message_id=[ident(batch, ack_set=left)]))
            await reconnect(client)
            again = await client.expect_messages(2)
            assert [list(m.body.ack_set) for m in again] == [left, []]
        client.send(pb.CommandAck(consumer_id=0, ack_type=how, message_id=[ident(batch, ack_set=[-1, 0b011111])]))
        await reconnect(client)
        assert entries(await client.expect_messages(1)) == [1]


async def test_trap_25_and_33_redelivery_on_shared_sends_just_those_and_counts() -> None:
    """Traps 25 and 33: counts start absent and grow by one; redelivered messages cost permits."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(5)
        await client.subscribe("t", "s", permits=7, subType=SHARED)
        got = await client.expect_messages(5)
        for count in (1, 2):
            client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, message_ids=[ident(got[3].position)]))
            again = await client.expect_message()
            assert (again.position, again.body.redelivery_count) == (got[3].position, count)
        client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0))
        await client.expect_nothing()  # 7 permits were 5 + 2
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=10))
        assert [m.body.redelivery_count for m in await client.expect_messages(5)] == [1, 1, 1, 3, 1]


async def test_redelivery_on_exclusive_starts_over_whatever_was_named() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(4)
        await client.subscribe("t", "s", permits=100)
        got = await client.expect_messages(4)
        client.acknowledge(got[1].position)
        client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, message_ids=[ident(got[3].position)]))
        again = await client.expect_messages(3)
        assert entries(again) == [0, 2, 3]
        assert all(not m.body.HasField("redelivery_count") for m in again)


async def seek(client: ScriptedClient, seek_to: pb.CommandSeek, consumer_id: int = 0) -> None:
    """The order of frames is the point: CLOSE_CONSUMER, then SUCCESS (trap 26)."""
    seek_to.consumer_id, seek_to.request_id = consumer_id, 600
    client.send(seek_to)
    closed = await client.expect(pb.CommandCloseConsumer)
    assert (closed.consumer_id, closed.request_id) == (consumer_id, (1 << 64) - 1)
    assert (await client.expect(pb.CommandSuccess)).request_id == 600


async def test_seek_to_an_id_delivers_it_next() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(6)
        await client.subscribe("t", "s", permits=100)
        got = await client.expect_messages(6)
        await client.acknowledge_saved(got[5].position, cumulative=True)
        for target, first in [(got[2].position, 2), (EARLIEST, 0), ((got[0].position[0], -1), 0), (got[5].position, 5)]:
            await seek(client, pb.CommandSeek(message_id=ident(target)))
            client.acknowledge(got[5].position)  # flushed by the client for the closed consumer: must not count (§17)
            await client.subscribe("t", "s", permits=100)
            assert entries(await client.expect_messages(6 - first)) == list(range(first, 6))
        await seek(client, pb.CommandSeek(message_id=ident(LATEST)))
        await client.subscribe("t", "s", permits=100)
        await client.expect_nothing()


@pytest.mark.parametrize(("after_ms", "first"), [(0, 0), (1, 1), (10, 1), (11, 2), (30, 3), (1000, 4), (-5, 0)])
async def test_seek_by_time_finds_the_first_entry_not_older(after_ms: int, first: int) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        for sequence_id in range(4):
            tail = message(sequence_id, b"x", publish_time=PUBLISH_TIME_MS + 10 * sequence_id)
            client.send_message(sequence_id, tail=tail)
            await client.expect(pb.CommandSendReceipt)
        await client.subscribe("t", "s", permits=100)
        await client.expect_messages(4)
        await seek(client, pb.CommandSeek(message_publish_time=PUBLISH_TIME_MS + after_ms))
        await client.subscribe("t", "s", permits=100)
        assert entries(await client.expect_messages(4 - first)) == list(range(first, 4))
        await client.expect_nothing(0.05)


async def test_a_seek_closes_every_consumer_of_a_shared_subscription() -> None:
    async with BrokerWorld() as world, await world.client() as client, await world.client() as other:
        await client.produce_on("t")
        await client.publish(2)
        await client.subscribe("t", "s", 0, subType=SHARED, permits=10)
        await client.expect_messages(2)
        await other.subscribe("t", "s", 5, subType=SHARED)
        await seek(client, pb.CommandSeek(message_id=ident(EARLIEST)))
        assert (await other.expect(pb.CommandCloseConsumer)).consumer_id == 5
        await other.subscribe("t", "s", 5, subType=SHARED, permits=10)
        assert [m.body.redelivery_count for m in await other.expect_messages(2)] == [0, 0]


async def test_trap_26_a_subscribe_during_a_seek_is_answered_behind_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(2)
        await client.subscribe("t", "s", permits=10)
        await client.expect_messages(2)
        client.send(
            pb.CommandSeek(consumer_id=0, request_id=600, message_id=ident(EARLIEST)),
            pb.CommandPing(),
        )
        client.send(
            pb.CommandSubscribe(topic="persistent://public/default/t", subscription="s", subType=0, consumer_id=0, request_id=601)
        )
        kinds = []
        while len(kinds) < 3:
            received = await client.receive()
            assert received is not None
            if not isinstance(received.body, pb.CommandPong):
                kinds.append((type(received.body), received.body.request_id))
        assert [request_id for _, request_id in kinds[1:]] == [600, 601]
        assert kinds[0][0] is pb.CommandCloseConsumer


@pytest.mark.slow
async def test_a_readers_position_survives_the_gap_after_a_seek_by_time() -> None:
    """It subscribes again without a start id; the seek's position counts (§17). Later it is gone with its last consumer."""
    async with BrokerWorld(reader_seek_grace_s=1.5) as world, await world.client() as client:
        await client.produce_on("t")
        for sequence_id in range(4):
            tail = message(sequence_id, b"x", publish_time=PUBLISH_TIME_MS + 10 * sequence_id)
            client.send_message(sequence_id, tail=tail)
            await client.expect(pb.CommandSendReceipt)
        await client.subscribe("t", "r", durable=False, start_message_id=ident(EARLIEST), permits=1)
        await client.expect_message()
        await seek(client, pb.CommandSeek(message_publish_time=PUBLISH_TIME_MS + 20))
        await client.subscribe("t", "r", durable=False, permits=100)
        assert entries(await client.expect_messages(2)) == [2, 3]
        await seek(client, pb.CommandSeek(message_id=ident(EARLIEST)))
        await client.subscribe("t", "r", durable=False, start_message_id=ident(LATEST), permits=100)
        assert entries(await client.expect_messages(4)) == [0, 1, 2, 3], "a cursor that is alive counts, not the start id"
        await seek(client, pb.CommandSeek(message_id=ident(EARLIEST)))
        await wait_until(lambda: "r" not in world.topic("t").subscriptions, what="the grace ends")


async def test_a_seek_without_a_target_is_refused() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s")
        error = await client.ask(pb.CommandSeek(consumer_id=0, request_id=4), pb.CommandError)
        assert error.request_id == 4
