"""Metrics of automatic repair. The figures of the cluster come from the audit record, which survives restarts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cepheid_metadata import Audit, ShortFigures
from cepheid_ports.prometheus import Family, counter, gauge

if TYPE_CHECKING:
    from cepheid_recovery.auditor import Auditor
    from cepheid_recovery.copy_checker import CopyChecker
    from cepheid_recovery.replication_worker import ReplicationWorker


def recovery_families(auditor: Auditor, worker: ReplicationWorker, checker: CopyChecker) -> Iterator[Family]:
    """Return the metrics of one process."""
    audited, work = auditor.statistics, worker.statistics
    yield gauge("cepheid_repair_auditor", "1: this process is the auditor of the cluster.", audited.is_auditor)
    yield counter("cepheid_repair_walks_total", "Walks over all ledgers.", audited.walks)
    yield counter("cepheid_repair_walked_ledgers_total", "Ledgers whose record a walk read.", audited.walked_ledgers)
    yield counter("cepheid_repair_marked_ledgers_total", "Ledgers marked because they lack copies.", audited.marked_ledgers)
    yield counter("cepheid_repair_checked_copies_total", "Copies of entries read to check them.", audited.checked_copies)
    yield counter("cepheid_repair_bad_copies_total", "Copies found missing or damaged by checks.", audited.bad_copies)
    yield counter("cepheid_repair_repaired_ledgers_total", "Ledgers that this process repaired completely.", work.ledgers)
    yield counter("cepheid_repair_failures_total", "Attempts to repair a ledger that left something undone.", work.failures)
    yield counter("cepheid_repair_copied_entries_total", "Copies of entries written by this process.", work.entries)
    yield counter("cepheid_repair_copied_bytes_total", "Bytes of copies written by this process.", work.size_bytes)
    yield gauge("cepheid_repair_in_work", "Ledgers that this process is repairing.", work.in_work)
    waiting = "Ledgers of the cluster that were closed by recovery, and whose copies were not checked since."
    yield gauge("cepheid_repair_unchecked_ledgers", waiting, checker.statistics.waiting)
    checked = "Ledgers closed by recovery whose copies this process has all checked."
    yield counter("cepheid_repair_checked_ledgers_total", checked, checker.statistics.ledgers)


_NO_AUDIT = Audit(finished_at_ms=0, ledgers=0, short=ShortFigures(), bookies={})


def audit_families(audit: Audit | None) -> Iterator[Family]:
    """Return the cluster's figures, as the auditor saved them; zeros before the first walk."""
    audit = audit or _NO_AUDIT
    short = audit.short
    yield gauge("cepheid_repair_short_ledgers", "Ledgers that lack copies.", short.ledgers)
    yield gauge("cepheid_repair_short_bytes", "Estimated bytes of the copies that are missing.", short.bytes)
    yield gauge("cepheid_repair_last_copy_entries", "Entries with only one copy left.", short.last_copy_entries)
    yield gauge("cepheid_repair_lost_entries", "Entries without any valid copy.", short.lost_entries)
    yield gauge("cepheid_repair_bytes_per_second", "Decrease of the missing bytes in the last minute.", audit.bytes_per_s)
    seconds_left = short.bytes / audit.bytes_per_s if audit.bytes_per_s else 0
    yield gauge("cepheid_repair_seconds_left", "Estimated time in seconds until all copies exist again; 0: unknown.", seconds_left)
    yield gauge("cepheid_repair_waiting_bookies", "Unregistered bookies in their grace period.", len(audit.waiting))
    yield gauge("cepheid_repair_badly_placed_ledgers", "Ledgers that could be spread over more racks.", audit.badly_placed)
    ended = "Unix time in seconds at which the last walk over all ledgers ended; 0: none has ended."
    yield gauge("cepheid_repair_walk_ended_seconds", ended, audit.finished_at_ms // 1000)
    yield gauge("cepheid_repair_audited_ledgers", "Ledgers that the last walk saw.", audit.ledgers)
