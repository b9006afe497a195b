"""Starts and ends of ranges as people write them: in calls of `scan()`, after `--from` and `--to`.

earliest, latest              the ends of what is kept
2026-03-01T08:00:00Z          a publish time with its zone; also a datetime with one
2026-03-01                    the start of that day in UTC
1772352000000                 the same as a number: milliseconds since 1970
-90s, -15m, -6h, -7d          this long before now
12:345, 12:345:7              a position in an unpartitioned topic (or in the only partition that is read)
{topic: "12:345"}             positions by topic; other topics have no such edge
subscription:billing          the position of that subscription
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import SupportsIndex, TypeAlias

from cepheid_decode.errors import BadOptionError
from cepheid_decode.positions import MessagePosition
from cepheid_decode.scan_request import EARLIEST, LATEST, MAX_TIME_MS, Edge

EdgeWord: TypeAlias = "str | SupportsIndex | date | MessagePosition | Mapping[str, str | MessagePosition] | Edge"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_DIGITS = 15  # in a time
_SHOWN = 100  # characters of a refused value
_BEFORE_NOW = re.compile(r"-([0-9]{1,9})(s|m|h|d)")
_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SUBSCRIPTION = "subscription:"
_MOST_POSITION_COLONS = 2


def parse_edge(word: EdgeWord, topic: str | None = None) -> Edge:
    """Return the edge for a word. `topic`: that of positions without a topic. Raises BadOptionError."""
    match word:
        case Edge():
            return word
        case SupportsIndex() | date():
            return Edge(publish_time_ms=time_ms(word))
        case MessagePosition():
            return _position_edge({_one_topic(topic, _shown(word)): word})
        case Mapping():
            return _position_edge(word)
        case str():
            return _parse_text(word.strip(), topic)
    raise _no_place(word)


def _parse_text(text: str, topic: str | None) -> Edge:
    if text in ("earliest", "latest"):
        return EARLIEST if text == "earliest" else LATEST
    if text.startswith(_SUBSCRIPTION):
        return Edge(subscription=text.removeprefix(_SUBSCRIPTION))
    if _looks_like_position(text):
        return _position_edge({_one_topic(topic, text): MessagePosition.parse(text)})
    return Edge(publish_time_ms=time_ms(text))


def before_now_ms(text: str) -> int | None:
    """Return the time of a word like `-6h`, in milliseconds since 1970; None: the text is not such a time."""
    found = _BEFORE_NOW.fullmatch(text.strip())
    return None if found is None else max(0, time.time_ns() // 1_000_000 - int(found[1]) * _UNITS_MS[found[2]])


def time_ms(value: str | SupportsIndex | date) -> int:
    """Return the milliseconds since 1970 of a time as people write it (see above), rounded down. Raises BadOptionError."""
    moment: object = value
    if isinstance(value, str):
        text = value.strip()
        if text.isascii() and text.isdigit():
            moment = int(text) if len(text) <= _MOST_DIGITS else MAX_TIME_MS + 1
        elif (before := before_now_ms(text)) is not None:
            moment = before
        else:
            try:
                moment = _date_or_time(text)
            except ValueError:
                raise _no_place(value) from None
    if isinstance(moment, date):
        if not isinstance(moment, datetime):
            moment = datetime(moment.year, moment.month, moment.day, tzinfo=UTC)
        if moment.utcoffset() is None:
            shown = _shown(value)
            raise BadOptionError(
                f"'{shown}' is not accepted, the zone is missing: give the time with its zone, such as 2026-03-01T08:00:00Z",
                value=shown,
            )
        moment = (moment - _EPOCH) // timedelta(milliseconds=1)
    if isinstance(moment, bool) or not isinstance(moment, SupportsIndex):
        raise _no_place(value)
    try:
        milliseconds = operator.index(moment)  # also for numpy's integers
    except TypeError:  # of numpy's arrays
        raise _no_place(value) from None
    if not 0 <= milliseconds <= MAX_TIME_MS:
        shown = _shown(value)
        raise BadOptionError(f"'{shown}' is not a time of a message: it is before 1970, or after the year 9999", value=shown)
    return milliseconds


def _date_or_time(text: str) -> date:
    """Raises ValueError."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        return datetime.fromisoformat(text)


def _no_place(word: object) -> BadOptionError:
    shown = _shown(word)
    return BadOptionError(
        f"'{shown}' is not a place in a topic: write earliest, latest, a time like 2026-03-01T08:00:00Z or -6h, a position like "
        "12:345, or subscription:NAME",
        value=shown,
    )


def _shown(word: object) -> str:
    try:
        text = str(word)
    except ValueError:  # an integer with thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def full_name(topic: str) -> str:
    """Return the full name of a topic's short or full name. Raises InvalidTopicNameError."""
    from cepheid_wire import TopicName  # needs protobuf, which importing `scan` alone should not load

    return str(TopicName.parse(topic))


def _looks_like_position(text: str) -> bool:
    """Return whether the text looks like a position. A time has digits and colons, too, but also a dash or a T."""
    parts = text.split(":")
    return 1 <= len(parts) - 1 <= _MOST_POSITION_COLONS and all(part.removeprefix("-").isdigit() for part in parts)


def _one_topic(topic: str | None, word: str) -> str:
    if topic is None:
        raise BadOptionError(
            f"the position {word} does not name a topic, and several are read: give {{topic: position}}", value=word
        )
    return topic


def _position_edge(positions: Mapping[str, str | MessagePosition]) -> Edge:
    if not positions:  # it would be an end for all topics, and read nothing
        raise BadOptionError("which positions? the mapping names no topic: write earliest or latest, or {topic: position}")
    parsed: dict[str, MessagePosition] = {}
    for topic, position in positions.items():
        name = full_name(topic)
        if name in parsed:
            raise BadOptionError(f"the positions name {name} twice", topic=name)
        parsed[name] = MessagePosition.parse(_shown(position))
    return Edge(positions=tuple(sorted(parsed.items())))
