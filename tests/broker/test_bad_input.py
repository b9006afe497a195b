"""What no client should send, and what it gets: an answer that says what is wrong, or nothing; never a stuck or damaged topic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cepheid_managed_ledger import ManagedLedgerSettings
from cepheid_metadata import Position
from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import full, ident, message, subscribe
from tests.support import wait_until

KINDS = (
    pb.CommandSubscribe.Exclusive,
    pb.CommandSubscribe.Shared,
    pb.CommandSubscribe.Failover,
    pb.CommandSubscribe.Key_Shared,
)
EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = KINDS
kinds = pytest.mark.parametrize("kind", KINDS, ids=[pb.CommandSubscribe.SubType.Name(kind) for kind in KINDS])
SMALL_LEDGERS = ManagedLedgerSettings(ledger_max_bytes=500, ledger_min_age_s=0, housekeeping_s=1000)


@pytest.fixture(autouse=True)
def nothing_in_the_log_says_bug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Bad input is no fault of ours: whatever is logged as an error, or with a traceback, is one."""
    yield
    found = [(record.message, record.__dict__.get("error")) for record in caplog.get_records("call") if record.levelname == "ERROR"]
    assert not found


def ack(kind: int) -> dict[str, bool]:
    return {"cumulative": kind in (EXCLUSIVE, FAILOVER)}


# Acknowledgements


@pytest.mark.slow
@kinds
async def test_acknowledgements_of_nothing_change_nothing(kind: int) -> None:
    """Of another topic, of the future, of what is trimmed, below zero, twice: one by one and cumulative."""
    async with BrokerWorld(ledgers=SMALL_LEDGERS) as world, await world.client() as client:
        await client.produce_on("t")
        await client.produce_on("other", 1)
        (foreign,) = [received.position for received in await client.publish(1, producer_id=1)]
        await client.subscribe("t", "s", permits=1000, subType=kind)
        got: list[tuple[int, int]] = []
        for sequence_id in range(30):
            client.send_message(sequence_id, bytes(100))
            while len(got) <= sequence_id:
                received = await client.receive()
                assert received is not None
                got += [received.position] if isinstance(received.body, pb.CommandMessage) else []
        ledgers = world.topic("t").ledger.ledgers
        client.acknowledge(*got[:20])
        await wait_until(lambda: got[0][0] not in ledgers, what="a trim")
        cursor = world.topic("t").subscriptions["s"].cursor
        await client.ping()
        before = cursor.mark_delete, cursor.backlog_entries
        last = got[-1]
        bad = [foreign, (last[0], last[1] + 1), (last[0] + 1, 0), got[0], got[5], (got[0][0], -1), (got[0][0], 1 << 40)]
        bad += [(0, 0), (-1, -1), ((1 << 63) - 1, (1 << 63) - 1), (last[0], (1 << 63) - 1), (last[0], -(1 << 63))]
        for position in bad:
            client.acknowledge(position, position, request_id=7)
            assert not (await client.answers(7))[7].HasField("error")
            client.acknowledge(position, cumulative=True)
            for words in ([], [0], [1], [-(1 << 63)] * 3, [-1] * 3000):
                ids = [ident(position, ack_set=words, batch_size=-5)]
                client.send(pb.CommandAck(consumer_id=0, ack_type=pb.CommandAck.Individual, message_id=ids))
            client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, message_ids=[ident(position)]))
        await client.ping_through()
        assert (cursor.mark_delete, cursor.backlog_entries) == before


