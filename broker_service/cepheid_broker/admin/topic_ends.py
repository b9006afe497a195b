"""Ending a topic, and giving up its entries: terminate, trim, truncate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotAllowedHereError
from cepheid_broker.admin.message_ids import message_id
from cepheid_broker.admin.part_calls import Ask, on_parts, same_call
from cepheid_broker.admin.path_names import TopicPath
from cepheid_broker.admin.topic_access import open_plain, open_topic, parts_of
from cepheid_broker.topics import Topic
from cepheid_wire import TopicName

NO_CONTENT = 204


def topic_ends(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.post("/terminate")
    async def terminate(topic: TopicPath) -> dict[str, Any]:
        """End the topic: nothing more can ever be published; return the last message id. A repeated call returns the same"""
        return await _terminate(await open_plain(context, topic))

    @router.post("/terminate/partitions")
    async def terminate_partitions(topic: TopicPath) -> dict[str, dict[str, Any]]:
        """Terminate every partition of a partitioned topic"""
        if await parts_of(context, topic) == [topic]:
            raise NotAllowedHereError(f"Topic {topic} is not partitioned: terminate it by its own name", topic=str(topic))
        found = await on_parts(context, topic, lambda part: _terminate_part(context, part), Ask("POST", "/terminate"))
        return {str(part.partition_index): last for part, last in found.items()}

    @router.post("/trim", status_code=NO_CONTENT)
    async def trim(topic: TopicPath, request: Request) -> None:
        """Delete now what every subscription has acknowledged and retention does not keep, ledger by ledger"""

        async def trim_part(part: TopicName) -> None:
            await (await open_topic(context, part)).trim()

        await on_parts(context, topic, trim_part, same_call(request))

    @router.delete("/truncate", status_code=NO_CONTENT)
    async def truncate(topic: TopicPath, request: Request) -> None:
        """Move every subscription to the end and delete everything published before, despite retention"""

        async def truncate_part(part: TopicName) -> None:
            await (await open_topic(context, part)).truncate()

        await on_parts(context, topic, truncate_part, same_call(request))

    return router


async def _terminate_part(context: AdminContext, part: TopicName) -> dict[str, Any]:
    return await _terminate(await open_topic(context, part))


async def _terminate(topic: Topic) -> dict[str, Any]:
    return message_id(await topic.terminate(), topic.name)
