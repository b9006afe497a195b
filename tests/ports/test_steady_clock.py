"""A wall clock that is set ahead or back gives nothing up early."""

from __future__ import annotations

import asyncio
import random

import pytest

from cepheid_ports import Ports, SteadyClock

YEAR_MS = 365 * 86_400_000


@pytest.mark.parametrize("jump_ms", [-YEAR_MS, YEAR_MS])
@pytest.mark.parametrize("wrong_when", ["noted", "judged"])
async def test_nothing_is_older_than_it_is(jump_ms: int, wrong_when: str) -> None:
    wall_ms = 1_700_000_000_000
    clock = SteadyClock(Ports(wall_ms=lambda: wall_ms, random=random.Random(0)))
    await asyncio.sleep(0.002)
    wall_ms += jump_ms * (wrong_when == "noted")
    noted_ms = clock.stamp_ms()
    wall_ms += jump_ms * (1 if wrong_when == "judged" else -1)
    assert clock.now_ms() - noted_ms < 1000


async def test_a_clock_that_is_right_tells_the_time() -> None:
    wall_ms = 1_700_000_000_000
    clock = SteadyClock(Ports(wall_ms=lambda: wall_ms, random=random.Random(0)))
    await asyncio.sleep(0.02)
    wall_ms += 10
    assert clock.now_ms() == wall_ms <= clock.stamp_ms() < wall_ms + 1000
