"""What a refused SUBSCRIBE leaves behind: nothing; and who is refused when many ask at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cepheid_broker.settings import ConnectionSettings
from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, ident, subscribe
from tests.support import wait_until

SHARED = pb.CommandSubscribe.Shared
EXCLUSIVE = pb.CommandSubscribe.Exclusive
KEY_SHARED = pb.CommandSubscribe.Key_Shared
SCHEMA = pb.Schema(name="s", type=pb.Schema.String, schema_data=b"")


async def refused(client: ScriptedClient, ask: pb.CommandSubscribe) -> pb.CommandError:
    error = await client.ask(ask, pb.CommandError)
    assert error.request_id == ask.request_id
    return error


async def test_a_refused_reader_leaves_no_subscription() -> None:
    """Its name is a random one: nobody would come back to it, and each attempt would leave another one."""
    for domain in ("persistent", "non-persistent"):
        topic = f"{domain}://public/default/t"
        async with BrokerWorld() as world, await world.client() as client:
            await client.subscribe(topic, "s")
            found = world.topic(topic)
            found.on_policies(replace(found.policies, max_consumers=1))
            for number in range(3):
                ask = subscribe(topic, f"reader-{number}", 1, number, subType=EXCLUSIVE, durable=False)
                assert (await refused(client, ask)).error == ServerError.CONSUMER_BUSY
            assert list(found.subscriptions) == ["s"]


async def test_a_reader_that_vanishes_while_it_waits_for_another_leaves_nothing() -> None:
    async with BrokerWorld(connection={"liveness_probe_s": 5}) as world, await world.client() as holder:
        holder.answer_pings = False
        await holder.subscribe("t", "r", durable=False)
        heir = await world.client()
        heir.send(subscribe("t", "r", 0, 1, subType=EXCLUSIVE, durable=False))
        await holder.expect(pb.CommandPing)
        heir.abort()
        await wait_until(lambda: world.broker.statistics().connections == 1)
        assert len(world.topic("t").subscriptions["r"].consumers) == 1
        await holder.ask(pb.CommandCloseConsumer(consumer_id=0, request_id=2), pb.CommandSuccess)
        assert not world.topic("t").subscriptions


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"subType": KEY_SHARED, "keySharedMeta": pb.KeySharedMeta(keySharedMode=pb.STICKY)}, ServerError.CONSUMER_ASSIGN_ERROR),
        ({"subType": SHARED, "consumer_name": "c" * 1001}, ServerError.NOT_ALLOWED_ERROR),
        ({"subType": SHARED, "metadata": [pb.KeyValue(key="k", value="v" * (1 << 20))]}, ServerError.NOT_ALLOWED_ERROR),
        ({"subType": SHARED, "read_compacted": True}, ServerError.NOT_ALLOWED_ERROR),
    ],
    ids=["ranges", "name", "metadata", "compacted"],
)
async def test_what_can_be_refused_at_once_makes_no_topic(fields: dict[str, Any], code: ServerError) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        error = await refused(client, subscribe("t", "s", 0, 1, **fields))
        assert error.error == code
        assert len(error.message) < 300
        assert not list(world.broker.topics.loaded())


async def test_who_may_not_subscribe_registers_no_schema() -> None:
    async with BrokerWorld(policies={"subscription_types": ["Shared"]}) as world, await world.client() as client:
        error = await refused(client, subscribe("t", "s", 0, 1, subType=EXCLUSIVE, schema=SCHEMA))
        assert "allowed are Shared" in error.message
        assert world.broker.schemas.registered == 0


async def test_the_limit_of_consumers_per_connection_holds_for_those_that_come_at_once() -> None:
    async with BrokerWorld(connection=ConnectionSettings(max_consumers=5)) as world, await world.client() as client:
        asks = [subscribe("t", "s", number, number, subType=SHARED) for number in range(20)]
        client.send(*asks)
        answers = [await client.receive() for _ in asks]
        served = [answer.body.request_id for answer in answers if answer and isinstance(answer.body, pb.CommandSuccess)]
        assert served == list(range(5)), "who came first"
        assert (await refused(client, asks[7])).error == ServerError.CONSUMER_BUSY


async def test_unsubscribing_and_closing_at_once_takes_nothing_from_others() -> None:
    """The one who asks counts as connected until it is gone; the others count in any case."""
    async with BrokerWorld() as world, await world.client() as client, await world.client() as other:
        await client.subscribe("t", "s", subType=SHARED)
        await other.subscribe("t", "s", subType=SHARED)
        client.send(pb.CommandUnsubscribe(consumer_id=0, request_id=1), pb.CommandCloseConsumer(consumer_id=0, request_id=2))
        assert (await client.expect(pb.CommandSuccess)).request_id == 2
        assert (await client.expect(pb.CommandError)).request_id == 1
        assert len(world.topic("t").subscriptions["s"].consumers) == 1
        await other.expect_nothing(0.05)


@pytest.mark.slow
async def test_a_seek_does_not_meet_the_end_of_the_grace_of_the_one_before() -> None:
    async with BrokerWorld(reader_seek_grace_s=1.0) as world, await world.client() as client:
        await client.subscribe("t", "r", durable=False)
        for request_id in (1, 2):
            client.send(pb.CommandSeek(consumer_id=0, request_id=request_id, message_id=ident((-1, -1))))
            await client.expect(pb.CommandCloseConsumer)
            await client.expect(pb.CommandSuccess)
            await client.subscribe("t", "r", durable=False)
        subscription = world.topic("t").subscriptions["r"]
        subscription.begin_seek()
        await client.expect(pb.CommandCloseConsumer)
        subscription.end_seek()
        subscription.begin_seek()  # by the admin API, say: nobody had come back
        await client.expect_nothing(1.2)
        assert not subscription.closed
        subscription.end_seek()
        await wait_until(lambda: subscription.closed, what="the grace ends")
        assert not world.topic("t").subscriptions
