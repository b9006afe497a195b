"""The lane that turns many callers' requests into groups for one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cepheid_metadata import StoreClosedError, StoreUnavailableError
from cepheid_metadata.group_lane import MAX_GROUP_BYTES, GroupLane
from cepheid_ports import OnDone


class HeldWorker:
    """Keeps submitted work until the test lets it run."""

    def __init__(self) -> None:
        self.held: list[tuple[Callable[[], Any], OnDone]] = []

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        self.held.append((work, on_done))

    def work_off(self) -> None:
        (work, on_done), *self.held = self.held
        try:
            result, error = work(), None
        except ValueError as caught:
            result, error = None, caught
        on_done(result, error)

    async def run(self, work: Callable[[], Any]) -> Any: ...
    async def aclose(self) -> None: ...


def echo(requests: Sequence[str]) -> list[Any]:
    """Answers with the size of the group; `bad` gets an error of its own, `worst` fails the whole group."""
    if "worst" in requests:
        raise ValueError("the job failed")
    return [ValueError(request) if request == "bad" else f"{request} of {len(requests)}" for request in requests]


def make(**limits: int) -> tuple[HeldWorker, GroupLane[str]]:
    worker = HeldWorker()
    return worker, GroupLane("test", worker, echo, **limits)  # type: ignore[arg-type]


async def ask(lane: GroupLane[str], *requests: str, size_bytes: int = 0) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(lane.ask(request, size_bytes)) for request in requests]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_what_arrives_while_a_group_is_out_makes_up_the_next() -> None:
    worker, lane = make()
    first = await ask(lane, "a", "b")
    second = await ask(lane, "c", "d", "e")
    assert len(worker.held) == 1
    worker.work_off()
    assert await asyncio.gather(*first) == ["a of 2", "b of 2"]
    worker.work_off()
    assert await asyncio.gather(*second) == ["c of 3", "d of 3", "e of 3"]
    assert worker.held == []
    third = await ask(lane, "f")
    worker.work_off()
    assert await asyncio.gather(*third) == ["f of 1"]
    assert repr(lane) == "<GroupLane test: 0 waiting, 6 requests in 3 groups>"


async def test_groups_are_bounded_by_count_and_bytes() -> None:
    worker, lane = make(max_group=2)
    tasks = await ask(lane, "a", "b", "c")
    worker.work_off()
    worker.work_off()
    assert await asyncio.gather(*tasks) == ["a of 2", "b of 2", "c of 1"]
    worker, lane = make()
    tasks = await ask(lane, "a", "b", "c", size_bytes=MAX_GROUP_BYTES // 2)
    worker.work_off()
    worker.work_off()
    assert await asyncio.gather(*tasks) == ["a of 2", "b of 2", "c of 1"]


async def test_too_many_waiting_are_refused_with_the_number() -> None:
    worker, lane = make(max_waiting=2)
    out = await ask(lane, "out")
    waiting = await ask(lane, "a", "b")
    with pytest.raises(StoreUnavailableError, match="2 requests wait for the metadata store's test lane") as caught:
        await lane.ask("c")
    assert not caught.value.outcome_unknown
    worker.work_off()
    worker.work_off()
    assert await asyncio.gather(*out, *waiting) == ["out of 1", "a of 2", "b of 2"]


async def test_errors_reach_exactly_their_callers() -> None:
    worker, lane = make()
    tasks = await ask(lane, "a", "bad")
    worker.work_off()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0] == "a of 2"
    assert isinstance(results[1], ValueError)
    tasks = await ask(lane, "a", "worst")
    worker.work_off()
    assert [str(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == ["the job failed"] * 2


async def test_cancelled_callers_are_left_out_or_ignored() -> None:
    worker, lane = make()
    out = await ask(lane, "a", "b")
    waiting = await ask(lane, "c", "d")
    out[0].cancel()
    waiting[0].cancel()
    await asyncio.sleep(0)
    worker.work_off()
    worker.work_off()
    assert [await out[1], await waiting[1]] == ["b of 2", "d of 1"]
    alone = await ask(lane, "e")
    next_alone = await ask(lane, "f")
    next_alone[0].cancel()
    await asyncio.sleep(0)
    worker.work_off()
    assert await alone[0] == "e of 1"
    assert worker.held == []


async def test_the_waiting_can_be_refused_and_what_is_out_is_answered() -> None:
    worker, lane = make()
    out, waiting = await ask(lane, "a"), await ask(lane, "b")
    lane.refuse_waiting(StoreClosedError("closed"))
    with pytest.raises(StoreClosedError):
        await waiting[0]
    worker.work_off()
    assert await out[0] == "a of 1"
    assert worker.held == []
