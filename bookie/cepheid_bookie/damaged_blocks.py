"""Damaged blocks: reported to metadata, and removed once their entries are intact in other blocks.

    scrubber, reader, compaction ──suspect──► read again ──intact──► nothing to do
                                                  └──damaged──► remembered, logged once
    each damaged block is read again after 1 s, 2 s, 4 s, … 10 min:
        entries that are intact nowhere on this bookie ──► mark in metadata: a replication worker copies them here from a replica
        all of them intact, but some in the damaged block alone ──► these are added again, as repair adds copies
        all of them in intact blocks ──► the damaged block is removed from the index

Rule 1: a block is removed from the index only when every entry of it was read intact from other blocks, which are still indexed
in the turn of the flush thread that removes it. So this bookie never denies an entry because its block was damaged.
Rule 2: a block that reads well the second time, or that is no longer in the index, is not damaged.
Rule 3: while metadata is unavailable, damaged blocks stay remembered and are reported later. A ledger whose mark already names this
bookie is not marked again: the worker would start over.
Rule 4: at most `MOST_DAMAGED` blocks are remembered, suspected ones included. `suspect` returns False for others, and the scrubber
does not continue past such a block before there is room for it.
Rule 5: a block whose entries cannot be looked up, because the index is damaged there, is no longer suspected: it will be found
again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cepheid_bookie.add_answers import OnAnswers
from cepheid_bookie.block_check import Assessment, Run, assess, place_of
from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.entry_block import plan_blocks
from cepheid_bookie.entry_log import EntryLogReader
from cepheid_bookie.errors import IndexCorruptError
from cepheid_bookie.write_cache import WriteCache
from cepheid_ports import Worker
from cepheid_rpc import AddAnswer, AddRequest, Status

log = logging.getLogger(__name__)

MOST_DAMAGED = 1000
_MOST_SUSPECTS = 1000
_AT_ONCE = 16
"""Limit of damaged blocks that one round reads: about 16 MiB."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 600.0
_ADD_BYTES = 512 << 10
"""Size of the pieces in which entries are added again."""


class Outlook(enum.StrEnum):
    """What can be done about a damaged block."""

    REPAIR = "repair"  # a replica may have its entries
    NO_REPLICA = "no_replica"  # no other bookie has them, as far as metadata knows
    NOT_NEEDED = "not_needed"  # metadata does not count on this bookie for them


class DamageReport(NamedTuple):
    """What metadata knows about damaged entries."""

    outlook: Outlook
    topic: str  # empty: unknown


class DamageReports(Protocol):
    """The reporting of damage to metadata. Raises if metadata cannot be reached."""

    async def report(self, ledger_id: int, entries: Sequence[Run]) -> DamageReport:
        """Have these entries copied to this bookie again, unless the ledger is marked for that already."""


class UnreportedDamage:
    """Implements `DamageReports` for a bookie without metadata: damage is only logged and counted."""

    async def report(self, ledger_id: int, entries: Sequence[Run]) -> DamageReport:
        return DamageReport(Outlook.REPAIR, "")


@dataclass(slots=True)
class _Damaged:
    outlook: Outlook = Outlook.REPAIR
    added_again: bool = False  # entries intact in this block alone are in the journal, and will be in another block
    pause_s: float = _FIRST_PAUSE_S  # until the next check
    due: float = 0.0  # loop time of the next check


