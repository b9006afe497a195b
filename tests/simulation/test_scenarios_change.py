"""Scenarios of bookies that fail under a living writer. Numbers and names are those of the list in the README; every answer and
commit is checked as in random worlds, what a script asserts beside is what it is about.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_ledger import LedgerError, LedgerFencedError
from cepheid_metadata import LedgerState
from cepheid_rpc import EntryGroup
from tests.simulation.history import InvariantViolation
from tests.simulation.mutants import MUTANTS
from tests.simulation.mutants_cluster import resend_from_the_lac_at_the_end_of_the_change
from tests.simulation.script import Script
from tests.simulation.sim_broker import LEDGER_SETTINGS
from tests.support import wait_until

# Until a silent bookie is given up (its clock ticks four times in a timeout), another is recorded and has the entries.
GIVEN_UP_S = LEDGER_SETTINGS.add_timeout_s * 1.25
RESUMES_S = GIVEN_UP_S + 0.2


async def written(script: Script, qw: int, qa: int, entries: int = 1) -> Any:
    """A writer of east that was told OK for some entries, by every bookie."""
    writer = await script.new_ledger(script.east, qw, qa)
    told = script.append(script.east, writer, *[b"%d" % n for n in range(entries)])
    await wait_until(lambda: bool(told))
    for bookie in script.ensemble_of(writer.ledger_id):
        await script.holds(script.bookies[bookie], writer.ledger_id, *range(entries))
    return writer


async def told_ok(told: list[Any], within_s: float = RESUMES_S) -> None:
    await wait_until(lambda: bool(told), timeout_s=within_s, what="the answer (V3)")
    assert isinstance(told[0], EntryGroup), told


def starts_of(script: Script, ledger_id: int) -> list[int]:
    """Of its fragments."""
    return [fragment.first_entry_id for fragment in script.history.ledgers[ledger_id].fragments]


# V3: the writer resumes


@pytest.mark.parametrize("failure", ["crash", "power loss", "silence"])
def test_a_writer_goes_on_with_a_spare_bookie(failure: str) -> None:
    """Qa = Qw: without another bookie nothing could be told OK."""

    async def course(script: Script) -> None:
        writer = await written(script, 3, 3)
        victim = script.bookies[script.ensemble_of(writer.ledger_id)[0]]
        if failure == "silence":
            script.network.block("east", victim.id)
        else:
            victim.crash(power=failure == "power loss")
        await told_ok(script.append(script.east, writer, b"next"))
        assert victim.id not in script.ensemble_of(writer.ledger_id)
        assert starts_of(script, writer.ledger_id) == [0, 1]
        end = await script.at(script.east, writer.close())
        assert end.last_entry_id == 1

    Script(4).run(course)


def test_a_writer_goes_on_when_a_disk_is_full() -> None:
    async def course(script: Script) -> None:
        writer = await written(script, 3, 3)
        victim = script.ensemble_of(writer.ledger_id)[0]
        script.bookies[victim].disk.full = True
        while victim in script.ensemble_of(writer.ledger_id):  # the journal has room for some more
            told = script.append(script.east, writer, b"." * 4_000)
            await told_ok(told, LEDGER_SETTINGS.refusal_retry_s + RESUMES_S)
        assert len(starts_of(script, writer.ledger_id)) == 2

    Script(4).run(course)


def test_2_empty_last_fragment() -> None:
    """A thousand entries, the ensemble changed, nothing written since, a bookie of the new one dies: recovery ends at 999."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 3, 2)
        ledger_id, ensemble = writer.ledger_id, script.ensemble_of(writer.ledger_id)
        script.network.block("east", ensemble[0], "add")
        told = [script.append(script.east, writer, *[b"%d" % (50 * n + k) for k in range(50)]) for n in range(20)]
        await wait_until(lambda: all(told))
        await wait_until(lambda: ensemble[0] not in script.ensemble_of(ledger_id))
        script.east.crash()
        script.bookies[ensemble[1]].crash(power=False)
        end = await script.at(script.west, script.west.ledgers.recover(ledger_id))
        assert end == (999, sum(len(b"%d" % n) for n in range(1000)))
        assert starts_of(script, ledger_id) == [0, 1000]

    Script(5).run(course)


