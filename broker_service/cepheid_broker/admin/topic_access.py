"""How admin calls come to the topics of a name: one that can be opened, or all parts of a partitioned one."""

from __future__ import annotations

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import PreconditionError
from cepheid_broker.errors import TopicNotFoundError
from cepheid_broker.topic import Topic
from cepheid_wire import TopicName


async def parts_of(context: AdminContext, name: TopicName) -> list[TopicName]:
    """The partitions of a partitioned topic, else the topic itself. Raises TopicNotFoundError."""
    partitions = await context.broker.catalog.partitions(name)
    if partitions is None:
        raise TopicNotFoundError(f"Topic {name} does not exist", topic=str(name))
    return [name.partition(index) for index in range(partitions)] or [name]


async def require_plain(context: AdminContext, name: TopicName) -> None:
    """A topic or one partition: the name of a partitioned topic is none (docs/reference/behaviours.md §5)."""
    if await context.broker.catalog.partitions(name) != 0:
        raise TopicNotFoundError(f"Topic {name} does not exist, or is partitioned: ask one of its partitions", topic=str(name))


async def open_topic(context: AdminContext, name: TopicName) -> Topic:
    """Opened if it is not, never created. Raises TopicNotFoundError."""
    return await context.broker.topics.get(name, may_create=False)


def require_idle(context: AdminContext, name: TopicName) -> None:
    """412 while producers or consumers are connected: tools that delete without force rely on it."""
    topic = context.broker.topics.find(name)
    if topic is None:
        return
    consumers = sum(len(subscription.consumers) for subscription in topic.subscriptions.values())
    if topic.producers or consumers:
        raise PreconditionError(f"Topic {name} has {len(topic.producers)} producers and {consumers} consumers", topic=str(name))
