"""Writes what the texts and the code say of scenarios into the pages about them.

python -m tests.simulation.scenarios.pages      after a change of steps, texts, mutants or medians; a test compares

    scenarios/README.md    placeholders and steps, as the modules of steps register them
    README.md              the table of scenarios and mutants, as their heads and medians.json say
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from tests.simulation.mutants.catalogue import MUTANTS, RULES, SCENARIO_MUTANTS
from tests.simulation.mutants.measured import Measured, load
from tests.simulation.scenarios.language import FOLDER, KINDS, STEPS, Scenario, all_scenarios
from tests.simulation.scenarios.runner import VERBS

_BEGIN = "<!-- written by tests.simulation.scenarios.pages -->"
_END = "<!-- until here -->"
_HEAD = (
    "| scenario | rules | mistake | fails there by | seeds until caught: median (least..most; by) | known from |",
    "|---|---|---|---|---|---|",
)


def pages() -> dict[Path, str]:
    """Each page as it should be: what people wrote, and between the marks what is written here."""
    return {
        FOLDER / "README.md": _page(FOLDER / "README.md", [*_placeholders(), *_steps()]),
        FOLDER.parent / "README.md": _page(FOLDER.parent / "README.md", _scenarios()),
    }


def _page(path: Path, lines: list[str]) -> str:
    before, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, f"{path} lacks the marks {_BEGIN} and {_END}"
    return before + "\n".join([_BEGIN, *lines, _END]) + after


def _placeholders() -> list[str]:
    rows = [f"| `{{{kind.name}}}` | {_cell(kind.example)} |" for kind in KINDS.values()]
    return ["", "## Placeholders", "", "| placeholder | for example |", "|---|---|", *rows]


def _steps() -> list[str]:
    lines = ["", "## Steps"]
    for name in VERBS:
        module = importlib.import_module(f"tests.simulation.scenarios.steps.{name}")
        title = (module.__doc__ or "").splitlines()[0]
        steps = [step for step in STEPS.values() if step.act.__module__ == module.__name__]
        rows = [f"| `{_cell(step.pattern)}` | {_cell(step.meaning)} |" for step in steps]
        lines += [
            "",
            f"### {title.rstrip('.')}",
            "",
            f"From `steps/{name}.py`.",
            "",
            "| step | what it does, or demands |",
            "|---|---|",
            *rows,
        ]
    return [*lines, ""]


def _scenarios() -> list[str]:
    """A row for each mistake of each scenario; then those that no scenario has, with the rules by which worlds catch them."""
    scenarios, measured = all_scenarios(), load()
    rows = [row for scenario in scenarios for row in _rows(scenario, measured)]
    told = {mutant for scenario in scenarios for mutant in scenario.mutants}
    rows += [_row("", _rules(mutant), mutant, "", _median(mutant, measured), "") for mutant in MUTANTS if mutant not in told]
    return ["", *_HEAD, *rows, ""]


def _rows(scenario: Scenario, measured: Mapping[str, Measured]) -> list[str]:
    name, holds = f"[{scenario.number} {scenario.title}](scenarios/{scenario.stem}.txt)", ", ".join(scenario.holds)
    mistakes = [(mutant, " or ".join(rules), _median(mutant, measured)) for mutant, rules in scenario.mutants.items()]
    return [_row(name, holds, *mistake, scenario.bug) for mistake in mistakes or [("", "", "")]]


def _rules(mutant: str) -> str:
    """Those that speak of it; exceptions that it may stumble over are left out."""
    return ", ".join(sorted((rule for rule in RULES[mutant] if rule[-1].isdigit()), key=lambda rule: (rule[0], int(rule[1:]))))


def _median(mutant: str, measured: Mapping[str, Measured]) -> str:
    if mutant in SCENARIO_MUTANTS:
        return "by its scenario alone"
    return str(measured[mutant]) if mutant in measured else "not measured yet"


def _row(*cells: str) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write() -> None:
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()
