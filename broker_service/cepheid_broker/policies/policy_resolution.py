"""Resolves policies: the topic's record over its namespace's over the broker's settings, each policy by itself.

A policy is taken whole: a topic that sets retention sets both of its limits. Quotas of size and of age are two policies. Only the
offload policy is taken field by field, as in Pulsar: a topic can have its own age and the namespace's object store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cepheid_broker.policies.topic_policies import (
    BacklogQuota,
    InactiveDeletion,
    InactiveTopics,
    QuotaAction,
    SchemaCompatibility,
    TopicPolicies,
)
from cepheid_broker.settings import BrokerSettings, TieredSettings
from cepheid_managed_ledger import ManagedLedgerConfig, OffloadConfig, Retention
from cepheid_metadata import (
    TOPIC_POLICIES,
    DelayedDeliveryPolicy,
    InactiveTopicsPolicy,
    NamespaceRecord,
    OffloadPolicy,
    PersistencePolicy,
    QuotaPolicy,
    RetentionPolicy,
    TopicRecord,
)


def resolve(topic: TopicRecord | None, namespace: NamespaceRecord, broker: TopicPolicies) -> TopicPolicies:
    """Return a topic's policies; without `topic`, those of topics in the namespace that set none themselves."""
    changes: dict[str, Any] = {}
    for name in TOPIC_POLICIES:
        if name == "offload":
            continue
        value = getattr(topic, name, None)
        if value is None:
            value = getattr(namespace, name)
        if value is not None:
            changes.update(_VALUES[name](value) if name in _VALUES else {name: value})
    if topic is not None and topic.max_message_bytes is not None:
        changes["max_message_bytes"] = topic.max_message_bytes
    changes["offload"] = _offload(getattr(topic, "offload", None), _offload(namespace.offload, broker.offload))
    for name in ("schema_auto_update", "encryption_required"):
        if (value := getattr(namespace, name)) is not None:
            changes[name] = value
    return replace(broker, **changes)


def broker_policies(settings: BrokerSettings, ledgers: ManagedLedgerConfig) -> TopicPolicies:
    """Return the policies where neither topic nor namespace set any."""
    defaults = settings.policies
    action = QuotaAction(defaults.backlog_quota_action)
    inactive = None
    if defaults.delete_inactive_topics:
        inactive = InactiveTopics(InactiveDeletion(defaults.inactive_topics_when), defaults.inactive_topics_after_s)
    return TopicPolicies(
        retention=_retention(defaults.retention_time_min, defaults.retention_size_mb),
        message_ttl_s=defaults.message_ttl_s,
        size_quota=_quota(defaults.backlog_quota_bytes, action),
        age_quota=_quota(defaults.backlog_quota_age_s, action),
        deduplication=defaults.deduplication,
        dedup_snapshot_entries=defaults.dedup_snapshot_entries,
        dedup_snapshot_s=defaults.dedup_snapshot_s,
        ensemble_size=ledgers.ensemble_size,
        write_quorum=ledgers.write_quorum,
        ack_quorum=ledgers.ack_quorum,
        max_unacked_per_consumer=settings.dispatch.max_unacked_messages,
        max_unacked_per_subscription=defaults.max_unacked_per_subscription,
        max_producers=defaults.max_producers,
        max_consumers=defaults.max_consumers,
        max_consumers_per_subscription=defaults.max_consumers_per_subscription,
        max_subscriptions=defaults.max_subscriptions,
        subscription_types=frozenset(defaults.subscription_types),
        auto_subscription_creation=defaults.auto_subscription_creation,
        delayed_delivery=defaults.delayed_delivery,
        schema_compatibility=SchemaCompatibility(defaults.schema_compatibility),
        schema_auto_update=defaults.schema_auto_update,
        schema_validation_enforced=defaults.schema_validation_enforced,
        encryption_required=defaults.encryption_required,
        inactive_topics=inactive,
        offload=_offload_of(settings.tiered),
    )


def ledger_config(policies: TopicPolicies) -> ManagedLedgerConfig:
    return ManagedLedgerConfig(
        policies.ensemble_size, policies.write_quorum, policies.ack_quorum, policies.retention, policies.offload
    )


def _retention(time_min: int, size_mb: int) -> Retention:
    return Retention(time_min if time_min < 0 else time_min * 60_000, size_mb if size_mb < 0 else size_mb << 20)


def _quota(limit: int, action: QuotaAction) -> BacklogQuota | None:
    return None if limit < 0 else BacklogQuota(limit, action)


def _offload_of(tiered: TieredSettings) -> OffloadConfig:
    return OffloadConfig(
        url=tiered.url,
        after_bytes=tiered.after_bytes,
        after_ms=-1 if tiered.after_s < 0 else tiered.after_s * 1000,
        keep_ms=tiered.keep_s * 1000,
        reads_objects=tiered.read_from == "objects",
    )


def _offload(policy: OffloadPolicy | None, above: OffloadConfig) -> OffloadConfig:
    if policy is None:
        return above
    return OffloadConfig(
        url=above.url if policy.url is None else policy.url,
        after_bytes=above.after_bytes if policy.after_bytes is None else policy.after_bytes,
        after_ms=above.after_ms if policy.after_s is None else policy.after_s if policy.after_s < 0 else policy.after_s * 1000,
        keep_ms=above.keep_ms if policy.keep_s is None else policy.keep_s * 1000,
        reads_objects=above.reads_objects if policy.read_from is None else policy.read_from == "objects",
    )


def _retention_of(policy: RetentionPolicy) -> dict[str, Any]:
    return {"retention": _retention(policy.time_limit_min, policy.size_limit_mb)}


def _persistence_of(policy: PersistencePolicy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in ("ensemble_size", "write_quorum", "ack_quorum")}


def _quota_of(name: str) -> Callable[[QuotaPolicy], dict[str, Any]]:
    return lambda policy: {name: _quota(policy.limit, QuotaAction(policy.action))}


def _delayed_delivery_of(policy: DelayedDeliveryPolicy) -> dict[str, Any]:
    return {"delayed_delivery": policy.active, "max_delay_ms": policy.max_delay_ms}


def _inactive_topics_of(policy: InactiveTopicsPolicy) -> dict[str, Any]:
    found = InactiveTopics(InactiveDeletion(policy.when), policy.after_s)
    return {"inactive_topics": found if policy.active else None}


_VALUES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "retention": _retention_of,
    "persistence": _persistence_of,
    "size_quota": _quota_of("size_quota"),
    "age_quota": _quota_of("age_quota"),
    "subscription_types": lambda names: {"subscription_types": frozenset(names)},
    "delayed_delivery": _delayed_delivery_of,
    "schema_compatibility": lambda name: {"schema_compatibility": SchemaCompatibility(name)},
    "inactive_topics": _inactive_topics_of,
}
"""For policies whose record differs in shape from the plain value."""
