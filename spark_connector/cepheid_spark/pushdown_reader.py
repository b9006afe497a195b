"""A batch read that takes Spark's filters: option filterPushdown=true, beside spark.sql.python.filterPushdown.enabled=true.

Use each load() once: Spark keeps the plan of the first query on a DataFrame, with that query's filters, for every later one.
`df.where(a).count()`, then `df.count()` gives the first count again (seen in 4.1.4 to 4.3.0; tests/spark/test_pushdown.py notices
the day it ends). So this is a class of its own, and never the default: where the setting is off, Spark refuses such a reader.

All filters are handed back: Spark applies them again, and what is taken here only spares reading.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from cepheid_scan import EARLIEST, LATEST, Edge, ReadMode, RowFilter, ScanRequest
from cepheid_spark.batch_reader import CepheidBatchReader

_TIMES = ("publish_time", "event_time")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class PushdownBatchReader(CepheidBatchReader):
    _filters: tuple[Filter, ...] = ()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._filters = tuple(filters)
        return filters

    def request(self) -> ScanRequest:
        return narrow(super().request(), self._filters, self._message_columns())

    def _message_columns(self) -> dict[str, str]:
        """Spark's names of what is known of each message, to the names in MESSAGE_COLUMNS. A schema's fields are not among them."""
        columns = {
            name: source for name, source in zip(self._layout.names, self._layout.sources, strict=True) if source is not None
        }
        if self._options.mode is not ReadMode.TYPED:
            return columns
        from cepheid_scan.columns import TYPED_PREFIX
        from cepheid_scan.typed import typed_fields

        fields = {field.name for field in typed_fields(self._schemas, self._options.reader_version)}
        return {
            name: source.removeprefix(TYPED_PREFIX)
            for name, source in columns.items()
            if source.startswith(TYPED_PREFIX) and source not in fields
        }


def narrow(request: ScanRequest, filters: Sequence[Filter], columns: Mapping[str, str]) -> ScanRequest:
    """Asks for less by those filters that a scan can use; the others are Spark's. `columns`: Spark's names to those of messages."""
    for each in filters:
        path: tuple[str, ...] = getattr(each, "attribute", ())  # of a NOT there is none: it is Spark's
        name = columns.get(path[0]) if len(path) == 1 else None
        value = getattr(each, "value", None)
        if name in _TIMES:
            request = _narrow_time(request, name, each, value)
        elif name == "key":
            request = _narrow_keys(request, each, value)
        elif name == "partition":
            request = _narrow_partitions(request, each, value)
    return request


def _narrow_time(request: ScanRequest, name: str, each: Filter, value: Any) -> ScanRequest:
    """Times are kept in ms, so every bound of a filter, exact to the µs, lies within one: from is rounded down, until up."""
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        return request
    at_ms = (value - _EPOCH) // datetime.timedelta(milliseconds=1)
    from_ms = at_ms if isinstance(each, GreaterThan | GreaterThanOrEqual | EqualTo) else None
    until_ms = at_ms + 1 if isinstance(each, LessThan | LessThanOrEqual | EqualTo) else None
    kept = request.spec.row_filter
    if name == "event_time":
        narrowed = replace(
            kept, event_from_ms=_later(kept.event_from_ms, from_ms), event_until_ms=_earlier(kept.event_until_ms, until_ms)
        )
        return _with_filter(request, narrowed)
    if from_ms is not None and (request.start == EARLIEST or request.start.publish_time_ms is not None):
        request = replace(request, start=Edge(publish_time_ms=_later(request.start.publish_time_ms, from_ms)))
    if until_ms is not None and (request.end == LATEST or request.end.publish_time_ms is not None):
        request = replace(request, end=Edge(publish_time_ms=_earlier(request.end.publish_time_ms, until_ms)))
    return request


def _narrow_keys(request: ScanRequest, each: Filter, value: Any) -> ScanRequest:
    keys = {value} if isinstance(each, EqualTo) else set(value) if isinstance(each, In) else None
    if keys is None or not all(isinstance(key, str) for key in keys):
        return request
    kept = request.spec.row_filter
    return _with_filter(request, replace(kept, keys=frozenset(keys) if kept.keys is None else kept.keys & keys))


def _narrow_partitions(request: ScanRequest, each: Filter, value: Any) -> ScanRequest:
    """Not as the option `partitions`: by that, one that no topic has is an error, and by a filter it has no rows."""
    wanted = {value} if isinstance(each, EqualTo) else set(value) if isinstance(each, In) else None
    if wanted is None or not all(isinstance(number, int) for number in wanted):
        return request
    kept = request.partition_filter
    return replace(request, partition_filter=frozenset(wanted) if kept is None else kept & wanted)


def _with_filter(request: ScanRequest, row_filter: RowFilter) -> ScanRequest:
    return replace(request, spec=replace(request.spec, row_filter=row_filter))


def _later(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
