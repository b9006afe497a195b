"""Statistics of a topic in the shapes of the API (docs/reference/shapes.md §4): functions of snapshots, no state.

What this broker does not have (offloading, replication, transactions, delayed delivery …) has its field with the value that means
none: clients and dashboards read them without asking whether they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cepheid_broker.consumer import ConsumerFigures
from cepheid_broker.producer import ProducerFigures
from cepheid_broker.rates import TrafficFigures
from cepheid_broker.subscription import SubscriptionFigures
from cepheid_broker.times import iso_time
from cepheid_broker.topic import TopicFigures


@dataclass(frozen=True, slots=True)
class StoredFigures:
    """What statistics need of a topic's managed ledger and record."""

    entries: int
    size_bytes: int
    created_at_ms: int
    owner_broker: str  # host:port of its admin API

    def estimate_bytes(self, entries: int) -> int:
        """Of some entries, by the average of all: exact figures would have to read them."""
        return 0 if self.entries == 0 else min(self.size_bytes, self.size_bytes * entries // self.entries)


def topic_stats(figures: TopicFigures, stored: StoredFigures, *, publishers: bool = True, consumers: bool = True) -> dict[str, Any]:
    """`TopicStats`. `publishers` and `consumers`: whether their lists are wanted."""
    published = figures.published
    delivered = [subscription.delivered for subscription in figures.subscriptions]
    backlog = max((subscription.backlog_entries for subscription in figures.subscriptions), default=0)
    return {
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
        "backlogSize": stored.estimate_bytes(backlog),
        "publishers": [_publisher(producer) for producer in figures.producers] if publishers else [],
        "subscriptions": {
            subscription.name: _subscription(subscription, stored, consumers=consumers) for subscription in figures.subscriptions
        },
        "ownerBroker": stored.owner_broker,
        "topicCreationTimeStamp": stored.created_at_ms,
        **_NONE_OF_A_TOPIC,
    }


def summed_stats(parts: Mapping[str, dict[str, Any]], metadata: dict[str, Any], *, per_partition: bool) -> dict[str, Any]:
    """`PartitionedTopicStats`: sums over the partitions, publishers merged by their place in the lists, subscriptions by name."""
    subscriptions: dict[str, list[dict[str, Any]]] = {}
    for part in parts.values():
        for name, subscription in part["subscriptions"].items():
            subscriptions.setdefault(name, []).append(subscription)
    publishers: list[list[dict[str, Any]]] = []
    for part in parts.values():
        for place, publisher in enumerate(part["publishers"]):
            if place == len(publishers):
                publishers.append([])
            publishers[place].append(publisher)
    return {
        **_sum(parts.values()),
        "publishers": [_sum(group) for group in publishers],
        "subscriptions": {name: _sum(group) for name, group in subscriptions.items()},
        "metadata": metadata,
        "partitions": dict(parts) if per_partition else {},
    }


def _publisher(producer: ProducerFigures) -> dict[str, Any]:
    return {
        "accessMode": "Shared",
        "msgRateIn": producer.traffic.message_rate_per_s,
        "msgThroughputIn": producer.traffic.byte_rate_per_s,
        "averageMsgSize": _average_bytes(producer.traffic),
        "chunkedMessageRate": 0.0,
        "producerId": producer.producer_id,
        "producerName": producer.name,
        "supportsPartialProducer": False,
        "address": f"/{producer.address}",
        "connectedSince": iso_time(producer.connected_at_ms),
        "clientVersion": producer.client_version,
        "metadata": producer.metadata,
    }


def _subscription(subscription: SubscriptionFigures, stored: StoredFigures, *, consumers: bool) -> dict[str, Any]:
    delivered = subscription.delivered
    stats = {
        "msgRateOut": delivered.message_rate_per_s,
        "msgThroughputOut": delivered.byte_rate_per_s,
        "bytesOutCounter": delivered.size_bytes,
        "msgOutCounter": delivered.messages,
        "msgBacklog": subscription.backlog_entries,
        "backlogSize": stored.estimate_bytes(subscription.backlog_entries),
        "msgBacklogNoDelayed": subscription.backlog_entries,
        "unackedMessages": subscription.unacked_messages,
        "blockedSubscriptionOnUnackedMsgs": False,
        "consumers": [_consumer(consumer) for consumer in subscription.consumers] if consumers else [],
        "isDurable": subscription.durable,
        "durable": subscription.durable,
        **_NONE_OF_A_SUBSCRIPTION,
    }
    if subscription.consumers:  # the type is that of those who are connected
        stats["type"] = subscription.type_name
        if subscription.type_name == "Exclusive":
            stats["activeConsumerName"] = subscription.consumers[0].name
    return stats


def _consumer(consumer: ConsumerFigures) -> dict[str, Any]:
    traffic = consumer.traffic
    return {
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
        "lastAckedTimestamp": consumer.last_acked_at_ms,
        "lastConsumedTimestamp": 0,
        "lastConsumedFlowTimestamp": consumer.last_flow_at_ms,
        "metadata": consumer.metadata,
    }


def _average_bytes(traffic: TrafficFigures) -> float:
    return traffic.size_bytes / traffic.messages if traffic.messages else 0.0


_AVERAGED = ("averageMsgSize",)
_NOT_SUMMED = (
    "producerId",
    "avgMessagesPerEntry",
    "topicCreationTimeStamp",
    "lastPublishTimeStamp",
    "lastOffloadLedgerId",
    "backlogQuotaLimitSize",  # -1 is no limit, and so below
    "backlogQuotaLimitTime",
    "oldestBacklogMessageAgeSeconds",
)


def _sum(stats: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Numbers are added, lists joined; what cannot be added is that of the first."""
    parts: Sequence[dict[str, Any]] = list(stats)
    total: dict[str, Any] = {}
    for name, first in parts[0].items() if parts else ():
        values = [part[name] for part in parts if name in part]
        if isinstance(first, bool):
            total[name] = any(values) if name.startswith("blocked") else first
        elif isinstance(first, int | float) and name not in _NOT_SUMMED:
            total[name] = sum(values) / (len(values) if name in _AVERAGED else 1)
        elif isinstance(first, list):
            total[name] = [item for value in values for item in value]
        else:
            total[name] = first
    return total


_NONE_OF_A_TOPIC: dict[str, Any] = {
    "systemTopicBytesInCounter": 0,
    "bytesOutInternalCounter": 0,
    "msgChunkPublished": False,
    "backlogQuotaLimitSize": -1,
    "backlogQuotaLimitTime": -1,
    "oldestBacklogMessageAgeSeconds": -1,
    "earliestMsgPublishTimeInBacklogs": 0,
    "publishRateLimitedTimes": 0,
    "offloadedStorageSize": 0,
    "lastOffloadLedgerId": 0,
    "lastOffloadSuccessTimeStamp": 0,
    "lastOffloadFailureTimeStamp": 0,
    "ongoingTxnCount": 0,
    "abortedTxnCount": 0,
    "committedTxnCount": 0,
    "waitingPublishers": 0,
    "replication": {},
    "deduplicationStatus": "Disabled",
    "nonContiguousDeletedMessagesRanges": 0,
    "nonContiguousDeletedMessagesRangesSerializedSize": 0,
    "delayedMessageIndexSizeInBytes": 0,
    "compaction": {
        "lastCompactionRemovedEventCount": 0,
        "lastCompactionSucceedTimestamp": 0,
        "lastCompactionFailedTimestamp": 0,
        "lastCompactionDurationTimeInMills": 0,
    },
    "lastPublishTimeStamp": 0,
}

_NONE_OF_A_SUBSCRIPTION: dict[str, Any] = {
    "msgRateRedeliver": 0.0,
    "messageAckRate": 0.0,
    "msgRateExpired": 0.0,
    "chunkedMessageRate": 0.0,
    "earliestMsgPublishTimeInBacklog": 0,
    "msgDelayed": 0,
    "msgInReplay": 0,
    "msgExpired": 0,
    "totalMsgExpired": 0,
    "lastExpireTimestamp": 0,
    "lastConsumedFlowTimestamp": 0,
    "lastConsumedTimestamp": 0,
    "lastAckedTimestamp": 0,
    "lastMarkDeleteAdvancedTimestamp": 0,
    "isReplicated": False,
    "replicated": False,
    "allowOutOfOrderDelivery": False,
    "nonContiguousDeletedMessagesRanges": 0,
    "nonContiguousDeletedMessagesRangesSerializedSize": 0,
    "delayedMessageIndexSizeInBytes": 0,
    "subscriptionProperties": {},
    "filterProcessedMsgCount": 0,
    "filterAcceptedMsgCount": 0,
    "filterRejectedMsgCount": 0,
    "filterRescheduledMsgCount": 0,
}
