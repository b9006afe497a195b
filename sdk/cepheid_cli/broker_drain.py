"""`cepheid brokers drain`: moves a broker's topics to others, so that it can be stopped without an interruption."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from cepheid.admin.exchange import segment
from cepheid_cli.admin.common import DEFAULT_URL, Admin, AdminUrl, connect_admin, done, print_lines
from cepheid_cli.admin.units import counted

_POLL_S = 0.5


def register(app: typer.Typer) -> None:
    """Add the command to `cepheid brokers`."""
    app.command()(drain)


def drain(
    broker: Annotated[str, typer.Argument(help="Its id, or host:port of its admin API.")],
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until it has no bundles left.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Let it accept bundles again. Those that were moved stay.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if no other broker accepts bundles: its topics are then not served.")
    ] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Move all topics of a broker to others. Their clients follow, and producers wait for a moment.

    Stopping this command stops nothing: repeat it to see the progress. The broker accepts no bundles until `--undo`, or until it
    is restarted.
    """
    admin, path = connect_admin(admin_url), f"/cepheid/v1/brokers/{segment(broker)}/drain"
    if undo:
        admin.call("DELETE", path)
        done(f"broker {broker} accepts bundles again")
        return
    found = admin.call("PUT", path, {"force": force or None})
    if wait:
        found = _watch(admin, path, found)
    print_lines([drain_line(found)])


def drain_line(found: dict[str, Any]) -> str:
    """Return the status line of a broker that is being drained."""
    broker = found["broker"]
    if not found["draining"]:
        return f"broker {broker} is no longer being drained: another command let it accept bundles again"
    if found["drained"]:
        return f"broker {broker} no longer serves topics: it can be stopped"
    left = f"{counted(found['bundles'], 'bundle')} with {counted(found['topics'], 'open topic')} left"
    return f"broker {broker} is being drained, {left}; check again: cepheid brokers drain {broker} --wait"


def _watch(admin: Admin, path: str, found: dict[str, Any]) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        total = found["bundles"]
        bar = progress.add_task(f"{found['broker']}: bundles moved", total=total)
        while found["draining"] and not found["drained"]:
            total = max(total, found["bundles"])
            progress.update(bar, total=total, completed=total - found["bundles"])
            time.sleep(_POLL_S)
            found = admin.call("GET", path)
        progress.update(bar, total=total, completed=total)
    return found
