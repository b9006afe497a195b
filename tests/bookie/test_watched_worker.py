"""The count of waits behind reads: 0 as the bookie is built, and not 0 when a read gets into a thread of adds."""

from __future__ import annotations

import asyncio

from cepheid_bookie.watched_worker import ReadWork
from tests.bookie.bookie_support import Machine, added, group_of, read_all, settle
from tests.support import wait_until


async def test_adds_of_ledgers_old_and_new_wait_for_no_read_however_slow_reads_are() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, *(group_of(ledger_id, 0, 3) for ledger_id in range(5)))
    async with machine.bookie() as bookie:
        machine.workers["read"].hold()
        machine.workers["scan"].hold()
        reads = [asyncio.ensure_future(read_all(bookie, ledger_id, 0, 2)) for ledger_id in range(5)]
        await settle()
        await added(bookie, *(group_of(ledger_id, 3) for ledger_id in range(10)))
        await bookie.checkpoint()
        assert not any(read.done() for read in reads)
        machine.workers["read"].release()
        machine.workers["scan"].release()
        await asyncio.gather(*reads)
        assert bookie.statistics().adds_waited_behind_reads_s == 0


async def test_a_read_in_the_thread_of_the_journal_is_noticed() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        machine.workers["journal"].takes_s = 0.05
        misplaced = asyncio.ensure_future(bookie._workers.journal.run(ReadWork(lambda: "read")))
        await settle()
        await added(bookie, group_of(7, 0))
        assert await misplaced == "read"
        waited_s = bookie.statistics().adds_waited_behind_reads_s
        assert waited_s > 0
        await added(bookie, group_of(7, 1))
        assert bookie.statistics().adds_waited_behind_reads_s == waited_s, "no read was before it"


async def test_a_reader_with_the_threads_of_flushes_is_noticed() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 3))
        await bookie.checkpoint()
        bookie._reader._worker = bookie._workers.flush  # the mistake
        machine.workers["flush"].takes_s = 0.02
        read = asyncio.ensure_future(read_all(bookie, 7, 0, 2))
        await settle()
        await added(bookie, group_of(7, 3))
        await bookie.checkpoint()
        await wait_until(read.done)
        assert bookie.statistics().adds_waited_behind_reads_s > 0
