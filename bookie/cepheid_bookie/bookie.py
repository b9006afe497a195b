"""One storage node, independent of the transport: what it promises to ledger clients.

    add ───► Admission ──► WriteCache + Journal ──synced──► answers        read ──► EntryReader ──► cache, else blocks
    fence ─► LedgerState + Journal ──synced──► answer                      Checkpointer: cache ──► entry log ──► index ──► mark

Rules (README.md has them all):
1. OK means durable here, and readable until metadata has deleted the ledger, or has closed it and names this bookie nowhere in it.
2. A fence is durable before anything is answered, negative answers and unknown ledgers included; it is never undone.
3. "Yes", "certainly not" and "unknown" are three different answers.
4. After an error that may have lost data nothing more is answered OK: the state is FAILED, and the process must restart and replay.
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
    MissingEntries,
    ReadAnswer,
    ReadRequest,
    Status,
)
from cepheid_security.read_tickets import LAST_ENTRY

log = logging.getLogger(__name__)

_SEEN_S = 86_400.0
"""Minimum uptime before tombstones expire: the clock of this process, or of the one that wrote them, may have been wrong."""


_BUSY_JOURNAL_BYTES = 256 << 10
_SYNCS_OF_A_FLUSH = 5
"""Number of normal sync times that a flush may take before it counts as slow: a flush is larger than a journal batch."""


class BookieState(enum.Enum):
    SERVING = "serving"
    CLOSING = "closing"
    FAILED = "failed"
    CLOSED = "closed"


class Bookie:
    """A storage node, created by `open`. All methods are called on the event loop; `add` is synchronous."""

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
        """Lock the directories, check whose they are and replay the journal; return a bookie that is ready to serve.

        `accept_empty_disk`: an operator confirms that the disks of this id are lost for good. The bookie then starts on empty ones,
        in
        limbo for every ledger that they may have held (`limbo.py`). It has no effect on a bookie that is new, or whose data is
        complete.
        `listed_at_start`: number of ledgers to list before it serves; the others are listed in the background (`ledger_table.py`).
        `journal_format`: format of new journal segments; all formats can be read.
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
        self.data_full = asyncio.Event()  # set when the data disk is full: deleted data must be collected now
        self.bytes_in_grace = 0  # bytes of deleted ledgers that can still be restored, as of the collector's last pass
        self.failed_collections = 0  # collector passes that ended with an error
        self.missing_ledgers = 0  # ledgers that metadata lacks but that are kept, as of the collector's last pass
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
        if directories.index.damage is not None:  # found at the start, which could continue despite it
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
        """Report a finding of a worker thread. Nothing is reported once the loop is closed."""
        if threading.get_ident() == self._thread_id:
            self._loop.call_soon(report, *found)
            return
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(report, *found)

    def _on_index_damaged(self, error: IndexCorruptError) -> None:
        """Record that the index is damaged: some entries cannot be found and no log can be deleted until the index is rebuilt."""
        if self.is_index_damaged or self.state is not BookieState.SERVING:
            return
        rebuild = "stop it and make a new index with `cepheid bookie-shell rebuild-index`"
        self._index_reason = f"its block index is damaged: {rebuild}"
        hint = f"what it holds is repaired from other bookies after recovery.grace_s; {rebuild}"
        log.error("bookie.index_damaged", extra={"bookie": self.bookie_id, "error": error.args[0], "hint": hint})
        self._on_health()

    # adds

    def add(self, requests: Sequence[AddRequest], on_answers: OnAnswers) -> None:
        """Admit groups in one step and answer after the journal's sync. The caller has verified groups that came from a network.

        Never answers within this call. `on_answers` is called once per journal batch, with adjacent answers joined. The answers for
        one ledger keep the order of the requests if all of them are background adds, or none is.
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
        """Whether adds wait for room; a transport that can apply backpressure should do so."""
        return self._admission.is_full

    @property
    def writable(self) -> bool:
        """Whether disk space permits regular adds."""
        return self.state is BookieState.SERVING and not self._space.read_only

    @property
    def is_unfit(self) -> bool:
        """Whether its data cannot be relied on: a disk hangs or cannot be read, or the index is damaged."""
        is_stalled = any(health.state is HealthState.STALLED for health in self._health.values())
        return is_stalled or bool(self._read_watch.reason) or self.is_index_damaged

    @property
    def is_index_damaged(self) -> bool:
        """Whether damage was found in the block index since the process started."""
        return bool(self._index_reason)

    def look_at_free_space(self) -> int:
        """Return the free bytes of the data disk as last measured.

        If that was long ago, start a new measurement for the next caller.
        """
        self._space.touch()
        return self._space.data.free_bytes

    def look_at_free_space_now(self) -> None:
        """Measure free space now (blocking); when this returns, adds are accepted or refused accordingly."""
        self._space.look_now()

    @property
    def read_only_reason(self) -> str:
        """Why the bookie accepts no regular adds; empty while it does."""
        return self._space.reason if self.state is BookieState.SERVING else f"it is {self.state.value}"

    @property
    def lacking_data_bytes(self) -> int:
        """Return how many bytes must be freed on the data disk before the bookie is writable; at least 1 while it is full."""
        return self._space.lacking_data_bytes

    @property
    def space_warning(self) -> str:
        """A message that names the disk that is nearly full; empty if there is none or the bookie is already read-only."""
        return self._space.warning if self.state is BookieState.SERVING else ""

    def _on_batch(self, completions: Sequence[Any], error: BaseException | None) -> None:
        """Handle a finished journal batch: the only place where an add is answered OK."""
        if error is None:
            outcome = Status.OK if self.failure is None else Status.IO_ERROR
        elif isinstance(error, JournalSpaceError):
            outcome = Status.NO_SPACE
            self._space.on_journal_full()
        else:
            outcome = Status.IO_ERROR
            self._fail(error)
        self._checkpointer.touch()  # now, not at admission: the next checkpoint must find this batch below its mark
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
        """Return the ledger's LAC as known here; with `fence`, after the ledger is durably fenced. May wait for a newer LAC."""
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
            return LacAnswer(Status.UNKNOWN if status.certain_no else status)  # it is stored here, so a certain no is impossible
        highest = answer.groups[0].slice(entry_id, entry_id)
        lac = max(state.explicit_lac, highest.header(entry_id).last_add_confirmed)
        return LacAnswer(Status.OK, lac, state.explicit_lac, highest)

    async def _contact_with_ticket(self, request: LacRequest) -> tuple[Status, LedgerState | None]:
        """Return the ledger's state for a reader with a ticket for a ledger without an end:

        the answer contains the newest entry.
        """
        if request.fence:
            return Status.BAD_REQUEST, None
        status = self._scans.authorize(request.ticket, request.ledger_id, 0, LAST_ENTRY)
        if status is not Status.OK:
            self._scans.counters.unauthorized += 1
            return status, None
        return await self._access.find(request.ledger_id)

    async def read(self, request: ReadRequest) -> AsyncGenerator[ReadAnswer, None]:
        """Yield chunks of about 1 MB; see `BookieConnection.read`. Scans have their own reader (scans.py)."""
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
        """Read like `read`, for a scan; yield whole blocks on disk as `StoredRun`s, which `runs` sends."""
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
            reached = request.first_entry_id
            async with aclosing(chunks):
                async for chunk in chunks:
                    if request.from_disk and (status := await self._status_of_memory(request.ledger_id)) is not Status.OK:
                        yield ReadAnswer((), (MissingEntries(reached, request.last_entry_id, status),), request.last_entry_id + 1)
                        return
                    yield chunk
                    reached = chunk.next_entry_id
        finally:
            self._open_reads -= 1

    async def _status_of_memory(self, ledger_id: int) -> Status:
        """Return OK once all entries of the ledger that are in memory now are durable, or the reason why they are not."""
        if not self._cache.holds(ledger_id):
            return Status.OK
        synced: asyncio.Future[Status] = self._loop.create_future()

        def on_synced(outcome: Status) -> None:
            if not synced.done():  # the reader may have gone
                synced.set_result(outcome)

        self._journal.append_marker(on_synced)
        try:
            async with asyncio.timeout(self.settings.read_wait_s):
                status = await synced
        except TimeoutError:  # the journal hangs
            return Status.OVERLOADED
        return Status.NO_SPACE if status is Status.OK and self._checkpointer.keeps_refused else status

    def authorize_reads(self, authorize: AuthorizeRead) -> None:
        """Check the ticket of every scan with `authorize` from now on.

        Log files are then not shared: they hold other ledgers, too.
        """
        self._scans.authorize = authorize
        self.runs.can_share = self.runs.can_share and authorize is accept_every_ticket

    async def write_lac(self, request: ExplicitLac) -> Status:
        """Store an explicit LAC; it is durable when this returns OK. A LAC below the known one changes nothing."""
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
        """Return an in-process connection with the semantics of a network connection."""
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
        """Start to read all blocks once per period. Damage, also that found by readers, is reported to `reports` and repaired."""
        self.scrubber.start(reports)

    def on_damaged(self, ledger_id: int, first_entry_id: int, last_entry_id: int) -> None:
        """Handle a report that blocks with these entries are damaged: read them again and repair them if so. Cheap to call."""
        self.scrubber.damaged.suspect_entries(ledger_id, first_entry_id, last_entry_id)

    def _is_busy(self) -> bool:
        """Return whether other work needs the disk now."""
        is_writing = self._journal.queued_bytes >= _BUSY_JOURNAL_BYTES or self._cache.flushing is not None
        return is_writing or self._open_reads > 0 or self.is_full

    # deletion

    def ledgers(self) -> list[int]:
        """Return the ids of the ledgers held here, ascending; complete once `ledgers_listed` (see `wait_listed`)."""
        return self._ledgers.ids()

    @property
    def ledgers_listed(self) -> bool:
        """Whether all ledgers in the index have been listed, which the start does not wait for."""
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
        """Delete ledgers that metadata no longer has; their writers are still refused for `tombstone_s`."""
        await self._deletion.delete(ledger_ids, self._clock.stamp_ms())
        self._lac_waits.wake_all()  # rare, so waking waiters of other ledgers, which go back to sleep, costs little

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
        """Count this start or period in metadata, so that an old copy of the disks is recognized. Called now and then.

        Stops the bookie if another process uses its id or a sync fails. Raises the errors of disk and metadata.
        """
        if self._life is None or self.state is not BookieState.SERVING:
            return
        try:
            await self._life.count()
        except (CookieError, SyncFailedError) as error:
            self._fail(error)
            raise

    # end

    async def checkpoint(self) -> None:
        """Return when all that is durable now is in entry log and index and below the mark; raise what prevents it."""
        await self._synced()
        target = self._journal.durable
        while self.failure is None and (
            self._checkpointer.mark < target or (self.state is BookieState.CLOSING and not self._checkpointer.clean)
        ):
            await self._checkpointer.run()
        if self.failure is not None:
            raise self.failure

    async def _synced(self) -> None:
        """Return when every record queued so far is synced, or the journal has failed."""
        barrier: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_synced(_: Status) -> None:
            if not barrier.done():
                barrier.set_result(None)

        self._journal.append_marker(on_synced)
        await barrier

    async def aclose(self) -> None:
        """Refuse new work, answer what was admitted, checkpoint and close. Killing the process instead is safe, like a crash."""
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
        """Stop answering OK because data may be lost. A restart replays what is really on the disk."""
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
        """Return counters since the start and current gauges."""
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
