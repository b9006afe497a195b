"""Removes consumed ledgers from a chain and deletes them.

    plan_trim ──► cursors leave the ledgers, durably ──► chain without them, deletion queue with them ──► ledgers deleted

Rules:
1. The decision and the positions of cursors are under one lock: what was decided stays true until it is recorded. Only reads may
   start meanwhile: they are checked again in the step in which the record is written.
2. First the record (and the list in memory with it), then any data: a crash in between leaves the deletion queue.
3. The clock that decides never runs faster than the loop's since opening: a wall clock that jumps ahead expires nothing.
4. A ledger that is due to be offloaded stays until its copy is complete, or for a limited time if it cannot be copied. `held` has
   these ledgers; a truncation ignores them.
5. Objects of ledgers that leave are queued for deletion in the same record. Their number and the bytes of their URLs are limited,
   so a trim may take several steps while the object store is unavailable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from cepheid_managed_ledger.chain_edits import LEAVE_AT_ONCE, count_that_may_leave, without_first
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.cursor import Cursor
from cepheid_managed_ledger.cursor_store import CursorStore
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.trim import Retention, plan_trim
from cepheid_metadata import Chain, Op, Position
from cepheid_ports import SteadyClock
from cepheid_wire import TopicName

log = logging.getLogger(__name__)


class Trimmer:
    def __init__(
        self,
        topic: TopicName,
        keeper: ChainKeeper,
        ledgers: LedgerList,
        cursors: CursorStore,
        readers: Callable[[], Iterable[Cursor]],
        is_in_use: Callable[[int], bool],
        positions: asyncio.Lock,
        clock: SteadyClock,
        held: Callable[[], Mapping[int, object]] = dict,
    ) -> None:
        self._topic = topic
        self._keeper = keeper
        self._ledgers = ledgers
        self._cursors = cursors
        self._readers = readers  # non-durable cursors: they do not hold ledgers, and are moved along
        self._is_in_use = is_in_use
        self._positions = positions
        self._clock = clock
        self._held = held
        self.trimmed = 0

    def plan(self, retention: Retention, *, holds: bool = True) -> int:
        """Return how many ledgers may be removed now. `holds`: those that are due to be offloaded stay."""
        chain = self._keeper.chain
        if len(chain.ledgers) < 2:
            return 0
        saved = [self._ledgers.rank(position) for position in self._cursors.saved_mark_deletes]

        def plan(is_in_use: Callable[[int], bool]) -> int:
            return plan_trim(
                chain.ledgers,
                last_size_bytes=self._ledgers.last_size_bytes,
                acknowledged_entries=min(saved, default=None),
                retention=retention,
                now_ms=self._clock.now_ms(),
                is_in_use=is_in_use,
            )

        count = plan(self._is_in_use)
        if count and holds and (held := self._held()):
            count = plan(lambda ledger_id: self._is_in_use(ledger_id) or ledger_id in held)
        return min(count, count_that_may_leave(chain), LEAVE_AT_ONCE) if count else 0

    async def run(self, retention: Callable[[], Retention], *, holds: bool = True) -> int:
        """Remove ledgers; return how many. Raises ManagedLedgerError, MetadataError, LedgerError: nothing was removed."""
        async with self._positions:
            count = self.plan(retention(), holds=holds)
            if count == 0:
                return 0
            going = self._keeper.chain.ledgers[:count]
            edge = Position(self._keeper.chain.ledgers[count].ledger_id, -1)
            moved = [cursor for cursor in self._cursors.cursors if cursor.leave_trimmed(edge)]
            await asyncio.gather(*(cursor.saved() for cursor in moved))  # only of these: other cursors may fail to save
            if self.plan(retention(), holds=holds) < count:  # the policy changed meanwhile, or a read started
                return 0
            is_read = False

            def plan(chain: Chain) -> tuple[Chain | None, Sequence[Op]]:
                nonlocal is_read
                is_read = any(self._is_in_use(ledger.ledger_id) for ledger in going)
                if is_read:  # a read started while another write of the chain was under way
                    return None, ()
                assert chain.ledgers[:count] == going, f"the head of the chain changed: {chain.ledgers}"
                return without_first(chain, count), ()

            await self._keeper.commit(plan)
            if is_read:
                return 0
            for cursor in self._readers():
                cursor.leave_trimmed(edge)
        self.trimmed += count
        fields = {"topic": str(self._topic), "ledgers": count, "first": going[0].ledger_id, "last": going[-1].ledger_id}
        log.info("ledgers.trimmed", extra=fields)
        return count
