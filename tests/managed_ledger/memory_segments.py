"""An object store in memory: `SegmentStore` without Parquet, with faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from crc32c import crc32c

from cepheid_rpc import HEADER_BYTES, EntryGroup
from cepheid_tiered import DamagedSegmentError, NoSuchSegmentError, SegmentError, SegmentSummary
from cepheid_wire import TopicName


class MemorySegments:
    """`fail(step, url)` is asked at each step: an error that it returns is raised there.

    Steps: "write" (nothing is written), "wrote" (the object exists, the answer is lost), "verify", "open", "read", "delete",
    "deleted" (the object is gone, the answer is lost).
    """

    def __init__(self) -> None:
        self.objects: dict[str, list[EntryGroup]] = {}
        self.fail: Callable[[str, str], Exception | None] = lambda step, url: None
        self.written: list[str] = []
        self.deleted: list[str] = []
        self.reads: list[tuple[str, int]] = []
        self.gate: asyncio.Event | None = None
        """Uploads wait here, half done."""
        self._number = 0

    def url_of(self, store_url: str, topic: TopicName, ledger_id: int) -> str:
        self._number += 1
        return f"{store_url}/{topic.tenant}/{topic.namespace}/{topic.local_name}/{ledger_id:020d}-{self._number:016x}.parquet"

    async def write(
        self, url: str, topic: TopicName, ledger_id: int, groups: AsyncIterator[Sequence[EntryGroup]]
    ) -> SegmentSummary:
        self._step("write", url)
        assert url not in self.objects, f"{url} is written twice"
        held: list[EntryGroup] = []
        async for part in groups:
            held += part
            if self.gate is not None:
                await self.gate.wait()
        self.objects[url] = held
        self.written.append(url)
        self._step("wrote", url)
        return summary_of(held)

    async def verify(self, url: str, ledger_id: int) -> SegmentSummary:
        self._step("verify", url)
        groups = self._groups(url)
        for group in groups:
            group.verify()
        return summary_of(groups)

    async def open(self, url: str, ledger_id: int, entries: int, *, fresh: bool = False) -> MemorySegmentReader:
        self._step("open", url)
        summary = summary_of(self._groups(url))
        if summary.entries < entries:
            raise DamagedSegmentError(f"{url} has {summary.entries} entries, the chain records {entries}")
        return MemorySegmentReader(self, url)

    async def delete(self, url: str) -> None:
        self._step("delete", url)
        self.objects.pop(url, None)
        self.deleted.append(url)
        self._step("deleted", url)

    def _groups(self, url: str) -> list[EntryGroup]:
        if url not in self.objects:
            raise NoSuchSegmentError(f"{url} does not exist")
        return self.objects[url]

    def _step(self, step: str, url: str) -> None:
        error = self.fail(step, url)
        if error is not None:
            raise error


class MemorySegmentReader:
    def __init__(self, store: MemorySegments, url: str) -> None:
        self._store = store
        self._url = url

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        self._store._step("read", self._url)
        self._store.reads.append((self._url, first))
        found: list[EntryGroup] = []
        for group in self._store._groups(self._url):
            if group.last_entry_id < first or group.first_entry_id > last:
                continue
            part = group.slice(max(first, group.first_entry_id), min(last, group.last_entry_id))
            found.append(part)
            max_bytes -= part.size_bytes
            if max_bytes <= 0:
                break
        return found


def summary_of(groups: Sequence[EntryGroup]) -> SegmentSummary:
    digests = b"".join(
        bytes(group.entry(entry_id)[HEADER_BYTES - 4 : HEADER_BYTES])
        for group in groups
        for entry_id in range(group.first_entry_id, group.last_entry_id + 1)
    )
    entries = sum(len(group) for group in groups)
    size = sum(group.size_bytes for group in groups)
    return SegmentSummary(entries, entries, size - HEADER_BYTES * entries, size, crc32c(digests))


def store_is_away(*steps: str) -> Callable[[str, str], Exception | None]:
    """A `fail` that fails each of these steps; without any, all of them."""
    return lambda step, url: SegmentError(f"{url}: the store does not answer") if not steps or step in steps else None
