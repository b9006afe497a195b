"""A server whose topics are offloaded into a folder: topics filled for it, policies, and what its processes take together.

Entries are random text, and none is like those near it: Parquet pages of entries that repeat would compress to nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.raw_client import Connection, Publisher, open_connection, open_publisher, subscribe
from benchmarks.secured_server import ConfiguredServer
from cepheid_wire import encode_batch, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb

BATCH = 1000
_VARIED_BYTES = 4 << 20  # more than a page of Parquet has, and each is compressed alone
_LIMIT_S = 120.0
_SETTINGS = """
[managed_ledger]
ledger_max_bytes = 4000000000
ledger_max_entries = 50000000
housekeeping_s = 0.2
"""


class VariedPublisher(Publisher):
    """One entry after the other of prebuilt ones, all of one size."""

    def __init__(self, connection: Connection, tails: list[bytes], num_messages: int | None) -> None:
        super().__init__(connection, 1, tails[0], num_messages)
        self._head = self._after[: len(self._after) - len(tails[0])]
        self._tails = tails

    def next_frame(self) -> bytes:
        self._after = self._head + self._tails[self.sent % len(self._tails)]
        return super().next_frame()


class TieredServer(ConfiguredServer):
    """Always a server that the benchmark starts itself, because it measures that process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        arguments.url = arguments.admin_url = None
        super().__init__(arguments)
        self.configure(_SETTINGS)
        self.archive = self.root / "archive"

    def process_ids(self) -> list[int]:
        """Return the ids of the server's process and of all its descendants."""
        assert self._process is not None
        found = [self._process.pid]
        for process_id in found:
            for children in Path(f"/proc/{process_id}/task").glob("*/children"):
                try:
                    found += map(int, children.read_text().split())
                except OSError:  # the thread has ended
                    continue
        return found

    def cpu_s(self) -> float:
        return sum(_cpu_s(each) for each in self.process_ids()) if self._process is not None else 0.0

    def memory_mb(self) -> float:
        """Return the memory of all its processes; shared pages count once (MB = 10^6 bytes)."""
        return sum(_memory_bytes(each) for each in self.process_ids()) / 1e6

    def ask(self, method: str, path: str, body: object = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.admin_url}{path}", content, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def offload(self, topic: str, *, keep_s: int, reads_objects: bool = False) -> None:
        """From now on, all ledgers that have ended. The topic is opened: those that are closed wait for minutes."""
        policy = {
            "managedLedgerOffloadDriver": "filesystem",
            "fileSystemURI": f"file://{self.archive}",
            "managedLedgerOffloadThresholdInBytes": 0,
            "managedLedgerOffloadDeletionLagInMillis": keep_s * 1000,
            "managedLedgerOffloadedReadPriority": "tiered-storage-first" if reads_objects else "bookkeeper-first",
        }
        self.ask("POST", f"{_path(topic)}/offloadPolicies", policy)
        self.ask("GET", f"{_path(topic)}/stats")

    def unload(self, topic: str) -> None:
        self.ask("PUT", f"{_path(topic)}/unload")

    def places(self, topic: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/cepheid/v1/topics/persistent/public/default/{_name(topic)}/tiered")
        return found

    def wait_until_offloaded(self, topic: str, *, off_bookies: bool = False) -> dict[str, Any]:
        """Until its one ended ledger is in the store, and on no bookie if that is wanted."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            places = self.places(topic)
            if places["objects" if off_bookies else "both"]["bytes"]:
                return places
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic} is not offloaded after {_LIMIT_S} s: {places}")
            time.sleep(0.02)


async def fill(server: TieredServer, topic: str, message_bytes: int, size_bytes: int, *, batched: bool = False) -> int:
    """Publish about so many bytes, for a subscription that has read nothing. Return how many entries."""
    connection = await open_connection(server.url, topic)
    await subscribe(connection, topic, "bench", earliest=True)
    named = await open_publisher(connection, topic, b"")
    del named  # the broker knows its producer by now; entries do not depend on its name
    entry_bytes = message_bytes * (BATCH if batched else 1)
    chance = random.Random(message_bytes)
    tails = [_tail(chance, message_bytes, batched=batched) for _ in range(-(-_VARIED_BYTES // entry_bytes))]
    publisher = VariedPublisher(connection, tails, BATCH if batched else None)
    entries = max(1, size_bytes // entry_bytes)
    await load.publish_all(connection, publisher, entries, window=max(32, min(1000, 8_000_000 // entry_bytes)))
    connection.close()
    return entries


def _tail(chance: random.Random, message_bytes: int, *, batched: bool) -> bytes:
    metadata = pb.MessageMetadata(producer_name="bench", sequence_id=0, publish_time=1_700_000_000_000)
    if not batched:
        return encode_tail(metadata, _text(chance, message_bytes))
    metadata.num_messages_in_batch = BATCH
    return encode_tail(metadata, encode_batch((pb.SingleMessageMetadata(), _text(chance, message_bytes)) for _ in range(BATCH)))


def _text(chance: random.Random, size_bytes: int) -> bytes:
    return chance.randbytes(size_bytes // 2).hex().encode()


def _name(topic: str) -> str:
    return topic.rpartition("/")[2]


def _path(topic: str) -> str:
    return f"/admin/v2/persistent/public/default/{_name(topic)}"


def _cpu_s(process_id: int) -> float:
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(process_id: int) -> int:
    try:
        text = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)
