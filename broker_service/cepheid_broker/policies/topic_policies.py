"""The policies of one topic: its own over its namespace's over the broker's settings, resolved into plain values.

    topic record ──┐  resolve
    namespace ─────┼──► TopicPolicies ──► Topic.policies, replaced as a whole when one of the records changes
    settings ──────┘  (policy_resolution.py)               (policy_follower.py)

Code that needs a policy reads `topic.policies` at that moment and keeps no copy, so a change applies at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from cepheid_managed_ledger import OffloadConfig, Retention


class QuotaAction(enum.Enum):
    """Action on a topic whose backlog is above its quota; values are the wire names."""

    HOLD = "producer_request_hold"
    """Producers wait; new ones are refused with ProducerBlockedQuotaExceededError."""
    REFUSE = "producer_exception"
    """Producers are closed; new ones are refused with ProducerBlockedQuotaExceededException."""
    EVICT = "consumer_backlog_eviction"
    """Subscriptions skip their oldest entries."""


@dataclass(frozen=True, slots=True)
class BacklogQuota:
    """A backlog quota. `limit`: bytes of backlog, or seconds of age of the oldest unacknowledged message."""

    limit: int
    action: QuotaAction


class SchemaCompatibility(enum.Enum):
    """Schema compatibility strategy; values are the names of the admin API."""

    UNDEFINED = "UNDEFINED"
    ALWAYS_INCOMPATIBLE = "ALWAYS_INCOMPATIBLE"
    ALWAYS_COMPATIBLE = "ALWAYS_COMPATIBLE"
    BACKWARD = "BACKWARD"
    FORWARD = "FORWARD"
    FULL = "FULL"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"


class InactiveDeletion(enum.Enum):
    """Which topics count as inactive; values are the names of the admin API."""

    NO_SUBSCRIPTIONS = "delete_when_no_subscriptions"
    CAUGHT_UP = "delete_when_subscriptions_caught_up"


@dataclass(frozen=True, slots=True)
class InactiveTopics:
    """Delete a topic that has had no producers and consumers for this long."""

    when: InactiveDeletion
    after_s: int


@dataclass(frozen=True, slots=True)
class TopicPolicies:
    """The policies in force for a topic. 0 of a maximum or a duration: no limit, off."""

    retention: Retention = field(default_factory=Retention)
    message_ttl_s: int = 0
    size_quota: BacklogQuota | None = None
    age_quota: BacklogQuota | None = None
    deduplication: bool = False
    dedup_snapshot_entries: int = 1000
    dedup_snapshot_s: int = 120
    ensemble_size: int = 1
    write_quorum: int = 1
    ack_quorum: int = 1
    max_unacked_per_consumer: int = 50_000
    max_unacked_per_subscription: int = 200_000
    max_producers: int = 0
    max_consumers: int = 0
    max_consumers_per_subscription: int = 0
    max_subscriptions: int = 0
    subscription_types: frozenset[str] = frozenset()
    """Allowed names of CommandSubscribe.SubType; empty: all."""
    auto_subscription_creation: bool = True
    delayed_delivery: bool = True
    """Off: delivery times are ignored, and messages are sent at once."""
    max_delay_ms: int = 0
    """Longest delay; messages that ask for a longer one are refused."""
    schema_compatibility: SchemaCompatibility = SchemaCompatibility.FULL
    schema_auto_update: bool = True
    """Off: producers cannot add versions, only the admin API can."""
    schema_validation_enforced: bool = False
    """On: producers without a schema are refused on topics that have one."""
    encryption_required: bool = False
    inactive_topics: InactiveTopics | None = None
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    max_message_bytes: int = 0
    """Limit of the topic; the broker's own limit applies as well."""
