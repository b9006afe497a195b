"""Bookies in processes of their own that are killed and paused under a writer: how long its publisher waits, and what is lost.

CEPHEID_BOOKIE_KILLS=30 for a campaign; the figures are printed (pytest -s).
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from pathlib import Path

import pytest

from cepheid_ledger import GroupDone, LedgerClient, LedgerError, LedgerSettings, LedgerWriter, RackAwarePlacement
from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree, ledger_records
from cepheid_ports import Ports
from cepheid_rpc import EntryGroup
from tests.ledger.bookie_process import BookieProcesses
from tests.support import wait_until

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("CEPHEID_BOOKIE_KILLS", "2"))
SLACK_S = 0.3 if "CEPHEID_BOOKIE_KILLS" in os.environ else 3.0  # beside the rest of the suite the machine itself may stand still
LIMIT_S = 240 + 10 * KILLS  # each round starts processes, which takes many times longer on a busy machine
SETTINGS = LedgerSettings(add_timeout_s=1.0, reconnect_delay_s=0.02, quarantine_s=0.1, quarantine_max_s=0.1, ensemble_retry_s=0.05)
PACE_S = 0.002


class Publisher:
    """Appends at a steady pace and notes how long each entry took."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self.sent: list[bytes] = []
        self.waits_s: list[float] = []
        self.errors: list[object] = []

    async def run(self, seconds: float) -> None:
        until = self._loop.time() + seconds
        while self._loop.time() < until:
            payload = b"%d" % len(self.sent)
            self.sent.append(payload)
            self._writer.append([payload], self._noting(self._loop.time()))
            await asyncio.sleep(PACE_S)

    def _noting(self, sent_at: float) -> GroupDone:
        def on_done(outcome: EntryGroup | LedgerError) -> None:
            if isinstance(outcome, EntryGroup):
                self.waits_s.append(self._loop.time() - sent_at)
            else:
                self.errors.append(outcome)

        return on_done

    async def finish(self) -> float:
        await wait_until(lambda: len(self.waits_s) + len(self.errors) == len(self.sent), what="every answer")
        assert not self.errors
        return max(self.waits_s)


async def read_all(client: LedgerClient, ledger_id: int) -> list[bytes]:
    reader = await client.open_reader(ledger_id)
    payloads: list[bytes] = []
    while len(payloads) <= reader.known_end:
        for group in await reader.read(len(payloads), reader.known_end, max_bytes=1 << 20):
            payloads += [bytes(payload) for payload in group.payloads()]
    return payloads


async def one_round(cluster: BookieProcesses, tree: MemoryTree, ack_quorum: int, seed: int, how: str) -> float:
    """The longest that an entry took while one bookie of three was killed or paused, and replaced. Nothing is lost."""
    store = MemoryStore(tree)
    placement = RackAwarePlacement(lambda: cluster.bookie_ids, random.Random(seed))
    client = LedgerClient(cluster, ledger_records(store), LedgerIds(store), placement, SETTINGS, Ports())
    try:
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=ack_quorum, custom={})
        publisher = Publisher(writer)
        await publisher.run(0.15)
        victim = writer.metadata.last_fragment.ensemble[seed % 3]
        if how == "pause":
            cluster.pause(victim)
        else:
            await cluster.kill(victim)
        await publisher.run(0.3)
        worst_s = await publisher.finish()
        await wait_until(lambda: victim not in writer.metadata.last_fragment.ensemble, what=f"{victim} to be replaced")
        end = await writer.close()
        assert end.last_entry_id == len(publisher.sent) - 1
        if how == "pause":
            await cluster.kill(victim)
        assert await read_all(client, writer.ledger_id) == publisher.sent
        await cluster.start(victim)
        return worst_s
    finally:
        await client.aclose()


@pytest.mark.deadline(LIMIT_S)
@pytest.mark.timeout(LIMIT_S + 30)
async def test_killed_and_paused_bookies_cost_publishers_what_was_promised(tmp_path: Path) -> None:
    """Killed: p99 < 300 ms. With Qa 2 of 3 the other two confirm meanwhile; with Qa 3 the gap is the change itself.
    Paused: nothing with Qa 2, else within the add timeout, a tick of it (a quarter) and 300 ms."""
    tree = MemoryTree()
    async with BookieProcesses(tmp_path, "abcd") as cluster:
        for ack_quorum in (2, 3):
            gaps_s = sorted([await one_round(cluster, tree, ack_quorum, seed, "kill") for seed in range(KILLS)])
            median_ms, worst_ms = statistics.median(gaps_s) * 1000, gaps_s[-1] * 1000
            print(f"\nQa {ack_quorum}: killed {KILLS} times, gap median {median_ms:.0f} ms, worst {worst_ms:.0f} ms")
            assert gaps_s[int(0.99 * (KILLS - 1))] < SLACK_S
            paused_s = await one_round(cluster, tree, ack_quorum, 1, "pause")
            print(f"Qa {ack_quorum}: paused, gap {paused_s * 1000:.0f} ms")
            assert paused_s < SLACK_S + (1.25 * SETTINGS.add_timeout_s if ack_quorum == 3 else 0)
