"""Brokers that restart, topics that move, dead addresses, wrong loops, and clients used after they were closed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cepheid
import cepheid.admin
from cepheid.credentials import Security
from cepheid_testkit import StandaloneCluster
from cepheid_wire import PING_FRAME, CommandType, FrameSplitter, encode_body, parse_command
from cepheid_wire import pulsar_api_pb2 as pb
from tests.client.conftest import ClusterThread
from tests.support import free_port, wait_until
from tests.tcp_proxy import TcpProxy

RECEIVE_S = 30.0


async def in_thread(work: Callable[[], Any]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, work)


async def test_publishing_goes_on_while_the_topic_is_unloaded(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, batch_messages=7) as producer, client.consumer(topic, "s") as consumer:
            unloading = asyncio.ensure_future(_unload_again_and_again(cluster, topic, 3))
            sent = 0
            while not unloading.done():
                await producer.send(b"%d" % sent)
                sent += 1
            await unloading
            seen: dict[bytes, None] = {}
            while len(seen) < sent:  # without deduplication a batch may be stored twice; nothing is lost and nothing out of order
                message = await consumer.receive(RECEIVE_S)
                seen[message.data] = None
                consumer.ack_nowait(message)
            assert list(seen) == [b"%d" % number for number in range(sent)]


async def _unload_again_and_again(cluster: ClusterThread, topic: str, times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0.1)
        await in_thread(lambda: cluster.unload(topic))


async def test_a_broker_that_restarts_loses_nothing(tmp_path: Path, topic: str) -> None:
    port = free_port()
    got: list[bytes] = []
    async with cepheid.connect(f"pulsar://127.0.0.1:{port}") as client:
        async with StandaloneCluster(data_dir=tmp_path, port=port):
            producer = await client.producer(topic)
            consumer = await client.consumer(topic, "s")
            for number in range(3):
                await producer.send(b"%d" % number)
            first = await consumer.receive(RECEIVE_S)
            await consumer.ack(first)
        for number in range(3, 6):
            producer.send_nowait(b"%d" % number)
        async with StandaloneCluster(data_dir=tmp_path, port=port):
            await producer.flush()
            while len(got) < 5:
                got.append((await consumer.receive(RECEIVE_S)).data)
            assert got == [b"%d" % number for number in range(1, 6)]
            async with client.reader(topic) as reader:
                assert [(await reader.read(RECEIVE_S)).data for _ in range(6)] == [b"%d" % number for number in range(6)]
            await client.close()


async def test_no_receipt_within_the_send_timeout(tmp_path: Path, topic: str) -> None:
    port = free_port()
    async with cepheid.connect(f"pulsar://127.0.0.1:{port}", request_timeout_s=5) as client:
        async with StandaloneCluster(data_dir=tmp_path, port=port):
            producer = await client.producer(topic, send_timeout_s=0.3)
        producer.send_nowait(b"1")
        producer.send_nowait(b"2")
        with pytest.raises(cepheid.TimedOutError, match=r"no receipt within 0.3 s .* may be stored or not"):
            await producer.send(b"3")
        with pytest.raises(cepheid.SendFailedError, match="2 messages were not stored") as failed:
            await producer.flush()
        assert isinstance(failed.value.first, cepheid.TimedOutError)
        assert failed.value.count == 2


async def test_some_addresses_may_be_dead(cluster: ClusterThread, topic: str) -> None:
    alive = cluster.url.removeprefix("pulsar://")
    async with cepheid.connect(f"pulsar://127.0.0.1:{free_port()},{alive}") as client:
        async with client.producer(topic) as producer:
            await producer.send(b"")
    nowhere = f"pulsar://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    async with cepheid.connect(nowhere, request_timeout_s=0.3) as client:
        with pytest.raises(cepheid.TimedOutError, match="none of 2 addresses answers"):
            await client.producer(topic)


async def test_what_is_closed_says_so(cluster: ClusterThread, topic: str) -> None:
    client = cepheid.connect(cluster.url)
    producer = await client.producer(topic)
    consumer = await client.consumer(topic, "s")
    await producer.send(b"")
    message = await consumer.receive(RECEIVE_S)
    waiting = asyncio.ensure_future(consumer.receive())
    await asyncio.sleep(0)
    await client.close()
    await client.close()
    uses: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: producer.send(b""),
        lambda: consumer.receive(),
        lambda: consumer.ack(message),
        lambda: client.partitions(topic),
        lambda: _opened(client, topic),
        lambda: _waited(waiting),
    ]
    for use in uses:
        with pytest.raises(cepheid.ClosedError, match="is closed"):
            await use()
    with pytest.raises(cepheid.ClosedError):
        producer.send_nowait(b"")
    with pytest.raises(cepheid.ClosedError):
        consumer.nack(message)


async def _opened(client: cepheid.Client, topic: str) -> None:
    await client.producer(topic)


async def _waited(task: asyncio.Future[Any]) -> None:
    await task


async def test_a_cancelled_close_can_be_repeated(cluster: ClusterThread, topic: str) -> None:
    client = cepheid.connect(cluster.url)
    consumer = await client.consumer(topic, "s")
    for each in (consumer, client):
        closing = asyncio.ensure_future(each.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await each.close()
    async with cepheid.connect(cluster.url) as other, other.consumer(topic, "s"):
        pass  # it is exclusive: the first one has left


async def test_a_producer_whose_close_was_cancelled_sends_what_was_taken(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        producer = await client.producer(topic)
        connection = producer._partitions[0].connection
        assert connection is not None
        connection.abort("cut by the test")
        producer.send_nowait(b"taken")
        first = asyncio.ensure_future(producer.close())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        await producer.close()
        async with client.reader(topic) as reader:
            assert await reader.has_message_available()


async def test_a_second_close_raises_what_a_cancelled_one_could_not(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        producer = await client.producer(topic)
        producer.send_nowait(b"taken")
        producer._partitions[0]._fail_all(cepheid.TerminatedError("terminated by the test"))
        first = asyncio.ensure_future(producer.close())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(cepheid.SendFailedError):
            await producer.close()
        await producer.close()


async def test_closing_sends_what_was_taken(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        producer = await client.producer(topic)
        for number in range(100):
            producer.send_nowait(b"%d" % number)
    async with cepheid.connect(cluster.url) as client, client.reader(topic) as reader:
        assert [(await reader.read(RECEIVE_S)).data for _ in range(100)] == [b"%d" % number for number in range(100)]


def test_a_client_belongs_to_one_loop(cluster: ClusterThread) -> None:
    client = cepheid.connect(cluster.url)

    async def use() -> None:
        assert await client.partitions("any-topic") == 0

    with asyncio.Runner() as first:
        first.run(use())
        with (
            asyncio.Runner() as second,
            pytest.raises(cepheid.UsageError, match=r"another event loop: call cepheid.connect in each"),
        ):
            second.run(use())
        first.run(client.close())


async def test_what_is_used_in_another_loop_or_thread_says_so(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        producer, consumer = await client.producer(topic), await client.consumer(topic, "s")
        await producer.send(b"0")
        message = await consumer.receive(RECEIVE_S)
        uses: list[Callable[[], Any]] = [
            lambda: producer.send_nowait(b"1"),
            lambda: consumer.ack_nowait(message),
            lambda: consumer.nack(message),
            lambda: asyncio.run(producer.send(b"1")),
            lambda: asyncio.run(producer.flush()),
            lambda: asyncio.run(consumer.receive()),
            lambda: asyncio.run(consumer.ack(message)),
        ]

        def use_all() -> None:
            for use in uses:
                with pytest.raises(cepheid.UsageError, match="belongs to another event loop or thread"):
                    use()

        await in_thread(use_all)
        await consumer.ack(message)
        assert (await producer.send(b"2")).entry_id == message.message_id.entry_id + 1


FORKED = """
import asyncio, os, cepheid

