"""What a bookie counts: one snapshot, pulled by whoever exports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BookieStatistics:
    """Counters grow since the start; gauges are as of now."""

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
    waiting_bytes: int
    # journal
    journal_batches: int
    journal_records: int
    journal_bytes: int
    journal_refused_batches: int
    journal_queued_bytes: int
    journal_sync_seconds: float
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
    reads_refused: int
    open_reads: int
    # ledgers
    ledgers: int
    ledgers_loaded: int
    fences: int
    # disks
    free_journal_bytes: int
    free_data_bytes: int
