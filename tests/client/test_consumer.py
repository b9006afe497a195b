"""Receiving: acknowledgements, giving back, dead letters, seeks, patterns, and what a cancelled call leaves."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

import cepheid
from cepheid.consumer import WAITING_PER_HANDLER
from cepheid.lookup import Lookup
from cepheid.routing import murmur3_hash
from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.client.conftest import ClusterThread
from tests.support import wait_until

RECEIVE_S = 30.0
SOON = cepheid.NackBackoff(first_s=0.05, limit_s=0.1)


@dataclass
class Point:
    x: int


async def publish(client: cepheid.Client, topic: str, count: int, **options: Any) -> list[cepheid.MessageId]:
    async with client.producer(topic, **options) as producer:
        return list(await asyncio.gather(*(producer.send(b"%d" % number) for number in range(count))))


async def data_of(consumer: cepheid.Consumer[bytes], count: int) -> list[bytes]:
    return [(await consumer.receive(RECEIVE_S)).data for _ in range(count)]


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


async def assert_silent(consumer: cepheid.Consumer[bytes]) -> None:
    with pytest.raises(cepheid.TimedOutError, match="no message of"):
        await consumer.receive(timeout=0.2)


@pytest.mark.parametrize("kind", ["exclusive", "shared", "failover", "key_shared"])
@pytest.mark.parametrize("batching", [True, False])
async def test_what_is_acknowledged_does_not_come_again(cluster: ClusterThread, topic: str, kind: Any, batching: bool) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 10, batching=batching)
        async with client.consumer(topic, "s", type=kind, start="earliest") as consumer:
            messages = [await consumer.receive(RECEIVE_S) for _ in range(10)]
            await asyncio.gather(*(consumer.ack(message) for message in messages[:3]))
            for message in messages[5:]:
                consumer.ack_nowait(message)
        async with client.consumer(topic, "s", type=kind) as consumer:
            assert await data_of(consumer, 2) == numbers(3, 5)
            await assert_silent(consumer)


async def test_an_acknowledgement_beside_close_is_sent_and_confirmed(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        for turns in range(4):
            await publish(client, topic, 1)
            consumer = await client.consumer(topic, "s", start="earliest")
            acknowledging = asyncio.ensure_future(consumer.ack(await consumer.receive(RECEIVE_S)))
            for _ in range(turns + 1):
                await asyncio.sleep(0)
            await consumer.close()
            await asyncio.wait_for(acknowledging, RECEIVE_S)
        async with client.consumer(topic, "s") as consumer:
            await assert_silent(consumer)


async def test_ack_waits_for_the_broker_also_if_it_fills_a_group(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepheid.topic_consumer.ACK_GROUP_ENTRIES", 1)  # every acknowledgement is sent at once
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 3, batching=False)
        async with client.consumer(topic, "s", start="earliest", receiver_queue=3) as consumer:
            messages = [await consumer.receive(RECEIVE_S) for _ in range(3)]
            (link,) = consumer.links.values()
            acknowledging = asyncio.ensure_future(consumer.ack(messages[0]))
            await asyncio.sleep(0)
            assert link.connection is not None
            link.connection.abort("cut by the test")
            with pytest.raises(cepheid.ConnectError):
                await acknowledging
            await asyncio.gather(*map(consumer.ack, messages))  # while it is not attached: when it is again
            stats = cluster.admin("GET", f"persistent/public/default/{topic}/stats")
            assert stats["subscriptions"]["s"]["msgBacklog"] == 0


async def test_cumulative_acknowledgement_inside_a_batch(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 10)
        async with client.consumer(topic, "s", start="earliest") as consumer:
            messages = [await consumer.receive(RECEIVE_S) for _ in range(10)]
            await consumer.ack_cumulative(messages[6])
        async with client.consumer(topic, "s") as consumer:
            assert await data_of(consumer, 3) == numbers(7, 10)
            await consumer.ack(messages[9].message_id)
        async with client.consumer(topic, "s", type="shared") as consumer:
            assert await data_of(consumer, 2) == numbers(7, 9)
            with pytest.raises(cepheid.UsageError, match="a shared subscription has no cumulative"):
                await consumer.ack_cumulative(messages[0].message_id)


async def test_a_message_given_back_comes_again_and_counts(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 3, batching=False)
        async with client.consumer(topic, "s", type="shared", start="earliest", nack_backoff=SOON) as consumer:
            first = await consumer.receive(RECEIVE_S)
            with pytest.raises(ZeroDivisionError):
                async with first.processing():
                    _ = 1 / 0
            async with (await consumer.receive(RECEIVE_S)).processing() as message:
                assert message.data == b"1"
            third = await consumer.receive(RECEIVE_S)
            task = asyncio.ensure_future(_process_for_ever(third))
            await asyncio.sleep(0)
            task.cancel()
            again = [await consumer.receive(RECEIVE_S) for _ in range(2)]
            assert sorted((message.data, message.redelivery_count) for message in again) == [(b"0", 1), (b"2", 1)]


async def _process_for_ever(message: cepheid.Message[bytes]) -> None:
    async with message.processing():
        await asyncio.sleep(3600)


async def test_of_a_batch_only_what_is_not_acknowledged_comes_again(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 4)
        async with client.consumer(
            topic, "s", type="shared", start="earliest", nack_backoff=SOON, batch_index_acks=False
        ) as consumer:
            messages = [await consumer.receive(RECEIVE_S) for _ in range(4)]
            for message in messages[:2]:
                consumer.ack_nowait(message)
            consumer.nack(messages[2])
            assert await data_of(consumer, 2) == numbers(2, 4)


async def test_an_exclusive_consumer_that_gives_back_keeps_the_order(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 50, batching=False)
        async with client.consumer(topic, "s", start="earliest", nack_backoff=SOON, receiver_queue=10) as consumer:
            for number in range(20):
                message = await consumer.receive(RECEIVE_S)
                assert message.data == b"%d" % number
                if number < 10:
                    consumer.ack_nowait(message)
            consumer.nack(message, delay=0)
            await asyncio.sleep(0.5)
            assert await data_of(consumer, 40) == numbers(10, 50)


async def test_messages_that_fail_again_and_again_become_dead_letters(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic) as producer:
            await producer.send(b"poison", key="k", properties={"p": "v"})
        dead = cepheid.DeadLetters(after=2, subscription="buried")
        async with client.consumer(topic, "s", type="shared", start="earliest", nack_backoff=SOON, dead_letters=dead) as consumer:
            for delivery in range(3):
                message = await consumer.receive(RECEIVE_S)
                assert message.redelivery_count == delivery
                consumer.nack(message)
            await assert_silent(consumer)
            async with client.consumer(f"{topic}-s-DLQ", "buried") as undertaker:
                letter = await undertaker.receive(RECEIVE_S)
                assert (letter.data, letter.key, letter.properties["p"]) == (b"poison", "k", "v")
                assert letter.properties["REAL_TOPIC"].endswith(topic)
        async with client.consumer(topic, "s", type="shared") as consumer:
            await assert_silent(consumer)


async def test_what_cannot_be_unpacked_is_never_a_dead_letter(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> bytes:
        raise cepheid.UnreadableMessageError("the codec is missing")

    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 1)
        dead = cepheid.DeadLetters(after=1, topic=f"{topic}-dead", subscription="buried")
        monkeypatch.setattr("cepheid.topic_consumer.unpack", refuse)
        async with client.consumer(
            topic, "s", type="shared", start="earliest", nack_backoff=SOON, dead_letters=dead, retry=True
        ) as consumer:
            for delivery in range(4):
                message = await consumer.receive(RECEIVE_S)
                assert message.redelivery_count == delivery
                with pytest.raises(cepheid.UnreadableMessageError):
                    await consumer.retry_later(message, 0.01)
                consumer.nack(message)
            monkeypatch.undo()
            async with client.consumer(f"{topic}-dead", "buried") as undertaker:
                assert await data_of(undertaker, 1) == [b"0"]


async def test_a_dead_letter_producer_that_failed_is_replaced(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 2)
        async with client.consumer(topic, "s", type="shared", start="earliest", retry=True) as consumer:
            await consumer.retry_later(await consumer.receive(RECEIVE_S), 0)
            (task,) = consumer._producers.values()
            task.result()._partitions[0]._fail(cepheid.TerminatedError("terminated by the test"))
            await consumer.retry_later(await consumer.receive(RECEIVE_S), 0)


async def test_retry_later_goes_through_the_retry_topic(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 1)
        dead = cepheid.DeadLetters(after=2, subscription="buried")
        async with client.consumer(topic, "s", type="shared", start="earliest", retry=True, dead_letters=dead) as consumer:
            attempts = []
            for _ in range(3):
                message = await consumer.receive(RECEIVE_S)
                attempts.append(message.properties.get("RECONSUMETIMES"))
                await consumer.retry_later(message, 0.05)
            assert attempts == [None, "1", "2"]
            async with client.consumer(f"{topic}-s-DLQ", "buried") as undertaker:
                assert await data_of(undertaker, 1) == [b"0"]


async def test_retry_later_with_a_partitioned_retry_topic(cluster: ClusterThread, topic: str) -> None:
    cluster.create_partitions(f"{topic}-s-RETRY", 2)
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 1)
        async with client.consumer(topic, "s", type="shared", start="earliest", retry=True) as consumer:
            for attempts in (None, "1", "2"):
                message = await consumer.receive(RECEIVE_S)
                assert message.properties.get("RECONSUMETIMES") == attempts
                await consumer.retry_later(message, 0)


async def test_retry_later_while_the_consumer_is_closed(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 1)
        consumer = await client.consumer(topic, "s", type="shared", start="earliest", retry=True)
        retrying = asyncio.ensure_future(consumer.retry_later(await consumer.receive(RECEIVE_S), 0))
        await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(cepheid.ClosedError):
            await retrying


async def test_seeks(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        ids = await publish(client, topic, 5)
        await asyncio.sleep(0.05)
        between = datetime.now(UTC)
        await asyncio.sleep(0.05)
        await publish(client, topic, 3)
        async with client.consumer(topic, "s", start="earliest") as consumer:
            await data_of(consumer, 8)
            for to, inclusive, expected in (
                ("earliest", False, numbers(0, 5) + numbers(0, 3)),
                (ids[1], False, numbers(2, 5) + numbers(0, 3)),
                (ids[1], True, numbers(1, 5) + numbers(0, 3)),
                (between, False, numbers(0, 3)),
                ("latest", False, []),
            ):
                await consumer.seek(to, inclusive=inclusive)
                assert await data_of(consumer, len(expected)) == expected, to
                await assert_silent(consumer)
            with pytest.raises(cepheid.UsageError, match="expected 'earliest', 'latest'"):
                await consumer.seek("soon")


async def test_readers_start_where_they_are_told(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        ids = await publish(client, topic, 5)
        await asyncio.sleep(0.05)
        between = datetime.now(UTC)
        await asyncio.sleep(0.05)
        await publish(client, topic, 2, batching=False)
        for start, inclusive, expected in (
            (ids[2], False, numbers(3, 5) + numbers(0, 2)),
            (ids[2], True, numbers(2, 5) + numbers(0, 2)),
            (between, False, numbers(0, 2)),
            ("latest", False, []),
        ):
            got = []
            async with client.reader(topic, start=start, inclusive=inclusive) as reader:
                while await reader.has_message_available():
                    got.append((await reader.read(RECEIVE_S)).data)
            assert got == expected, start


async def test_a_cancelled_receive_loses_nothing(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.consumer(topic, "s") as consumer:
        waiting = [asyncio.ensure_future(consumer.receive()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        async with client.producer(topic) as producer:
            await asyncio.gather(*(producer.send(b"%d" % number) for number in range(3)))
        first = await waiting[1]
        waiting[2].cancel()
        done = await asyncio.gather(waiting[2], return_exceptions=True)
        got = [first.data, *(each.data for each in done if isinstance(each, cepheid.Message))]
        got += await data_of(consumer, 3 - len(got))
        assert got == numbers(0, 3)


async def test_receive_many_takes_what_is_there(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.consumer(topic, "s") as consumer:
        await publish(client, topic, 10)
        first = await consumer.receive_many(4, timeout=RECEIVE_S)
        assert [message.data for message in first] == numbers(0, 4)
        assert [message.data for message in await consumer.receive_many(timeout=RECEIVE_S)] == numbers(4, 10)


async def test_iterating_ends_when_the_consumer_is_closed(cluster: ClusterThread, topic: str) -> None:
    closing: list[asyncio.Future[None]] = []
    async with cepheid.connect(cluster.url) as client:
        consumer = await client.consumer(topic, "s")
        await publish(client, topic, 3)
        got = []
        async for message in consumer:
            got.append(message.data)
            if len(got) == 3:
                asyncio.get_running_loop().call_later(0.05, lambda: closing.append(asyncio.ensure_future(consumer.close())))
        assert got == numbers(0, 3)
        await closing[0]
        with pytest.raises(cepheid.ClosedError):
            await consumer.receive()


async def test_taking_messages_without_a_pause_lets_the_loop_go_on(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.consumer(topic, "s", receiver_queue=50) as consumer:
        await publish(client, topic, 50)
        await wait_until(lambda: consumer.queued_messages == 50)
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        first = await data_of(consumer, 25)
        assert not turns, "what is there is returned at once"
        rest = await data_of(consumer, 25)
        assert turns, "permits were written after 25 messages, and leave the process while others are processed"
        assert first + rest == numbers(0, 50)


async def test_a_loop_over_a_consumer_may_be_left_and_begun_again(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.consumer(topic, "s") as consumer:
        await publish(client, topic, 4)
        got = []
        for _ in range(2):
            async for message in consumer:
                got.append(message.data)
                break
        got += await data_of(consumer, 2)
        assert got == numbers(0, 4)


async def test_a_subscription_has_one_exclusive_consumer(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.consumer(topic, "s"):
        with pytest.raises(cepheid.BusyError, match="use another name, or choose a type that can be shared"):
            await client.consumer(topic, "s")
        async with client.consumer(topic, "other") as other:
            await other.unsubscribe()
    stats = cluster.admin("GET", f"persistent/public/default/{topic}/stats")
    assert list(stats["subscriptions"]) == ["s"]


async def test_failover_has_one_active_consumer(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        async with client.consumer(topic, "s", type="failover", name="a") as first:
            async with client.consumer(topic, "s", type="failover", name="b") as second:
                await wait_until(lambda: first.is_active != second.is_active, what="one is active")
                active, other = (first, second) if first.is_active else (second, first)
                await active.close()
                await wait_until(lambda: other.is_active, what="the other one is active")


async def test_several_topics_and_patterns(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url, partition_refresh_s=0.05) as client:
        await publish(client, f"{topic}-a", 1)
        cluster.create_partitions(f"{topic}-b", 2)
        async with client.consumer([f"{topic}-a", f"{topic}-b"], "several", start="earliest") as consumer:
            assert len(consumer.topics) == 3
            await publish(client, f"{topic}-b", 1)
            assert await data_of(consumer, 2) == [b"0", b"0"]
        pattern = re.compile(f"public/default/{topic}-.*")
        async with client.consumer(pattern, "matching", start="earliest") as consumer:
            assert len(consumer.topics) == 3
            await data_of(consumer, 2)
            await publish(client, f"{topic}-c", 1)  # a topic that is not there yet: read from its start
            message = await consumer.receive(RECEIVE_S)
            assert message.topic == f"persistent://public/default/{topic}-c"
        with pytest.raises(cepheid.UsageError, match="must begin with a namespace"):
            await client.consumer(re.compile(".*"), "matching")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"type": "queue"}, "type must be one of exclusive"),
        ({"start": "middle"}, "start must be 'latest' or 'earliest'"),
        ({"receiver_queue": 0}, "receiver_queue must be 1 or more"),
        ({"key_shared": cepheid.KeyShared()}, "key_shared needs type='key_shared', got 'exclusive'"),
        ({"ack_timeout_s": 0}, "ack_timeout_s must be more than 0 seconds"),
        ({"dead_letters": cepheid.DeadLetters()}, "need type='shared' or 'key_shared'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], why: str) -> None:
    with pytest.raises(cepheid.UsageError, match=why):
        cepheid.connect("pulsar://127.0.0.1:1").consumer("topic", "s", **options)


async def test_a_receive_that_is_cancelled_as_a_message_comes(cluster: ClusterThread, topic: str) -> None:
    """The waiter is cancelled and the message arrives before its task has run again."""
    async with cepheid.connect(cluster.url) as client, client.consumer(topic, "s") as consumer:
        waiting = [asyncio.ensure_future(consumer.receive()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        consumer.on_messages([])
        consumer._wake(1)
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        await publish(client, topic, 1)
        assert (await waiting[1]).data == b"0"


async def test_opening_may_be_cancelled(cluster: ClusterThread, topic: str) -> None:
    cluster.create_partitions(topic, 4)
    async with cepheid.connect(cluster.url) as client:
        for _ in range(5):
            for turns in range(0, 40, 4):
                opening = asyncio.ensure_future(_consumer(client, topic))
                for _ in range(turns):
                    await asyncio.sleep(0)
                opening.cancel()
                result = (await asyncio.gather(opening, return_exceptions=True))[0]
                if isinstance(result, cepheid.Consumer):
                    await result.close()
        async with client.consumer(topic, "s") as consumer:  # exclusive: nothing of the cancelled ones is left
            assert len(consumer.topics) == 4


async def _consumer(client: cepheid.Client, topic: str) -> cepheid.Consumer[bytes]:
    return await client.consumer(topic, "s")


@pytest.mark.parametrize(("size_bytes", "kind", "grown"), [(10, "exclusive", 8), (10, "shared", 1), (1 << 21, "exclusive", 1)])
async def test_a_queue_that_is_kept_empty_grows(cluster: ClusterThread, topic: str, size_bytes: int, kind: Any, grown: int) -> None:
    count = 400 if size_bytes < 1000 else 40
    async with cepheid.connect(cluster.url) as client:
        async with client.consumer(topic, "s", type=kind, receiver_queue=10) as consumer:
            async with client.producer(topic, batch_messages=10) as producer:
                await asyncio.gather(*(producer.send(bytes(size_bytes)) for _ in range(count)))
            for _ in range(count):
                await consumer.receive(RECEIVE_S)
            (link,) = consumer.links.values()
            assert link.receiver_queue <= 10 * grown
            assert grown == 1 or link.receiver_queue > 10


async def test_consumers_of_a_key_shared_subscription_have_their_own_keys(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        consumers = [await client.consumer(topic, "s", type="key_shared") for _ in range(2)]
        async with client.producer(topic, batch_by_key=True) as producer:
            await asyncio.gather(*(producer.send(b"%d" % number, key=f"key-{number % 10}") for number in range(200)))
        seen: list[list[cepheid.Message[bytes]]] = [[], []]
        while sum(map(len, seen)) < 200:
            for consumer, messages in zip(consumers, seen, strict=True):
                if consumer.queued_messages:
                    messages += await consumer.receive_many(1000)
            await asyncio.sleep(0.01)
        keys = [{message.key for message in messages} for messages in seen]
        assert keys[0].isdisjoint(keys[1])
        assert len(keys[0] | keys[1]) == 10
        for key in keys[0] | keys[1]:
            numbers_of_key = [int(message.data) for messages in seen for message in messages if message.key == key]
            assert numbers_of_key == sorted(numbers_of_key)


async def test_a_seek_inside_a_batch_leaves_no_backlog(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        ids = await publish(client, topic, 4)
        async with client.consumer(topic, "s", start="earliest") as consumer:
            for to, expected in ((ids[1], numbers(2, 4)), (ids[3], [])):
                await consumer.seek(to)
                for data in expected:
                    message = await consumer.receive(RECEIVE_S)
                    assert message.data == data
                    await consumer.ack(message)
                await assert_silent(consumer)
                stats = cluster.admin("GET", f"persistent/public/default/{topic}/stats")
                assert stats["subscriptions"]["s"]["msgBacklog"] == 0, to


@pytest.mark.parametrize("is_read_on", [False, True])
async def test_a_seek_ends_with_one_of_another_client(cluster: ClusterThread, topic: str, is_read_on: bool) -> None:
    async with cepheid.connect(cluster.url) as client:
        ids = await publish(client, topic, 6, batch_messages=2)
        async with client.consumer(topic, "s", type="shared", start="earliest") as consumer:
            await consumer.seek(ids[2])
            if is_read_on:
                for message in [await consumer.receive(RECEIVE_S) for _ in range(2)]:
                    await consumer.ack(message)
            async with client.consumer(topic, "s", type="shared", receiver_queue=1) as other:
                await other.seek("earliest")
            got: set[bytes] = set()
            while len(got) < 6:
                got.add((await consumer.receive(RECEIVE_S)).data)


async def test_a_reader_that_started_at_a_time_starts_there_again(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 3)
        await asyncio.sleep(0.05)
        between = datetime.now(UTC)
        await asyncio.sleep(0.05)
        await publish(client, topic, 2, batching=False)
        for start in (between, datetime(2020, 1, 1, tzinfo=UTC)):
            async with client.reader(topic, start=start) as reader:
                assert client._pool is not None
                for connection in list(client._pool._open.values()):
                    connection.abort("cut by the test")
                (link,) = reader._consumer.links.values()
                await asyncio.sleep(0)
                assert link.connection is None
                assert not reader._consumer.queued_messages
                got = [(await reader.read(RECEIVE_S)).data]
                while await reader.has_message_available():
                    got.append((await reader.read(RECEIVE_S)).data)
                assert got == (numbers(0, 2) if start is between else numbers(0, 3) + numbers(0, 2))


async def test_a_message_id_does_not_start_a_reader_of_partitions(cluster: ClusterThread, topic: str) -> None:
    cluster.create_partitions(topic, 2)
    async with cepheid.connect(cluster.url) as client:
        (message_id,) = await publish(client, topic, 1)
        with pytest.raises(cepheid.UsageError, match="start at a time, or read one partition"):
            await client.reader(topic, start=message_id)
        async with client.reader(f"{topic}-partition-{message_id.partition}", start=message_id, inclusive=True) as reader:
            assert (await reader.read(RECEIVE_S)).data == b"0"


async def test_a_pattern_leaves_out_its_own_dead_letter_and_retry_topics(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {kind: f"persistent://public/default/{topic}-{kind}" for kind in ("a", "a-s-DLQ", "a-s-RETRY", "b", "b-s-RETRY", "c")}
    add_topic = cepheid.Client._add_topic

    async def add_all_but_b(self: Any, consumer: Any, plan: Any, name: str, *args: Any, **more: Any) -> None:
        if name == names["b"]:
            raise cepheid.NotAllowedError("refused by the test", code=ServerError.NOT_ALLOWED_ERROR)
        await add_topic(self, consumer, plan, name, *args, **more)

    async with cepheid.connect(cluster.url, partition_refresh_s=0.05) as client:
        for kind in ("a", "a-s-DLQ"):
            await publish(client, names[kind], 1)
        pattern = re.compile(f"public/default/{topic}-.*")
        async with client.consumer(pattern, "s", type="shared", start="earliest", retry=True) as consumer:
            assert set(consumer.topics) == {names["a"], names["a-s-RETRY"]}
            monkeypatch.setattr(cepheid.Client, "_add_topic", add_all_but_b)
            await publish(client, names["b"], 1)
            await publish(client, names["c"], 1)
            await wait_until(lambda: names["c"] in consumer.topics and names["b-s-RETRY"] in consumer.topics)
            assert names["b"] not in consumer.topics, "it cannot be opened, and the others are"
            monkeypatch.undo()
            await wait_until(lambda: names["b"] in consumer.topics)


async def test_a_cancelled_handler_is_no_step_towards_a_dead_letter(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 1)
        dead = cepheid.DeadLetters(after=1, subscription="buried")
        async with client.consumer(topic, "s", type="shared", start="earliest", nack_backoff=SOON, dead_letters=dead) as consumer:
            consumer.nack(await consumer.receive(RECEIVE_S))
            for _ in range(3):  # the last attempt, cancelled three times
                task = asyncio.ensure_future(_process_for_ever(await consumer.receive(RECEIVE_S)))
                await asyncio.sleep(0)
                task.cancel()
            consumer.nack(await consumer.receive(RECEIVE_S))
            async with client.consumer(f"{topic}-s-DLQ", "buried") as undertaker:
                assert await data_of(undertaker, 1) == [b"0"]


async def test_a_schema_that_could_not_be_fetched_is_fetched_again(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = cepheid.AvroSchema(Point)
    fetch = Lookup.schema
    fetched: list[bytes | None] = []

    async def fail_once(self: Lookup, name: str, version: bytes | None = None) -> Any:
        fetched.append(version)
        if len(fetched) == 1:
            raise cepheid.TimedOutError("no answer")
        return await fetch(self, name, version)

    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, schema=schema) as producer:
            for number in range(2):
                await producer.send(Point(number))
        monkeypatch.setattr(Lookup, "schema", fail_once)
        async with client.consumer(topic, "s", schema=schema, start="earliest") as consumer:
            first = await consumer.receive(RECEIVE_S)
            with pytest.raises(cepheid.UnreadableMessageError, match="the schema of a message cannot be fetched: no answer"):
                _ = first.value
            assert (await consumer.receive(RECEIVE_S)).value == Point(1)


async def test_a_paused_consumer_asks_for_nothing_until_it_is_resumed(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, batching=False) as producer:
        async with client.consumer(topic, "s", start="earliest", receiver_queue=2) as consumer:
            consumer.pause()
            for number in range(6):
                await producer.send(b"%d" % number)
            assert await data_of(consumer, 2) == numbers(0, 2)  # permits for these were given before
            await assert_silent(consumer)
            (link,) = consumer.links.values()
            assert link.connection is not None
            link.connection.abort("cut by the test")  # a new connection does not end the pause
            await wait_until(lambda: link.connection is not None, what="attached again")
            await assert_silent(consumer)
            consumer.resume()
            assert await data_of(consumer, 6) == numbers(0, 6)
        with pytest.raises(cepheid.ClosedError, match="is closed"):
            consumer.pause()


async def test_run_handles_messages_and_drains_when_it_is_cancelled(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 6, batching=False)
        running: list[bytes] = []
        go_on, handled, most = asyncio.Event(), list[bytes](), 0

        async def handle(message: cepheid.Message[bytes]) -> None:
            nonlocal most
            running.append(message.data)
            most = max(most, len(running))
            if message.data != b"0":
                await go_on.wait()
            running.remove(message.data)
            handled.append(message.data)

        async with client.consumer(topic, "s", type="shared", start="earliest") as consumer:
            worker = asyncio.ensure_future(consumer.run(handle, concurrency=2))
            await wait_until(lambda: len(running) == 2, what="two handlers run")
            worker.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await worker
            assert (handled, most) == (numbers(0, 3), 2)
            assert await data_of(consumer, 3) == numbers(3, 6)  # was not taken
            stats = cluster.admin("GET", f"persistent/public/default/{topic}/stats")
            assert stats["subscriptions"]["s"]["msgBacklog"] == 3


async def test_run_gives_back_what_fails_and_what_does_not_end(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 2, batching=False)
        failed = asyncio.Event()

        async def handle(message: cepheid.Message[bytes]) -> None:
            if message.data == b"0" and not failed.is_set():
                failed.set()
                raise ValueError("not today")
            if message.data == b"1":
                await asyncio.sleep(3600)

        async with client.consumer(topic, "s", type="shared", start="earliest", nack_backoff=SOON) as consumer:
            worker = asyncio.ensure_future(consumer.run(handle, concurrency=2, drain_timeout_s=0.01))
            await wait_until(lambda: consumer.queued_messages == 0 and failed.is_set(), what="both were taken")
            await wait_until(
                lambda: cluster.admin("GET", f"persistent/public/default/{topic}/stats")["subscriptions"]["s"]["msgBacklog"] == 1,
                what="the failed message was handled again",
            )
            worker.cancel()
            with pytest.raises(asyncio.CancelledError):
                await worker
            message = await consumer.receive(RECEIVE_S)
            assert (message.data, message.redelivery_count) == (b"1", 1)


@pytest.mark.parametrize(("kind", "at_once"), [("key_shared", ["a1", "b1"]), ("shared", ["a1", "a2", "b1"])])
async def test_run_handles_messages_of_one_key_in_order(cluster: ClusterThread, topic: str, kind: Any, at_once: list[str]) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=str, batching=False) as producer:
        for text in ("a1", "a2", "b1"):
            await producer.send(text, key=text[0])
        handled: list[str] = []
        go_on = asyncio.Event()

        async def handle(message: cepheid.Message[str]) -> None:
            handled.append(message.value)
            await go_on.wait()

        async with client.consumer(topic, "s", type=kind, start="earliest", schema=str) as consumer:
            worker = asyncio.ensure_future(consumer.run(handle, concurrency=3))
            await wait_until(lambda: len(handled) == len(at_once), what="handlers run")
            await asyncio.sleep(0.01)
            assert sorted(handled) == at_once
            go_on.set()
            await wait_until(lambda: len(handled) == 3, what="all are handled")
        await asyncio.wait_for(worker, RECEIVE_S)  # closing the consumer ends it
        assert [text for text in handled if text[0] == "a"] == ["a1", "a2"]


async def test_a_hot_key_does_not_stop_the_other_keys_of_run(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, batching=False) as producer:
        async with client.consumer(topic, "s", type="key_shared") as consumer:
            handled: list[bytes] = []

            async def handle(message: cepheid.Message[bytes]) -> None:
                if message.key == "hot":
                    await asyncio.Event().wait()
                handled.append(message.data)

            worker = asyncio.ensure_future(consumer.run(handle, concurrency=2, drain_timeout_s=0))
            for number in range(WAITING_PER_HANDLER):
                await producer.send(b"%d" % number, key="hot")
            await producer.send(b"cold", key="cold")
            await wait_until(lambda: handled == [b"cold"], what="the other key is handled")
            for number in range(WAITING_PER_HANDLER, 2 * WAITING_PER_HANDLER + 6):
                await producer.send(b"%d" % number, key="hot")
            await wait_until(lambda: consumer.queued_messages == 5, what="one is handled, and as many wait as may")
            worker.cancel()
            await asyncio.wait([worker])
            assert await data_of(consumer, 5) == numbers(2 * WAITING_PER_HANDLER + 1, 2 * WAITING_PER_HANDLER + 6)
            again = await data_of(consumer, 2 * WAITING_PER_HANDLER + 1)
            assert sorted(again, key=int) == numbers(0, 2 * WAITING_PER_HANDLER + 1), "what was given back"
        assert handled == [b"cold"]


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
async def test_what_is_not_acknowledged_in_time_comes_again(cluster: ClusterThread, topic: str, kind: Any) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 4, batching=False)
        async with client.consumer(topic, "s", type=kind, start="earliest", ack_timeout_s=0.2, receiver_queue=2) as consumer:
            messages = [await consumer.receive(RECEIVE_S) for _ in range(4)]
            for message in (messages[0], messages[1], messages[3]):
                consumer.ack_nowait(message)
            again = await consumer.receive(RECEIVE_S)
            assert (again.data, again.redelivery_count) == (b"2", int(kind == "shared"))
            consumer.ack_nowait(again)
            await asyncio.sleep(0.3)
            await assert_silent(consumer)


async def test_the_acknowledgement_timeout_leads_to_the_dead_letter_topic(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        await publish(client, topic, 1)
        async with (
            client.consumer(f"{topic}-s-DLQ", "dead") as dead,
            client.consumer(
                topic, "s", type="shared", start="earliest", ack_timeout_s=0.05, dead_letters=cepheid.DeadLetters(after=1)
            ) as consumer,
        ):
            assert [(await consumer.receive(RECEIVE_S)).redelivery_count for _ in range(2)] == [0, 1]
            assert (await dead.receive(RECEIVE_S)).data == b"0"


async def test_a_pattern_that_the_broker_refuses_is_followed_too(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepheid_broker.linear_pattern.MAX_PATTERN_CHARS", len("public/default/.*"))
    async with cepheid.connect(cluster.url, partition_refresh_s=600) as client:
        async with client.consumer(re.compile(f"public/default/{topic}.*"), "s") as consumer:
            await publish(client, f"{topic}-a", 1)
            assert await data_of(consumer, 1) == [b"0"]


@pytest.mark.parametrize("lookaround", ["", "(?!x)"])  # the broker has no such patterns: it is asked for all topics
async def test_a_broker_tells_consumers_of_a_pattern_about_new_topics(cluster: ClusterThread, topic: str, lookaround: str) -> None:
    topic = topic.partition("-")[0] + str(len(lookaround))
    pattern = re.compile(f"public/default/{lookaround}{topic}.*")
    async with cepheid.connect(cluster.url, partition_refresh_s=600) as client:
        async with client.consumer(pattern, "s") as consumer:
            await publish(client, f"{topic}-a", 1)
            assert await data_of(consumer, 1) == [b"0"]
            for link in consumer.links.values():
                assert link.connection is not None
                link.connection.abort("cut by the test")  # with it goes the watcher
            cluster.create_partitions(f"{topic}-b", 2)
            await wait_until(lambda: len(consumer.topics) == 3, what="the partitions are consumed")
            cluster.create_partitions(f"{topic}-b", 3, method="POST")
            await wait_until(lambda: len(consumer.topics) == 4, what="the new partition is consumed")
            connection = next(iter(consumer.links.values())).connection
            assert connection is not None
            assert connection.watchers
        await wait_until(lambda: not connection.watchers, what="the watcher is closed")


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_topic_of_a_pattern_that_is_deleted_stays_deleted(cluster: ClusterThread, topic: str, partitions: int) -> None:
    topic = topic.partition("[")[0] + str(partitions)
    path = f"persistent/public/default/{topic}-a" + ("/partitions" if partitions else "")

    async def admin(method: str, path: str, body: Any = None) -> Any:
        return await asyncio.to_thread(cluster.admin, method, path, body)

    async with cepheid.connect(cluster.url, partition_refresh_s=600) as client:
        await admin("PUT", path, partitions or None)
        async with client.consumer(re.compile(f"public/default/{topic}-.*"), "s") as consumer:
            assert len(consumer.topics) == max(partitions, 1)
            await admin("DELETE", f"{path}?force=true")
            await wait_until(lambda: not consumer.topics, what="the topic is left")
            assert not [name for name in await admin("GET", "persistent/public/default") if f"{topic}-a" in name]
            await admin("PUT", path, partitions or None)
            await wait_until(lambda: len(consumer.topics) == max(partitions, 1), what="the new topic is consumed")


async def test_patterns_are_followed_also_where_brokers_have_no_watchers(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepheid_broker.protocol.connection.FEATURES", pb.FeatureFlags())
    async with cepheid.connect(cluster.url, partition_refresh_s=0.05) as client:
        async with client.consumer(re.compile(f"public/default/{topic}.*"), "s") as consumer:
            await publish(client, f"{topic}-a", 1)
            assert await data_of(consumer, 1) == [b"0"]


async def test_a_consumer_has_the_keys_of_its_hash_ranges(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=str, batch_by_key=True) as producer:
        low, high = cepheid.KeyShared(((0, 32767),)), cepheid.KeyShared(((32768, 65535),))
        async with (
            client.consumer(topic, "s", type="key_shared", schema=str, key_shared=low) as first,
            client.consumer(topic, "s", type="key_shared", schema=str, key_shared=high) as second,
        ):
            with pytest.raises(cepheid.RefusedError):
                await client.consumer(topic, "s", type="key_shared", key_shared=low)
            for number in range(20):
                await producer.send(str(number), key=f"key-{number}")
            await wait_until(lambda: first.queued_messages + second.queued_messages == 20, what="all came")
            for consumer, hashes in ((first, range(32768)), (second, range(32768, 65536))):
                for message in await consumer.receive_many():
                    assert murmur3_hash(str(message.key).encode()) % 65536 in hashes
