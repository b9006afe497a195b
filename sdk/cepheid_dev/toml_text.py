"""Settings as a TOML file: tables in tables, numbers, strings, booleans, lists of those."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def toml_text(settings: Mapping[str, Any]) -> str:
    return "".join(f"{line}\n" for line in _lines(settings, ()))


def _lines(settings: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    tables = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    for name, value in settings.items():
        if name not in tables:
            yield f"{_text(name)} = {_text(value)}"
    for name, table in tables.items():
        inner = (*path, name)
        yield f"[{'.'.join(_text(part) for part in inner)}]"
        yield from _lines(table, inner)


def _text(value: Any) -> str:
    """Return a value in JSON's form, which is also TOML's, except for DEL, which TOML does not accept."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
