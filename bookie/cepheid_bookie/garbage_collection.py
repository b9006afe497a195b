"""Deletes ledgers that metadata no longer has, and emptied entry logs. Never on an error, a partial listing, or a mass absence.

    every interval:  local ids ► complete listing ► absent now and a pass ago ► each read directly: certainly no ► delete
                                      └─► ledgers that exist ► surplus copies (`surplus_copies.py`)

Rule 1: the local snapshot is taken first: metadata is written before data, so what is held was in metadata by then.
Rule 2: two passes an interval apart must miss a ledger, then a direct read must deny it. A failure ends the pass without effect.
Rule 3: if metadata lacks a large share of our ledgers, it is probably the wrong one: nothing is deleted, and that is an ERROR.
Rule 4: metadata that was restored from a backup lacks newer ledgers: nothing is deleted until an operator confirms the restore.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from cepheid_bookie.bookie import Bookie
from cepheid_bookie.surplus_copies import LedgersToTouch, SurplusCopies
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)


class LedgersInMetadata(LedgersToTouch, Protocol):
    """Metadata's side. All raise when they cannot tell: a short answer is not an answer."""

    async def report_if_restored(self, bookie: Bookie) -> bool:
        """Return whether metadata was restored from a backup, without confirmation so far; report the bookie's ledger ids then."""

    async def purge(self) -> None:
        """Forgets deleted ledgers that nobody can ask back any more."""

    async def listing(self) -> Collection[int]:
        """All ledger ids, read to the end."""

    async def exists(self, ledger_id: int) -> bool:
        """A direct read, not from a follower that lags."""


@dataclass(frozen=True, slots=True)
class GcPass:
    """What one pass did."""

    held: int = 0
    absent: int = 0
    deleted: tuple[int, ...] = ()
    surplus: tuple[int, ...] = ()
    deleted_logs: tuple[int, ...] = ()
    refused_mass: bool = False
    refused_restored: bool = False


class GarbageCollector:
    """`collect` is one pass; `start` runs it at every interval."""

    def __init__(self, bookie: Bookie, ledgers: LedgersInMetadata) -> None:
        self._bookie = bookie
        self._ledgers = ledgers
        self._settings = bookie.settings
        self._suspects: frozenset[int] = frozenset()
        self._surplus = SurplusCopies(bookie, ledgers, limit=self._settings.gc_surplus_ledgers)
        self._tasks = TaskOwner(f"{bookie.bookie_id}-gc")
        self.passes = 0
        self.failed_passes = 0
        self.deleted_ledgers = 0

    def start(self) -> None:
        self._tasks.start(self._run(), name="collect")

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def collect(self) -> GcPass:
        """One pass. Raises what metadata raises and deletes nothing more; what the pass before saw no longer counts then."""
        suspects, self._suspects = self._suspects, frozenset()
        if await self._ledgers.report_if_restored(self._bookie):  # rule 4
            hint = "cepheid metadata report shows what metadata lacks; cepheid metadata confirm lets bookies collect it"
            log.warning("gc.metadata_restored", extra={"bookie": self._bookie.bookie_id, "hint": hint})
            return GcPass(refused_restored=True)
        await self._ledgers.purge()
        await self._bookie.wait_listed()
        held = self._bookie.ledgers()
        listed = await self._ledgers.listing()
        absent = frozenset(held).difference(listed)
        if len(held) >= self._settings.gc_mass_ledgers and len(absent) > len(held) * self._settings.gc_mass_ratio:
            hint = "check that this is the right cluster; if so much was really deleted, raise storage.gc_mass_ratio and restart"
            log.error("gc.mass_absence", extra={"held": len(held), "absent": len(absent), "hint": hint})
            return GcPass(len(held), len(absent), refused_mass=True)
        condemned = [ledger_id for ledger_id in sorted(absent & suspects) if not await self._ledgers.exists(ledger_id)]
        await self._bookie.delete_ledgers(condemned)
        surplus = await self._surplus.collect([ledger_id for ledger_id in held if ledger_id not in absent])
        logs = await self._bookie.reclaim()
        self._suspects = absent.difference(condemned)
        self.passes += 1
        self.deleted_ledgers += len(condemned)
        return GcPass(len(held), len(absent), tuple(condemned), tuple(surplus), tuple(logs))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.gc_interval_s)
            try:
                await self._bookie.count_life()
                await self.collect()
            except Exception as error:  # metadata may be away for hours: the next pass begins anew
                self.failed_passes += 1
                log.warning("gc.pass_failed", extra={"bookie": self._bookie.bookie_id, "error": repr(error)})
