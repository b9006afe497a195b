"""Deduplication over the wire where several producers have one name, or a name gives trouble."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_broker.publishing.topic_deduplication import DEDUP_CURSOR
from cepheid_wire import ServerError, add_checksum, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.deduplicated_world import (
    NAME,
    REPEATED,
    TOPIC,
    HeldAppends,
    connect,
    deduplicating,
    deduplication,
    position_of,
    publish,
    stored,
)
from tests.broker.scripted_client import ScriptedClient, full, message, send_frame
from tests.support import wait_until


async def test_a_new_incarnation_waits_for_what_the_old_one_has_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        await publish(client, 0)
        appends = HeldAppends(monkeypatch, world.topic("t").ledger)
        client.send_message(1)
        await wait_until(lambda: bool(appends.held))
        client.abort()
        async with await world.client() as successor:
            successor.send(pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, producer_name=NAME))
            await successor.expect_nothing()
            appends.let_go()
            assert (await successor.expect(pb.CommandProducerSuccess)).last_sequence_id == 1
            monkeypatch.undo()
            assert (await publish(successor, 1, 2))[0] == REPEATED
        assert await stored(world) == [0, 1, 2]


async def test_a_name_in_use_is_refused_at_once_while_its_holder_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever publishes without a pause has always something under way: the other one would never be answered."""
    async with deduplicating() as (world, client), await world.client() as other:
        await connect(client)
        appends = HeldAppends(monkeypatch, world.topic("t").ledger)
        client.send_message(0)
        await client.ping()
        ask = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, producer_name=NAME)
        other.send(ask)
        await client.expect_nothing()  # it answers the broker's PING
        assert (await other.expect(pb.CommandError)).error == ServerError.PRODUCER_BUSY
        appends.let_go()
        await client.expect(pb.CommandSendReceipt)


async def test_who_waits_for_its_predecessors_messages_is_told_when_the_topic_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deduplicating(close_timeout_s=0.2) as (world, client):
        await connect(client)
        topic = world.topic("t")
        appends = HeldAppends(monkeypatch, topic.ledger)
        client.send_message(0)
        await client.ping()
        client.abort()
        async with await world.client() as successor:
            successor.send(pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, producer_name=NAME))
            await successor.expect_nothing(0.05)
            assert len(topic.admission) == 1
            unloading = asyncio.create_task(world.broker.topics.unload(TOPIC))
            refused = await successor.expect(pb.CommandError)
            assert (refused.request_id, refused.error) == (1, ServerError.SERVICE_NOT_READY)
            appends.let_go()
            await unloading
            assert await connect(successor) == -1


async def test_who_fences_its_own_name_goes_on_behind_what_it_pushed_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    fencing = {"producer_name": NAME, "producer_access_mode": pb.ProducerAccessMode.ExclusiveWithFencing}
    async with deduplicating() as (world, old), await world.client() as new:
        await old.produce_on("t", **fencing)
        appends = HeldAppends(monkeypatch, world.topic("t").ledger)
        old.send_message(0)
        await old.ping()
        new.send(pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, **fencing))
        assert (await old.expect(pb.CommandCloseProducer)).producer_id == 0
        await new.expect_nothing()
        appends.let_go()
        monkeypatch.undo()
        success = await new.expect(pb.CommandProducerSuccess)
        assert (success.last_sequence_id, success.topic_epoch) == (0, 1)
        assert (await publish(new, 0, 1))[0] == REPEATED
        assert await stored(world) == [0, 1]
        await old.expect_nothing(0.05)  # what was pushed aside is not answered


