"""ACK and REDELIVER of one connection's consumers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from cepheid_broker.dispatch import shares_entries
from cepheid_broker.errors import ProtocolViolationError
from cepheid_broker.peer import Peer
from cepheid_broker.protocol.wire_errors import error_text, server_error_of
from cepheid_broker.topics import BatchAck, Consumer
from cepheid_managed_ledger import MAX_BATCH_MESSAGES
from cepheid_metadata import Position
from cepheid_ports import RefusalLog
from cepheid_wire import ServerError, signed64
from cepheid_wire import pulsar_api_pb2 as pb

_WORD = (1 << 64) - 1
MAX_WORDS = MAX_BATCH_MESSAGES // 64


class ConsumerAcks:
    def __init__(
        self, peer: Peer, consumers: Mapping[int, Consumer], refusals: RefusalLog, wall_ms: Callable[[], int], limit: int
    ) -> None:
        """`limit`: most acknowledgements whose answers wait until they are durable."""
        self._peer = peer
        self._limit = limit
        self._waiting = 0
        self._refusals = refusals
        self._consumers = consumers
        self._wall_ms = wall_ms

    def on_ack(self, ack: pb.CommandAck) -> None:
        consumer = self._consumers.get(ack.consumer_id)
        if consumer is None:  # in flight at every close and seek (protocol.md §17; §26, rule 7)
            self._refuse(ack, ServerError.CONSUMER_NOT_FOUND, f"consumer {ack.consumer_id} is not open on this connection")
            return
        if ack.HasField("txnid_most_bits") or ack.HasField("txnid_least_bits"):
            self._refuse(ack, ServerError.NOT_ALLOWED_ERROR, "transactions are not supported yet")
            return
        if ack.HasField("validation_error"):
            error = pb.CommandAck.ValidationError.Name(ack.validation_error)
            subscription = consumer.subscription
            self._refusals.note(
                "consumer.could_not_use_message",
                (subscription.topic, subscription.name, error),
                level=logging.WARNING,
                topic=str(subscription.topic),
                subscription=subscription.name,
                error=error,
            )
        consumer.activity.last_acked_at_ms = self._wall_ms()
        if ack.ack_type == pb.CommandAck.Individual:
            self._individual(consumer, ack)
        else:
            self._cumulative(consumer, ack)
        if ack.HasField("request_id"):
            self._answer_when_saved(consumer, ack.request_id)

    def _individual(self, consumer: Consumer, ack: pb.CommandAck) -> None:
        positions: list[Position] = []
        parts: list[BatchAck] = []
        for ident in ack.message_id:
            if ident.ack_set and (part := _part_of(ident)) is not None:
                parts.append(part)
            else:
                positions.append(position_of(ident))
        consumer.subscription.acknowledge(consumer, positions, parts)

    def _cumulative(self, consumer: Consumer, ack: pb.CommandAck) -> None:
        subscription = consumer.subscription
        if len(ack.message_id) != 1 or shares_entries(subscription.kind):
            # As in the reference broker: ignored, and success is reported if an answer was requested (protocol.md §15).
            self._refusals.note(
                "consumer.cumulative_ack_ignored",
                (subscription.topic, subscription.name),
                level=logging.WARNING,
                topic=str(subscription.topic),
                subscription=subscription.name,
                type=subscription.type_name,
                ids=len(ack.message_id),
            )
            return
        ident = ack.message_id[0]
        subscription.acknowledge_cumulative(consumer, position_of(ident), _part_of(ident) if ident.ack_set else None)

    def on_redeliver(self, ask: pb.CommandRedeliverUnacknowledgedMessages) -> None:
        consumer = self._consumers.get(ask.consumer_id)
        if consumer is not None:
            positions = [position_of(ident) for ident in ask.message_ids]
            if ask.HasField("consumer_epoch") and consumer.epoch is not None:
                # Before anything is sent again: messages on the way carry the old epoch, and the client drops them.
                consumer.epoch = max(consumer.epoch, signed64(ask.consumer_epoch))
            consumer.subscription.redeliver(consumer, positions or None)

    def _answer_when_saved(self, consumer: Consumer, request_id: int) -> None:
        if self._waiting >= self._limit:
            raise ProtocolViolationError(f"{self._waiting} acknowledgements are waiting for answers, the limit is {self._limit}")
        self._waiting += 1
        answer = pb.CommandAckResponse(consumer_id=consumer.consumer_id, request_id=request_id)

        def on_saved(error: Exception | None) -> None:  # keeps the answer, not the ACK, which may have megabytes of ids
            self._waiting -= 1
            self._send(answer, None if error is None else server_error_of(error), "" if error is None else error_text(error))

        consumer.subscription.answers.when_saved(on_saved)

    def _refuse(self, ack: pb.CommandAck, error: ServerError, message: str) -> None:
        if ack.HasField("request_id"):
            self._send(pb.CommandAckResponse(consumer_id=ack.consumer_id, request_id=ack.request_id), error, message)

    def _send(self, answer: pb.CommandAckResponse, error: ServerError | None, message: str) -> None:
        """Send the answer. Go takes it for a failure exactly if it has a message (protocol.md §5)."""
        if error is not None:
            answer.error, answer.message = cast(Any, int(error)), message
        self._peer.send(answer)


def position_of(ident: pb.MessageIdData) -> Position:
    """Decode a position; -1 is sent as 2^64 - 1 (protocol.md §0)."""
    return Position(signed64(ident.ledgerId), signed64(ident.entryId))


def words_of(ident: pb.MessageIdData) -> tuple[int, ...]:
    """Return which messages of a batch are still to be delivered, bit i for message i; empty if no word was sent or all are zero.

    A Java client seeks into a batch with them. Go sends only an index, as it filters by itself (protocol.md §17). More words than a
    batch can have are ignored: the whole batch is delivered.
    """
    if len(ident.ack_set) > MAX_WORDS:
        return ()
    words = tuple(word & _WORD for word in ident.ack_set)
    return words if any(words) else ()


def _part_of(ident: pb.MessageIdData) -> BatchAck | None:
    """Return the acknowledged part of a batch; None if all words are zero, which acknowledges the whole entry (protocol.md §15)."""
    if (count := len(ident.ack_set)) > MAX_WORDS:
        return BatchAck(position_of(ident), (), 64 * count)  # larger than any batch: the cursor refuses and counts it
    # Clients omit trailing words that are zero, so this may be less than the batch has: the rest is acknowledged.
    words = words_of(ident)
    return BatchAck(position_of(ident), words, 64 * len(words)) if words else None
