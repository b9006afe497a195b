"""Writes docs/settings.md, all settings of all roles: `python -m cepheid_cli.settings_page docs/settings.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer.main

from cepheid_broker.settings import RENAMED, BrokerRoleSettings
from cepheid_broker.standalone import StandaloneSettings
from cepheid_cli.settings_loader import Setting, settings_of, tables_of
from cepheid_recovery.roles import AutoRecoverySettings, BookieNodeSettings

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class RolePage:
    """A role on the page. `command` is the word after `cepheid`."""

    command: str
    title: str
    model: type[BaseModel]

    @property
    def prefix(self) -> str:
        return f"CEPHEID_{self.command.upper()}_"


ROLES = (
    RolePage("standalone", "A whole cluster in one process", StandaloneSettings),
    RolePage("broker", "A broker of a cluster", BrokerRoleSettings),
    RolePage("bookie", "A bookie of a cluster", BookieNodeSettings),
    RolePage("autorecovery", "Automatic repair in a process of its own", AutoRecoverySettings),
)

_INTRODUCTION = """\
# Settings

<!-- Generated from the models that the processes read: python -m cepheid_cli.settings_page docs/settings.md -->

All settings of `cepheid standalone`, `cepheid broker`, `cepheid bookie` and `cepheid autorecovery`. Each has a default and can be
given in up to three ways. A flag wins over the environment, the environment over the file.

- **Flag**, for settings that have one: `cepheid broker --port 7000`.
- **Environment variable**: the role, then the name in capital letters, with two underscores after the name of a table.
  `CEPHEID_BROKER_PORT=7000`, `CEPHEID_BROKER_DISPATCH__MAX_PERMITS=5000`. A list is separated by commas.
- **TOML file** that `--config` names: `port = 7000`, and below a line `[dispatch]` the line `max_permits = 5000`.

A name that does not exist and a value that is not allowed are errors when the process starts. Nothing can be changed while it runs.
`GET /admin/v2/brokers/configuration/runtime` shows the settings with which a broker runs.

A name that ends in `_bytes` is a size in bytes, in `_bytes_s` a rate in bytes per second, in `_s` a time in seconds, in `_min`
minutes, in `_mb` megabytes (2^20 bytes). The units in the tables below are for reading: a file has `tail_cache_bytes = 134217728`
for 128 MiB.
"""

_HEAD = ("| setting | default | allowed | meaning |", "|---|---|---|---|")
_HEAD_WITH_FLAGS = ("| setting | default | allowed | flag | meaning |", "|---|---|---|---|---|")
_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_UNITS = {
    "_bytes_s": tuple((size, f"{unit}/s") for size, unit in _BYTES),
    "_bytes": _BYTES,
    "_s": ((86400, "d"), (3600, "h"), (1, "s")),
}


def settings_page() -> str:
    """Return the text of docs/settings.md."""
    return "\n".join(_lines()) + "\n"


def flags_of(command: str) -> dict[str, str]:
    """Return the flags of a role, by the name of their setting."""
    from cepheid_cli.app import app
    from cepheid_cli.role_commands import NOT_SETTINGS

    parameters = typer.main.get_group(app).commands[command].params
    return {parameter.name: parameter.opts[0] for parameter in parameters if parameter.name not in (None, "help", *NOT_SETTINGS)}


def default_of(setting: Setting) -> str:
    """Return a default in readable form: `64 MiB`."""
    if setting.field.is_required():
        return "required"
    value = setting.field.default
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(value) or "empty"
    return _number(setting.name, value) if isinstance(value, int | float) else f"`{value}`"


def _number(name: str, value: float) -> str:
    for suffix, units in _UNITS.items():
        if name.endswith(suffix) and value > 0:
            size, unit = next((unit for unit in units if value % unit[0] == 0), units[-1])
            return f"{value / size:g} {unit}"
    return f"{value:,}" if value >= 10_000 and not name.endswith("port") else f"{value:g}"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    tables: dict[tuple[str, type[BaseModel]], list[str]] = {}
    """Tables with their roles; two roles may have different tables of one name."""
    for role in ROLES:
        for path, table in tables_of(role.model).items():
            tables.setdefault((path, table), []).append(role.command)
    names = [path for path, _ in tables]
    titles = {
        key: key[0] if names.index(key[0]) == place else f"{key[0]} of {roles[0]}"
        for place, (key, roles) in enumerate(tables.items())
    }
    for role in ROLES:
        yield f"## cepheid {role.command}"
        yield f"{role.title}. Environment variables begin with `{role.prefix}`."
        yield ""
        yield from _HEAD_WITH_FLAGS
        flags = flags_of(role.command)
        for setting in settings_of(role.model).values():
            if "." not in setting.name:
                yield _row(setting, f"`{flags[setting.name]}`" if setting.name in flags else "")
        yield ""
        mine = (titles[key] for key, roles in tables.items() if role.command in roles)
        yield f"Tables: {_listing(f'[{title}](#{_anchor(title)})' for title in mine)}."
        yield ""
    for (path, table), roles in tables.items():
        yield f"## {titles[path, table]}"
        yield f"{(table.__doc__ or '').strip()} Used by {_listing(f'`cepheid {command}`' for command in roles)}."
        yield f"Defined in `{table.__module__}.{table.__name__}`."
        yield ""
        yield from _HEAD
        for name, field in table.model_fields.items():
            if f"{path}.{name}" not in names:  # a table within the table has its own section
                yield _row(Setting(f"{path}.{name}", table, field))
        yield ""
    yield "## Renamed settings"
    yield "This release accepts the old names with a warning. The next one does not."
    yield ""
    yield "| old name | new name |"
    yield "|---|---|"
    for old, new in RENAMED.items():
        yield f"| `{old}` | `{new}` |"


def _anchor(title: str) -> str:
    return title.replace(" ", "-").replace(".", "")


def _row(setting: Setting, *cells: str) -> str:
    allowed = setting.allowed(lambda value: _number(setting.name, value))
    cells = (f"`{setting.name}`", default_of(setting), allowed, *cells, setting.field.description or "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _listing(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_page())
