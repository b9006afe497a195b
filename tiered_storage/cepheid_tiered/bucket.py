"""Small objects and listings: what manifests, sweeps and restores ask of an object store.

Segments are written and read by a `SegmentStore`, in ranges and with their own checks. This is the rest, by URL as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from cepheid_tiered.object_store import ObjectStore, StoredObject
from cepheid_tiered.segment import SegmentError


class Bucket(Protocol):
    """Errors are SegmentErrors that name the URL; only NoSuchSegmentError says that an object is not there."""

    def list(self, prefix_url: str) -> AsyncIterator[StoredObject]:
        """All objects below this URL, which is a directory. None below it is success; a listing ends whole, or raises."""

    async def get(self, url: str, *, max_bytes: int) -> bytes:
        """Raises NoSuchSegmentError."""

    async def put(self, url: str, data: bytes) -> None:
        """Write the object whole, over what was there: a reader sees the old one or the new one."""

    async def delete(self, url: str) -> None:
        """No such object is success."""


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
        # One that is replaced by a shorter one at this moment is damaged for the caller, who may ask again.
        return bytes(await self._objects.get_range(url, 0, size_bytes))

    async def put(self, url: str, data: bytes) -> None:
        await self._objects.put(url, data)

    async def delete(self, url: str) -> None:
        await self._objects.delete(url)
