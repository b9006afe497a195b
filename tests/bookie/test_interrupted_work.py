"""What is cut short, fails on the way, or is asked twice: nothing is left in half a state, nothing is claimed too early."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cepheid_bookie import RealDisk
from cepheid_bookie.block_index import BlockRef
from cepheid_rpc import AddAnswer, AddRequest, ExplicitLac, LacRequest, Status
from tests.bookie.bookie_support import KEY, KiB, Machine, add, added, group_of, read_all, small_settings
from tests.support import wait_until


async def test_a_deletion_that_the_index_refused_can_be_asked_for_again() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0), group_of(8, 0))
        await bookie.checkpoint()

        def full() -> None:
            raise OSError(errno.ENOSPC, "no space left")

        machine.index.before_sync = full
        with pytest.raises(OSError, match="no space"):
            await bookie.delete_ledgers([7])
        machine.index.before_sync = lambda: None
        assert [a.status for a in await add(bookie, group_of(7, 1))] == [Status.FENCED], "metadata has no such ledger any more"
        assert 7 in bookie.ledgers(), "garbage collection must find it again"
        await bookie.delete_ledgers([7])
        assert bookie.ledgers() == [8]


async def test_a_ledger_being_deleted_is_not_loaded_anew_from_its_old_record() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0), group_of(8, 0))
    async with machine.bookie(loaded_ledgers=1) as bookie:
        await added(bookie, group_of(7, 1), group_of(8, 1))  # two are loaded: one will be pushed out
        machine.workers["flush"].hold()
        deletion = asyncio.ensure_future(bookie.delete_ledgers([7]))
        await asyncio.sleep(0.4)  # longer than the table waits with pushing out
        late = await add(bookie, group_of(7, 2))
        machine.workers["flush"].release()
        await deletion
        assert [a.status for a in late] == [Status.FENCED]


async def test_a_fence_of_a_deleted_ledger_is_answered_behind_the_adds_that_came_before_it() -> None:
    """The tombstone is durable, but an add from before the deletion may still wait for a slow journal (seed 0x169b738df)."""
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
        await bookie.checkpoint()
        machine.workers["journal"].hold()
        answers: list[str] = []
        late = asyncio.ensure_future(add(bookie, group_of(7, 1)))
        late.add_done_callback(lambda _: answers.append("add"))
        await asyncio.sleep(0)
        await bookie.delete_ledgers([7])
        fence = asyncio.ensure_future(bookie.read_lac(LacRequest(7, KEY, fence=True)))
        fence.add_done_callback(lambda _: answers.append("fence"))
        await asyncio.sleep(0.1)
        assert not answers, "neither is durable yet"
        machine.workers["journal"].release()
        assert [answer.status for answer in await late] == [Status.OK]
        assert (await fence).status is Status.NO_LEDGER
        assert answers == ["add", "fence"]


@pytest.mark.virtual_time
async def test_under_steady_load_adds_that_wait_a_moment_are_not_refused_with_those_that_wait_too_long() -> None:
    machine = Machine(settings=small_settings(waiting_s=0.1))
    async with machine.bookie() as bookie:
        machine.workers["flush"].takes_s = 0.005
        fates: list[Status] = []
        sent = 0
        ends = asyncio.get_running_loop().time() + 0.5  # five times what an add may wait

        def send() -> None:
            nonlocal sent
            bookie.add([AddRequest(group_of(7, sent, size=2 * KiB), KEY)], on_answers)
            sent += 1

        def on_answers(answers: Sequence[AddAnswer]) -> None:
            for answer in answers:
                for _ in range(answer.first_entry_id, answer.last_entry_id + 1):
                    fates.append(answer.status)
                    if asyncio.get_running_loop().time() < ends:
                        send()

        for _ in range(40):  # 80 KiB outstanding through a cache of 16: some always wait, none for long
            send()
        await wait_until(lambda: len(fates) == sent)
        assert set(fates) == {Status.OK}


async def test_a_checkpoint_under_which_the_journal_fails_says_why() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
        machine.workers["flush"].hold()
        checkpoint = asyncio.ensure_future(bookie.checkpoint())
        await asyncio.sleep(0.01)

        def broken(name: str, path: str) -> None:
            if name == "sync" and path.startswith("journal/"):
                raise OSError(errno.EIO, "the disk said no")

        machine.disk.on_operation = broken
        await add(bookie, group_of(7, 1))
        machine.workers["flush"].release()
        with pytest.raises(OSError, match="the disk said no"):
            await checkpoint


async def test_the_same_explicit_lac_is_not_confirmed_before_it_is_durable() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
        machine.workers["journal"].hold()
        asked = [asyncio.ensure_future(bookie.write_lac(ExplicitLac(7, 5, KEY))) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert [request.done() for request in asked] == [False, False]
        machine.workers["journal"].release()
        assert await asyncio.gather(*asked) == [Status.OK, Status.OK]


async def test_a_read_that_was_given_up_before_its_turn_costs_the_disk_nothing() -> None:
    """Else a slow disk reads for clients that have timed out and asked again, and never catches up."""
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
        await bookie.checkpoint()
        machine.workers["read"].hold()
        reads = [asyncio.ensure_future(read_all(bookie, 7, 0, 0)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for given_up in reads[:2]:
            given_up.cancel()
        await asyncio.gather(*reads[:2], return_exceptions=True)
        looks = 0
        find = machine.index.find

        def counted(*args: int) -> list[BlockRef]:
            nonlocal looks
            looks += 1
            return find(*args)

        machine.index.find = counted  # type: ignore[method-assign]
        machine.workers["read"].release()
        entries, _ = await reads[2]
        assert (len(entries), looks) == (1, 1)
        assert bookie.statistics().open_reads == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks the system which directories were synced")
def test_the_name_of_a_new_data_directory_is_durable_with_all_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    RealDisk(tmp_path / "var" / "bookie")
    assert synced == [str(tmp_path), str(tmp_path / "var")]
    RealDisk(tmp_path / "var" / "bookie")
    assert len(synced) == 2
