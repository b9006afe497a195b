"""Updates the policies of open topics when records change, whether by this broker's admin API or another's.

    namespace record ─┐ change
    topic record ─────┴──► resolve for each affected open topic ──► Topic.on_policies, where the result differs

A partition has the policies of its partitioned topic. There is one watch for each namespace with open topics and one for the
record of each open topic (partitions share theirs).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from cepheid_broker.errors import NamespaceNotFoundError
from cepheid_broker.policies.policy_resolution import resolve
from cepheid_broker.policies.topic_policies import TopicPolicies
from cepheid_metadata import MetadataStore, NamespaceRecord, TopicRecord, WatchedRecord, WatchedRecords, keys
from cepheid_ports import TaskOwner
from cepheid_wire import TopicName

log = logging.getLogger(__name__)


class Governed(Protocol):
    """An open topic, whose policies are followed."""

    name: TopicName
    policies: TopicPolicies

    def on_policies(self, policies: TopicPolicies) -> None: ...


@dataclass(slots=True)
class _Followed:
    namespace: WatchedRecord[NamespaceRecord] | None = None
    own: WatchedRecord[TopicRecord] | None = None
    topic: Governed | None = None
    resolved: tuple[TopicRecord | None, NamespaceRecord, TopicPolicies] | None = None
    """The records from which the policies were last resolved."""


class PolicyFollower:
    """Follows policies: `follow` before a topic is opened, `attach` when it is open, `release` when it is closed."""

    def __init__(self, store: MetadataStore, broker: TopicPolicies, tasks: TaskOwner) -> None:
        self._broker = broker
        self._records = WatchedRecords(store, tasks)
        self._followed: dict[TopicName, _Followed] = {}
        self._of_namespace: tuple[NamespaceRecord, TopicPolicies] | None = None
        """The namespace that was last resolved, and the policies of its topics without policies of their own."""

    def __repr__(self) -> str:
        return f"<PolicyFollower {len(self._followed)} topics, {self._records!r}>"

    @property
    def watches(self) -> int:
        return len(self._records)

    async def follow(self, topic: TopicName) -> TopicPolicies:
        """Return the policies now, and miss no change from here on. Raises NamespaceNotFoundError, MetadataError."""
        assert topic not in self._followed, f"{topic} is opened twice"
        followed = self._followed[topic] = _Followed()
        try:
            return await self._follow(topic, followed)
        except BaseException:
            self.release(topic)
            raise

    async def _follow(self, topic: TopicName, followed: _Followed) -> TopicPolicies:
        def on_change() -> None:
            self._tell(followed)

        records, namespace = self._records, topic.namespace
        key = keys.namespace_key(namespace.tenant, namespace.local_name)
        found = followed.namespace = await records.use(key, NamespaceRecord, topic, on_change)
        if found.record is None or found.record.deleted:
            raise NamespaceNotFoundError(f"namespace {namespace} does not exist", namespace=str(namespace))
        owner = topic.base if topic.is_partition else topic
        own = followed.own = await records.use(keys.topic_key(owner), TopicRecord, topic, on_change)
        if topic.is_partition and (own.record is None or own.record.partitions <= topic.partition_index):
            records.leave(own, topic)  # not one of its partitions: a plain topic of that unusual name
            followed.own = await records.use(keys.topic_key(topic), TopicRecord, topic, on_change)
        return self._resolve(followed)

    def shows_topic(self, topic: TopicName) -> bool:
        """Return whether the record of a followed topic says that it can be opened.

        Not for partitions: they share a record, which may have been read earlier for others.
        """
        own = self._followed[topic].own
        record = None if own is None else own.record
        return record is not None and not record.partitions and not record.deleted

    def attach(self, topic: Governed) -> None:
        """Report changes to the opened topic, including any since `follow`."""
        followed = self._followed[topic.name]
        followed.topic = topic
        self._tell(followed)

    def release(self, topic: TopicName) -> None:
        """Stop following a closed topic. Idempotent."""
        followed = self._followed.pop(topic, None)
        if followed is not None and followed.namespace is not None:
            self._records.leave(followed.namespace, topic)
        if followed is not None and followed.own is not None:
            self._records.leave(followed.own, topic)

    def _resolve(self, followed: _Followed) -> TopicPolicies:
        assert followed.namespace is not None
        assert followed.namespace.record is not None, "checked when the topic was opened, and kept since"
        own, namespace = None if followed.own is None else followed.own.record, followed.namespace.record
        known = followed.resolved
        if known is None or known[0] is not own or known[1] is not namespace:
            known = followed.resolved = own, namespace, self._resolve_records(own, namespace)
        return known[2]

    def _resolve_records(self, own: TopicRecord | None, namespace: NamespaceRecord) -> TopicPolicies:
        if own is not None and own.format > 1:
            return resolve(own, namespace, self._broker)
        if self._of_namespace is None or self._of_namespace[0] is not namespace:  # a record of format 1 has no policies
            self._of_namespace = namespace, resolve(None, namespace, self._broker)
        return self._of_namespace[1]

    def _tell(self, followed: _Followed) -> None:
        if followed.topic is not None and (policies := self._resolve(followed)) != followed.topic.policies:
            log.info("topic.policies_changed", extra={"topic": str(followed.topic.name)})
            followed.topic.on_policies(policies)
