"""Readers that drain ledgers from the bookies as brokers do: 1 MiB at a time, each ledger in sequence.

A process of its own: `python -m benchmarks.ledger_drain METADATA_URL READERS CLASS LEDGER…` prints megabytes and seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from benchmarks import load
from benchmarks.repair_cluster import ledger_client
from benchmarks.scheduling import enter_class

READ_BYTES = 1 << 20


async def drain(metadata_url: str, readers: int, ledger_ids: Sequence[int]) -> dict[str, float]:
    left = iter(ledger_ids)
    size_bytes = 0

    async with ledger_client(metadata_url, list) as client:

        async def read_in_turn() -> None:
            nonlocal size_bytes
            for ledger_id in left:
                reader = await client.open_reader(ledger_id)
                position = 0
                while position <= reader.known_end:
                    groups = await reader.read(position, reader.known_end, max_bytes=READ_BYTES)
                    size_bytes += sum(group.size_bytes for group in groups)
                    position = groups[-1].last_entry_id + 1

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(readers):
                group.create_task(read_in_turn())
        return {"mb": size_bytes / 1e6, "seconds": time.perf_counter() - started}


def main() -> None:
    metadata_url, readers, scheduling, *ledger_ids = sys.argv[1:]
    enter_class(scheduling)
    print(json.dumps(load.run(drain(metadata_url, int(readers), [int(ledger_id) for ledger_id in ledger_ids]))))


if __name__ == "__main__":
    main()
