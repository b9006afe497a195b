"""Drops surplus copies: entries of closed ledgers whose metadata record names this bookie in no fragment.

A bookie that returns after its ledgers were repaired elsewhere holds such copies, as does one that a writer replaced before
anything was confirmed.

    pass n      a slice of the ledgers held here ► record: closed, names this bookie nowhere ► suspect
    pass n + 1  number of adds admitted (A) ► record: unchanged ► touch it (same content, new version)
                ► still A? ──same turn of the loop──► drop the entries

A replication worker may copy the same ledger to this bookie meanwhile (apache/bookkeeper#4668). It reads the record, copies,
and then names the bookie by compare-and-set at exactly the version that it read; it never reads again without copying again.

Rule 1: the touch is the fence: a worker that read the record before it can no longer name this bookie, whatever it has copied.
So the touch must have succeeded; an unknown outcome ends the attempt. A stale read is harmless: its touch fails.
Rule 2: a worker that reads the record after the touch sends all its adds later. Those admitted before the drop keep the entries
here; those admitted later are new entries, which the drop does not remove (`ledger_deletion.py`, rule 3).
Rule 3: while adds are admitted from one pass to the next, the record is left alone: a touch would make their sender start again.
Rule 4: while a ledger is marked for repair, none of its entries are dropped: this copy may be the only one that has an entry.
Rule 5: if at least one fragment of a ledger names this bookie, its copy is kept with all entries.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, islice
from typing import Protocol

from cepheid_bookie.bookie import Bookie
from cepheid_bookie.errors import IndexCorruptError
from cepheid_metadata import Found, LedgerMetadata

log = logging.getLogger(__name__)


class LedgersToTouch(Protocol):
    """Access to metadata. All methods raise if they cannot tell."""

    async def record(self, ledger_id: int) -> Found[LedgerMetadata] | None:
        """Return a ledger's record, no older than the last listing; None if it is deleted, or this release cannot read it."""

    async def is_marked(self, ledger_id: int) -> bool:
        """Return whether the ledger waits for repair."""

    async def touch(self, found: Found[LedgerMetadata]) -> bool:
        """Write the record again as read, so that its version rises. Return False if it has another version by now."""


def is_surplus(ledger: LedgerMetadata, bookie_id: str) -> bool:
    """Return whether a copy of the ledger on that bookie is useless: the ledger is closed, and no fragment names the bookie."""
    return ledger.is_closed and not any(bookie_id in fragment.ensemble for fragment in ledger.fragments)


class SurplusCopies:
    """Finds and drops surplus copies, among at most `limit` ledgers per pass."""

    def __init__(self, bookie: Bookie, ledgers: LedgersToTouch, *, limit: int) -> None:
        self._bookie = bookie
        self._ledgers = ledgers
        self._limit = limit
        self._suspects: dict[int, int] = {}  # ledger → adds admitted to it when it was found surplus
        self._looked_through = -1  # the last ledger of the previous slice

    async def collect(self, ledger_ids: Sequence[int]) -> list[int]:
        """Run one pass over ledgers that are held here and in metadata, ascending; return those whose entries were dropped.

        Raises the errors of metadata and index; what the previous pass saw then no longer counts.
        """
        suspects, self._suspects = self._suspects, {}
        dropped = [ledger_id for ledger_id, adds in suspects.items() if await self._drop(ledger_id, adds)]
        if dropped:
            log.info("ledgers.surplus_dropped", extra={"bookie": self._bookie.bookie_id, "count": len(dropped)})
        found: dict[int, int] = {}
        for ledger_id in self._next_slice(ledger_ids, self._limit - len(suspects)):
            adds = self._bookie.admitted_adds(ledger_id)
            record = await self._ledgers.record(ledger_id)
            if record is not None and is_surplus(record.record, self._bookie.bookie_id):
                found[ledger_id] = adds
        self._suspects = found
        return dropped

    async def _drop(self, ledger_id: int, adds: int) -> bool:
        try:
            copy = await self._bookie.look_at_copy(ledger_id)
        except IndexCorruptError:
            return False  # its record cannot be read; the other ledgers are not affected
        if copy is None or copy.adds != adds:  # there is nothing to drop, or rule 3
            return False
        found = await self._ledgers.record(ledger_id)
        if found is None or not is_surplus(found.record, self._bookie.bookie_id) or await self._ledgers.is_marked(ledger_id):
            return False
        if not await self._ledgers.touch(found):
            return False
        return await self._bookie.drop_copy(copy)

    def _next_slice(self, ledger_ids: Sequence[int], count: int) -> list[int]:
        """Return up to `count` ledgers that follow those of the previous slice, beginning again after the last one."""
        start = bisect_right(ledger_ids, self._looked_through)
        rotated = chain(islice(ledger_ids, start, None), islice(ledger_ids, start))
        ids = list(islice(rotated, max(0, count)))
        if ids:
            self._looked_through = ids[-1]
        return ids
