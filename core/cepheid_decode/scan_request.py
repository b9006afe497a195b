"""What a reader asks for, checked and without text forms: Spark's options, `scan()` and the command line are turned into this."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cepheid_decode.errors import BadOptionError
from cepheid_decode.history import SchemaVersion
from cepheid_decode.positions import MessagePosition
from cepheid_security import ClientTls
from cepheid_security.client_environment import NO_SECRETS, ClientSecrets
from cepheid_wire.payload_decryption import PrivateKeyOf

MAX_TIME_MS = 253_402_300_799_999  # the year 9999: beyond it there is no timestamp in Spark or Python


class ReadMode(Enum):
    MESSAGES = "messages"  # one row a message
    ENTRIES = "entries"  # one row a stored entry, its bytes as they are
    TYPED = "typed"  # the topic's schema as columns


class OnBadRecord(Enum):
    FAIL = "fail"
    NULL = "null"  # a row without what could not be decoded
    SKIP = "skip"  # no row; counted


@dataclass(frozen=True, slots=True)
class PlanSource:
    """Where to ask for the plan of a scan: at least one of the three addresses. Secrets are kept out of repr."""

    service_url: str | None = None  # pulsar://host:port[,host:port], or http://…: brokers
    admin_url: str | None = None  # http://host:port[,host:port]
    metadata: str | None = None  # zk://host:port[,host:port]/path
    secrets: ClientSecrets = NO_SECRETS  # shown to brokers
    retry_s: float = 60.0
    tls: ClientTls | None = None  # for https and for bookies with TLS; None: as the environment says


@dataclass(frozen=True, slots=True)
class StorageAccess:
    """How a reader reaches object storage, where its environment does not say it. The URL of an object names the store itself; what
    is given here counts more than what the URL or the environment says. None of it is shown by repr."""

    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    endpoint: str | None = field(default=None, repr=False)
    region: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TopicSelection:
    """Exactly one of the two. Partitioned topics mean all their partitions, unless `partitions` names some."""

    names: tuple[str, ...] = ()
    pattern: str | None = None  # persistent://tenant/namespace/REGEX; REGEX alone: in public/default
    partitions: frozenset[int] | None = None
    fail_on_missing: bool = True


@dataclass(frozen=True, slots=True)
class Edge:
    """A start (inclusive) or an end (exclusive) of the range that is read; of its fields the first one that is given counts.

    `publish_time_ms`: the first message published then or later. `positions`: by full topic name with partition; topics that are
    not named start at their earliest and end at their latest message. `subscription`: where that subscription stands.
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
    """Rows to keep; times in ms since 1970, from (inclusive) and until (exclusive); None: no bound. `keys` as text, as sent."""

    publish_from_ms: int | None = None
    publish_until_ms: int | None = None
    event_from_ms: int | None = None
    event_until_ms: int | None = None
    keys: frozenset[str] | None = None

    def check_for(self, mode: ReadMode) -> None:
        """Of what a user asks for. Raises BadOptionError: no rows, or all of them, would look as if that was what there is."""
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
    """How bytes come from bookies to rows. Sizes in bytes.

    Memory of a task: 125 to 160 MB as measured, of which 45 are in use; with 16 MiB of `decode_bytes` up to 245."""

    rack: str | None = None
    read_timeout_s: float = 10.0  # per chunk
    read_attempts: int = 5  # rounds over all replicas, at least
    unreachable_s: float = 15.0  # and so long at least, if a replica may come back; busy ones 20 times
    chunk_bytes: int = 4 << 20  # 1, 2, 4 or 8 MiB, the next one above; with no less than `decode_bytes` chunks are decoded in place
    decode_bytes: int = 3 << 20  # 16 MiB are hardly faster
    verify_checksum: bool = True
    chunk_lookback: int = 1000  # entries before its own that a task may read for messages in chunks
    tls: ClientTls | None = None  # what bookies with TLS are shown; None: as the environment says
    prefer_bookies: bool = False  # of ledgers that bookies and object storage have; else the object is read


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """What tasks need besides their pieces: small, pickled once per task.

    `columns` are names of the mode's columns, in the order of the rows. In typed mode the schema's columns come from `schemas` (the
    history of one topic; `reader_version` is the version that is shown), and `columns` may name some of them too. `writers`: the
    histories of topics, without their partitions, where they are not `schemas`.
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
    plan_source: PlanSource | None = None  # to look once again where a ledger went
    storage: StorageAccess = StorageAccess()
    decryption_keys: str | PrivateKeyOf | None = None  # package.module:function, a directory, or a function; None: no keys


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """A bounded scan as a whole."""

    source: PlanSource
    topics: TopicSelection
    spec: ScanSpec
    start: Edge = EARLIEST
    end: Edge = LATEST
    target_task_bytes: int = 128 << 20
    min_tasks: int = 1
    timestamp_skew_ms: int = 60_000
