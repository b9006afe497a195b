"""Runs the rings of the test suite: `python -m tests.suite fast`, `slow`, or `all` (fast, then slow if fast passed).

The fast ring is everything that is not marked `slow`. Tests run in two processes, a file at a time; slow tests outside of the
simulator and Spark in three, because they wait for other processes half of their time.

With `--repeat-failed` each failed test runs once more, alone. A test that passes then is flaky: it is named in the last lines, and
more than two of them fail the run. So a landing does not depend on luck, and no flaky test goes unnoticed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROCESSES = 2
PROCESSES_OF_WAITING_TESTS = 3
MAX_FLAKY = 2
NO_TESTS = 5  # exit code of pytest when a ring has no test below the given paths
MAX_REPEATED = 10
"""When more tests fail, the code is broken, not a test."""
RINGS = {"fast": ("not slow",), "slow": ("slow",), "all": ("not slow", "slow")}


def pytest(*arguments: str) -> tuple[int, list[str]]:
    """Run pytest in a process of its own. Return its exit code and the node ids of the tests that failed."""
    with tempfile.TemporaryDirectory() as cache:  # not that of the clone: another pytest may write there meanwhile
        code = subprocess.run([sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache}", *arguments]).returncode
        failed = Path(cache) / "v" / "cache" / "lastfailed"
        return code, sorted(json.loads(failed.read_text())) if failed.exists() else []


def parts_of(paths: Sequence[str], selection: str) -> list[list[str]]:
    """Return the arguments of each pytest run.

    The simulator's seeds are balanced test by test; all other tests share servers per file. Tests of Spark run in processes of
    their own: a JVM that is started from a process in which gRPC has run may end at once (gRPC's handlers run in the forked child).
    """
    two = ["-n", str(PROCESSES), "--dist"]
    if paths:
        return [[*two, "loadfile", *paths]]
    waiting = ["-n", str(PROCESSES_OF_WAITING_TESTS if selection == "slow" else PROCESSES), "--dist", "loadfile"]
    others = [*waiting, "tests", "--ignore", "tests/simulation", "--ignore", "tests/spark"]
    return [[*two, "worksteal", "tests/simulation"], [*two, "loadfile", "tests/spark"], others]


def run_ring(selection: str, paths: Sequence[str], *, repeat: bool) -> tuple[bool, list[str]]:
    """Return whether the ring passed, and which tests passed only when they were repeated."""
    passed, flaky = True, []
    for part in parts_of(paths, selection):
        code, failed = pytest("-m", selection, *part)
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
