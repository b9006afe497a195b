"""The Python that Spark would take without being told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cepheid_spark.java_check import find_fault


@pytest.mark.slow
def test_an_environment_that_has_everything_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert find_fault() is None


def test_a_python_without_the_package_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As when a program of an environment is called by its path, and `python3` is the system's."""
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'cepheid_spark'\" >&2\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    fault = find_fault()
    assert fault is not None
    assert f"{other} says: ModuleNotFoundError" in fault
    assert f"export PYSPARK_PYTHON={sys.executable}" in fault


def test_no_python_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", str(tmp_path / "bin/python"))
    fault = find_fault()
    assert fault is not None
    assert f"there is no {tmp_path}/bin/python" in fault
