"""How many ledgers of open topics name a bookie that does not run: counted in rounds, as bookies go and come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_managed_ledger import ManagedLedgerConfig, under_replicated
from cepheid_managed_ledger.under_replicated import UnderReplicated
from cepheid_metadata import MemoryStore, StoreClosedError, StoreUnavailableError, ledger_records
from tests.managed_ledger.topic_world import KEEP, Broker, TopicWorld, append_all, topic_world

TWO_COPIES = ManagedLedgerConfig(2, 2, 1, KEEP)


class States:
    """Which bookies run."""

    def __init__(self, *bookies: str) -> None:
        self.all, self.down = list(bookies), set[str]()

    def writable(self) -> list[str]:
        return [bookie for bookie in self.all if bookie not in self.down]

    registered = writable

    def expected(self) -> list[str]:
        return self.all

    def problems(self) -> list[str]:
        return []


def counting(broker: Broker, states: States) -> UnderReplicated:
    return UnderReplicated(broker.client, broker.ledgers.opened, states)


def figures(counted: UnderReplicated) -> tuple[int, int]:
    found = counted.statistics()
    return found.ledgers, found.not_looked_up


async def filled(world: TopicWorld) -> Broker:
    """A broker that opened a topic with three ended ledgers."""
    for _ in range(3):
        broker = world.broker()
        await append_all(await broker.open(TWO_COPIES), 2)
        await broker.aclose()
    world.brokers.clear()
    broker = world.broker()
    await broker.open(TWO_COPIES)
    return broker


async def test_ledgers_that_name_a_bookie_which_does_not_run_are_counted_also_after_a_restart() -> None:
    async with topic_world("a", "b") as world:
        broker, states = await filled(world), States("a", "b")
        counted = counting(broker, states)
        await counted.look()
        assert figures(counted) == (0, 0)
        states.down.add("b")
        await counted.look()
        assert figures(counted) == (3, 0)
        states.down.clear()
        assert figures(counted) == (0, 0), "a scrape knows at once that it is back"
        states.down.add("b")
        assert figures(counted) == (3, 0)


async def test_the_ledger_that_is_written_counts_without_any_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with topic_world("a", "b") as world:
        broker, states = world.broker(), States("a", "b")
        ledger = await broker.open(TWO_COPIES)
        counted = counting(broker, states)
        states.down.add("a")
        await counted.look()
        assert figures(counted) == (0, 0), "an empty ledger lacks nothing"
        await append_all(ledger, 2)
        monkeypatch.setattr(broker.client, "metadata_of", None)
        await counted.look()
        assert figures(counted) == (1, 0)


async def test_a_ledger_that_was_repaired_counts_no_more() -> None:
    async with topic_world("a", "b") as world:
        broker, states = await filled(world), States("a", "b", "c")
        counted = counting(broker, states)
        states.down.add("a")
        await counted.look()
        assert figures(counted) == (3, 0)
        records = ledger_records(MemoryStore(world.tree))
        for ledger_id, ledger in (await world.ledger_records()).items():
            whole = ledger.replace(fragments=(ledger.last_fragment.replace(ensemble=("b", "c")),))
            found = await records.get(ledger_id)
            assert found is not None
            await records.replace(ledger_id, whole, found.version)
        for _ in range(under_replicated._TURNS):
            await counted.look()
        assert figures(counted) == (0, 0)


async def test_a_round_reads_some_records_and_says_how_many_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_replicated, "_READ_IN_A_ROUND", 2)
    async with topic_world("a", "b") as world:
        broker, states = await filled(world), States("a", "b")
        counted = counting(broker, states)
        states.down.add("a")
        await counted.look()
        assert figures(counted) == (2, 1)
        await counted.look()
        assert figures(counted) == (3, 0)


async def test_a_record_that_cannot_be_read_stays_unknown_and_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_replicated, "_READ_IN_A_ROUND", 1)
    async with topic_world("a", "b") as world:
        broker, states = await filled(world), States("a", "b")
        counted = counting(broker, states)
        states.down.add("a")
        read = broker.client.metadata_of
        unreadable = next(iter(broker.ledgers.opened.values())).stored_ledger_ids()[0]

        async def fails(ledger_id: int) -> Any:
            if ledger_id == unreadable:
                raise StoreUnavailableError("away")
            return await read(ledger_id)

        monkeypatch.setattr(broker.client, "metadata_of", fails)
        for _ in range(3):
            await counted.look()
        assert figures(counted) == (2, 1)
        monkeypatch.setattr(broker.client, "metadata_of", read)
        await counted.look()
        assert figures(counted) == (3, 0)


async def test_it_ends_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_replicated, "CHECK_S", 0.001)
    async with topic_world("a", "b") as world:
        broker, states = await filled(world), States("a", "b")
        counted = counting(broker, states)
        states.down.add("a")

        async def closed(ledger_id: int) -> Any:
            raise StoreClosedError("closed")

        monkeypatch.setattr(broker.client, "metadata_of", closed)
        async with asyncio.timeout(10):
            await counted.run()
