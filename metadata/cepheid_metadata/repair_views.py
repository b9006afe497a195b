"""Automatic repair for operators and tools: which ledgers lack copies, and what operators can request. All of it is metadata.

status   {"off": the switch or null, "auditor": name or null, "audit": the audit record or null, "draining": [records],
          "draining_unreadable": [names of bookies whose draining records this release cannot read],
          "unchecked": number of ledgers whose copies were not checked since their recovery}
short    {"ledgers": [marks], "next"}
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from cepheid_metadata import keys
from cepheid_metadata.errors import BadVersionError, CorruptRecordError, KeyExistsError, NewerFormatError, NoSuchKeyError
from cepheid_metadata.ledger_records import LedgerMetadata
from cepheid_metadata.listing import list_deleted_ledgers, list_names, list_records, list_repair_marks
from cepheid_metadata.repair_records import (
    DrainingBookie,
    EntryRun,
    MissingLedgers,
    RepairMark,
    RepairRequest,
    RepairSwitch,
    ShortReason,
)
from cepheid_metadata.repositories import (
    audit_record,
    auditor_record,
    available_bookies,
    bookie_cookies,
    decommissioned_bookies,
    deleted_ledger_records,
    draining_bookies,
    ledger_records,
    missing_ledgers,
    repair_marks,
    repair_requests,
    repair_switch,
    unchecked_ledgers,
)
from cepheid_metadata.store import MetadataStore
from cepheid_metadata.upgrade import read_storage_format
from cepheid_ports import CepheidError

View = dict[str, Any]

_MARKS_NAME_ENTRIES_SINCE = 2  # storage format of the cluster
_MOST_RUNS = 100
"""A bookie with more damaged runs of entries in one ledger has all of its entries checked."""
_READ_AT_ONCE = 64  # records
_DELETED_SHOWN = 1000
"""Deleted ledgers that are read for one status: the newest ones, which can usually be restored for longest."""


class UnknownBookieError(CepheidError):
    """Metadata has no bookie of that name."""

    hint: ClassVar[str] = "cepheid bookies list shows the known bookies"


class UnknownLedgerError(CepheidError):
    """Metadata has no such ledger."""


class RepairRefusedError(CepheidError):
    """The request would cost copies, or makes no sense for this bookie."""


async def repair_status(store: MetadataStore) -> View:
    """Return whether repair is on, which process is the auditor, and what it found."""
    switch, auditor, audit = await asyncio.gather(
        repair_switch(store).get(None), auditor_record(store).get(None), audit_record(store).get(None)
    )
    hint = "cepheid bookies decommission ID --cancel removes the record, cepheid bookies decommission ID begins again"
    found, unreadable = await list_records(store, keys.DRAINING_BOOKIES_KEY, draining_bookies(store), hint)
    draining = [record.model_dump(mode="json") for record in found.values()]
    return {
        "off": None if switch is None else switch.record.model_dump(mode="json"),
        "auditor": None if auditor is None else auditor.record.name,
        "audit": None if audit is None else audit.record.model_dump(mode="json", exclude={"urgent"}),
        "draining": draining,
        "draining_unreadable": unreadable,
        "unchecked": len(await list_names(store, keys.UNCHECKED_LEDGERS_KEY)),
    }


async def short_page(store: MetadataStore, *, above: int, limit: int) -> View:
    """Return the marks of the first `limit` ledgers with larger ids than `above`; `next` is the `above` of the following page."""
    ids: list[int] = []
    async with aclosing(list_repair_marks(store, above=above)) as listed:  # type: ignore[type-var]
        async for ledger_id in listed:
            ids.append(ledger_id)
            if len(ids) == limit:
                break
    found = await asyncio.gather(*map(repair_marks(store).get, ids))
    marks = [{**one.record.model_dump(mode="json"), "lost_entries": one.record.lost_entries} for one in found if one is not None]
    return {"ledgers": marks, "next": ids[-1] if len(ids) == limit else None}


async def switch_off(store: MetadataStore, now_ms: int, reason: str) -> None:
    """Stop repair in the whole cluster. Copies in progress are finished. Safe to repeat."""
    try:
        await repair_switch(store).create(None, RepairSwitch(off_since_ms=now_ms, reason=reason))
    except KeyExistsError:
        found = await repair_switch(store).get(None)
        if found is not None:
            await repair_switch(store).replace(None, found.record.replace(reason=reason), found.version)


async def switch_on(store: MetadataStore) -> None:
    """Continue repair. Safe to repeat."""
    try:
        await repair_switch(store).delete(None, None)
    except NoSuchKeyError:
        pass


@dataclass(frozen=True, slots=True)
class StrictRacks:
    """What new ledgers need under strict placement. `suffice`: whether bookies in these racks, one item each, are enough."""

    write_quorum: int
    suffice: Callable[[Sequence[str]], bool]


async def decommission(
    store: MetadataStore, bookie: str, now_ms: int, ensemble_size: int, strict_racks: StrictRacks | None = None
) -> View:
    """Start to move all copies away from a bookie, or return the progress; also after it has ended.

    `ensemble_size`: of new ledgers. `strict_racks`: None if two copies of an entry may share a rack.

    Raises UnknownBookieError, and RepairRefusedError if too few bookies, or racks, would be left for an ensemble.
    """
    records = draining_bookies(store)
    draining = set(await list_names(store, keys.DRAINING_BOOKIES_KEY))
    if bookie not in draining:
        known, _ = await _bookies(store)
        writable = set(await list_names(store, keys.AVAILABLE_BOOKIES_KEY))
        if bookie not in known:
            if await decommissioned_bookies(store).exists(bookie):
                return await decommission_status(store, bookie)
            raise UnknownBookieError(f"there is no bookie {bookie}; known are {', '.join(sorted(known)) or 'none'}", bookie=bookie)
        audit = await audit_record(store).get(None)
        needed = max(ensemble_size, 1 if audit is None else audit.record.largest_ensemble)
        left = sorted(writable - draining - {bookie})
        if lacking := await _lacking(store, left, needed, strict_racks):
            message = f"bookie {bookie} cannot be decommissioned: {lacking}"
            raise RepairRefusedError(message, bookie=bookie, needed=needed, left=len(left))
        try:
            await records.create(bookie, DrainingBookie(bookie_id=bookie, since_ms=now_ms))
        except KeyExistsError:
            pass  # another operator was faster
        else:
            others = set(await list_names(store, keys.DRAINING_BOOKIES_KEY))
            if others - draining != {bookie}:  # another bookie was decommissioned meanwhile
                left = sorted(writable - others)
                if lacking := await _lacking(store, left, needed, strict_racks):
                    await records.delete(bookie, None)
                    names = ", ".join(sorted(others - {bookie}))
                    message = f"bookie {bookie} cannot be decommissioned: {names} is, and {lacking}"
                    raise RepairRefusedError(message, bookie=bookie, needed=needed, left=len(left))
    return await decommission_status(store, bookie)


async def _lacking(store: MetadataStore, left: Sequence[str], needed: int, strict: StrictRacks | None) -> str:
    """Return what ledgers would lack with only these writable bookies, and what to start; nothing if they are enough."""
    if len(left) < needed:
        return (
            f"ledgers need {needed} writable bookies, and {len(left)} would be left ({', '.join(left) or 'none'}); "
            f"start {needed - len(left)} more first"
        )
    if strict is None:
        return ""
    found = await asyncio.gather(*map(available_bookies(store).get, left))
    racks = [one.record.rack for one in found if one is not None and one.record.rack]
    if strict.suffice(racks):
        return ""
    counts = ", ".join(f"{rack} ({count})" for rack, count in sorted(Counter(racks).items()))
    return (
        f"ledgers need the {strict.write_quorum} copies of each entry in different racks (ledger.strict_racks), and writable "
        f"bookies would be left in: {counts or 'no rack'}; start one in another rack first"
    )


async def cancel_decommission(store: MetadataStore, bookie: str) -> None:
    """Let the bookie stay. What was moved is not moved back. Raises RepairRefusedError."""
    try:
        await draining_bookies(store).delete(bookie, None)
    except NoSuchKeyError:
        raise RepairRefusedError(f"bookie {bookie} is not being decommissioned", bookie=bookie) from None


async def decommission_status(store: MetadataStore, bookie: str) -> View:
    """Return {"state": draining, drained or gone, "ledgers_at_start", "ledgers_left", "bytes_left", "running", "problem"}.

    `gone`: it was decommissioned and has ended, so metadata does not know it any more. Raises UnknownBookieError if it is known
    and is not being decommissioned.
    """
    known, running = await _bookies(store)
    found = await draining_bookies(store).get(bookie)
    if found is None:
        if bookie in known:
            raise UnknownBookieError(f"bookie {bookie} is not being decommissioned", bookie=bookie)
        return {"state": "gone", "ledgers_at_start": None, "ledgers_left": 0, "bytes_left": 0, "running": False, "problem": ""}
    left, bytes_left, problem, only_copy = 0, 0, "", ""
    marks = repair_marks(store)
    page: list[int] = []

    async def count(ledger_ids: list[int]) -> None:
        nonlocal left, bytes_left, problem, only_copy
        for one in await asyncio.gather(*map(marks.get, ledger_ids), return_exceptions=True):
            if isinstance(one, CorruptRecordError | NewerFormatError):
                continue
            if isinstance(one, BaseException):
                raise one
            if one is not None and bookie in one.record.bookies:
                left += 1
                bytes_left += one.record.short_bytes
                problem = problem or one.record.problem
            elif one is not None and bookie in one.record.former:
                left += 1
                only_copy = only_copy or _only_copy(one.record, is_running=bookie in running)

    async with aclosing(list_repair_marks(store)) as listed:  # type: ignore[type-var]
        async for ledger_id in listed:
            page.append(ledger_id)
            if len(page) == 100:
                await count(page)
                page = []
    await count(page)
    problem = problem or await _obstacle(store) or only_copy
    if not problem and found.record.ledgers_at_start is not None and found.record.drained_at_ms is None:
        problem = await _restorable(store, bookie)
    return {
        "state": "draining" if found.record.drained_at_ms is None else "drained",
        "ledgers_at_start": found.record.ledgers_at_start,
        "ledgers_left": left,
        "bytes_left": bytes_left,
        "running": bookie in running,
        "problem": problem,
    }


def _only_copy(mark: RepairMark, *, is_running: bool) -> str:
    """Return why a bookie that the ledger's record no longer names must keep its disks, and what to do."""
    runs = ", ".join(f"{run.first}..{run.last}" for run in mark.lost[:5])
    what = "its log says why it cannot read them" if is_running else "start it, so that they are copied"
    return f"it may have the only copy of entries {runs} of ledger {mark.ledger_id}: {what}"


