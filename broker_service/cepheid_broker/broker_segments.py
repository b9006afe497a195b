"""Object stores as one broker uses them: opened at first use, fed with the schemas of its topics, and counted for metrics.

Most brokers never offload anything. So the libraries of object stores and of Parquet, tens of megabytes of memory, are loaded when
the first ledger is uploaded or read back, and not at start. Ledgers are written and verified in a process beside this one, so that
publishing does not share an interpreter lock with it; reading for consumers is done here, in threads.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cepheid_broker.schemas import HistoryStore, encode_version
from cepheid_broker.settings import TieredSettings
from cepheid_metadata import MetadataStore
from cepheid_ports import Ports, Worker
from cepheid_rpc import EntryGroup
from cepheid_tiered import SegmentError, SegmentReader, SegmentStore, SegmentSummary
from cepheid_tiered.requirements import missing_requirements
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid_decode import SchemaVersion
    from cepheid_tiered.offload_process import ProcessSegments
    from cepheid_tiered.segments import Segments

_THREADS = 2  # a long row group does not hold up the next reader
_FILE_THREADS = 4  # for file:// alone: a mount that hangs must hold up neither decoding nor readers of other stores at once


@dataclass(frozen=True, slots=True)
class SegmentStatistics:
    """Since the process started."""

    uploads: int = 0
    uploaded_bytes: int = 0
    """Payload bytes of the entries."""
    object_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    deletions: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """By what failed: upload, verification, read, deletion."""
    cached_bytes: int = 0


class BrokerSegments:
    """A `SegmentStore`."""

    def __init__(self, store: MetadataStore, settings: TieredSettings, cluster: str, ports: Ports, uploads: int = 1) -> None:
        """`uploads`: the most that are under way at a time."""
        self._histories = HistoryStore(store)
        self._settings = settings
        self._cluster = cluster
        self._ports = ports
        self._uploads = uploads
        self._worker: Worker | None = None
        self._files: Worker | None = None
        self._local: Segments | None = None
        self._opened: ProcessSegments | None = None
        self._loaded: set[str] = set()  # libraries that the worker has imported
        self._figures = SegmentStatistics(failures=dict.fromkeys(("upload", "verification", "read", "deletion"), 0))

    def __repr__(self) -> str:
        return f"<BrokerSegments {'not used yet' if self._opened is None else self._opened!r}>"

    async def aclose(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()
        if self._local is not None:
            await self._local.aclose()
        for worker in (self._worker, self._files):
            if worker is not None:
                await worker.aclose()

    def statistics(self) -> SegmentStatistics:
        return replace(self._figures, cached_bytes=0 if self._local is None else self._local.cached_bytes)

    def url_of(self, store_url: str, topic: TopicName, ledger_id: int) -> str:
        return self._segments().url_of(store_url, topic, ledger_id)

    async def write(
        self, url: str, topic: TopicName, ledger_id: int, groups: AsyncIterator[Sequence[EntryGroup]]
    ) -> SegmentSummary:
        try:
            summary = await self._segments().write(url, topic, ledger_id, groups)
        except Exception:
            self._count_failure("upload")
            raise
        self._count(uploads=1, uploaded_bytes=summary.entry_bytes, object_bytes=summary.object_bytes)
        return summary

    async def verify(self, url: str, ledger_id: int) -> SegmentSummary:
        try:
            return await self._segments().verify(url, ledger_id)
        except SegmentError:
            self._count_failure("verification")
            raise

    async def open(self, url: str, ledger_id: int, entries: int, *, fresh: bool = False) -> SegmentReader:
        try:
            segments = self._segments()
            await self._load("cepheid_tiered.segment_reader", *_libraries_of(url))
            reader = await segments.open(url, ledger_id, entries, fresh=fresh)
        except SegmentError:
            self._count_failure("read")
            raise
        return _CountedReader(reader, lambda size: self._count(reads=1, read_bytes=size), lambda: self._count_failure("read"))

    async def delete(self, url: str) -> None:
        try:
            segments = self._segments()
            await self._load(*_libraries_of(url))
            await segments.delete(url)
        except SegmentError:
            self._count_failure("deletion")
            raise
        self._count(deletions=1)

    @property
    def child_pid(self) -> int | None:
        """Process that writes and verifies; None: it does not run now."""
        return None if self._opened is None else self._opened.child_pid

    def _segments(self) -> ProcessSegments:
        if self._opened is None:
            from cepheid_tiered.object_stores import ObjectStores
            from cepheid_tiered.offload_process import OffloadProcessSettings, ProcessSegments
            from cepheid_tiered.segments import Segments, SegmentSettings

            worker = self._worker = self._ports.new_worker("segments", _THREADS)
            settings = SegmentSettings(cache_bytes=self._settings.read_cache_bytes, cluster=self._cluster)
            files = self._files = self._ports.new_worker("segment-files", _FILE_THREADS)
            local = self._local = Segments(ObjectStores(files), worker, self._schemas_of, settings)
            process = OffloadProcessSettings(calls_at_once=max(2, self._uploads))
            self._opened = ProcessSegments(local, self._schemas_of, process, cluster=self._cluster)
        return self._opened

    async def _load(self, *modules: str) -> None:
        """Import large libraries in a thread: the loop would stand still for up to a second."""
        assert self._worker is not None, "_segments() comes first"
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")  # the default keeps 150 MB of what ten readers took once
        for module in modules:
            if module not in self._loaded:
                await self._worker.run(lambda module=module: importlib.import_module(module))  # type: ignore[misc]
                self._loaded.add(module)

    async def _schemas_of(self, topic: TopicName) -> Sequence[SchemaVersion]:
        """Every version that an entry may name, oldest first: also those that are not in force any more."""
        from cepheid_decode import SchemaVersion

        found = await self._histories.get(topic)
        versions: list[SchemaVersion] = []
        for row in () if found is None else found.record.versions:
            definition = await self._histories.definition(topic, row)
            if definition is not None:  # else it was deleted meanwhile
                number = encode_version(row.version)
                versions.append(SchemaVersion(number, definition.type, definition.data, definition.properties))
        return versions

    def _count(self, **more: int) -> None:
        self._figures = replace(self._figures, **{name: getattr(self._figures, name) + count for name, count in more.items()})

    def _count_failure(self, what: str) -> None:
        self._figures.failures[what] += 1


def broker_segments(
    store: MetadataStore, settings: TieredSettings, cluster: str, ports: Ports, uploads: int = 1
) -> BrokerSegments | None:
    """Return None where the libraries are not installed: the broker then says what is missing when it needs them."""
    return None if missing_requirements() is not None else BrokerSegments(store, settings, cluster, ports, uploads)


def _libraries_of(url: str) -> tuple[str, ...]:
    return () if url.startswith("file:") else ("obstore",)


@dataclass(frozen=True, slots=True)
class _CountedReader:
    reader: SegmentReader
    on_read: Callable[[int], None]
    on_failed: Callable[[], None]

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        try:
            groups = await self.reader.read(first, last, max_bytes=max_bytes)
        except SegmentError:
            self.on_failed()
            raise
        self.on_read(sum(group.size_bytes for group in groups))
        return groups


if TYPE_CHECKING:
    _: type[SegmentStore] = BrokerSegments
