"""Publishing: ids, order, batches, compression, partitions, windows, and what is refused."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import cepheid
from cepheid.entry_reader import ChunkBuffer
from cepheid.topic_producer import SendWindow, TopicProducer
from cepheid_wire import pulsar_api_pb2 as pb
from tests.client.conftest import ClusterThread
from tests.support import wait_until

RECEIVE_S = 30.0


async def read_all(client: cepheid.Client, topic: str, count: int) -> list[cepheid.Message[bytes]]:
    async with client.reader(topic) as reader:
        messages = [await reader.read(RECEIVE_S) for _ in range(count)]
        assert not await reader.has_message_available()
    return messages


async def test_send_returns_the_id_under_which_the_message_is_read(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as producer:
        message_id = await producer.send(
            b"one", key="k", ordering_key=b"o", properties={"a": "b"}, event_time=datetime(2026, 1, 2, tzinfo=UTC)
        )
        (message,) = await read_all(client, topic, 1)
        assert message.message_id == message_id
        assert (message.data, message.value, message.key, message.ordering_key) == (b"one", b"one", "k", b"o")
        assert (message.properties, message.event_time) == ({"a": "b"}, datetime(2026, 1, 2, tzinfo=UTC))
        assert (message.producer_name, message.sequence_id) == (producer.name, 0)
        assert abs(message.publish_time - datetime.now(UTC)) < timedelta(minutes=1)


async def test_concurrent_sends_share_batches_and_keep_their_order(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, batch_messages=50) as producer:
        sent = await asyncio.gather(*(producer.send(b"%d" % number) for number in range(200)))
        assert sent == sorted(sent)
        assert len({message_id[:2] for message_id in sent}) == 4
        messages = await read_all(client, topic, 200)
        assert [message.data for message in messages] == [b"%d" % number for number in range(200)]
        assert [message.message_id for message in messages] == sent


@pytest.mark.parametrize("compression", ["none", "zlib", "lz4", "zstd", "snappy"])
@pytest.mark.parametrize("batching", [True, False])
async def test_compressed_messages_are_read_as_they_were(
    cluster: ClusterThread, topic: str, compression: Any, batching: bool
) -> None:
    payloads = [b"", b"x" * 5000, bytes(range(256))]
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, compression=compression, batching=batching) as producer:
            for payload in payloads:
                producer.send_nowait(payload)
        assert [message.data for message in await read_all(client, topic, 3)] == payloads


async def test_a_full_window_refuses_and_drain_waits_for_room(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, window_messages=10) as producer:
        for number in range(10):
            producer.send_nowait(b"%d" % number)
        with pytest.raises(cepheid.WindowFullError, match=r"10 messages .*window_messages 10.*drain"):
            producer.send_nowait(b"too many")
        await producer.drain()
        producer.send_nowait(b"10")
        await asyncio.gather(*(producer.send(b"%d" % number) for number in range(11, 60)))
        await producer.flush()
        assert producer.unanswered_messages == 0
        assert [message.data for message in await read_all(client, topic, 60)] == [b"%d" % number for number in range(60)]


async def test_keys_choose_the_partition_and_batches_by_key_hold_one_key(cluster: ClusterThread, topic: str) -> None:
    cluster.create_partitions(topic, 3)
    async with cepheid.connect(cluster.url) as client:
        assert await client.partitions(topic) == 3
        async with client.producer(topic, batch_by_key=True) as producer:
            ids = await asyncio.gather(*(producer.send(b"%d" % n, key=f"key-{n % 4}") for n in range(40)))
            no_key = await asyncio.gather(*(producer.send(b"") for _ in range(3)))
        by_key = [{message_id.partition for message_id in ids[key::4]} for key in range(4)]
        assert all(len(partitions) == 1 for partitions in by_key)
        entries = [{(message_id.partition, *message_id[:2]) for message_id in ids[key::4]} for key in range(4)]
        assert len(set().union(*entries)) == sum(map(len, entries)), "no entry has messages of two keys"
        assert {message_id.partition for message_id in no_key} <= {0, 1, 2}
        async with client.consumer(topic, "s", start="earliest") as consumer:
            got = [await consumer.receive(RECEIVE_S) for _ in range(43)]
        of_a_key = [message.data for message in got if message.key == "key-1"]
        assert of_a_key == [b"%d" % n for n in range(1, 40, 4)]


async def test_a_message_too_large_is_refused_or_sent_in_chunks(cluster: ClusterThread, topic: str) -> None:
    large = bytes(range(256)) * (6 << 12)  # 6 MiB
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic) as producer:
            with pytest.raises(cepheid.MessageTooLargeError, match=r"up to 5,242,880 bytes; this one has 6,291,4.*chunking"):
                await producer.send(large)
            await producer.send(b"small")
        async with client.producer(topic, chunking=True) as producer:
            await producer.send(large, key="k")
            await producer.send(b"after")
        async with client.consumer(topic, "s", start="earliest") as consumer:
            messages = [await consumer.receive(RECEIVE_S) for _ in range(3)]
            assert [message.data for message in messages] == [b"small", large, b"after"]
            assert messages[1].key == "k"
            await asyncio.gather(*(consumer.ack(message) for message in messages))
        stats = cluster.admin("GET", f"persistent/public/default/{topic}/stats")
        assert stats["subscriptions"]["s"]["msgBacklog"] == 0, "every chunk is acknowledged"


async def test_a_message_in_chunks_counts_after_the_receipt_of_its_last_chunk(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_receipt, counted = TopicProducer.on_receipt, list[int]()

    def count(self: TopicProducer, receipt: pb.CommandSendReceipt) -> None:
        on_receipt(self, receipt)
        counted.append(self.last_sequence_id)

    monkeypatch.setattr(TopicProducer, "on_receipt", count)
    async with cepheid.connect(cluster.url) as client, client.producer(topic, chunking=True) as producer:
        await producer.send(b"small")
        await producer.send(b"x" * (11 << 20))
    assert counted == [0, 0, 0, 1]


async def test_a_message_whose_chunks_were_dropped_for_others_is_delivered_again(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, chunking=True) as producer:
        async with client.consumer(topic, "s", type="shared", nack_backoff=cepheid.NackBackoff(0.05)) as consumer:
            (link,) = consumer.links.values()
            chunks, evicted = ChunkBuffer(limit_messages=1), False

            def add(metadata: pb.MessageMetadata, at: tuple[int, int], payload: bytes) -> Any:
                nonlocal evicted
                whole = ChunkBuffer.add(chunks, metadata, at, payload)
                if not evicted:
                    evicted = True
                    other = pb.MessageMetadata(uuid="other", num_chunks_from_msg=2, chunk_id=0)
                    ChunkBuffer.add(chunks, other, (1 << 40, 0), b"")
                return whole

            monkeypatch.setattr(link, "_chunks", chunks)
            monkeypatch.setattr(chunks, "add", add)
            await producer.send(b"x" * (6 << 20))
            assert len((await consumer.receive(RECEIVE_S)).data) == 6 << 20


async def test_what_consumers_would_not_decompress_is_refused(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepheid.batching.MAX_UNCOMPRESSED_BYTES", 1000)
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, chunking=True, batching=False, compression="zlib") as producer:
            with pytest.raises(cepheid.MessageTooLargeError, match="decompress up to 1,000 bytes; this message has 1,001"):
                await producer.send(bytes(1001))
            await producer.send(bytes(1000))


async def test_delayed_messages_come_later(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        async with client.consumer(topic, "s", type="shared") as consumer, client.producer(topic) as producer:
            await producer.send(b"later", deliver_after=1.5)
            await producer.send(b"now")
            assert [(await consumer.receive(RECEIVE_S)).data for _ in range(2)] == [b"now", b"later"]


async def test_access_modes(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        holder = await client.producer(topic, access="exclusive")
        with pytest.raises(cepheid.FencedError):
            await client.producer(topic, access="exclusive")
        with pytest.raises(cepheid.BusyError):
            await client.producer(topic)
        waiting = asyncio.ensure_future(_open(client, topic))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await holder.close()
        successor = await waiting
        await successor.send(b"mine")
        async with client.producer(topic, access="exclusive_with_fencing") as winner:
            await winner.send(b"ours")
            with pytest.raises(cepheid.FencedError, match="open a new producer"):
                await successor.send(b"lost")


async def _open(client: cepheid.Client, topic: str) -> cepheid.Producer[bytes]:
    return await client.producer(topic, access="wait_for_exclusive")


async def test_a_named_producer_goes_on_after_its_last_sequence_id(cluster: ClusterThread, topic: str) -> None:
    cluster.admin("PUT", f"persistent/public/default/{topic}")
    cluster.admin("POST", f"persistent/public/default/{topic}/deduplicationEnabled", True)
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, name="p") as producer:
            await asyncio.gather(*(producer.send(b"%d" % n, sequence_id=n) for n in (0, 1, 5)))
            assert producer.last_sequence_id == 5
        async with client.producer(topic, name="p") as producer:
            assert producer.last_sequence_id == 5
            repeated = await producer.send(b"5", sequence_id=5)
            assert repeated[:2] == (-1, -1), "stored before"
            await producer.send(b"6")
            with pytest.raises(cepheid.UsageError, match="must grow: got 5 after 6"):
                await producer.send(b"again", sequence_id=5)
        assert [message.data for message in await read_all(client, topic, 4)] == [b"0", b"1", b"5", b"6"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"schema": 7}, "schema must be bytes, str, bool, int"),
        ({"compression": "gzip"}, "compression must be one of none, zlib"),
        ({"access": "mine"}, "access must be one of shared"),
        ({"batch_messages": 0}, "batch_messages and batch_bytes must be 1 or more"),
        ({"window_bytes": 0}, "window_messages and window_bytes must be 1 or more"),
        ({"repeatable": True, "window_messages": 1500}, "repeatable needs a window of two batches"),
    ],
)
async def test_bad_options_are_named(options: dict[str, Any], why: str) -> None:
    with pytest.raises(cepheid.UsageError, match=why):
        cepheid.connect("pulsar://127.0.0.1:1").producer("topic", **options)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"value": "text"}, "must be bytes, got str"),
        ({"key": 7}, "key must be str or bytes"),
        ({"properties": {"a": 1}}, "properties must map str to str"),
        ({"deliver_at": 1, "deliver_after": 1}, "not both"),
        ({"event_time": datetime(2026, 1, 1)}, "no time zone"),  # noqa: DTZ001
        ({"deliver_after": -1}, "0 or more seconds"),
    ],
)
async def test_bad_messages_are_refused_and_the_producer_stays_usable(
    cluster: ClusterThread, arguments: dict[str, Any], why: str
) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer("bad-messages") as producer:
        sends: tuple[Any, ...] = (producer.send_nowait, producer.send)
        for send in sends:
            with pytest.raises(cepheid.UsageError, match=why):
                await _call(send, {"value": b"", **arguments})
        await producer.send(b"good")


async def _call(send: Any, arguments: dict[str, Any]) -> None:
    result = send(**arguments)
    if result is not None:
        await result


async def test_partitions_that_are_added_are_used(cluster: ClusterThread, topic: str) -> None:
    cluster.create_partitions(topic, 1)
    async with cepheid.connect(cluster.url, partition_refresh_s=0.05) as client:
        async with client.producer(topic) as producer, client.consumer(topic, "s") as consumer:
            await producer.send(b"0")
            await asyncio.get_running_loop().run_in_executor(None, lambda: cluster.create_partitions(topic, 3, method="POST"))
            seen: set[int] = set()
            while seen != {0, 1, 2}:
                message_id = await producer.send(b"")
                seen.add(message_id.partition)
            received: set[int] = set()
            while received != {0, 1, 2}:
                received.add((await consumer.receive(RECEIVE_S)).message_id.partition)


async def test_properties_count_towards_the_size_of_a_batch(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as producer:
        properties = {"large": "ä" * 40_000}
        ids = await asyncio.gather(*(producer.send(b"", properties=properties) for _ in range(100)))
        assert len({message_id[:2] for message_id in ids}) >= 100 * 80_000 // (128 << 10)
        with pytest.raises(cepheid.MessageTooLargeError):
            await producer.send(b"", properties={"large": "x" * (6 << 20)})
        await producer.send(b"after")
        async with client.producer(topic, chunking=True) as chunking:
            with pytest.raises(cepheid.MessageTooLargeError, match="the key and properties of a message have 6,291,"):
                await chunking.send(b"", properties={"large": "x" * (6 << 20)})


async def test_a_topic_that_takes_smaller_messages_than_the_broker_fails_those_alone(cluster: ClusterThread, topic: str) -> None:
    cluster.admin("PUT", f"persistent/public/default/{topic}")
    cluster.admin("POST", f"persistent/public/default/{topic}/maxMessageSize", 1000)
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, batching=False) as producer:
            sends = [producer.send(b"x" * size) for size in (10, 2000, 20)]
            first, refused, last = await asyncio.gather(*sends, return_exceptions=True)
            assert isinstance(refused, cepheid.NotAllowedError)
            assert isinstance(first, cepheid.MessageId)
            assert isinstance(last, cepheid.MessageId)
            assert [message.data for message in await read_all(client, topic, 2)] == [b"x" * 10, b"x" * 20]


async def test_a_message_may_be_refused_before_earlier_ones_are_confirmed(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, batching=False) as producer:
            (link,) = producer._partitions
            receipts: list[pb.CommandSendReceipt] = []
            with monkeypatch.context() as patched:
                patched.setattr(link, "on_receipt", receipts.append)
                sends = [asyncio.ensure_future(producer.send(b"%d" % number)) for number in range(3)]
                await wait_until(lambda: len(receipts) == 3, what="receipts are held back")
            link.on_send_error(pb.CommandSendError(sequence_id=1, error=pb.NotAllowedError, message="too large"))
            for receipt in (receipts[0], receipts[2]):
                link.on_receipt(receipt)
            first, refused, last = await asyncio.gather(*sends, return_exceptions=True)
            assert [type(first), type(refused), type(last)] == [cepheid.MessageId, cepheid.NotAllowedError, cepheid.MessageId]
            await producer.send(b"3")
        assert [message.data for message in await read_all(client, topic, 4)] == [b"0", b"1", b"2", b"3"], "none is sent again"


async def test_a_partition_that_failed_is_left_out(cluster: ClusterThread, topic: str) -> None:
    cluster.create_partitions(topic, 3)
    async with cepheid.connect(cluster.url) as client, client.producer(topic, window_messages=2) as producer:
        producer._partitions[1]._fail(cepheid.TerminatedError("terminated by the test"))
        ids = await asyncio.gather(*(producer.send(b"") for _ in range(20)))
        assert {message_id.partition for message_id in ids} <= {0, 2}
        refused = 0
        for number in range(20):
            try:
                await producer.send(b"", key=f"key-{number}")
            except cepheid.TerminatedError:
                refused += 1
        assert 0 < refused < 20, "keys keep their partition"


async def test_nothing_is_taken_once_the_producer_closes(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        producer = await client.producer(topic)
        producer.send_nowait(b"before")
        closing = asyncio.ensure_future(producer.close())
        await asyncio.sleep(0)
        with pytest.raises(cepheid.ClosedError):
            producer.send_nowait(b"after")
        with pytest.raises(cepheid.ClosedError):
            await producer.send(b"after")
        await closing
        assert [message.data for message in await read_all(client, topic, 1)] == [b"before"]


async def test_batches_by_key_go_by_the_ordering_key(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, batch_by_key=True) as producer:
        orders = [b"a", b"b", b"a", b"b"]
        ids = await asyncio.gather(*(producer.send(b"", key=f"{n}", ordering_key=order) for n, order in enumerate(orders)))
        entries = [message_id[:2] for message_id in ids]
        assert (entries[0], entries[1]) == (entries[2], entries[3])
        assert entries[0] != entries[1]


async def test_the_last_sequence_id_of_partitions_is_the_lowest(cluster: ClusterThread, topic: str) -> None:
    cluster.create_partitions(topic, 2)
    async with cepheid.connect(cluster.url) as client, client.producer(topic, routing=lambda key, _: int(key or 0)) as producer:
        await producer.send(b"", key="0")
        assert producer.last_sequence_id == -1
        await asyncio.gather(*(producer.send(b"", key=key) for key in "0011"))
        assert producer.last_sequence_id == 1


async def test_sends_that_wait_for_room_keep_their_order(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, window_messages=3) as producer:
        sends = []
        for number in range(100):
            sends.append(asyncio.ensure_future(producer.send(b"%d" % number)))
            if number % 3 == 0:
                await asyncio.sleep(0.001)
        sends[-1].cancel()
        ids = await asyncio.gather(*sends[:-1])
        assert ids == sorted(ids)


async def test_room_is_given_in_the_order_of_the_calls() -> None:
    window = SendWindow(1, 100)
    window.messages = 1
    order: list[int] = []

    async def wait(number: int) -> None:
        await window.wait_for_room()
        order.append(number)

    waiting = [asyncio.ensure_future(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    window.give_back(1, 0)
    async with asyncio.timeout(RECEIVE_S):
        await wait(3)  # there is room, and a call before it
        await asyncio.gather(waiting[0], waiting[2])  # what one does not take is for the next
    assert order == [0, 2, 3]
    assert not window.has_waiters


async def test_a_send_that_is_cancelled_while_it_waits_for_room_sends_nothing(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, window_messages=1) as producer:
        sends = [asyncio.ensure_future(producer.send(b"%d" % number)) for number in range(3)]
        await asyncio.sleep(0)
        for cancelled in sends[:2]:  # the first one is on its way, the second one waits for room
            cancelled.cancel()
        await sends[2]
        async with client.reader(topic) as reader:
            assert [(await reader.read(RECEIVE_S)).data for _ in range(2)] == [b"0", b"2"]
            assert not await reader.has_message_available()


async def test_a_cancelled_send_that_fails_is_counted(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        producer = await client.producer(topic)
        sending = asyncio.ensure_future(producer.send(b""))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        producer._partitions[0]._fail(cepheid.TerminatedError("terminated by the test"))
        with pytest.raises(cepheid.SendFailedError, match="1 messages were not stored"):
            await producer.flush()


async def test_a_sequence_id_below_the_automatic_ones_is_refused(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as producer:
        for number in range(3):
            await producer.send(b"%d" % number)
        producer.send_nowait(b"3")
        with pytest.raises(cepheid.UsageError, match="must grow: got 3 after 3"):
            await producer.send(b"", sequence_id=3)
        await producer.send(b"", sequence_id=4)


async def test_errors_that_repeat_are_answered_more_and_more_slowly(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as producer:
        (link,) = producer._partitions
        with monkeypatch.context() as patched:
            patched.setattr(link, "on_receipt", lambda receipt: None)
            producer.send_nowait(b"")
            link.seal()
            for _ in range(3):
                await wait_until(lambda: link.connection is not None)
                link.on_send_error(pb.CommandSendError(producer_id=0, sequence_id=0, error=pb.PersistenceError, message=""))
            await wait_until(lambda: link.connection is not None)
            assert link._reattach_backoff.next_s() >= 0.8 * 0.4
        await producer.send(b"")
        assert link._reattach_backoff.next_s() <= 0.05, "a receipt ends it"


async def test_a_repeatable_producer_cuts_batches_by_count_alone(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, repeatable=True, batch_messages=4) as producer:
        for number in range(10):
            producer.send_nowait(b"%d" % number)
            await asyncio.sleep(0.03)  # longer than a batch waits otherwise
        await producer.flush()
        messages = await read_all(client, topic, 10)
        assert [message.message_id.batch_size for message in messages] == [4] * 8 + [2] * 2


async def test_a_producer_knows_the_version_of_its_broker(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as producer:
        assert producer.server_version.startswith("Cepheid")


async def test_after_the_first_failure_of_a_repeatable_producer_nothing_is_stored(cluster: ClusterThread, topic: str) -> None:
    cluster.admin("PUT", f"persistent/public/default/{topic}")
    cluster.admin("POST", f"persistent/public/default/{topic}/maxMessageSize", 1000)
    async with cepheid.connect(cluster.url) as client:
        producer = await client.producer(topic, repeatable=True, batching=False)
        for payload in (b"first", b"x" * 2000, b"last"):
            producer.send_nowait(payload)
        with pytest.raises(cepheid.SendFailedError):
            await producer.flush()
        with pytest.raises(cepheid.NotAllowedError):
            producer.send_nowait(b"later")
        await producer.abandon()
        assert [message.data for message in await read_all(client, topic, 1)] == [b"first"]


async def test_what_waits_for_a_batch_is_not_sent_when_a_producer_is_abandoned(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        producer = await client.producer(topic, repeatable=True)
        producer.send_nowait(b"waits")
        await producer.abandon()
        await producer.close()
        assert await read_all(client, topic, 0) == []


async def test_none_is_a_message_without_value(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as producer:
        await producer.send(None, key="gone")
        await producer.send(None)
        first, second = await read_all(client, topic, 2)
        assert (first.is_null, first.key, first.value) == (True, "gone", None)
        assert second.is_null


async def test_the_schema_of_a_topic(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        assert await client.topic_schema(topic) is None
        async with client.producer(topic, schema=str):
            found = await client.topic_schema(topic)
        assert found is not None
        assert found.kind == "STRING"
