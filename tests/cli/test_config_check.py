"""`cepheid config check`: what a process would say about its settings file, without starting it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_ports import CepheidError


@pytest.mark.parametrize(
    ("role", "text", "said"),
    [
        ("broker", 'metadata = "zk://a:2181"\n[dispatch]\nmax_permits = 5\n', ""),
        ("bookie", 'metadata = "zk://a:2181"\ncaught_up_timeout_s = 60\n', ""),
        ("standalone", "port = 0\n", ""),
        ("autorecovery", 'metadata = "zk://a:2181"\n', ""),
        ("broker", 'metadata = "zk://a:2181"\nprot = 1\n', "did you mean 'port'?"),
        ("broker", "port = 1\n", "setting metadata is missing"),
        ("bookie", 'metadata = "zk://a:2181"\naccept_empty_disk = true\n', "is not a setting"),
        ("standalone", "port = 70000\n", "a whole number from 0 to 65535"),
        ("standalone", "port = \n", "cannot read settings file"),
    ],
)
def test_a_file_is_checked_as_the_process_would(role: str, text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["config", "check", role, str(file)])
    if not said:
        assert (done.exit_code, done.output) == (0, f"{file} has valid settings for cepheid {role}\n")
    else:
        assert isinstance(done.exception, CepheidError)
        assert said in str(done.exception)
