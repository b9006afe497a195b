"""Runs the rings of the test suite: `python -m tests.suite fast`, `slow`, or `all` (fast, then slow if fast passed).

The fast ring is everything that is not marked `slow`. Neither ring has tests marked `page`, which `make check` runs. A ring has
three parts, which run beside each other. The simulator has a low priority: it uses the processors while the others wait for
servers, and takes little time from them. What it and Spark print is shown when all have ended.

    others        ──────────────────────────────►   three processes, a file at a time
    spark         ──────────────────►               one process (slow: two), a file at a time
    simulation    ─────────────────────────►        two processes, test by test

With `--repeat-failed` each failed test runs once more, alone. A test that passes then is flaky: it is named in the last lines, and
more than two of them fail the run. So a landing does not depend on luck, and no flaky test goes unnoticed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO

FAST, SLOW = "not slow and not page", "slow and not page"
PROCESSES = 2
PROCESSES_OF_WAITING_TESTS = 3
"""Tests outside of the simulator and Spark wait for servers, clients and clocks half of their time."""
PROCESSES_OF_SPARK = {FAST: 1, SLOW: 2}
"""Each starts a JVM and a server. That takes longer than the few jobs of the fast ring."""
PRIORITY_OF_SIMULATION = 10
"""As in nice(1): a process beside it gets nine tenths of a processor that both want."""
TIMEOUT_OF_SIMULATION_S = 900
"""Instead of the usual limit against hangs, because of the low priority."""
MAX_FLAKY = 2
NO_TESTS = 5  # exit code of pytest when a ring has no test below the given paths
MAX_REPEATED = 10
"""When more tests fail, the code is broken, not a test."""
RINGS = {"fast": (FAST,), "slow": (SLOW,), "all": (FAST, SLOW)}

Ended = tuple[int, list[str]]
"""The exit code of a pytest run, and the node ids of the tests that failed in it."""


def pytest(*arguments: str, output: IO[str] | None = None, priority: int = 0, first_worker: int = 0) -> Ended:
    """Run pytest in a process of its own, and wait for it.

    `first_worker` is the number of its first worker process among those of all runs beside each other: each has ports of its own.
    """
    command = [sys.executable, "-m", "pytest", "-q"]
    if priority:
        command = ["nice", "-n", str(priority), *command]
    with tempfile.TemporaryDirectory() as cache:  # not that of the clone: another pytest may write there meanwhile
        environment = {**os.environ, "CEPHEID_FIRST_WORKER": str(first_worker)}
        run = subprocess.run([*command, "-o", f"cache_dir={cache}", *arguments], stdout=output, stderr=output, env=environment)
        failed = Path(cache) / "v" / "cache" / "lastfailed"
        return run.returncode, sorted(json.loads(failed.read_text())) if failed.exists() else []


def run_parts(selection: str) -> list[Ended]:
    """Run all tests of a ring, its three parts beside each other.

    The simulator's seeds are balanced test by test; all other tests share servers per file, and files with long tests come first
    (`LONG_FILES` in conftest.py). Tests of Spark run in processes of their own: a JVM that is started from a process in which gRPC
    has run may end at once (gRPC's handlers run in the forked child).
    """
    by_file = ["--dist", "loadfile", "--no-loadscope-reorder"]
    with ExitStack() as opened:
        said = {part: opened.enter_context(tempfile.TemporaryFile("w+")) for part in ("tests/spark", "tests/simulation")}
        beside = opened.enter_context(ThreadPoolExecutor(len(said)))
        spark = beside.submit(
            pytest,
            *("-m", selection, "-n", str(PROCESSES_OF_SPARK[selection]), *by_file, "tests/spark"),
            output=said["tests/spark"],
            first_worker=PROCESSES_OF_WAITING_TESTS,
        )
        simulation = beside.submit(
            pytest,
            *("-m", selection, "-n", str(PROCESSES), "--dist", "worksteal"),
            *("--timeout", str(TIMEOUT_OF_SIMULATION_S), "tests/simulation"),
            output=said["tests/simulation"],
            priority=PRIORITY_OF_SIMULATION,
        )
        others = pytest(
            *("-m", selection, "-n", str(PROCESSES_OF_WAITING_TESTS), *by_file),
            *("tests", "--ignore", "tests/simulation", "--ignore", "tests/spark"),
        )
        ended = [others, spark.result(), simulation.result()]
        for part, output in said.items():
            output.seek(0)
            print(f"\n{part}:\n{output.read()}", flush=True)
    return ended


def run_ring(selection: str, paths: Sequence[str], *, repeat: bool) -> tuple[bool, list[str]]:
    """Return whether the ring passed, and which tests passed only when they were repeated."""
    passed, flaky = True, []
    given = ["-m", selection, "-n", str(PROCESSES), "--dist", "loadfile", *paths]
    for code, failed in [pytest(*given)] if paths else run_parts(selection):
        if code in (0, NO_TESTS):
            continue
        if not repeat or code != 1 or not 0 < len(failed) <= MAX_REPEATED:
            passed = False
            continue
        print(f"\n{len(failed)} failed; each runs once more, alone", flush=True)
        recovered = [test for test in failed if pytest(test)[0] == 0]
        flaky += recovered
        passed = passed and len(recovered) == len(failed)
    return passed, flaky


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.suite", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("ring", choices=RINGS)
    parser.add_argument("paths", nargs="*", help="only the tests below these paths")
    parser.add_argument("--repeat-failed", action="store_true", help="run failed tests once more, alone, and name flaky ones")
    options = parser.parse_args(arguments)
    flaky: list[str] = []
    passed = True
    for selection in RINGS[options.ring]:
        passed, found = run_ring(selection, options.paths, repeat=options.repeat_failed)
        flaky += found
        if not passed:
            break
    for test in flaky:
        print(f"flaky: {test} failed, and passed when it ran alone")
    if len(flaky) > MAX_FLAKY:
        print(f"{len(flaky)} flaky tests, {MAX_FLAKY} are tolerated: find their causes")
    return 0 if passed and len(flaky) <= MAX_FLAKY else 1


if __name__ == "__main__":
    sys.exit(main())