# 5. metadata-stall-during-change


def test_5_metadata_stall_during_change() -> None:
    """Metadata is out while three bookies fail in turn. Two are enough to go on; with one nothing is told OK until it is back."""

    async def course(script: Script) -> None:
        writer = await written(script, 3, 2)
        ledger_id = writer.ledger_id
        first, second, third = (script.bookies[name] for name in script.ensemble_of(ledger_id))
        script.tree.begin_outage()
        first.crash(power=False)
        await told_ok(script.append(script.east, writer, b"on two"))
        second.crash(power=False)
        told = script.append(script.east, writer, b"on one")
        await script.holds(third, ledger_id, 2)
        third.crash(power=False)
        await asyncio.sleep(LEDGER_SETTINGS.ensemble_change_timeout_s / 2)
        assert not told
        assert script.ensemble_of(ledger_id) == (first.id, second.id, third.id)
        script.tree.end_outage()
        await told_ok(told)
        end = await script.at(script.east, writer.close())
        assert end.last_entry_id == 2

    Script(6).run(course)


def test_5_metadata_that_stays_away_fails_a_ledger_without_its_quorum() -> None:
    async def course(script: Script) -> None:
        writer = await written(script, 3, 2)
        script.tree.begin_outage()
        for name in script.ensemble_of(writer.ledger_id)[:2]:
            script.bookies[name].crash(power=False)
        told = script.append(script.east, writer, b"never")
        await wait_until(lambda: bool(told), timeout_s=LEDGER_SETTINGS.ensemble_change_timeout_s + 8)
        assert isinstance(told[0], LedgerError)
        script.tree.end_outage()
        for name in script.ensemble_of(writer.ledger_id)[:2]:
            await script.bookies[name].start()
        end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
        assert end.last_entry_id >= 0

    Script(6).run(course)


# 6. second-failure-in-change


async def second_failure_in_change(script: Script) -> None:
    writer = await written(script, 3, 2)
    ledger_id, store = writer.ledger_id, script.east.store
    first, second, third = script.ensemble_of(ledger_id)
    store.held_writes = asyncio.Event()
    script.network.block("east", first, "add")
    await told_ok(script.append(script.east, writer, b"1"))
    await asyncio.sleep(GIVEN_UP_S + 0.1)  # the first is given up, and its replacement is on its way
    await told_ok(script.append(script.east, writer, b"2"))  # confirmed meanwhile by two that are in both ensembles
    script.network.block("east", second, "add")
    told = script.append(script.east, writer, b"3")
    await script.holds(script.bookies[third], ledger_id, 3)
    await asyncio.sleep(GIVEN_UP_S + 0.1)
    assert not told, "one bookie is no quorum, whatever else is on its way"
    store.held_writes.set()
    await told_ok(told)
    newcomer = script.bookies[script.ensemble_of(ledger_id)[0]]
    await script.holds(newcomer, ledger_id, 2, 3)  # 2 was confirmed meanwhile, and is in the new fragment
    assert first not in script.ensemble_of(ledger_id)
    await wait_until(lambda: second not in script.ensemble_of(ledger_id))
    end = await script.at(script.east, writer.close())
    assert end.last_entry_id == 3


def test_6_second_failure_in_change() -> None:
    """A bookie fails while the change for another one is on its way to metadata."""
    Script(5).run(second_failure_in_change)


def test_6_newcomers_that_get_only_what_is_unconfirmed_at_the_end_lack_copies() -> None:
    with resend_from_the_lac_at_the_end_of_the_change(), pytest.raises(AssertionError, match="did not hold"):
        Script(5).run(second_failure_in_change)


