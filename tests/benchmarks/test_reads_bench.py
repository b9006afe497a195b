"""Benchmarks of reads, restarts, tiered storage, large entries and indexes on little data: their figures are those with bars."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

from benchmarks.__main__ import BARS, find_misses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = {
    # Readers of the class "idle" would wait for ever beside other tests.
    "reads_beside_publish": (
        *("--gigabytes", "0.02", "--rounds", "1", "--seconds", "1", "--ledgers", "4", "--rate", "200"),
        *("--readers-class", "normal"),
    ),
    "publish_beside_catch_up": ("--entries", "5000", "--rounds", "1", "--seconds", "1"),
    "publish_large": ("--seconds", "1"),
    "restart": ("--gigabytes", "0.02", "--journal-gigabytes", "0.01", "--ledgers", "100"),
    "tiered_write": ("--mb", "2", "--flights", "2000", "--rounds", "1"),
    "tiered_offload": ("--gigabytes", "0.01", "--beside-gigabytes", "0.01", "--seconds", "1"),
    "tiered_read": ("--gigabytes", "0.01", "--pairs", "1", "--seeks", "5"),
    "tiered_memory": ("--megabytes", "5", "--offloaded-megabytes", "10", "--topics", "2"),
    "index_size": ("--entries", "100000", "--many-topics", "1000"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_benchmark_has_the_figures_that_bars_are_set_for(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *SIZES[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    line = json.loads(done.stdout)
    bars = tomllib.loads(BARS.read_text())[name]
    assert [miss for miss in find_misses(line, bars) if miss.startswith("no figure")] == []
    assert line.get("waited_behind_reads_s", 0.0) == 0.0
