"""Deletes ledgers that metadata no longer has, and empty entry logs; never after an error, a partial listing or a mass absence.

    every pass:  local ids ► complete listing ► absent now and a pass ago ► each read directly: certainly no ► delete
                                  └─► ledgers that exist ► surplus copies (`surplus_copies.py`)

    pass ──gc_interval_s──► pass             ──gc_confirm_s──► pass, after one in which a ledger was missing for the first time
      └──the data disk is full──► pass at once, then one every gc_full_interval_s until it has room

Rule 1: the local snapshot is taken first: metadata is written before data, so every ledger held here was in metadata by then.
Rule 2: two passes must miss a ledger, then a direct read must deny it. A failure ends the pass without effect.
Rule 3: if metadata lacks a large share of our ledgers, it is probably the wrong one: nothing is deleted and an ERROR is logged,
until an operator confirms the number (`cepheid bookies confirm-missing`). Ledgers that metadata remembers as deleted for good do
not count, even if this bookie was down all the time in between.
Rule 4: metadata that was restored from a backup lacks newer ledgers: nothing is deleted until an operator confirms the restore.
Rule 5: a ledger that can be restored is given up early only on a full disk, only if a setting allows it, and only
while the disk lacks more bytes than the given-up ledgers have.
Rule 6: if metadata has not allocated the largest ledger id held here, it is older than this bookie's data: nothing is deleted
and an ERROR is logged. No confirmation helps: brokers would allocate ids a second time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cepheid_bookie.bookie import Bookie
from cepheid_bookie.surplus_copies import LedgersToTouch, SurplusCopies
from cepheid_metadata import InGrace
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)

_LISTING_S = 60.0
"""Longest time that a pass waits for the list of the ledgers held here, which a bookie builds after its start."""


class LedgersInMetadata(LedgersToTouch, Protocol):
    """Access to metadata. All methods raise if they cannot tell: an incomplete answer is not an answer."""

    async def report_if_restored(self, bookie: Bookie) -> bool:
        """Return whether metadata was restored from a backup and not confirmed yet; if so, report the bookie's ledger ids."""

    async def purge(self, give_up: Collection[int] = ()) -> Mapping[int, InGrace]:
        """Forget deleted ledgers whose grace period is over, and those to give up. Return those that can still be restored."""

    async def were_purged(self, ledger_ids: Collection[int]) -> Collection[int]:
        """Return those of the ledgers that are remembered as deleted for good. Called after `listing`."""

    async def listing(self) -> Collection[int]:
        """Return all ledger ids; the listing is complete."""

    async def absent(self, ledger_ids: Sequence[int]) -> list[int]:
        """Return those of the ledgers that certainly do not exist: read one by one, not from a lagging follower."""

    async def next_ledger_id(self) -> int:
        """Return the id from which on no ledger can exist according to metadata. Called after `listing`."""

    async def report_missing(self, bookie_id: str, held: int, missing: Collection[int]) -> bool:
        """Record that metadata lacks these ledgers. Return whether an operator has confirmed that they are deleted."""

    async def withdraw_missing(self, bookie_id: str) -> None:
        """Remove that record, if there is one."""


@dataclass(frozen=True, slots=True)
class GcPass:
    """Results of one pass."""

    held: int = 0
    absent: int = 0
    deleted: tuple[int, ...] = ()
    surplus: tuple[int, ...] = ()
    deleted_logs: tuple[int, ...] = ()
    refused_mass: bool = False
    refused_restored: bool = False
    refused_old: bool = False


