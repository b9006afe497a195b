"""Statistics in the API: of topics, of partitioned topics, and of their ledgers and cursors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from cepheid_broker.admin.brokers import broker_id
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotFoundError, PreconditionError
from cepheid_broker.admin.internal_stats import internal_stats
from cepheid_broker.admin.part_calls import Ask, on_parts
from cepheid_broker.admin.path_names import TopicPath
from cepheid_broker.admin.summed_stats import summed_stats
from cepheid_broker.admin.topic_access import open_topic, require_plain
from cepheid_broker.admin.topic_stats import Holes, OffloadFigures, StoredFigures, topic_stats
from cepheid_broker.topics import MeasuredBacklog, Topic, measure_backlog
from cepheid_metadata import ledger_records, topic_records
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from pyroaring import BitMap

    from cepheid_managed_ledger import ManagedLedger

_MEASURED_IN_ONE_GO = 50  # subscriptions: some 2 ms of the loop


def stats(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.get("/stats")
    async def get_stats(
        topic: TopicPath,
        request: Request,
        getPreciseBacklog: bool = False,
        getEarliestTimeInBacklog: bool = False,
        excludePublishers: bool = False,
        excludeConsumers: bool = False,
    ) -> dict[str, Any]:
        """Return rates, sizes, clients, and each subscription's backlog in entries, bytes and, where known, messages and seconds"""
        await require_plain(context, topic)
        shown = _Shown(getPreciseBacklog, getEarliestTimeInBacklog, not excludePublishers, not excludeConsumers)
        return await _stats(context, topic, request, shown)

    @router.get("/partitioned-stats")
    async def get_partitioned_stats(
        topic: TopicPath,
        request: Request,
        perPartition: bool = True,
        getPreciseBacklog: bool = False,
        getEarliestTimeInBacklog: bool = False,
        excludePublishers: bool = False,
        excludeConsumers: bool = False,
    ) -> dict[str, Any]:
        """Return the statistics of all partitions together, and of each"""
        metadata = await _partitioned_metadata(context, topic)
        shown = _Shown(getPreciseBacklog, getEarliestTimeInBacklog, not excludePublishers, not excludeConsumers)
        ask = Ask("GET", f"/stats?{request.scope['query_string'].decode('ascii', errors='replace')}")
        parts = await on_parts(context, topic, lambda part: _stats(context, part, request, shown), ask)
        return summed_stats({str(part): found for part, found in parts.items()}, metadata, per_partition=perPartition)

    @router.get("/internalStats")
    async def get_internal_stats(topic: TopicPath, metadata: bool = False) -> dict[str, Any]:
        """Return ledgers and cursors"""
        await require_plain(context, topic)
        return await _internal(context, topic, metadata=metadata)

    @router.get("/partitioned-internalStats")
    async def get_partitioned_internal_stats(topic: TopicPath) -> dict[str, Any]:
        """Return the ledgers and cursors of every partition"""
        metadata = await _partitioned_metadata(context, topic)
        parts = await on_parts(context, topic, lambda part: _internal(context, part), Ask("GET", "/internalStats"))
        return {"metadata": metadata, "partitions": {str(part): found for part, found in parts.items()}}

    return router


@dataclass(frozen=True, slots=True)
class _Shown:
    """The parts of statistics that the caller asked for."""

    precise: bool
    oldest: bool
    publishers: bool
    consumers: bool


async def _stats(context: AdminContext, name: TopicName, request: Request, shown: _Shown) -> dict[str, Any]:
    opened = await open_topic(context, name)
    stored = await _stored(context, opened, request, precise=shown.precise, oldest=shown.oldest)
    return topic_stats(opened.figures(), stored, publishers=shown.publishers, consumers=shown.consumers)


async def _partitioned_metadata(context: AdminContext, topic: TopicName) -> dict[str, Any]:
    if topic.is_partition:
        raise PreconditionError(f"{topic} is the name of a partition: use the name of the partitioned topic", topic=str(topic))
    found = await topic_records(context.store).get(topic)
    if found is None or found.record.partitions == 0:
        raise NotFoundError(f"Topic {topic} is not partitioned, or does not exist", topic=str(topic))
    return {"partitions": found.record.partitions, "deleted": False, "properties": found.record.properties}


