"""What one producer sends again: judges for each of its SENDs whether it is new or a repetition (rules in deduplication.py).

    Producer ──judge──► the sequence of the name in the message ──► new: its group settles the ids once it is stored
                                                               └──► not new: stored, or being appended in a group

The name is that in the message: replicated messages keep their first producer's name.
"""

from __future__ import annotations

import asyncio

from cepheid_broker.publishing.deduplication import MAX_SEQUENCE_ID, NOTHING, Mark, ProducerSequence, mark_of_batch
from cepheid_broker.publishing.publish_group import PublishGroup
from cepheid_broker.publishing.topic_deduplication import TopicDeduplication, chunk_of, is_recorded, name_key, producer_name_of
from cepheid_wire import SendCommand
from cepheid_wire import pulsar_api_pb2 as pb


class Repetitions:
    """The repetitions of one producer."""

    __slots__ = ("_deduplication", "_sequence", "count")

    def __init__(self, deduplication: TopicDeduplication) -> None:
        self._deduplication = deduplication
        self._sequence: ProducerSequence | None = None  # the last one used
        self.count = 0

    def __repr__(self) -> str:
        return f"<Repetitions {self.count}, of {self._sequence!r}>"

    @property
    def active(self) -> bool:
        return self._deduplication.active

    def begin(self, name: str) -> None:
        """Mark the name as used from now on, even if its producer does not publish."""
        if self.active:
            self._follow(name_key(name))

    def end(self) -> None:
        if self._sequence is not None:
            self._deduplication.sequences.leave(self._sequence, _now())
        self._sequence = None

    def sequence_of(self, metadata: pb.MessageMetadata) -> ProducerSequence:
        sequence = self._sequence
        if sequence is None or sequence.name != metadata.producer_name or sequence.is_forgotten:
            sequence = self._follow(producer_name_of(metadata))
        return sequence

    def judge(
        self, send: SendCommand, metadata: pb.MessageMetadata, messages: int, sequence: ProducerSequence, group: PublishGroup
    ) -> Mark | None:
        """Judge an entry; every entry of a topic passes here. None: it is new, and joins the group. Else return the mark that
        decides it.

        Of two numbers the higher one counts: after a crash, stored entries are found by that of the metadata.
        """
        first = send.sequence_id
        if metadata.sequence_id > first:
            first = metadata.sequence_id
        if messages == 1:
            begins = ends = first
        else:
            begins, ends = mark_of_batch(first, messages, max(send.highest_sequence_id or 0, metadata.highest_sequence_id))
        if ends > MAX_SEQUENCE_ID:
            return None
        if (metadata.num_chunks_from_msg or metadata.marker_type) and not is_recorded(metadata):
            if metadata.marker_type:
                return None
            if sequence.is_new(first, first):
                chunk = chunk_of(metadata)
                if sequence.has_chunk(chunk):
                    return NOTHING  # the chunk is stored, though its message is not whole
                group.join(sequence)
                group.chunk = chunk
                return None
        elif sequence.push(first, begins, ends):
            group.join(sequence, begins, ends)
            return None
        return Mark(first, ends)

    def on_answered(self, group: PublishGroup, *, stored: bool) -> None:
        """Note the end of an append, even after the producer was closed: its successor needs it. `stored` False: it may not be
        stored."""
        sequence = group.sequence
        if sequence is not None:
            if not stored:
                sequence.fail(group.mark)
            else:
                if group.chunk is not None:
                    sequence.chunk = group.chunk
                sequence.confirm(group.mark)
        self._deduplication.on_answered(len(group.payloads), None if sequence is None else sequence.name)

    def note_repeated(self, size_bytes: int) -> None:
        self.count += 1
        self._deduplication.repeated.count(1, 1, size_bytes)

    def _follow(self, name: str) -> ProducerSequence:
        self.end()
        self._sequence = self._deduplication.sequences.follow(name, _now())
        return self._sequence


def _now() -> float:
    return asyncio.get_running_loop().time()
