"""A ledger's record as its writer knows it. One change at a time: two metadata writers of one process would race."""

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
        """The record as last read or written."""
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
        """Read the record, but not from a lagging follower: earlier changes by others must be seen.

        Raises NoSuchLedgerError and the store's errors. A change in progress keeps what it knows: it reads again by itself.
        """
        await self._records.store.sync(self._records.key_of(self.ledger.ledger_id))
        found = await read_ledger(self._records, self.ledger.ledger_id)
        if not self._is_changing and found.version > self._found.version:  # otherwise a change overtook this read
            self._found = found
        return found.record
