"""`cepheid demo`, `demo-spark` and `demo-tiered` on a part of the flights: every promise holds while processes are really killed.

They run in a directory outside of the repository, because the commands must find `examples/` from anywhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cepheid_spark.java_check import NoJavaError, find_java
from tests.support import free_port

pytestmark = pytest.mark.slow


def run_demo(directory: Path, *words: str, timeout_s: float) -> str:
    """Run a demo to its end with its data in `directory`. Returns what it printed."""
    command = [sys.executable, "-m", "cepheid_cli", *words, "--data", "demo"]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_on_a_part_of_the_flights(tmp_path: Path) -> None:
    ports = ["--port", str(free_port()), "--admin-port", str(free_port())]
    printed = run_demo(tmp_path, "demo", "--events", "40000", *ports, timeout_s=280)
    assert re.findall(r"│ (yes|NO) ", printed) == ["yes"] * 9, printed
    assert printed.count("SIGKILL") == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_spark_demo_on_a_part_of_the_flights(tmp_path: Path) -> None:
    try:
        find_java()
    except NoJavaError as error:
        pytest.skip(f"NO SPARK: {error}")
    # This number of events does not fill whole ledgers of two full batches each, because the open ledger must have entries.
    printed = run_demo(tmp_path, "demo-spark", "--events", "6250", timeout_s=840)
    assert re.findall(r"│ (yes|NO) ", printed) == ["yes"] * 11, printed
    assert sorted(path.name for path in (tmp_path / "demo").glob("*.png")) == ["delays.png", "scan.png", "stream.png"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tiered_demo_on_a_part_of_the_flights(tmp_path: Path) -> None:
    pytest.importorskip("moto", reason="NO S3 SERVER: pip install 'moto[s3,server]'")
    try:
        find_java()
    except NoJavaError as error:
        pytest.skip(f"NO SPARK: {error}")
    printed = run_demo(tmp_path, "demo-tiered", "--events", "20000", timeout_s=840)
    assert re.findall(r"│ (yes|NO) ", printed) == ["yes"] * 11, printed
    assert printed.count("SIGKILL") == 1
