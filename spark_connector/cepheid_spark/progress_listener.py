"""Figures of this source's streams for logs and Prometheus, from Spark's progress after each micro-batch.

    listener = ProgressListener()
    spark.streams.addListener(listener)
    listener.prometheus_text()                 # for an endpoint of the application; the same figures are logged

The figures of lag are the source's own (lag.py), after the last micro-batch. Spark calls listeners in the user's process.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from cepheid_ports.prometheus import Family, Sample, encode

log = logging.getLogger("cepheid.spark")


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """Figures of one of our sources in a query, after its last batch.

    Lag: entries not taken yet, stored bytes, age of the oldest one.
    """

    query: str
    source: int
    batch: int
    rows: int
    rows_per_s: float
    batch_s: float
    lag_bytes: int
    lag_entries: int
    lag_s: float
    lost_entries: int


class ProgressListener(StreamingQueryListener):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures: dict[tuple[str, int], SourceFigures] = {}
        self._totals: dict[tuple[str, int], tuple[int, int]] = {}  # batches and rows since this listener was added

    def figures(self) -> list[SourceFigures]:
        """Return the figures of running queries."""
        with self._lock:
            return list(self._figures.values())

    def prometheus_text(self) -> str:
        return encode(self._families())

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        log.info("stream.started", extra={"query": event.name or str(event.id)})

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for found in figures_of(json.loads(event.progress.json)):
            key = found.query, found.source
            with self._lock:
                batches, rows = self._totals.get(key, (0, 0))
                self._figures[key] = found
                self._totals[key] = batches + 1, rows + found.rows
            log.info("stream.progress", extra={name: getattr(found, name) for name in found.__slots__})

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with self._lock:
            for key in [key for key in self._figures if key[0] == str(event.id)]:
                del self._figures[key], self._totals[key]
        level = logging.INFO if event.exception is None else logging.ERROR
        log.log(level, "stream.ended", extra={"query": str(event.id), "error": event.exception})

    def _families(self) -> Iterator[Family]:
        with self._lock:
            rows = [(found, *self._totals[key]) for key, found in self._figures.items()]
        for name, text, value in _FAMILIES:
            samples = [Sample(value(*row), {"query": row[0].query, "source": str(row[0].source)}) for row in rows]
            yield Family(f"cepheid_spark_{name}", "counter" if name.endswith("_total") else "gauge", text, tuple(samples))


_LOST = "Entries trimmed before they were read, as far as known, since the query started."
_FAMILIES: Sequence[tuple[str, str, Callable[[SourceFigures, int, int], float]]] = (  # of figures, batches and rows
    ("lag_bytes", "Stored bytes that the stream has not taken yet.", lambda found, *_: found.lag_bytes),
    ("lag_entries", "Entries that the stream has not taken yet.", lambda found, *_: found.lag_entries),
    ("lag_seconds", "Minimum age in seconds of the oldest entry not taken yet.", lambda found, *_: found.lag_s),
    ("lost_entries", _LOST, lambda found, *_: found.lost_entries),
    ("batch_seconds", "Duration of the last micro-batch in seconds.", lambda found, *_: found.batch_s),
    ("batches_total", "Micro-batches.", lambda _, batches, __: batches),
    ("rows_total", "Rows read from the source.", lambda _, __, count: count),
)


def figures_of(progress: dict[str, Any]) -> Iterator[SourceFigures]:
    """Yield the figures of a query's progress as Spark writes it. Other sources are left out."""
    for number, source in enumerate(progress.get("sources", ())):
        lag = source.get("latestOffset")
        lag = json.loads(lag) if isinstance(lag, str) else lag
        if not isinstance(lag, dict) or "lagEntries" not in lag:
            continue
        yield SourceFigures(
            query=progress["id"],
            source=number,
            batch=progress["batchId"],
            rows=source["numInputRows"],
            rows_per_s=source.get("processedRowsPerSecond") or 0.0,
            batch_s=progress.get("durationMs", {}).get("triggerExecution", 0) / 1000,
            lag_bytes=lag["lagBytes"],
            lag_entries=lag["lagEntries"],
            lag_s=lag["lagMs"] / 1000,
            lost_entries=lag["lost"],
        )
