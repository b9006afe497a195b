"""Work that is finished whoever gives up, and what its caller hears when its owner is closed."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_managed_ledger import ManagedLedgerClosedError
from cepheid_managed_ledger.finish import finish
from cepheid_ports import TaskOwner
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["before its first step", "in it", "later"])
async def test_an_owner_that_is_closed_ends_the_work_and_its_caller_hears_of_it(steps: int) -> None:
    """Before its first step too: a warning of work that nobody awaited is an error here."""
    tasks, began = TaskOwner("test"), False

    async def work() -> None:
        nonlocal began
        began = True
        await asyncio.sleep(10)

    caller = asyncio.ensure_future(finish(tasks, work(), name="work"))
    for _ in range(1 + steps):
        await asyncio.sleep(0)
    assert len(tasks) == 1
    await tasks.aclose()
    with pytest.raises(ManagedLedgerClosedError, match="work was given up"):
        await caller
    assert began == (steps > 0)


async def test_a_caller_that_gives_up_leaves_the_work_to_its_end() -> None:
    tasks, done, held = TaskOwner("test"), [], asyncio.Event()

    async def work() -> None:
        await held.wait()
        done.append("done")

    caller = asyncio.ensure_future(finish(tasks, work(), name="work"))
    await wait_until(lambda: len(tasks) == 1)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    held.set()
    await wait_until(lambda: not len(tasks))
    assert done == ["done"]
