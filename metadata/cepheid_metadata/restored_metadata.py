"""The time between a restore of metadata and its confirmation.

    restore ──► /restored ──► each bookie starts: id counter raised above its ledgers ──► its report
                    │              all bookies have reported ──► ledger ids are given out again
                    └── bookies delete nothing ──► confirm: an operator has checked what bookies hold ──► record deleted

A backup is older than what bookies hold. Bookies have ledgers that it does not know, whose ids its counter would give out again.

Rules:
1. A bookie raises the id counter by compare-and-set before it writes its report, and reports before it registers.
2. No ledger id is given out while a bookie in metadata, with a cookie or a registration, has no report. The counter
   itself records that it was restored: this costs nothing otherwise, and an older release, which knows no reports, refuses it.
3. A bookie that is lost for good gets a report if an operator names it as lost.
4. The record, all reports and the counter's note are removed in one write. A report is written together with a check of the
   record, so that a late report cannot create an empty record again.
5. The counter is raised by `ID_MARGIN` more: no bookie knows the ids that brokers had taken in blocks and used for ledgers
   without entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from cepheid_metadata import keys
from cepheid_metadata.errors import BadVersionError, KeyExistsError, MetadataError, NoSuchKeyError, NotEmptyError
from cepheid_metadata.ledger_records import LedgerIdCounter
from cepheid_metadata.listing import list_names
from cepheid_metadata.repositories import Records, bookie_reports, restored_record
from cepheid_metadata.restored_records import BookieReport
from cepheid_metadata.store import Check, Delete, MetadataStore, Op

ID_MARGIN = 100_000
"""Blocks of a hundred brokers (`LedgerIds.block`). There are 2^63 ids."""

_KNOWN_BOOKIES = (keys.BOOKIE_COOKIES_KEY, keys.AVAILABLE_BOOKIES_KEY, keys.READONLY_BOOKIES_KEY)
_REGISTERED_BOOKIES = _KNOWN_BOOKIES[1:]
_TRIES = 20


class RestoreNotReportedError(MetadataError):
    """Metadata was restored, and bookies have not reported yet which ledger ids they hold: no id may be given out."""

    retriable: ClassVar[bool] = True
    hint: ClassVar[str] = "start these bookies; if one is lost for good: cepheid metadata confirm --without BOOKIE"


class NothingRestoredError(MetadataError):
    """There is no restore to confirm."""


class BookieNotMissingError(MetadataError):
    """A bookie to be given up has reported its ledgers, runs, or is not known."""


async def missing_reports(store: MetadataStore) -> list[str]:
    """Return the known bookies that have not reported since the restore, sorted; empty if nothing was restored."""
    if not await restored_record(store).exists(None):
        return []
    known, reported = await asyncio.gather(_names(store, _KNOWN_BOOKIES), list_names(store, keys.RESTORED_BOOKIES_KEY))
    return sorted(known.difference(reported))


async def require_reports(store: MetadataStore) -> None:
    """Raise RestoreNotReportedError while ledger ids could be given out twice (rule 2)."""
    if missing := await missing_reports(store):
        names = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        message = f"metadata was restored, and {names} did not report yet which ledger ids are in use: no ledger can be created"
        raise RestoreNotReportedError(message, bookies=missing)


async def report_ledgers(
    store: MetadataStore, bookie_id: str, incarnation: str, largest_ledger_id: int, ledgers: int, now_ms: int
) -> bool:
    """Raise the id counter above what this bookie holds, and report it. Return whether metadata waits for a confirmation.

    A bookie that has already reported from these disks changes nothing. Raises the errors of the store: call it again then.
    """
    # No sync is needed: this session has read the cluster's identity, which a restore writes last, and never sees older data.
    reports = bookie_reports(store)
    report = BookieReport(
        bookie_id=bookie_id,
        incarnation=incarnation,
        largest_ledger_id=largest_ledger_id,
        ledgers=ledgers,
        reported_at_ms=now_ms,
    )
    for _ in range(_TRIES):
        restored = await restored_record(store).get(None)
        if restored is None:
            return False
        found = await reports.get(bookie_id)
        if found is not None and found.record.incarnation == incarnation:
            return True
        await raise_counter(store, largest_ledger_id + 1 + ID_MARGIN)  # rule 1
        write = reports.create_op(bookie_id, report) if found is None else reports.replace_op(bookie_id, report, found.version)
        try:
            await store.multi([Check(keys.RESTORED_KEY, restored.version), write])  # rule 4
        except (BadVersionError, KeyExistsError, NoSuchKeyError):
            continue  # confirmed, or given up by an operator, at this moment
        return True
    raise _unsettled("the report of " + bookie_id)


async def raise_counter(store: MetadataStore, at_least: int) -> None:
    """Make the next ledger id at least this one, in restored metadata."""
    counter = _counter(store)
    raised = LedgerIdCounter(next_ledger_id=at_least, restored=True)
    for _ in range(_TRIES):
        found = await counter.get(None)
        try:
            if found is None:
                await counter.create(None, raised)
            elif found.record.next_ledger_id < at_least:
                await counter.replace(None, raised, found.version)
        except (BadVersionError, KeyExistsError):
            continue
        return
    raise _unsettled(keys.LEDGER_IDS_KEY)


async def restored_view(store: MetadataStore) -> dict[str, Any]:
    """Return `restored` (the record, or null), `reports` (by bookie) and `missing` (bookies without a report)."""
    found = await restored_record(store).get(None)
    if found is None:
        return {"restored": None, "reports": {}, "missing": []}
    names = await list_names(store, keys.RESTORED_BOOKIES_KEY)
    reports = await asyncio.gather(*map(bookie_reports(store).get, names))
    return {
        "restored": found.record.model_dump(mode="json"),
        "reports": {name: one.record.model_dump(mode="json") for name, one in zip(names, reports, strict=True) if one is not None},
        "missing": await missing_reports(store),
    }


async def give_up_bookies(store: MetadataStore, bookies: Sequence[str], now_ms: int) -> None:
    """Write a report for bookies that are lost for good (rule 3). Raises NothingRestoredError, BookieNotMissingError."""
    await _require_restored(store)
    missing = await missing_reports(store)
    registered = await _names(store, _REGISTERED_BOOKIES)
    for bookie_id in dict.fromkeys(bookies):
        if bookie_id not in missing:
            message = f"bookie {bookie_id} is not missing; missing are: {', '.join(missing) or 'none'}"
            raise BookieNotMissingError(message, bookie=bookie_id)
        if bookie_id in registered:
            message = f"bookie {bookie_id} runs: it reports within its storage.gc_interval_s, or when it is restarted"
            raise BookieNotMissingError(message, bookie=bookie_id)
    for bookie_id in dict.fromkeys(bookies):
        report = BookieReport(
            bookie_id=bookie_id, incarnation="", largest_ledger_id=-1, ledgers=0, reported_at_ms=now_ms, lost=True
        )
        restored = await _require_restored(store)
        try:
            await store.multi([Check(keys.RESTORED_KEY, restored), bookie_reports(store).create_op(bookie_id, report)])
        except KeyExistsError:
            raise BookieNotMissingError(f"bookie {bookie_id} has just reported its ledgers", bookie=bookie_id) from None


async def confirm_restore(store: MetadataStore) -> None:
    """End the time after a restore: from now on bookies collect ledgers that metadata does not have.

    Raises NothingRestoredError; RestoreNotReportedError while bookies are missing.
    """
    for _ in range(_TRIES):
        version = await _require_restored(store)
        await require_reports(store)
        counter = await _counter(store).get(None)
        ops: list[Op] = [Delete(keys.restored_bookie_key(name)) for name in await list_names(store, keys.RESTORED_BOOKIES_KEY)]
        if await store.exists(keys.RESTORED_BOOKIES_KEY):
            ops.append(Delete(keys.RESTORED_BOOKIES_KEY))
        if counter is not None:
            ops.append(_counter(store).replace_op(None, counter.record.replace(restored=None), counter.version))
        try:
            await store.multi([*ops, Delete(keys.RESTORED_KEY, version)])
        except (BadVersionError, NoSuchKeyError, NotEmptyError):
            continue  # a bookie reported, or a broker took ledger ids, at this moment
        return
    raise _unsettled(keys.RESTORED_KEY)


def _counter(store: MetadataStore) -> Records[None, LedgerIdCounter]:
    return Records(store, lambda _: keys.LEDGER_IDS_KEY, LedgerIdCounter)


async def _require_restored(store: MetadataStore) -> int:
    await store.sync(keys.RESTORED_KEY)
    found = await restored_record(store).get(None)
    if found is None:
        raise NothingRestoredError("metadata was not restored from a backup, or that is confirmed already: there is nothing to do")
    return found.version


async def _names(store: MetadataStore, parents: Sequence[str]) -> set[str]:
    return {name for names in await asyncio.gather(*(list_names(store, parent) for parent in parents)) for name in names}


def _unsettled(what: str) -> MetadataError:
    return MetadataError(f"{what} was changed by others {_TRIES} times in a row; try again")
