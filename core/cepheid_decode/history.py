"""Where the history of topics is stored: for planners, and for the tasks of a scan. All of it can be pickled and is immutable.

HistoryPlan  ──►  TopicHistory per topic or partition  ──►  LedgerHistory …  ──►  Fragment …       what exists
ScanTask     ──►  Piece: entries first..last of one ledger  ──►  Fragment …                        what one task reads
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_PARTITION = -1
_SHAPING = {"KEY_VALUE": ("key.schema.type", "value.schema.type"), "PROTOBUF": ("__PARSING_INFO__",)}


@dataclass(frozen=True, slots=True)
class Fragment:
    """Entries from `first_entry_id` to before the next fragment's are on this ensemble (striped: docs/plan-service.md)."""

    first_entry_id: int
    ensemble: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """One ledger of a chain. `last_entry_id` is the last entry to read, -1: none; for the open ledger, entries up to it are
    certain.

    `object_url`: the ledger's complete copy in object storage, "": there is none. A ledger that is only in object storage has no
    fragments. `ticket`: the signed permission to read it from bookies; a cluster without security sends the master key instead.
    """

    ledger_id: int
    last_entry_id: int
    is_open: bool
    size_bytes: int
    closed_at_ms: int | None
    ensemble_size: int = 0
    write_quorum: int = 0
    fragments: tuple[Fragment, ...] = ()
    master_key: bytes = b""
    object_url: str = ""
    object_bytes: int = 0
    ticket: bytes = field(default=b"", repr=False, compare=False)  # differs in each plan

    @property
    def is_on_bookies(self) -> bool:
        return not self.object_url or bool(self.fragments)


@dataclass(frozen=True, slots=True)
class TopicHistory:
    """`topic`: full name, with its partition if it has one. `incarnation` changes when the topic is deleted and created again."""

    topic: str
    partition: int
    incarnation: str
    ledgers: tuple[LedgerHistory, ...]


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A version of a topic's schema. `version` as in entries (8 bytes, big-endian); `kind` as in Pulsar's admin API."""

    version: bytes
    kind: str
    definition: bytes
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> tuple[str | bytes, ...]:
        """What decides how values look: for some kinds, properties do, too. Topics number the same schemas differently."""
        return self.kind, self.definition, *(self.properties.get(name, "") for name in _SHAPING.get(self.kind, ()))


@dataclass(frozen=True, slots=True)
class HistoryPlan:
    """A snapshot. `bookies`: host:port of the gRPC endpoint of each bookie that is up, after `tls://` if it requires TLS.
    `schemas`: by topic without its partition, oldest version first; requested separately. `ticket` is sent in every read request
    for a ledger that has no ticket of its own; if several topics are planned, each has one in `tickets`, by topic without its
    partition, or by its full name if the name only looks like a partition's."""

    topics: tuple[TopicHistory, ...]
    bookies: Mapping[str, str]
    ticket: bytes = b""
    schemas: Mapping[str, tuple[SchemaVersion, ...]] = field(default_factory=dict)
    tickets: Mapping[str, bytes] = field(default_factory=dict)
    racks: Mapping[str, str] = field(default_factory=dict)  # of the bookies that report theirs

    def ticket_of(self, topic: str, partition: int) -> bytes:
        base, mark, _ = topic.rpartition("-partition-")
        return self.tickets.get(topic) or self.tickets.get(base if mark and partition >= 0 else topic, self.ticket)


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries `first_entry_id..last_entry_id` (inclusive) of one ledger.

    Of the first entry, the messages before `first_batch_index` are left out; of the last one, those from `end_batch_index` on
    (-1: none). `before`: the entries before the ledger's first, for chunked messages that begin there: the ends of the previous
    ledgers, the oldest first. Pieces of a task share them, so that they take little space when pickled. `object_url`: as in
    LedgerHistory; if there are also fragments, either copy may be read. `ticket`: as in LedgerHistory.
    """

    topic: str
    partition: int
    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    ensemble_size: int
    write_quorum: int
    fragments: tuple[Fragment, ...]
    first_batch_index: int = 0
    end_batch_index: int = -1
    before: tuple[Piece, ...] = ()
    object_url: str = ""
    ticket: bytes = field(default=b"", repr=False, compare=False)  # differs in each plan


@dataclass(frozen=True, slots=True)
class ScanTask:
    """What one task reads, in this order. `size_bytes` is an estimate of the stored bytes."""

    pieces: tuple[Piece, ...]
    bookies: tuple[tuple[str, str], ...]
    ticket: bytes = b""
    size_bytes: int = 0
    racks: tuple[tuple[str, str], ...] = ()
