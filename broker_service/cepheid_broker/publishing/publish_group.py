"""SENDs of one producer that are appended together, and the receipt of each: stored, or a repetition of what is."""

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
"""Of a repetition, in its receipt: clients take it as success (protocol.md §10.3)."""

REPETITION_BYTES = 64
"""What a repetition, which is not stored, counts in the publish window: its place among the answers."""


class Repetition(NamedTuple):
    place: int  # among the group's sequence ids; it has no payload
    sequence: ProducerSequence
    repeated: Mark


@dataclass(slots=True, eq=False)
class PublishGroup:
    payloads: list[Buffer] = field(default_factory=list)
    sequence_ids: list[tuple[int, int | None]] = field(default_factory=list)
    """Of every SEND, with the highest of a batch if it was sent."""
    messages: list[int] = field(default_factory=list)
    """In each payload."""
    size_bytes: int = 0
    """Of payloads, and of answers that wait although nothing of theirs is stored."""
    window_bytes: int = 0
    """What of that it has taken from the publish window."""
    errors_after: bytearray = field(default_factory=bytearray)
    """Frames to be written behind its receipts."""
    sequence: ProducerSequence | None = None
    """With deduplication: whose ids they are; all of a group are of one name."""
    begins: int = NOTHING_PERSISTED
    ends: int = NOTHING_PERSISTED
    chunk: Chunk | None = None
    """The newest that is not the last of its message."""
    repetitions: list[Repetition] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.sequence_ids

    @property
    def stored_bytes(self) -> int:
        return self.size_bytes - REPETITION_BYTES * len(self.repetitions) - len(self.errors_after)

    @property
    def repeats_what_is_stored(self) -> bool:
        """False: something was sent again while it was under way, and then it was not stored."""
        return all(repetition.sequence.is_stored(*repetition.repeated) for repetition in self.repetitions)

    @property
    def mark(self) -> Mark:
        """What it settles once it is stored."""
        return Mark(self.begins, self.ends)

    def join(self, sequence: ProducerSequence, begins: int = NOTHING_PERSISTED, ends: int = NOTHING_PERSISTED) -> None:
        """An entry with ids of this sequence is added, which settles so much."""
        self.sequence = sequence
        if begins > self.begins:
            self.begins = begins
        if ends > self.ends:
            self.ends = ends

    def repeat(self, send: SendCommand, sequence: ProducerSequence, repeated: Mark) -> None:
        """A SEND that is not stored takes its place among the answers."""
        self.repetitions.append(Repetition(len(self.sequence_ids), sequence, repeated))
        self.sequence_ids.append((send.sequence_id, send.highest_sequence_id))
        self.size_bytes += REPETITION_BYTES

    def add_error(self, frame: bytes) -> None:
        self.errors_after += frame
        self.size_bytes += len(frame)

    def receipts(self, producer_id: int, first: Position | None, *, step: int) -> list[tuple[int, int, int, int, int | None]]:
        """Of each SEND, in their order. `first` is where the first payload is, `step` how far entry ids are apart."""
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
        """A ledger ended in the middle of the group."""
        places = iter([(ledger_id, entry_id + n) for (ledger_id, entry_id), count in where.runs for n in range(count)])
        repeated = {repetition.place for repetition in self.repetitions}
        return [
            (producer_id, sequence_id, *(NO_POSITION if index in repeated else next(places)), highest)
            for index, (sequence_id, highest) in enumerate(self.sequence_ids)
        ]


def why_not_allowed(policies: TopicPolicies, tail_bytes: int, metadata: pb.MessageMetadata) -> str | None:
    """What the topic's policies have against a message; None: nothing."""
    if 0 < policies.max_message_bytes < tail_bytes:
        return f"a message of {tail_bytes} bytes, the topic's policy allows {policies.max_message_bytes}"
    delay_ms = metadata.deliver_at_time - metadata.publish_time
    if 0 < policies.max_delay_ms < delay_ms:
        return f"a message to be delivered after {delay_ms} ms, the topic's policy allows {policies.max_delay_ms}"
    if policies.encryption_required and not metadata.encryption_keys:
        return "a message that is not encrypted, and the topic's policy demands it"
    return None
