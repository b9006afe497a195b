"""Where settings come from, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from cepheid_cli.settings_loader import SettingsError, load_settings


class Table(BaseModel, frozen=True, extra="forbid"):
    keepalive_s: float = Field(30.0, gt=0)


class Example(BaseModel, frozen=True, extra="forbid"):
    connection: Table = Table()
    port: int = Field(6650, ge=0, le=65535)
    host: str = "127.0.0.1"
    data_dir: Path = Path("data")


def load(tmp_path: Path, *, flags: dict[str, object] | None = None, env: dict[str, str] | None = None, text: str = "") -> Example:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return load_settings(Example, flags=flags or {}, environment_prefix="CEPHEID_EXAMPLE_", file=file, environment=env or {})


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    env = {"CEPHEID_EXAMPLE_PORT": "2", "CEPHEID_EXAMPLE_HOST": "env", "OTHER": "x"}
    settings = load(tmp_path, flags={"port": 3, "host": None}, env=env, text='port = 1\nhost = "file"\ndata_dir = "d"')
    assert (settings.port, settings.host, settings.data_dir) == (3, "env", Path("d"))


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'prot' in the environment; did you mean 'port'"):
        load(tmp_path, env={"CEPHEID_EXAMPLE_PROT": "1"})
    with pytest.raises(SettingsError, match=r"unknown setting 'zzz' in file .*; known are connection, data_dir, host, port"):
        load(tmp_path, text="zzz = 1")


def test_a_value_out_of_bounds_names_field_and_source(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"setting port = '99999' from the environment"):
        load(tmp_path, env={"CEPHEID_EXAMPLE_PORT": "99999"})


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        load_settings(Example, flags={}, environment_prefix="X_", file=tmp_path / "nowhere.toml", environment={})


def test_tables_of_a_file_are_checked_alike(tmp_path: Path) -> None:
    assert load(tmp_path, text="[connection]\nkeepalive_s = 5").connection.keepalive_s == 5.0
    with pytest.raises(SettingsError, match=r"unknown setting 'connection.keepalve_s' in file .*did you mean 'keepalive_s'"):
        load(tmp_path, text="[connection]\nkeepalve_s = 5")
    with pytest.raises(SettingsError, match=r"setting connection.keepalive_s = -1 from file"):
        load(tmp_path, text="[connection]\nkeepalive_s = -1")


@pytest.mark.parametrize("source", ["file", "env"])
def test_what_is_no_setting_is_refused_with_the_reason(tmp_path: Path, source: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("accept_loss = true" if source == "file" else "")
    environment = {"CEPHEID_EXAMPLE_ACCEPT_LOSS": "1"} if source == "env" else {}
    with pytest.raises(SettingsError, match=r"'accept_loss' in (file .*|the environment) is no setting: one start only"):
        load_settings(
            Example,
            flags={},
            environment_prefix="CEPHEID_EXAMPLE_",
            file=file,
            environment=environment,
            refused={"accept_loss": "one start only"},
        )
