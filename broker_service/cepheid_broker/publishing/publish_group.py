"""SENDs of one producer that are appended together, and the receipt of each: stored, or a repetition of a stored one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cepheid_broker.peer import Buffer
from cepheid_broker.policies import TopicPolicies
from cepheid_broker.publishing.deduplication import NOTHING_PERSISTED, Chunk, Mark, ProducerSequence
from cepheid_managed_ledger import SplitPosition
from cepheid_metadata import Position
from cepheid_wire import SendCommand
from cepheid_wire import pulsar_api_pb2 as pb

NO_POSITION = Position(-1, -1)
"""Position in the receipt of a repetition: clients take it as success (protocol.md §10.3)."""

REPETITION_BYTES = 64
"""Bytes that a repetition, which is not stored, counts in the publish window for its place among the answers."""


class Repetition(NamedTuple):
    place: int  # index among the group's sequence ids; it has no payload
    sequence: ProducerSequence
    repeated: Mark


@dataclass(slots=True, eq=False)
class PublishGroup:
    payloads: list[Buffer] = field(default_factory=list)
    sequence_ids: list[tuple[int, int | None]] = field(default_factory=list)
    """Id of every SEND, with the highest of a batch if it was sent."""
    messages: list[int] = field(default_factory=list)
    """Number of messages in each payload."""
    size_bytes: int = 0
    """Bytes of payloads, and of waiting answers to SENDs that are not stored."""
    window_bytes: int = 0
    """The part of `size_bytes` counted in the publish window."""
    errors_after: bytearray = field(default_factory=bytearray)
    """Frames to write after its receipts."""
    sequence: ProducerSequence | None = None
    """With deduplication: the sequence of its ids; a group has ids of one name only."""
    begins: int = NOTHING_PERSISTED
    ends: int = NOTHING_PERSISTED
    chunk: Chunk | None = None
    """Newest chunk in it that is not the last of its message."""
    repetitions: list[Repetition] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.sequence_ids

    @property
    def stored_bytes(self) -> int:
        return self.size_bytes - REPETITION_BYTES * len(self.repetitions) - len(self.errors_after)

    @property
    def repeats_what_is_stored(self) -> bool:
        """False if something was sent again while it was being appended, and then was not stored."""
        return all(repetition.sequence.is_stored(*repetition.repeated) for repetition in self.repetitions)

    @property
    def mark(self) -> Mark:
        """The mark that is set once the group is stored."""
        return Mark(self.begins, self.ends)

    def join(self, sequence: ProducerSequence, begins: int = NOTHING_PERSISTED, ends: int = NOTHING_PERSISTED) -> None:
        """Add an entry with ids of this sequence to the mark."""
        self.sequence = sequence
        if begins > self.begins:
            self.begins = begins
        if ends > self.ends:
            self.ends = ends

    def repeat(self, send: SendCommand, sequence: ProducerSequence, repeated: Mark) -> None:
        """Add a place among the answers for a SEND that is not stored."""
        self.repetitions.append(Repetition(len(self.sequence_ids), sequence, repeated))
        self.sequence_ids.append((send.sequence_id, send.highest_sequence_id))
        self.size_bytes += REPETITION_BYTES

    def add_error(self, frame: bytes) -> None:
        self.errors_after += frame
        self.size_bytes += len(frame)

    def receipts(self, producer_id: int, first: Position | None, *, step: int) -> list[tuple[int, int, int, int, int | None]]:
        """Return the receipts of all SENDs in order. `first`: position of the first payload; `step`: distance of entry ids."""
        if isinstance(first, SplitPosition):
            return self._receipts_of_parts(producer_id, first)
        ledger_id, entry_id = first or NO_POSITION
        if not self.repetitions:
            return [
                (producer_id, sequence_id, ledger_id, entry_id + index * step, highest)
                for index, (sequence_id, highest) in enumerate(self.sequence_ids)
            ]
        repeated = {repetition.place for repetition in self.repetitions}
        receipts = []
        for index, (sequence_id, highest) in enumerate(self.sequence_ids):
            if index in repeated:
                receipts.append((producer_id, sequence_id, *NO_POSITION, highest))
            else:
                receipts.append((producer_id, sequence_id, ledger_id, entry_id, highest))
                entry_id += step
        return receipts

    def _receipts_of_parts(self, producer_id: int, where: SplitPosition) -> list[tuple[int, int, int, int, int | None]]:
        """Return the receipts of a group in which a ledger ended."""
        places = iter([(ledger_id, entry_id + n) for (ledger_id, entry_id), count in where.runs for n in range(count)])
        repeated = {repetition.place for repetition in self.repetitions}
        return [
            (producer_id, sequence_id, *(NO_POSITION if index in repeated else next(places)), highest)
            for index, (sequence_id, highest) in enumerate(self.sequence_ids)
        ]


def why_not_allowed(policies: TopicPolicies, tail_bytes: int, metadata: pb.MessageMetadata) -> str | None:
    """Return why the topic's policies refuse a message, or None."""
    if 0 < policies.max_message_bytes < tail_bytes:
        return f"the message has {tail_bytes} bytes; the topic's policy allows {policies.max_message_bytes}"
    delay_ms = metadata.deliver_at_time - metadata.publish_time
    if 0 < policies.max_delay_ms < delay_ms:
        return f"the message asks for a delay of {delay_ms} ms; the topic's policy allows {policies.max_delay_ms}"
    if policies.encryption_required and not metadata.encryption_keys:
        return "the message is not encrypted, which the topic's policy requires"
    return None
