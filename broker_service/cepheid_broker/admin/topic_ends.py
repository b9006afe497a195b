"""Ending a topic, and giving up what is in it: terminate, trim, truncate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotAllowedHereError
from cepheid_broker.admin.message_ids import message_id
from cepheid_broker.admin.path_names import TopicPath
from cepheid_broker.admin.topic_access import open_parts, open_plain, parts_of
from cepheid_broker.topic import Topic

NO_CONTENT = 204


def topic_ends(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.post("/terminate")
    async def terminate(topic: TopicPath) -> dict[str, Any]:
        """Nothing more can be published, ever; answers the last message id. Again: the same answer"""
        return await _terminate(await open_plain(context, topic))

    @router.post("/terminate/partitions")
    async def terminate_partitions(topic: TopicPath) -> dict[str, dict[str, Any]]:
        """Every partition of a partitioned topic"""
        if await parts_of(context, topic) == [topic]:
            raise NotAllowedHereError(f"Topic {topic} is not partitioned: terminate it by its own name", topic=str(topic))
        return {str(part.name.partition_index): await _terminate(part) for part in await open_parts(context, topic)}

    @router.post("/trim", status_code=NO_CONTENT)
    async def trim(topic: TopicPath) -> None:
        """Deletes now what every subscription has acknowledged and retention does not keep, ledger by ledger"""
        for part in await open_parts(context, topic):
            await part.trim()

    @router.delete("/truncate", status_code=NO_CONTENT)
    async def truncate(topic: TopicPath) -> None:
        """Every subscription goes to the end, and everything published before is deleted, whatever retention says"""
        for part in await open_parts(context, topic):
            await part.truncate()

    return router


async def _terminate(topic: Topic) -> dict[str, Any]:
    return message_id(await topic.terminate(), topic.name)
