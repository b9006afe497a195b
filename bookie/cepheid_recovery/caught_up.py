"""Whether a bookie has caught up after its start. A rolling restart waits for that before it stops the next bookie.

    start ──► its copies were checked (auditor) ──► no ledger of the cluster lacks a copy ──► caught up
      └───────────────────────── timeout, logged ─────────────────────────────────────────────────┘

Rules:
1. Once caught up, a bookie stays so until its process ends. A bookie that is lost later is a matter for alarms: if it made all
   others look unready, nothing would be gained.
2. Only what the auditor saved about this very run counts. Figures from before the restart say nothing about it.
3. Without automatic repair in this process there is nothing to wait for.
"""

from __future__ import annotations

import asyncio
import logging

from cepheid_metadata import Audit, MetadataError, MetadataStore, RepairSwitch, StoreClosedError, audit_record, repair_switch
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)

_POLL_S = 2.0


def what_is_missing(audit: Audit | None, off: RepairSwitch | None, bookie_id: str, run: str) -> str:
    """Return why a bookie has not caught up, empty if it has. `run` is the name of its run in the audit."""
    repair = "" if off is None else "; automatic repair is off: cepheid repair on"
    if audit is None:
        return f"no walk over all ledgers has ended yet{repair}"
    if audit.runs.get(bookie_id) != run:
        return f"its copies are being checked{repair}"
    if audit.short.ledgers:
        ledgers = "1 ledger lacks" if audit.short.ledgers == 1 else f"{audit.short.ledgers} ledgers lack"
        return f"{ledgers} a copy: cepheid ledgers short{repair}"
    return ""


class CaughtUp:
    """Follows the audit until nothing is missing. `start` once, `aclose` once."""

    def __init__(self, store: MetadataStore, bookie_id: str, run: str, timeout_s: float) -> None:
        self._audits = audit_record(store)
        self._switch = repair_switch(store)
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
        except StoreClosedError:
            raise
        except MetadataError as error:
            self.missing = f"the audit cannot be read: {error}"
            return
        self.missing = what_is_missing(
            None if audit is None else audit.record, None if off is None else off.record, self._bookie_id, self._run
        )
