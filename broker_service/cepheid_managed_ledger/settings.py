"""Settings of managed ledgers: those of a broker, and those that may differ for each topic."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cepheid_managed_ledger.trim import Retention

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class ManagedLedgerSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of a topic's chain of ledgers, and of its cursors."""

    ledger_max_bytes: PositiveInt = Field(
        2 * GIB, description="Size at which a ledger is followed by a new one. Smaller: disk space returns in smaller steps."
    )
    ledger_max_entries: int = Field(
        1_000_000,
        ge=1,
        le=1 << 31,
        description="Number of entries at which a ledger is followed by a new one, once it is `managed_ledger.ledger_min_age_s` "
        "old.",
    )
    ledger_min_age_s: NonNegativeFloat = Field(
        600.0,
        description="Age below which a ledger is not closed for its number of entries. Shorter: more ledgers, and each is a record "
        "in metadata.",
    )
    ledger_max_age_s: PositiveFloat = Field(
        4 * 3600.0,
        description="Age at which a ledger with entries is followed by a new one. Only closed ledgers can be trimmed: shorten it "
        "for topics with little traffic and a short retention.",
    )
    append_window_bytes: PositiveInt = Field(
        256 * MIB,
        description="Bytes of one topic that may wait to be stored. Beyond it publishes are refused. Keep it above "
        "`publish_buffer_bytes`.",
    )
    drain_timeout_s: PositiveFloat = Field(
        10.0, description="Time for which closing, terminating or rolling over a ledger waits for appends in progress."
    )
    ledger_failover_timeout_s: PositiveFloat = Field(
        30.0,
        description="Time for which appends wait until a failed ledger is recovered and followed by a new one. After it they fail "
        "and the topic is opened again. By default clients give up on a message after 30 s.",
    )
    metadata_timeout_s: PositiveFloat = Field(
        10.0,
        description="Time for which opening, closing, and acknowledgements with a response wait for a metadata store that is "
        "unavailable. An open topic continues without it.",
    )
    metadata_retry_s: PositiveFloat = Field(
        0.05, description="Pause before a change of a topic's metadata whose outcome is unknown is looked up."
    )
    housekeeping_s: PositiveFloat = Field(
        30.0, description="Interval between checks of open topics for ledgers to close by age and to trim by retention."
    )
    orphan_scan_s: PositiveFloat = Field(
        6 * 3600.0,
        description="Interval between searches for ledgers that a broker created for a topic and did not record before it died. "
        "Each search slowly reads the record of every ledger of the cluster.",
    )
    cursor_flush_s: PositiveFloat = Field(
        0.5,
        description="Time within which acknowledgements without a response are saved. "
        "After a crash, messages with more recent acknowledgements are delivered again.",
    )
    cursor_inline_bytes: PositiveInt = Field(
        4 * KIB,
        le=64 * KIB,
        description="Size up to which the acknowledgement state of a subscription is kept in its metadata record. Larger state is "
        "kept in a ledger.",
    )
    cursor_part_bytes: PositiveInt = Field(
        512 * KIB, le=4 * MIB, description="Size of the parts in which acknowledgement state is written to a ledger."
    )
    cursor_ledger_max_bytes: PositiveInt = Field(
        64 * MIB, description="Size at which a ledger of acknowledgement state is replaced by a new one with the current state."
    )
    max_cursors: PositiveInt = Field(
        10_001,
        description="Durable cursors of one topic: one for each durable subscription, and one if deduplication is on. See "
        "`max_subscriptions_per_topic`.",
    )
    max_ledger_readers: PositiveInt = Field(8, description="Ledgers of one topic that are kept open for reading.")
    read_ahead_bytes: PositiveInt = Field(
        4 * MIB,
        description="Bytes that are read from storage ahead of a consumer that catches up. From objects it is a row group (4 MiB) "
        "at a time.",
    )
    catch_up_bytes: PositiveInt = Field(
        128 * MIB,
        description="Memory for entries of all topics that were read from storage and not delivered yet. Raise it when many "
        "consumers catch up at once.",
    )
    object_ahead_bytes: PositiveInt = Field(
        24 * MIB,
        description="Memory for entries of all topics that were read from objects ahead of consumers, part of "
        "`managed_ledger.catch_up_bytes`. Consumers for which nothing is left are served from `tiered.read_cache_bytes`.",
    )
    counts_bytes: PositiveInt = Field(
        64 * MIB,
        description="Memory for sizes and message counts of the entries of all topics, 4 bytes an entry, or 8 if messages are "
        "batched. With less, exact backlogs of long histories are read from storage more often.",
    )
    offload_uploads: PositiveInt = Field(
        1, le=64, description="Ledgers that a broker uploads to object stores at the same time. Raise it when the store is slow."
    )
    offload_bytes_per_s: NonNegativeInt = Field(
        256 * MIB,
        description="Bytes per second that a broker reads from bookies to upload them, over all topics. 0: no limit. On a busy "
        "broker uploads pause by themselves.",
    )
    offload_retry_s: PositiveFloat = Field(
        5.0, description="Pause after a failed offload of a topic. It doubles with each further failure, up to 5 minutes."
    )
    offload_hold_s: NonNegativeFloat = Field(
        24 * 3600.0,
        description="Time for which retention waits for a ledger whose offload fails, from the moment when it was due by age, or "
        "else from its end. After it retention may delete the ledger without a copy. Longer: more disk on bookies while a bucket "
        "is unavailable or a ledger cannot be offloaded at all.",
    )


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """When closed ledgers of a topic are copied to an object store (`OffloadPolicy`, resolved).

    A ledger is due when `after_bytes` of newer ledgers are on the bookies, or `after_ms` after it was closed. -1: never for this
    reason. After another `keep_ms` the bookies' copies are deleted. Until then `reads_objects` says which copy is read.
    """

    url: str | None = None
    """Object store and prefix; None: nothing is offloaded."""
    after_bytes: int = -1
    after_ms: int = -1
    keep_ms: int = 4 * 3_600_000
    reads_objects: bool = False


@dataclass(frozen=True, slots=True)
class ManagedLedgerConfig:
    """The settings that may differ for each topic."""

    ensemble_size: int = 1
    write_quorum: int = 1
    ack_quorum: int = 1
    retention: Retention = field(default_factory=Retention)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
