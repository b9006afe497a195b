"""Machines of bookies: what can happen to their disks and processes; a start that should notice damage is checked for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import pytest

from cepheid_bookie import cookie as cookies
from cepheid_bookie import opening
from cepheid_bookie.bookie_life import BookieLife
from cepheid_bookie.errors import JournalCorruptError
from cepheid_bookie.journal_replay import JournalReplay
from cepheid_bookie.journal_tail import Tail
from cepheid_metadata import SessionState
from cepheid_rpc import ReadRequest, Status
from tests.simulation.checks.history import InvariantViolation
from tests.simulation.world.cluster import Machine, SimBookie
from tests.simulation.world.sim_directory import SESSION_S
from tests.simulation.world.stage import Stage
from tests.support import wait_until

Script = Callable[[Stage, SimBookie], Coroutine[Any, Any, None]]


def play(script: Script) -> None:
    """With three bookies; the script gets the first, which holds a closed ledger's entries, in its logs and in its journal."""
    stage = Stage("sim bookie")
    machine = Machine(two_disks=True)

    async def main() -> None:
        stage.build(3)
        for name in stage.bookies:
            stage.bookies[name] = SimBookie(name, stage.tree, stage.network, stage.plan, stage.history, machine=machine)
            await stage.bookies[name].start()
        broker = stage.brokers["east"]
        broker.start()
        writer = await broker.ledgers.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
        for number in range(60):
            answered: asyncio.Future[object] = stage.loop.create_future()
            writer.append([b"%d" % number * 300], lambda *answer, answered=answered: answered.set_result(answer))
            await answered
            if number == 40:
                await asyncio.sleep(2.0)  # a checkpoint
        await asyncio.sleep(0.05)
        await script(stage, stage.bookies["b1"])

    stage.play(main())


async def restarted(bookie: SimBookie) -> None:
    """Once: it serves, or was refused."""
    if bookie.node.alive:
        bookie.crash(power=False)
    await bookie.start()


async def statuses(bookie: SimBookie, ledger_id: int = 1) -> list[Status]:
    assert bookie.bookie is not None
    chunks = [chunk async for chunk in bookie.bookie.read(ReadRequest(ledger_id, 0, 59))]
    return [missing.status for chunk in chunks for missing in chunk.missing]


@pytest.mark.parametrize("which", ["data", "journal", "index"])
def test_a_bookie_that_lost_one_directory_is_refused_and_then_serves_in_limbo(which: str) -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        bookie.lose_one(which)
        await restarted(bookie)
        assert not bookie.serving
        assert "its data is gone" in str(bookie.refused)
        await restarted(bookie)
        assert bookie.serving
        assert await statuses(bookie) != []
        assert not any(status.certain_no for status in await statuses(bookie))

    play(script)


@pytest.mark.parametrize("damage", [SimBookie.blank, SimBookie.blank_but_for_cookie])
def test_a_blank_bookie_under_an_old_id_needs_its_operators_word(damage: Callable[[SimBookie], None]) -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        damage(bookie)
        await restarted(bookie)
        assert not bookie.serving
        assert bookie.refused is not None
        await restarted(bookie)
        assert bookie.serving
        assert not any(status.certain_no for status in await statuses(bookie))

    play(script)


@pytest.mark.parametrize("operator_knows", [True, False])
def test_a_copy_from_before_the_disks_were_lost_is_refused(operator_knows: bool) -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        bookie.keep_copy()
        bookie.lose_disk()
        await restarted(bookie)
        assert bookie.serving
        bookie.restore_copy()
        bookie.accepts_empty_disk = operator_knows
        await restarted(bookie)
        assert not bookie.serving
        assert ("is not whole" if operator_knows else "the directories are of") in str(bookie.refused)
        await restarted(bookie)
        assert bookie.serving
        assert not any(status.certain_no for status in await statuses(bookie))

    play(script)


def test_a_copy_is_put_back_whatever_else_was_wrong() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        bookie.keep_copy()
        bookie.lose_cookie()
        bookie.restore_copy()
        await restarted(bookie)
        assert bookie.serving

    play(script)


def test_a_bookie_that_starts_as_if_it_were_whole_is_a_violation() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        bookie.blank_but_for_cookie()
        with mock.patch.object(BookieLife, "old_copies", return_value=None), mock.patch.object(BookieLife, "count"):
            await restarted(bookie)
        await asyncio.sleep(1)

    with pytest.raises(InvariantViolation, match="S11: b1 starts as if it were whole"):
        play(script)


def test_a_lost_cookie_is_noticed_and_its_copy_put_back_loses_nothing() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        bookie.lose_cookie()
        await restarted(bookie)
        assert not bookie.serving
        assert "not stamped" in str(bookie.refused)
        await restarted(bookie)
        assert bookie.serving
        assert await statuses(bookie) == []

    play(script)