class GarbageCollector:
    """Runs the passes: `collect` is one pass; `start` runs it at every interval."""

    def __init__(self, bookie: Bookie, ledgers: LedgersInMetadata) -> None:
        self._bookie = bookie
        self._ledgers = ledgers
        self._settings = bookie.settings
        self._suspects: frozenset[int] = frozenset()
        self._surplus = SurplusCopies(bookie, ledgers, limit=self._settings.gc_surplus_ledgers)
        self._in_grace: Mapping[int, InGrace] = {}  # of the ledgers held here
        self._given_up: dict[int, int] = {}  # ledger → about how many bytes of it are held here
        self._warned_of_bytes = 0
        self._was_full = False  # at the last pass
        self._may_be_reported = True  # missing ledgers, perhaps by an earlier process
        self._tasks = TaskOwner(f"{bookie.bookie_id}-gc")
        self.passes = 0
        self.failed_passes = 0
        self.deleted_ledgers = 0

    def start(self) -> None:
        self._tasks.start(self._run(), name="collect")

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def collect(self, *, surplus: bool = True) -> GcPass:
        """Run one pass. If metadata raises, nothing more is deleted, and what the previous pass saw no longer counts.

        `surplus`: also look for surplus copies, which reads metadata records.
        """
        suspects, self._suspects = self._suspects, frozenset()
        if await self._ledgers.report_if_restored(self._bookie):  # rule 4
            hint = "cepheid metadata report shows what metadata lacks; cepheid metadata confirm lets bookies collect it"
            log.warning("gc.metadata_restored", extra={"bookie": self._bookie.bookie_id, "hint": hint})
            return GcPass(refused_restored=True)
        urgent = self._bookie.data_full.is_set()
        in_grace = await self._ledgers.purge(self._to_give_up() if urgent else ())
        try:
            async with asyncio.timeout(_LISTING_S):
                await self._bookie.wait_listed()
        except TimeoutError:
            if not self._bookie.is_index_damaged:
                await self._bookie.reclaim(urgent=urgent)  # without the list
                raise
            # The list cannot be read beyond the damage: this pass can delete only what is listed by now.
        held = self._bookie.ledgers()
        listed = await self._ledgers.listing()
        absent = frozenset(held).difference(listed)
        self._take_grace(held, in_grace)
        refused = await self._refuse(held, absent)
        if refused is not None:
            await self._bookie.reclaim(urgent=urgent)  # space of ledgers that were deleted earlier
            return refused
        condemned = await self._ledgers.absent(sorted(absent & suspects))
        try:
            await self._bookie.delete_ledgers(condemned)
        except Exception:
            if urgent:  # no room in the index for the deletion: dead logs may free some
                await self._bookie.reclaim(urgent=True)
            raise
        self.deleted_ledgers += len(condemned)
        dropped = await self._surplus.collect([ledger_id for ledger_id in held if ledger_id not in absent]) if surplus else []
        self._suspects = absent.difference(condemned)  # before the logs: a walk over a damaged index never completes
        logs = await self._bookie.reclaim(urgent=urgent)
        self.passes += 1
        return GcPass(len(held), len(absent), tuple(condemned), tuple(dropped), tuple(logs))

    async def _refuse(self, held: Collection[int], absent: frozenset[int]) -> GcPass | None:
        """Return the result of a pass that must not delete, because metadata is probably wrong (rules 3 and 6), or None."""
        bookie, missing = self._bookie, absent
        largest = bookie.largest_ledger_id
        next_id = await self._ledgers.next_ledger_id() if absent else largest + 1
        if next_id <= largest:
            bookie.missing_ledgers = len(absent)
            hint = "it is older than this bookie's data: restore the newest backup with cepheid metadata restore before brokers run"
            facts = {"bookie": bookie.bookie_id, "held": len(held), "absent": len(absent), "largest": largest, "next_id": next_id}
            log.error("gc.metadata_is_old", extra={**facts, "hint": hint})
            return GcPass(len(held), len(absent), refused_old=True)
        if self._is_mass(held, missing):
            missing = absent.difference(await self._ledgers.were_purged(absent))
        if not self._is_mass(held, missing):
            bookie.missing_ledgers = 0
            if self._may_be_reported:
                await self._ledgers.withdraw_missing(bookie.bookie_id)
                self._may_be_reported = False
            return None
        self._may_be_reported = True
        if await self._ledgers.report_missing(bookie.bookie_id, len(held), missing):
            return None
        bookie.missing_ledgers = len(missing)
        hint = (
            "check that metadata is complete and of this cluster; if these ledgers were really deleted: "
            f"cepheid bookies confirm-missing {bookie.bookie_id} --metadata URL"
        )
        log.error("gc.mass_absence", extra={"bookie": bookie.bookie_id, "held": len(held), "absent": len(missing), "hint": hint})
        return GcPass(len(held), len(absent), refused_mass=True)

    def _is_mass(self, held: Collection[int], missing: Collection[int]) -> bool:
        settings = self._settings
        return len(held) >= settings.gc_mass_ledgers and len(missing) > len(held) * settings.gc_mass_ratio

    def _take_grace(self, held: Collection[int], in_grace: Mapping[int, InGrace]) -> None:
        self._in_grace = {ledger_id: in_grace[ledger_id] for ledger_id in held if ledger_id in in_grace}
        self._bookie.bytes_in_grace = waiting = sum(ledger.copy_bytes for ledger in self._in_grace.values())
        urgent = self._bookie.data_full.is_set() and not self._settings.shorten_undelete_on_full_disk
        if urgent and waiting and waiting != self._warned_of_bytes:
            hint = "they are kept until their time of grace is over; `cepheid ledgers purge` gives them up now"
            facts = {"bookie": self._bookie.bookie_id, "ledgers": len(self._in_grace), "bytes": waiting}
            log.warning("gc.deleted_ledgers_wait", extra={**facts, "hint": hint})
        self._warned_of_bytes = waiting if urgent else 0

    def _to_give_up(self) -> list[int]:
        """Return as many deleted ledgers as the disk lacks bytes, beginning with the least remaining time (rule 5)."""
        if not self._settings.shorten_undelete_on_full_disk:
            return []
        lacking = self._bookie.lacking_data_bytes - self._given_up_bytes()
        chosen: list[int] = []
        for ledger_id, ledger in sorted(self._in_grace.items(), key=lambda item: (item[1].until_ms, item[0])):
            if lacking <= 0:
                break
            chosen.append(ledger_id)
            lacking -= ledger.copy_bytes
        self._given_up.update((ledger_id, self._in_grace[ledger_id].copy_bytes) for ledger_id in chosen)
        return chosen

    def _given_up_bytes(self) -> int:
        """Return the bytes of given-up ledgers that later passes will delete here."""
        held = frozenset(self._bookie.ledgers())
        self._given_up = {ledger_id: size for ledger_id, size in self._given_up.items() if ledger_id in held}
        return sum(self._given_up.values())

    async def _run(self) -> None:
        loop, settings = asyncio.get_running_loop(), self._settings
        regular_at = loop.time() + settings.gc_interval_s
        while True:
            await self._pause(regular_at)
            regular = loop.time() >= regular_at
            if regular:
                regular_at = loop.time() + settings.gc_interval_s
            try:
                if regular:
                    await self._bookie.count_life()
                await self.collect(surplus=regular or self._bookie.data_full.is_set())
            except Exception as error:  # metadata may be unavailable for hours: the next pass starts again
                self.failed_passes += 1
                self._bookie.failed_collections += 1
                log.warning("gc.pass_failed", extra={"bookie": self._bookie.bookie_id, "error": repr(error)})

    async def _pause(self, regular_at: float) -> None:
        """Wait and return when the next pass is due."""
        loop, settings, full = asyncio.get_running_loop(), self._settings, self._bookie.data_full
        if full.is_set() and self._was_full:
            await asyncio.sleep(min(settings.gc_full_interval_s, settings.gc_interval_s))
        else:
            due = min(regular_at, loop.time() + settings.gc_confirm_s) if self._suspects else regular_at
            try:
                async with asyncio.timeout_at(due):
                    await full.wait()
            except TimeoutError:
                pass
        self._was_full = full.is_set()
