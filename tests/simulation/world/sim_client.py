"""An application's machine with a client library: connections to brokers, lookups, requests with timeouts.

    connect(topic) ──► LOOKUP at any broker ──► Redirect ──► LOOKUP there … ──► Connect: the one connection to that broker
    request(body)  ──► answer of the same request id │ RequestFailedError(code) │ TimeoutError │ ConnectionError

As the official clients do: one connection per broker and client, shared by all its producers and consumers; a PING when nothing was
heard, and the end of the connection when there is still nothing; any answer that does not belong closes it too. Times are scaled to
those of the simulated brokers. The client's process is a `Node` of its own: it outlives every broker, and may crash itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Protocol, cast

from google.protobuf.message import Message

from cepheid_wire import (
    BODY_FIELDS,
    PING_FRAME,
    PONG_FRAME,
    CommandType,
    FrameSplitter,
    ServerError,
    TopicName,
    encode_body,
)
from cepheid_wire import pulsar_api_pb2 as pb
from tests.simulation.checks.history import History
from tests.simulation.world.node import Node

PORT = 6650
REQUEST_S = 8.0
"""Of a request: what 30 s are to real clients; above what the simulated brokers take to refuse."""
CONNECT_S = 3.0
KEEPALIVE_S = 4.0
_MOST_REDIRECTS = 8
_MAX_FRAME_BYTES = 1 << 22
_FOR_CONSUMERS = frozenset(
    {
        CommandType.MESSAGE,
        CommandType.CLOSE_CONSUMER,
        CommandType.ACTIVE_CONSUMER_CHANGE,
        CommandType.REACHED_END_OF_TOPIC,
    }
)

_parse = pb.BaseCommand.FromString


class RequestFailedError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{ServerError(code).name}: {text}")
        self.code = ServerError(code)


CLIENT_ERRORS = (RequestFailedError, TimeoutError, OSError)
"""What clients cope with by trying again. A ConnectionError is an OSError."""


class Handler(Protocol):
    """A producer or consumer on a connection."""

    def on_command(self, kind: int, body: Any, tail: memoryview) -> None: ...

    def on_connection_lost(self, connection: ClientConnection) -> None: ...


class ClientConnection(asyncio.Protocol):
    def __init__(self, client: SimClient, host: str) -> None:
        self._client = client
        self.host = host
        self._splitter = FrameSplitter(_MAX_FRAME_BYTES)
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._heard = self._pinged = False
        self._timer: asyncio.TimerHandle | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.producers: dict[int, Handler] = {}
        self.consumers: dict[int, Handler] = {}
        self.lost = False

    def __repr__(self) -> str:
        return f"<ClientConnection {self._client.name} to {self.host}{', lost' if self.lost else ''}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        connect = pb.CommandConnect(client_version="Pulsar-Java simulated", protocol_version=20, auth_method_name="none")
        if self._client.role:
            connect.auth_method_name, connect.auth_data = "token", self._client.role.encode()
        self.send(connect)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        for kind, command, tail in self._splitter.feed(data):
            if self.lost:
                return
            if kind == CommandType.PING:
                self.write(PONG_FRAME)
            elif kind == CommandType.CONNECTED:
                self._on_connected()
            elif kind != CommandType.PONG:
                self._take(kind, getattr(_parse(command), BODY_FIELDS[kind]), tail)

    def _take(self, kind: int, body: Any, tail: memoryview) -> None:
        if kind in (CommandType.SEND_RECEIPT, CommandType.SEND_ERROR, CommandType.CLOSE_PRODUCER):
            handler = self.producers.get(body.producer_id)
        elif kind in _FOR_CONSUMERS:
            handler = self.consumers.get(body.consumer_id)
        else:
            self._answer(body)
            return
        if handler is not None:  # else: closed here, and on its way there
            handler.on_command(kind, body, tail)

    def _answer(self, body: Any) -> None:
        future = self._requests.pop(body.request_id, None)
        if future is None or future.done():
            return  # it was given up
        if isinstance(body, pb.CommandError):
            future.set_exception(RequestFailedError(body.error, body.message))
        else:
            future.set_result(body)

    def _on_connected(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._on_timer)
        if not self.ready.done():
            self.ready.set_result(None)

    def _on_timer(self) -> None:
        if self.lost:
            return
        if not self._heard and self._pinged:
            self.abort()
            return
        self._pinged = not self._heard
        self._heard = False
        if self._pinged:
            self.write(PING_FRAME)
        self._timer = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._on_timer)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def abort(self) -> None:
        """From here: the client gives it up."""
        if not self.lost:
            self.transport.abort()
            self._end()

    def _end(self) -> None:
        if self.lost:
            return
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._client.forget(self)
        failure = ConnectionResetError(f"the connection to {self.host} is lost")
        for future in (*self._requests.values(), self.ready):
            if not future.done():
                future.set_exception(failure)
                future.exception()  # heard, also when nobody waits any more
        self._requests.clear()
        handlers = (*self.producers.values(), *self.consumers.values())
        self.producers.clear()
        self.consumers.clear()
        for handler in handlers:
            handler.on_connection_lost(self)

    # What handlers do

    def write(self, frames: bytes) -> None:
        if not self.lost:
            self.transport.write(frames)

    def send(self, *bodies: Message) -> None:
        self.write(b"".join(map(encode_body, bodies)))

    def ask(self, body: Any) -> asyncio.Future[Any]:
        """`body.request_id` is set here. Its answer; RequestFailedError; ConnectionResetError."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.lost:
            future.set_exception(ConnectionResetError(f"the connection to {self.host} is lost"))
            return future
        body.request_id = self._client.next_id()
        self._requests[body.request_id] = future
        self.send(body)
        return future

    async def request(self, body: Any) -> Any:
        """Raises one of CLIENT_ERRORS."""
        try:
            async with asyncio.timeout(REQUEST_S):
                return await self.ask(body)
        finally:
            self._requests.pop(body.request_id, None)


