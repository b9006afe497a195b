"""Settings of a role: flags over environment over file over default; an unknown key is an error that names the nearest known one.

pydantic-settings lets a misspelt environment variable pass in silence, so names are compared here.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")


class SettingsError(CepheidError):
    """A setting is unknown or out of its bounds."""


def load_settings(
    model: type[M],
    *,
    flags: Mapping[str, Any],
    environment_prefix: str,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> M:
    """An instance of `model` from `flags` (None = not given), `PREFIX_FIELD` variables, a TOML file and defaults.

    `refused`: names that are no settings although somebody may take them for some, and why.
    Raises SettingsError naming the source and the field.
    """
    from pydantic import ValidationError

    known = list(model.model_fields)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, entries in (
        (f"file {file}", _from_file(file)),
        ("the environment", _from_environment(environment_prefix, os.environ if environment is None else environment)),
        ("the command line", {name: value for name, value in flags.items() if value is not None}),
    ):
        for name, value in entries.items():
            if refused is not None and name in refused:
                raise SettingsError(f"{name!r} in {source} is no setting: {refused[name]}")
            if name not in known:
                raise SettingsError(f"unknown setting {name!r} in {source}{_suggest(name, known)}")
            values[name], sources[name] = value, source
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        name, source = ".".join(path) or "?", sources.get(path[0], "defaults") if path else "defaults"
        if first["type"] == "missing":
            flag, variable = name.replace("_", "-"), environment_prefix + "_".join(path).upper()
            raise SettingsError(f"setting {name} is missing: --{flag}, {variable}, or the file of --config") from None
        if not path:
            raise SettingsError(first["msg"].removeprefix("Value error, ")) from None
        if first["type"] == "extra_forbidden":
            raise SettingsError(f"unknown setting {name!r} in {source}{_suggest(path[-1], _fields_at(model, path[:-1]))}") from None
        raise SettingsError(f"setting {name} = {first['input']!r} from {source}: {first['msg']}") from None


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Names of the settings in the table `path` of `model`."""
    for part in path:
        nested = model.model_fields[part].annotation
        assert isinstance(nested, type), f"{part} is no table of settings"
        model = nested
    return list(model.model_fields)


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read settings file {file}: {error}") from None


def _from_environment(prefix: str, environment: Mapping[str, str]) -> dict[str, str]:
    return {name[len(prefix) :].lower(): value for name, value in environment.items() if name.startswith(prefix)}


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
