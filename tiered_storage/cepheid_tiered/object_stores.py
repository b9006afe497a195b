"""All object stores of a process. Each URL is passed to the store of its scheme."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from cepheid_ports import Worker
from cepheid_rpc import Buffer
from cepheid_tiered.file_objects import FileObjects
from cepheid_tiered.object_store import ObjectStore, StoredObject, StoreUrl
from cepheid_tiered.remote_objects import RemoteObjects, StoreTimeouts


class ObjectStores:
    """An `ObjectStore` for every URL. `worker` runs file operations; libraries of remote stores are imported on first use."""

    def __init__(self, worker: Worker, timeouts: StoreTimeouts | None = None) -> None:
        self._files = FileObjects(worker)
        self._remote = RemoteObjects(timeouts)

    async def get_range(self, url: str, start: int, end: int) -> Buffer:
        return await self._of(url).get_range(url, start, end)

    async def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return await self._of(url).get_ranges(url, ranges)

    async def size(self, url: str) -> int:
        return await self._of(url).size(url)

    async def put(self, url: str, data: Buffer) -> None:
        await self._of(url).put(url, data)

    async def upload(self, url: str, parts: AsyncIterator[Buffer]) -> int:
        return await self._of(url).upload(url, parts)

    def list(self, prefix_url: str) -> AsyncIterator[StoredObject]:
        return self._of(prefix_url).list(prefix_url)

    async def delete(self, url: str) -> None:
        await self._of(url).delete(url)

    def _of(self, url: str) -> ObjectStore:
        return self._files if StoreUrl.parse(url).scheme == "file" else self._remote
