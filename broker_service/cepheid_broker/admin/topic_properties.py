"""Properties of a topic, and its metadata, read without opening it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from uuid import NAMESPACE_URL, uuid5

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext, replace_or_conflict
from cepheid_broker.admin.errors import NotServedError, PreconditionError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.admin.path_names import TopicPath
from cepheid_broker.admin.topic_access import parts_of
from cepheid_broker.errors import TopicNotFoundError
from cepheid_metadata import (
    Chain,
    ChainLedger,
    CursorRecord,
    Found,
    OffloadedLedger,
    Position,
    TopicRecord,
    cursor_records,
    list_cursors,
    read_chain,
    topic_records,
)
from cepheid_ports import iso_time
from cepheid_wire import TopicName

NO_CONTENT = 204
MAX_PROPERTIES_BYTES = 64 << 10  # of a topic: its record is read at every lookup

SHADOW_SOURCE = "PULSAR.SHADOW_SOURCE"
"""Makes a Pulsar topic a read-only copy of the topic that it names."""

PropertiesBody = Annotated[dict[str, str], json_body(dict[str, str])]


def topic_properties(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/admin/v2/persistent/{tenant}/{namespace}/{topic}")

    @router.get("/properties")
    async def get_properties(topic: TopicPath) -> dict[str, str]:
        """Return the properties; a partition has those of its partitioned topic"""
        return (await _record(context, topic)).record.properties

    @router.put("/properties", status_code=NO_CONTENT)
    async def put_properties(topic: TopicPath, properties: PropertiesBody) -> None:
        """Add these properties, replacing others by name; up to 64 KiB in total"""
        refuse_shadow(properties)
        found = await _own_record(context, topic)
        await _replace(context, topic, found, {**found.record.properties, **properties})

    @router.delete("/properties", status_code=NO_CONTENT)
    async def delete_property(topic: TopicPath, key: str | None = None) -> None:
        """Delete the property named by `key`; succeeds if there is none"""
        if key is None:
            raise PreconditionError("Name the property to delete: ?key=NAME", topic=str(topic))
        found = await _own_record(context, topic)
        await _replace(context, topic, found, {name: value for name, value in found.record.properties.items() if name != key})

    @router.get("/internal-info")
    async def internal_info(topic: TopicPath) -> dict[str, Any]:
        """Return what metadata records of ledgers and cursors, for every partition; opens nothing"""
        found = await _record(context, topic)
        parts = await parts_of(context, topic)
        if parts == [topic]:
            return await _managed_ledger_info(context, topic, found.record)
        infos = {str(part): await _managed_ledger_info(context, part, found.record) for part in parts}
        return {"version": found.version, "partitions": infos}

    return router


def refuse_shadow(properties: Mapping[str, str] | None) -> None:
    """Raise NotServedError for a topic that should show another topic's messages: it would stay empty."""
    if SHADOW_SOURCE in (properties or {}):
        raise NotServedError(f"Shadow topics do not exist: leave the property {SHADOW_SOURCE} out")


async def _record(context: AdminContext, topic: TopicName) -> Found[TopicRecord]:
    """Return the topic's record, for a partition that of its partitioned topic. Raises TopicNotFoundError."""
    records = topic_records(context.store)
    if topic.is_partition:
        base = await records.get(topic.base)
        if base is not None and base.record.partitions > topic.partition_index:
            return base
    found = await records.get(topic)
    if found is None:
        raise TopicNotFoundError(f"Topic {topic} does not exist", topic=str(topic))
    return found


async def _own_record(context: AdminContext, topic: TopicName) -> Found[TopicRecord]:
    found = await _record(context, topic)
    if topic.is_partition and found.record.partitions:
        raise PreconditionError(f"{topic} is a partition: its properties are those of {topic.base}", topic=str(topic))
    return found


async def _replace(context: AdminContext, topic: TopicName, found: Found[TopicRecord], properties: dict[str, str]) -> None:
    size_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if size_bytes > MAX_PROPERTIES_BYTES:
        message = f"The properties of {topic} would have {size_bytes} bytes, {MAX_PROPERTIES_BYTES} are possible"
        raise PreconditionError(message, topic=str(topic))
    if properties != found.record.properties:
        record = found.record.replace(properties=properties)
        await replace_or_conflict(topic_records(context.store).replace(topic, record, found.version))


async def _managed_ledger_info(context: AdminContext, topic: TopicName, record: TopicRecord) -> dict[str, Any]:
    """Return `ManagedLedgerInfo` (docs/reference/shapes.md §4)."""
    found = await read_chain(context.store, topic)
    chain, version = (None, 0) if found is None else found  # it was never opened
    cursors: dict[str, Any] = {}
    for name in await list_cursors(context.store, topic):
        cursor = await cursor_records(context.store).get((topic, name))
        if cursor is not None:
            cursors[name] = _cursor(cursor.record, cursor.version)
    return {
        "version": version,
        "creationDate": iso_time(record.created_at_ms),
        "ledgers": [] if chain is None else [_ledger(each, (chain.offloaded or {}).get(each.ledger_id)) for each in chain.ledgers],
        **_end(chain),
        "properties": record.properties,
        "cursors": cursors,
    }


def _end(chain: Chain | None) -> dict[str, Any]:
    if chain is None or chain.terminated_at is None:
        return {}
    return {"terminatedPosition": _position(chain.terminated_at)}


def _ledger(recorded: ChainLedger, copy: OffloadedLedger | None) -> dict[str, Any]:
    """Describe a ledger. `offloadedContextUuid` is set for each attempt, as in Pulsar; `object` is Cepheid's own."""
    return {
        "ledgerId": recorded.ledger_id,
        "entries": recorded.entries or 0,
        "size": recorded.size_bytes,
        "timestamp": recorded.closed_at_ms,
        "isOffloaded": copy is not None and copy.complete,
        **({} if copy is None else {"offloadedContextUuid": str(uuid5(NAMESPACE_URL, copy.url)), "object": _object(copy)}),
    }


def _object(copy: OffloadedLedger) -> dict[str, Any]:
    return {
        "url": copy.url,
        "complete": copy.complete,
        "size": copy.object_bytes,
        "startedAt": copy.started_at_ms,
        "completedAt": copy.completed_at_ms,
        "onBookies": copy.on_bookies,
    }


def _cursor(record: CursorRecord, version: int) -> dict[str, Any]:
    return {
        "version": version,
        "creationDate": iso_time(record.created_at_ms),
        "cursorsLedgerId": -1 if record.cursor_ledger_id is None else record.cursor_ledger_id,
        "markDelete": _position(record.mark_delete),
        "properties": record.properties,
    }


def _position(position: Position) -> dict[str, int]:
    return {"ledgerId": position.ledger_id, "entryId": position.entry_id}
