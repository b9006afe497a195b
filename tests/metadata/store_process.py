"""A RocksDB store in a process of its own, to be killed or to run out of space: `python -m tests.metadata.store_process`."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

from cepheid_metadata import SessionState, StoreUnavailableError
from cepheid_metadata.rocks_store import RocksStore
from cepheid_ports import Ports


class StoreProcess:
    """The running process, seen from the test: it writes lines."""

    def __init__(self, what: str, directory: Path) -> None:
        self._process = subprocess.Popen(self.command(what, directory), stdout=subprocess.PIPE)

    @staticmethod
    def command(what: str, directory: Path) -> list[str]:
        return [sys.executable, "-m", "tests.metadata.store_process", what, str(directory)]

    def read_lines(self, count: int) -> list[str]:
        assert self._process.stdout is not None
        return [self._process.stdout.readline().decode().strip() for _ in range(count)]

    def kill(self) -> list[str]:
        """SIGKILL; what it had written until then and was not read yet, whole lines only."""
        self._process.kill()
        said, _ = self._process.communicate()
        return [line.decode() for line in said.split(b"\n")[:-1]]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # unbuffered: said is said, also when killed in the next moment


async def create_for_ever(directory: Path) -> None:
    """Says each key once it is acknowledged, and puts each a second time."""
    store = await RocksStore.open(directory, Ports())

    async def creator(name: int) -> None:
        n = 0
        while True:
            key = await store.create(f"/made/{name}/{n:06}", b"x" * 200)
            say("created", key)
            await store.put(key, b"again", 0)
            say("put", key)
            n += 1

    await asyncio.gather(*(creator(name) for name in range(20)))


def limit_file_bytes(limit: int) -> None:
    """A file size limit stands for the full disk: it needs no privileges."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


async def run_out_of_space(directory: Path) -> None:
    """Says what was observed."""
    store = await RocksStore.open(directory, Ports(), retry_s=0.05)
    connected = asyncio.Event()
    store.subscribe(lambda state: connected.set() if state is SessionState.CONNECTED else connected.clear())
    watch = await store.watch("/never")
    for n in range(50):
        await store.create(f"/made/{n:02}", os.urandom(5_000))

    limit_file_bytes(100_000)  # less than the log holds: neither a write nor the reopening can succeed
    for _ in range(2):
        try:
            await store.create("/made/late", b"")
        except StoreUnavailableError as error:
            say("refused", error.retriable, error.outcome_unknown, error)
    say("state", store.session_state.name)
    say("readable", len(await store.children("/made")), await store.exists("/made/00"), await store.exists("/made/late"))

    limit_file_bytes(resource.RLIM_INFINITY)
    await asyncio.wait_for(connected.wait(), 10)
    say("state", store.session_state.name)
    say("kept", len(await store.children("/made")), watch.has_fired)
    await store.create("/made/late", b"")
    await store.aclose()
    say("closed")


async def run_short_of_space(directory: Path) -> None:
    """As above, but there is room enough to reopen at once: one write fails, the next one works."""
    store = await RocksStore.open(directory, Ports())
    limit_file_bytes(100_000)
    refused = 0
    for n in range(45):
        try:
            await store.create(f"/made/{n:03}", os.urandom(5_000))
        except StoreUnavailableError:
            refused += 1
            await store.create(f"/made/{n:03}", os.urandom(5_000))
    say("refused", refused, store.session_state.name, len(await store.children("/made")))
    await store.aclose()


async def main(what: str, directory: Path) -> None:
    match what:
        case "open":
            await (await RocksStore.open(directory, Ports())).aclose()
        case "create-for-ever":
            await create_for_ever(directory)
        case "run-out-of-space":
            await run_out_of_space(directory)
        case "run-short-of-space":
            await run_short_of_space(directory)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
