"""`cepheid broker`: one broker in the foreground."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cepheid_cli.role_process import run_role
from cepheid_cli.settings_loader import load_settings
from cepheid_ports import Ports


def run_broker(flags: Mapping[str, Any], config: Sequence[Path]) -> None:
    """Serves until a signal; returns after a clean stop. Raises CepheidError when it cannot start or has to give up."""
    started = time.monotonic()
    from cepheid_broker.broker_role import BrokerRole
    from cepheid_broker.settings import RENAMED, BrokerRoleSettings

    settings = load_settings(BrokerRoleSettings, flags=flags, environment_prefix="CEPHEID_BROKER_", file=config, renamed=RENAMED)

    def facts(role: BrokerRole) -> list[str]:
        return [f"broker    {role.broker_id}", f"clients   {role.service_url}", f"admin     {role.admin_url}"]

    run_role("broker", lambda: BrokerRole(settings, Ports()), facts, started)
