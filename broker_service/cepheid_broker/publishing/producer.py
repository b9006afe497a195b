"""One producer on one topic: what it may publish, and its state from its request until it is closed.

    take ──► checksum, policies ──► new, or sent before? (repetitions.py) ──► UnansweredSends ──► appends, receipts in SEND order

Rules
1. A receipt is written when its entry is durable, in SEND order, without leaving one out (protocol.md §26).
2. After a failed append this incarnation stores nothing more: the client resends from its first unanswered message, and storing a
   later one first would swap them (protocol.md §10.4). Earlier SENDs are answered, then the producer is closed; the connection
   stays.
3. A repetition that deduplication recognises is also answered in its turn, with position -1:-1. If it is not known yet whether the
   original was stored, it waits for that; if it was not, the producer is closed and the client sends both again.
4. A bad checksum fails only that message, in its turn: C++ clients match the error to their oldest message (§10.4).
5. Pending appends of a replaced incarnation are not answered (§26, rule 9).
6. Its connection receives each change of its state by a method of `ProducerOwner`, and answers the client.

    ASKING ──► OPEN ──► CLOSING ──► CLOSED          ASKING: the topic's epoch is being saved, it waits for others to leave, or for
                                                    earlier SENDs under its name
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cepheid_broker.errors import BrokerError, ServiceNotReadyError
from cepheid_broker.peer import Peer
from cepheid_broker.policies import TopicPolicies
from cepheid_broker.publishing.deduplication import Mark, ProducerSequence
from cepheid_broker.publishing.producer_access import AccessMode
from cepheid_broker.publishing.publish_group import why_not_allowed
from cepheid_broker.publishing.repetitions import Repetitions
from cepheid_broker.publishing.topic_deduplication import TopicDeduplication, claim_of
from cepheid_broker.publishing.unanswered_sends import AppendTarget, UnansweredSends
from cepheid_broker.traffic import Traffic, TrafficFigures
from cepheid_ports import RefusalLog
from cepheid_wire import (
    ChecksumMismatchError,
    MetadataShape,
    SendCommand,
    ServerError,
    TopicName,
    add_checksum,
    encode_body,
    messages_in,
    parse_metadata,
    verify_tail,
)
from cepheid_wire import pulsar_api_pb2 as pb

log = logging.getLogger(__name__)


class ProducerState(enum.Enum):
    ASKING = "asking"
    OPEN = "open"
    CLOSING = "closing"  # takes nothing more; pending SENDs are still answered
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ProducerFigures:
    producer_id: int
    name: str
    address: str
    client_version: str
    connected_at_ms: int
    traffic: TrafficFigures
    pending_entries: int
    checksum_errors: int
    duplicates: int
    access_mode: AccessMode
    chunk_rate_per_s: float
    metadata: dict[str, str]


class Admission(Protocol):
    """The list of a topic's producers, which a producer leaves."""

    def leave(self, producer: Producer) -> None: ...


class ProducedTopic(AppendTarget, Protocol):
    """The part of its topic that a producer uses."""

    @property
    def name(self) -> TopicName: ...

    @property
    def policies(self) -> TopicPolicies: ...

    @property
    def chunks(self) -> Traffic: ...

    @property
    def deduplication(self) -> TopicDeduplication | None: ...

    @property
    def admission(self) -> Admission: ...


class ProducerOwner(Protocol):
    """The producer's connection, which answers PRODUCER."""

    def on_admitted(self, producer: Producer) -> None:
        """Report that the producer may publish now."""

    def on_waiting(self, producer: Producer) -> None:
        """Report that the producer may publish later, when it is admitted."""

    def on_refused(self, producer: Producer, error: BrokerError) -> None:
        """Report a refusal after the request was accepted for later, or told to wait."""

    def on_closed_by_broker(self, producer: Producer) -> None:
        """Report that the broker closed the producer, so that its client reconnects."""


