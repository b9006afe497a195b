"""Topics of both domains: list, create, delete, unload. What only stored topics have is in other modules."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request

from cepheid_broker.admin.access import visible_topics
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import ConflictError, NotAllowedHereError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.part_calls import on_parts, same_call
from cepheid_broker.admin.path_names import NamespacePath, TopicPath
from cepheid_broker.admin.topic_access import open_topic, require_idle, require_owner
from cepheid_broker.admin.topic_lists import is_shown, partitioned_topics_in, topics_in
from cepheid_broker.admin.topic_properties import refuse_shadow
from cepheid_broker.ownership import bundle_of, division_of
from cepheid_broker.topics import last_message
from cepheid_metadata import KeyExistsError
from cepheid_wire import PERSISTENT, TopicName

NO_CONTENT = 204

PropertiesBody = Annotated[dict[str, str] | None, json_body(dict[str, str] | None)]


def topics(context: AdminContext) -> APIRouter:
    router = topics_of(context, PERSISTENT)

    @router.get("/{topic}/lastMessageId")
    async def last_message_id(topic: TopicPath) -> dict[str, int]:
        if await context.broker.catalog.partitions(topic):
            raise NotAllowedHereError(f"Topic {topic} is partitioned: ask one of its partitions", topic=str(topic))
        position, batch_index = await last_message((await open_topic(context, topic)).ledger)
        answer = {"ledgerId": position.ledger_id, "entryId": position.entry_id, "partitionIndex": topic.partition_index}
        return answer if batch_index is None else {**answer, "batchIndex": batch_index}

    return router


def topics_of(context: AdminContext, domain: str) -> APIRouter:
    """Return the routes that both domains have."""
    router = APIRouter(prefix=f"/admin/v2/{domain}/{{tenant}}/{{namespace}}")

    @router.get("")
    async def list_topics(
        namespace: NamespacePath,
        request: Request,
        bundle: str | None = None,
        includeSystemTopic: bool = False,
    ) -> list[str]:
        """Return topics that the role may use: partitions one by one, never the name of a partitioned topic"""
        found = [topic for topic in await topics_in(context, namespace, domain) if is_shown(topic, includeSystemTopic)]
        if bundle is not None:
            division = division_of((await context.require_namespace(namespace)).record)
            found = [topic for topic in found if bundle_of(topic, division).range == bundle]
        return [str(topic) for topic in await visible_topics(context, request, namespace, found)]

    @router.get("/partitioned")
    async def list_partitioned(namespace: NamespacePath, request: Request, includeSystemTopic: bool = False) -> list[str]:
        """Return the names of partitioned topics that the role may use"""
        found = await partitioned_topics_in(context, namespace, domain)
        return [
            str(topic) for topic in await visible_topics(context, request, namespace, found) if is_shown(topic, includeSystemTopic)
        ]

    @router.put("/{topic}", status_code=NO_CONTENT)
    async def create_topic(topic: TopicPath, properties: PropertiesBody) -> None:
        await _check_partition_name(context, topic)
        refuse_shadow(properties)
        try:
            await context.broker.catalog.create(topic, 0, properties or {})
        except KeyExistsError:
            raise ConflictError(f"Topic {topic} already exists", topic=str(topic)) from None

    @router.delete("/{topic}", status_code=NO_CONTENT)
    async def delete_topic(topic: TopicPath, force: bool = False) -> None:
        """Delete a topic; `force` closes clients. A partitioned topic is deleted with its partitions"""
        if await context.broker.catalog.partitions(topic):
            raise ConflictError(f"Topic {topic} is partitioned: delete it with its partitions", topic=str(topic))
        await require_owner(context, topic)
        if not force:
            require_idle(context, topic)
        await context.broker.topics.delete(topic, force=force)

    @router.put("/{topic}/unload", status_code=NO_CONTENT)
    async def unload_topic(topic: TopicPath, request: Request) -> None:
        """Unload a topic, or all partitions of a partitioned topic"""

        async def unload_part(part: TopicName) -> None:
            await require_owner(context, part)
            await context.broker.topics.unload(part)

        await on_parts(context, topic, unload_part, same_call(request))

    return router


async def _check_partition_name(context: AdminContext, topic: TopicName) -> None:
    """Refuse `x-partition-3` unless `x` has it: as a plain topic it would become a partition when `x` is created."""
    if not topic.is_partition:
        return
    if await context.broker.catalog.partitions(topic) is not None:
        raise ConflictError(f"Topic {topic} already exists", topic=str(topic))
    raise PreconditionError(
        f"{topic.base} has no partition {topic.partition_index}; {topic} cannot be a topic of its own", topic=str(topic)
    )
