"""Statistics of a topic in the formats of the API (docs/reference/shapes.md §4): functions of snapshots, without state.

`msgBacklog` counts entries, as in Pulsar: a batch is one. Cepheid adds fields: `backlogMessages` (absent if not counted yet),
`backlogAgeSeconds` (of the oldest message), and `backlogExact`: whether `backlogSize` excludes acknowledged entries after the
mark-delete position. `msgBacklog` is always exact; asking for a precise backlog makes the others exact too.
`notPublishing` and `notSaving` give the reason if nothing can be published, or acknowledgements are not saved; else they are
absent. `nearLimit` names a limit of its metadata that a topic approaches; else it is absent.

Features that this broker lacks (replication, transactions, compaction …) have their fields with the value for "none": clients and
dashboards read them without checking that they exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cepheid_broker.policies import TopicPolicies
from cepheid_broker.publishing import AccessMode, ProducerFigures
from cepheid_broker.topics import ConsumerFigures, MeasuredBacklog, SubscriptionFigures, TopicFigures
from cepheid_broker.traffic import TrafficFigures
from cepheid_ports import iso_time


@dataclass(frozen=True, slots=True)
class Holes:
    """Runs of entries that a subscription has acknowledged out of order, and the bytes that they take."""

    runs: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OffloadFigures:
    """Offloaded ledgers of a topic: bytes of their entries, and the newest copy. 0: none, never."""

    size_bytes: int = 0
    last_ledger_id: int = 0
    last_success_at_ms: int = 0
    last_failure_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class StoredFigures:
    """A topic's state for statistics besides its figures: managed ledger, records, policies, and measured backlogs."""

    size_bytes: int
    created_at_ms: int
    owner_broker: str  # host:port of its admin API
    last_published_at_ms: int = 0
    topic_epoch: int | None = None
    waiting_producers: int = 0
    policies: TopicPolicies = field(default_factory=TopicPolicies)
    backlogs: Mapping[str, MeasuredBacklog] = field(default_factory=dict)
    holes: Mapping[str, Holes] = field(default_factory=dict)
    asked_for_earliest: bool = False
    offload: OffloadFigures = field(default_factory=OffloadFigures)
    not_publishing: str | None = None
    """Why the topic has no ledger to append to."""
    not_saving: str | None = None
    """Why acknowledgements could not be saved at the last attempt."""
    near_limit: str | None = None
    """The limit of its metadata that the topic approaches."""


def topic_stats(figures: TopicFigures, stored: StoredFigures, *, publishers: bool = True, consumers: bool = True) -> dict[str, Any]:
    """Return `TopicStats`. `publishers` and `consumers`: whether to include their lists."""
    published = figures.published
    subscriptions = {
        subscription.name: _subscription(subscription, stored, consumers=consumers) for subscription in figures.subscriptions
    }
    delivered = [subscription.delivered for subscription in figures.subscriptions]
    policies = stored.policies
    stats = {
        "msgRateIn": published.message_rate_per_s,
        "msgThroughputIn": published.byte_rate_per_s,
        "msgRateOut": sum(traffic.message_rate_per_s for traffic in delivered),
        "msgThroughputOut": sum(traffic.byte_rate_per_s for traffic in delivered),
        "bytesInCounter": published.size_bytes,
        "msgInCounter": published.messages,
        "bytesOutCounter": sum(traffic.size_bytes for traffic in delivered),
        "msgOutCounter": sum(traffic.messages for traffic in delivered),
        "averageMsgSize": _average_bytes(published),
        "storageSize": stored.size_bytes,
        "backlogSize": max((backlog.kept_bytes for backlog in stored.backlogs.values()), default=0),
        "backlogQuotaLimitSize": -1 if policies.size_quota is None else policies.size_quota.limit,
        "backlogQuotaLimitTime": -1 if policies.age_quota is None else policies.age_quota.limit,
        "publishers": [_publisher(producer) for producer in figures.producers] if publishers else [],
        "msgChunkPublished": figures.has_chunks,
        "offloadedStorageSize": stored.offload.size_bytes,
        "lastOffloadLedgerId": stored.offload.last_ledger_id,
        "lastOffloadSuccessTimeStamp": stored.offload.last_success_at_ms,
        "lastOffloadFailureTimeStamp": stored.offload.last_failure_at_ms,
        "waitingPublishers": stored.waiting_producers,
        "subscriptions": subscriptions,
        "deduplicationStatus": "Enabled" if policies.deduplication else "Disabled",
        "ownerBroker": stored.owner_broker,
        "topicCreationTimeStamp": stored.created_at_ms,
        "lastPublishTimeStamp": stored.last_published_at_ms,
        **_oldest(figures, stored),
        **{name: sum(each[name] for each in subscriptions.values()) for name in _SUMMED_OF_SUBSCRIPTIONS},
        **_NONE_OF_A_TOPIC,
    }
    if stored.topic_epoch is not None:
        stats["topicEpoch"] = stored.topic_epoch
    if stored.not_publishing is not None:
        stats["notPublishing"] = stored.not_publishing
    if stored.not_saving is not None:
        stats["notSaving"] = stored.not_saving
    if stored.near_limit is not None:
        stats["nearLimit"] = stored.near_limit
    return stats


