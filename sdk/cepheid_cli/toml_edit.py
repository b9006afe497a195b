"""Changes single settings in the text of a TOML file and preserves everything else: comments, order, manual additions.

    text, {"tls.plain_ports": True, "metadata_private": None} ──► text with the first set and the second removed

The result is parsed and compared with the intended settings. A file that does not have one setting per line
(dotted keys, inline tables) is refused and must be edited by hand.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from cepheid_ports import CepheidError

Value = bool | int | str | list[str]
"""Possible values. JSON and TOML write them in the same way."""

_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_.-]+)\s*\]")


class UneditableFileError(CepheidError):
    """A settings file does not have one setting per line."""


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def with_changes(text: str, changes: Mapping[str, Value | None], where: str) -> str:
    """Return the text with these settings by dotted names; None removes one. `where` names the file in errors.

    Raises UneditableFileError.
    """
    expected = flattened(_parsed(text, where))
    for name, value in changes.items():
        if value is None:
            expected.pop(name, None)
        else:
            expected[name] = value
    lines = text.splitlines()
    for name, value in changes.items():
        _change(lines, name, value)
    changed = "\n".join(lines) + "\n"
    try:
        right = flattened(tomllib.loads(changed)) == expected
    except tomllib.TOMLDecodeError:
        right = False
    if not right:
        wanted = ", ".join(
            f"{name} = {_written(value)}" if value is not None else f"without {name}" for name, value in changes.items()
        )
        raise UneditableFileError(
            f"{where} cannot be changed by this command: edit it by hand, so that it has {wanted}", path=where
        )
    return changed


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UneditableFileError(f"{where} is not TOML: {error}", path=where) from None


def _change(lines: list[str], dotted: str, value: Value | None) -> None:
    table, _, name = dotted.rpartition(".")
    first, end = _section(lines, table)
    if first is None:
        if value is not None:
            lines += ["", f"[{table}]", f"{name} = {_written(value)}"]
        return
    setting = re.compile(rf"\s*{re.escape(name)}\s*=")
    for start in range(first, end):
        if setting.match(lines[start]):
            lines[start : _end_of_value(lines, start, end)] = [] if value is None else [f"{name} = {_written(value)}"]
            return
    if value is not None:
        while end > first and not lines[end - 1].strip():
            end -= 1  # before the empty lines that separate the tables
        lines.insert(end, f"{name} = {_written(value)}")


def _section(lines: list[str], table: str) -> tuple[int | None, int]:
    """Return the lines of a table after its head, or those before the first head for ""; None: there is no such table."""
    heads = [(number, found.group(1)) for number, line in enumerate(lines) if (found := _TABLE.fullmatch(line.partition("#")[0]))]
    others = [number for number, line in enumerate(lines) if line.lstrip().startswith("[")]  # arrays of tables end one as well
    if not table:
        return 0, min(others, default=len(lines))
    for number, name in heads:
        if name == table:
            return number + 1, min((other for other in others if other > number), default=len(lines))
    return None, 0


def _end_of_value(lines: list[str], start: int, end: int) -> int:
    """Return the end of a setting's lines: an array may span several."""
    for stop in range(start + 1, end + 1):
        try:
            tomllib.loads("\n".join(lines[start:stop]))
            return stop
        except tomllib.TOMLDecodeError:
            continue
    return start + 1


def _written(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False)