@pytest.mark.parametrize("seed", range(8))
def test_a_bit_that_flipped_in_the_journal_stops_the_start(seed: int) -> None:
    """Each of them: it is above the mark, and another batch is behind it."""

    async def script(stage: Stage, bookie: SimBookie) -> None:
        assert bookie.decay_journal(random.Random(seed))
        await restarted(bookie)
        assert isinstance(bookie.refused, JournalCorruptError)
        await restarted(bookie)
        assert bookie.serving
        assert await statuses(bookie) == []

    play(script)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("damage", [SimBookie.cut_journal, SimBookie.decay_end_of_journal])
def test_a_journal_that_lost_its_end_starts_in_limbo(damage: Callable[[SimBookie, random.Random], bool], seed: int) -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        assert damage(bookie, random.Random(seed))
        await restarted(bookie)
        assert bookie.serving
        assert not any(status.certain_no for status in await statuses(bookie))
        await restarted(bookie)
        assert bookie.serving

    play(script)


def test_a_start_that_takes_the_lost_end_of_a_journal_for_a_torn_one_is_a_violation() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        assert bookie.cut_journal(random.Random(0))
        with mock.patch.object(JournalReplay, "_report_damage"):
            await restarted(bookie)
        await asyncio.sleep(1)

    with pytest.raises(InvariantViolation, match="S8: b1 starts as if it were whole: its journal was cut off"):
        play(script)


def test_a_bookie_that_takes_what_a_crash_left_for_damage_is_a_violation() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        with mock.patch.object(JournalReplay, "_judge_tail", return_value=Tail.DAMAGED):
            await restarted(bookie)
        await asyncio.sleep(1)

    with pytest.raises(InvariantViolation, match="S8: b1 starts in limbo below 11, and has lost nothing"):
        play(script)


def test_where_the_mark_has_passed_all_of_the_journal_nothing_flips() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        await asyncio.sleep(2.0)  # a checkpoint
        assert not bookie.decay_end_of_journal(random.Random(0))
        await restarted(bookie)
        assert not bookie.decay_journal(random.Random(0))
        await restarted(bookie)
        assert await statuses(bookie) == []

    play(script)


def test_a_bookie_that_is_stopped_leaves_nothing_to_replay_and_nobody_connected() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        bookie.stop()
        await wait_until(lambda: not bookie.node.alive)
        assert not bookie.serving
        with mock.patch.object(opening.FlushStore, "flush", side_effect=AssertionError("there was something to replay")):
            await bookie.start()
        assert await statuses(bookie) == []

    play(script)


def test_a_pause_beyond_the_session_ends_it_and_the_process_goes_on_with_a_new_one() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        assert bookie.store is not None
        bookie.pause(SESSION_S * 3)
        await asyncio.sleep(SESSION_S * 2)
        assert bookie.node.paused
        assert bookie.store.memory.session_state is SessionState.LOST
        await asyncio.sleep(SESSION_S * 2)
        assert not bookie.node.paused
        assert bookie.store.session_state is SessionState.CONNECTED
        assert await statuses(bookie) == []

    play(script)


def test_a_full_index_refuses_no_reads_and_the_flush_comes_through_later() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        assert bookie.bookie is not None
        bookie.index.full = True
        with pytest.raises(OSError, match="no space"):
            await bookie.bookie.checkpoint()
        assert await statuses(bookie) == []
        bookie.free_space()
        await wait_until(lambda: bookie.writable)
        await bookie.bookie.checkpoint()
        await restarted(bookie)
        assert await statuses(bookie) == []

    play(script)


def test_an_index_that_cannot_be_read_makes_entries_unknown_and_not_absent() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        await restarted(bookie)  # nothing is cached
        with mock.patch.object(bookie.index, "on_look", side_effect=OSError("a bad block")):
            assert set(await statuses(bookie)) == {Status.IO_ERROR}
        assert await statuses(bookie) == []

    play(script)


def test_a_slow_disk_of_the_journal_holds_up_no_flush() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        bookie.slow_thread, bookie.slow_thread_s = "journal", (10.0, 10.0)
        began_s = stage.loop.time()
        journal, flush = bookie._work_delay_s("b1-journal"), bookie._work_delay_s("b1-flush")
        assert (journal, flush < 1) == (10.0, True)
        assert stage.plan.ends_s >= began_s + 10  # peace waits for it

    play(script)


def test_two_disks_are_two() -> None:
    async def script(stage: Stage, bookie: SimBookie) -> None:
        assert bookie.journal_disk.listdir("journal")
        assert not bookie.disk.exists("journal")
        assert bookie.disk.listdir("entrylog")
        assert cookies.load_cookie(bookie.disk, "data") == cookies.load_cookie(bookie.journal_disk, "journal")

    play(script)
