"""Small objects and listings of an object store, as needed by manifests, sweeps and restores.

Segments are written and read by a `SegmentStore`, in ranges and with their own checks. This is for all other objects, by URL too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from cepheid_ports import Worker
from cepheid_tiered.object_store import ObjectStore, StoredObject
from cepheid_tiered.segment import SegmentError


class Bucket(Protocol):
    """Objects by URL. Errors are SegmentErrors that name the URL; only NoSuchSegmentError means that an object does not exist."""

    def list(self, prefix_url: str) -> AsyncIterator[StoredObject]:
        """Yield all objects, if any, below this URL of a directory. A listing is complete or raises."""

    async def get(self, url: str, *, max_bytes: int) -> bytes:
        """Return the contents of an object. Raises NoSuchSegmentError."""

    async def put(self, url: str, data: bytes) -> None:
        """Write or replace the object atomically: a reader sees the old or the new one."""

    async def delete(self, url: str) -> None:
        """Delete the object. Succeeds if it does not exist."""


class ObjectBucket:
    """The objects of any `ObjectStore`."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def list(self, prefix_url: str) -> AsyncIterator[StoredObject]:
        return self._objects.list(prefix_url)

    async def get(self, url: str, *, max_bytes: int) -> bytes:
        size_bytes = await self._objects.size(url)
        if size_bytes > max_bytes:
            raise SegmentError(f"{url} has {size_bytes} bytes; at most {max_bytes} are read", url=url)
        # An object replaced by a shorter one at this moment looks damaged to the caller, which may retry.
        return bytes(await self._objects.get_range(url, 0, size_bytes))

    async def put(self, url: str, data: bytes) -> None:
        await self._objects.put(url, data)

    async def delete(self, url: str) -> None:
        await self._objects.delete(url)


class LazyBucket:
    """An `ObjectBucket` that is opened at its first use: most brokers never offload anything."""

    def __init__(self, new_worker: Callable[[], Worker]) -> None:
        self._new_worker = new_worker
        self._worker: Worker | None = None
        self._opened: ObjectBucket | None = None

    def __repr__(self) -> str:
        return f"<LazyBucket {'not used yet' if self._opened is None else 'opened'}>"

    async def aclose(self) -> None:
        if self._worker is not None:
            await self._worker.aclose()

    def list(self, prefix_url: str) -> AsyncIterator[StoredObject]:
        return self._bucket().list(prefix_url)

    async def get(self, url: str, *, max_bytes: int) -> bytes:
        return await self._bucket().get(url, max_bytes=max_bytes)

    async def put(self, url: str, data: bytes) -> None:
        await self._bucket().put(url, data)

    async def delete(self, url: str) -> None:
        await self._bucket().delete(url)

    def _bucket(self) -> ObjectBucket:
        if self._opened is None:
            from cepheid_tiered.object_stores import ObjectStores

            self._worker = self._new_worker()
            self._opened = ObjectBucket(ObjectStores(self._worker))
        return self._opened
