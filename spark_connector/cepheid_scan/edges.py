"""Resolves starts and ends of a range to positions: for every topic the first message to read, and the first one not to read.

    publish time T ──► ledgers closed before T − skew are out ──► binary search over the entries of the others, one read each
                                                           start: after an entry that is older than T − skew
                                                           end:   at an entry that is not older than T + skew

Publish times come from clients' clocks, so they may fall by up to `skew_ms`. Then nothing before such a start is as new
as T, and nothing from such an end on is older, whichever entries were read. The rows between are filtered by their own times.
An unreadable entry gives no information: the next readable one is used, and those before it are in the range.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from cepheid_decode.errors import BadOptionError, BadRecordError, DamagedEntryError
from cepheid_decode.history import HistoryPlan, LedgerHistory, TopicHistory
from cepheid_decode.positions import MessagePosition
from cepheid_decode.scan_request import Edge
from cepheid_scan.planner import in_threads, parse_topic

_MOST_UNREADABLE = 100
"""Limit of unreadable entries in a row before a search by time gives up."""
_BEFORE_ALL = MessagePosition(0, 0)


class EntryProbe(Protocol):
    """Reads publish times of entries. Safe to call from several threads."""

    def publish_time_ms(self, history: TopicHistory, ledger: LedgerHistory, entry_id: int, about_ms: int) -> int | None:
        """Return the time, or another one on the same side of `about_ms`, which may be known without reading the entry.

        None: the entry is no longer kept. Raises BadRecordError or DamagedEntryError if it is kept but does not show its time.
        """


def resolve_edge(
    edge: Edge,
    plan: HistoryPlan,
    probe: EntryProbe,
    *,
    is_end: bool,
    skew_ms: int,
    subscription_position: Callable[[str, str], MessagePosition] | None = None,
) -> dict[str, MessagePosition]:
    """Return, by topic with partition, the first message to read, or with `is_end` the first one not to read.

    `subscription_position` is called for edges of that kind. Raises BadOptionError for a position in a topic that is not read.
    """
    if edge.publish_time_ms is not None:
        time_ms = edge.publish_time_ms
        search = _search_end if is_end else _search_start
        found = in_threads(plan.topics, lambda history: search(history, probe, time_ms, skew_ms))
        return {history.topic: position for history, position in zip(plan.topics, found, strict=True)}
    if edge.positions:
        return _given(edge, plan, is_end=is_end)
    if edge.subscription is not None:
        name, ask = edge.subscription, subscription_position
        if ask is None:
            raise BadOptionError(
                f"cannot resolve subscription {name!r}: no broker or metadata store is configured", subscription=name
            )
        places = in_threads(plan.topics, lambda history: ask(history.topic, name))
        return {history.topic: position for history, position in zip(plan.topics, places, strict=True)}
    whole = first_of if edge.earliest else end_of
    return {history.topic: whole(history) for history in plan.topics}


def first_of(history: TopicHistory) -> MessagePosition:
    """Return the position of the first message that is kept."""
    return MessagePosition(history.ledgers[0].ledger_id, 0) if history.ledgers else _BEFORE_ALL


def end_of(history: TopicHistory) -> MessagePosition:
    """Return the position after the last message."""
    if not history.ledgers:
        return _BEFORE_ALL
    last = history.ledgers[-1]
    return MessagePosition(last.ledger_id, last.last_entry_id + 1)


def _given(edge: Edge, plan: HistoryPlan, *, is_end: bool) -> dict[str, MessagePosition]:
    positions = {str(parse_topic(topic)): position for topic, position in edge.positions}
    names = {history.topic for history in plan.topics}
    if unknown := [topic for topic in positions if topic not in names]:
        read = ", ".join(sorted(names)[:5]) or "none"
        raise BadOptionError(
            f"a position of {unknown[0]} was given, which is not read (names are full, with partition; read are {read})",
            topic=unknown[0],
        )
    default = end_of if is_end else first_of
    return {history.topic: positions.get(history.topic) or default(history) for history in plan.topics}


class _Entries:
    """All entries of some ledgers, numbered consecutively."""

    def __init__(self, history: TopicHistory, ledgers: Sequence[LedgerHistory], probe: EntryProbe) -> None:
        self._history = history
        self._ledgers = [ledger for ledger in ledgers if ledger.last_entry_id >= 0]
        self._ends = list(accumulate(ledger.last_entry_id + 1 for ledger in self._ledgers))
        self._probe = probe

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def position(self, number: int) -> MessagePosition:
        ledger, entry_id = self._find(number)
        return MessagePosition(ledger.ledger_id, entry_id)

    def look(self, number: int, end: int, time_ms: int) -> tuple[int, bool]:
        """Return the first entry from `number` on that shows its time, and whether it is older; `end` and False if none before it
        does.

        A deleted entry counts as older than the kept ones.
        """
        for place in range(number, end):
            ledger, entry_id = self._find(place)
            try:
                published_ms = self._probe.publish_time_ms(self._history, ledger, entry_id, time_ms)
            except (BadRecordError, DamagedEntryError):
                if place - number >= _MOST_UNREADABLE:
                    raise
                continue
            return place, published_ms is None or published_ms < time_ms
        return end, False

    def _find(self, number: int) -> tuple[LedgerHistory, int]:
        place = bisect_right(self._ends, number)
        return self._ledgers[place], number - (self._ends[place - 1] if place else 0)


def _search_start(history: TopicHistory, probe: EntryProbe, time_ms: int, skew_ms: int) -> MessagePosition:
    kept = [ledger for ledger in history.ledgers if ledger.closed_at_ms is None or ledger.closed_at_ms >= time_ms - skew_ms]
    entries = _Entries(history, kept, probe)
    number, _ = _first_not_older(entries, time_ms - skew_ms)
    return entries.position(number) if number < len(entries) else end_of(history)


def _search_end(history: TopicHistory, probe: EntryProbe, time_ms: int, skew_ms: int) -> MessagePosition:
    """Return the end. A ledger begins when the previous one has been closed, so entries after a late close are late, too."""
    kept: list[LedgerHistory] = []
    for ledger in history.ledgers:
        kept.append(ledger)
        if ledger.closed_at_ms is not None and ledger.closed_at_ms >= time_ms + skew_ms:
            break
    entries = _Entries(history, kept, probe)
    _, number = _first_not_older(entries, time_ms + skew_ms)
    if number < len(entries):
        return entries.position(number)
    return MessagePosition(kept[-1].ledger_id, kept[-1].last_entry_id + 1) if kept else _BEFORE_ALL


def _first_not_older(entries: _Entries, time_ms: int) -> tuple[int, int]:
    """Return the number after an entry older than `time_ms` (or 0), and that of one that is not (or the end).

    Entries between the two are unreadable.
    """
    low, high = 0, len(entries)
    not_older = high
    while low < high:
        middle = (low + high) // 2
        place, is_older = entries.look(middle, high, time_ms)
        if is_older:
            low = place + 1
        else:
            not_older = place if place < high else not_older
            high = middle
    return low, not_older
