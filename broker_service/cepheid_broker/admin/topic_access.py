"""Access of admin calls to topics: one that can be opened, or all parts of a partitioned one."""

from __future__ import annotations

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotAllowedHereError, NotFoundError, PreconditionError
from cepheid_broker.errors import TopicNotFoundError
from cepheid_broker.topics import Subscription, Topic
from cepheid_wire import TopicName


async def parts_of(context: AdminContext, name: TopicName) -> list[TopicName]:
    """Return the partitions of a partitioned topic, else the topic itself. Raises TopicNotFoundError."""
    partitions = await context.broker.catalog.partitions(name)
    if partitions is None:
        raise TopicNotFoundError(f"Topic {name} does not exist", topic=str(name))
    return [name.partition(index) for index in range(partitions)] or [name]


async def require_plain(context: AdminContext, name: TopicName) -> None:
    """Check that it is a topic or partition, not the name of a partitioned topic (docs/reference/behaviours.md §5)."""
    if await context.broker.catalog.partitions(name) != 0:
        raise TopicNotFoundError(f"Topic {name} does not exist, or is partitioned: ask one of its partitions", topic=str(name))


async def open_topic(context: AdminContext, name: TopicName) -> Topic:
    """Return the topic, opened if needed, never created. Raises TopicNotFoundError; NotOwnerError if another broker serves it
    (app.py)."""
    return await context.broker.topics.get(name, may_create=False)


async def require_owner(context: AdminContext, name: TopicName) -> None:
    """Raise NotOwnerError if another broker serves the topic (app.py)."""
    await context.broker.ownership.require(name)


def require_idle(context: AdminContext, name: TopicName) -> None:
    """Raise PreconditionError (412) while clients are connected: tools that delete without force rely on it."""
    topic = context.broker.topics.find(name)
    if topic is None:
        return
    consumers = sum(len(subscription.consumers) for subscription in topic.subscriptions.values())
    if topic.producers or consumers:
        raise PreconditionError(f"Topic {name} has {len(topic.producers)} producers and {consumers} consumers", topic=str(name))


async def open_plain(context: AdminContext, name: TopicName) -> Topic:
    """Open the topic for calls on one topic or partition: 405 on a partitioned name, 404 if it does not exist."""
    partitions = await context.broker.catalog.partitions(name)
    if partitions is None:
        raise TopicNotFoundError(f"Topic {name} does not exist", topic=str(name))
    if partitions:
        message = f"Topic {name} has {partitions} partitions: ask one of them, {name.partition(0)} and so on"
        raise NotAllowedHereError(message, topic=str(name))
    return await open_topic(context, name)


def subscription_of(topic: Topic, name: str) -> Subscription:
    """Return the subscription. Raises NotFoundError."""
    found = topic.subscriptions.get(name)
    if found is None:
        raise NotFoundError(f"Subscription {name!r} of {topic.name} does not exist", topic=str(topic.name), subscription=name)
    return found


async def open_subscription(context: AdminContext, name: TopicName, subscription: str) -> tuple[Topic, Subscription]:
    """Return topic and subscription. Raises the errors of `open_topic`, and NotFoundError."""
    topic = await open_topic(context, name)
    return topic, subscription_of(topic, subscription)
