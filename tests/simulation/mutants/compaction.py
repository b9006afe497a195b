"""Mistakes of bookies that compact entry logs: what they copy, in which order, and which logs they believe to be dead."""

from __future__ import annotations

import contextlib
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from cepheid_bookie import memory_index
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.entry_log import EntryLogReader, EntryLogWriter
from cepheid_bookie.fail_stop import FailStopWorker
from cepheid_bookie.log_collection import LogCollection
from cepheid_bookie.log_usage import LogUsage
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_ports import OnDone
from tests.simulation.mutants.registry import mutant, scenario_mutant


@mutant("S9", "S2", "S5", "S6", "S8")
@contextlib.contextmanager
def delete_the_old_log_before_the_index_is_synced() -> Iterator[None]:
    """The new places are on their way to the index, and the log is gone (BOOKKEEPER-530, apache/bookkeeper#1534)."""
    move = LogCollection._move

    async def delete_first(self: LogCollection, moves: Sequence[tuple[BlockRef, BlockRef]]) -> None:
        await self._delete(sorted({old.log_id for old, _ in moves}), copied_bytes=0)
        await move(self, moves)

    def unlink_what_is_there(self: LogCollection, log_ids: Sequence[int], **options: Any) -> Any:
        there = [log_id for log_id in log_ids if log_id in self._sizes]
        return delete(self, there, **options)

    delete = LogCollection._delete
    with mock.patch.object(LogCollection, "_move", delete_first), mock.patch.object(LogCollection, "_delete", unlink_what_is_there):
        yield


@mutant("V6", "S9")
@contextlib.contextmanager
def move_blocks_that_are_not_in_the_index_any_more() -> Iterator[None]:
    """A ledger that was deleted while its blocks were copied comes back."""

    def move(content: Any, moves: Sequence[tuple[BlockRef, BlockRef]]) -> int:
        for old, new in moves:
            known = content.blocks.setdefault(old.ledger_id, [])
            if old in known:
                known.remove(old)
            insort(known, new, key=memory_index._order)
        return len(moves)

    with mock.patch.object(MemoryBlockIndex, "_move", staticmethod(move)):
        yield


@mutant("S9", "S2", "S5", "S6", "S8")
@contextlib.contextmanager
def compact_the_log_that_is_being_written() -> Iterator[None]:
    """Its next blocks are added behind the walk."""
    with mock.patch.object(EntryLogWriter, "is_needed", return_value=False):
        yield


@mutant("S9", "S2", "S5", "S6", "S8")
@contextlib.contextmanager
def take_a_walk_that_began_before_the_log_was_closed() -> Iterator[None]:
    """What the pass before found is taken for what there is now, of logs that were closed since."""
    walk = LogCollection._walk

    async def walk_of_the_last_pass(self: LogCollection, visit: Any) -> None:
        usage = getattr(visit, "__self__", None)
        if not isinstance(usage, LogUsage):
            await walk(self, visit)
            return
        before: LogUsage = self.__dict__.setdefault("last_usage", LogUsage())
        now = LogUsage()
        await walk(self, now.visit)
        usage.live_bytes, usage.blocks = before.live_bytes, before.blocks
        self.__dict__["last_usage"] = now

    with mock.patch.object(LogCollection, "_walk", walk_of_the_last_pass):
        yield


@scenario_mutant
@contextlib.contextmanager
def copy_blocks_without_a_check() -> Iterator[None]:
    """What has decayed is copied as if it were whole, and the log that the medium has damaged is deleted.

    Random worlds rarely notice it: a bit has to flip in a log of which other ledgers are deleted afterwards.
    """
    with mock.patch.object(EntryLogReader, "read_checked", EntryLogReader._read):
        yield


@mutant("S9", "S2", "S5")
@contextlib.contextmanager
def delete_a_log_of_which_a_block_could_not_be_read() -> Iterator[None]:
    """Most of it was copied."""
    with mock.patch.object(LogCollection, "_note_damage"):
        yield


@scenario_mutant
@contextlib.contextmanager
def go_on_after_a_failed_sync_of_collection() -> Iterator[None]:
    """It is logged, and the next pass syncs again, which succeeds although what was written is lost.

    Random worlds miss it: their disks fail while they flush, and a bookie stops then anyway.
    """

    def submit(self: FailStopWorker, work: Callable[[], Any], on_done: OnDone) -> None:
        self._worker.submit(work, on_done)

    with mock.patch.object(FailStopWorker, "submit", submit):
        yield
