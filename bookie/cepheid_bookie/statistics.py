"""A bookie's statistics: one snapshot, pulled by the code that exports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cepheid_bookie.admission import Admission
    from cepheid_bookie.background_pace import BackgroundPace
    from cepheid_bookie.checkpoint import Checkpointer
    from cepheid_bookie.disk_space import DiskSpace
    from cepheid_bookie.entry_reader import ReadCounters
    from cepheid_bookie.journal import Journal
    from cepheid_bookie.lac_waits import LacWaits
    from cepheid_bookie.ledger_access import LedgerAccess
    from cepheid_bookie.ledger_deletion import LedgerDeletion
    from cepheid_bookie.ledger_table import LedgerTable
    from cepheid_bookie.log_collection import LogCollection
    from cepheid_bookie.opening import Workers
    from cepheid_bookie.run_sender import RunSender
    from cepheid_bookie.scans import Scans
    from cepheid_bookie.scrubber import ScrubFigures
    from cepheid_bookie.write_cache import WriteCache


@dataclass(frozen=True, slots=True)
class BookieStatistics:
    """Counters since the start, and current gauges."""

    state: str
    writable: bool
    # adds
    groups_added: int
    entries_added: int
    bytes_added: int
    adds_refused: int
    adds_fenced: int
    adds_overloaded: int
    adds_no_space: int
    adds_read_only: int  # of ledgers in limbo
    waiting_bytes: int
    # background adds (copies of repair); also counted above, except while they wait
    background_bytes_added: int
    background_waiting_bytes: int
    background_rate_bytes_s: float | None  # None: there are no foreground adds, and no limit
    background_slowdowns: int
    # journal
    journal_batches: int
    journal_records: int
    journal_bytes: int
    journal_refused_batches: int
    journal_queued_bytes: int
    journal_sync_seconds: float
    journal_sync_buckets: tuple[tuple[float, int], ...]  # (upper bound in seconds, syncs)
    journal_durable_sequence: int
    # write cache and checkpoints
    cache_bytes: int
    flushes: int
    failed_flushes: int
    flushed_bytes: int
    mark_sequence: int
    # reads
    read_requests: int
    read_cache_chunks: int
    read_disk_chunks: int
    read_disk_blocks: int
    read_disk_bytes: int
    read_unreadable_blocks: int
    read_cached_blocks: int
    read_blocks_ahead: int
    reads_refused: int
    reads_expired: int
    open_reads: int
    adds_waited_behind_reads_s: float
    scan_requests: int
    scan_cache_chunks: int
    scan_disk_chunks: int
    scan_disk_bytes: int
    scan_sent_bytes: int
    scan_shared_bytes: int
    scan_waits: int
    scans_refused: int
    scans_unauthorized: int
    open_scans: int
    lac_waits: int
    lac_waits_refused: int
    # ledgers
    ledgers: int
    ledgers_loaded: int
    fences: int
    ledgers_deleted: int
    surplus_ledgers_dropped: int
    # entry logs
    logs_deleted: int
    log_bytes: int  # as of the last collection
    log_live_bytes: int
    compactions: int
    compacted_bytes: int
    reclaimed_bytes: int
    quarantined_logs: int
    damaged_blocks: int
    scrub: ScrubFigures
    # disks
    free_journal_bytes: int
    free_data_bytes: int
    bytes_in_grace: int
    missing_ledgers: int
    failed_collections: int
    oldest_read_s: float


def take_statistics(
    *,
    state: str,
    writable: bool,
    bytes_in_grace: int,
    missing_ledgers: int,
    failed_collections: int,
    oldest_read_s: float,
    open_reads: int,
    admission: Admission,
    pace: BackgroundPace,
    background_rate_bytes_s: float | None,
    journal: Journal,
    cache: WriteCache,
    checkpointer: Checkpointer,
    reads: ReadCounters,
    scans: Scans,
    runs: RunSender,
    ledgers: LedgerTable,
    access: LedgerAccess,
    lac_waits: LacWaits,
    deletion: LedgerDeletion,
    collection: LogCollection,
    scrub: ScrubFigures,
    space: DiskSpace,
    workers: Workers,
) -> BookieStatistics:
    """Read every counter from its owner."""
    adds = admission.counters
    return BookieStatistics(
        state=state,
        writable=writable,
        groups_added=adds.groups,
        entries_added=adds.entries,
        bytes_added=adds.bytes,
        adds_refused=adds.refused,
        adds_fenced=adds.fenced,
        adds_overloaded=adds.overloaded,
        adds_no_space=adds.no_space,
        adds_read_only=adds.read_only,
        waiting_bytes=admission.waiting_bytes,
        background_bytes_added=adds.background_bytes,
        background_waiting_bytes=admission.background.waiting_bytes,
        background_rate_bytes_s=background_rate_bytes_s,
        background_slowdowns=pace.slowdowns,
        journal_batches=journal.written_batches,
        journal_records=journal.written_records,
        journal_bytes=journal.written_bytes,
        journal_refused_batches=journal.refused_batches,
        journal_queued_bytes=journal.queued_bytes,
        journal_sync_seconds=journal.sync_times.total_s,
        journal_sync_buckets=journal.sync_times.buckets(),
        journal_durable_sequence=journal.durable.sequence,
        cache_bytes=cache.used_bytes,
        flushes=checkpointer.flushes,
        failed_flushes=checkpointer.failed_flushes,
        flushed_bytes=checkpointer.flushed_bytes,
        mark_sequence=checkpointer.mark.sequence,
        read_requests=reads.requests,
        read_cache_chunks=reads.cache_chunks,
        read_disk_chunks=reads.disk_chunks,
        read_disk_blocks=reads.disk_blocks,
        read_disk_bytes=reads.disk_bytes,
        read_unreadable_blocks=reads.unreadable_blocks + scans.reads.unreadable_blocks + runs.unreadable_runs,
        read_cached_blocks=reads.cached_blocks,
        read_blocks_ahead=reads.blocks_ahead,
        reads_refused=reads.refused,
        reads_expired=reads.expired,
        open_reads=open_reads,
        adds_waited_behind_reads_s=workers.waited_behind_reads_s,
        scan_requests=scans.counters.requests,
        scan_cache_chunks=scans.reads.cache_chunks,
        scan_disk_chunks=scans.reads.disk_chunks,
        scan_disk_bytes=scans.reads.disk_bytes,
        scan_sent_bytes=scans.counters.sent_bytes,
        scan_shared_bytes=runs.shared_bytes,
        scan_waits=scans.turns.waits,
        scans_refused=scans.counters.refused,
        scans_unauthorized=scans.counters.unauthorized,
        open_scans=scans.open,
        lac_waits=lac_waits.parked,
        lac_waits_refused=lac_waits.refused,
        ledgers=ledgers.count,
        ledgers_loaded=ledgers.loaded_count,
        fences=access.fences,
        ledgers_deleted=deletion.deleted_ledgers,
        surplus_ledgers_dropped=deletion.dropped_copies,
        logs_deleted=collection.counters.deleted_logs,
        log_bytes=collection.counters.log_bytes,
        log_live_bytes=collection.counters.live_bytes,
        compactions=collection.counters.runs,
        compacted_bytes=collection.counters.compacted_bytes,
        reclaimed_bytes=collection.counters.reclaimed_bytes,
        quarantined_logs=len(collection.quarantined),
        damaged_blocks=collection.counters.damaged_blocks,
        scrub=scrub,
        free_journal_bytes=space.journal.free_bytes,
        free_data_bytes=space.data.free_bytes,
        bytes_in_grace=bytes_in_grace,
        missing_ledgers=missing_ledgers,
        failed_collections=failed_collections,
        oldest_read_s=oldest_read_s,
    )
