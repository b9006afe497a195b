"""Removes entries that metadata no longer needs, and later the tombstones of deleted ledgers.

Their space in entry logs is reclaimed by `log_collection.py`.

    living ──delete──► tombstone (fenced; no entries) ──tombstone_s──► forgotten
    living ──drop──► empty (fenced; takes recovery adds, since a repair may choose this bookie again)

Rule 1: a ledger's blocks are removed and its tombstone is written in one batch, in the flush thread: no flush is running then, and
none indexes the blocks again.
Rule 2: `drop` compares the number of admitted adds, hides the cached entries and queues the removal from the index in one turn of
the loop. Adds admitted later are flushed after that removal, so they stay. A replay of the journal may restore old entries:
they are dropped again later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from cepheid_bookie.block_index import BlockIndex
from cepheid_bookie.errors import IndexCorruptError
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_bookie.ledger_table import LedgerState, LedgerTable
from cepheid_bookie.write_cache import WriteCache
from cepheid_ports import Worker

log = logging.getLogger(__name__)


class HeldCopy(NamedTuple):
    """A ledger's entries on this bookie at one moment."""

    state: LedgerState
    adds: int
    """Groups admitted so far (`LedgerState.adds`)."""


class LedgerDeletion:
    """Deletes ledgers and drops copies. `flush_worker` is the thread that flushes, one task at a time.

    `on_deleted(ledger_ids)` is called when the index no longer has their entries.
    """

    def __init__(
        self,
        ledgers: LedgerTable,
        cache: WriteCache,
        index: BlockIndex,
        flush_worker: Worker,
        on_deleted: Callable[[Collection[int]], None],
    ) -> None:
        self._ledgers = ledgers
        self._cache = cache
        self._index = index
        self._flush_worker = flush_worker
        self._on_deleted = on_deleted
        self.deleted_ledgers = 0
        self.dropped_copies = 0

    async def delete(self, ledger_ids: Iterable[int], now_ms: int) -> None:
        """Delete the ledgers. If loading or the index raises, they are refused and still listed, and the call can be repeated.

        A ledger whose record is in a damaged part of the index is skipped, and stays listed.
        """
        states: list[LedgerState] = []
        try:
            for ledger_id in ledger_ids:
                try:
                    state = await self._load(ledger_id)
                except IndexCorruptError as error:
                    log.warning("ledger.not_deleted", extra={"ledger_id": ledger_id, "error": error.args[0], "hint": error.hint})
                    continue
                if state is None:
                    continue
                self._ledgers.delete(state, now_ms)
                self._cache.drop(ledger_id)
                states.append(state)
            tombstones: dict[int, LedgerRecord | None] = {state.ledger_id: state.record() for state in states}
            await self._flush_worker.run(lambda: self._index.delete_ledgers(tombstones))
            self._on_deleted(tombstones)
        except BaseException:
            for state in states:
                self._ledgers.on_delete_failed(state)
            raise
        self.deleted_ledgers += len(states)
        if states:
            log.info("ledgers.deleted", extra={"count": len(states)})

    async def look(self, ledger_id: int) -> HeldCopy | None:
        """Return the ledger's copy as it is now, or None if it has no entries here. Raises the errors of loading."""
        state = await self._load(ledger_id)
        return None if state is None or state.deleted or state.last_entry_id < 0 else HeldCopy(state, state.adds)

    async def drop(self, copy: HeldCopy) -> bool:
        """Remove the ledger's entries and keep its record, fenced. Return False if an add may have been admitted since the look.

        Raises the errors of the index; some entries may then be left, and the call can be repeated after another look.
        """
        state, ledger_id = copy.state, copy.state.ledger_id
        if self._ledgers.get(ledger_id) is not state or state.adds != copy.adds or state.deleted:
            return False
        last_entry_id = state.last_entry_id
        self._ledgers.clear(state)
        self._cache.drop(ledger_id)
        emptied: dict[int, LedgerRecord | None] = {ledger_id: state.record()}
        try:
            await self._flush_worker.run(lambda: self._index.delete_ledgers(emptied))
            self._on_deleted(emptied)
        except BaseException:
            state.last_entry_id = max(state.last_entry_id, last_entry_id)  # the index may still have it
            raise
        self.dropped_copies += 1
        return True

    async def forget_tombstones(self, before_ms: int) -> int:
        """Forget tombstones created before that time; a writer that has slept since then is no longer alive. Return their number.

        Only tombstones are visited: a walk over the records of all ledgers would delay flushes for seconds.
        """
        tombstones = self._ledgers.tombstones()

        def work() -> list[int]:
            old: list[int] = []
            for ledger_id in tombstones:
                try:
                    record = self._index.record(ledger_id)
                except IndexCorruptError:
                    continue
                if record is not None and record.deleted and record.deleted_at_ms < before_ms:
                    old.append(ledger_id)
            if old:
                self._index.delete_ledgers(dict.fromkeys(old))
            return old

        old = await self._flush_worker.run(work)
        for ledger_id in old:
            self._ledgers.forget(ledger_id)
        return len(old)

    async def _load(self, ledger_id: int) -> LedgerState | None:
        """Return the ledger's state; None if it was never here."""
        while (state := self._ledgers.get(ledger_id)) is None:
            if not self._ledgers.may_know(ledger_id):
                return None
            await asyncio.shield(self._ledgers.load(ledger_id))  # other callers wait for it too
        return state
