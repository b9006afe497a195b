"""The benchmark of repair on a few megabytes: it finds every ledger repaired, and its figures are those that have bars."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

from benchmarks.__main__ import BARS, find_misses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_repair_of_a_few_megabytes_has_the_figures_that_bars_are_set_for() -> None:
    sizes = ("--gigabytes", "0.02", "--whole-gigabytes", "0.02", "--ledgers", "10")
    done = subprocess.run([sys.executable, "-m", "benchmarks.repair", *sizes], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    line = json.loads(done.stdout)
    bars = tomllib.loads(BARS.read_text())["repair"]
    assert [miss for miss in find_misses(line, bars) if miss.startswith("no figure")] == []
    assert line["kill_to_whole_s"] > line["kill_to_first_copy_s"] > 0