def _oldest(figures: TopicFigures, stored: StoredFigures) -> dict[str, Any]:
    """Return the oldest message of durable subscriptions only: readers retain nothing, and quotas ignore them."""
    durable = {subscription.name for subscription in figures.subscriptions if subscription.durable}
    aged = [
        (backlog.oldest_age_s, name)
        for name, backlog in stored.backlogs.items()
        if name in durable and backlog.oldest_age_s is not None
    ]
    published = [found.oldest_publish_time_ms for found in stored.backlogs.values() if found.oldest_publish_time_ms is not None]
    stats: dict[str, Any] = {
        "oldestBacklogMessageAgeSeconds": -1,
        "earliestMsgPublishTimeInBacklogs": min(published, default=0) if stored.asked_for_earliest else 0,
    }
    if aged:
        age_s, name = max(aged)
        stats["oldestBacklogMessageAgeSeconds"] = int(age_s)
        stats["oldestBacklogMessageSubscriptionName"] = name
    return stats


def _publisher(producer: ProducerFigures) -> dict[str, Any]:
    return {
        "accessMode": _ACCESS_MODES[producer.access_mode],
        "msgRateIn": producer.traffic.message_rate_per_s,
        "msgThroughputIn": producer.traffic.byte_rate_per_s,
        "averageMsgSize": _average_bytes(producer.traffic),
        "chunkedMessageRate": producer.chunk_rate_per_s,
        "producerId": producer.producer_id,
        "producerName": producer.name,
        "supportsPartialProducer": False,
        "address": f"/{producer.address}",
        "connectedSince": iso_time(producer.connected_at_ms),
        "clientVersion": producer.client_version,
        "metadata": producer.metadata,
    }


def _subscription(subscription: SubscriptionFigures, stored: StoredFigures, *, consumers: bool) -> dict[str, Any]:
    delivered, activity, connected = subscription.delivered, subscription.activity, subscription.consumers
    holes = stored.holes.get(subscription.name, Holes())
    stats = {
        "msgRateOut": delivered.message_rate_per_s,
        "msgThroughputOut": delivered.byte_rate_per_s,
        "msgRateRedeliver": sum(consumer.redeliver_rate_per_s for consumer in connected),
        "messageAckRate": sum(consumer.ack_rate_per_s for consumer in connected),
        "msgRateExpired": subscription.expire_rate_per_s,
        "bytesOutCounter": delivered.size_bytes,
        "msgOutCounter": delivered.messages,
        **_backlog(subscription, stored),
        "msgDelayed": subscription.delayed_entries,
        "msgInReplay": subscription.replay_entries,
        "unackedMessages": subscription.unacked_messages,
        "blockedSubscriptionOnUnackedMsgs": subscription.is_blocked,
        "msgExpired": subscription.expired_entries,
        "totalMsgExpired": subscription.expired_entries,
        "lastExpireTimestamp": activity.last_expired_at_ms,
        "lastConsumedFlowTimestamp": activity.last_flow_at_ms,
        "lastConsumedTimestamp": activity.last_sent_at_ms,
        "lastAckedTimestamp": activity.last_acked_at_ms,
        "lastMarkDeleteAdvancedTimestamp": activity.last_mark_delete_at_ms,
        "consumers": [_consumer(consumer, subscription) for consumer in connected] if consumers else [],
        "isDurable": subscription.durable,
        "durable": subscription.durable,
        "allowOutOfOrderDelivery": subscription.key_sharing is not None and subscription.key_sharing.out_of_order,
        "nonContiguousDeletedMessagesRanges": holes.runs,
        "nonContiguousDeletedMessagesRangesSerializedSize": holes.size_bytes,
        "subscriptionProperties": dict(subscription.properties),
        **_NONE_OF_A_SUBSCRIPTION,
    }
    if connected:  # the type is that of connected consumers
        stats["type"] = subscription.type_name
        if (active := _active(subscription)) is not None:
            stats["activeConsumerName"] = active
        if subscription.key_sharing is not None:
            stats["keySharedMode"] = "STICKY" if subscription.key_sharing.sticky else "AUTO_SPLIT"
    return stats


