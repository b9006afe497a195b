"""Reads a topic's history as an Arrow stream, without Spark: for notebooks, DuckDB, Polars, pandas and scripts.

from cepheid_scan import scan
reader = scan("flights", service_url="pulsar://127.0.0.1:6650", start="2026-03-01", columns=["key", "value"])
for batch in reader: ...                      # or reader.read_all(), polars.from_arrow(reader), duckdb.sql("from reader")
with reader: reader.read_next_batch()         # if it is not read to its end: threads end, and reads of bookies stop

    plan_scan ──► tasks ──► scan_task, `threads` of them ahead, in order ──► record batches

The range is fixed when `scan` returns; entries are read when batches are requested. In a topic the order is the topic's;
several topics and partitions are read one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any, SupportsIndex

from cepheid_decode.counters import ScanCounters
from cepheid_decode.history import ScanTask
from cepheid_decode.scan_request import (
    OnBadRecord,
    ReadMode,
    ReadSettings,
    RowFilter,
    ScanRequest,
    ScanSpec,
    StorageAccess,
    TopicSelection,
)
from cepheid_scan.decryption_keys import checked_keys
from cepheid_scan.edge_words import EdgeWord, parse_edge, time_ms
from cepheid_scan.read_ahead import read_in_order
from cepheid_scan.scan_arguments import (
    checked_counters,
    checked_settings,
    checked_storage,
    chosen_columns,
    chosen_keys,
    chosen_partitions,
    one_of,
    plan_source,
    tls_files,
    topic_names,
    true_or_false,
    whole_number,
)
from cepheid_security.client_environment import Token

if TYPE_CHECKING:
    from cepheid_scan.scan_reader import ScanReader
    from cepheid_wire.payload_decryption import PrivateKeyOf

TASK_BYTES = 32 << 20  # smaller than Spark's: a task costs nothing here, and the first rows arrive sooner


def scan(
    topic: str | Sequence[str],
    *,
    service_url: str | None = None,
    admin_url: str | None = None,
    metadata: str | None = None,
    token: Token | None = None,
    password: tuple[str, str] | None = None,
    tls_ca_file: str | None = None,
    tls_certificate_file: str | None = None,
    tls_key_file: str | None = None,
    retry_s: float = 10.0,
    start: EdgeWord = "earliest",
    end: EdgeWord = "latest",
    columns: Sequence[str] | None = None,
    mode: str = "messages",
    keys: Iterable[str] | None = None,
    partitions: Iterable[SupportsIndex] | None = None,
    event_from: str | SupportsIndex | date | None = None,
    event_until: str | SupportsIndex | date | None = None,
    on_bad_record: str = "fail",
    fail_on_data_loss: bool = True,
    threads: int = 2,
    settings: ReadSettings | None = None,
    storage: StorageAccess | None = None,
    decryption_keys: str | PrivateKeyOf | None = None,
    counters: ScanCounters | None = None,
) -> ScanReader:
    """Return rows of `topic` (one name, or several) from `start` (inclusive) to `end` (exclusive), as described in `docs/spark.md`.

    One of `service_url`, `admin_url` and `metadata` names the cluster; an unavailable one is retried for `retry_s`.
    `token` (text, the Path of its file, or a function that returns it, such as `cepheid.ClientCredentials`) or `password` (user
    name, password) and the three files of TLS are for brokers, the files for bookies as well; without them the environment
    is used.
    `start` and `end` are words of `edge_words`; a time is a publish time. `mode`: messages, entries or typed. `keys`,
    `partitions` and the event times filter rows (stored entries have neither keys nor event times). `counters` is filled as
    batches are read. `storage`: credentials for ledgers in object storage, if the environment has none. `decryption_keys`: the
    private keys for encrypted messages, as a directory of PEM files, "package.module:function", or a function that returns the PEM
    of the key `name`, called as `function(name, metadata)`, by several threads. Close the reader if it is not read to its end.
    Raises BadOptionError, NoSuchTopicError, PlanUnavailableError; later errors of the reader are ScanErrors, too.
    """
    from cepheid_scan.plan_scan import plan_scan

    settings, counters = checked_settings(settings), checked_counters(counters)
    tls = tls_files(tls_ca_file, tls_certificate_file, tls_key_file)
    if tls is not None:
        settings = replace(settings, tls=tls)
    threads = whole_number("threads", threads, at_least=1)
    names = topic_names(topic)
    chosen = None if partitions is None else chosen_partitions(partitions)
    edge_topic = _only_topic(names, chosen)
    request = ScanRequest(
        source=plan_source(service_url, admin_url, metadata, token, retry_s, settings.tls, password),
        topics=TopicSelection(names=names, partitions=chosen),
        spec=ScanSpec(
            mode=one_of(ReadMode, mode, "mode"),
            columns=() if columns is None else chosen_columns(columns),
            row_filter=RowFilter(
                event_from_ms=None if event_from is None else time_ms(event_from),
                event_until_ms=None if event_until is None else time_ms(event_until),
                keys=None if keys is None else chosen_keys(keys),
            ),
            on_bad_record=one_of(OnBadRecord, on_bad_record, "on_bad_record"),
            fail_on_data_loss=true_or_false("fail_on_data_loss", fail_on_data_loss),
            settings=settings,
            storage=checked_storage(storage),
            decryption_keys=checked_keys(decryption_keys),
        ),
        start=parse_edge(start, edge_topic),
        end=parse_edge(end, edge_topic),
        target_task_bytes=TASK_BYTES,
        min_tasks=1,
    )
    request.spec.row_filter.check_for(request.spec.mode)
    request.start.check_before(request.end)
    tasks, spec, _ = plan_scan(request)
    spec = spec if spec.columns else replace(spec, columns=default_columns(spec))
    return _open_reader(tasks, spec, threads, counters)


def _open_reader(tasks: Sequence[ScanTask], spec: ScanSpec, threads: int, counters: ScanCounters) -> ScanReader:
    from cepheid_decode.columns import arrow_schema
    from cepheid_scan.scan_reader import ScanReader
    from cepheid_scan.scan_task import scan_task
    from cepheid_scan.stop_signal import StopSignal

    stop = StopSignal()
    adding = threading.Lock()

    def read(task: ScanTask) -> Iterator[Any]:
        of_task = ScanCounters()
        try:
            yield from scan_task(task, spec, of_task, stop)
        finally:
            with adding:
                counters.add(of_task)

    return ScanReader(arrow_schema(spec), read_in_order(tasks, read, threads, stop), stop)


def default_columns(spec: ScanSpec) -> tuple[str, ...]:
    """Return the default columns, as in Spark: for typed rows the schema's, then the usual ones of messages."""
    from cepheid_decode.columns import DEFAULT_ENTRY_COLUMNS, DEFAULT_MESSAGE_COLUMNS, TYPED_PREFIX, schema_columns

    if spec.mode is ReadMode.ENTRIES:
        return DEFAULT_ENTRY_COLUMNS
    if spec.mode is ReadMode.MESSAGES:
        return DEFAULT_MESSAGE_COLUMNS
    return (
        *schema_columns(spec.schemas, spec.reader_version),
        *(f"{TYPED_PREFIX}{name}" for name in DEFAULT_MESSAGE_COLUMNS if name != "value"),
    )


def _only_topic(names: Sequence[str], partitions: frozenset[int] | None) -> str | None:
    """Return the topic of positions without a topic; None: there are several."""
    if len(names) != 1:
        return None
    if partitions is None:
        return names[0]
    return f"{names[0]}-partition-{next(iter(partitions))}" if len(partitions) == 1 else None
