"""Counts the ledgers of open topics with a bookie that does not run. They can be read, but one more loss may be too much.

    every CHECK_S ──► all expected bookies run ──► nothing to look up
                  └─► one does not ──► ledgers of open topics ──► written here: its writer knows the bookies
                                                              └─► closed: its record, read once, some in each round
    scrape ──► number of ledgers by set of bookies (few sets) × registered bookies ──► the figures

Rules:
1. A scrape does not iterate over topics. A round takes the loop for `_IN_ONE_TURN` ledgers at a time, and reads `_READ_IN_A_ROUND`
  records.
2. Records are read only while a bookie is missing. Each ledger that lacks a copy is looked up again every `_TURNS` rounds, since it
   may have been repaired.
3. Empty ledgers lack nothing, and are not counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cepheid_ledger import BookieStates, LedgerClient, NoSuchLedgerError, bookies_of
from cepheid_managed_ledger.managed_ledger import ManagedLedger
from cepheid_metadata import StoreClosedError
from cepheid_ports import CepheidError
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

CHECK_S = 5.0
_READ_IN_A_ROUND = 500
_AT_ONCE = 20
_IN_ONE_TURN = 2_000
_TURNS = 16

Bookies = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnderReplicatedFigures:
    """`ledgers` of open topics have a bookie that does not run, or are written without one; `not_looked_up` may be further ones."""

    ledgers: int
    not_looked_up: int


class UnderReplicated:
    def __init__(self, client: LedgerClient, opened: Mapping[TopicName, ManagedLedger], bookies: BookieStates) -> None:
        self._client = client
        self._opened = opened
        self._bookies = bookies
        self._ended: dict[int, Bookies] = {}  # bookies of ledgers that are not written here
        self._failed: dict[int, None] = {}  # records that could not be read: others are read first
        self._counts: Counter[Bookies] = Counter()  # ledgers by their bookies
        self._without_spare = 0  # ledgers whose bookies all run, but that are written without one of them
        self._not_looked_up = 0
        self._rounds = 0

    def __repr__(self) -> str:
        return f"<UnderReplicated {self.statistics()}>"

    def statistics(self) -> UnderReplicatedFigures:
        registered = frozenset(self._bookies.registered())
        short = sum(count for bookies, count in self._counts.items() if not registered.issuperset(bookies))
        waiting = self._client.ensemble_change_statistics().ledgers_waiting  # newer than the last round
        return UnderReplicatedFigures(max(short + self._without_spare, waiting), self._not_looked_up)

    async def run(self) -> None:
        """Check until the task is cancelled, or the store closed."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self.look()
            except StoreClosedError:
                return

    async def look(self) -> None:
        """Do one round. Raises StoreClosedError."""
        registered = frozenset(self._bookies.registered())
        self._rounds += 1
        if registered.issuperset(self._bookies.expected()):
            self._ended, self._failed, self._counts = {}, {}, Counter()
            self._without_spare = self._not_looked_up = 0
            return
        ended: dict[int, Bookies] = {}
        counts: Counter[Bookies] = Counter()
        fresh: list[int] = []
        again: list[int] = []
        failed: list[int] = []
        without_spare = unknown = 0
        for number, ledger_id in enumerate(self._ledger_ids(), 1):
            if (writer := self._client.open_writer(ledger_id)) is not None:
                bookies = writer.bookies
                counts[bookies] += 1
                without_spare += bool(writer.under_replicated) and registered.issuperset(bookies)
            elif (known := self._ended.get(ledger_id)) is not None:
                ended[ledger_id] = known
                counts[known] += 1
                if ledger_id % _TURNS == self._rounds % _TURNS and not registered.issuperset(known):
                    _append(again, ledger_id)
            else:
                unknown += 1
                _append(failed if ledger_id in self._failed else fresh, ledger_id)
            if number % _IN_ONE_TURN == 0:
                await asyncio.sleep(0)
        read = await self._read([*fresh, *again, *failed][:_READ_IN_A_ROUND])
        for ledger_id, now in read.items():
            if (before := ended.get(ledger_id)) is not None:
                counts[before] -= 1
            else:
                unknown -= 1
            ended[ledger_id] = now
            counts[now] += 1
        self._ended, self._counts = ended, +counts
        self._without_spare, self._not_looked_up = without_spare, unknown

    def _ledger_ids(self) -> Iterator[int]:
        for managed_ledger in list(self._opened.values()):
            yield from managed_ledger.stored_ledger_ids()

    async def _read(self, ledger_ids: list[int]) -> dict[int, Bookies]:
        """Return the bookies of these ledgers, without those whose record cannot be read now."""
        read: dict[int, Bookies] = {}
        sets = {bookies: bookies for bookies in self._counts}  # thousands of ledgers share a few of them
        for first in range(0, len(ledger_ids), _AT_ONCE):
            part = ledger_ids[first : first + _AT_ONCE]
            for ledger_id, bookies in zip(part, await asyncio.gather(*map(self._look_up, part)), strict=True):
                if bookies is None:
                    self._failed[ledger_id] = None
                else:
                    self._failed.pop(ledger_id, None)
                    read[ledger_id] = sets.setdefault(bookies, bookies)
        return read

    async def _look_up(self, ledger_id: int) -> Bookies | None:
        try:
            return bookies_of(await self._client.metadata_of(ledger_id))
        except NoSuchLedgerError:
            return ()  # it was deleted meanwhile
        except StoreClosedError:
            raise
        except (CepheidError, TimeoutError) as error:
            log.info("ledger.not_looked_up", extra={"ledger_id": ledger_id, "error": str(error)})
            return None


def _append(ledger_ids: list[int], ledger_id: int) -> None:
    if len(ledger_ids) < _READ_IN_A_ROUND:
        ledger_ids.append(ledger_id)
