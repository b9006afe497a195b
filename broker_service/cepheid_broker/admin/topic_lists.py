"""Which topics a list shows: partitions one by one, never the name of a partitioned topic (docs/reference/behaviours.md §10)."""

from __future__ import annotations

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.topics import is_system_topic
from cepheid_metadata import list_topics
from cepheid_wire import PERSISTENT, NamespaceName, TopicName


def is_shown(topic: TopicName, with_system_topics: bool) -> bool:
    return with_system_topics or not is_system_topic(topic)


async def topics_in(context: AdminContext, namespace: NamespaceName, domain: str = PERSISTENT) -> list[TopicName]:
    """Return the topics of a namespace. Raises NamespaceNotFoundError."""
    return await context.broker.catalog.topics_of(namespace, domain)


async def partitioned_topics_in(context: AdminContext, namespace: NamespaceName, domain: str = PERSISTENT) -> list[TopicName]:
    """Return the partitioned topics of a namespace. Raises NamespaceNotFoundError."""
    await context.require_namespace(namespace)
    found = await list_topics(context.store, namespace.tenant, namespace.local_name, domain)
    return [topic for topic in found if await context.broker.catalog.partitions(topic)]
