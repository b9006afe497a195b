"""Informs brokers of topics that another one created, grew or deleted, by a mark in metadata for each namespace.

    catalog changes ──► note ──(a moment later, once for all)──► mark written ──► watch fires at its followers ──► they list again

Rules
1. The mark is written after the change, so a notified broker finds it. Another broker's mark in between notifies them as well, so a
   conflict needs no retry.
2. A mark that cannot be written is written later. If the broker dies first the change is not announced, but topics are listed again
   periodically anyway (topic_watches.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cepheid_metadata import (
    BadVersionError,
    KeyExistsError,
    MetadataError,
    MetadataStore,
    NoSuchKeyError,
    StoreClosedError,
    TopicChanges,
    WatchedRecord,
    WatchedRecords,
    topic_changes,
)
from cepheid_ports import Ports, TaskOwner
from cepheid_wire import NamespaceName, TopicName

log = logging.getLogger(__name__)

PAUSE_S = 0.05
RETRY_S = 1.0


class TopicChangeMarks:
    """The marks of one broker. `broker_id` is called when needed, as it is known only once the broker has started."""

    def __init__(self, store: MetadataStore, broker_id: Callable[[], str], tasks: TaskOwner, ports: Ports) -> None:
        self._records = topic_changes(store)
        self._watched = WatchedRecords(store, tasks)
        self._broker_id = broker_id
        self._tasks = tasks
        self._ports = ports
        self._unwritten: dict[NamespaceName, None] = {}
        self._writing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<TopicChangeMarks {len(self._unwritten)} to be written, {len(self._watched)} followed>"

    def note(self, topic: TopicName) -> None:
        """Note that this broker created, grew or deleted the topic."""
        self._unwritten[topic.namespace] = None
        if self._writing is None or self._writing.done():
            self._writing = self._tasks.start(self._write(), name="mark-topic-changes")

    async def follow(self, namespace: NamespaceName, on_change: Callable[[], None]) -> WatchedRecord[TopicChanges]:
        """Call `on_change` for every mark after this returns. End it with `leave`. Raises MetadataError."""
        key = self._records.key_of((namespace.tenant, namespace.local_name))
        return await self._watched.use(key, TopicChanges, on_change, on_change)

    def leave(self, followed: WatchedRecord[TopicChanges], on_change: Callable[[], None]) -> None:
        self._watched.leave(followed, on_change)

    async def _write(self) -> None:
        while self._unwritten:
            await asyncio.sleep(PAUSE_S)
            namespace = next(iter(self._unwritten))
            del self._unwritten[namespace]
            try:
                await self._mark(namespace)
            except (KeyExistsError, BadVersionError, NoSuchKeyError):
                continue  # rule 1
            except StoreClosedError:
                return
            except MetadataError as error:
                self._unwritten[namespace] = None
                log.warning("topic_changes.unwritten", extra={"namespace": str(namespace), "error": str(error)})
                await asyncio.sleep(RETRY_S)

    async def _mark(self, namespace: NamespaceName) -> None:
        noun = (namespace.tenant, namespace.local_name)
        record = TopicChanges(broker_id=self._broker_id(), at_ms=self._ports.wall_ms())
        found = await self._records.get(noun)
        if found is None:
            await self._records.create(noun, record)
        else:
            await self._records.replace(noun, record, found.version)
