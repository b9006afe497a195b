"""Scenarios of a single bookie's disk. Numbers and names are those of the list in the README; every answer and commit is
checked as in random worlds, what a script asserts beside is what it is about.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cepheid_bookie.errors import CookieError
from cepheid_ledger import LedgerError, LedgerFencedError, RecoveryFailedError
from tests.simulation.cluster import SimBookie
from tests.simulation.history import InvariantViolation
from tests.simulation.mutants import MUTANTS
from tests.simulation.script import Script, fencing_read, restart
from tests.support import wait_until

# 9. fence-then-power-loss


def test_9_fence_then_power_loss() -> None:
    """A bookie denies an entry to a fencing read and loses power at once: it is fenced when it comes back."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 1, 1)
        bookie = script.bookies[script.history.ledgers[writer.ledger_id].last_fragment.ensemble[0]]
        (chunk,) = await fencing_read(script, script.west, bookie.id, writer.ledger_id)
        assert chunk.missing[0].status.certain_no
        await restart(bookie)
        told = script.append(script.east, writer, b"late")
        await wait_until(lambda: bool(told))
        assert isinstance(told[0], LedgerFencedError)

    Script(1).run(course)


def test_9_a_fence_that_is_not_waited_for_is_forgotten() -> None:
    with MUTANTS["answer a fence before it is durable"](), pytest.raises((InvariantViolation, AssertionError)):
        test_9_fence_then_power_loss()


# 10. add-in-flight-at-fence


def test_10_add_in_flight_at_fence() -> None:
    """An add waits for the journal when a fencing read arrives: the read sees the entry."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 1, 1)
        script.b1.work_delay_s = 0.5
        told = script.append(script.east, writer, b"in flight")
        await asyncio.sleep(0.1)
        assert not told
        (chunk,) = await fencing_read(script, script.west, "b1", writer.ledger_id)
        assert [bytes(payload) for payload in chunk.groups[0].payloads()] == [b"in flight"]
        await wait_until(lambda: bool(told))

    Script(1).run(course)


# 11. fence-without-entries-checkpoint


def test_11_fence_without_entries_checkpoint() -> None:
    """A fence of an idle bookie goes through a checkpoint that has no entry to write, and then the power fails."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 1, 1)
        await fencing_read(script, script.west, "b1", writer.ledger_id)
        before = script.b1.bookie.statistics().mark_sequence
        await wait_until(lambda: script.b1.bookie.statistics().mark_sequence > before)
        await restart(script.b1)
        told = script.append(script.east, writer, b"late")
        await wait_until(lambda: bool(told))
        assert isinstance(told[0], LedgerFencedError)

    Script(1).run(course)


# 12. corrupt-log-recovery


async def corrupt_log_recovery(script: Script) -> None:
    writer = await script.new_ledger(script.east, 2, 2)
    told = [script.append(script.east, writer, b"entry %d" % n) for n in range(10)]
    await wait_until(lambda: all(told))
    script.east.crash()
    for bookie in (script.b1, script.b2):
        await restart(bookie)  # replay moves everything into the entry log
    path, offset = _find(script.b1, b"entry 9")
    script.b1.disk.flip_bit(path, offset)
    script.network.slow["b2"] = 50  # so that the damaged one is heard first
    end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
    assert end.last_entry_id == 9


def test_12_corrupt_log_recovery() -> None:
    """One of two copies decays in the entry log: it is unknown there, not absent, and recovery keeps the entry."""
    Script(2).run(corrupt_log_recovery)


def test_12_a_bookie_that_denies_what_it_cannot_read_is_found_out() -> None:
    with MUTANTS["deny what cannot be read"](), pytest.raises(InvariantViolation, match=r"^S5|^L5"):
        Script(2).run(corrupt_log_recovery)


def _find(bookie: SimBookie, data: bytes) -> tuple[str, int]:
    for path, content in bookie.disk.durable_files().items():
        if path.startswith("entrylog") and data in content:
            return path, content.index(data)
    raise AssertionError(f"{data!r} is in no entry log of {bookie!r}")


# 13. flush-fails-once