def test_6_a_failed_bookie_that_counts_on_is_found_out() -> None:
    """Entry 1 is on the one that fails and then on another one; the change begins at 1, and does not name the first."""

    async def course(script: Script) -> None:
        writer = await written(script, 3, 2)
        first, second, third = script.ensemble_of(writer.ledger_id)
        for name in (second, third):
            script.network.block("east", name, "add")
        told = script.append(script.east, writer, b"1")
        await script.holds(script.bookies[first], writer.ledger_id, 1)
        await asyncio.sleep(0.05)  # and it has answered
        script.east.store.held_writes = asyncio.Event()
        script.bookies[first].crash(power=False)
        more = script.append(script.east, writer, b"2")  # by which it is found out
        await asyncio.sleep(0.1)
        script.network.unblock("east", second, "add")
        await asyncio.sleep(0.1)
        assert not told, "on one of those that are in both ensembles"
        script.east.store.held_writes.set()
        await told_ok(told)
        await told_ok(more)

    Script(4).run(course)
    with MUTANTS["count failed bookies while they are replaced"](), pytest.raises((InvariantViolation, AssertionError)):
        Script(4).run(course)


def test_6_an_answer_of_a_change_that_is_lost() -> None:
    """The change is in force, and its writer hears that nobody knows, again and again."""

    async def course(script: Script) -> None:
        writer = await written(script, 3, 2)
        first, second, _ = script.ensemble_of(writer.ledger_id)
        lost: list[str] = []

        def loses(ops: Any) -> bool:
            lost.extend(op.key for op in ops)
            return len(lost) <= 3

        script.east.store.loses_answer = loses
        script.network.block("east", first, "add")
        script.network.block("east", second, "add")
        await told_ok(script.append(script.east, writer, b"1"), RESUMES_S)
        assert lost
        assert {first, second}.isdisjoint(script.ensemble_of(writer.ledger_id))
        assert starts_of(script, writer.ledger_id) == [0, 1]

    Script(5).run(course)


# 7. aba-replacement


def test_7_aba_replacement() -> None:
    """A fails, its replacement fails at once, and only A is left to be chosen: it is not, and two go on without a third."""

    async def course(script: Script) -> None:
        writer = await written(script, 3, 2)
        ledger_id = writer.ledger_id
        a = script.ensemble_of(ledger_id)[0]
        (b,) = script.spares_of(ledger_id)
        script.network.block("east", a, "add")
        script.network.block("east", b, "add")
        await told_ok(script.append(script.east, writer, b"1"))
        await wait_until(lambda: b in script.ensemble_of(ledger_id))
        script.network.unblock("east", a, "add")
        await told_ok(script.append(script.east, writer, b"2"))
        await asyncio.sleep(3 * LEDGER_SETTINGS.add_timeout_s)
        await told_ok(script.append(script.east, writer, b"3"))
        assert a not in script.ensemble_of(ledger_id)
        assert writer.under_replicated == (b,)

    Script(4).run(course)


# A recoverer comes in between


def test_a_change_meets_a_recovery() -> None:
    """The recoverer writes first: the change is refused, nothing is told OK any more, and the ledger ends where it was."""

    async def course(script: Script) -> None:
        writer = await written(script, 3, 2)
        script.east.store.held_writes = asyncio.Event()
        for name in script.ensemble_of(writer.ledger_id)[:2]:
            script.network.block("east", name, "add")
        told = script.append(script.east, writer, b"1")
        await asyncio.sleep(GIVEN_UP_S + 0.1)
        end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
        script.east.store.held_writes.set()
        await wait_until(lambda: bool(told))
        assert isinstance(told[0], LedgerFencedError)
        assert script.state_of(writer.ledger_id) is LedgerState.CLOSED
        assert end.last_entry_id in (0, 1)

    Script(5).run(course)
