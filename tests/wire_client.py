"""A blocking client of a few calls, for tests that need to see each frame: one connection, one topic, no reconnecting."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from cepheid_cli.client_security import own_secrets, own_tls
from cepheid_ports import CepheidError
from cepheid_wire import (
    PONG_FRAME,
    CommandType,
    Frame,
    FrameSplitter,
    WireError,
    decode_batch,
    decompress,
    encode_command,
    encode_tail,
    parse_command,
    parse_metadata,
    split_tail,
)
from cepheid_wire import pulsar_api_pb2 as pb

MAX_FRAME_BYTES = 5 * 1024 * 1024 + 10 * 1024
_RECEIVE_BYTES = 1 << 18


class ServerRefusedError(CepheidError):
    """The server answered a request with an error."""


class ServerUnreachableError(CepheidError):
    """No connection, or it broke."""

    retriable = True
    hint = "check the address, and that `cepheid standalone` runs there"


class UnreadableMessageError(CepheidError):
    """A message that came cannot be shown. It is not acknowledged."""


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    ledger_id: int
    entry_id: int
    batch_index: int  # -1: not in a batch
    key: str
    publish_time_ms: int
    payload: bytes
    last_of_entry: bool


class WireClient:
    """Connected to the broker that serves `topic`. Use as a context manager."""

    def __init__(self, service_url: str, topic: str, *, timeout_s: float = 30.0) -> None:
        self._topic = topic
        self._requests = 0
        self._open_any(service_url, timeout_s)
        lookup = pb.BaseCommand(type=pb.BaseCommand.LOOKUP)
        lookup.lookupTopic.topic = topic
        lookup.lookupTopic.request_id = self._next_request()
        answer = self._ask(lookup).lookupTopicResponse
        if answer.response == pb.CommandLookupTopicResponse.Failed:
            raise ServerRefusedError(f"lookup of {topic} failed: {answer.message}", topic=topic)
        if (where := _place_of(answer.brokerServiceUrlTls if self._peer[2] else answer.brokerServiceUrl)) != self._peer:
            self.close()
            if self._peer[2] and not where[2]:
                raise ServerUnreachableError(f"the broker of {topic} is at {where[0]}:{where[1]}, without TLS")
            self._open(*where, timeout_s)

    def _open_any(self, service_url: str, timeout_s: float) -> None:
        """The first broker of the URL that takes the connection."""
        scheme, slashes, hosts = service_url.partition("://")
        *others, last = hosts.split(",")
        for host in others:
            try:
                self._open(*_place_of(f"{scheme}{slashes}{host}"), timeout_s)
                return
            except ServerUnreachableError:
                continue
        self._open(*_place_of(f"{scheme}{slashes}{last}"), timeout_s)

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def open_producer(self) -> str:
        """Returns the producer's name."""
        command = pb.BaseCommand(type=pb.BaseCommand.PRODUCER)
        command.producer.topic = self._topic
        command.producer.producer_id = 0
        command.producer.request_id = self._next_request()
        self._producer_name = self._ask(command).producer_success.producer_name
        return self._producer_name

    def send(self, sequence_id: int, payload: bytes, *, key: str = "") -> tuple[int, int]:
        """Publishes one message and waits for its receipt: (ledger id, entry id)."""
        metadata = pb.MessageMetadata(
            producer_name=self._producer_name, sequence_id=sequence_id, publish_time=time.time_ns() // 1_000_000
        )
        if key:
            metadata.partition_key = key
        command = pb.BaseCommand(type=pb.BaseCommand.SEND)
        command.send.producer_id = 0
        command.send.sequence_id = sequence_id
        self._write(encode_command(command, encode_tail(metadata, payload)))
        while True:
            answer = parse_command(self._next_frame().command)
            if answer.type == pb.BaseCommand.SEND_RECEIPT:
                return answer.send_receipt.message_id.ledgerId, answer.send_receipt.message_id.entryId
            self._refuse_errors(answer)

    def subscribe(self, subscription: str, *, shared: bool, earliest: bool, permits: int = 1000) -> None:
        command = pb.BaseCommand(type=pb.BaseCommand.SUBSCRIBE)
        subscribe = command.subscribe
        subscribe.topic, subscribe.subscription, subscribe.consumer_id = self._topic, subscription, 0
        subscribe.request_id = self._next_request()
        subscribe.subType = pb.CommandSubscribe.Shared if shared else pb.CommandSubscribe.Exclusive
        subscribe.initialPosition = pb.CommandSubscribe.Earliest if earliest else pb.CommandSubscribe.Latest
        self._ask(command)
        self._permits = permits
        self._taken = 0
        self._flow(permits)

    def receive(self) -> Iterator[ReceivedMessage]:
        """Messages as they come, without end. `acknowledge` them."""
        while True:
            frame = self._next_frame()
            command = parse_command(frame.command)
            if command.type != pb.BaseCommand.MESSAGE:
                self._refuse_errors(command)
                continue
            messages = _messages_of(command.message.message_id, frame.tail)
            self._taken += len(messages)
            if self._taken >= self._permits // 2:
                self._flow(self._taken)
                self._taken = 0
            yield from messages

    def close_consumer(self) -> None:
        """Leaves the subscription; when this returns, the server has taken every acknowledgement sent before."""
        command = pb.BaseCommand(type=pb.BaseCommand.CLOSE_CONSUMER)
        command.close_consumer.consumer_id = 0
        command.close_consumer.request_id = self._next_request()
        self._ask(command)

    def _open(self, host: str, port: int, over_tls: bool, timeout_s: float) -> None:
        self._peer = (host, port, over_tls)
        try:
            self._socket = socket.create_connection((host, port), timeout=timeout_s)
            if over_tls:
                self._socket = own_tls().wrap_socket(self._socket, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            why = f"the certificate of {host}:{port} is not accepted: {error.verify_message}"
            raise ServerUnreachableError(f"{why}; name the CA that signed it in CEPHEID_TLS_CA_FILE") from None
        except OSError as error:
            raise ServerUnreachableError(f"cannot connect to {host}:{port}: {error}", host=host, port=port) from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)
        self._frames: deque[Frame] = deque()
        connect = pb.BaseCommand(type=pb.BaseCommand.CONNECT)
        connect.connect.client_version = "cepheid-cli"
        connect.connect.protocol_version = 20
        if (token := own_secrets().token) is not None:
            text = token() if callable(token) else str(token)
            connect.connect.auth_method_name, connect.connect.auth_data = "token", text.encode()
        elif "CEPHEID_TLS_CERTIFICATE_FILE" in os.environ:
            connect.connect.auth_method_name = "tls"
        self._ask(connect)

    def _next_request(self) -> int:
        self._requests += 1
        return self._requests

    def _flow(self, permits: int) -> None:
        command = pb.BaseCommand(type=pb.BaseCommand.FLOW)
        command.flow.consumer_id = 0
        command.flow.messagePermits = permits
        self._write(encode_command(command))

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Acknowledges the message's entry once its last message was handed in; a batch has one acknowledgement."""
        if not message.last_of_entry:
            return
        command = pb.BaseCommand(type=pb.BaseCommand.ACK)
        command.ack.consumer_id = 0
        command.ack.ack_type = pb.CommandAck.Individual
        command.ack.message_id.add(ledgerId=message.ledger_id, entryId=message.entry_id)
        self._write(encode_command(command))

    def _ask(self, command: pb.BaseCommand) -> pb.BaseCommand:
        self._write(encode_command(command))
        while (answer := parse_command(self._next_frame().command)).type in (pb.BaseCommand.MESSAGE,):
            continue
        self._refuse_errors(answer)
        return answer

    def _refuse_errors(self, answer: pb.BaseCommand) -> None:
        if answer.type == pb.BaseCommand.ERROR:
            raise ServerRefusedError(f"the server refused: {answer.error.message}", topic=self._topic)
        if answer.type == pb.BaseCommand.SEND_ERROR:
            raise ServerRefusedError(f"the message was not stored: {answer.send_error.message}", topic=self._topic)
        if answer.type in (pb.BaseCommand.CLOSE_CONSUMER, pb.BaseCommand.CLOSE_PRODUCER):
            raise ServerRefusedError(f"the server closed {self._topic} for us", topic=self._topic)

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ServerUnreachableError(f"the connection to {self._peer[0]}:{self._peer[1]} broke: {error}") from None

    def _next_frame(self) -> Frame:
        """The next frame that is not keepalive."""
        while True:
            while self._frames:
                frame = self._frames.popleft()
                if frame.type == CommandType.PING:
                    self._write(PONG_FRAME)
                elif frame.type != CommandType.PONG:
                    return frame
            try:
                chunk = self._socket.recv(_RECEIVE_BYTES)
            except OSError as error:
                raise ServerUnreachableError(f"no answer from {self._peer[0]}:{self._peer[1]}: {error}") from None
            if not chunk:
                raise ServerUnreachableError(f"{self._peer[0]}:{self._peer[1]} closed the connection")
            self._frames.extend(self._splitter.feed(chunk))


