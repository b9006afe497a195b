"""A bookie that is there and says nothing (SIGSTOP), as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cepheid_scan import EntriesUnreadableError, ReadSettings, ScanCounters
from cepheid_scan import entry_source as module
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.replica_order import Suspects
from tests.scan.scan_bookies import ScanBookies, groups_of, piece_of

pytestmark = pytest.mark.slow


@pytest.fixture
def paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address; stopped after it has begun to listen."""
    monkeypatch.setattr(module, "_suspects", Suspects())
    directory = tmp_path / "paused"
    directory.mkdir()
    command = [sys.executable, "-m", "tests.ledger.bookie_process", "p", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        yield f"127.0.0.1:{port}", process
        process.kill()
    close_channels()


def test_a_paused_bookie_costs_one_timeout(paused: tuple[str, subprocess.Popen[str]], tmp_path: Path) -> None:
    with ScanBookies(tmp_path, "a") as bookies:
        for group in groups_of(100):
            bookies.add(group)
        settings = ReadSettings(read_timeout_s=2.0)  # what a bookie that is well may take on a busy machine
        counters = ScanCounters()
        source = EntrySource({**bookies.addresses, "p": paused[0]}, b"", settings, counters, replan=None)
        began = time.monotonic()
        for first in range(20):  # of which about half would ask it first
            entries = sum(len(group) for group in source.read(piece_of(first, 99, (0, "ap"))))
            assert entries == 100 - first
        assert time.monotonic() - began < 15.0, "half of the reads would have waited 2 s each"
        assert counters.retries == 1, "then it is a suspect, and asked last"


def test_a_paused_bookie_without_another_replica_is_named(paused: tuple[str, subprocess.Popen[str]]) -> None:
    settings = ReadSettings(read_timeout_s=0.2, read_attempts=2, unreachable_s=0.5)
    source = EntrySource({"p": paused[0]}, b"", settings, ScanCounters(), replan=None)
    with pytest.raises(EntriesUnreadableError, match=r"p: (no answer within 0\.2 s|UNAVAILABLE)"):
        list(source.read(piece_of(0, 9, (0, "p"))))
