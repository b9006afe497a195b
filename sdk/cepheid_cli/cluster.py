"""`cepheid cluster`: what concerns the cluster as a whole."""

from __future__ import annotations

from typing import Annotated

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, connect_admin, done, print_lines, sub_app

app = sub_app("cluster", "The cluster as a whole: the end of an upgrade (docs/operations.md).")


@app.command("upgrade-status")
def upgrade_status(admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Show the storage format of the cluster, and which bookies run an older release."""
    found = connect_admin(admin_url).upgrade.show()
    lines = [f"storage format  {found['storage_format']}; this release knows {found['newest']}"]
    if found["older"]:
        lines.append(f"older release   {', '.join(found['older'])}")
    elif found["storage_format"] < found["newest"]:
        lines.append("every bookie that runs knows it: cepheid cluster finish-upgrade")
    print_lines(lines)


@app.command("finish-upgrade")
def finish_upgrade(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False, admin_url: AdminUrl = DEFAULT_URL
) -> None:
    """Let bookies write the storage format of this release, from their next start on.

    Until then they write the old one, and the old release can be started again. Afterwards there is no way back to it. Refused
    while a bookie of an older release runs.
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
