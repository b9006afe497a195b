"""Worlds in which entry logs decay far more often than elsewhere, and scrubbers run: nothing that was promised is denied."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.simulation.faults.disks import DiskFaults
from tests.simulation.world import world as worlds
from tests.simulation.world.world import World

OFTEN = 30.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 6, 26, 33])  # worlds in which blocks are mended
def test_nothing_is_denied_while_entry_logs_decay_and_are_scrubbed(seed: int) -> None:
    acts = DiskFaults.acts

    def decaying(self: DiskFaults) -> dict[object, float]:
        return {**acts(self), self._decay_entry_log: OFTEN}

    with mock.patch.object(DiskFaults, "acts", decaying), mock.patch.object(worlds, "_SCRUBS", 1.0):
        World(seed, operations=200).run()
