"""Which branches of the cores a run went through: a decision that no seed takes is one that nothing here has tested.

    seeds and scenarios ──► shares, a process each, traced ──► per core: branches, reached, and what was missed

A core decides and does nothing else (no I/O, no clock, no await); the drivers around it are dull on purpose and not counted, but
for those in DRIVERS, which decide what no core does: what is in doubt, what to do without, when to give up.
A branch is named by what it says, not by its line, so that `unreached.txt` survives edits elsewhere in the file:

    dispatch_shared SharedDispatch.on_flow: if not permits → return []
        a reason, for all the branches above it, why no seed takes it and what tests it instead
"""

from __future__ import annotations

import ast
import importlib.util
import json
import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coverage import Coverage

from tests.simulation.scenarios.language import all_scenarios
from tests.simulation.scenarios.runner import play
from tests.simulation.seeds import run_seed

DRIVERS = (
    "cepheid_ledger.ensemble_change",
    "cepheid_ledger.recovery",
    "cepheid_bookie.admission",
    "cepheid_managed_ledger.appender",
    "cepheid_managed_ledger.failover",
    "cepheid_managed_ledger.rollover",
)
CORES = (
    *DRIVERS,
    *(f"cepheid_ledger.{name}" for name in ("metadata_edits", "recovery_state", "striping", "unconfirmed", "writer_state")),
    *(
        f"cepheid_bookie.{name}"
        for name in (
            "add_answers", "entry_block", "journal_format", "journal_replay", "journal_tail", "ledger_record", "limbo",
            "write_cache",
        )
    ),
    *(
        f"cepheid_managed_ledger.{name}"
        for name in (
            "ack_set", "chain_keeper", "count_budget", "cursor_state", "delivery_counts", "ended_totals", "ledger_counts",
            "ledger_list", "position_numbers", "trim",
        )
    ),
    *(
        f"cepheid_broker.dispatch.{name}"
        for name in (
            "back_reader", "chunk_owners", "counted_group", "delayed_entries", "delivery", "dispatch_failover",
            "dispatch_key_shared", "dispatch_shared", "effects", "forward_reader", "holders", "key_owners", "key_places",
            "key_sharing", "position_set", "turns", "waiting_keys",
        )
    ),
    *(f"cepheid_broker.publishing.{name}" for name in ("deduplication", "producer_access", "publish_group", "unanswered_sends")),
    "cepheid_broker.ownership.bundle_states",
    "cepheid_broker.protocol.consumer_acks",
    "cepheid_broker.publish_window",
)  # fmt: skip

UNREACHED = Path(__file__).with_name("unreached.txt")
RARE = "Taken by some seeds only"
"""So begins the reason of a branch that the few seeds of the test may miss, and that many seeds take."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One way out of one decision. `name` says it in words, `line` is for people."""

    core: str
    name: str
    line: int


@dataclass(frozen=True, slots=True)
class CoreReport:
    core: str
    branches: int
    missed: tuple[Branch, ...]
    names: frozenset[str]  # of all of them

    def __str__(self) -> str:
        lines = [f"{self.core:22} {self.branches:4} branches, {self.branches - len(self.missed):4} reached"]
        return "\n".join([*lines, *(f"    {branch.line:4} {branch.name}" for branch in self.missed)])


def branches_of(seeds: Sequence[int], *, cores: int = 1, with_scenarios: bool = True) -> list[CoreReport]:
    """What these seeds and all scenarios go through, core by core."""
    texts = [scenario.stem for scenario in all_scenarios()] if with_scenarios else []
    shares = [(list(seeds[core::cores]), texts[core::cores]) for core in range(cores)]
    spawn = multiprocessing.get_context("spawn")  # a tracer is not to be forked, nor to stay behind
    with ProcessPoolExecutor(cores, mp_context=spawn) as processes:
        return merged(list(processes.map(_trace_share, shares)))


def rare_and_missed(reports: Sequence[CoreReport], reasons: Mapping[str, str]) -> tuple[int, list[str]]:
    """How many branches are excused because few seeds take them, and which of them none of these took."""
    rare = [name for name, reason in reasons.items() if reason.startswith(RARE)]
    missed = {branch.name for report in reports for branch in report.missed}
    return len(rare), [name for name in rare if name in missed]


