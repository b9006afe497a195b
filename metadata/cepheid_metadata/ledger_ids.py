"""Ledger ids: 63 bits, never given out twice, taken from a counter record in blocks.

    counter 1001 ──compare-and-set──► 2001      this process owns 1001..2000 and gives them out from memory

A process that stops loses the rest of its block: ids are plenty, and reuse would join two ledgers on the bookies.
Blocks of two processes are used at the same time, so ids rise only within a process. Positions compare by ledger id, so a
chain that changes owners needs an id `above` its last one; and a new chain needs the `newest`, since it is unknown which ids a
topic of that name had before it was deleted.
"""

from __future__ import annotations

import asyncio

from cepheid_metadata import keys
from cepheid_metadata.errors import BadVersionError, KeyExistsError, LedgerIdsRolledBackError, NoSuchKeyError
from cepheid_metadata.ledger_records import LedgerIdCounter
from cepheid_metadata.listing import largest_ledger_id
from cepheid_metadata.repositories import Records
from cepheid_metadata.restored_metadata import require_reports
from cepheid_metadata.store import Check, MetadataStore

FIRST_LEDGER_ID = 1


class LedgerIds:
    def __init__(self, store: MetadataStore, block: int = 1_000) -> None:
        self._store = store
        self._counter: Records[None, LedgerIdCounter] = Records(store, lambda _: keys.LEDGER_IDS_KEY, LedgerIdCounter)
        self._block = block
        self._next = self._end = 0
        self._refilling = asyncio.Lock()
        self._refills = 0  # started so far
        self._refill = 0  # the one that the block belongs to
        self._oldest_refill = 0  # the first whose block may be used

    def __repr__(self) -> str:
        return f"<LedgerIds {self._end - self._next} left, next {self._next}>"

    async def take(self, *, above: int = -1, newest: bool = False) -> int:
        """Return an id that was never used, larger than `above`; the `newest` is larger than all ids given out before this call.

        Raises the errors of the store (then nothing was taken), LedgerIdsRolledBackError if `above` itself was never given out, and
        RestoreNotReportedError after a restore of metadata, until each bookie has reported which ids are in use.
        """
        oldest_refill = self._refills + 1 if newest else 0
        self._go_above(above)
        while self._next == self._end or self._refill < max(oldest_refill, self._oldest_refill):
            async with self._refilling:
                if self._next == self._end or self._refill < max(oldest_refill, self._oldest_refill):
                    self._refills = refill = self._refills + 1
                    if self._refill < self._oldest_refill or not await self._has_newest_block():
                        self._next, self._end = await self._take_block(above)
                    self._refill = refill
            self._go_above(above)
        self._next += 1
        return self._next - 1

    def drop_block(self) -> None:
        """Take only ids from now on that the counter has not given out so far.

        A bookie that returned on empty disks takes no part in ledgers with older ids: with a block of them, hundreds of ledgers
        would be without that bookie.
        """
        self._oldest_refill = self._refills + 1

    def _go_above(self, above: int) -> None:
        self._next = min(max(self._next, above + 1), self._end)

    async def check(self) -> None:
        """Raise LedgerIdsRolledBackError if there is a ledger whose id the counter has not given out yet."""
        largest = await largest_ledger_id(self._store)
        found = await self._counter.get(None)
        next_ledger_id = FIRST_LEDGER_ID if found is None else found.record.next_ledger_id
        if largest is not None and largest >= next_ledger_id:
            raise _rolled_back(largest, next_ledger_id)

    async def _has_newest_block(self) -> bool:
        """Whether the counter has given out no ids above those that are left here."""
        if self._next == self._end:
            return False
        found = await self._counter.get(None)
        if found is None or found.record.next_ledger_id != self._end:
            return False
        try:  # the value read may be old: a write that changes nothing detects that
            await self._store.multi([Check(keys.LEDGER_IDS_KEY, found.version)])
        except (BadVersionError, NoSuchKeyError):
            return False
        return True

    async def _take_block(self, above: int) -> tuple[int, int]:
        # An unknown outcome does no harm: at worst that block stays unused.
        while True:
            found = await self._counter.get(None)
            first = FIRST_LEDGER_ID if found is None else found.record.next_ledger_id
            if above >= first:
                raise _rolled_back(above, first)
            try:
                if found is None:
                    await self._counter.create(None, LedgerIdCounter(next_ledger_id=first + self._block))
                else:
                    if found.record.restored:
                        await require_reports(self._store)  # a restore after this read of the counter makes the write fail
                    counter = found.record.replace(next_ledger_id=first + self._block)
                    await self._counter.replace(None, counter, found.version)
            except (BadVersionError, KeyExistsError):
                continue  # another process took that block
            return first, first + self._block


async def raise_ledger_ids(store: MetadataStore, at_least: int) -> None:
    """Make the next block of ids begin at `at_least` or above. No running broker may have a block left: it would not notice."""
    counter: Records[None, LedgerIdCounter] = Records(store, lambda _: keys.LEDGER_IDS_KEY, LedgerIdCounter)
    while True:
        found = await counter.get(None)
        try:
            if found is None:
                await counter.create(None, LedgerIdCounter(next_ledger_id=at_least))
            elif found.record.next_ledger_id < at_least:
                await counter.replace(None, found.record.replace(next_ledger_id=at_least), found.version)
        except (BadVersionError, KeyExistsError):
            continue  # a bookie raised it at this moment
        return


def _rolled_back(ledger_id: int, next_ledger_id: int) -> LedgerIdsRolledBackError:
    message = f"ledger {ledger_id} exists, but the id counter is at {next_ledger_id}"
    return LedgerIdsRolledBackError(message, ledger_id=ledger_id, next_ledger_id=next_ledger_id)
