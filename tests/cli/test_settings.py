"""Every documented setting of every role can be given from a file, the environment, and its flag; docs/settings.md has them all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from cepheid_broker.settings import RENAMED
from cepheid_cli import secure
from cepheid_cli.app import app
from cepheid_cli.secured_cluster import NotSecuredError
from cepheid_cli.settings_loader import Setting, load_settings, settings_of, tables_of, variable_of
from cepheid_cli.settings_page import ROLES, RolePage, flags_of, settings_page
from cepheid_dev.toml_text import toml_text

ROOT = Path(__file__).parents[2]
EVERY_SETTING = [(role, name) for role in ROLES for name in settings_of(role.model)]
SAMPLES: dict[str, Any] = {
    "metadata": "zk://127.0.0.1:2182/elsewhere",
    "write_quorum": 2,  # at most the ensemble size
    "admin_allowed_hosts": ["admin.example.org", ".svc.cluster.local"],
    "host": "0.0.0.0",
    "bookie_host": "10.1.2.3",
    "http_host": "::1",
    "advertised_host": "broker-1.example.org",
    "broker_id": "broker-1",
    "bookie_id": "bookie-1",
    "name": "repair-1",
    "rack": "east",
    **{f"tls.{name}": "tls.pem" for name in ("certificate_file", "key_file", "ca_file", "client_ca_file", "crl")},
    **{f"tls.own_{name}": "own.pem" for name in ("certificate_file", "key_file")},
    **{f"authentication.{name}": ["a.key", "b=b.key"] for name in ("secret_keys", "public_keys")},
    **{f"authentication.{name}": "some" for name in ("role_claim", "audience", "issuer", "passwords_file", "anonymous_role")},
    "authentication.own_token_file": "broker.token",
    **{f"authentication.oidc.{name}": "some" for name in ("role_claim", "ca_file")},
    "authentication.oidc.issuers": ["https://login.example.org"],
    "authentication.oidc.audiences": ["cepheid"],
    "audit.file": "audit.log",
    **{f"authorization.{name}_roles": ["some", "other"] for name in ("super_user", "proxy", "peer", "monitoring")},
    **{f"tls.own_{name}": "own.pem" for name in ("certificate_file", "key_file")},
    **{f"authentication.oidc.{name}": ["https://login.example.org", "other"] for name in ("issuers", "audiences")},
    **{f"authentication.oidc.{name}": "some" for name in ("role_claim", "ca_file")},
    "metadata_auth_file": "metadata.auth",
    **{f"{table}.{name}": ["a", "b"] for table in ("access", "bookie_access") for name in ("cluster_roles", "reader_roles")},
    "tiered.url": "s3://archive/cepheid?region=eu-west-1",
}
"""Text of a certain form, and what has to fit to other settings. All else follows from the type and the bounds."""


@cache
def schema_of(table: type[BaseModel]) -> dict[str, Any]:
    return table.model_json_schema()


def another_value(setting: Setting) -> Any:
    """One that is allowed and not the default."""
    if setting.name in SAMPLES:
        return SAMPLES[setting.name]
    schema = schema_of(setting.table)["properties"][setting.name.rpartition(".")[2]]
    schema = next((part for part in schema.get("anyOf", ()) if part["type"] != "null"), schema)
    default = setting.field.default
    match schema["type"]:
        case "boolean":
            return not default
        case "array":
            return schema["items"]["enum"][:2]
        case "string" if "enum" in schema:
            return next(choice for choice in schema["enum"] if choice != default)
        case "string":
            assert schema["format"] == "path", f"{setting.name} needs a sample"
            return "elsewhere"
        case "number":
            return default / 2
    value = 1 if default is None else default + 1
    return value if value <= schema.get("maximum", value) else default - 1


def text_of(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)


def load(role: RolePage, tmp_path: Path, *, table: dict[str, Any] | None = None, **sources: Any) -> BaseModel:
    """With what must be given, in a file."""
    file = tmp_path / "settings.toml"
    needed = {name: SAMPLES[name] for name, setting in settings_of(role.model).items() if setting.field.is_required()}
    file.write_text(toml_text(needed | (table or {})))
    return load_settings(
        role.model, **{"flags": {}, "environment": {}, **sources}, environment_prefix=role.prefix, file=file, renamed=RENAMED
    )


def flat(model: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def assert_only_this_was_set(before: dict[str, Any], settings: BaseModel, name: str, value: Any) -> None:
    after = dict(flat(settings))
    expected = tuple(value) if isinstance(value, list) else Path(value) if isinstance(after[name], Path) else value
    assert after == {**before, name: expected}
    assert name == "metadata" or before[name] != expected, f"nothing is tested with the default of {name}"


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.command)
def test_each_can_be_set_from_a_file_and_from_the_environment(role: RolePage, tmp_path: Path) -> None:
    before = dict(flat(load(role, tmp_path)))
    for name, setting in settings_of(role.model).items():
        value = another_value(setting)
        table: Any = value
        for part in reversed(name.split(".")):
            table = {part: table}
        assert_only_this_was_set(before, load(role, tmp_path, table=table), name, value)
        variables = {variable_of(role.prefix, name): text_of(value)}
        assert_only_this_was_set(before, load(role, tmp_path, environment=variables), name, value)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.command)
def test_each_flag_reaches_its_setting(role: RolePage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[dict[str, Any], list[Path]]] = []

    def run(flags: dict[str, Any], config: list[Path], **_: Any) -> None:
        called.append((flags, config))

    monkeypatch.setattr(f"cepheid_cli.{role.command}.run_{role.command}", run)
    before = dict(flat(load(role, tmp_path)))
    for name, flag in flags_of(role.command).items():
        called.clear()
        value = another_value(settings_of(role.model)[name])
        outcome = CliRunner().invoke(app, [role.command, flag, text_of(value), "--config", "some.toml"])
        assert outcome.exit_code == 0, (flag, outcome.output)
        ((flags, config),) = called
        assert config == [Path("some.toml")]
        assert_only_this_was_set(before, load(role, tmp_path, flags=flags), name, value)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.command)
def test_a_secured_directory_gives_settings_that_config_outweighs(
    role: RolePage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[Path]] = []
    monkeypatch.setattr(f"cepheid_cli.{role.command}.run_{role.command}", lambda _, config, **__: called.append(config))
    refused = CliRunner().invoke(app, [role.command, "--secure", str(tmp_path)])
    assert isinstance(refused.exception, NotSecuredError)
    assert "cepheid secure init" in str(refused.exception)
    secure.init(tmp_path)
    assert CliRunner().invoke(app, [role.command, "--secure", str(tmp_path), "--config", "more.toml"]).exit_code == 0
    ((from_secure, given),) = called
    assert given == Path("more.toml")
    required = tmp_path / "required.toml"
    required.write_text(
        toml_text({name: SAMPLES[name] for name, found in settings_of(role.model).items() if found.field.is_required()})
    )
    files = [from_secure, required]
    loaded: Any = load_settings(role.model, flags={}, environment={}, environment_prefix=role.prefix, file=files)
    assert loaded.tls.enabled
    more = tmp_path / "more.toml"
    more.write_text(toml_text({"tls": {"ca_file": "other.pem"}}))
    again: Any = load_settings(role.model, flags={}, environment={}, environment_prefix=role.prefix, file=[*files, more])
    assert again.tls == loaded.tls.model_copy(update={"ca_file": "other.pem"})


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.command)
def test_what_must_be_given_has_a_flag_of_its_name(role: RolePage) -> None:
    """An error about a missing setting says so."""
    for name, setting in settings_of(role.model).items():
        if setting.field.is_required():
            assert flags_of(role.command)[name] == f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.command)
def test_a_table_has_the_defaults_of_its_own_type(role: RolePage) -> None:
    """A file that gives one setting of a table changes nothing else in it."""
    for name, field in role.model.model_fields.items():
        if name in tables_of(role.model):
            assert field.default == tables_of(role.model)[name](), name


def test_old_names_lead_to_settings_and_are_none_themselves() -> None:
    for role in ROLES[:2]:
        assert RENAMED.keys().isdisjoint(settings_of(role.model))
        assert set(RENAMED.values()) <= settings_of(role.model).keys()


@pytest.mark.page
def test_every_setting_is_read_by_something() -> None:
    """By its name, at least: a setting that nothing reads cannot do what its description says."""
    folders = ("core", "bookie", "tiered_storage", "broker_service", "sdk")
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    read = {node.attr for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert [name for _, name in EVERY_SETTING if name.rpartition(".")[2] not in read] == []


def test_every_setting_is_described_and_names_others_as_they_are() -> None:
    known = {name for _, name in EVERY_SETTING}
    for role, name in EVERY_SETTING:
        text = settings_of(role.model)[name].field.description or ""
        assert text.endswith("."), name
        named = [word for word in re.findall(r"`([a-z0-9.]+_[a-z0-9_.]+)`", text) if not word.startswith("cepheid_")]
        assert set(named) <= known, name


@pytest.mark.page
def test_the_page_of_settings_is_what_the_models_say() -> None:
    page = ROOT / "docs/settings.md"
    how = "docs/settings.md is not what the models say; run: python -m cepheid_cli.settings_page docs/settings.md"
    assert page.read_text() == settings_page(), how
