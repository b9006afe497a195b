"""`cepheid repair`, `cepheid ledgers short`, `cepheid bookies decommission` and `recover`: commands for automatic repair."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated, Any

import typer

from cepheid_cli.admin.common import (
    DEFAULT_URL,
    Admin,
    AdminUrl,
    Json,
    connect_admin,
    done,
    print_json,
    print_lines,
    print_table,
    sub_app,
)
from cepheid_cli.admin.units import counted, shown_bytes, shown_duration, shown_time
from cepheid_cli.ledgers import app as ledgers_app
from cepheid_cli.ledgers import bookies_app
from cepheid_cli.metadata import STORE_HELP, opened

app = sub_app("repair", "Automatic repair of ledgers that lack copies (docs/operations.md).")

Bookie = Annotated[str, typer.Argument(help="Bookie id.")]
Metadata = Annotated[str, typer.Option("--metadata", envvar="CEPHEID_METADATA", help=f"The metadata store: {STORE_HELP}.")]

_POLL_S = 1.0
_PAGE = 1000


@app.command()
def status(as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Show whether repair is on, the auditor, the ledgers that lack copies, and the time until they are repaired."""
    found = connect_admin(admin_url).repair.status()
    if as_json:
        print_json(found)
    else:
        print_lines(status_lines(found))


def status_lines(found: dict[str, Any]) -> list[str]:
    """Return the output of `cepheid repair status`."""
    off, audit = found["off"], found["audit"]
    reason = f": {off['reason']}" if off and off["reason"] else ""
    lines = [
        "repair     on" if off is None else f"repair     OFF since {shown_time(off['off_since_ms'])}{reason}; cepheid repair on",
        f"auditor    {found['auditor'] or 'none: no process with automatic repair runs'}",
    ]
    if audit is None:
        return [*lines, "last walk  none so far: missing copies are unknown"]
    short = audit["short"]
    lines.append(f"last walk  {shown_time(audit['finished_at_ms'])}, {counted(audit['ledgers'], 'ledger')}")
    lines.append(f"short      {counted(short['ledgers'], 'ledger')}, {shown_bytes(short['bytes'])} of copies")
    if short["ledgers"] and audit["bytes_per_s"]:
        left_s = short["bytes"] / audit["bytes_per_s"]
        lines.append(f"rate       {shown_bytes(audit['bytes_per_s'])}/s, {shown_duration(left_s)} to go")
    for count, text in (
        (short["last_copy_entries"], "entries with one copy left"),
        (short["lost_entries"], "entries without any valid copy: cepheid ledgers short"),
        (audit["badly_placed"], "ledgers that could be spread over more racks"),
        (audit["unreadable_records"], "ledgers whose record in metadata cannot be read: cepheid ledgers list"),
    ):
        if count:
            lines.append(f"           {count} {text}")
    if waiting := found.get("unchecked", 0):  # an older broker does not report it
        lines.append(f"unchecked  {counted(waiting, 'ledger')} closed by recovery: each copy is checked once")
    lines += [f"waiting    {bookie} is not registered, in its grace period" for bookie in audit["waiting"]]
    for one in found["draining"]:
        state = "draining" if one["drained_at_ms"] is None else "drained: stop it and discard its disks"
        lines.append(f"leaving    {one['bookie_id']}: {state}")
    for bookie in found["draining_unreadable"]:
        lines.append(f"leaving    {bookie}: its record cannot be read; cepheid bookies decommission {bookie} --cancel, then again")
    return lines


