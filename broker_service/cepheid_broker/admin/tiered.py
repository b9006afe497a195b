"""Where the data of topics is: on bookies or in object stores. Ours, not Pulsar's; `cepheid tiered status` shows it.

Where ledgers lie is read from the chains' records, which any broker can do. What is going on (`live`) is known to the topic's owner
alone, while the topic is open there; null: it is not open on the broker that answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.path_names import AnyTopicPath, NamespacePath
from cepheid_broker.admin.topic_access import require_owner, require_plain
from cepheid_broker.admin.topic_lists import topics_in
from cepheid_broker.topics import PersistentTopic
from cepheid_managed_ledger import ManagedLedger, due_ledgers
from cepheid_metadata import Chain, read_chain
from cepheid_wire import PERSISTENT, TopicName

_READ_IN_ONE_GO = 50  # chains; other requests are served in between


def tiered(context: AdminContext) -> APIRouter:
    router = APIRouter(prefix="/cepheid/v1")

    @router.get("/tiered/{tenant}/{namespace}")
    async def namespace_tiered(namespace: NamespacePath) -> dict[str, Any]:
        """Ours, not Pulsar's: of each topic, ledgers and bytes on bookies, in the object store and in both, and what is due"""
        await context.require_namespace(namespace)
        rows: list[dict[str, Any]] = []
        for topic in await topics_in(context, namespace, PERSISTENT):
            rows.append(await _row(context, topic))
            if len(rows) % _READ_IN_ONE_GO == 0:
                await asyncio.sleep(0)
        return {"topics": rows}

    @router.get("/topics/{domain}/{tenant}/{namespace}/{topic}/tiered")
    async def topic_tiered(topic: AnyTopicPath) -> dict[str, Any]:
        """Ours, not Pulsar's: the same of one topic or partition, with what its owner is doing, if it is open there"""
        await require_plain(context, topic)
        await require_owner(context, topic)
        return await _row(context, topic)

    return router


async def _row(context: AdminContext, topic: TopicName) -> dict[str, Any]:
    opened = context.broker.topics.find(topic)
    ledger = opened.ledger if isinstance(opened, PersistentTopic) else None
    found = await read_chain(context.store, topic)
    chain = None if found is None else found.record
    policies = await context.broker.catalog.policies(topic)
    config = policies.offload
    last_bytes = 0 if ledger is None else ledger.statistics().current_ledger_bytes
    row: dict[str, Any] = {
        "topic": str(topic),
        "url": config.url,
        "after_bytes": config.after_bytes,
        "after_ms": config.after_ms,
        "keep_ms": config.keep_ms,
        "retention_time_ms": policies.retention.time_ms,
        "retention_bytes": policies.retention.size_bytes,
        **_places(chain, last_bytes),
    }
    now_ms = context.broker.ports.wall_ms()
    due = [] if chain is None else due_ledgers(chain, last_size_bytes=last_bytes, config=config, now_ms=now_ms)
    row["due"] = {
        "ledgers": len(due),
        "bytes": sum(each.size_bytes for each in due),
        "oldest_ended_at_ms": due[0].closed_at_ms if due else 0,
    }
    row["waiting_deletions"] = 0 if chain is None else len(chain.object_deletions or ())
    row["live"] = None if ledger is None else _live(ledger)
    return row


def _places(chain: Chain | None, last_bytes: int) -> dict[str, Any]:
    """Return the ledgers with entries and their bytes by place, and the bytes of their objects."""
    places = {where: {"ledgers": 0, "bytes": 0} for where in ("bookies", "both", "objects")}
    object_bytes = 0
    for each in () if chain is None else chain.ledgers:
        size_bytes = last_bytes if each.is_open else each.size_bytes
        if not size_bytes and not each.entries:
            continue
        assert chain is not None
        copy = chain.offload_of(each.ledger_id)
        place = places["bookies" if copy is None else "both" if copy.on_bookies else "objects"]
        place["ledgers"] += 1
        place["bytes"] += size_bytes
        object_bytes += 0 if copy is None else copy.object_bytes
    return {**places, "object_bytes": object_bytes}


def _live(ledger: ManagedLedger) -> dict[str, Any]:
    figures = ledger.offload_statistics()
    return {
        "uploading": figures.uploading_ledger_id,
        "last_error": figures.last_error,
        "failing_since_ms": figures.failing_since_ms,
        "last_success_at_ms": figures.last_success_at_ms,
        "last_failure_at_ms": figures.last_failure_at_ms,
        "uploaded_ledgers": figures.uploaded_ledgers,
        "uploaded_bytes": figures.uploaded_bytes,
        "failures": figures.failures,
        "refused_ledgers": figures.refused_ledgers,
        "refused": {str(ledger_id): error for ledger_id, error in figures.refused.items()},
        "not_held_ledgers": figures.not_held_ledgers,
        "deletion_error": figures.object_deletion_error,
        "object_reads": figures.object_reads,
        "object_read_bytes": figures.object_read_bytes,
    }
