"""Managed ledgers over memory bookies and a memory store: what most tests of this folder start from."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cepheid_ledger import LedgerClient, RackAwarePlacement
from cepheid_managed_ledger import (
    ManagedLedger,
    ManagedLedgerConfig,
    ManagedLedgerError,
    ManagedLedgers,
    ManagedLedgerSettings,
    Retention,
    TailCache,
)
from cepheid_metadata import (
    Chain,
    LedgerIds,
    LedgerMetadata,
    MemoryStore,
    MemoryTree,
    PageLimits,
    Position,
    ledger_records,
    list_ledgers,
    read_chain,
)
from cepheid_metadata.chain_pages import LIMITS
from cepheid_ports import Ports
from cepheid_rpc import Buffer, EntryGroup
from cepheid_wire import TopicName
from tests.ledger.ledger_world import FAST as FAST_LEDGERS
from tests.ledger.memory_bookie import MemoryCluster
from tests.managed_ledger.memory_segments import MemorySegments

# Nothing here waits for a bookie's timeout; they are long so that a busy machine does not fail tests.
LEDGERS = FAST_LEDGERS.model_copy(
    update={"add_timeout_s": 10.0, "read_timeout_s": 10.0, "recovery_timeout_s": 10.0, "metadata_timeout_s": 10.0}
)
TOPIC = TopicName.parse("persistent://public/default/orders")
SETTINGS = ManagedLedgerSettings(
    cursor_flush_s=0.02,
    metadata_retry_s=0.002,
    metadata_timeout_s=1.0,
    drain_timeout_s=2.0,
    ledger_min_age_s=0.0,
    ledger_failover_timeout_s=10.0,
)
KEEP = Retention(-1, -1)
ONE_BOOKIE = ManagedLedgerConfig(retention=KEEP)
THREE_BOOKIES = ManagedLedgerConfig(3, 3, 2, KEEP)
TRIM = ManagedLedgerConfig()


class Clock:
    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


@dataclass
class Broker:
    """One process: a session with the store, a ledger client, managed ledgers."""

    ledgers: ManagedLedgers
    client: Any
    store: Any
    tail_cache: TailCache

    async def open(self, config: ManagedLedgerConfig = ONE_BOOKIE, topic: TopicName = TOPIC) -> ManagedLedger:
        return await self.ledgers.open(topic, config)

    async def aclose(self) -> None:
        await self.ledgers.aclose()
        await self.client.aclose()

    async def crash(self) -> None:
        """Ends without a word to bookies or store, as far as one process can play that."""
        self.store.dead = True
        await self.ledgers.aclose()
        await self.client.aclose()


class MortalStore(MemoryStore):
    """Refuses everything once its process is dead."""

    dead = False

    def _check_session(self) -> None:
        if self.dead:
            from cepheid_metadata import StoreClosedError

            raise StoreClosedError("this process has crashed")
        super()._check_session()


@dataclass
class TopicWorld:
    cluster: MemoryCluster
    tree: MemoryTree
    clock: Clock
    settings: ManagedLedgerSettings
    segments: MemorySegments = field(default_factory=MemorySegments)
    brokers: list[Broker] = field(default_factory=list)
    page_limits: PageLimits = LIMITS

    def broker(
        self,
        *,
        store: Any = None,
        settings: ManagedLedgerSettings | None = None,
        cache_bytes: int = 1 << 20,
        seed: int = 1,
        with_segments: bool = True,
    ) -> Broker:
        store = store or MortalStore(self.tree)
        rng = random.Random(seed)
        placement = RackAwarePlacement(self.cluster.available, rng)
        client = LedgerClient(self.cluster, ledger_records(store), LedgerIds(store), placement, LEDGERS, Ports(random=rng))
        tail_cache = TailCache(cache_bytes)
        ports = Ports(wall_ms=self.clock, random=random.Random(seed))
        segments = self.segments if with_segments else None
        ledgers = ManagedLedgers(
            client, store, tail_cache, settings or self.settings, ports, segments=segments, page_limits=self.page_limits
        )
        broker = Broker(ledgers, client, store, tail_cache)
        self.brokers.append(broker)
        return broker

    async def chain(self, topic: TopicName = TOPIC) -> Chain:
        found = await read_chain(MemoryStore(self.tree), topic)
        assert found is not None, f"{topic} has no chain"
        return found.record

    async def ledger_records(self) -> dict[int, LedgerMetadata]:
        store = MemoryStore(self.tree)
        records = ledger_records(store)
        found = {}
        async for ledger_id in list_ledgers(store):
            record = await records.get(ledger_id)
            assert record is not None
            found[ledger_id] = record.record
        return found


@contextlib.asynccontextmanager
async def topic_world(
    *bookies: str, settings: ManagedLedgerSettings = SETTINGS, page_limits: PageLimits = LIMITS
) -> AsyncIterator[TopicWorld]:
    world = TopicWorld(MemoryCluster(*(bookies or ("a",))), MemoryTree(), Clock(), settings, page_limits=page_limits)
    try:
        yield world
    finally:
        for broker in world.brokers:
            await broker.aclose()


def append(ledger: ManagedLedger, *payloads: Buffer) -> asyncio.Future[Position]:
    """One group; the future gets the position of its first entry, or the error."""
    future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()

    def on_done(outcome: Position | ManagedLedgerError, count: int) -> None:
        assert count == len(payloads)
        assert not future.done(), "an append was answered twice"
        if isinstance(outcome, ManagedLedgerError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    ledger.append(payloads, on_done)
    return future


async def append_all(ledger: ManagedLedger, count: int, prefix: str = "m", group: int = 1) -> list[Position]:
    """`count` entries in groups; the position of each entry."""
    positions: list[Position] = []
    futures = []
    for start in range(0, count, group):
        payloads = [f"{prefix}{number}".encode() for number in range(start, min(count, start + group))]
        futures.append((append(ledger, *payloads), len(payloads)))
    for future, size in futures:
        first = await future
        positions += [Position(first.ledger_id, first.entry_id + index) for index in range(size)]
    return positions


async def read_all(
    ledger: ManagedLedger, start: Position | None = None, *, cached: bool = True, max_bytes: int = 1 << 20
) -> list[bytes]:
    """Every payload from `start` (or the beginning) to the end."""
    payloads: list[bytes] = []
    position = start or Position(-1, -1)
    while True:
        groups = ledger.read_cached(position, max_entries=1000, max_bytes=max_bytes) if cached else None
        if groups is None:
            groups = await ledger.read(position, max_entries=1000, max_bytes=max_bytes)
        if not groups:
            return payloads
        payloads += payloads_of(groups)
        position = ledger.next_position(Position(groups[-1].ledger_id, groups[-1].last_entry_id))


def payloads_of(groups: Sequence[EntryGroup]) -> list[bytes]:
    return [bytes(payload) for group in groups for payload in group.payloads()]
