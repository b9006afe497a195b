"""Implementations of the bookie's interfaces to metadata."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest

from cepheid_bookie.block_check import Run
from cepheid_bookie.bookie import Bookie
from cepheid_bookie.cookie import Cookie
from cepheid_bookie.damaged_blocks import DamageReport, Outlook
from cepheid_bookie.errors import CookieError
from cepheid_bookie.journal_format import FORMAT_VERSION, SIZED_FORMAT_VERSION
from cepheid_metadata import (
    BadVersionError,
    BookieCookie,
    BookieLife,
    CorruptRecordError,
    DeletedLedgers,
    Found,
    InGrace,
    KeyExistsError,
    LedgerIdCounter,
    LedgerMetadata,
    MetadataStore,
    NewerFormatError,
    NoSuchKeyError,
    Records,
    RepairMark,
    ShortReason,
    bookie_cookies,
    bookie_lives,
    decommissioned_bookies,
    deleted_ledger_records,
    keys,
    ledger_records,
    list_deleted_ledgers,
    list_ledgers,
    repair_marks,
    report_ledgers,
    restored_record,
)
from cepheid_metadata.repair_views import (
    RepairRefusedError,
    UnknownLedgerError,
    has_entries_on,
    mark_damaged,
    marks_remembering,
    report_missing,
    withdraw_missing,
)
from cepheid_metadata.upgrade import read_storage_format
from cepheid_ports import Ports, SteadyClock

log = logging.getLogger(__name__)

_SIZED_JOURNAL_SINCE = 2  # storage format of the cluster
_READ_AT_ONCE = 64  # records of ledgers


class MetadataCookies:
    """Implements `CookieRecords` and `LifeRecords`. Paths in `directories` are informative: the incarnation identifies disks.

    Rule: a use that had its own directory keeps one. If a journal is no longer configured, the stamped data directory
    would look complete, and an empty journal in it would replay nothing of what was acknowledged.
    """

    def __init__(self, store: MetadataStore, directories: dict[str, tuple[str, ...]]) -> None:
        self._store = store
        self._records = bookie_cookies(store)
        self._lives = bookie_lives(store)
        self._decommissioned = decommissioned_bookies(store)
        self._ids: Records[None, LedgerIdCounter] = Records(store, lambda _: keys.LEDGER_IDS_KEY, LedgerIdCounter)
        self._directories = directories

    async def load(self, bookie_id: str) -> Cookie | None:
        # A follower that lags behind this bookie's first start would deny that it exists.
        await self._store.sync(self._records.key_of(bookie_id))
        found = await self._records.get(bookie_id)
        if found is None:
            return None
        record = found.record
        if forgotten := sorted(record.directories.keys() - self._directories.keys()):
            places = ", ".join(f"{use} in {', '.join(record.directories[use])}" for use in forgotten)
            raise CookieError(f"bookie {bookie_id} keeps its {places}, and is started without that; name it: --{forgotten[0]}")
        limbo_below = record.limbo_below or 0
        return Cookie(record.bookie_id, record.cluster_id, record.incarnation, record.layout_version, limbo_below)

    async def create(self, cookie: Cookie) -> None:
        create = self._records.create_op(cookie.bookie_id, self._record(cookie))
        found = await self._decommissioned.get(cookie.bookie_id)
        forget = [] if found is None else [self._decommissioned.delete_op(cookie.bookie_id, found.version)]
        await self._store.multi([create, *forget])

    async def decommissioned(self, bookie_id: str) -> str | None:
        found = await self._decommissioned.get(bookie_id)
        return None if found is None else found.record.incarnation

    async def is_named(self, bookie_id: str) -> bool:
        living, deleted = ledger_records(self._store), deleted_ledger_records(self._store)

        async def names(ledger_id: int) -> bool:
            # A ledger that is deleted or restored meanwhile is in one of the trees at each look.
            for _ in range(2):
                if (found := await living.get(ledger_id)) is not None:
                    return has_entries_on(found.record, bookie_id)
                if (kept := await deleted.get(ledger_id)) is not None:
                    return has_entries_on(kept.record.ledger, bookie_id)
            return False

        await self._store.sync(keys.LEDGERS_KEY)
        await self._store.sync(keys.DELETED_LEDGERS_KEY)
        for listing in (list_ledgers, list_deleted_ledgers):
            ledger_ids = [ledger_id async for ledger_id in listing(self._store)]
            for start in range(0, len(ledger_ids), _READ_AT_ONCE):
                if any(await asyncio.gather(*map(names, ledger_ids[start : start + _READ_AT_ONCE]))):
                    return True
        # After the ledgers: the write that removes a bookie from a record is the one by which the mark remembers it.
        await self._store.sync(keys.REPAIR_MARKS_KEY)
        return bool(await marks_remembering(self._store, bookie_id))

    async def replace(self, recorded: Cookie, cookie: Cookie) -> None:
        found = await self._records.get(cookie.bookie_id)
        if found is None or found.record.incarnation != recorded.incarnation:
            seen = None if found is None else found.record.incarnation
            message = f"bookie {cookie.bookie_id} was incarnation {recorded.incarnation} a moment ago, and is {seen} now"
            raise CookieError(f"{message}; look for another process that starts under this id")
        await self._records.replace(cookie.bookie_id, self._record(cookie), found.version)

    async def next_ledger_id(self) -> int:
        await self._store.sync(keys.LEDGER_IDS_KEY)  # a lagging follower would return too low a watermark
        found = await self._ids.get(None)
        return 0 if found is None else found.record.next_ledger_id

    async def is_restored(self) -> bool:
        await self._store.sync(keys.RESTORED_KEY)
        return await restored_record(self._store).exists(None)

    async def load_life(self, bookie_id: str) -> int:
        found = await self._lives.get(bookie_id)
        return 0 if found is None else found.record.life

    async def save_life(self, bookie_id: str, life: int) -> None:
        found = await self._lives.get(bookie_id)
        record = BookieLife(life=life)
        try:
            if found is None:
                await self._lives.create(bookie_id, record)
                return
            if found.record.life < life:
                await self._lives.replace(bookie_id, record, found.version)
                return
        except (BadVersionError, KeyExistsError):
            pass
        message = f"life {life} of bookie {bookie_id} is taken: another process runs under this id, on a copy of its disks"
        raise CookieError(f"{message}; stop it, or give it an id of its own")

    def _record(self, cookie: Cookie) -> BookieCookie:
        return BookieCookie(
            layout_version=cookie.format_version,
            bookie_id=cookie.bookie_id,
            incarnation=cookie.incarnation,
            cluster_id=cookie.cluster_id,
            directories=self._directories,
            limbo_below=cookie.limbo_below or None,
        )


class MetadataLedgers:
    """Implements `LedgersInMetadata`. A deleted ledger counts as existing until its grace period is over."""

    def __init__(self, store: MetadataStore, ports: Ports) -> None:
        self._store = store
        self._ports = ports
        self._clock = SteadyClock(ports)
        self._deleted = DeletedLedgers(store)
        self._living = ledger_records(store)
        self._marks = repair_marks(store)
        self._ids: Records[None, LedgerIdCounter] = Records(store, lambda _: keys.LEDGER_IDS_KEY, LedgerIdCounter)

    async def report_if_restored(self, bookie: Bookie) -> bool:
        return await report_bookie(self._store, bookie, self._ports)

    async def purge(self, give_up: Collection[int] = ()) -> Mapping[int, InGrace]:
        purged = await self._deleted.purge(self._clock.now_ms(), give_up)
        if purged:
            given_up = len(set(purged).intersection(give_up))
            facts = {"ledgers": len(purged), "first": purged[0], "last": purged[-1], "before_their_time": given_up}
            log.info("gc.purged", extra=facts)
        return self._deleted.in_grace

    async def were_purged(self, ledger_ids: Collection[int]) -> Collection[int]:
        return await self._deleted.were_purged(ledger_ids)

    async def listing(self) -> Collection[int]:
        await self._sync()
        return await self._deleted.listing()

    async def absent(self, ledger_ids: Sequence[int]) -> list[int]:
        await self._sync()  # once: a ledger that is in neither tree does not return to one
        found: list[int] = []
        for start in range(0, len(ledger_ids), _READ_AT_ONCE):
            part = ledger_ids[start : start + _READ_AT_ONCE]
            kept = await asyncio.gather(*map(self._deleted.is_kept, part))
            found += [ledger_id for ledger_id, is_kept in zip(part, kept, strict=True) if not is_kept]
        return found

    async def record(self, ledger_id: int) -> Found[LedgerMetadata] | None:
        try:
            return await self._living.get(ledger_id)
        except (CorruptRecordError, NewerFormatError) as error:
            hint = "the entries of this ledger stay on this bookie; run `cepheid ledgers verify` from the newest release in use"
            log.warning("gc.record_unreadable", extra={"ledger_id": ledger_id, "error": error.args[0], "hint": hint})
            return None

    async def is_marked(self, ledger_id: int) -> bool:
        return await self._marks.exists(ledger_id)

    async def touch(self, found: Found[LedgerMetadata]) -> bool:
        try:
            await self._living.replace(found.record.ledger_id, found.record, found.version)
        except (BadVersionError, NoSuchKeyError):
            return False
        return True

    async def next_ledger_id(self) -> int:
        # No sync: `listing` has just synced, and a session never sees older metadata than before.
        found = await self._ids.get(None)
        return 0 if found is None else found.record.next_ledger_id

    async def report_missing(self, bookie_id: str, held: int, missing: Collection[int]) -> bool:
        return await report_missing(self._store, bookie_id, held, missing, self._ports.wall_ms())

    async def withdraw_missing(self, bookie_id: str) -> None:
        await withdraw_missing(self._store, bookie_id)

    async def _sync(self) -> None:
        """Catch up: a follower may lag behind the creation of a ledger that is held here."""
        await self._store.sync(keys.LEDGERS_KEY)
        await self._store.sync(keys.DELETED_LEDGERS_KEY)


async def journal_format(store: MetadataStore) -> int:
    """Return the format of new journal segments in this cluster. Raises NewerStorageFormatError."""
    return SIZED_FORMAT_VERSION if await read_storage_format(store) >= _SIZED_JOURNAL_SINCE else FORMAT_VERSION


class MetadataDamage:
    """Implements `DamageReports`: marks a ledger, so that a replication worker copies its bad entries to this bookie again."""

    def __init__(self, store: MetadataStore, bookie_id: str, ports: Ports) -> None:
        self._store = store
        self._bookie_id = bookie_id
        self._ports = ports
        self._ledgers = ledger_records(store)
        self._marks = repair_marks(store)

    async def report(self, ledger_id: int, entries: Sequence[Run]) -> DamageReport:
        found = await self._ledgers.get(ledger_id)
        if found is None:  # garbage collection removes it
            return DamageReport(Outlook.NOT_NEEDED, "")
        ledger = found.record
        topic = ledger.custom.get("topic", "")
        if not any(self._is_named_for(ledger, run) for run in entries):
            return DamageReport(Outlook.NOT_NEEDED, topic)
        mark = await self._marks.get(ledger_id)
        if mark is None or not self._is_in_work(mark.record, entries):
            try:
                await mark_damaged(self._store, ledger_id, [self._bookie_id], self._ports.wall_ms(), entries=entries)
            except (UnknownLedgerError, RepairRefusedError):  # deleted, or moved away from here, at this moment
                return DamageReport(Outlook.NOT_NEEDED, topic)
        lost = () if mark is None else mark.record.lost
        is_lost = any(run.first <= last and run.last >= first for run in lost for first, last in entries)
        return DamageReport(Outlook.NO_REPLICA if is_lost or ledger.write_quorum == 1 else Outlook.REPAIR, topic)

    def _is_in_work(self, mark: RepairMark, entries: Sequence[Run]) -> bool:
        """Return whether a worker already checks these entries: renewing a mark makes it start over."""
        if mark.bookies.get(self._bookie_id) in (None, ShortReason.PLACEMENT, ShortReason.LOST):
            return False
        checked = mark.entries_to_check(self._bookie_id)
        return checked is None or all(any(run.first <= first and last <= run.last for run in checked) for first, last in entries)

    def _is_named_for(self, ledger: LedgerMetadata, run: Run) -> bool:
        """Return whether the ledger's record names this bookie for at least one of these entries."""
        size, quorum = ledger.ensemble_size, ledger.write_quorum
        starts = [fragment.first_entry_id for fragment in ledger.fragments[1:]]
        end = run[1] if ledger.last_entry_id is None else min(run[1], ledger.last_entry_id)
        for fragment, following in zip_longest(ledger.fragments, starts):
            first, last = max(run[0], fragment.first_entry_id), end if following is None else min(end, following - 1)
            if self._bookie_id in fragment.ensemble:
                position = fragment.ensemble.index(self._bookie_id)
                # An entry is on the `quorum` bookies from position `entry id % size` on; that repeats every `size` entries.
                if any((position - entry_id) % size < quorum for entry_id in range(first, min(last, first + size - 1) + 1)):
                    return True
        return False


async def report_bookie(store: MetadataStore, bookie: Bookie, ports: Ports) -> bool:
    """After a restore of metadata, raise the id counter above the bookie's ledgers and report it. Call it before registering.

    Return whether metadata was restored from a backup and no operator has confirmed that yet.
    """
    if not await restored_record(store).exists(None):
        return False
    await bookie.wait_listed()  # a start need not wait for it otherwise
    incarnation, largest = bookie.cookie.registered_as, bookie.largest_ledger_id
    return await report_ledgers(store, bookie.bookie_id, incarnation, largest, bookie.ledger_count, ports.wall_ms())
