"""Spark's offsets of a stream, format v3 (docs/spark.md): where a micro-batch ends in each topic partition.

    {"cut":{T:entries per task},"from":{T:[ledger,entry(,index)]},"inc":{T:"5d1f0c…"},
     "since":ms,"sub":"spark-…","t":{T:[ledger,entry]},"v":3}

| key | meaning |
|---|---|
| `t` | the last entry included; entry -1: none of this ledger. Batches end at entry boundaries |
| `from` | the first message, if an earlier offset does not have it: for all topics in the first batch, later for those found since,
|        | or continued after a loss or deleted empty ledgers, and until it has moved for one that begins within an entry, or
|        | after the end of its ledger |
| `cut` | entries per task, for the topics that this batch moves, so that a repeated batch has the same tasks |
| `inc` | the incarnation of the topic to which its `t` and `from` belong, if known: format 1, which can still be read, has none |
| `since` | the publish time, in ms since 1970, at which the query began: older messages are in no batch. Absent: it began |
|        | otherwise, or the format is 1 or 2, which can still be read and have none |
| `sub` | the subscription that is the query's lease; absent: there is none |

Rules
1. Spark compares offsets as JSON strings. So each value has one form: sorted keys at every level, whole numbers,
   no empty `cut`, `from`, `inc`, `since`, `sub`; and if nothing is new the very dict from Spark is returned.
2. Spark does not keep `initialOffset` and requests it again after a crash: so the end of the first batch has `from`,
   and `from` of an end applies to that batch, whatever its start says.
3. A position is not rewritten into an equivalent one ([7, last] and [8, -1]): that would be an empty batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from cepheid_decode import MessagePosition
from cepheid_ports import CepheidError

FORMAT = 3
_KEYS_1 = frozenset(("cut", "from", "sub", "t", "v"))
_KEYS_2 = _KEYS_1 | {"inc"}
_KEYS = {1: _KEYS_1, 2: _KEYS_2, FORMAT: _KEYS_2 | {"since"}}  # of all readable formats


class BadOffsetError(CepheidError):
    """The checkpoint has an unusable offset."""

    hint = "use the checkpoint with the version that wrote it, or start the query with a new checkpoint and startingOffsets"


class EntryPosition(NamedTuple):
    """The last entry included; `entry_id` -1: none of this ledger."""

    ledger_id: int
    entry_id: int

    @classmethod
    def before(cls, first: MessagePosition) -> Self:
        return cls(first.ledger_id, first.entry_id - 1 if first.entry_id > 0 else -1)

    @property
    def next(self) -> MessagePosition:
        """Return the first message not included, within this ledger."""
        return MessagePosition(self.ledger_id, self.entry_id + 1)


@dataclass(frozen=True, slots=True)
class StreamOffset:
    ends: Mapping[str, EntryPosition]
    starts: Mapping[str, MessagePosition] = field(default_factory=dict)  # `from`
    cut: Mapping[str, int] = field(default_factory=dict)
    subscription: str | None = None
    incarnations: Mapping[str, str] = field(default_factory=dict)  # of topics in `ends`, as far as known
    since_ms: int | None = None

    @classmethod
    def initial(
        cls,
        starts: Mapping[str, MessagePosition],
        subscription: str | None,
        incarnations: Mapping[str, str],
        since_ms: int | None = None,
    ) -> StreamOffset:
        ends = {topic: EntryPosition.before(first) for topic, first in starts.items()}
        return cls(ends, starts, {}, subscription, incarnations, since_ms)

    @property
    def is_initial(self) -> bool:
        """Whether nothing is included yet: the offset before the first batch."""
        return self.ends.keys() == self.starts.keys() and all(map(self.is_start, self.starts))

    def is_start(self, topic: str) -> bool:
        """Return whether nothing of the topic was read yet: it is at its start."""
        return topic in self.starts and self.ends.get(topic) == EntryPosition.before(self.starts[topic])

    def first_message(self, topic: str, start: StreamOffset) -> MessagePosition:
        """Return where the batch from `start` to this end begins in `topic`, one of `ends` (rule 2)."""
        if topic in self.starts:
            return self.starts[topic]
        if topic not in start.ends:
            raise BadOffsetError(f"the offsets of a batch do not say where {topic} begins", topic=topic)
        return start.ends[topic].next

    def moved_to(
        self,
        ends: Mapping[str, EntryPosition],
        *,
        cut: Mapping[str, int],
        found: Mapping[str, MessagePosition],
        incarnations: Mapping[str, str],
        gone: frozenset[str] = frozenset(),
    ) -> StreamOffset:
        """Return the end of the batch that starts here.

        `ends`: of the topics that moved; `found`: starts of topics that are new, or must still be recorded; `incarnations`: those
        that are new, or known for the first time.
        """
        waiting = {  # a start within a batch of messages, which `ends` cannot express
            topic: first for topic, first in self.starts.items() if first.batch_index >= 0 and self.is_start(topic)
        }
        starts = {**(self.starts if self.is_initial else waiting), **found}
        merged = {topic: end for topic, end in {**self.ends, **ends}.items() if topic not in gone}
        kept_starts = {topic: first for topic, first in starts.items() if topic in merged}
        known = {topic: each for topic, each in {**self.incarnations, **incarnations}.items() if topic in merged}
        return StreamOffset(merged, kept_starts, dict(cut), self.subscription, known, self.since_ms)

    def to_json(self) -> dict[str, Any]:
        """Rule 1."""
        document: dict[str, Any] = {}
        if self.cut:
            document["cut"] = {topic: int(self.cut[topic]) for topic in sorted(self.cut)}
        if self.starts:
            document["from"] = {topic: _numbers(self.starts[topic]) for topic in sorted(self.starts)}
        if self.incarnations:
            document["inc"] = {topic: self.incarnations[topic] for topic in sorted(self.incarnations)}
        if self.since_ms is not None:
            document["since"] = int(self.since_ms)
        if self.subscription is not None:
            document["sub"] = self.subscription
        document["t"] = {topic: [int(number) for number in self.ends[topic]] for topic in sorted(self.ends)}
        document["v"] = FORMAT
        return document

    @classmethod
    def from_json(cls, document: Any) -> StreamOffset:
        """Return the offset. Raises BadOffsetError for another format, or a document that is not ours."""
        if not isinstance(document, dict) or "v" not in document:
            raise BadOffsetError(f"this is not an offset of a Cepheid stream: {_short(document)}")
        number = document["v"]
        if number not in tuple(_KEYS):
            known = f"1 to {FORMAT}"
            raise BadOffsetError(
                f"the checkpoint has offsets of format {number!r}, this version of cepheid_spark knows formats {known}",
                found=number,
                known=known,
            )
        if unknown := sorted(document.keys() - _KEYS[number]):
            raise BadOffsetError(f"an offset of format {number} has no {', '.join(unknown)}: {_short(document)}")
        try:
            return cls(
                {topic: EntryPosition(*_whole(pair, 2, 2)) for topic, pair in document["t"].items()},
                {topic: MessagePosition(*_whole(place, 2, 3)) for topic, place in document.get("from", {}).items()},
                {topic: _whole([entries], 1, 1)[0] for topic, entries in document.get("cut", {}).items()},
                document.get("sub"),
                {topic: _text(each) for topic, each in document.get("inc", {}).items()},
                _whole([document["since"]], 1, 1)[0] if "since" in document else None,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadOffsetError(f"an offset of format {number} that cannot be read ({error}): {_short(document)}") from None


def _numbers(position: MessagePosition) -> list[int]:
    """Return the numbers, with the index within an entry only if there is one: a user's start may be inside a batch."""
    whole = [int(position.ledger_id), int(position.entry_id)]
    return whole if position.batch_index < 0 else [*whole, int(position.batch_index)]


def _whole(numbers: Any, at_least: int, at_most: int) -> list[int]:
    if not isinstance(numbers, list) or not at_least <= len(numbers) <= at_most:
        raise ValueError(f"{numbers!r} is not a position")
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= -1 for number in numbers):
        raise ValueError(f"{numbers!r} are not whole numbers from -1 on")
    return numbers


def _text(incarnation: Any) -> str:
    if not isinstance(incarnation, str) or not incarnation:
        raise ValueError(f"{incarnation!r} is not an incarnation")
    return incarnation


def _short(document: Any, limit: int = 200) -> str:
    text = repr(document)
    return text if len(text) <= limit else text[:limit] + "…"
