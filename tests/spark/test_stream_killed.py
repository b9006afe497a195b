"""Exactly once over SIGKILL: drivers die at random points, the topic goes on, and every number comes once.

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
from contextlib import closing
from pathlib import Path

import pulsar
import pytest

from cepheid_spark.java_check import NoJavaError, find_java
from cepheid_testkit import ProcessCluster
from tests.spark.streams import StreamedTopic

WAIT_S = 300.0  # a JVM start on a busy machine takes its time
SEND_PAUSE_S = 0.05


class Driver:
    def __init__(self, server: ProcessCluster, topic: str, directory: Path) -> None:
        self._log = (directory / "log").open("ab")
        command = [sys.executable, "-m", "tests.spark.stream_driver", server.service_url, topic, str(directory)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2])

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """The JVM first: it must not hear of the driver's end."""
        if self._log.closed:
            return
        for child in _children(self._process.pid):
            os.kill(child, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._log.close()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


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
        self._seed = random.randrange(1 << 32)
        self.chance = random.Random(self._seed)
        self._drivers: list[Driver] = []
        self.sender = Sender(client.create_producer(streamed.topic, batching_enabled=False))
        self.sender.start()

    def close(self) -> None:
        self.sender.stop()
        for driver in self._drivers:
            driver.kill()

    def start_driver(self) -> Driver:
        self._drivers.append(Driver(self._server, self.streamed.topic, self.directory))
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

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.story()
            assert self._drivers[-1].runs, self.story()
            time.sleep(0.005)


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
    work.wait_until(lambda: bool(work.leases()))
    held_from = work.sender.sent + 1  # sent after the lease was there; the one on its way is before or after it
    work.wait_until(lambda: (work.directory / "checkpoint" / "offsets" / "0").exists())
    driver.kill()  # before the first commit, most often before its rows are written
    for _ in range(2):
        driver, enough = work.start_driver(), len(work.batches()) + work.chance.randrange(1, 6)
        work.wait_until(lambda enough=enough: len(work.batches()) >= enough)  # type: ignore[misc]
        time.sleep(work.chance.random() * 0.3)  # anywhere within a batch
        driver.kill()
        work.streamed.roll()
        work.streamed.trim()
    work.sender.stop()
    work.start_driver()
    work.wait_until(lambda: work.sender.sent - 1 in work.numbers())
    came = work.numbers()
    assert came == list(range(came[0], work.sender.sent)), work.story()
    assert came[0] <= held_from, work.story()
    assert len(work.leases()) == 1, "leases of starts that were never used are gone again"
