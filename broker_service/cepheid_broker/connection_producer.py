"""Producers of one connection: PRODUCER, SEND, CLOSE_PRODUCER."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from cepheid_broker.connection_lookup import served_topic
from cepheid_broker.errors import NotAllowedError, ProducerBusyError, ProtocolViolationError, ServiceNotReadyError, TooManyError
from cepheid_broker.peer import Peer
from cepheid_broker.position import EARLIEST
from cepheid_broker.producer import Producer
from cepheid_broker.requests import Requests
from cepheid_broker.services import Services
from cepheid_broker.topic import Topic
from cepheid_broker.wire_errors import error_text, server_error_of
from cepheid_wire import CommandType, SendCommand, parse_send
from cepheid_wire import pulsar_api_pb2 as pb

NO_REQUEST = (1 << 64) - 1  # -1: a close that the broker started (protocol.md §19)
NO_SEQUENCE_ID = -1


class ProducerCommands:
    def __init__(self, peer: Peer, services: Services, requests: Requests) -> None:
        self._peer = peer
        self._services = services
        self._requests = requests
        self._open: dict[int, Producer] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._closed_by_broker: dict[int, None] = {}  # SENDs for them are on their way and are dropped
        self._touched: dict[Producer, None] = {}  # have gathered SENDs in this turn
        self.table: Mapping[int, Callable[[Any], None]] = {
            CommandType.PRODUCER: self._on_producer,
            CommandType.CLOSE_PRODUCER: self._on_close,
        }

    def __repr__(self) -> str:
        return f"{len(self._open)} producers"

    # SEND

    def take_send(self, command: bytes, tail: memoryview) -> None:
        send = parse_send(command)
        producer = self._open.get(send.producer_id)
        if producer is None:
            self._drop_or_refuse(send)
        elif send.txnid_most_bits is not None or send.txnid_least_bits is not None:
            raise ProtocolViolationError("SEND in a transaction, which was never opened", producer_id=send.producer_id)
        else:
            self._touched[producer] = None
            producer.take(send, tail)

    def flush(self) -> None:
        if self._touched:
            touched, self._touched = self._touched, {}
            for producer in touched:
                producer.flush()

    def _drop_or_refuse(self, send: SendCommand) -> None:
        if send.producer_id not in self._closed_by_broker:
            raise ProtocolViolationError(f"SEND for producer {send.producer_id}, which is not open", producer_id=send.producer_id)

    # PRODUCER

    def _on_producer(self, ask: pb.CommandProducer) -> None:
        producer = self._open.get(ask.producer_id)
        if producer is not None and ask.epoch <= producer.epoch:
            self._send_success(ask.request_id, producer)
        elif ask.producer_id in self._opening:
            self._refuse(ask, ServiceNotReadyError(f"producer {ask.producer_id} is being opened"))
        else:
            task = self._requests.start(self._open_producer(ask), name="open-producer")
            self._opening[ask.producer_id] = task

    async def _open_producer(self, ask: pb.CommandProducer) -> None:
        try:
            async with asyncio.timeout(self._services.settings.request_timeout_s):
                producer = await self._create(ask)
        except Exception as error:  # every request is answered, also when the fault is ours
            self._refuse(ask, error)
        else:
            self._closed_by_broker.pop(ask.producer_id, None)
            self._open[ask.producer_id] = producer
            self._send_success(ask.request_id, producer)
        finally:
            self._opening.pop(ask.producer_id, None)

    async def _create(self, ask: pb.CommandProducer) -> Producer:
        name = served_topic(ask.topic)
        _check_served(ask)
        if len(self._open) >= self._services.settings.connection.max_producers:
            raise TooManyError(f"this connection has {len(self._open)} producers")
        if (older := self._open.pop(ask.producer_id, None)) is not None:
            older.detach()  # a new incarnation, before the client's close was seen (protocol.md §9.3)
        topic = await self._services.topics.get(name, may_create=True)
        if ask.initial_subscription_name:
            await topic.create_subscription(ask.initial_subscription_name, EARLIEST)
        producer_name = ask.producer_name or self._services.topics.new_producer_name()
        await self._claim_name(topic, producer_name)
        topic.check_open()
        producer = Producer(
            topic,
            self._peer,
            ask.producer_id,
            producer_name,
            epoch=ask.epoch,
            metadata={pair.key: pair.value for pair in ask.metadata},
            connected_at_ms=self._services.ports.wall_ms(),
            refusals=self._services.refusals,
            on_closed_by_broker=self._on_closed_by_broker,
        )
        topic.add_producer(producer)
        return producer

    async def _claim_name(self, topic: Topic, name: str) -> None:
        """Returns when nobody holds the name; nothing may be awaited between this and taking it. Raises ProducerBusyError."""
        while (holder := topic.producers.get(name)) is not None:
            if holder.peer is self._peer or await holder.peer.is_alive():
                raise ProducerBusyError(
                    f"topic {topic.name} has a producer named {name!r}, connected from {holder.peer.address}",
                    topic=str(topic.name),
                    producer=name,
                )

    def _send_success(self, request_id: int, producer: Producer) -> None:
        self._peer.send(
            pb.CommandProducerSuccess(
                request_id=request_id,
                producer_name=producer.name,
                last_sequence_id=NO_SEQUENCE_ID,
                schema_version=b"",  # Java's client reads it without asking whether it is there (protocol.md §5)
                producer_ready=True,
            )
        )

    def _refuse(self, ask: pb.CommandProducer, error: BaseException) -> None:
        code = server_error_of(error)
        self._services.refusals.note(
            "producer.refused",
            (ask.topic, code),
            topic=ask.topic[:300],
            peer=self._peer.address,
            code=code.name,
            error=str(error),
        )
        self._peer.send_error(ask.request_id, code, error_text(error))

    # The end

    def _on_close(self, ask: pb.CommandCloseProducer) -> None:
        if (task := self._opening.pop(ask.producer_id, None)) is not None:
            task.cancel()
        self._closed_by_broker.pop(ask.producer_id, None)
        producer = self._open.get(ask.producer_id)
        if producer is None:
            self._peer.send(pb.CommandSuccess(request_id=ask.request_id))
        else:
            producer.close_when_settled(lambda: self._on_settled(producer, ask.request_id))

    def _on_settled(self, producer: Producer, request_id: int) -> None:
        if self._open.get(producer.producer_id) is producer:
            del self._open[producer.producer_id]
        producer.detach()
        self._peer.send(pb.CommandSuccess(request_id=request_id))

    def _on_closed_by_broker(self, producer: Producer) -> None:
        if self._open.get(producer.producer_id) is not producer:
            return
        del self._open[producer.producer_id]
        if len(self._closed_by_broker) >= self._services.settings.connection.max_producers:
            self._closed_by_broker.pop(next(iter(self._closed_by_broker)))
        self._closed_by_broker[producer.producer_id] = None
        self._peer.send(pb.CommandCloseProducer(producer_id=producer.producer_id, request_id=NO_REQUEST))

    def on_connection_lost(self) -> None:
        self._touched.clear()
        opened, self._open = self._open, {}
        for producer in opened.values():
            producer.detach()


def _check_served(ask: pb.CommandProducer) -> None:
    """Raises NotAllowedError for what a producer may ask for and this broker does not do yet."""
    if ask.producer_access_mode != pb.ProducerAccessMode.Shared:
        mode = pb.ProducerAccessMode.Name(ask.producer_access_mode)
        raise NotAllowedError(f"access mode {mode} is not supported yet; use Shared")
    if ask.HasField("schema") and ask.schema.type != pb.Schema.Type.Value("None"):
        raise NotAllowedError("schemas are not supported yet; use the bytes schema and encode messages in the application")
