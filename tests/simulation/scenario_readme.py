"""Writes into scenarios/README.md what placeholders and steps there are, as the code registers them.

python -m tests.simulation.scenario_readme      after a change of steps; a test compares
"""

from __future__ import annotations

import importlib

from tests.simulation.scenario_language import FOLDER, KINDS, STEPS
from tests.simulation.scenario_runner import VERBS

PAGE = FOLDER / "README.md"
_MARK = "<!-- below: written by tests.simulation.scenario_readme -->\n"


def written() -> str:
    """The page as it should be: what people wrote, and what the code says."""
    by_hand = PAGE.read_text(encoding="utf-8").partition(_MARK)[0]
    return by_hand + _MARK + "\n".join(["", *_placeholders(), *_steps()]) + "\n"


def _placeholders() -> list[str]:
    rows = [f"| `{{{kind.name}}}` | {_cell(kind.example)} |" for kind in KINDS.values()]
    return ["## Placeholders", "", "| placeholder | for example |", "|---|---|", *rows]


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
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
