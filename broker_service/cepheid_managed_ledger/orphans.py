"""Finds ledgers that a broker created for a topic and did not record before it died.

    every ledger's record, periodically ──► custom fields: topic, incarnation, epoch
        topic open here, its incarnation, an epoch below the chain's ──► no record names it? ──► the chain's deletion queue

Why that is certain: a ledger is recorded by a write that names the version of the chain which its creator had read, in the epoch
of its opening, and checks its incarnation. The chain has a later epoch, so every such write of an earlier one fails, whenever it
arrives. Whether a record names the ledger already is checked in the step that adds it to the queue, after its own record was read,
and by the owner itself.
Left alone: ledgers of the present epoch (a rollover may be about to record them), those of topics that are not open or are deleted,
and ledgers that an operator restored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from cepheid_managed_ledger.errors import ManagedLedgerError
from cepheid_managed_ledger.managed_ledger import ManagedLedger
from cepheid_metadata import (
    UNDELETED,
    Chain,
    CorruptRecordError,
    LedgerMetadata,
    MetadataError,
    MetadataStore,
    NewerFormatError,
    ledger_records,
    list_ledgers,
)
from cepheid_wire import InvalidTopicNameError, TopicName

log = logging.getLogger(__name__)

_AT_ONCE = 20
_PAUSE_S = 0.05  # at most 400 records a second: this is never urgent


def is_of_an_earlier_epoch(ledger: LedgerMetadata, chain: Chain) -> bool:
    """Whether the ledger was created by an earlier opening of this chain, which can no longer record it.

    False for ledgers of releases that did not store the epoch."""
    epoch = ledger.custom.get("epoch", "")
    is_ours = ledger.custom.get("incarnation") == chain.incarnation and UNDELETED not in ledger.custom
    return is_ours and epoch.isdecimal() and int(epoch) < chain.epoch


class OrphanScan:
    def __init__(self, store: MetadataStore, opened: Mapping[TopicName, ManagedLedger]) -> None:
        self._store = store
        self._opened = opened
        self.found = 0

    async def run(self) -> None:
        """Scan all ledgers once. An unavailable store ends the pass: another one follows."""
        records = ledger_records(self._store)
        number = 0
        try:
            async for ledger_id in list_ledgers(self._store):
                try:
                    found = await records.get(ledger_id)
                except (CorruptRecordError, NewerFormatError) as error:  # the other ledgers are checked all the same
                    log.warning("ledger.record_unreadable", extra={"ledger_id": ledger_id, "error": str(error)})
                    found = None
                if found is not None:
                    await self._look_at(found.record)
                number += 1
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(_PAUSE_S)
        except MetadataError as error:
            log.info("orphans.scan_ended", extra={"ledgers": number, "error": str(error)})

    async def _look_at(self, ledger: LedgerMetadata) -> None:
        try:
            managed_ledger = self._opened.get(TopicName.parse(ledger.custom.get("topic", "")))
        except InvalidTopicNameError:
            return
        if managed_ledger is None or not managed_ledger.is_usable or not is_of_an_earlier_epoch(ledger, managed_ledger.chain):
            return
        try:
            deleted = await managed_ledger.delete_unnamed(ledger.ledger_id)
        except ManagedLedgerError:  # the topic has another owner, which may find it
            return
        if deleted:
            self.found += 1
            fields = {"topic": str(managed_ledger.topic), "ledger_id": ledger.ledger_id, "epoch": ledger.custom["epoch"]}
            log.warning("ledger.orphan_deleted", extra=fields)
