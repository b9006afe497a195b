"""How each namespace in use is divided into bundles. Watched, since bundles are split and namespaces deleted and created again.

    record changed ──► divided more finely: adopted               bundles that are in both divisions are not touched
                  └──► otherwise: read again first                the watch may have seen a record older than a split of our own

Rules
1. A deletion that has begun may be refused, and its mark is then removed at once. So the mark closes no topics; the bundles are
   released when the namespace has been gone for some seconds.
2. While this broker splits a bundle it adopts no other division of that namespace (`held`): topics and bundles change together
   when the split is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from cepheid_broker.errors import NamespaceNotFoundError, ServiceNotReadyError
from cepheid_broker.ownership.bundles import Division, division_of, starts_of
from cepheid_broker.ownership.ownership import KEEPS_CONNECTION
from cepheid_metadata import MetadataError, MetadataStore, NamespaceRecord, WatchedRecord, WatchedRecords, namespace_records
from cepheid_ports import TaskOwner
from cepheid_wire import NamespaceName

DELETION_S = 5.0
"""Longer than a deletion takes from its mark to its end."""
_RETRY_S = 1.0


class BundleDivisions:
    """The divisions of namespaces in use. Calls `on_divided` with a namespace and its new division, or None if it was deleted."""

    def __init__(
        self, store: MetadataStore, tasks: TaskOwner, on_divided: Callable[[NamespaceName, Division | None], None]
    ) -> None:
        self._records = namespace_records(store)
        self._tasks = tasks
        self._on_divided = on_divided
        self._watched = WatchedRecords(store, tasks)
        self._known: dict[NamespaceName, tuple[Division, WatchedRecord[NamespaceRecord]]] = {}
        self._held: dict[NamespaceName, bool] = {}  # whether the record changed meanwhile
        self._freed = asyncio.Event()  # replaced whenever it is set

    def __repr__(self) -> str:
        return f"<BundleDivisions of {len(self._known)} namespaces>"

    def known(self, namespace: NamespaceName) -> Division | None:
        """Return the division of a namespace in use, or None if no caller has asked for it yet."""
        found = self._known.get(namespace)
        return None if found is None else found[0]

    async def get(self, namespace: NamespaceName) -> Division:
        """Return the division and watch it from here on. Raises NamespaceNotFoundError, ServiceNotReadyError."""
        if (known := self._known.get(namespace)) is not None:
            return known[0]
        key = self._records.key_of((namespace.tenant, namespace.local_name))
        try:
            watched = await self._watched.use(key, NamespaceRecord, self, partial(self._on_change, namespace))
        except MetadataError as error:
            raise _unreadable(namespace, error) from error
        if (known := self._known.get(namespace)) is not None:  # another call was faster
            return known[0]
        record = watched.record
        if record is None or record.deleted:
            self._watched.leave(watched, self)
            raise NamespaceNotFoundError(f"namespace {namespace} does not exist", namespace=str(namespace))
        self._known[namespace] = (division_of(record), watched)
        return division_of(record)

    async def look_up(self, namespace: NamespaceName) -> Division:
        """Return the division without watching a namespace that is not in use yet. Raises what `get` raises."""
        if (known := self._known.get(namespace)) is not None:
            return known[0]
        return division_of(await self._read(namespace))

    async def refresh(self, namespace: NamespaceName) -> Division:
        """Read the division now, and adopt it unless the namespace is held. Raises what `get` raises."""
        division = division_of(await self._read(namespace))
        if namespace not in self._held:
            self._take_over(namespace, division)
        return division

    @contextmanager
    def held(self, namespace: NamespaceName) -> Iterator[None]:
        """Adopt no changes inside this context (rule 2). Call `wait_free` first: only one caller at a time may hold a namespace."""
        assert namespace not in self._held, f"a bundle of {namespace} is being split already"
        self._held[namespace] = False
        try:
            yield
        finally:
            if self._held.pop(namespace):
                self._read_soon(namespace)
            self._freed.set()
            self._freed = asyncio.Event()

    async def wait_free(self, namespace: NamespaceName) -> None:
        """Wait until the namespace is not held."""
        while namespace in self._held:
            await self._freed.wait()

    def set_split(self, namespace: NamespaceName, record: NamespaceRecord) -> None:
        """Adopt a division that this broker has written. Does not call `on_divided`, since the caller knows."""
        if (known := self._known.get(namespace)) is not None:
            watched = known[1]
            watched.record = record  # else a namespace that is created again with its first division would look unchanged
            self._known[namespace] = (division_of(record), watched)

    def close(self) -> None:
        for _, watched in self._known.values():
            self._watched.leave(watched, self)

    def _on_change(self, namespace: NamespaceName) -> None:
        if namespace in self._held:
            self._held[namespace] = True
            return
        if (known := self._known.get(namespace)) is None:
            return
        division, watched = known
        if watched.record is None:
            return
        found = division_of(watched.record)
        if _is_finer(found, division):
            self._take_over(namespace, found)
        elif found != division:
            self._read_soon(namespace)
        elif watched.record.deleted:
            self._tasks.start(self._forget_if_gone(namespace), name=f"forget {namespace}")

    def _take_over(self, namespace: NamespaceName, division: Division) -> None:
        if (known := self._known.get(namespace)) is not None and known[0] != division:
            self._known[namespace] = (division, known[1])
            self._on_divided(namespace, division)

    def _read_soon(self, namespace: NamespaceName) -> None:
        self._tasks.start(self._read_again(namespace), name=f"divide {namespace}")

    async def _read_again(self, namespace: NamespaceName) -> None:
        while namespace in self._known and namespace not in self._held:
            try:
                await self.refresh(namespace)
                return
            except NamespaceNotFoundError:
                await self._forget_if_gone(namespace)
                return
            except ServiceNotReadyError:
                await asyncio.sleep(_RETRY_S)

    async def _read(self, namespace: NamespaceName) -> NamespaceRecord:
        try:
            found = await self._records.get((namespace.tenant, namespace.local_name))
        except MetadataError as error:
            raise _unreadable(namespace, error) from error
        if found is None or found.record.deleted:
            raise NamespaceNotFoundError(f"namespace {namespace} does not exist", namespace=str(namespace))
        return found.record

    async def _forget_if_gone(self, namespace: NamespaceName) -> None:
        await asyncio.sleep(DELETION_S)
        try:
            if not await self._records.exists((namespace.tenant, namespace.local_name)):
                self._forget(namespace)
        except MetadataError:
            pass  # its bundles remain without topics until the session ends

    def _forget(self, namespace: NamespaceName) -> None:
        if (known := self._known.pop(namespace, None)) is not None:
            self._watched.leave(known[1], self)
            self._on_divided(namespace, None)


def _is_finer(division: Division, than: Division) -> bool:
    """Return whether the division has all starts of the other one, and more."""
    mine, others = starts_of(division), starts_of(than)
    return len(mine) > len(others) and set(others) <= set(mine)


def _unreadable(namespace: NamespaceName, error: MetadataError) -> ServiceNotReadyError:
    return ServiceNotReadyError(f"namespace {namespace} cannot be read: {error} ({KEEPS_CONNECTION})")
