"""Random histories against a model: adds, recovery adds, fences, LACs, reads, checkpoints, deletions, crashes, for many seeds."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from cepheid_bookie import Bookie
from cepheid_rpc import Status
from tests.bookie.bookie_support import KiB, Machine, group_of, read_all, settle, small_settings
from tests.bookie.promises import Promises


async def a_step(bookie: Bookie, promises: Promises, rng: random.Random) -> None:
    ledger_id = rng.randrange(1, 8)
    first = rng.randrange(0, 40)
    match rng.choices(
        ["add", "message", "recovery", "fence", "fence_by_read", "lac", "checkpoint", "read"], [30, 20, 10, 2, 2, 4, 6, 10]
    )[0]:
        case "add":
            await promises.add(bookie, group_of(ledger_id, first, rng.randrange(1, 9), size=200))
        case "message":
            groups = [group_of(rng.randrange(1, 8), rng.randrange(0, 40), rng.randrange(1, 5), size=200) for _ in range(12)]
            await promises.add(bookie, *groups)
        case "recovery":
            await promises.add(bookie, group_of(ledger_id, first, rng.randrange(1, 9), size=200), recovery=True)
        case "fence":
            await promises.fence(bookie, ledger_id)
        case "fence_by_read":
            await promises.fence_by_read(bookie, ledger_id, first)
        case "lac":
            await promises.write_lac(bookie, ledger_id, first)
        case "checkpoint":
            await bookie.checkpoint()
        case "read":
            promised = set(promises.ok)  # what is answered meanwhile may be missed
            entries, missing = await read_all(bookie, ledger_id, first, first + 10)
            for entry_id, status in missing.items():
                assert status.certain_no
                assert (ledger_id, entry_id) not in promised, f"{ledger_id}:{entry_id} was answered OK and is denied"
            assert all(promises.sent[ledger_id, entry_id] == entry for entry_id, entry in entries.items())


async def drop_a_copy(bookie: Bookie, promises: Promises, ledger_id: int) -> None:
    """As garbage collection does with a surplus copy, while nothing else is under way."""
    copy = await bookie.look_at_copy(ledger_id)
    if copy is not None and await bookie.drop_copy(copy):
        promises.ok = {name: entry for name, entry in promises.ok.items() if name[0] != ledger_id}
        promises.fenced[ledger_id] = promises.fence_asked[ledger_id] = None
        assert await read_all(bookie, ledger_id, 0, 50) == ({}, dict.fromkeys(range(51), Status.NO_ENTRY))


async def several_at_once(bookie: Bookie, promises: Promises, rng: random.Random, steps: int) -> None:
    """Three clients side by side."""

    async def client() -> None:
        for _ in range(steps // 3):
            await a_step(bookie, promises, rng)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(client())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
async def test_promises_survive_any_history_of_crashes(seed: int) -> None:
    rng = random.Random(seed)
    settings = small_settings(write_cache_bytes=rng.choice((4, 16, 64)) * 4 * KiB, loaded_ledgers=rng.choice((1, 3, 100)))
    machine, promises = Machine(seed, settings), Promises()
    for _ in range(5):
        machine.crash_at(rng.randrange(0, 150))
        steps = rng.randrange(10, 80)
        await machine.run_until_crash(partial(several_at_once, promises=promises, rng=rng, steps=steps))
        machine.restart(power_loss=rng.random() < 0.8)
        async with machine.bookie() as bookie:
            await promises.check(bookie)
        machine.restart(power_loss=rng.random() < 0.5)
    assert promises.ok or not promises.sent


@pytest.mark.parametrize("seed", range(10))
async def test_at_every_mark_power_loss_would_lose_nothing(seed: int) -> None:
    """S6: what lies below the saved mark is in synced log and index."""
    rng = random.Random(seed)
    machine, promises = Machine(seed, small_settings(write_cache_bytes=16 * KiB)), Promises()
    bookie = await machine.open()
    marks = 0
    for _ in range(12):
        for _ in range(8):
            await a_step(bookie, promises, rng)
        await drop_a_copy(bookie, promises, rng.randrange(1, 8))
        machine.disk.on_operation = None
        copy = Machine(f"{seed}/copy", machine.settings, machine.disk.copy_after_power_loss(rng))
        copy.index._now = machine.index._synced.copy()
        copy.index._synced = machine.index._synced.copy()
        async with copy.bookie() as other:
            await promises.check(other)
        marks = max(marks, bookie.statistics().mark_sequence)
    assert marks > 1
    await bookie.aclose()


async def test_reads_see_every_entry_while_flushes_run_under_them() -> None:
    """An entry is in a half or in the index, at any moment of a flush."""
    machine = Machine(settings=small_settings(write_cache_bytes=16 * KiB))
    async with machine.bookie() as bookie:
        written = 0
        done = False

        async def write() -> None:
            nonlocal written, done
            promises = Promises()
            for first in range(0, 300, 3):
                assert await promises.add(bookie, group_of(7, first, 3, size=400)) == [Status.OK]
                written = first + 3
            done = True

        async def read() -> None:
            while not done:
                await asyncio.sleep(0)  # a read from memory needs no wait of its own
                upto = written
                entries, _ = await read_all(bookie, 7, 0, max(upto - 1, 0))
                assert len(entries) >= upto, f"{upto - len(entries)} entries are nowhere"

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            for _ in range(3):
                group.create_task(read())
        assert bookie.statistics().flushes > 10


async def test_entries_of_a_half_being_flushed_are_read_from_it() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        promises = Promises()
        await promises.add(bookie, group_of(7, 0, 5))
        machine.workers["flush"].hold()
        checkpoint = asyncio.ensure_future(bookie.checkpoint())
        await settle()
        await promises.add(bookie, group_of(7, 5, 5))
        await promises.check(bookie)
        assert bookie.statistics().read_disk_chunks == 0
        machine.workers["flush"].release()
        await checkpoint
        await promises.check(bookie)
