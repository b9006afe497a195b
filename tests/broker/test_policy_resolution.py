"""Topic over namespace over broker, each policy by itself: against a model that knows nothing of the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_broker.policies.policy_resolution import broker_policies, ledger_config, resolve
from cepheid_broker.policies.topic_policies import (
    BacklogQuota,
    InactiveDeletion,
    InactiveTopics,
    QuotaAction,
    SchemaCompatibility,
    TopicPolicies,
)
from cepheid_broker.settings import BrokerSettings, DispatchSettings, PolicySettings, TieredSettings
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

NUMBERS = st.integers(0, 2**31 - 1)
QUOTAS = st.builds(QuotaPolicy, limit=st.integers(-1, 2**60), action=st.sampled_from([action.value for action in QuotaAction]))
TYPES = ("Exclusive", "Shared", "Failover", "Key_Shared")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "retention": st.builds(RetentionPolicy, time_limit_min=st.integers(-1, 2**31 - 1), size_limit_mb=st.integers(-1, 2**40)),
    "persistence": st.integers(1, 9).map(lambda n: PersistencePolicy(ensemble_size=n, write_quorum=n, ack_quorum=(n + 1) // 2)),
    "message_ttl_s": NUMBERS,
    "size_quota": QUOTAS,
    "age_quota": QUOTAS,
    "deduplication": st.booleans(),
    "dedup_snapshot_s": st.integers(1, 2**31 - 1),
    "max_unacked_per_consumer": NUMBERS,
    "max_unacked_per_subscription": NUMBERS,
    "max_producers": NUMBERS,
    "max_consumers": NUMBERS,
    "max_consumers_per_subscription": NUMBERS,
    "max_subscriptions": NUMBERS,
    "subscription_types": st.lists(st.sampled_from(TYPES), unique=True).map(tuple),
    "auto_subscription_creation": st.booleans(),
    "delayed_delivery": st.builds(DelayedDeliveryPolicy, active=st.booleans(), max_delay_ms=NUMBERS),
    "schema_compatibility": st.sampled_from([found.value for found in SchemaCompatibility if found.value != "UNDEFINED"]),
    "schema_validation_enforced": st.booleans(),
    "inactive_topics": st.builds(
        InactiveTopicsPolicy,
        active=st.booleans(),
        when=st.sampled_from([found.value for found in InactiveDeletion]),
        after_s=st.integers(1, 2**31 - 1),
    ),
    "offload": st.builds(
        OffloadPolicy,
        url=st.none() | st.sampled_from(["s3://archive", "file:///archive"]),
        after_bytes=st.none() | NUMBERS | st.just(-1),
        after_s=st.none() | NUMBERS | st.just(-1),
        keep_s=st.none() | NUMBERS,
        read_from=st.sampled_from([None, "bookies", "objects"]),
    ),
}
LEVEL = st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()})


def in_force(name: str, value: Any) -> dict[str, Any]:
    """What a policy of a record means, written down once more."""
    match value:
        case RetentionPolicy(time_limit_min=minutes, size_limit_mb=mib):
            return {"retention": Retention(-1 if minutes == -1 else minutes * 60_000, -1 if mib == -1 else mib * 1024 * 1024)}
        case PersistencePolicy(ensemble_size=ensemble, write_quorum=write, ack_quorum=ack):
            return {"ensemble_size": ensemble, "write_quorum": write, "ack_quorum": ack}
        case QuotaPolicy(limit=limit, action=action):
            return {name: None if limit == -1 else BacklogQuota(limit, QuotaAction(action))}
        case DelayedDeliveryPolicy(active=active, max_delay_ms=max_delay_ms):
            return {"delayed_delivery": active, "max_delay_ms": max_delay_ms}
        case InactiveTopicsPolicy(active=active, when=when, after_s=after_s):
            return {"inactive_topics": InactiveTopics(InactiveDeletion(when), after_s) if active else None}
        case tuple():
            return {name: frozenset(value)}
        case str():
            return {name: SchemaCompatibility(value)}
        case _:
            return {name: value}


def offload_in_force(topic: OffloadPolicy | None, namespace: OffloadPolicy | None, broker: OffloadConfig) -> OffloadConfig:
    """The one policy that is taken field by field."""

    def first(name: str) -> Any:
        return next((value for level in (topic, namespace) if (value := getattr(level, name, None)) is not None), None)

    changes: dict[str, Any] = {name: value for name in ("url", "after_bytes") if (value := first(name)) is not None}
    if (after_s := first("after_s")) is not None:
        changes["after_ms"] = -1 if after_s == -1 else after_s * 1000
    if (keep_s := first("keep_s")) is not None:
        changes["keep_ms"] = keep_s * 1000
    if (read_from := first("read_from")) is not None:
        changes["reads_objects"] = read_from == "objects"
    return replace(broker, **changes)


def test_every_policy_is_drawn_here() -> None:
    assert tuple(VALUES) == TOPIC_POLICIES


@pytest.mark.slow
@given(LEVEL, LEVEL, st.none() | st.integers(1, 2**31 - 1), st.none() | st.booleans(), st.none() | st.booleans())
def test_the_first_level_that_says_something_decides(
    topic: dict[str, Any], namespace: dict[str, Any], size: int | None, update: bool | None, encrypted: bool | None
) -> None:
    broker = TopicPolicies(
        message_ttl_s=5,
        max_producers=3,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        offload=OffloadConfig("gs://a", 7, 8, 9, True),
    )
    expected: dict[str, Any] = {name: getattr(broker, name) for name in TopicPolicies.__slots__}
    expected["offload"] = offload_in_force(topic["offload"], namespace["offload"], broker.offload)
    for name in VALUES:
        value = namespace[name] if topic[name] is None else topic[name]
        if value is not None and name != "offload":
            expected.update(in_force(name, value))
    for name, only_there in (("max_message_bytes", size), ("schema_auto_update", update), ("encryption_required", encrypted)):
        expected[name] = expected[name] if only_there is None else only_there
    record = NamespaceRecord(**namespace, schema_auto_update=update, encryption_required=encrypted)
    assert resolve(TopicRecord(**topic, max_message_bytes=size, created_at_ms=1), record, broker) == TopicPolicies(**expected)


@given(LEVEL)
def test_without_a_topic_the_namespace_decides(namespace: dict[str, Any]) -> None:
    record, broker = NamespaceRecord(**namespace), TopicPolicies(max_consumers=3)
    assert resolve(None, record, broker) == resolve(TopicRecord(created_at_ms=1), record, broker)
    assert resolve(TopicRecord(**namespace, created_at_ms=1), NamespaceRecord(), broker) == resolve(None, record, broker)


def test_where_nobody_says_anything_the_settings_hold() -> None:
    settings = BrokerSettings(
        dispatch=DispatchSettings(max_unacked_messages=17),
        policies=PolicySettings(
            retention_time_min=2,
            retention_size_mb=-1,
            backlog_quota_age_s=9,
            backlog_quota_action="producer_exception",
            subscription_types=("Failover",),
            delete_inactive_topics=True,
            inactive_topics_after_s=7,
        ),
        tiered=TieredSettings(url="s3://archive/", after_bytes=5, after_s=6, keep_s=7, read_from="objects"),
    )
    found = resolve(None, NamespaceRecord(), broker_policies(settings, ManagedLedgerConfig(3, 3, 2)))
    assert found == TopicPolicies(
        retention=Retention(120_000, -1),
        age_quota=BacklogQuota(9, QuotaAction.REFUSE),
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        max_unacked_per_consumer=17,
        subscription_types=frozenset({"Failover"}),
        inactive_topics=InactiveTopics(InactiveDeletion.NO_SUBSCRIPTIONS, 7),
        offload=OffloadConfig("s3://archive", 5, 6000, 7000, True),
    )
    assert ledger_config(found) == ManagedLedgerConfig(3, 3, 2, Retention(120_000, -1), found.offload)


def test_the_settings_defaults_are_those_of_the_values() -> None:
    assert broker_policies(BrokerSettings(), ManagedLedgerConfig()) == TopicPolicies()


@pytest.mark.parametrize("limit", [0, 1])
def test_a_quota_of_nothing_is_a_quota(limit: int) -> None:
    record = NamespaceRecord(size_quota=QuotaPolicy(limit=limit, action="producer_exception"))
    assert resolve(None, record, TopicPolicies()).size_quota == BacklogQuota(limit, QuotaAction.REFUSE)
