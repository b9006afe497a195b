"""Consumers of one connection: SUBSCRIBE and all commands with a consumer id.

Commands without an answer (FLOW, ACK, REDELIVER) are ignored if their id is not open: at every close some are in flight
(protocol.md §26, rule 7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

from cepheid_broker.dispatch import KeySharing, key_sharing_of
from cepheid_broker.errors import (
    BrokerError,
    ConsumerNotFoundError,
    NotAllowedError,
    ProtocolViolationError,
    ServiceNotReadyError,
    TooManyError,
)
from cepheid_broker.peer import Peer
from cepheid_broker.protocol.access import Access
from cepheid_broker.protocol.advertised import assign
from cepheid_broker.protocol.connection_producer import NO_REQUEST
from cepheid_broker.protocol.consumer_acks import ConsumerAcks, position_of, words_of
from cepheid_broker.protocol.requests import Requests
from cepheid_broker.protocol.services import Services
from cepheid_broker.protocol.subscribe_checks import check_allowed, check_room, check_served
from cepheid_broker.protocol.wire_errors import error_text, server_error_of
from cepheid_broker.schemas import asked_schema
from cepheid_broker.topics import Consumer, Subscription, Topic, last_message, position_at_time
from cepheid_metadata import EARLIEST, LATEST, Position
from cepheid_ports import CepheidError, iso_time
from cepheid_wire import CommandType, ServerError, TopicName, signed64
from cepheid_wire import pulsar_api_pb2 as pb

MAX_FLOW = (1 << 31) - 1  # clients count permits in an int32; more is damage or an attack

# Codes that make a first SUBSCRIBE of a C++ client fail at once; with any other it hangs until its timeout (protocol.md §12.4).
_FAIL_AT_ONCE = frozenset(
    {
        ServerError.AUTHENTICATION_ERROR,
        ServerError.AUTHORIZATION_ERROR,
        ServerError.CONSUMER_BUSY,
        ServerError.TOPIC_NOT_FOUND,
        ServerError.TOPIC_TERMINATED_ERROR,
        ServerError.PRODUCER_BUSY,
        ServerError.INCOMPATIBLE_SCHEMA,
        ServerError.CONSUMER_ASSIGN_ERROR,
        ServerError.NOT_ALLOWED_ERROR,
    }
)


class ConsumerCommands:
    def __init__(self, peer: Peer, services: Services, requests: Requests, access: Access) -> None:
        self._access = access
        self._peer = peer
        self._services = services
        self._requests = requests
        self._open: dict[int, Consumer] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        limit = services.settings.connection.max_waiting_requests
        acks = ConsumerAcks(peer, self._open, services.refusals, services.ports.wall_ms, limit)
        self.table: Mapping[int, Callable[[Any], None]] = {
            CommandType.SUBSCRIBE: self._on_subscribe,
            CommandType.FLOW: self._on_flow,
            CommandType.ACK: acks.on_ack,
            CommandType.REDELIVER_UNACKNOWLEDGED_MESSAGES: acks.on_redeliver,
            CommandType.SEEK: self._on_seek,
            CommandType.GET_LAST_MESSAGE_ID: self._on_get_last_message_id,
            CommandType.UNSUBSCRIBE: self._on_unsubscribe,
            CommandType.CLOSE_CONSUMER: self._on_close,
            CommandType.CONSUMER_STATS: self._on_stats,
        }

    def __repr__(self) -> str:
        return f"{len(self._open)} consumers"

    def __len__(self) -> int:
        return len(self._open) + len(self._opening)

    # SUBSCRIBE

    def _on_subscribe(self, ask: pb.CommandSubscribe) -> None:
        if (consumer := self._open.get(ask.consumer_id)) is not None:
            self._answer_again(ask, consumer)
        elif ask.consumer_id in self._opening:
            self._refuse(ask, ServiceNotReadyError(f"consumer {ask.consumer_id} is being opened"))
        elif len(self) >= self._services.settings.connection.max_consumers:
            self._refuse(ask, TooManyError(f"this connection has {len(self)} consumers, which is its limit"))
        else:
            self._opening[ask.consumer_id] = self._requests.start(
                self._subscribe(ask), name="subscribe", on_cancelled=lambda: self._answer_closed(ask)
            )

    def _answer_again(self, ask: pb.CommandSubscribe, consumer: Consumer) -> None:
        """Answer a SUBSCRIBE that was sent twice (protocol.md §26, rule 6)."""
        subscription = consumer.subscription
        try:
            if (TopicName.parse(ask.topic), ask.subscription) != (subscription.topic, subscription.name):
                message = f"consumer {ask.consumer_id} of this connection is on subscription {subscription.name!r} of"
                raise NotAllowedError(f"{message} {subscription.topic}; close it first, or use another id")
        except CepheidError as error:
            self._refuse(ask, error)
        else:
            self._peer.send(pb.CommandSuccess(request_id=ask.request_id))

    def _answer_closed(self, ask: pb.CommandSubscribe) -> None:
        error = ServiceNotReadyError(f"consumer {ask.consumer_id} was closed before it was open")
        self._peer.send_error(ask.request_id, server_error_of(error), error_text(error))

    async def _subscribe(self, ask: pb.CommandSubscribe) -> None:
        try:
            async with asyncio.timeout(self._services.settings.request_timeout_s):
                consumer = await self._create(ask)
        except Exception as error:  # answer every request, even after an internal error
            self._refuse(ask, error)
        else:
            # Registered before SUCCESS is written, so that the FLOW which follows at once finds it. No entry is sent before that
            # FLOW (protocol.md §12.5).
            self._open[ask.consumer_id] = consumer
            self._peer.send(pb.CommandSuccess(request_id=ask.request_id))
            consumer.subscription.announce_end()
        finally:
            if self._opening.get(ask.consumer_id) is asyncio.current_task():
                del self._opening[ask.consumer_id]

    async def _create(self, ask: pb.CommandSubscribe) -> Consumer:
        name = self._access.topic_named(CommandType.SUBSCRIBE, ask.topic)
        check_served(ask)
        await self._access.require(CommandType.SUBSCRIBE, name, ask.subscription)
        sharing = key_sharing_of(ask)
        may_create = ask.force_topic_creation and self._access.may_create(CommandType.SUBSCRIBE, name)
        topic = await self._services.topics.get(name, may_create=may_create)
        check_allowed(topic, ask)
        schema = asked_schema(ask)
        await self._services.schemas.for_consumer(name, schema, topic.policies, topic_is_idle=_is_idle(topic))
        subscription = await self._find_or_create(topic, ask)
        try:
            return await self._join(topic, subscription, ask, sharing)
        except BaseException:
            subscription.end_if_unused()  # a reader's, which could never be found again
            raise

    async def _join(self, topic: Topic, subscription: Subscription, ask: pb.CommandSubscribe, sharing: KeySharing) -> Consumer:
        await subscription.wait_until_free(ask.subType, self._peer, sharing)
        topic.check_open()
        check_room(topic, subscription)
        self._access.require_still(CommandType.SUBSCRIBE, topic.name, subscription.name)
        if self._peer.ending:  # joining would depose the active consumer and restart delivery
            raise ServiceNotReadyError(f"the connection of consumer {ask.consumer_id} is closed")
        consumer = Consumer(
            subscription,
            self._peer,
            ask.consumer_id,
            subscription.new_key(),
            name=ask.consumer_name,
            priority_level=ask.priority_level,
            metadata={pair.key: pair.value for pair in ask.metadata},
            connected_at_ms=self._services.ports.wall_ms(),
            epoch=_epoch_of(ask),
            key_sharing=sharing,
            on_closed_by_broker=self._on_closed_by_broker,
        )
        subscription.add_consumer(consumer, ask.subType)
        return consumer

    async def _find_or_create(self, topic: Topic, ask: pb.CommandSubscribe) -> Subscription:
        properties = {pair.key: pair.value for pair in ask.subscription_properties}
        if ask.durable:
            position = EARLIEST if ask.initialPosition == pb.CommandSubscribe.Earliest else LATEST
            return await topic.create_subscription(ask.subscription, position, properties=properties)
        start: Position | None = position_of(ask.start_message_id) if ask.HasField("start_message_id") else None
        if ask.start_message_rollback_duration_sec > 0:
            since_ms = self._services.ports.wall_ms() - 1000 * ask.start_message_rollback_duration_sec
            start = await position_at_time(topic.ledger, since_ms)
        return await topic.open_reader(ask.subscription, start, properties=properties)

    def _refuse(self, ask: pb.CommandSubscribe, error: BaseException) -> None:
        code = server_error_of(error)
        topic, subscription = ask.topic[:300], ask.subscription[:300]  # they may have megabytes, and the log remembers them
        self._services.refusals.note(
            "consumer.refused",
            (topic, subscription, code),
            topic=topic,
            subscription=subscription,
            peer=self._peer.address,
            code=code.name,
            error=str(error),
        )
        self._peer.send_error(ask.request_id, code, error_text(error))
        if code not in _FAIL_AT_ONCE:
            # Without it a C++ client never tries again, as it considers itself connected (protocol.md §12.4).
            self._peer.send(pb.CommandCloseConsumer(consumer_id=ask.consumer_id, request_id=NO_REQUEST))

    # FLOW

    def _on_flow(self, flow: pb.CommandFlow) -> None:
        consumer = self._open.get(flow.consumer_id)
        if consumer is None:
            return
        if not 0 < flow.messagePermits <= MAX_FLOW:
            raise ProtocolViolationError(
                f"FLOW of {flow.messagePermits} permits; 1 to {MAX_FLOW} are possible", permits=flow.messagePermits
            )
        consumer.activity.on_flow(self._services.ports.wall_ms())
        consumer.subscription.on_flow(consumer, flow.messagePermits)

    # Requests

    def _on_seek(self, ask: pb.CommandSeek) -> None:
        consumer = self._open.get(ask.consumer_id)
        if consumer is None:
            self._no_consumer(ask.request_id, ask.consumer_id)
        elif not (ask.HasField("message_id") or ask.HasField("message_publish_time")):
            self._peer.send_error(ask.request_id, ServerError.METADATA_ERROR, "SEEK without message id and time")
        else:
            try:
                topic = self._topic_of(consumer)
                consumer.subscription.begin_seek()  # at once: a SUBSCRIBE right after it must find the seek begun
            except BrokerError as error:
                self._peer.send_error(ask.request_id, server_error_of(error), error_text(error))
                return
            # Not cancelled with the connection: it is completed, and the next SUBSCRIBE waits for its end. One per subscription, so
            # they are bounded.
            work = self._answered(partial(self._seek, topic, consumer.subscription, ask), ask.request_id, "seek")
            self._services.tasks.start(work, name="seek")

    async def _seek(self, topic: Topic, subscription: Subscription, ask: pb.CommandSeek) -> None:
        try:
            words: tuple[int, ...] = ()
            if ask.HasField("message_id"):
                position, words = position_of(ask.message_id), words_of(ask.message_id)
            else:
                async with asyncio.timeout(self._services.settings.request_timeout_s):
                    position = await position_at_time(topic.ledger, ask.message_publish_time)
            await topic.reset_subscription(subscription, position, words)
            self._peer.send(pb.CommandSuccess(request_id=ask.request_id))
        finally:
            subscription.end_seek()

    def _on_get_last_message_id(self, ask: pb.CommandGetLastMessageId) -> None:
        self._start(partial(self._answer_last_message_id, ask), ask.request_id, "last-message-id")

    async def _answer_last_message_id(self, ask: pb.CommandGetLastMessageId) -> None:
        if (opening := self._opening.get(ask.consumer_id)) is not None:
            # C++ asks right after a repeated SUBSCRIBE, and reports an error to the application at once.
            await asyncio.wait([opening])
        if (consumer := self._open.get(ask.consumer_id)) is None:
            raise _not_open(ask.consumer_id)
        position, batch_index = await last_message(self._topic_of(consumer).ledger)
        answer = pb.CommandGetLastMessageIdResponse(request_id=ask.request_id, last_message_id=message_id(position))
        if (partition := consumer.subscription.topic.partition_index) >= 0:
            answer.last_message_id.partition = partition
        if batch_index is not None:
            answer.last_message_id.batch_index = batch_index
        mark_delete = consumer.subscription.cursor.mark_delete
        if mark_delete.ledger_id >= 0:
            answer.consumer_mark_delete_position.CopyFrom(message_id(mark_delete))
        self._peer.send(answer)

    def _on_unsubscribe(self, ask: pb.CommandUnsubscribe) -> None:
        consumer = self._open.get(ask.consumer_id)
        if consumer is None:
            self._no_consumer(ask.request_id, ask.consumer_id)
        else:
            self._start(partial(self._unsubscribe, consumer, ask), ask.request_id, "unsubscribe")

    async def _unsubscribe(self, consumer: Consumer, ask: pb.CommandUnsubscribe) -> None:
        subscription, topic = consumer.subscription, self._topic_of(consumer)
        others = sum(other is not consumer for other in subscription.consumers.values())  # others may have been closed meanwhile
        if others > 0 and not ask.force:
            message = f"subscription {subscription.name!r} has {others} more consumers; close them first"
            self._peer.send_error(ask.request_id, ServerError.METADATA_ERROR, message)
            return
        self._open.pop(ask.consumer_id, None)  # removed with its subscription: the client expects no CLOSE_CONSUMER (§19)
        consumer.detach()
        await topic.delete_subscription(subscription.name)
        self._peer.send(pb.CommandSuccess(request_id=ask.request_id))

    def _on_stats(self, ask: pb.CommandConsumerStats) -> None:
        answer = pb.CommandConsumerStatsResponse(request_id=ask.request_id)
        consumer = self._open.get(ask.consumer_id)
        if consumer is None:
            answer.error_code = cast(Any, int(ServerError.CONSUMER_NOT_FOUND))
            answer.error_message = f"consumer {ask.consumer_id} is not open on this connection"
        else:
            figures = consumer.figures()
            answer.msgRateOut = figures.traffic.message_rate_per_s
            answer.msgThroughputOut = figures.traffic.byte_rate_per_s
            answer.msgRateRedeliver = figures.redeliver_rate_per_s
            answer.messageAckRate = figures.ack_rate_per_s
            answer.msgRateExpired = consumer.subscription.expire_rate_per_s
            answer.consumerName = figures.name
            answer.availablePermits = max(0, figures.permits)
            answer.unackedMessages = figures.unacked_messages
            answer.blockedConsumerOnUnackedMsgs = figures.is_blocked
            answer.address = figures.address
            answer.connectedSince = iso_time(figures.connected_at_ms)
            answer.type = consumer.subscription.type_name
            answer.msgBacklog = consumer.subscription.cursor.backlog_entries
        self._peer.send(answer)

    def _start(self, work: Callable[[], Awaitable[None]], request_id: int, name: str) -> None:
        self._requests.start(self._answered(work, request_id, name), name=name)

    async def _answered(self, work: Callable[[], Awaitable[None]], request_id: int, name: str) -> None:
        try:
            await work()
        except Exception as error:  # answer every request, even after an internal error
            code = server_error_of(error)
            self._services.refusals.note(
                "request.refused", (name, code), request=name, peer=self._peer.address, code=code.name, error=str(error)
            )
            self._peer.send_error(request_id, code, error_text(error))

    def _no_consumer(self, request_id: int, consumer_id: int) -> None:
        error = _not_open(consumer_id)
        self._peer.send_error(request_id, server_error_of(error), error_text(error))

    def _topic_of(self, consumer: Consumer) -> Topic:
        topic = self._services.topics.find(consumer.subscription.topic)
        if topic is None or topic.subscriptions.get(consumer.subscription.name) is not consumer.subscription:
            raise ServiceNotReadyError(f"topic {consumer.subscription.topic} is being unloaded")
        return topic

    # The end

    def on_permissions_changed(self, tenant: str | None) -> None:
        for consumer in list(self._open.values()):
            topic, subscription = consumer.subscription.topic, consumer.subscription.name
            if tenant in (None, topic.tenant):
                reason = self._access.why_not_any_more(CommandType.SUBSCRIBE, topic, subscription)
                if reason is not None:
                    consumer.close_by_broker(reason)

    def _on_close(self, ask: pb.CommandCloseConsumer) -> None:
        if (task := self._opening.pop(ask.consumer_id, None)) is not None:
            task.cancel()
        if (consumer := self._open.pop(ask.consumer_id, None)) is not None:
            consumer.detach()
        self._peer.send(pb.CommandSuccess(request_id=ask.request_id))

    def _on_closed_by_broker(self, consumer: Consumer) -> None:
        if self._open.get(consumer.consumer_id) is consumer:
            del self._open[consumer.consumer_id]
            close = pb.CommandCloseConsumer(consumer_id=consumer.consumer_id, request_id=NO_REQUEST)
            assign(close, consumer.moved_to)
            self._peer.send(close)

    def on_writable(self, writable: bool) -> None:
        for consumer in self._open.values():
            consumer.subscription.on_writable(consumer, writable)

    def on_connection_lost(self) -> None:
        opened = list(self._open.values())
        self._open.clear()
        for consumer in opened:
            consumer.detach()


def message_id(position: Position) -> pb.MessageIdData:
    """Encode a position; -1 is sent as 2^64 - 1 (protocol.md §0)."""
    return pb.MessageIdData(ledgerId=position.ledger_id % (1 << 64), entryId=position.entry_id % (1 << 64))


def _not_open(consumer_id: int) -> ConsumerNotFoundError:
    return ConsumerNotFoundError(f"consumer {consumer_id} is not open on this connection")


def _epoch_of(ask: pb.CommandSubscribe) -> int | None:
    """Return the epoch of a Java client's redelivery requests; None if it sent -1 (none yet) or nothing (protocol.md §12.1)."""
    epoch = signed64(ask.consumer_epoch) if ask.HasField("consumer_epoch") else -1
    return epoch if epoch >= 0 else None


def _is_idle(topic: Topic) -> bool:
    """Return whether the topic has no clients and no entries, so that the first schema may set its own."""
    if topic.producers or any(subscription.consumers for subscription in topic.subscriptions.values()):
        return False
    return not (topic.name.is_persistent and topic.ledger.ledgers.total_entries)
