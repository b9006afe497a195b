"""Structured streaming: translates Spark's calls to those of StreamQuery. The order of the calls is in docs/spark.md.

Spark creates two readers for a query: one in a process that lives as long as the query and plans (all but `read`), and one
created with the first batch, pickled, whose `read` runs in the tasks. They share nothing: what tasks need is in the
partitions. So is the schema history of typed rows, unless both know it from load(): it may have changed by the first batch.
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
        """`schemas`: as found by load(); None: it did not look, as the user gave the rows' schema."""
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
        """Return the rows. Raises BadOptionError if the topics have no schema, or lack the user's columns."""
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
        """Return the limit.

        Spark can express only one, and returns it unchanged: it marks that there are limits; all are applied here.
        """
        options = self._options
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.max_entries_per_trigger is not None:
            return ReadMaxRows(options.max_entries_per_trigger)
        return ReadMinRows(1) if options.min_bytes_per_trigger is not None else ReadAllAvailable()

    @brief_errors
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end; `start`, the very dict, if nothing is new: Spark compares texts."""
        if self._start_json != start:  # while nothing is new it is the same 69 times a second
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
        if not isinstance(partition, TaskPartition):  # of value None, if there is nothing to read
            return iter(())
        known = self._rows.schemas if self._rows is not None else partition.carried()
        rows = self._rows or _rows_of(self._schema, self._options, known)
        return read_partition(partition, known, rows.layout, self._schema, freeze_gc=self._options.freeze_gc)

    @brief_errors
    def commit(self, end: dict[str, Any]) -> None:
        self._query.commit(StreamOffset.from_json(end))

    def stop(self) -> None:
        """Stop. Often never called (Spark kills the process), or only after the next run has begun: nothing depends on it."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Schema and options. `options`: with the version to show, for typed rows."""

    options: SourceOptions
    schemas: tuple[SchemaVersion, ...]
    layout: RowLayout


def _rows_of(schema: StructType, options: SourceOptions, schemas: tuple[SchemaVersion, ...]) -> _Rows:
    from cepheid_spark.spark_schema import with_reader_version

    options = with_reader_version(options, schemas)
    return _Rows(options, schemas, choose_columns(schema, options, schemas))


def _check_end(end: Edge) -> None:
    """Raise BadOptionError for an end that a stream cannot have."""
    if end.publish_time_ms is not None:
        raise BadOptionError(
            "endingTimestamp (publishedUntil) ends a batch read; a stream has no end in time, since an older message may always "
            "arrive later: filter its rows by publish_time, or give endingOffsets",
            option="endingTimestamp",
        )
    for topic, place in end.positions:
        if place.batch_index != WHOLE_ENTRY:
            entry, next_entry = f"{place.ledger_id}:{place.entry_id}", f"{place.ledger_id}:{place.entry_id + 1}"
            raise BadOptionError(
                f"option endingOffsets, topic {topic}: {place} is inside a batch of messages, and a stream ends between entries, "
                f"or it could not continue after it later: give {entry} to leave that entry out, {next_entry} to read all of it",
                option="endingOffsets",
                topic=topic,
            )
