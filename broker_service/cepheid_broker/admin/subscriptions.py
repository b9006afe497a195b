"""Subscriptions of a topic: list, create, delete, set properties. On a partitioned topic each call applies to every partition."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Request

from cepheid_broker.admin.access import may
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.message_ids import MessageIdBody, OptionalMessageIdIn, require_place
from cepheid_broker.admin.part_calls import Ask, on_parts, same_call
from cepheid_broker.admin.path_names import SubscriptionPath, TopicPath
from cepheid_broker.admin.topic_access import open_subscription, open_topic, parts_of
from cepheid_broker.errors import TopicNotFoundError
from cepheid_metadata import LATEST
from cepheid_security import Need
from cepheid_wire import TopicName

NO_CONTENT = 204
_NOT_THERE = (HTTPStatus.NOT_FOUND,)  # a subscription on only some partitions is not an error
PropertiesBody = Annotated[dict[str, str], json_body(dict[str, str])]


def subscriptions(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.get("/subscriptions")
    async def list_subscriptions(topic: TopicPath, request: Request) -> list[str]:
        """Return the subscriptions of all partitions"""

        async def names_of(part: TopicName) -> list[str]:
            return list((await open_topic(context, part)).subscriptions)

        found = await on_parts(context, topic, names_of, same_call(request))
        return list({name: None for names in found.values() for name in names})

    @router.put("/subscription/{sub}", status_code=NO_CONTENT)
    async def create_subscription(topic: TopicPath, sub: SubscriptionPath, start: OptionalMessageIdIn, request: Request) -> None:
        """Create a subscription at a message id, earliest or latest (no body), with properties; creates the topic if that is
        allowed"""
        await _create(context, request, topic, sub, start)

    @router.delete("/subscription/{sub}", status_code=NO_CONTENT)
    async def delete_subscription(topic: TopicPath, sub: SubscriptionPath, request: Request, force: bool = False) -> None:
        """Delete a subscription; with consumers connected: 412 without `force`"""
        if not force:
            await _require_unused(context, topic, sub)
        await _delete(context, topic, sub, same_call(request))

    @router.get("/subscription/{sub}/properties")
    async def get_properties(topic: TopicPath, sub: SubscriptionPath, request: Request) -> dict[str, str]:
        """Return the properties of all partitions together"""

        async def properties_of(part: TopicName) -> dict[str, str]:
            _, subscription = await open_subscription(context, part, sub)
            return dict(subscription.cursor.properties)

        found = await on_parts(context, topic, properties_of, same_call(request), tolerate=_NOT_THERE)
        return {name: value for properties in found.values() for name, value in properties.items()}

    @router.put("/subscription/{sub}/properties", status_code=NO_CONTENT)
    async def put_properties(topic: TopicPath, sub: SubscriptionPath, properties: PropertiesBody, request: Request) -> None:
        """Replace all properties"""

        async def put_on(name: TopicName) -> None:
            part, _ = await open_subscription(context, name, sub)
            await part.set_subscription_properties(sub, properties)

        await on_parts(context, topic, put_on, same_call(request), tolerate=_NOT_THERE)

    return router


async def _create(context: AdminContext, request: Request, topic: TopicName, name: str, body: MessageIdBody | None) -> None:
    """Create the subscription on the partitions that lack it."""
    try:
        may_create = not topic.is_partition or await may(context, request, Need.CONSUME, topic.namespace)
        await context.broker.catalog.partitions_or_create(topic, may_create=may_create)
    except TopicNotFoundError as error:
        raise PreconditionError(str(error), topic=str(topic)) from None
    first, properties = (LATEST, None) if body is None else (body.first, body.properties)
    if body is not None and body.position.ledger_id >= 0 and body.position != LATEST:
        await _require_single(context, topic)

    async def create_on(part_name: TopicName) -> None:
        part = await open_topic(context, part_name)
        if name in part.subscriptions:
            raise ConflictError(f"Subscription {name!r} of {part_name} already exists", topic=str(part_name), subscription=name)
        await part.create_subscription(name, require_place(part, first), properties=properties)

    await on_parts(context, topic, create_on, same_call(request), tolerate={HTTPStatus.CONFLICT})


async def _require_single(context: AdminContext, topic: TopicName) -> None:
    """Refuse a message id for several partitions: it is valid in only one of them."""
    if await parts_of(context, topic) != [topic]:
        raise PreconditionError(
            f"Topic {topic} is partitioned: start at earliest or latest, or name one partition", topic=str(topic)
        )


async def _require_unused(context: AdminContext, topic: TopicName, name: str) -> None:
    """Check all parts for consumers before anything is deleted."""

    async def consumers_of(part: TopicName) -> int:
        _, subscription = await open_subscription(context, part, name)
        return len(subscription.consumers)

    def read(stats: Any) -> int:
        return len(stats["subscriptions"].get(name, {}).get("consumers", ()))

    found = await on_parts(context, topic, consumers_of, Ask("GET", "/stats", read=read), tolerate=_NOT_THERE)
    if consumers := sum(found.values()):
        raise PreconditionError(f"Subscription {name!r} of {topic} has {consumers} consumers", topic=str(topic), subscription=name)


async def _delete(context: AdminContext, topic: TopicName, name: str, ask: Ask) -> None:
    async def delete_on(part_name: TopicName) -> None:
        part, _ = await open_subscription(context, part_name, name)
        await part.delete_subscription(name)

    await on_parts(context, topic, delete_on, ask, tolerate=_NOT_THERE)