class Producer:
    def __init__(
        self,
        topic: ProducedTopic,
        peer: Peer,
        producer_id: int,
        name: str,
        *,
        owner: ProducerOwner,
        request_id: int = 0,
        access_mode: AccessMode = AccessMode.SHARED,
        shown_epoch: int | None = None,
        epoch: int = 0,
        metadata: dict[str, str] | None = None,
        schema_version: bytes = b"",
        encrypted: bool = False,
        connected_at_ms: int = 0,
        refusals: RefusalLog,
    ) -> None:
        self.topic = topic
        self.peer = peer
        self.producer_id = producer_id
        self.name = name
        self.request_id = request_id  # of the PRODUCER command that it answers
        self.access_mode = access_mode
        self.shown_epoch = shown_epoch
        self.topic_epoch: int | None = None
        self.epoch = epoch
        self.metadata = metadata or {}
        self.schema_version = schema_version
        self.encrypted = encrypted
        self.connected_at_ms = connected_at_ms
        self.state = ProducerState.ASKING
        self.traffic = Traffic()
        self.chunks = Traffic(topic.chunks)
        """Part of the traffic: chunks of chunked messages."""
        self.checksum_errors = 0
        self.moved_to: Mapping[str, str] | None = None
        """Addresses for the client after the broker closed the producer; None: it looks the topic up."""
        self._shape = MetadataShape()
        self._refusals = refusals
        self._owner = owner
        self._on_settled: list[Callable[[], None]] = []  # several may wait: its client, and the topic being unloaded
        self._repetitions = None if topic.deduplication is None else Repetitions(topic.deduplication)
        self._sends = UnansweredSends(
            topic, peer, producer_id, self._repetitions, self.traffic, self._settle_if_done, self._on_given_up
        )

    def __repr__(self) -> str:
        return f"<Producer {self.name} of {self.topic.name}, {self.state.value}, {self.pending_entries} entries pending>"

    @property
    def pending_entries(self) -> int:
        return self._sends.entries

    def take(self, send: SendCommand, tail: memoryview) -> None:
        """Take one SEND. Raises WireError if no consumer could read it: the connection closes."""
        if self.state is not ProducerState.OPEN:
            return  # rule 2: sent before the close arrived; the client resends it
        try:
            has_checksum = verify_tail(tail)
        except ChecksumMismatchError as error:
            self._refuse(send, error)
            return
        policies, repetitions = self.topic.policies, self._repetitions
        restricted = policies.max_message_bytes or policies.max_delay_ms or policies.encryption_required
        deduplicates = repetitions is not None and repetitions.active
        if not restricted and not deduplicates and self._shape.fits(tail):
            messages = 1
        elif not (messages := self._examine(send, tail, restricted=bool(restricted), deduplicates=deduplicates)):
            return
        gathered = self._sends.gathered
        payload = tail if has_checksum else add_checksum(tail)
        gathered.payloads.append(payload)
        gathered.messages.append(messages)
        gathered.sequence_ids.append((send.sequence_id, send.highest_sequence_id))
        gathered.size_bytes += len(payload)

    def _examine(self, send: SendCommand, tail: memoryview, *, restricted: bool, deduplicates: bool) -> int:
        """Return the entry's number of messages; 0 if it is not to be stored and is answered otherwise. Raises WireError."""
        metadata = parse_metadata(tail)
        messages = messages_in(metadata, len(tail))
        if restricted and not self._is_allowed(send, tail, metadata):
            return 0
        if deduplicates:
            assert self._repetitions is not None
            sends, repetitions = self._sends, self._repetitions
            sequence = repetitions.sequence_of(metadata)
            if sends.gathered.sequence is not sequence and sends.gathered.sequence is not None:
                sends.append()  # one sequence per group
            repeated = repetitions.judge(send, metadata, messages, sequence, sends.gathered)
            if repeated is not None:
                self._repeat(send, sequence, repeated, len(tail))
                return 0
        elif not restricted:
            self._shape.learn(tail, metadata)
        if metadata.num_chunks_from_msg > 1:
            self.chunks.count(1, messages, len(tail))
        return messages

    def flush(self) -> None:
        """Note that the SENDs of this turn of the loop are complete."""
        self._sends.flush()

    def _repeat(self, send: SendCommand, sequence: ProducerSequence, repeated: Mark, size_bytes: int) -> None:
        """Answer a repetition, or close the producer if it cannot be decided here (rule 3)."""
        assert self._repetitions is not None
        if self._sends.may_repeat(sequence, repeated):
            self._repetitions.note_repeated(size_bytes)
            self._sends.gathered.repeat(send, sequence, repeated)
        else:
            self.close_by_broker("a message was sent again while another producer was publishing it")

    # Its standing

    def on_admitted(self, topic_epoch: int | None) -> None:
        if self.state is ProducerState.CLOSED:
            return  # its successor, which asks next, replaces it
        self.topic_epoch = topic_epoch
        if self.topic.deduplication is None:
            self._open()
        else:
            self.topic.deduplication.when_settled(self.name, self._open)

    def _open(self) -> None:
        if self.state is not ProducerState.ASKING:
            return  # closed meanwhile
        self.state = ProducerState.OPEN
        if self._repetitions is not None:
            self._repetitions.begin(self.name)
            if (claim := claim_of(self.metadata)) is not None and self.topic.deduplication is not None:
                self.topic.deduplication.set_claim(self.name, claim)
        self._owner.on_admitted(self)

    def on_waiting(self) -> None:
        """Report that the producer was put on the waiting list."""
        self._owner.on_waiting(self)

    def on_refused(self, error: BrokerError) -> None:
        if self.state is not ProducerState.CLOSED:
            self.state = ProducerState.CLOSED
            self._owner.on_refused(self, error)

    def close_when_settled(self, on_settled: Callable[[], None]) -> None:
        """Take nothing more; call `on_settled` when all pending SENDs are answered."""
        self.flush()
        if self.state is ProducerState.OPEN:
            self.state = ProducerState.CLOSING
        self._on_settled.append(on_settled)
        self._settle_if_done()

    def close_in_good_order(self, reason: str) -> None:
        """Close as `close_by_broker`, after answering pending SENDs."""
        self.close_when_settled(lambda: self.close_by_broker(reason))

    def close_by_broker(self, reason: str, moved_to: Mapping[str, str] | None = None) -> None:
        """Tell the client to reconnect, at `moved_to` (addresses by scheme) or after a lookup. Pending SENDs are not answered
        (rule 2)."""
        if self.state is ProducerState.ASKING:
            self.detach()
            # Clients look for these words, and then keep their other producers and consumers on the connection (protocol.md §7.2).
            self._owner.on_refused(self, ServiceNotReadyError(f"topic {self.topic.name} is being unloaded: {reason}"))
        elif self.state is not ProducerState.CLOSED:
            self.moved_to = moved_to
            self.detach()
            log.info("producer.closed_by_broker", extra={"topic": str(self.topic.name), "producer": self.name, "reason": reason})
            self._owner.on_closed_by_broker(self)

    def stop(self) -> None:
        """Stop after a new incarnation replaced it; that takes its place in the topic, or frees it by `detach`."""
        if self.state is not ProducerState.CLOSED:
            self._stop()

    def detach(self) -> None:
        """Leave the topic after the client closed the producer or disconnected."""
        self.stop()
        self.topic.admission.leave(self)

    def on_tick(self, window_s: float) -> None:
        self.traffic.on_tick(window_s)
        self.chunks.on_tick(window_s)

    def figures(self) -> ProducerFigures:
        return ProducerFigures(
            self.producer_id,
            self.name,
            self.peer.address,
            self.peer.client_version,
            self.connected_at_ms,
            self.traffic.figures(),
            self.pending_entries,
            self.checksum_errors,
            0 if self._repetitions is None else self._repetitions.count,
            self.access_mode,
            self.chunks.message_rate_per_s,
            self.metadata,
        )

    def _stop(self) -> None:
        self.state = ProducerState.CLOSED
        self._sends.stop()
        if self._repetitions is not None:
            self._repetitions.end()
        self._settle_if_done()

    def _on_given_up(self, reason: str, in_good_order: bool) -> None:
        """Close after an append failed (rule 2)."""
        if in_good_order:
            self.close_in_good_order(reason)
        else:
            self.close_by_broker(reason)

    def _settle_if_done(self) -> None:
        if self._on_settled and (self._sends.is_empty or self.state is ProducerState.CLOSED):
            waiting, self._on_settled = self._on_settled, []
            for on_settled in waiting:
                on_settled()

    # What is not stored

    def _refuse(self, send: SendCommand, error: ChecksumMismatchError) -> None:
        self.checksum_errors += 1
        self._refusals.note(
            "publish.checksum_mismatch",
            (self.topic.name, self.name),
            level=logging.WARNING,
            topic=str(self.topic.name),
            producer=self.name,
            sequence_id=send.sequence_id,
            error=str(error),
        )
        self._send_error(send, ServerError.CHECKSUM_ERROR, str(error))

    def _is_allowed(self, send: SendCommand, tail: memoryview, metadata: pb.MessageMetadata) -> bool:
        """Check the topic's policies; on refusal answer an error, close the producer and return False.

        Some clients give the message up (Java), others resend it until it expires (C++), but no later one is stored before it
        (protocol.md §10.4).
        """
        reason = why_not_allowed(self.topic.policies, len(tail), metadata)
        if reason is None:
            return True
        self._refusals.note(
            "publish.not_allowed",
            (self.topic.name, self.name),
            topic=str(self.topic.name),
            producer=self.name,
            sequence_id=send.sequence_id,
            reason=reason,
        )
        self._send_error(send, ServerError.NOT_ALLOWED_ERROR, reason)
        self.close_in_good_order(reason)
        return False

    def _send_error(self, send: SendCommand, code: ServerError, text: str) -> None:
        """Send an error in the turn of its SEND."""
        frame = encode_body(
            pb.CommandSendError(producer_id=self.producer_id, sequence_id=send.sequence_id, error=code.as_protobuf, message=text)
        )
        self._sends.add_error(frame)
