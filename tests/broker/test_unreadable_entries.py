"""Entries of which every copy is damaged: consumers get the reason and the rest, and an operator may give the entries up."""

from __future__ import annotations

import logging

import pytest

from cepheid_broker.dispatch import Idle
from cepheid_broker.topics.subscription import Subscription
from cepheid_ledger import EntryUnavailableError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient
from tests.support import wait_until

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = (
    pb.CommandSubscribe.Exclusive,
    pb.CommandSubscribe.Shared,
    pb.CommandSubscribe.Failover,
    pb.CommandSubscribe.Key_Shared,
)


def patient_world() -> BrokerWorld:
    """Whose dispatch tries again so late that only being told helps."""
    return BrokerWorld(dispatch={"read_retry_s": 20.0})


async def damage(world: BrokerWorld, *numbers: int) -> None:
    """Flip a bit of the payloads of these entries, in all the copies that there are, behind all caches."""
    await world._bookie.checkpoint()
    world.topic("t").ledger._tail.clear()
    for number in numbers:
        needle, places = b"payload %d" % number, 0
        for path in (world.disk.root / "entrylog").glob("*.log"):
            data = bytearray(path.read_bytes())
            while (at := data.find(needle)) >= 0:
                data[at] ^= 1
                places += 1
            path.write_bytes(data)
        assert places == 1


def subscription(world: BrokerWorld, name: str = "s") -> Subscription:
    found = world.topic("t").subscriptions[name]
    assert isinstance(found, Subscription)
    return found


async def published(client: ScriptedClient, count: int) -> list[tuple[int, int]]:
    await client.produce_on("t")
    return [receipt.position for receipt in await client.publish(count)]


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER, SHARED, KEY_SHARED])
async def test_consumers_get_the_reason_and_after_a_skip_the_rest(kind: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with patient_world() as world, await world.client() as client:
        places = await published(client, 7)
        await damage(world, 2, 3, 5)
        await client.subscribe("t", "s", permits=10, subType=kind)
        if kind == FAILOVER:
            await client.expect(pb.CommandActiveConsumerChange)
        assert [received.position for received in await client.expect_messages(2)] == places[:2]
        await wait_until(lambda: subscription(world).is_unreadable)
        why = next(why for why in subscription(world).why() if why.idle is Idle.UNREADABLE)
        assert why.position == places[2]
        assert "BAD_DIGEST" in why.details
        assert "--unreadable" in why.until
        assert world.broker.statistics().subscriptions_unreadable == 1
        (line,) = [record for record in caplog.records if record.message == "dispatch.unreadable"]
        assert (line.subscription, line.position) == ("s", str(why.position))  # type: ignore[attr-defined]

        found = await subscription(world).skip_unreadable()
        assert found.positions == [places[2], places[3], places[5]]
        assert [(str(first), str(last)) for first, last, _ in found.runs()] == [
            (f"{places[2][0]}:2", f"{places[2][0]}:3"),
            (f"{places[5][0]}:5", f"{places[5][0]}:5"),
        ]
        assert not found.may_be_more
        assert [received.position for received in await client.expect_messages(2)] == [places[4], places[6]]
        assert world.broker.statistics().subscriptions_unreadable == 0
        assert subscription(world).cursor.backlog_entries == 4
        assert (await subscription(world).skip_unreadable()).positions == []


async def test_entries_to_be_sent_again_that_decayed_meanwhile_are_skipped_where_they_are_waited_for() -> None:
    async with patient_world() as world, await world.client() as client:
        places = await published(client, 4)
        await client.subscribe("t", "s", permits=10, subType=SHARED)
        await client.expect_messages(4)
        await damage(world, 1)
        client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0))
        await wait_until(lambda: subscription(world).is_unreadable)
        assert (await subscription(world).skip_unreadable()).positions == [places[1]]
        again = [received.position for received in await client.expect_messages(3)]
        assert again == [places[0], places[2], places[3]]


async def test_what_was_skipped_stops_no_consumer_that_comes_later() -> None:
    """The entry before it is not acknowledged, so reading begins before the damage."""
    async with patient_world() as world, await world.client() as client:
        places = await published(client, 4)
        await damage(world, 1)
        await client.subscribe("t", "s", permits=10, subType=SHARED)
        await client.expect_messages(1)
        await wait_until(lambda: subscription(world).is_unreadable)
        await subscription(world).skip_unreadable()
        await client.expect_messages(2)
        async with await world.client() as other:
            client.send(pb.CommandCloseConsumer(consumer_id=0, request_id=99))
            await client.expect(pb.CommandSuccess)
            await other.subscribe("t", "s", permits=10, subType=EXCLUSIVE)
            got = [received.position for received in await other.expect_messages(3)]
            assert got == [places[0], places[2], places[3]]


async def test_what_a_bookie_that_is_away_may_have_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with patient_world() as world, await world.client() as client:
        await published(client, 3)
        await client.subscribe("t", "s")
        await damage(world, 0)

        async def away(*_: object, **__: object) -> None:
            raise EntryUnavailableError("a bookie is away")

        monkeypatch.setattr(world.topic("t").ledger, "read", away)
        with pytest.raises(EntryUnavailableError):
            await subscription(world).skip_unreadable()
        assert subscription(world).cursor.backlog_entries == 3


async def test_the_last_entry_may_be_the_one_that_is_skipped() -> None:
    async with patient_world() as world, await world.client() as client:
        places = await published(client, 2)
        await damage(world, 1)
        await client.subscribe("t", "s", permits=10)
        await client.expect_messages(1)
        await wait_until(lambda: subscription(world).is_unreadable)
        assert (await subscription(world).skip_unreadable()).positions == [places[1]]
        await wait_until(lambda: [why.idle for why in subscription(world).why()] == [Idle.AT_END])
        await client.publish(1, first_sequence_id=2)
        await client.expect_message()
