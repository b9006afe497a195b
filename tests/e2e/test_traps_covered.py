"""Every row of protocol.md §27 (traps) has a test that is named after it; tests/traps.md says which.

    python -m tests.e2e.test_traps_covered        writes the table anew

`test_trap_24_…` guards row 24, `test_trap_29_and_30_…` both. Where the official client cannot show a row, the scripted one of
tests/broker does, and the test says why.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.page

ROOT = Path(__file__).parents[2]
FACTS = ROOT / "docs" / "reference" / "protocol.md"
TABLE = ROOT / "tests" / "traps.md"
ROWS = 46
SHOWN_CHARS = 90


class TrapTest(NamedTuple):
    path: str
    name: str
    says_why: bool

    @property
    def is_end_to_end(self) -> bool:
        return self.path.startswith("e2e/")


@cache
def rows() -> dict[int, str]:
    section = FACTS.read_text().split("\n## 27. Traps\n")[1].split("\n## 28.")[0]
    return {int(number): text for number, text in re.findall(r"^(\d+)\. (.+)$", section, flags=re.MULTILINE)}


@cache
def covering() -> dict[int, list[TrapTest]]:
    found: dict[int, list[TrapTest]] = defaultdict(list)
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_trap_"):
                test = TrapTest(str(path.relative_to(ROOT / "tests")), node.name, ast.get_docstring(node) is not None)
                for number in numbers_in(node.name):
                    found[number].append(test)
    return found


def numbers_in(name: str) -> list[int]:
    match = re.match(r"test_trap_((?:\d\d_(?:and_)?)+)", name)
    assert match is not None, f"{name}: no row is named with two digits"
    return [int(number) for number in re.findall(r"\d\d", match[1])]


def table() -> str:
    lines = [
        "# Traps of the protocol and their tests",
        "",
        "Rows of `docs/reference/protocol.md` §27. Written by `python -m tests.e2e.test_traps_covered`; a test compares.",
        "",
        "| row | trap | tests |",
        "|---|---|---|",
    ]
    for number, text in rows().items():
        shown = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS].rsplit(" ", 1)[0] + " …"
        if shown.count("`") % 2:
            shown += "`"
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in covering()[number]:
            by_file[test.path].append(re.sub(r"^test_trap_(?:\d\d_(?:and_)?)+", "", test.name))
        tests = "<br>".join(f"`{path}`: {', '.join(names)}" for path, names in by_file.items())
        lines.append(f"| {number} | {shown.replace('|', chr(92) + '|')} | {tests} |")
    return "\n".join(lines) + "\n"


def test_the_facts_are_read() -> None:
    assert list(rows()) == list(range(1, ROWS + 1))


@pytest.mark.slow
def test_every_row_has_a_test_and_every_number_a_row() -> None:
    missing = {number: text for number, text in rows().items() if not covering()[number]}
    assert not missing
    assert covering().keys() <= rows().keys()


def test_who_has_no_end_to_end_test_says_why() -> None:
    silent = [
        test
        for number in rows()
        if not any(test.is_end_to_end for test in covering()[number])
        for test in covering()[number]
        if not test.says_why
    ]
    assert not silent


def test_names_of_several_rows_are_read() -> None:
    assert numbers_in("test_trap_27_32_and_38_readers_start") == [27, 32, 38]
    assert numbers_in("test_trap_46_a_consumer_holds_50_000_messages") == [46]


def test_the_table_is_up_to_date() -> None:
    assert TABLE.read_text() == table(), "run: python -m tests.e2e.test_traps_covered"


if __name__ == "__main__":
    TABLE.write_text(table())
