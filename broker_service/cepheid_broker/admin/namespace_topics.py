"""All topics of a namespace, or of one bundle of it, at once: clear backlogs, delete a subscription everywhere, unload."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated

from fastapi import APIRouter, Depends

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, NotFoundError, NotServedError, PreconditionError
from cepheid_broker.admin.path_names import NamespacePath, SubscriptionPath
from cepheid_broker.admin.raw_path import decode_once
from cepheid_broker.admin.topic_access import open_topic
from cepheid_broker.admin.unserved import unserved
from cepheid_broker.bundles import boundaries, bundle_of
from cepheid_broker.topic import Topic
from cepheid_wire import NON_PERSISTENT, NamespaceName, TopicName

NO_CONTENT = 204


async def _bundle(bundle: str) -> str:
    return decode_once(bundle)


BundlePath = Annotated[str, Depends(_bundle)]


def namespace_topics(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/namespaces/{tenant}/{namespace}")

    @router.put("/{bundle}/unload", status_code=NO_CONTENT)
    async def unload_bundle(namespace: NamespacePath, bundle: BundlePath) -> None:
        """Every open topic of the bundle; `destinationBroker` is ignored: there is one"""
        is_inside = await _in_bundle(context, namespace, bundle)
        for topic in context.broker.topics.loaded():
            if topic.name.namespace == namespace and is_inside(topic.name):
                await context.broker.topics.unload(topic.name)

    @router.delete("/{bundle}", status_code=NO_CONTENT)
    async def delete_bundle(namespace: NamespacePath, bundle: BundlePath) -> None:
        """Nothing to do for an empty bundle, 409 for one with topics; any other word is 412, as in Pulsar"""
        if (reason := unserved(f"/admin/v2/namespaces/t/n/{bundle}")) is not None:
            raise NotServedError(f"DELETE {bundle} of {namespace}: {reason}")
        is_inside = await _in_bundle(context, namespace, bundle)
        catalog = context.broker.catalog
        topics = [*await catalog.topics_of(namespace), *await catalog.topics_of(namespace, NON_PERSISTENT)]
        if topics := [topic for topic in topics if is_inside(topic)]:
            raise ConflictError(f"Bundle {bundle} of {namespace} has {len(topics)} topics, one is {topics[0]}")

    @router.post("/clearBacklog", status_code=NO_CONTENT)
    async def clear_backlogs(namespace: NamespacePath) -> None:
        """Of every subscription of every topic"""
        await _clear(context, namespace, None, None)

    @router.post("/clearBacklog/{sub}", status_code=NO_CONTENT)
    async def clear_backlogs_of(namespace: NamespacePath, sub: SubscriptionPath) -> None:
        """Of this subscription on every topic that has it"""
        await _clear(context, namespace, None, sub)

    @router.post("/{bundle}/clearBacklog", status_code=NO_CONTENT)
    async def clear_bundle(namespace: NamespacePath, bundle: BundlePath) -> None:
        """Of every subscription in the bundle"""
        await _clear(context, namespace, bundle, None)

    @router.post("/{bundle}/clearBacklog/{sub}", status_code=NO_CONTENT)
    async def clear_bundle_of(namespace: NamespacePath, bundle: BundlePath, sub: SubscriptionPath) -> None:
        """Of this subscription in the bundle"""
        await _clear(context, namespace, bundle, sub)

    @router.post("/unsubscribe/{sub}", status_code=NO_CONTENT)
    async def unsubscribe(namespace: NamespacePath, sub: SubscriptionPath) -> None:
        """Deletes it on every topic; 412 while one of them has consumers of it: then nothing is deleted"""
        await _unsubscribe(context, namespace, None, sub)

    @router.post("/{bundle}/unsubscribe/{sub}", status_code=NO_CONTENT)
    async def unsubscribe_bundle(namespace: NamespacePath, bundle: BundlePath, sub: SubscriptionPath) -> None:
        """The same in one bundle"""
        await _unsubscribe(context, namespace, bundle, sub)

    return router


async def _in_bundle(context: AdminContext, namespace: NamespaceName, bundle: str) -> Callable[[TopicName], bool]:
    """Raises PreconditionError when `bundle` is none of the namespace's."""
    count = (await context.require_namespace(namespace)).record.bundles
    ends = boundaries(count)
    if bundle not in [f"{start}_{end}" for start, end in pairwise(ends)]:
        message = f"{bundle[:200]!r} is no bundle of {namespace}: they start at {', '.join(ends[:-1])}"
        raise PreconditionError(message, namespace=str(namespace))
    return lambda topic: bundle_of(topic, count).range == bundle


async def _stored_topics(context: AdminContext, namespace: NamespaceName, bundle: str | None) -> list[TopicName]:
    if bundle is None:
        return await context.broker.catalog.topics_of(namespace)
    is_inside = await _in_bundle(context, namespace, bundle)
    return [topic for topic in await context.broker.catalog.topics_of(namespace) if is_inside(topic)]


async def _clear(context: AdminContext, namespace: NamespaceName, bundle: str | None, name: str | None) -> None:
    """Topics that are not open are opened one by one: each may have a backlog."""
    for topic in await _stored_topics(context, namespace, bundle):
        opened = await open_topic(context, topic)
        for subscription in list(opened.subscriptions.values()):
            if name is None or subscription.name == name:
                await subscription.clear_backlog()


async def _unsubscribe(context: AdminContext, namespace: NamespaceName, bundle: str | None, name: str) -> None:
    found: list[Topic] = []
    for topic in await _stored_topics(context, namespace, bundle):
        opened = await open_topic(context, topic)
        if name in opened.subscriptions:
            found.append(opened)
            if consumers := len(opened.subscriptions[name].consumers):
                message = f"Subscription {name!r} of {topic} has {consumers} consumers: close them first"
                raise PreconditionError(message, topic=str(topic), subscription=name)
    if not found:
        raise NotFoundError(f"No topic of {namespace} has a subscription {name!r}", namespace=str(namespace), subscription=name)
    for opened in found:
        await opened.delete_subscription(name)
