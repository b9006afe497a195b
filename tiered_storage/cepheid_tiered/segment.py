"""What brokers and readers ask of object storage: the words of this package, without its libraries.

A *segment* is the object that holds one ended ledger. Its URL is made before the upload begins, and is its only name ever: it
says which store (and with which endpoint and region), and its random part keeps two uploads of one ledger apart. So a URL in the
chain's record is enough to read, verify or delete the object, whatever policies say by then.

Errors are `SegmentError`s, or what the source of the entries raises. No method hides a failure, and each may be repeated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cepheid_ports import CepheidError
from cepheid_rpc import EntryGroup
from cepheid_wire import TopicName


class SegmentError(CepheidError):
    """An object store did not do what was asked. The text names the URL and the reason."""

    retriable = True
    hint = "check the object store, its credentials and `cepheid tiered status`; nothing was deleted from the bookies"


class NoSuchSegmentError(SegmentError):
    """The object is not there, which the store has said for certain."""

    retriable = False
    hint = "somebody deleted it, or the URL is of another store; see `cepheid tiered verify`"


class SegmentNotWrittenError(SegmentError):
    """The ledger could not be made into an object, whatever the store says. Other ledgers may be fine."""

    hint = "see the broker's log for the reason; the bookies keep the ledger, and the offload is tried again"


class DamagedSegmentError(SegmentError):
    """The object is not what was uploaded: cut off, changed, or of another ledger."""

    retriable = False
    hint = "see `cepheid tiered verify`; while bookies still have the ledger it is read from them"


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """What an upload wrote, or a verification read back."""

    entries: int
    messages: int
    entry_bytes: int
    """Payload bytes: the ledger's length."""
    object_bytes: int
    crc32c: int
    """Over the digests of all entries in order, each as 4 bytes big-endian: two copies of a ledger with one value are equal."""


class SegmentReader(Protocol):
    """One segment, opened. It holds nothing that must be closed."""

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        """Entries from `first` up to at most `last` (inclusive), verified, in order: about `max_bytes`, at least one entry.

        With some entries here, it does not wait for more that would have to be fetched."""


class SegmentStore(Protocol):
    """All object stores that a broker can reach."""

    def url_of(self, store_url: str, topic: TopicName, ledger_id: int) -> str:
        """Return a new URL, below the policy's `store_url`, for a segment that is about to be written."""

    async def write(
        self, url: str, topic: TopicName, ledger_id: int, groups: AsyncIterator[Sequence[EntryGroup]]
    ) -> SegmentSummary:
        """Upload the entries, which come in order from entry 0. The object exists when this returns, and only then."""

    async def verify(self, url: str, ledger_id: int) -> SegmentSummary:
        """Read the whole object back and check every entry's digest."""

    async def open(self, url: str, ledger_id: int, entries: int, *, fresh: bool = False) -> SegmentReader:
        """`fresh`: ask the store, whatever is in memory of this object.

        Raises NoSuchSegmentError, DamagedSegmentError (also when it has fewer entries than the chain recorded).
        """

    async def delete(self, url: str) -> None:
        """Delete the object and any unfinished upload of it. No such object is success."""
