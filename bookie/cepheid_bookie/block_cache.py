"""Cache of blocks that readers have not finished: those in whose middle a reader stopped, and those read ahead.

    fetch(block) ──► unfinished? ahead? being read ahead? ──no──► read from disk
         └──► settle(block): finished ──► may leave first       unfinished ──► kept for the reader's next request

A request ends after about 1 MB, rarely at a block boundary. Without this cache each block is read and checked by the request that
begins in it and again by the one that ends in it.

Rule 1: the size is bounded in bytes of whole blocks. Blocks read ahead take half of it at most, and are kept a few seconds. They
take no room from blocks in whose middle a reader was in the last seconds: with more readers than fit, nothing is
read ahead, since that would make others read their blocks again.
Rule 2: after `forget`, the cache has no block of the ledger. Blocks looked up in the index earlier are not kept either: the
caller takes `generation` before its lookup.
Rule 3: a damaged block is never kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import NamedTuple

from cepheid_bookie.block_index import BlockRef
from cepheid_rpc import EntryGroup, Status

ReadBlock = Callable[[BlockRef], tuple[Status, EntryGroup | None]]

_IDLE_S = 5.0
_FINISHED = float("-inf")


class _Kept(NamedTuple):
    group: EntryGroup
    at: float
    """When it was read ahead, or last used by a reader that has not finished it."""


class BlockCache:
    """Cache of blocks. Reader threads call it, and the loop calls `forget`. Blocks are immutable, so readers share them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[BlockRef, _Kept] = OrderedDict()  # the first is evicted first
        self._block_bytes = 0
        self._ahead: OrderedDict[BlockRef, _Kept] = OrderedDict()
        self._ahead_bytes = 0
        self._being_read: dict[BlockRef, threading.Event] = {}
        self.generation = 0

    def __repr__(self) -> str:
        return f"<BlockCache: {len(self._blocks)} blocks, {len(self._ahead)} read ahead, {self.used_bytes} B>"

    @property
    def used_bytes(self) -> int:
        return self._block_bytes + self._ahead_bytes

    def fetch(self, block: BlockRef, read: ReadBlock) -> tuple[Status, EntryGroup | None, bool]:
        """Return the block's entries, or why there are none, and whether they came from the cache. Call `settle` afterwards."""
        with self._lock:
            group = self._take(block)
            being_read = self._being_read.get(block) if group is None else None
        if being_read is not None:
            being_read.wait()
            with self._lock:
                group = self._take(block)
        return (*read(block), False) if group is None else (Status.OK, group, True)

    def settle(self, block: BlockRef, group: EntryGroup, *, finished: bool, generation: int, now: float) -> None:
        """Keep a fetched block. `finished`: its reader has read all of it, so only another reader may need it."""
        with self._lock:
            if generation != self.generation:
                return
            if block not in self._blocks:
                self._block_bytes += block.length
            self._blocks[block] = _Kept(group, _FINISHED if finished else now)
            self._blocks.move_to_end(block, last=not finished)
            self._shrink()

    def read_ahead(self, block: BlockRef, read: ReadBlock, *, generation: int, now: float) -> bool:
        """Read the block unless it is cached. Return False if there is no room for it (rule 1)."""
        with self._lock:
            self._drop_unfetched(now)
            if block in self._blocks or block in self._ahead or block in self._being_read:
                return True
            if self._ahead_bytes + block.length > self._limit_bytes // 2:
                return False
            self._make_room(block.length, now)
            if self.used_bytes + block.length > self._limit_bytes:
                return False
            done = self._being_read[block] = threading.Event()
        group: EntryGroup | None = None
        try:
            group = read(block)[1]
        finally:
            with self._lock:
                if group is not None and generation == self.generation:
                    self._ahead[block] = _Kept(group, now)
                    self._ahead_bytes += block.length
                    self._shrink()
                del self._being_read[block]
            done.set()
        return group is not None

    def forget(self, ledger_ids: Collection[int]) -> None:
        """Drop the blocks of these ledgers, whose entries were deleted from the index."""
        with self._lock:
            self.generation += 1
            for block in [block for block in self._blocks if block.ledger_id in ledger_ids]:
                del self._blocks[block]
                self._block_bytes -= block.length
            for block in [block for block in self._ahead if block.ledger_id in ledger_ids]:
                del self._ahead[block]
                self._ahead_bytes -= block.length

    def _take(self, block: BlockRef) -> EntryGroup | None:
        if (ahead := self._ahead.pop(block, None)) is not None:
            self._ahead_bytes -= block.length
            return ahead.group
        kept = self._blocks.get(block)
        return None if kept is None else kept.group

    def _drop_unfetched(self, now: float) -> None:
        while self._ahead and next(iter(self._ahead.values())).at < now - _IDLE_S:
            block, _ = self._ahead.popitem(last=False)
            self._ahead_bytes -= block.length

    def _make_room(self, size_bytes: int, now: float) -> None:
        """Drop blocks that no reader is in the middle of, if that much room is needed."""
        while self._blocks and self.used_bytes + size_bytes > self._limit_bytes:
            block, kept = next(iter(self._blocks.items()))
            if kept.at >= now - _IDLE_S:
                break
            del self._blocks[block]
            self._block_bytes -= block.length

    def _shrink(self) -> None:
        while self._blocks and self.used_bytes > self._limit_bytes:
            block, _ = self._blocks.popitem(last=False)
            self._block_bytes -= block.length
