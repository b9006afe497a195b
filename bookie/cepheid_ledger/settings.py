"""Settings of the ledger client, documented at the field."""

from __future__ import annotations

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt

MIB = 1 << 20


class LedgerSettings(BaseModel, frozen=True, extra="forbid"):
    """One per process: brokers, recovery workers and readers use the same."""

    add_timeout_s: PositiveFloat = Field(
        5.0,
        description="A bookie that has entries of a ledger to answer and answers none of them for this long has failed "
        "for that ledger. Raise it for disks that stall longer.",
    )
    refusal_retry_s: PositiveFloat = Field(
        10.0,
        description="How long entries are re-sent to a bookie that is overloaded or out of space before it counts as failed.",
    )
    refusal_delay_s: PositiveFloat = Field(
        0.02, description="First pause before re-sending refused entries; doubles at each refusal, up to 25 times this."
    )
    channel_window_bytes: PositiveInt = Field(
        256 * MIB,
        description="Bytes that may wait for one bookie, 512 per request included. When it is full, ledgers that can do without "
        "this bookie go on without it; the others are bounded by what publishers may have unanswered.",
    )
    reconnect_delay_s: PositiveFloat = Field(
        0.1, description="First pause before a broken stream to a bookie is opened again; doubles up to `reconnect_delay_max_s`."
    )
    reconnect_delay_max_s: PositiveFloat = Field(5.0, description="Longest pause between attempts to open a stream again.")
    read_timeout_s: PositiveFloat = Field(
        5.0, description="How long one bookie may take to answer a read; after that the next replica is asked."
    )
    speculative_read_s: PositiveFloat = Field(
        1.0, description="A replica that has not answered for this long gets company: the next one is asked in addition."
    )
    long_poll_s: float = Field(
        30.0, gt=0, le=60, description="How long a reader of an open ledger waits at a bookie for more before it asks anew."
    )
    long_poll_pause_s: PositiveFloat = Field(
        1.0, description="A bookie that lets no reader wait (fenced, in limbo, full, down) is asked at most so often."
    )
    recovery_timeout_s: PositiveFloat = Field(
        5.0, description="How long recovery waits for a bookie before its answer counts as unknown."
    )
    recoveries: PositiveInt = Field(
        256, description="Ledgers recovered at once. More would time out on each other when a broker reopens all its topics."
    )
    recovery_batch_entries: PositiveInt = Field(
        10_000, description="Entries that recovery asks for at once; a batch is bounded by 1 MB as well."
    )
    explicit_lac_interval_s: float = Field(
        1.0,
        ge=0,
        description="A writer to which nothing was appended for this long tells its bookies what is confirmed, for readers past "
        "the broker: else they would see its last entry with the next one only. 0: never.",
    )
    idle_check_s: float = Field(
        30.0,
        ge=0,
        description="A writer that was idle for longer looks up whether its ledger is still its own, beside the next append, "
        "which is confirmed after that. Not below the session timeout of the metadata store. 0: never.",
    )
    idle_check_timeout_s: PositiveFloat = Field(
        1.0, description="How long that look-up may take. Metadata that is away must not stop topics: then bookies' fences decide."
    )
    quarantine_s: float = Field(
        10.0,
        ge=0,
        description="A bookie that failed is not chosen for this long, unless there are too few others. Doubles when it fails "
        "again soon after, up to `quarantine_max_s`. Ends when it registers anew.",
    )
    quarantine_max_s: float = Field(60.0, ge=0, description="Longest quarantine of a bookie that fails again and again.")
    quarantined_spare_after_s: float = Field(
        10.0,
        ge=0,
        description="A ledger that lacked copies for this long, as there was no other bookie, takes one in quarantine too. At "
        "once, if it cannot go on without.",
    )
    ensemble_changes: PositiveInt = Field(
        64, description="Ledgers whose bookies are being replaced in metadata at once; the others wait in the order of asking."
    )
    ensemble_change_timeout_s: PositiveFloat = Field(
        30.0,
        description="How long a ledger that has fewer than Qa bookies left waits for metadata to take others; then it fails. "
        "With Qa bookies it goes on without, however long that takes.",
    )
    ensemble_retry_s: PositiveFloat = Field(
        1.0,
        description="Pause before a spare bookie is looked for again for an under-replicated ledger; up to 10 times this while "
        "there is none.",
    )
    deletion_grace_s: float = Field(
        3600.0,
        ge=0,
        description="How long a deleted ledger can be brought back; its entries stay on the bookies until then. 0: not at all.",
    )
    metadata_timeout_s: PositiveFloat = Field(
        10.0, description="How long a change of ledger metadata may take, conflicts and re-reads included."
    )
    metadata_retry_s: PositiveFloat = Field(
        0.05, description="Pause before a metadata change of unknown outcome is looked at again."
    )
