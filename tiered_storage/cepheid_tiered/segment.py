"""The interface of object storage for brokers and readers, without the libraries of stores.

A *segment* is the object that holds one ended ledger. Its URL is chosen before the upload begins, and is its only name: it
names the store (with endpoint and region), and its random part distinguishes two uploads of one ledger. So a URL in the
chain's record is enough to read, verify or delete the object, whatever the policies are by then.

Errors are `SegmentError`s, or those of the source of entries. No method hides a failure, and each may be retried.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cepheid_ports import CepheidError
from cepheid_rpc import EntryGroup
from cepheid_wire import TopicName


class SegmentError(CepheidError):
    """An operation of an object store failed. The message names the URL and the reason."""

    retriable = True
    hint = "check the object store, its credentials and `cepheid tiered status`; nothing was deleted from the bookies"


class NoSuchSegmentError(SegmentError):
    """The object does not exist, as reported by the store."""

    retriable = False
    hint = "somebody deleted it, or the URL is of another store; see `cepheid tiered verify`"


class SegmentNotWrittenError(SegmentError):
    """The ledger could not be converted into an object, independently of the store. Other ledgers may be fine."""

    hint = "see the broker's log for the reason; the bookies keep the ledger, and the offload is tried again"


class DamagedSegmentError(SegmentError):
    """The object is not what was uploaded: it is truncated, changed, or of another ledger."""

    retriable = False
    hint = "see `cepheid tiered verify`; while bookies still have the ledger it is read from them"


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """Totals of what an upload wrote, or a verification read back."""

    entries: int
    messages: int
    entry_bytes: int
    """Payload bytes: the ledger's length."""
    object_bytes: int
    crc32c: int
    """CRC over the digests of all entries in order, each as 4 bytes big-endian. Copies of a ledger with equal values are equal."""


class SegmentReader(Protocol):
    """An open segment. It has no resources that must be closed."""

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[EntryGroup]:
        """Return verified entries in order, from `first` up to at most `last` (inclusive): about `max_bytes`, at least one entry.

        Once some entries are in memory, it does not wait for more that would have to be fetched."""


class SegmentStore(Protocol):
    """All object stores that a broker can reach."""

    def url_of(self, store_url: str, topic: TopicName, ledger_id: int) -> str:
        """Return a new URL, below the policy's `store_url`, for a segment that is about to be written."""

    async def write(
        self, url: str, topic: TopicName, ledger_id: int, groups: AsyncIterator[Sequence[EntryGroup]]
    ) -> SegmentSummary:
        """Upload the entries, in order from entry 0. The object exists only when this returns."""

    async def verify(self, url: str, ledger_id: int) -> SegmentSummary:
        """Read the whole object back and check every entry's digest."""

    async def open(self, url: str, ledger_id: int, entries: int, *, fresh: bool = False) -> SegmentReader:
        """Open a segment. `fresh`: read from the store even if the object's footer is in memory.

        Raises NoSuchSegmentError, DamagedSegmentError (also when it has fewer entries than the chain recorded).
        """

    async def delete(self, url: str) -> None:
        """Delete the object and any unfinished upload of it. Succeeds if it does not exist."""
