"""Loading of a role's settings: flags override the environment, which overrides files, which override defaults.

    file         a table is a TOML table                [dispatch]  max_permits = 5
    environment  a table's name, two underscores        CEPHEID_BROKER_DISPATCH__MAX_PERMITS=5
    flags        for some settings outside of tables    --port 6650
                    │
                    ▼  dotted names: renamed, refused, unknown?
                 one instance of the role's model, with its bounds

Names are checked here because pydantic-settings ignores misspelt environment variables.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

M = TypeVar("M", bound="BaseModel")

PAGE = "docs/settings.md"
_CLOSE = 0.75  # similarity from which a name is suggested: that of `prot` and `port`
_VERY_CLOSE = 0.9  # for names with their tables, whose long common parts prove little


class SettingsError(CepheidError):
    """A setting is unknown, missing or out of its bounds."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One documented field of a role's model. `name` is dotted: `dispatch.max_permits`."""

    name: str
    table: type[BaseModel]
    field: FieldInfo

    def allowed(self, number: Callable[[float], str] = str) -> str:
        """Describe the allowed values: `a whole number from 0 to 65535`."""
        schema = self.table.model_json_schema()["properties"][self.name.rpartition(".")[2]]
        return _allowed_by(schema, number)

    @property
    def is_list(self) -> bool:
        return getattr(self.field.annotation, "__origin__", None) is tuple


def tables_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the tables of settings in a role's model by dotted name."""
    from pydantic import BaseModel

    tables: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            tables[name] = nested
            tables |= {f"{name}.{inner}": table for inner, table in tables_of(nested).items()}
    return tables


def settings_of(model: type[BaseModel]) -> dict[str, Setting]:
    """Return all settings of a role, those in tables included, by dotted name."""
    tables = tables_of(model)
    found = {}
    for path, table in {"": model, **tables}.items():
        for name, field in table.model_fields.items():
            dotted = f"{path}.{name}".lstrip(".")
            if dotted not in tables:
                found[dotted] = Setting(dotted, table, field)
    return found


def variable_of(prefix: str, name: str) -> str:
    """Return the environment variable of a dotted name."""
    return prefix + name.replace(".", "__").upper()


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and its source. `prefix`: of the environment's names."""

    name: str
    value: Any
    source: str
    prefix: str | None = None

    def spelled(self, name: str) -> str:
        """Return a dotted name as written in this source."""
        return name if self.prefix is None else variable_of(self.prefix, name)

    @property
    def shown(self) -> str:
        return f"{self.spelled(self.name)!r} in {self.source}"


