"""Reads one ledger without recovering it.

    read(first, last) ──► bounded by the known end ──► one fragment ──► one replica, else the next ──► verified groups
                                                                    └─► striped: several, merged by entry id
    wait_for_lac(above) ──► parked at the bookies and at the metadata, until there are more entries, or the end

The known end is what is certainly confirmed: the last entry of a closed ledger, the LAC of a writer in this process, else
the largest LAC that bookies reported. A reader never returns an entry above it.
The record may change under a reader: ensembles change, repair moves entries. A read that fails under one version is tried under the
next, and "no such entry" is only reported for a version that is still the current one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cepheid_ledger.errors import (
    EntryBeyondEndError,
    EntryDamagedError,
    EntryUnavailableError,
    LedgerError,
    LedgerLostError,
    NoSuchEntryError,
)
from cepheid_ledger.lac_reads import ask_lac, may_hide_entries, poll_lac
from cepheid_ledger.ledger_writer import LedgerWriter, WriterPhase
from cepheid_ledger.metadata_loop import LedgerRecords, read_ledger
from cepheid_ledger.replica_read import ConnectionOf, read_range
from cepheid_ledger.settings import MIB, LedgerSettings
from cepheid_ledger.striped_read import read_striped
from cepheid_metadata import Fragment, LedgerMetadata, SessionLostError, StoreUnavailableError
from cepheid_rpc import EntryGroup, ReadRequest

_STAY_BYTES = 16 * MIB
"""Bytes read from one replica before the next one is used: enough for a disk's read-ahead, few enough to spread the load."""


