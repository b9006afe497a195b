"""Settings of managed ledgers: one model per broker, and what may differ per topic."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from cepheid_managed_ledger.trim import Retention

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class ManagedLedgerSettings(BaseModel, frozen=True, extra="forbid"):
    """One per broker."""

    ledger_max_bytes: PositiveInt = Field(
        2 * GIB, description="A ledger of this size is followed by a new one. Smaller: trimming frees disks in finer steps."
    )
    ledger_max_entries: int = Field(
        1_000_000,
        ge=1,
        le=1 << 31,
        description="A ledger with this many entries is followed by a new one, once it is `ledger_min_age_s` old.",
    )
    ledger_min_age_s: NonNegativeFloat = Field(
        600.0, description="Younger ledgers are not ended for their number of entries: each ledger is a metadata record."
    )
    ledger_max_age_s: PositiveFloat = Field(
        4 * 3600.0, description="A ledger of this age that has entries is followed by a new one, so that it can be trimmed."
    )
    append_window_bytes: PositiveInt = Field(
        256 * MIB,
        description="Bytes of one topic that may wait to be stored; more is refused. Above what its publishers' windows allow.",
    )
    drain_timeout_s: PositiveFloat = Field(
        10.0, description="How long closing, terminating and rolling over wait for appends on their way before they fail them."
    )
    ledger_failover_timeout_s: PositiveFloat = Field(
        30.0,
        description="How long appends wait for a ledger that takes no more to be recovered and followed by the next one, before "
        "they fail and the topic is opened anew. Clients give a message up after 30 s, unless they are told otherwise.",
    )
    metadata_timeout_s: PositiveFloat = Field(
        10.0,
        description="How long opening, closing, and acknowledgements with a response wait for a metadata store that is away. "
        "An open topic goes on without it.",
    )
    metadata_retry_s: PositiveFloat = Field(0.05, description="Pause before a write of unknown outcome is looked at again.")
    housekeeping_s: PositiveFloat = Field(
        30.0, description="How often open topics are looked at for ledgers to end by age and to trim by retention."
    )
    orphan_scan_s: PositiveFloat = Field(
        6 * 3600.0,
        description="How often all ledgers are looked at for those that a process made for a topic and died before recording them; "
        "each scan reads the record of every ledger of the cluster, slowly.",
    )
    cursor_flush_s: PositiveFloat = Field(
        0.5, description="Acknowledgements without response are saved within this time. A crash redelivers at most that much."
    )
    cursor_inline_bytes: PositiveInt = Field(
        4 * KIB,
        le=64 * KIB,
        description="Acknowledgement state up to this size is kept in the cursor's metadata record, larger state in a ledger.",
    )
    cursor_part_bytes: PositiveInt = Field(
        512 * KIB, le=4 * MIB, description="Larger cursor state is written to its ledger in parts of this size."
    )
    cursor_ledger_max_bytes: PositiveInt = Field(
        64 * MIB, description="A cursor ledger of this size is replaced by a new one with the present states."
    )
    max_cursors: PositiveInt = Field(
        10_001, description="Durable cursors of one topic: its subscriptions, and one where deduplication is on."
    )
    max_ledger_readers: PositiveInt = Field(8, description="Ledgers of one topic whose metadata is kept for reading.")
    read_ahead_bytes: PositiveInt = Field(4 * MIB, description="How much is read from storage ahead of a consumer that catches up.")
    catch_up_bytes: PositiveInt = Field(
        128 * MIB, description="Bytes read from storage and not delivered yet, over all topics: the memory that old data may take."
    )
    counts_bytes: PositiveInt = Field(
        64 * MIB,
        description="Memory for sizes and message counts of entries, over all topics: 4 bytes an entry, 8 where messages are "
        "batched. With less, exact backlogs of long histories are read from storage more often.",
    )


@dataclass(frozen=True, slots=True)
class ManagedLedgerConfig:
    """What may differ per topic."""

    ensemble_size: int = 1
    write_quorum: int = 1
    ack_quorum: int = 1
    retention: Retention = field(default_factory=Retention)
