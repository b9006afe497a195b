"""The measured figures of the demo, as rows of its first table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.flights_spark.checks import StreamSeen
from examples.report import percentile


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """Measurements. `batch` was written by the batch driver; `progress` are Spark's reports of all micro-batches."""

    events: int
    stored_bytes: int
    closed_ledgers: int
    first_part_per_s: float
    batch: Mapping[str, Any]
    stream: StreamSeen
    progress: Sequence[Mapping[str, Any]]

    def rows(self) -> list[tuple[str, str]]:
        query_s = self.batch["query_s"]
        durations_s = [progress["durationMs"]["triggerExecution"] / 1e3 for progress in self.progress]
        return [
            ("events", f"{self.events:,}"),
            ("stored", f"{self.stored_bytes / 1e6:.1f} MB in {self.closed_ledgers} closed ledgers and the open one"),
            ("published, first half", f"{self.first_part_per_s:,.0f} events/s"),
            ("first batch query (count)", f"{self.batch['first_s']:.2f} s"),
            ("mean delay per carrier and hour", f"{query_s:.2f} s, {self.events / query_s:,.0f} events/s"),
            ("the same in many tasks, with a bookie killed", f"{self.batch['kill']['seconds']:.2f} s"),
            ("micro-batches", f"{len(self.progress)}"),
            ("micro-batch p50 / longest", f"{percentile(durations_s, 0.5):.2f} / {max(durations_s, default=0.0):.2f} s"),
            ("SIGKILL of the driver to the next micro-batch", f"{self.stream.back_at_s - self.stream.killed_at_s:.1f} s"),
        ]