def load_settings(
    model: type[M],
    *,
    flags: Mapping[str, Any],
    environment_prefix: str,
    file: Path | Sequence[Path] | None = None,
    environment: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> M:
    """Return an instance of `model` from `flags` (None: not given), environment, TOML files and defaults.

    Later files override earlier ones.
    `refused` has names that users may mistake for settings, each with the reason. `renamed` maps
    old dotted names to new ones; an old name is accepted with a warning on standard error.
    Raises SettingsError with the source, the name, the value and what is allowed.
    """
    environment = os.environ if environment is None else environment
    known, tables = settings_of(model), tables_of(model)
    values: dict[str, _Given] = {}
    files = [file] if isinstance(file, Path) else list(file or ())
    for given in (
        *(each for one in files for each in _from_file(one)),
        *_from_environment(environment_prefix, environment),
        *_from_flags(flags),
    ):
        name = given.name
        if given.value == {} and name in tables:
            continue
        if refused is not None and name in refused:
            raise SettingsError(f"{given.shown} is not a setting: {refused[name]}")
        if name not in known and name not in (renamed or {}):
            if name in tables:
                example = given.spelled(next(inner for inner in known if inner.startswith(f"{name}.")))
                raise SettingsError(f"{given.shown} is a table of settings, not a value: set for example {example}")
            raise SettingsError(f"unknown setting {given.shown}{_suggestion(given, known, tables)}")
        values[name] = given
    _take_renamed(values, renamed or {})
    return _validated(model, known, values, environment_prefix)


def _from_file(file: Path) -> Iterator[_Given]:
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read settings file {file}: {error}") from None
    for name, value in _flat(content, ""):
        yield _Given(name, value, f"file {file}")


def _flat(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables. An empty table is a value: it may be one that does not exist."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _from_environment(prefix: str, environment: Mapping[str, str]) -> Iterator[_Given]:
    for variable, value in environment.items():
        if variable.startswith(prefix):
            name = variable[len(prefix) :].lower().replace("__", ".")
            yield _Given(name, value, "the environment", prefix)


def _from_flags(flags: Mapping[str, Any]) -> Iterator[_Given]:
    for name, value in flags.items():
        if value is not None:
            yield _Given(name, value, "the command line")


def _take_renamed(values: dict[str, _Given], renamed: Mapping[str, str]) -> None:
    for old, new in renamed.items():
        if old not in values:
            continue
        given = values.pop(old)
        if new in values:
            raise SettingsError(f"{given.shown} is the old name of {values[new].shown}: remove the old one")
        hint = f"call it {given.spelled(new)!r}, the next release does not accept the old name"
        print(f"cepheid: warning: setting {given.shown} was renamed: {hint}", file=sys.stderr)
        values[new] = given


def _validated(model: type[M], known: Mapping[str, Setting], values: Mapping[str, _Given], prefix: str) -> M:
    from pydantic import ValidationError

    tree: dict[str, Any] = {}
    for name, given in values.items():
        *path, last = name.split(".")
        table = tree
        for part in path:
            table = table.setdefault(part, {})
        table[last] = _items(given.value) if known[name].is_list and isinstance(given.value, str) else given.value
    try:
        settings = model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of several settings together
            raise SettingsError(first["msg"].removeprefix("Value error, ")) from None
        name = next(name for name in known if tuple(name.split(".")) == first["loc"][: name.count(".") + 1])
        if first["type"] == "missing":
            places = f"--{name.replace('_', '-')}, {variable_of(prefix, name)}, or the file of --config"
            raise SettingsError(f"setting {name} is missing: give it by {places}") from None
        raise _not_allowed(known[name], values[name]) from None
    for name, given in values.items():
        value = functools.reduce(getattr, name.split("."), settings)
        if isinstance(value, float) and not math.isfinite(value):
            raise _not_allowed(known[name], given)
    return settings


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _not_allowed(setting: Setting, given: _Given) -> SettingsError:
    place = given.source if given.prefix is None else f"{given.spelled(given.name)} in {given.source}"
    return SettingsError(f"setting {setting.name} must be {setting.allowed()}, got {given.value!r} from {place}")


def _allowed_by(schema: Mapping[str, Any], number: Callable[[float], str]) -> str:
    for alternative in schema.get("anyOf", ()):
        if alternative["type"] != "null":
            return _allowed_by(alternative, number)
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    kind = schema["type"]
    if kind == "array":
        items = ", ".join(schema["items"]["enum"]) if "enum" in schema["items"] else "texts"
        return f"a list of {items}, separated by commas in the environment"
    if kind == "string":
        return _allowed_text(schema)
    if kind == "boolean":
        return "true or false"
    return _allowed_number(schema, number)


def _allowed_number(schema: Mapping[str, Any], number: Callable[[float], str]) -> str:
    least, most, above = schema.get("minimum"), schema.get("maximum"), schema.get("exclusiveMinimum")
    what = "a number"
    if schema["type"] == "integer":
        what = "a whole number"
        if above is not None:
            least, above = max(above + 1, least or 0), None
    if above is not None:
        what += f" above {number(above)}"
        return what if most is None else f"{what} and at most {number(most)}"
    if least is not None:
        return f"{what} of at least {number(least)}" if most is None else f"{what} from {number(least)} to {number(most)}"
    return what if most is None else f"{what} of at most {number(most)}"


def _allowed_text(schema: Mapping[str, Any]) -> str:
    if schema.get("format") == "path":
        return "a path"
    if "pattern" in schema:
        return f"text that matches {schema['pattern']}"
    least, most = schema.get("minLength"), schema.get("maxLength")
    if most is not None:
        return f"text of {least or 0} to {most} characters"
    return "text that is not empty" if least else "text"


def _suggestion(given: _Given, known: Collection[str], tables: Collection[str]) -> str:
    """Suggest the intended name, as written in its source: in the same table, otherwise in another; or say where to look."""
    name, names = given.name, [*known, *tables]
    table, _, last = name.rpartition(".")
    last_parts = {candidate: candidate.rpartition(".")[2] for candidate in names}
    in_table = [candidate for candidate in names if candidate.rpartition(".")[0] == table]
    meant = (
        _nearest(last, {candidate: last_parts[candidate] for candidate in in_table})
        or [candidate for candidate in names if last_parts[candidate] == last]
        or _nearest(name.replace(".", "_"), {candidate: candidate.replace(".", "_") for candidate in known}, _VERY_CLOSE)
        or _nearest(last, last_parts)
    )
    if not meant:
        return f"; {PAGE} lists all settings"
    return f"; did you mean {' or '.join(repr(given.spelled(candidate)) for candidate in meant)}?"


def _nearest(name: str, spellings: Mapping[str, str], cutoff: float = _CLOSE) -> list[str]:
    """Return the candidates with the spelling nearest to `name`, if any is near."""
    near = difflib.get_close_matches(name, spellings.values(), n=1, cutoff=cutoff)
    return [candidate for candidate, spelling in spellings.items() if near and spelling == near[0]]
