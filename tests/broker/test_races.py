"""Two who want the same at once, and what ends under those who use it: one outcome, and nothing that was confirmed is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from cepheid_broker.topics import last_message
from cepheid_managed_ledger import ManagedLedgerFailedError, TopicTerminatedError
from cepheid_metadata import EARLIEST, SessionState, list_cursors
from cepheid_ports import CepheidError
from cepheid_wire import ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full, message, subscribe
from tests.managed_ledger.topic_world import append, topic_world
from tests.support import wait_until

EXCLUSIVE = pb.CommandSubscribe.Exclusive
SHARED = pb.CommandSubscribe.Shared
KINDS = (EXCLUSIVE, SHARED, pb.CommandSubscribe.Failover, pb.CommandSubscribe.Key_Shared)
TOPIC = TopicName.parse("t")


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    found = [(record.message, record.__dict__.get("error")) for record in caplog.get_records("call") if record.levelname == "ERROR"]
    assert not found


async def asked(client: ScriptedClient, body: Any) -> Any:
    client.send(body)
    return (await client.answers(body.request_id))[body.request_id]


# The end of a topic that grows


@pytest.mark.virtual_time
async def test_the_last_message_is_one_message_also_when_another_entry_is_appended_meanwhile() -> None:
    async with topic_world() as world:
        ledger = await world.broker(cache_bytes=1).open()
        first = await append(ledger, message(0, b"x", messages=3))
        world.cluster["a"].delay_s = 0.05
        asking = asyncio.ensure_future(last_message(ledger))
        await asyncio.sleep(0.01)
        world.cluster["a"].delay_s = 0.0
        second = await append(ledger, message(1, b"x", messages=5))
        assert not asking.done(), "it reads the first one"
        assert await asking in ((first, 2), (second, 4))


# Two want the same


async def test_of_many_who_claim_one_exclusive_place_at_once_one_gets_it() -> None:
    """As producer and as consumer, each on a connection of its own; and all of them live."""
    async with BrokerWorld() as world:
        clients = [await world.client() for _ in range(8)]
        for round_ in range(5):
            topic = f"t{round_}"
            claims: list[list[Any]] = [
                [pb.CommandProducer(topic=full(topic), producer_id=0, request_id=1, producer_access_mode=pb.Exclusive)],
                [subscribe(topic, "s", 0, 2, subType=EXCLUSIVE)],
                [subscribe(topic, "r", 1, 3, subType=EXCLUSIVE, durable=False)],
            ]
            for (claim,) in claims:
                answers = await asyncio.gather(*(answered_while_asked(client, claim) for client in clients))
                refused = [answer for answer in answers if isinstance(answer, pb.CommandError)]
                assert len(refused) == len(clients) - 1, answers
                assert {answer.error for answer in refused} <= {ServerError.PRODUCER_FENCED, ServerError.CONSUMER_BUSY}
            found = world.topic(topic)
            assert len(found.producers) == 1
            assert [len(found.subscriptions[name].consumers) for name in ("s", "r")] == [1, 1]
            for client in clients:
                client.send(
                    pb.CommandCloseProducer(producer_id=0, request_id=4), pb.CommandCloseConsumer(consumer_id=0, request_id=5)
                )
                await client.answers(4, 5)
                await asked(client, pb.CommandCloseConsumer(consumer_id=1, request_id=6))
        for client in clients:
            await client.close()


async def answered_while_asked(client: ScriptedClient, claim: Any) -> Any:
    """The answer to the claim, after which this client goes on answering PINGs for a moment."""
    answer = await asked(client, claim)
    await client.receive_for(0.05)
    return answer


async def test_one_name_claimed_by_many_connections_at_once_is_one_producer() -> None:
    async with BrokerWorld() as world:
        clients = [await world.client() for _ in range(8)]
        claim = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, producer_name="p")
        answers = await asyncio.gather(*(answered_while_asked(client, claim) for client in clients))
        assert sum(isinstance(answer, pb.CommandProducerSuccess) for answer in answers) == 1
        assert {answer.error for answer in answers if isinstance(answer, pb.CommandError)} == {ServerError.PRODUCER_BUSY}
        for client in clients:
            await client.close()


# What ends under those who use it


@pytest.mark.parametrize("kind", KINDS, ids=[pb.CommandSubscribe.SubType.Name(kind) for kind in KINDS])
async def test_unsubscribing_while_messages_are_delivered(kind: int) -> None:
    """By force, by one of two consumers, with messages, permits and acknowledgements on their way."""
    async with BrokerWorld() as world, await world.client() as client, await world.client() as other:
        await client.produce_on("t")
        await client.publish(50)
        for round_ in range(10):
            consumers = [client] if kind == EXCLUSIVE else [client, other]
            for each in consumers:
                ask = subscribe("t", "s", 0, each.request_id(), subType=kind, initialPosition=pb.CommandSubscribe.Earliest)
                assert isinstance(await asked(each, ask), pb.CommandSuccess)
                each.send(pb.CommandFlow(consumer_id=0, messagePermits=1000))
            for _ in range(round_):
                await asyncio.sleep(0)
            client.send(pb.CommandUnsubscribe(consumer_id=0, request_id=900, force=True))
            client.acknowledge((1, 1), consumer_id=0)
            client.send(pb.CommandFlow(consumer_id=0, messagePermits=5))
            for each in consumers:
                each.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0))
            assert isinstance((await client.answers(900))[900], pb.CommandSuccess)
            if kind != EXCLUSIVE:
                while not isinstance(await other.receive_body(), pb.CommandCloseConsumer):
                    pass
            assert not world.topic("t").subscriptions
            assert await list_cursors(world.store, TOPIC) == []


async def test_terminating_while_many_publish_keeps_what_was_confirmed_and_nothing_else() -> None:
    async with BrokerWorld() as world:
        topic = await world.broker.topics.get(TOPIC, may_create=True)
        await topic.create_subscription("audit", EARLIEST)
        clients = [await world.client() for _ in range(4)]
        publishing = [asyncio.ensure_future(publish_until_the_end(client, index)) for index, client in enumerate(clients)]
        await wait_until(lambda: topic.published.entries > 200)
        ends = await asyncio.gather(*(topic.terminate() for _ in range(3)))
        assert len(set(ends)) == 1
        confirmed = sorted(position for positions in await asyncio.gather(*publishing) for position in positions)
        assert confirmed[-1] <= ends[0]
        async with await world.client() as reader:
            await reader.subscribe("t", "audit", permits=100_000)
            got = [received.position for received in await reader.skim_messages(len(confirmed))]
            extra = [body for body in await reader.receive_for(0.1) if isinstance(body, pb.CommandMessage)]
            assert len(got) + len(extra) == topic.ledger.ledgers.total_entries
            assert set(confirmed) <= {*got, *((body.message_id.ledgerId, body.message_id.entryId) for body in extra)}
        with pytest.raises(TopicTerminatedError):
            await topic.check_publishing(encrypted=False, reconnecting=False)
        for client in clients:
            await client.close()


async def publish_until_the_end(client: ScriptedClient, index: int) -> list[tuple[int, int]]:
    """Positions of the receipts; ends when the broker says that the topic has ended."""
    confirmed: list[tuple[int, int]] = []
    epoch = sequence_id = 0
    while True:
        ask = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=10_000 + epoch, producer_name=f"p{index}", epoch=epoch)
        answer = await asked(client, ask)
        if isinstance(answer, pb.CommandError):
            assert answer.error == ServerError.TOPIC_TERMINATED_ERROR, answer
            return confirmed
        epoch += 1
        is_open = True
        while is_open:
            for _ in range(5):
                client.send_message(sequence_id, b"x" * 50)
                sequence_id += 1
            for _ in range(5):
                body = await client.receive_body()
                if isinstance(body, pb.CommandCloseProducer):
                    is_open = False
                    break
                assert isinstance(body, pb.CommandSendReceipt)
                confirmed.append((body.message_id.ledgerId, body.message_id.entryId))


async def test_growing_while_producers_and_consumers_connect_loses_nothing() -> None:
    """Each new partition has the subscription from its first entry on, whoever publishes to it first."""
    async with BrokerWorld() as world, await world.client() as client, await world.client() as consumer:
        partitions, last = 1, 6
        name = TopicName.parse("t")
        await world.create_topic("t", partitions)
        await consumer.subscribe("t-partition-0", "s", 0)
        published: dict[str, list[int]] = {}
        growing = asyncio.ensure_future(grow_to(world, name, last))
        known, sequence_id = 0, 0
        while known < last:
            answer = await asked(client, pb.CommandPartitionedTopicMetadata(topic=full("t"), request_id=client.request_id()))
            for index in range(known, answer.partitions):
                part = full(f"t-partition-{index}")
                ask = pb.CommandProducer(topic=part, producer_id=index, request_id=client.request_id())
                assert isinstance(await asked(client, ask), pb.CommandProducerSuccess)
                client.send_message(sequence_id, b"first of %d" % index, producer_id=index)
                while not isinstance(await client.receive_body(), pb.CommandSendReceipt):
                    pass
                published.setdefault(part, []).append(sequence_id)
                sequence_id += 1
            known = max(known, answer.partitions)
        await growing
        for index in range(last):
            await consumer.subscribe(f"t-partition-{index}", "s", index, initialPosition=pb.CommandSubscribe.Latest, permits=10)
            assert (await consumer.expect_message()).tail.endswith(b"first of %d" % index)


async def grow_to(world: BrokerWorld, topic: TopicName, partitions: int) -> None:
    for count in range(2, partitions + 1):
        await asyncio.gather(
            *(world.broker.partitioned.grow(topic, count) for _ in range(2)), return_exceptions=True
        )  # one of the two is told that the other was faster
        assert await world.broker.catalog.partitions(topic) == count


async def test_policies_that_change_during_an_opening_hold_when_it_is_open() -> None:
    """Whatever step of the opening they meet."""
    async with BrokerWorld() as world:
        await world.create_topic("t")
        for turns in range(25):
            opening = asyncio.ensure_future(world.broker.topics.get(TOPIC, may_create=False))
            for _ in range(turns):
                await asyncio.sleep(0)
            found = await world.broker.catalog.find(TOPIC)
            assert found is not None
            await world.broker.catalog.replace(TOPIC, found, max_message_bytes=1000 + turns)
            topic = await opening
            await wait_until(lambda topic=topic, turns=turns: topic.policies.max_message_bytes == 1000 + turns)
            await world.broker.topics.unload(TOPIC)
        assert world.broker.policies.watches == 0


async def test_a_ledger_that_fails_before_its_topic_hears_of_it_keeps_no_topic_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ends in the step between the two."""
    async with BrokerWorld() as world:
        await world.create_topic("t")
        ledgers = world.broker.topics._managed_ledgers
        open_ledger = ledgers.open

        async def open_too_late(*args: Any) -> Any:
            ledger = await open_ledger(*args)
            ledgers.on_session(SessionState.LOST)
            return ledger

        with monkeypatch.context() as patch:
            patch.setattr(ledgers, "open", open_too_late)
            with pytest.raises(ManagedLedgerFailedError):
                await world.broker.topics.get(TOPIC, may_create=False)
        assert (await world.broker.topics.get(TOPIC, may_create=False)).ledger.is_usable


