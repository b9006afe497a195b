"""Scenarios of owners that depose each other. Numbers and names are those of the list in the README; every answer and commit is
checked as in random worlds, what a script asserts beside is what it is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cepheid_broker.managed_ledger import ManagedLedger, ManagedLedgerConfig, Retention, State
from cepheid_ledger import LedgerError
from cepheid_metadata import CursorRecord, LedgerState, Op, Position, keys
from cepheid_rpc import EntryGroup
from cepheid_wire import TopicName
from tests.simulation.audit import read_all
from tests.simulation.checks_topic import check_all_entries
from tests.simulation.faults import CALM
from tests.simulation.history import InvariantViolation
from tests.simulation.mutants import MUTANTS
from tests.simulation.script import Script
from tests.simulation.sim_broker import SimBroker
from tests.simulation.workload_ledgers import Quorums
from tests.simulation.workload_topics import TopicWorkload
from tests.simulation.world import World
from tests.support import wait_until

TOPIC = TopicName.parse("persistent://public/default/holes")


async def opened(script: Script, workload: TopicWorkload, broker: SimBroker) -> ManagedLedger:
    topic = await script.at(broker, workload.open(broker))
    assert topic is not None
    return topic


async def appended(script: Script, workload: TopicWorkload, broker: SimBroker, topic: ManagedLedger) -> bool:
    """Whether it is stored, as its producer is told."""
    return await broker.node.context.run(workload.append, (broker.name, topic.chain.epoch), topic)


def is_everywhere(script: Script, ledger_id: int) -> bool:
    """Every bookie has every entry that was sent."""
    sent = len(script.history.sent[ledger_id])
    return all(len(script.history.bookie(name).ok.get(ledger_id, ())) == sent for name in script.bookies)


async def all_is_there(script: Script, workload: TopicWorkload) -> None:
    """As the next owner reads it (M3, M4, M5)."""
    auditor = script.new_broker("auditor")
    auditor.start()
    topic = await opened(script, workload, auditor)
    check_all_entries(script.history, workload.model, await script.at(auditor, read_all(topic)))


# 8. cas-lost-answer


def test_8_cas_lost_answer() -> None:
    """A rollover is recorded, the answer is lost, and while its owner sleeps the next one takes over: no ledger is deleted."""

    async def course(script: Script) -> None:
        def falls_asleep(ops: Sequence[Op]) -> bool:
            rolls_over = any(op.key.startswith(f"{keys.CHAINS_KEY}/") for op in ops)
            if rolls_over:
                script.east.node.pause()
            return rolls_over

        ledger = await script.at(script.east, script.east.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        await script.at(script.east, ledger.create_cursor("sub", ledger.last_confirmed))  # holds retention
        script.east.store.loses_answer = falls_asleep
        while not script.east.node.paused:  # some go to the next ledger, before it is recorded
            script.east.node.context.run(ledger.append, [b"an entry"], lambda position, count: None)
            await asyncio.sleep(0.0005)
        rolled_to = script.history.chains[keys.chain_key(TOPIC)].ledgers[-1].ledger_id

        successor = await script.at(script.west, script.west.managed_ledgers.open(TOPIC, ManagedLedgerConfig()))
        script.east.node.resume()
        await wait_until(lambda: ledger.state is State.FAILED)
        await asyncio.sleep(5)  # whatever it does with what it believes to be its own
        assert rolled_to in script.history.ledgers
        read = await script.at(script.west, successor.read(Position(rolled_to, 0), max_entries=1, max_bytes=100))
        assert read[0].ledger_id == rolled_to

    Script(1).run(course)


def test_8_every_answer_is_lost() -> None:
    """Each write of east takes effect and is reported as unknown: no ledger, ensemble or chain takes itself for an enemy."""

    async def course(script: Script) -> None:
        script.east.store.loses_answer = lambda ops: ops[0].key != keys.LEDGER_IDS_KEY  # a lost block of ids is given up
        writer = await script.new_ledger(script.east, 3, 3)
        told = script.append(script.east, writer, b"0")
        await wait_until(lambda: bool(told))
        script.bookies[script.ensemble_of(writer.ledger_id)[0]].crash(power=False)
        told = script.append(script.east, writer, b"1")
        await wait_until(lambda: bool(told))
        assert isinstance(told[0], EntryGroup)
        assert (await script.at(script.east, writer.close())).last_entry_id == 1

        workload = TopicWorkload("orders", script.random, script.history, Quorums(1, 1, 1))
        topic = await opened(script, workload, script.east)
        before = len(topic.chain.ledgers)
        while len(topic.chain.ledgers) < before + 2:
            assert await appended(script, workload, script.east, topic)
        await all_is_there(script, workload)

    Script(4).run(course)


# 25. delete-under-writer, 26. sleeping-owner


async def delete_under_writer(script: Script, entries: int) -> None:
    """East sleeps beyond its session; west takes over, drops east's ledger, and bookies forget it; east wakes up and appends."""
    workload = TopicWorkload("orders", script.random, script.history, Quorums(3, 3, 2))
    workload.config = replace(workload.config, retention=Retention())
    topic = await opened(script, workload, script.east)
    for _ in range(entries):
        assert await appended(script, workload, script.east, topic)
    ledger_id = topic.chain.ledgers[-1].ledger_id
    script.east.node.pause()
    script.east.store.expire()
    successor = await opened(script, workload, script.west)
    assert await appended(script, workload, script.west, successor)
    await script.at(script.west, successor.trim())
    await wait_until(lambda: ledger_id in script.history.deleted and ledger_id not in script.history.restorable)
    await asyncio.sleep(5)  # bookies collect it
    script.east.store.renew()
    script.east.node.resume()
    assert not await appended(script, workload, script.east, topic)
    await all_is_there(script, workload)


