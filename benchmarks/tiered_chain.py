"""What does a topic of 20,000 offloaded ledgers cost on ZooKeeper: to open it, to seek in it, to plan a scan of it?

The chain is written into the metadata of a running cluster. Its ledgers are neither on bookies nor in a bucket: none of these reads
an entry. With --on-bookies the ledgers have records, as between an upload and the deletion from bookies: then a plan reads
them. `open_s` is the call of the admin API that opens the topic and creates a subscription, `seek_ms` a reset of it to an entry
somewhere in the chain, saved in metadata.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
import urllib.request
from typing import Any

from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line
from benchmarks.scan_planning import AT_ONCE, ENTRIES, ENTRY_BYTES, closed_ledger, keep_everything
from cepheid_decode import PlanSource, ReadMode, ScanRequest, ScanSpec, TopicSelection
from cepheid_metadata import (
    Chain,
    ChainLedger,
    LedgerIdCounter,
    OffloadedLedger,
    TopicRecord,
    keys,
    ledger_records,
    topic_records,
)
from cepheid_metadata.chain_pages import create_chain
from cepheid_metadata.open_store import open_store
from cepheid_ports import Ports
from cepheid_scan.plan_scan import plan_scan
from cepheid_wire import TopicName

FIRST_LEDGER_ID = 1_000_000
PLANS = 3


async def write_topic(metadata_url: str, name: TopicName, count: int, *, on_bookies: bool) -> None:
    store = await open_store(metadata_url, Ports())
    try:
        ids = range(FIRST_LEDGER_ID, FIRST_LEDGER_ID + count)
        for first in range(0, count if on_bookies else 0, AT_ONCE):
            await asyncio.gather(
                *(ledger_records(store).create(each, closed_ledger(each)) for each in ids[first : first + AT_ONCE])
            )
        found = await store.get(keys.LEDGER_IDS_KEY)
        counter = LedgerIdCounter(next_ledger_id=ids.stop + 1_000).encode()
        if found is None:
            await store.create(keys.LEDGER_IDS_KEY, counter)
        else:
            await store.put(keys.LEDGER_IDS_KEY, counter, found.version)
        await topic_records(store).create(name, TopicRecord(created_at_ms=1))
        now_ms = Ports().wall_ms()
        recorded = tuple(
            ChainLedger(ledger_id=each, entries=ENTRIES, size_bytes=ENTRIES * ENTRY_BYTES, closed_at_ms=now_ms) for each in ids
        )
        copies = {each: copy_of(name, each, now_ms, on_bookies=on_bookies) for each in ids}
        chain = Chain(incarnation="bench", epoch=1, ledgers=recorded, offloaded=copies, messages=dict.fromkeys(ids, ENTRIES))
        await create_chain(store, name, chain)
    finally:
        await store.aclose()


def copy_of(name: TopicName, ledger_id: int, now_ms: int, *, on_bookies: bool) -> OffloadedLedger:
    url = f"s3://bucket/prefix/{name.namespace}/{name.local_name}/{ledger_id:020d}-{random.getrandbits(64):016x}.parquet?region=eu"
    return OffloadedLedger(
        url=url,
        started_at_ms=now_ms,
        complete=True,
        completed_at_ms=now_ms,
        object_bytes=ENTRIES * ENTRY_BYTES // 2,
        on_bookies=on_bookies,
    )


def call(method: str, url: str, body: object = None) -> float:
    """Seconds that a call of the admin API takes."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    began = time.perf_counter()
    urllib.request.urlopen(request, timeout=120).close()
    return time.perf_counter() - began


def measure(cluster: Cluster, name: TopicName, count: int, seeks: int) -> dict[str, Any]:
    admin_url = cluster.processes.admin_urls[0]
    subscription = f"{admin_url}/admin/v2/persistent/{name.namespace}/{name.local_name}/subscription/bench"
    open_s = call("PUT", subscription)
    seek_s: list[float] = []
    rng = random.Random(1)
    for _ in range(seeks):
        place = {"ledgerId": FIRST_LEDGER_ID + rng.randrange(count), "entryId": rng.randrange(ENTRIES)}
        seek_s.append(call("POST", f"{subscription}/resetcursor", place))
    request = ScanRequest(
        PlanSource(service_url=cluster.url), TopicSelection((str(name),)), ScanSpec(ReadMode.MESSAGES, ("value",))
    )
    plan_s: list[float] = []
    cpu_s, own_cpu_s = cluster.cpu_s(), time.process_time()
    for _ in range(PLANS):
        began = time.perf_counter()
        tasks, _, plan = plan_scan(request)
        plan_s.append(time.perf_counter() - began)
    assert len(plan.topics[0].ledgers) == count + 1
    return {
        "open_s": round(open_s, 3),
        "broker_plan_cpu_s": round((cluster.cpu_s() - cpu_s) / PLANS, 2),
        "reader_plan_cpu_s": round((time.process_time() - own_cpu_s) / PLANS, 2),
        "seek_ms": round(1000 * percentile(seek_s, 0.99), 1),
        "seek_ms_p50": round(1000 * percentile(seek_s, 0.5), 1),
        "plan_s": round(percentile(plan_s, 0.5), 3),
        "tasks": len(tasks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--ledgers", type=int, default=20_000)
    parser.add_argument("--on-bookies", action="store_true", help="the ledgers have not left the bookies yet")
    parser.add_argument("--seeks", type=int, default=100)
    arguments = parser.parse_args()
    with Cluster(arguments) as cluster:
        name = TopicName.parse("persistent://public/default/tiered-chain")
        keep_everything(cluster.processes.admin_urls[0])
        asyncio.run(write_topic(cluster.processes.metadata_url, name, arguments.ledgers, on_bookies=arguments.on_bookies))
        figures = measure(cluster, name, arguments.ledgers, arguments.seeks)
        print_line(
            "tiered_chain",
            figures=figures,
            load={"ledgers": arguments.ledgers, "on_bookies": arguments.on_bookies},
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
