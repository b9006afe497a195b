"""Ledgers that were deleted vanish after a while: until then they can be brought back.

    /ledgers/… ──delete──► /deleted-ledgers/… ──grace is over──► gone: bookies collect its entries
         ▲                        │
         └────────undelete────────┘        each step is one atomic write

Rules:
1. Bookies collect a ledger that is in neither tree. Who looks for one asks the living, the deleted, and the living again: it may
   have been brought back in between.
2. What came back belongs to no topic any more. Its custom fields say so (`UNDELETED`), so that nobody takes it for an orphan.
3. Versions go on where they ended. A writer from before still holds one, and would open the ledger again by compare-and-set.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from cepheid_metadata.errors import BadVersionError, CorruptRecordError, KeyExistsError, NewerFormatError, NoSuchKeyError
from cepheid_metadata.ledger_records import DeletedLedger, LedgerMetadata
from cepheid_metadata.listing import list_deleted_ledgers, list_ledgers
from cepheid_metadata.repositories import Found, deleted_ledger_records, ledger_records
from cepheid_metadata.store import Create, MetadataStore, Op, Put

log = logging.getLogger(__name__)

UNDELETED = "undeleted_at_ms"
"""Custom field of a ledger that was brought back."""


@dataclass(frozen=True, slots=True)
class InGrace:
    """A deleted ledger whose entries are kept, as `purge` found it."""

    until_ms: int
    copy_bytes: int
    """About how much of it one bookie of its ensemble holds."""


def _in_grace(record: DeletedLedger) -> InGrace:
    ledger = record.ledger
    return InGrace(record.purge_after_ms, (ledger.length_bytes or 0) * ledger.write_quorum // ledger.ensemble_size)


class DeletedLedgers:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._in_grace: dict[int, InGrace] = {}  # as of the last `purge`
        self._living = ledger_records(store)
        self._deleted = deleted_ledger_records(store)

    async def delete(self, found: Found[LedgerMetadata], now_ms: int, grace_ms: int) -> None:
        """Only if the record is still this version. An empty ledger, or one without grace, is gone at once.

        Raises BadVersionError, NoSuchKeyError, and what the store raises."""
        ledger, version = found
        if grace_ms <= 0 or ledger.last_entry_id == -1:
            await self._living.delete(ledger.ledger_id, version)
            return
        record = DeletedLedger(ledger=ledger, deleted_at_ms=now_ms, purge_after_ms=now_ms + grace_ms, version=version)
        await self._store.multi(
            [self._living.delete_op(ledger.ledger_id, version), self._deleted.create_op(ledger.ledger_id, record)]
        )

    async def get(self, ledger_id: int) -> DeletedLedger | None:
        """None: it was never deleted, or is gone for good."""
        found = await self._deleted.get(ledger_id)
        return None if found is None else found.record

    async def undelete(
        self, ledger_id: int, now_ms: int, *, together: Callable[[LedgerMetadata], Sequence[Create]] = lambda _: ()
    ) -> LedgerMetadata | None:
        """Return the record that is back; None: there is nothing to bring back. Of two at once, or a purge meanwhile, one wins.

        `together(record)` is created in the same write, unless it is there already.
        """
        found = await self._deleted.get(ledger_id)
        if found is None:
            return None
        ledger = found.record.ledger
        ledger = ledger.replace(custom={**ledger.custom, UNDELETED: str(now_ms)})
        ops = [self._deleted.delete_op(ledger_id, found.version), *self._return_ops(ledger, (found.record.version or 0) + 1)]
        try:
            try:
                await self._store.multi([*ops, *together(ledger)])
            except KeyExistsError:  # of what comes along: the first of `ops` fails when another process was quicker
                await self._store.multi(ops)
        except (BadVersionError, NoSuchKeyError):
            return None
        return ledger

    def _return_ops(self, ledger: LedgerMetadata, version: int) -> list[Op]:
        """Rule 3: it is made, and put until it has this version. Nobody sees what is in between, so that is left empty."""
        key = self._living.key_of(ledger.ledger_id)
        return [
            Create(key, b""),
            *(Put(key, b"", before) for before in range(version - 1)),
            self._living.replace_op(ledger.ledger_id, ledger, version - 1),
        ]

    @property
    def in_grace(self) -> Mapping[int, InGrace]:
        """Return the deleted ledgers that the last `purge` left, by id."""
        return self._in_grace

    async def purge(
        self, now_ms: int, give_up: Collection[int] = (), *, before: Callable[[Collection[int]], Awaitable[None]] | None = None
    ) -> list[int]:
        """Forget those whose time is over, and those to give up; return their ids. Any number of processes may do it at once.

        `before(ids)` is awaited with all deleted ledgers before one of them is forgotten.

        A record is read when this object first sees it and when its time is over: nothing else can change its time, except that
        the ledger is brought back and deleted again, which only makes it later.
        """
        known, self._in_grace = self._in_grace, {}
        purged: list[int] = []
        found = [ledger_id async for ledger_id in list_deleted_ledgers(self._store)]
        if before is not None:
            await before(found)
        for ledger_id in found:
            waiting = known.get(ledger_id)
            if waiting is None or waiting.until_ms <= now_ms or ledger_id in give_up:
                waiting = await self._purge_one(ledger_id, now_ms, give_up=ledger_id in give_up)
                if waiting is None:
                    purged.append(ledger_id)
                    continue
            self._in_grace[ledger_id] = waiting
        return purged

    async def give_up(self, ledger_id: int) -> bool:
        """Forget a deleted ledger before its time. Return whether it was deleted, and could have been brought back until now."""
        found = await self._deleted.get(ledger_id)
        if found is None:
            return False
        try:
            await self._deleted.delete(ledger_id, found.version)
        except (BadVersionError, NoSuchKeyError):
            return False
        return True

    async def _purge_one(self, ledger_id: int, now_ms: int, *, give_up: bool) -> InGrace | None:
        """Return None if it was forgotten now."""
        try:
            found = await self._deleted.get(ledger_id)
        except (CorruptRecordError, NewerFormatError) as error:
            hint = "its entries stay on the bookies; `cepheid ledgers list --deleted` shows the record"
            log.warning("gc.deleted_record_unreadable", extra={"ledger_id": ledger_id, "error": error.args[0], "hint": hint})
            return InGrace(now_ms, 0)
        if found is None:  # brought back, or purged by another process
            return InGrace(now_ms, 0)
        if found.record.purge_after_ms > now_ms and not give_up:
            return _in_grace(found.record)
        try:
            await self._deleted.delete(ledger_id, found.version)
        except (BadVersionError, NoSuchKeyError):
            return InGrace(now_ms, 0)  # as above
        return None

    async def listing(self) -> set[int]:
        """Ids of all ledgers whose entries must be kept, read to the end. One that is moved meanwhile may be missed (rule 1)."""
        listed = {ledger_id async for ledger_id in list_ledgers(self._store)}  # the living first: deleting moves them to the others
        return listed.union([ledger_id async for ledger_id in list_deleted_ledgers(self._store)])

    async def is_kept(self, ledger_id: int) -> bool:
        """False is certain (rule 1)."""
        for records in (self._living, self._deleted, self._living):
            if await records.exists(ledger_id):
                return True
        return False
