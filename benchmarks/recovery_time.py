"""How long does it take to recover a ledger whose writer died? Of 1,000 entries and of 1,000,000: it must not depend on the length.

a process of its own:  create ──► append ──► "all are answered" ──► SIGKILL
this one:              recover ──► the end is in metadata
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks import load
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line
from benchmarks.server import ServerFailedError

GROUP_ENTRIES = 100
WINDOW_BYTES = 8 << 20


@asynccontextmanager
async def ledger_client(metadata_url: str) -> AsyncIterator[Any]:
    """As a broker has it."""
    from cepheid_ledger import LedgerClient, LedgerSettings, RackAwarePlacement
    from cepheid_ledger.bookie_directory import BookieDirectory
    from cepheid_metadata import LedgerIds, ledger_records
    from cepheid_metadata.open_store import open_store
    from cepheid_ports import Ports

    ports = Ports()
    settings = LedgerSettings()
    store = await open_store(metadata_url, ports)
    directory = BookieDirectory(store, ports)
    await directory.start()
    placement = RackAwarePlacement(directory.writable, ports.random, settings.quarantine_s)
    client = LedgerClient(directory, ledger_records(store), LedgerIds(store), placement, settings, ports)
    try:
        yield client
    finally:
        await client.aclose()
        await directory.aclose()
        await store.aclose()


async def write_and_wait(metadata_url: str, entries: int, entry_bytes: int) -> None:
    """The writer's process: says the ledger's id once every entry is answered, and then waits to be killed."""
    async with ledger_client(metadata_url) as client:
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        payloads = [bytes(entry_bytes)] * GROUP_ENTRIES

        def on_done(outcome: Any) -> None:
            if done.done():
                return  # the last groups are answered one by one, after the last entry is confirmed
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            elif writer.last_add_confirmed == entries - 1:
                done.set_result(None)
            else:
                refill()

        def refill() -> None:
            while writer.in_flight_bytes < WINDOW_BYTES and writer.last_add_pushed < entries - 1:
                writer.append(payloads, on_done)

        refill()
        await done
        print(writer.ledger_id, flush=True)
        await asyncio.Event().wait()


def orphan_ledger(metadata_url: str, entries: int, entry_bytes: int) -> int:
    """Id of a ledger of so many entries, whose writer was killed."""
    command = [sys.executable, "-m", "benchmarks.recovery_time", "--write", str(entries), metadata_url]
    with subprocess.Popen([*command, "--entry-bytes", str(entry_bytes)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    if not said:
        raise ServerFailedError("the writer ended before its ledger was written")
    return int(said)


async def recover(metadata_url: str, ledger_id: int, entries: int) -> float:
    """Seconds until the ledger is closed."""
    async with ledger_client(metadata_url) as client:
        started = time.perf_counter()
        closed = await client.recover(ledger_id)
        elapsed_s = time.perf_counter() - started
    if closed.last_entry_id != entries - 1:
        raise ServerFailedError(f"ledger {ledger_id} was closed at {closed.last_entry_id}; {entries} entries were answered")
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--write", nargs=2, metavar=("ENTRIES", "URL"), help=argparse.SUPPRESS)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--few-entries", type=int, default=1_000)
    parser.add_argument("--entry-bytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.write is not None:
        load.run(write_and_wait(arguments.write[1], int(arguments.write[0]), arguments.entry_bytes))
        return
    times_s: dict[int, list[float]] = {arguments.few_entries: [], arguments.entries: []}
    with Cluster(arguments) as cluster:
        url = cluster.processes.metadata_url
        for _ in range(arguments.rounds):
            for entries, times in times_s.items():
                ledger_id = orphan_ledger(url, entries, arguments.entry_bytes)
                times.append(load.run(recover(url, ledger_id, entries)))
        print_line(
            "recovery_time",
            figures={
                "recovered_s": round(max(times_s[arguments.entries]), 3),
                "recovered_few_s": round(max(times_s[arguments.few_entries]), 3),
                "recovered_s_p50": round(percentile(times_s[arguments.entries], 0.5), 3),
                "recovered_few_s_p50": round(percentile(times_s[arguments.few_entries], 0.5), 3),
            },
            load={
                "entries": arguments.entries,
                "few_entries": arguments.few_entries,
                "entry_bytes": arguments.entry_bytes,
                "rounds": arguments.rounds,
            },
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
