"""Where the history of topics lies: what a planner learns, and what a task of a scan is told. All of it picklable and immutable.

HistoryPlan  ──►  TopicHistory per topic or partition  ──►  LedgerHistory …  ──►  Fragment …       what there is
ScanTask     ──►  Piece: entries first..last of one ledger  ──►  Fragment …                        what one task reads
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_PARTITION = -1
_SHAPING = {"KEY_VALUE": ("key.schema.type", "value.schema.type"), "PROTOBUF": ("__PARSING_INFO__",)}


@dataclass(frozen=True, slots=True)
class Fragment:
    """Entries from `first_entry_id` to before the next fragment's lie on this ensemble (striped: docs/plan-service.md)."""

    first_entry_id: int
    ensemble: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """One ledger of a chain. `last_entry_id` is the last entry to read, -1: none; of the open ledger, up to here it is certain.

    `object_url`: the ledger's complete copy in object storage, "": there is none. A ledger that is only an object has no fragments.
    `ticket`: the signed permission to read it from bookies; a cluster without security gives the master key instead.
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
    ticket: bytes = field(default=b"", repr=False, compare=False)  # each plan has others

    @property
    def is_on_bookies(self) -> bool:
        return not self.object_url or bool(self.fragments)


@dataclass(frozen=True, slots=True)
class TopicHistory:
    """`topic`: full name, with its partition if it has one. `incarnation` is another when the topic was deleted and made again."""

    topic: str
    partition: int
    incarnation: str
    ledgers: tuple[LedgerHistory, ...]


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A version of a topic's schema. `version` as entries have it (8 bytes, big-endian); `kind` as Pulsar's admin API names it."""

    version: bytes
    kind: str
    definition: bytes
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> tuple[str | bytes, ...]:
        """What decides how values look: of some kinds properties do, too. Topics number equal ones as they came."""
        return self.kind, self.definition, *(self.properties.get(name, "") for name in _SHAPING.get(self.kind, ()))


@dataclass(frozen=True, slots=True)
class HistoryPlan:
    """A snapshot. `bookies`: host:port of the gRPC endpoint of each bookie that is up, after `tls://` where that takes TLS.
    `schemas`: by topic without its partition, oldest version first; asked for separately. `ticket` goes into every read request of
    a ledger that has none of its own; where several topics are planned each has one in `tickets`, by topic without its partition,
    or by its whole name where it only looks like one."""

    topics: tuple[TopicHistory, ...]
    bookies: Mapping[str, str]
    ticket: bytes = b""
    schemas: Mapping[str, tuple[SchemaVersion, ...]] = field(default_factory=dict)
    tickets: Mapping[str, bytes] = field(default_factory=dict)
    racks: Mapping[str, str] = field(default_factory=dict)  # of the bookies that say where they stand

    def ticket_of(self, topic: str, partition: int) -> bytes:
        base, mark, _ = topic.rpartition("-partition-")
        return self.tickets.get(topic) or self.tickets.get(base if mark and partition >= 0 else topic, self.ticket)


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries `first_entry_id..last_entry_id` (inclusive) of one ledger.

    Of the first entry, the messages before `first_batch_index` are left out; of the last one, those from `end_batch_index` on
    (-1: none). `before`: where the entries before the ledger's first lie, for messages in chunks that began there: the tails of
    ledgers before, the oldest first. Pieces of a task share them, so that pickled they take little. `object_url`: as that of
    LedgerHistory; with fragments too, either copy may be read. `ticket`: that of LedgerHistory.
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
    ticket: bytes = field(default=b"", repr=False, compare=False)  # each plan has others


@dataclass(frozen=True, slots=True)
class ScanTask:
    """What one task reads, in this order. `size_bytes` is an estimate of the stored bytes."""

    pieces: tuple[Piece, ...]
    bookies: tuple[tuple[str, str], ...]
    ticket: bytes = b""
    size_bytes: int = 0
    racks: tuple[tuple[str, str], ...] = ()
