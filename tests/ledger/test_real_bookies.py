"""The ledger client on real bookies: their journal, cache and index on a real disk, in this process and over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cepheid_bookie import Bookie, BookieSettings, RealDisk
from cepheid_bookie.grpc_server import BookieServer
from cepheid_bookie.rocks_index import RocksBlockIndex
from cepheid_ledger import (
    ClosedLedger,
    LedgerClient,
    LedgerFencedError,
    LedgerSettings,
    LedgerWriter,
    RandomPlacement,
)
from cepheid_ledger.grpc_connection import GrpcConnection
from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree, ledger_records
from cepheid_ports import Ports
from cepheid_rpc import BookieConnection, EntryGroup
from tests.ledger.ledger_world import append, payloads_of
from tests.support import run_async, wait_until

SETTINGS = LedgerSettings(add_timeout_s=2.0, recovery_timeout_s=2.0, reconnect_delay_s=0.02)


class RealCluster:
    """Bookies that can be stopped and started again on their directories."""

    def __init__(self, directory: Path, bookie_ids: Sequence[str], over_grpc: bool) -> None:
        self._directory = directory
        self._over_grpc = over_grpc
        self.bookie_ids = bookie_ids
        self.bookies: dict[str, Bookie] = {}
        self._servers: dict[str, BookieServer] = {}
        self._connections: dict[str, BookieConnection] = {}

    async def start(self, bookie_id: str) -> None:
        directory = self._directory / bookie_id
        directory.mkdir(exist_ok=True)
        settings = BookieSettings(
            bookie_id=bookie_id, cluster_id="test", journal_segment_bytes=1 << 20, min_free_journal_bytes=0, min_free_data_bytes=0
        )
        index = RocksBlockIndex(str(directory / "index"))
        bookie = self.bookies[bookie_id] = await Bookie.open(settings, RealDisk(directory / "data"), index, Ports())
        if (old := self._connections.pop(bookie_id, None)) is not None:
            await old.aclose()
        if self._over_grpc:
            server = self._servers[bookie_id] = BookieServer(bookie, "127.0.0.1", 0)
            await server.start()
            self._connections[bookie_id] = GrpcConnection(bookie_id, f"127.0.0.1:{server.port}")
        else:
            self._connections[bookie_id] = bookie.connection()

    async def stop(self, bookie_id: str) -> None:
        if (server := self._servers.pop(bookie_id, None)) is not None:
            await server.aclose()
        await self.bookies.pop(bookie_id).aclose()

    def get(self, bookie_id: str) -> BookieConnection:
        return self._connections[bookie_id]

    def client(self, store: MemoryStore) -> LedgerClient:
        placement = RandomPlacement(lambda: self.bookie_ids, random.Random(1))
        return LedgerClient(self, ledger_records(store), LedgerIds(store), placement, SETTINGS, Ports())


@contextlib.asynccontextmanager
async def real_cluster(directory: Path, over_grpc: bool) -> AsyncIterator[RealCluster]:
    cluster = RealCluster(directory, ("a", "b", "c"), over_grpc)
    try:
        for bookie_id in cluster.bookie_ids:
            await cluster.start(bookie_id)
        yield cluster
    finally:
        for bookie_id in list(cluster.bookies):
            await cluster.stop(bookie_id)
            await cluster.get(bookie_id).aclose()


async def write_many(writer: LedgerWriter, groups: int) -> list[bytes]:
    """Groups of 1 to 7 entries, all pending at once; returns what was acknowledged, in order."""
    rng = random.Random(3)
    sizes = [rng.randint(1, 7) for _ in range(groups)]
    pending = [append(writer, [b"%d.%d" % (n, k) * rng.randint(1, 50) for k in range(size)]) for n, size in enumerate(sizes)]
    return payloads_of(await asyncio.gather(*pending))


async def read_all(client: LedgerClient, ledger_id: int, last: int, max_bytes: int) -> list[bytes]:
    reader = await client.open_reader(ledger_id)
    groups: list[EntryGroup] = []
    while (first := groups[-1].last_entry_id + 1 if groups else 0) <= last:
        groups += await reader.read(first, last, max_bytes=max_bytes)
    return payloads_of(groups)


@pytest.mark.parametrize("over_grpc", [False, True])
@pytest.mark.parametrize(("size", "ack_quorum"), [(1, 1), (3, 2)])
def test_written_recovered_and_read_back_across_restarts(tmp_path: Path, over_grpc: bool, size: int, ack_quorum: int) -> None:
    async def main() -> None:
        async with real_cluster(tmp_path, over_grpc) as cluster:
            tree = MemoryTree()
            client = cluster.client(MemoryStore(tree))
            writer = await client.create(ensemble_size=size, write_quorum=size, ack_quorum=ack_quorum, custom={})
            expected = await write_many(writer, 200)
            other = cluster.client(MemoryStore(tree))
            end = await other.recover(writer.ledger_id)
            assert end == ClosedLedger(len(expected) - 1, sum(map(len, expected)))
            with pytest.raises(LedgerFencedError):
                await append(writer, [b"too late"])
            assert await read_all(other, writer.ledger_id, end.last_entry_id, 5_000) == expected
            await client.aclose()
            await other.aclose()
            for bookie_id in cluster.bookie_ids:
                await cluster.stop(bookie_id)
                await cluster.start(bookie_id)
            late = cluster.client(MemoryStore(tree))
            assert await late.recover(writer.ledger_id) == end
            assert await read_all(late, writer.ledger_id, end.last_entry_id, 1 << 20) == expected
            await late.aclose()

    run_async(main(), timeout_s=60)


@pytest.mark.parametrize("over_grpc", [False, True])
def test_a_bookie_that_stops_costs_copies_but_no_entries(tmp_path: Path, over_grpc: bool) -> None:
    async def main() -> None:
        async with real_cluster(tmp_path, over_grpc) as cluster:
            tree = MemoryTree()
            client = cluster.client(MemoryStore(tree))
            writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
            expected = await write_many(writer, 20)
            await cluster.stop("b")
            expected += await write_many(writer, 20)
            await wait_until(lambda: writer.under_replicated == ("b",))
            other = cluster.client(MemoryStore(tree))
            end = await other.recover(writer.ledger_id)
            assert end.last_entry_id == len(expected) - 1
            assert await read_all(other, writer.ledger_id, end.last_entry_id, 1 << 20) == expected
            await client.aclose()
            await other.aclose()
            await cluster.start("b")

    run_async(main(), timeout_s=60)


def test_an_empty_ledger_is_fenced_where_nobody_knew_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with real_cluster(tmp_path, over_grpc=False) as cluster:
            tree = MemoryTree()
            client, other = cluster.client(MemoryStore(tree)), cluster.client(MemoryStore(tree))
            writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
            assert await other.recover(writer.ledger_id) == ClosedLedger(-1, 0)
            with pytest.raises(LedgerFencedError):
                await append(writer, [b"too late"])
            await client.aclose()
            await other.aclose()

    run_async(main())