async def _restorable(store: MetadataStore, bookie: str) -> str:
    """Return until when deleted ledgers that name the bookie can be restored; nothing if there are none."""
    _, running = await _bookies(store)
    staying = running.difference(await list_names(store, keys.DRAINING_BOOKIES_KEY))
    found = await last_copies_of_deleted(store, bookie, staying, newest=_DELETED_SHOWN)
    if unreadable := [key for key, until_ms in found.items() if until_ms is None]:
        return f"the record {unreadable[0]} of a deleted ledger cannot be read, and may name it"
    if not found:
        return ""
    until = datetime.fromtimestamp(max(until_ms or 0 for until_ms in found.values()) / 1000, UTC)
    count = f"{len(found)} or more" if len(found) == _DELETED_SHOWN else str(len(found))
    what = f"the last copies of {count} deleted {'ledger' if len(found) == 1 else 'ledgers'}"
    return f"it has {what}, to be restored until {until:%Y-%m-%d %H:%M:%S} UTC; cepheid ledgers purge gives them up earlier"


async def last_copies_of_deleted(
    store: MetadataStore, bookie: str, staying: Collection[str], *, newest: int | None = None
) -> dict[str, int | None]:
    """Return the deleted ledgers that can still be restored and have no copies but this bookie's, by the key of their record.

    `staying`: bookies that run and are not being decommissioned. Copies on others do not count, as those bookies may be gone when
    the ledger is restored. Missing copies are made after that, so one bookie with copies is enough.

    The value is the wall clock time until which the ledger can be restored, or None if the record cannot be read (it may name the
    bookie). `newest`: how many of the newest ledgers are read; None: all.
    """
    records = deleted_ledger_records(store)
    limbo = await _limbo_of(store, staying)  # below that id they have lost what they had, and deleted ledgers are not copied again
    naming: dict[str, int | None] = {}

    async def look_at(ledger_id: int) -> None:
        try:
            found = await records.get(ledger_id)
        except (CorruptRecordError, NewerFormatError):
            naming[records.key_of(ledger_id)] = None
        else:
            holders = {name for name, below in limbo.items() if ledger_id >= below}
            if found is not None and _has_last_copies(found.record.ledger, bookie, holders):
                naming[records.key_of(ledger_id)] = found.record.purge_after_ms

    ledger_ids = [ledger_id async for ledger_id in list_deleted_ledgers(store)]
    ledger_ids = ledger_ids if newest is None else ledger_ids[-newest:]
    await _for_each(ledger_ids, look_at)
    return naming