async def _stored(context: AdminContext, topic: Topic, request: Request, *, precise: bool, oldest: bool) -> StoredFigures:
    found = await topic_records(context.store).get(topic.name) or await topic_records(context.store).get(topic.name.base)
    backlogs = await _backlogs(topic, precise=precise, oldest=oldest)
    ledger = topic.ledger
    return StoredFigures(
        size_bytes=ledger.ledgers.total_bytes,
        created_at_ms=0 if found is None else found.record.created_at_ms,
        owner_broker=broker_id(context, request),
        last_published_at_ms=ledger.last_appended_at_ms,
        topic_epoch=ledger.topic_epoch,
        waiting_producers=len(topic.admission) - len(topic.producers),
        policies=topic.policies,
        backlogs=backlogs,
        holes={
            name: _holes(subscription.cursor.ack_set.acked)
            for name, subscription in topic.subscriptions.items()
            if subscription.cursor.ack_set.acked
        },
        asked_for_earliest=oldest,
        not_publishing=None if ledger.lacking is None else str(ledger.lacking),
        offload=_offload(ledger),
        not_saving=None if ledger.not_saving is None else str(ledger.not_saving),
        near_limit=ledger.near_limit,
    )


def _offload(ledger: ManagedLedger) -> OffloadFigures:
    chain, figures = ledger.chain, ledger.offload_statistics()
    copies = [(found.completed_at_ms, ledger_id) for ledger_id, found in (chain.offloaded or {}).items() if found.complete]
    completed_at_ms, ledger_id = max(copies, default=(0, 0))
    return OffloadFigures(
        figures.size_bytes, ledger_id, max(completed_at_ms, figures.last_success_at_ms), figures.last_failure_at_ms
    )


async def _backlogs(topic: Topic, *, precise: bool, oldest: bool) -> dict[str, MeasuredBacklog]:
    """Measure backlogs, always with the age of the slowest durable subscription, which is the topic's."""
    ledger, subscriptions = topic.ledger, dict(topic.subscriptions)
    durable = [subscription for subscription in subscriptions.values() if subscription.durable]
    slowest = min(durable, key=lambda found: ledger.ledgers.rank(found.cursor.mark_delete), default=None)
    backlogs: dict[str, MeasuredBacklog] = {}
    for number, (name, subscription) in enumerate(subscriptions.items(), 1):
        wanted = oldest or precise or subscription is slowest
        backlogs[name] = await measure_backlog(ledger, subscription.cursor, precise=precise, oldest=wanted)
        if number % _MEASURED_IN_ONE_GO == 0:
            await asyncio.sleep(0)
    return backlogs


def _holes(acked: Mapping[int, BitMap]) -> Holes:
    runs = sum(len(entries - entries.shift(1)) for entries in acked.values())  # an entry without the one before it starts a run
    return Holes(runs, sum(len(entries.serialize()) for entries in acked.values()))


async def _internal(context: AdminContext, name: TopicName, *, metadata: bool = False) -> dict[str, Any]:
    topic = await open_topic(context, name)
    ledger = topic.ledger
    figures = ledger.statistics()
    records = ledger_records(context.store)
    last = await records.get(figures.ledgers[-1].ledger_id) if figures.ledgers else None
    described: dict[int, str] = {}
    for recorded in figures.ledgers if metadata else ():
        if (found := await records.get(recorded.ledger_id)) is not None:
            described[recorded.ledger_id] = found.record.model_dump_json(exclude={"password"})
    return internal_stats(
        figures,
        {name: cursor.ack_set.acked for name, cursor in ledger.cursors.items()},
        read_positions={
            found.name: found.read_position for found in topic.figures().subscriptions if found.read_position is not None
        },
        pending_entries=sum(producer.pending_entries for producer in topic.producers.values()),
        last_ledger_created_at_ms=0 if last is None else last.record.created_at_ms,
        ledger_metadata=described,
        offloaded={ledger_id for ledger_id, found in (ledger.chain.offloaded or {}).items() if found.complete},
    )
