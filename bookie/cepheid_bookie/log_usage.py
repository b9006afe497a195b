"""Counts how much of each entry log is live, by a walk over the block index in slices.

A walk that begins after a log was closed finds every reference that the log has at the end of the walk, and may find more. Proof:

1. References are added by the flush thread alone: by a flush, to logs that are then being written or whose blocks are on their
   way to the index (`EntryLogWriter.is_needed`); and by `BlockIndex.move`, to the new log of a compaction, which was just written.
2. A log is closed when neither holds. The writer never opens an old log again, and log ids are not used twice. So no
   reference to a closed log is added any more, and existing ones only become fewer.
3. A reference that exists at the end existed all the time, also when the walk read its slice of the index: that slice had it.

So a closed log without a reference in the walk is dead for good, and the walk may run in another thread, with pauses, while
flushes, deletions and moves change the index. What it finds in a log is an upper bound of what is left to copy from it. `closed`
must be determined in the flush thread, between two flushes, before the walk begins.

The index may show a removal that a power loss undoes (its sync failed): sync the index before deleting a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_ports import Worker

_SLICE_BLOCKS = 500
"""About a millisecond of the interpreter lock."""
_PAUSE_S = 0.002
"""Pause between two slices, in which the loop and the journal's thread run."""

Visit: TypeAlias = Callable[[Sequence[BlockRef]], None]


async def walk_blocks(index: BlockIndex, worker: Worker, visit: Visit, is_urgent: Callable[[], bool]) -> None:
    """Pass every block to `visit`, in the worker's thread. If the index raises, so does this, and the walk proves nothing."""
    last: BlockRef | None = None

    def work() -> BlockRef | None:
        blocks = index.blocks_after(last, _SLICE_BLOCKS)
        visit(blocks)
        return blocks[-1] if len(blocks) == _SLICE_BLOCKS else None

    while True:
        last = await worker.run(work)
        if last is None:
            return
        await asyncio.sleep(0 if is_urgent() else _PAUSE_S)


class LogUsage:
    """Live bytes and blocks of every log, as counted so far by a walk."""

    def __init__(self) -> None:
        self.live_bytes: dict[int, int] = {}
        self.blocks: dict[int, int] = {}

    def visit(self, blocks: Sequence[BlockRef]) -> None:
        """Count these blocks."""
        for block in blocks:
            self.live_bytes[block.log_id] = self.live_bytes.get(block.log_id, 0) + block.length
            self.blocks[block.log_id] = self.blocks.get(block.log_id, 0) + 1


class LogContents:
    """The references to some logs, as found so far by a walk."""

    def __init__(self, log_ids: Collection[int]) -> None:
        self.by_log: dict[int, list[BlockRef]] = {log_id: [] for log_id in log_ids}

    def visit(self, blocks: Sequence[BlockRef]) -> None:
        """Keep those of the blocks that are in one of the logs."""
        for block in blocks:
            found = self.by_log.get(block.log_id)
            if found is not None:
                found.append(block)
