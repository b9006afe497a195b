"""A real bookie on a real disk, reached by ledger clients over gRPC: append, read back, recover from another client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cepheid_bookie import Bookie, BookieIdentity, RealDisk, StorageSettings
from cepheid_bookie.grpc_server import BookieServer
from cepheid_bookie.rocks_index import RocksBlockIndex
from cepheid_broker.settings import BrokerSettings
from cepheid_ledger import LedgerClient, LedgerFencedError, LedgerSettings, LedgerWriter, RackAwarePlacement
from cepheid_ledger.grpc_connection import GrpcConnection
from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree, ledger_records
from cepheid_ports import Ports
from cepheid_rpc import SCAN_CHUNK_BYTES, BookieConnection, Buffer, EntryGroup, ReadRequest


class Registry:
    def __init__(self, connections: dict[str, BookieConnection]) -> None:
        self._connections = connections

    def get(self, bookie_id: str) -> BookieConnection:
        return self._connections[bookie_id]


@asynccontextmanager
async def bookies(root: Path, count: int) -> AsyncIterator[dict[str, str]]:
    """Addresses by bookie id."""
    opened: list[tuple[Bookie, BookieServer]] = []
    addresses = {}
    for number in range(count):
        disk = RealDisk(root / f"b{number}")
        identity, settings = BookieIdentity(f"b{number}"), StorageSettings(journal_segment_bytes=1 << 20)
        bookie = await Bookie.open(identity, settings, disk, RocksBlockIndex(root / f"b{number}" / "index"), Ports())
        server = BookieServer(bookie, "127.0.0.1", 0)
        await server.start()
        opened.append((bookie, server))
        addresses[f"b{number}"] = f"127.0.0.1:{server.port}"
    try:
        yield addresses
    finally:
        for bookie, server in opened:
            await server.aclose()
            await bookie.aclose()


@asynccontextmanager
async def ledger_client(addresses: dict[str, str], tree: MemoryTree) -> AsyncIterator[LedgerClient]:
    """A client with connections of its own, as another process would have."""
    ports, store = Ports(), MemoryStore(tree)
    connections = {name: GrpcConnection(name, address) for name, address in addresses.items()}
    placement = RackAwarePlacement(lambda: list(addresses), ports.random)
    client = LedgerClient(Registry(dict(connections)), ledger_records(store), LedgerIds(store), placement, LedgerSettings(), ports)
    try:
        yield client
    finally:
        await client.aclose()
        for connection in connections.values():
            await connection.aclose()


async def append(writer: LedgerWriter, *payloads: Buffer) -> EntryGroup:
    done: asyncio.Future[EntryGroup] = asyncio.get_running_loop().create_future()

    def on_done(outcome: EntryGroup | Exception) -> None:
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    writer.append(payloads, on_done)
    return await done


async def read_all(client: LedgerClient, ledger_id: int, last: int) -> list[bytes]:
    reader = await client.open_reader(ledger_id)
    payloads: list[bytes] = []
    while len(payloads) <= last:
        for group in await reader.read(len(payloads), last, max_bytes=1 << 20):
            payloads += [bytes(payload) for payload in group.payloads()]
    return payloads


async def test_what_was_appended_over_grpc_is_read_back_by_another_client(tmp_path: Path) -> None:
    tree = MemoryTree()
    async with bookies(tmp_path, 3) as addresses, ledger_client(addresses, tree) as writing:
        writer = await writing.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
        payloads = [bytes([number % 251]) * (number * 37) for number in range(300)] + [b"x" * 5_000_000]
        for start in range(0, len(payloads), 30):
            await append(writer, *payloads[start : start + 30])
        end = await writer.close()
        assert end.last_entry_id == 300
        async with ledger_client(addresses, tree) as reading:
            assert await read_all(reading, writer.ledger_id, 300) == payloads


async def test_the_largest_entry_that_brokers_may_be_set_to_fits_beside_the_largest_chunk(tmp_path: Path) -> None:
    """`max_message_bytes` is bounded by what one gRPC message takes: a chunk of a scan may be exceeded by one entry."""
    largest = BrokerSettings.model_json_schema()["properties"]["max_message_bytes"]["maximum"]
    entry_bytes = BrokerSettings(max_message_bytes=largest).max_frame_bytes
    chunk_bytes = SCAN_CHUNK_BYTES[-1]
    tree = MemoryTree()
    async with bookies(tmp_path, 1) as addresses, ledger_client(addresses, tree) as client:
        writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1, custom={})
        sizes = [chunk_bytes - 1000 - entry_bytes, entry_bytes, entry_bytes]
        for size in sizes:
            await append(writer, b"x" * size)
        await writer.close()
        assert [len(payload) for payload in await read_all(client, writer.ledger_id, 2)] == sizes
        connection = GrpcConnection("b0", addresses["b0"])
        request = ReadRequest(writer.ledger_id, 0, 2, 1 << 40, scan=True, chunk_bytes=chunk_bytes)
        chunks = [sum(len(group.data) for group in answer.groups) async for answer in connection.read(request)]
        assert max(chunks) > chunk_bytes - 1000 + entry_bytes
        await connection.aclose()


async def test_recovery_over_grpc_fences_the_writer_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    tree = MemoryTree()
    async with bookies(tmp_path, 3) as addresses, ledger_client(addresses, tree) as writing:
        writer = await writing.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
        await append(writer, b"one", b"two")
        async with ledger_client(addresses, tree) as recovering:
            end = await recovering.recover(writer.ledger_id)
            assert end.last_entry_id == 1
            with pytest.raises(LedgerFencedError):
                await append(writer, b"too late")
            assert await read_all(recovering, writer.ledger_id, 1) == [b"one", b"two"]
