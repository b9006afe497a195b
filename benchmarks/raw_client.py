"""A raw-socket client of the Pulsar protocol, cheap enough not to be what is measured.

    received bytes ──► walk over frame sizes ──► receipts, messages: counted, never parsed
                                            └──► the rest: parsed; answers go to who asked, PING is answered, refusals are fatal

The receive buffer is one piece of memory: frames are looked at where they lie, and an incomplete one moves to the front.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from cepheid_wire import BODY_FIELDS, PONG_FRAME, CommandType, encode_batch, encode_body, encode_tail, parse_command
from cepheid_wire import pulsar_api_pb2 as pb

BUFFER_BYTES = 8 << 20  # more than the largest frame
REQUEST_LIMIT_S = 30.0
_RECEIPT, _MESSAGE = int(CommandType.SEND_RECEIPT), int(CommandType.MESSAGE)
_HEADER_BYTES = 10  # total size, command size, and the command's type (tag and number: first in every known encoder)


class RefusedError(Exception):
    """The server answered with an error, closed what we use, or hung up: the measurement is void."""


class Connection(asyncio.BufferedProtocol):
    """`on_receipts(count)` and `on_messages(count, last_command)` are called once per received piece; so is `on_frames`, if set,
    with command and tail of every message."""

    def __init__(self) -> None:
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._request_id = 0
        self._transport: asyncio.Transport | None = None
        self.receipts = 0
        self.messages = 0
        self.message_bytes = 0
        self.on_receipts: Callable[[int], None] | None = None
        self.on_messages: Callable[[int, bytes], None] | None = None
        self.on_frames: Callable[[list[tuple[bytes, bytes]]], None] | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only
        self._transport.set_write_buffer_limits(64 << 20)  # the load's window is the bound, not the buffer

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(RefusedError(f"the server closed the connection: {error or 'no error'}"))

    def get_buffer(self, _: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, size_bytes: int) -> None:
        end = self._filled + size_bytes
        start = receipts = messages = last_message = message_bytes = 0
        frames: list[tuple[bytes, bytes]] = []
        buffer, read_header = self._buffer, struct.Struct(">IIBB").unpack_from
        while end - start >= _HEADER_BYTES:
            total_bytes, command_bytes, _, command_type = read_header(buffer, start)
            frame_end = start + 4 + total_bytes
            if frame_end > end:
                break
            if command_type == _RECEIPT:
                receipts += 1
            elif command_type == _MESSAGE:
                messages += 1
                message_bytes += total_bytes - command_bytes
                last_message = start
                if self.on_frames is not None:
                    tail_start = start + 8 + command_bytes
                    frames.append((bytes(self._view[start + 8 : tail_start]), bytes(self._view[tail_start:frame_end])))
            else:
                self._on_command(bytes(self._view[start + 8 : start + 8 + command_bytes]))
            start = frame_end
        if messages:
            self.messages += messages
            self.message_bytes += message_bytes
            if self.on_messages is not None:
                command_bytes = read_header(buffer, last_message)[1]
                self.on_messages(messages, bytes(self._view[last_message + 8 : last_message + 8 + command_bytes]))
            if self.on_frames is not None:
                self.on_frames(frames)
        if receipts:
            self.receipts += receipts
            if self.on_receipts is not None:
                self.on_receipts(receipts)
        if start and start < end:
            buffer[: end - start] = buffer[start:end]
        self._filled = end - start

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    @property
    def peer_port(self) -> int:
        """The server's port."""
        assert self._transport is not None
        return int(self._transport.get_extra_info("peername")[1])

    def fileno(self) -> int:
        """For a sender thread that writes whole frames itself."""
        assert self._transport is not None
        return int(self._transport.get_extra_info("socket").fileno())

    def close(self) -> None:
        if not self.failed.done():
            self.failed.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, body: Any) -> Any:
        """Sends a request and returns the body of its answer. Gives the request its id."""
        self._request_id += 1
        body.request_id = self._request_id
        return await self._ask(body, self._request_id)

    async def connect(self, token: str | None = None) -> None:
        command = pb.CommandConnect(client_version="cepheid-bench", protocol_version=20)
        if token is not None:
            command.auth_method_name, command.auth_data = "token", token.encode()
        await self._ask(command, 0)

    async def _ask(self, body: Any, request_id: int) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        self.write(encode_body(body))
        return await answer

    def _on_command(self, data: bytes) -> None:
        command = parse_command(data)
        command_type = CommandType(command.type)
        if command_type is CommandType.PING:
            self.write(PONG_FRAME)
            return
        body = getattr(command, BODY_FIELDS[command.type])
        if command_type in (CommandType.SEND_ERROR, CommandType.CLOSE_PRODUCER, CommandType.CLOSE_CONSUMER):
            self._fail(RefusedError(f"the server sent {command_type.name}: {body}".replace("\n", " ")))
            return
        answer = self._waiting.pop(getattr(body, "request_id", 0), None)
        if answer is None or answer.done():
            return
        if command_type is CommandType.ERROR:
            answer.set_exception(RefusedError(f"the server refused: {body.message}"))
        else:
            answer.set_result(body)

    def _fail(self, error: RefusedError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(error)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a client shows: a token, and TLS with these settings for `pulsar+ssl://`."""

    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None


NOTHING = Shown()


async def open_connection(url: str, topic: str | None = None, shown: Shown = NOTHING) -> Connection:
    """A connection that may be used: to `url`, or to whoever serves `topic` according to it. Creates the topic as clients do."""
    connection = await _dial(url, shown)
    if topic is None:
        return connection
    await connection.ask(pb.CommandPartitionedTopicMetadata(topic=topic))
    answer = await look_up_topic(connection, topic)
    told = answer.brokerServiceUrlTls if url.startswith("pulsar+ssl://") else answer.brokerServiceUrl
    if told and _host_port(told) != _host_port(url):
        connection.close()
        connection = await _dial(told, shown)
    return connection


async def look_up_topic(connection: Connection, topic: str) -> Any:
    """Return the answer of a lookup. Raises RefusedError."""
    answer = await connection.ask(pb.CommandLookupTopic(topic=topic))
    if answer.response == pb.CommandLookupTopicResponse.Failed:
        raise RefusedError(f"lookup of {topic} failed: {answer.message}")
    return answer


async def _dial(url: str, shown: Shown) -> Connection:
    host, port = _host_port(url)
    tls = shown.tls if url.startswith("pulsar+ssl://") else None
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port, ssl=tls)
    async with asyncio.timeout(REQUEST_LIMIT_S):
        await connection.connect(shown.token)
    return connection


def _host_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 6650


class Publisher:
    """Prebuilt entries of one producer: all but the sequence id is encoded once."""

    # Varints of five bytes from here up to 2^35: every SEND has the same size.
    FIRST_SEQUENCE_ID = 1 << 28

    def __init__(self, connection: Connection, producer_id: int, tail: bytes, num_messages: int | None) -> None:
        self._connection = connection
        self.tail = tail
        self.sent = 0
        rest = b"" if num_messages is None else b"\x18" + _varint(num_messages)
        producer = b"\x08" + _varint(producer_id) + b"\x10"
        body_bytes = len(producer) + 5 + len(rest)
        command_bytes = 4 + body_bytes
        sizes = struct.pack(">II", 4 + command_bytes + len(tail), command_bytes)
        self._before = sizes + bytes((0x08, int(CommandType.SEND), 0x32, body_bytes)) + producer
        self._after = rest + tail

    @property
    def frame_bytes(self) -> int:
        return len(self._before) + 5 + len(self._after)

    def next_frame(self) -> bytes:
        number = self.FIRST_SEQUENCE_ID + self.sent
        self.sent += 1
        return b"%b%c%c%c%c%c%b" % (
            self._before,
            number & 127 | 128,
            number >> 7 & 127 | 128,
            number >> 14 & 127 | 128,
            number >> 21 & 127 | 128,
            number >> 28,
            self._after,
        )

    def send(self, count: int) -> None:
        self._connection.write(b"".join([self.next_frame() for _ in range(count)]))


async def open_publisher(
    connection: Connection, topic: str, payload: bytes, *, num_messages: int | None = None, producer_id: int = 1
) -> Publisher:
    """A producer whose every entry carries `payload`: a batch of `num_messages` if given, else one plain message."""
    name = (await connection.ask(pb.CommandProducer(topic=topic, producer_id=producer_id))).producer_name
    metadata = pb.MessageMetadata(producer_name=name, sequence_id=0, publish_time=1)
    if num_messages is not None:
        metadata.num_messages_in_batch = num_messages
    return Publisher(connection, producer_id, encode_tail(metadata, payload), num_messages)


class Counter:
    """A consumer that only counts: keeps its permits filled and acknowledges cumulatively, at most every `ack_every` entries.

    `permits` and what it counts are entries; a broker counts the messages in them, of which each has `batch`.
    """

    def __init__(self, connection: Connection, consumer_id: int, permits: int, ack_every: int, batch: int = 1) -> None:
        self._connection = connection
        self._consumer_id = consumer_id
        self._permits = permits
        self._ack_every = ack_every
        self._batch = batch
        self._to_return = 0
        self._to_acknowledge = 0
        self.on_counted: Callable[[int], None] | None = None
        connection.on_messages = self._on_messages
        self._flow(permits)

    def _on_messages(self, count: int, last_command: bytes) -> None:
        self._to_return += count
        self._to_acknowledge += count
        if self._to_return >= self._permits // 2:
            self._flow(self._to_return)
            self._to_return = 0
        if self._to_acknowledge >= self._ack_every:
            self._to_acknowledge = 0
            last = parse_command(last_command).message.message_id
            ids = [pb.MessageIdData(ledgerId=last.ledgerId, entryId=last.entryId)]
            ack = pb.CommandAck(consumer_id=self._consumer_id, ack_type=pb.CommandAck.Cumulative, message_id=ids)
            self._connection.write(encode_body(ack))
        if self.on_counted is not None:
            self.on_counted(count)

    def _flow(self, permits: int) -> None:
        self._connection.write(encode_body(pb.CommandFlow(consumer_id=self._consumer_id, messagePermits=permits * self._batch)))


async def open_counter(
    connection: Connection,
    topic: str,
    subscription: str,
    *,
    earliest: bool,
    permits: int = 1000,
    ack_every: int = 1000,
    batch: int = 1,
) -> Counter:
    """An Exclusive subscription, of entries that have `batch` messages each."""
    await subscribe(connection, topic, subscription, earliest=earliest)
    return Counter(connection, 1, permits, ack_every, batch)


async def subscribe(connection: Connection, topic: str, subscription: str, *, earliest: bool) -> None:
    """Makes the subscription when it does not exist; without permits nothing is delivered."""
    command = pb.CommandSubscribe(
        topic=topic, subscription=subscription, subType=pb.CommandSubscribe.Exclusive, consumer_id=1, consumer_name="bench"
    )
    command.initialPosition = pb.CommandSubscribe.Earliest if earliest else pb.CommandSubscribe.Latest
    await connection.ask(command)


def batch_payload(messages: int, message_bytes: int) -> bytes:
    return encode_batch((pb.SingleMessageMetadata(), bytes(message_bytes)) for _ in range(messages))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
