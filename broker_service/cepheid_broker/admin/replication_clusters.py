"""Replication clusters of namespaces and topics. There is only this cluster, so no other can be set."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotServedError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.path_names import NamespacePath, TopicPath
from cepheid_broker.admin.policy_change import change_namespace, require_topic

NO_CONTENT = 204

_NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}/replication"
_TOPIC = "/admin/v2/persistent/{tenant}/{namespace}/{topic}/replication"

ClustersBody = Annotated[list[str], json_body(list[str])]


def replication_clusters(context: AdminContext) -> APIRouter:
    router = APIRouter()

    @router.get(_NAMESPACE)
    async def get_replication(namespace: NamespacePath) -> list[str]:
        """Return the clusters that have the namespace: only this one"""
        return list((await context.require_namespace(namespace)).record.replication_clusters)

    @router.post(_NAMESPACE, status_code=NO_CONTENT)
    async def set_replication(namespace: NamespacePath, clusters: ClustersBody) -> None:
        """Set the clusters: only this one; others are 501"""
        await context.require_namespace(namespace)
        _require_own(context, clusters)
        await change_namespace(context, namespace, lambda _: {"replication_clusters": (context.cluster,)})

    @router.get(_TOPIC)
    async def get_topic_replication(topic: TopicPath) -> list[str]:
        """Return the clusters that have the topic: only this one"""
        await require_topic(context, topic)
        return [context.cluster]

    @router.post(_TOPIC, status_code=NO_CONTENT)
    async def set_topic_replication(topic: TopicPath, clusters: ClustersBody) -> None:
        """Set the clusters: only this one; others are 501"""
        await require_topic(context, topic)
        _require_own(context, clusters)

    @router.delete(_TOPIC, status_code=NO_CONTENT)
    async def remove_topic_replication(topic: TopicPath) -> None:
        """Succeed without effect: nothing to remove"""
        await require_topic(context, topic)

    return router


def _require_own(context: AdminContext, clusters: list[str]) -> None:
    if not clusters:
        raise PreconditionError(f"The list of clusters is empty: it must be [{context.cluster!r}]")
    if others := sorted({name for name in clusters if name != context.cluster}):
        named = ", ".join(others)[:200]
        raise NotServedError(f"This broker knows one cluster and does not replicate to {named}: set [{context.cluster!r}]")
