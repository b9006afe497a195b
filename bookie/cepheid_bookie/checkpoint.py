"""Move the journal's contents into entry log and index, then release the journal. The order is essential:

    C0 take mark M = journal's durable position ┐ one turn of the loop
    C1 swap the write cache, take dirty records ┘
    C2 write blocks   C3 sync the logs          ┐
    C4 blocks into the index, synced            │ flush thread; C4 and C5 are one batch
    C5 ledger records into the index, synced    ┘
       release the half: what it held can be found in the index
    C6 save M (synced, renamed, directory synced)
    C7 delete journal segments wholly below the older of the two saved marks, or keep them as spare ones (journal_writer.py, rule 6)

Rule 1: M is taken before the swap and only then: later admissions are in the other half, and above M or not answered.
Rule 2: a checkpoint of an empty cache may not be empty: fences and LACs are dirty records, and written before M is saved.
Rule 3: one checkpoint at a time. A failed flush keeps its half and its M: a full disk is retried, anything else stops the bookie.
Rule 4: C7 only after C6 is durable.
Rule 5: what a half's blocks take of the entry log is written once, however often the index refuses them (apache/bookkeeper#4114);
   until it has them, no log of theirs is dead.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping

from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.disk import Disk
from cepheid_bookie.entry_log import EntryLogWriter
from cepheid_bookie.journal import Journal
from cepheid_bookie.journal_format import parse_segment_name, segment_path
from cepheid_bookie.journal_mark import MarkFile
from cepheid_bookie.journal_writer import JournalPosition, SpareSegments
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_bookie.ledger_table import LedgerTable
from cepheid_bookie.settings import StorageSettings
from cepheid_bookie.write_cache import Half, WriteCache
from cepheid_ports import Worker

log = logging.getLogger(__name__)


class FlushStore:
    """The blocking steps. Runs only in the flush thread, and in replay before the bookie serves."""

    def __init__(
        self, logs: EntryLogWriter, index: BlockIndex, mark: MarkFile, journal_disk: Disk, spares: SpareSegments | None = None
    ) -> None:
        self._logs = logs
        self._index = index
        self._mark = mark
        self._journal_disk = journal_disk
        self._spares = spares
        self._unindexed: tuple[Half, list[BlockRef]] | None = None  # in the log, and refused by the index

    def flush(self, half: Half, records: Mapping[int, LedgerRecord]) -> None:
        """Carry out C2 to C5. After an OSError call it again with the same half: C2 and C3 are not repeated if they succeeded."""
        ledgers = list(half.ledgers.items())  # one step: the loop may drop a deleted ledger meanwhile
        if self._unindexed is not None and self._unindexed[0] is half:
            blocks = [block for block in self._unindexed[1] if block.ledger_id in half.ledgers]  # rule 5
        else:
            ledgers.sort()
            blocks = self._logs.append(ledgers)
            self._unindexed = half, blocks
        # A tombstone never enters the index without the removal of the ledger's blocks, also after a deletion that failed.
        tombstones: dict[int, LedgerRecord | None] = {i: record for i, record in records.items() if record.deleted}
        if tombstones:
            self._index.delete_ledgers(tombstones)
        if blocks or len(records) > len(tombstones):
            self._index.write(blocks, {i: record for i, record in records.items() if not record.deleted})
        self._logs.on_indexed()
        self._unindexed = None

    @property
    def older_mark(self) -> JournalPosition:
        """Return the older of the two saved marks: journal files are kept from it on."""
        return self._mark.older

    def save_mark(self, mark: JournalPosition) -> None:
        """Carry out C6 and C7."""
        self._mark.save(mark)
        for name in self._journal_disk.listdir("journal"):
            segment_id = parse_segment_name(name)
            if segment_id is None or segment_id >= self._mark.older.segment_id:
                continue
            if self._spares is None or not self._spares.add(segment_id):
                self._journal_disk.unlink(segment_path(segment_id))


class Checkpointer:
    """The part in the event loop: when to checkpoint, in which order, and what to do after a failure.

    `on_room` is called when a half was released, `on_full(bool)` when the data disk turned out full or has space again,
    `on_failed(error)` when the bookie must stop.
    """

    def __init__(
        self,
        store: FlushStore,
        worker: Worker,
        journal: Journal,
        cache: WriteCache,
        ledgers: LedgerTable,
        settings: StorageSettings,
        *,
        mark: JournalPosition,
        on_room: Callable[[], None],
        on_full: Callable[[bool], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._store = store
        self._worker = worker
        self._journal = journal
        self._cache = cache
        self._ledgers = ledgers
        self._settings = settings
        self._on_room = on_room
        self._on_full = on_full
        self._on_failed = on_failed
        self._timer: asyncio.TimerHandle | None = None
        self._running = False
        self._requested = False
        self._backing_off = False  # a flush found the disk full; the timer tries it again
        self._taken = mark  # of the half being flushed
        self._refused_taken = 0  # journal batches that had been refused when that half was taken
        self._refused_flushed = 0  # the same of the half that was flushed last
        self._journal_bytes_taken = journal.written_bytes
        self._closed = False
        self._waiters: list[asyncio.Future[None]] = []
        self.mark = mark
        self.flushes = 0
        self.failed_flushes = 0
        self.flushed_bytes = 0

    def __repr__(self) -> str:
        return f"<Checkpointer at {self.mark}{', running' if self._running else ''}>"

    @property
    def clean(self) -> bool:
        """Whether a restart would have nothing to replay."""
        return (
            not self._running and self._cache.used_bytes == 0 and not self._ledgers.has_dirty and self.mark == self._journal.durable
        )

    @property
    def keeps_refused(self) -> bool:
        """Whether the cache may hold entries that the journal refused: a read returns them, and a crash loses them."""
        return self._cache.used_bytes > 0 and self._refused_flushed < self._journal.refused_batches

    def touch(self) -> None:
        """Note that a journal batch is done, so that a checkpoint follows within the interval. Cheap; an idle bookie has no timer.

        The batch's entries were in the cache, and its records dirty, before. So the checkpoint includes them without a later touch.
        """
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._settings.checkpoint_interval_s, self._on_timer)
        if self._journal.written_bytes - self._journal_bytes_taken > self._settings.checkpoint_journal_bytes:
            self.request()

    def request(self) -> None:
        """Start a checkpoint, or another one after the running one."""
        if self._running:
            self._requested = True
        elif not self._backing_off:
            self._start()

    def make_room(self) -> bool:
        """Swap a full active half for an empty one, and return whether that was possible."""
        if self._running:
            self._requested = True
        elif not self._backing_off:
            self._start()
        return not self._cache.half_full

    def release_journal(self) -> None:
        """Make room on a full journal disk: flush, then save the mark twice, and delete the files below it.

        Files are kept from the older of two marks on, and without adds no checkpoint comes that would move both.
        """
        if not self.clean:
            self.request()
        elif self._store.older_mark != self.mark and not self._closed:
            self._running = True
            self._save_mark(self.mark, on_error=self._on_not_released)

    async def run(self) -> None:
        """Wait for a new checkpoint, or the end of the running one. Raises the error of a failed one."""
        if not self._running:
            self._start()
        if self._running:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(done)
            await done

    def stop(self, error: BaseException | None = None) -> None:
        """Let no checkpoint begin or end any more. Callers that wait for one get `error`."""
        self._closed = True
        self._tell_waiters(error or asyncio.CancelledError())
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self._backing_off = False
        self.request()

    def _start(self) -> None:
        self._requested = False
        if self._closed or self.clean:
            return
        self._running = True
        if self._cache.flushing is None:
            self._taken = self._journal.durable  # C0, and in the same turn
            self._refused_taken = self._journal.refused_batches
            self._journal_bytes_taken = self._journal.written_bytes
            half = self._cache.swap()  # C1
        else:
            half = self._cache.flushing  # a flush that found the disk full: its half, its mark
            self._requested = True  # and then what came since: when it touched, the timer of this attempt was set already
        records, size = self._ledgers.take_dirty(), half.used_bytes

        def on_done(_: None, error: BaseException | None) -> None:
            if error is None:
                self.flushes += 1
                self.flushed_bytes += size
                self._on_flushed()
            else:
                self._ledgers.on_flush_failed()
                self._retry_or_fail(error)

        self._worker.submit(lambda: self._store.flush(half, records), on_done)

    def _on_flushed(self) -> None:
        if self._closed:
            return
        self._cache.release()
        self._refused_flushed = self._refused_taken
        self._ledgers.on_flushed()
        self._on_full(False)
        mark = self._taken
        if mark == self.mark:
            self._on_marked()
            return
        self._save_mark(mark, on_error=self._retry_or_fail)
        self._on_room()

    def _save_mark(self, mark: JournalPosition, *, on_error: Callable[[BaseException], None]) -> None:
        def on_done(_: None, error: BaseException | None) -> None:
            if error is None:
                self.mark = mark
                self._on_marked()
            else:
                on_error(error)

        self._worker.submit(lambda: self._store.save_mark(mark), on_done)

    def _on_not_released(self, error: BaseException) -> None:
        """Handle a full disk when saving a mark again: the next check of free space retries."""
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            self._on_marked()
        else:
            self._retry_or_fail(error)

    def _on_marked(self) -> None:
        self._running = False
        self._tell_waiters(None)
        if self._requested:
            self._start()
        self._on_room()

    def _tell_waiters(self, error: BaseException | None) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            elif isinstance(error, asyncio.CancelledError):
                waiter.cancel()
            else:
                waiter.set_exception(error)

    def _retry_or_fail(self, error: BaseException) -> None:
        self.failed_flushes += 1
        self._running = False
        self._tell_waiters(error)
        if self._closed:
            return
        if not (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            self._on_failed(error)
            return
        log.warning("checkpoint.disk_full", extra={"error": str(error), "hint": "free space on the data disk; adds are refused"})
        self._on_full(True)
        self._backing_off = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._settings.retry_s, self._on_timer)
