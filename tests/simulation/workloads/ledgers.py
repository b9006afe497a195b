"""Clients of bare ledgers: writers that append and now and then vanish, recoverers that take ledgers from under them, readers,
operators who delete ledgers and bring them back.

Each is a loop in some broker's process and ends with it; what they did is in the history.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from cepheid_ledger import LedgerError
from cepheid_ports import CepheidError
from cepheid_rpc import EntryGroup
from tests.simulation.checks.history import History
from tests.simulation.world.sim_broker import SimBroker

EXPECTED = (CepheidError, TimeoutError)
"""What an operation may raise while things break."""


@dataclass(slots=True)
class Quorums:
    ensemble_size: int
    write_quorum: int
    ack_quorum: int


@dataclass(slots=True)
class Pending:
    """Appends that were not answered yet (V3, V9: none may be forgotten)."""

    count: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        self.count += 1

    def end(self) -> None:
        self.count -= 1
        self.changed.set()

    async def wait_below(self, limit: int) -> None:
        while self.count >= limit:
            self.changed.clear()
            await self.changed.wait()


BARE = {"workload": "ledgers"}
"""Custom fields of a ledger that belongs to no topic."""


class LedgerWorkload:
    def __init__(self, rng: random.Random, history: History, quorums: Quorums) -> None:
        self._random = rng
        self._history = history
        self.quorums = quorums
        self._payloads = 0
        self.pending: dict[str, Pending] = {}  # by process
        self.stopped = False

    async def write(self, broker: SimBroker) -> None:
        """Ledger after ledger."""
        rng, quorums = self._random, self.quorums
        while not self.stopped:
            try:
                writer = await broker.ledgers.create(
                    ensemble_size=quorums.ensemble_size,
                    write_quorum=quorums.write_quorum,
                    ack_quorum=quorums.ack_quorum,
                    custom=BARE,
                )
            except EXPECTED as error:
                self._history.note(f"{broker.process} cannot create a ledger: {error!r}")
                await asyncio.sleep(rng.uniform(0.05, 0.5))
                continue
            self._history.note(f"{broker.process} writes ledger {writer.ledger_id}")
            await self._fill(writer, self.pending.setdefault(broker.process, Pending()))
            await asyncio.sleep(rng.choice((0.0, 0.1, 0.4)))
            if rng.random() < 0.5:
                self._history.did("close")
                try:
                    await writer.close()
                except EXPECTED as error:
                    self._history.note(f"{broker.process} cannot close ledger {writer.ledger_id}: {error}")
                    await writer.aclose()  # as every owner that does not try again: it keeps entries for newcomers else

    async def _fill(self, writer: Any, pending: Pending) -> None:
        rng = self._random
        failed = False

        def on_done(outcome: EntryGroup | LedgerError) -> None:
            nonlocal failed
            pending.end()
            failed = failed or isinstance(outcome, LedgerError)

        for _ in range(rng.choice((0, 1, 3, 8, 20))):
            payloads = [self._payload() for _ in range(rng.choice((1, 1, 1, 2, 4)))]
            self._history.did("append")
            pending.begin()
            writer.append(payloads, on_done)
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.05, 0.2)))
            await pending.wait_below(8)
            if failed or self.stopped:
                return
        if rng.random() < 0.8:
            await pending.wait_below(1)

    async def append_once(self, broker: SimBroker) -> None:
        """To a ledger of its own, until it is answered. Raises what making a ledger raises."""
        quorums, pending = self.quorums, Pending()
        writer = await broker.ledgers.create(
            ensemble_size=quorums.ensemble_size,
            write_quorum=quorums.write_quorum,
            ack_quorum=quorums.ack_quorum,
            custom=BARE,
        )
        self._history.did("append")
        pending.begin()
        writer.append([self._payload()], lambda _: pending.end())
        await pending.wait_below(1)

    async def recover(self, broker: SimBroker, ledger_id: int) -> None:
        self._history.did("recover")
        try:
            await broker.ledgers.recover(ledger_id)
        except EXPECTED as error:
            self._history.note(f"{broker.process} cannot recover ledger {ledger_id}: {error}")

    async def delete(self, broker: SimBroker, ledger_id: int) -> None:
        """An operator's doing, of what belongs to no topic."""
        self._history.did("delete")
        try:
            await broker.ledgers.delete(ledger_id)
        except EXPECTED as error:
            self._history.note(f"{broker.process} cannot delete ledger {ledger_id}: {error}")

    async def bring_back(self, broker: SimBroker, ledger_id: int) -> None:
        try:
            await broker.ledgers.undelete(ledger_id)
        except EXPECTED as error:
            self._history.note(f"{broker.process} cannot bring back ledger {ledger_id}: {error}")

    async def read(self, broker: SimBroker, ledger_id: int) -> None:
        """Tails a ledger without recovering it: LAC, then what lies below it."""
        self._history.did("read")
        try:
            reader = await broker.ledgers.open_reader(ledger_id)
            reader.is_of_a_topic = False
            entry_id = 0
            for _ in range(3):
                end = await reader.read_lac()
                while entry_id <= end:
                    groups = await reader.read(entry_id, end, max_bytes=self._random.choice((1, 200, 5_000)))
                    entry_id = groups[-1].last_entry_id + 1
                await asyncio.sleep(self._random.uniform(0.0, 0.1))
        except EXPECTED as error:
            self._history.note(f"{broker.process} cannot read ledger {ledger_id}: {error}")

    def _payload(self) -> bytes:
        self._payloads += 1
        size = self._random.choice((0, 10, 40, 40, 40, 900))
        return f"e{self._payloads}".encode() + b"." * size
