"""`cepheid bookie`: one storage node, with automatic repair in it, in the foreground."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cepheid_cli.role_process import begin_role, run_role
from cepheid_cli.settings_loader import load_settings
from cepheid_ports import Ports

NOT_KEPT = {
    "accept_empty_disk": "one loss is accepted for one start, on the command line (--accept-empty-disk); a permanent setting "
    "would accept every later loss too"
}


def run_bookie(flags: Mapping[str, Any], config: Sequence[Path], *, accept_empty_disk: bool = False) -> None:
    """Serve until a signal; return after a clean stop. Raises CepheidError if it cannot start or must give up."""
    started = begin_role()
    from cepheid_recovery.roles import BookieNode, BookieNodeSettings

    settings = load_settings(BookieNodeSettings, flags=flags, environment_prefix="CEPHEID_BOOKIE_", file=config, refused=NOT_KEPT)

    def facts(role: BookieNode) -> list[str]:
        return [
            f"bookie    {role.bookie_id}",
            f"grpc      {role.address}",
            f"health    {role.http_url}/ready",
            f"data      {settings.data_dir.resolve()}",
            *([f"read-only {role.read_only_reason}"] if role.read_only_reason else []),
        ]

    run_role("bookie", lambda: BookieNode(settings, Ports(), accept_empty_disk=accept_empty_disk), facts, started)
