"""`cepheid cluster`: operations on the whole cluster: upgrades and load balancing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, Json, connect_admin, done, print_json, print_lines, sub_app
from cepheid_cli.admin.units import shown_time
from cepheid_cli.brokers import BALANCE

app = sub_app("cluster", "The cluster as a whole: upgrades and load balancing (docs/operations.md).")


@app.command("upgrade-status")
def upgrade_status(admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Show the storage format of the cluster, and the brokers and bookies of older releases."""
    found = connect_admin(admin_url).upgrade.show()
    lines = [f"storage format  {found['storage_format']}; this release knows {found['newest']}"]
    if found["older"]:
        lines.append(f"older release   {', '.join(found['older'])}")
    elif found["storage_format"] < found["newest"]:
        lines.append("every running broker and bookie supports it: cepheid cluster finish-upgrade")
    print_lines(lines)


@app.command("finish-upgrade")
def finish_upgrade(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False, admin_url: AdminUrl = DEFAULT_URL
) -> None:
    """Let bookies write the storage format of this release, from their next start on.

    Until then they write the old one, and the old release can be started again; afterwards it cannot. Refused while a broker or
    bookie of an older release runs. Upgrade readers of history first.
    """
    admin = connect_admin(admin_url)
    found = admin.upgrade.show()
    if found["storage_format"] == found["newest"]:
        done(f"the storage format is {found['newest']} already")
        return
    if not yes:
        change = f"Change the storage format from {found['storage_format']} to {found['newest']}"
        typer.confirm(f"{change}? There is no way back to an older release.", abort=True)
    admin.upgrade.finish()
    done(f"the storage format is {found['newest']}; each bookie writes it from its next start on")


_SWITCH = "/admin/v2/brokers/configuration/balance.enabled"


@app.command()
def balance(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be moved and split, and why.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Switch off automatic balancing in the whole cluster.")] = False,
    on: Annotated[bool, typer.Option("--on", help="Switch it on again.")] = False,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Spread the load evenly over the brokers now: move bundles, and split those that are too large to move.

    Brokers do this automatically every few seconds, unless it is switched off. One call moves at most as much as one round.
    """
    if off + on + dry_run > 1:
        raise typer.BadParameter("choose one of --dry-run, --off and --on")
    admin = connect_admin(admin_url)
    if off or on:
        admin.call("POST", f"{_SWITCH}/{'false' if off else 'true'}")
        done(f"automatic balancing is {'off: nothing moves until `cepheid cluster balance --on`' if off else 'on'}")
        return
    found = admin.call("GET", BALANCE)
    if not dry_run and found["plan"]:
        outcomes = admin.call("POST", BALANCE)
        if as_json:
            print_json(outcomes)
        else:
            print_lines(_action(outcome) for outcome in outcomes)
        if any(outcome["error"] for outcome in outcomes):
            raise typer.Exit(1)
    elif as_json:
        print_json(found)
    else:
        print_lines(balance_lines(found))


def balance_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Return the output of `cepheid cluster balance --dry-run`."""
    settings = found["settings"]
    if settings is not None:
        state = "on" if settings["enabled"] else "OFF: cepheid cluster balance --on"
        yield f"balancing  {state}; leader {found['leader']}"
        yield f"load       mean {found['mean_load']:.2f}, {settings['tolerance']:.0%} above or below is even"
    for broker in found["brokers"]:
        yield f"broker     {broker['broker_id']}: load {broker['load']:.2f}, {broker['bundles']} bundles, {broker['state']}"
    yield from (f"would      {_action(action)}" for action in found["plan"])
    if not found["plan"] and settings is not None:
        yield "would      move nothing"
    yield from (f"note       {note}" for note in found["notes"])
    yield from (f"{shown_time(outcome['at_ms'])}  {_action(outcome)}" for outcome in found["recent"][-10:])


def _action(action: Mapping[str, Any]) -> str:
    places = f"from {action['from']} to {action['to']}" if action["action"] == "move" else f"at {action['from']}"
    state = "NOT ANSWERED YET" if action.get("unanswered") else "NOT DONE"
    failed = f"; {state}: {action['error']}" if action.get("error") else ""
    return f"{action['action']} {action['bundle']} {places} ({action['why']}){failed}"
