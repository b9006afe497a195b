"""The ledger client on real bookies: their journal, cache and index on a real disk, in this process and over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cepheid_bookie import Bookie, BookieIdentity, MetadataCookies, RealDisk, StorageSettings
from cepheid_bookie.grpc_server import BookieServer
from cepheid_bookie.rocks_index import RocksBlockIndex
from cepheid_ledger import (
    ClosedLedger,
    EntryUnavailableError,
    LedgerClient,
    LedgerError,
    LedgerFencedError,
    LedgerSettings,
    LedgerWriter,
    RackAwarePlacement,
    RecoveryFailedError,
)
from cepheid_ledger.grpc_connection import GrpcConnection
from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree, ledger_records
from cepheid_ports import Ports
from cepheid_rpc import BookieConnection, EntryGroup
from tests.ledger.ledger_world import append, payloads_of
from tests.support import wait_until

SETTINGS = LedgerSettings(add_timeout_s=2.0, recovery_timeout_s=2.0, reconnect_delay_s=0.02, explicit_lac_interval_s=0.2)


class RealCluster:
    """Bookies that can be stopped and started again on their directories."""

    def __init__(self, directory: Path, bookie_ids: Sequence[str], over_grpc: bool) -> None:
        self._directory = directory
        self.tree = MemoryTree()
        self._cookies = MetadataCookies(MemoryStore(self.tree), {})
        self._over_grpc = over_grpc
        self.bookie_ids = bookie_ids
        self.bookies: dict[str, Bookie] = {}
        self._servers: dict[str, BookieServer] = {}
        self._connections: dict[str, BookieConnection] = {}

    async def replace_by_a_blank_one(self, bookie_id: str) -> None:
        await self.stop(bookie_id)
        shutil.rmtree(self._directory / bookie_id)
        await self.start(bookie_id, accept_empty_disk=True)

    async def start(self, bookie_id: str, *, accept_empty_disk: bool = False) -> None:
        directory = self._directory / bookie_id
        directory.mkdir(exist_ok=True)
        identity = BookieIdentity(bookie_id, "test")
        settings = StorageSettings(journal_segment_bytes=1 << 20, min_free_journal_bytes=0, min_free_data_bytes=0)
        disk, index = RealDisk(directory / "data"), RocksBlockIndex(str(directory / "index"))
        bookie = await Bookie.open(
            identity, settings, disk, index, Ports(), cookies=self._cookies, accept_empty_disk=accept_empty_disk
        )
        self.bookies[bookie_id] = bookie
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
        placement = RackAwarePlacement(lambda: self.bookie_ids, random.Random(1))
        return LedgerClient(self, ledger_records(store), LedgerIds(store), placement, SETTINGS, Ports())


@contextlib.asynccontextmanager
async def real_cluster(directory: Path, over_grpc: bool, bookie_ids: Sequence[str] = ("a", "b", "c")) -> AsyncIterator[RealCluster]:
    cluster = RealCluster(directory, bookie_ids, over_grpc)
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


@pytest.mark.slow
@pytest.mark.parametrize("over_grpc", [False, True])
@pytest.mark.parametrize(("size", "write_quorum", "ack_quorum"), [(1, 1, 1), (3, 3, 2), (3, 2, 2), (3, 2, 1)])
async def test_written_recovered_and_read_back_across_restarts(
    tmp_path: Path, over_grpc: bool, size: int, write_quorum: int, ack_quorum: int
) -> None:
    async with real_cluster(tmp_path, over_grpc) as cluster:
        tree = MemoryTree()
        client = cluster.client(MemoryStore(tree))
        writer = await client.create(ensemble_size=size, write_quorum=write_quorum, ack_quorum=ack_quorum, custom={})
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


@pytest.mark.parametrize("over_grpc", [False, True])
async def test_a_bookie_that_stops_costs_copies_but_no_entries(tmp_path: Path, over_grpc: bool) -> None:
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


async def test_an_empty_ledger_is_fenced_where_nobody_knew_it(tmp_path: Path) -> None:
    async with real_cluster(tmp_path, over_grpc=False) as cluster:
        tree = MemoryTree()
        client, other = cluster.client(MemoryStore(tree)), cluster.client(MemoryStore(tree))
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
        assert await other.recover(writer.ledger_id) == ClosedLedger(-1, 0)
        with pytest.raises(LedgerFencedError):
            await append(writer, [b"too late"])
        await client.aclose()
        await other.aclose()


@pytest.mark.parametrize("over_grpc", [False, True])
async def test_a_reader_elsewhere_waits_for_entries_and_for_the_end(tmp_path: Path, over_grpc: bool) -> None:
    async with real_cluster(tmp_path, over_grpc) as cluster:
        client, other = cluster.client(MemoryStore(cluster.tree)), cluster.client(MemoryStore(cluster.tree))
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
        reader = await other.open_reader(writer.ledger_id)
        waiting = asyncio.create_task(reader.wait_for_lac(-1, 20.0))
        await wait_until(lambda: all(bookie.statistics().lac_waits == 1 for bookie in cluster.bookies.values()))
        await append(writer, [b"0"])
        await append(writer, [b"1"])
        assert await waiting >= 0
        assert await reader.wait_for_lac(0, 20.0) == 1, "told by the idle writer"
        waiting = asyncio.create_task(reader.wait_for_lac(1, 20.0))
        await wait_until(lambda: all(bookie.statistics().lac_waits == 1 for bookie in cluster.bookies.values()))
        start = asyncio.get_running_loop().time()
        await cluster.stop("b")
        assert asyncio.get_running_loop().time() - start < 10, "a bookie stops without waiting for those who wait"
        await writer.close()
        assert await waiting == 1
        await wait_until(lambda: all(bookie.statistics().lac_waits == 0 for bookie in cluster.bookies.values()))
        await client.aclose()
        await other.aclose()
        await cluster.start("b")


async def test_blank_bookies_under_old_ids_while_the_writer_sleeps(tmp_path: Path) -> None:
    """Scenario 20 (#4812): all bookies of an open ledger, one by one. Nothing is acknowledged into a void, nothing is cut short."""
    async with real_cluster(tmp_path, over_grpc=False) as cluster:
        client, other = cluster.client(MemoryStore(cluster.tree)), cluster.client(MemoryStore(cluster.tree))
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
        lost = await write_many(writer, 5)
        for bookie_id in cluster.bookie_ids:
            await cluster.replace_by_a_blank_one(bookie_id)
        with pytest.raises(LedgerError):
            await append(writer, [b"into the void"])
        with pytest.raises(RecoveryFailedError, match="UNKNOWN"):
            await other.recover(writer.ledger_id)
        reader = await other.open_reader(writer.ledger_id)
        reader._last_add_confirmed = len(lost) - 1  # as it knew before
        with pytest.raises(EntryUnavailableError, match="UNKNOWN"):
            await reader.read(0, 0, max_bytes=1)
        fresh = await other.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={}, above=None)
        expected = await write_many(fresh, 5)
        assert (await client.recover(fresh.ledger_id)).last_entry_id == len(expected) - 1
        await client.aclose()
        await other.aclose()


async def test_one_blank_bookie_costs_a_copy_and_the_writer_goes_on_without_it(tmp_path: Path) -> None:
    async with real_cluster(tmp_path, over_grpc=False, bookie_ids="abcd") as cluster:
        client, other = cluster.client(MemoryStore(cluster.tree)), cluster.client(MemoryStore(cluster.tree))
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
        expected = await write_many(writer, 5)
        victim = writer.metadata.last_fragment.ensemble[0]
        await cluster.replace_by_a_blank_one(victim)
        expected += await write_many(writer, 5)
        await wait_until(lambda: victim not in writer.metadata.last_fragment.ensemble, what="another bookie in its place")
        assert cluster.bookies[victim].ledgers() == [], "it took nothing"
        end = await other.recover(writer.ledger_id)
        assert end.last_entry_id == len(expected) - 1
        assert await read_all(other, writer.ledger_id, end.last_entry_id, 1 << 20) == expected
        await client.aclose()
        await other.aclose()
