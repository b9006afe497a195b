"""The interface of a planner, which knows the topics and where their history is stored, and what both planners share.

PlanSource ──open_planner──► Planner ──topics──► full names, partitions expanded ──plan──► HistoryPlan
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from cepheid_decode.errors import BadOptionError, NoSuchTopicError
from cepheid_decode.history import HistoryPlan
from cepheid_decode.positions import MessagePosition
from cepheid_decode.scan_request import TopicSelection
from cepheid_wire import InvalidTopicNameError, NamespaceName, TopicName

_PATTERN_PREFIX = re.compile(r"(?:(?P<domain>[a-z-]+)://)?(?:(?P<tenant>[^/]+)/(?P<namespace>[^/]+)/)?(?P<local>[^/]+)")
_MOST_NEAR_NAMES = 3


class Planner(Protocol):
    """Blocking; from any thread, one call at a time. Raises PlanUnavailableError when nobody answers."""

    def topics(self, selection: TopicSelection) -> list[str]:
        """Full names of topics and partitions that can be read, sorted. Raises NoSuchTopicError, BadOptionError."""

    def plan(self, topics: Sequence[str], *, schemas: bool = False) -> HistoryPlan:
        """A fresh snapshot, in the order of `topics`. Raises NoSuchTopicError."""

    def subscription_position(self, topic: str, subscription: str) -> MessagePosition:
        """The first entry that is not mark-deleted. Raises BadOptionError: the topic has no such subscription."""

    def deleted_ledger_end(self, ledger_id: int) -> int | None:
        """The last entry of a ledger that was trimmed, as long as its record is kept; None: nobody knows."""

    def gone_ledgers(self, topic: str, incarnation: str, ids: range) -> dict[int, int] | None:
        """Last entries of those of `ids` that were the topic's and had entries, as far as records tell: of what was deleted they
        are kept for a while. `ids`: without any that are in its chain. None: nobody knows, or these are too many to ask for."""

    def close(self) -> None: ...


def is_entries_of(custom: Mapping[str, str], topic: str, incarnation: str) -> bool:
    """`custom`: of a ledger's record. Cursors have ledgers, too."""
    asked = {"topic": topic, "incarnation": incarnation, "use": "entries"}
    return asked.items() <= custom.items()


def parse_topic(name: str) -> TopicName:
    """Raises BadOptionError: no name of a topic, or of one that has no history."""
    try:
        topic = TopicName.parse(name)
    except InvalidTopicNameError as error:
        raise BadOptionError(str(error), topic=name[:200]) from None
    if not topic.is_persistent:
        raise BadOptionError(f"{topic} is not persistent: it has no history to read", topic=str(topic))
    return topic


def expand(counts: Mapping[str, int], partitions: frozenset[int] | None) -> list[str]:
    """`counts`: numbers of partitions by topic. `partitions`: only these; a topic that is not partitioned has none of them."""
    names = {
        name: None
        for topic, count in counts.items()
        for index, name in _parts(topic, count)
        if partitions is None or index in partitions
    }
    return sorted(names, key=_in_order_of_partitions)


def expand_checked(counts: Mapping[str, int], selection: TopicSelection) -> list[str]:
    """Raises NoSuchTopicError for a partition that none of the topics has: fewer rows, or none, would hide it."""
    there = {index for topic, count in counts.items() for index, _ in _parts(topic, count)}
    absent = sorted((selection.partitions or frozenset()) - there)
    if counts and absent and selection.fail_on_missing:
        topic, most = max(counts.items(), key=lambda each: each[1])
        has = f"has {most}, from 0 to {most - 1}" if most else "is not partitioned"
        raise NoSuchTopicError(f"there is no partition {absent[0]}: {topic} {has}", topic=topic)
    return expand(counts, selection.partitions)


def _parts(topic: str, count: int) -> Iterator[tuple[int, str]]:
    """With their numbers. One that is not partitioned is its own only part, numbered as its name says."""
    name = TopicName.parse(topic)
    if count == 0:
        yield name.partition_index, topic
    for index in range(count):
        yield index, str(name.partition(index))


def _in_order_of_partitions(topic: str) -> tuple[str, int]:
    name = TopicName.parse(topic)
    return str(name.base), name.partition_index


def namespace_of_pattern(pattern: str) -> tuple[NamespaceName, re.Pattern[str]]:
    """Where a pattern looks, and the whole pattern over full names. Raises BadOptionError."""
    found = _PATTERN_PREFIX.fullmatch(pattern)
    if found is None or found["domain"] not in (None, "persistent"):
        forms = "persistent://tenant/namespace/REGEX, nor REGEX alone (of public/default)"
        raise BadOptionError(f"the pattern {pattern!r} does not read {forms}: slashes only there", value=pattern)
    try:
        namespace = NamespaceName.parse(f"{found['tenant'] or 'public'}/{found['namespace'] or 'default'}")
    except InvalidTopicNameError:
        raise BadOptionError(f"the pattern {pattern!r} must name its tenant and namespace as they are", value=pattern) from None
    try:
        return namespace, re.compile(f"{re.escape(f'persistent://{namespace}/')}(?:{found['local']})")
    except re.error as error:
        raise BadOptionError(f"the pattern {pattern!r} is no regular expression: {error}", value=pattern) from None


def no_such_topics(missing: Sequence[str], there: Iterable[str]) -> NoSuchTopicError:
    """`there`: names of the namespace, to find those that may have been meant."""
    near = difflib.get_close_matches(missing[0], list(there), _MOST_NEAR_NAMES)
    more = f", nor {len(missing) - 1} more" if len(missing) > 1 else ""
    meant = f"; there is {', '.join(near)}" if near else ""
    return NoSuchTopicError(f"topic {missing[0]} does not exist{more}{meant}", topics=list(missing[:10]))
