"""One piece of work shared by all who ask for it at once."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ports import SingleFlight


class Gone(Exception):
    """What callers get when the owner closes."""


class Work:
    """Counts its runs; each waits for `gate`."""

    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.failure: Exception | None = None
        self.flights: SingleFlight[str, int] = SingleFlight("tests", Gone)

    async def __call__(self, key: str) -> int:
        self.runs += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return self.runs

    def ask(self, key: str = "a") -> asyncio.Task[int]:
        return asyncio.create_task(self.flights.run(key, self))


async def test_callers_at_the_same_time_share_one_run_and_later_ones_do_not() -> None:
    work = Work()
    callers = [work.ask(), work.ask(), work.ask("b")]
    await asyncio.sleep(0)
    assert len(work.flights) == 2
    work.gate.set()
    assert await asyncio.gather(*callers) == [1, 1, 2]
    assert (work.runs, len(work.flights)) == (2, 0)
    assert await work.ask() == 3


async def test_a_failure_reaches_all_and_is_not_remembered() -> None:
    work = Work()
    work.failure = ValueError("no")
    work.gate.set()
    outcomes = await asyncio.gather(work.ask(), work.ask(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ValueError, ValueError]
    work.failure = None
    assert await work.ask() == 2


async def test_one_caller_may_give_up_the_last_one_cancels_the_work() -> None:
    work = Work()
    first, second = work.ask(), work.ask()
    await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert work.cancelled == 0
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert len(work.flights) == 0
    await asyncio.sleep(0)
    assert work.cancelled == 1
    work.gate.set()
    assert await work.ask() == 2, "the next caller starts anew"


async def test_closing_cancels_the_work_and_tells_its_callers_why() -> None:
    work = Work()
    caller, cancelled = work.ask(), work.ask()
    await asyncio.sleep(0.001)
    cancelled.cancel()
    await work.flights.aclose()
    with pytest.raises(Gone):
        await caller
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (work.cancelled, len(work.flights)) == (1, 0)
