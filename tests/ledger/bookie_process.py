"""A bookie in a process of its own, for tests that kill or pause it: python -m tests.ledger.bookie_process ID DIRECTORY.

Prints its port and serves until it is killed. `BookieProcesses` starts and breaks several.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from cepheid_ledger.grpc_connection import GrpcConnection
from cepheid_rpc import BookieConnection


async def serve(bookie_id: str, directory: Path) -> None:
    from cepheid_bookie import Bookie, BookieIdentity, RealDisk, StorageSettings
    from cepheid_bookie.grpc_server import BookieServer
    from cepheid_bookie.rocks_index import RocksBlockIndex
    from cepheid_ports import Ports

    identity = BookieIdentity(bookie_id, "test")
    settings = StorageSettings(journal_segment_bytes=4 << 20, min_free_journal_bytes=0, min_free_data_bytes=0)
    bookie = await Bookie.open(identity, settings, RealDisk(directory / "data"), RocksBlockIndex(str(directory / "index")), Ports())
    server = BookieServer(bookie, "127.0.0.1", 0)
    await server.start()
    print(server.port, flush=True)
    await asyncio.get_running_loop().create_future()


class BookieProcesses:
    """Connections by id, like a directory of bookies; a bookie that starts again is found at its new port."""

    def __init__(self, directory: Path, bookie_ids: Sequence[str]) -> None:
        self.bookie_ids = list(bookie_ids)
        self._directory = directory
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._connections: dict[str, GrpcConnection] = {}

    async def __aenter__(self) -> BookieProcesses:
        await asyncio.gather(*(self.start(bookie_id) for bookie_id in self.bookie_ids))
        return self

    async def __aexit__(self, *_: object) -> None:
        for bookie_id in list(self._processes):
            await self.kill(bookie_id)
        for connection in self._connections.values():
            await connection.aclose()

    async def start(self, bookie_id: str) -> None:
        command = [sys.executable, "-m", "tests.ledger.bookie_process", bookie_id, str(self._directory / bookie_id)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        self._processes[bookie_id] = process
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        if (old := self._connections.pop(bookie_id, None)) is not None:
            await old.aclose()
        self._connections[bookie_id] = GrpcConnection(bookie_id, f"127.0.0.1:{port}")

    async def kill(self, bookie_id: str) -> None:
        process = self._processes.pop(bookie_id)
        process.kill()
        await process.wait()

    def pause(self, bookie_id: str) -> None:
        self._processes[bookie_id].send_signal(signal.SIGSTOP)

    def get(self, bookie_id: str) -> BookieConnection:
        return self._connections[bookie_id]


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
