"""How much memory does automatic repair take in a bookie's process when a cluster has many ledgers, and all of them lack copies?

Records of ledgers are written into metadata; their bookies hold no entries. One of three bookies is killed, so every ledger is
marked, and none can be repaired for want of another bookie. The largest process with repair is compared with the largest one
without.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

from benchmarks import load
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.repair_cluster import VICTIM, load_average, peak_rss_mb
from benchmarks.report import print_line
from cepheid_metadata import Fragment, LedgerMetadata, LedgerState, audit_record, ledger_records
from cepheid_metadata.open_store import open_store
from cepheid_ports import Ports

FIRST_LEDGER_ID = 1
WRITTEN_TOGETHER = 200
BOOKIES = (VICTIM, "bookie-2", "bookie-3")
ZOOKEEPER_HEAP = "-Xmx1g"  # as many records and marks do not fit into that of `cepheid dev`
MARKED_LIMIT_S = 1200.0


def closed_ledger(ledger_id: int) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=ledger_id,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.CLOSED,
        fragments=(Fragment(first_entry_id=0, ensemble=BOOKIES),),
        last_entry_id=999,
        length_bytes=1_000_000,
        password=os.urandom(16),
        creation_token=1,
        created_at_ms=1,
        custom={"topic": "persistent://public/default/bench"},
    )


async def write_records(metadata_url: str, count: int) -> None:
    store = await open_store(metadata_url, Ports())
    try:
        records = ledger_records(store)
        for first in range(FIRST_LEDGER_ID, FIRST_LEDGER_ID + count, WRITTEN_TOGETHER):
            ids = range(first, min(first + WRITTEN_TOGETHER, FIRST_LEDGER_ID + count))
            await asyncio.gather(*(records.create(ledger_id, closed_ledger(ledger_id)) for ledger_id in ids))
    finally:
        await store.aclose()


async def short_ledgers(metadata_url: str) -> int:
    """Return how many ledgers the auditor found to lack copies."""
    store = await open_store(metadata_url, Ports())
    try:
        found = await audit_record(store).get(None)
        return 0 if found is None else found.record.short.ledgers
    finally:
        await store.aclose()


def peak_mb(arguments: argparse.Namespace, *, enabled: bool) -> tuple[float, dict[str, object]]:
    """Return the peak memory of the largest bookie process that lives, and the cluster's settings."""
    recovery: dict[str, Any] = {"enabled": enabled, "grace_s": 0.0}
    with Cluster(arguments, {"bookie": {"recovery": recovery}}) as cluster:
        url = cluster.processes.metadata_url
        load.run(write_records(url, arguments.ledgers))
        cluster.processes.kill(VICTIM)
        if enabled:
            cluster.wait_until(lambda: load.run(short_ledgers(url)) == arguments.ledgers, "every ledger is marked", MARKED_LIMIT_S)
        time.sleep(arguments.seconds)
        return max(peak_rss_mb(cluster, name) for name in BOOKIES[1:]), cluster.settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, bookies=3, brokers=0)
    parser.add_argument("--ledgers", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which workers try to repair, after all ledgers are marked")
    arguments = parser.parse_args()
    load_before = load_average()
    os.environ["_JAVA_OPTIONS"] = ZOOKEEPER_HEAP
    without_mb, _ = peak_mb(arguments, enabled=False)
    with_mb, settings = peak_mb(arguments, enabled=True)
    print_line(
        "repair_memory",
        figures={
            "more_mb": round(with_mb - without_mb, 1),
            "with_repair_mb": round(with_mb, 1),
            "without_repair_mb": round(without_mb, 1),
        },
        load={"ledgers": arguments.ledgers, "seconds": arguments.seconds, "load_average_before": load_before},
        settings=settings,
    )


if __name__ == "__main__":
    main()
