"""Every policy at both levels: what is set is read back, shown in the whole object, and in force in open topics within a second."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from cepheid_broker.admin.backlog_quotas import OTHER_LIMITS_SINCE
from cepheid_broker.admin.policy_table import POLICIES
from cepheid_broker.admin.unset_policies import OF_NAMESPACES, OF_TOPICS, UnsetPolicy
from cepheid_broker.policies.topic_policies import (
    BacklogQuota,
    InactiveDeletion,
    InactiveTopics,
    QuotaAction,
    SchemaCompatibility,
    TopicPolicies,
)
from cepheid_managed_ledger import OffloadConfig, Retention
from cepheid_metadata.upgrade import StorageFormat, storage_format_record
from cepheid_tiered import requirements
from cepheid_wire import TopicName
from tests.admin.admin_world import AdminWorld
from tests.support import wait_until

NAMESPACE = "/admin/v2/namespaces/public/policies"
TOPIC = "/admin/v2/persistent/public/policies/plain"
SPLIT = "/admin/v2/persistent/public/policies/split"
ONE_BOOKIE = {"bookkeeperEnsemble": 1, "bookkeeperWriteQuorum": 1, "bookkeeperAckQuorum": 1}
SIZE_QUOTA = {"limitSize": 1 << 20, "policy": "producer_exception"}
AGE_QUOTA = {"limitTime": 60, "policy": "consumer_backlog_eviction"}


OFFLOAD_NUMBERS = {
    "managedLedgerOffloadThresholdInBytes": 1 << 30,
    "managedLedgerOffloadDeletionLagInMillis": 3_600_000,
}
S3_ARCHIVE = {"managedLedgerOffloadDriver": "aws-s3", "managedLedgerOffloadBucket": "archive"}
BAD_OFFLOADS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"managedLedgerOffloadDriver": "floppy"}, 412),
    ({"managedLedgerOffloadDriver": "aliyun-oss"}, 412),  # Pulsar has it
    ({"managedLedgerOffloadDriver": "filesystem"}, 412),  # of a bucket
    ({"managedLedgerOffloadBucket": ""}, 412),
    ({"managedLedgerOffloadBucket": "Ar chive"}, 412),
    ({"managedLedgerOffloadBucket": "archive/../other"}, 412),
    ({"s3ManagedLedgerOffloadBucket": "another"}, 412),
    ({"gcsManagedLedgerOffloadBucket": "archive"}, 412),
    ({"managedLedgerOffloadServiceEndpoint": "minio:9000"}, 412),
    ({"managedLedgerOffloadServiceEndpoint": "http://user:word@minio:9000"}, 412),
    ({"managedLedgerOffloadThresholdInBytes": -2}, 412),
    ({"managedLedgerOffloadThresholdInBytes": "much"}, 400),
    ({"managedLedgerOffloadThresholdInSeconds": -2}, 412),
    ({"managedLedgerOffloadDeletionLagInMillis": -1}, 412),
    ({"managedLedgerOffloadDeletionLagInMillis": 1500}, 412),
    ({"managedLedgerOffloadedReadPriority": "newest-first"}, 412),
    ({"managedLedgerExtraConfigurations": {"speed": "high"}}, 412),
    ({"s3ManagedLedgerOffloadCredentialId": "AKIA"}, 412),
    ({"s3ManagedLedgerOffloadCredentialSecret": "hush"}, 412),
    ({"s3ManagedLedgerOffloadRole": "arn:aws:iam::1:role/r"}, 412),
    ({"gcsManagedLedgerOffloadServiceAccountKeyFile": "/key.json"}, 412),
    ({"managedLedgerOffloadMaxThreads": 7}, 501),
    ({"fileSystemProfilePath": "conf/hdfs.xml"}, 501),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """`holds`: fields of TopicPolicies with which the value is in force."""

    namespace: str | None = None
    topic: str | None = None
    member: str | None = None
    body: Any
    answer: Any = None
    holds: dict[str, Any] = field(default_factory=dict)
    applied: Any = None
    set_by: str = "POST"
    unset: Any = None
    topic_unset: Any = None
    bad: tuple[tuple[Any, int], ...] = ()

    def __str__(self) -> str:
        return str(self.topic or self.namespace)


def limit(namespace: str, topic: str, member: str, holds: str) -> Row:
    bad = ((-1, 412), ("many", 400), (2**31, 400), (None, 400))
    return Row(namespace=namespace, topic=topic, member=member, body=7, holds={holds: 7}, bad=bad)


ROWS = (
    Row(
        namespace="retention",
        topic="retention",
        member="retention_policies",
        body={"retentionTimeInMinutes": 10, "retentionSizeInMB": -1},
        holds={"retention": Retention(600_000, -1)},
        bad=(
            ({"retentionTimeInMinutes": 5}, 400),
            ({"retentionTimeInMinutes": 5, "retentionSizeInMB": 0}, 400),
            ({"retentionTimeInMinutes": -2, "retentionSizeInMB": 1}, 400),
            (5, 400),
        ),
    ),
    Row(
        namespace="persistence",
        topic="persistence",
        member="persistence",
        body={**ONE_BOOKIE, "managedLedgerMaxMarkDeleteRate": 0.5},
        applied={**ONE_BOOKIE, "managedLedgerMaxMarkDeleteRate": 0.0},
        holds={"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1},
        bad=(
            ({"bookkeeperEnsemble": 1, "bookkeeperWriteQuorum": 2, "bookkeeperAckQuorum": 1}, 400),
            ({"bookkeeperEnsemble": 0}, 400),
            ({}, 400),  # 2, 2, 2, and there is one bookie
            ({"bookkeeperEnsemble": 2, "bookkeeperWriteQuorum": 1, "bookkeeperAckQuorum": 1}, 400),  # striped over too many
            (
                {
                    "bookkeeperEnsemble": 1,
                    "bookkeeperWriteQuorum": 1,
                    "bookkeeperAckQuorum": 1,
                    "managedLedgerStorageClassName": "x",
                },
                501,
            ),
        ),
    ),
    Row(
        namespace="deduplication",
        topic="deduplicationEnabled",
        member="deduplicationEnabled",
        body=True,
        holds={"deduplication": True},
        bad=(("perhaps", 400), (None, 400)),
    ),
    Row(
        namespace="deduplicationSnapshotInterval",
        topic="deduplicationSnapshotInterval",
        member="deduplicationSnapshotIntervalSeconds",
        body=30,
        holds={"dedup_snapshot_s": 30},
        bad=((0, 412), (-1, 412)),
    ),
    Row(
        namespace="autoTopicCreation",
        member="autoTopicCreationOverride",
        body={"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 3},
        bad=(
            ({"allowAutoTopicCreation": True, "topicType": "square"}, 412),
            ({"allowAutoTopicCreation": True, "topicType": "partitioned"}, 412),
            ({"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 10_001}, 406),
            ({}, 400),
        ),
    ),
    Row(
        namespace="autoSubscriptionCreation",
        topic="autoSubscriptionCreation",
        member="autoSubscriptionCreationOverride",
        body={"allowAutoSubscriptionCreation": False},
        holds={"auto_subscription_creation": False},
        bad=(({}, 400),),
    ),
    Row(
        namespace="delayedDelivery",
        topic="delayedDelivery",
        member="delayed_delivery_policies",
        body={"tickTime": 500.0, "active": True, "maxDelayInMillis": 9000},  # as Go's client spells it
        answer={"tickTime": 500, "active": True, "maxDelayInMillis": 9000, "maxDeliveryDelayInMillis": 9000},
        applied={"tickTime": 1000, "active": True, "maxDelayInMillis": 9000, "maxDeliveryDelayInMillis": 9000},
        holds={"delayed_delivery": True, "max_delay_ms": 9000},
        bad=(
            ({"tickTime": 500}, 400),
            ({"active": True, "tickTime": -1}, 412),
            ({"active": True, "maxDeliveryDelayInMillis": -1}, 412),
        ),
    ),
    Row(
        namespace="inactiveTopicPolicies",
        topic="inactiveTopicPolicies",
        member="inactive_topic_policies",
        body={
            "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
            "maxInactiveDurationSeconds": 3600,
            "deleteWhileInactive": True,
        },
        holds={"inactive_topics": InactiveTopics(InactiveDeletion.CAUGHT_UP, 3600)},
        bad=(
            ({"inactiveTopicDeleteMode": "never", "maxInactiveDurationSeconds": 1, "deleteWhileInactive": True}, 400),
            ({"maxInactiveDurationSeconds": 0, "deleteWhileInactive": True}, 412),
        ),
    ),
    Row(
        namespace="encryptionRequired",
        member="encryption_required",
        body="true",  # Go's client sends a string
        answer=True,
        unset=False,
        holds={"encryption_required": True},
        bad=(("perhaps", 400),),
    ),
    Row(
        namespace="schemaCompatibilityStrategy",
        topic="schemaCompatibilityStrategy",
        member="schema_compatibility_strategy",
        set_by="PUT",
        body="FORWARD",
        unset="UNDEFINED",
        holds={"schema_compatibility": SchemaCompatibility.FORWARD},
        bad=(("SIDEWAYS", 412), (5, 400)),
    ),
    Row(
        namespace="isAllowAutoUpdateSchema",
        member="is_allow_auto_update_schema",
        body=False,
        unset=True,
        holds={"schema_auto_update": False},
        bad=(("perhaps", 400),),
    ),
    Row(
        namespace="schemaValidationEnforced",
        topic="schemaValidationEnforced",
        member="schema_validation_enforced",
        body=True,
        unset=False,
        topic_unset=False,
        holds={"schema_validation_enforced": True},
        bad=(("perhaps", 400),),
    ),
    Row(
        namespace="subscriptionTypesEnabled",
        topic="subscriptionTypesEnabled",
        member="subscription_types_enabled",
        body=["Shared", "Exclusive", "Shared"],
        answer=["Exclusive", "Shared"],
        unset=[],
        holds={"subscription_types": frozenset({"Exclusive", "Shared"})},
        bad=((["Exclusive", "Splendid"], 412), ("Shared", 400)),
    ),
    Row(namespace="messageTTL", member="message_ttl_in_seconds", body=60, holds={"message_ttl_s": 60}, bad=((-1, 412), ("", 400))),
    limit("maxProducersPerTopic", "maxProducers", "max_producers_per_topic", "max_producers"),
    limit("maxConsumersPerTopic", "maxConsumers", "max_consumers_per_topic", "max_consumers"),
    limit(
        "maxConsumersPerSubscription",
        "maxConsumersPerSubscription",
        "max_consumers_per_subscription",
        "max_consumers_per_subscription",
    ),
    limit("maxSubscriptionsPerTopic", "maxSubscriptionsPerTopic", "max_subscriptions_per_topic", "max_subscriptions"),
    limit(
        "maxUnackedMessagesPerConsumer",
        "maxUnackedMessagesOnConsumer",
        "max_unacked_messages_per_consumer",
        "max_unacked_per_consumer",
    ),
    limit(
        "maxUnackedMessagesPerSubscription",
        "maxUnackedMessagesOnSubscription",
        "max_unacked_messages_per_subscription",
        "max_unacked_per_subscription",
    ),
    Row(namespace="maxTopicsPerNamespace", member="max_topics_per_namespace", body=9, unset=0, bad=((-1, 412),)),
    Row(
        namespace="offloadPolicies",
        topic="offloadPolicies",
        member="offload_policies",
        body={  # as Pulsar's own client fills it in
            "offloadersDirectory": "./offloaders",
            "managedLedgerOffloadDriver": "aws-s3",
            "managedLedgerOffloadMaxThreads": 2,
            "managedLedgerOffloadBucket": "archive",
            "s3ManagedLedgerOffloadBucket": "archive",
            "s3ManagedLedgerOffloadRegion": "eu-west-1",
            "s3ManagedLedgerOffloadServiceEndpoint": "http://minio:9000/",
            "s3ManagedLedgerOffloadMaxBlockSizeInBytes": 67108864,
            "s3ManagedLedgerOffloadRole": "",
            "managedLedgerOffloadThresholdInBytes": 1 << 30,
            "managedLedgerOffloadDeletionLagInMillis": 3_600_000,
            "managedLedgerOffloadedReadPriority": "tiered-storage-first",
            "managedLedgerExtraConfigurations": {"prefix": "cluster/one"},
        },
        answer={
            "managedLedgerOffloadDriver": "aws-s3",
            "s3ManagedLedgerOffloadBucket": "archive",
            "s3ManagedLedgerOffloadRegion": "eu-west-1",
            "s3ManagedLedgerOffloadServiceEndpoint": "http://minio:9000",
            **OFFLOAD_NUMBERS,
            "managedLedgerOffloadedReadPriority": "tiered-storage-first",
            "managedLedgerExtraConfigurations": {"prefix": "cluster/one"},
        },
        applied={
            "managedLedgerOffloadDriver": "aws-s3",
            "s3ManagedLedgerOffloadBucket": "archive",
            "s3ManagedLedgerOffloadRegion": "eu-west-1",
            "s3ManagedLedgerOffloadServiceEndpoint": "http://minio:9000",
            **OFFLOAD_NUMBERS,
            "managedLedgerOffloadThresholdInSeconds": -1,
            "managedLedgerOffloadedReadPriority": "tiered-storage-first",
            "managedLedgerExtraConfigurations": {"prefix": "cluster/one"},
        },
        holds={
            "offload": OffloadConfig(
                url="s3://archive/cluster/one?region=eu-west-1&endpoint=http://minio:9000",
                after_bytes=1 << 30,
                keep_ms=3_600_000,
                reads_objects=True,
            )
        },
        bad=(
            *(({**S3_ARCHIVE, **changes}, status) for changes, status in BAD_OFFLOADS),
            ({}, 412),
            (None, 400),
            ({"managedLedgerOffloadBucket": "archive"}, 412),
        ),
    ),
    Row(topic="maxMessageSize", body=1000, holds={"max_message_bytes": 1000}, bad=((-1, 412), (2**30, 412))),
)
NAMESPACE_ROWS = [row for row in ROWS if row.namespace is not None]
TOPIC_ROWS = [row for row in ROWS if row.topic is not None]
WITHOUT_DELETE = {
    "deduplicationSnapshotInterval",
    "encryptionRequired",
    "schemaCompatibilityStrategy",
    "isAllowAutoUpdateSchema",
    "schemaValidationEnforced",
}


@pytest.fixture(scope="module", autouse=True)
def _topics(admin: AdminWorld) -> None:
    """Open ones: a plain topic and a partition."""
    assert admin.put(NAMESPACE).status_code == 204
    assert admin.put(TOPIC).status_code == 204
    assert admin.put(f"{SPLIT}/partitions", json=2).status_code == 204
    for name in ("plain", "split-partition-1"):
        admin.run(admin.standalone.broker.topics.get(TopicName.parse(f"persistent://public/policies/{name}"), may_create=False))


def in_force(admin: AdminWorld, name: str = "plain") -> TopicPolicies:
    topic = admin.standalone.broker.topics.find(TopicName.parse(f"persistent://public/policies/{name}"))
    assert topic is not None
    return topic.policies


def wait_in_force(admin: AdminWorld, holds: dict[str, Any], name: str = "plain") -> None:
    def holds_now() -> bool:
        policies = in_force(admin, name)
        return {found: getattr(policies, found) for found in holds} == holds

    admin.run(wait_until(holds_now, 1.0, f"{holds} of {name}"))


def assert_not_set(admin: AdminWorld, path: str, unset: Any) -> None:
    answer = admin.get(path)
    if unset is None:
        assert (answer.status_code, answer.content) == (204, b"")
    else:
        assert (answer.status_code, answer.json()) == (200, unset)


@pytest.mark.slow
def test_every_policy_of_the_table_is_in_these_tests() -> None:
    assert {row.namespace for row in NAMESPACE_ROWS} == {kind.namespace.word for kind in POLICIES if kind.namespace}
    assert {*(row.topic for row in TOPIC_ROWS), "messageTTL"} == {kind.topic.word for kind in POLICIES if kind.topic}


@pytest.mark.parametrize("row", NAMESPACE_ROWS, ids=str)
def test_a_policy_of_a_namespace_lives(admin: AdminWorld, row: Row) -> None:
    path = f"{NAMESPACE}/{row.namespace}"
    expected = row.body if row.answer is None else row.answer
    before = in_force(admin)
    assert_not_set(admin, path, row.unset)
    answer = admin.ask(row.set_by, path, json=row.body)
    assert (answer.status_code, answer.content) == (204, b"")
    assert admin.get(path).json() == expected
    assert admin.get(NAMESPACE).json()[row.member] == expected
    wait_in_force(admin, row.holds)
    wait_in_force(admin, row.holds, "split-partition-1")
    remove(admin, path, row)
    assert_not_set(admin, path, row.unset)
    wait_in_force(admin, {name: getattr(before, name) for name in row.holds})


def remove(admin: AdminWorld, path: str, row: Row) -> None:
    """As the API has it: some policies of namespaces have no DELETE."""
    if row.namespace == "offloadPolicies":
        assert admin.delete(f"{NAMESPACE}/removeOffloadPolicies").status_code == 204
    elif row.namespace not in WITHOUT_DELETE:
        assert admin.delete(path).status_code == 204
    elif row.namespace == "deduplicationSnapshotInterval":
        assert admin.post(path, content=b"null").status_code == 204
    else:
        assert admin.delete(path).status_code == 412, "takes the word for a bundle"
        assert admin.ask(row.set_by, path, json=row.unset).status_code == 204


@pytest.mark.parametrize("row", NAMESPACE_ROWS, ids=str)
def test_a_namespace_is_made_with_it_and_copied(admin: AdminWorld, row: Row) -> None:
    made, copied = f"{NAMESPACE}-made-{row.namespace}", f"{NAMESPACE}-copied-{row.namespace}"
    assert admin.put(made, json={row.member: row.body}).status_code == 204
    assert admin.get(f"{made}/{row.namespace}").json() == (row.body if row.answer is None else row.answer)
    found = admin.get(made).json()
    assert admin.put(copied, json=found).status_code == 204
    assert admin.get(copied).json() == found


@pytest.mark.parametrize("row", TOPIC_ROWS, ids=str)
@pytest.mark.parametrize("open_as", ["plain", "split-partition-1"])
def test_a_policy_of_a_topic_lives(admin: AdminWorld, row: Row, open_as: str) -> None:
    path = f"/admin/v2/persistent/public/policies/{open_as.partition('-')[0]}/{row.topic}"
    expected = row.body if row.answer is None else row.answer
    before = in_force(admin, open_as)
    other = "plain" if open_as != "plain" else "split-partition-1"
    others = in_force(admin, other)
    assert_not_set(admin, path, row.topic_unset)
    default = admin.get(path, params={"applied": "true"})
    assert default.status_code == 200
    answer = admin.ask(row.set_by, path, json=row.body)
    assert (answer.status_code, answer.content) == (204, b"")
    assert admin.get(path).json() == expected
    assert_not_set(admin, f"{path}?isGlobal=true", row.topic_unset)  # another store, and nothing is in it
    wait_in_force(admin, row.holds, open_as)
    assert in_force(admin, other) == others
    assert admin.delete(path).status_code == 204
    assert_not_set(admin, path, row.topic_unset)
    assert admin.get(path, params={"applied": "true"}).json() == default.json()
    wait_in_force(admin, {name: getattr(before, name) for name in row.holds}, open_as)


@pytest.mark.parametrize("row", [row for row in TOPIC_ROWS if row.namespace], ids=str)
def test_what_is_applied_is_the_topics_else_the_namespaces(admin: AdminWorld, row: Row) -> None:
    namespace, topic = f"{NAMESPACE}/{row.namespace}", f"{TOPIC}/{row.topic}"
    shown = row.body if row.answer is None else row.answer
    assert admin.ask(row.set_by, namespace, json=row.body).status_code == 204
    applied = admin.get(topic, params={"applied": "true"})
    assert applied.json() == (shown if row.applied is None else row.applied)
    assert_not_set(admin, topic, row.topic_unset)
    remove(admin, namespace, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "set_by", "body", "status"),
    [
        (f"{base}/{word}", row.set_by, body, status)
        for row in ROWS
        for base, word in ((NAMESPACE, row.namespace), (TOPIC, row.topic))
        if word is not None
        for body, status in row.bad
    ],
    ids=str,
)
def test_bad_values_are_refused_and_change_nothing(admin: AdminWorld, path: str, set_by: str, body: Any, status: int) -> None:
    before = admin.get(path)
    answer = admin.ask(set_by, path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    assert answer.json()["reason"]
    assert (admin.get(path).status_code, admin.get(path).content) == (before.status_code, before.content)


@pytest.mark.parametrize(
    ("driver", "fields", "url"),
    [
        ("S3", {"managedLedgerOffloadBucket": "archive"}, "s3://archive"),
        ("google-cloud-storage", {"gcsManagedLedgerOffloadBucket": "archive"}, "gs://archive"),
        ("azureblob", {"managedLedgerOffloadBucket": "archive"}, "abfs://archive"),
        ("filesystem", {"fileSystemURI": "file:///mnt/archive"}, "file:///mnt/archive"),
    ],
)
def test_a_driver_of_pulsar_is_a_kind_of_url_and_back(admin: AdminWorld, driver: str, fields: dict[str, Any], url: str) -> None:
    path = f"{TOPIC}/offloadPolicies"
    assert admin.post(path, json={"managedLedgerOffloadDriver": driver, **fields}).status_code == 204
    wait_in_force(admin, {"offload": OffloadConfig(url=url)})
    shown = admin.get(path).json()
    assert shown == {"managedLedgerOffloadDriver": "aws-s3" if driver == "S3" else driver, **fields} or driver == "S3"
    assert admin.post(path, json=shown).status_code == 204, "what is shown can be set again"
    wait_in_force(admin, {"offload": OffloadConfig(url=url)})
    assert admin.delete(path).status_code == 204


def test_a_topic_changes_one_number_and_keeps_the_store_of_its_namespace(admin: AdminWorld) -> None:
    store = {"managedLedgerOffloadDriver": "aws-s3", "managedLedgerOffloadBucket": "archive"}
    assert admin.post(f"{NAMESPACE}/offloadPolicies", json=store).status_code == 204
    assert admin.post(f"{TOPIC}/offloadPolicies", json={"managedLedgerOffloadThresholdInSeconds": 60}).status_code == 204
    wait_in_force(admin, {"offload": OffloadConfig(url="s3://archive", after_ms=60_000)})
    wait_in_force(admin, {"offload": OffloadConfig(url="s3://archive")}, "split-partition-1")
    assert admin.delete(f"{TOPIC}/offloadPolicies").status_code == 204
    assert admin.delete(f"{NAMESPACE}/removeOffloadPolicies").status_code == 204


def test_a_store_is_refused_where_its_libraries_are_missing(admin: AdminWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "_LIBRARIES", ("no_such_library",))
    answer = admin.post(f"{TOPIC}/offloadPolicies", json=S3_ARCHIVE)
    assert answer.status_code == 412
    assert "no_such_library is not installed; run pip install 'cepheid[tiered]'" in answer.json()["reason"]


def test_the_numbers_of_a_namespaces_offload_policy_have_calls_of_their_own(admin: AdminWorld) -> None:
    size, age, lag = (f"{NAMESPACE}/{word}" for word in ("offloadThreshold", "offloadThresholdInSeconds", "offloadDeletionLagMs"))
    assert [admin.get(size).json(), admin.get(age).json(), admin.get(lag).status_code] == [-1, -1, 204]
    for path, value in ((size, 1000), (age, 60), (lag, 5000)):
        assert admin.put(path, json=value).status_code == 204
        assert admin.get(path).json() == value
        for bad, status in ((-2, 412), ("much", 400), (None, 400), (2**63, 400)):
            assert admin.put(path, json=bad).status_code == status, (path, bad)
    assert admin.put(lag, json=-1).status_code == 412
    assert admin.put(lag, json=1500).status_code == 412, "whole seconds"
    numbers = {
        "managedLedgerOffloadThresholdInBytes": 1000,
        "managedLedgerOffloadThresholdInSeconds": 60,
        "managedLedgerOffloadDeletionLagInMillis": 5000,
    }
    assert admin.get(f"{NAMESPACE}/offloadPolicies").json() == numbers
    shown = admin.get(NAMESPACE).json()
    assert [shown[name] for name in ("offload_threshold", "offload_threshold_in_seconds", "offload_deletion_lag_ms")] == [
        1000,
        60,
        5000,
    ]
    wait_in_force(admin, {"offload": OffloadConfig(after_bytes=1000, after_ms=60_000, keep_ms=5000)})
    assert admin.put(f"{NAMESPACE}-copied-numbers", json=shown).status_code == 204
    assert admin.put(f"{NAMESPACE}-old-numbers", json={"offload_threshold": 9, "offload_deletion_lag_ms": 1000}).status_code == 204
    assert admin.get(f"{NAMESPACE}-old-numbers/offloadThreshold").json() == 9
    different = {"offload_threshold": 9, "offload_policies": {"managedLedgerOffloadThresholdInBytes": 8}}
    assert admin.put(f"{NAMESPACE}-different-numbers", json=different).status_code == 412
    assert admin.delete(lag).status_code == 204
    assert admin.get(lag).status_code == 204
    assert admin.delete(f"{NAMESPACE}/removeOffloadPolicies").status_code == 204


def test_the_ttl_of_a_topic_comes_in_the_query(admin: AdminWorld) -> None:
    path = f"{TOPIC}/messageTTL"
    assert_not_set(admin, path, None)
    assert admin.post(path, params={"messageTTL": 60}).status_code == 204
    assert admin.get(path).json() == 60
    wait_in_force(admin, {"message_ttl_s": 60})
    for bad, status in ((-1, 412), (2**31, 400), ("soon", 400), (None, 400)):
        assert admin.post(path, params={} if bad is None else {"messageTTL": bad}).status_code == status
    assert admin.delete(path, params={"messageTTL": 60}).status_code == 204
    assert_not_set(admin, path, None)
    assert admin.get(path, params={"applied": "true"}).json() == 0


@pytest.mark.parametrize("base", [NAMESPACE, TOPIC])
def test_backlog_quotas_live_by_type(admin: AdminWorld, base: str) -> None:
    quotas, quota = f"{base}/backlogQuotaMap", f"{base}/backlogQuota"
    age = {"backlogQuotaType": "message_age"}
    shown_size = {"limit": 1 << 20, "limitSize": 1 << 20, "limitTime": -1, "policy": "producer_exception"}
    shown_age = {"limit": -1, "limitSize": -1, "limitTime": 60, "policy": "consumer_backlog_eviction"}
    nothing = {"limit": -1, "limitSize": -1, "limitTime": -1, "policy": "producer_request_hold"}
    assert (admin.get(quotas).status_code, admin.get(quotas).json()) == (200, {})
    assert admin.post(quota, json=SIZE_QUOTA).status_code == 204
    assert admin.get(quotas).json() == {"destination_storage": shown_size}
    assert admin.get(quotas, params={"applied": "true"}).json() == {"destination_storage": shown_size, "message_age": nothing}
    assert admin.post(quota, params=age, json=AGE_QUOTA).status_code == 204
    assert admin.get(quotas).json() == {"destination_storage": shown_size, "message_age": shown_age}
    wait_in_force(
        admin,
        {"size_quota": BacklogQuota(1 << 20, QuotaAction.REFUSE), "age_quota": BacklogQuota(60, QuotaAction.EVICT)},
    )
    assert admin.delete(quota).status_code == 204, "the default type"
    assert admin.get(quotas).json() == {"message_age": shown_age}
    assert admin.delete(quota, params=age).status_code == 204
    wait_in_force(admin, {"size_quota": None, "age_quota": None})


@pytest.mark.parametrize("base", [NAMESPACE, TOPIC])
@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("destination_storage", {"limit": 5, "policy": "producer_exception"}, 204),  # the old name of limitSize
        ("destination_storage", {"limitSize": -1, "limitTime": -1, "policy": "producer_exception"}, 204),
        ("destination_storage", {"limitSize": -2, "policy": "producer_exception"}, 412),
        ("destination_storage", {"policy": "producer_exception"}, 412),
        ("destination_storage", {"limitSize": 5, "limitTime": 5, "policy": "producer_exception"}, 204),  # clients send both
        ("destination_storage", {"limitSize": 5, "policy": "shrug"}, 400),
        ("destination_storage", {"limitSize": 5}, 400),
        ("message_age", {"limitSize": 5, "policy": "producer_exception"}, 412),
        ("colour", {"limitSize": 5, "policy": "producer_exception"}, 400),
        ("destination_storage", None, 400),
    ],
)
def test_quotas_say_what_is_wrong_with_them(admin: AdminWorld, base: str, kind: str, body: Any, status: int) -> None:
    answer = admin.post(f"{base}/backlogQuota", params={"backlogQuotaType": kind}, json=body)
    assert answer.status_code == status, answer.text
    assert admin.delete(f"{base}/backlogQuota").status_code == 204


@pytest.mark.parametrize("kind", ["destination_storage", "message_age"])
def test_of_a_quota_with_both_limits_the_one_of_its_type_holds_and_both_are_shown(admin: AdminWorld, kind: str) -> None:
    both = {"limitSize": 5, "limitTime": 6, "policy": "producer_exception"}
    assert admin.post(f"{TOPIC}/backlogQuota", params={"backlogQuotaType": kind}, json=both).status_code == 204
    assert admin.get(f"{TOPIC}/backlogQuotaMap").json() == {kind: {**both, "limit": 5}}
    of_size = kind == "destination_storage"
    wait_in_force(
        admin,
        {
            "size_quota": BacklogQuota(5, QuotaAction.REFUSE) if of_size else None,
            "age_quota": None if of_size else BacklogQuota(6, QuotaAction.REFUSE),
        },
    )
    assert admin.delete(f"{TOPIC}/backlogQuota", params={"backlogQuotaType": kind}).status_code == 204


def test_until_the_upgrade_is_finished_a_quota_is_written_as_older_releases_read_it(admin: AdminWorld) -> None:
    store = admin.standalone.broker.store
    records = storage_format_record(store)
    found = admin.run(records.get(None))
    assert found is not None
    admin.run(records.replace(None, StorageFormat(storage_format=OTHER_LIMITS_SINCE - 1), found.version))
    try:
        both = {"limitSize": 5, "limitTime": 6, "policy": "producer_exception"}
        assert admin.post(f"{NAMESPACE}/backlogQuota", json=both).status_code == 204
        assert admin.get(f"{NAMESPACE}/backlogQuotaMap").json()["destination_storage"]["limitTime"] == -1
        assert admin.delete(f"{NAMESPACE}/backlogQuota").status_code == 204
    finally:
        admin.run(records.replace(None, found.record, found.version + 1))


@pytest.mark.parametrize("base", [NAMESPACE, TOPIC])
def test_retention_and_quota_must_go_together_whichever_comes_second(admin: AdminWorld, base: str) -> None:
    retention = {"retentionTimeInMinutes": 1, "retentionSizeInMB": 1}
    assert admin.post(f"{base}/retention", json=retention).status_code == 204
    for params, body in ((None, SIZE_QUOTA), ({"backlogQuotaType": "message_age"}, AGE_QUOTA)):
        refused = admin.post(f"{base}/backlogQuota", params=params, json=body)
        assert refused.status_code == 412
        assert "retention must be larger" in refused.json()["reason"]
    assert admin.delete(f"{base}/retention").status_code == 204
    assert admin.post(f"{base}/backlogQuota", json=SIZE_QUOTA).status_code == 204
    assert admin.post(f"{base}/retention", json=retention).status_code == 412
    assert admin.post(f"{base}/retention", json={"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}).status_code == 204
    assert admin.post(f"{base}/retention", json={"retentionTimeInMinutes": 1, "retentionSizeInMB": 2}).status_code == 204
    assert admin.delete(f"{base}/backlogQuota").status_code == 204
    assert admin.delete(f"{base}/retention").status_code == 204


def test_a_topics_retention_must_exceed_its_namespaces_quota(admin: AdminWorld) -> None:
    assert admin.post(f"{NAMESPACE}/backlogQuota", json=SIZE_QUOTA).status_code == 204
    assert admin.post(f"{TOPIC}/retention", json={"retentionTimeInMinutes": -1, "retentionSizeInMB": 1}).status_code == 412
    assert admin.delete(f"{NAMESPACE}/backlogQuota").status_code == 204


def test_a_namespace_is_not_made_with_contradictions(admin: AdminWorld) -> None:
    retention = {"retentionTimeInMinutes": 1, "retentionSizeInMB": 1}
    body = {"retention_policies": retention, "backlog_quota_map": {"destination_storage": SIZE_QUOTA}}
    assert admin.put(f"{NAMESPACE}-contradicting", json=body).status_code == 412
    assert admin.get(f"{NAMESPACE}-contradicting").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/admin/v2/persistent/public/policies/nothing/retention", 404),
        ("POST", "/admin/v2/persistent/public/policies/nothing/retention", 404),
        ("DELETE", "/admin/v2/persistent/public/policies/nothing/retention", 404),
        ("GET", "/admin/v2/persistent/public/nowhere/t/retention", 404),
        ("GET", "/admin/v2/namespaces/public/nowhere/retention", 404),
        ("POST", "/admin/v2/namespaces/public/nowhere/retention", 404),
        ("GET", f"{SPLIT}-partition-0/retention", 412),
        ("POST", f"{SPLIT}-partition-0/retention", 412),
        ("DELETE", f"{SPLIT}-partition-0/retention", 412),
        ("GET", f"{SPLIT}-partition-2/retention", 404),
        ("POST", f"{TOPIC}/retention?isGlobal=true", 501),
        ("DELETE", f"{TOPIC}/retention?isGlobal=true", 501),
        ("POST", f"{TOPIC}/backlogQuota?isGlobal=true", 501),
        ("DELETE", f"{NAMESPACE}/noSuchPolicy", 412),
    ],
)
def test_who_has_no_policies_says_so(admin: AdminWorld, method: str, path: str, status: int) -> None:
    body = SIZE_QUOTA if "backlogQuota" in path else {"retentionTimeInMinutes": 10, "retentionSizeInMB": 10}
    answer = admin.ask(method, path, json=body) if method == "POST" else admin.ask(method, path)
    assert answer.status_code == status, answer.text
    assert answer.json()["reason"]


def test_writers_at_the_same_time_lose_nothing(admin: AdminWorld) -> None:
    async def together() -> list[int]:
        calls = [admin.send("POST", f"{NAMESPACE}/{row.namespace}", json=7) for row in ROWS[-8:-2]]
        return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert set(admin.run(together())) == {204}
    assert [admin.get(f"{NAMESPACE}/{row.namespace}").json() for row in ROWS[-8:-2]] == [7] * 6
    for row in ROWS[-8:-2]:
        assert admin.delete(f"{NAMESPACE}/{row.namespace}").status_code == 204


def test_no_policy_is_lost_when_the_topic_grows(admin: AdminWorld) -> None:
    assert admin.post(f"{SPLIT}/maxProducers", json=3).status_code == 204
    assert admin.post(f"{SPLIT}/partitions", json=3).status_code == 204
    assert admin.get(f"{SPLIT}/maxProducers").json() == 3
    assert admin.delete(f"{SPLIT}/maxProducers").status_code == 204


def test_one_policy_of_topics_decodes_their_names_twice(admin: AdminWorld) -> None:
    assert admin.put("/admin/v2/persistent/public/policies/50%25%20of%20it").status_code == 204
    off = {"allowAutoSubscriptionCreation": False}
    once, twice = ("/admin/v2/persistent/public/policies/" + name for name in ("50%25%20of%20it", "50%2525%2520of%2520it"))
    assert admin.post(f"{twice}/autoSubscriptionCreation", json=off).status_code == 204
    assert admin.get(f"{once}/autoSubscriptionCreation").json() == off, "once is enough where no escape is left"
    assert admin.post(f"{once}/maxProducers", json=1).status_code == 204
    assert admin.post(f"{twice}/maxProducers", json=1).status_code == 404


# Policies that cannot be set yet


@pytest.mark.parametrize("policy", OF_NAMESPACES, ids=lambda policy: policy.word)
def test_a_policy_of_a_namespace_that_is_not_served_reads_as_unset(admin: AdminWorld, policy: UnsetPolicy) -> None:
    assert_not_set(admin, f"{NAMESPACE}/{policy.word}", policy.unset)
    assert admin.get(f"/admin/v2/namespaces/public/nowhere/{policy.word}").status_code == 404


@pytest.mark.parametrize("policy", OF_TOPICS, ids=lambda policy: policy.word)
def test_a_policy_of_a_topic_that_is_not_served_reads_as_unset(admin: AdminWorld, policy: UnsetPolicy) -> None:
    word = policy.word.format(sub="s")
    assert_not_set(admin, f"{TOPIC}/{word}", policy.unset)
    assert_not_set(admin, f"{TOPIC}/{word}?isGlobal=true", policy.unset)
    assert_not_set(admin, f"{TOPIC}/{word}?applied=true", policy.in_force)
    assert admin.get(f"{TOPIC}-none/{word}").status_code == 404


@pytest.mark.parametrize("base", [NAMESPACE, TOPIC])
@pytest.mark.parametrize("word", ["dispatchRate", "compactionThreshold", "entryFilters", "subscriptionExpirationTime"])
def test_writing_it_is_still_refused(admin: AdminWorld, base: str, word: str) -> None:
    for method in ("PUT", "POST", "DELETE"):
        answer = admin.ask(method, f"{base}/{word}", json={})
        assert answer.status_code == 501, f"{method} {answer.text}"
        assert answer.json()["reason"]


@pytest.mark.parametrize("base", [NAMESPACE, TOPIC])
def test_replication_is_this_cluster_and_can_be_set_to_it(admin: AdminWorld, base: str) -> None:
    path = f"{base}/replication"
    assert admin.post(path, json=["standalone"]).status_code == 204
    assert admin.get(path).json() == ["standalone"]
    for clusters, status in ((["standalone", "west"], 501), (["west"], 501), ([], 412), ("standalone", 400), (None, 400)):
        refused = admin.post(path, json=clusters)
        assert (refused.status_code, bool(refused.json()["reason"])) == (status, True), clusters
    assert admin.get(path).json() == ["standalone"]
