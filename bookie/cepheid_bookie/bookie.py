"""One storage node: what it promises to ledger clients, whoever carries the bytes.

    add ───► Admission ──► WriteCache + Journal ──synced──► answers        read ──► EntryReader ──► cache, else blocks
    fence ─► LedgerState + Journal ──synced──► answer                      Checkpointer: cache ──► entry log ──► index ──► mark

Rules (README.md has them all):
1. OK means durable here, and readable until metadata no longer knows the ledger, or closed it and names this bookie nowhere in it.
2. A fence is durable before anything is answered, negative answers and unknown ledgers included; it is never undone.
3. Yes, a certain no, and unknown are three answers.
4. After an error that may have lost data nothing is answered OK any more: the state is FAILED, the process restarts and replays.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from cepheid_bookie.add_answers import AddCompletion, OnAnswers, deliver
from cepheid_bookie.admission import Admission, refuse_all
from cepheid_bookie.background_pace import BackgroundPace
from cepheid_bookie.block_index import BlockIndex
from cepheid_bookie.checkpoint import Checkpointer, FlushStore
from cepheid_bookie.cookie import BookieIdentity
from cepheid_bookie.damaged_blocks import DamagedBlocks, DamageReports
from cepheid_bookie.disk import Disk, SyncFailedError
from cepheid_bookie.disk_health import DiskHealth, HealthLimits, HealthState, TimedWorker
from cepheid_bookie.disk_space import DiskSpace
from cepheid_bookie.entry_log import EntryLogReader
from cepheid_bookie.entry_reader import EntryReader, StoredRun, refuse_range
from cepheid_bookie.errors import CookieError, IndexCorruptError
from cepheid_bookie.fail_stop import FailStopWorker
from cepheid_bookie.journal import Journal
from cepheid_bookie.journal_format import FORMAT_VERSION
from cepheid_bookie.journal_writer import JournalSpaceError, JournalWriter, SpareSegments
from cepheid_bookie.lac_waits import LacWaits
from cepheid_bookie.ledger_access import LedgerAccess
from cepheid_bookie.ledger_deletion import HeldCopy, LedgerDeletion
from cepheid_bookie.ledger_table import LISTED_AT_START, LedgerState
from cepheid_bookie.limbo import Limbo
from cepheid_bookie.local_connection import LocalConnection
from cepheid_bookie.log_collection import LogCollection
from cepheid_bookie.opening import Directories, IdentityRecords, Storage, new_nonce, open_storage
from cepheid_bookie.read_watch import ReadWatch, WatchedReads
from cepheid_bookie.run_sender import RunSender
from cepheid_bookie.scans import CACHED_GROUPS, AuthorizeRead, Scans, accept_every_ticket
from cepheid_bookie.scrubber import Scrubber
from cepheid_bookie.settings import StorageSettings
from cepheid_bookie.statistics import BookieStatistics, take_statistics
from cepheid_ports import Ports, SteadyClock, Worker
from cepheid_rpc import (
    AddRequest,
    BookieConnection,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    ReadAnswer,
    ReadRequest,
    Status,
)
from cepheid_security.read_tickets import LAST_ENTRY

log = logging.getLogger(__name__)

_SEEN_S = 86_400.0
"""How long a process runs before it forgets tombstones: neither it nor the one that made them may have had the right time."""


_BUSY_JOURNAL_BYTES = 256 << 10
_SYNCS_OF_A_FLUSH = 5
"""A flush is larger than a batch of the journal: it may take so many times as long before it counts as slow."""


class BookieState(enum.Enum):
    SERVING = "serving"
    CLOSING = "closing"
    FAILED = "failed"
    CLOSED = "closed"


class Bookie:
    """Made by `open`. Everything is called in the loop; `add` is synchronous."""

    @classmethod
    async def open(
        cls,
        identity: BookieIdentity,
        settings: StorageSettings,
        disk: Disk,
        index: BlockIndex,
        ports: Ports,
        *,
        journal_disk: Disk | None = None,
        cookies: IdentityRecords | None = None,
        accept_empty_disk: bool = False,
        listed_at_start: int = LISTED_AT_START,
        journal_format: int = FORMAT_VERSION,
    ) -> Bookie:
        """Locks the directories, checks whose they are, replays the journal; returns ready to serve.

        `accept_empty_disk` is an operator's word that the disks of this id are lost for good: it starts on empty ones, in limbo
        for every ledger that may have been there (`limbo.py`). It changes nothing for a bookie that is new, or whole.
        `listed_at_start`: ledgers that are listed before it serves; the rest is found meanwhile (`ledger_table.py`).
        `journal_format` is what new journal segments are written in; all formats are read.
        The bookie owns `index` from now on and closes it, also when this raises: DirectoryInUseError, CookieError, DiskFullError,
        FormatVersionError, JournalCorruptError, JournalMissingError, MarkCorruptError.
        """
        directories = Directories(disk, journal_disk or disk, index)
        storage = await open_storage(
            identity, settings, directories, cookies, ports, accept_empty_disk=accept_empty_disk, listed_at_start=listed_at_start
        )
        return cls(settings, ports, storage, journal_format)

    def __init__(self, settings: StorageSettings, ports: Ports, storage: Storage, journal_format: int) -> None:
        directories, workers, cache = storage.directories, storage.workers, storage.cache
        ledgers, logs, mark = storage.ledgers, storage.logs, storage.mark
        self.settings = settings
        self.cookie = storage.cookie
        self._life = storage.life
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._clock = SteadyClock(ports)
        self._limbo = Limbo(storage.cookie.limbo_below)
        self.state = BookieState.SERVING
        self.failure: BaseException | None = None
        self.on_failed: Callable[[BaseException], None] | None = None
        self.on_writable: Callable[[bool], None] | None = None
        self.data_full = asyncio.Event()  # the data disk has no room: what was deleted is to be collected now
        self.bytes_in_grace = 0  # of deleted ledgers that can be brought back, as the collector saw them last
        self.failed_collections = 0  # passes of the collector that an error ended
        self.missing_ledgers = 0  # that metadata lacks and that are kept all the same, as of the last pass of the collector
        self._directories = directories
        self._ports = ports
        self._workers = workers
        self._cache = cache
        self._ledgers = ledgers
        self._logs = logs
        self._read_watch = ReadWatch("data", settings.stalled_disk_s or math.inf, self._on_health)
        self._log_reader = EntryLogReader(directories.data, open_logs=settings.open_logs)
        if settings.stalled_disk_s:
            self._log_reader.on_error = partial(self._call_in_loop, self._read_watch.on_failed_read)
        read, scan, scrubs = (WatchedReads(one, self._read_watch) for one in (workers.read, workers.scan, workers.scrub))
        flush, compact, scrub = map(self._stop_at_failed_sync, (workers.flush, workers.compact, scrubs))
        damaged = DamagedBlocks(
            directories.index, self._log_reader, cache, scrub, flush, self.add, bookie_id=storage.cookie.bookie_id
        )
        self._reader = EntryReader(
            cache,
            directories.index,
            self._log_reader,
            read,
            reading_bytes=settings.reading_bytes,
            read_ahead_bytes=settings.read_ahead_bytes,
            on_damaged=damaged.suspect,
        )
        damaged.forget_cached = self._reader.forget
        self._scans = Scans(
            EntryReader(
                cache,
                directories.index,
                self._log_reader,
                scan,
                reading_bytes=settings.scan_bytes,
                whole_blocks=True,
                cached_groups=CACHED_GROUPS,
                on_damaged=damaged.suspect,
            ),
            open_scans=settings.open_scans,
            retry_s=settings.scan_retry_s,
        )
        can_share = settings.share_logs and directories.data.can_share
        self.runs = RunSender(self._log_reader, scan, can_share=can_share)
        self._health: dict[str, DiskHealth] = {}
        self._index_reason = ""
        self._open_reads = 0
        self._connections: dict[LocalConnection, None] = {}
        start = mark.current
        self._spares = SpareSegments(
            directories.journal, limit=settings.journal_spare_segments, segment_bytes=settings.journal_segment_bytes
        )
        writer = JournalWriter(
            directories.journal,
            start,
            segment_bytes=settings.journal_segment_bytes,
            new_nonce=lambda: new_nonce(ports),
            format_version=journal_format,
            save_first_mark=None if mark.exists else mark.save,
            spares=self._spares,
        )
        compaction_pace = BackgroundPace(settings.background_floor_bytes_s)
        self._pace = BackgroundPace(settings.background_floor_bytes_s, beside=compaction_pace)
        journal_disk, data_disk = directories.journal, directories.data
        self._watched = [
            self._watch("journal", workers.journal, journal_disk, settings.slow_disk_s),
            self._watch("data", workers.flush, data_disk, _SYNCS_OF_A_FLUSH * settings.slow_disk_s),
        ]
        self._journal = Journal(
            writer, self._watched[0], start, self._on_batch, self._pace, batch_bytes=settings.journal_batch_bytes
        )
        self._space = DiskSpace(directories.journal, directories.data, workers.look, settings, self._on_space, self._on_looked)
        self._checkpointer = Checkpointer(
            FlushStore(logs, directories.index, mark, directories.journal, self._spares),
            self._watched[1],
            self._journal,
            cache,
            ledgers,
            settings,
            mark=start,
            on_room=self._on_room,
            on_full=self._space.on_flush_full,
            on_failed=self._fail,
        )
        self._admission = Admission(
            ledgers,
            cache,
            self._journal,
            self._checkpointer,
            self._space,
            settings,
            self._limbo,
            self._pace,
            self._wake_connections,
        )
        self._lac_waits = LacWaits(settings.lac_waits, ledgers.is_settled)
        self._access = LedgerAccess(ledgers, self._journal, lambda: self.state is BookieState.SERVING, self._lac_waits.wake)
        self._deletion = LedgerDeletion(ledgers, cache, directories.index, flush, self._reader.forget)
        self.collection = LogCollection(
            directories.index,
            directories.data,
            logs,
            self._log_reader,
            compact,
            flush,
            settings,
            compaction_pace,
            lambda: self._space.data.free_bytes,
            self.data_full.is_set,
            lambda: self._cache.used_bytes,
        )
        self.collection.on_damaged = self.on_damaged
        self.scrubber = Scrubber(
            directories.data,
            directories.index,
            self._log_reader,
            scrub,
            damaged,
            settings,
            self._clock,
            self._is_busy,
            name=storage.cookie.bookie_id,
        )
        ledgers.start()
        self._space.look_now()
        directories.index.on_damage = partial(self._call_in_loop, self._on_index_damaged)
        if directories.index.damage is not None:  # the start met it and could do without
            self._on_index_damaged(directories.index.damage)

    def __repr__(self) -> str:
        return f"<Bookie {self.bookie_id}: {self.state.value}, {self._journal!r}, {self._cache!r}>"

    def _watch(self, use: str, worker: Worker, disk: Disk, slow_s: float) -> TimedWorker:
        settings = self.settings
        limits = HealthLimits(slow_s or math.inf, settings.stalled_disk_s or math.inf, settings.slow_disk_for_s)
        health = self._health[use] = DiskHealth(use, limits)
        interval_s = settings.disk_check_interval_s
        return TimedWorker(
            worker, disk, health, limits, probe_interval_s=interval_s, on_change=self._on_health, on_failed=self._fail
        )

    def _stop_at_failed_sync(self, worker: Worker) -> FailStopWorker:
        return FailStopWorker(worker, lambda: self.failure, self._fail)

    def _on_health(self) -> None:
        if self.state is BookieState.SERVING:
            reasons = [*(health.reason for health in self._health.values()), self._read_watch.reason, self._index_reason]
            self._space.on_unfit(" and ".join(filter(None, reasons)))

    def _call_in_loop(self, report: Callable[..., None], *found: Any) -> None:
        """Report what a thread has found. A loop that is closed by then needs no report."""
        if threading.get_ident() == self._thread_id:
            self._loop.call_soon(report, *found)
            return
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(report, *found)

    def _on_index_damaged(self, error: IndexCorruptError) -> None:
        """Some entries cannot be found any more, and no log can be deleted. It stays so until there is a new index."""
        if self.is_index_damaged or self.state is not BookieState.SERVING:
            return
        rebuild = "stop it and make a new index with `cepheid bookie-shell rebuild-index`"
        self._index_reason = f"its block index is damaged: {rebuild}"
        hint = f"what it holds is repaired from other bookies after recovery.grace_s; {rebuild}"
        log.error("bookie.index_damaged", extra={"bookie": self.bookie_id, "error": error.args[0], "hint": hint})
        self._on_health()

    # adds

    def add(self, requests: Sequence[AddRequest], on_answers: OnAnswers) -> None:
        """Admits groups (verified by whoever took them from a network) in one step; answers after the journal's sync.

        Never answers within this call; one call of `on_answers` per journal batch, what adjoins is joined. For one ledger
        answers come in the order of requests, if they are all background adds or none is.
        """
        if self.state is BookieState.SERVING:
            self._admission.add(requests, on_answers)
        else:
            asyncio.get_running_loop().call_soon(refuse_all, requests, on_answers, Status.STOPPED)

    @property
    def bookie_id(self) -> str:
        return self.cookie.bookie_id

    @property
    def is_full(self) -> bool:
        """Adds wait for room; a transport that can hold back should."""
        return self._admission.is_full

    @property
    def writable(self) -> bool:
        """Takes regular adds, as far as disk space goes."""
        return self.state is BookieState.SERVING and not self._space.read_only

    @property
    def is_unfit(self) -> bool:
        """Whether what it holds cannot be counted on: a disk hangs or cannot be read, or the index is damaged."""
        is_stalled = any(health.state is HealthState.STALLED for health in self._health.values())
        return is_stalled or bool(self._read_watch.reason) or self.is_index_damaged

    @property
    def is_index_damaged(self) -> bool:
        """Whether a call of this process met damage in the block index."""
        return bool(self._index_reason)

    def look_at_free_space(self) -> int:
        """Return the free bytes of the data disk as of the last look. If that was long ago, look again for the next caller."""
        self._space.touch()
        return self._space.data.free_bytes

    def look_at_free_space_now(self) -> None:
        """Look at the disks at once, blocking; adds are refused or taken accordingly when this returns."""
        self._space.look_now()

    @property
    def read_only_reason(self) -> str:
        """Why it takes no regular adds; empty while it does."""
        return self._space.reason if self.state is BookieState.SERVING else f"it is {self.state.value}"

    @property
    def lacking_data_bytes(self) -> int:
        """Return how many bytes the data disk must get back before the bookie is writable; at least 1 while it is full."""
        return self._space.lacking_data_bytes

    @property
    def space_warning(self) -> str:
        """Which disk is nearly full, in words; empty while none is, or the bookie is read-only already."""
        return self._space.warning if self.state is BookieState.SERVING else ""

    def _on_batch(self, completions: Sequence[Any], error: BaseException | None) -> None:
        """A journal batch is done: the only place where an add is answered OK."""
        if error is None:
            outcome = Status.OK if self.failure is None else Status.IO_ERROR
        elif isinstance(error, JournalSpaceError):
            outcome = Status.NO_SPACE
            self._space.on_journal_full()
        else:
            outcome = Status.IO_ERROR
            self._fail(error)
        self._checkpointer.touch()  # now, not at admission: the checkpoint that follows must find this batch below its mark
        adds: list[AddCompletion] = []
        for completion in completions:
            if type(completion) is AddCompletion:
                adds.append(completion)
            else:
                completion(outcome)
        deliver(adds, outcome)
        if self._lac_waits.parked:
            for add in adds:
                self._lac_waits.wake(add.ledger_id)
        self._admission.pump()

    # fences, LACs, reads

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        """What this bookie knows of the ledger's LAC; with `fence`, after the ledger is durably fenced here. May wait for news."""
        if request.wait_ms > 0 and not request.fence:
            return await self._lac_waits.answer(request, self._look_at_lac)
        return await self._look_at_lac(request)

    async def _look_at_lac(self, request: LacRequest) -> LacAnswer:
        if request.ticket:
            status, state = await self._contact_with_ticket(request)
        else:
            status, state = await self._access.contact(request.ledger_id, request.master_key, fence=request.fence)
        if state is None:
            return LacAnswer(self._limbo.sure(request.ledger_id, status))
        entry_id = state.last_entry_id
        if entry_id < 0:
            status = Status.OK if state.explicit_lac >= 0 else self._limbo.sure(request.ledger_id, Status.NO_ENTRY)
            return LacAnswer(status, state.explicit_lac, state.explicit_lac)
        answer = await self._reader.read_one(request.ledger_id, entry_id)
        if self.state is not BookieState.SERVING:
            return LacAnswer(Status.STOPPED)
        if not answer.groups:
            status = answer.missing[0].status
            return LacAnswer(Status.UNKNOWN if status.certain_no else status)  # we hold the entry: no certain no is possible
        highest = answer.groups[0].slice(entry_id, entry_id)
        lac = max(state.explicit_lac, highest.header(entry_id).last_add_confirmed)
        return LacAnswer(Status.OK, lac, state.explicit_lac, highest)

    async def _contact_with_ticket(self, request: LacRequest) -> tuple[Status, LedgerState | None]:
        """The ledger's state for a reader. Its ticket must be for a ledger without an end: the answer has the newest entry."""
        if request.fence:
            return Status.BAD_REQUEST, None
        status = self._scans.authorize(request.ticket, request.ledger_id, 0, LAST_ENTRY)
        if status is not Status.OK:
            self._scans.counters.unauthorized += 1
            return status, None
        return await self._access.find(request.ledger_id)

    async def read(self, request: ReadRequest) -> AsyncGenerator[ReadAnswer, None]:
        """Chunks of about 1 MB; see `BookieConnection.read`. Scans have their own reader (scans.py)."""
        refusal = await self._refusal(request)
        if refusal is not None:
            yield refusal
            return
        async with aclosing(self._scans.read(request) if request.scan else self._read_for_broker(request)) as chunks:
            async for chunk in chunks:
                if self.state is not BookieState.SERVING:
                    yield refuse_range(request, Status.STOPPED)
                    return
                yield self._limbo.chunk(request.ledger_id, chunk)

    async def scan(self, request: ReadRequest) -> AsyncGenerator[ReadAnswer | StoredRun, None]:
        """As `read`, of a scan; what lies on disk in whole blocks is told as runs of them, for `runs`."""
        assert request.scan, "brokers read through gRPC or in their own process"
        refusal = await self._refusal(request)
        if refusal is not None:
            yield refusal
            return
        async with aclosing(self._scans.read_stored(request)) as chunks:
            async for chunk in chunks:
                if self.state is not BookieState.SERVING:
                    yield refuse_range(request, Status.STOPPED)
                    return
                yield chunk if isinstance(chunk, StoredRun) else self._limbo.chunk(request.ledger_id, chunk)

    async def _refusal(self, request: ReadRequest) -> ReadAnswer | None:
        refusal = self._scans.refuse(request) if request.scan and self.state is BookieState.SERVING else None
        if refusal is None and (status := await self._refuse_read(request)) is not None:
            refusal = refuse_range(request, self._limbo.sure(request.ledger_id, status))
        return refusal

    async def _read_for_broker(self, request: ReadRequest) -> AsyncGenerator[ReadAnswer, None]:
        self._reader.counters.requests += 1
        self._open_reads += 1
        try:
            chunks = self._reader.read(
                request.ledger_id,
                request.first_entry_id,
                request.last_entry_id,
                request.max_bytes,
                urgent=request.fence,
                deadline=None if request.fence else self._loop.time() + self.settings.read_wait_s,
                fresh=request.from_disk,
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        finally:
            self._open_reads -= 1

    def authorize_reads(self, authorize: AuthorizeRead) -> None:
        """From now on every scan's ticket is shown to it. A log has the entries of other ledgers, too: none is given away then."""
        self._scans.authorize = authorize
        self.runs.can_share = self.runs.can_share and authorize is accept_every_ticket

    async def write_lac(self, request: ExplicitLac) -> Status:
        """Durable when it returns OK. A LAC below what is known changes nothing."""
        status, state = await self._access.contact(request.ledger_id, request.master_key, create=True)
        return status if state is None else await self._access.raise_lac(state, request.last_add_confirmed)

    async def _refuse_read(self, request: ReadRequest) -> Status | None:
        if self.state is not BookieState.SERVING:
            return Status.STOPPED
        if not 0 <= request.first_entry_id <= request.last_entry_id:
            return Status.BAD_REQUEST
        if request.fence:
            status, state = await self._access.contact(request.ledger_id, request.master_key, fence=True)
            return status if state is None else None
        if self._ledgers.needs_load(request.ledger_id):
            refusal = await self._access.look_up(request.ledger_id)
            if refusal is not None:
                return refusal
        if not self._ledgers.may_know(request.ledger_id) or self._ledgers.is_deleted(request.ledger_id):
            return Status.NO_LEDGER
        if not request.scan and self._open_reads >= self.settings.open_reads:
            self._reader.counters.refused += 1
            return Status.OVERLOADED
        return None

    # connections

    def connection(self) -> BookieConnection:
        """In-process: the same semantics as over a network, without one."""
        connection = LocalConnection(self, on_closed=lambda closed: self._connections.pop(closed, None))
        self._connections[connection] = None
        return connection

    def _wake_connections(self) -> None:
        for connection in self._connections:
            connection.wake()

    def _on_room(self) -> None:
        self._admission.pump()

    def _on_space(self) -> None:
        if self._space.read_only:
            self._admission.refuse_waiting(self._space.refusal)
        if self.on_writable is not None:
            self.on_writable(not self._space.read_only)

    def _on_looked(self) -> None:
        self._spares.keeps = self._space.has_room_to_spare(self._spares.most_bytes, kept=self._spares.keeps)
        if self._spares and not self._spares.keeps:
            self._workers.look.submit(self._spares.drop, lambda *_: None)  # what is left of them is deleted by the next start
        if self._space.journal.short:
            self._checkpointer.release_journal()
        if self._space.data_short:
            self.data_full.set()
        else:
            self.data_full.clear()

    # scrubbing

    def start_scrubber(self, reports: DamageReports) -> None:
        """Read all blocks once in a period from now on; damage, also what readers find, is reported there and mended."""
        self.scrubber.start(reports)

    def on_damaged(self, ledger_id: int, first_entry_id: int, last_entry_id: int) -> None:
        """Something found blocks with these entries damaged. They are read again, and repaired if that is so. Cheap."""
        self.scrubber.damaged.suspect_entries(ledger_id, first_entry_id, last_entry_id)

    def _is_busy(self) -> bool:
        """Return whether others want the disk now."""
        is_writing = self._journal.queued_bytes >= _BUSY_JOURNAL_BYTES or self._cache.flushing is not None
        return is_writing or self._open_reads > 0 or self.is_full

    # deletion

    def ledgers(self) -> list[int]:
        """Ids of the ledgers held here, ascending. Complete once `ledgers_listed`: see `wait_listed`."""
        return self._ledgers.ids()

    @property
    def ledgers_listed(self) -> bool:
        """Whether all ledgers in the index have been found. A start does not wait for that."""
        return self._ledgers.all_listed

    async def wait_listed(self) -> None:
        """Return when `ledgers` and `ledger_count` are complete."""
        await self._ledgers.wait_listed()

    @property
    def ledger_count(self) -> int:
        """Return how many ledgers are held here; those found so far until `ledgers_listed`."""
        return self._ledgers.count

    @property
    def largest_ledger_id(self) -> int:
        """Return the largest ledger id that this bookie has seen, deleted ledgers included; -1: none."""
        return self._ledgers.largest_id

    async def delete_ledgers(self, ledger_ids: Iterable[int]) -> None:
        """Drops ledgers that metadata no longer has; their writers stay refused for `tombstone_s`."""
        await self._deletion.delete(ledger_ids, self._clock.stamp_ms())
        self._lac_waits.wake_all()  # rare, and who waits for another ledger goes back to sleep

    def admitted_adds(self, ledger_id: int) -> int:
        """Return how many groups were admitted to the ledger since its state was loaded; 0 if it is not loaded."""
        state = self._ledgers.get(ledger_id)
        return 0 if state is None else state.adds

    async def look_at_copy(self, ledger_id: int) -> HeldCopy | None:
        """Return the ledger's entries here as of now, for `drop_copy`; None if there are none."""
        return await self._deletion.look(ledger_id)

    async def drop_copy(self, copy: HeldCopy) -> bool:
        """Drop a surplus copy unless an add may have been admitted since `look_at_copy`. Return whether it was dropped.

        The ledger stays fenced and keeps its master key; recovery adds to it are taken as before.
        """
        dropped = await self._deletion.drop(copy)
        if dropped:
            self._lac_waits.wake(copy.state.ledger_id)
        return dropped

    async def reclaim(self, *, urgent: bool = False) -> list[int]:
        """Forget old tombstones, delete dead entry logs and compact sparse ones; return the ids of the logs that were deleted.

        `urgent`, for a full disk: compact everything that is worth it, at once, and without regard for adds.
        """
        tombstone_s = self.settings.tombstone_s
        if self._clock.age_s >= min(tombstone_s, _SEEN_S):
            await self._deletion.forget_tombstones(self._clock.now_ms() - int(1000 * tombstone_s))
        return await self.collection.collect(urgent=urgent)

    async def count_life(self) -> None:
        """Now and then, so that an old copy of the disks is known as one. Raises what disk and metadata raise. Another process
        under this id, or a failed sync, stops this one."""
        if self._life is None or self.state is not BookieState.SERVING:
            return
        try:
            await self._life.count()
        except (CookieError, SyncFailedError) as error:
            self._fail(error)
            raise

    # end

    async def checkpoint(self) -> None:
        """Returns when everything durable by now is in entry log and index, and the mark says so; raises what prevents it."""
        await self._synced()
        target = self._journal.durable
        while self.failure is None and (
            self._checkpointer.mark < target or (self.state is BookieState.CLOSING and not self._checkpointer.clean)
        ):
            await self._checkpointer.run()
        if self.failure is not None:
            raise self.failure

    async def _synced(self) -> None:
        """Returns when every record queued so far is synced, or the journal has failed."""
        barrier: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_synced(_: Status) -> None:
            if not barrier.done():
                barrier.set_result(None)

        self._journal.append_marker(on_synced)
        await barrier

    async def aclose(self) -> None:
        """Refuses new work, answers what was admitted, checkpoints, closes. A kill instead is equal to a crash, and safe."""
        if self.state is BookieState.CLOSED:
            return
        if self.state is BookieState.SERVING:
            self.state = BookieState.CLOSING
            self._lac_waits.wake_all()
            self._admission.refuse_waiting(Status.STOPPED)
            try:
                await self.checkpoint()
            except Exception as error:
                log.warning("bookie.closed_without_checkpoint", extra={"bookie": self.bookie_id, "error": repr(error)})
        await self.scrubber.aclose()
        self._reader.stop()
        self._scans.stop()
        self._stop_watching()
        self._checkpointer.stop()
        self._ledgers.stop()
        await self.collection.aclose()
        await self._workers.aclose()
        for connection in list(self._connections):
            connection.on_bookie_stopped("is stopped")
        self._journal.close()
        self._logs.close()
        self._log_reader.close()
        self._directories.close()
        self.state = BookieState.CLOSED

    def _stop_watching(self) -> None:
        self._space.stop()
        self._read_watch.stop()
        for worker in self._watched:
            worker.stop()

    def _fail(self, error: BaseException) -> None:
        """Data may be lost: nothing is answered OK from here on. A restart replays what is really on the disk."""
        if self.failure is not None:
            return
        self.failure = error
        self.state = BookieState.FAILED
        hint = "check the disk; restart the bookie, it replays its journal"
        log.error("bookie.failed", extra={"bookie": self.bookie_id, "error": repr(error), "hint": hint})
        self._stop_watching()
        self._checkpointer.stop(error)
        self.collection.stop()
        self._ledgers.stop()
        self._journal.fail(error)
        self._reader.stop()
        self._scans.stop()
        self._admission.refuse_waiting(Status.STOPPED)
        self._lac_waits.wake_all()
        for connection in list(self._connections):
            connection.on_bookie_stopped(f"failed: {error}")
        if self.on_failed is not None:
            self.on_failed(error)

    def statistics(self) -> BookieStatistics:
        """Counters since the start and gauges as of now."""
        return take_statistics(
            state=self.state.value,
            writable=self.writable,
            bytes_in_grace=self.bytes_in_grace,
            missing_ledgers=self.missing_ledgers,
            failed_collections=self.failed_collections,
            oldest_read_s=self._read_watch.oldest_s,
            open_reads=self._open_reads,
            admission=self._admission,
            pace=self._pace,
            background_rate_bytes_s=self._pace.rate_bytes_s(self._loop.time()),
            journal=self._journal,
            cache=self._cache,
            checkpointer=self._checkpointer,
            reads=self._reader.counters,
            scans=self._scans,
            runs=self.runs,
            ledgers=self._ledgers,
            access=self._access,
            lac_waits=self._lac_waits,
            deletion=self._deletion,
            collection=self.collection,
            scrub=self.scrubber.figures(),
            space=self._space,
            workers=self._workers,
        )
