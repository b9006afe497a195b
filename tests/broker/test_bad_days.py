"""Bad days of a broker: a full disk, a topic that fails again and again, seeks and openings that are interrupted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_broker.errors import TopicNotFoundError
from cepheid_managed_ledger import ManagedLedgerFailedError, ManagedLedgerSettings
from cepheid_metadata import EARLIEST
from cepheid_wire import ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full, ident, subscribe
from tests.support import wait_until

TOPIC = TopicName.parse("t")


async def all_payloads(client: ScriptedClient, count: int) -> list[bytes]:
    await client.subscribe("t", "audit", 99, permits=1000)
    return [m.tail.rsplit(b"payload ", 1)[1] for m in await client.expect_messages(count)]


async def test_producers_wait_while_the_disk_is_full_and_go_on_when_there_is_space() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(5)
        world.fill_disk()
        for sequence_id in (5, 6):
            client.send_message(sequence_id, b"payload %d" % sequence_id)
        await client.expect_nothing(0.2)
        await client.ping()
        world.disk.full = False
        assert [(await client.expect(pb.CommandSendReceipt)).sequence_id for _ in range(2)] == [5, 6]
        assert await all_payloads(client, 7) == [b"%d" % n for n in range(7)]


async def test_a_disk_that_stays_full_closes_producers_and_loses_nothing_that_was_answered() -> None:
    settings = ManagedLedgerSettings(ledger_failover_timeout_s=0.1)
    async with BrokerWorld(refusal_retry_s=0.1, ledgers=settings) as world, await world.client() as client:
        await client.produce_on("t", initial_subscription_name="audit")  # what nobody subscribes to is trimmed
        await client.publish(5)
        world.fill_disk()
        for sequence_id in range(5, 9):
            client.send_message(sequence_id, b"payload %d" % sequence_id)
        await client.expect(pb.CommandCloseProducer)
        await client.ping()
        world.disk.full = False
        await client.produce_on("t", epoch=1)
        await client.publish(4, first_sequence_id=5)
        assert await all_payloads(client, 9) == [b"%d" % n for n in range(9)]


async def test_a_topic_that_cannot_be_opened_is_tried_again_with_growing_pauses() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        world.refuse_opening_topics(True)
        began = asyncio.get_running_loop().time()
        for request_id in range(4):
            client.send(pb.CommandProducer(topic=full("t"), producer_id=0, request_id=request_id))
            assert (await client.expect(pb.CommandError)).error == ServerError.SERVICE_NOT_READY
        assert asyncio.get_running_loop().time() - began > 0.02 + 0.04 + 0.08
        assert world.broker.statistics().topic_failures == 4
        world.refuse_opening_topics(False)
        await client.produce_on("t")


@pytest.mark.slow
async def test_a_topic_that_serves_between_its_failures_is_not_punished_for_them() -> None:
    async with BrokerWorld(topic_retry_s=0.2) as world, await world.client() as client:
        began = asyncio.get_running_loop().time()
        for round_number in range(8):
            await client.produce_on("t", epoch=round_number)
            await client.publish(1, first_sequence_id=round_number)
            await world.fence("t")
            client.send_message(99)
            await client.expect(pb.CommandCloseProducer)
        assert asyncio.get_running_loop().time() - began < 15, "doubled pauses would add up to more than 20 s"


async def test_many_who_ask_for_a_topic_at_once_open_it_once_and_share_its_failure() -> None:
    async with BrokerWorld() as world:
        topics = world.broker.topics
        opened = await asyncio.gather(*(topics.get(TOPIC, may_create=True) for _ in range(20)))
        assert len(set(map(id, opened))) == 1
        await topics.unload(TOPIC)
        world.refuse_opening_topics(True)
        outcomes = await asyncio.gather(*(topics.get(TOPIC, may_create=True) for _ in range(20)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ManagedLedgerFailedError}
        assert topics.failures == 1


async def test_who_gives_up_on_an_opening_does_not_stop_it_for_others() -> None:
    async with BrokerWorld() as world:
        topics = world.broker.topics
        impatient = asyncio.create_task(topics.get(TOPIC, may_create=True))
        patient = asyncio.create_task(topics.get(TOPIC, may_create=True))
        await asyncio.sleep(0)
        impatient.cancel()
        assert (await patient).name == TOPIC
        with pytest.raises(asyncio.CancelledError):
            await impatient


async def test_one_who_may_not_create_does_not_spoil_it_for_one_who_may() -> None:
    async with BrokerWorld() as world:
        topics = world.broker.topics
        outcomes = await asyncio.gather(
            topics.get(TOPIC, may_create=False), topics.get(TOPIC, may_create=True), return_exceptions=True
        )
        assert isinstance(outcomes[0], TopicNotFoundError)
        assert not isinstance(outcomes[1], BaseException)


async def test_deleting_forgets_everything_and_a_topic_made_anew_is_empty() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(5)
        await client.subscribe("t", "s", permits=10)
        await client.expect_messages(5)
        with pytest.raises(Exception, match="1 producers and 1 consumers"):
            await world.broker.topics.delete(TOPIC)
        await world.broker.topics.delete(TOPIC, force=True)
        await client.expect(pb.CommandCloseProducer)
        await client.expect(pb.CommandCloseConsumer)
        with pytest.raises(TopicNotFoundError):
            await world.broker.topics.delete(TOPIC)
        await client.produce_on("t", epoch=1)
        assert list(world.topic("t").subscriptions) == []
        await client.publish(1)
        assert await all_payloads(client, 1) == [b"0"]


async def test_a_client_that_vanishes_in_a_seek_leaves_a_subscription_that_works() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(5)
        for _ in range(20):
            rude = await world.client()
            rude.send(
                subscribe("t", "s", 0, 1, subType=pb.CommandSubscribe.Exclusive),
                pb.CommandFlow(consumer_id=0, messagePermits=10),
            )
            await rude.expect(pb.CommandSuccess)
            rude.send(pb.CommandSeek(consumer_id=0, request_id=2, message_id=ident((-1, -1))))
            rude.abort()
        await wait_until(lambda: world.broker.statistics().connections == 1)
        await client.subscribe("t", "s", permits=10)
        received = [message.body.message_id.entryId for message in await client.expect_messages(5)]
        assert received == [0, 1, 2, 3, 4]
        assert len(world.topic("t").subscriptions["s"].consumers) == 1


async def test_nothing_is_left_over_when_clients_come_and_go() -> None:
    """Budgets back at zero, no consumer, producer or request remembered."""
    async with BrokerWorld() as world:
        for round_number in range(10):
            client = await world.client()
            await client.produce_on("t", producer_name="p")
            client.send_message(0, bytes(10_000))
            client.send_message(1, bytes(10_000))
            client.send(subscribe("t", "s", 0, 1, subType=pb.CommandSubscribe.Shared))
            while not isinstance((await client.receive()).body, pb.CommandSuccess):  # type: ignore[union-attr]
                pass
            client.send(pb.CommandFlow(consumer_id=0, messagePermits=round_number + 1))
            client.abort()
            await wait_until(lambda: world.broker.statistics().connections == 0)
        topic = world.topic("t")
        await wait_until(lambda: world.broker.statistics().publish_buffer_bytes == 0)
        assert not topic.producers
        assert not topic.subscriptions["s"].consumers
        await wait_until(lambda: world.broker.statistics().read_ahead_bytes == 0, what="read-ahead given back")
        await wait_until(lambda: world.broker.statistics().requests_running == 0, what="requests ended")


async def test_stopping_answers_what_is_under_way_and_ends_connections() -> None:
    async with BrokerWorld() as world:
        client = await world.client()
        await client.produce_on("t")
        await client.subscribe("t", "s")
        for sequence_id in range(10):
            client.send_message(sequence_id)
        await client.drain()
        await wait_until(lambda: world.topic("t").published.entries > 0 or bool(world.topic("t").producers))
        await client.ping()
        await world.broker.aclose()
        receipts = []
        while (received := await client.receive()) is not None:
            if isinstance(received.body, pb.CommandSendReceipt):
                receipts.append(received.body.sequence_id)
        assert receipts == list(range(10))
        await client.close()


async def test_a_client_that_gives_up_while_its_subscription_is_made_leaves_no_half_of_one() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        topic = world.topic("t")
        making = asyncio.create_task(topic.create_subscription("s", EARLIEST))
        for _ in range(3):
            await asyncio.sleep(0)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        assert (await topic.create_subscription("s", EARLIEST)).name == "s"
        assert sorted(topic.ledger.cursors) == ["s"]
        await topic.delete_subscription("s")
        assert sorted(topic.ledger.cursors) == []


async def test_a_defect_in_dispatch_ends_that_subscription_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "broken", 0)
        await client.subscribe("t", "sound", 1, permits=10)
        dispatcher = world.topic("t").subscriptions["broken"]._dispatcher
        assert dispatcher is not None
        dispatcher.core.next_effect = lambda: 1 // 0  # type: ignore[method-assign]
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=10))
        assert (await client.expect(pb.CommandCloseConsumer)).consumer_id == 0
        client.send_message(0)
        got = {type((await client.receive()).body) for _ in range(2)}  # type: ignore[union-attr]
        assert got == {pb.CommandSendReceipt, pb.CommandMessage}
        await client.subscribe("t", "broken", 0, permits=10)
        await client.expect_message()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["dispatch.failed"]


@pytest.mark.parametrize("where", ["the ledger", "the core"])
async def test_a_defect_in_reading_ends_that_subscription_and_does_not_leave_it_waiting(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "s")
        ledger: Any = world.topic("t").ledger
        dispatcher: Any = world.topic("t").subscriptions["s"]._dispatcher
        sound = ledger.read_cached, ledger.read
        ledger.read_cached = lambda *args, **kwargs: None
        if where == "the ledger":
            ledger.read = lambda *args, **kwargs: 1 // 0
        else:
            dispatcher.core.on_read = lambda *args, **kwargs: 1 // 0
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=10))
        assert (await client.expect(pb.CommandCloseConsumer)).consumer_id == 0
        ledger.read_cached, ledger.read = sound
        await client.subscribe("t", "s", permits=10)
        await client.expect_messages(3)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["dispatch.failed"]


async def test_a_defect_that_an_append_finds_ends_that_subscription_and_the_others_hear_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "broken", 0, permits=10)
        await client.subscribe("t", "sound", 1, permits=10)
        await client.ping()
        dispatcher: Any = world.topic("t").subscriptions["broken"]._dispatcher
        dispatcher.core.on_appended = lambda tail: 1 // 0
        client.send_message(0)
        got = {type(await client.receive_body()) for _ in range(3)}
        assert got == {pb.CommandSendReceipt, pb.CommandMessage, pb.CommandCloseConsumer}
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["dispatch.failed"]


async def test_a_defect_that_a_newcomer_finds_leaves_no_consumer_that_nobody_has(caplog: pytest.LogCaptureFixture) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s", 0, subType=pb.CommandSubscribe.Shared)
        subscription = world.topic("t").subscriptions["s"]
        dispatcher: Any = subscription._dispatcher
        dispatcher.core.on_writable = lambda consumer, writable: 1 // 0
        client.send(subscribe("t", "s", 1, 9, subType=pb.CommandSubscribe.Shared))
        assert (await client.answers(9))[9].error == ServerError.SERVICE_NOT_READY
        assert not subscription.consumers
        assert (await client.expect(pb.CommandCloseConsumer)).consumer_id == 1  # so that it comes back
        await client.subscribe("t", "s", 2)  # and of another type: it is free
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["dispatch.failed"]


async def test_a_defect_that_a_lost_connection_finds_leaves_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        rude = await world.client()
        await rude.produce_on("t", producer_name="p")
        for number, name in enumerate(("broken", "sound")):
            await rude.subscribe("t", name, number, subType=pb.CommandSubscribe.Shared)
            await client.subscribe("t", name, number, subType=pb.CommandSubscribe.Shared)
        dispatcher: Any = world.topic("t").subscriptions["broken"]._dispatcher
        dispatcher.core.on_consumer_left = lambda consumer: 1 // 0
        rude.abort()
        assert (await client.expect(pb.CommandCloseConsumer)).consumer_id == 0
        await wait_until(lambda: world.broker.statistics().connections == 1)
        assert [len(found.consumers) for found in world.topic("t").subscriptions.values()] == [0, 1]
        await client.produce_on("t", producer_name="p")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["dispatch.failed"]


async def test_a_defect_in_one_topics_figures_does_not_end_the_clock_of_all() -> None:
    async with BrokerWorld(rate_window_s=0.02) as world, await world.client() as client:
        defects: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: defects.append(context["message"]))
        await client.produce_on("t")
        topic: Any = world.topic("t")
        topic.on_tick = lambda window_s: 1 // 0
        await wait_until(lambda: len(defects) >= 2)
        del topic.on_tick
        await client.publish(1)
        await wait_until(lambda: topic.published.figures().message_rate_per_s > 0)


async def test_an_acknowledgement_that_cannot_be_saved_is_answered_with_an_error() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        position = (await client.publish(1))[0].position
        await client.subscribe("t", "s", permits=10)
        await client.expect_message()
        cursor = world.topic("t").subscriptions["s"].cursor

        async def fail() -> None:
            raise ManagedLedgerFailedError("planted")

        cursor.saved = fail  # type: ignore[method-assign]
        for request_id in (5, 6):
            client.acknowledge(position, request_id=request_id)
            answer = await client.expect(pb.CommandAckResponse)
            assert (answer.request_id, answer.error) == (request_id, ServerError.SERVICE_NOT_READY)
            assert answer.message, "Go takes an answer without a message for a success"


async def test_acknowledgements_that_wait_for_a_store_that_hangs_are_bounded() -> None:
    connection = {"max_waiting_requests": 100}
    async with BrokerWorld(connection=connection) as world, await world.client() as client, await world.client() as other:
        await client.subscribe("t", "s", subType=pb.CommandSubscribe.Shared)
        await other.subscribe("t", "s", subType=pb.CommandSubscribe.Shared)
        cursor, held = world.topic("t").subscriptions["s"].cursor, asyncio.Event()
        cursor.saved = held.wait  # type: ignore[assignment]
        for request_id in range(101):
            client.acknowledge((1, 1), request_id=request_id)
        await client.expect_closed()
        for request_id in range(99):
            other.acknowledge((1, 1), request_id=request_id)
        await other.ping()
        held.set()
        assert [(await other.expect(pb.CommandAckResponse)).request_id for _ in range(99)] == list(range(99))
        await other.acknowledge_saved((1, 1))
