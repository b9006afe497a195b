"""Every process restarted in turn under load, as an upgrade does it."""

from __future__ import annotations

import pytest

from tests.integration.chaos_cluster import ChaosCluster

pytestmark = pytest.mark.slow


def test_every_process_restarted_in_turn_under_load(chaos: ChaosCluster) -> None:
    with chaos.workload("rolling", types="Exclusive,Key_Shared") as work:
        for name in chaos.processes.names():
            if name.startswith("broker"):
                with work.connections_end(f"restart of {name}"):
                    chaos.processes.stop(name)
                    work.goes_on()
                    chaos.processes.start(name)
            else:
                work.fault(f"restart of {name}")
                chaos.processes.stop(name)
                chaos.processes.start(name)
            chaos.wait_until(lambda name=name: chaos.shown(name) == "ready", f"{name} is ready")  # type: ignore[misc]
            work.goes_on()
        work.ends_well()
