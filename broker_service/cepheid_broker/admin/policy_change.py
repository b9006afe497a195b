"""Writes policies to records: compare-and-set, repeated if another caller changed the record meanwhile.

The broker applies policies by itself (policy_follower.py): it watches the records, so a change here applies at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, PreconditionError
from cepheid_broker.errors import TopicNotFoundError
from cepheid_broker.policies import CONCERNED, TopicPolicies, contradiction, resolve
from cepheid_metadata import BadVersionError, Found, NamespaceRecord, TopicRecord
from cepheid_wire import NamespaceName, TopicName

TRIES = 10


async def change_namespace(
    context: AdminContext, namespace: NamespaceName, plan: Callable[[NamespaceRecord], Mapping[str, Any]]
) -> None:
    """Change the fields that `plan` returns (None: not set). Raises NamespaceNotFoundError, PreconditionError, ConflictError."""
    for _ in range(TRIES):
        found = await context.require_namespace(namespace)
        changes = plan(found.record)
        record = found.record.replace(**changes)
        check_consistent(changes, resolve(None, record, context.broker.catalog.broker_policies))
        try:
            await context.namespaces.replace((namespace.tenant, namespace.local_name), record, found.version)
            return
        except BadVersionError:
            continue
    raise contended(namespace)


async def change_topic(context: AdminContext, topic: TopicName, changes: Mapping[str, Any]) -> None:
    """Change fields of the topic's record (None: not set). Raises TopicNotFoundError and the errors of `change_namespace`."""
    for _ in range(TRIES):
        namespace = await context.require_namespace(topic.namespace)
        found = await require_topic(context, topic)
        record = found.record.replace(**changes)
        check_consistent(changes, resolve(record, namespace.record, context.broker.catalog.broker_policies))
        try:
            await context.topics.replace(topic, record, found.version)
            return
        except BadVersionError:
            continue
    raise contended(topic)


async def require_topic(context: AdminContext, topic: TopicName) -> Found[TopicRecord]:
    """Return the record that holds policies; not for a partition, as policies are set for all partitions at once."""
    found = await context.topics.get(topic)
    if found is None and topic.is_partition:
        base = await context.topics.get(topic.base)
        if base is not None and base.record.partitions > topic.partition_index:
            raise PreconditionError(f"{topic} is a partition: policies are those of {topic.base}", topic=str(topic))
    if found is None:
        raise TopicNotFoundError(f"Topic {topic} does not exist", topic=str(topic))
    return found


def check_consistent(changes: Mapping[str, Any], policies: TopicPolicies) -> None:
    """Raise PreconditionError if the resulting policies contradict each other and these fields are involved."""
    concerned = not CONCERNED.isdisjoint(changes)
    if concerned and (found := contradiction(policies)) is not None:
        raise PreconditionError(f"Policies contradict each other: {found}")


def contended(what: NamespaceName | TopicName) -> ConflictError:
    return ConflictError(f"{what} was changed by others {TRIES} times meanwhile; try again", name=str(what))
