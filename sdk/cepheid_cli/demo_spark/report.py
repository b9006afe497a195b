"""The demo's last page: what was measured, what was promised, what held, where the pictures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cepheid_cli.demo.checks import Check, percentile
from cepheid_cli.demo_spark.checks import StreamSeen


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """`batch`: what the batch driver told. `progress`: Spark's reports of the micro-batches, of both runs."""

    events: int
    stored_bytes: int
    closed_ledgers: int
    first_part_per_s: float
    batch: Mapping[str, Any]
    stream: StreamSeen
    progress: Sequence[Mapping[str, Any]]


def print_report(console: Console, checks: Sequence[Check], figures: DemoFigures, pictures: Sequence[Path]) -> bool:
    """Prints both tables; True when every check held."""
    console.print(_figures_table(figures))
    table = Table(title="Checked against the source file", title_justify="left")
    table.add_column("promise")
    table.add_column("held")
    table.add_column("numbers")
    for check in checks:
        table.add_row(check.promise, "[green]yes[/]" if check.held else "[bold red]NO[/]", check.detail)
    console.print(table)
    for path in pictures:
        console.print(f"picture: {path}", highlight=False, soft_wrap=True)
    return all(check.held for check in checks)


def _figures_table(figures: DemoFigures) -> Table:
    table = Table(title=f"Measured (Spark {figures.batch['spark']}, everything on this machine)", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    megabytes = figures.stored_bytes / 1e6
    query_s, kill = figures.batch["query_s"], figures.batch["kill"]
    durations_s = [progress["durationMs"]["triggerExecution"] / 1e3 for progress in figures.progress]
    seen = figures.stream
    for row in (
        ("events", f"{figures.events:,}"),
        ("stored", f"{megabytes:.1f} MB in {figures.closed_ledgers} closed ledgers and the open one"),
        ("published, first half", f"{figures.first_part_per_s:,.0f} events/s"),
        ("batch query, mean delay by carrier and hour", f"{query_s:.2f} s, {figures.events / query_s:,.0f} events/s"),
        ("first query of the session (count)", f"{figures.batch['first_s']:.2f} s"),
        ("the same in many tasks, a bookie killed", f"{kill['seconds']:.2f} s"),
        ("micro-batches", f"{len(figures.progress)}"),
        ("micro-batch p50 / longest", f"{percentile(durations_s, 0.5):.2f} / {max(durations_s, default=0.0):.2f} s"),
        ("SIGKILL of the driver to its first micro-batch again", f"{seen.back_at_s - seen.killed_at_s:.1f} s"),
    ):
        table.add_row(*row)
    return table
