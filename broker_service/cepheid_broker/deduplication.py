"""Which SENDs of a topic are repetitions, without I/O (protocol.md §11).

    push: new ──► begin (its group is appended) ──► confirm ──► persisted
      │    │        └──► fail ┐
      │    └── never appended ┴──► pushed falls back to what is persisted or still under way
      └──► is_stored: a duplicate; neither: unknown, it is under way

Rules
1. Persisted names only entries that are confirmed: what is saved of it calls no message a duplicate that is not stored (H3).
2. After a failure the same sequence ids are new again: the client's second attempt is no duplicate of one that was not stored.
3. A batch is judged by its highest sequence id: it is a duplicate only when all of it is stored. Clients that do not say which is
   the highest (C++) are judged by the id they give, mostly of the first message: such a batch is recognised when it is sent again
   as it was, not when its messages come in another grouping.
4. Of a chunked message the last chunk is recorded: the message is stored when that one is. Until then the chunks of its newest
   attempt are known, and those sent again are duplicates: consumers of the C++ library drop a message whose chunks they see twice.
5. Ids with the highest bit set (a client's -1) are neither judged nor recorded: one of them would make everything after it a
   duplicate.
6. A name is followed while somebody uses it. Others are forgotten after `idle_s`, and the longest unused ones beyond `max_names`;
   what a forgotten name sends again is stored again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

NOTHING_PERSISTED = -1
MAX_SEQUENCE_ID = (1 << 63) - 1


class Chunk(NamedTuple):
    """One that is not the last of its message. The time and the size tell attempts apart: an application that starts over may use
    the sequence id for another message, whose chunks must not be mixed with the old ones. Resending changes neither."""

    sequence_id: int
    chunk_id: int
    publish_time_ms: int
    message_bytes: int


class ProducerSequence:
    """What is known of one producer name. Made by `SequenceIds`."""

    __slots__ = ("_under_way", "chunk", "is_forgotten", "name", "persisted", "pushed", "used_at", "users")

    def __init__(self, name: str, persisted: int, used_at: float) -> None:
        self.name = name
        self.persisted = self.pushed = persisted
        self.users = 0
        self.used_at = used_at
        self.is_forgotten = False
        """Nothing of it is kept any more: whoever still has it asks for the name again."""
        self.chunk: Chunk | None = None
        """The newest that is stored; those before it are as well."""
        self._under_way: deque[int] = deque()  # the highest id of each group being appended

    def __repr__(self) -> str:
        return f"<ProducerSequence {self.name!r} persisted {self.persisted}, pushed {self.pushed}>"

    @property
    def is_settled(self) -> bool:
        """Nothing is under way: what is persisted is all there is."""
        return not self._under_way

    def is_new(self, highest: int) -> bool:
        return highest > self.pushed

    def is_stored(self, highest: int) -> bool:
        """A duplicate, for certain. What is neither new nor stored is under way: nobody knows yet."""
        return highest <= self.persisted

    def has_chunk(self, chunk: Chunk) -> bool:
        """Rule 4: a duplicate, for certain."""
        stored = self.chunk
        return stored is not None and chunk.chunk_id <= stored.chunk_id and chunk == stored._replace(chunk_id=chunk.chunk_id)

    def push(self, highest: int) -> bool:
        """True: it is new, and taken; it will be part of the next group."""
        if highest > self.pushed:
            self.pushed = highest
            return True
        return False

    def begin(self, highest: int) -> None:
        """A group is appended, and this is the highest id in it."""
        self._under_way.append(highest)

    def confirm(self, highest: int) -> None:
        """The group is stored."""
        self._under_way.remove(highest)
        self.persisted = max(self.persisted, highest)
        self.pushed = max(self.pushed, highest)

    def fail(self, highest: int) -> None:
        """The group may or may not be stored; if it is, whoever opens the topic next finds it."""
        self._under_way.remove(highest)
        self.abandon()

    def abandon(self) -> None:
        """What was pushed and not appended never will be (rule 2)."""
        self.pushed = max(self.persisted, *self._under_way) if self._under_way else self.persisted


class SequenceIds:
    """Of one topic: every name that published lately."""

    def __init__(self) -> None:
        self._names: dict[str, ProducerSequence] = {}

    def __repr__(self) -> str:
        return f"<SequenceIds of {len(self._names)} producers>"

    def __len__(self) -> int:
        return len(self._names)

    def follow(self, name: str, now: float) -> ProducerSequence:
        """It is kept until it is given back by `leave`."""
        sequence = self._names.get(name)
        if sequence is None:
            sequence = self._names[name] = ProducerSequence(name, NOTHING_PERSISTED, now)
        sequence.users += 1
        return sequence

    def leave(self, sequence: ProducerSequence, now: float) -> None:
        sequence.users -= 1
        sequence.used_at = now

    def persisted(self, name: str) -> int:
        sequence = self._names.get(name)
        return NOTHING_PERSISTED if sequence is None else sequence.persisted

    def is_settled(self, name: str) -> bool:
        sequence = self._names.get(name)
        return sequence is None or sequence.is_settled

    # What is saved

    def restore(self, saved: Mapping[str, int], now: float) -> None:
        self.clear()
        for name, persisted in saved.items():
            self._names[name] = ProducerSequence(name, persisted, now)

    def note_stored(self, name: str, highest: int, now: float) -> None:
        """An entry that is stored behind what was saved."""
        sequence = self._names.get(name)
        if sequence is None:
            self._names[name] = ProducerSequence(name, highest, now)
        else:
            sequence.persisted = sequence.pushed = max(sequence.persisted, highest)

    def note_stored_chunk(self, name: str, chunk: Chunk, now: float) -> None:
        """Likewise, of an entry that is not the last chunk."""
        if name not in self._names:
            self._names[name] = ProducerSequence(name, NOTHING_PERSISTED, now)
        self._names[name].chunk = chunk

    def snapshot(self) -> dict[str, int]:
        """Rule 1. Holds for every entry that is confirmed by now."""
        return {name: sequence.persisted for name, sequence in self._names.items() if sequence.persisted >= 0}

    def forget_idle(self, unused_since: float, max_names: int) -> int:
        """Rule 6. How many are forgotten."""
        unused = [sequence for sequence in self._names.values() if not sequence.users and sequence.is_settled]
        unused.sort(key=lambda sequence: sequence.used_at)
        excess = len(self._names) - max_names
        forgotten = [sequence for index, sequence in enumerate(unused) if index < excess or sequence.used_at < unused_since]
        for sequence in forgotten:
            self._forget(sequence)
        return len(forgotten)

    def clear(self) -> None:
        for sequence in list(self._names.values()):
            self._forget(sequence)

    def _forget(self, sequence: ProducerSequence) -> None:
        sequence.is_forgotten = True
        del self._names[sequence.name]
