"""What `medians` measured, in `medians.json`: per mutant the seeds that each run took, and the rule that caught it then.

    medians ──a run──► Measured ──save──► medians.json ──load──► scenarios.pages: the table of scenarios and mutants

Rule 1: a row is of one state of the code. The first run over another one begins the row again.
Rule 2: a row names that state, and no rule that `rules.py` does not expect. One that does not agree with it any more
leaves the file: its mutant is not measured yet.
Rule 3: one mutant is one line of the file, so that two people who measure different ones have nothing to merge.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RUNS = 10
"""As many as a median is of."""
FILE = Path(__file__).with_name("medians.json")


@dataclass(frozen=True, slots=True)
class Run:
    seeds: int  # until one failed, or it gave up
    rule: str  # that failed; "": it gave up
    failed: str = ""  # the seed that did, as its replay takes it; not told of what was measured earlier


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs of one mutant."""

    code: str  # a hash of what the seeds ran
    date: str  # of the last run
    runs: tuple[Run, ...] = ()

    def plus(self, run: Run, code: str, date: str) -> Measured:
        """Rule 1."""
        return Measured(code, date, (*self.runs, run) if code == self.code else (run,))

    @property
    def median(self) -> float:
        return statistics.median(run.seeds for run in self.runs)

    @property
    def missed(self) -> int:
        return sum(not run.rule for run in self.runs)

    @property
    def rules(self) -> Counter[str]:
        return Counter(run.rule for run in self.runs if run.rule)

    def __str__(self) -> str:
        """For a cell of a table: "2 (1..7; L10 8, L5 2)"."""
        seeds = [run.seeds for run in self.runs]
        rules = self.rules.most_common()
        caught = ", ".join(f"{rule} {count}" if len(rules) > 1 else rule for rule, count in rules)
        told = [f"{min(seeds)}..{max(seeds)}", caught, f"{self.missed} in vain" if self.missed else ""]
        runs = f", {len(seeds)} runs" if len(seeds) != RUNS else ""
        return f"{self.median:g} ({'; '.join(filter(None, told))}{runs})"


def load(file: Path = FILE) -> dict[str, Measured]:
    """By mutant."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    return {mutant: Measured(row["code"], row["date"], tuple(Run(*run) for run in row["runs"])) for mutant, row in rows.items()}


def save(measured: Mapping[str, Measured], file: Path = FILE) -> None:
    lines = [f"  {json.dumps(mutant)}: {json.dumps(_row(each))}" for mutant, each in sorted(measured.items())]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)  # whoever stops it in between has the old one, or the new one


def _row(measured: Measured) -> dict[str, object]:
    return {"code": measured.code, "date": measured.date, "runs": [_told(run) for run in measured.runs]}


def _told(run: Run) -> list[object]:
    return [run.seeds, run.rule, *filter(None, [run.failed])]
