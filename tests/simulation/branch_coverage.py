"""Which branches of the cores a run went through: a decision that no seed takes is one that nothing here has tested.

    with BRANCHES.traced(): run_seed(…)        ──► BRANCHES.report() ──► per core: branches, reached, and what was missed

A core decides and does nothing else (no I/O, no clock, no await); the drivers around it are dull on purpose and not counted. A
branch is named by what it says, not by its line, so that `unreached.txt` survives edits elsewhere in the file:

    dispatch_shared SharedDispatch.on_flow: if not permits → return []
        a reason, for all the branches above it, why no seed takes it and what tests it instead
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coverage import Coverage

CORES = (
    *(f"cepheid_ledger.{name}" for name in ("metadata_edits", "recovery_state", "striping", "unconfirmed", "writer_state")),
    *(
        f"cepheid_bookie.{name}"
        for name in ("add_answers", "entry_block", "journal_format", "journal_replay", "ledger_record", "limbo", "write_cache")
    ),
    *(
        f"cepheid_broker.managed_ledger.{name}"
        for name in (
            "ack_set", "chain_keeper", "count_budget", "cursor_state", "delivery_counts", "ended_totals", "ledger_counts",
            "ledger_list", "position_numbers", "trim",
        )
    ),
    *(
        f"cepheid_broker.{name}"
        for name in (
            "bundle_states", "chunk_owners", "consumer_acks", "counted_group", "deduplication", "delayed_entries", "delivery",
            "dispatch", "dispatch_failover", "dispatch_key_shared", "dispatch_shared", "holders", "key_owners", "key_places",
            "key_sharing", "position_set", "producer_access", "publish_group", "publish_window", "turns", "unanswered_sends",
            "waiting_keys",
        )
    ),
)  # fmt: skip

UNREACHED = Path(__file__).with_name("unreached.txt")


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

    def __str__(self) -> str:
        lines = [f"{self.core:22} {self.branches:4} branches, {self.branches - len(self.missed):4} reached"]
        return "\n".join([*lines, *(f"    {branch.line:4} {branch.name}" for branch in self.missed)])


class BranchCoverage:
    """Of this process: tracing slows it, so that it is on only where it is asked for."""

    def __init__(self) -> None:
        self.runs = 0
        self._tracing = False

    @cached_property
    def _paths(self) -> dict[str, str]:
        return {name.rpartition(".")[2]: _path_of(name) for name in CORES}

    @cached_property
    def _coverage(self) -> Coverage:
        return Coverage(data_file=None, branch=True, include=list(self._paths.values()), config_file=False, messages=False)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """What runs inside counts. May be entered again and again, and inside itself."""
        if self._tracing:
            yield
            return
        self._tracing = True
        self.runs += 1
        self._coverage.start()
        try:
            yield
        finally:
            self._coverage.stop()
            self._tracing = False

    def report(self) -> list[CoreReport]:
        """Of all that was traced so far, core by core."""
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            self._coverage.json_report(list(self._paths.values()), outfile=file.name)
            files: dict[str, Any] = json.load(file)["files"]
        found = {Path(path).resolve(): of_file for path, of_file in files.items()}
        return [_report(core, Path(path), found[Path(path).resolve()]) for core, path in self._paths.items()]


def _report(core: str, path: Path, of_file: dict[str, Any]) -> CoreReport:
    names = _Names(core, path.read_text())
    missed = tuple(Branch(core, names.of(line, target), line) for line, target in sorted(of_file["missing_branches"]))
    return CoreReport(core, of_file["summary"]["num_branches"], missed)


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


BRANCHES = BranchCoverage()
