"""The final output of the demos: a table of figures, and a table of promises that shows which of them held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Check:
    """A promise and whether it held; `detail` has the numbers behind the verdict."""

    promise: str
    held: bool
    detail: str


def print_report(console: Console, title: str, figures: Sequence[tuple[str, str]], checks: Sequence[Check]) -> bool:
    """Print `figures` (name, value) under `title`, then `checks`. Returns True when every check held."""
    measured = Table(title=title, title_justify="left")
    measured.add_column("what")
    measured.add_column("figure", justify="right")
    for figure in figures:
        measured.add_row(*figure)
    console.print(measured)
    promised = Table(title="Checked against the source file", title_justify="left")
    for heading in ("promise", "held", "numbers"):
        promised.add_column(heading)
    for check in checks:
        promised.add_row(check.promise, "[green]yes[/]" if check.held else "[bold red]NO[/]", check.detail)
    console.print(promised)
    return all(check.held for check in checks)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0..1) of `values` lie; 0.0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
