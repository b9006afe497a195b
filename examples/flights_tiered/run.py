"""The steps of `cepheid demo-tiered`.

an S3 server, ZooKeeper, 3 bookies and a broker run as processes
  ├─ all flights but a tail are published; a subscription has read a third of them
  ├─ offload is switched on ── the S3 server is paused in the middle of an upload ── SIGKILL of the broker ── both continue
  ├─ bookies keep nothing of the offloaded ledgers; the tail is published and stays on bookies
  ├─ everything is consumed again; DuckDB reads the bucket, Spark the topic; verify and sweep check the bucket
  └─ the cluster is stopped for good ── restore into a second, empty one ── the subscription continues where it was
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import cepheid.admin.sync
from cepheid_dev.local_cluster import LocalCluster
from cepheid_spark.java_check import find_java
from examples.flight_data import FlightEvent, load_flights
from examples.flights_spark.driver_process import REPOSITORY, DriverFailedError
from examples.flights_spark.expected import Expected, expect
from examples.flights_spark.publisher import FlightPublisher
from examples.flights_tiered import checks
from examples.flights_tiered.bucket_server import BUCKET, REGION, BucketServer
from examples.flights_tiered.consuming import Seen, consume, consume_with_cepheid
from examples.progress import wait_while_moving
from examples.pulsar_connection import connect
from examples.report import Check, print_report

TOPIC = "persistent://public/default/flights"
DIRECTORY = "cepheid/public/default/flights"
AUDIT = "audit"
EVENT_BYTES = 75
LEDGERS = 10
LEAST_LEDGER_BYTES = 64 << 10
TAIL = 0.02  # of the flights, published after the offload and never offloaded
READ_BY_AUDIT = 1 / 3
KEEP_S = 2
STALL_S = 90.0
COMMAND_S = 300.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    data_dir: Path
    limit: int | None = None


def run_demo_tiered(options: DemoOptions, console: Console) -> bool:
    """Run the demo to its end and print the report. Returns True when every check held."""
    find_java()
    events, expected = load_flights(options.limit), expect(options.limit)
    directory = options.data_dir.absolute()
    clusters = [LocalCluster(directory / name) for name in ("cluster", "second-cluster")]
    for cluster in clusters:
        if cluster.exists:  # from an earlier demo, which may have been killed
            cluster.down()
        shutil.rmtree(cluster.directory, ignore_errors=True)
    shutil.rmtree(directory / "tiered", ignore_errors=True)
    (directory / "tiered").mkdir(parents=True)
    console.print(f"{len(events):,} flights; data and logs in {options.data_dir}")
    bucket = BucketServer(directory / "tiered" / "s3.log")
    try:
        bucket.start()
        console.print(f"S3 server on {bucket.endpoint}, bucket {BUCKET}", soft_wrap=True)
        return _Demo(events, expected, clusters[0], clusters[1], bucket, directory / "tiered", console).run()
    finally:
        for cluster in clusters:
            if cluster.exists:
                cluster.down()
        bucket.close()


class _Demo:
    def __init__(
        self,
        events: list[FlightEvent],
        expected: Expected,
        cluster: LocalCluster,
        second: LocalCluster,
        bucket: BucketServer,
        directory: Path,
        console: Console,
    ) -> None:
        self._events = events
        self._expected = expected
        self._cluster = cluster
        self._second = second
        self._bucket = bucket
        self._directory = directory
        self._console = console
        self._checks: list[Check] = []
        self._figures: list[tuple[str, str]] = [("events", f"{len(events):,}")]
        self._tail = max(1, int(len(events) * TAIL))

    def run(self) -> bool:
        self._start(self._cluster)
        self._publish()
        self._offload_through_a_crash()
        self._publish_tail()
        self._consume_again()
        self._query()
        self._look_at_the_bucket()
        self._restore()
        return print_report(self._console, "Measured (everything on this machine)", self._figures, self._checks)

    @property
    def _body(self) -> list[FlightEvent]:
        return self._events[: -self._tail]

    def _start(self, cluster: LocalCluster) -> None:
        ledger_max_bytes = max(LEAST_LEDGER_BYTES, len(self._events) * EVENT_BYTES // LEDGERS)
        broker = {"managed_ledger": {"ledger_max_bytes": ledger_max_bytes}, "manifest_interval_s": 1.0}
        cluster.up(bookies=3, brokers=1, settings={"broker": broker})
        admin = cepheid.admin.sync.connect(cluster.admin_urls[0])
        admin.namespaces.set_retention("public/default", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})

    def _publish(self) -> None:
        publisher = FlightPublisher(self._cluster.service_url, TOPIC, self._directory / "client.log")
        started = time.monotonic()
        try:
            publisher.publish(self._body)
        finally:
            publisher.close()
        self._figures.append(("published", f"{len(self._body) / (time.monotonic() - started):,.0f} events/s"))
        self._audited = int(len(self._body) * READ_BY_AUDIT)
        seen = self._consume(self._cluster, AUDIT, self._audited, to_end=False)
        self._checks.append(checks.check_seen("a subscription reads the first third", seen, range(self._audited)))
        # Unloading ends the open ledger, so that all flights so far can be offloaded. The call after it opens the topic again.
        self._admin("PUT", "/admin/v2/persistent/public/default/flights/unload")
        self._admin("GET", "/admin/v2/persistent/public/default/flights/stats")

    def _offload_through_a_crash(self) -> None:
        before = self._stored_on_bookies()
        policy = f"{self._bucket.url},after-size=0,keep={KEEP_S}s"
        self._cepheid("namespaces", "set", "public/default", "offload", policy, admin=self._cluster)
        self._console.print(f"cepheid namespaces set public/default offload '{policy}'", soft_wrap=True, highlight=False)
        started = time.monotonic()
        self._wait("an offloaded ledger", lambda: self._chain()["complete"] > 0)
        self._bucket.pause()
        self._wait("an upload that is half done", lambda: self._chain()["begun"] > 0)
        at_kill = self._chain()
        broker = next(name for name in self._cluster.names() if name.startswith("broker"))
        self._cluster.kill(broker)
        self._console.print(
            f"[bold red]SIGKILL[/] of the broker in the middle of an upload, with {at_kill['complete']} of {at_kill['ended']} "
            "ledgers offloaded; starting it again"
        )
        self._bucket.resume()
        self._cluster.start(broker)
        self._admin("GET", "/admin/v2/persistent/public/default/flights/stats")  # opens the topic, which nobody uses now
        self._wait("the bookies to keep nothing", lambda: self._chain()["off_bookies"] == self._chain()["ended"] > 0)
        self._figures.append(("offloaded and deleted from bookies", f"{time.monotonic() - started:.1f} s"))
        chain = self._chain()
        self._wait("the bookies' ledgers to be deleted", lambda: not self._still_in_metadata(chain["ids"]))
        objects = [size for name, size in self._objects() if name.endswith(".parquet")]
        self._figures += [
            ("on bookies before", f"{before / 1e6:.1f} MB"),
            ("in the bucket", f"{sum(objects) / 1e6:.1f} MB in {len(objects)} objects"),
        ]
        self._checks += [
            checks.check_crash(at_kill),
            checks.check_offloaded(chain, len(objects)),
        ]

    def _publish_tail(self) -> None:
        self._admin("DELETE", "/admin/v2/namespaces/public/default/removeOffloadPolicies")
        publisher = FlightPublisher(self._cluster.service_url, TOPIC, self._directory / "client.log")
        try:
            publisher.publish(self._events[-self._tail :])
        finally:
            publisher.close()

    def _consume_again(self) -> None:
        started = time.monotonic()
        seen = consume_with_cepheid(self._cluster.service_url, TOPIC, "again", self._events, len(self._events))
        self._figures.append(("consumed again", f"{len(seen.ids) / (time.monotonic() - started):,.0f} events/s"))
        promise = "bucket and bookies give every event once, in order, unchanged"
        self._checks.append(checks.check_seen(promise, seen, range(len(self._events))))

    def _query(self) -> None:
        started = time.monotonic()
        rows = self._duckdb_delays()
        self._figures.append(("mean delays by DuckDB from the bucket", f"{time.monotonic() - started:.2f} s"))
        part = expect(len(self._body))
        self._checks.append(
            checks.check_carriers("DuckDB on the objects: mean delays per carrier equal the source file's", rows, part)
        )
        result = self._directory / "spark.json"
        with (self._directory / "spark.log").open("ab") as log:
            words = [self._cluster.service_url, TOPIC, str(result)]
            command = [sys.executable, "-m", "examples.flights_tiered.spark_driver", *words]
            done = subprocess.run(command, stdout=log, stderr=log, cwd=REPOSITORY, timeout=COMMAND_S, check=False)
        if done.returncode:
            raise DriverFailedError(f"the Spark driver ended with exit code {done.returncode}: see {self._directory / 'spark.log'}")
        found = json.loads(result.read_text())
        self._figures.append(("count and mean delays by Spark", f"{found['seconds']:.2f} s"))
        self._checks += checks.check_spark(found, self._expected)

    def _duckdb_delays(self) -> list[tuple[str, int, float]]:
        """Return carrier, flights with a delay, and its mean, from the objects alone."""
        import duckdb
        import pyarrow.dataset as ds
        from pyarrow.fs import S3FileSystem

        s3 = S3FileSystem(endpoint_override=self._bucket.endpoint.removeprefix("http://"), scheme="http", region=REGION)
        names = [f"{BUCKET}/{name}" for name, _ in self._objects() if name.endswith(".parquet")]
        flights = ds.dataset(names, filesystem=s3, format="parquet")
        query = "select carrier, count(dep_delay), avg(dep_delay) from flights where dep_delay is not null group by carrier"
        with duckdb.connect() as connection:
            connection.register("flights", flights)
            return connection.sql(query).fetchall()

    def _look_at_the_bucket(self) -> None:
        verified = self._cepheid("tiered", "verify", "--metadata", self._cluster.metadata_url)
        swept = self._cepheid(
            "tiered", "sweep", self._bucket.url, "--metadata", self._cluster.metadata_url, "--dry-run", "--grace-hours", "0"
        )
        self._checks.append(checks.check_bucket(verified, swept))

    def _restore(self) -> None:
        self._wait("a manifest with the tail", lambda: self._manifest_has_tail())
        self._cluster.down()
        self._start(self._second)
        broker = next(name for name in self._second.names() if name.startswith("broker"))
        self._second.stop(broker)
        started = time.monotonic()
        restored = self._cepheid("tiered", "restore", self._bucket.url, "--into", self._second.metadata_url)
        self._figures.append(("restored into a second cluster", f"{time.monotonic() - started:.1f} s"))
        self._console.print(restored.strip(), soft_wrap=True, highlight=False)
        self._second.start(broker)
        self._checks.append(checks.check_report(restored, self._tail))
        audited = self._consume(self._second, AUDIT, len(self._body) - self._audited, to_end=True)
        promise = "in the second cluster the subscription goes on where it was"
        self._checks.append(checks.check_continues(promise, audited, self._audited, len(self._body)))
        seen = self._consume(self._second, "again-restored", len(self._body), to_end=True)
        self._checks.append(
            checks.check_seen("and every event that was offloaded is there once, in order", seen, range(len(self._body)))
        )

    # Helpers of the steps

    def _consume(self, cluster: LocalCluster, subscription: str, count: int, *, to_end: bool) -> Seen:
        client = connect(cluster.service_url, self._directory / "client.log")
        try:
            return consume(client, TOPIC, subscription, self._events, count, to_end=to_end)
        finally:
            client.close()

    def _admin(self, method: str, path: str) -> Any:
        deadline = time.monotonic() + 60
        while True:
            try:
                return cepheid.admin.sync.connect(self._cluster.admin_urls[0]).call(method, path)
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _cepheid(self, *words: str, admin: LocalCluster | None = None) -> str:
        """Run a command, and return what it printed."""
        options = [] if admin is None else ["--admin-url", admin.admin_urls[0]]
        command = [sys.executable, "-m", "cepheid_cli", *words, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        printed = done.stdout + done.stderr
        if done.returncode:
            raise DriverFailedError(f"cepheid {' '.join(words[:2])} ended with exit code {done.returncode}: {printed}")
        return re.sub(r"\x1b\[[0-9;]*m", "", printed)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        del what
        wait_while_moving(condition, lambda: self._chain(), stall_s=STALL_S, logs=self._cluster.directory)

    def _chain(self) -> dict[str, Any]:
        """Return the content of the chain record, read from metadata itself: brokers may be down."""

        async def main() -> dict[str, Any]:
            from cepheid_metadata import read_chain
            from cepheid_metadata.open_store import open_store
            from cepheid_ports import Ports
            from cepheid_wire import TopicName

            store = await open_store(self._cluster.metadata_url, Ports())
            try:
                found = await read_chain(store, TopicName.parse(TOPIC))
            finally:
                await store.aclose()
            assert found is not None
            chain = found.record
            copies = (chain.offloaded or {}).values()
            return {
                "ended": sum(1 for ledger in chain.ledgers if ledger.entries),
                "begun": sum(1 for copy in copies if not copy.complete),
                "complete": sum(1 for copy in copies if copy.complete),
                "off_bookies": sum(1 for copy in copies if not copy.on_bookies),
                "waiting": len(chain.deletions),
                "ids": [ledger.ledger_id for ledger in chain.ledgers if ledger.entries],
                "bytes": sum(ledger.size_bytes for ledger in chain.ledgers),
            }

        return asyncio.run(main())

    def _still_in_metadata(self, ledger_ids: list[int]) -> bool:
        async def main() -> bool:
            from cepheid_metadata import ledger_records
            from cepheid_metadata.open_store import open_store
            from cepheid_ports import Ports

            store = await open_store(self._cluster.metadata_url, Ports())
            try:
                return any([await ledger_records(store).exists(ledger_id) for ledger_id in ledger_ids])
            finally:
                await store.aclose()

        return asyncio.run(main())

    def _stored_on_bookies(self) -> int:
        return int(self._chain()["bytes"])

    def _objects(self) -> list[tuple[str, int]]:
        """Return names and sizes of all objects below the bucket's prefix."""
        from pyarrow.fs import FileSelector, S3FileSystem

        s3 = S3FileSystem(endpoint_override=self._bucket.endpoint.removeprefix("http://"), scheme="http", region=REGION)
        found = s3.get_file_info(FileSelector(f"{BUCKET}/{DIRECTORY}", recursive=True))
        return sorted((one.path.removeprefix(f"{BUCKET}/"), one.size) for one in found if one.is_file)

    def _manifest_has_tail(self) -> bool:
        from pyarrow.fs import S3FileSystem

        from cepheid_tiered.manifest import Manifest

        s3 = S3FileSystem(endpoint_override=self._bucket.endpoint.removeprefix("http://"), scheme="http", region=REGION)
        with s3.open_input_file(f"{BUCKET}/{DIRECTORY}/manifest.json") as file:
            manifest = Manifest.decode(file.read(), "manifest.json")
        behind = {cursor.name: cursor.mark_delete for cursor in manifest.cursors}
        return bool(manifest.not_offloaded) and AUDIT in behind
