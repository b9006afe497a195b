"""Parses the texts of options: sizes, durations, times, lists. Errors name the option, the value and what is accepted.

64mb, 1gb, 4096                      sizes, in steps of 1024
500ms, 10s, 15m, 6h, 7d              durations; a bare number is seconds
1711929600000, 2024-04-01T00:00:00Z  times, as edge_words.py describes them
a,b or ["a","b"]                     lists
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cepheid_decode import BadOptionError
from cepheid_scan.edge_words import time_ms

T = TypeVar("T")
Parse = Callable[[str, str], T]
"""Parses an option's text, given its name."""

_SIZE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30, "t": 1 << 40}
_SIZE_UNITS |= {"tb": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_TIMES = "milliseconds since 1970, a date, ISO 8601 with its zone, such as 2024-04-01T00:00:00Z, or -6h"
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


def _with_unit(text: str, units: Mapping[str, T]) -> tuple[str, T] | None:
    """Return the number as written, and the value of its unit; None: the text is not a number with a unit."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([a-z]*)", text.strip().lower())
    return None if match is None or match[2] not in units else (match[1], units[match[2]])


def size(*, least: int = 1, most: int = 1 << 60) -> Parse[int]:
    def parse(name: str, text: str) -> int:
        if (found := _with_unit(text, _SIZE_UNITS)) is None:
            raise refuse(name, text, "a size such as 64mb, 1gb or a number of bytes")
        number, unit = found
        size_bytes = int(float(number) * unit) if "." in number else int(number) * unit
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
        if (found := _with_unit(text, _DURATION_UNITS)) is None:
            raise refuse(name, text, "a duration such as 500ms, 10s, 15m, 6h or 7d")
        seconds = float(found[0]) * found[1]
        if not least_s <= seconds <= most_s:
            raise refuse(name, text, f"a duration from {least_s:g} s to {most_s:g} s")
        return seconds

    return parse


def parse_time_ms(name: str, text: str) -> int:
    """Return milliseconds since 1970. A time without a zone is refused: the driver's zone is not the user's."""
    try:
        return time_ms(text)
    except BadOptionError as error:
        zone = " (the zone is missing)" if "zone is missing" in str(error) else ""
        raise refuse(name, text, f"{_TIMES}{zone}, between 1970 and 9999") from None


def parse_list(name: str, text: str) -> tuple[str, ...]:
    """Parse a comma-separated list, or a JSON list for values with commas. Neither the list nor its members may be empty."""
    accepted = 'a list: a,b,c or ["a","b","c"]'
    members: list[Any]
    if text.lstrip().startswith("["):
        try:
            members = json.loads(text)
        except (ValueError, RecursionError):  # the second: for deeply nested brackets
            raise refuse(name, text, accepted) from None
        if not all(isinstance(member, str | int) and not isinstance(member, bool) for member in members):
            raise refuse(name, text, accepted)
    else:
        members = [member.strip() for member in text.split(",")]
    if not members or "" in members:
        raise refuse(name, text, accepted)
    return tuple(str(member) for member in members)


def parse_numbers(name: str, text: str) -> frozenset[int]:
    """Parse `0,3,7-9`, runs with both ends included."""
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


def plain_name(name: str) -> str:
    """Return a name in the form for comparison: without case, dots and underscores."""
    return re.sub(r"[._]", "", name.lower())


class OptionTable:
    """The options of one use, by name.

    `refused` maps names that exist elsewhere, or do not exist yet, to the rest of the error `option NAME …`; `refused_prefixes`
    does so for all names with a prefix.
    """

    def __init__(
        self,
        parsers: Mapping[str, Parse[Any]],
        other_names: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
        refused_prefixes: Mapping[str, str] | None = None,
    ) -> None:
        self._parsers = parsers
        self._other_names = other_names or {}
        self._refused = refused or {}
        self._refused_prefixes = refused_prefixes or {}
        self._names = {plain_name(name): name for name in (*parsers, *self._other_names, *self._refused)}

    def parse(self, options: Mapping[str, str]) -> dict[str, Any]:
        """Return the values by their names here. Raises BadOptionError."""
        values: dict[str, Any] = {}
        texts: dict[str, tuple[str, str]] = {}  # by our name: the written name, and its text
        for written, text in options.items():
            name = self._known_name(written)
            if name in texts and texts[name][1] != text:
                raise BadOptionError(
                    f"options {texts[name][0]} and {written} are the same option with two values: give one of them"
                )
            texts[name] = (written, text)
            values[name] = self._parsers[name](name, text)  # Spark has lower-cased the user's name
        return values

    def _known_name(self, written: str) -> str:
        for prefix, why in self._refused_prefixes.items():
            if written.lower().startswith(prefix):
                raise BadOptionError(f"option {written} {why}", option=written)
        name = self._names.get(plain_name(written))
        if name is None:
            near = difflib.get_close_matches(plain_name(written), self._names, n=1, cutoff=0.5)
            advice = f"did you mean {self._names[near[0]]}?" if near else f"known are: {', '.join(self._parsers)}"
            raise BadOptionError(f"there is no option {written}; {advice}", option=written)
        if name in self._refused:
            raise BadOptionError(f"option {name} {self._refused[name]}", option=name)
        return self._other_names.get(name, name)
