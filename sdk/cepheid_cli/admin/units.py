"""Durations, sizes, positions and times as people write them: 90s, 2h, 7d · 500MB, 10GB · 12:34 · 2026-05-01T12:00, -15m."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid.admin.bodies import MessageIdBody

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DURATION = re.compile(r"(\d+)([smhdw])")
_SIZE = re.compile(r"(\d+)(?:([BKMGT]?)(?:i?B)?)", re.IGNORECASE)
UNLIMITED = "unlimited"


class BadValueError(CepheidError):
    """A value on the command line is invalid."""


def duration_s(text: str) -> int:
    """Return a duration in seconds; `unlimited` is -1."""
    if text == UNLIMITED:
        return -1
    if (found := _DURATION.fullmatch(text)) is None:
        raise BadValueError(f"{text!r} is not a duration; write 90s, 15m, 2h, 7d, 1w or {UNLIMITED}")
    return int(found[1]) * _SECONDS[found[2]]


def size_bytes(text: str) -> int:
    """Return a size in bytes; `unlimited` is -1."""
    if text == UNLIMITED:
        return -1
    if (found := _SIZE.fullmatch(text)) is None:
        raise BadValueError(f"{text!r} is not a size; write 500MB, 10GB or {UNLIMITED}")
    return int(found[1]) * _BYTES[found[2].upper()]


def switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise BadValueError(f"{text!r} is neither on nor off")
    return text == "on"


def position(text: str) -> MessageIdBody:
    """Return LEDGER:ENTRY, earliest or latest as the API's message id."""
    if text == "earliest":
        return {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
    if text == "latest":
        return {"ledgerId": (1 << 63) - 1, "entryId": (1 << 63) - 1, "partitionIndex": -1}
    if (found := re.fullmatch(r"(\d+):(-?\d+)", text)) is None:
        raise BadValueError(f"{text!r} is not a position; write LEDGER:ENTRY, earliest or latest")
    return {"ledgerId": int(found[1]), "entryId": int(found[2]), "partitionIndex": -1}


def time_ms(text: str) -> int:
    """Return the milliseconds since 1970 of a date and time (in the local time zone unless it has one), or of an age (-15m)."""
    if text.startswith("-"):
        return int((datetime.now(UTC).timestamp() - duration_s(text[1:])) * 1000)
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise BadValueError(f"{text!r} is not a time; write 2026-05-01T12:00:00, with or without a zone, or -15m") from None


def pairs(texts: list[str]) -> dict[str, str]:
    """NAME=VALUE arguments."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise BadValueError(f"{text!r} is not NAME=VALUE")
        found[name] = value
    return found


def shown_bytes(count: Any) -> str:
    if not isinstance(count, int | float) or count < 0:
        return "-"
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"


def shown_duration(seconds: Any) -> str:
    if not isinstance(seconds, int | float) or seconds < 0:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < 2 * size:
            return f"{seconds:.0f} {unit}"
        seconds /= size
    return f"{seconds:.0f} d"


def counted(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def shown_time(ms: int) -> str:
    """Return a time in the local time zone."""
    return datetime.fromtimestamp(ms / 1000, UTC).astimezone().isoformat(" ", "seconds")
