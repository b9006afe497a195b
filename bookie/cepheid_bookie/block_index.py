"""Index of block locations: one key per block, and the ledgers' records. An interface, for RocksDB and for the simulator's memory.

    block    (ledger id, first entry id, log id, offset) → (length, last entry id)
    record   ledger id → LedgerRecord
    summary  ledger id → (largest last entry id, longest block in entries), kept by the index itself

Blocks of one ledger may overlap (entries sent again, recovery) and leave gaps between them. A block holds every id of its range, so
a block whose range contains an id has the entry.

Rule 1: log id and offset are part of the key: two blocks that begin at one id never replace each other.
Rule 2: before it denies an entry, a search steps back until no earlier block of the ledger could reach it, given its longest block.
Rule 3: `write`, `move`, `delete_ledgers` and `remove_blocks` are synced when they return. `move` and `remove_blocks` are one batch:
all or nothing. A crash may leave a part of a `write`, records before blocks: the journal still has all of it, as the mark
moves later. It may leave a part of the ledgers of `delete_ledgers` deleted, each as a whole: the deletion is repeated.

Every call blocks and may be made from any thread; those four from one thread at a time.
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
    """The index of a bookie's blocks. What it shows when opened is synced. Calls that meet damage raise IndexCorruptError."""

    damage: IndexCorruptError | None
    """The first damage that a call met; None: none."""
    on_damage: Callable[[IndexCorruptError], None]
    """Called when a call meets damage, in the thread of that call."""

    def write(self, blocks: Sequence[BlockRef], records: Mapping[int, LedgerRecord]) -> None:
        """Add blocks and replace ledger records; synced when it returns (rule 3)."""

    def move(self, moves: Sequence[tuple[BlockRef, BlockRef]]) -> int:
        """Replace blocks by copies of them elsewhere (old, new), in one synced batch. Return how many were replaced.

        A block that is no longer in the index is left out: its ledger was deleted while it was copied, and must not return.
        """

    def delete_ledgers(self, ledgers: Mapping[int, LedgerRecord | None]) -> None:
        """Remove the ledgers' blocks and summaries; remove their records or replace them by the given tombstones; synced.

        Each ledger is deleted as a whole or not at all (rule 3).
        """

    def remove_blocks(self, blocks: Sequence[BlockRef]) -> None:
        """Remove single blocks in one synced batch. Their entries must be in other blocks, or reads would deny them.

        The ledger's summary does not change: it may claim more than exists, never less.
        """

    def sync(self) -> None:
        """Return when everything visible is synced, including a batch whose own sync failed."""

    def find(self, ledger_id: int, first_entry_id: int, last_entry_id: int, max_blocks: int) -> list[BlockRef]:
        """Return blocks that together hold every indexed entry of the range, in order from its beginning; at most `max_blocks`.

        Ids that are in none of them are certainly not in the index, up to the end of the last block returned, or of the range if
        fewer than `max_blocks` were returned.
        """

    def overlapping(self, ledger_id: int, first_entry_id: int, last_entry_id: int) -> list[BlockRef]:
        """Return every block that has at least one entry of the range, in the order of the index."""

    def contains(self, block: BlockRef) -> bool:
        """Return whether the index has this block, at this place and with this length and these entries."""

    def last_entry_id(self, ledger_id: int) -> int:
        """Return the largest entry id in any block of the ledger; -1 if there is none."""

    def record(self, ledger_id: int) -> LedgerRecord | None: ...

    def records(self) -> Iterator[tuple[int, LedgerRecord]]:
        """Yield every ledger record, by id."""

    def ledger_ids(self, above: int, limit: int) -> list[tuple[int, bool]]:
        """Return the first `limit` ledgers with a record and an id above `above`, by id; each with whether it is deleted."""

    def largest_ledger_id(self) -> int | None:
        """Return the largest id of a ledger with a record; None if there is none."""

    def blocks(self) -> Iterator[BlockRef]:
        """Yield every block in the order of ledger, first entry, log and offset."""

    def blocks_after(self, last: BlockRef | None, limit: int) -> list[BlockRef]:
        """Return the next blocks in the order of `blocks`: those after `last` (which may be gone), or the first ones if it is None.

        Fewer than `limit` blocks mean that no more follow. Raises if the index cannot be read further.
        """

    def stamp(self) -> bytes | None:
        """Return the stamp from `put_stamp`: the bookie to which this index belongs."""

    def put_stamp(self, stamp: bytes) -> None:
        """Store the stamp; synced when it returns."""

    def close(self) -> None: ...


class Summary(NamedTuple):
    """Bounds of a search in one ledger."""

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
