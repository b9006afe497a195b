"""Statistics over the API: of topics, of partitioned topics, and of what lies below them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cepheid_broker.admin.brokers import broker_id
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError, PreconditionError
from cepheid_broker.admin.internal_stats import internal_stats
from cepheid_broker.admin.path_names import TopicPath
from cepheid_broker.admin.topic_access import open_topic, parts_of, require_plain
from cepheid_broker.admin.topic_stats import StoredFigures, summed_stats, topic_stats
from cepheid_broker.topic import Topic
from cepheid_metadata import ledger_records, topic_records
from cepheid_wire import TopicName


def stats(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.get("/stats")
    async def get_stats(
        topic: TopicPath,
        request: Request,
        excludePublishers: bool = False,
        excludeConsumers: bool = False,
    ) -> dict[str, Any]:
        await require_plain(context, topic)
        opened = await open_topic(context, topic)
        stored = await _stored(context, opened, broker_id(context, request))
        return topic_stats(opened.figures(), stored, publishers=not excludePublishers, consumers=not excludeConsumers)

    @router.get("/partitioned-stats")
    async def get_partitioned_stats(
        topic: TopicPath,
        request: Request,
        perPartition: bool = True,
        excludePublishers: bool = False,
        excludeConsumers: bool = False,
    ) -> dict[str, Any]:
        metadata = await _partitioned_metadata(context, topic)
        parts: dict[str, dict[str, Any]] = {}
        for part in await parts_of(context, topic):
            opened = await open_topic(context, part)
            stored = await _stored(context, opened, broker_id(context, request))
            parts[str(part)] = topic_stats(
                opened.figures(), stored, publishers=not excludePublishers, consumers=not excludeConsumers
            )
        return summed_stats(parts, metadata, per_partition=perPartition)

    @router.get("/internalStats")
    async def get_internal_stats(topic: TopicPath) -> dict[str, Any]:
        await require_plain(context, topic)
        return await _internal(context, topic)

    @router.get("/partitioned-internalStats")
    async def get_partitioned_internal_stats(topic: TopicPath) -> dict[str, Any]:
        metadata = await _partitioned_metadata(context, topic)
        return {
            "metadata": metadata,
            "partitions": {str(part): await _internal(context, part) for part in await parts_of(context, topic)},
        }

    return router


async def _partitioned_metadata(context: AdminContext, topic: TopicName) -> dict[str, Any]:
    if topic.is_partition:
        raise PreconditionError(f"{topic} is the name of a partition: use the name of the partitioned topic", topic=str(topic))
    found = await topic_records(context.store).get(topic)
    if found is None or found.record.partitions == 0:
        raise NotFoundError(f"Topic {topic} is not partitioned, or does not exist", topic=str(topic))
    return {"partitions": found.record.partitions, "deleted": False, "properties": found.record.properties}


async def _stored(context: AdminContext, topic: Topic, owner_broker: str) -> StoredFigures:
    found = await topic_records(context.store).get(topic.name) or await topic_records(context.store).get(topic.name.base)
    figures = topic.ledger.statistics()
    created_at_ms = 0 if found is None else found.record.created_at_ms
    return StoredFigures(figures.entries, figures.size_bytes, created_at_ms, owner_broker)


async def _internal(context: AdminContext, name: TopicName) -> dict[str, Any]:
    topic = await open_topic(context, name)
    figures = topic.ledger.statistics()
    last = await ledger_records(context.store).get(figures.ledgers[-1].ledger_id)
    return internal_stats(
        figures,
        {name: cursor.ack_set.acked for name, cursor in topic.ledger.cursors.items()},
        pending_entries=sum(producer.pending_entries for producer in topic.producers.values()),
        last_ledger_created_at_ms=0 if last is None else last.record.created_at_ms,
    )
