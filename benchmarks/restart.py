"""How long does a bookie take to start, and how much memory, with much data and a long journal? Does more data make it longer?

A bookie is filled with entries of 1 KB in 10,000 ledgers and checkpointed. Then entries are written that stay in the journal above
the mark, and the process ends as if it was killed. The next process replays them: its time from its start to ready, and its largest
memory. Then as much data is written again, with the same journal. The page cache keeps the files if it is large enough.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.compaction import IN_FLIGHT
from benchmarks.repair_pace import KEY, AddsRefusedError
from benchmarks.report import print_line

ENTRY_BYTES = 1000
GROUP_ENTRIES = 50


async def write(bookie: Any, first_entry_id: int, size_bytes: int, ledgers: int) -> int:
    """Write so many bytes to the ledgers in turn; return the id that follows the last entry of each."""
    from cepheid_rpc import AddRequest, Status, encode_group

    room = asyncio.Semaphore(4 * IN_FLIGHT)
    refused: list[Any] = []

    def on_answers(answers: Any) -> None:
        refused.extend(answer for answer in answers if answer.status is not Status.OK)
        room.release()

    payloads = [bytes(ENTRY_BYTES)] * GROUP_ENTRIES
    rounds = max(1, size_bytes // (ENTRY_BYTES * GROUP_ENTRIES * ledgers))
    for number in range(rounds):
        first = first_entry_id + number * GROUP_ENTRIES
        for ledger_id in range(ledgers):
            await room.acquire()
            group = encode_group(ledger_id, first, first - 1, first * ENTRY_BYTES, payloads)
            bookie.add([AddRequest(group, KEY)], lambda answers: on_answers(answers))  # its own: answers of one callback are joined
    for _ in range(4 * IN_FLIGHT):
        await room.acquire()
    if refused:
        raise AddsRefusedError(f"{len(refused)} ranges of writes were refused, first {refused[0]}")
    return first_entry_id + rounds * GROUP_ENTRIES


async def open_bookie(directory: Path, **changes: Any) -> Any:
    from cepheid_bookie import Bookie, BookieIdentity, RealDisk, StorageSettings
    from cepheid_bookie.rocks_index import RocksBlockIndex
    from cepheid_ports import Ports

    index = RocksBlockIndex(directory / "index")
    return await Bookie.open(BookieIdentity("bench-bookie"), StorageSettings(**changes), RealDisk(directory), index, Ports())


async def fill(arguments: argparse.Namespace) -> None:
    """In a process of its own: the data, checkpointed, then the journal; ends without a close."""
    directory, journal_bytes = Path(arguments.directory), int(arguments.journal_gigabytes * 1e9)
    bookie = await open_bookie(directory)
    end = await write(bookie, arguments.first_entry_id, int(arguments.gigabytes * 1e9), arguments.ledgers)
    await bookie.checkpoint()
    await bookie.aclose()
    # A cache that takes it all, and no checkpoint: the mark stays below what follows.
    no_checkpoint = {"checkpoint_interval_s": 3600.0, "checkpoint_journal_bytes": 1 << 40, "write_cache_bytes": 8 * journal_bytes}
    bookie = await open_bookie(directory, **no_checkpoint)
    end = await write(bookie, end, journal_bytes, max(1, arguments.ledgers // 10))
    print(end, flush=True)
    os._exit(0)


async def restart(arguments: argparse.Namespace) -> None:
    """In a process of its own: open, say so, end."""
    bookie = await open_bookie(Path(arguments.directory))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(json.dumps({"peak_mb": round(peak_mb)}), flush=True)
    await bookie.aclose()


def run_step(step: str, directory: str, first_entry_id: int, arguments: argparse.Namespace) -> tuple[str, float]:
    """Run a step in another process; return its line and the seconds until it came."""
    words = ["--step", step, "--directory", directory, "--first-entry-id", str(first_entry_id), "--ledgers", str(arguments.ledgers)]
    words += ["--gigabytes", str(arguments.gigabytes), "--journal-gigabytes", str(arguments.journal_gigabytes)]
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "benchmarks.restart", *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took_s = time.perf_counter() - started
        if process.wait() != 0:
            raise RuntimeError(f"the step {step} ended with {process.returncode}")
    return line, took_s


def measure(directory: str, arguments: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    end = 0
    for name in ("", "_twice_the_data"):
        line, _ = run_step("fill", directory, end, arguments)
        end = int(line)
        line, ready_s = run_step("restart", directory, 0, arguments)
        figures[f"ready_s{name}"] = round(ready_s, 2)
        figures[f"peak_mb{name}"] = json.loads(line)["peak_mb"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0, help="of entries in the logs")
    parser.add_argument("--journal-gigabytes", type=float, default=1.0, help="above the mark")
    parser.add_argument("--ledgers", type=int, default=10_000)
    parser.add_argument("--data", help="parent directory of the bookie's data")
    parser.add_argument("--step", choices=("fill", "restart"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--first-entry-id", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step is not None:
        asyncio.run((fill if arguments.step == "fill" else restart)(arguments))
        return
    with tempfile.TemporaryDirectory(prefix="cepheid-bench-", dir=arguments.data) as directory:
        figures = measure(directory, arguments)
    print_line(
        "restart",
        figures=figures,
        load={
            "gigabytes": arguments.gigabytes,
            "journal_gigabytes": arguments.journal_gigabytes,
            "ledgers": arguments.ledgers,
            "entry_bytes": ENTRY_BYTES,
        },
        settings={"bookie": "in a process of its own", "all": "default"},
    )


if __name__ == "__main__":
    main()
