"""Which topics exist according to the records, and what a client may create by using it.

T                  a record with partitions = 0: a plain topic; N: partitioned, which makes T-partition-0 .. N-1 topics
T-partition-k      no record of its own if T has more than k partitions; else a plain topic of that unusual name
T, deleted         its deletion has begun: T and its partitions cannot be used, created or grown until it is over
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext
from typing import Any

from cepheid_broker.errors import NamespaceNotFoundError, NotAllowedError, ServiceNotReadyError, TooManyError, TopicNotFoundError
from cepheid_broker.policies import TopicPolicies, resolve
from cepheid_broker.settings import TopicCreation
from cepheid_metadata import (
    BadVersionError,
    Check,
    Found,
    KeyExistsError,
    MetadataStore,
    NamespaceRecord,
    NoSuchKeyError,
    Op,
    TopicRecord,
    list_topics,
    namespace_records,
    topic_records,
)
from cepheid_ports import Ports
from cepheid_wire import NON_PERSISTENT, PERSISTENT, NamespaceName, TopicName

SYSTEM_MARK = "__"
READ_TOGETHER = 250
"""Records that a listing requests at a time: in groups, 5,000 topics take a third of the time of single reads."""


def is_system_topic(topic: TopicName) -> bool:
    """Return whether the topic is hidden from lists unless asked for (docs/reference/behaviours.md §3)."""
    return topic.local_name.startswith(SYSTEM_MARK)


def being_deleted(topic: TopicName) -> ServiceNotReadyError:
    # Clients look for these words, and then keep their other producers and consumers on the connection (protocol.md §7.2).
    message = f"topic {topic} is being unloaded: its deletion has begun"
    return ServiceNotReadyError(message, topic=str(topic))


def _why_not_created(topic: TopicName) -> str:
    asked = "the client asked not to create it"
    if not topic.is_partition:
        return asked
    return f"{asked}, or its role has no grant on the namespace, needed to add a partition to {topic.base}"


def _partitions(topic: TopicName, record: TopicRecord) -> int:
    return 0 if topic.is_partition else record.partitions


class TopicCatalog:
    def __init__(self, store: MetadataStore, creation: TopicCreation, policies: TopicPolicies, ports: Ports) -> None:
        self._store = store
        self._records = topic_records(store)
        self._namespaces = namespace_records(store)
        self._creation = creation
        self.broker_policies = policies
        self.on_changed: list[Callable[[TopicName], None]] = []
        """Called after this broker created, grew or deleted a topic's record."""
        self.on_marked_found: list[Callable[[TopicName], None]] = []
        """Called when a client requests a topic that is being deleted."""
        self._ports = ports
        self._limited = asyncio.Lock()

    async def find(self, topic: TopicName) -> Found[TopicRecord] | None:
        """Return the topic's record, for a partition that of its partitioned topic; None if there is no such topic."""
        if topic.is_partition:
            base = await self._records.get(topic.base)
            if base is not None and base.record.partitions > topic.partition_index:
                return base
        return await self._records.get(topic)

    async def partitions(self, topic: TopicName) -> int | None:
        """Return the number of partitions; 0: not partitioned; None: there is no such topic."""
        found = await self.find(topic)
        return None if found is None else _partitions(topic, found.record)

    async def partitions_or_create(self, topic: TopicName, *, may_create: bool = True) -> int:
        """Return the number of partitions as `partitions` does; a missing topic is created if the rules allow it.

        Raises TopicNotFoundError, NamespaceNotFoundError, ServiceNotReadyError (it is being deleted).
        """
        if (found := await self.find(topic)) is not None:
            if found.record.deleted:
                for hook in self.on_marked_found:
                    hook(topic.base)
                raise being_deleted(topic)
            return _partitions(topic, found.record)
        creation = await self.creation_in(topic.namespace)
        if not (may_create and creation.allowed):
            reason = "creating topics by using them is off" if may_create else _why_not_created(topic)
            raise TopicNotFoundError(f"topic {topic} does not exist, and {reason}", topic=str(topic))
        partitions = 0
        if creation.topic_type == "partitioned" and not topic.is_partition:
            partitions = creation.partitions
        try:
            await self.create(topic, partitions)
        except KeyExistsError:  # another client was first, perhaps with another count
            return await self.partitions_or_create(topic, may_create=may_create)
        return partitions

    async def require(self, topic: TopicName, *, may_create: bool) -> None:
        """Check that the topic exists, or create it, and is not partitioned. Raises TopicNotFoundError, NotAllowedError."""
        if await self.partitions_or_create(topic, may_create=may_create):
            raise NotAllowedError(f"topic {topic} is partitioned: connect to its partitions {topic}-partition-N", topic=str(topic))

    async def create(self, topic: TopicName, partitions: int, properties: Mapping[str, str] | None = None) -> None:
        """Create a topic. Raises KeyExistsError, NamespaceNotFoundError, NotAllowedError, TooManyError."""
        if partitions and topic.is_partition:
            raise NotAllowedError(f"topic {topic} is named like a partition and cannot have partitions", topic=str(topic))
        limited = bool((await self._require_namespace(topic.namespace)).max_topics)
        record = TopicRecord(partitions=partitions, properties=dict(properties or {}), created_at_ms=self._ports.wall_ms())
        async with self._limited if limited else nullcontext():  # one after the other: fewer retries
            while not await self._try_create(topic, record, limited=limited):
                continue  # the namespace changed meanwhile
        self._note_changed(topic)

    async def _try_create(self, topic: TopicName, record: TopicRecord, *, limited: bool) -> bool:
        """Return False if the namespace changed meanwhile. Raises as `create`."""
        namespace = await self._find_namespace(topic.namespace)
        if limited and await self.find(topic) is None:
            await self.require_room(topic, record.partitions or 1)
        # One transaction with a check of the namespace: a deletion marks it first, and from then on no topic is created in it. If
        # topics are limited the namespace is written, so that two brokers cannot both use the last place.
        noun = (topic.namespace.tenant, topic.namespace.local_name)
        guard: Op = Check(self._namespaces.key_of(noun), namespace.version)
        if limited:
            guard = self._namespaces.replace_op(noun, namespace.record, namespace.version)
        try:
            await self._store.multi([guard, self._records.create_op(topic, record)])
        except (BadVersionError, NoSuchKeyError):
            return False
        return True

    async def require_room(self, topic: TopicName, more: int) -> None:
        """Raise TooManyError if the namespace may not have this many more topics and partitions."""
        namespace = topic.namespace
        most = (await self._require_namespace(namespace)).max_topics or 0
        if not most or is_system_topic(topic):
            return
        there = [shown for domain in (PERSISTENT, NON_PERSISTENT) for shown in await self.shown_topics_of(namespace, domain)]
        if len(there) + more > most:
            message = f"namespace {namespace} has {len(there)} topics and partitions, its policy allows {most}: no room for {topic}"
            raise TooManyError(message, namespace=str(namespace), limit=most)

    async def replace(self, topic: TopicName, found: Found[TopicRecord], **changes: Any) -> None:
        """Change the record. Raises BadVersionError if it was changed since it was found."""
        await self._records.replace(topic, found.record.replace(**changes), found.version)
        self._note_changed(topic)

    async def delete(self, topic: TopicName) -> None:
        """Delete only the record; succeeds if there is none."""
        try:
            await self._records.delete(topic, None)
        except NoSuchKeyError:
            pass
        self._note_changed(topic)

    def _note_changed(self, topic: TopicName) -> None:
        for hook in self.on_changed:
            hook(topic)

    async def shown_topics_of(self, namespace: NamespaceName, domain: str = PERSISTENT) -> list[TopicName]:
        """Return `topics_of` without system topics. Raises NamespaceNotFoundError."""
        return [topic for topic in await self.topics_of(namespace, domain) if not is_system_topic(topic)]

    async def topics_of(self, namespace: NamespaceName, domain: str = PERSISTENT) -> list[TopicName]:
        """Return every topic that clients can connect to: partitioned ones appear as their partitions."""
        await self._require_namespace(namespace)
        names: list[TopicName] = []
        topics = await list_topics(self._store, namespace.tenant, namespace.local_name, domain)
        for start in range(0, len(topics), READ_TOGETHER):
            together = topics[start : start + READ_TOGETHER]
            for topic, found in zip(together, await asyncio.gather(*map(self._records.get, together)), strict=True):
                if found is not None and not found.record.deleted:
                    partitions = found.record.partitions
                    names += [topic.partition(index) for index in range(partitions)] if partitions else [topic]
        return names

    async def topics_with_policies(self, namespace: NamespaceName) -> AsyncIterator[dict[TopicName, TopicPolicies]]:
        """Yield every persistent topic and partition with its policies, in groups. Raises NamespaceNotFoundError."""
        own = await self._require_namespace(namespace)
        topics = await list_topics(self._store, namespace.tenant, namespace.local_name, PERSISTENT)
        for start in range(0, len(topics), READ_TOGETHER):
            together = topics[start : start + READ_TOGETHER]
            some: dict[TopicName, TopicPolicies] = {}
            for topic, found in zip(together, await asyncio.gather(*map(self._records.get, together)), strict=True):
                if found is not None and not found.record.deleted:
                    policies = resolve(found.record, own, self.broker_policies)
                    names = [topic.partition(index) for index in range(found.record.partitions)] or [topic]
                    some.update(dict.fromkeys(names, policies))
            yield some

    async def policies(self, topic: TopicName) -> TopicPolicies:
        """Return the topic's current policies; an open one has them as `Topic.policies`. Raises NamespaceNotFoundError."""
        namespace = await self._require_namespace(topic.namespace)
        found = await self.find(topic)
        return resolve(None if found is None else found.record, namespace, self.broker_policies)

    async def creation_in(self, namespace: NamespaceName) -> TopicCreation:
        """Return the rules for clients that use a missing topic there. Raises NamespaceNotFoundError."""
        override = (await self._require_namespace(namespace)).auto_topic_creation
        if override is None:
            return self._creation
        return TopicCreation(allowed=override.allowed, topic_type=override.topic_type, partitions=override.partitions or 1)

    async def _require_namespace(self, namespace: NamespaceName) -> NamespaceRecord:
        return (await self._find_namespace(namespace)).record

    async def _find_namespace(self, namespace: NamespaceName) -> Found[NamespaceRecord]:
        found = await self._namespaces.get((namespace.tenant, namespace.local_name))
        if found is None or found.record.deleted:
            raise NamespaceNotFoundError(f"namespace {namespace} does not exist", namespace=str(namespace))
        return found