def _backlog(subscription: SubscriptionFigures, stored: StoredFigures) -> dict[str, Any]:
    backlog = stored.backlogs.get(subscription.name)
    entries = subscription.backlog_entries if backlog is None else backlog.entries
    stats: dict[str, Any] = {
        "msgBacklog": entries,
        "backlogSize": 0 if backlog is None else backlog.bytes,
        "msgBacklogNoDelayed": max(0, entries - subscription.delayed_entries),
        "earliestMsgPublishTimeInBacklog": 0,
        "backlogExact": backlog is not None and backlog.is_exact,
    }
    if backlog is not None:
        if backlog.messages is not None:
            stats["backlogMessages"] = backlog.messages
        if backlog.oldest_age_s is not None:
            stats["backlogAgeSeconds"] = round(backlog.oldest_age_s, 3)
        if stored.asked_for_earliest:
            stats["earliestMsgPublishTimeInBacklog"] = backlog.oldest_publish_time_ms or 0
    return stats


def _active(subscription: SubscriptionFigures) -> str | None:
    if subscription.type_name not in ("Exclusive", "Failover"):
        return None
    return next((consumer.name for consumer in subscription.consumers if consumer.is_active), None)


def _consumer(consumer: ConsumerFigures, subscription: SubscriptionFigures) -> dict[str, Any]:
    traffic, activity = consumer.traffic, consumer.activity
    stats = {
        "consumerName": consumer.name,
        "address": f"/{consumer.address}",
        "connectedSince": iso_time(consumer.connected_at_ms),
        "clientVersion": consumer.client_version,
        "msgRateOut": traffic.message_rate_per_s,
        "msgThroughputOut": traffic.byte_rate_per_s,
        "msgRateRedeliver": consumer.redeliver_rate_per_s,
        "messageAckRate": consumer.ack_rate_per_s,
        "chunkedMessageRate": 0.0,
        "bytesOutCounter": traffic.size_bytes,
        "msgOutCounter": traffic.messages,
        "availablePermits": consumer.permits,
        "unackedMessages": consumer.unacked_messages,
        "avgMessagesPerEntry": traffic.messages // traffic.entries if traffic.entries else 0,
        "blockedConsumerOnUnackedMsgs": consumer.is_blocked,
        "firstConsumedFlowTimestamp": activity.first_flow_at_ms,
        "firstMessagesSentTimestamp": activity.first_sent_at_ms,
        "lastConsumedFlowTimestamp": activity.last_flow_at_ms,
        "lastConsumedTimestamp": activity.last_sent_at_ms,
        "lastAckedTimestamp": activity.last_acked_at_ms,
        "lastConsumedTime": iso_time(activity.last_sent_at_ms),
        "lastAckedTime": iso_time(activity.last_acked_at_ms),
        "metadata": consumer.metadata,
    }
    if subscription.key_sharing is not None:
        stats["keyHashRanges"] = [f"[{first}, {last}]" for first, last in consumer.hash_ranges]
        stats["keyHashRangeArrays"] = [[first, last] for first, last in consumer.hash_ranges]
    return stats


def _average_bytes(traffic: TrafficFigures) -> float:
    return traffic.size_bytes / traffic.messages if traffic.messages else 0.0


_ACCESS_MODES = {
    AccessMode.SHARED: "Shared",
    AccessMode.EXCLUSIVE: "Exclusive",
    AccessMode.WAIT_FOR_EXCLUSIVE: "WaitForExclusive",
    AccessMode.EXCLUSIVE_WITH_FENCING: "ExclusiveWithFencing",
}

_SUMMED_OF_SUBSCRIPTIONS = ("nonContiguousDeletedMessagesRanges", "nonContiguousDeletedMessagesRangesSerializedSize")

_NONE_OF_A_TOPIC: dict[str, Any] = {
    "systemTopicBytesInCounter": 0,
    "bytesOutInternalCounter": 0,
    "publishRateLimitedTimes": 0,
    "ongoingTxnCount": 0,
    "abortedTxnCount": 0,
    "committedTxnCount": 0,
    "replication": {},
    "delayedMessageIndexSizeInBytes": 0,
    "compaction": {
        "lastCompactionRemovedEventCount": 0,
        "lastCompactionSucceedTimestamp": 0,
        "lastCompactionFailedTimestamp": 0,
        "lastCompactionDurationTimeInMills": 0,
    },
}

_NONE_OF_A_SUBSCRIPTION: dict[str, Any] = {
    "chunkedMessageRate": 0.0,
    "consumersAfterMarkDeletePosition": {},
    "isReplicated": False,
    "replicated": False,
    "delayedMessageIndexSizeInBytes": 0,
    "filterProcessedMsgCount": 0,
    "filterAcceptedMsgCount": 0,
    "filterRejectedMsgCount": 0,
    "filterRescheduledMsgCount": 0,
    "dispatchThrottledMsgEventsBySubscriptionLimit": 0,
    "dispatchThrottledMsgEventsByTopicLimit": 0,
    "dispatchThrottledMsgEventsByBrokerLimit": 0,
    "dispatchThrottledBytesEventsBySubscriptionLimit": 0,
    "dispatchThrottledBytesEventsByTopicLimit": 0,
    "dispatchThrottledBytesEventsByBrokerLimit": 0,
}