def test_25_delete_under_writer() -> None:
    """The ledger is empty, and is gone at once."""
    Script(3).run(lambda script: delete_under_writer(script, 0))


def test_26_sleeping_owner() -> None:
    """What was in it is consumed."""
    Script(3).run(lambda script: delete_under_writer(script, 3))


def test_26_a_handle_that_outlives_its_session_is_found_out() -> None:
    """Nobody took over, and every append is stored: and yet the owner has no right to say so."""

    async def course(script: Script) -> None:
        workload = TopicWorkload("orders", script.random, script.history, Quorums(1, 1, 1))
        topic = await opened(script, workload, script.east)
        script.east.store.expire()
        await asyncio.sleep(0.1)
        script.east.store.renew()
        await asyncio.sleep(0.1)
        assert not await appended(script, workload, script.east, topic)

    Script(1).run(course)
    with MUTANTS["keep what is open when the session is lost"](), pytest.raises(InvariantViolation, match=r"^O1"):
        Script(1).run(course)


# Seed 0x4dd: a writer that slept while its ledger was deleted and came back


def test_a_ledger_that_came_back_is_not_opened_by_its_old_writer() -> None:
    """East sleeps; west recovers its ledger, deletes it and brings it back; a bookie ends, and east, awake, replaces it in the
    record of which it knows the first version."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 3, 2)
        assert await script.told(script.append(script.east, writer, b"0"))
        script.east.node.pause()
        ledgers = script.west.ledgers
        await script.at(script.west, ledgers.recover(writer.ledger_id))
        await script.at(script.west, ledgers.delete(writer.ledger_id))
        await script.at(script.west, ledgers.undelete(writer.ledger_id))
        script.bookies[script.ensemble_of(writer.ledger_id)[0]].crash(power=False)
        script.east.node.resume()
        told = script.append(script.east, writer, b"1")
        await wait_until(lambda: bool(told))
        assert isinstance(told[0], LedgerError)
        await asyncio.sleep(5)
        assert script.state_of(writer.ledger_id) is LedgerState.CLOSED

    Script(4).run(course)


# 27. close-lost-then-auditor


async def close_lost_then_auditor(script: Script) -> None:
    workload = TopicWorkload("orders", script.random, script.history, Quorums(3, 3, 2))
    topic = await opened(script, workload, script.east)
    assert await appended(script, workload, script.east, topic)
    for bookie in script.bookies:
        script.network.block(bookie, "east", "add answer")
    ledger_id = topic.chain.ledgers[-1].ledger_id
    told = script.east.node.context.run(workload.append, ("east", 1), topic)
    await wait_until(lambda: is_everywhere(script, ledger_id))
    await wait_until(lambda: any("ledger_broken" in line for line in script.noted), what="the ledger is given up")
    for bookie in script.bookies:
        script.network.unblock(bookie, "east", "add answer")
    assert await told
    told_at = workload.model.answered["east", 1][1]
    assert await appended(script, workload, script.east, topic)
    await all_is_there(script, workload)
    assert told_at.ledger_id == ledger_id, "it was stored there"
    assert [ledger.ledger_id for ledger in topic.chain.ledgers][-2] == ledger_id


def test_27_close_lost_then_auditor() -> None:
    """An entry is stored, and its answers are lost: the ledger is recovered with it, and it is told where it is, not sent again."""
    Script(3).run(close_lost_then_auditor)


@pytest.mark.parametrize("mistake", ["append again what recovery found", "record an end that recovery did not find"])
def test_27_an_owner_that_trusts_itself_is_found_out(mistake: str) -> None:
    with MUTANTS[mistake](), pytest.raises(InvariantViolation, match=r"^M"):
        Script(3).run(close_lost_then_auditor)


# 28. late-callback


def test_28_late_callback() -> None:
    """The old ledger's answers come when its entries were answered by recovery, and the next append is in the next ledger."""

    async def course(script: Script) -> None:
        workload = TopicWorkload("orders", script.random, script.history, Quorums(3, 3, 2))
        topic = await opened(script, workload, script.east)
        assert await appended(script, workload, script.east, topic)
        for bookie in ("b2", "b3"):
            script.network.block(bookie, "east", "add answer")
        ledger_id = topic.chain.ledgers[-1].ledger_id
        first = script.east.node.context.run(workload.append, ("east", 1), topic)
        await wait_until(lambda: is_everywhere(script, ledger_id))
        await script.at(script.west, script.west.ledgers.recover(ledger_id))
        second = script.east.node.context.run(workload.append, ("east", 1), topic)  # which finds the fence
        assert await first
        assert not second.done()
        for bookie in ("b2", "b3"):
            script.network.unblock(bookie, "east", "add answer")
        assert await second
        assert workload.model.answered["east", 1][1].ledger_id > ledger_id
        await all_is_there(script, workload)

    Script(3).run(course)


