"""Checks of SUBSCRIBE: what this broker serves, and what the topic's policies allow. One function for each stage.

    check_served   the command itself, before the topic is looked up
    check_allowed  the topic is open; before a subscription is found or created
    check_room     when joining, with no await in between

All raise errors that fail at once in every client (wire_errors.py), as waiting would not help.
"""

from __future__ import annotations

from cepheid_broker.errors import NotAllowedError, SubscriptionNotFoundError, TooManyError
from cepheid_broker.topics import Subscription, Topic
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb

MAX_NAME_BYTES = 1000
"""Limit of a subscription name, which is a segment of a metadata key, and of a consumer name. The admin API has the same limit,
so that it can name what clients create."""
MAX_METADATA_BYTES = 64 << 10  # kept in memory as long as the consumer lives


_IN_ORDER = (pb.CommandSubscribe.Exclusive, pb.CommandSubscribe.Failover)


def check_served(ask: pb.CommandSubscribe) -> None:
    check_subscription_name(ask.subscription)
    if (size_bytes := len(ask.consumer_name.encode())) > MAX_NAME_BYTES:
        raise NotAllowedError(f"a consumer's name has {size_bytes} bytes, {MAX_NAME_BYTES} are possible")
    # read_compacted has no effect: as no topic is compacted yet, it reads the same. A TableView always sets it.
    if ask.read_compacted and ask.subType not in _IN_ORDER:
        message = f"read_compacted is for Exclusive and Failover subscriptions, not for {_type_of(ask)} ones: subscribe without it"
        raise NotAllowedError(message)
    if ask.read_compacted and not TopicName.parse(ask.topic).is_persistent:
        raise NotAllowedError(
            f"topic {ask.topic[:300]} is non-persistent: it stores nothing to compact; subscribe without read_compacted"
        )
    size_bytes = sum(len(pair.key.encode()) + len(pair.value.encode()) for pair in ask.metadata)
    if size_bytes > MAX_METADATA_BYTES:
        raise NotAllowedError(f"a consumer's metadata may have {MAX_METADATA_BYTES} bytes, not {size_bytes}")


def check_subscription_name(name: str) -> None:
    """Check a subscription name. Raises NotAllowedError."""
    if not 1 <= (size_bytes := len(name.encode())) <= MAX_NAME_BYTES:
        raise NotAllowedError(f"a subscription needs a name of 1 to {MAX_NAME_BYTES} bytes, not {size_bytes}: {name[:40]!r}")


def check_allowed(topic: Topic, ask: pb.CommandSubscribe) -> None:
    """Check the topic's policies. Raises NotAllowedError, SubscriptionNotFoundError."""
    policies = topic.policies
    if policies.subscription_types and _type_of(ask) not in policies.subscription_types:
        allowed = ", ".join(sorted(policies.subscription_types))
        raise NotAllowedError(f"{_type_of(ask)} subscriptions are not allowed on {topic.name}; allowed are {allowed}")
    if ask.durable and not policies.auto_subscription_creation and ask.subscription not in topic.subscriptions:
        # Go clients stop on this first word (protocol.md §24).
        raise SubscriptionNotFoundError(
            f"SubscriptionNotFound: {topic.name} has no subscription {ask.subscription!r}, and a policy forbids creating it by use",
            topic=str(topic.name),
            subscription=ask.subscription,
        )


def check_room(topic: Topic, subscription: Subscription) -> None:
    """Check the limits of consumers. Raises TooManyError."""
    policies = topic.policies
    if 0 < policies.max_consumers_per_subscription <= len(subscription.consumers):
        count, most = len(subscription.consumers), policies.max_consumers_per_subscription
        raise TooManyError(f"subscription {subscription.name!r} of {topic.name} has {count} consumers, {most} are allowed")
    if policies.max_consumers > 0:
        count = sum(len(other.consumers) for other in topic.subscriptions.values())
        if count >= policies.max_consumers:
            raise TooManyError(f"{topic.name} has {count} consumers, {policies.max_consumers} are allowed")


def _type_of(ask: pb.CommandSubscribe) -> str:
    return pb.CommandSubscribe.SubType.Name(ask.subType)
