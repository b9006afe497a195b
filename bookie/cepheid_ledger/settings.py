"""Settings of the ledger client, with bounds in the type and the meaning in the description."""

from __future__ import annotations

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt

MIB = 1 << 20

_TRANSPORT_FACTOR = 2.0
"""How much longer the transport waits than the ledger client. The client decides first, for each ledger and in view of the other
replicas. The transport only ends what no caller waits for any more, so its limits follow those of the client and never cap them."""


class LedgerSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of a process for writing, reading and recovering ledgers."""

    add_timeout_s: PositiveFloat = Field(
        5.0,
        description="Time after which a bookie that has entries of a ledger to answer, and answers none of them, has failed for "
        "that ledger. Raise it for disks that stall longer. A bookie whose process does not react at all fails after about 20 s "
        "in any case.",
    )
    refusal_retry_s: PositiveFloat = Field(
        10.0,
        description="Time for which entries are sent again to a bookie that is overloaded or out of disk space, before it has "
        "failed for the ledger.",
    )
    refusal_delay_s: PositiveFloat = Field(
        0.02, description="First pause before refused entries are sent again. It doubles at each refusal, up to 25 times this."
    )
    channel_window_bytes: PositiveInt = Field(
        256 * MIB,
        description="Bytes that may wait for one bookie, plus 512 for each request. When it is full, ledgers that have enough "
        "other bookies continue without this one. The others wait, bounded by what their publishers may have unanswered.",
    )
    reconnect_delay_s: PositiveFloat = Field(
        0.1,
        description="First pause before a broken stream to a bookie is opened again. It doubles up to "
        "`ledger.reconnect_delay_max_s`.",
    )
    reconnect_delay_max_s: PositiveFloat = Field(5.0, description="Longest pause between two attempts to open a stream again.")
    read_timeout_s: PositiveFloat = Field(
        5.0, description="Time that one bookie may take to answer a read. After it the next replica is asked."
    )
    speculative_read_s: PositiveFloat = Field(
        1.0,
        description="Time after which the next replica is asked in addition to one that has not answered. Shorter: shorter waits "
        "when a bookie is slow, and more reads.",
    )
    long_poll_s: float = Field(
        30.0,
        gt=0,
        le=60,
        description="Time for which a reader of an open ledger waits at a bookie for further entries, before it asks again.",
    )
    long_poll_pause_s: PositiveFloat = Field(
        1.0,
        description="Shortest interval between two requests to a bookie at which no reader can wait: it is fenced, in limbo, full "
        "or down.",
    )
    recovery_timeout_s: PositiveFloat = Field(
        5.0, description="Time for which a recovery waits for a bookie. After it the bookie's answer counts as unknown."
    )
    recoveries: PositiveInt = Field(
        256,
        description="Ledgers that are recovered at once. With more, they time out on each other when a broker reopens all its "
        "topics.",
    )
    recovery_batch_entries: PositiveInt = Field(
        10_000, description="Entries that a recovery reads with one request. A batch has 1 MiB at most as well."
    )
    explicit_lac_interval_s: float = Field(
        1.0,
        ge=0,
        description="Idle time after which a writer tells its bookies which entry is confirmed. Without it readers past the "
        "brokers (Spark, `cepheid read`) would see the last entry only when the next one is written. 0: never.",
    )
    idle_check_s: float = Field(
        30.0,
        ge=0,
        description="Idle time after which a writer checks in metadata, beside its next append, that the ledger is still its own; "
        "the append is confirmed after that. Keep it at least as long as the metadata session timeout. 0: never.",
    )
    idle_check_timeout_s: PositiveFloat = Field(
        1.0,
        description="Time that the check of `ledger.idle_check_s` may take. After it the append continues without the check, so "
        "that an outage of metadata does not stop topics.",
    )
    quarantine_s: float = Field(
        10.0,
        ge=0,
        description="Time for which a bookie that failed is not chosen for a ledger, unless too few others are left. It doubles "
        "when the bookie fails again soon, up to `ledger.quarantine_max_s`, and ends when the bookie registers again.",
    )
    quarantine_max_s: float = Field(60.0, ge=0, description="Longest quarantine of a bookie that fails repeatedly.")
    quarantined_spare_after_s: float = Field(
        10.0,
        ge=0,
        description="Time for which a ledger may lack copies because no other bookie is left, before it takes one in quarantine. "
        "A ledger that cannot continue otherwise takes it at once.",
    )
    strict_racks: bool = Field(
        False,
        description="Whether a ledger is refused rather than given two copies of an entry in one rack. Bookies without a `rack` "
        "get no new copies then. While too few racks have bookies, topics open without a ledger, and ledgers lack copies.",
    )
    unregistered_bookie_s: PositiveFloat = Field(
        10.0,
        description="Time after which a bookie that is not registered any more is replaced in open ledgers, idle ones included, if "
        "there is a spare bookie. It counts only while the metadata store answers. Ledgers without a spare are looked at again "
        "after the same time.",
    )
    ensemble_changes: PositiveInt = Field(
        64, description="Ledgers whose bookies are replaced in metadata at once. The others wait in the order of asking."
    )
    ensemble_change_timeout_s: PositiveFloat = Field(
        30.0,
        description="Time for which a ledger with fewer than Qa working bookies waits for metadata to replace one, before it "
        "fails. With Qa bookies it continues without a replacement.",
    )
    ensemble_retry_s: PositiveFloat = Field(
        1.0,
        description="First pause before another search for a bookie that takes over the copies that a ledger lacks. It grows up "
        "to 10 times this while there is none.",
    )
    deletion_grace_s: float = Field(
        3600.0,
        ge=0,
        description="Time for which a deleted ledger can be restored with `cepheid ledgers undelete`. Its entries stay on the "
        "bookies until then. 0: deletion is final.",
    )
    metadata_timeout_s: PositiveFloat = Field(
        10.0, description="Time that one change of a ledger's metadata may take, including conflicts and repeated reads."
    )
    metadata_retry_s: PositiveFloat = Field(
        0.05, description="Pause before a change of a ledger's metadata whose outcome is unknown is looked up."
    )

    @property
    def silent_stream_s(self) -> float:
        """How long a stream of adds may be without any answer before the transport breaks it."""
        return _TRANSPORT_FACTOR * self.add_timeout_s

    @property
    def silent_call_s(self) -> float:
        """How long the transport waits for the answer of a LAC request, or for one chunk of a read."""
        return _TRANSPORT_FACTOR * max(self.read_timeout_s, self.recovery_timeout_s, self.speculative_read_s)
