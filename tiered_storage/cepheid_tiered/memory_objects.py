"""An object store in memory for tests and the simulator, in which every operation can be made slow or made to fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from cepheid_rpc import Buffer
from cepheid_tiered.object_store import StoredObject, StoreUrl
from cepheid_tiered.segment import DamagedSegmentError, NoSuchSegmentError

Hook = Callable[[str, str], Awaitable[None]]
"""Called with the name of the operation (`get_range`, `size`, `put`, `part`, `upload`, `list`, `delete`) and the URL."""


class MemoryObjects:
    """Objects in memory. `before` runs before an operation takes effect, `after` between its effect and its return.

    Either may wait, or raise: an exception in `after` acts as a lost answer. Each part of an upload calls both as `part`.
    """

    def __init__(self, before: Hook | None = None, after: Hook | None = None, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified_ms: dict[str, int] = {}
        self.before = before
        self.after = after
        self.operations: dict[str, int] = {}
        self._now_ms = now_ms

    async def get_range(self, url: str, start: int, end: int) -> Buffer:
        await self._begin("get_range", url)
        data = self._found(url)
        if end > len(data):
            raise DamagedSegmentError(f"{url} has {len(data)} bytes, of which {start} to {end} were asked for", url=url)
        await self._done("get_range", url)
        return memoryview(data)[start:end]

    async def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return [await self.get_range(url, start, end) for start, end in ranges]

    async def size(self, url: str) -> int:
        await self._begin("size", url)
        size_bytes = len(self._found(url))
        await self._done("size", url)
        return size_bytes

    async def put(self, url: str, data: Buffer) -> None:
        await self._begin("put", url)
        self._store(url, bytes(data))
        await self._done("put", url)

    async def upload(self, url: str, parts: AsyncIterator[Buffer]) -> int:
        await self._begin("upload", url)
        whole = bytearray()
        async for part in parts:
            await self._begin("part", url)
            whole += part
            await self._done("part", url)
        self._store(url, bytes(whole))
        await self._done("upload", url)
        return len(whole)

    async def list(self, prefix_url: str) -> AsyncIterator[StoredObject]:
        prefix = StoreUrl.parse(prefix_url)
        await self._begin("list", prefix_url)
        start = prefix.with_key("").partition("?")[0] + (f"{prefix.key.rstrip('/')}/" if prefix.key.strip("/") else "")
        found = [url for url in sorted(self.objects) if url.startswith(start)]
        await self._done("list", prefix_url)
        for url in found:
            yield StoredObject(url, len(self.objects.get(url, b"")), self.modified_ms.get(url, 0))

    async def delete(self, url: str) -> None:
        await self._begin("delete", url)
        self.objects.pop(url, None)
        self.modified_ms.pop(url, None)
        await self._done("delete", url)

    def _found(self, url: str) -> bytes:
        data = self.objects.get(url)
        if data is None:
            raise NoSuchSegmentError(f"{url} does not exist", url=url)
        return data

    def _store(self, url: str, data: bytes) -> None:
        StoreUrl.parse(url)
        self.objects[url] = data
        self.modified_ms[url] = self._now_ms()

    async def _begin(self, operation: str, url: str) -> None:
        self.operations[operation] = self.operations.get(operation, 0) + 1
        if self.before is not None:
            await self.before(operation, url)

    async def _done(self, operation: str, url: str) -> None:
        if self.after is not None:
            await self.after(operation, url)
