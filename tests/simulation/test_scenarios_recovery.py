"""Scenarios of fencing and recovery. Numbers and names are those of the list in the README; every answer and commit is
checked as in random worlds, what a script asserts beside is what it is about.
"""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import LedgerFencedError
from cepheid_metadata import LedgerState
from tests.simulation.history import InvariantViolation
from tests.simulation.mutants import MUTANTS
from tests.simulation.script import Script
from tests.support import wait_until

# 1. half-written-fence-miss


async def half_written_fence_miss(script: Script) -> None:
    net = script.network
    for bookie in ("b2", "b3"):  # entry 0 is on b1 alone
        net.block("east", bookie, "add")
    writer = await script.new_ledger(script.east, 3, 2)
    told = script.append(script.east, writer, b"zero")
    await script.holds(script.b1, writer.ledger_id, 0)

    net.block("west", "b3", "fence")  # b1 and b2 are enough to cover the fence …
    net.block("west", "b1", "recovery read")  # … and b1 falls silent before it is read
    end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
    assert end.last_entry_id == -1, "b2 and b3 deny it, which decides"

    net.unblock("east", "b3", "add")  # the late add arrives where the fence did not
    await wait_until(lambda: bool(told))
    assert isinstance(told[0], LedgerFencedError)


def test_1_half_written_fence_miss() -> None:
    """Recovery's reads fence too: b3, which the fence missed, refuses the late add."""
    Script(3).run(half_written_fence_miss)


def test_1_a_recovery_that_fences_by_lac_reads_alone_loses_the_entry() -> None:
    with MUTANTS["fence not by reads"](), pytest.raises(InvariantViolation, match=r"^L10"):
        Script(3).run(half_written_fence_miss)


# 3. recovery-changes-ensemble-then-dies


def test_3_recovery_changes_ensemble_then_dies() -> None:
    """A recoverer finds two bookies silent, copies everything to two others, and dies before it can say so: the next one asks
    the bookies that metadata names, and ends the ledger at the same entry."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 3, 2)
        ledger_id, ensemble = writer.ledger_id, script.ensemble_of(writer.ledger_id)
        told = script.append(script.east, writer, *[b"%d" % n for n in range(5)])
        await wait_until(lambda: bool(told))
        script.east.crash()
        for bookie in ensemble[:2]:
            script.network.block("west", bookie, "add")
        script.spawn(script.west.node, script.west.ledgers.recover(ledger_id), "recover")
        await wait_until(lambda: script.state_of(ledger_id) is LedgerState.IN_RECOVERY)
        script.west.store.held_writes = asyncio.Event()
        for spare in script.spares_of(ledger_id):
            await script.holds(script.bookies[spare], ledger_id, *range(5))
        script.west.crash()
        assert script.ensemble_of(ledger_id) == ensemble
        end = await script.at(script.north, script.north.ledgers.recover(ledger_id))
        assert end.last_entry_id == 4

    Script(5, ("east", "west", "north")).run(course)


# 4. two-recoverers-one-copy


async def two_entries_on_one_bookie(script: Script) -> int:
    """Entries 0 to 5 are confirmed, 6 and 7 are on b1 alone; their writer is gone. Returns the ledger's id."""
    writer = await script.new_ledger(script.east, 3, 2)
    told = script.append(script.east, writer, *[b"%d" % n for n in range(6)])
    await wait_until(lambda: bool(told))
    for bookie in script.ensemble_of(writer.ledger_id)[1:]:
        await script.holds(script.bookies[bookie], writer.ledger_id, *range(6))
        script.network.block("east", bookie, "add")
    script.append(script.east, writer, b"6", b"7")
    await script.holds(script.bookies[script.ensemble_of(writer.ledger_id)[0]], writer.ledger_id, 6, 7)
    script.east.crash()
    return int(writer.ledger_id)


@pytest.mark.parametrize("first", ["west", "north"])
def test_4_two_recoverers_one_copy(first: str) -> None:
    """Only north reaches b1: it finds 6 and 7, west finds that they were never acknowledged. Whoever closes first is right."""

    async def course(script: Script) -> None:
        ledger_id = await two_entries_on_one_bookie(script)
        holder, other, _ = script.ensemble_of(ledger_id)
        script.network.block("west", holder)
        script.network.block("north", other, "recovery read")  # so that it hears the holder out
        late = script.brokers["north" if first == "west" else "west"]
        late.store.held_writes = asyncio.Event()
        slower = late.node.start(late.ledgers.recover(ledger_id), name="recover")
        early = script.brokers[first]
        faster = early.node.start(early.ledgers.recover(ledger_id), name="recover")
        await wait_until(lambda: script.state_of(ledger_id) is LedgerState.CLOSED)
        late.store.held_writes.set()
        ends = await slower, await faster
        assert ends[0] == ends[1]
        assert ends[0].last_entry_id == (5 if first == "west" else 7)

    Script(3, ("east", "west", "north")).run(course)


async def reader_between_two_recoverers(script: Script) -> None:
    ledger_id = await two_entries_on_one_bookie(script)
    holder, *others = script.ensemble_of(ledger_id)
    script.network.block("west", holder)
    west = script.west.node.start(script.west.ledgers.recover(ledger_id), name="recover")
    negatives = script.history.recoverer(script.west.process, ledger_id).negatives
    await wait_until(lambda: len(negatives) == 2, what="west knows that 6 is absent")
    script.west.node.pause()

    script.network.block("north", others[0], "recovery read")  # so that it hears the holder out
    north = script.north.node.start(script.north.ledgers.recover(ledger_id), name="recover")
    script.north.store.held_writes = asyncio.Event()
    for bookie in others:
        await script.holds(script.bookies[bookie], ledger_id, 6, 7)
    reader = await script.at(script.south, script.south.ledgers.open_reader(ledger_id))
    assert await script.at(script.south, reader.read_lac()) <= 5, "6 and 7 are copied, and not confirmed"

    script.west.node.resume()
    assert (await west).last_entry_id == 5
    script.north.store.held_writes.set()
    assert (await north).last_entry_id == 5
    assert await script.at(script.south, reader.read_lac()) == 5


def test_4_a_reader_asks_for_the_lac_after_the_losers_copies() -> None:
    """North copies 6 and 7 and loses; west closes at 5. A reader that asked in between was told of neither."""
    Script(3, ("east", "west", "north", "south")).run(reader_between_two_recoverers)


def test_4_the_loser_replaces_two_bookies_in_memory_and_dies() -> None:
    """North copies 6 and 7 to two others, and dies: the next recoverer finds them on b1 alone, and copies both again."""

    async def course(script: Script) -> None:
        ledger_id = await two_entries_on_one_bookie(script)
        _, *others = script.ensemble_of(ledger_id)
        for bookie in others:
            script.network.block("north", bookie, "add")
        for recoverer in ("north", "west"):
            script.network.block(recoverer, others[0], "recovery read")  # so that it hears the holder out
        script.spawn(script.north.node, script.north.ledgers.recover(ledger_id), "recover")
        await wait_until(lambda: script.state_of(ledger_id) is LedgerState.IN_RECOVERY)
        script.north.store.held_writes = asyncio.Event()
        for spare in script.spares_of(ledger_id):
            await script.holds(script.bookies[spare], ledger_id, 6, 7)
        script.north.crash()
        end = await script.at(script.west, script.west.ledgers.recover(ledger_id))
        assert end.last_entry_id == 7
        record = script.history.ledgers[ledger_id]
        assert all(len(script.history.holders(record, entry_id)) >= 2 for entry_id in range(8))

    Script(5, ("east", "west", "north")).run(course)
