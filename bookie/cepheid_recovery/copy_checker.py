"""Checks each copy of ledgers that were closed by recovery, once.

    /repair/unchecked ──► lock ──► ask each bookie of the record for its entries ──► copies are missing: mark the ledger
                                                                              └──► one write: removed from the list and unlocked

Only the writer of a ledger knows what a bookie missed while it hung. If the writer ends without closing the ledger, recovery
copies the last entries to all bookies, and nothing looks wrong from outside.

Rules:
1. A ledger is listed in the write that closes it, and leaves the list when every bookie of its record has answered for all entries.
   A bookie that does not answer now is asked again later, or has been replaced by repair by then. For one that has not run for
   the grace period the ledger is marked: the auditor may have walked before the ledger was brought back.
2. What is missing is marked before the ledger leaves the list. Workers copy it. If the process ends in between, it is checked
   twice.
3. A ledger of the list is not known to be short of copies. So the list has figures of its own, and raises no alarm.
4. A bookie costs one request for each fragment, and more if it holds many bytes. Requests and bytes are limited for each
   process, and nothing is read while repair is switched off.
5. Locks are only between these processes: a check may take minutes, and repair of the ledger must not wait for it. A record that
   repair changes meanwhile makes the last write fail, and copies that moved are checked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cepheid_ledger import CopyFailedError, LedgerClient, LedgerError, entries_of
from cepheid_metadata import (
    Check,
    Found,
    KeyExistsError,
    LedgerMetadata,
    MetadataError,
    MetadataStore,
    RepairLock,
    check_locks,
    keys,
    ledger_records,
    list_names,
    repair_marks,
    unchecked_ledgers,
)
from cepheid_metadata.repair_views import RepairRefusedError, UnknownLedgerError, mark_damaged, merged_runs
from cepheid_ports import Ports, TaskOwner
from cepheid_recovery.cluster_state import ClusterState
from cepheid_recovery.retries import Retries
from cepheid_recovery.settings import RecoverySettings

log = logging.getLogger(__name__)

_BYTES_PER_S = 16 << 20
"""Bytes of copies that one process reads in a second, on average."""
_PART_BYTES = 32 << 20
"""Limit of the bytes read without a pause."""
_BEGIN_AFTER_S = 10.0
"""Time after a ledger is first seen on the list until it is checked. A broker that takes over many topics opens them faster without
checks at the same time, and a bookie that hung may still get what was queued for it."""


@dataclass(slots=True)
class CheckerStatistics:
    """Statistics of a checker. `waiting`: ledgers on the cluster's list when it was last read. The others count this process's
    work."""

    waiting: int = 0
    ledgers: int = 0
    short_ledgers: int = 0


class CopyChecker:
    """Checks ledgers closed by recovery. Call `start` once and `aclose` once."""

    def __init__(
        self,
        name: str,
        store: MetadataStore,
        client: LedgerClient,
        state: ClusterState,
        settings: RecoverySettings,
        ports: Ports,
        *,
        on_marked: Callable[[], None] = lambda: None,
    ) -> None:
        self._lock_record = RepairLock(worker=f"{name} {ports.random.getrandbits(32):08x} checks")
        self._store = store
        self._client = client
        self._state = state
        self._settings = settings
        self._ports = ports
        self._on_marked = on_marked
        self._ledgers = ledger_records(store)
        self._unchecked = unchecked_ledgers(store)
        self._locks = check_locks(store)
        self._marks = repair_marks(store)
        self._since: dict[int, float] = {}
        self._away_since: dict[str, float] = {}  # by bookie that does not run
        self._noted_at = 0.0  # when `_away_since` was last updated
        self._metadata_failed = False  # whether a request to metadata has failed since
        self._retries = Retries(settings.retry_s)
        self._heard: dict[int, tuple[int, set[tuple[int, str]]]] = {}
        """By ledger that could not be checked completely: the version of its record, and the first entry of each fragment with each
        bookie that has answered for it."""
        self._due = asyncio.Event()
        self._tasks = TaskOwner(f"copy-checker {name}")
        self.statistics = CheckerStatistics()

    def __repr__(self) -> str:
        return f"<CopyChecker {self.statistics}, {len(self._retries)} to be asked again>"

    def start(self) -> None:
        self._tasks.start(self._run(), name="check")

    async def aclose(self) -> None:
        """End running work. A lock ends with the session."""
        await self._tasks.aclose()

    def retry_all(self) -> None:
        """Try again at once: a bookie came or changed, so those that did not answer may answer now."""
        self._retries.clear()
        self._due.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._state.refresh()
                self._note_away()
                await self._check_listed()
            except Exception as error:  # a defect must end neither repair nor the bookie in this process
                self._metadata_failed = True
                log.warning("repair.unchecked_not_read", extra={"error": repr(error)})
            try:
                async with asyncio.timeout(self._settings.poll_s):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()

    async def _check_listed(self) -> None:
        """Check the ledgers of one listing that are due, in random order: other processes check them as well."""
        listed = {int(name) for name in await list_names(self._store, keys.UNCHECKED_LEDGERS_KEY)}
        self.statistics.waiting = len(listed)
        now = asyncio.get_running_loop().time()
        self._since = {ledger_id: self._since.get(ledger_id, now) for ledger_id in listed}
        self._retries.keep(listed)
        self._heard = {ledger_id: heard for ledger_id, heard in self._heard.items() if ledger_id in listed}
        old = [one for one in sorted(listed) if now - self._since[one] >= _BEGIN_AFTER_S]
        due = self._retries.due(old, now)
        self._ports.random.shuffle(due)
        for ledger_id in due:
            if self._state.off is not None:
                return
            try:
                await self._check(ledger_id)
            except (LedgerError, MetadataError, TimeoutError) as error:
                log.info("repair.not_checked", extra={"ledger_id": ledger_id, "error": str(error)})
                self._retries.later(ledger_id, asyncio.get_running_loop().time())

    async def _check(self, ledger_id: int) -> None:
        """Check one ledger. After LedgerError, MetadataError or TimeoutError it stays on the list."""
        try:
            await self._locks.create(ledger_id, self._lock_record, ephemeral=True)
        except KeyExistsError:
            found = await self._locks.get(ledger_id)
            if found is None or found.record != self._lock_record:
                return  # another process works on it
        try:
            await self._check_locked(ledger_id)
        except BaseException:
            try:
                await self._locks.delete(ledger_id, 0)
            except MetadataError:
                pass  # it ends with the session at the latest
            raise

    async def _check_locked(self, ledger_id: int) -> None:
        found = await self._ledgers.get(ledger_id)
        forget = self._unchecked.delete_op(ledger_id, 0)
        unlock = self._locks.delete_op(ledger_id, 0)
        if found is None:  # it was deleted meanwhile
            await self._store.multi([forget, unlock])
            return
        if not found.record.is_closed:  # possible after a restore of metadata from a backup
            raise CopyFailedError(f"ledger {ledger_id} is not closed yet", ledger_id=ledger_id)
        await self._look_at_copies(found)
        # Copies that moved meanwhile are checked at their new place.
        await self._store.multi([Check(self._ledgers.key_of(ledger_id), found.version), forget, unlock])
        self._heard.pop(ledger_id, None)
        self.statistics.ledgers += 1

    async def _look_at_copies(self, found: Found[LedgerMetadata]) -> None:
        """Mark the ledger for each bookie that lacks copies. Raises CopyFailedError if a bookie cannot answer, MetadataError."""
        ledger = found.record
        version, heard = self._heard.get(ledger.ledger_id, (found.version, set()))
        if version != found.version:
            heard = set()
        self._heard[ledger.ledger_id] = found.version, heard
        unknown: LedgerError | None = None
        is_short = False
        for fragment in ledger.fragments:
            first, last = entries_of(ledger, fragment)
            for position, bookie in enumerate(fragment.ensemble if first <= last else ()):
                if (fragment.first_entry_id, bookie) in heard:
                    continue
                try:
                    missing = await self._missing(ledger, position, bookie, first, last)
                except LedgerError as error:  # the others are asked all the same
                    unknown = error
                    if self._is_away_for_long(bookie):
                        await self._mark_away(ledger.ledger_id, bookie)
                    continue
                if missing:
                    is_short = True
                    await self._mark(ledger.ledger_id, bookie, missing)
                heard.add((fragment.first_entry_id, bookie))
        self.statistics.short_ledgers += is_short
        if unknown is not None:
            raise unknown

    async def _missing(self, ledger: LedgerMetadata, position: int, bookie: str, first: int, last: int) -> list[tuple[int, int]]:
        """Return the entries that a bookie lacks, read in parts at the pace of rule 4. Raises CopyFailedError."""
        if bookie not in self._state.registered():
            raise CopyFailedError(f"bookie {bookie} is not running", bookie=bookie)
        assert ledger.last_entry_id is not None
        entry_bytes = (ledger.length_bytes or 0) * ledger.write_quorum / ledger.ensemble_size / (ledger.last_entry_id + 1)
        part = max(1, int(_PART_BYTES / max(entry_bytes, 1)))
        missing: list[tuple[int, int]] = []
        for start in range(first, last + 1, part):
            end = min(last, start + part - 1)
            missing += await self._client.runs_not_stored(ledger, position, bookie, start, end)
            await asyncio.sleep(max(1 / self._settings.checks_per_s, (end - start + 1) * entry_bytes / _BYTES_PER_S))
        return merged_runs(missing)

    def _note_away(self) -> None:
        """Update since when bookies do not run. The time counts only while repair is on and metadata answers."""
        now = asyncio.get_running_loop().time()
        paused_s = now - self._noted_at if self._metadata_failed else 0.0
        self._noted_at, self._metadata_failed = now, False
        away = () if self._state.off is not None else set(self._state.expected()) - self._state.registered()
        self._away_since = {bookie: min(now, self._away_since.get(bookie, now) + paused_s) for bookie in away}

    def _is_away_for_long(self, bookie: str) -> bool:
        """Return whether the bookie has not run for the grace period, or metadata does not know it."""
        if bookie in self._state.registered():
            return False
        if bookie not in self._state.expected():
            return True
        now = asyncio.get_running_loop().time()
        return now - self._away_since.get(bookie, now) >= self._settings.grace_s

    async def _mark_away(self, ledger_id: int, bookie: str) -> None:
        """Mark the ledger for a bookie that does not run, unless it is marked for it. Raises MetadataError."""
        mark = await self._marks.get(ledger_id)
        if mark is None or bookie not in mark.record.bookies:
            await self._mark_damaged(ledger_id, bookie)

    async def _mark(self, ledger_id: int, bookie: str, missing: Sequence[tuple[int, int]]) -> None:
        """Mark the ledger for what a bookie lacks. Raises MetadataError."""
        extra = {"ledger_id": ledger_id, "bookie": bookie, "runs": len(missing), "first": missing[0][0], "last": missing[-1][1]}
        log.warning("repair.copies_missing", extra=extra)
        await self._mark_damaged(ledger_id, bookie, missing)

    async def _mark_damaged(self, ledger_id: int, bookie: str, entries: Sequence[tuple[int, int]] = ()) -> None:
        try:
            await mark_damaged(self._store, ledger_id, [bookie], self._ports.wall_ms(), entries=entries)
        except (UnknownLedgerError, RepairRefusedError):
            return  # it was deleted, or its copies moved, at this moment: the write that follows fails
        self._on_marked()
