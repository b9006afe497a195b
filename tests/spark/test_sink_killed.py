"""Exactly once over SIGKILL: a query from topic to topic dies in mid-batch, and every number is in its target once.

Its driver and JVM are killed, with the Python workers left to what they do; and its workers alone, as when an executor is lost.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pulsar
import pytest

from cepheid_spark.java_check import NoJavaError, find_java
from cepheid_testkit import ProcessCluster
from tests.spark.test_sink import Sink

pytestmark = pytest.mark.slow

NUMBERS = 30_000
WAIT_S = 300.0
ATTEMPTS = 3  # on a busy machine a Python worker may take longer to start than Spark waits
RECEIVE_LIMIT_MS = 20_000


class Driver:
    def __init__(self, server: ProcessCluster, source: Sink, target: Sink, directory: Path, *words: str) -> None:
        self._log_path = directory / "log"
        command = [sys.executable, "-m", "tests.spark.sink_driver", server.service_url, source.topic, target.topic, str(directory)]
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen([*command, *words], stdout=log, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2])

    def kill(self) -> None:
        """The JVM first: it must not learn of the driver's end."""
        for child in _children(self.process.pid):
            _kill(child)
        self.process.kill()
        self.process.wait()

    def kill_workers(self) -> None:
        """Every Python process below the JVM. The query ends with an error."""
        workers = [each for jvm in _children(self.process.pid) for each in _descendants(jvm)]
        for worker in workers:
            _kill(worker)
        assert workers, self.log
        self.process.wait(WAIT_S)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")[-3000:]


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
                found += map(int, (task / "children").read_text().split())
    return found


def _descendants(process: int) -> list[int]:
    return [each for child in _children(process) for each in (child, *_descendants(child))]


def stored(target: Sink) -> int:
    """Return how many messages its partitions have taken since the broker started."""
    stats = target.admin("GET", "/partitioned-stats")
    return int(stats["msgInCounter"])


@pytest.mark.timeout(900)
def test_every_number_is_stored_once_whatever_is_killed(
    server: ProcessCluster, client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    try:
        find_java()
    except NoJavaError as error:
        pytest.skip(f"NO SPARK: {error}")
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    source, target = Sink(server, client, f"{topic}-source"), Sink(server, client, topic)
    source.create()
    target.create(2)
    source.send(range(NUMBERS))
    before = 0
    for kill in (Driver.kill, Driver.kill_workers):
        driver = Driver(server, source, target, tmp_path)
        deadline = time.monotonic() + WAIT_S
        while stored(target) <= before:
            assert driver.process.poll() is None, f"seed {seed}: {driver.log}"
            assert time.monotonic() < deadline, f"seed {seed}: nothing is written: {driver.log}"
            time.sleep(0.02)
        time.sleep(chance.random())
        kill(driver)
        before = stored(target)
    assert before < NUMBERS, f"seed {seed}: it was done before it was killed"
    for _ in range(ATTEMPTS):
        last = Driver(server, source, target, tmp_path, "once")
        if last.process.wait(WAIT_S) == 0:
            break
    else:
        pytest.fail(f"seed {seed}: {last.log}")
    found = sorted(int(message.data()) for message in target.received(NUMBERS, RECEIVE_LIMIT_MS))
    assert found == list(range(NUMBERS)), f"seed {seed}"
