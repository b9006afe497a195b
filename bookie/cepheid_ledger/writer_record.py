"""A ledger's record as its writer knows it. One change at a time: two metadata writers of one process would race each other."""

from __future__ import annotations

from collections.abc import Sequence

from cepheid_ledger.metadata_loop import FoundLedger, LedgerRecords, Plan, change_ledger, read_ledger
from cepheid_ledger.settings import LedgerSettings
from cepheid_metadata import Create, LedgerMetadata


class WriterRecord:
    def __init__(self, found: FoundLedger, records: LedgerRecords, settings: LedgerSettings) -> None:
        self._found = found
        self._records = records
        self._settings = settings
        self._is_changing = False

    @property
    def ledger(self) -> LedgerMetadata:
        """As last read or written."""
        return self._found.record

    async def change(self, plan: Plan, together: Sequence[Create] = ()) -> None:
        """Change the record, and create `together` in the same write. Raises like `change_ledger`."""
        assert not self._is_changing, f"two changes of ledger {self.ledger.ledger_id} at once"
        self._is_changing = True
        try:
            self._found = await change_ledger(self._records, self._found, plan, self._settings, together=together)
        finally:
            self._is_changing = False

    async def reread(self) -> LedgerMetadata:
        """Not from a follower that lags: what others did long ago must be seen. Raises NoSuchLedgerError and what the store raises.
        A change under way keeps what it knows: it re-reads by itself."""
        await self._records.store.sync(self._records.key_of(self.ledger.ledger_id))
        found = await read_ledger(self._records, self.ledger.ledger_id)
        if not self._is_changing and found.version > self._found.version:  # else a change overtook this read
            self._found = found
        return found.record
