"""The block index in memory, with a sync that can be lost: for the simulator and tests."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence

from cepheid_bookie.block_index import BlockIndex, BlockRef, Summary
from cepheid_bookie.disk import sync_failures
from cepheid_bookie.errors import IndexCorruptError
from cepheid_bookie.ledger_record import LedgerRecord

_Order = tuple[int, int, int]


def _order(block: BlockRef) -> _Order:
    return block.first_entry_id, block.log_id, block.offset


class _Content:
    def __init__(self) -> None:
        self.blocks: dict[int, list[BlockRef]] = {}
        self.summaries: dict[int, Summary] = {}
        self.records: dict[int, LedgerRecord] = {}
        self.stamp: bytes | None = None

    def copy(self) -> _Content:
        copy = _Content()
        copy.blocks = {ledger_id: list(blocks) for ledger_id, blocks in self.blocks.items()}
        copy.stamp = self.stamp
        copy.summaries, copy.records = dict(self.summaries), dict(self.records)
        return copy


class MemoryBlockIndex(BlockIndex):
    """An index in memory. `write` is visible first, then synced. Between the two `before_sync` is called; if it raises, the write
    stays unsynced until a later sync, as they share one log.

    `crash()` returns to what was last synced, like a database with its own log after a power loss.
    """

    def __init__(self, before_sync: Callable[[], None] = lambda: None) -> None:
        self.before_sync = before_sync
        self.damage: IndexCorruptError | None = None
        self.on_damage: Callable[[IndexCorruptError], None] = lambda error: None
        self._lock = threading.Lock()  # readers are in other threads
        self._now = _Content()
        self._synced = _Content()
        self._unsynced: list[Callable[[_Content], None]] = []
        self.closed = False

    def crash(self) -> None:
        with self._lock:
            self._now = self._synced.copy()
            self._unsynced.clear()
            self.closed = False

    def write(self, blocks: Sequence[BlockRef], records: Mapping[int, LedgerRecord]) -> None:
        self._change(lambda content: self._apply(content, blocks, records))

    def move(self, moves: Sequence[tuple[BlockRef, BlockRef]]) -> int:
        moved = 0

        def change(content: _Content) -> None:
            nonlocal moved
            moved = self._move(content, moves)

        self._change(change)
        return moved

    def delete_ledgers(self, ledgers: Mapping[int, LedgerRecord | None]) -> None:
        self._change(lambda content: self._delete(content, ledgers))

    def remove_blocks(self, blocks: Sequence[BlockRef]) -> None:
        self._change(lambda content: self._remove(content, blocks))

    def sync(self) -> None:
        with sync_failures():
            self.before_sync()
        with self._lock:
            for change in self._unsynced:
                change(self._synced)
            self._unsynced.clear()

    def find(self, ledger_id: int, first_entry_id: int, last_entry_id: int, max_blocks: int) -> list[BlockRef]:
        with self._lock:
            blocks, summary = self._now.blocks.get(ledger_id, []), self._now.summaries.get(ledger_id, Summary())
            found: list[BlockRef] = []
            entry_id = first_entry_id
            while entry_id <= min(last_entry_id, summary.last_entry_id) and len(found) < max_blocks:
                index = bisect_right(blocks, entry_id, key=lambda block: block.first_entry_id) - 1
                after = index + 1
                while index >= 0 and blocks[index].last_entry_id < entry_id:
                    index = index - 1 if blocks[index].first_entry_id + summary.longest > entry_id else -1
                if index >= 0:
                    found.append(blocks[index])
                    entry_id = blocks[index].last_entry_id + 1
                elif after < len(blocks):
                    entry_id = blocks[after].first_entry_id
                else:
                    break  # the summary claims more than is left after a removal
            return found

    def overlapping(self, ledger_id: int, first_entry_id: int, last_entry_id: int) -> list[BlockRef]:
        with self._lock:
            blocks = self._now.blocks.get(ledger_id, [])
            return [block for block in blocks if block.first_entry_id <= last_entry_id and block.last_entry_id >= first_entry_id]

    def contains(self, block: BlockRef) -> bool:
        with self._lock:
            return block in self._now.blocks.get(block.ledger_id, [])

    def last_entry_id(self, ledger_id: int) -> int:
        with self._lock:
            return self._now.summaries.get(ledger_id, Summary()).last_entry_id

    def record(self, ledger_id: int) -> LedgerRecord | None:
        with self._lock:
            return self._now.records.get(ledger_id)

    def records(self) -> Iterator[tuple[int, LedgerRecord]]:
        with self._lock:
            return iter(sorted(self._now.records.items()))

    def ledger_ids(self, above: int, limit: int) -> list[tuple[int, bool]]:
        with self._lock:
            records = self._now.records
            return [(ledger_id, records[ledger_id].deleted) for ledger_id in sorted(records) if ledger_id > above][:limit]

    def largest_ledger_id(self) -> int | None:
        with self._lock:
            return max(self._now.records, default=None)

    def blocks(self) -> Iterator[BlockRef]:
        with self._lock:
            return iter([block for _, blocks in sorted(self._now.blocks.items()) for block in blocks])

    def blocks_after(self, last: BlockRef | None, limit: int) -> list[BlockRef]:
        with self._lock:
            found: list[BlockRef] = []
            for ledger_id, blocks in sorted(self._now.blocks.items()):
                if last is None or ledger_id > last.ledger_id:
                    found += blocks[: limit - len(found)]
                elif ledger_id == last.ledger_id:
                    found += blocks[bisect_right(blocks, _order(last), key=_order) :][:limit]
                if len(found) >= limit:
                    break
            return found

    def stamp(self) -> bytes | None:
        return self._now.stamp

    def put_stamp(self, stamp: bytes) -> None:
        def put(content: _Content) -> None:
            content.stamp = stamp

        self._change(put)

    def close(self) -> None:
        self.closed = True

    def _change(self, change: Callable[[_Content], None]) -> None:
        with self._lock:
            change(self._now)
            self._unsynced.append(change)
        self.sync()

    @staticmethod
    def _apply(content: _Content, blocks: Sequence[BlockRef], records: Mapping[int, LedgerRecord]) -> None:
        for block in blocks:
            known = content.blocks.setdefault(block.ledger_id, [])
            if block not in known[max(0, bisect_right(known, _order(block), key=_order) - 1) :]:
                insort(known, block, key=_order)
            content.summaries[block.ledger_id] = content.summaries.get(block.ledger_id, Summary()).including(block)
        content.records.update(records)

    @staticmethod
    def _move(content: _Content, moves: Sequence[tuple[BlockRef, BlockRef]]) -> int:
        moved = 0
        for old, new in moves:
            known = content.blocks.get(old.ledger_id, [])
            if old in known:
                known.remove(old)
                insort(known, new, key=_order)
                moved += 1
        return moved

    @staticmethod
    def _remove(content: _Content, blocks: Sequence[BlockRef]) -> None:
        for block in blocks:
            known = content.blocks.get(block.ledger_id, [])
            if block in known:
                known.remove(block)

    @staticmethod
    def _delete(content: _Content, ledgers: Mapping[int, LedgerRecord | None]) -> None:
        for ledger_id, tombstone in ledgers.items():
            content.blocks.pop(ledger_id, None)
            content.summaries.pop(ledger_id, None)
            if tombstone is None:
                content.records.pop(ledger_id, None)
            else:
                content.records[ledger_id] = tombstone
