"""A client that does exactly what a test says, and believes nothing: every frame it gets can be looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

from google.protobuf.message import Message

from cepheid_wire import (
    BODY_FIELDS,
    SMALLEST_MESSAGE_BYTES,
    CommandType,
    FrameSplitter,
    encode_body,
    encode_command,
    encode_tail,
    parse_command,
    signed64,
    verify_tail,
)
from cepheid_wire import pulsar_api_pb2 as pb

B = TypeVar("B", bound=Message)

TIMEOUT_S = 20.0  # of what is certain to come: how long it takes is nobody's subject
PUBLISH_TIME_MS = 1_790_000_000_000


class Received(NamedTuple):
    """One frame from the broker."""

    body: Any
    tail: bytes

    @property
    def position(self) -> tuple[int, int]:
        return signed64(self.body.message_id.ledgerId), signed64(self.body.message_id.entryId)


class ScriptedClient:
    """Use `async with await ScriptedClient.open(port)`: connected, handshake done."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._splitter = FrameSplitter(1 << 28)
        self._received: list[Received] = []
        self._requests = 0
        self.answer_pings = True

    @classmethod
    async def open(cls, port: int, *, handshake: bool = True, role: str = "", original_principal: str = "") -> Self:
        """`role`: for a broker that asks who its clients are (tests/roles_by_name.py)."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        if handshake:
            connect = pb.CommandConnect(client_version="scripted", protocol_version=20)
            if role:
                connect.auth_method_name, connect.auth_data = "token", role.encode()
            if original_principal:
                connect.original_principal = original_principal
            client.send(connect)
            await client.expect(pb.CommandConnected)
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass

    def abort(self) -> None:
        self._writer.transport.abort()

    def request_id(self) -> int:
        self._requests += 1
        return self._requests - 1  # 0 is a valid id

    # Sending

    def send(self, *bodies: Message) -> None:
        self.send_bytes(b"".join(map(encode_body, bodies)))

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    # Receiving

    async def receive(self, timeout_s: float = TIMEOUT_S) -> Received | None:
        """The next frame; None when the broker has closed the connection. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not self._received:
                try:
                    data = await self._reader.read(1 << 18)
                except ConnectionError:
                    return None
                if not data:
                    return None
                for frame in self._splitter.feed(data):
                    body = getattr(parse_command(frame.command), BODY_FIELDS[frame.type])
                    if frame.type == CommandType.PING and self.answer_pings:
                        self.send(pb.CommandPong())
                    else:
                        self._received.append(Received(body, bytes(frame.tail)))
        return self._received.pop(0)

    async def expect(self, kind: type[B], timeout_s: float = TIMEOUT_S) -> B:
        received = await self.receive(timeout_s)
        assert received is not None, f"the broker closed the connection instead of sending {kind.__name__}"
        assert isinstance(received.body, kind), f"expected {kind.__name__}, got {received.body!r}"
        return received.body

    async def expect_message(self, timeout_s: float = TIMEOUT_S) -> Received:
        received = await self.receive(timeout_s)
        assert received is not None, "the broker closed the connection"
        assert isinstance(received.body, pb.CommandMessage), received.body
        verify_tail(received.tail)
        return received

    async def expect_messages(self, count: int) -> list[Received]:
        return [await self.expect_message() for _ in range(count)]

    async def expect_nothing(self, for_s: float = 0.15) -> None:
        try:
            received = await self.receive(for_s)
        except TimeoutError:
            return
        raise AssertionError(f"expected nothing, got {received}")

    async def expect_closed(self, timeout_s: float = TIMEOUT_S) -> None:
        """Whatever still comes, the connection ends."""
        async with asyncio.timeout(timeout_s):
            while await self.receive(timeout_s) is not None:
                pass

    async def ask(self, body: Message, kind: type[B]) -> B:
        self.send(body)
        return await self.expect(kind)

    # Common steps

    async def produce_on(self, topic: str, producer_id: int = 0, **fields: Any) -> pb.CommandProducerSuccess:
        ask = pb.CommandProducer(topic=full(topic), producer_id=producer_id, request_id=self.request_id(), **fields)
        answer = await self.ask(ask, pb.CommandProducerSuccess)
        assert answer.request_id == ask.request_id
        return answer

    def send_message(self, sequence_id: int, payload: bytes = b"", *, producer_id: int = 0, tail: bytes | None = None) -> None:
        send = pb.CommandSend(producer_id=producer_id, sequence_id=sequence_id)
        self.send_bytes(send_frame(send, message(sequence_id, payload) if tail is None else tail))

    async def publish(self, count: int, *, producer_id: int = 0, first_sequence_id: int = 0, messages: int = 0) -> list[Received]:
        """`count` entries; `messages` above 0: batches of so many. Their receipts."""
        for sequence_id in range(first_sequence_id, first_sequence_id + count):
            tail = message(sequence_id, b"payload %d" % sequence_id, messages=messages)
            self.send_message(sequence_id, producer_id=producer_id, tail=tail)
        receipts = []
        for sequence_id in range(first_sequence_id, first_sequence_id + count):
            received = await self.receive()
            assert received is not None
            assert isinstance(received.body, pb.CommandSendReceipt), received.body
            assert (received.body.producer_id, received.body.sequence_id) == (producer_id, sequence_id)
            receipts.append(received)
        return receipts

    async def subscribe(self, topic: str, subscription: str, consumer_id: int = 0, *, permits: int = 0, **fields: Any) -> None:
        fields.setdefault("subType", pb.CommandSubscribe.Exclusive)
        fields.setdefault("initialPosition", pb.CommandSubscribe.Earliest)
        ask = subscribe(topic, subscription, consumer_id, self.request_id(), **fields)
        success = await self.ask(ask, pb.CommandSuccess)
        assert success.request_id == ask.request_id
        if permits:
            self.send(pb.CommandFlow(consumer_id=consumer_id, messagePermits=permits))

    def acknowledge(self, *positions: tuple[int, int], consumer_id: int = 0, cumulative: bool = False, **fields: Any) -> None:
        kind = pb.CommandAck.Cumulative if cumulative else pb.CommandAck.Individual
        ids = [ident(position) for position in positions]
        self.send(pb.CommandAck(consumer_id=consumer_id, ack_type=kind, message_id=ids, **fields))

    async def acknowledge_saved(self, *positions: tuple[int, int], consumer_id: int = 0, **fields: Any) -> None:
        """Returns when the broker says that it is durable."""
        request_id = self.request_id()
        self.acknowledge(*positions, consumer_id=consumer_id, request_id=request_id, **fields)
        answer = await self.expect(pb.CommandAckResponse)
        assert answer.request_id == request_id
        assert not answer.HasField("error"), answer

    async def answers(self, *request_ids: int) -> dict[int, Any]:
        """The bodies that answer these requests; what comes between is passed over, and no request is answered twice."""
        found: dict[int, Any] = {}
        while len(found) < len(request_ids):
            body = await self.receive_body()
            if (request_id := getattr(body, "request_id", None)) in request_ids:
                assert request_id not in found, f"a second answer: {body}"
                found[request_id] = body
        return found

    async def receive_for(self, for_s: float) -> list[Any]:
        """Whatever comes meanwhile."""
        bodies = []
        try:
            async with asyncio.timeout(for_s):
                while True:
                    bodies.append(await self.receive_body())
        except TimeoutError:
            return bodies

    async def skim_messages(self, count: int) -> list[Received]:
        """The next messages; what comes between is passed over."""
        found: list[Received] = []
        while len(found) < count:
            received = await self.receive()
            assert received is not None, "the broker closed the connection"
            found += [received] if isinstance(received.body, pb.CommandMessage) else []
        return found

    async def skim_until(self, is_it: Callable[[Received], bool]) -> Received:
        """The first message for which it holds; whatever comes before is passed over."""
        while True:
            (received,) = await self.skim_messages(1)
            if is_it(received):
                return received

    async def receive_body(self) -> Any:
        received = await self.receive()
        assert received is not None, "the broker closed the connection"
        return received.body

    async def ping_through(self) -> None:
        """As `ping`, whatever else comes."""
        self.send(pb.CommandPing())
        while not isinstance(await self.receive_body(), pb.CommandPong):
            pass

    async def ping(self) -> None:
        """Returns when everything sent before has been looked at."""
        await self.ask(pb.CommandPing(), pb.CommandPong)


