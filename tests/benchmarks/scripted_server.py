"""A server that stores nothing: it answers what the load generators ask, as cheaply as it can."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from cepheid_wire import (
    BODY_FIELDS,
    PING_FRAME,
    CommandType,
    FrameSplitter,
    encode_body,
    encode_message_header,
    encode_send_receipts,
    parse_command,
    parse_send,
)
from cepheid_wire import pulsar_api_pb2 as pb


class ScriptedServer:
    """Every connection shares `tails`, which consumers get from the first on."""

    def __init__(self) -> None:
        self.tails: list[memoryview] = []
        self.acknowledged: list[Any] = []
        self.sequence_ids: list[int] = []
        self.permits: list[int] = []
        self.keep = True
        self.refuse_sends = False
        self.connections: list[_Serving] = []

    async def start(self) -> str:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Serving(self), "127.0.0.1", 0)
        return f"pulsar://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        self._server.close()
        for connection in self.connections:
            connection.transport.abort()
        await self._server.wait_closed()

    def ping(self) -> None:
        for connection in self.connections:
            connection.transport.write(PING_FRAME)


class _Serving(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._splitter = FrameSplitter(6 << 20)
        self._permits = 0
        self._next = 0
        self._consuming = False
        self.pongs = 0
        server.connections.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only

    def data_received(self, data: bytes) -> None:
        receipts = []
        for frame in self._splitter.feed(data):
            if frame.type != CommandType.SEND:
                self._answer(frame.command)
                continue
            send = parse_send(frame.command)
            if self._server.refuse_sends:
                refusal = pb.CommandSendError(producer_id=send.producer_id, sequence_id=send.sequence_id, error=1, message="full")
                self.transport.write(encode_body(refusal))
                continue
            receipts.append((send.producer_id, send.sequence_id, 7, len(self._server.tails), None))
            if self._server.keep:
                self._server.sequence_ids.append(send.sequence_id)
                self._server.tails.append(frame.tail)
        if receipts:
            self.transport.write(encode_send_receipts(receipts))
            for connection in self._server.connections:
                connection._deliver()

    def _answer(self, data: bytes) -> None:
        command = parse_command(data)
        body = getattr(command, BODY_FIELDS[command.type])
        match command.type:
            case CommandType.CONNECT:
                self.transport.write(encode_body(pb.CommandConnected(server_version="scripted")))
            case CommandType.PARTITIONED_METADATA:
                response = pb.CommandPartitionedTopicMetadataResponse(request_id=body.request_id, partitions=0)
                self.transport.write(encode_body(response))
            case CommandType.LOOKUP:
                response = pb.CommandLookupTopicResponse(request_id=body.request_id)
                response.response = pb.CommandLookupTopicResponse.Connect
                self.transport.write(encode_body(response))
            case CommandType.PRODUCER:
                self.transport.write(encode_body(pb.CommandProducerSuccess(request_id=body.request_id, producer_name="p")))
            case CommandType.SUBSCRIBE:
                if body.subscription == "refused":
                    self.transport.write(encode_body(pb.CommandError(request_id=body.request_id, error=5, message="busy")))
                    return
                self._consuming = True
                self.transport.write(encode_body(pb.CommandSuccess(request_id=body.request_id)))
            case CommandType.FLOW:
                self._server.permits.append(body.messagePermits)
                self._permits += body.messagePermits
                self._deliver()
            case CommandType.ACK:
                self._server.acknowledged.append(body)
            case CommandType.PONG:
                self.pongs += 1

    def _deliver(self) -> None:
        if not self._consuming:
            return
        tails = self._server.tails[self._next : self._next + self._permits]
        out: list[bytes | memoryview] = []
        for number, tail in enumerate(tails, start=self._next):
            out += (encode_message_header(1, 7, number, len(tail)), tail)
        self._next += len(tails)
        self._permits -= len(tails)
        self.transport.write(b"".join(out))