# 29. failed-then-next


def test_29_failed_then_next() -> None:
    """Two appends fail, in their order, when neither bookies nor metadata answer for too long; nothing behind them is taken."""

    async def course(script: Script) -> None:
        workload = TopicWorkload("orders", script.random, script.history, Quorums(3, 3, 2))
        topic = await opened(script, workload, script.east)
        assert await appended(script, workload, script.east, topic)
        script.tree.begin_outage()
        for bookie in script.bookies.values():
            bookie.crash(power=True)
        told = [script.east.node.context.run(workload.append, ("east", 1), topic) for _ in range(2)]
        await wait_until(lambda: told[0].done(), timeout_s=60)
        late = script.east.node.context.run(workload.append, ("east", 1), topic)
        assert [await future for future in (*told, late)] == [False] * 3
        script.tree.end_outage()
        for bookie in script.bookies.values():
            await bookie.start()
        successor = await opened(script, workload, script.west)
        for _ in range(3):  # they come again
            assert await appended(script, workload, script.west, successor)
        await all_is_there(script, workload)

    Script(3).run(course)


# 39. split-metadata-view


def test_39_split_metadata_view() -> None:
    """East opens by a record that is two openings old: its write is refused, and the ledger it made is gone."""

    async def course(script: Script) -> None:
        workload = TopicWorkload("orders", script.random, script.history, Quorums(1, 1, 1))
        topic = await opened(script, workload, script.west)
        assert await appended(script, workload, script.west, topic)
        await asyncio.sleep(2)
        script.west.crash()
        script.west.start()
        topic = await opened(script, workload, script.west)
        assert await appended(script, workload, script.west, topic)
        script.east.store.lag_s = 1.0
        assert await script.at(script.east, workload.open(script.east)) is None
        assert await appended(script, workload, script.west, topic), "nobody took it away"
        await asyncio.sleep(2)
        assert len(script.history.ledgers) == len(topic.chain.ledgers)
        script.east.store.lag_s = None
        await opened(script, workload, script.east)
        assert not await appended(script, workload, script.west, topic)
        await all_is_there(script, workload)

    Script(1).run(course)


