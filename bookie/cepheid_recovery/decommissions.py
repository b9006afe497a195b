"""The auditor's part of decommissionings: when the disks of a bookie may be discarded, and when metadata forgets the bookie.

    draining ──a walk finds that nothing needs it──► drained ──stopped for the grace period──► forgotten

Rules:
1. A bookie is drained only after a walk that began when every broker and worker had known for some time that it is draining: until
   then one of them may give it another ledger.
2. It is not drained while it may have the last copies of a deleted ledger that can be restored, or the only copy of an entry.
3. Metadata forgets a drained bookie only when it has been gone for the grace period: a bookie that only lost its session would
   return as an unknown one, and be used again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from cepheid_metadata import (
    BadVersionError,
    BookieHoldings,
    DecommissionedBookie,
    KeyExistsError,
    MetadataStore,
    NoSuchKeyError,
    Op,
    bookie_cookies,
    bookie_lives,
    decommissioned_bookies,
    draining_bookies,
)
from cepheid_metadata.repair_views import last_copies_of_deleted, marks_remembering, unchecked_ledgers_naming
from cepheid_ports import Ports
from cepheid_recovery.cluster_state import ClusterState
from cepheid_recovery.settings import RecoverySettings
from cepheid_recovery.shortage import BookiesSeen

log = logging.getLogger(__name__)

_POLLS_UNTIL_KNOWN = 2
"""Number of polls after which every process knows which bookies are draining."""


@dataclass(slots=True)
class Finished:
    """`forgotten`: bookies that metadata no longer knows. `needs_walk`: another walk may find that a bookie is drained."""

    forgotten: list[str] = field(default_factory=list)
    needs_walk: bool = False


class Decommissions:
    """All methods raise MetadataError."""

    def __init__(self, store: MetadataStore, state: ClusterState, settings: RecoverySettings, ports: Ports) -> None:
        self._store = store
        self._state = state
        self._settings = settings
        self._ports = ports
        self._draining = draining_bookies(store)
        self._cookies = bookie_cookies(store)
        self._lives = bookie_lives(store)
        self._gone = decommissioned_bookies(store)
        self._kept_for: dict[str, list[str]] = {}  # by bookie, the keys of records for whose sake it has to keep its disks
        self.draining_since: dict[str, float] = {}
        """Loop time at which this process first saw the bookie draining."""

    def __repr__(self) -> str:
        return f"<Decommissions of {', '.join(sorted(self.draining_since)) or 'no bookie'}>"

    def look(self) -> None:
        """Note which bookies are draining now."""
        now = asyncio.get_running_loop().time()
        self.draining_since = {bookie: self.draining_since.get(bookie, now) for bookie in self._state.draining}

    async def on_walked(
        self, draining: Collection[str], holdings: dict[str, BookieHoldings], *, began: float, unreadable: int
    ) -> None:
        """Save the progress of each decommissioning after a walk that began at this loop time (rules 1 and 2)."""
        now_ms, known_for_s = self._ports.wall_ms(), _POLLS_UNTIL_KNOWN * self._settings.poll_s
        for bookie in sorted(draining):
            found = await self._draining.get(bookie)
            if found is None:
                continue
            ledgers = holdings.get(bookie, BookieHoldings()).ledgers
            record = found.record
            if record.ledgers_at_start is None:
                record = record.replace(ledgers_at_start=ledgers)
            is_known = began - self.draining_since.get(bookie, began) >= known_for_s
            is_drained = is_known and ledgers == 0 and unreadable == 0  # an unreadable record may name it
            is_drained = is_drained and not await self._must_be_kept(bookie)
            record = record.replace(drained_at_ms=(record.drained_at_ms or now_ms) if is_drained else None)
            if record != found.record:
                try:
                    await self._draining.replace(bookie, record, found.version)
                except (BadVersionError, NoSuchKeyError):
                    continue
                if record.drained_at_ms is not None:
                    log.info("bookie.drained", extra={"bookie": bookie})

    async def finish(self, seen: BookiesSeen, needed: Collection[str]) -> Finished:
        """Remove the records of bookies that were drained and have been gone for the grace period (rule 3).

        `needed`: bookies that cannot be drained yet, as far as the auditor knows.
        """
        finished = Finished()
        for bookie in sorted(seen.draining):
            found = await self._draining.get(bookie)
            if found is None:
                continue
            if found.record.drained_at_ms is None:
                if bookie not in needed and not await self._is_kept(bookie):
                    finished.needs_walk = True
            elif bookie not in seen.registered and bookie not in seen.waiting:  # otherwise it may be restarting, with its cookie
                if await self._must_be_kept(bookie):  # since the last walk
                    finished.needs_walk = True
                elif await self._forget(bookie, found.version):
                    finished.forgotten.append(bookie)
        return finished

    async def _must_be_kept(self, bookie: str) -> bool:
        """Return whether anything besides the records of ledgers needs the copies of a bookie."""
        staying = self._state.registered() - self._state.draining
        deleted = await last_copies_of_deleted(self._store, bookie, staying)
        # In this order: a ledger that is brought back meanwhile is on one of the two lists.
        unchecked = await unchecked_ledgers_naming(self._store, bookie)
        self._kept_for[bookie] = [*deleted, *unchecked, *await marks_remembering(self._store, bookie)]
        return bool(self._kept_for[bookie])

    async def _is_kept(self, bookie: str) -> bool:
        """Return whether a record that the last `_must_be_kept` found is still there."""
        kept_for = self._kept_for.get(bookie, [])
        while kept_for and await self._store.get(kept_for[-1]) is None:
            kept_for.pop()
        return bool(kept_for)

    async def _forget(self, bookie: str, version: int) -> bool:
        """Remove what metadata knows of a bookie, except that its disks were emptied. Return False if that changed meanwhile."""
        cookie, life = await self._cookies.get(bookie), await self._lives.get(bookie)
        ops: list[Op] = [self._draining.delete_op(bookie, version)]
        ops += [] if cookie is None else [self._cookies.delete_op(bookie, cookie.version)]
        ops += [] if life is None else [self._lives.delete_op(bookie, life.version)]
        if cookie is not None:
            record = DecommissionedBookie(bookie_id=bookie, incarnation=cookie.record.incarnation, at_ms=self._ports.wall_ms())
            before = await self._gone.get(bookie)
            create, replace = self._gone.create_op, self._gone.replace_op
            ops.append(create(bookie, record) if before is None else replace(bookie, record, before.version))
        try:
            await self._store.multi(ops)
        except (BadVersionError, KeyExistsError, NoSuchKeyError):
            return False
        log.info("bookie.decommissioned", extra={"bookie": bookie})
        return True
