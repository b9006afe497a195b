"""The state of the cluster for processes that repair: the switch, and the bookies that are being decommissioned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from cepheid_ledger import BookieStates
from cepheid_metadata import MetadataStore, RepairSwitch, keys, list_names, repair_switch

LOST_RUN = "lost"
"""Stands in the audit for the run of a lost bookie, whatever it was: unlike the name of any run, it has no space."""


class RepairBookies(BookieStates, Protocol):
    """The bookies of the cluster, as far as this process knows."""

    def incarnation_of(self, bookie_id: str) -> str:
        """Return the name of the disks that it registered with; empty if it is not known."""

    def process_of(self, bookie_id: str) -> str:
        """Return the name of the process that registered; empty if it is not known."""


class ClusterState:
    """The state that the auditor and the worker of a process share; each refreshes it when needed."""

    def __init__(
        self, store: MetadataStore, bookies: RepairBookies, on_draining: Callable[[frozenset[str]], None] = lambda _: None
    ) -> None:
        self._store = store
        self._on_draining = on_draining
        self._bookies = bookies
        self._switch = repair_switch(store)
        self.draining: frozenset[str] = frozenset()
        self.off: RepairSwitch | None = None
        """The operator's order to repair nothing, while it is in force."""

    async def refresh(self) -> None:
        """Read the switch and the draining bookies. Raises MetadataError."""
        found = await self._switch.get(None)
        self.off = None if found is None else found.record
        self.draining = frozenset(await list_names(self._store, keys.DRAINING_BOOKIES_KEY))
        self._on_draining(self.draining)

    def registered(self) -> frozenset[str]:
        return frozenset(self._bookies.registered())

    def expected(self) -> Collection[str]:
        """Return the ids of all bookies that have a cookie or are registered."""
        return self._bookies.expected()

    def incarnation_of(self, bookie_id: str) -> str:
        return self._bookies.incarnation_of(bookie_id)

    def writable(self) -> Sequence[str]:
        """Return the ids of the bookies that can accept copies."""
        return [bookie for bookie in self._bookies.writable() if bookie not in self.draining]

    def run_of(self, bookie_id: str) -> str:
        """Return the name of this run of the bookie on these disks; another name means that it was restarted."""
        return run_name(self._bookies.incarnation_of(bookie_id), self._bookies.process_of(bookie_id))

    def racks(self) -> Mapping[str, str]:
        """Return the racks of the bookies that have one, as far as known."""
        return self._bookies.racks()


def run_name(incarnation: str, process: str) -> str:
    """Return the name of one run of a bookie, from the disks and the process that it registered with."""
    return f"{incarnation} {process}"


def without_lost(runs: Mapping[str, str]) -> dict[str, str]:
    """Return the runs of an audit; empty for lost bookies, so that each is checked when it is back."""
    return {bookie: "" if run == LOST_RUN else run for bookie, run in runs.items()}
