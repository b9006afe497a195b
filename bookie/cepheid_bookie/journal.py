"""Group commit, the part in the event loop: records that wait for the journal form one batch, and one batch is written at a time.

    append ─┐
    append ─┼─► open batch ──(none in flight)──► worker: write + sync ──► on_batch(completions, outcome): one call answers all
    marker ─┘        ▲ meanwhile the next one fills

Rule 1: completions return in the order of `append`, markers included, so answers that wait for a marker are in order too.
Rule 2: `durable` moves only in the loop, when a batch was synced: a checkpoint reads it and swaps the cache in the same turn.
Rule 3: after an error other than a full disk nothing more is written or reported as durable.

The pace of background adds (background_pace.py) learns from each batch how long its first foreground add was in this queue, sync
included. That costs one timestamp a batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from cepheid_bookie.background_pace import BackgroundPace
from cepheid_bookie.duration_histogram import DurationHistogram
from cepheid_bookie.journal_writer import JournalPosition, JournalSpaceError, JournalWriter
from cepheid_ports import Worker
from cepheid_rpc import Buffer

OnBatch = Callable[[Sequence[Any], "BaseException | None"], None]


class _Batch:
    __slots__ = ("background_bytes", "completions", "foreground_at", "parts", "records", "size_bytes")

    def __init__(self) -> None:
        self.foreground_at: float | None = None  # when its first foreground add arrived
        self.background_bytes = 0
        self.parts: list[Buffer] = []
        self.completions: list[Any] = []
        self.size_bytes = 0
        self.records = 0


class Journal:
    """`on_batch(completions, error)`: None means durable, JournalSpaceError that nothing was kept, else the journal has failed."""

    def __init__(
        self,
        writer: JournalWriter,
        worker: Worker,
        start: JournalPosition,
        on_batch: OnBatch,
        pace: BackgroundPace,
        *,
        batch_bytes: int,
    ) -> None:
        self._writer = writer
        self._worker = worker
        self._on_batch = on_batch
        self._pace = pace
        self._batch_bytes = batch_bytes
        self._open = _Batch()
        self._closed_batches: deque[_Batch] = deque()
        self._in_flight: _Batch | None = None
        self._flush_due = False
        self._failed: BaseException | None = None
        self.durable = start
        self.queued_bytes = 0
        self.written_bytes = 0
        self.written_batches = 0
        self.written_records = 0
        self.refused_batches = 0
        self.sync_times = DurationHistogram()  # submission to report, so with the worker's queue and the loop's delay

    def __repr__(self) -> str:
        return f"<Journal at {self.durable}, {self.queued_bytes} B waiting{', failed' if self._failed else ''}>"

    @property
    def idle(self) -> bool:
        return self._in_flight is None and not self._closed_batches and not self._open.completions and not self._open.records

    def append(self, parts: list[Buffer], size_bytes: int, completion: Any, background: bool | None = None) -> None:
        """Queue one record. `completion` is passed to `on_batch` once the record's batch is durable or has failed.

        `background`: whether it is a background add or a foreground add; None: it is not an add.
        """
        batch = self._open
        if background is not None:
            if background:
                batch.background_bytes += size_bytes
                self._pace.on_background_admitted(asyncio.get_running_loop().time(), size_bytes)
            elif batch.foreground_at is None:
                batch.foreground_at = now = asyncio.get_running_loop().time()
                self._pace.on_foreground_admitted(now)
        batch.parts += parts
        batch.size_bytes += size_bytes
        batch.records += 1
        batch.completions.append(completion)
        self.queued_bytes += size_bytes
        if batch.size_bytes >= self._batch_bytes:
            self._closed_batches.append(batch)
            self._open = _Batch()
        if not self._flush_due and self._in_flight is None:
            self._flush_soon()

    def append_marker(self, completion: Any) -> None:
        """Queue a completion without a record, which is passed to `on_batch` when all records before it were synced."""
        self._open.completions.append(completion)
        if not self._flush_due and self._in_flight is None:
            self._flush_soon()

    def fail(self, error: BaseException) -> None:
        """Write nothing more, because another part failed. The batch in flight is still reported."""
        if self._failed is None:
            self._failed = error

    def close(self) -> None:
        """Close the journal. Call only when it is idle or failed, and after the worker has ended."""
        self._writer.close()

    def _flush_soon(self) -> None:
        self._flush_due = True
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._closed_batches:
            batch = self._closed_batches.popleft()
        else:
            batch, self._open = self._open, _Batch()
        self._in_flight = batch
        started = asyncio.get_running_loop().time()
        if self._failed is not None or not batch.records:
            self._finish(batch, self._failed, started)
            return

        def work() -> JournalPosition:
            return self._writer.write_batch(batch.parts, batch.size_bytes, batch.records)

        def on_done(position: JournalPosition | None, error: BaseException | None) -> None:
            now = asyncio.get_running_loop().time()
            self.sync_times.observe(now - started)
            if position is not None:
                self.durable = position
                self.written_bytes += batch.size_bytes
                self.written_records += batch.records
                self.written_batches += 1
            elif isinstance(error, JournalSpaceError):
                self.refused_batches += 1
            else:
                self._failed = error
            self._finish(batch, error, now)

        self._worker.submit(work, on_done)

    def _finish(self, batch: _Batch, error: BaseException | None, now: float) -> None:
        self._in_flight = None
        self.queued_bytes -= batch.size_bytes
        if batch.foreground_at is not None or batch.background_bytes:
            self._pace.on_batch(now, batch.foreground_at, batch.background_bytes, synced=error is None)
        if self._closed_batches or self._open.completions:
            self._flush_soon()  # before the report: what the report queues finds the flush already due
        self._on_batch(batch.completions, error)
