"""Structured streaming: Spark's calls, turned into those of StreamQuery. The order of the calls: docs/spark.md.

Spark makes two readers for a query: one in a process that lives as long as the query does and plans (all but `read`), and one
that is made with the first batch, pickled, and whose `read` runs in the tasks. They share nothing: what tasks need is in the
partitions. So is the history that typed rows are of, unless both know it from load(): by the first batch it may be another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from cepheid_decode import WHOLE_ENTRY, BadOptionError, Edge, ReadMode, SchemaVersion
from cepheid_spark.brief_errors import brief_errors
from cepheid_spark.column_styles import RowLayout
from cepheid_spark.offsets import StreamOffset
from cepheid_spark.options import SourceOptions
from cepheid_spark.partitions import TaskPartition, partitions_of, read_partition
from cepheid_spark.spark_schema import choose_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from cepheid_spark.stream_query import StreamQuery


class CepheidStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, schema: StructType, options: SourceOptions, schemas: tuple[SchemaVersion, ...] | None = None) -> None:
        """`schemas`: as load() found them; None: it did not ask, as the user gave the rows' schema."""
        _check_end(options.end)
        self._schema = schema
        self._options = options
        self._rows: _Rows | None = None
        self._is_told = options.spec.mode is not ReadMode.TYPED or schemas is not None
        if self._is_told:
            self._rows = _rows_of(schema, options, schemas or ())
        self._opened: StreamQuery | None = None
        self._start_json: dict[str, Any] | None = None
        self._start = StreamOffset({})

    def _planned_rows(self) -> _Rows:
        """Raises BadOptionError: the topics have no schema, or not the columns of the user's."""
        if self._rows is None:
            from cepheid_spark.spark_schema import load_topic_schemas

            self._rows = _rows_of(self._schema, self._options, load_topic_schemas(self._options))
        return self._rows

    @property
    def _query(self) -> StreamQuery:
        if self._opened is None:
            from cepheid_spark.stream_query import open_stream_query

            rows = self._planned_rows()
            self._opened = open_stream_query(rows.options, rows.schemas)
        return self._opened

    @brief_errors
    def initialOffset(self) -> dict[str, Any]:
        return self._query.initial().to_json()

    @brief_errors
    def prepareForTriggerAvailableNow(self) -> None:
        self._query.prepare_available_now()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Only one limit can be said, and it comes back as it is: it says that there are limits; all of them are applied here."""
        options = self._options
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.max_entries_per_trigger is not None:
            return ReadMaxRows(options.max_entries_per_trigger)
        return ReadMinRows(1) if options.min_bytes_per_trigger is not None else ReadAllAvailable()

    @brief_errors
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """`start`, the very dict, if nothing is new: Spark compares texts."""
        if self._start_json != start:  # while nothing is new it comes 69 times a second
            self._start_json, self._start = start, StreamOffset.from_json(start)
        begin = self._start
        end = self._query.latest(begin, is_limited=not isinstance(limit, ReadAllAvailable))
        return start if end is begin or end == begin else end.to_json()

    @brief_errors
    def reportLatestOffset(self) -> dict[str, Any]:
        return self._query.lag()

    @brief_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        ends_at = StreamOffset.from_json(end)
        tasks = self._query.plan(StreamOffset.from_json(start), ends_at)
        rows = self._planned_rows()
        spec = self._query.spec(ends_at, rows.layout.scan_columns, tasks)
        return partitions_of(tasks, spec, rows.schemas, is_known=self._is_told)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TaskPartition):  # of value None, where there is nothing to read
            return iter(())
        known = self._rows.schemas if self._rows is not None else partition.carried()
        rows = self._rows or _rows_of(self._schema, self._options, known)
        return read_partition(partition, known, rows.layout, self._schema, freeze_gc=self._options.freeze_gc)

    @brief_errors
    def commit(self, end: dict[str, Any]) -> None:
        self._query.commit(StreamOffset.from_json(end))

    def stop(self) -> None:
        """Often never called (Spark kills the process), or when the next run has begun: nothing depends on it."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """`options`: with the version that is shown, where the rows are typed."""

    options: SourceOptions
    schemas: tuple[SchemaVersion, ...]
    layout: RowLayout


def _rows_of(schema: StructType, options: SourceOptions, schemas: tuple[SchemaVersion, ...]) -> _Rows:
    from cepheid_spark.spark_schema import with_reader_version

    options = with_reader_version(options, schemas)
    return _Rows(options, schemas, choose_columns(schema, options, schemas))


def _check_end(end: Edge) -> None:
    """Raises BadOptionError: an end that a stream cannot have."""
    if end.publish_time_ms is not None:
        raise BadOptionError(
            "endingTimestamp (publishedUntil) ends a batch read; a stream has no end in time, since an older message may always "
            "come later: filter its rows by publish_time, or give endingOffsets",
            option="endingTimestamp",
        )
    for topic, place in end.positions:
        if place.batch_index != WHOLE_ENTRY:
            entry, next_entry = f"{place.ledger_id}:{place.entry_id}", f"{place.ledger_id}:{place.entry_id + 1}"
            raise BadOptionError(
                f"option endingOffsets, topic {topic}: {place} is inside a batch of messages, and a stream ends between entries, "
                f"or it could not go on behind it later: give {entry} to leave that entry out, {next_entry} to read all of it",
                option="endingOffsets",
                topic=topic,
            )
