"""Values for every policy of a namespace and of a topic, as the admin API takes them.

Nothing is published where these policies apply, so their time limits cannot remove recorded messages.
"""

from __future__ import annotations

from typing import Any

YEARS_S = 10 * 365 * 86_400

_ALIKE: dict[str, Any] = {  # the same path for a namespace and for a topic
    "retention": {"retentionTimeInMinutes": 100_000, "retentionSizeInMB": 2_000},
    "persistence": {
        "bookkeeperEnsemble": 1,
        "bookkeeperWriteQuorum": 1,
        "bookkeeperAckQuorum": 1,
        "managedLedgerMaxMarkDeleteRate": 0.5,
    },
    "deduplicationSnapshotInterval": 30,
    "autoSubscriptionCreation": {"allowAutoSubscriptionCreation": False},
    "delayedDelivery": {"tickTime": 500, "active": True, "maxDeliveryDelayInMillis": 9_000},
    "inactiveTopicPolicies": {
        "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
        "maxInactiveDurationSeconds": YEARS_S,
        "deleteWhileInactive": True,
    },
    "schemaValidationEnforced": True,
    "subscriptionTypesEnabled": ["Exclusive", "Shared"],
    "maxConsumersPerSubscription": 11,
}

OF_A_NAMESPACE: dict[str, Any] = {
    **_ALIKE,
    "deduplication": True,
    "autoTopicCreation": {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 3},
    "encryptionRequired": True,
    "schemaCompatibilityStrategy": "FORWARD",
    "isAllowAutoUpdateSchema": False,
    "messageTTL": 7_000,
    "maxProducersPerTopic": 12,
    "maxConsumersPerTopic": 13,
    "maxSubscriptionsPerTopic": 14,
    "maxUnackedMessagesPerConsumer": 15,
    "maxUnackedMessagesPerSubscription": 16,
    "maxTopicsPerNamespace": 17,
}

OF_A_TOPIC: dict[str, Any] = {
    **_ALIKE,
    "deduplicationEnabled": True,
    "schemaCompatibilityStrategy": "BACKWARD_TRANSITIVE",
    "messageTTL": 8_000,
    "maxProducers": 22,
    "maxConsumers": 23,
    "maxSubscriptionsPerTopic": 24,
    "maxUnackedMessagesOnConsumer": 25,
    "maxUnackedMessagesOnSubscription": 26,
    "maxMessageSize": 27_000,
}

BACKLOG_QUOTAS: dict[str, Any] = {
    "destination_storage": {"limitSize": 1 << 20, "policy": "producer_exception"},
    "message_age": {"limitTime": 600, "policy": "consumer_backlog_eviction"},
}

SET_BY_PUT = ("schemaCompatibilityStrategy",)
IN_QUERY = ("messageTTL",)
"""The value of a topic's policy of this name is a query parameter."""
