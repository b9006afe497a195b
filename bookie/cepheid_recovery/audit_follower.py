"""Follows the auditor's results in processes that only show them: brokers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from cepheid_metadata import Audit, MetadataError, MetadataStore, RepairSwitch, StoreClosedError, audit_record, repair_switch
from cepheid_ports import TaskOwner, iso_time
from cepheid_ports.prometheus import Family, gauge
from cepheid_recovery.recovery_metrics import audit_families

log = logging.getLogger(__name__)

_POLL_S = 10.0


class AuditFollower:
    """Reads the audit record and the switch periodically. `start` once, `aclose` once."""

    def __init__(self, store: MetadataStore) -> None:
        self._audits = audit_record(store)
        self._switch = repair_switch(store)
        self._tasks = TaskOwner("audit-follower")
        self.audit: Audit | None = None
        self.off: RepairSwitch | None = None

    def __repr__(self) -> str:
        return f"<AuditFollower {self.audit!r}>"

    def start(self) -> None:
        self._tasks.start(self._run(), name="follow")

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def look(self) -> None:
        """Raises MetadataError."""
        audit, switch = await self._audits.get(None), await self._switch.get(None)
        self.audit = None if audit is None else audit.record
        self.off = None if switch is None else switch.record

    def problems(self) -> list[str]:
        """Return sentences about problems with copies."""
        found: list[str] = []
        if self.off is not None:
            why = f" ({self.off.reason})" if self.off.reason else ""
            found.append(f"automatic repair is off since {iso_time(self.off.off_since_ms)}{why}: `cepheid repair on`")
        if self.audit is not None and self.audit.short.lost_entries:
            found.append(f"{self.audit.short.lost_entries} entries have no valid copy: `cepheid ledgers short` names their ledgers")
        return found

    def families(self) -> Iterator[Family]:
        """Return the figures of the cluster as metrics."""
        yield gauge("cepheid_repair_off", "1: automatic repair is switched off in the cluster.", self.off is not None)
        yield from audit_families(self.audit)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except StoreClosedError:
                return
            except MetadataError as error:
                log.debug("audit.not_read", extra={"error": str(error)})
            await asyncio.sleep(_POLL_S)
