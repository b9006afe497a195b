"""`python -m benchmarks NAME,NAME|all [--check] [-- arguments for each]`: runs benchmarks, each in a process of its own.

With --check every figure that `bars.toml` names is compared; a miss is said on standard error and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BARS = Path(__file__).with_name("bars.toml")


def main() -> int:
    bars = tomllib.loads(BARS.read_text())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", help=f"all, or some of {','.join(bars)}, separated by commas")
    parser.add_argument("--check", action="store_true", help="compare with bars.toml; exit code 1 on a miss")
    parser.add_argument("rest", nargs="*", help="arguments for each benchmark, behind --")
    arguments = parser.parse_args()
    names = list(bars) if arguments.names == "all" else arguments.names.split(",")
    if unknown := [name for name in names if name not in bars]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(bars)}")
    misses: list[str] = []
    for name in names:
        line = run_one(name, arguments.rest)
        if line is None:
            misses.append(f"{name}: it failed")
        elif arguments.check:
            misses += [f"{name}: {miss}" for miss in find_misses(line, bars[name])]
    for miss in misses:
        print(f"MISS {miss}", file=sys.stderr)
    return 1 if misses else 0


def run_one(name: str, rest: list[str]) -> dict[str, Any] | None:
    """The line of a benchmark, printed as it came; None when it failed."""
    finished = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *rest], stdout=subprocess.PIPE, text=True, check=False)
    print(finished.stdout, end="", flush=True)
    if finished.returncode != 0:
        return None
    line: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return line


def find_misses(line: Mapping[str, Any], bars: Mapping[str, Mapping[str, float]]) -> list[str]:
    misses = []
    for figure, bar in bars.items():
        value = line.get(figure)
        for kind, bound in bar.items():
            if value is None:
                misses.append(f"no figure {figure}")
            elif not _reaches(value, kind, bound):
                misses.append(f"{figure} is {value}, to reach: {kind.replace('_', ' ')} {bound}")
    return misses


def _reaches(value: float, kind: str, bound: float) -> bool:
    match kind:
        case "at_least":
            return value >= bound
        case "at_most":
            return value <= bound
        case "below":
            return value < bound
        case "equals":
            return value == bound
    raise ValueError(f"bars.toml: no bound is called {kind!r}")


if __name__ == "__main__":
    sys.exit(main())