def test_13_flush_fails_once() -> None:
    """The index fails in the middle of a flush. The bookie stops; after a restart and a power loss nothing is missing."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 1, 1)
        told = [script.append(script.east, writer, b"entry %d" % n) for n in range(10)]
        await wait_until(lambda: all(told))
        failures = _fail_once(script.b1)
        await wait_until(lambda: not script.b1.node.alive)
        assert failures == ["failed"]
        await script.b1.start()
        await asyncio.sleep(2)  # checkpoints that succeed
        await restart(script.b1)  # which asks for everything that was promised (S2)
        end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
        assert end.last_entry_id == 9

    Script(1).run(course)


def _fail_once(bookie: SimBookie) -> list[str]:
    failures: list[str] = []

    def before_sync() -> None:
        if not failures:
            failures.append("failed")
            raise OSError(5, "the index cannot be written")

    bookie.index.before_sync = before_sync
    return failures


# 20. blank-bookie-old-id


async def blank_bookie_old_id(script: Script) -> None:
    writer = await script.new_ledger(script.east, 3, 2)
    ledger_id = writer.ledger_id
    told = script.append(script.east, writer, b"before")
    await wait_until(lambda: bool(told))
    script.east.node.pause()
    end = await script.at(script.west, script.west.ledgers.recover(ledger_id))
    assert end.last_entry_id == 0
    for bookie in script.bookies.values():
        bookie.lose_disk()
        await bookie.start()
    script.east.node.resume()
    told = script.append(script.east, writer, b"after")
    await wait_until(lambda: bool(told))
    assert isinstance(told[0], LedgerError)


def test_20_blank_bookie_old_id() -> None:
    """Every bookie of a ledger is rebuilt empty under its old id, while its writer sleeps and somebody else closes it. All fences
    are gone, and yet the writer is told OK for nothing."""
    Script(3).run(blank_bookie_old_id)


def test_20_without_limbo_the_writer_goes_on() -> None:
    with MUTANTS["take a blank bookie for a new one"](), pytest.raises(InvariantViolation, match=r"^S2|^S11"):
        Script(3).run(blank_bookie_old_id)


async def one_blank_bookie_in_a_recovery(script: Script) -> None:
    writer = await script.new_ledger(script.east, 3, 2)
    silent, other, blank = script.ensemble_of(writer.ledger_id)
    script.network.block("east", silent, "add")
    told = script.append(script.east, writer, b"on two of three")
    await wait_until(lambda: bool(told))
    script.east.crash()
    script.bookies[blank].lose_disk()
    await script.bookies[blank].start()
    script.network.block("west", other, "recovery read")
    recovery = script.west.node.start(script.west.ledgers.recover(writer.ledger_id), name="recover")
    await asyncio.wait([recovery])
    assert isinstance(recovery.exception(), RecoveryFailedError), "nobody knows"
    script.network.unblock("west", other, "recovery read")
    end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
    assert end.last_entry_id == 0


def test_20_a_blank_bookie_denies_nothing_to_a_recovery() -> None:
    """The entry is on one that is silent and was on one that is blank; a third one never had it. One certain no is not enough."""
    Script(3).run(one_blank_bookie_in_a_recovery)


def test_20_a_blank_bookie_that_denies_truncates() -> None:
    with MUTANTS["limbo answers a certain no"](), pytest.raises(InvariantViolation, match=r"^S2|^S5"):
        Script(3).run(one_blank_bookie_in_a_recovery)


# 21. restored-disk


@pytest.mark.parametrize("accepted", [False, True])
def test_21_restored_disk(accepted: bool) -> None:
    """A bookie comes back with an older copy of its own disks: it does not start, or, if that is accepted, it denies nothing."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 2, 2)
        assert await script.told(script.append(script.east, writer, b"in the copy"))
        script.b1.keep_copy()
        assert await script.told(script.append(script.east, writer, b"behind it"))
        await wait_until(lambda: script.b1.has_old_copy)
        script.east.crash()
        script.b1.restore_copy()
        script.b1.may_refuse, script.b1.accepts_empty_disk = True, accepted
        await script.b1.start()
        assert script.b1.serving is accepted
        assert isinstance(script.b1.refused, CookieError) is not accepted
        if accepted:
            end = await script.at(script.west, script.west.ledgers.recover(writer.ledger_id))
            assert end.last_entry_id == 1

    Script(2).run(course)


# Seed 0x465: a bookie asks a follower for its cookie


def test_a_bookie_that_starts_again_asks_no_follower_whether_it_exists() -> None:
    """A moment after its first start; the follower that it reaches now has not heard of that."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 1, 1)
        told = script.append(script.east, writer, b"data")
        await wait_until(lambda: bool(told))
        script.plan.faults = replace(script.plan.faults, stale_read=1.0, stale_read_s=(100.0, 100.0))
        await restart(script.b1)
        assert script.b1.serving

    Script(1).run(course)
