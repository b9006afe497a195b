"""`cepheid standalone`: the cluster of one process in the foreground."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cepheid_cli.bookie import NOT_KEPT
from cepheid_cli.role_process import begin_role, run_role
from cepheid_cli.settings_loader import load_settings
from cepheid_ports import Ports


def run_standalone(flags: Mapping[str, Any], config: Sequence[Path], *, accept_empty_disk: bool = False) -> None:
    """Serve until a signal; return after a clean stop. Raises CepheidError if it cannot start or must give up."""
    started = begin_role()
    from cepheid_broker.settings import RENAMED
    from cepheid_broker.standalone import Standalone, StandaloneSettings

    settings = load_settings(
        StandaloneSettings, flags=flags, environment_prefix="CEPHEID_STANDALONE_", file=config, renamed=RENAMED, refused=NOT_KEPT
    )

    def facts(standalone: Standalone) -> list[str]:
        bookies = f"{settings.bookies} {'bookie' if settings.bookies == 1 else 'bookies'}"
        return [
            *(f"clients   {url}" for url in standalone.service_urls),
            f"admin     {standalone.admin_url}",
            f"data      {settings.data_dir.resolve()} ({bookies})",
            *(f"problem   {problem}" for problem in standalone.problems),
        ]

    run_role("standalone", lambda: Standalone(settings, Ports(), accept_empty_disk=accept_empty_disk), facts, started)