# 40. duplicate-delivery-of-rpc


@pytest.mark.parametrize("seed", range(3))
def test_40_duplicate_delivery_of_rpc(seed: int) -> None:
    """Every add, fence and read arrives twice, the second time late."""
    World(seed, faults=replace(CALM, duplicate=1.0), operations=150).run()


# Seed 0x2793: a repetition at a deposed owner


def test_a_repetition_at_a_deposed_owner_claims_nothing() -> None:
    """East has everything acknowledged and saved; west takes the topic over and resets the cursor; east, whom nobody told, is
    given the same acknowledgements again, has nothing to save for them, and says so. The reset stands, and no rule is broken."""

    async def course(script: Script) -> None:
        workload = TopicWorkload("orders", script.random, script.history, Quorums(1, 1, 1))
        model = workload.model
        deposed = await script.at(script.east, workload.open(script.east))
        assert deposed is not None
        await script.at(script.east, workload.create_cursor(deposed, "sub"))
        script.east.node.context.run(workload.append, ("east", 1), deposed)
        await wait_until(lambda: bool(model.stored))
        cursor = deposed.cursors["sub"]

        async def acknowledge_and_save() -> None:
            for _ in range(30):
                workload.acknowledge(cursor)
            await workload.save(cursor)

        await script.at(script.east, acknowledge_and_save())
        assert all(model.cursors["sub"].must.covers(position) for position in model.stored)

        reigning = await script.at(script.west, workload.open(script.west))
        assert reigning is not None
        await script.at(script.west, workload.reset(reigning, reigning.cursors["sub"]))
        start = reigning.cursors["sub"].first_unacknowledged()
        await script.at(script.east, acknowledge_and_save())
        assert cursor.backlog_entries == 0, "it looks so to east"

        script.west.crash()
        script.west.start()
        reopened = await script.at(script.west, workload.open(script.west))
        assert reopened is not None
        assert reopened.cursors["sub"].first_unacknowledged() == start

    Script(1).run(course)


# Seed 0x30daf: one gap by two names


def test_a_trim_that_is_cut_short_moves_no_cursor_back() -> None:
    """East moves a cursor to the edge of the next ledger and dies before the chain loses the ledger; to west the cursor is at the
    last entry before that edge, which is the same."""

    async def course(script: Script) -> None:
        workload = TopicWorkload("orders", script.random, script.history, Quorums(1, 1, 1))
        workload.config = replace(workload.config, retention=Retention())
        topic = await opened(script, workload, script.east)
        cursor = await script.at(script.east, topic.create_cursor("sub", topic.first_position()))
        while len(topic.chain.ledgers) < 2:
            assert await appended(script, workload, script.east, topic)

        def dies(ops: Sequence[Op]) -> bool:
            moves = any(op.key.startswith(f"{keys.CURSORS_KEY}/") for op in ops)
            if moves and record().mark_delete.entry_id == -1:
                script.later(0.0, script.east.crash)
            return False

        def record() -> CursorRecord:
            (found,) = script.history.cursor_records.values()
            return found

        script.east.store.loses_answer = dies
        script.east.node.context.run(cursor.acknowledge_cumulative, max(p for p in workload.model.stored if topic.is_valid(p)))
        await wait_until(lambda: not script.east.node.alive)
        edge = record().mark_delete
        keeps = replace(workload.config, retention=Retention(time_ms=-1, size_bytes=-1))
        reopened = await script.at(script.west, script.west.managed_ledgers.open(workload.topic, keeps))
        assert reopened.chain.ledgers[0].ledger_id < edge.ledger_id, "the chain has lost nothing"
        told: list[Any] = []
        script.west.node.context.run(reopened.append, [b"the next"], lambda position, count: told.append(position))
        await wait_until(lambda: bool(told))
        reopened.cursors["sub"].count_redelivery(*told[0])
        await script.at(script.west, reopened.cursors["sub"].saved())
        assert record().mark_delete < edge

    Script(1).run(course)
