"""Which SENDs of a topic are repetitions, decided without I/O (protocol.md §11).

    push: new ──► begin (its group is appended) ──► confirm ──► persisted
      │    │        └──► fail ┐
      │    └── never appended ┴──► pushed falls back to what is persisted or still being appended
      └──► is_stored: a duplicate; neither: not known yet, as it is being appended

Rules
1. Persisted ids cover only confirmed entries, so what is saved never makes a message a duplicate that is not stored (H3).
2. After a failure the same sequence ids are new again: the client's second attempt is not a duplicate of one that was not stored.
3. Clients send entries in the order of their first ids, even if batches are made by key and their ids interleave: (0 1 3) (2). So
   an entry that begins above all others is new, wherever it ends. One that ends above all others is new too, wherever it begins: a
   restarted application packs other batches, and a partly stored one is stored again rather than lost. Any other entry is a
   duplicate.
4. A chunked message is recorded by its last chunk, which makes it stored. Until then the chunks of its newest attempt are
   remembered, and saved with the sequence ids; if sent again they are duplicates: consumers of the C++ library drop a message whose
   chunks they see twice.
5. Ids with the highest bit set (a client's -1) are neither judged nor recorded: one of them would make all later ones duplicates.
6. A name is followed while it is used. Others are forgotten after `idle_s`, and the longest unused ones beyond `max_names`; what a
   forgotten name sends again is stored again.
7. A claimed name is remembered for as long as its claim says, if that is longer, and beyond `max_names` it is forgotten after all
   unclaimed ones. Until then it belongs to the owner named by its claim. A claim may describe by a text what is sent from a
   sequence id on: once some of that is stored, another text for that id is refused, as other messages would become duplicates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

MAX_SEQUENCE_ID = (1 << 63) - 1
NOTHING_PERSISTED = -1
_BEGINS = "\0"
"""Prefix of a name in what is saved, for `Mark.begins` where it differs from `ends`."""
_CHUNK = "\0\0"
"""Prefix in what is saved of `chunk id/publish time/bytes of the message/name`, for the sequence id of `ProducerSequence.chunk`."""
_CLAIM = "\0\1"
"""Prefix in what is saved of the rest of a `NameClaim` and the name, as JSON, for its `memory_s`; earlier releases ignore it."""
NO_NAMES = ("\0", "\1")
"""Prefixes that no name has (`name_key`), so that other saved keys can be distinguished from names."""


class Mark(NamedTuple):
    """Highest ids of one name (rule 3): an entry that begins and ends at or below these is not new."""

    begins: int
    ends: int

    def or_later(self, other: Mark) -> Mark:
        return Mark(max(self.begins, other.begins), max(self.ends, other.ends))


NOTHING = Mark(NOTHING_PERSISTED, NOTHING_PERSISTED)


def mark_of_batch(first: int, messages: int, highest: int | None) -> Mark:
    """Return the mark that an entry of several messages sets. `highest`: as its client sent it; C++ does not send it.

    No two messages have one id, so without a gap among its ids no later entry begins between them.
    """
    ends = first + messages - 1
    if highest is None or not ends <= highest <= MAX_SEQUENCE_ID:
        return Mark(first, ends)
    return Mark(highest if highest == ends else first, highest)


class Chunk(NamedTuple):
    """A chunk that is not the last of its message.

    Time and size distinguish attempts: a restarted application may use the sequence id for another message, whose chunks must not
    be mixed with the old ones. Resending changes neither.
    """

    sequence_id: int
    chunk_id: int
    publish_time_ms: int
    message_bytes: int

    def is_of_same_attempt(self, other: Chunk) -> bool:
        return self == other._replace(chunk_id=self.chunk_id)


class NameClaim(NamedTuple):
    """A producer's claim to its name: who may use it, and how long it is remembered after its last use."""

    owner: str
    memory_s: int
    first_id: int = -1
    """First sequence id that `content` describes; -1: it describes nothing."""
    content: str = ""


