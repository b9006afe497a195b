"""The two levels of policies as seen by their routes: namespaces and topics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Depends

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotServedError
from cepheid_broker.admin.path_names import NamespacePath, TopicPath, TwiceDecodedTopicPath
from cepheid_broker.admin.policy_change import change_namespace, change_topic, require_topic
from cepheid_broker.admin.policy_table import PathOf, PolicyKind
from cepheid_broker.policies import TopicPolicies, resolve
from cepheid_metadata import NamespaceRecord, TopicRecord
from cepheid_wire import NamespaceName, TopicName


async def _never() -> bool:
    return False


NEVER: Any = Depends(_never)
"""For calls that do not take a flag."""


@dataclass(frozen=True, slots=True)
class Level:
    noun: Any
    """Dependency: the namespace or topic of the path."""
    noun_decoded_twice: Any
    is_global: Any
    """Dependency: whether policies of all clusters are meant, which do not exist here."""
    what: str
    path_of: Callable[[PolicyKind], PathOf | None]
    record: Callable[[Any], Awaitable[NamespaceRecord | TopicRecord]]
    in_force: Callable[[Any], Awaitable[TopicPolicies]]
    change: Callable[[Any, Mapping[str, Any]], Awaitable[None]]

    def noun_for(self, path: PathOf) -> Any:
        return self.noun_decoded_twice if path.decoded_twice else self.noun


def namespace_level(context: AdminContext) -> Level:
    async def noun(namespace: NamespacePath) -> NamespaceName:
        return namespace

    async def record(namespace: NamespaceName) -> NamespaceRecord:
        return (await context.require_namespace(namespace)).record

    async def in_force(namespace: NamespaceName) -> TopicPolicies:
        return resolve(None, await record(namespace), context.broker.catalog.broker_policies)

    async def change(namespace: NamespaceName, changes: Mapping[str, Any]) -> None:
        await change_namespace(context, namespace, lambda _: changes)

    return Level(Depends(noun), Depends(noun), NEVER, "namespace", lambda kind: kind.namespace, record, in_force, change)


def topic_level(context: AdminContext) -> Level:
    async def noun(topic: TopicPath) -> TopicName:
        return topic

    async def noun_decoded_twice(topic: TwiceDecodedTopicPath) -> TopicName:
        return topic

    async def is_global(isGlobal: bool = False) -> bool:
        return isGlobal

    async def record(topic: TopicName) -> TopicRecord:
        await context.require_namespace(topic.namespace)
        return (await require_topic(context, topic)).record

    async def in_force(topic: TopicName) -> TopicPolicies:
        return await context.broker.catalog.policies(topic)

    async def change(topic: TopicName, changes: Mapping[str, Any]) -> None:
        await change_topic(context, topic, changes)

    return Level(
        Depends(noun), Depends(noun_decoded_twice), Depends(is_global), "topic", lambda kind: kind.topic, record, in_force, change
    )


def refuse_global(is_global: bool) -> None:
    if is_global:
        raise NotServedError("Policies for all clusters (isGlobal=true) are not served: this broker knows one cluster")
