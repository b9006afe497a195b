"""What audits share: waiting within a bound, and reading all of a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from cepheid_managed_ledger import ManagedLedger
from cepheid_metadata import Position
from tests.simulation.world.sim_broker import MANAGED_LEDGER_SETTINGS
from tests.simulation.world.sim_directory import SESSION_S

if TYPE_CHECKING:
    from tests.simulation.world.world import World

REST_S = 60.0
"""Longer than every timeout and backoff of the settings in `cluster.py` together."""
OPENED_S = MANAGED_LEDGER_SETTINGS.ledger_failover_timeout_s + SESSION_S + 3.0
"""Of a topic: its ledger has been given up, the session of its last owner has ended, and what is read and written is little."""
RECOVERED_S = 15.0
"""Of all ledgers: nobody is silent any more, so none of them takes a timeout."""
REPAIRED_S = 60.0
"""Of all ledgers: the grace period of a bookie, two walks (`sim_repairer.py`), and an attempt after the longest likely pause."""
RESUMED_S = 12.0
"""Of a writer: what struck it last has to be found out (2.5 s), a change under way be decided (6 s) and another be made."""
STARTED_S = 10.0
"""Of bookies: one that fails once more or refuses its disks is started again, and each start takes less than a second."""
SERVED_S = 30.0
"""Of clients: they look for their broker again after some seconds, and send again what they were not answered."""


async def read_all(managed_ledger: ManagedLedger) -> list[tuple[Position, bytes]]:
    """Every entry, in order."""
    entries: list[tuple[Position, bytes]] = []
    position = managed_ledger.first_position()
    while groups := await managed_ledger.read(position, max_entries=100, max_bytes=100_000):
        for group in groups:
            for entry_id, payload in enumerate(group.payloads(), group.first_entry_id):
                entries.append((Position(group.ledger_id, entry_id), bytes(payload)))
        position = Position(entries[-1][0].ledger_id, entries[-1][0].entry_id + 1)
    return entries


async def wait_for(
    world: World, rule: str, condition: Callable[[], bool], what: str | Callable[[], str], *, limit_s: float = REST_S
) -> None:
    deadline = world.loop.time() + limit_s
    while not condition():
        if world.loop.time() > deadline:
            told = what if isinstance(what, str) else what()
            world.history.violated(rule, f"{told}, {limit_s:g} s after the last fault")
            await asyncio.sleep(0)  # the end of the run, unless this rule is muted
            return
        await asyncio.sleep(0.1)
    world.history.check(rule, True, what)
