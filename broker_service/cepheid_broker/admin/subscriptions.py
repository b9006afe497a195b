"""Subscriptions of a topic: list, create, delete. On a partitioned topic each call goes to every partition."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, NotFoundError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.path_names import SubscriptionPath, TopicPath
from cepheid_broker.admin.topic_access import open_topic, parts_of
from cepheid_broker.errors import TopicNotFoundError
from cepheid_broker.position import EARLIEST, LATEST, Position
from cepheid_wire import TopicName

NO_CONTENT = 204
_MAX_ID = (1 << 63) - 1


class MessageIdBody(BaseModel):
    """Where a new subscription starts (docs/reference/shapes.md §8, ResetCursorData)."""

    ledgerId: int = Field(ge=-1, le=_MAX_ID)
    entryId: int = Field(ge=-1, le=_MAX_ID)
    isExcluded: bool = False
    properties: dict[str, str] | None = None

    @property
    def first(self) -> Position:
        """The first entry that is delivered."""
        position = Position(self.ledgerId, self.entryId)
        if self.isExcluded and position not in (EARLIEST, LATEST):
            return Position(self.ledgerId, self.entryId + 1)
        return position


PositionBody = Annotated[MessageIdBody | None, json_body(MessageIdBody | None)]


def subscriptions(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.get("/subscriptions")
    async def list_subscriptions(topic: TopicPath) -> list[str]:
        names: dict[str, None] = {}
        for part in await parts_of(context, topic):
            names |= dict.fromkeys((await open_topic(context, part)).subscriptions)
        return list(names)

    @router.put("/subscription/{sub}", status_code=NO_CONTENT)
    async def create_subscription(topic: TopicPath, sub: SubscriptionPath, position: PositionBody) -> None:
        await _create(context, topic, sub, position)

    @router.delete("/subscription/{sub}", status_code=NO_CONTENT)
    async def delete_subscription(topic: TopicPath, sub: SubscriptionPath, force: bool = False) -> None:
        await _delete(context, topic, sub, force=force)

    return router


async def _create(context: AdminContext, topic: TopicName, name: str, body: MessageIdBody | None) -> None:
    """Existing on some partitions only is not an error: the others get it."""
    try:
        await context.broker.catalog.partitions_or_create(topic)
    except TopicNotFoundError as error:
        raise PreconditionError(str(error), topic=str(topic)) from None
    created = False
    for part in await parts_of(context, topic):
        opened = await open_topic(context, part)
        if name not in opened.subscriptions:
            created = True
            first, properties = (LATEST, None) if body is None else (body.first, body.properties)
            await opened.create_subscription(name, first, properties=properties)
    if not created:
        raise ConflictError(f"Subscription {name!r} of {topic} already exists", topic=str(topic), subscription=name)


async def _delete(context: AdminContext, topic: TopicName, name: str, *, force: bool) -> None:
    parts = [await open_topic(context, part) for part in await parts_of(context, topic)]
    found = [part for part in parts if name in part.subscriptions]
    if not found:
        raise NotFoundError(f"Subscription {name!r} of {topic} does not exist", topic=str(topic), subscription=name)
    consumers = sum(len(part.subscriptions[name].consumers) for part in found)
    if consumers and not force:
        raise PreconditionError(f"Subscription {name!r} of {topic} has {consumers} consumers", topic=str(topic), subscription=name)
    for part in found:
        await part.delete_subscription(name)
