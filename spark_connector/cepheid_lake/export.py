"""Exports a topic's messages to a table, each exactly once: every run adds what is new since the last one.

    table's last commit ──► positions ──► scan from there to the topic's end ──► rows ──► commit(rows, positions) ──► hold moved

Rules
1. Only the table says where an export continues: a killed run loses what it had not committed.
2. The subscription (hold.py) follows the commits, never the other way round.
3. A table belongs to one topic and one kind of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cepheid_decode import BadOptionError, MessagePosition, PlanSource, ScanCounters, TopicSelection
from cepheid_lake.errors import LakeError, LakeTargetError
from cepheid_lake.hold import Hold
from cepheid_lake.positions import Progress, position_columns, table_column
from cepheid_lake.target import Committed, Target
from cepheid_scan import scan
from cepheid_scan.open_planner import open_planner
from cepheid_scan.scan_arguments import plan_source, tls_files
from cepheid_security.client_environment import Token
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid_scan.scan_reader import ScanReader
    from cepheid_wire.payload_decryption import PrivateKeyOf

COMMIT_BYTES = 128 << 20
MODES = ("messages", "typed")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The outcome of one run. `positions`: by topic partition, the position after the last exported message."""

    rows: int
    commits: int
    positions: Mapping[str, str]
    subscription: str
    bad_records: int


def export(
    topic: str,
    to: str,
    *,
    service_url: str | None = None,
    admin_url: str | None = None,
    token: Token | None = None,
    password: tuple[str, str] | None = None,
    tls_ca_file: str | None = None,
    tls_certificate_file: str | None = None,
    tls_key_file: str | None = None,
    catalog: Mapping[str, str] | None = None,
    start: str = "earliest",
    mode: str = "messages",
    columns: Sequence[str] | None = None,
    on_bad_record: str = "fail",
    fail_on_data_loss: bool = True,
    subscription: str | None = None,
    decryption_keys: str | PrivateKeyOf | None = None,
    commit_bytes: int = COMMIT_BYTES,
    threads: int = 2,
) -> ExportReport:
    """Add the new messages of `topic` to the table `to`, up to the end of the topic when the export began.

    `to`: parquet:///path, parquet+s3://bucket/prefix, or iceberg://namespace.table with the properties of its `catalog`. `start`
    applies only to the first run. `mode`: messages or typed, `columns` and `decryption_keys` as in `scan`. Rows are committed
    whenever they are about `commit_bytes`. `subscription`: the name of the one that retains unexported messages; by default one
    is derived from `to`.
    Raises LakeError, ScanError.
    """
    if mode not in MODES:
        raise BadOptionError(f"mode '{mode}': there is {' and '.join(MODES)}", value=mode)
    if commit_bytes < 1:
        raise BadOptionError(f"commit_bytes must be at least 1, got {commit_bytes}", value=commit_bytes)
    tls = tls_files(tls_ca_file, tls_certificate_file, tls_key_file)
    source = plan_source(service_url, admin_url, None, token, 10.0, tls, password)
    name = str(TopicName.parse(topic))
    target = _open_target(to, catalog or {})
    with closing(target):
        committed = target.open()
        _check_same(committed, name, mode, to)
        positions = {} if committed is None else committed.positions
        hold = Hold(source, subscription or _subscription_of(to))
        counters = ScanCounters()
        with closing(hold):
            if committed is not None or start == "earliest":
                hold.make(_held_places(source, name, positions))
            reader = scan(
                name,
                service_url=service_url,
                admin_url=admin_url,
                token=token,
                password=password,
                tls_ca_file=tls_ca_file,
                tls_certificate_file=tls_certificate_file,
                tls_key_file=tls_key_file,
                start=positions or start,
                columns=None if columns is None else _with_positions(columns, mode),
                mode=mode,
                on_bad_record=on_bad_record,
                fail_on_data_loss=fail_on_data_loss,
                threads=threads,
                decryption_keys=decryption_keys,
                counters=counters,
            )
            progress = Progress(mode, positions)
            kept = columns if columns is not None else reader.schema.names
            run = _Run(target, hold, progress, name, mode, tuple(kept), commit_bytes)
            with reader:
                run.add_all(reader)
    return ExportReport(run.rows, run.commits, progress.positions, hold.subscription, counters.bad_records)


