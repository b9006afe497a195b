"""Non-persistent topics, frame by frame: nothing is stored, whoever is there gets it, the rest is dropped and counted."""

from __future__ import annotations

import pytest

from cepheid_broker.dispatch.effects import Idle
from cepheid_broker.dispatch.key_owners import Sticky
from cepheid_broker.dispatch.non_persistent_dispatch import NonPersistentDispatch, NonPersistentKeyShared, NonPersistentShared
from cepheid_broker.topics.non_persistent_subscription import NonPersistentSubscription
from cepheid_wire import ServerError, TopicName, parse_metadata
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import message, subscribe

TOPIC = "non-persistent://public/default/np"
SHARED = pb.CommandSubscribe.Shared


def dropped(world: BrokerWorld, subscription: str, topic: str = TOPIC) -> int:
    found = world.topic(topic).subscriptions[subscription]
    assert isinstance(found, NonPersistentSubscription)
    return found.dropped_messages


async def test_trap_40_every_entry_has_the_id_0_0_in_receipts_and_messages() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe(TOPIC, "s", permits=100)
        await client.produce_on(TOPIC)
        client.send_message(0, b"a")
        client.send_message(1, b"b")
        frames = [await client.receive() for _ in range(4)]
        bodies = [frame.body for frame in frames if frame is not None]
        receipts = [body for body in bodies if isinstance(body, pb.CommandSendReceipt)]
        messages = [body for body in bodies if isinstance(body, pb.CommandMessage)]
        assert [receipt.sequence_id for receipt in receipts] == [0, 1]
        assert {(body.message_id.ledgerId, body.message_id.entryId) for body in [*receipts, *messages]} == {(0, 0)}
        assert len(messages) == 2


async def test_what_arrives_while_nobody_can_take_it_is_dropped_and_counted() -> None:
    async with BrokerWorld() as world, await world.client() as producer, await world.client() as consumer:
        await producer.produce_on(TOPIC)
        await producer.publish(2)  # nobody is subscribed
        await consumer.subscribe(TOPIC, "s", permits=2)
        await consumer.ping()
        await producer.publish(3, first_sequence_id=2)
        received = await consumer.expect_messages(2)
        assert [frame.position for frame in received] == [(0, 0), (0, 0)]
        assert dropped(world, "s") == 1
        consumer.send(pb.CommandFlow(consumer_id=0, messagePermits=1))
        await consumer.ping()
        await consumer.expect_nothing(0.05)  # a dropped one does not come later
        await producer.publish(1, first_sequence_id=5)
        await consumer.expect_message()


async def test_a_batch_costs_its_messages_and_is_sent_whole() -> None:
    async with BrokerWorld() as world, await world.client() as producer, await world.client() as consumer:
        await consumer.subscribe(TOPIC, "s", permits=1)
        await consumer.ping()
        await producer.produce_on(TOPIC)
        await producer.publish(2, messages=10)
        await consumer.expect_message()
        assert dropped(world, "s") == 10
        consumer.send(pb.CommandFlow(consumer_id=0, messagePermits=9))  # -9 + 9: still none
        await consumer.ping()
        await producer.publish(1, first_sequence_id=2)
        await consumer.expect_nothing(0.05)


async def test_a_socket_that_fills_loses_messages_and_nobody_else_does() -> None:
    async with (
        BrokerWorld(connection={"write_high_bytes": 64 << 10}) as world,
        await world.client() as producer,
        await world.client() as slow,
        await world.client() as fast,
    ):
        await slow.subscribe(TOPIC, "slow", permits=1_000_000)
        await fast.subscribe(TOPIC, "fast", permits=1_000_000)
        await producer.produce_on(TOPIC)
        sent = 0
        while dropped(world, "slow") == 0:
            assert sent < 2_000, "its socket never filled"
            producer.send_message(sent, tail=message(sent, b"x" * 100_000))
            await producer.expect(pb.CommandSendReceipt)
            await fast.expect_message()
            sent += 1
        assert dropped(world, "fast") == 0


