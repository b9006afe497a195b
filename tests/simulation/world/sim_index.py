"""The block index of a simulated bookie: stands for RocksDB, which does its own I/O. It fails as a database on a bad disk does.

write: visible ──► `on_operation("sync", "index")`, `full` ──► synced        what raises in between leaves it unsynced
look: `on_look` ──► found                                                    raises, and nothing is known
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_bookie.memory_index import MemoryBlockIndex


class SimBlockIndex(MemoryBlockIndex):
    def __init__(self) -> None:
        super().__init__(self._sync)
        self.full = False
        self.on_operation: Callable[[str, str], None] | None = None
        self.on_look: Callable[[], None] | None = None

    def find(self, ledger_id: int, first_entry_id: int, last_entry_id: int, max_blocks: int) -> list[BlockRef]:
        self._look()
        return super().find(ledger_id, first_entry_id, last_entry_id, max_blocks)

    def blocks_after(self, last: BlockRef | None, limit: int) -> list[BlockRef]:
        self._look()
        return super().blocks_after(last, limit)

    def record(self, ledger_id: int) -> LedgerRecord | None:
        self._look()
        return super().record(ledger_id)

    def copy_after_power_loss(self) -> SimBlockIndex:
        """What the next process would find if power were lost now; this index goes on."""
        copy = SimBlockIndex()
        copy._synced = self._synced.copy()
        copy.crash()
        return copy

    def _look(self) -> None:
        if self.on_look is not None:
            self.on_look()

    def _sync(self) -> None:
        if self.on_operation is not None:
            self.on_operation("sync", "index")
        if self.full:
            raise OSError(errno.ENOSPC, "no space left for the simulated index")