class _Run:
    def __init__(
        self, target: Target, hold: Hold, progress: Progress, topic: str, mode: str, columns: tuple[str, ...], commit_bytes: int
    ) -> None:
        self._target = target
        self._hold = hold
        self._progress = progress
        self._topic = topic
        self._mode = mode
        self._columns = columns
        self._names = [table_column(name) for name in columns]
        if len(set(self._names)) < len(self._names):
            twice = max(self._names, key=self._names.count)
            raise LakeError(f"the table would have two columns {twice}: one of the topic's schema; choose columns", column=twice)
        self._commit_bytes = commit_bytes
        self._held: set[str] = set()  # topic partitions whose subscription is known to exist
        self.rows = 0
        self.commits = 0

    def add_all(self, reader: ScanReader) -> None:
        waiting = 0
        for batch in reader:
            if not batch.num_rows:
                continue
            self._progress.advance(batch)
            size = self._target.add(batch.select(list(self._columns)).rename_columns(self._names))
            waiting += batch.num_rows
            if size >= self._commit_bytes:
                self._commit(waiting)
                waiting = 0
        if waiting:
            self._commit(waiting)

    def _commit(self, rows: int) -> None:
        self._target.commit(Committed(self._topic, self._mode, self._progress.positions))
        self.rows += rows
        self.commits += 1
        places = self._progress.take_last_entries()
        self._hold.make({topic: place for topic, place in places.items() if topic not in self._held})
        self._held.update(places)
        self._hold.move(places)


def _check_same(committed: Committed | None, topic: str, mode: str, to: str) -> None:
    if committed is None:
        return
    if committed.topic != topic:
        raise LakeError(f"{to} holds the export of {committed.topic}, not of {topic}: give each topic a table of its own", url=to)
    if committed.mode != mode:
        raise LakeError(
            f"{to} was begun with mode {committed.mode}, not {mode}: continue with that, or export to another table", url=to
        )


def _held_places(source: PlanSource, topic: str, positions: Mapping[str, str]) -> dict[str, MessagePosition | None]:
    """Return, by topic partition, the position at which a missing subscription is created; None: the first message."""
    with closing(open_planner(source)) as planner:
        names = planner.topics(TopicSelection(names=(topic,)))
    return {name: MessagePosition.parse(positions[name]) if name in positions else None for name in names}


def _with_positions(columns: Sequence[str], mode: str) -> list[str]:
    return [*columns, *(name for name in position_columns(mode) if name not in columns)]


def _subscription_of(to: str) -> str:
    return f"lake-{hashlib.sha256(to.encode()).hexdigest()[:12]}"


def _open_target(url: str, properties: Mapping[str, str]) -> Target:
    """Return the target of `parquet:///path`, `parquet+s3://bucket/prefix` (also gs, abfs), or `iceberg://namespace.table` with
    the catalog's properties. Raises LakeTargetError for an unknown kind of table, or if its library is not installed.
    """
    scheme = urlsplit(url).scheme
    if scheme == "iceberg":
        from cepheid_lake.iceberg_target import IcebergTarget

        return IcebergTarget(url, properties)
    if scheme == "parquet" or scheme.startswith("parquet+"):
        from cepheid_lake.parquet_target import ParquetTarget

        if properties:
            raise LakeTargetError(f"catalog properties are only for iceberg://; {url} is a folder of Parquet files")
        return ParquetTarget(url)
    raise LakeTargetError(
        f"{url!r} does not name a table: write parquet:///absolute/path, parquet+s3://bucket/prefix, or iceberg://namespace.table"
    )
