"""`cepheid standalone` on a disk that fills: refused in time, space back after a deletion, and nothing acknowledged is lost."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cepheid_ports import CepheidError
from cepheid_testkit import ProcessCluster
from tests.plain_admin import AdminClient
from tests.wire_client import WireClient

MIB = 1 << 20

pytestmark = pytest.mark.slow

# The interval of collections is so long that only the full disk can be what starts one.
SETTINGS = """
[ledger]
deletion_grace_s = 2.0
[storage]
journal_segment_bytes = 4194304
log_bytes = 4194304
write_cache_bytes = 8388608
checkpoint_interval_s = 0.5
min_free_journal_bytes = 25165824
min_free_data_bytes = 25165824
space_margin_bytes = 16777216
disk_check_interval_s = 0.2
gc_interval_s = 3600.0
gc_full_interval_s = 1.0
"""


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    directory.mkdir()
    tried = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(directory)], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {tried.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def publish(cluster: ProcessCluster, topic: str, numbers: range) -> int:
    """Publish 1 MiB each; return how many were acknowledged before one was not."""
    with WireClient(cluster.service_url, topic, timeout_s=5.0) as client:
        client.open_producer()
        for acknowledged, number in enumerate(numbers):
            try:
                client.send(number, f"{number}".encode().ljust(MIB, b"."))
            except CepheidError:
                return acknowledged
    return len(numbers)


def ready_page(cluster: ProcessCluster) -> str:
    with urllib.request.urlopen(f"{cluster.admin_url}/ready") as answer:
        return str(answer.read().decode())


def test_a_full_standalone_takes_messages_again_after_a_topic_was_deleted(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(SETTINGS)
    with small_disk(tmp_path / "disk"), ProcessCluster(tmp_path / "disk" / "data", flags=("--config", str(config))) as cluster:
        for topic in ("old", "kept"):
            with WireClient(cluster.service_url, topic) as client:
                client.subscribe("reader", shared=False, earliest=True, permits=1)
        assert publish(cluster, "old", range(60)) == 60
        acknowledged = publish(cluster, "kept", range(200))
        assert acknowledged < 200
        assert re.search("bookie-1 is read-only: its (journal|data) disk has", ready_page(cluster))  # one disk is both
        AdminClient(cluster.admin_url).delete("/admin/v2/persistent/public/default/old", force=True)
        deadline = time.monotonic() + 60
        while "read-only" in ready_page(cluster):
            assert time.monotonic() < deadline, cluster.log_text
            time.sleep(0.2)
        more = publish(cluster, "kept", range(1000, 1010))
        assert more == 10
        with WireClient(cluster.service_url, "kept") as client:
            client.subscribe("audit", shared=False, earliest=True)
            received = client.receive()
            found: list[int] = []
            while not found or found[-1] != 1009:
                found.append(int(next(received).payload.rstrip(b".")))
        expected = [*range(acknowledged), *range(1000, 1010)]
        assert [number for number in found if number != acknowledged] == expected  # that one had no answer
