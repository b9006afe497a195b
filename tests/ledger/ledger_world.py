"""A ledger client over memory bookies and a memory store: what most tests of the drivers start from."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cepheid_ledger import LedgerClient, LedgerError, LedgerSettings, LedgerWriter, RackAwarePlacement
from cepheid_metadata import LedgerIds, LedgerMetadata, MemoryStore, MemoryTree, Records, ledger_records
from cepheid_ports import Ports
from cepheid_rpc import Buffer, EntryGroup
from tests.ledger.memory_bookie import MemoryCluster

FAST = LedgerSettings(
    add_timeout_s=0.2,
    refusal_retry_s=0.3,
    refusal_delay_s=0.005,
    reconnect_delay_s=0.01,
    read_timeout_s=0.3,
    speculative_read_s=0.05,
    recovery_timeout_s=0.3,
    metadata_retry_s=0.005,
    metadata_timeout_s=2.0,
)


class ChosenPlacement(RackAwarePlacement):
    """Takes `next_ensemble` once, if a test has set it."""

    next_ensemble: tuple[str, ...] | None = None

    def new_ensemble(self, size: int, write_quorum: int) -> tuple[str, ...]:
        chosen, self.next_ensemble = self.next_ensemble, None
        return chosen or super().new_ensemble(size, write_quorum)


@dataclass
class LedgerWorld:
    cluster: MemoryCluster
    placement: ChosenPlacement
    tree: MemoryTree
    store: Any
    records: Records[int, LedgerMetadata]
    client: LedgerClient

    async def create(self, size: int = 3, ack_quorum: int = 2) -> LedgerWriter:
        return await self.client.create(ensemble_size=size, write_quorum=size, ack_quorum=ack_quorum, custom={"topic": "t"})

    async def create_on(self, ensemble: str, ack_quorum: int = 2, write_quorum: int | None = None) -> LedgerWriter:
        """With these bookies, one letter each, in this order."""
        self.placement.next_ensemble = tuple(ensemble)
        size = len(ensemble)
        return await self.client.create(
            ensemble_size=size, write_quorum=write_quorum or size, ack_quorum=ack_quorum, custom={"topic": "t"}
        )

    async def record(self, ledger_id: int) -> LedgerMetadata:
        found = await self.records.get(ledger_id)
        assert found is not None
        return found.record

    def another_client(self, settings: LedgerSettings = FAST, seed: int = 7) -> LedgerClient:
        """Another process over the same bookies and metadata."""
        placement = RackAwarePlacement(self.cluster.available, random.Random(seed))
        return new_client(self.cluster, MemoryStore(self.tree), placement, settings)


def new_client(cluster: Any, store: Any, placement: RackAwarePlacement, settings: LedgerSettings) -> LedgerClient:
    rng = random.Random(1)
    return LedgerClient(cluster, ledger_records(store), LedgerIds(store), placement, settings, Ports(random=rng))


@contextlib.asynccontextmanager
async def ledger_world(
    *bookies: str,
    settings: LedgerSettings = FAST,
    store_of: Any = MemoryStore,
    racks: Mapping[str, str] | None = None,
    strict: bool = False,
) -> AsyncIterator[LedgerWorld]:
    cluster = MemoryCluster(*(bookies or ("a", "b", "c")))
    tree = MemoryTree()
    store = store_of(tree)
    placement = ChosenPlacement(cluster.available, random.Random(1), racks=lambda: racks or {}, strict=strict)
    client = new_client(cluster, store, placement, settings)
    try:
        yield LedgerWorld(cluster, placement, tree, store, ledger_records(store), client)
    finally:
        await client.aclose()


def append(writer: LedgerWriter, payloads: Sequence[Buffer]) -> asyncio.Future[EntryGroup]:
    """One group; the future gets the group or the error."""
    future: asyncio.Future[EntryGroup] = asyncio.get_running_loop().create_future()

    def on_done(outcome: EntryGroup | LedgerError) -> None:
        if isinstance(outcome, LedgerError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    writer.append(payloads, on_done)
    return future


def payloads_of(groups: Sequence[EntryGroup]) -> list[bytes]:
    return [bytes(payload) for group in groups for payload in group.payloads()]