async def main():
    async with cepheid.connect({url!r}) as client:
        producer = await client.producer({topic!r})
        consumer = await client.consumer({topic!r}, "s")
        producer.send_nowait(b"0")
        if os.fork() == 0:
            for use in (lambda: producer.send_nowait(b"child"), lambda: client._use()):
                try:
                    use()
                except cepheid.UsageError as error:
                    print(error, flush=True)
            os._exit(0)
        os.wait()
        for number in range(1, 100):
            await producer.send(b"%d" % number)
        assert [(await consumer.receive(30)).data for _ in range(100)] == [b"%d" % number for number in range(100)]
        print("parent done")

asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_leaves_its_parents_connections_alone(cluster: ClusterThread, topic: str) -> None:
    code = FORKED.format(url=cluster.url, topic=topic)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    child = [line for line in done.stdout.splitlines() if "before this process was forked: call cepheid.connect" in line]
    assert len(child) == 2, done.stdout + done.stderr
    assert done.stdout.endswith("parent done\n")


RECONNECTING = """
import asyncio, os, cepheid, cepheid.sync

async def publish(client, text):
    async with client.producer({topic!r}) as producer:
        await producer.send(text)

async def connect_again():
    async with cepheid.connect({url!r}) as client:
        await publish(client, b"child")

async def main():
    inherited = cepheid.connect({url!r})
    await publish(inherited, b"parent")
    if (child := os.fork()) == 0:
        try:
            await publish(inherited, b"lost")
        except cepheid.UsageError as error:
            assert "call cepheid.connect" in str(error)
        asyncio.run(connect_again())     # to asyncio no loop runs in a forked process
        with cepheid.sync.connect({url!r}) as client, client.producer({topic!r}) as producer:
            producer.send(b"child, blocking")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    await publish(inherited, b"parent again")
    async with inherited, inherited.reader({topic!r}) as reader:
        print([(await reader.read(30)).data.decode() for _ in range(4)], await reader.has_message_available())

asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_told_to_connect_and_publishes_when_it_has(cluster: ClusterThread, topic: str) -> None:
    code = RECONNECTING.format(url=cluster.url, topic=topic)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['parent', 'child', 'child, blocking', 'parent again'] False\n", done.stderr


async def test_a_topic_that_is_not_there_and_may_not_be_created(cluster: ClusterThread) -> None:
    cluster.admin("PUT", "namespaces/public/fixed")
    cluster.admin("POST", "namespaces/public/fixed/autoTopicCreation", {"allowAutoTopicCreation": False})
    async with cepheid.connect(cluster.url) as client:
        for opening in (
            client.producer("public/fixed/none"),
            client.consumer("public/fixed/none", "s"),
            client.reader("public/fixed/none"),
        ):
            with pytest.raises(cepheid.NotFoundError, match="check the name"):
                await _open(opening)
        with pytest.raises(cepheid.UsageError, match="not tenant/namespace/topic"):
            await client.producer("a/b")


async def _open(opening: Any) -> None:
    await opening


@dataclass
class Order:
    id: int


@dataclass
class Renamed:
    number: str


async def test_a_schema_that_does_not_fit_names_the_field(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=Order) as producer:
        await producer.send(Order(1))
        with pytest.raises(cepheid.SchemaError, match=r"field 'number'.*change the type"):
            await client.producer(topic, schema=Renamed)
        with pytest.raises(cepheid.UsageError, match="expected a Order, got Renamed"):
            await producer.send(Renamed("1"))  # type: ignore[arg-type]
        async with client.producer(topic) as raw:  # bytes fit every topic
            await raw.send(b'{"id": "no number"}')
        async with client.consumer(topic, "s", schema=Order, start="earliest") as consumer:
            assert (await consumer.receive(RECEIVE_S)).value == Order(1)
            message = await consumer.receive(RECEIVE_S)
            with pytest.raises(
                cepheid.UnreadableMessageError, match=r"message \S+ of .*: field 'id': expected int, got 'no number'"
            ):
                _ = message.value
            assert message.data == b'{"id": "no number"}'


@asynccontextmanager
async def scripted_broker(answer: Callable[[Any], list[bytes]]) -> AsyncIterator[tuple[str, list[Any]]]:
    """A broker that says what the test wants; yields its URL and the commands that came."""
    commands: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        splitter = FrameSplitter(1 << 20)
        while data := await reader.read(1 << 16):
            for frame in splitter.feed(data):
                command = parse_command(frame.command)
                commands.append(command)
                for reply in answer(command):
                    writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"pulsar://127.0.0.1:{server.sockets[0].getsockname()[1]}", commands
    finally:
        server.close()


CONNECTED = encode_body(pb.CommandConnected(server_version="scripted", protocol_version=20))


async def test_a_broker_that_never_answers() -> None:
    async with scripted_broker(lambda command: []) as (url, _):
        async with cepheid.connect(url, connect_timeout_s=0.2, request_timeout_s=0.3) as client:
            with pytest.raises(cepheid.TimedOutError, match="did not answer within"):
                await client.producer("topic")


def _refuse_for_now(command: Any) -> list[bytes]:
    code = pb.ServerError.ServiceNotReady
    match command.type:
        case CommandType.CONNECT:
            return [CONNECTED]
        case CommandType.PARTITIONED_METADATA:
            request_id = command.partitionMetadata.request_id
            failed = pb.CommandPartitionedTopicMetadataResponse.Failed
            return [encode_body(pb.CommandPartitionedTopicMetadataResponse(request_id=request_id, response=failed, error=code))]
    return []


def _say_nothing_more(command: Any) -> list[bytes]:
    return [CONNECTED] if command.type == CommandType.CONNECT else []


def _refuse_connections(command: Any) -> list[bytes]:
    return [encode_body(pb.CommandError(request_id=0, error=pb.ServerError.ServiceNotReady, message="starting"))]


@pytest.mark.parametrize("answer", [_refuse_for_now, _say_nothing_more, _refuse_connections])
async def test_an_address_that_answers_nothing_useful_is_left(
    cluster: ClusterThread, topic: str, answer: Callable[[Any], list[bytes]]
) -> None:
    alive = cluster.url.removeprefix("pulsar://")
    async with scripted_broker(answer) as (url, _), cepheid.connect(f"{url},{alive}", request_timeout_s=3) as client:
        await asyncio.gather(*(client.partitions(f"{topic}-{index}") for index in range(2)))  # both fail at the first address
        async with client.producer(topic) as producer:
            await producer.send(b"")


async def test_a_half_open_connection_is_replaced(tmp_path: Path, topic: str) -> None:
    """Bytes neither arrive nor are refused: only the keep-alive notices. Without deduplication a message may be stored twice."""
    port = free_port()
    with TcpProxy(f"127.0.0.1:{port}") as proxy:
        async with StandaloneCluster(data_dir=tmp_path, port=port, advertised_port=proxy.port):
            async with cepheid.connect(f"pulsar://{proxy.address}", keep_alive_s=0.2) as client:
                producer, consumer = await client.producer(topic), await client.consumer(topic, "s")
                await producer.send(b"0")
                before = proxy.connections
                proxy.stall()
                producer.send_nowait(b"1")
                await wait_until(lambda: proxy.connections > before)
                proxy.heal()
                await producer.send(b"2")
                seen: dict[bytes, None] = {}
                while len(seen) < 3:
                    message = await consumer.receive(RECEIVE_S)
                    seen[message.data] = None
                    await consumer.ack(message)
                assert list(seen) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("jump_s", [7200, -7200])
async def test_a_wall_clock_that_jumps_changes_publish_times_alone(
    cluster: ClusterThread, topic: str, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    backoff = cepheid.NackBackoff(first_s=0.05)
    async with cepheid.connect(cluster.url, keep_alive_s=0.1) as client:
        async with client.producer(topic, send_timeout_s=5) as producer:
            async with client.consumer(topic, "s", type="shared", nack_backoff=backoff) as consumer:
                producer.send_nowait(b"0")
                wall = SimpleNamespace(time_ns=lambda: time.time_ns() + jump_s * 1_000_000_000)
                monkeypatch.setattr("cepheid.topic_producer.time", wall)
                await producer.flush()
                await producer.send(b"1")
                first, second = [await consumer.receive(RECEIVE_S) for _ in range(2)]
                consumer.nack(second)
                again = await consumer.receive(RECEIVE_S)
                assert (first.data, again.data, again.redelivery_count) == (b"0", b"1", 1)
                shown_s = (again.publish_time - datetime.now(UTC)).total_seconds()
                assert (shown_s > 3600) if jump_s > 0 else (shown_s < -3600)
                await asyncio.gather(consumer.ack(first), consumer.ack(again))


async def test_a_message_of_100_mb(cluster: ClusterThread, topic: str) -> None:
    large = bytes(range(256)) * 390_625
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic) as producer:
            with pytest.raises(cepheid.MessageTooLargeError, match=r"this one has 100,000,\d+.*chunking"):
                producer.send_nowait(large)
            await producer.send(b"the producer is still usable")
        async with client.consumer(topic, "s") as consumer, client.producer(topic, chunking=True) as producer:
            await producer.send(large)
            message = await consumer.receive(RECEIVE_S)
            assert message.data == large
            await consumer.ack(message)


async def test_keep_alive_both_ways() -> None:
    def answer(command: Any) -> list[bytes]:
        return [CONNECTED, PING_FRAME] if command.type == CommandType.CONNECT else []

    async with scripted_broker(answer) as (url, commands):
        async with cepheid.connect(url, keep_alive_s=0.1, request_timeout_s=1.5) as client:
            with pytest.raises(cepheid.TimedOutError):
                await client.producer("topic")
            types = [command.type for command in commands]
            assert CommandType.PONG in types, "the broker's ping is answered"
            assert CommandType.PING in types
            await wait_until(lambda: types.count(CommandType.CONNECT) > 0)
            assert len([kind for kind in types if kind == CommandType.CONNECT]) >= 2, "a silent broker is given up, and tried again"


async def test_a_redirect_is_followed_and_a_token_is_sent(cluster: ClusterThread, topic: str) -> None:
    def answer(command: Any) -> list[bytes]:
        if command.type == CommandType.CONNECT:
            return [CONNECTED]
        if command.type == CommandType.PARTITIONED_METADATA:
            request_id = command.partitionMetadata.request_id
            success = pb.CommandPartitionedTopicMetadataResponse.Success
            return [encode_body(pb.CommandPartitionedTopicMetadataResponse(request_id=request_id, partitions=0, response=success))]
        if command.type == CommandType.LOOKUP:
            redirect = pb.CommandLookupTopicResponse.Redirect
            request_id = command.lookupTopic.request_id
            return [
                encode_body(pb.CommandLookupTopicResponse(request_id=request_id, response=redirect, brokerServiceUrl=cluster.url))
            ]
        return []

    async with scripted_broker(answer) as (url, commands):
        async with cepheid.connect(url, token=lambda: "secret") as client, client.producer(topic) as producer:
            await producer.send(b"")
    assert (commands[0].connect.auth_method_name, commands[0].connect.auth_data) == ("token", b"secret")


@pytest.mark.parametrize(("named", "proxied_to"), [("pulsar://broker-7:6650", ["", "broker-7:6650"]), ("", [""])])
async def test_a_proxy_is_told_which_broker_is_meant(named: str, proxied_to: list[str]) -> None:
    """A lookup that names the address that was asked needs no second connection: a standalone server answers so."""

    def answer(command: Any) -> list[bytes]:
        if command.type == CommandType.CONNECT:
            return [CONNECTED]
        if command.type == CommandType.PARTITIONED_METADATA:
            request_id, success = command.partitionMetadata.request_id, pb.CommandPartitionedTopicMetadataResponse.Success
            return [encode_body(pb.CommandPartitionedTopicMetadataResponse(request_id=request_id, partitions=0, response=success))]
        if command.type == CommandType.LOOKUP:
            found = pb.CommandLookupTopicResponse(request_id=command.lookupTopic.request_id, proxy_through_service_url=True)
            found.response, found.brokerServiceUrl = pb.CommandLookupTopicResponse.Connect, named or url
            return [encode_body(found)]
        if command.type == CommandType.PRODUCER:
            return [encode_body(pb.CommandProducerSuccess(request_id=command.producer.request_id, producer_name="p"))]
        if command.type == CommandType.CLOSE_PRODUCER:
            return [encode_body(pb.CommandSuccess(request_id=command.close_producer.request_id))]
        return []

    async with scripted_broker(answer) as (url, commands):
        async with cepheid.connect(url) as client, client.producer("t"):
            connects = [command.connect for command in commands if command.type == CommandType.CONNECT]
            assert [connect.proxy_to_broker_url for connect in connects] == proxied_to


def test_a_token_is_read_from_its_file_each_time(tmp_path: Path) -> None:
    security = Security(token=tmp_path / "token")
    with pytest.raises(cepheid.ConnectError, match="the file with the token cannot be read"):
        security.show_now()
    for token in ("old", "new"):
        (tmp_path / "token").write_text(f"{token}\n")
        assert security.show_now() == ("token", token.encode())


async def test_a_token_function_that_raises_is_asked_again(cluster: ClusterThread, topic: str) -> None:
    calls: list[int] = []

    def token() -> str:
        calls.append(0)
        if len(calls) in (1, 3):
            raise OSError("the secret store does not answer")
        return "secret"

    async with cepheid.connect(cluster.url, token=token) as client, client.producer(topic) as producer:
        assert client._pool is not None
        for connection in list(client._pool._open.values()):
            connection.abort("cut by the test")
        await producer.send(b"")
        assert len(calls) == 4


async def test_a_peer_that_speaks_another_protocol() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with cepheid.connect(f"pulsar://127.0.0.1:{port}", request_timeout_s=0.3) as client:
            with pytest.raises(cepheid.TimedOutError, match="frame at byte 0 of the connection"):
                await client.producer("topic")
    finally:
        server.close()


@pytest.mark.parametrize("batching", [True, False])
async def test_connections_that_break_again_and_again(cluster: ClusterThread, topic: str, batching: bool) -> None:
    """With deduplication every message is stored once and in order; the consumer misses nothing of it."""
    cluster.admin("PUT", f"persistent/public/default/{topic}")
    cluster.admin("POST", f"persistent/public/default/{topic}/deduplicationEnabled", True)
    count = 3000
    async with cepheid.connect(cluster.url) as client:
        consumer = await client.consumer(topic, "s", start="earliest")
        producer = await client.producer(topic, name="p", batching=batching, batch_messages=20, window_messages=300)

        async def publish() -> None:
            for number in range(count):
                while True:
                    try:
                        producer.send_nowait(b"%d" % number)
                        break
                    except cepheid.WindowFullError:
                        await producer.drain()
            await producer.flush()

        async def consume() -> dict[bytes, None]:
            seen: dict[bytes, None] = {}
            while len(seen) < count:
                message = await consumer.receive(RECEIVE_S)
                seen[message.data] = None
                consumer.ack_nowait(message)
            return seen

        publishing, consuming = asyncio.ensure_future(publish()), asyncio.ensure_future(consume())
        cuts = 0
        while not (publishing.done() and consuming.done()):
            await asyncio.sleep(0.15)
            assert client._pool is not None
            if cuts < 8:
                cuts += 1
                for connection in list(client._pool._open.values()):
                    connection.abort("cut by the test")
        await publishing
        assert list(await consuming) == [b"%d" % number for number in range(count)]
        async with client.reader(topic) as reader:
            stored = [(await reader.read(RECEIVE_S)).data for _ in range(count)]
            assert stored == [b"%d" % number for number in range(count)]
            assert not await reader.has_message_available()


class KilledServer:
    """`cepheid standalone` in a process of its own, which is killed and started again on the same data and ports."""

    def __init__(self, data: Path) -> None:
        self.port, self.admin_port = free_port(), free_port()
        self._command = [
            *(sys.executable, "-m", "cepheid_cli", "standalone", "--data", str(data)),
            *("--port", str(self.port), "--admin-port", str(self.admin_port)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@pytest.mark.slow
async def test_200_000_messages_through_kills_and_cuts_are_stored_once_and_in_order(tmp_path: Path, topic: str) -> None:
    count, kills, cuts, chance = 200_000, 3, 12, random.Random(24)
    incidents = dict.fromkeys(chance.sample(range(count // 20, count), cuts), "cut")
    incidents |= dict.fromkeys(chance.sample(range(count // 20, count), kills), "kill")
    due = sorted(incidents, reverse=True)
    server = KilledServer(tmp_path)
    server.start()
    try:
        async with (
            cepheid.connect(f"pulsar://127.0.0.1:{server.port}") as client,
            cepheid.admin.connect(f"http://127.0.0.1:{server.admin_port}") as admin,
        ):
            consumer = await client.consumer(topic, "s")
            await admin.topics.set_deduplication_enabled(topic, True)
            producer = await client.producer(topic, name="p", window_messages=5000)

            async def publish() -> None:
                for number in range(count):
                    while True:
                        try:
                            producer.send_nowait(b"%d" % number)
                            break
                        except cepheid.WindowFullError:
                            await producer.drain()
                await producer.flush()

            publishing = asyncio.ensure_future(publish())
            seen: dict[bytes, None] = {}
            while len(seen) < count:
                message = await consumer.receive(RECEIVE_S)
                seen[message.data] = None
                consumer.ack_nowait(message)
                if due and len(seen) >= due[-1]:
                    if incidents[due.pop()] == "kill":
                        await in_thread(server.kill)
                        server.start()
                    else:
                        assert client._pool is not None
                        for connection in list(client._pool._open.values()):
                            connection.abort("cut by the test")
            await publishing
            expected = [b"%d" % number for number in range(count)]
            assert list(seen) == expected
            async with client.reader(topic) as reader:
                assert [(await reader.read(RECEIVE_S)).data for _ in range(count)] == expected
                assert not await reader.has_message_available()
    finally:
        server.kill()