def _messages_of(message_id: pb.MessageIdData, tail: memoryview) -> list[ReceivedMessage]:
    """Return the messages of an entry. One that is encrypted, and a chunk of a larger message, come whole, as their bytes are.

    Raises UnreadableMessageError."""
    metadata, stored = parse_metadata(tail), split_tail(tail)[1]
    place, published = (message_id.ledgerId, message_id.entryId), metadata.publish_time
    if metadata.encryption_keys or metadata.num_chunks_from_msg > 1:
        return [ReceivedMessage(*place, -1, metadata.partition_key, published, bytes(stored), True)]
    payload = _decompressed(f"{place[0]}:{place[1]}", metadata, stored)
    if not metadata.HasField("num_messages_in_batch"):
        return [ReceivedMessage(*place, -1, metadata.partition_key, published, payload, True)]
    count = metadata.num_messages_in_batch
    return [
        ReceivedMessage(*place, index, single.partition_key, published, bytes(body), index == count - 1)
        for index, (single, body) in enumerate(decode_batch(payload, count))
    ]


def _decompressed(place: str, metadata: pb.MessageMetadata, payload: memoryview) -> bytes:
    try:
        return decompress(metadata.compression, payload, metadata.uncompressed_size)
    except ImportError as error:  # the bare install has zlib alone
        codec = pb.CompressionType.Name(metadata.compression)
        message = f"message {place} is compressed with {codec}, which needs the library {error.name}: pip install {error.name}"
        raise UnreadableMessageError(message, codec=codec) from None
    except WireError as error:
        message = f"message {place} cannot be read: {error}; `cepheid subscriptions skip` takes the subscription past it"
        raise UnreadableMessageError(message) from None


def _place_of(service_url: str) -> tuple[str, int, bool]:
    """Host, port, and whether TLS is spoken there."""
    try:
        parts = urlsplit(service_url)
        over_tls = parts.scheme == "pulsar+ssl"
        host, port = parts.hostname, parts.port or (6651 if over_tls else 6650)
    except ValueError:
        host = None
    if not host or parts.scheme not in ("pulsar", "pulsar+ssl"):
        expected = "pulsar://HOST:PORT[,HOST:PORT…], or pulsar+ssl:// with TLS"
        raise ServerUnreachableError(f"{service_url!r} is no service URL; expected {expected}")
    return host, port, over_tls