@pytest.mark.parametrize("durable", [True, False])
async def test_what_needs_stored_entries_is_refused_at_once(durable: bool) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe(TOPIC, "s", permits=10, durable=durable)
        seek = pb.CommandSeek(consumer_id=0, request_id=7, message_publish_time=1)
        last = pb.CommandGetLastMessageId(consumer_id=0, request_id=8)
        for ask in (seek, last):
            refused = await client.ask(ask, pb.CommandError)
            assert refused.request_id == ask.request_id
            assert refused.error == ServerError.NOT_ALLOWED_ERROR
            assert "non-persistent" in refused.message
        client.acknowledge((0, 0))
        await client.acknowledge_saved((0, 0))  # answered, though there is nothing to keep
        client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0))
        stats = await client.ask(pb.CommandConsumerStats(consumer_id=0, request_id=9), pb.CommandConsumerStatsResponse)
        assert (stats.msgBacklog, stats.availablePermits, stats.type) == (0, 10, "Exclusive")


async def test_subscriptions_follow_the_rules_of_their_type() -> None:
    async with BrokerWorld() as world, await world.client() as client, await world.client() as other:
        await client.subscribe(TOPIC, "s")
        busy = await client.ask(subscribe(TOPIC, "s", 1, 1, subType=pb.CommandSubscribe.Exclusive), pb.CommandError)
        assert busy.error == ServerError.CONSUMER_BUSY
        await client.ask(pb.CommandUnsubscribe(consumer_id=0, request_id=4), pb.CommandSuccess)
        assert "s" not in world.topic(TOPIC).subscriptions
        await client.subscribe(TOPIC, "s", subType=SHARED)
        await other.subscribe(TOPIC, "s", subType=SHARED)


async def test_a_reader_leaves_nothing_and_a_durable_subscription_stays() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe(TOPIC, "kept")
        await client.subscribe(TOPIC, "gone", 1, durable=False)
        for consumer_id in (0, 1):
            await client.ask(pb.CommandCloseConsumer(consumer_id=consumer_id, request_id=5), pb.CommandSuccess)
        assert list(world.topic(TOPIC).subscriptions) == ["kept"]


async def test_unloading_and_deleting_tell_the_clients() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        name = TopicName.parse(TOPIC)
        await client.produce_on(TOPIC)
        await world.broker.topics.unload(name)
        await client.expect(pb.CommandCloseProducer)
        await client.subscribe(TOPIC, "s")
        await world.broker.topics.delete(name, force=True)
        await client.expect(pb.CommandCloseConsumer)
        assert await world.broker.catalog.partitions(name) is None


async def test_key_shared_keeps_keys_together() -> None:
    async with BrokerWorld() as world, await world.client() as producer, await world.client() as a, await world.client() as b:
        kind = pb.CommandSubscribe.Key_Shared
        for consumer in (a, b):
            await consumer.subscribe(TOPIC, "s", subType=kind, permits=1000)
            await consumer.ping()
        await producer.produce_on(TOPIC)
        for number in range(200):
            producer.send_message(number, tail=message(number, b"x", partition_key=f"key-{number % 20}"))
        for _ in range(200):
            await producer.expect(pb.CommandSendReceipt)
        assert dropped(world, "s") == 0
        keys = []
        for consumer in (a, b):
            figures = world.topic(TOPIC).figures().subscriptions[0].consumers[len(keys)]
            received = await consumer.expect_messages(figures.traffic.messages)
            keys.append({parse_metadata(frame.tail).partition_key for frame in received})
        assert all(keys)
        assert not keys[0] & keys[1]