async def test_what_another_producer_has_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two producers write under one name: what the second sends behind must not be stored if the first one fails."""
    async with deduplicating() as (world, client), await world.client() as other:
        await connect(client)
        await other.produce_on("t", producer_name="another")
        appends = HeldAppends(monkeypatch, world.topic("t").ledger)
        client.send_message(0)
        await client.ping()
        other.send_message(0)  # its metadata has the same name
        other.send_message(1)
        assert (await other.expect(pb.CommandCloseProducer)).producer_id == 0
        appends.let_go()
        monkeypatch.undo()
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
        assert await stored(world) == [0]


async def test_names_of_who_is_connected_are_kept_beyond_the_bound() -> None:
    """Told its last sequence id it may send again what was not answered: not yet published is not unused."""
    async with deduplicating(deduplication={"max_names": 1}) as (world, client), await world.client() as other:
        await connect(client)
        await publish(client, 0, 1, 2)
        await world.broker.topics.unload(TOPIC)
        await client.expect(pb.CommandCloseProducer)
        assert await connect(client, epoch=1) == 2
        for producer_id, name in enumerate(("a", "b", "c")):
            await other.produce_on("t", producer_id, producer_name=name)
            metadata = pb.MessageMetadata(producer_name=name, sequence_id=0, publish_time=1)
            other.send_message(0, producer_id=producer_id, tail=encode_tail(metadata, b""))
            await other.expect(pb.CommandSendReceipt)
        deduplication(world).snapshot()
        assert await publish(client, 2) == [REPEATED]


async def test_names_that_nobody_uses_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deduplicating(deduplication={"idle_s": 500.0}) as (world, client):
        await connect(client)
        await publish(client, 0)
        found = deduplication(world)
        now = asyncio.get_running_loop().time
        monkeypatch.setattr(found, "_now", lambda: now() + 501)
        found.on_tick()
        assert len(found.sequences) == 1, "it is connected"
        monkeypatch.undo()
        await client.ask(pb.CommandCloseProducer(producer_id=0, request_id=1), pb.CommandSuccess)
        found.on_tick()
        assert len(found.sequences) == 1
        monkeypatch.setattr(found, "_now", lambda: now() + 1001)
        found.on_tick()
        assert len(found.sequences) == 0
        assert world.topic("t").ledger.cursors[DEDUP_CURSOR].sequence_ids == {}


async def test_names_of_any_length_are_told_apart_and_saved() -> None:
    """A message names a producer as it likes, whatever its producer is called: no name may make the cursor impossible to save."""
    async with deduplicating() as (world, client):
        await connect(client)
        names = ["n" * 70_000, "n" * 70_001, "n" * 2_048]
        tails = [encode_tail(pb.MessageMetadata(producer_name=name, sequence_id=5, publish_time=1), b"x") for name in names]
        for tail in (*tails, *tails):
            client.send_bytes(send_frame(pb.CommandSend(producer_id=0, sequence_id=5), tail))
        receipts = [position_of(await client.expect(pb.CommandSendReceipt)) for _ in range(6)]
        assert receipts.count(REPEATED) == 3
        assert REPEATED not in receipts[:3]
        await world.broker.topics.unload(TOPIC)
        await client.expect(pb.CommandCloseProducer)
        await connect(client, epoch=1)
        ledger = world.topic("t").ledger
        assert all(len(name) <= 2_048 for name in ledger.cursors[DEDUP_CURSOR].sequence_ids)
        assert deduplication(world).entries_replayed == 0, "saved when the topic closed"
        for tail in tails:
            client.send_bytes(send_frame(pb.CommandSend(producer_id=0, sequence_id=5), tail))
        assert [position_of(await client.expect(pb.CommandSendReceipt)) for _ in range(3)] == 3 * [REPEATED]


async def test_names_that_begin_with_a_zero_byte_are_names_like_others() -> None:
    """What is saved besides has such names (deduplication.py)."""
    async with deduplicating() as (world, client):
        await client.produce_on("t", producer_name="\0" + NAME)
        await client.produce_on("t", 1, producer_name=NAME)
        for producer_id, name, first, repeated in ((0, "\0" + NAME, 7, False), (1, NAME, 20, False), (0, "\0" + NAME, 7, True)):
            metadata = pb.MessageMetadata(producer_name=name, sequence_id=first, publish_time=1, num_messages_in_batch=3)
            client.send_message(first, producer_id=producer_id, tail=encode_tail(metadata, b""))
            assert (position_of(await client.expect(pb.CommandSendReceipt)) == REPEATED) == repeated
        await world.broker.topics.unload(TOPIC)
        for _ in range(2):
            await client.expect(pb.CommandCloseProducer)
        assert (await client.produce_on("t", producer_name="\0" + NAME)).last_sequence_id == 9
        assert (await client.produce_on("t", 1, producer_name=NAME)).last_sequence_id == 22


async def test_names_are_those_of_the_messages_also_when_they_are_no_text() -> None:
    """Replicated messages keep the name of their first producer; what cannot be read as text is still a name."""

    def named(name: bytes, sequence_id: int) -> bytes:
        tail = message(sequence_id)
        assert len(name) == len(NAME)
        return add_checksum(tail[6:].replace(NAME.encode(), name))

    async with deduplicating() as (world, client):
        await connect(client)
        odd = b"\xff\xfe234567"
        for name, sequence_id in [(b"scripted", 5), (b"replica_", 2), (odd, 1), (odd, 1), (b"replica_", 2)]:
            client.send_message(sequence_id, tail=named(name, sequence_id))
        results = [position_of(await client.expect(pb.CommandSendReceipt)) == REPEATED for _ in range(5)]
        assert results == [False, False, False, True, True]
        await world.broker.topics.unload(TOPIC)
        await client.expect(pb.CommandCloseProducer)
        assert await connect(client, epoch=1) == 5
        client.send_message(1, tail=named(b"\xff\xfe234567", 1))
        assert position_of(await client.expect(pb.CommandSendReceipt)) == REPEATED


async def claim(client: ScriptedClient, owner: str, **more: str) -> pb.CommandProducerSuccess | pb.CommandError:
    """PRODUCER with the properties of a claim: the answer."""
    ask = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, producer_name=NAME)
    for key, value in {"owner": owner, **more}.items():
        ask.metadata.add(key=f"cepheid-name-{key}", value=value)
    client.send(ask)
    received = await client.receive()
    assert received is not None
    return received.body  # type: ignore[no-any-return]  # one of the two


async def test_a_claimed_name_is_its_owners_also_after_the_topic_was_closed() -> None:
    async with deduplicating() as (world, client):
        assert isinstance(await claim(client, "me", **{"memory-s": "1000", "content": "0/two"}), pb.CommandProducerSuccess)
        await publish(client, 0)
        client.abort()
        await world.broker.topics.unload(TOPIC)
        for owner, content, said in (("you", "0/two", "belongs to 'me'"), ("me", "0/three", "of other content (two, now three)")):
            async with await world.client() as other:
                refused = await claim(other, owner, content=content)
                assert isinstance(refused, pb.CommandError)
                assert said in refused.message
        async with await world.client() as again:
            answer = await claim(again, "me", content="0/two")
            assert isinstance(answer, pb.CommandProducerSuccess)
            assert answer.last_sequence_id == 0


async def test_a_claim_needs_deduplication_and_sense() -> None:
    async with deduplicating() as (_, client):
        for properties in ({"memory-s": "-1"}, {"memory-s": "1e9"}, {"content": "two"}, {"content": "x/two"}):
            refused = await claim(client, "me", **properties)
            assert isinstance(refused, pb.CommandError)
            assert refused.error == ServerError.NOT_ALLOWED_ERROR
    async with BrokerWorld() as world, await world.client() as client:
        refused = await claim(client, "me")
        assert isinstance(refused, pb.CommandError)
        assert "needs deduplication, which is off" in refused.message
