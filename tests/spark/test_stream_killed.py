"""Exactly once over SIGKILL: drivers die at random points, the topic goes on, and every number comes once.

A Spark takes ten seconds to come back, so it is killed twice. A process that has the source alone, and makes Spark's calls
itself (source_driver.py), is killed twelve times, while its topic is trimmed as far as its lease lets it be.

The Python process that plans a query outlives its JVM for a moment: it sees the end of its input and stops, perhaps after the next
run has begun. So only the driver and its JVM are killed, and that process is left to itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pulsar
import pytest

from cepheid_spark.java_check import NoJavaError, find_java
from cepheid_testkit import ProcessCluster
from tests.spark.streams import StreamedTopic

pytestmark = pytest.mark.slow

WAIT_S = 300.0  # a JVM start on a busy machine takes its time
SEND_PAUSE_S = 0.05
SOURCE_KILLS = 12


class Driver:
    def __init__(self, module: str, server: ProcessCluster, topic: str, directory: Path) -> None:
        self._log = (directory / "log").open("ab")
        command = [sys.executable, "-m", f"tests.spark.{module}", server.service_url, topic, str(directory)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2])

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """The JVM first: it must not hear of the driver's end."""
        if self._log.closed:
            return
        if self.runs:
            for child in _children(self._process.pid):
                os.kill(child, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        self._log.close()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


class Sender(threading.Thread):
    """Numbers from 0 on, one entry each, until it is told to stop."""

    def __init__(self, producer: pulsar.Producer) -> None:
        super().__init__(name="sender")
        self._producer = producer
        self.sent = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(SEND_PAUSE_S):
            self._producer.send(str(self.sent).encode())
            self.sent += 1

    def stop(self) -> None:
        self.stopped.set()
        self.join()


class Work:
    """A topic that is sent to, drivers that read it, and what they have written."""

    def __init__(self, server: ProcessCluster, client: pulsar.Client, streamed: StreamedTopic, directory: Path) -> None:
        self._server = server
        self.streamed = streamed
        self.directory = directory
        self._first_offset = directory / "checkpoint" / "offsets" / "0"
        self._seed = random.randrange(1 << 32)
        self.chance = random.Random(self._seed)
        self._drivers: list[Driver] = []
        self.sender = Sender(client.create_producer(streamed.topic, batching_enabled=False))
        self.sender.start()

    def close(self) -> None:
        self.sender.stop()
        for driver in self._drivers:
            driver.kill()

    def start_driver(self, module: str = "stream_driver") -> Driver:
        self._drivers.append(Driver(module, self._server, self.streamed.topic, self.directory))
        return self._drivers[-1]

    def leases(self) -> list[str]:
        found: list[str] = self.streamed.admin("GET", "/subscriptions")
        return found

    def batches(self) -> dict[int, list[int]]:
        return {int(path.name[6:]): json.loads(path.read_text()) for path in self.directory.glob("batch-*")}

    def numbers(self) -> list[int]:
        return [number for _, rows in sorted(self.batches().items()) for number in rows]

    def story(self) -> str:
        return f"seed {self._seed}: batches {sorted(self.batches())}\n{(self.directory / 'log').read_text()[-3000:]}"

    def wait_for_first_offset(self) -> int:
        """A number that was sent after there was a lease; the one that was on its way then is before or behind it."""
        self.wait_until(lambda: bool(self.leases()))
        held_from = self.sender.sent + 1
        self.wait_until(self._first_offset.exists)
        return held_from

    def check(self, held_from: int) -> None:
        """All that was sent has come once, from where the first offset says: in the first ledger, where entries are numbers."""
        first_offset = json.loads(self._first_offset.read_text().splitlines()[-1])
        _, first = first_offset["from"][self.streamed.topic]
        assert first <= held_from, self.story()
        assert self.numbers() == list(range(first, self.sender.sent)), self.story()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.story()
            assert self._drivers[-1].runs, self.story()
            time.sleep(0.02)


@pytest.fixture
def work(server: ProcessCluster, client: pulsar.Client, topic: str, tmp_path: Path) -> Iterator[Work]:
    try:
        find_java()
    except NoJavaError as error:
        pytest.skip(f"NO SPARK: {error}")
    with StreamedTopic(server, client, topic) as streamed, closing(Work(server, client, streamed, tmp_path)) as work:
        yield work


@pytest.mark.timeout(900)
def test_every_number_comes_once_whenever_the_driver_is_killed(work: Work) -> None:
    driver = work.start_driver()
    held_from = work.wait_for_first_offset()
    driver.kill()  # before the first commit, most often before its rows are written
    driver, enough = work.start_driver(), len(work.batches()) + work.chance.randrange(1, 6)
    work.wait_until(lambda: len(work.batches()) >= enough)
    time.sleep(work.chance.random() * 0.3)  # anywhere within a batch
    driver.kill()
    work.streamed.roll()
    work.streamed.trim()
    work.sender.stop()
    work.start_driver()
    work.wait_until(lambda: work.sender.sent - 1 in work.numbers())
    work.check(held_from)
    assert len(work.leases()) == 1, "leases of starts that were never used are gone again"


def test_every_number_comes_once_whenever_the_source_is_killed(work: Work) -> None:
    """Its Python alone, in whose place a real Spark takes too long to start for so many kills."""
    driver = work.start_driver("source_driver")
    held_from = work.wait_for_first_offset()
    driver.kill()
    for _ in range(SOURCE_KILLS):
        started = work.directory / "started"
        started.unlink()
        driver = work.start_driver("source_driver")
        work.wait_until(started.exists)
        time.sleep(work.chance.random() * 0.8)  # from before the first plan until some batches have come
        driver.kill()
        work.streamed.roll()
        work.streamed.trim()
    work.sender.stop()
    work.start_driver("source_driver")
    work.wait_until(lambda: work.sender.sent - 1 in work.numbers())
    work.check(held_from)
    assert len(work.batches()) >= SOURCE_KILLS, work.story()
    work.wait_until(lambda: work.streamed.trim() is None and len(work.streamed.ledgers()) < SOURCE_KILLS / 2)
