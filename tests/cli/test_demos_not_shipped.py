"""The demos are in the repository only: an installed wheel does not contain them, and its commands say where to find them."""

from __future__ import annotations

import os
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.installed_wheel import CLONE


@pytest.mark.slow
@pytest.mark.parametrize("command", ["demo", "demo-spark", "demo-tiered"])
def test_an_installed_command_says_where_the_demos_are(wheel_bin: Path, command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [wheel_bin / "cepheid", command], capture_output=True, text=True, timeout=60, check=False, env=environment, cwd="/"
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "does not contain the demos" in line
    assert "clone the repository and run `make demo` or `make demo-spark` there" in line


@pytest.mark.slow
def test_the_wheel_contains_the_packages_and_nothing_else(wheel_bin: Path) -> None:
    project = tomllib.loads((CLONE / "pyproject.toml").read_text())
    packages = {Path(folder).name for folder in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    (wheel,) = wheel_bin.parents[1].glob("cepheid-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == packages
    assert not [name for name in names if "flights" in name or "/demo/" in name or "/demo_spark/" in name]
