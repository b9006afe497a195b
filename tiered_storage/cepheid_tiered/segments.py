"""A `SegmentStore` over an object store, in this process.

    write    groups ─► worker: SegmentWriter ─► parts ─► upload
    read     row group in the cache? ─► else one range of the object ─► worker: entries, verified ─► cache ─► reader
                                        the next row group is fetched meanwhile, if the reader goes on where it stopped

Rule 1: row groups and footers in memory have a limit in bytes, for all readers together. A row group that a reader has read to its
end is removed first, and none is prefetched without room beside those that are still to be read.
Rule 2: concurrent fetches of the same data by several readers are one fetch.
Rule 3: the worker does all processor-intensive work; the event loop waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import quote

from cepheid_ports import SingleFlight, TaskOwner, Worker
from cepheid_rpc import Buffer, EntryGroup
from cepheid_tiered.object_store import ObjectStore, StoreUrl, join_url
from cepheid_tiered.segment import DamagedSegmentError, SegmentError, SegmentReader, SegmentSummary
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid_decode import SchemaVersion
    from cepheid_tiered.segment_reader import Footer

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Schemas = Callable[[TopicName], Awaitable["Sequence[SchemaVersion]"]]
"""Return the schema versions of a topic, oldest first; none if it has no schema."""

_READ_SHARE = 2  # of the cache: row groups that were read to their ends
_LOADS_AT_ONCE = 4  # row groups of a store: until one is decoded, it is in memory twice
_STALE_USES = 200
"""A value of a cache that was not used while others were used so often is removed before those that were read to their ends."""
_MAX_FOOTER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SegmentSettings:
    cache_bytes: int = 16 << 20
    """Limit in bytes for fetched entries in memory, for all readers together."""
    footer_bytes: int = 32 << 20
    """Limit in bytes for footers of open segments, for all readers together: about 1.7 MiB for each GiB of entries. A larger footer
    is kept until the next one is read."""
    cluster: str = ""
    """Cluster id that is written into the metadata of the files."""


def new_url(store_url: str, topic: TopicName, ledger_id: int, token: str) -> str:
    """Return the URL of a segment. `token` distinguishes uploads of one ledger. Raises BadStoreUrlError."""
    name = f"{ledger_id:020d}-{token}.parquet"
    return join_url(store_url, topic.tenant, topic.namespace.local_name, quote(topic.local_name, safe=""), name)


def _new_token() -> str:
    return secrets.token_hex(8)


class Segments:
    """Segments in object stores. `worker` decodes and encodes; with several threads, reads continue while a segment is written."""

    def __init__(
        self,
        objects: ObjectStore,
        worker: Worker,
        schemas: Schemas,
        settings: SegmentSettings | None = None,
        *,
        new_token: Callable[[], str] = _new_token,
    ) -> None:
        self._objects = objects
        self._worker = worker
        self._schemas = schemas
        self._settings = settings or SegmentSettings()
        self._new_token = new_token
        self._footers: _Cache[str, Footer] = _Cache(self._settings.footer_bytes, keeps_newest=True)
        self._groups: _Cache[tuple[str, int], Sequence[EntryGroup]] = _Cache(self._settings.cache_bytes)
        self._opening: SingleFlight[tuple[str, int], Footer] = SingleFlight("segment-footers", _closed)
        self._loading: SingleFlight[tuple[str, int, int], Sequence[EntryGroup]] = SingleFlight("segment-row-groups", _closed)
        self._prefetches = TaskOwner("segment-prefetch")
        self._rooms: dict[str, asyncio.Semaphore] = {}  # by store: one that hangs must not hold up the others
        self._prefetching: dict[tuple[str, int], int] = {}  # with the bytes that they will take

    @property
    def cached_bytes(self) -> int:
        """Bytes of entries in the cache."""
        return self._groups.held_bytes

    async def aclose(self) -> None:
        await self._prefetches.aclose()
        await self._loading.aclose()
        await self._opening.aclose()

    def url_of(self, store_url: str, topic: TopicName, ledger_id: int) -> str:
        return new_url(store_url, topic, ledger_id, self._new_token())

    async def write(
        self, url: str, topic: TopicName, ledger_id: int, groups: AsyncIterator[Sequence[EntryGroup]]
    ) -> SegmentSummary:
        from cepheid_tiered.segment_writer import SegmentWriter

        schemas = tuple(await self._schemas(topic))
        cluster = self._settings.cluster
        writer = await self._worker.run(lambda: SegmentWriter(topic, ledger_id, schemas, cluster))
        summaries: list[SegmentSummary] = []

        async def parts() -> AsyncIterator[Buffer]:
            async for some in groups:
                if new := await self._worker.run(lambda some=some: b"".join(writer.add(some))):  # type: ignore[misc]
                    yield new
            rest, summary = await self._worker.run(writer.finish)
            summaries.append(summary)
            yield b"".join(rest)

        feed = parts()
        try:
            await self._objects.upload(url, feed)
        finally:
            # A store that failed has not read the source to its end: close it now instead of by the garbage collector.
            await close_source(feed)
            await close_source(groups)
        return summaries[0]

    async def verify(self, url: str, ledger_id: int) -> SegmentSummary:
        from cepheid_tiered.segment_reader import check_row_group

        footer = await self._read_footer(url, ledger_id)
        entry_bytes = crc = 0
        for row_group in range(footer.row_groups):
            start, end = footer.whole_range(row_group)
            data = await self._objects.get_range(url, start, end)
            found, crc = await self._worker.run(
                lambda row_group=row_group, start=start, data=data, crc=crc: (  # type: ignore[misc]
                    check_row_group(url, footer, row_group, start, data, crc)
                )
            )
            entry_bytes += found
        said = footer.metadata
        if (entry_bytes, crc) != (said.entry_bytes, said.crc32c):
            raise DamagedSegmentError(
                f"{url} has {entry_bytes} payload bytes with crc {crc:08x}, its metadata says {said.entry_bytes} with "
                f"{said.crc32c:08x}",
                url=url,
            )
        return SegmentSummary(said.entries, said.messages, entry_bytes, footer.object_bytes, crc)

    async def open(self, url: str, ledger_id: int, entries: int, *, fresh: bool = False) -> SegmentReader:
        if fresh:
            self._footers.discard(lambda key: key == url)
        footer = await self.footer(url, ledger_id)
        if footer.metadata.entries != entries:
            raise DamagedSegmentError(
                f"{url} has {footer.metadata.entries} entries of ledger {ledger_id}, {entries} are recorded", url=url
            )
        return _Reader(self, url, ledger_id, entries)

    async def delete(self, url: str) -> None:
        self._forget(url)
        await self._objects.delete(url)

    async def footer(self, url: str, ledger_id: int) -> Footer:
        """Return the footer of a segment, from the cache or the object."""
        found = self._footers.get(url)
        if found is None or found.metadata.ledger_id != ledger_id:
            found = await self._opening.run((url, ledger_id), lambda _key: self._read_footer(url, ledger_id))
            self._footers.put(url, found, found.held_bytes)
        return found

    async def _read_footer(self, url: str, ledger_id: int) -> Footer:
        from cepheid_tiered.segment_format import GUARD_BYTES
        from cepheid_tiered.segment_reader import TAIL_BYTES, footer_bytes, parse_footer

        object_bytes = await self._objects.size(url)
        tail = await self._objects.get_range(url, max(object_bytes - TAIL_BYTES, 0), object_bytes)
        needed = footer_bytes(url, tail)
        if needed > min(object_bytes, _MAX_FOOTER_BYTES):
            raise DamagedSegmentError(f"{url} has {object_bytes} bytes and says that its footer has {needed}", url=url)
        if needed + GUARD_BYTES > len(tail):
            tail = await self._objects.get_range(url, max(object_bytes - needed - GUARD_BYTES, 0), object_bytes)
        return await self._worker.run(lambda: parse_footer(url, ledger_id, tail, object_bytes))

    async def row_group(self, url: str, ledger_id: int, index: int) -> Sequence[EntryGroup]:
        """Return the entries of one row group in pieces, from the cache or the object."""
        found = self._groups.get((url, index))
        if found is None:
            found = await self._loading.run((url, ledger_id, index), self._load)
        return found

    async def _load(self, key: tuple[str, int, int]) -> Sequence[EntryGroup]:
        from cepheid_tiered.segment_reader import load_row_group

        url, ledger_id, index = key
        footer = await self.footer(url, ledger_id)
        start, end = footer.raw_range(index)
        async with self._rooms.setdefault(StoreUrl.parse(url).root, asyncio.Semaphore(_LOADS_AT_ONCE)):
            data = await self._objects.get_range(url, start, end)
            pieces = await self._worker.run(lambda: load_row_group(url, footer, index, start, data))
        self._groups.put((url, index), pieces, sum(piece.size_bytes + 4 * len(piece) for piece in pieces))
        return pieces

    def is_cached(self, url: str, index: int) -> bool:
        return (url, index) in self._groups

    def done_with(self, url: str, index: int) -> None:
        """Note that a reader has read this row group to its end. The last such groups stay for a while, for readers that follow."""
        self._groups.yield_first((url, index))

    def prefetch(self, url: str, ledger_id: int, index: int, size_bytes: int) -> None:
        """Load a row group that will be needed soon, if there is room for it. A failure is left to the actual read."""
        key = (url, index)
        if key in self._prefetching or key in self._groups:
            return
        if sum(self._prefetching.values()) + size_bytes > self._groups.free_bytes:
            return

        async def load() -> None:
            try:
                await self.row_group(url, ledger_id, index)
            except SegmentError:
                pass
            finally:
                self._prefetching.pop(key, None)

        self._prefetching[key] = size_bytes
        self._prefetches.start(load(), name=f"{ledger_id}:{index}")

    def _forget(self, url: str) -> None:
        self._footers.discard(lambda key: key == url)
        self._groups.discard(lambda key: key[0] == url)


class _Reader:
    def __init__(self, segments: Segments, url: str, ledger_id: int, entries: int) -> None:
        self._segments = segments
        self._url = url
        self._ledger_id = ledger_id
        self._entries = entries
        self._next = -1  # the entry after those that were read last

    def __repr__(self) -> str:
        return f"<segment of ledger {self._ledger_id}, {self._entries} entries, {self._url}>"

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        from cepheid_tiered.segment_reader import cut

        assert 0 <= first <= last < self._entries, f"{first}..{last} outside of {self!r}"
        footer = await self._segments.footer(self._url, self._ledger_id)
        index = footer.row_group_of(first)
        found: list[EntryGroup] = []
        left = max_bytes
        goes_on = first == self._next
        while True:
            pieces = await self._segments.row_group(self._url, self._ledger_id, index)
            some = list(cut(pieces, max(first, pieces[0].first_entry_id), last, left))
            found += some
            left -= sum(part.size_bytes for part in some)
            if not some or some[-1].last_entry_id < pieces[-1].last_entry_id:
                break
            self._segments.done_with(self._url, index)
            index += 1
            if left <= 0 or some[-1].last_entry_id >= last or not self._segments.is_cached(self._url, index):
                break  # return the entries in memory instead of waiting for a fetch
        self._next = found[-1].last_entry_id + 1
        at = footer.row_group_of(self._next - 1) + 1
        if goes_on and at < footer.row_groups:
            self._segments.prefetch(self._url, self._ledger_id, at, footer.entries_bytes(at))
        return found


class _Cache(Generic[K, V]):
    """A cache that drops the least recently used values above a number of bytes.

    A larger single value is not kept, unless the cache keeps its newest one.
    """

    def __init__(self, limit_bytes: int, *, keeps_newest: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._keeps_newest = keeps_newest
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._uses = 0
        self._used: dict[K, int] = {}  # the number of its last use
        self._yielding: dict[K, int] = {}  # those that `yield_first` named, with their bytes
        self.held_bytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._values

    @property
    def free_bytes(self) -> int:
        """Free room, including that of values that yield."""
        return self._limit_bytes - self.held_bytes + sum(self._yielding.values())

    def get(self, key: K) -> V | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        self._yielding.pop(key, None)
        self._note_use(key)
        return found[0]

    def put(self, key: K, value: V, size_bytes: int) -> None:
        self._remove(key)
        if size_bytes > self._limit_bytes and not self._keeps_newest:
            return
        self._values[key] = value, size_bytes
        self._note_use(key)
        self.held_bytes += size_bytes
        while self.held_bytes > self._limit_bytes and len(self._values) > 1:
            oldest = next(iter(self._values))
            is_stale = self._uses - self._used[oldest] > _STALE_USES
            self._remove(oldest if is_stale or not self._yielding else next(iter(self._yielding)))

    def yield_first(self, key: K) -> None:
        """Remove this value before others that were used earlier. The last such values stay, in a share of the room."""
        if key in self._values:
            self._yielding[key] = self._values[key][1]
        while sum(self._yielding.values()) > self._limit_bytes // _READ_SHARE:
            self._remove(next(iter(self._yielding)))

    def discard(self, unwanted: Callable[[K], bool]) -> None:
        for key in [key for key in self._values if unwanted(key)]:
            self._remove(key)

    def _remove(self, key: K) -> None:
        _, size_bytes = self._values.pop(key, (None, 0))
        self._yielding.pop(key, None)
        self._used.pop(key, None)
        self.held_bytes -= size_bytes

    def _note_use(self, key: K) -> None:
        self._uses += 1
        self._used[key] = self._uses


async def close_source(source: object) -> None:
    """Close an async generator that was not read to its end. Other iterators need no closing."""
    if isinstance(source, AsyncGenerator):
        with contextlib.suppress(RuntimeError):  # it is running, and its task is being cancelled
            await source.aclose()


def _closed() -> SegmentError:
    return SegmentError("this process stops reading segments")
