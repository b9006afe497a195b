"""Readers past the brokers in random worlds: whatever breaks, a scan shows what was written and nothing else, and when all is quiet
again the scans of a ledger's bookies together give every entry of it.

A world with scans is another one than that of the same seed without: these are seeds of their own. `BookieProbe` judges each answer
(S5, S8), as it does those to brokers.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest

from cepheid_metadata import LedgerMetadata
from cepheid_ports import CepheidError
from cepheid_rpc import NO_ENTRY_ID, SCAN_CHUNK_BYTES, ReadAnswer, ReadRequest
from tests.simulation.seeds import run_seed
from tests.simulation.world.node import Node
from tests.simulation.world.sim_connection import SimConnection
from tests.simulation.world.world import World

SEEDS = range(0x5CA0, 0x5CA0 + 12)


class ScanningWorld(World):
    """Tasks of Spark, as a bookie sees them: they know a ledger's placement and an end that was confirmed, and nothing else."""

    seen: Counter[str]

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self._scanner = random.Random(f"{seed}/scanner")
        self._executor = Node("executor")

    def _look_around(self) -> None:
        super()._look_around()
        rng = self._scanner
        if self.history.ledgers and rng.random() < 0.5:
            ledger_id = rng.choice(list(self.history.ledgers))
            bookie_id = rng.choice(list(self.bookies))
            end = self.history.readable_end(ledger_id)
            if end > NO_ENTRY_ID:
                first = rng.randint(0, end)
                last, most = rng.randint(first, end), rng.choice((1, 3, 1_000))
                self.spawn(self._executor, self._scan_amid_faults(bookie_id, ledger_id, first, last, most), "scan")

    async def _scan_amid_faults(self, bookie_id: str, ledger_id: int, first: int, last: int, most_chunks: int) -> None:
        """Some are given up after a few chunks, as by a task that is killed."""
        try:
            self.seen["amid faults"] += len(await self._scan(bookie_id, ledger_id, first, last, most_chunks))
        except CepheidError as error:
            self.seen["failed"] += 1
            self.history.note(f"scan of {ledger_id} at {bookie_id}: {error}")

    async def _scan(self, bookie_id: str, ledger_id: int, first: int, last: int, most_chunks: int) -> dict[int, bytes]:
        chunk_bytes = self._scanner.choice(SCAN_CHUNK_BYTES)
        request = ReadRequest(ledger_id, first, last, 1 << 40, ticket=b"any", scan=True, chunk_bytes=chunk_bytes)
        entries: dict[int, bytes] = {}
        position = first
        async with aclosing(SimConnection(self.network, self._executor, bookie_id).read(request)) as chunks:
            async for chunk in chunks:
                told = set(ids_of(chunk))  # an answer that is cut short names what was given before again
                assert told.issuperset(range(position, chunk.next_entry_id)), f"{bookie_id} says nothing of some: {chunk}"
                position = chunk.next_entry_id
                for group in chunk.groups:
                    group.verify()
                    entries |= dict(enumerate(map(bytes, group.payloads()), group.first_entry_id))
                most_chunks -= 1
                if not most_chunks:
                    return entries
        assert position == last + 1
        return entries

    async def _scan_all(self, record: LedgerMetadata, entries: dict[int, bytes]) -> None:
        assert record.last_entry_id is not None
        for bookie_id in {bookie_id: None for fragment in record.fragments for bookie_id in fragment.ensemble}:
            if record.last_entry_id > NO_ENTRY_ID:
                entries |= await self._scan(bookie_id, record.ledger_id, 0, record.last_entry_id, 1_000_000)

    async def _live(self) -> None:
        await super()._live()
        for ledger_id, record in list(self.history.ledgers.items()):
            written = self.history.sent.get(ledger_id)
            if record.last_entry_id is None or written is None:
                continue
            entries: dict[int, bytes] = {}
            await self.spawn(self._executor, self._scan_all(record, entries), "last scans")
            self.history.check(
                "L7",
                entries == dict(enumerate(written[: record.last_entry_id + 1])),
                lambda ledger_id=ledger_id: f"scans give something else; {self.history.story(ledger_id)}",
            )
            self.seen["when all is quiet"] += len(entries)


def ids_of(chunk: ReadAnswer) -> list[int]:
    held = [entry_id for group in chunk.groups for entry_id in range(group.first_entry_id, group.last_entry_id + 1)]
    return held + [entry_id for run in chunk.missing for entry_id in range(run.first_entry_id, run.last_entry_id + 1)]


@pytest.mark.slow
def test_scans_give_what_was_written_whatever_breaks() -> None:
    ScanningWorld.seen = Counter()
    for seed in SEEDS:
        outcome = run_seed(seed, new_world=ScanningWorld)
        assert outcome.failure is None, outcome.describe()
    assert min(ScanningWorld.seen[what] for what in ("amid faults", "failed", "when all is quiet")) > 10, ScanningWorld.seen
