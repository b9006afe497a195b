"""A group of entries as dispatch sees it, with per-entry facts from the metadata.

These are: the number of messages, which entries are chunks of a larger message, the delivery times set by producers, and key
hashes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cepheid_broker.dispatch.key_hash import hash_of_metadata
from cepheid_metadata import Position
from cepheid_rpc import EntryGroup
from cepheid_wire import SMALLEST_MESSAGE_BYTES, BadTailError, MetadataShape, SharedMessage, messages_in, parse_metadata
from cepheid_wire import pulsar_api_pb2 as pb

log = logging.getLogger(__name__)

Run = tuple[int, int]
"""Entry ids `first..last`, inclusive, of one group."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a chunked message; all its chunks have the same uuid (protocol.md §10.5)."""

    uuid: str
    is_last: bool


class CountedGroup:
    """A group of entries with what dispatch needs of their metadata.

    `counts[i]`: messages in entry `first + i`; None: one in each. `chunks` by entry id; None: there is none. `deliver_at_ms` by
    entry id (wall clock); None: all at once. `hashes[i]`: of the key of entry `first + i`; None: unknown.
    """

    __slots__ = (
        "after",
        "chunks",
        "counts",
        "deliver_at_ms",
        "first",
        "group",
        "hashes",
        "last",
        "ledger_id",
        "messages",
        "shared",
        "size_bytes",
    )

    def __init__(
        self,
        group: EntryGroup,
        counts: Sequence[int] | None,
        chunks: dict[int, Chunk] | None = None,
        *,
        deliver_at_ms: dict[int, int] | None = None,
        hashes: Sequence[int] | None = None,
    ) -> None:
        self.group = group
        self.counts = counts
        self.chunks = chunks
        self.deliver_at_ms = deliver_at_ms
        self.hashes = hashes
        self.ledger_id = group.ledger_id
        self.first = group.first_entry_id
        self.last = group.last_entry_id
        self.after = Position(self.ledger_id, self.last + 1)
        self.messages = len(group.ends) if counts is None else sum(counts)
        self.size_bytes = group.size_bytes
        self.shared: list[SharedMessage] | None = None  # delivery.py: frames in which only the consumer's id differs

    def __repr__(self) -> str:
        return f"<CountedGroup {self.group!r}, {self.messages_in(self.group.first_entry_id, self.group.last_entry_id)} messages>"

    def messages_in(self, first: int, last: int) -> int:
        if self.counts is None:
            return last - first + 1
        base = self.group.first_entry_id
        return sum(self.counts[first - base : last - base + 1])

    def counts_in(self, first: int, last: int) -> Sequence[int]:
        if self.counts is None:
            return (1,) * (last - first + 1)
        base = self.group.first_entry_id
        return self.counts[first - base : last - base + 1]

    def slice(self, first: int, last: int) -> CountedGroup:
        """Return the entries `first..last` (inclusive, inside the group) over the same memory."""
        if (first, last) == (self.first, self.last):
            return self
        base = self.first
        part = slice(first - base, last - base + 1)
        return CountedGroup(
            self.group.slice(first, last),
            None if self.counts is None else self.counts[part],
            None if self.chunks is None else {e: chunk for e, chunk in self.chunks.items() if first <= e <= last} or None,
            hashes=None if self.hashes is None else self.hashes[part],
        )

    def take(self, runs: Sequence[Run], permits: int, max_entries: int) -> tuple[list[Run], int]:
        """Return the front of `runs` that `permits` (> 0) pay for, and its number of messages.

        An entry is sent whole as soon as there is one permit, so the result may cost more than `permits` (protocol.md §13).
        """
        assert permits > 0
        taken: list[Run] = []
        messages = 0
        for first, last in runs:
            if messages >= permits or max_entries <= 0:
                break
            if last - first >= max_entries:
                last = first + max_entries - 1
            cost = self.messages_in(first, last)
            if cost > permits - messages:
                last, cost = self._cut(first, permits - messages)
            taken.append((first, last))
            messages += cost
            max_entries -= last - first + 1
        return taken, messages

    def _cut(self, first: int, permits: int) -> tuple[int, int]:
        """Return the last entry, counted from `first`, that `permits` reach, and the cost up to it."""
        if self.counts is None:
            return first + permits - 1, permits
        cost, base = 0, self.group.first_entry_id
        for index in range(first - base, len(self.counts)):
            cost += self.counts[index]
            if cost >= permits:
                return base + index, cost
        raise AssertionError("called only when the run costs more than the permits")


class _Derived(NamedTuple):
    """Facts shared by all readers of a group in the tail cache: a thousand subscriptions parse an entry's metadata once."""

    counts: Sequence[int] | None
    chunks: dict[int, Chunk] | None
    deliver_at_ms: dict[int, int] | None
    hashes: Sequence[int] | None


def count_group(group: EntryGroup, *, with_hashes: bool = False, shape: MetadataShape | None = None) -> CountedGroup:
    """Read the metadata of every entry once. `shape`: what this topic's entries looked like before.

    An entry with unreadable metadata counts as one message: it is refused when published, so it can only come from elsewhere.
    """
    known = group.derived
    if not isinstance(known, _Derived) or (with_hashes and known.hashes is None):
        known = group.derived = _derive(group, with_hashes=with_hashes, shape=shape or MetadataShape())
    return CountedGroup(group, known.counts, known.chunks, deliver_at_ms=known.deliver_at_ms, hashes=known.hashes)


def _derive(group: EntryGroup, *, with_hashes: bool, shape: MetadataShape) -> _Derived:
    counts: list[int] = []
    hashes: list[int] | None = [] if with_hashes else None
    chunks: dict[int, Chunk] = {}
    deliver_at_ms: dict[int, int] = {}
    entry_id = group.first_entry_id
    for payload in group.payloads():
        if hashes is None and shape.fits(payload):  # one message, no chunk, and not delayed
            counts.append(1)
            entry_id += 1
            continue
        try:
            metadata = parse_metadata(payload)
        except BadTailError as error:
            log.warning("entry.unreadable", extra={"ledger_id": group.ledger_id, "entry_id": entry_id, "error": str(error)})
            counts.append(1)
            if hashes is not None:
                hashes.append(0)
        else:
            count = metadata.num_messages_in_batch
            counts.append(count if 0 < count * SMALLEST_MESSAGE_BYTES <= len(payload) else _count_of_odd(metadata, payload))
            if hashes is not None:
                hashes.append(hash_of_metadata(metadata))
            if metadata.num_chunks_from_msg > 1:
                is_last = metadata.chunk_id >= metadata.num_chunks_from_msg - 1
                chunks[entry_id] = Chunk(str(metadata.uuid), is_last)
            if metadata.deliver_at_time > 0:
                deliver_at_ms[entry_id] = metadata.deliver_at_time
            elif hashes is None:
                shape.learn(payload, metadata)
        entry_id += 1
    single = sum(counts) == len(counts)
    return _Derived(None if single else counts, chunks or None, deliver_at_ms or None, hashes)


def _count_of_odd(metadata: pb.MessageMetadata, payload: memoryview) -> int:
    """Return a message count for a stored entry whose count is impossible, so that it does not use up a consumer's permits."""
    try:
        return messages_in(metadata, len(payload))
    except BadTailError:
        return 1
