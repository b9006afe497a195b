"""Non-persistent topics in the API: calls shared with stored topics, and their own statistics.

Calls that need stored entries are refused with the status that Pulsar has for it (unserved.py).
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cepheid_broker.admin.brokers import broker_id
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError, PreconditionError
from cepheid_broker.admin.part_calls import Ask, on_parts, same_call
from cepheid_broker.admin.partitions import partitions_of
from cepheid_broker.admin.path_names import TopicPath
from cepheid_broker.admin.summed_stats import summed_stats
from cepheid_broker.admin.topic_access import open_topic, require_plain
from cepheid_broker.admin.topic_stats import StoredFigures, topic_stats
from cepheid_broker.admin.topics import topics_of
from cepheid_broker.topics import NonPersistentSubscription, Topic
from cepheid_wire import NON_PERSISTENT, TopicName

_NO_LEDGER = {"ledgerId": -1, "entries": -1, "size": -1, "offloaded": False, "underReplicated": False}
_NOTHING_STORED = {
    "entriesAddedCounter": 0,
    "numberOfEntries": 0,
    "totalSize": 0,
    "currentLedgerEntries": 0,
    "currentLedgerSize": 0,
    "waitingCursorsCount": 0,
    "pendingAddEntriesCount": 0,
    "ledgers": [],
    "cursors": {},
    "schemaLedgers": [],
    "compactedLedger": _NO_LEDGER,
}


def non_persistent_topics(context: AdminContext) -> APIRouter:
    return topics_of(context, NON_PERSISTENT)


def non_persistent_partitions(context: AdminContext) -> APIRouter:
    return partitions_of(context, NON_PERSISTENT)


def non_persistent_stats(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix=f"/admin/v2/{NON_PERSISTENT}/{{tenant}}/{{namespace}}/{{topic}}")

    @router.get("/stats")
    async def get_stats(topic: TopicPath, request: Request) -> dict[str, Any]:
        """Return rates, clients, and what was dropped"""
        await require_plain(context, topic)
        return await _stats(context, topic, request)

    @router.get("/partitioned-stats")
    async def get_partitioned_stats(topic: TopicPath, request: Request, perPartition: bool = True) -> dict[str, Any]:
        """Return the statistics of all partitions together, and of each"""
        if topic.is_partition:
            raise PreconditionError(f"{topic} is the name of a partition: use the name of the partitioned topic", topic=str(topic))
        found = await context.broker.catalog.find(topic)
        if found is None or found.record.partitions == 0:
            raise NotFoundError(f"Topic {topic} is not partitioned, or does not exist", topic=str(topic))
        record = found.record
        metadata = {"partitions": record.partitions, "deleted": bool(record.deleted), "properties": record.properties}
        parts = await on_parts(context, topic, lambda part: _stats(context, part, request), Ask("GET", "/stats"))
        return summed_stats({str(part): found for part, found in parts.items()}, metadata, per_partition=perPartition)

    @router.get("/internalStats")
    async def get_internal_stats(topic: TopicPath) -> dict[str, Any]:
        """Return zeros, as nothing is stored"""
        await require_plain(context, topic)
        return _NOTHING_STORED

    @router.get("/subscriptions")
    async def list_subscriptions(topic: TopicPath, request: Request) -> list[str]:
        """Return the subscriptions that exist now on any partition"""

        async def names_of(part: TopicName) -> list[str]:
            return list((await open_topic(context, part)).subscriptions)

        found = await on_parts(context, topic, names_of, same_call(request))
        return list({name: None for names in found.values() for name in names})

    return router


async def _stats(context: AdminContext, name: TopicName, request: Request) -> dict[str, Any]:
    topic = await open_topic(context, name)
    found = await context.broker.catalog.find(name)
    created_at_ms = 0 if found is None else found.record.created_at_ms
    stored = StoredFigures(size_bytes=0, created_at_ms=created_at_ms, owner_broker=broker_id(context, request))
    return _with_drops(topic_stats(topic.figures(), stored), topic)


def _with_drops(stats: dict[str, Any], topic: Topic) -> dict[str, Any]:
    """Add `msgDropRate` at every level (docs/reference/shapes.md §4). Nothing is dropped on arrival (non_persistent_topic.py)."""
    rates = {
        name: subscription.drop_rate_per_s
        for name, subscription in topic.subscriptions.items()
        if isinstance(subscription, NonPersistentSubscription)
    }
    return {
        **stats,
        "msgDropRate": sum(rates.values()),
        "publishers": [{**publisher, "msgDropRate": 0.0} for publisher in stats["publishers"]],
        "subscriptions": {name: {**found, "msgDropRate": rates.get(name, 0.0)} for name, found in stats["subscriptions"].items()},
    }
