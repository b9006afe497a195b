"""Listings by walking the tree. They are complete or raise an error; they are never short.

A missing parent has no children. Keys that are created or deleted during the walk may be in the result or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TypeVar

from cepheid_metadata import keys
from cepheid_metadata.errors import CorruptRecordError, NewerFormatError, NoSuchKeyError
from cepheid_metadata.record import Record
from cepheid_metadata.repositories import Records
from cepheid_metadata.store import MetadataStore
from cepheid_wire import NamespaceName, TopicName

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

_REGISTRATION_HINT = "a process of this release replaces its own damaged registration; if it persists, restart that process"


async def list_names(store: MetadataStore, parent_key: str) -> list[str]:
    """Return the decoded names below `parent_key`, sorted; empty if the parent does not exist."""
    return sorted(map(keys.decode_name, await _children(store, parent_key)))


async def list_records(
    store: MetadataStore, parent_key: str, records: Records[str, R], hint: str = _REGISTRATION_HINT
) -> tuple[dict[str, R], list[str]]:
    """Return the records below `parent_key` by name, and the names of those that this release cannot read.

    Those are logged with the hint, and do not hide others.
    """
    found: dict[str, R] = {}
    unreadable: list[str] = []
    for name in await list_names(store, parent_key):
        try:
            one = await records.get(name)
        except (CorruptRecordError, NewerFormatError) as error:
            log.error("record.unreadable", extra={"key": records.key_of(name), "error": error.args[0], "hint": hint})
            unreadable.append(name)
        else:
            if one is not None:
                found[name] = one.record
    return found, unreadable


async def list_tenants(store: MetadataStore) -> list[str]:
    return await list_names(store, keys.TENANTS_KEY)


async def list_namespaces(store: MetadataStore, tenant: str) -> list[str]:
    """Return the namespaces of the tenant, without the tenant's name."""
    return await list_names(store, keys.namespaces_key(tenant))


async def list_cursors(store: MetadataStore, topic: TopicName) -> list[str]:
    """Return the names of the topic's durable subscriptions."""
    return await list_names(store, keys.cursors_key(topic))


async def list_topics(store: MetadataStore, tenant: str, namespace: str, domain: str) -> list[TopicName]:
    """Return the topics that have a topic record, sorted."""
    return await _list_buckets(store, keys.TOPICS_KEY, tenant, namespace, domain)


async def list_chains(store: MetadataStore, tenant: str, namespace: str, domain: str) -> list[TopicName]:
    """Return the topics that have a chain (partitions do, partitioned topics do not), sorted."""
    return await _list_buckets(store, keys.CHAINS_KEY, tenant, namespace, domain)


async def list_schemas(store: MetadataStore, tenant: str, namespace: str) -> list[str]:
    """Return the local names of the topics that have a schema history, sorted."""
    parent_key = keys.namespace_schemas_key(tenant, namespace)
    buckets = [await list_names(store, f"{parent_key}/{bucket}") for bucket in await _children(store, parent_key)]
    return sorted(name for names in buckets for name in names)


async def list_ledgers(store: MetadataStore, *, above: int = -1) -> AsyncIterator[int]:
    """Yield the ids of all ledgers above `above`, ascending. Wrap it in `contextlib.aclosing` to stop early."""
    async for ledger_id in _walk_ledgers(store, above, keys.LEDGERS_KEY, keys.HIGH_LEDGERS_KEY):
        yield ledger_id


async def list_deleted_ledgers(store: MetadataStore, *, above: int = -1) -> AsyncIterator[int]:
    """Yield the ids of the ledgers that can still be restored, as `list_ledgers` does."""
    async for ledger_id in _walk_ledgers(store, above, keys.DELETED_LEDGERS_KEY, keys.HIGH_DELETED_LEDGERS_KEY):
        yield ledger_id


async def list_repair_marks(store: MetadataStore, *, above: int = -1) -> AsyncIterator[int]:
    """Yield the ids of the ledgers that are marked for repair, as `list_ledgers` does."""
    async for ledger_id in _walk_ledgers(store, above, keys.REPAIR_MARKS_KEY, keys.HIGH_REPAIR_MARKS_KEY):
        yield ledger_id


async def _walk_ledgers(store: MetadataStore, above: int, *roots: str) -> AsyncIterator[int]:
    for root in roots:
        parts = keys.LEDGER_ID_PARTS[root]
        pending = [(root, "", 0)]  # (key, digits so far, parts so far); the next in order is the last
        while pending:
            key, digits, depth = pending.pop()
            if depth and int(digits + "9999" * (parts - depth)) <= above:
                continue  # so is everything below it
            names = await _digit_names(store, key)
            if depth + 1 < parts:
                pending.extend((f"{key}/{name}", digits + name, depth + 1) for name in reversed(names))
                continue
            for name in names:  # up to 10,000: their keys are not needed
                if (ledger_id := int(digits + name)) > above:
                    yield ledger_id


async def largest_ledger_id(store: MetadataStore) -> int | None:
    """Return the largest id of a ledger, without walking all of them."""
    for root in (keys.HIGH_LEDGERS_KEY, keys.LEDGERS_KEY):
        parts = keys.LEDGER_ID_PARTS[root]
        pending = [(root, "", 0)]
        while pending:
            key, digits, depth = pending.pop()
            if depth == parts:
                return int(digits)
            names = await _digit_names(store, key)
            pending.extend((f"{key}/{name}", digits + name, depth + 1) for name in names)
    return None


async def _digit_names(store: MetadataStore, key: str) -> list[str]:
    names = [name for name in await _children(store, key) if f"{key}/{name}" not in keys.NOT_LEDGERS]
    for name in names:
        if not (name.isascii() and name.isdigit()):
            raise CorruptRecordError(f"{key}/{name} is not part of a ledger id", key=f"{key}/{name}")
    return names


async def _list_buckets(store: MetadataStore, root_key: str, tenant: str, namespace: str, domain: str) -> list[TopicName]:
    parent_key = keys.domain_key(root_key, tenant, namespace, domain)
    buckets = await _children(store, parent_key)  # at most 256, asked together: stores answer groups
    try:
        async with asyncio.TaskGroup() as group:
            listings = [group.create_task(list_names(store, f"{parent_key}/{bucket}")) for bucket in buckets]
    except ExceptionGroup as errors:  # they are all alike: callers expect the store's own error
        raise errors.exceptions[0] from None
    owner = NamespaceName(tenant, namespace)
    return [TopicName(domain, owner, name) for name in sorted(name for listing in listings for name in listing.result())]


async def _children(store: MetadataStore, key: str) -> list[str]:
    try:
        return await store.children(key)
    except NoSuchKeyError:
        return []