async def test_failover_tells_who_is_active() -> None:
    async with BrokerWorld() as world, await world.client() as producer, await world.client() as a, await world.client() as b:
        kind = pb.CommandSubscribe.Failover
        await a.subscribe(TOPIC, "s", subType=kind, consumer_name="b", permits=1)
        assert (await a.expect(pb.CommandActiveConsumerChange)).is_active
        await b.subscribe(TOPIC, "s", subType=kind, consumer_name="c", permits=1)
        assert not (await b.expect(pb.CommandActiveConsumerChange)).is_active
        await producer.produce_on(TOPIC)
        await producer.publish(1)
        await a.expect_message()
        await a.ask(pb.CommandCloseConsumer(consumer_id=0, request_id=8), pb.CommandSuccess)
        assert (await b.expect(pb.CommandActiveConsumerChange)).is_active
        await producer.publish(1, first_sequence_id=1)
        await b.expect_message()


async def test_a_subscription_says_why_it_would_drop() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe(TOPIC, "s", consumer_name="me")
        subscription = world.topic(TOPIC).subscriptions["s"]
        assert [(why.idle, why.consumer) for why in subscription.why()] == [(Idle.NO_PERMITS, "me")]
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=1))
        await client.ping()
        assert subscription.why() == ()
        assert subscription.figures().backlog_messages == 0
        await client.ask(pb.CommandCloseConsumer(consumer_id=0, request_id=8), pb.CommandSuccess)
        assert [why.idle for why in subscription.why()] == [Idle.NO_CONSUMER]


# The core


def joined(core: NonPersistentDispatch, *consumers: tuple[int, int, str], permits: int = 100) -> NonPersistentDispatch:
    for key, priority, name in consumers:
        core.on_joined(key, priority=priority, name=name)
        core.on_permits(key, permits)
    return core


def test_a_turn_ends_with_each_entry_and_the_better_priority_goes_first() -> None:
    core = joined(NonPersistentShared(), (1, 0, ""), (2, 0, ""), (3, 5, ""), permits=2)
    plan = core.plan([1] * 7, ())
    assert plan.taken == {1: [0, 2], 2: [1, 3], 3: [4, 5]}
    assert plan.dropped_messages == 1
    core.on_writable(2, False)
    for key in (1, 2):
        core.on_permits(key, 5)
    assert core.plan([1, 1], ()).taken == {1: [0, 1]}


def test_an_exclusive_consumer_without_permits_drops() -> None:
    core = NonPersistentDispatch()
    assert core.plan([1], ()).dropped_messages == 1
    joined(core, (1, 0, ""), permits=1)
    plan = core.plan([3, 1], ())
    assert (plan.taken, plan.dropped_messages, core.consumers[1].permits) == ({1: [0]}, 1, -2)


@pytest.mark.parametrize(
    ("partition", "consumers", "active"),
    [
        (-1, [(1, 0, "b"), (2, 0, "a"), (3, 0, "c")], 2),  # by name
        (-1, [(1, 0, "b"), (2, 1, "a")], 1),  # by priority first
        (1, [(1, 0, "b"), (2, 0, "a"), (3, 0, "c")], 1),
        (2, [(1, 0, "b"), (2, 0, "a"), (3, 1, "c")], 2),  # modulo those of the best priority
        (-1, [(2, 0, ""), (1, 0, "")], 1),  # equal names: the older one
    ],
)
def test_one_is_active_and_nobody_else_gets_its_entries(partition: int, consumers: list[tuple[int, int, str]], active: int) -> None:
    core = joined(NonPersistentDispatch(partition), *consumers, permits=1)
    plan = core.plan([1, 1], ())
    assert (plan.taken, plan.dropped_messages) == ({active: [0]}, 1)
    core.on_left(active)
    assert active not in core.plan([1], ()).taken


def test_a_key_goes_to_its_owner_or_nowhere() -> None:
    core = NonPersistentKeyShared(Sticky())
    core.on_joined(1, ranges=[(0, 99)])
    core.on_joined(2, ranges=[(200, 299)])
    for key in (1, 2):
        core.on_permits(key, 2)
    plan = core.plan([1] * 5, [0, 200, 150, 99, 50])
    assert plan.taken == {1: [0, 3], 2: [1]}
    assert plan.dropped_messages == 2, "one in nobody's range, one whose owner has no permit left"
    core.on_left(1)
    assert core.plan([1], [50]).dropped_messages == 1
