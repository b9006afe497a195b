"""Subscriptions of a topic: list, create, delete, label. On a partitioned topic each call goes to every partition."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.message_ids import MessageIdBody, OptionalMessageIdIn, require_place
from cepheid_broker.admin.path_names import SubscriptionPath, TopicPath
from cepheid_broker.admin.topic_access import open_parts, parts_of, subscription_on_parts
from cepheid_broker.errors import TopicNotFoundError
from cepheid_broker.position import LATEST
from cepheid_wire import TopicName

NO_CONTENT = 204
PropertiesBody = Annotated[dict[str, str], json_body(dict[str, str])]


def subscriptions(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.get("/subscriptions")
    async def list_subscriptions(topic: TopicPath) -> list[str]:
        """Those of any partition"""
        return list({name: None for part in await open_parts(context, topic) for name in part.subscriptions})

    @router.put("/subscription/{sub}", status_code=NO_CONTENT)
    async def create_subscription(topic: TopicPath, sub: SubscriptionPath, start: OptionalMessageIdIn) -> None:
        """At a message id, earliest or latest (no body), with properties. May create the topic where that is allowed"""
        await _create(context, topic, sub, start)

    @router.delete("/subscription/{sub}", status_code=NO_CONTENT)
    async def delete_subscription(topic: TopicPath, sub: SubscriptionPath, force: bool = False) -> None:
        """With consumers connected: 412 without `force`"""
        await _delete(context, topic, sub, force=force)

    @router.get("/subscription/{sub}/properties")
    async def get_properties(topic: TopicPath, sub: SubscriptionPath) -> dict[str, str]:
        """Of all partitions together"""
        found = await subscription_on_parts(context, topic, sub)
        return {name: value for _, subscription in found for name, value in subscription.cursor.properties.items()}

    @router.put("/subscription/{sub}/properties", status_code=NO_CONTENT)
    async def put_properties(topic: TopicPath, sub: SubscriptionPath, properties: PropertiesBody) -> None:
        """Replaces them all"""
        for part, _ in await subscription_on_parts(context, topic, sub):
            await part.set_subscription_properties(sub, properties)

    return router


async def _create(context: AdminContext, topic: TopicName, name: str, body: MessageIdBody | None) -> None:
    """Existing on some partitions only is not an error: the others get it."""
    try:
        await context.broker.catalog.partitions_or_create(topic)
    except TopicNotFoundError as error:
        raise PreconditionError(str(error), topic=str(topic)) from None
    first, properties = (LATEST, None) if body is None else (body.first, body.properties)
    if body is not None and body.position.ledger_id >= 0 and body.position != LATEST:
        await _require_single(context, topic)
    created = False
    for part in await open_parts(context, topic):
        if name not in part.subscriptions:
            created = True
            await part.create_subscription(name, require_place(part, first), properties=properties)
    if not created:
        raise ConflictError(f"Subscription {name!r} of {topic} already exists", topic=str(topic), subscription=name)


async def _require_single(context: AdminContext, topic: TopicName) -> None:
    """A message lies in one partition: on the others its id means nothing."""
    if await parts_of(context, topic) != [topic]:
        raise PreconditionError(
            f"Topic {topic} is partitioned: start at earliest or latest, or name one partition", topic=str(topic)
        )


async def _delete(context: AdminContext, topic: TopicName, name: str, *, force: bool) -> None:
    found = await subscription_on_parts(context, topic, name)
    consumers = sum(len(subscription.consumers) for _, subscription in found)
    if consumers and not force:
        raise PreconditionError(f"Subscription {name!r} of {topic} has {consumers} consumers", topic=str(topic), subscription=name)
    for part, _ in found:
        await part.delete_subscription(name)
