"""`cepheid broker`: one broker in the foreground, or a supervisor of several."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cepheid_cli.broker_processes import ProcessPlace, run_processes
from cepheid_cli.role_process import begin_role, run_role
from cepheid_cli.settings_loader import load_settings
from cepheid_ports import Ports


def run_broker(flags: Mapping[str, Any], config: Sequence[Path], as_process: str | None = None) -> None:
    """Serve until a signal; return after a clean stop. `as_process`: this is one of the processes of a supervisor.

    Raises CepheidError if it cannot start or must give up.
    """
    started = begin_role()
    from cepheid_broker.admin import NO_SHARED_PORTS
    from cepheid_broker.broker_role import BrokerRole
    from cepheid_broker.settings import RENAMED, BrokerRoleSettings

    settings = load_settings(BrokerRoleSettings, flags=flags, environment_prefix="CEPHEID_BROKER_", file=config, renamed=RENAMED)

    def facts(role: BrokerRole) -> list[str]:
        return [f"broker    {role.broker_id}", f"clients   {role.service_url}", f"admin     {role.admin_url}"]

    if as_process is not None:
        place = ProcessPlace.parse(as_process)
        own, shared = settings.for_process(place.index), place.shared_admin()
        run_role(f"broker process {place.index}", lambda: BrokerRole(own, Ports(), shared), facts, started, place.supervisor())
    elif settings.processes > 1:
        run_processes(settings, sys.argv[1:], started)
    else:
        run_role("broker", lambda: BrokerRole(settings, Ports(), NO_SHARED_PORTS), facts, started)
