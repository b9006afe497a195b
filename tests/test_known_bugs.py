"""tests/known_bugs.md names every report that the reference names, and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.page

TESTS = Path(__file__).parent
REFERENCE = TESTS.parent / "docs" / "reference"
REPORT = re.compile(r"#\d{2,}|BOOKKEEPER-\d+")
SCENARIOS = "simulation/scenarios"
CELL = re.compile(rf"`([\w/]+\.py|{SCENARIOS})`: ([\w, ]+)")


def table() -> str:
    return (TESTS / "known_bugs.md").read_text()


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_report_of_the_reference_is_there_and_no_other() -> None:
    named = {
        report for name in ("ledger-protocol.md", "managed-ledger.md") for report in REPORT.findall((REFERENCE / name).read_text())
    }
    assert len(named) > 50
    assert set(REPORT.findall(table())) == named


@pytest.mark.slow
def test_every_row_has_tests_and_each_exists() -> None:
    rows = [line for line in table().splitlines() if line.startswith(("| #", "| BOOK"))]
    assert len(rows) > 30
    for row in rows:
        cells = CELL.findall(row)
        assert cells, row
        missing = [f"{path}: {name}" for path, names in cells for name in names.strip().split(", ") if not exists(path, name)]
        assert not missing, missing


def exists(path: str, name: str) -> bool:
    if path == SCENARIOS:
        return (TESTS / path / f"{name}.txt").exists()
    return f"test_{name}" in functions_of(TESTS / path)
