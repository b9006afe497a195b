"""The members of a local cluster as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from cepheid_dev.local_cluster import ProcessStatus

_STYLES = {"ready": "green", "starting": "yellow", "paused": "yellow", "stopped": "dim", "killed": "red", "died": "bold red"}


def status_table(members: Sequence[ProcessStatus], now_ms: int) -> Table:
    table = Table("name", "state", "pid", "ports", "since", box=None, header_style="bold", pad_edge=False)
    for member in members:
        alive = member.state in ("ready", "starting", "paused")
        ports = " ".join(f"{use}:{port}" for use, port in member.ports.items())
        since = duration(now_ms - member.since_ms) if member.since_ms else "-"  # it was never started
        state = f"[{_STYLES[member.state]}]{member.state}[/]" + (f" {member.role}" if member.role else "")
        table.add_row(member.name, state, str(member.pid) if alive else "-", ports, since)
    return table


def duration(ms: int) -> str:
    """Return `12s`, `3m 20s`, `2h 5m` or `3d 4h`."""
    seconds = max(0, ms // 1000)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60}s"
    if seconds < 86_400:
        return f"{seconds // 3600}h {seconds % 3600 // 60}m"
    return f"{seconds // 86_400}d {seconds % 86_400 // 3600}h"
