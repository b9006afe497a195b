"""Where blocks lie: one key per block, the ledgers' records beside them. An interface, for RocksDB and for the simulator's memory.

    block    (ledger id, first entry id, log id, offset) → (length, last entry id)
    record   ledger id → LedgerRecord
    summary  ledger id → (largest last entry id, longest block in entries), kept by the index itself

Blocks of one ledger may overlap (entries sent again, recovery) and leave gaps between them. A block holds every id of its range, so
a block whose range contains an id has the entry.

Rule 1: log id and offset are part of the key: two blocks that begin at one id never replace each other.
Rule 2: to deny an entry, the search steps back until no earlier block of the ledger could reach it (its longest block says so).
Rule 3: `write`, `move`, `delete_ledgers` and `remove_blocks` are synced when they return. `move` and `remove_blocks` are one batch:
all of it, or nothing. Of a `write` a crash may leave a part, records before blocks: the journal still has all of it, as the mark
moves later. Of `delete_ledgers` it may leave some ledgers deleted, each as a whole, and others not: their deletion is repeated.

Every call blocks and may come from any thread; those four from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from cepheid_bookie.errors import IndexCorruptError
from cepheid_bookie.ledger_record import LedgerRecord


class BlockRef(NamedTuple):
    """A block of an entry log: entries `first_entry_id..last_entry_id`, all of them."""

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    log_id: int
    offset: int
    length: int  # bytes in the log, header included


class BlockIndex(Protocol):
    """What it shows when it is opened is synced. Where it is damaged, calls raise IndexCorruptError."""

    damage: IndexCorruptError | None
    """The first damage that a call met."""
    on_damage: Callable[[IndexCorruptError], None]
    """Called whenever a call meets damage, in the thread of that call."""

    def write(self, blocks: Sequence[BlockRef], records: Mapping[int, LedgerRecord]) -> None:
        """Adds blocks and replaces ledger records; synced when it returns (rule 3)."""

    def move(self, moves: Sequence[tuple[BlockRef, BlockRef]]) -> int:
        """Replace blocks by copies of them elsewhere (old, new), in one synced batch. Return how many were replaced.

        A block that is not in the index any more is left out: its ledger was deleted while it was copied, and must not come back.
        """

    def delete_ledgers(self, ledgers: Mapping[int, LedgerRecord | None]) -> None:
        """Remove the ledgers' blocks and summaries, and their records or put the given ones (tombstones) there; synced.

        Each ledger is deleted as a whole or not at all (rule 3).
        """

    def remove_blocks(self, blocks: Sequence[BlockRef]) -> None:
        """Remove single blocks, in one synced batch. Their entries must be in other blocks: a read denies what no block has.

        The ledger's summary stays as it is: it may claim more than there is, never less.
        """

    def sync(self) -> None:
        """Whatever is visible is synced when it returns, also what a batch left behind whose sync failed."""

    def find(self, ledger_id: int, first_entry_id: int, last_entry_id: int, max_blocks: int) -> list[BlockRef]:
        """Blocks that together hold every indexed entry of the range, in order, from its beginning; at most `max_blocks`.

        Ids of the range below the end of the last block returned, or of the whole range if fewer than `max_blocks` came,
        that are in none of them are certainly not in the index.
        """

    def overlapping(self, ledger_id: int, first_entry_id: int, last_entry_id: int) -> list[BlockRef]:
        """Return every block that has at least one entry of the range, in the order of the index."""

    def contains(self, block: BlockRef) -> bool:
        """Return whether the index has this block, at this place and with this length and these entries."""

    def last_entry_id(self, ledger_id: int) -> int:
        """The largest id in any block of the ledger; -1 if there is none."""

    def record(self, ledger_id: int) -> LedgerRecord | None: ...

    def records(self) -> Iterator[tuple[int, LedgerRecord]]:
        """Every ledger record, by id."""

    def ledger_ids(self, above: int, limit: int) -> list[tuple[int, bool]]:
        """The first `limit` ledgers with a record whose id is above `above`, by id; each with whether it is deleted."""

    def largest_ledger_id(self) -> int | None:
        """The largest id of a ledger with a record; None if there is none."""

    def blocks(self) -> Iterator[BlockRef]:
        """Every block, in the order of ledger, first entry, log and offset."""

    def blocks_after(self, last: BlockRef | None, limit: int) -> list[BlockRef]:
        """Return the next blocks in the order of `blocks`: those after `last`, which need not be there any more; None: the first.

        Fewer than `limit` blocks mean that no more follow. Raises where the index cannot be read on.
        """

    def stamp(self) -> bytes | None:
        """What `put_stamp` put: the bookie this index belongs to."""

    def put_stamp(self, stamp: bytes) -> None:
        """Synced when it returns."""

    def close(self) -> None: ...


class Summary(NamedTuple):
    """What bounds a search in one ledger."""

    last_entry_id: int = -1
    longest: int = 0  # entries of the longest block

    def including(self, block: BlockRef) -> Summary:
        return Summary(
            max(self.last_entry_id, block.last_entry_id), max(self.longest, block.last_entry_id - block.first_entry_id + 1)
        )


def group_by_ledger(blocks: Iterable[BlockRef]) -> dict[int, list[BlockRef]]:
    ledgers: dict[int, list[BlockRef]] = {}
    for block in blocks:
        ledgers.setdefault(block.ledger_id, []).append(block)
    return ledgers
