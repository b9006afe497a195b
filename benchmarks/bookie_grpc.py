"""What does a bookie in its own process take from one ledger client over gRPC, durably? Entries of 1 KB, then of 64 KB."""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.report import print_line
from benchmarks.server import ServerFailedError

BOOKIE_ID = "bench-bookie"


async def serve_bookie(directory: Path) -> None:
    """The bookie's process: prints its port and serves until SIGTERM."""
    from cepheid_bookie import Bookie, BookieIdentity, RealDisk, StorageSettings
    from cepheid_bookie.grpc_server import BookieServer
    from cepheid_bookie.rocks_index import RocksBlockIndex
    from cepheid_ports import Ports

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    disk, index = RealDisk(directory / "bookie"), RocksBlockIndex(directory / "index")
    bookie = await Bookie.open(BookieIdentity(BOOKIE_ID), StorageSettings(), disk, index, Ports())
    server = BookieServer(bookie, "127.0.0.1", 0)
    await server.start()
    print(server.port, flush=True)
    await stop.wait()
    await server.aclose()
    await bookie.aclose()


class OneConnection:
    """A registry of one bookie."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def get(self, _: str) -> Any:
        return self._connection


async def append_small_and_large(port: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Durable entries a second of 1 KB and of 64 KB, by one client."""
    from cepheid_ledger import LedgerClient, LedgerSettings, RackAwarePlacement
    from cepheid_ledger.grpc_connection import GrpcConnection
    from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree, ledger_records
    from cepheid_ports import Ports

    ports = Ports()
    connection = GrpcConnection(BOOKIE_ID, f"127.0.0.1:{port}")
    store = MemoryStore(MemoryTree())
    placement = RackAwarePlacement(lambda: [BOOKIE_ID], ports.random)
    client = LedgerClient(OneConnection(connection), ledger_records(store), LedgerIds(store), placement, LedgerSettings(), ports)
    try:
        small = await append(client, 1000, arguments.group_entries, arguments.window_bytes, arguments.seconds)
        return small, await append(client, 64_000, 1, arguments.window_bytes, arguments.seconds)
    finally:
        await client.aclose()
        await connection.aclose()


async def append(client: Any, entry_bytes: int, group_entries: int, window_bytes: int, seconds: float) -> float:
    """Entries a second to a new ledger, with `window_bytes` always on their way."""
    writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1, custom={})
    payloads = [bytes(entry_bytes)] * group_entries
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    entries = 0
    measuring = True

    def on_done(outcome: Any) -> None:
        nonlocal entries
        if isinstance(outcome, Exception):
            if not failed.done():
                failed.set_exception(outcome)
            return
        entries += len(outcome)
        refill()

    def refill() -> None:
        while measuring and writer.in_flight_bytes < window_bytes:
            writer.append(payloads, on_done)

    refill()
    await load.run_unless_failed(failed, 1.0)
    counted, started = entries, time.perf_counter()
    await load.run_unless_failed(failed, seconds)
    rate_per_s = (entries - counted) / (time.perf_counter() - started)
    measuring = False
    await writer.aclose()
    failed.cancel()
    return rate_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--window-bytes", type=int, default=16 << 20, help="bytes on their way")
    parser.add_argument("--group-entries", type=int, default=32, help="1 KB entries appended at once")
    parser.add_argument("--data", help="parent directory of the bookie's data")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        load.run(serve_bookie(arguments.serve))
        return
    with tempfile.TemporaryDirectory(prefix="cepheid-bench-", dir=arguments.data) as directory:
        command = [sys.executable, "-m", "benchmarks.bookie_grpc", "--serve", directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bookie:
            try:
                assert bookie.stdout is not None
                if not (said := bookie.stdout.readline()):
                    raise ServerFailedError("the bookie's process ended before it served")
                small, large = load.run(append_small_and_large(int(said), arguments))
            finally:
                bookie.send_signal(signal.SIGTERM)
    print_line(
        "bookie_grpc",
        figures={
            "entries_per_s_1kb": round(small),
            "mb_per_s_1kb": round(small * 1000 / 1e6, 1),
            "entries_per_s_64kb": round(large),
            "mb_per_s_64kb": round(large * 64_000 / 1e6, 1),
        },
        load={
            "ledgers": 1,
            "window_bytes": arguments.window_bytes,
            "group_entries": {"1kb": arguments.group_entries, "64kb": 1},
            "seconds": arguments.seconds,
        },
        settings={"ensemble": 1, "transport": "gRPC, one stream"},
    )


if __name__ == "__main__":
    main()
