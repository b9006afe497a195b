"""Deleted ledgers, which are kept for a grace period and can be restored until then.

    /ledgers/… ──delete──► /deleted-ledgers/… ──grace is over──► forgotten: bookies collect its entries
         ▲                        │
         └────────undelete────────┘        each step is one atomic write

Rules:
1. Bookies collect a ledger that is in neither tree. To look for one, read the living, the deleted, and the living again: it may
   have been restored in between.
2. A restored ledger belongs to no topic any more. Its custom fields say so (`UNDELETED`), so that it does not count as an orphan.
3. Versions continue where they ended. A writer from before still has one, and could open the ledger again by compare-and-set.
4. The write that forgets a ledger for good remembers its id, one bit of a page of 8,192 ledgers. A bookie that was down meanwhile
   can tell a deleted ledger from one that metadata lost. Only a hint: without it an operator decides, so a page that cannot be
   written delays no deletion. An empty ledger is not remembered, as bookies hold only a fence of it. There are at most
   4,096 pages of 1.4 KB: those of the oldest ids are removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from cepheid_metadata import keys
from cepheid_metadata.errors import BadVersionError, CorruptRecordError, KeyExistsError, NewerFormatError, NoSuchKeyError
from cepheid_metadata.ledger_records import DeletedLedger, LedgerMetadata, PurgedLedgers
from cepheid_metadata.listing import list_deleted_ledgers, list_ledgers, list_names
from cepheid_metadata.repositories import Found, deleted_ledger_records, ledger_records, purged_ledger_records
from cepheid_metadata.store import Create, Delete, MetadataStore, Op, Put

log = logging.getLogger(__name__)

UNDELETED = "undeleted_at_ms"
"""Custom field of a restored ledger."""

_PAGE_LEDGERS = 8192
_MAX_PAGES = 4096
_TOGETHER = 64  # ledgers that one write forgets
_TRIES = 5  # attempts to write a page that other processes write as well


@dataclass(frozen=True, slots=True)
class InGrace:
    """A deleted ledger whose entries are kept, as `purge` found it."""

    until_ms: int
    copy_bytes: int
    """Estimated bytes of it on one bookie of its ensemble."""


def _in_grace(record: DeletedLedger) -> InGrace:
    ledger = record.ledger
    return InGrace(record.purge_after_ms, (ledger.length_bytes or 0) * ledger.write_quorum // ledger.ensemble_size)


class DeletedLedgers:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._in_grace: dict[int, InGrace] = {}  # as of the last `purge`
        self._living = ledger_records(store)
        self._deleted = deleted_ledger_records(store)
        self._pages = purged_ledger_records(store)

    async def delete(self, found: Found[LedgerMetadata], now_ms: int, grace_ms: int) -> None:
        """Delete the ledger if its record still has this version. An empty ledger, or one without grace, is forgotten at once.

        Raises BadVersionError, NoSuchKeyError, and the errors of the store.
        """
        ledger, version = found
        if ledger.last_entry_id == -1:
            await self._living.delete(ledger.ledger_id, version)
            return
        if grace_ms <= 0:
            await self._forget_one(ledger.ledger_id, self._living.delete_op(ledger.ledger_id, version))
            return
        record = DeletedLedger(ledger=ledger, deleted_at_ms=now_ms, purge_after_ms=now_ms + grace_ms, version=version)
        await self._store.multi(
            [self._living.delete_op(ledger.ledger_id, version), self._deleted.create_op(ledger.ledger_id, record)]
        )

    async def get(self, ledger_id: int) -> DeletedLedger | None:
        """Return a deleted ledger; None: it was never deleted, or is forgotten."""
        found = await self._deleted.get(ledger_id)
        return None if found is None else found.record

    async def undelete(
        self, ledger_id: int, now_ms: int, *, together: Callable[[LedgerMetadata], Sequence[Create]] = lambda _: ()
    ) -> LedgerMetadata | None:
        """Restore a ledger; return its record, or None if there is none. Of two at once, or a purge meanwhile, one wins.

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
            except KeyExistsError:  # of `together`: the first of `ops` fails if another process was faster
                await self._store.multi(ops)
        except (BadVersionError, NoSuchKeyError):
            return None
        return ledger

    def _return_ops(self, ledger: LedgerMetadata, version: int) -> list[Op]:
        """Return the writes that restore a record with this version (rule 3). Values in between are never seen, so they are
        empty."""
        key = self._living.key_of(ledger.ledger_id)
        return [
            Create(key, b""),
            *(Put(key, b"", before) for before in range(version - 1)),
            self._living.replace_op(ledger.ledger_id, ledger, version - 1),
        ]

    @property
    def in_grace(self) -> Mapping[int, InGrace]:
        """The deleted ledgers that the last `purge` left, by id."""
        return self._in_grace

    async def purge(self, now_ms: int, give_up: Collection[int] = ()) -> list[int]:
        """Forget ledgers whose grace is over, and those to give up; return their ids. Any number of processes may do it at once.

        A record is read when this object first sees it and when its grace is over: nothing else can change the time, except that
        the ledger is restored and deleted again, which only makes it later.
        """
        known, self._in_grace = self._in_grace, {}
        due: list[tuple[int, Delete]] = []
        for ledger_id in [ledger_id async for ledger_id in list_deleted_ledgers(self._store)]:
            waiting = known.get(ledger_id)
            if waiting is None or waiting.until_ms <= now_ms or ledger_id in give_up:
                looked_at = await self._look_at(ledger_id, now_ms, give_up=ledger_id in give_up)
                if isinstance(looked_at, Delete):
                    due.append((ledger_id, looked_at))
                    continue
                waiting = looked_at
            self._in_grace[ledger_id] = waiting
        return await self._forget_all(due, now_ms)

    async def give_up(self, ledger_id: int) -> bool:
        """Forget a deleted ledger before its time. Return whether it was deleted, and could have been restored until now."""
        found = await self._deleted.get(ledger_id)
        if found is None:
            return False
        try:
            await self._forget_one(ledger_id, self._deleted.delete_op(ledger_id, found.version))
        except (BadVersionError, NoSuchKeyError):
            return False
        return True

    async def were_purged(self, ledger_ids: Collection[int]) -> set[int]:
        """Return which of the ledgers are remembered as deleted for good (rule 4)."""
        purged: set[int] = set()
        for page, of_page in groupby(sorted(ledger_ids), key=_page_of):
            try:
                found = await self._pages.get(page)
            except (CorruptRecordError, NewerFormatError) as error:
                log.warning("gc.purged_page_unreadable", extra={"page": page, "error": error.args[0]})
                continue
            if found is not None:
                bits = int.from_bytes(found.record.bits, "little")
                purged.update(ledger_id for ledger_id in of_page if bits >> ledger_id % _PAGE_LEDGERS & 1)
        return purged

    async def _forget_all(self, due: Sequence[tuple[int, Delete]], now_ms: int) -> list[int]:
        """Return those that were forgotten here. The others were restored meanwhile, or forgotten by another process."""
        forgotten: list[int] = []
        for page, group in groupby(due, key=lambda one: _page_of(one[0])):
            of_page = list(group)
            for start in range(0, len(of_page), _TOGETHER):
                part = of_page[start : start + _TOGETHER]
                if await self._forget(page, part):
                    forgotten += [ledger_id for ledger_id, _ in part]
                    continue
                for ledger_id, delete in part:
                    try:
                        await self._forget_one(ledger_id, delete)
                        forgotten.append(ledger_id)
                    except (BadVersionError, NoSuchKeyError):
                        self._in_grace[ledger_id] = InGrace(now_ms, 0)
        return forgotten

    async def _forget_one(self, ledger_id: int, delete: Delete) -> None:
        """Delete the record for good, and remember the ledger if that is possible. Raises BadVersionError, NoSuchKeyError."""
        if not await self._forget(_page_of(ledger_id), [(ledger_id, delete)]):
            await self._store.delete(delete.key, delete.expected_version)

    async def _forget(self, page: int, ledgers: Sequence[tuple[int, Delete]]) -> bool:
        """Delete records of ledgers of one page, and remember them, in one write.

        False: nothing was written, because a record has changed, or the page cannot be written now.
        """
        deletes = [delete for _, delete in ledgers]
        for _ in range(_TRIES):
            try:
                found = await self._pages.get(page)
                bits, version = (0, None) if found is None else (int.from_bytes(found.record.bits, "little"), found.version)
            except CorruptRecordError as error:
                bits, version = 0, error.version
            except NewerFormatError:
                return False
            if version is None and not await self._make_room(page):
                return False
            for ledger_id, _ in ledgers:
                bits |= 1 << ledger_id % _PAGE_LEDGERS
            record = PurgedLedgers(bits=bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
            write = self._pages.create_op(page, record) if version is None else self._pages.replace_op(page, record, version)
            try:
                await self._store.multi([*deletes, write])
            except (BadVersionError, KeyExistsError, NoSuchKeyError) as error:
                if error.op_index != len(deletes):
                    return False
            else:
                return True
        return False

    async def _make_room(self, page: int) -> bool:
        """Remove the oldest pages before one is added. Return False if this one is older than all of them."""
        pages = sorted(int(name) for name in await list_names(self._store, keys.PURGED_LEDGERS_KEY) if name.isdecimal())
        if len(pages) < _MAX_PAGES:
            return True
        if page < pages[0]:
            return False
        for oldest in pages[: len(pages) - _MAX_PAGES + 1]:
            try:
                await self._pages.delete(oldest, None)
            except NoSuchKeyError:
                pass  # another process has removed it
        return True

    async def _look_at(self, ledger_id: int, now_ms: int, *, give_up: bool) -> InGrace | Delete:
        """Return the deletion of the ledger's record if it is due, else when it is."""
        try:
            found = await self._deleted.get(ledger_id)
        except (CorruptRecordError, NewerFormatError) as error:
            hint = "its entries stay on the bookies; `cepheid ledgers list --deleted` shows the record"
            log.warning("gc.deleted_record_unreadable", extra={"ledger_id": ledger_id, "error": error.args[0], "hint": hint})
            return InGrace(now_ms, 0)
        if found is None:  # restored, or purged by another process
            return InGrace(now_ms, 0)
        if found.record.purge_after_ms > now_ms and not give_up:
            return _in_grace(found.record)
        return self._deleted.delete_op(ledger_id, found.version)

    async def listing(self) -> set[int]:
        """Return the ids of all ledgers whose entries must be kept. One that is moved meanwhile may be missed (rule 1)."""
        listed = {ledger_id async for ledger_id in list_ledgers(self._store)}  # the living first: deleting moves them to the others
        return listed.union([ledger_id async for ledger_id in list_deleted_ledgers(self._store)])

    async def is_kept(self, ledger_id: int) -> bool:
        """Whether the entries of a ledger must be kept. False is certain (rule 1)."""
        for records in (self._living, self._deleted, self._living):
            if await records.exists(ledger_id):
                return True
        return False


def _page_of(ledger_id: int) -> int:
    return ledger_id // _PAGE_LEDGERS