def full(topic: str) -> str:
    return topic if "://" in topic else f"persistent://public/default/{topic}"


def subscribe(topic: str, subscription: str, consumer_id: int, request_id: int, **fields: Any) -> pb.CommandSubscribe:
    return pb.CommandSubscribe(
        topic=full(topic), subscription=subscription, consumer_id=consumer_id, request_id=request_id, **fields
    )


def ident(position: tuple[int, int], **fields: Any) -> pb.MessageIdData:
    return pb.MessageIdData(ledgerId=position[0] % (1 << 64), entryId=position[1] % (1 << 64), **fields)


def send_frame(send: pb.CommandSend, tail: bytes) -> bytes:
    return encode_command(pb.BaseCommand(type=pb.BaseCommand.SEND, send=send), tail)


def message(
    sequence_id: int, payload: bytes = b"", *, messages: int = 0, publish_time: int = PUBLISH_TIME_MS, **fields: Any
) -> bytes:
    metadata = pb.MessageMetadata(producer_name="scripted", sequence_id=sequence_id, publish_time=publish_time, **fields)
    if messages:
        metadata.num_messages_in_batch = messages
        payload = payload.ljust(SMALLEST_MESSAGE_BYTES * messages, b"\0")  # what so many messages take at least
    return encode_tail(metadata, payload)