async def _for_each(ledger_ids: Sequence[int], look_at: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    for start in range(0, len(ledger_ids), _READ_AT_ONCE):
        await asyncio.gather(*map(look_at, ledger_ids[start : start + _READ_AT_ONCE]))


async def _limbo_of(store: MetadataStore, bookies: Collection[str]) -> dict[str, int]:
    """Return, by bookie, the ledger id below which it has lost what it had; without those whose cookies cannot be read."""
    limbo: dict[str, int] = {}
    for bookie in bookies:
        try:
            found = await bookie_cookies(store).get(bookie)
        except (CorruptRecordError, NewerFormatError):
            continue
        limbo[bookie] = 0 if found is None else found.record.limbo_below or 0
    return limbo


async def unchecked_ledgers_naming(store: MetadataStore, bookie: str) -> list[str]:
    """Return the keys of unchecked ledgers that name the bookie. A ledger that was restored is unchecked at first."""
    records, unchecked = ledger_records(store), unchecked_ledgers(store)
    naming: list[str] = []

    async def look_at(ledger_id: int) -> None:
        try:
            found = await records.get(ledger_id)
        except (CorruptRecordError, NewerFormatError):
            naming.append(unchecked.key_of(ledger_id))
        else:
            if found is not None and has_entries_on(found.record, bookie):
                naming.append(unchecked.key_of(ledger_id))

    ledger_ids = [int(name) for name in await list_names(store, keys.UNCHECKED_LEDGERS_KEY)]
    await _for_each(ledger_ids, look_at)
    return naming


async def marks_remembering(store: MetadataStore, bookie: str) -> list[str]:
    """Return the keys of repair marks that list the bookie as one that may have the only copy of an entry (`former`).

    The keys of marks that only a newer release can read are included.
    """
    records = repair_marks(store)
    remembering: list[str] = []

    async def look_at(ledger_id: int) -> None:
        try:
            found = await records.get(ledger_id)
        except NewerFormatError:
            remembering.append(records.key_of(ledger_id))
        except CorruptRecordError:
            pass  # it is logged by the auditor; nobody would ever remove it
        else:
            if found is not None and bookie in found.record.former:
                remembering.append(records.key_of(ledger_id))

    ledger_ids = [ledger_id async for ledger_id in list_repair_marks(store)]
    await _for_each(ledger_ids, look_at)
    return remembering


def has_entries_on(ledger: LedgerMetadata, bookie: str) -> bool:
    """Return whether the ledger's record names the bookie for entries, or in an open fragment."""
    # The last fragment of a closed ledger may be empty: repair does not change it.
    end = math.inf if ledger.last_entry_id is None else ledger.last_entry_id
    return any(bookie in fragment.ensemble for fragment in ledger.fragments if fragment.first_entry_id <= end)


def _has_last_copies(ledger: LedgerMetadata, bookie: str, staying: Collection[str]) -> bool:
    """Return whether entries of the ledger may have no copy on other bookies that stay."""
    end, size = ledger.last_entry_id, ledger.ensemble_size
    for fragment in ledger.fragments:
        if bookie not in fragment.ensemble or (end is not None and fragment.first_entry_id > end):
            continue
        place = fragment.ensemble.index(bookie)
        for start in range(place - ledger.write_quorum + 1, place + 1):  # each write set that has the bookie
            others = {fragment.ensemble[(start + i) % size] for i in range(ledger.write_quorum)} - {bookie}
            if not others.intersection(staying):
                return True
    return False


async def _obstacle(store: MetadataStore) -> str:
    """Return what stops all repair, or keeps a bookie from counting as empty; nothing if there is no problem."""
    switch, auditor, audit = await asyncio.gather(
        repair_switch(store).get(None), auditor_record(store).get(None), audit_record(store).get(None)
    )
    if switch is not None:
        return "automatic repair is off: cepheid repair on"
    if auditor is None:
        return "no process with automatic repair runs: start one with recovery.enabled, or cepheid autorecovery"
    if audit is not None and (count := audit.record.unreadable_records):
        return f"{count} records of ledgers cannot be read, and may name it: cepheid ledgers list shows them as DAMAGED"
    return ""


async def request_recovery(store: MetadataStore, bookie: str, now_ms: int) -> None:
    """Request the repair of the ledgers of a bookie that is down now, without its grace period.

    Raises UnknownBookieError, and RepairRefusedError if it runs.
    """
    known, running = await _bookies(store)
    if bookie not in known:
        raise UnknownBookieError(f"there is no bookie {bookie}; known are {', '.join(sorted(known)) or 'none'}", bookie=bookie)
    if bookie in running:
        message = (
            f"bookie {bookie} is registered, so nothing needs to be recovered. If its process has just ended, try again when its"
            " session is over, in a few seconds; to empty a bookie that runs: cepheid bookies decommission"
        )
        raise RepairRefusedError(message, bookie=bookie)
    try:
        await repair_requests(store).create(bookie, RepairRequest(bookie_id=bookie, since_ms=now_ms))
    except KeyExistsError:
        pass


async def missing_views(store: MetadataStore) -> list[View]:
    """Return the records of bookies that keep ledgers which metadata lacks, by bookie id."""
    found = await asyncio.gather(*map(missing_ledgers(store).get, await list_names(store, keys.MISSING_LEDGERS_KEY)))
    return sorted((one.record.model_dump(mode="json") for one in found if one is not None), key=lambda view: str(view["bookie_id"]))


async def report_missing(store: MetadataStore, bookie: str, held: int, missing: Collection[int], now_ms: int) -> bool:
    """Record that metadata lacks these ledgers of a bookie. Return whether an operator confirmed that they are deleted.

    A confirmation is void if other ledgers are missing now, or more.
    """
    records = missing_ledgers(store)
    found = await records.get(bookie)
    if found is not None and found.record.confirmed and found.record.covers(missing):
        return True
    since_ms = now_ms if found is None else found.record.since_ms
    record = MissingLedgers(
        bookie_id=bookie, held=held, missing=len(missing), first=min(missing), last=max(missing), since_ms=since_ms
    )
    try:
        if found is None:
            await records.create(bookie, record)
        elif found.record != record:
            await records.replace(bookie, record, found.version)
    except (BadVersionError, KeyExistsError, NoSuchKeyError):
        pass  # an operator confirmed it at this moment: the next pass sees that
    return False


async def withdraw_missing(store: MetadataStore, bookie: str) -> None:
    """Remove the record of a bookie that does not miss ledgers any more. Safe to repeat."""
    records = missing_ledgers(store)
    try:
        if await records.exists(bookie):  # usually there is none, and a look costs less than a write
            await records.delete(bookie, None)
    except NoSuchKeyError:
        pass


async def confirm_missing(store: MetadataStore, bookie: str, missing: int) -> None:
    """Let a bookie delete the ledgers that metadata lacks; `missing` is the number that the operator was shown.

    Raises RepairRefusedError.
    """
    records = missing_ledgers(store)
    found = await records.get(bookie)
    if found is None:
        raise RepairRefusedError(f"bookie {bookie} misses no ledgers in metadata: there is nothing to confirm", bookie=bookie)
    if found.record.missing != missing:
        message = f"bookie {bookie} misses {found.record.missing:,} ledgers now, not {missing:,}: look again, then confirm"
        raise RepairRefusedError(message, bookie=bookie)
    try:
        await records.replace(bookie, found.record.replace(confirmed=True), found.version)
    except (BadVersionError, NoSuchKeyError):
        raise RepairRefusedError(f"what bookie {bookie} misses has just changed: look again, then confirm", bookie=bookie) from None


async def mark_damaged(
    store: MetadataStore, ledger_id: int, bookies: Sequence[str], now_ms: int, *, entries: Sequence[tuple[int, int]] = ()
) -> None:
    """Request a check of these bookies' copies of a ledger. Raises UnknownLedgerError, RepairRefusedError.

    `entries`: first and last of the runs of entries that are known to be bad, so that only they are checked; none: all are.
    """
    found = await ledger_records(store).get(ledger_id)
    if found is None:
        raise UnknownLedgerError(f"ledger {ledger_id} does not exist, or was deleted", ledger_id=ledger_id)
    named = {name for fragment in found.record.fragments for name in fragment.ensemble}
    if strangers := sorted(set(bookies) - named):
        message = f"ledger {ledger_id} has no entries on {', '.join(strangers)}; its bookies are {', '.join(sorted(named))}"
        raise RepairRefusedError(message, ledger_id=ledger_id)
    marks = repair_marks(store)
    damaged = dict.fromkeys(bookies, ShortReason.DAMAGED)
    short_entries = sum(last - first + 1 for first, last in entries)
    if entries and await read_storage_format(store) < _MARKS_NAME_ENTRIES_SINCE:
        entries = ()
    while True:
        mark = await marks.get(ledger_id)
        try:
            if mark is None:
                fresh = RepairMark(
                    ledger_id=ledger_id,
                    bookies=damaged,
                    copies_left=max(0, found.record.write_quorum - len(damaged)),
                    short_entries=short_entries,
                    short_bytes=_bytes_of(found.record, short_entries),
                    since_ms=now_ms,
                    damaged=damaged_entries(None, bookies, entries),
                )
                await marks.create(ledger_id, fresh)
            else:
                merged = merged_reasons(mark.record.bookies, damaged)
                named_entries = damaged_entries(mark.record, bookies, entries)
                await marks.replace(ledger_id, mark.record.replace(bookies=merged, damaged=named_entries), mark.version)
            return
        except (KeyExistsError, BadVersionError, NoSuchKeyError):
            continue


def _bytes_of(ledger: LedgerMetadata, entries: int) -> int:
    """Return the estimated payload bytes of this many entries; 0 while the ledger's length is not known."""
    if not ledger.length_bytes or ledger.last_entry_id is None:
        return 0
    return ledger.length_bytes * entries // (ledger.last_entry_id + 1)


def damaged_entries(
    mark: RepairMark | None, bookies: Iterable[str], entries: Sequence[tuple[int, int]]
) -> dict[str, tuple[EntryRun, ...]] | None:
    """Return `damaged` of a mark after these entries (all, if there are none) were found damaged on these bookies."""
    known = {} if mark is None or mark.damaged is None else dict(mark.damaged)
    for bookie in bookies:
        is_all = mark is not None and mark.bookies.get(bookie) is ShortReason.DAMAGED and bookie not in known
        runs = merged_runs([*((run.first, run.last) for run in known.pop(bookie, ())), *entries])
        if entries and not is_all and len(runs) <= _MOST_RUNS:
            known[bookie] = tuple(EntryRun(first=first, last=last) for first, last in runs)
    return known or None


def merged_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return runs of ids, both ends inclusive, in order; runs that overlap or adjoin are joined."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def merged_reasons(known: Mapping[str, ShortReason], found: Mapping[str, ShortReason]) -> dict[str, ShortReason]:
    """Return the reasons of a mark that had `known`, after `found`.

    Damage stays until the copies were checked or have moved: the copies of a lost or draining bookie that returns are not checked.
    An empty disk outweighs it, because all copies are checked then; the auditor finds that again from the cookie. A bad placement
    outweighs nothing.
    """
    return {**found, **{name: why for name, why in known.items() if name not in found or _outweighs(why, found[name])}}


def _outweighs(known: ShortReason, found: ShortReason) -> bool:
    match found:
        case ShortReason.PLACEMENT:
            return True
        case ShortReason.LOST | ShortReason.DRAINING:
            return known is ShortReason.DAMAGED
        case ShortReason.DAMAGED:
            return known is ShortReason.EMPTY_DISK
        case ShortReason.EMPTY_DISK:
            return False


async def _bookies(store: MetadataStore) -> tuple[set[str], set[str]]:
    """Return the ids of all bookies, and of those that are registered."""
    parents = keys.BOOKIE_COOKIES_KEY, keys.AVAILABLE_BOOKIES_KEY, keys.READONLY_BOOKIES_KEY
    cookies, available, readonly = [set(await list_names(store, parent)) for parent in parents]
    return cookies | available | readonly, available | readonly
