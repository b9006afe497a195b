"""A bookie that is far slower than the others, but answers: publishers do not notice, memory stays in its bound.

In virtual time, so that a busy machine does not count as a slow bookie.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.ledger.ledger_world import FAST, append, ledger_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

WINDOW_BYTES = 300_000
SETTINGS = FAST.model_copy(update={"channel_window_bytes": WINDOW_BYTES, "add_timeout_s": 5.0, "ensemble_retry_s": 0.01})


@pytest.mark.parametrize("entry_bytes", [10, 1_000])
@pytest.mark.parametrize("spares", ["", "d"])
async def test_it_costs_publishers_nothing_and_memory_its_window(entry_bytes: int, spares: str) -> None:
    async with ledger_world(*"abc", *spares, settings=SETTINGS) as world:
        writers = [await world.create_on("abc") for _ in range(4)]
        world.cluster["b"].delay_s = 0.5  # it answers what it is sent, half a second late
        loop, worst_s, most_bytes, sent_bytes = asyncio.get_running_loop(), 0.0, 0, 0
        while sent_bytes < 3 * WINDOW_BYTES:
            await asyncio.sleep(0.002)
            began = loop.time()
            await asyncio.gather(*(append(writer, [bytes(entry_bytes)] * 5) for writer in writers))
            worst_s = max(worst_s, loop.time() - began)
            sent_bytes += len(writers) * (5 * entry_bytes + 512)
            most_bytes = max(most_bytes, world.client.statistics()["b"].waiting_bytes)
        assert worst_s < 0.01, "nobody waited for the slow one"
        assert WINDOW_BYTES / 2 < most_bytes <= 1.25 * WINDOW_BYTES + 10_000
        assert world.client.statistics()["b"].lanes_failed == len(writers), "each ledger gave it up once"
        if spares:
            await wait_until(lambda: all(w.metadata.last_fragment.ensemble == ("a", "d", "c") for w in writers))
        else:
            assert all(writer.under_replicated == ("b",) for writer in writers)


async def test_with_qa_equal_to_qw_publishers_wait_but_memory_is_what_they_have_unanswered() -> None:
    async with ledger_world(settings=SETTINGS) as world:
        writer = await world.create_on("abc", ack_quorum=3)
        world.cluster["b"].delay_s = 0.05
        for _ in range(3):
            await append(writer, [bytes(WINDOW_BYTES)])
        assert world.client.statistics()["b"].lanes_failed == 0
        assert world.client.statistics()["b"].waiting_bytes == 0
