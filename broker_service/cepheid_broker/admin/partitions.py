"""Partitioned topics: create, count, grow, delete.

A partitioned topic is a record with a count; only its partitions can be opened.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from cepheid_broker.admin.access import may
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, NotAcceptableError, PreconditionError, UnprocessableError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.part_calls import Ask, on_parts
from cepheid_broker.admin.path_names import TopicPath
from cepheid_broker.admin.topic_access import require_idle, require_owner
from cepheid_broker.admin.topic_properties import refuse_shadow
from cepheid_broker.errors import TopicNotFoundError
from cepheid_broker.ownership import clients_in
from cepheid_metadata import KeyExistsError, list_topics, topic_records
from cepheid_security import Need
from cepheid_wire import PERSISTENT, TopicName

NO_CONTENT = 204


class PartitionedTopicMetadata(BaseModel):
    """The body that newer clients send instead of a plain number."""

    partitions: int
    properties: dict[str, str] | None = Field(default_factory=dict)


CountBody = Annotated[int | PartitionedTopicMetadata, json_body(int | PartitionedTopicMetadata)]
NumberBody = Annotated[int, json_body(int)]


def partitions(context: AdminContext) -> APIRouter:
    router = partitions_of(context, PERSISTENT)

    @router.post("/createMissedPartitions", status_code=NO_CONTENT)
    async def create_missed(topic: TopicPath) -> None:
        """Give partitions that were never opened the durable subscriptions of partition 0"""
        _refuse_partition_name(topic)
        if await context.broker.catalog.partitions(topic) == 0:
            raise ConflictError(f"Topic {topic} is not partitioned", topic=str(topic))
        await require_owner(context, topic)
        await context.broker.partitioned.create_missing(topic)

    return router


def partitions_of(context: AdminContext, domain: str) -> APIRouter:
    """Return the routes that both domains have."""
    router = APIRouter(prefix=f"/admin/v2/{domain}/{{tenant}}/{{namespace}}/{{topic}}")

    @router.put("/partitions", status_code=NO_CONTENT)
    async def create_partitioned(topic: TopicPath, count: CountBody) -> None:
        body = count if isinstance(count, PartitionedTopicMetadata) else PartitionedTopicMetadata(partitions=count)
        _refuse_partition_name(topic)
        refuse_shadow(body.properties)
        if not 1 <= body.partitions <= context.settings.max_partitions:
            limit = context.settings.max_partitions
            raise NotAcceptableError(f"{body.partitions} partitions: a topic may have 1 to {limit}", topic=str(topic))
        await _refuse_strays(context, topic, first=0)
        try:
            await context.broker.catalog.create(topic, body.partitions, body.properties or {})
        except KeyExistsError:
            raise ConflictError(f"Topic {topic} already exists", topic=str(topic)) from None

    @router.get("/partitions")
    async def count_partitions(topic: TopicPath, request: Request, checkAllowAutoCreation: bool = False) -> dict[str, Any]:
        """Return the number of partitions; 0: not partitioned"""
        return await _count(context, request, topic, may_create=checkAllowAutoCreation)

    @router.post("/partitions", status_code=NO_CONTENT)
    async def grow(topic: TopicPath, count: NumberBody, force: bool = False) -> None:
        """Grow up to 10,000 partitions; new ones get the durable subscriptions of partition 0, at earliest"""
        _refuse_partition_name(topic)
        await require_owner(context, topic)
        await _grow(context, topic, count, force=force)

    @router.delete("/partitions", status_code=NO_CONTENT)
    async def delete_partitioned(topic: TopicPath, force: bool = False, onlyIfMarked: bool = False) -> None:
        """Delete with all partitions; `force` closes clients. `onlyIfMarked` is for brokers: 404 unless its deletion has begun"""
        _refuse_partition_name(topic)
        await require_owner(context, topic)
        if onlyIfMarked and not await context.broker.partitioned.is_marked(topic):
            raise TopicNotFoundError(f"Topic {topic} is not being deleted", topic=str(topic))
        await _delete(context, topic, force=force)

    return router


async def _count(context: AdminContext, request: Request, topic: TopicName, *, may_create: bool) -> dict[str, Any]:
    """Return the number of partitions; with `checkAllowAutoCreation` a missing partitioned topic is created.

    A plain topic is created only when a client connects (docs/reference/behaviours.md §4).
    """
    found = await topic_records(context.store).get(topic)
    if found is not None:
        record = found.record
        return {"partitions": record.partitions, "deleted": bool(record.deleted), "properties": record.properties}
    if await context.broker.catalog.partitions(topic) is not None:  # a partition of a partitioned topic
        return {"partitions": 0, "deleted": False, "properties": {}}
    count = 0
    creation = await context.broker.catalog.creation_in(topic.namespace)
    if not (may_create and creation.allowed):
        raise TopicNotFoundError(f"Topic {topic} does not exist", topic=str(topic))
    if creation.topic_type == "partitioned":
        may_create = not topic.is_partition or await may(context, request, Need.PRODUCE_OR_CONSUME, topic.namespace)
        count = await context.broker.catalog.partitions_or_create(topic, may_create=may_create)
    return {"partitions": count, "deleted": False, "properties": {}}


async def _grow(context: AdminContext, topic: TopicName, count: int, *, force: bool) -> None:
    now = await context.broker.catalog.partitions(topic)
    if now is None:
        raise TopicNotFoundError(f"Topic {topic} does not exist", topic=str(topic))
    if now == 0:
        raise ConflictError(f"Topic {topic} is not partitioned", topic=str(topic))
    if not now <= count <= context.settings.max_partitions:
        limit = context.settings.max_partitions
        raise UnprocessableError(
            f"Topic {topic} has {now} partitions: it may be grown up to {limit}, not to {count}", topic=str(topic)
        )
    if not force:
        await _refuse_strays(context, topic, first=now)
    await context.broker.partitioned.grow(topic, count)


async def _delete(context: AdminContext, topic: TopicName, *, force: bool) -> None:
    if await context.broker.catalog.partitions(topic) == 0:
        raise ConflictError(f"Topic {topic} is not partitioned", topic=str(topic))
    if not force:
        await on_parts(context, topic, lambda part: _require_part_idle(context, part), Ask("GET", "/stats", read=_read_idle))
    await context.broker.partitioned.delete(topic, force=force)


async def _require_part_idle(context: AdminContext, part: TopicName) -> None:
    await require_owner(context, part)
    require_idle(context, part)


def _read_idle(stats: Any) -> None:
    if clients := clients_in(stats):
        raise PreconditionError(f"A partition at another broker has {clients} clients")


def _refuse_partition_name(topic: TopicName) -> None:
    if topic.is_partition:
        raise PreconditionError(f"{topic} is the name of a partition: use the name of the partitioned topic", topic=str(topic))


async def _refuse_strays(context: AdminContext, topic: TopicName, *, first: int) -> None:
    """Refuse if plain topics have names of the new partitions: they would silently become partitions."""
    namespace = topic.namespace
    for found in await list_topics(context.store, namespace.tenant, namespace.local_name, topic.domain):
        if found.base == topic and found.partition_index >= first:
            raise ConflictError(f"Topic {found} exists, and is not a partition of {topic}", topic=str(topic))
