"""How many bundles each namespace in use has: fixed while it exists, watched since it may be deleted and made anew.

Rule: a deletion that has begun may be refused, and its mark is taken back at once. So the mark closes nobody's topics; the
namespace is given up when it is gone for some seconds, or when it has other bundles than before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from cepheid_broker.errors import NamespaceNotFoundError, ServiceNotReadyError
from cepheid_broker.ownership.ownership import KEEPS_CONNECTION
from cepheid_metadata import MetadataError, MetadataStore, NamespaceRecord, WatchedRecord, WatchedRecords, namespace_records
from cepheid_ports import TaskOwner
from cepheid_wire import NamespaceName

DELETION_S = 5.0
"""Longer than a deletion takes from its mark to its end."""


class BundleCounts:
    """`on_gone` hears of namespaces that are no more what they were: nothing is known of them then."""

    def __init__(self, store: MetadataStore, tasks: TaskOwner, on_gone: Callable[[NamespaceName], None]) -> None:
        self._records = namespace_records(store)
        self._tasks = tasks
        self._on_gone = on_gone
        self._watched = WatchedRecords(store, tasks)
        self._known: dict[NamespaceName, tuple[int, WatchedRecord[NamespaceRecord]]] = {}

    def __repr__(self) -> str:
        return f"<BundleCounts of {len(self._known)} namespaces>"

    def known(self, namespace: NamespaceName) -> int | None:
        """None: not asked for yet."""
        found = self._known.get(namespace)
        return None if found is None else found[0]

    async def get(self, namespace: NamespaceName) -> int:
        """Raises NamespaceNotFoundError, ServiceNotReadyError."""
        if (known := self._known.get(namespace)) is not None:
            return known[0]
        key = self._records.key_of((namespace.tenant, namespace.local_name))
        try:
            watched = await self._watched.use(key, NamespaceRecord, self, partial(self._on_change, namespace))
        except MetadataError as error:
            raise ServiceNotReadyError(f"namespace {namespace} cannot be read: {error} ({KEEPS_CONNECTION})") from error
        record = watched.record
        if record is None or record.deleted:
            self._watched.leave(watched, self)
            raise NamespaceNotFoundError(f"namespace {namespace} does not exist", namespace=str(namespace))
        self._known[namespace] = (record.bundles, watched)
        return record.bundles

    async def look_up(self, namespace: NamespaceName) -> int:
        """As `get`, for one question: a namespace that is not known yet is not watched from here on."""
        if (known := self._known.get(namespace)) is not None:
            return known[0]
        try:
            found = await self._records.get((namespace.tenant, namespace.local_name))
        except MetadataError as error:
            raise ServiceNotReadyError(f"namespace {namespace} cannot be read: {error} ({KEEPS_CONNECTION})") from error
        if found is None or found.record.deleted:
            raise NamespaceNotFoundError(f"namespace {namespace} does not exist", namespace=str(namespace))
        return found.record.bundles

    def close(self) -> None:
        for _, watched in self._known.values():
            self._watched.leave(watched, self)

    def _on_change(self, namespace: NamespaceName) -> None:
        if (known := self._known.get(namespace)) is None:
            return
        count, watched = known
        if watched.record is not None and watched.record.bundles != count:
            self._forget(namespace)
        elif watched.record is not None and watched.record.deleted:
            self._tasks.start(self._forget_if_gone(namespace), name=f"forget {namespace}")

    async def _forget_if_gone(self, namespace: NamespaceName) -> None:
        await asyncio.sleep(DELETION_S)
        try:
            if not await self._records.exists((namespace.tenant, namespace.local_name)):
                self._forget(namespace)
        except MetadataError:
            pass  # its bundles stay, without topics, until the session ends

    def _forget(self, namespace: NamespaceName) -> None:
        if (known := self._known.pop(namespace, None)) is not None:
            self._watched.leave(known[1], self)
            self._on_gone(namespace)
