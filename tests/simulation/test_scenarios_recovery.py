"""Scenarios of fencing and recovery. Numbers and names are those of the list in the README; every answer and commit is
checked as in random worlds, what a script asserts beside is what it is about.
"""

from __future__ import annotations

import pytest

from cepheid_ledger import LedgerFencedError
from cepheid_metadata import Fragment, ledger_records
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


# 2. empty-last-fragment


def test_2_empty_last_fragment() -> None:
    """A thousand entries, the ensemble changed, nothing written since, a bookie of the new one dies: recovery ends at 999."""

    async def course(script: Script) -> None:
        writer = await script.new_ledger(script.east, 3, 2)
        ledger_id, ensemble = writer.ledger_id, script.history.ledgers[writer.ledger_id].last_fragment.ensemble
        told = [script.append(script.east, writer, *[b"%d" % (50 * n + k) for k in range(50)]) for n in range(20)]
        await wait_until(lambda: all(told))

        others = [bookie for bookie in script.bookies if bookie not in ensemble]
        records = ledger_records(script.east.store)

        async def change_ensemble() -> None:
            found = await records.get(ledger_id)
            assert found is not None
            fragment = Fragment(first_entry_id=1000, ensemble=(ensemble[0], *others))
            changed = found.record.replace(fragments=(*found.record.fragments, fragment))
            await records.replace(ledger_id, changed, found.version)

        await script.at(script.east, change_ensemble())
        script.east.crash()
        script.bookies[others[0]].crash(power=False)
        end = await script.at(script.west, script.west.ledgers.recover(ledger_id))
        assert end == (999, sum(len(b"%d" % n) for n in range(1000)))
        assert [fragment.first_entry_id for fragment in script.history.ledgers[ledger_id].fragments] == [0, 1000]

    Script(5).run(course)