class SimClient:
    def __init__(self, name: str, brokers: Sequence[str], rng: random.Random, history: History) -> None:
        self.name = name
        self.node = Node(name)
        self.random = rng
        self.history = history
        self.role = ""  # that it names to brokers which ask for it
        self._brokers = list(brokers)
        self._connections: dict[str, ClientConnection] = {}
        self._connecting: dict[str, asyncio.Task[ClientConnection]] = {}
        self._ids = 0

    def __repr__(self) -> str:
        return f"<SimClient {self.name}, {len(self._connections)} connections>"

    def next_id(self) -> int:
        """Of requests, producers and consumers: never used again, so that whatever arrives late belongs to nobody."""
        self._ids += 1
        return self._ids

    @property
    def connections(self) -> list[ClientConnection]:
        return list(self._connections.values())

    def forget(self, connection: ClientConnection) -> None:
        if self._connections.get(connection.host) is connection:
            del self._connections[connection.host]

    async def connect_to(self, host: str) -> ClientConnection:
        """The one connection to it."""
        if (connection := self._connections.get(host)) is not None:
            return connection
        if host not in self._connecting:
            self._connecting[host] = self.node.start(self._open(host), name=f"connect {host}")
            self._connecting[host].add_done_callback(lambda task: (self._connecting.pop(host, None), task.exception())[0])
        return await asyncio.shield(self._connecting[host])

    async def _open(self, host: str) -> ClientConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(lambda: ClientConnection(self, host), host, PORT)
            try:
                await connection.ready
            except BaseException:
                connection.abort()
                raise
        self._connections[host] = connection
        return connection

    async def find(self, topic: TopicName) -> ClientConnection:
        """To the broker that says that it serves the topic. Raises one of CLIENT_ERRORS."""
        host, authoritative = self.random.choice(self._brokers), False
        for _ in range(_MOST_REDIRECTS):
            connection = await self.connect_to(host)
            answer = await connection.request(pb.CommandLookupTopic(topic=str(topic), request_id=0, authoritative=authoritative))
            if answer.response == pb.CommandLookupTopicResponse.Failed:
                raise RequestFailedError(answer.error, answer.message)
            host, authoritative = host_of(answer.brokerServiceUrl), answer.authoritative
            if answer.response == pb.CommandLookupTopicResponse.Connect:
                return await self.connect_to(host)
        raise ConnectionRefusedError(f"{topic}: sent on {_MOST_REDIRECTS} times")

    async def partitions(self, topic: TopicName) -> int:
        connection = await self.connect_to(self.random.choice(self._brokers))
        answer = await connection.request(pb.CommandPartitionedTopicMetadata(topic=str(topic), request_id=0))
        if answer.response == pb.CommandPartitionedTopicMetadataResponse.Failed:
            raise RequestFailedError(answer.error, answer.message)
        return int(answer.partitions)


def host_of(url: str) -> str:
    return url.removeprefix("pulsar://").rpartition(":")[0]
