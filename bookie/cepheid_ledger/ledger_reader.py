"""Reads one ledger without recovering it.

    read(first, last) ──► bounded by the known end ──► one fragment ──► one replica, else the next ──► verified groups

The known end is what is certainly confirmed: the last entry of a closed ledger, the LAC of a writer in this process, else
the largest LAC that bookies told. A reader never gives out an entry above it.
"""

from __future__ import annotations

import asyncio

from cepheid_ledger.errors import EntryBeyondEndError, EntryUnavailableError, LedgerLostError, NoSuchEntryError
from cepheid_ledger.ledger_writer import LedgerWriter
from cepheid_ledger.master_key import master_key_of
from cepheid_ledger.metadata_loop import LedgerRecords, read_ledger
from cepheid_ledger.replica_read import ConnectionOf, read_range
from cepheid_ledger.settings import MIB, LedgerSettings
from cepheid_metadata import LedgerMetadata
from cepheid_rpc import (
    BookieUnavailableError,
    DigestMismatchError,
    EntryGroup,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    ReadRequest,
    Status,
)

_STAY_BYTES = 16 * MIB
"""Read from one replica before the next one takes over: long enough for a disk's read-ahead, short enough to spread."""


class LedgerReader:
    """Made by `LedgerClient.open_reader`. Holds nothing that needs to be closed."""

    def __init__(
        self,
        ledger: LedgerMetadata,
        records: LedgerRecords,
        connection_of: ConnectionOf,
        writer: LedgerWriter | None,
        settings: LedgerSettings,
    ) -> None:
        self.ledger_id = ledger.ledger_id
        self._ledger = ledger
        self._records = records
        self._connection_of = connection_of
        self._writer = writer
        self._settings = settings
        self._last_add_confirmed = -1  # as told by bookies; never falls
        self._turn = ledger.ledger_id % ledger.ensemble_size  # readers of many ledgers start at different replicas
        self._stayed_bytes = 0

    def __repr__(self) -> str:
        return f"<LedgerReader {self.ledger_id} {self._ledger.state}, known end {self.known_end}>"

    @property
    def metadata(self) -> LedgerMetadata:
        """As last read."""
        return self._ledger

    @property
    def known_end(self) -> int:
        """The last entry that may be read without asking anybody."""
        if self._ledger.last_entry_id is not None:
            return self._ledger.last_entry_id
        if self._writer is not None:
            return self._writer.last_add_confirmed
        return self._last_add_confirmed

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        """Entries from `first` up to at most `last` (inclusive), verified, in order: about `max_bytes`, at least one entry.

        Raises EntryBeyondEndError (above what is confirmed), NoSuchEntryError and LedgerLostError (certain: data is lost),
        EntryUnavailableError (try again), NoSuchLedgerError (deleted).
        """
        assert 0 <= first <= last, f"{first}..{last} is no range of entries"
        end = self.known_end if first <= self.known_end else await self.read_lac()
        if first > end:
            message = f"entry {self.ledger_id}:{first} is above the known end {end}"
            raise EntryBeyondEndError(message, ledger_id=self.ledger_id, entry_id=first, known_end=end)
        try:
            return await self._read(first, min(last, end), max_bytes)
        except (EntryUnavailableError, NoSuchEntryError, LedgerLostError):
            before = self._ledger.fragment_of(first)
            self._ledger = (await read_ledger(self._records, self.ledger_id)).record
            if self._ledger.fragment_of(first) == before:
                raise
            return await self._read(first, min(last, end), max_bytes)  # repair has moved the entries

    async def read_lac(self) -> int:
        """The last entry known to be confirmed; of a closed ledger its last. May be behind, never ahead.

        Raises NoSuchLedgerError.
        """
        if not self._ledger.is_closed and self._writer is None:
            self._ledger = (await read_ledger(self._records, self.ledger_id)).record
            if not self._ledger.is_closed:
                await self._ask_lac()
        return self.known_end

    async def _read(self, first: int, last: int, max_bytes: int) -> list[EntryGroup]:
        fragments = self._ledger.fragments
        for fragment in fragments:
            if first < fragment.first_entry_id <= last:
                last = fragment.first_entry_id - 1
        ensemble = self._ledger.fragment_of(first).ensemble
        turn = self._turn % len(ensemble)
        request = ReadRequest(self.ledger_id, first, last, max_bytes)
        copies = await read_range(request, ensemble[turn:] + ensemble[:turn], self._connection_of, self._settings)
        self._stay_or_move(ensemble.index(copies.bookie), sum(group.size_bytes for group in copies.groups))
        return copies.groups

    def _stay_or_move(self, turn: int, size_bytes: int) -> None:
        """The replica that answered is asked again, until it is the turn of the next."""
        self._stayed_bytes = self._stayed_bytes + size_bytes if turn == self._turn else size_bytes
        self._turn = turn
        if self._stayed_bytes >= _STAY_BYTES:
            self._turn, self._stayed_bytes = turn + 1, 0

    async def _ask_lac(self) -> None:
        """Freshness is all that suffers when bookies do not answer."""
        request = LacRequest(self.ledger_id, master_key_of(self._ledger))
        ensemble = self._ledger.last_fragment.ensemble
        answers = await asyncio.gather(*(self._ask_one_lac(bookie, request) for bookie in ensemble))
        floor = self._ledger.last_fragment.first_entry_id - 1  # what is before the last fragment is confirmed
        self._last_add_confirmed = max(self._last_add_confirmed, floor, *answers)

    async def _ask_one_lac(self, bookie: str, request: LacRequest) -> int:
        try:
            async with asyncio.timeout(self._settings.speculative_read_s):
                return self._lac_of(await self._connection_of(bookie).read_lac(request))
        except (BookieUnavailableError, TimeoutError):
            return -1

    def _lac_of(self, answer: LacAnswer) -> int:
        if answer.status is not Status.OK:
            return -1
        group = answer.highest_entry
        if group is None or group.ledger_id != self.ledger_id or len(group) != 1:
            return answer.explicit_lac
        try:
            group.verify()
        except (DigestMismatchError, MalformedGroupError):
            return answer.explicit_lac
        return max(answer.explicit_lac, group.header(group.first_entry_id).last_add_confirmed)