@pytest.mark.parametrize("cumulative", [False, True], ids=["one by one", "cumulative"])
async def test_megabytes_of_words_in_one_acknowledgement_stop_nobody(cumulative: bool) -> None:
    """Of one batch that cannot be, and of many; word by word, half a million of them took hours."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        positions = [received.position for received in await client.publish(3, messages=64 * 2048)]
        await client.subscribe("t", "s", permits=1000, subType=EXCLUSIVE if cumulative else SHARED)
        await client.expect_message()
        kind = pb.CommandAck.Cumulative if cumulative else pb.CommandAck.Individual
        began = time.process_time()
        too_many = ident(positions[0], ack_set=[-1] * 400_000)
        client.send(pb.CommandAck(consumer_id=0, ack_type=kind, message_id=[too_many], request_id=7))
        most = [ident(position, ack_set=[0] * 2047 + [-1]) for position in positions]
        for repeated in range(1 if cumulative else 60):
            ids = most[:1] if cumulative else most
            client.send(pb.CommandAck(consumer_id=0, ack_type=kind, message_id=ids, request_id=100 + repeated))
        await client.answers(7, 100)
        await client.ping_through()
        assert time.process_time() - began < 5
        cursor = world.topic("t").subscriptions["s"].cursor
        assert cursor.refused_acks == 1
        assert cursor.backlog_entries == 3, "64 messages of each are left"
        assert cursor.unacked_words(Position(*positions[0])) == (0,) * 2047 + (-1,)
        client.send(pb.CommandSeek(consumer_id=0, request_id=8, message_id=too_many))
        await client.answers(8)
        assert cursor.unacked_words(Position(*positions[0])) is None, "a seek to it delivers it whole"


@kinds
async def test_acknowledging_the_same_twice_counts_once(kind: int) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "s", permits=10, subType=kind)
        got = [received.position for received in await client.skim_messages(3)]
        for _ in range(3):
            await client.acknowledge_saved(got[1], got[1], got[0])
        figures = world.topic("t").subscriptions["s"].figures()
        assert (figures.acked_entries, figures.backlog_entries) == (2, 1)


# Permits


@kinds
async def test_permits_for_a_closed_consumer_are_nobodys(kind: int) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "s", subType=kind)
        await client.receive_for(0.02)
        client.send(
            pb.CommandCloseConsumer(consumer_id=0, request_id=1),
            pb.CommandFlow(consumer_id=0, messagePermits=100),
            subscribe("t", "s", 0, 2, subType=kind),
        )
        await client.answers(1, 2)
        assert not [body for body in await client.receive_for(0.05) if isinstance(body, pb.CommandMessage)]
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=1))
        await client.expect_message()
        await client.expect_nothing(0.05)


# Names


@kinds
async def test_two_consumers_with_one_name(kind: int) -> None:
    """Trap 37: no conflict by the name. Exclusive has room for one, whatever it is called."""
    async with BrokerWorld() as world, await world.client() as client, await world.client() as other:
        await client.subscribe("t", "s", 0, subType=kind, consumer_name="c")
        client.send(subscribe("t", "s", 1, 8, subType=kind, consumer_name="c"))
        refused = [(await client.answers(8))[8]]
        answering = asyncio.create_task(client.receive_for(0.3))  # it lives, and says so when it is asked
        other.send(subscribe("t", "s", 0, 9, subType=kind, consumer_name="c"))
        refused.append((await other.answers(9))[9])
        await answering
        if kind == EXCLUSIVE:
            assert [answer.error for answer in refused] == [ServerError.CONSUMER_BUSY] * 2
        expected = 1 if kind == EXCLUSIVE else 3
        assert len(world.topic("t").subscriptions["s"].consumers) == expected


HOSTILE = {
    "empty": "",
    "spaces": "   ",
    "nul": "a\x00b",
    "newline": "a\nb\r",
    "slashes": "a/b//c",
    "dots": "..",
    "url": "%2F%00%zz",
    "quote": "'\"`$(x);--",
    "unicode": "é✓🎉",
    "right-to-left": "\u202eabc\u200b\ufeff",
    "surrogate-like": "\ud7ff\ue000",
    "last": "\U0010ffff",
    "braces": "{0}%s{{}}",
    "partition": "x-partition-1",
    "underscores": "__system",
    "long": "n" * 999,
    "long in bytes": "🎉" * 250,
    "longer": "n" * 1001,
    "longer in bytes": "🎉" * 251,
    "megabyte": "n" * (1 << 20),
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
async def test_names_of_every_kind_in_every_place(name: str) -> None:
    """Each is served under exactly this name, or refused at once with a short text; and the connection lives."""
    async with BrokerWorld() as world, await world.client() as client:
        label = [pb.KeyValue(key=name, value=name)]
        asks: list[Any] = [
            pb.CommandPartitionedTopicMetadata(topic=f"persistent://public/default/{name}", request_id=1),
            pb.CommandPartitionedTopicMetadata(topic=f"persistent://{name}/default/t", request_id=2),
            pb.CommandPartitionedTopicMetadata(topic=name, request_id=3),
            pb.CommandLookupTopic(topic=f"persistent://public/{name}/t", request_id=4),
            pb.CommandLookupTopic(topic=full("t"), request_id=5, advertised_listener_name=name),
            pb.CommandGetTopicsOfNamespace(namespace=name, request_id=6),
            pb.CommandGetTopicsOfNamespace(namespace="public/default", request_id=7, topics_pattern=name),
            pb.CommandGetTopicsOfNamespace(namespace="public/default", request_id=8, topics_hash=name),
            pb.CommandWatchTopicList(namespace="public/default", request_id=9, watcher_id=1, topics_pattern=name),
            pb.CommandGetSchema(topic=name, request_id=10),
            pb.CommandProducer(topic=full("t"), producer_id=1, request_id=11, producer_name=name),
            pb.CommandProducer(topic=full("t"), producer_id=2, request_id=12, metadata=label),
            pb.CommandProducer(topic=full("t"), producer_id=3, request_id=13, initial_subscription_name=name),
            pb.CommandProducer(topic=f"persistent://public/default/{name}", producer_id=4, request_id=14),
            subscribe("t", name, 1, 15, subType=SHARED),
            subscribe("t", "s", 2, 16, subType=SHARED, consumer_name=name),
            subscribe("t", "s", 3, 17, subType=SHARED, metadata=label),
            subscribe("t", "s2", 4, 18, subType=SHARED, subscription_properties=label),
            subscribe(f"non-persistent://public/default/{name}", name, 5, 19, subType=SHARED),
            pb.CommandProducer(topic=full("t"), producer_id=6, request_id=20, schema=pb.Schema(name=name, type=0, schema_data=b"")),
        ]
        for ask in asks:
            client.send(ask)
            answer = await client.receive_body()
            while getattr(answer, "request_id", None) != ask.request_id:  # news for the watcher, and CLOSE_CONSUMER
                answer = await client.receive_body()
            text = getattr(answer, "message", "")
            assert len(text) < 2500, f"{type(ask).__name__}: {text}"
            if isinstance(answer, pb.CommandError):
                assert answer.error != ServerError.UNKNOWN_ERROR, text
                assert name in ("", "   ") or not text or "\n" not in text
        tail = message(0, b"x", partition_key=name, ordering_key=name.encode(), properties=label)
        await client.produce_on("t", 9)
        client.send_message(0, producer_id=9, tail=tail)
        while not isinstance(await client.receive_body(), pb.CommandSendReceipt):
            pass
        topic = world.topic("t")
        served = [name] if 0 < len(name.encode()) <= 1000 else []
        kept = ["s", "s2"] if len(name) < 10_000 else []  # with this name and as long a text in their properties
        assert sorted(topic.subscriptions) == sorted([*served, *kept])
        await client.ping_through()
        if served:
            await world.broker.topics.unload(topic.name)  # and comes back from the records
            found = await world.broker.topics.get(topic.name, may_create=False)
            assert name in found.subscriptions
            await found.delete_subscription(name)
            assert name not in found.subscriptions


# Ranges of keys


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ([], "1 to 1000 hash ranges"),
        ([(5, 4)], "5..4 is invalid"),
        ([(-1, 4)], "-1..4 is invalid"),
        ([(0, 65536)], "0..65536 is invalid"),
        ([(65535, 65536)], "65535..65536 is invalid"),
        ([(-(1 << 31), (1 << 31) - 1)], "is invalid"),
        ([(0, 10), (10, 20)], "of one consumer overlap"),
        ([(100, 200)], "overlaps 200..300 of consumer 'holder'"),
        ([(0, 65535)], "overlaps 200..300 of consumer 'holder'"),
        ([(number, number) for number in range(301, 2000)], "1 to 1000 hash ranges"),
    ],
)
async def test_ranges_that_cannot_be_had(ranges: list[tuple[int, int]], text: str) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s", 0, subType=KEY_SHARED, consumer_name="holder", keySharedMeta=sticky([(200, 300)]))
        error = await client.ask(subscribe("t", "s", 1, 9, subType=KEY_SHARED, keySharedMeta=sticky(ranges)), pb.CommandError)
        assert error.error == ServerError.CONSUMER_ASSIGN_ERROR
        assert text in error.message
        await client.expect_nothing(0.02)  # no CLOSE_CONSUMER: it fails at once
        await client.subscribe("t", "s", 1, subType=KEY_SHARED, keySharedMeta=sticky([(0, 199), (301, 65535)]))
        assert len(world.topic("t").subscriptions["s"].consumers) == 2


def sticky(ranges: list[tuple[int, int]]) -> pb.KeySharedMeta:
    asked = [pb.IntRange(start=first, end=last) for first, last in ranges]
    return pb.KeySharedMeta(keySharedMode=pb.STICKY, hashRanges=asked)


# Consumers that never acknowledge


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED, FAILOVER], ids=["Shared", "Key_Shared", "Failover"])
async def test_what_a_consumer_never_acknowledged_goes_to_another_when_it_leaves(kind: int) -> None:
    policies = {"max_unacked_per_subscription": 20}
    async with BrokerWorld(policies=policies) as world, await world.client() as client:
        lazy, heir = await world.client(), await world.client()
        await lazy.subscribe("t", "s", permits=1000, subType=kind, consumer_name="a")
        await client.produce_on("t")
        for sequence_id in range(50):
            client.send_message(sequence_id, tail=message(sequence_id, b"x", partition_key=f"k{sequence_id % 7}"))
            await client.expect(pb.CommandSendReceipt)
        if kind != FAILOVER:  # it has its limit
            await wait_until(lambda: world.topic("t").subscriptions["s"].figures().unacked_messages >= 20)
            why = str(world.topic("t").subscriptions["s"].why())
            assert "unacknowledged" in why
        heir.send(subscribe("t", "s", 0, 1, subType=kind, consumer_name="b"))
        await heir.answers(1)
        heir.send(pb.CommandFlow(consumer_id=0, messagePermits=1000))
        await heir.ping_through()
        lazy.abort()
        got: set[int] = set()
        while len(got) < 50:
            body = await heir.receive_body()
            if isinstance(body, pb.CommandMessage):
                got.add(body.message_id.entryId)
                heir.acknowledge((body.message_id.ledgerId, body.message_id.entryId))
        await heir.ping_through()
        assert world.topic("t").subscriptions["s"].cursor.backlog_entries == 0
        await heir.close()


# Seeks

SEEKS: dict[str, dict[str, Any]] = {
    "earliest": {"message_id": ident((-1, -1))},
    "latest": {"message_id": ident(((1 << 63) - 1, (1 << 63) - 1))},
    "almost latest": {"message_id": ident(((1 << 63) - 1, 0))},
    "future": {"message_id": ident((1 << 40, 7))},
    "entry of the future": {"message_id": ident((0, 1 << 50))},
    "below zero": {"message_id": ident((-(1 << 63), -(1 << 63)))},
    "before the first": {"message_id": ident((0, -1))},
    "batch index": {"message_id": ident((0, 3), batch_index=1 << 30)},
    "batch index below zero": {"message_id": ident((0, 3), batch_index=-7)},
    "words": {"message_id": ident((0, 3), ack_set=[-1] * 50_000)},
    "time 0": {"message_publish_time": 0},
    "end of time": {"message_publish_time": (1 << 64) - 1},
}


@kinds
@pytest.mark.parametrize("target", SEEKS.values(), ids=SEEKS)
async def test_seeks_to_nowhere_end_and_leave_a_subscription_that_works(kind: int, target: dict[str, Any]) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(5)
        await client.subscribe("t", "s", permits=100, subType=kind)
        client.send(pb.CommandSeek(consumer_id=0, request_id=77, **target))  # while it is being delivered to
        while not isinstance(body := await client.receive_body(), pb.CommandSuccess | pb.CommandError):
            pass
        assert body.request_id == 77
        await client.close()
        async with await world.client() as heir:
            heir.send(subscribe("t", "s", 0, 1, subType=kind), pb.CommandProducer(topic=full("t"), producer_id=0, request_id=2))
            await heir.answers(1, 2)
            heir.send(pb.CommandFlow(consumer_id=0, messagePermits=100))
            heir.send_message(9, b"new")
            while not (isinstance(body := await heir.receive_body(), pb.CommandMessage) and body.message_id.entryId == 5):
                pass  # a new entry is delivered, whatever comes before it


async def test_a_seek_during_a_seek_and_by_a_consumer_that_is_being_closed() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(5)
        earliest = ident((-1, -1))
        for round_ in range(20):
            await client.subscribe("t", "s", 0, subType=SHARED)
            await client.subscribe("t", "s", 1, subType=SHARED)
            client.send(
                pb.CommandSeek(consumer_id=0, request_id=100, message_id=earliest),
                pb.CommandSeek(consumer_id=1, request_id=101, message_id=earliest),  # closed by the seek before
                pb.CommandSeek(consumer_id=0, request_id=102, message_publish_time=round_),
                pb.CommandCloseConsumer(consumer_id=0, request_id=103),
                pb.CommandCloseConsumer(consumer_id=1, request_id=104),
                pb.CommandSeek(consumer_id=0, request_id=105, message_id=earliest),
            )
            found = await client.answers(100, 101, 102, 103, 104, 105)
            assert [type(found[request_id]) for request_id in (100, 103, 104)] == [pb.CommandSuccess] * 3
            for request_id in (101, 102, 105):
                assert found[request_id].error == ServerError.METADATA_ERROR
        await client.subscribe("t", "s", 0, subType=SHARED, permits=10)
        await client.expect_messages(5)


# Schemas


@pytest.mark.parametrize("size_bytes", [1 << 20, (1 << 20) + 1], ids=["1 MB", "1 MB and a byte"])
async def test_a_schema_of_the_largest_size_is_taken_and_a_byte_more_is_refused(size_bytes: int) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        frame = b'{"type":"record","name":"r","doc":"%s","fields":[]}'
        data = frame % (b"d" * (size_bytes - len(frame) + 2))
        assert len(data) == size_bytes
        schema = pb.Schema(name="s", type=pb.Schema.Avro, schema_data=data)
        asks: list[Any] = [
            pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, schema=schema),
            subscribe("t2", "s", 0, 2, subType=SHARED, schema=schema),
        ]
        for ask in asks:
            client.send(ask)
            answer = await client.receive_body()
            if size_bytes == 1 << 20:
                assert not isinstance(answer, pb.CommandError), answer
            else:
                assert isinstance(answer, pb.CommandError)
                assert answer.error == ServerError.INCOMPATIBLE_SCHEMA
                assert f"{size_bytes} bytes; {1 << 20} are possible" in answer.message
        await client.ping()


# Properties


@pytest.mark.parametrize("size_bytes", [60_000, 1 << 20])
async def test_properties_of_a_megabyte_are_refused_and_less_is_kept(size_bytes: int) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        large = [pb.KeyValue(key="k", value="v" * size_bytes)]
        asks: list[Any] = [
            pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, metadata=large),
            subscribe("t", "a", 0, 2, subType=SHARED, metadata=large),
            subscribe("t", "b", 1, 3, subType=SHARED, subscription_properties=large),
        ]
        for ask in asks:
            client.send(ask)
            answer = await client.receive_body()
            if size_bytes < 65536:
                assert not isinstance(answer, pb.CommandError), answer
            else:
                assert isinstance(answer, pb.CommandError)
                assert answer.error == ServerError.NOT_ALLOWED_ERROR
                assert str(size_bytes + 1) in answer.message
        await client.ping()


# Ids that were never opened


async def test_a_client_that_talks_of_what_it_never_opened() -> None:
    async with BrokerWorld() as world, await world.client() as other:
        await other.produce_on("t")
        await other.subscribe("t", "s")
        async with await world.client() as client:
            for number in (0, 1, (1 << 64) - 1):
                client.send(
                    pb.CommandFlow(consumer_id=number, messagePermits=0),  # not looked at: nobody has them
                    pb.CommandAck(consumer_id=number, ack_type=pb.CommandAck.Cumulative, message_id=[]),
                    pb.CommandRedeliverUnacknowledgedMessages(consumer_id=number, message_ids=[ident((1, 1))]),
                    pb.CommandCloseProducer(producer_id=number, request_id=10),
                    pb.CommandCloseConsumer(consumer_id=number, request_id=11),
                    pb.CommandWatchTopicListClose(watcher_id=number, request_id=12),
                    pb.CommandUnsubscribe(consumer_id=number, request_id=13),
                    pb.CommandSeek(consumer_id=number, request_id=14),
                    pb.CommandGetLastMessageId(consumer_id=number, request_id=15),
                    pb.CommandConsumerStats(consumer_id=number, request_id=16),
                    pb.CommandAck(consumer_id=number, ack_type=pb.CommandAck.Individual, message_id=[], request_id=17),
                )
                found = await client.answers(10, 11, 12, 13, 14, 15, 16, 17)
                assert [type(found[number]) for number in (10, 11, 12)] == [pb.CommandSuccess] * 3
                assert [type(found[number]) for number in (13, 14, 15)] == [pb.CommandError] * 3
                assert found[17].error == ServerError.CONSUMER_NOT_FOUND
            client.send_message(0, producer_id=0)  # as the reference: this one closes
            await client.expect_closed()
        await other.publish(1)
        assert len(world.topic("t").subscriptions["s"].consumers) == 1
