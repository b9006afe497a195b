"""How long does a scan take to plan: a topic of 1,000 and of 10,000 closed ledgers, from a service URL alone to tasks?

The ledgers are written into the metadata of a stopped server, as closed as a broker leaves them: planning reads nothing else. Each
plan is made by a planner that knows nothing yet; `again_ms` is that of one that has planned the topic before, as a stream does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import time
import urllib.request
from contextlib import closing
from pathlib import Path

from benchmarks.report import percentile, print_line
from benchmarks.server import Server, add_arguments
from cepheid_decode import PlanSource, ReadMode, ScanRequest, ScanSpec, TopicSelection
from cepheid_metadata import (
    Chain,
    ChainLedger,
    Fragment,
    LedgerIdCounter,
    LedgerMetadata,
    LedgerState,
    TopicRecord,
    chain_records,
    keys,
    ledger_records,
    topic_records,
)
from cepheid_metadata.rocks_store import RocksStore
from cepheid_ports import Ports
from cepheid_scan.open_planner import open_planner
from cepheid_scan.plan_scan import plan_scan
from cepheid_wire import TopicName

FIRST_LEDGER_ID = 10_000
ENTRIES, ENTRY_BYTES = 1_000, 64_000  # of each ledger
AT_ONCE = 500


async def write_topics(directory: Path, sizes: list[int]) -> None:
    """Topics `ledgers-N`, each with a chain of N closed ledgers."""
    store = await RocksStore.open(directory, Ports())
    try:
        ledger_id = FIRST_LEDGER_ID
        for size in sizes:
            name = TopicName.parse(f"ledgers-{size}")
            ids = range(ledger_id, ledger_id + size)
            for first in range(0, size, AT_ONCE):
                part = ids[first : first + AT_ONCE]
                await asyncio.gather(*(ledger_records(store).create(each, closed_ledger(each)) for each in part))
            await topic_records(store).create(name, TopicRecord(created_at_ms=1))
            now_ms = Ports().wall_ms()
            recorded = [
                ChainLedger(ledger_id=each, entries=ENTRIES, size_bytes=ENTRIES * ENTRY_BYTES, closed_at_ms=now_ms) for each in ids
            ]
            await chain_records(store).create(name, Chain(incarnation="bench", epoch=1, ledgers=tuple(recorded)))
            ledger_id += size
        counter = LedgerIdCounter(next_ledger_id=ledger_id + 1000)
        await store.create(keys.LEDGER_IDS_KEY, counter.encode())  # a server without topics has given out none
    finally:
        await store.aclose()


def closed_ledger(ledger_id: int) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=ledger_id,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.CLOSED,
        fragments=(Fragment(first_entry_id=0, ensemble=("bookie-1", "bookie-2", "bookie-3")),),
        last_entry_id=ENTRIES - 1,
        length_bytes=ENTRIES * ENTRY_BYTES,
        password=os.urandom(16),
        creation_token=1,
        created_at_ms=1,
        custom={"topic": "bench"},
    )


def keep_everything(admin_url: str) -> None:
    body = json.dumps({"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}).encode()
    url = f"{admin_url}/admin/v2/namespaces/public/default/retention"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    urllib.request.urlopen(request, timeout=60).close()


def measure(source: PlanSource, size: int, rounds: int) -> dict[str, float]:
    request = ScanRequest(source, TopicSelection((f"ledgers-{size}",)), ScanSpec(ReadMode.MESSAGES, ("value",)))
    took: list[float] = []
    for _ in range(rounds + 1):  # the first opens the topic
        began = time.perf_counter()
        tasks, _, plan = plan_scan(request)
        took.append(time.perf_counter() - began)
    assert len(plan.topics[0].ledgers) == size + 1
    assert sum(piece.last_entry_id - piece.first_entry_id + 1 for task in tasks for piece in task.pieces) == size * ENTRIES
    again: list[float] = []
    with closing(open_planner(source)) as planner:
        for _ in range(rounds + 1):
            began = time.perf_counter()
            planner.plan([plan.topics[0].topic])
            again.append(time.perf_counter() - began)
    return {
        f"plan_{size}_s": round(percentile(took[1:], 0.5), 3),
        f"plan_{size}_s_first": round(took[0], 3),
        f"again_{size}_ms": round(1000 * percentile(again[1:], 0.5), 1),
        f"tasks_{size}": len(tasks),
        f"task_bytes_{size}_max": max(len(pickle.dumps(task)) for task in tasks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, bookies=3)
    parser.add_argument("--ledgers", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.url is not None:
        parser.error("it writes into the metadata of a server of its own: without --url")
    with Server(arguments) as server:
        assert server.admin_url is not None
        server.metric("none")  # the admin API opens a moment after the protocol's port
        keep_everything(server.admin_url)
        server.stop()
        asyncio.run(write_topics(server.root / "data" / "metadata", arguments.ledgers))
        server.start()
        server.metric("none")
        figures: dict[str, float] = {}
        for size in arguments.ledgers:
            figures |= measure(PlanSource(service_url=server.url), size, arguments.rounds)
        load = {"ledgers": arguments.ledgers, "entries_per_ledger": ENTRIES, "rounds": arguments.rounds}
        print_line("scan_planning", figures=figures, load=load, settings=server.settings)


if __name__ == "__main__":
    main()
