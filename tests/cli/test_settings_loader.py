"""Where settings come from, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from cepheid_cli.settings_loader import SettingsError, load_settings


class Inner(BaseModel, frozen=True, extra="forbid"):
    depth: int = Field(1, gt=0)


class Table(BaseModel, frozen=True, extra="forbid"):
    keepalive_s: float = Field(30.0, gt=0)
    max_consumers: int = Field(10, ge=1, le=99)
    kinds: tuple[Literal["a", "b"], ...] = ()
    inner: Inner = Inner()


class Other(BaseModel, frozen=True, extra="forbid"):
    max_consumers: int = 5
    allowed: bool = True


class Example(BaseModel, frozen=True, extra="forbid"):
    connection: Table = Table()
    other: Other = Other()
    port: int = Field(6650, ge=0, le=65535)
    host: str = "127.0.0.1"
    rack: str | None = Field(None, min_length=1, max_length=9)
    data_dir: Path = Path("data")


PREFIX = "CEPHEID_EXAMPLE_"


def load(tmp_path: Path, *, flags: dict[str, object] | None = None, env: dict[str, str] | None = None, text: str = "") -> Example:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return load_settings(
        Example,
        flags=flags or {},
        environment_prefix=PREFIX,
        file=file,
        environment={PREFIX + name: value for name, value in (env or {}).items()} | {"OTHER": "x"},
        refused={"accept_loss": "one start only"},
        renamed={"other": "other.allowed", "connection.keepalive": "connection.keepalive_s"},
    )


def refusal(tmp_path: Path, **given: Any) -> str:
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, **given)
    return str(refused.value)


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    env = {"PORT": "2", "HOST": "env"}
    settings = load(tmp_path, flags={"port": 3, "host": None}, env=env, text='port = 1\nhost = "file"\ndata_dir = "d"')
    assert (settings.port, settings.host, settings.data_dir) == (3, "env", Path("d"))


def test_sources_may_each_give_a_part_of_a_table(tmp_path: Path) -> None:
    env = {"CONNECTION__KEEPALIVE_S": "5", "CONNECTION__INNER__DEPTH": "3"}
    settings = load(tmp_path, env=env, text="[connection]\nkeepalive_s = 4\nmax_consumers = 7\n[other]")
    assert settings.connection == Table(keepalive_s=5, max_consumers=7, inner=Inner(depth=3))


def test_a_list_is_separated_by_commas_in_the_environment(tmp_path: Path) -> None:
    assert load(tmp_path, env={"CONNECTION__KINDS": "a, b"}).connection.kinds == ("a", "b")
    assert load(tmp_path, env={"CONNECTION__KINDS": ""}, text='[connection]\nkinds = ["a"]').connection.kinds == ()
    said = refusal(tmp_path, env={"CONNECTION__KINDS": "a,c"})
    assert "setting connection.kinds must be a list of a, b" in said
    assert "got 'a,c' from CEPHEID_EXAMPLE_CONNECTION__KINDS in the environment" in said


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("prot", "port"),
        ("connection.keepalve_s", "connection.keepalive_s"),
        ("conection.keepalive_s", "connection.keepalive_s"),
        ("keepalive_s", "connection.keepalive_s"),
        ("other.keepalive_s", "connection.keepalive_s"),
        ("connection_keepalive_s", "connection.keepalive_s"),
        ("connection.inner.deep", "connection.inner.depth"),
        ("othr", "other"),
    ],
)
def test_a_name_that_is_nearly_one_of_ours_is_suggested_as_its_source_writes_it(tmp_path: Path, name: str, meant: str) -> None:
    *tables, last = name.split(".")
    text = f"[{'.'.join(tables)}]\n{last} = 1" if tables else f"{last} = 1"
    assert f"unknown setting '{name}' in file {tmp_path}/settings.toml; did you mean '{meant}'?" in refusal(tmp_path, text=text)
    variable, right = (PREFIX + word.upper().replace(".", "__") for word in (name, meant))
    said = refusal(tmp_path, env={variable.removeprefix(PREFIX): "1"})
    assert f"unknown setting '{variable}' in the environment; did you mean '{right}'?" in said


def test_a_name_that_two_tables_have_is_suggested_with_both(tmp_path: Path) -> None:
    said = refusal(tmp_path, text="max_consumers = 1")
    assert "did you mean 'connection.max_consumers' or 'other.max_consumers'?" in said


@pytest.mark.parametrize("name", ["zzz", "connection.zzz", "zzz.port_of_something", "", "hosting_place"])
def test_a_name_that_is_not_near_gets_no_suggestion(tmp_path: Path, name: str) -> None:
    said = refusal(tmp_path, env={name.upper().replace(".", "__"): "1"})
    assert "did you mean" not in said
    assert "docs/settings.md lists all settings" in said


def test_a_table_that_does_not_exist_is_an_error_even_when_it_is_empty(tmp_path: Path) -> None:
    assert "unknown setting 'connections' in file" in refusal(tmp_path, text="[connections]")
    assert load(tmp_path, text="[connection]\n[other]") == Example()


def test_a_value_for_a_table_says_how_to_set_what_is_in_it(tmp_path: Path) -> None:
    said = refusal(tmp_path, env={"CONNECTION": "1"})
    assert "'CEPHEID_EXAMPLE_CONNECTION' in the environment is a table of settings" in said
    assert "set for example CEPHEID_EXAMPLE_CONNECTION__KEEPALIVE_S" in said
    assert "set for example connection.keepalive_s" in refusal(tmp_path, text="connection = 1")
    assert "unknown setting 'port.number'" in refusal(tmp_path, text="[port]\nnumber = 1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"env": {"PORT": "99999"}}, "port must be a whole number from 0 to 65535, got '99999' from CEPHEID_EXAMPLE_PORT in the"),
        ({"flags": {"port": -1}}, "setting port must be a whole number from 0 to 65535, got -1 from the command line"),
        ({"env": {"PORT": "many"}}, "a whole number from 0 to 65535, got 'many'"),
        ({"text": "[connection]\nkeepalive_s = -1"}, "connection.keepalive_s must be a number above 0, got -1 from file"),
        ({"text": "[connection]\nkeepalive_s = inf"}, "connection.keepalive_s must be a number above 0, got inf from file"),
        ({"env": {"CONNECTION__KEEPALIVE_S": "nan"}}, "connection.keepalive_s must be a number above 0, got 'nan'"),
        ({"env": {"CONNECTION__INNER__DEPTH": "0"}}, "connection.inner.depth must be a whole number of at least 1, got '0'"),
        ({"env": {"OTHER__ALLOWED": "perhaps"}}, "other.allowed must be true or false, got 'perhaps'"),
        ({"text": "host = 5"}, "host must be text, got 5"),
        ({"text": 'rack = ""'}, "rack must be text of 1 to 9 characters, got ''"),
        ({"text": "data_dir = 5"}, "data_dir must be a path, got 5"),
    ],
)
def test_a_value_that_is_not_allowed_names_the_setting_the_bounds_and_the_source(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    assert said in refusal(tmp_path, **given)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        load_settings(Example, flags={}, environment_prefix="X_", file=tmp_path / "nowhere.toml", environment={})
    assert "cannot read settings file" in refusal(tmp_path, text="port 5")


def test_what_is_not_a_setting_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert "'accept_loss' in file" in (said := refusal(tmp_path, text="accept_loss = true"))
    assert said.endswith("is not a setting: one start only")
    assert "'CEPHEID_EXAMPLE_ACCEPT_LOSS' in the environment is not a" in refusal(tmp_path, env={"ACCEPT_LOSS": "1"})


@pytest.mark.parametrize(
    ("given", "old", "new"),
    [
        ({"text": "other = false"}, "'other' in file", "'other.allowed'"),
        ({"env": {"OTHER": "false"}}, "'CEPHEID_EXAMPLE_OTHER' in the environment", "'CEPHEID_EXAMPLE_OTHER__ALLOWED'"),
    ],
)
def test_an_old_name_is_accepted_with_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], old: str, new: str
) -> None:
    assert load(tmp_path, **given).other == Other(allowed=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cepheid: warning: setting ")
    assert old in line
    assert f"call it {new}" in line


def test_an_old_name_obeys_the_order_of_sources_and_the_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "[connection]\nkeepalive = 5"
    assert load(tmp_path, env={"CONNECTION__KEEPALIVE": "6"}, text=text).connection.keepalive_s == 6
    assert len(capsys.readouterr().err.splitlines()) == 1
    said = refusal(tmp_path, env={"CONNECTION__KEEPALIVE": "0"})
    assert "connection.keepalive_s must be a number above 0, got '0' from CEPHEID_EXAMPLE_CONNECTION__KEEPALIVE in the" in said


def test_an_old_name_together_with_the_new_one_is_an_error(tmp_path: Path) -> None:
    said = refusal(tmp_path, env={"OTHER__ALLOWED": "true"}, text="other = false")
    assert "'other' in file" in said
    assert "is the old name of 'CEPHEID_EXAMPLE_OTHER__ALLOWED' in the environment: remove the old one" in said


def test_the_new_form_of_a_renamed_table_gives_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(tmp_path, text="[other]\nallowed = false").other == Other(allowed=False)
    assert capsys.readouterr().err == ""