class ProducerSequence:
    """State of one producer name; created by `SequenceIds`."""

    __slots__ = (
        "_pushed_begins",
        "_pushed_ends",
        "_under_way",
        "chunk",
        "claim",
        "is_forgotten",
        "name",
        "persisted",
        "used_at",
        "users",
    )

    def __init__(self, name: str, persisted: Mark, used_at: float) -> None:
        self.name = name
        self.persisted = persisted
        self._pushed_begins, self._pushed_ends = persisted  # two numbers, as they change with every entry
        self.users = 0
        self.used_at = used_at
        self.is_forgotten = False
        """Its state was dropped: a holder of this object must follow the name again."""
        self.chunk: Chunk | None = None
        """Newest stored chunk of an incomplete message; those before it are stored as well."""
        self.claim: NameClaim | None = None
        self._under_way: list[Mark] = []  # one for each group being appended; usually none

    def __repr__(self) -> str:
        return f"<ProducerSequence {self.name!r} persisted {self.persisted}, pushed {self.pushed}>"

    @property
    def is_settled(self) -> bool:
        """Whether no append is pending, so that what is persisted is all there is."""
        return not self._under_way

    @property
    def pushed(self) -> Mark:
        return Mark(self._pushed_begins, self._pushed_ends)

    def is_new(self, first: int, ends: int) -> bool:
        return first > self._pushed_begins or ends > self._pushed_ends

    def is_stored(self, first: int, ends: int) -> bool:
        """Return whether it is certainly a duplicate. What is neither new nor stored is still being appended."""
        return first <= self.persisted.begins and ends <= self.persisted.ends

    def has_chunk(self, chunk: Chunk) -> bool:
        """Return whether the chunk is certainly a duplicate (rule 4)."""
        stored = self.chunk
        return stored is not None and chunk.chunk_id <= stored.chunk_id and chunk.is_of_same_attempt(stored)

    def push(self, first: int, begins: int, ends: int) -> bool:
        """Return whether the entry is new; if so it joins the next group, which once stored settles `Mark(begins, ends)`."""
        if first <= self._pushed_begins and ends <= self._pushed_ends:
            return False
        if begins > self._pushed_begins:
            self._pushed_begins = begins
        if ends > self._pushed_ends:
            self._pushed_ends = ends
        return True

    def begin(self, mark: Mark) -> None:
        """Note that a group with this mark is being appended."""
        self._under_way.append(mark)

    def confirm(self, mark: Mark) -> None:
        """Note that the group is stored."""
        self._under_way.remove(mark)
        self._note_stored(mark)

    def fail(self, mark: Mark) -> None:
        """Note that the append failed; if the group is stored after all, the next opening of the topic finds it."""
        self._under_way.remove(mark)
        self.abandon()

    def abandon(self) -> None:
        """Reset what was pushed and will not be appended (rule 2)."""
        pushed = self.persisted
        for mark in self._under_way:
            pushed = mark.or_later(pushed)
        self._pushed_begins, self._pushed_ends = pushed

    def _note_stored(self, mark: Mark) -> None:
        self.persisted = mark.or_later(self.persisted)
        self._pushed_begins, self._pushed_ends = self.persisted.or_later(self.pushed)
        if self.chunk is not None and self.chunk.sequence_id <= self.persisted.begins:
            self.chunk = None  # its message is complete, or was given up


