"""Looks at each copy of ledgers that were closed by recovery, once.

    /repair/unchecked ──► lock ──► ask each bookie of the record for its entries ──► copies are missing: mark the ledger
                                                                              └──► one write: not listed any more, lock removed

What a bookie missed while it hung is known to the writer of the ledger alone. When the writer ends without closing the ledger,
recovery copies the last entries to all bookies, and nothing looks wrong from outside.

Rules:
1. A ledger is listed in the write that closes it, and leaves the list when every bookie of its record has answered for all entries.
   A bookie that does not answer now is asked again later, or has been replaced by repair by then.
2. What is missing is marked before the ledger leaves the list. Workers copy it. A process that ends in between costs a second look.
3. A ledger of the list is not short of copies as far as anybody knows. So the list has figures of its own, and raises no alarm.
4. A whole bookie costs one request for each fragment. Requests and bytes are limited for each process, and nothing is read while
   repair is switched off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cepheid_ledger import CopyFailedError, LedgerClient, LedgerError, entries_of
from cepheid_metadata import (
    Check,
    KeyExistsError,
    LedgerMetadata,
    MetadataError,
    MetadataStore,
    RepairLock,
    keys,
    ledger_records,
    list_names,
    repair_locks,
    unchecked_ledgers,
)
from cepheid_metadata.repair_views import RepairRefusedError, UnknownLedgerError, mark_damaged, merged_runs
from cepheid_ports import Ports, TaskOwner
from cepheid_recovery.cluster_state import ClusterState
from cepheid_recovery.settings import RecoverySettings

log = logging.getLogger(__name__)

_BYTES_PER_S = 16 << 20
"""Most bytes of copies that one process reads in a second, over a whole ledger."""
_MAX_RETRY_S = 300.0


@dataclass(slots=True)
class CheckerStatistics:
    """`waiting`: ledgers on the list of the cluster when it was read last. The others count what this process did."""

    waiting: int = 0
    ledgers: int = 0
    short_ledgers: int = 0


@dataclass(slots=True)
class _Retry:
    not_before: float
    pause_s: float


class CopyChecker:
    """`start` once, `aclose` once."""

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
        self._locks = repair_locks(store)
        self._retries: dict[int, _Retry] = {}
        self._due = asyncio.Event()
        self._tasks = TaskOwner(f"copy-checker {name}")
        self.statistics = CheckerStatistics()

    def __repr__(self) -> str:
        return f"<CopyChecker {self.statistics}, {len(self._retries)} to be asked again>"

    def start(self) -> None:
        self._tasks.start(self._run(), name="check")

    async def aclose(self) -> None:
        """Ends what is under way. A lock ends with the session."""
        await self._tasks.aclose()

    def retry_all(self) -> None:
        """A bookie came or changed: those that did not answer may answer now."""
        self._retries.clear()
        self._due.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._state.refresh()
                await self._check_listed()
            except Exception as error:  # a defect must end neither repair nor the bookie in this process
                log.warning("repair.unchecked_not_read", extra={"error": repr(error)})
            try:
                async with asyncio.timeout(self._settings.poll_s):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()

    async def _check_listed(self) -> None:
        """Check the ledgers of one listing that are due, in random order: other processes check them as well."""
        listed = [int(name) for name in await list_names(self._store, keys.UNCHECKED_LEDGERS_KEY)]
        self.statistics.waiting = len(listed)
        self._retries = {ledger_id: retry for ledger_id, retry in self._retries.items() if ledger_id in listed}
        now = asyncio.get_running_loop().time()
        due = [one for one in listed if one not in self._retries or self._retries[one].not_before <= now]
        self._ports.random.shuffle(due)
        for ledger_id in due:
            if self._state.off is not None:
                return
            try:
                await self._check(ledger_id)
            except (LedgerError, MetadataError, TimeoutError) as error:
                log.info("repair.not_checked", extra={"ledger_id": ledger_id, "error": str(error)})
                self._retry_later(ledger_id)

    def _retry_later(self, ledger_id: int) -> None:
        before = self._retries.get(ledger_id)
        pause_s = self._settings.retry_s if before is None else min(2 * before.pause_s, _MAX_RETRY_S)
        self._retries[ledger_id] = _Retry(asyncio.get_running_loop().time() + pause_s, pause_s)

    async def _check(self, ledger_id: int) -> None:
        """Raises LedgerError, MetadataError, TimeoutError: it stays on the list."""
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
        if not found.record.is_closed:  # a backup of metadata may have it so
            raise CopyFailedError(f"ledger {ledger_id} is not closed yet", ledger_id=ledger_id)
        await self._look_at_copies(found.record)
        # Copies that moved meanwhile are looked at where they are now.
        await self._store.multi([Check(self._ledgers.key_of(ledger_id), found.version), forget, unlock])
        self.statistics.ledgers += 1

    async def _look_at_copies(self, ledger: LedgerMetadata) -> None:
        """Mark the ledger for each bookie that lacks copies. Raises CopyFailedError when a bookie cannot tell, MetadataError."""
        loop = asyncio.get_running_loop()
        began, requests = loop.time(), 0
        missing: dict[str, list[tuple[int, int]]] = {}
        unknown: LedgerError | None = None
        for fragment in ledger.fragments:
            first, last = entries_of(ledger, fragment)
            for position, bookie in enumerate(fragment.ensemble if first <= last else ()):
                requests += 1
                try:
                    runs = await self._client.runs_not_stored(ledger, position, bookie, first, last)
                except LedgerError as error:  # the others are asked all the same
                    unknown = error
                    continue
                if runs:
                    missing.setdefault(bookie, []).extend(runs)
        for bookie, runs in missing.items():
            entries = merged_runs(runs)
            extra = {"ledger_id": ledger.ledger_id, "bookie": bookie, "runs": len(entries), "first": entries[0][0]}
            log.warning("repair.copies_missing", extra=extra)
            try:
                await mark_damaged(self._store, ledger.ledger_id, [bookie], self._ports.wall_ms(), entries=entries)
            except (UnknownLedgerError, RepairRefusedError):
                continue  # it was deleted, or its copies moved, this moment: the write that follows fails
            self._on_marked()
        self.statistics.short_ledgers += bool(missing)
        size_bytes = (ledger.length_bytes or 0) * ledger.write_quorum
        pace_s = max(requests / self._settings.checks_per_s, size_bytes / _BYTES_PER_S)
        await asyncio.sleep(max(0.0, began + pace_s - loop.time()))
        if unknown is not None:
            raise unknown
