"""Calls on all topics of a namespace or of one bundle: clear backlogs, delete a subscription everywhere, unload."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import quote

from fastapi import APIRouter, Request

from cepheid_broker.admin.brokers import id_of_broker
from cepheid_broker.admin.bundle_calls import BundlePath, on_bundles, require_bundle, require_owner
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, NotServedError, PreconditionError
from cepheid_broker.admin.path_names import NamespacePath, SubscriptionPath
from cepheid_broker.admin.topic_access import open_topic
from cepheid_broker.admin.unserved import unserved
from cepheid_broker.ownership import Bundle
from cepheid_broker.topics import Topic
from cepheid_wire import NON_PERSISTENT, TopicName

NO_CONTENT = 204


def namespace_topics(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/namespaces/{tenant}/{namespace}")

    @router.put("/{bundle}/unload", status_code=NO_CONTENT)
    async def unload_bundle(namespace: NamespacePath, bundle: BundlePath, request: Request, destinationBroker: str = "") -> None:
        """Unload every open topic of the bundle, which moves to `destinationBroker`, or to another one if there is one. 412, and
        nothing moves, if that broker does not run, is draining, or is not allowed by an isolation policy"""
        found = await require_bundle(context, namespace, bundle)
        to = id_of_broker(context, request, destinationBroker) if destinationBroker else ""
        await require_owner(context, found)
        await context.broker.ownership.release(found, to=to)

    @router.delete("/{bundle}", status_code=NO_CONTENT)
    async def delete_bundle(namespace: NamespacePath, bundle: BundlePath) -> None:
        """Do nothing for an empty bundle; 409 for one with topics; any other word is 412, as in Pulsar"""
        if (reason := unserved(f"/admin/v2/namespaces/t/n/{bundle}")) is not None:
            raise NotServedError(f"DELETE {bundle} of {namespace}: {reason}")
        found = await require_bundle(context, namespace, bundle)
        catalog = context.broker.catalog
        topics = [*await catalog.topics_of(namespace), *await catalog.topics_of(namespace, NON_PERSISTENT)]
        if topics := [topic for topic in topics if found.holds(topic)]:
            raise ConflictError(f"Bundle {bundle} of {namespace} has {len(topics)} topics, one is {topics[0]}")

    @router.post("/clearBacklog", status_code=NO_CONTENT)
    async def clear_backlogs(namespace: NamespacePath) -> None:
        """Clear the backlog of every subscription of every topic"""
        await on_bundles(context, namespace, lambda bundle: _clear(context, bundle, None), "/clearBacklog")

    @router.post("/clearBacklog/{sub}", status_code=NO_CONTENT)
    async def clear_backlogs_of(namespace: NamespacePath, sub: SubscriptionPath) -> None:
        """Clear the backlog of this subscription on every topic that has it"""
        await on_bundles(context, namespace, lambda bundle: _clear(context, bundle, sub), f"/clearBacklog/{_segment(sub)}")

    @router.post("/{bundle}/clearBacklog", status_code=NO_CONTENT)
    async def clear_bundle(namespace: NamespacePath, bundle: BundlePath) -> None:
        """Clear the backlog of every subscription in the bundle"""
        found = await require_bundle(context, namespace, bundle)
        await require_owner(context, found)
        await _clear(context, found, None)

    @router.post("/{bundle}/clearBacklog/{sub}", status_code=NO_CONTENT)
    async def clear_bundle_of(namespace: NamespacePath, bundle: BundlePath, sub: SubscriptionPath) -> None:
        """Clear the backlog of this subscription in the bundle"""
        found = await require_bundle(context, namespace, bundle)
        await require_owner(context, found)
        await _clear(context, found, sub)

    @router.post("/unsubscribe/{sub}", status_code=NO_CONTENT)
    async def unsubscribe(namespace: NamespacePath, sub: SubscriptionPath) -> None:
        """Delete the subscription everywhere; 412 while a topic has consumers of it: then nothing of that bundle is deleted"""
        below = f"/unsubscribe/{_segment(sub)}"
        tolerate = (HTTPStatus.NOT_FOUND,)  # from brokers of earlier releases, if no topic of a bundle has it
        await on_bundles(context, namespace, lambda bundle: _unsubscribe(context, bundle, sub), below, tolerate=tolerate)

    @router.post("/{bundle}/unsubscribe/{sub}", status_code=NO_CONTENT)
    async def unsubscribe_bundle(namespace: NamespacePath, bundle: BundlePath, sub: SubscriptionPath) -> None:
        """Delete the subscription in one bundle"""
        found = await require_bundle(context, namespace, bundle)
        await require_owner(context, found)
        await _unsubscribe(context, found, sub)

    return router


async def _topics_in(context: AdminContext, bundle: Bundle) -> list[TopicName]:
    return [topic for topic in await context.broker.catalog.topics_of(bundle.namespace) if bundle.holds(topic)]


async def _clear(context: AdminContext, bundle: Bundle, name: str | None) -> None:
    """Clear backlogs, opening closed topics one by one: each may have a backlog."""
    for topic in await _topics_in(context, bundle):
        opened = await open_topic(context, topic)
        for subscription in list(opened.subscriptions.values()):
            if name is None or subscription.name == name:
                await subscription.clear_backlog()


async def _unsubscribe(context: AdminContext, bundle: Bundle, name: str) -> None:
    found: list[Topic] = []
    for topic in await _topics_in(context, bundle):
        opened = await open_topic(context, topic)
        if name in opened.subscriptions:
            found.append(opened)
            if consumers := len(opened.subscriptions[name].consumers):
                message = f"Subscription {name!r} of {topic} has {consumers} consumers: close them first"
                raise PreconditionError(message, topic=str(topic), subscription=name)
    for opened in found:
        await opened.delete_subscription(name)


def _segment(subscription: str) -> str:
    """Encode a name for a path segment that is decoded twice (raw_path.py)."""
    return quote(quote(subscription, safe=""), safe="")
