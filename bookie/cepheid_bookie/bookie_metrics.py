"""Metrics of a bookie. A standalone process shows them on the broker's page, one sample per bookie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cepheid_ports.prometheus import Family, Sample, counter, gauge, histogram

if TYPE_CHECKING:
    from cepheid_bookie.denials import Denials
    from cepheid_bookie.scrubber import ScrubFigures
    from cepheid_bookie.statistics import BookieStatistics


def bookie_families(bookie: str, figures: BookieStatistics) -> Iterator[Family]:
    yield gauge("cepheid_bookie_writable", "1: takes new entries.", figures.writable, bookie=bookie)
    yield from _adds(bookie, figures)
    yield from _background_adds(bookie, figures)
    yield from _journal(bookie, figures)
    yield from _cache(bookie, figures)
    yield from _reads(bookie, figures)
    yield from _scans(bookie, figures)
    yield gauge(
        "cepheid_bookie_ledgers",
        "Ledgers with entries here. In the first seconds of a process, those counted so far.",
        figures.ledgers,
        bookie=bookie,
    )
    yield counter("cepheid_bookie_ledgers_deleted_total", "Ledgers deleted here.", figures.ledgers_deleted, bookie=bookie)
    yield counter(
        "cepheid_bookie_surplus_ledgers_dropped_total",
        "Closed ledgers whose entries were dropped here because their record no longer names this bookie.",
        figures.surplus_ledgers_dropped,
        bookie=bookie,
    )
    yield from _entry_logs(bookie, figures)
    yield from _scrub(bookie, figures.scrub)
    yield gauge(
        "cepheid_bookie_in_grace_bytes",
        "Bytes of deleted ledgers that can still be restored, as of the last collection.",
        figures.bytes_in_grace,
        bookie=bookie,
    )
    yield gauge(
        "cepheid_bookie_oldest_disk_read_seconds",
        "Age in seconds of the oldest read that the data disk has not answered; 0: none.",
        figures.oldest_read_s,
        bookie=bookie,
    )
    yield gauge(
        "cepheid_bookie_missing_ledgers",
        "Ledgers that metadata lacks, kept until an operator confirms that they were deleted.",
        figures.missing_ledgers,
        bookie=bookie,
    )
    yield counter(
        "cepheid_bookie_failed_collections_total",
        "Passes of garbage collection that ended with an error.",
        figures.failed_collections,
        bookie=bookie,
    )
    yield counter("cepheid_bookie_fences_total", "Ledgers fenced.", figures.fences, bookie=bookie)
    yield Family(
        "cepheid_bookie_free_bytes",
        "gauge",
        "Free space, by use of the disk.",
        (
            Sample(figures.free_journal_bytes, {"bookie": bookie, "disk": "journal"}),
            Sample(figures.free_data_bytes, {"bookie": bookie, "disk": "data"}),
        ),
    )


def _entry_logs(bookie: str, figures: BookieStatistics) -> Iterator[Family]:
    yield counter("cepheid_bookie_logs_deleted_total", "Entry log files deleted.", figures.logs_deleted, bookie=bookie)
    yield Family(
        "cepheid_bookie_log_bytes",
        "gauge",
        "Bytes of entry log files at the last collection: all of them, and those of entries not deleted.",
        (
            Sample(figures.log_bytes, {"bookie": bookie, "kind": "all"}),
            Sample(figures.log_live_bytes, {"bookie": bookie, "kind": "live"}),
        ),
    )
    yield counter(
        "cepheid_bookie_compactions_total", "Entry log files that compaction has written.", figures.compactions, bookie=bookie
    )
    yield counter(
        "cepheid_bookie_compacted_bytes_total", "Bytes that compaction has copied.", figures.compacted_bytes, bookie=bookie
    )
    yield counter(
        "cepheid_bookie_reclaimed_bytes_total",
        "Bytes of deleted entry log files, less the bytes that were copied from them.",
        figures.reclaimed_bytes,
        bookie=bookie,
    )
    yield gauge(
        "cepheid_bookie_quarantined_logs",
        "Entry log files kept because compaction found damaged blocks in them.",
        figures.quarantined_logs,
        bookie=bookie,
    )
    yield counter(
        "cepheid_bookie_damaged_blocks_total", "Damaged blocks that compaction found.", figures.damaged_blocks, bookie=bookie
    )


def _adds(bookie: str, figures: BookieStatistics) -> Iterator[Family]:
    yield counter("cepheid_bookie_added_entries_total", "Entries admitted.", figures.entries_added, bookie=bookie)
    yield counter("cepheid_bookie_added_groups_total", "Groups of entries admitted.", figures.groups_added, bookie=bookie)
    yield counter("cepheid_bookie_added_bytes_total", "Bytes admitted.", figures.bytes_added, bookie=bookie)
    reasons = (
        ("refused", figures.adds_refused),
        ("fenced", figures.adds_fenced),
        ("overloaded", figures.adds_overloaded),
        ("no_space", figures.adds_no_space),
    )
    yield Family(
        "cepheid_bookie_refused_groups_total",
        "counter",
        "Groups not admitted, by reason.",
        [Sample(count, {"bookie": bookie, "reason": reason}) for reason, count in reasons],
    )
    yield gauge(
        "cepheid_bookie_waiting_bytes", "Bytes of adds that wait for room in the write cache.", figures.waiting_bytes, bookie=bookie
    )


def _background_adds(bookie: str, figures: BookieStatistics) -> Iterator[Family]:
    rate = figures.background_rate_bytes_s
    yield counter(
        "cepheid_bookie_background_added_bytes_total",
        "Admitted bytes that repair copied to this bookie.",
        figures.background_bytes_added,
        bookie=bookie,
    )
    yield gauge(
        "cepheid_bookie_background_waiting_bytes",
        "Bytes of copies made by repair that wait for other adds.",
        figures.background_waiting_bytes,
        bookie=bookie,
    )
    yield gauge(
        "cepheid_bookie_background_limit_bytes_per_second",
        "Rate at which copies made by repair are admitted beside other adds. +Inf: no other adds, no limit.",
        math.inf if rate is None else rate,
        bookie=bookie,
    )
    yield counter(
        "cepheid_bookie_background_slowdowns_total",
        "Times that the rate of copies made by repair was halved because other adds waited longer for the journal.",
        figures.background_slowdowns,
        bookie=bookie,
    )


def _journal(bookie: str, figures: BookieStatistics) -> Iterator[Family]:
    yield histogram(
        "cepheid_bookie_journal_sync_duration_seconds",
        "Time to write and sync a batch, including the hand-over to and from its thread.",
        figures.journal_sync_buckets,
        figures.journal_sync_seconds,
        bookie=bookie,
    )
    yield counter("cepheid_bookie_journal_records_total", "Records synced.", figures.journal_records, bookie=bookie)
    yield counter("cepheid_bookie_journal_bytes_total", "Bytes synced.", figures.journal_bytes, bookie=bookie)
    yield counter(
        "cepheid_bookie_journal_refused_batches_total",
        "Batches refused because the disk is full.",
        figures.journal_refused_batches,
        bookie=bookie,
    )
    yield gauge(
        "cepheid_bookie_journal_queued_bytes", "Bytes that wait for a journal sync.", figures.journal_queued_bytes, bookie=bookie
    )


def _cache(bookie: str, figures: BookieStatistics) -> Iterator[Family]:
    yield gauge("cepheid_bookie_write_cache_bytes", "Bytes in the write cache.", figures.cache_bytes, bookie=bookie)
    yield counter("cepheid_bookie_flushes_total", "Checkpoints made.", figures.flushes, bookie=bookie)
    yield counter("cepheid_bookie_flush_failures_total", "Checkpoints that failed.", figures.failed_flushes, bookie=bookie)
    yield counter("cepheid_bookie_flushed_bytes_total", "Bytes written to entry logs.", figures.flushed_bytes, bookie=bookie)


def _reads(bookie: str, figures: BookieStatistics) -> Iterator[Family]:
    yield counter(
        "cepheid_bookie_read_requests_total", "Read requests. Tailing consumers cause none.", figures.read_requests, bookie=bookie
    )
    yield Family(
        "cepheid_bookie_read_chunks_total",
        "counter",
        "Chunks answered, by source.",
        (
            Sample(figures.read_cache_chunks, {"bookie": bookie, "source": "cache"}),
            Sample(figures.read_disk_chunks, {"bookie": bookie, "source": "disk"}),
        ),
    )
    yield counter("cepheid_bookie_read_disk_blocks_total", "Blocks read from entry logs.", figures.read_disk_blocks, bookie=bookie)
    yield counter("cepheid_bookie_read_disk_bytes_total", "Bytes read from entry logs.", figures.read_disk_bytes, bookie=bookie)
    yield counter(
        "cepheid_bookie_read_unreadable_blocks_total",
        "Blocks that could not be read.",
        figures.read_unreadable_blocks,
        bookie=bookie,
    )
    yield counter("cepheid_bookie_reads_refused_total", "Reads refused.", figures.reads_refused, bookie=bookie)
    yield counter(
        "cepheid_bookie_read_ahead_blocks_total",
        "Blocks read from entry logs before a request for them.",
        figures.read_blocks_ahead,
        bookie=bookie,
    )
    yield counter(
        "cepheid_bookie_read_cached_blocks_total",
        "Blocks that reads found in memory, from read-ahead or an earlier read.",
        figures.read_cached_blocks,
        bookie=bookie,
    )
    yield counter(
        "cepheid_bookie_reads_expired_total",
        "Reads refused after they had waited for storage.read_wait_s.",
        figures.reads_expired,
        bookie=bookie,
    )
    yield counter(
        "cepheid_bookie_adds_waited_behind_reads_seconds_total",
        "Seconds that adds waited for reads in the queue of a thread. Stays 0: they share no thread.",
        figures.adds_waited_behind_reads_s,
        bookie=bookie,
    )
    yield gauge("cepheid_bookie_open_reads", "Reads in progress.", figures.open_reads, bookie=bookie)


def _scans(bookie: str, figures: BookieStatistics) -> Iterator[Family]:
    yield counter(
        "cepheid_bookie_scan_requests_total", "Scan requests (reads that bypass the brokers).", figures.scan_requests, bookie=bookie
    )
    yield gauge("cepheid_bookie_open_scans", "Scans in progress.", figures.open_scans, bookie=bookie)
    yield counter("cepheid_bookie_scan_sent_bytes_total", "Bytes sent to scans.", figures.scan_sent_bytes, bookie=bookie)
    yield counter(
        "cepheid_bookie_scan_shared_bytes_total",
        "Bytes of these that scans on this machine read from the entry logs themselves.",
        figures.scan_shared_bytes,
        bookie=bookie,
    )
    yield Family(
        "cepheid_bookie_scan_chunks_total",
        "counter",
        "Chunks sent to scans, by source.",
        (
            Sample(figures.scan_cache_chunks, {"bookie": bookie, "source": "cache"}),
            Sample(figures.scan_disk_chunks, {"bookie": bookie, "source": "disk"}),
        ),
    )
    yield counter(
        "cepheid_bookie_scan_disk_bytes_total", "Bytes read from entry logs for scans.", figures.scan_disk_bytes, bookie=bookie
    )
    yield counter("cepheid_bookie_scan_waits_total", "Chunks that waited for other scans.", figures.scan_waits, bookie=bookie)
    yield Family(
        "cepheid_bookie_refused_scans_total",
        "counter",
        "Scans refused, by reason.",
        (
            Sample(figures.scans_refused, {"bookie": bookie, "reason": "overloaded"}),
            Sample(figures.scans_unauthorized, {"bookie": bookie, "reason": "unauthorized"}),
        ),
    )


def _scrub(bookie: str, figures: ScrubFigures) -> Iterator[Family]:
    yield counter("cepheid_bookie_scrubbed_blocks_total", "Blocks compared with their checksum.", figures.blocks, bookie=bookie)
    yield counter(
        "cepheid_bookie_scrubbed_bytes_total", "Bytes read to compare blocks with their checksum.", figures.bytes, bookie=bookie
    )
    yield gauge(
        "cepheid_bookie_scrub_progress_ratio",
        "Share of the entry logs that the current pass has read, 0 to 1.",
        figures.progress,
        bookie=bookie,
    )
    yield gauge(
        "cepheid_bookie_scrub_last_pass_age_seconds",
        "Time since the last pass over all blocks ended; until the first one has ended, since it began.",
        figures.last_pass_age_s,
        bookie=bookie,
    )
    yield counter("cepheid_bookie_damaged_blocks_found_total", "Blocks found damaged or unreadable.", figures.found, bookie=bookie)
    yield counter(
        "cepheid_bookie_mended_blocks_total",
        "Damaged blocks removed after all their entries were in other blocks.",
        figures.mended,
        bookie=bookie,
    )
    yield Family(
        "cepheid_bookie_damaged_blocks",
        "gauge",
        "Current damaged blocks, by outlook: repair from a replica; no_replica: no other bookie has their entries; "
        "not_needed: metadata does not count on this bookie for them.",
        [Sample(count, {"bookie": bookie, "outlook": outlook.value}) for outlook, count in figures.damaged.items()],
    )


def denial_families(denials: Denials) -> Iterator[Family]:
    """Yield the metrics of refusals at the ports of a bookie process, and of the log lines about them."""
    yield Family(
        "cepheid_bookie_denials_total",
        "counter",
        "Calls and connections that the ports refused, by reason.",
        (
            Sample(denials.roles, {"reason": "role"}),
            Sample(denials.tickets, {"reason": "ticket"}),
            Sample(denials.handshakes, {"reason": "handshake"}),
        ),
    )
    audit = denials.audit.figures()
    yield counter("cepheid_bookie_audit_lines_total", "Lines written to the audit log of the bookie.", audit.written)
    yield counter(
        "cepheid_bookie_audit_lines_lost_total",
        "Lines of the bookie's audit log that could not be written because the disk failed or too many waited.",
        audit.lost,
    )
    yield counter(
        "cepheid_bookie_audit_lines_suppressed_total",
        "Denials that the bookie's audit log only counts because one address caused too many.",
        audit.suppressed,
    )
