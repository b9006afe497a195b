"""Producers of one connection: PRODUCER, SEND, CLOSE_PRODUCER.

PRODUCER ──► opening (a task: the topic is opened, a conflicting producer is checked for liveness) ──► asking ──► open
                                   the topic's epoch is being saved, it waits for exclusive access,   ┘
                                   or for earlier SENDs under its name
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from cepheid_broker.errors import (
    BrokerError,
    NotAllowedError,
    ProtocolViolationError,
    ServiceNotReadyError,
    TooManyProducersError,
)
from cepheid_broker.peer import Peer
from cepheid_broker.protocol.access import Access
from cepheid_broker.protocol.advertised import assign
from cepheid_broker.protocol.requests import Requests
from cepheid_broker.protocol.services import Services
from cepheid_broker.protocol.subscribe_checks import check_subscription_name
from cepheid_broker.protocol.wire_errors import error_text, server_error_of
from cepheid_broker.publishing import AccessMode, Producer, ProducerState, claim_of
from cepheid_broker.schemas import asked_schema
from cepheid_broker.topics import Topic
from cepheid_metadata import EARLIEST
from cepheid_ports import CepheidError
from cepheid_wire import CommandType, SendCommand, SendReader, TopicName
from cepheid_wire import pulsar_api_pb2 as pb

NO_REQUEST = (1 << 64) - 1  # -1: a close that the broker started (protocol.md §19)
NO_SEQUENCE_ID = -1
MAX_NAME_CHARACTERS = 2048
MAX_PROPERTIES_CHARACTERS = 64 * 1024


class ProducerCommands:
    def __init__(self, peer: Peer, services: Services, requests: Requests, access: Access) -> None:
        self._access = access
        self._peer = peer
        self._services = services
        self._requests = requests
        self._open: dict[int, Producer] = {}
        self._asking: dict[int, Producer] = {}  # their topic has not admitted them yet
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._closed_by_broker: dict[int, None] = {}  # SENDs for these may still arrive and are dropped
        self._reader = SendReader()
        self._touched: dict[Producer, None] = {}  # with SENDs gathered in this turn
        self._unanswered_closes = 0
        self.table: Mapping[int, Callable[[Any], None]] = {
            CommandType.PRODUCER: self._on_producer,
            CommandType.CLOSE_PRODUCER: self._on_close,
        }

    def __repr__(self) -> str:
        return f"{len(self._open)} producers"

    # SEND

    def take_send(self, command: bytes, tail: memoryview) -> None:
        send = self._reader.read(command)
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
        asking = self._asking.get(ask.producer_id)
        if producer is not None and ask.epoch <= producer.epoch and producer.state is ProducerState.OPEN:
            self._answer_again(ask, producer)
        elif ask.producer_id in self._opening or (asking is not None and ask.epoch <= asking.epoch):
            self._refuse(ask, ServiceNotReadyError(f"producer {ask.producer_id} is being opened"))
        elif producer is asking is None and len(self) >= self._services.settings.connection.max_producers:
            self._refuse(ask, TooManyProducersError(f"this connection has {len(self)} producers, which is its limit"))
        else:
            self._opening[ask.producer_id] = self._requests.start(
                self._open_producer(ask), name="open-producer", on_cancelled=lambda: self._refuse_closed(ask)
            )

    def __len__(self) -> int:
        return len(self._open) + len(self._asking) + len(self._opening)

    def _answer_again(self, ask: pb.CommandProducer, producer: Producer) -> None:
        """Answer a PRODUCER that was sent twice (protocol.md §9.3)."""
        try:
            if TopicName.parse(ask.topic) != producer.topic.name:
                raise NotAllowedError(f"producer {ask.producer_id} of this connection is open on {producer.topic.name}")
        except CepheidError as error:
            self._refuse(ask, error)
        else:
            producer.request_id = ask.request_id
            self._send_success(producer)

    async def _open_producer(self, ask: pb.CommandProducer) -> None:
        try:
            async with asyncio.timeout(self._services.settings.request_timeout_s):
                await self._ask_topic(ask)
        except Exception as error:  # answer every request, even after an internal error
            self._asking.pop(ask.producer_id, None)
            self._refuse(ask, error)
        finally:
            if self._opening.get(ask.producer_id) is asyncio.current_task():  # else it was closed and is opened again
                del self._opening[ask.producer_id]

    async def _ask_topic(self, ask: pb.CommandProducer) -> None:
        """Return when the producer is admitted, or its topic will call back."""
        if (closing := self._open.get(ask.producer_id)) is not None and closing.state is ProducerState.CLOSING:
            settled = asyncio.Event()
            closing.close_when_settled(settled.set)  # its receipts, and the answer to its CLOSE_PRODUCER, come first
            await settled.wait()
        older = self._open.pop(ask.producer_id, None) or self._give_up_asking(ask.producer_id)
        if older is not None:
            older.stop()  # a new incarnation, before the client's close arrived (protocol.md §9.3)
        try:
            name = self._access.topic_named(CommandType.PRODUCER, ask.topic)
            await self._access.require(CommandType.PRODUCER, name)
            if ask.initial_subscription_name:  # created with the producer of a dead-letter topic
                await self._access.require(CommandType.SUBSCRIBE, name, ask.initial_subscription_name)
            properties = checked_properties(ask)
            topic = await self._services.topics.get(name, may_create=self._access.may_create(CommandType.PRODUCER, name))
            await topic.check_publishing(encrypted=ask.encrypted, reconnecting=ask.epoch > 0)
            schema_version = await self._services.schemas.for_producer(name, asked_schema(ask), topic.policies)
            await self._create_initial_subscription(topic, ask)
            check_claim(topic, ask.producer_name, properties)
            producer = Producer(
                topic,
                self._peer,
                ask.producer_id,
                checked_name(ask.producer_name) or self._new_name(topic),
                owner=self,
                request_id=ask.request_id,
                access_mode=AccessMode(ask.producer_access_mode),
                shown_epoch=ask.topic_epoch if ask.HasField("topic_epoch") else None,
                epoch=ask.epoch,
                metadata=properties,
                encrypted=ask.encrypted,
                schema_version=schema_version,
                connected_at_ms=self._services.ports.wall_ms(),
                refusals=self._services.refusals,
            )
            await self._seat(topic, producer, older)
        finally:
            if older is not None:
                older.detach()

    async def _seat(self, topic: Topic, producer: Producer, older: Producer | None) -> None:
        """Ask for admission, again if a conflicting producer turns out to be dead. Raises the refusal.

        After a client's crash the old socket may look open for long (protocol.md §9.3).
        """
        while True:
            topic.check_open()
            self._access.require_still(CommandType.PRODUCER, topic.name)  # no await between this and the admission
            self._asking[producer.producer_id] = producer
            refused = topic.admission.ask(producer, older, most=topic.policies.max_producers)
            if refused is None:
                return
            del self._asking[producer.producer_id]
            error, in_the_way = refused
            if in_the_way is None or in_the_way.peer is self._peer:
                raise error
            if await in_the_way.peer.is_alive() and in_the_way in topic.admission:
                raise error

    def _new_name(self, topic: Topic) -> str:
        while topic.admission.holds_name(name := self._services.topics.new_producer_name()):
            pass  # a client chose this name
        return name

    async def _create_initial_subscription(self, topic: Topic, ask: pb.CommandProducer) -> None:
        name = ask.initial_subscription_name
        if name and name not in topic.subscriptions:
            check_subscription_name(name)
            if not topic.policies.auto_subscription_creation:
                text = f"subscription {name!r} of {topic.name} does not exist, and its creation by use is off"
                raise NotAllowedError(text, topic=str(topic.name), subscription=name)
            await topic.create_subscription(name, EARLIEST)

    # What the topic says (ProducerOwner)

    def on_admitted(self, producer: Producer) -> None:
        del self._asking[producer.producer_id]
        self._closed_by_broker.pop(producer.producer_id, None)
        self._open[producer.producer_id] = producer
        self._send_success(producer)

    def on_waiting(self, producer: Producer) -> None:
        """Report that the producer waits. It is reported again on admission; meanwhile the client has no timeout (protocol.md
        §9.2)."""
        self._send_success(producer)

    def on_refused(self, producer: Producer, error: BrokerError) -> None:
        del self._asking[producer.producer_id]
        self._note_refusal(str(producer.topic.name), error)
        self._peer.send_error(producer.request_id, server_error_of(error), error_text(error))

    def _send_success(self, producer: Producer) -> None:
        deduplication = producer.topic.deduplication
        self._peer.send(
            pb.CommandProducerSuccess(
                request_id=producer.request_id,
                producer_name=producer.name,
                last_sequence_id=NO_SEQUENCE_ID if deduplication is None else deduplication.last_sequence_id(producer.name),
                schema_version=producer.schema_version,  # Java's client reads it without checking that it is set (§5)
                topic_epoch=producer.topic_epoch,
                producer_ready=producer.state is not ProducerState.ASKING,
            )
        )

    def _refuse(self, ask: pb.CommandProducer, error: BaseException) -> None:
        self._note_refusal(ask.topic[:300], error)
        self._peer.send_error(ask.request_id, server_error_of(error), error_text(error))

    def _give_up_asking(self, producer_id: int) -> Producer | None:
        """Refuse a request that waits, finally, even if it was told to wait: its client keeps that request (protocol.md §9.2)."""
        asking = self._asking.get(producer_id)
        if asking is not None:
            self.on_refused(asking, _closed_early(producer_id))
        return asking

    def _refuse_closed(self, ask: pb.CommandProducer) -> None:
        self._refuse(ask, _closed_early(ask.producer_id))

    def _note_refusal(self, topic: str, error: BaseException) -> None:
        code = server_error_of(error)
        self._services.refusals.note(
            "producer.refused", (topic, code), topic=topic, peer=self._peer.address, code=code.name, error=str(error)
        )

    # The end

    def on_permissions_changed(self, tenant: str | None) -> None:
        for producer in [*self._open.values(), *self._asking.values()]:
            topic = producer.topic.name
            if tenant in (None, topic.tenant) and (reason := self._access.why_not_any_more(CommandType.PRODUCER, topic)):
                producer.close_by_broker(reason)

    def _on_close(self, ask: pb.CommandCloseProducer) -> None:
        if (task := self._opening.pop(ask.producer_id, None)) is not None:
            task.cancel()
        self._closed_by_broker.pop(ask.producer_id, None)
        if (asking := self._give_up_asking(ask.producer_id)) is not None:
            asking.detach()
        producer = self._open.get(ask.producer_id)
        if producer is None:
            self._peer.send(pb.CommandSuccess(request_id=ask.request_id))
        else:
            limit = self._services.settings.connection.max_waiting_requests
            if self._unanswered_closes >= limit:
                raise ProtocolViolationError(f"{limit} CLOSE_PRODUCER are waiting", waiting=limit)
            self._unanswered_closes += 1
            producer.close_when_settled(lambda: self._on_settled(producer, ask.request_id))

    def _on_settled(self, producer: Producer, request_id: int) -> None:
        self._unanswered_closes -= 1
        if self._open.get(producer.producer_id) is producer:
            del self._open[producer.producer_id]
        producer.detach()
        self._peer.send(pb.CommandSuccess(request_id=request_id))

    def on_closed_by_broker(self, producer: Producer) -> None:
        if self._open.get(producer.producer_id) is not producer:
            return
        del self._open[producer.producer_id]
        if len(self._closed_by_broker) >= self._services.settings.connection.max_producers:
            self._closed_by_broker.pop(next(iter(self._closed_by_broker)))
        self._closed_by_broker[producer.producer_id] = None
        close = pb.CommandCloseProducer(producer_id=producer.producer_id, request_id=NO_REQUEST)
        assign(close, producer.moved_to)
        self._peer.send(close)

    def on_connection_lost(self) -> None:
        self._touched.clear()
        producers = [*self._open.values(), *self._asking.values()]
        self._open, self._asking = {}, {}
        for producer in producers:
            producer.detach()


def _closed_early(producer_id: int) -> ServiceNotReadyError:
    return ServiceNotReadyError(f"producer {producer_id} was closed, or requested again, before it was open")


def checked_name(name: str) -> str:
    """Return the client's producer name; empty: the broker chooses one. Raises NotAllowedError."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise NotAllowedError(f"a producer name has {len(name)} characters, the limit is {MAX_NAME_CHARACTERS}: {name[:40]!r}…")
    return name


def check_claim(topic: Topic, name: str, properties: Mapping[str, str]) -> None:
    """Check the deduplication claim of a producer. Raises NotAllowedError, ServiceNotReadyError."""
    claim = claim_of(properties)
    if claim is None:
        return
    if not name:
        raise NotAllowedError("a producer that claims an owner for its name must set a name")
    if topic.deduplication is None:
        raise NotAllowedError(f"topic {topic.name} is not persistent: it has no deduplication", topic=str(topic.name))
    topic.deduplication.check_claim(name, claim)


def checked_properties(ask: pb.CommandProducer) -> dict[str, str]:
    """Return the properties, which are kept while the producer is connected. Raises NotAllowedError."""
    size = sum(len(pair.key) + len(pair.value) for pair in ask.metadata)
    if size > MAX_PROPERTIES_CHARACTERS:
        raise NotAllowedError(f"the producer's properties have {size} characters, the limit is {MAX_PROPERTIES_CHARACTERS}")
    return {pair.key: pair.value for pair in ask.metadata}
