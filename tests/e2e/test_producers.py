"""Producers as the official client sees them: access modes, names, deduplication through SIGKILL; traps 15 to 22 of §27."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from cepheid_wire import CommandType
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.scripted_client import ScriptedClient, full, message, send_frame
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, client_of, publish, wait_for
from tests.e2e.tapped_broker import TappedBroker
from tests.support import run_async

MODE = pulsar.ProducerAccessMode
KEEP = {"retention_policies": {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}}


def call(cluster: ProcessCluster, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(cluster.admin_url + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = answer.read()
    return json.loads(content) if content else None


def deduplicate(cluster: ProcessCluster, namespace: str = "dedup") -> str:
    """The prefix of topics in a namespace with deduplication that keeps everything."""
    call(cluster, "PUT", f"/admin/v2/namespaces/public/{namespace}", KEEP)
    call(cluster, "POST", f"/admin/v2/namespaces/public/{namespace}/deduplication", True)
    return f"persistent://public/{namespace}/"


@pytest.fixture(scope="module")
def deduplicated(cluster: ProcessCluster) -> str:
    return deduplicate(cluster)


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[pulsar.Client]:
    with client_of(cluster.service_url) as client:
        yield client


def read_all(client: pulsar.Client, topic: str) -> list[bytes]:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    payloads = []
    while reader.has_message_available():
        payloads.append(reader.read_next(TIMEOUT_MS).data())
    reader.close()
    return payloads


def numbers(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]


# Access modes


@pytest.mark.slow
def test_exclusive_refuses_everybody_else_until_it_closes(client: pulsar.Client, topic: str) -> None:
    holder = client.create_producer(topic, access_mode=MODE.Exclusive)
    with pytest.raises(pulsar.ProducerFenced):
        client.create_producer(topic, access_mode=MODE.Exclusive)
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer(topic)
    holder.send(b"mine")
    holder.close()
    client.create_producer(topic, access_mode=MODE.Exclusive).send(b"next")


@pytest.mark.slow
def test_who_waits_for_exclusive_is_let_in_when_the_holder_closes(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as holding, client_of(cluster.service_url) as waiting:
        holder = holding.create_producer(topic, access_mode=MODE.WaitForExclusive)
        admitted: list[pulsar.Producer] = []
        thread = threading.Thread(
            target=lambda: admitted.append(waiting.create_producer(topic, "second", access_mode=MODE.WaitForExclusive))
        )
        thread.start()
        thread.join(1.0)
        assert not admitted
        holder.send(b"mine")
        holder.close()
        thread.join(60)
        admitted[0].send(b"my turn")


def test_fencing_takes_the_topic_over_for_good(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as old_client, client_of(cluster.service_url) as new_client:
        old = old_client.create_producer(topic, access_mode=MODE.Exclusive, send_timeout_millis=10_000)
        old.send(b"old")
        new = new_client.create_producer(topic, access_mode=MODE.ExclusiveWithFencing)
        new.send(b"new")
        with pytest.raises((pulsar.ProducerFenced, pulsar.AlreadyClosed, pulsar.Timeout)):
            old.send(b"never")
        new.send(b"still new")
        assert b"never" not in read_all(new_client, topic)


@pytest.mark.slow
def test_an_exclusive_holder_comes_back_after_a_kill_and_the_one_before_it_does_not(tmp_path: Path) -> None:
    with ProcessCluster(tmp_path / "data") as cluster:
        with client_of(cluster.service_url) as first_client, client_of(cluster.service_url) as second_client:
            first = first_client.create_producer("t", access_mode=MODE.Exclusive, send_timeout_millis=15_000)
            first.send(b"0")
            second = second_client.create_producer("t", access_mode=MODE.ExclusiveWithFencing)
            second.send(b"1")
            cluster.kill()
            cluster.start()
            second.send(b"2")
            with pytest.raises((pulsar.ProducerFenced, pulsar.AlreadyClosed, pulsar.Timeout)):
                first.send(b"never")


# Names


def test_a_producer_name_is_taken_once(client: pulsar.Client, topic: str) -> None:
    producer = client.create_producer(topic, "mine")
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer(topic, "mine")
    producer.close()
    client.create_producer(topic, "mine").close()


@pytest.mark.slow
def test_trap_15_given_names_differ_also_after_a_restart(tmp_path: Path) -> None:
    names = []
    with ProcessCluster(tmp_path / "data") as cluster:
        for _ in range(2):
            with client_of(cluster.service_url) as client:
                names += [client.create_producer("t").producer_name() for _ in range(3)]
            cluster.stop()
            cluster.start()
    assert len(set(names)) == 6


# Deduplication


def test_the_same_sequence_ids_are_stored_once(client: pulsar.Client, deduplicated: str, topic: str) -> None:
    topic = deduplicated + topic
    producer = client.create_producer(topic, "p")
    assert producer.last_sequence_id() == -1
    for n in (0, 1, 1, 0, 2, 2, 3):
        producer.send(b"%d" % n, sequence_id=n)
    assert producer.last_sequence_id() == 3
    assert read_all(client, topic) == numbers(4)
    producer.close()
    producer = client.create_producer(topic, "p")
    assert producer.last_sequence_id() == 3
    producer.send(b"4")  # goes on behind it
    assert producer.last_sequence_id() == 4
    assert read_all(client, topic) == numbers(5)


@pytest.mark.slow
def test_an_application_that_starts_over_repeats_nothing(tmp_path: Path) -> None:
    """It knows what it sent, not what arrived: the broker is killed while it publishes, and so is the application.

    An initial sequence id of -1 would mean to go on behind the last one that is stored."""
    with ProcessCluster(tmp_path / "data") as cluster:
        topic = deduplicate(cluster) + "t"
        with client_of(cluster.service_url) as client:
            producer = client.create_producer(topic, "app", initial_sequence_id=99, max_pending_messages=5000)
            for payload in numbers(2000):
                producer.send_async(payload, lambda result, message_id: None)
            wait_for(lambda: producer.last_sequence_id() > 300, "some receipts")
            cluster.kill()
            cluster.start()
        with client_of(cluster.service_url) as client:
            publish(client, topic, numbers(2000), producer_name="app", initial_sequence_id=99)
            assert read_all(client, topic) == numbers(2000)
            publish(client, topic, [b"2000"], producer_name="app")
            assert read_all(client, topic)[-1] == b"2000"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="single"),
        pytest.param({"batching_enabled": True, "batching_max_messages": 7}, id="batched"),
        pytest.param({"compression_type": pulsar.CompressionType.LZ4, "batching_enabled": True}, id="compressed"),
        pytest.param(
            {
                "batching_enabled": True,
                "batching_type": pulsar.BatchingType.KeyBased,
                "batching_max_messages": 20,
            },
            id="key-based",
        ),
    ],
)
def test_trap_20_with_deduplication_a_kill_stores_every_message_once(tmp_path: Path, options: dict[str, Any]) -> None:
    count = 3000
    with ProcessCluster(tmp_path / "data") as cluster:
        topic = deduplicate(cluster) + "t"
        with client_of(cluster.service_url) as client:
            options = {"block_if_queue_full": True, "send_timeout_millis": 60_000, **options}
            producer = client.create_producer(topic, **options)
            results: list[Any] = []
            for n in range(count):
                producer.send_async(b"%d" % n, lambda result, _: results.append(result), partition_key=f"k{n % 3}")
                if n == count // 2:
                    wait_for(lambda n=n: len(results) > n // 2, "some receipts")
                    cluster.kill()
                    cluster.start()
            producer.flush()
            wait_for(lambda: len(results) == count, "all receipts")
            assert set(results) == {pulsar.Result.Ok}
            payloads = read_all(client, topic)
            assert sorted(map(int, payloads)) == list(range(count))
            if "batching_type" not in options:
                assert payloads == numbers(count)


@pytest.mark.slow
def test_chunked_messages_arrive_once_through_a_kill(tmp_path: Path) -> None:
    count, size = 12, 12_000_000  # three chunks each
    with ProcessCluster(tmp_path / "data") as cluster:
        topic = deduplicate(cluster) + "t"
        with client_of(cluster.service_url) as client:
            producer = client.create_producer(topic, chunking_enabled=True, block_if_queue_full=True, send_timeout_millis=60_000)
            results: list[Any] = []
            for n in range(count):
                producer.send_async(bytes([n]) * size, lambda result, _: results.append(result))
                if n == count // 2:
                    wait_for(lambda: len(results) > 2, "some receipts")
                    cluster.kill()
                    cluster.start()
            producer.flush()
            wait_for(lambda: len(results) == count, "all receipts")
            assert set(results) == {pulsar.Result.Ok}
            consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
            for n in range(count):
                assert consumer.receive(TIMEOUT_MS).data() == bytes([n]) * size
            with pytest.raises(pulsar.Timeout):
                consumer.receive(300)


def test_chunks_whose_receipts_were_lost_are_not_stored_twice(topic: str) -> None:
    """The consumer of the C++ library drops a message when it sees its first chunk twice."""
    policies = {"deduplication": True, "retention_time_min": -1, "retention_size_mb": -1}
    payload = bytes(range(256)) * 800
    with TappedBroker(max_message_bytes=64 << 10, policies=policies) as broker, client_of(broker.service_url) as client:
        producer = client.create_producer(topic, chunking_enabled=True)
        broker.lose_connection_at(CommandType.SEND_RECEIPT)
        producer.send(payload)
        first, *_, last = broker.frames(CommandType.SEND)
        assert (first.connection, last.connection) == (1, 2)
        assert [seen.tail for seen in broker.frames(CommandType.SEND)].count(first.tail) == 2, "the first chunk is sent again"
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        assert consumer.receive(TIMEOUT_MS).data() == payload
        assert len(broker.frames(CommandType.MESSAGE)) == 4


def test_a_chunked_message_that_was_cut_off_is_delivered(client: pulsar.Client, cluster: ProcessCluster, deduplicated: str) -> None:
    """This client never delivers a message whose chunks it sees twice."""
    topic = deduplicated + "cut-off"

    def chunk(index: int) -> bytes:
        fields = {"uuid": "scripted-0", "chunk_id": index, "num_chunks_from_msg": 3, "total_chunk_msg_size": 6}
        return send_frame(pb.CommandSend(producer_id=0, sequence_id=0, is_chunk=True), message(0, b"%d." % index, **fields))

    async def publish_in_two_attempts() -> None:
        for chunks in (2, 3):
            async with await ScriptedClient.open(cluster.port) as scripted:
                await scripted.produce_on(topic, producer_name="scripted")
                scripted.send_bytes(b"".join(map(chunk, range(chunks))))
                for _ in range(chunks):
                    await scripted.expect(pb.CommandSendReceipt)

    run_async(publish_in_two_attempts())
    assert read_all(client, topic) == [b"0.1.2."]


def test_an_application_that_starts_over_with_other_batches_loses_nothing(client: pulsar.Client, deduplicated: str) -> None:
    topic = deduplicated + "packed-anew"

    def run(ids: range, batch_messages: int) -> None:
        options = {"batching_max_messages": batch_messages, "batching_max_publish_delay_ms": 1000}
        producer = client.create_producer(topic, producer_name="app", batching_enabled=True, **options)
        results: list[Any] = []
        for sequence_id in ids:
            producer.send_async(b"%d" % sequence_id, lambda result, _: results.append(result), sequence_id=sequence_id)
        producer.flush()
        wait_for(lambda: len(results) == len(ids), "all receipts")
        assert set(results) == {pulsar.Result.Ok}
        producer.close()

    run(range(11), 10)
    run(range(5, 40), 10)
    run(range(10, 50), 7)
    assert set(read_all(client, topic)) == set(numbers(50))


def test_deduplication_may_be_turned_on_and_off_while_a_producer_is_connected(cluster: ProcessCluster, topic: str) -> None:
    namespace = "switched"
    prefix = deduplicate(cluster, namespace)
    with client_of(cluster.service_url) as client:
        producer = client.create_producer(prefix + topic, "p")

        def is_repeated() -> bool:
            before = len(read_all(client, prefix + topic))
            producer.send(b"x", sequence_id=5)
            return len(read_all(client, prefix + topic)) == before

        assert not is_repeated()
        assert is_repeated()
        call(cluster, "POST", f"/admin/v2/namespaces/public/{namespace}/deduplication", False)
        wait_for(lambda: not is_repeated(), "turned off")
        call(cluster, "POST", f"/admin/v2/namespaces/public/{namespace}/deduplication", True)
        wait_for(is_repeated, "turned on")


# Traps


async def connected(cluster: ProcessCluster, topic: str, **fields: Any) -> tuple[ScriptedClient, pb.CommandProducerSuccess]:
    client = await ScriptedClient.open(cluster.port)
    return client, await client.produce_on(topic, **fields)


async def test_trap_15_producer_success_has_what_every_client_reads(cluster: ProcessCluster, topic: str) -> None:
    client, answer = await connected(cluster, topic)
    async with client:
        assert answer.producer_name
        assert answer.HasField("schema_version")
        assert answer.last_sequence_id == -1


def test_trap_16_a_batch_of_one_is_a_batch(client: pulsar.Client, topic: str) -> None:
    publish(client, topic, [b"alone"], batching_enabled=True)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    received = consumer.receive(TIMEOUT_MS)
    assert received.data() == b"alone"
    assert received.message_id().batch_index() == consumer.get_last_message_id().batch_index() == 0
    publish(client, topic, [b"plain"])
    assert consumer.get_last_message_id().batch_index() == -1


async def test_trap_17_receipts_carry_the_id_of_the_send(cluster: ProcessCluster, deduplicated: str, topic: str) -> None:
    client, _ = await connected(cluster, deduplicated + topic, producer_name="scripted")
    async with client:
        for sequence_id, highest in [(7, 9), (7, 9), (20, None), (20, None)]:
            fields = {} if highest is None else {"highest_sequence_id": highest}
            send = pb.CommandSend(producer_id=0, sequence_id=sequence_id, **fields)
            client.send_bytes(send_frame(send, message(sequence_id)))
            receipt = await client.expect(pb.CommandSendReceipt)
            assert (receipt.sequence_id, receipt.highest_sequence_id) == (sequence_id, highest or 0)


async def test_trap_18_receipts_of_many_producers_keep_each_ones_order(cluster: ProcessCluster, topic: str) -> None:
    client, _ = await connected(cluster, topic)
    async with client:
        await client.produce_on(topic, 1)
        for sequence_id in range(500):
            client.send_message(sequence_id, producer_id=sequence_id % 2)
        expected = {0: iter(range(0, 500, 2)), 1: iter(range(1, 500, 2))}
        for _ in range(500):
            receipt = await client.expect(pb.CommandSendReceipt)
            assert receipt.sequence_id == next(expected[receipt.producer_id])


def test_trap_19_a_repetition_is_answered_and_closes_nothing(cluster: ProcessCluster, deduplicated: str, topic: str) -> None:
    """C++ closes its connection at every SEND_ERROR but one: two producers of it, one repeats, none is disturbed."""
    topic = deduplicated + topic
    with client_of(cluster.service_url) as client:
        repeating, other = client.create_producer(topic, "a"), client.create_producer(topic, "b")
        results: list[Any] = []
        for n in range(200):
            repeating.send_async(b"a", lambda result, _: results.append(result), sequence_id=n // 2)
            other.send_async(b"b", lambda result, _: results.append(result))
        wait_for(lambda: len(results) == 400, "all receipts")
        assert set(results) == {pulsar.Result.Ok}
        assert sorted(read_all(client, topic)) == [b"a"] * 100 + [b"b"] * 200
        stats = call(cluster, "GET", f"/admin/v2/{topic.replace('://', '/')}/stats")
        assert len(stats["publishers"]) == 2


async def test_trap_20_without_deduplication_what_is_resent_is_stored_again(cluster: ProcessCluster, topic: str) -> None:
    client, answer = await connected(cluster, topic)
    async with client:
        first = await client.publish(2)
        again, _ = await connected(cluster, topic, producer_name=f"{answer.producer_name}-2")
        async with again:
            second = await again.publish(2)
    assert first[-1].position < second[0].position


def test_trap_21_the_clients_metadata_is_stored_as_it_is(client: pulsar.Client, topic: str) -> None:
    before_ms = int(time.time() * 1000) - 1
    producer = client.create_producer(topic)
    producer.send(b"x")
    received = client.subscribe(topic, "s", initial_position=EARLIEST).receive(TIMEOUT_MS)
    assert received.producer_name() == producer.producer_name()
    assert before_ms <= received.publish_timestamp() <= time.time() * 1000 + 1


async def test_trap_22_the_first_answer_comes_at_once(cluster: ProcessCluster, topic: str) -> None:
    client, _ = await connected(cluster, topic, producer_access_mode=pb.ProducerAccessMode.Exclusive)
    async with client:
        wait = pb.CommandProducer(topic=full(topic), producer_id=1, request_id=40)
        wait.producer_access_mode = pb.ProducerAccessMode.WaitForExclusive
        answer = await client.ask(wait, pb.CommandProducerSuccess)
        assert (answer.request_id, answer.producer_ready) == (40, False)
        client.send(pb.CommandCloseProducer(producer_id=0, request_id=41))
        answers = [await client.receive(), await client.receive()]
        ready = [answer.body for answer in answers if answer and isinstance(answer.body, pb.CommandProducerSuccess)]
        assert [(answer.request_id, answer.producer_ready) for answer in ready] == [(40, True)]
