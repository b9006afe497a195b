"""Writes what the texts and the code say of scenarios into the pages about them.

python -m tests.simulation.scenario_readme      after a change of steps or texts; a test compares

    scenarios/README.md    placeholders and steps, as the modules of steps register them
    README.md              the table of scenarios, as their heads say
"""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.simulation.scenario_language import FOLDER, KINDS, STEPS, Scenario, all_scenarios
from tests.simulation.scenario_runner import VERBS

_BEGIN = "<!-- written by tests.simulation.scenario_readme -->"
_END = "<!-- until here -->"


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
        module = importlib.import_module(f"tests.simulation.{name}")
        title = (module.__doc__ or "").splitlines()[0]
        steps = [step for step in STEPS.values() if step.act.__module__ == module.__name__]
        rows = [f"| `{_cell(step.pattern)}` | {_cell(step.meaning)} |" for step in steps]
        lines += [
            "",
            f"### {title.rstrip('.')}",
            "",
            f"From `{name}.py`.",
            "",
            "| step | what it does, or demands |",
            "|---|---|",
            *rows,
        ]
    return [*lines, ""]


def _scenarios() -> list[str]:
    rows = [_row(scenario) for scenario in all_scenarios()]
    return ["", "| scenario | holds | mistakes that it finds out, and by which rule | known from |", "|---|---|---|---|", *rows, ""]


def _row(scenario: Scenario) -> str:
    name = f"[{scenario.number} {scenario.title}](scenarios/{scenario.stem}.txt)"
    mistakes = "<br>".join(f"{name} ({' or '.join(rules)})" for name, rules in scenario.mutants.items())
    return f"| {name} | {', '.join(scenario.holds)} | {mistakes} | {scenario.bug} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")