@app.command()
def off(reason: Annotated[str, typer.Option(help="Reason, shown in the status.")] = "", admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Stop automatic repair in the whole cluster, for maintenance. Copies in progress are finished."""
    connect_admin(admin_url).repair.switch_off(reason=reason)
    done("automatic repair is off: copies that are lost now are not replaced until `cepheid repair on`")


@app.command()
def on(admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Continue automatic repair."""
    connect_admin(admin_url).repair.switch_on()
    done("automatic repair is on")


@ledgers_app.command()
def short(
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of ledgers.")] = 1000,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """List ledgers that lack copies: on which bookies and why, how many copies are left, and since when."""
    admin = connect_admin(admin_url)
    found: list[dict[str, Any]] = []
    above: int | None = -1
    while above is not None and len(found) < limit:
        page = admin.repair.short(above=above, limit=min(_PAGE, limit - len(found)))
        found += page["ledgers"]
        above = page["next"]
    if as_json:
        print_json(found)
        return
    state = admin.repair.status()
    if state["off"] is not None:
        done(age_of_list(state))
    found.sort(key=lambda mark: (mark["copies_left"], mark["ledger_id"]))
    columns = ("ledger", "copies left", "missing", "bytes", "since", "why")
    print_table(columns, [_short_row(mark) for mark in found])
    if above is not None:
        done(f"there are more than {limit}: --limit shows more")
    if state["audit"] is None:
        done("no walk over all ledgers has ended yet: this list is incomplete")


def age_of_list(state: dict[str, Any]) -> str:
    """Return the note of `cepheid ledgers short` while repair is off: nothing has been added to its list since."""
    since = f"automatic repair is off, and ledgers that lost copies after {shown_time(state['off']['off_since_ms'])} are not listed"
    audit = state["audit"]
    if audit is None:
        return f"{since}: cepheid repair on"
    found = (
        f"the walk of {shown_time(audit['finished_at_ms'])} found {counted(audit['short']['ledgers'], 'ledger')} short of copies"
    )
    return f"{since}; {found}: cepheid repair on"


def _short_row(mark: dict[str, Any]) -> tuple[str, ...]:
    why = ", ".join(f"{bookie} {reason}" for bookie, reason in mark["bookies"].items())
    if mark["lost_entries"]:
        runs = ", ".join(f"{run['first']}..{run['last']}" for run in mark["lost"][:5])
        former = f"; {' or '.join(mark['former'])} may have them" if mark["former"] else ""
        why = "; ".join(filter(None, [f"no valid copy of entries {runs}{former}", why]))
    elif mark["problem"]:
        why = f"{why}; {mark['problem']}"
    return (
        str(mark["ledger_id"]),
        str(mark["copies_left"]),
        counted(mark["short_entries"], "copy", "copies"),
        shown_bytes(mark["short_bytes"]),
        shown_time(mark["since_ms"]),
        why,
    )


@bookies_app.command()
def recover(bookie: Bookie, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Copy the ledgers of a bookie that is down to other bookies now, without waiting for its grace period."""
    admin = connect_admin(admin_url)
    admin.bookies.recover(bookie)
    if admin.repair.status()["off"] is not None:
        done(f"automatic repair is off: the ledgers of {bookie} are copied from their other replicas after `cepheid repair on`")
        return
    done(f"the ledgers of {bookie} are copied from their other replicas now: cepheid repair status")


@bookies_app.command()
def missing(metadata: Metadata, as_json: Json = False) -> None:
    """List bookies that keep ledgers because suspiciously many of them are missing in metadata."""
    from cepheid_metadata.repair_views import missing_views

    async def main() -> list[dict[str, Any]]:
        async with opened(metadata) as store:
            return await missing_views(store)

    found = asyncio.run(main())
    if as_json:
        print_json(found)
    elif not found:
        done("no bookie misses ledgers in metadata")
    else:
        rows = [
            (
                one["bookie_id"],
                str(one["held"]),
                str(one["missing"]),
                f"{one['first']}..{one['last']}",
                shown_time(one["since_ms"]),
                "yes" if one["confirmed"] else "no",
            )
            for one in found
        ]
        print_table(("BOOKIE", "LEDGERS", "MISSING", "IDS", "SINCE", "CONFIRMED"), rows)


@bookies_app.command("confirm-missing")
def confirm_missing(
    bookie: Bookie, metadata: Metadata, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Let a bookie delete the ledgers that metadata lacks. If more are missing by its next comparison, it asks again.

    First make sure that metadata is complete and belongs to this cluster: deleted ledgers cannot be brought back.
    """
    from cepheid_metadata.repair_views import confirm_missing, missing_views

    async def find() -> int:
        async with opened(metadata) as store:
            return next((int(one["missing"]) for one in await missing_views(store) if one["bookie_id"] == bookie), 0)

    async def confirm() -> None:
        async with opened(metadata) as store:
            await confirm_missing(store, bookie, count)

    count = asyncio.run(find())
    if count and not yes:
        typer.confirm(
            f"Delete {counted(count, 'ledger')} on {bookie} that metadata lacks? They cannot be brought back.", abort=True
        )
    asyncio.run(confirm())
    done(f"{bookie} deletes {counted(count, 'ledger')} after two more comparisons with metadata (storage.gc_interval_s)")


@bookies_app.command()
def decommission(
    bookie: Bookie,
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until the bookie can be removed.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Keep the bookie. Moved copies are not moved back.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Move all copies of a bookie to others, so that it can be removed. Stopping this command stops nothing: repeat it."""
    admin = connect_admin(admin_url)
    if cancel:
        admin.bookies.cancel_decommission(bookie)
        done(f"{bookie} stays")
        return
    found = admin.bookies.decommission(bookie)
    if wait:
        found = _watch(admin, bookie, found)
    print_lines(decommission_lines(bookie, found))


def decommission_lines(bookie: str, found: dict[str, Any]) -> list[str]:
    """Return the status lines of a bookie that is being decommissioned."""
    if found["state"] == "gone":
        return [f"{bookie} is decommissioned: nothing refers to it any more, its disks can be discarded"]
    if found["state"] == "drained":
        if found["running"]:
            return [f"{bookie} holds nothing that is still needed: stop it, and discard its disks"]
        return [f"{bookie} holds nothing that is still needed: its disks can be discarded"]
    left = f"{counted(found['ledgers_left'], 'ledger')} ({shown_bytes(found['bytes_left'])}) left"
    if found["ledgers_at_start"] is None:
        left = "its ledgers are being counted"
    problem = [f"  not yet possible: {found['problem']}"] if found["problem"] else []
    return [f"{bookie} is being emptied, {left}; check again: cepheid bookies decommission {bookie} --wait", *problem]


def _watch(admin: Admin, bookie: str, found: dict[str, Any]) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        bar = progress.add_task(f"{bookie}: ledgers moved", total=None)
        while found["state"] == "draining":
            total = found["ledgers_at_start"]
            if total is not None:
                total = max(total, found["ledgers_left"])
                progress.update(bar, total=total, completed=total - found["ledgers_left"])
            problem = f" ({found['problem']})" if found["problem"] else ""
            progress.update(bar, description=f"{bookie}: ledgers moved{problem}")
            time.sleep(_POLL_S)
            found = admin.bookies.decommission_status(bookie)
        total = found["ledgers_at_start"] or 0
        progress.update(bar, total=total, completed=total)
    return found
