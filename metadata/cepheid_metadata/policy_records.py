"""Policies as stored in records: a namespace's apply to its topics, a topic's own take precedence. None: not set here.

Field names and units are ours; the broker maps the names of the admin API. Names of choices (`action`, `when`,
`schema_compatibility`, `subscription_types`) are spelt as in the API.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cepheid_metadata.record import RecordPart

SchemaCompatibilityName = Literal[
    "ALWAYS_INCOMPATIBLE",
    "ALWAYS_COMPATIBLE",
    "BACKWARD",
    "FORWARD",
    "FULL",
    "BACKWARD_TRANSITIVE",
    "FORWARD_TRANSITIVE",
    "FULL_TRANSITIVE",
]
SubscriptionTypeName = Literal["Exclusive", "Shared", "Failover", "Key_Shared"]


class RetentionPolicy(RecordPart):
    """How much data is kept that every subscription has acknowledged: within the time *and* the size. -1: no limit."""

    time_limit_min: int = Field(ge=-1)
    size_limit_mb: int = Field(ge=-1)


class PersistencePolicy(RecordPart):
    ensemble_size: PositiveInt
    write_quorum: PositiveInt
    ack_quorum: PositiveInt
    max_mark_delete_rate_per_s: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum:
            sizes = f"E {self.ensemble_size}, Qw {self.write_quorum}, Qa {self.ack_quorum}"
            raise ValueError(f"{sizes}: E >= Qw >= Qa does not hold")
        return self


class AutoTopicCreation(RecordPart):
    """A namespace's own setting of whether a client creates a topic by using it."""

    allowed: bool
    topic_type: Literal["partitioned", "non-partitioned"] = "non-partitioned"
    partitions: PositiveInt | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.allowed and (self.topic_type == "partitioned") != (self.partitions is not None):
            raise ValueError("partitions must be set if created topics are partitioned, and only then")
        return self


class QuotaPolicy(RecordPart):
    """The action when a backlog exceeds `limit`: bytes, or seconds of age. -1: there is no limit."""

    limit: int = Field(ge=-1)
    action: Literal["producer_request_hold", "producer_exception", "consumer_backlog_eviction"]


class DelayedDeliveryPolicy(RecordPart):
    active: bool
    tick_ms: NonNegativeInt = Field(1000, description="How late a delivery may be. Stored for clients; ours is not later.")
    max_delay_ms: NonNegativeInt = Field(0, description="0: no limit.")


class InactiveTopicsPolicy(RecordPart):
    """Deletion of unused topics."""

    active: bool
    when: Literal["delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"]
    after_s: PositiveInt


class OffloadPolicy(RecordPart):
    """When closed ledgers are copied to an object store, and how long the bookies keep them after that.

    Each field that is None is taken from the level above (topic, namespace, broker). Without a `url` nothing is offloaded.
    """

    url: str | None = Field(
        None,
        description="Object store and prefix: s3://bucket/prefix?region=eu-west-1, gs://, abfs://, file:///path. No secrets.",
    )
    after_bytes: int | None = Field(None, ge=-1, description="Bytes of the newest ledgers that are not offloaded. -1: not by size.")
    after_s: int | None = Field(None, ge=-1, description="Age of a closed ledger from which it is offloaded. -1: not by age.")
    keep_s: NonNegativeInt | None = Field(None, description="Time for which bookies keep a ledger after it was offloaded.")
    read_from: Literal["bookies", "objects"] | None = Field(None, description="Which copy is read while there are both.")


class TopicPolicyFields(RecordPart):
    """Policies that a namespace and a topic can both set. A number of 0: no limit, off."""

    retention: RetentionPolicy | None = None
    persistence: PersistencePolicy | None = None
    message_ttl_s: NonNegativeInt | None = None
    size_quota: QuotaPolicy | None = None
    age_quota: QuotaPolicy | None = None
    deduplication: bool | None = None
    dedup_snapshot_s: PositiveInt | None = None
    max_unacked_per_consumer: NonNegativeInt | None = None
    max_unacked_per_subscription: NonNegativeInt | None = None
    max_producers: NonNegativeInt | None = None
    max_consumers: NonNegativeInt | None = None
    max_consumers_per_subscription: NonNegativeInt | None = None
    max_subscriptions: NonNegativeInt | None = None
    subscription_types: tuple[SubscriptionTypeName, ...] | None = None
    auto_subscription_creation: bool | None = None
    delayed_delivery: DelayedDeliveryPolicy | None = None
    schema_compatibility: SchemaCompatibilityName | None = None
    schema_validation_enforced: bool | None = None
    inactive_topics: InactiveTopicsPolicy | None = None
    offload: OffloadPolicy | None = None


class OtherQuotaLimits(RecordPart):
    """Limits that a client sent with a quota of the other type. They are returned unchanged, and never enforced."""

    size_quota_time_s: int | None = Field(None, ge=-1, description="Time limit that was sent with `size_quota`.")
    age_quota_size_bytes: int | None = Field(None, ge=-1, description="Size limit that was sent with `age_quota`.")


OTHER_QUOTA_LIMITS = tuple(OtherQuotaLimits.model_fields)
TOPIC_POLICIES = tuple(TopicPolicyFields.model_fields)
