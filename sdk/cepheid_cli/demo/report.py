"""The demo's last page: what was measured, what was promised, what held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from cepheid_cli.demo.checks import Check, percentile


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """Rates leave out the time in which the server was down; latencies leave out what an outage touched."""

    events: int
    bytes_published: int
    publish_s: float
    audit_s: float
    publish_latencies_s: Sequence[float]
    end_to_end_s: Sequence[float]
    resent_duplicates: int
    redelivered: Mapping[str, int]
    start_times_s: Sequence[float]
    outages_s: Sequence[float]
    server_memory_bytes: int


def print_report(console: Console, checks: Sequence[Check], figures: DemoFigures) -> bool:
    """Prints both tables; True when every check held."""
    console.print(_figures_table(figures))
    table = Table(title="Checked against the source file", title_justify="left")
    table.add_column("promise")
    table.add_column("held")
    table.add_column("numbers")
    for check in checks:
        table.add_row(check.promise, "[green]yes[/]" if check.held else "[bold red]NO[/]", check.detail)
    console.print(table)
    return all(check.held for check in checks)


def _figures_table(figures: DemoFigures) -> Table:
    table = Table(title="Measured (outages left out of rates and latencies)", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    megabytes = figures.bytes_published / 1e6
    rows = [
        ("events", f"{figures.events:,}"),
        ("payload", f"{megabytes:.1f} MB"),
        ("published", f"{figures.events / figures.publish_s:,.0f} messages/s, {megabytes / figures.publish_s:.1f} MB/s"),
        ("consumed, one consumer, not paced", f"{figures.events / figures.audit_s:,.0f} messages/s"),
        ("publish latency p50 / p99", _milliseconds(figures.publish_latencies_s)),
        ("end-to-end p50 / p99", _milliseconds(figures.end_to_end_s)),
        ("duplicates by the client's resends", f"{figures.resent_duplicates:,}"),
        ("redelivered after the kills", ", ".join(f"{name} {count:,}" for name, count in figures.redelivered.items())),
        ("server start to first publish", ", ".join(f"{start:.2f} s" for start in figures.start_times_s)),
        ("kill to first publish again", ", ".join(f"{outage:.2f} s" for outage in figures.outages_s)),
        ("server memory, highest seen", f"{figures.server_memory_bytes / 1e6:.0f} MB"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _milliseconds(values_s: Sequence[float]) -> str:
    return f"{percentile(values_s, 0.5) * 1e3:.1f} / {percentile(values_s, 0.99) * 1e3:.1f} ms"