class SequenceIds:
    """The names of one topic that published recently."""

    def __init__(self) -> None:
        self._names: dict[str, ProducerSequence] = {}

    def __repr__(self) -> str:
        return f"<SequenceIds of {len(self._names)} producers>"

    def __len__(self) -> int:
        return len(self._names)

    def follow(self, name: str, now: float) -> ProducerSequence:
        """Return the state of the name, kept until `leave`."""
        sequence = self._known(name, now)
        sequence.users += 1
        return sequence

    def leave(self, sequence: ProducerSequence, now: float) -> None:
        sequence.users -= 1
        sequence.used_at = now

    def last_sequence_id(self, name: str) -> int:
        sequence = self._names.get(name)
        return NOTHING_PERSISTED if sequence is None else sequence.persisted.ends

    def is_settled(self, name: str) -> bool:
        sequence = self._names.get(name)
        return sequence is None or sequence.is_settled

    def why_refused(self, name: str, claim: NameClaim) -> str | None:
        """Return the reason to refuse a claim (rule 7), or None."""
        sequence = self._names.get(name)
        if sequence is None or sequence.claim is None:
            return None
        before = sequence.claim
        if before.owner != claim.owner:
            return f"the name belongs to {before.owner!r}, and {claim.owner!r} asks for it: use another name"
        begun = before.first_id == claim.first_id and 0 <= claim.first_id <= sequence.persisted.ends
        if begun and before.content != claim.content:
            count = sequence.persisted.ends - claim.first_id + 1
            return (
                f"{count:,} messages from {claim.first_id} on are stored, of other content ({before.content}, now {claim.content})"
            )
        return None

    def set_claim(self, name: str, claim: NameClaim, now: float) -> bool:
        """Set the claim; return whether it is new and must be saved."""
        sequence = self._known(name, now)
        is_new, sequence.claim = sequence.claim != claim, claim
        return is_new

    # What is saved

    def restore(self, saved: Mapping[str, int], now: float) -> None:
        self.clear()
        for name, ends in sequence_ids_of(saved).items():
            self._names[name] = ProducerSequence(name, Mark(saved.get(_BEGINS + name, ends), ends), now)
        for key, sequence_id in saved.items():
            if key.startswith(_CHUNK):
                chunk_id, publish_time_ms, message_bytes, name = key.removeprefix(_CHUNK).split("/", 3)
                self._known(name, now).chunk = Chunk(sequence_id, int(chunk_id), int(publish_time_ms), int(message_bytes))
            elif key.startswith(_CLAIM):
                name, owner, first_id, content = json.loads(key.removeprefix(_CLAIM))
                self._known(name, now).claim = NameClaim(owner, sequence_id, first_id, content)

    def note_stored(self, name: str, mark: Mark, now: float) -> None:
        """Note an entry that was stored after the last save."""
        self._known(name, now)._note_stored(mark)

    def note_stored_chunk(self, name: str, chunk: Chunk, now: float) -> None:
        """Note a chunk, not the last of its message, that was stored after the last save."""
        sequence = self._known(name, now)
        if sequence.is_new(chunk.sequence_id, chunk.sequence_id):
            sequence.chunk = chunk

    def snapshot(self) -> dict[str, int]:
        """Return what to save (rule 1), valid for all entries confirmed by now."""
        saved: dict[str, int] = {}
        for name, sequence in self._names.items():
            begins, ends = sequence.persisted
            if ends >= 0:
                saved[name] = ends
                if begins != ends:
                    saved[_BEGINS + name] = begins
            if (claim := sequence.claim) is not None:
                saved[_CLAIM + json.dumps([name, claim.owner, claim.first_id, claim.content])] = claim.memory_s
            if (chunk := sequence.chunk) is not None:
                saved[f"{_CHUNK}{chunk.chunk_id}/{chunk.publish_time_ms}/{chunk.message_bytes}/{name}"] = chunk.sequence_id
        return saved

    def forget_chunks(self) -> int:
        """Drop incomplete chunked messages, as they are being deleted; return how many."""
        incomplete = [sequence for sequence in self._names.values() if sequence.chunk is not None]
        for sequence in incomplete:
            sequence.chunk = None
        return len(incomplete)

    def forget_idle(self, now: float, idle_s: float, max_names: int) -> int:
        """Forget names unused for `idle_s`, or for as long as their claim says, and those beyond `max_names`; return how many.

        Rules 6 and 7 say which.
        """
        unused = [sequence for sequence in self._names.values() if not sequence.users and sequence.is_settled]
        unused.sort(key=lambda sequence: (sequence.claim is not None, sequence.used_at))
        excess = len(self._names) - max_names
        forgotten = [
            sequence
            for index, sequence in enumerate(unused)
            if index < excess or sequence.used_at < now - max(idle_s, 0 if sequence.claim is None else sequence.claim.memory_s)
        ]
        for sequence in forgotten:
            self._forget(sequence)
        return len(forgotten)

    def clear(self) -> None:
        for sequence in list(self._names.values()):
            self._forget(sequence)

    def _known(self, name: str, now: float) -> ProducerSequence:
        sequence = self._names.get(name)
        if sequence is None:
            sequence = self._names[name] = ProducerSequence(name, NOTHING, now)
        return sequence

    def _forget(self, sequence: ProducerSequence) -> None:
        sequence.is_forgotten = True
        del self._names[sequence.name]


def sequence_ids_of(saved: Mapping[str, int]) -> dict[str, int]:
    """Return the highest sequence id by name, from a snapshot."""
    return {name: ends for name, ends in saved.items() if not name.startswith(_BEGINS)}