class DamagedBlocks:
    """The damaged blocks of a bookie; used on the loop.

    `worker` reads blocks; `flush_worker` is the thread that writes to the index.
    """

    def __init__(
        self,
        index: BlockIndex,
        logs: EntryLogReader,
        cache: WriteCache,
        worker: Worker,
        flush_worker: Worker,
        add: Callable[[Sequence[AddRequest], OnAnswers], None],
        *,
        bookie_id: str,
    ) -> None:
        self._index = index
        self._logs = logs
        self._cache = cache
        self._worker = worker
        self._flush_worker = flush_worker
        self._add = add
        self._bookie_id = bookie_id
        self._damaged: dict[BlockRef, _Damaged] = {}
        self._suspects: dict[BlockRef, None] = {}
        self._ranges: dict[tuple[int, int, int], None] = {}
        self.reports: DamageReports = UnreportedDamage()
        self.forget_cached: Callable[[Collection[int]], None] = lambda ledger_ids: None
        """Makes readers drop their cached blocks of these ledgers: intact ones would hide the damage from repair."""
        self.wakeup = asyncio.Event()  # a block is suspected
        self.is_changed = False  # since `blocks` was last saved; the code that saves it resets this
        self._said_full = False
        self.found = 0
        self.mended = 0

    def __repr__(self) -> str:
        return f"<DamagedBlocks: {len(self._damaged)}, {len(self._suspects) + len(self._ranges)} suspected>"

    @property
    def blocks(self) -> Collection[BlockRef]:
        """The damaged blocks that are known."""
        return self._damaged.keys()

    def count(self, outlook: Outlook) -> int:
        """Return the number of damaged blocks with this outlook."""
        return sum(damaged.outlook is outlook for damaged in self._damaged.values())

    def remember(self, blocks: Sequence[BlockRef]) -> None:
        """Take over the damaged blocks that an earlier process found."""
        self._damaged.update((block, _Damaged()) for block in blocks[:MOST_DAMAGED])
        if blocks:
            self.wakeup.set()

    def suspect(self, block: BlockRef) -> bool:
        """Note that a read of this block failed; it is read again soon. Cheap. Return False if there is no room to remember it."""
        if block not in self._damaged and block not in self._suspects:
            if len(self._damaged) + len(self._suspects) >= MOST_DAMAGED:
                self._say_full()
                return False
            self._suspects[block] = None
            self.wakeup.set()
        return True

    def suspect_entries(self, ledger_id: int, first_entry_id: int, last_entry_id: int) -> None:
        """Note that reads of these entries failed, when the block is unknown: every block with one of them is read again."""
        if len(self._ranges) < _MOST_SUSPECTS:
            self._ranges[ledger_id, first_entry_id, last_entry_id] = None
            self.wakeup.set()

    async def look_at_suspects(self) -> None:
        """Read suspected blocks again and remember the damaged ones. Raises the errors of the index."""
        self.wakeup.clear()
        while self._ranges:
            ledger_id, first, last = next(iter(self._ranges))
            try:
                found = await self._overlapping(ledger_id, first, last)
            except IndexCorruptError:  # rule 5
                found = []
            self._ranges.pop((ledger_id, first, last), None)
            for block in found:
                self.suspect(block)
        self.wakeup.clear()
        while self._suspects:
            block = next(iter(self._suspects))
            try:
                assessment = await self._assess(block)
            except IndexCorruptError:  # rule 5
                self._suspects.pop(block, None)
                continue
            self._suspects.pop(block, None)
            if not assessment.error or block in self._damaged:
                continue
            self.found += 1
            damaged = self._damaged[block] = _Damaged(due=asyncio.get_running_loop().time() + _FIRST_PAUSE_S)
            self.is_changed = True
            await self._act(block, damaged, assessment, is_new=True)

    @property
    def next_look_at(self) -> float | None:
        """Return the loop time at which a damaged block is to be read again; None: there is none."""
        return min((damaged.due for damaged in self._damaged.values()), default=None)

    async def look_again(self, *, now: float = math.inf) -> None:
        """Read damaged blocks that are due by `now` again, a few at a time, and repair what can be.

        Raises the errors of the index.
        """
        due = [block for block, damaged in self._damaged.items() if damaged.due <= now]
        for block in due[:_AT_ONCE]:
            damaged = self._damaged.pop(block)
            self._damaged[block] = damaged  # moved to the end: the next round checks the others
            damaged.due = asyncio.get_running_loop().time() + damaged.pause_s
            damaged.pause_s = min(2 * damaged.pause_s, _LONGEST_PAUSE_S)
            try:
                assessment = await self._assess(block)
            except IndexCorruptError:
                continue
            if assessment.error:
                await self._act(block, damaged, assessment, is_new=False)
            else:
                self._forget(block, "block.no_longer_damaged")

    def _say_full(self) -> None:
        if not self._said_full:
            self._said_full = True
            hint = "the disk is failing: cepheid bookies decommission moves everything to other bookies"
            log.error("block.too_many_damaged", extra={"bookie": self._bookie_id, "remembered": MOST_DAMAGED, "hint": hint})

    async def _overlapping(self, ledger_id: int, first: int, last: int) -> list[BlockRef]:
        return await self._worker.run(lambda: self._index.overlapping(ledger_id, first, last))

    async def _assess(self, block: BlockRef) -> Assessment:
        return await self._worker.run(lambda: assess(self._index, self._logs, block))

    async def _act(self, block: BlockRef, damaged: _Damaged, assessment: Assessment, *, is_new: bool) -> None:
        self.forget_cached([block.ledger_id])
        missing = [run for missed in assessment.missing for run in self._not_cached(block.ledger_id, *missed)]
        topic = ""
        if missing:
            try:
                damaged.outlook, topic = await self.reports.report(block.ledger_id, missing)
            except Exception as error:  # metadata may be unavailable for hours: the next round reports again
                log.warning("block.damage_not_reported", extra={**self._facts(block), "error": repr(error)})
        if is_new:
            self._log_damage(block, damaged, missing, topic, assessment.error)
        if missing:
            return
        if assessment.others:
            if await self._flush_worker.run(lambda: self._remove(block, assessment.others)):
                self.mended += 1
                self._forget(block, "block.mended")
        elif assessment.only_here and not assessment.missing and not damaged.added_again:
            damaged.added_again = await self._add_again(assessment)
            if damaged.added_again:
                damaged.pause_s = _FIRST_PAUSE_S  # the next checkpoint brings them into a block

    def _not_cached(self, ledger_id: int, first: int, last: int) -> list[Run]:
        """Return which of these entries are not in the write cache, on their way to a block."""
        runs: list[Run] = []
        while first <= last:
            group = self._cache.find(ledger_id, first)
            if group is not None:
                first = group.last_entry_id + 1
                continue
            following = self._cache.first_from(ledger_id, first)
            end = last if following is None else min(last, following - 1)
            runs.append((first, end))
            first = end + 1
        return runs

    async def _add_again(self, assessment: Assessment) -> bool:
        """Add the entries that are intact in the damaged block alone, as repair adds copies. Return whether they are durable."""
        for group in plan_blocks(assessment.only_here, _ADD_BYTES):
            if not await self._add_one(AddRequest(group, assessment.master_key, recovery=True, background=True)):
                return False
        return True

    async def _add_one(self, request: AddRequest) -> bool:
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = len(request.group)
        is_ok = True

        def on_answers(answers: Sequence[AddAnswer]) -> None:
            nonlocal waiting, is_ok
            for answer in answers:
                waiting -= answer.last_entry_id - answer.first_entry_id + 1
                is_ok = is_ok and answer.status is Status.OK
            if waiting <= 0 and not done.done():
                done.set_result(is_ok)

        self._add([request], on_answers)
        return await done

    def _remove(self, block: BlockRef, others: Sequence[BlockRef]) -> bool:
        """Remove the block from the index, in the flush thread (rule 1).

        Return False if another of the blocks has left the index.
        """
        if not all(self._index.contains(other) for other in others):
            return False
        self._index.remove_blocks([block])
        return True

    def _forget(self, block: BlockRef, event: str) -> None:
        self._damaged.pop(block, None)
        self.is_changed = True
        log.info(event, extra=self._facts(block))

    def _log_damage(self, block: BlockRef, damaged: _Damaged, missing: Sequence[Run], topic: str, error: str) -> None:
        if not missing:
            hint = "all its entries are whole on this bookie; they are written again"
        elif damaged.outlook is Outlook.NO_REPLICA:
            hint = "no other bookie has these entries: bring back an older copy of the disk, or give them up"
        elif damaged.outlook is Outlook.NOT_NEEDED:
            hint = "metadata does not count on this bookie for these entries; nothing is lost"
        else:
            hint = "repair copies these entries from another bookie; if it happens again, check the disk"
        entries = ", ".join(f"{first}..{last}" for first, last in missing[:10]) or "none"
        log.error(
            "block.damaged", extra={**self._facts(block), "topic": topic or "?", "entries": entries, "error": error, "hint": hint}
        )

    def _facts(self, block: BlockRef) -> dict[str, object]:
        return {"bookie": self._bookie_id, "ledger_id": block.ledger_id, "place": place_of(block)}
