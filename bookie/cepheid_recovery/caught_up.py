"""Whether a bookie has caught up after its start. A rolling restart waits for that before it stops the next bookie.

    start ──► its copies were checked (auditor) ──► no ledger of the cluster lacks a copy ──► caught up
      └───────────────────────── timeout, logged ─────────────────────────────────────────────────┘

Rules:
1. Once caught up, a bookie stays so until its process ends. A bookie that is lost later is a matter for alarms: making all others
   look unready would not help.
2. Only what the auditor saved about this run counts. Figures from before the restart say nothing about it.
3. Without automatic repair in this process there is nothing to wait for.
4. A ledger that is still written and lacks copies only in its last fragment delays the restart for two minutes. Its writer
   replaces the bookie within that time. If no other bookie can take the place, repair can do nothing until the ledger is closed,
   which may be hours later, and its entries are on the other bookies of the fragment.
"""

from __future__ import annotations

import asyncio
import logging

from cepheid_metadata import (
    Audit,
    MetadataError,
    MetadataStore,
    RepairMark,
    RepairSwitch,
    ShortReason,
    StoreClosedError,
    audit_record,
    list_repair_marks,
    repair_marks,
    repair_switch,
)
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)

_POLL_S = 2.0
_OPEN_LEDGER_S = 120.0
_MARKS_READ = 100
"""If there are more ledgers than these, they are not checked one by one: they are not all open."""


def is_short_where_open_alone(mark: RepairMark) -> bool:
    """Return whether all that the ledger lacks is copies in its last fragment, of entries that another bookie has (rule 4)."""
    lacks = any(why is not ShortReason.PLACEMENT for why in mark.bookies.values())
    return lacks and mark.short_entries == 0 and mark.lost_entries == 0 and mark.copies_left > 0


def what_is_missing(audit: Audit | None, off: RepairSwitch | None, bookie_id: str, run: str, *, excused: int = 0) -> str:
    """Return why a bookie has not caught up, empty if it has.

    `run` is the name of its run in the audit, `excused` the number of ledgers that do not delay it although they lack copies.
    """
    repair = "" if off is None else "; automatic repair is off: cepheid repair on"
    if audit is None:
        return f"no walk over all ledgers has ended yet{repair}"
    if audit.runs.get(bookie_id) != run:
        return f"its copies are being checked{repair}"
    if (short := audit.short.ledgers - excused) > 0:
        ledgers = "1 ledger lacks" if short == 1 else f"{short} ledgers lack"
        return f"{ledgers} a copy: cepheid ledgers short{repair}"
    return ""


class CaughtUp:
    """Follows the audit until nothing is missing. Call `start` once and `aclose` once."""

    def __init__(self, store: MetadataStore, bookie_id: str, run: str, timeout_s: float) -> None:
        self._audits = audit_record(store)
        self._switch = repair_switch(store)
        self._store = store
        self._marks = repair_marks(store)
        self._open_since: dict[int, float] = {}
        """Ledgers that are short only in their open fragment, with the loop time when that was first seen."""
        self._bookie_id = bookie_id
        self._run = run
        self._timeout_s = timeout_s
        self._tasks = TaskOwner(f"caught-up {bookie_id}")
        self.missing = "it has just started"
        """Why the bookie has not caught up; empty once it has."""

    def __repr__(self) -> str:
        return f"<CaughtUp {self._bookie_id}: {self.missing or 'yes'}>"

    def start(self) -> None:
        self._tasks.start(self._follow(), name="follow")

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def _follow(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while self.missing:
                    await self._look()
                    if self.missing:
                        await asyncio.sleep(_POLL_S)
        except StoreClosedError:
            return  # the process ends
        except TimeoutError:
            log.warning(
                "bookie.not_caught_up", extra={"bookie": self._bookie_id, "after_s": self._timeout_s, "error": self.missing}
            )
            self.missing = ""
        else:
            log.info("bookie.caught_up", extra={"bookie": self._bookie_id})

    async def _look(self) -> None:
        try:
            audit, off = await self._audits.get(None), await self._switch.get(None)
            excused = 0 if audit is None or not 0 < audit.record.short.ledgers <= _MARKS_READ else await self._excused()
        except StoreClosedError:
            raise
        except MetadataError as error:
            self.missing = f"the audit cannot be read: {error}"
            return
        self.missing = what_is_missing(
            None if audit is None else audit.record,
            None if off is None else off.record,
            self._bookie_id,
            self._run,
            excused=excused,
        )

    async def _excused(self) -> int:
        """Return how many ledgers have been short only in their open fragment for long enough. Raises MetadataError."""
        ledger_ids = [ledger_id async for ledger_id in list_repair_marks(self._store)]
        found = await asyncio.gather(*map(self._marks.get, ledger_ids[:_MARKS_READ]))
        now = asyncio.get_running_loop().time()
        marks = [each.record for each in found if each is not None]
        is_open = [mark.ledger_id for mark in marks if is_short_where_open_alone(mark)]
        self._open_since = {ledger_id: self._open_since.get(ledger_id, now) for ledger_id in is_open}
        return sum(now - since >= _OPEN_LEDGER_S for since in self._open_since.values())