def excused_and_taken(reports: Sequence[CoreReport], reasons: Mapping[str, str], *, rare_too: bool = True) -> list[str]:
    """Branches that need no excuse, or another one: these runs took them."""
    missed = {branch.name for report in reports for branch in report.missed}
    known = {name for report in reports for name in report.names}
    wrong = [name for name, reason in reasons.items() if rare_too or not reason.startswith(RARE)]
    return [name for name in wrong if name in known and name not in missed]


def totals(reports: Sequence[CoreReport]) -> str:
    branches, missed = sum(report.branches for report in reports), sum(len(report.missed) for report in reports)
    return f"branches    {branches} in {len(reports)} cores, {branches - missed} reached"


def _trace_share(share: tuple[list[int], list[str]]) -> list[CoreReport]:
    seeds, texts = share
    paths = {name.rpartition(".")[2]: _path_of(name) for name in CORES}
    coverage = Coverage(data_file=None, branch=True, include=list(paths.values()), config_file=False, messages=False)
    coverage.start()
    try:
        for seed in seeds:
            run_seed(seed)
        for scenario in all_scenarios():
            if scenario.stem in texts:
                play(scenario)
    finally:
        coverage.stop()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        coverage.json_report(list(paths.values()), outfile=file.name)
        files: dict[str, Any] = json.load(file)["files"]
    found = {Path(path).resolve(): of_file for path, of_file in files.items()}
    return [_report(core, Path(path), found[Path(path).resolve()]) for core, path in paths.items()]


def merged(shares: Sequence[list[CoreReport]]) -> list[CoreReport]:
    """Missed is what all of them missed."""
    reports = []
    for of_core in zip(*shares, strict=True):
        everywhere = set.intersection(*(set(report.missed) for report in of_core))
        first = of_core[0]
        missed = tuple(branch for branch in first.missed if branch in everywhere)
        reports.append(CoreReport(first.core, first.branches, missed, first.names))
    return reports


def _report(core: str, path: Path, of_file: dict[str, Any]) -> CoreReport:
    names = _Names(core, path.read_text())
    missed = tuple(Branch(core, names.of(line, target), line) for line, target in sorted(of_file["missing_branches"]))
    every = [*of_file["executed_branches"], *of_file["missing_branches"]]
    return CoreReport(core, of_file["summary"]["num_branches"], missed, frozenset(names.of(*branch) for branch in every))


class _Names:
    """What the branches of one file are called."""

    def __init__(self, core: str, source: str) -> None:
        self._core = core
        self._lines = source.splitlines()
        self._functions: list[tuple[int, int, str]] = []
        self._collect(ast.parse(source), "")

    def of(self, line: int, target: int) -> str:
        where = [name for first, last, name in self._functions if first <= line <= last]
        goes = "leaves" if target < 0 else self._said(target)
        return f"{self._core} {where[-1] if where else '-'}: {self._said(line)} → {goes}"

    def _said(self, line: int) -> str:
        return self._lines[line - 1].partition("  #")[0].strip()

    def _collect(self, node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                assert child.end_lineno is not None
                self._functions.append((child.lineno, child.end_lineno, name))
                self._collect(child, f"{name}.")
            else:
                self._collect(child, prefix)


def excused(text: str) -> dict[str, str]:
    """Of `unreached.txt`: the reason for each branch, by its name."""
    reasons: dict[str, str] = {}
    waiting: list[str] = []
    reason = ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" "):
            assert waiting, f"a reason without a branch: {line.strip()}"
            reason = f"{reason} {line.strip()}".strip()
            reasons.update(dict.fromkeys(waiting, reason))
        else:
            if reason:
                waiting, reason = [], ""
            waiting.append(line.strip())
    unexplained = [name for name in waiting if name not in reasons]
    assert not unexplained, f"{UNREACHED.name} gives no reason for {unexplained}"
    return reasons


def _path_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no {module}"
    assert spec.origin is not None
    return spec.origin
