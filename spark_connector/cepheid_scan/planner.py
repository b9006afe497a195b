"""The interface of planners, which know topics and the location of their history, and code shared by both of them.

PlanSource ──open_planner──► Planner ──topics──► full names, partitions expanded ──plan──► HistoryPlan
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from cepheid_decode.errors import BadOptionError, NoSuchTopicError
from cepheid_decode.history import HistoryPlan
from cepheid_decode.positions import MessagePosition
from cepheid_decode.scan_request import TopicSelection
from cepheid_wire import InvalidTopicNameError, NamespaceName, TopicName

_PATTERN_PREFIX = re.compile(r"(?:(?P<domain>[a-z-]+)://)?(?:(?P<tenant>[^/]+)/(?P<namespace>[^/]+)/)?(?P<local>[^/]+)")
_MOST_NEAR_NAMES = 3
_AT_ONCE = 8  # requests of one plan, or topics that are searched

N = TypeVar("N")
R = TypeVar("R")


class Planner(Protocol):
    """A planner with blocking calls from any thread, one at a time. Raises PlanUnavailableError if nothing answers."""

    def topics(self, selection: TopicSelection) -> list[str]:
        """Return the full names of readable topics and partitions, sorted. Raises NoSuchTopicError, BadOptionError."""

    def plan(self, topics: Sequence[str], *, schemas: bool = False) -> HistoryPlan:
        """Return a fresh snapshot in the order of `topics`. Raises NoSuchTopicError."""

    def subscription_position(self, topic: str, subscription: str) -> MessagePosition:
        """Return the first entry that is not mark-deleted. Raises BadOptionError if the topic has no such subscription."""

    def deleted_ledger_end(self, ledger_id: int) -> int | None:
        """Return the last entry of a trimmed ledger while its record is kept; None: unknown."""

    def gone_ledgers(self, topic: str, incarnation: str, ids: range) -> dict[int, int] | None:
        """Return last entries of those of `ids` that belonged to the topic and had entries, as far as recorded.

        Records of deleted ledgers are kept for a while. `ids`: without those in its chain. None: unknown, or too many to request.
        """

    def close(self) -> None: ...


def parse_topic(name: str) -> TopicName:
    """Return the parsed name. Raises BadOptionError for an invalid name, or for a topic without a history."""
    try:
        topic = TopicName.parse(name)
    except InvalidTopicNameError as error:
        raise BadOptionError(str(error), topic=name[:200]) from None
    if not topic.is_persistent:
        raise BadOptionError(f"{topic} is not persistent: it has no history to read", topic=str(topic))
    return topic


def selected(
    selection: TopicSelection,
    counts_of: Callable[[Sequence[TopicName]], Mapping[str, int]],
    listed: Callable[[NamespaceName], Mapping[str, int]],
) -> list[str]:
    """Return the full names of all topics and partitions that are selected, sorted.

    Both functions return numbers of partitions by existing topic; 0: the topic is not partitioned. Raises
    NoSuchTopicError, also for a partition that no topic has: fewer rows, or none, would hide it.
    """
    if selection.pattern is not None:
        namespace, expression = namespace_of_pattern(selection.pattern)
        counts = {name: count for name, count in listed(namespace).items() if expression.fullmatch(name)}
        if not counts and selection.fail_on_missing:
            raise NoSuchTopicError(f"no topic matches {selection.pattern}", pattern=selection.pattern)
    else:
        names = list(dict.fromkeys(parse_topic(name) for name in selection.names))
        counts = dict(counts_of(names))
        missing = [str(name) for name in names if str(name) not in counts]
        if missing and selection.fail_on_missing:
            raise no_such_topics(missing, listed(parse_topic(missing[0]).namespace))
    parts = [part for topic, count in counts.items() for part in _parts(topic, count)]
    wanted = selection.partitions
    absent = sorted((wanted or frozenset()) - {index for index, _ in parts})
    if counts and absent and selection.fail_on_missing:
        topic, most = max(counts.items(), key=lambda each: each[1])
        has = f"has {most}, from 0 to {most - 1}" if most else "is not partitioned"
        raise NoSuchTopicError(f"there is no partition {absent[0]}: {topic} {has}", topic=topic)
    return sorted({name for index, name in parts if wanted is None or index in wanted}, key=_in_order_of_partitions)


def _parts(topic: str, count: int) -> Iterator[tuple[int, str]]:
    """Yield the parts with their numbers. An unpartitioned topic is its own only part, numbered as in its name."""
    name = TopicName.parse(topic)
    if count == 0:
        yield name.partition_index, topic
    for index in range(count):
        yield index, str(name.partition(index))


def _in_order_of_partitions(topic: str) -> tuple[str, int]:
    name = TopicName.parse(topic)
    return str(name.base), name.partition_index


def namespace_of_pattern(pattern: str) -> tuple[NamespaceName, re.Pattern[str]]:
    """Return the namespace of a pattern, and the whole pattern over full names. Raises BadOptionError."""
    found = _PATTERN_PREFIX.fullmatch(pattern)
    if found is None or found["domain"] not in (None, "persistent"):
        forms = "persistent://tenant/namespace/REGEX, nor REGEX alone (of public/default)"
        raise BadOptionError(f"the pattern {pattern!r} is not of the form {forms}: slashes only there", value=pattern)
    try:
        namespace = NamespaceName.parse(f"{found['tenant'] or 'public'}/{found['namespace'] or 'default'}")
    except InvalidTopicNameError:
        raise BadOptionError(f"the pattern {pattern!r} must name its tenant and namespace literally", value=pattern) from None
    try:
        return namespace, re.compile(f"{re.escape(f'persistent://{namespace}/')}(?:{found['local']})")
    except re.error as error:
        raise BadOptionError(f"the pattern {pattern!r} is not a regular expression: {error}", value=pattern) from None


def no_such_topics(missing: Sequence[str], there: Iterable[str]) -> NoSuchTopicError:
    """Return the error. `there`: names of the namespace, to suggest those that may have been meant."""
    near = difflib.get_close_matches(missing[0], list(there), _MOST_NEAR_NAMES)
    more = f", nor {len(missing) - 1} more" if len(missing) > 1 else ""
    meant = f"; similar: {', '.join(near)}" if near else ""
    return NoSuchTopicError(f"topic {missing[0]} does not exist{more}{meant}", topics=list(missing[:10]))


def in_threads(nouns: Sequence[N], ask: Callable[[N], R]) -> list[R]:
    """Return the answers in order, requesting several at a time. Raises the first failure."""
    if len(nouns) <= 1:
        return [ask(noun) for noun in nouns]
    with ThreadPoolExecutor(min(_AT_ONCE, len(nouns)), thread_name_prefix="cepheid-plan") as threads:
        return list(threads.map(ask, nouns))
