"""Closing a reader while its bookies are away, busy or silent: whoever waits for them goes on at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cepheid_decode import ReadMode, ReadSettings, ScanCounters, ScanSpec, ScanTask
from cepheid_scan import entry_source as module
from cepheid_scan import read_rounds
from cepheid_scan.bookie_channels import close_channels
from cepheid_scan.replica_order import Suspects
from cepheid_scan.scan import _open_reader
from cepheid_scan.scan_reader import ScanReader
from tests.scan.scan_bookies import piece_of
from tests.support import free_port

pytestmark = pytest.mark.slow

PATIENT = ScanSpec(ReadMode.ENTRIES, ("entry_id",), settings=ReadSettings(read_timeout_s=60.0, unreachable_s=60.0))
SOON_S = 10.0  # "at once", on a busy machine; pauses and limits have 60 s here


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_suspects", Suspects())
    monkeypatch.setattr(read_rounds, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(read_rounds, "LONGEST_PAUSE_S", 60.0)
    yield
    close_channels()


@pytest.fixture
def down() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def paused(tmp_path: Path) -> Iterator[str]:
    """It takes connections and says nothing."""
    command = [sys.executable, "-m", "tests.ledger.bookie_process", "a", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        yield f"127.0.0.1:{port}"
        process.kill()


def reader_of(address: str, threads: int) -> ScanReader:
    tasks = [ScanTask((piece_of(first, first + 9, (0, "a")),), (("a", address),)) for first in (0, 10, 20)]
    return _open_reader(tasks, PATIENT, threads, ScanCounters())


def scan_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("cepheid-scan-", "scan-"))]


def close_while_it_is_read(reader: ScanReader, after_s: float) -> tuple[float, BaseException]:
    """How long it took, and what the thread that reads got."""
    raised: list[BaseException] = []

    def read() -> None:
        try:
            reader.read_next_batch()
        except BaseException as error:
            raised.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    time.sleep(after_s)
    began = time.monotonic()
    reader.close()
    took_s = time.monotonic() - began
    reading.join(30)
    return took_s, raised[0]


@pytest.mark.parametrize("threads", [1, 2])
def test_nobody_waits_for_a_bookie_that_is_down(down: str, threads: int) -> None:
    took_s, error = close_while_it_is_read(reader_of(down, threads), 1.0)
    assert took_s < SOON_S
    assert isinstance(error, ValueError), error
    assert "reader of this scan is closed" in str(error)
    assert not scan_threads()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_nobody_waits_for_a_bookie_that_says_nothing(paused: str, threads: int) -> None:
    took_s, error = close_while_it_is_read(reader_of(paused, threads), 1.0)
    assert took_s < SOON_S
    assert isinstance(error, ValueError), error
    assert not scan_threads()


@pytest.mark.slow
def test_who_is_closed_blames_no_bookie(paused: str, caplog: pytest.LogCaptureFixture) -> None:
    close_while_it_is_read(reader_of(paused, 2), 1.0)
    assert "scan.replica_failed" not in caplog.text
    assert not module._suspects.among(["a"], time.monotonic())


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["down", "paused"])
def test_an_interrupted_read_ends_at_once(request: pytest.FixtureRequest, kind: str, threads: int) -> None:
    reader = reader_of(request.getfixturevalue(kind), threads)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    interrupted_at = signal_after(1.0, signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt), reader:
            reader.read_all()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - interrupted_at() < SOON_S
    assert not scan_threads()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["down", "paused"])
def test_a_signal_handler_that_closes_it_ends_the_read_at_once(request: pytest.FixtureRequest, kind: str, threads: int) -> None:
    reader = reader_of(request.getfixturevalue(kind), threads)
    before = signal.signal(signal.SIGUSR1, lambda *_: reader.close())
    told_at = signal_after(1.0, signal.SIGUSR1)
    try:
        with pytest.raises(ValueError, match="reader of this scan is closed"):
            reader.read_all()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - told_at() < SOON_S
    assert not scan_threads()


def signal_after(seconds: float, number: signal.Signals) -> Callable[[], float]:
    """Sends it to this process, and tells when."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Timer(seconds, send).start()
    return lambda: sent[0]