@pytest.mark.parametrize("step", range(12))
async def test_an_unload_during_any_step_of_a_subscription_is_answered(step: int) -> None:
    """SUBSCRIBE, then an unload so many turns of the loop later: it is served before, or told to come again."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        client.send(subscribe("t", "s", 0, 500, subType=SHARED), pb.CommandUnsubscribe(consumer_id=0, request_id=501))
        await wait_until(lambda: world.broker.statistics().requests_running > 0 or "s" in world.topic("t").subscriptions)
        for _ in range(step):
            await asyncio.sleep(0)
        unloading = [asyncio.ensure_future(world.broker.topics.unload(TOPIC)) for _ in range(2)]
        answers = await client.answers(500, 501)
        for answer in answers.values():
            if isinstance(answer, pb.CommandError):
                assert answer.error in (ServerError.SERVICE_NOT_READY, ServerError.METADATA_ERROR)
        await asyncio.gather(*unloading)
        topic = await world.broker.topics.get(TOPIC, may_create=False)
        assert set(await list_cursors(world.store, TOPIC)) == set(topic.subscriptions)


async def test_deleting_a_subscription_during_a_seek_leaves_no_cursor() -> None:
    for turns in range(20):
        async with BrokerWorld() as world, await world.client() as client:
            await client.produce_on("t")
            await client.publish(5)
            await client.subscribe("t", "s")
            client.send(pb.CommandSeek(consumer_id=0, request_id=1, message_publish_time=1))
            await client.expect(pb.CommandCloseConsumer)
            for _ in range(turns):
                await asyncio.sleep(0)
            try:
                await world.topic("t").delete_subscription("s")
            except CepheidError:  # it met the seek: again, as its caller is told
                await world.topic("t").delete_subscription("s")
            answer = (await client.answers(1))[1]
            assert isinstance(answer, pb.CommandSuccess | pb.CommandError)
            assert await list_cursors(world.store, TOPIC) == []
            await client.subscribe("t", "s", permits=10)
            await client.expect_messages(5)
