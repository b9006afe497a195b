"""The request of a reader, checked and without text forms: created from Spark's options, `scan()` and the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cepheid_decode.errors import BadOptionError
from cepheid_decode.history import SchemaVersion
from cepheid_decode.positions import MessagePosition
from cepheid_security import ClientTls
from cepheid_security.client_environment import NO_SECRETS, ClientSecrets
from cepheid_wire.payload_decryption import PrivateKeyOf

MAX_TIME_MS = 253_402_300_799_999  # the year 9999: Spark and Python have no later timestamps


class ReadMode(Enum):
    MESSAGES = "messages"  # one row per message
    ENTRIES = "entries"  # one row per stored entry, with its bytes unchanged
    TYPED = "typed"  # the topic's schema as columns


class OnBadRecord(Enum):
    FAIL = "fail"
    NULL = "null"  # a row without what could not be decoded
    SKIP = "skip"  # no row; counted


@dataclass(frozen=True, slots=True)
class PlanSource:
    """Where to request the plan of a scan: at least one of the three addresses. Secrets are not in repr."""

    service_url: str | None = None  # pulsar://host:port[,host:port], or http://…: brokers
    admin_url: str | None = None  # http://host:port[,host:port]
    metadata: str | None = None  # zk://host:port[,host:port]/path
    secrets: ClientSecrets = NO_SECRETS  # sent to brokers
    retry_s: float = 60.0
    tls: ClientTls | None = None  # for https and for bookies with TLS; None: as in the environment


@dataclass(frozen=True, slots=True)
class StorageAccess:
    """How a reader reaches object storage, if its environment does not say so. The URL of an object names the store itself; these
    values override the URL and the environment. None of them is in repr."""

    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    endpoint: str | None = field(default=None, repr=False)
    region: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TopicSelection:
    """Exactly one of the two. A partitioned topic means all its partitions, unless `partitions` selects some."""

    names: tuple[str, ...] = ()
    pattern: str | None = None  # persistent://tenant/namespace/REGEX; only REGEX: in public/default
    partitions: frozenset[int] | None = None
    fail_on_missing: bool = True


@dataclass(frozen=True, slots=True)
class Edge:
    """A start (inclusive) or an end (exclusive) of the range to read; the first field that is set counts.

    `publish_time_ms`: the first message published then or later. `positions`: by full topic name with partition; topics that are
    not in it start at their earliest and end at their latest message. `subscription`: the position of that subscription.
    None of them: `earliest` or latest."""

    publish_time_ms: int | None = None
    positions: tuple[tuple[str, MessagePosition], ...] = ()
    subscription: str | None = None
    earliest: bool = False

    def check_before(self, end: Edge) -> None:
        """Raises BadOptionError: an empty range by mistake would look like a topic without messages."""
        start_ms, end_ms = self.publish_time_ms, end.publish_time_ms
        if start_ms is not None and end_ms is not None and start_ms > end_ms:
            raise BadOptionError(f"the start ({start_ms} ms) is later than the end ({end_ms} ms)")
        ends = {} if start_ms is not None or end_ms is not None else dict(end.positions)
        for topic, first in self.positions:
            if topic in ends and first > ends[topic]:
                raise BadOptionError(f"the start {first} of {topic} is later than the end {ends[topic]}", topic=topic)


EARLIEST = Edge(earliest=True)
LATEST = Edge()


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Rows to keep; times in ms since 1970, from (inclusive) and until (exclusive); None: no limit. `keys` as text, as sent."""

    publish_from_ms: int | None = None
    publish_until_ms: int | None = None
    event_from_ms: int | None = None
    event_until_ms: int | None = None
    keys: frozenset[str] | None = None

    def check_for(self, mode: ReadMode) -> None:
        """Check a user's filter. Raises BadOptionError if it would match no rows or all rows by mistake."""
        of_messages = (self.keys, self.event_from_ms, self.event_until_ms)
        if mode is ReadMode.ENTRIES and any(each is not None for each in of_messages):
            raise BadOptionError(
                "keys and event times are those of messages, and with the mode entries a row is a stored entry of several: "
                "leave them out, or read messages"
            )
        from_ms, until_ms = self.event_from_ms, self.event_until_ms
        if from_ms is not None and until_ms is not None and from_ms > until_ms:
            raise BadOptionError(f"the event times from ({from_ms} ms) on are later than those before their end ({until_ms} ms)")


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """How bytes from bookies become rows. Sizes in bytes.

    Memory of a task: 125 to 160 MB as measured, of which 45 are in use; with 16 MiB of `decode_bytes` up to 245."""

    rack: str | None = None
    read_timeout_s: float = 10.0  # per chunk
    read_attempts: int = 5  # rounds over all replicas, at least
    unreachable_s: float = 15.0  # at least this long, if a replica may come back; 20 times as long for busy ones
    chunk_bytes: int = 4 << 20  # 1, 2, 4 or 8 MiB, rounded up; if at least `decode_bytes`, chunks are decoded in place
    decode_bytes: int = 3 << 20  # 16 MiB are hardly faster
    verify_checksum: bool = True
    chunk_lookback: int = 1000  # entries before its own that a task may read for chunked messages
    tls: ClientTls | None = None  # sent to bookies with TLS; None: as in the environment
    prefer_bookies: bool = False  # for ledgers that are on bookies and in object storage; otherwise the object is read


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """What tasks need besides their pieces: small, pickled once per task.

    `columns` are names of the mode's columns, in the order of the rows. In typed mode the schema's columns come from `schemas` (the
    history of one topic; `reader_version` is the version to show), and `columns` may contain some of them too. `writers`: the
    histories of topics, without their partitions, that differ from `schemas`.
    """

    mode: ReadMode
    columns: tuple[str, ...]
    row_filter: RowFilter = RowFilter()
    on_bad_record: OnBadRecord = OnBadRecord.FAIL
    fail_on_data_loss: bool = True
    settings: ReadSettings = ReadSettings()
    schemas: tuple[SchemaVersion, ...] = ()
    reader_version: bytes | None = None
    writers: tuple[tuple[str, tuple[SchemaVersion, ...]], ...] = ()
    plan_source: PlanSource | None = None  # to look up again where a ledger is
    storage: StorageAccess = StorageAccess()
    decryption_keys: str | PrivateKeyOf | None = None  # package.module:function, a directory, or a function; None: no keys


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """A complete bounded scan."""

    source: PlanSource
    topics: TopicSelection
    spec: ScanSpec
    start: Edge = EARLIEST
    end: Edge = LATEST
    target_task_bytes: int = 128 << 20
    min_tasks: int = 1
    timestamp_skew_ms: int = 60_000
