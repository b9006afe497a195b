"""Chooses the copy that a ledger's entries are read from: the bookies, or its object.

    no complete copy in the object store ──► bookies
    complete, still on the bookies       ──► bookies, then the object; the other way round if `reads_objects`
    complete, no longer on the bookies   ──► the object

Rules:
1. The chain's record decides, at each read. A handle of a copy that is not to be read any more is dropped.
2. If one copy fails and there is another, that one is read, and the failure is logged. So a reader in the middle of a ledger
   continues without a gap when the copy that it reads is deleted.
3. An object is trusted only for the entries that were requested: another range or another ledger is damage.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from cepheid_ledger import LedgerClient, LedgerError, LedgerReader, NoSuchLedgerError, check_end
from cepheid_ledger import is_entry_gone as is_gone_from_bookies
from cepheid_managed_ledger.errors import NoObjectStoreError
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_metadata import Chain, MetadataError
from cepheid_rpc import EntryGroup
from cepheid_tiered import DamagedSegmentError, NoSuchSegmentError, SegmentError, SegmentReader, SegmentStore

log = logging.getLogger(__name__)


def is_entry_gone(error: BaseException) -> bool:
    """Return whether a read failed because certainly no copy of its first entry is left, so that a retry would fail too."""
    return is_gone_from_bookies(error) or isinstance(error, NoSuchSegmentError | DamagedSegmentError)


class Source(enum.Enum):
    BOOKIES = "bookies"
    OBJECT = "object"


class StoredCopies:
    """The copies of one topic's ledgers."""

    def __init__(
        self,
        topic: str,
        client: LedgerClient,
        objects: SegmentStore | None,
        ledgers: LedgerList,
        chain: Callable[[], Chain],
        reads_objects: Callable[[], bool],
        max_readers: int,
    ) -> None:
        self._topic = topic
        self._client = client
        self._objects = objects
        self._ledgers = ledgers
        self._chain = chain
        self._reads_objects = reads_objects
        self._max_readers = max_readers
        self._handles: OrderedDict[tuple[int, Source], LedgerReader | SegmentReader] = OrderedDict()  # least recently used first
        self._on_bookies: dict[int, int] = {}  # reads under way by ledger id
        self.object_reads = 0
        self.object_bytes = 0
        self.other_copy_reads = 0
        """Reads that a second copy answered, because the first one failed."""

    def __repr__(self) -> str:
        return f"<StoredCopies {len(self._handles)} open, {self.object_reads} reads of objects>"

    def is_reading_bookies(self, ledger_id: int) -> bool:
        return ledger_id in self._on_bookies

    def is_object(self, ledger_id: int) -> bool:
        """Whether its object is what is read first."""
        return self._sources_of(ledger_id)[0] is Source.OBJECT

    def forget(self, ledger_id: int) -> None:
        """Drop what is known about a ledger that has been closed, or leaves the chain."""
        for source in Source:
            self._handles.pop((ledger_id, source), None)

    def on_chain_changed(self) -> None:
        """Drop handles of copies that do not count any more (rule 1)."""
        if self._handles:
            for ledger_id, source in [key for key in self._handles if key[1] not in self._sources_of(key[0])]:
                del self._handles[ledger_id, source]

    def clear(self) -> None:
        self._handles.clear()

    async def read(self, ledger_id: int, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        """Read verified entries from `first` up to at most `last` (inclusive): about `max_bytes`, at least one entry.

        Raises LedgerError, SegmentError, MetadataError, NoObjectStoreError, TimeoutError: no copy could be read.
        """
        failures: dict[Source, Exception] = {}
        while True:
            source = next((source for source in self._sources_of(ledger_id) if source not in failures), None)
            if source is None:
                raise self._worst_case(ledger_id, failures)
            try:
                groups = await self._read(source, ledger_id, first, last, max_bytes)
            except (LedgerError, SegmentError, MetadataError, TimeoutError) as error:
                self._handles.pop((ledger_id, source), None)
                failures[source] = error
                continue
            except BaseException:
                self._handles.pop((ledger_id, source), None)
                raise
            if failures:
                self._note_other_copy(ledger_id, source, failures)
            return groups

    def _sources_of(self, ledger_id: int) -> Sequence[Source]:
        """Return the usable copies in the order in which they are tried."""
        chain = self._chain()
        if self._objects is None or chain.offload_of(ledger_id) is None:
            return (Source.BOOKIES,)
        if not chain.is_on_bookies(ledger_id):
            return (Source.OBJECT,)
        return (Source.OBJECT, Source.BOOKIES) if self._reads_objects() else (Source.BOOKIES, Source.OBJECT)

    async def _read(self, source: Source, ledger_id: int, first: int, last: int, max_bytes: int) -> list[EntryGroup]:
        if source is Source.OBJECT:
            reader = await self._handle(source, ledger_id)
            groups = await reader.read(first, last, max_bytes=max_bytes)
            _check_range(groups, ledger_id, first, last)
            self.object_reads += 1
            self.object_bytes += sum(group.size_bytes for group in groups)
            return groups
        self._on_bookies[ledger_id] = self._on_bookies.get(ledger_id, 0) + 1
        try:
            reader = await self._handle(source, ledger_id)
            return await reader.read(first, last, max_bytes=max_bytes)
        finally:
            self._on_bookies[ledger_id] -= 1
            if not self._on_bookies[ledger_id]:
                del self._on_bookies[ledger_id]

    async def _handle(self, source: Source, ledger_id: int) -> LedgerReader | SegmentReader:
        key = ledger_id, source
        handle = self._handles.get(key)
        if handle is None:
            handle = await (self._open_object(ledger_id) if source is Source.OBJECT else self._open_ledger(ledger_id))
            if source not in self._sources_of(ledger_id):
                return handle  # the chain changed meanwhile: usable for this read only
            self._handles[key] = handle
            if len(self._handles) > self._max_readers:
                self._handles.popitem(last=False)
        self._handles.move_to_end(key)
        return handle

    async def _open_ledger(self, ledger_id: int) -> LedgerReader:
        reader = await self._client.open_reader(ledger_id)
        if self._ledgers.is_ended(ledger_id):  # more entries recorded than stored would be lost entries
            check_end(ledger_id, self._ledgers.entries_of(ledger_id), reader.known_end)
        return reader

    async def _open_object(self, ledger_id: int) -> SegmentReader:
        found, entries = self._chain().offload_of(ledger_id), self._ledgers.entries_of(ledger_id)
        if found is None or entries is None or self._objects is None:  # trimmed at this very moment
            raise NoSuchLedgerError(f"ledger {ledger_id} left the chain of {self._topic}", ledger_id=ledger_id)
        return await self._objects.open(found.url, ledger_id, entries)

    def _worst_case(self, ledger_id: int, failures: dict[Source, Exception]) -> Exception:
        """Return the error to raise if no copy could be read: a retriable one, if there is one."""
        if self._objects is None and not self._chain().is_on_bookies(ledger_id):
            message = f"{self._topic}: ledger {ledger_id} is in an object store, and this broker has no library to read it"
            return NoObjectStoreError(message, topic=self._topic, ledger_id=ledger_id)
        *_, last = failures.values()
        return next((error for error in failures.values() if getattr(error, "retriable", True)), last)

    def _note_other_copy(self, ledger_id: int, source: Source, failures: dict[Source, Exception]) -> None:
        self.other_copy_reads += 1
        ((failed, error),) = failures.items()
        fields = {"topic": self._topic, "ledger_id": ledger_id, "read_from": source.value, "error": str(error)}
        log.warning("ledger.copy_failed", extra={**fields, "failed": failed.value})


def _check_range(groups: Sequence[EntryGroup], ledger_id: int, first: int, last: int) -> None:
    """Raise DamagedSegmentError unless the groups are exactly entries of the requested range (rule 3)."""
    expected = first
    for group in groups:
        if (group.ledger_id, group.first_entry_id) != (ledger_id, expected) or group.last_entry_id > last:
            message = f"the object of ledger {ledger_id} returned {group!r} instead of entry {expected} (of {first}..{last})"
            raise DamagedSegmentError(message, ledger_id=ledger_id, entry_id=expected)
        expected = group.last_entry_id + 1
    if not groups:
        raise DamagedSegmentError(f"the object of ledger {ledger_id} returned no entries of {first}..{last}", ledger_id=ledger_id)