class LedgerReader:
    """Reads one ledger. Created by `LedgerClient.open_reader`; need not be closed."""

    def __init__(
        self,
        ledger: LedgerMetadata,
        records: LedgerRecords,
        connection_of: ConnectionOf,
        writer: LedgerWriter | None,
        settings: LedgerSettings,
        *,
        distance_of: Callable[[str], int] | None = None,
    ) -> None:
        self.ledger_id = ledger.ledger_id
        self._ledger = ledger
        self._last_add_confirmed = ledger.last_fragment.first_entry_id - 1  # never falls
        self._records = records
        self._connection_of = connection_of
        self._writer = writer
        self._settings = settings
        self._distance_of = distance_of
        self._turn = ledger.ledger_id % ledger.ensemble_size  # readers of many ledgers start at different replicas
        self._turn_in: tuple[str, ...] = ()  # the ensemble in which the position `_turn` was chosen
        self._stayed_bytes = 0
        self.silent: tuple[str, ...] = ()  # bookies of an open ledger that returned no LAC at the last request
        self._avoided: tuple[int, ...] = ()  # positions of a striped ensemble that failed since the last turn

    def __repr__(self) -> str:
        return f"<LedgerReader {self.ledger_id} {self._ledger.state}, known end {self.known_end}>"

    @property
    def metadata(self) -> LedgerMetadata:
        """The record as last read."""
        return self._ledger

    @property
    def known_end(self) -> int:
        """The last entry that may be read without asking a bookie."""
        if self._ledger.last_entry_id is not None:
            return self._ledger.last_entry_id
        if self._writer is not None:
            return max(self._writer.last_add_confirmed, self._last_add_confirmed)
        return self._last_add_confirmed

    @property
    def may_miss_entries(self) -> bool:
        """Whether so many bookies returned no LAC that all holders of the next confirmed entries may be among them."""
        return bool(self.silent) and not self._ledger.is_closed and may_hide_entries(self._ledger, self.silent)

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        """Read verified entries in order from `first` to at most `last` (inclusive): about `max_bytes`, at least one entry.

        Raises EntryBeyondEndError (above what is confirmed), NoSuchEntryError and LedgerLostError (certain: data is lost),
        EntryUnavailableError (try again; certain when it is an EntryDamagedError), NoSuchLedgerError (deleted).
        """
        assert 0 <= first <= last, f"{first}..{last} is not a range of entries"
        end = self.known_end if first <= self.known_end else await self.read_lac()
        if first > end:
            message = f"entry {self.ledger_id}:{first} is above the known end {end}"
            raise EntryBeyondEndError(message, ledger_id=self.ledger_id, entry_id=first, known_end=end)
        while True:
            fragment = self._ledger.fragment_of(first)
            try:
                return await self._read(fragment, first, min(last, end), max_bytes)
            except (EntryUnavailableError, NoSuchEntryError, LedgerLostError) as error:
                await self._look_again(error)
                if self._ledger.fragment_of(first) == fragment:
                    raise

    async def read_lac(self) -> int:
        """Return the last entry known to be confirmed; for a closed ledger its last. May be too low, never too high.

        Raises NoSuchLedgerError.
        """
        if not self._ledger.is_closed and not self._is_written_here:
            self._take((await read_ledger(self._records, self.ledger_id)).record)
            if not self._ledger.is_closed:
                told = await ask_lac(self._ledger, self._connection_of, self._settings)
                self._last_add_confirmed = max(self._last_add_confirmed, told.last_add_confirmed)
                self.silent = told.silent
        return self.known_end

    async def wait_for_lac(self, above: int, timeout_s: float) -> int:
        """Wait until the known end is above `above`, the ledger is closed, or the time is over; return the known end.

        Waiting costs nothing while nothing happens: the bookies hold the request, and metadata reports a new ensemble or the end.
        Raises NoSuchLedgerError (deleted meanwhile).
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.known_end <= above and not self._ledger.is_closed:
                    await self._wait_for_news(above)
        except TimeoutError:
            pass
        return self.known_end

    @property
    def _is_written_here(self) -> bool:
        """True while the local writer is healthy: a failed one is not informed when recovery closes its ledger."""
        return self._writer is not None and self._writer.state is WriterPhase.OPEN

    async def _wait_for_news(self, above: int) -> None:
        try:
            watch = await self._records.store.watch(self._records.key_of(self.ledger_id))
        except (StoreUnavailableError, SessionLostError):  # bookies work without metadata, and so do their readers
            await self._poll(above, asyncio.sleep(self._settings.long_poll_pause_s))
            return
        with watch:
            try:
                self._take((await read_ledger(self._records, self.ledger_id)).record)
                if self.known_end <= above and not self._ledger.is_closed:
                    await self._poll(above, watch.wait())
            except (StoreUnavailableError, SessionLostError):
                await self._poll(above, asyncio.sleep(self._settings.long_poll_pause_s))

    async def _poll(self, above: int, changed: Coroutine[Any, Any, None]) -> None:
        told = await poll_lac(self._ledger, above, changed, self._connection_of, self._settings)
        self._last_add_confirmed = max(self._last_add_confirmed, told)

    def _take(self, ledger: LedgerMetadata) -> None:
        """Use a newer version of the record. What is before its last fragment is confirmed.

        No version follows CLOSED: an earlier one comes from a follower that lags, and the known end must not fall.
        """
        if self._ledger.is_closed and not ledger.is_closed:
            return
        self._ledger = ledger
        self._last_add_confirmed = max(self._last_add_confirmed, ledger.last_fragment.first_entry_id - 1)

    async def _look_again(self, error: LedgerError) -> None:
        """Re-read the record after a failure under it. A certain failure is certain only if no other version is in force by now."""
        certain = isinstance(error, EntryDamagedError) or not isinstance(error, EntryUnavailableError)
        try:
            if certain:
                await self._records.store.sync(self._records.key_of(self.ledger_id))
            self._take((await read_ledger(self._records, self.ledger_id)).record)
        except (StoreUnavailableError, SessionLostError) as unavailable:
            if certain:
                message = f"{error}, and its metadata cannot be read now: {unavailable}"
                raise EntryUnavailableError(message, ledger_id=self.ledger_id) from error

    async def _read(self, fragment: Fragment, first: int, last: int, max_bytes: int) -> list[EntryGroup]:
        for other in self._ledger.fragments:
            if first < other.first_entry_id <= last:
                last = other.first_entry_id - 1
        ensemble, write_quorum = fragment.ensemble, self._ledger.write_quorum
        distances = self._distances_in(ensemble)
        if ensemble != self._turn_in:
            self._turn, self._turn_in = nearest_from(self._turn, distances), ensemble
        turn = self._turn
        request = ReadRequest(self.ledger_id, first, last, max_bytes)
        if write_quorum == len(ensemble):
            replicas = [ensemble[position] for position in positions_by_distance(turn, distances)]
            copies = await read_range(request, replicas, self._connection_of, self._settings)
            groups, answered = copies.groups, ensemble.index(copies.bookie)
        else:
            stripes = await read_striped(
                request,
                ensemble,
                write_quorum,
                self._connection_of,
                self._settings,
                turn=turn,
                avoided=self._avoided,
                distances=distances,
            )
            groups, answered = stripes.groups, turn
            self._avoided = tuple(dict.fromkeys((*self._avoided, *stripes.failed)))
        self._stay_or_move(answered, sum(group.size_bytes for group in groups), distances)
        return groups

    def _distances_in(self, ensemble: tuple[str, ...]) -> list[int]:
        if self._distance_of is None:
            return [0] * len(ensemble)
        return [self._distance_of(bookie) for bookie in ensemble]

    def _stay_or_move(self, turn: int, size_bytes: int, distances: Sequence[int]) -> None:
        """Stay with the replica that answered, until it is the turn of the next of the nearest ones."""
        self._stayed_bytes = self._stayed_bytes + size_bytes if turn == self._turn else size_bytes
        self._turn = turn
        if self._stayed_bytes >= _STAY_BYTES:
            self._turn, self._stayed_bytes, self._avoided = nearest_from(turn + 1, distances), 0, ()


def nearest_from(turn: int, distances: Sequence[int]) -> int:
    """Return the first position from `turn` on, around the ensemble, that is as near as any."""
    size, nearest = len(distances), min(distances)
    return next(position % size for position in range(turn, turn + size) if distances[position % size] == nearest)


def positions_by_distance(turn: int, distances: Sequence[int]) -> list[int]:
    """Return all positions in the order in which they are asked: `turn`, which answered last, then the others by distance."""
    size = len(distances)
    others = [position % size for position in range(turn + 1, turn + size)]
    return [turn, *sorted(others, key=lambda position: distances[position])]
