"""Topics and subscriptions: which exist, which are open, what consumers have acknowledged. README.md has the rules."""

from cepheid_broker.topics.backlog import MeasuredBacklog, exact_backlog, measure_backlog
from cepheid_broker.topics.backlog_check import BacklogChecks
from cepheid_broker.topics.closed_topics import ClosedTopicFigures, ClosedTopics
from cepheid_broker.topics.inactive_topics import InactiveTopics
from cepheid_broker.topics.lease_expiry import LeaseExpiry
from cepheid_broker.topics.non_persistent_subscription import NonPersistentSubscription
from cepheid_broker.topics.partitioned_topics import PartitionedTopics
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_broker.topics.subscription import BatchAck, Consumer, Subscription
from cepheid_broker.topics.subscription_figures import ConsumerFigures, SubscriptionFigures
from cepheid_broker.topics.topic import Topic, TopicFigures
from cepheid_broker.topics.topic_catalog import TopicCatalog, is_system_topic
from cepheid_broker.topics.topic_changes import TopicChangeMarks
from cepheid_broker.topics.topic_manifests import TopicManifests
from cepheid_broker.topics.topic_pattern import TopicPattern
from cepheid_broker.topics.topic_positions import last_message, position_at_time
from cepheid_broker.topics.topic_watches import TopicWatch, TopicWatches, topics_hash
from cepheid_broker.topics.topics import Topics

__all__ = [
    "BacklogChecks",
    "BatchAck",
    "ClosedTopicFigures",
    "ClosedTopics",
    "Consumer",
    "ConsumerFigures",
    "InactiveTopics",
    "LeaseExpiry",
    "MeasuredBacklog",
    "NonPersistentSubscription",
    "PartitionedTopics",
    "PersistentTopic",
    "Subscription",
    "SubscriptionFigures",
    "Topic",
    "TopicCatalog",
    "TopicChangeMarks",
    "TopicFigures",
    "TopicManifests",
    "TopicPattern",
    "TopicWatch",
    "TopicWatches",
    "Topics",
    "exact_backlog",
    "is_system_topic",
    "last_message",
    "measure_backlog",
    "position_at_time",
    "topics_hash",
]
