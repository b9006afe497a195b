"""`cepheid autorecovery`: automatic repair alone, in the foreground."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cepheid_cli.role_process import begin_role, run_role
from cepheid_cli.settings_loader import load_settings
from cepheid_ports import Ports


def run_autorecovery(flags: Mapping[str, Any], config: Sequence[Path]) -> None:
    """Repair until a signal; returns after a clean stop. Raises CepheidError if it cannot start."""
    started = begin_role()
    from cepheid_recovery.roles import AutoRecoveryRole, AutoRecoverySettings

    settings = load_settings(AutoRecoverySettings, flags=flags, environment_prefix="CEPHEID_AUTORECOVERY_", file=config)

    def facts(role: AutoRecoveryRole) -> list[str]:
        return [f"name      {role.name}", f"health    {role.http_url}/ready"]

    run_role("autorecovery", lambda: AutoRecoveryRole(settings, Ports()), facts, started)
