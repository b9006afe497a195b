"""From the texts of options to values: sizes, durations, times, lists. A refusal names the option, the value and what is accepted.

64mb, 1gb, 4096                      sizes, in steps of 1024
500ms, 10s, 15m, 6h, 7d              durations; a bare number is seconds
1711929600000, 2024-04-01T00:00:00Z  times: ms since 1970, or ISO 8601 with its zone
a,b or ["a","b"]                     lists
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from cepheid_decode.scan_request import MAX_TIME_MS
from cepheid_scan import BadOptionError

T = TypeVar("T")
Parse = Callable[[str, str], T]
"""Of an option's name and its text."""

_SIZE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30, "t": 1 << 40}
_SIZE_UNITS |= {"tb": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DURATION_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def refuse(name: str, text: str, accepted: str) -> BadOptionError:
    shown = text if len(text) <= 100 else text[:100] + "…"
    return BadOptionError(f"option {name}: '{shown}' is not accepted; give {accepted}", option=name, value=shown)


def parse_text(name: str, text: str) -> str:
    if not text.strip():
        raise refuse(name, text, "a text that is not empty")
    return text.strip()


def parse_bool(name: str, text: str) -> bool:
    match text.strip().lower():
        case "true" | "yes" | "1" | "on":
            return True
        case "false" | "no" | "0" | "off":
            return False
    raise refuse(name, text, "true or false")


def whole_number(*, least: int, most: int = 1 << 62) -> Parse[int]:
    def parse(name: str, text: str) -> int:
        accepted = f"a whole number from {least}" + (f" to {most}" if most < 1 << 62 else "")
        digits = text.strip().replace("_", "")
        if not re.fullmatch(r"-?[0-9]{1,19}", digits) or not least <= int(digits) <= most:
            raise refuse(name, text, accepted)
        return int(digits)

    return parse


def size(*, least: int = 1, most: int = 1 << 60) -> Parse[int]:
    def parse(name: str, text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([a-z]*)", text.strip().lower())
        if match is None or match[2] not in _SIZE_UNITS:
            raise refuse(name, text, "a size such as 64mb, 1gb or a number of bytes")
        size_bytes = int(float(match[1]) * _SIZE_UNITS[match[2]]) if "." in match[1] else int(match[1]) * _SIZE_UNITS[match[2]]
        if not least <= size_bytes <= most:
            raise refuse(name, text, f"a size from {show_size(least)} to {show_size(most)}")
        return size_bytes

    return parse


def show_size(size_bytes: int) -> str:
    for unit, factor in (("tb", 1 << 40), ("gb", 1 << 30), ("mb", 1 << 20), ("kb", 1 << 10)):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes} bytes"


def duration(*, least_s: float = 0.0, most_s: float = 10 * 365 * 86400.0) -> Parse[float]:
    def parse(name: str, text: str) -> float:
        match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-z]*)", text.strip().lower())
        if match is None or match[2] not in _DURATION_UNITS:
            raise refuse(name, text, "a duration such as 500ms, 10s, 15m, 6h or 7d")
        seconds = float(match[1]) * _DURATION_UNITS[match[2]]
        if not least_s <= seconds <= most_s:
            raise refuse(name, text, f"a duration from {least_s:g} s to {most_s:g} s")
        return seconds

    return parse


def parse_time_ms(name: str, text: str) -> int:
    """Milliseconds since 1970. A time without its zone is refused: the driver's zone is not the user's."""
    accepted = "milliseconds since 1970, or ISO 8601 with its zone, such as 2024-04-01T00:00:00Z or 2024-04-01T02:00:00+02:00"
    if re.fullmatch(r"[0-9]{1,18}", text.strip()):
        at_ms = int(text)
    else:
        try:
            moment = datetime.datetime.fromisoformat(text.strip())
        except ValueError:
            raise refuse(name, text, accepted) from None
        if moment.tzinfo is None:
            raise refuse(name, text, accepted + " (the zone is missing)")
        delta = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        at_ms = delta // datetime.timedelta(milliseconds=1)
    if not 0 <= at_ms <= MAX_TIME_MS:
        raise refuse(name, text, accepted + ", between 1970 and 9999")
    return at_ms


def parse_list(name: str, text: str) -> tuple[str, ...]:
    """Comma separated, or a JSON list for values that have commas in them. Neither empty nor with empty members."""
    accepted = 'a list: a,b,c or ["a","b","c"]'
    members: list[Any]
    if text.lstrip().startswith("["):
        try:
            members = json.loads(text)
        except (ValueError, RecursionError):  # the second: of brackets within brackets
            raise refuse(name, text, accepted) from None
        if not all(isinstance(member, str | int) and not isinstance(member, bool) for member in members):
            raise refuse(name, text, accepted)
    else:
        members = [member.strip() for member in text.split(",")]
    if not members or "" in members:
        raise refuse(name, text, accepted)
    return tuple(str(member) for member in members)


def parse_numbers(name: str, text: str) -> frozenset[int]:
    """`0,3,7-9`: both ends of a run included."""
    accepted = "numbers and runs of them, such as 0,3,7-9"
    numbers: set[int] = set()
    for part in parse_list(name, text):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise refuse(name, text, accepted)
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)


def one_of(*choices: str) -> Parse[str]:
    def parse(name: str, text: str) -> str:
        if text.strip().lower() not in choices:
            raise refuse(name, text, " or ".join(choices))
        return text.strip().lower()

    return parse


def address(*schemes: str) -> Parse[str]:
    def parse(name: str, text: str) -> str:
        shape = " or ".join(f"{scheme}://host:port" for scheme in schemes)
        if not re.fullmatch(rf"({'|'.join(map(re.escape, schemes))})://[^\s/]+(/\S*)?", text.strip()):
            raise refuse(name, text, shape)
        return text.strip()

    return parse


def parse_regex(name: str, text: str) -> str:
    try:
        re.compile(parse_text(name, text))
    except re.error as error:
        raise refuse(name, text, f"persistent://tenant/namespace/REGEX, a regular expression of its names ({error})") from None
    return text.strip()
