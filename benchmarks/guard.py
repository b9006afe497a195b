"""`python -m benchmarks.guard [NAME,NAME]`: is this tree slower than the baseline? Pairs of runs, one server of each, interleaved.

    baseline (a commit) ──► wheel ──► an environment of its own ┐
    this tree ──────────────────────► this environment ─────────┴► old new │ new old │ old new │ … ──► ratio of each pair

The load generator is the same in both runs, that of this tree: only the server differs. The noise of a shared machine concerns both
runs of a pair alike, so ratios say what absolute figures cannot.

A benchmark fails when the median of its ratios is below 0.95 and their 90 % interval excludes 1.0. The interval is that of the
median by order statistics, which assumes nothing of the distribution: with ten pairs it lies between the second and the ninth.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BASELINE = Path(__file__).with_name("baseline")
ROOT = Path(__file__).parent.parent
ENOUGH = 0.95
COVERAGE = 0.9
FEWEST_PAIRS = 5
"""Fewer have no interval of 90 %."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """A benchmark on little data, and the figure of it that is compared."""

    figure: str
    arguments: tuple[str, ...] = ()
    higher_is_better: bool = True

    def ratio(self, old: float, new: float) -> float:
        """Return how good the new figure is; 1.0: as the old one."""
        return new / old if self.higher_is_better else old / new


GUARDED = {
    "publish_single": Guarded("entries_per_s", ("--seconds", "4")),
    "publish_batched": Guarded("messages_per_s", ("--seconds", "4")),
    "publish_large": Guarded("mb_per_s", ("--seconds", "4")),
    "publish_latency": Guarded("latency_ms_p50", ("--seconds", "5"), higher_is_better=False),
    "tail_latency": Guarded("latency_ms_p50", ("--seconds", "5"), higher_is_better=False),
    "catch_up": Guarded("mb_per_s_1kb", ("--gigabytes", "0.3", "--entry-bytes", "1000")),
    "shared_acks": Guarded("entries_per_s", ("--seconds", "4")),
    "startup": Guarded("first_produce_s", ("--rounds", "3", "--idle-seconds", "0"), higher_is_better=False),
}


class GuardError(Exception):
    """The comparison cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Verdict:
    median: float
    low: float
    high: float

    @property
    def is_slower(self) -> bool:
        return self.median < ENOUGH and self.high < 1.0


def judge(ratios: Sequence[float]) -> Verdict:
    """Raises ValueError with fewer than `FEWEST_PAIRS` ratios."""
    ordered, count = sorted(ratios), len(ratios)
    if count < FEWEST_PAIRS:
        raise ValueError(f"{count} pairs say nothing of their spread: {FEWEST_PAIRS} are the fewest")

    def coverage(left_out: int) -> float:
        """That of the interval without the `left_out` lowest and highest ratios: the median of all runs is in it."""
        return sum(math.comb(count, k) for k in range(left_out + 1, count - left_out)) / float(2**count)

    left_out = max(k for k in range((count + 1) // 2) if k == 0 or coverage(k) >= COVERAGE)
    return Verdict(statistics.median(ordered), ordered[left_out], ordered[count - 1 - left_out])


def baseline_python(commit: str) -> Path:
    """Return the interpreter of an environment with the server of that commit; it is made when it is first asked for.

    Raises GuardError.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cepheid-bench" / commit
    python = cache / "bin" / "python"
    if (cache / "complete").exists():
        return python
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        why = archive.stderr.decode(errors="replace").strip()
        raise GuardError(f"commit {commit} of {BASELINE.name} cannot be read: {why}. A shallow clone needs `git fetch --unshallow`")
    print(f"makes an environment with the server of {commit[:12]} in {cache}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as source:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(source, filter="data")
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(cache)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{source}[server]"],
        ):
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                raise GuardError(f"{' '.join(command)} failed: see above")
    (cache / "complete").touch()
    return python


def run(name: str, server_python: str) -> float:
    """Return the figure of one run. Raises GuardError."""
    guarded = GUARDED[name]
    command = [sys.executable, "-m", f"benchmarks.{name}", *guarded.arguments, "--server-python", server_python]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    if finished.returncode:
        raise GuardError(f"{' '.join(command[1:])} failed: see above")
    figure = json.loads(finished.stdout.splitlines()[-1]).get(guarded.figure)
    if not isinstance(figure, int | float) or figure <= 0:
        raise GuardError(f"{name} has no figure {guarded.figure}")
    return float(figure)


def compare(name: str, old_python: str, pairs: int) -> tuple[Verdict, list[tuple[float, float]]]:
    """Return what was found, and the figures of each pair, old and new. Raises GuardError."""
    figures: list[tuple[float, float]] = []
    for pair in range(pairs):
        if pair % 2:
            new = run(name, sys.executable)
            old = run(name, old_python)
        else:
            old = run(name, old_python)
            new = run(name, sys.executable)
        figures.append((old, new))
    return judge([GUARDED[name].ratio(old, new) for old, new in figures]), figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__)
    parser.add_argument("names", nargs="?", default="all", help=f"all, or some of {','.join(GUARDED)}, separated by commas")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--baseline", default=BASELINE.read_text().strip(), help="another commit than that of benchmarks/baseline")
    parser.add_argument("--baseline-python", help="an interpreter with the server to compare with, instead of a commit")
    arguments = parser.parse_args()
    names = list(GUARDED) if arguments.names == "all" else arguments.names.split(",")
    if unknown := [name for name in names if name not in GUARDED]:
        parser.error(f"{', '.join(unknown)} is not guarded; there are {', '.join(GUARDED)}")
    if arguments.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs: {FEWEST_PAIRS} are the fewest")
    slower: list[str] = []
    try:
        old_python = arguments.baseline_python or str(baseline_python(arguments.baseline))
        for name in names:
            verdict, figures = compare(name, old_python, arguments.pairs)
            line = {
                "guard": name,
                "figure": GUARDED[name].figure,
                "ratio": round(verdict.median, 3),
                "interval": [round(verdict.low, 3), round(verdict.high, 3)],
                "old_and_new": figures,
            }
            print(json.dumps(line), flush=True)
            if verdict.is_slower:
                slower.append(f"{name}: {verdict.median:.3f} of the baseline ({verdict.low:.3f} to {verdict.high:.3f})")
    except GuardError as error:
        print(f"guard: {error}", file=sys.stderr)
        return 2
    for miss in slower:
        print(f"SLOWER {miss}", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
