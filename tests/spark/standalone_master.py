"""Spark's own cluster: a standalone master and workers as processes, from the jars that PySpark's wheel carries. For tests."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import pyspark

from tests.support import QUICK_JVM

SPARK_HOME = Path(pyspark.__file__).parent
START_S = 300.0  # four JVM starts on a busy machine take their time
SUBMIT_S = 800.0
POLL_S = 0.05


def spark_environment(**extra: str) -> dict[str, str]:
    """Of a shell in which nobody has set anything of Spark's; all of it on the loopback."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_", "PYTHONPATH"))}
    quick = dict.fromkeys(("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS", "SPARK_DAEMON_JAVA_OPTS"), QUICK_JVM)
    return {**kept, **quick, "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", **extra}


class Started:
    """A process, what it writes, and its end."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(environment))

    def wait_for(self, pattern: str) -> str:
        """The first group of the first match."""
        deadline = time.monotonic() + START_S
        while True:
            text = self._log.read_text(errors="replace")
            if found := re.search(pattern, text):
                return found[1]
            assert self._process.poll() is None, text[-3000:]
            assert time.monotonic() < deadline, text[-3000:]
            time.sleep(POLL_S)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class StandaloneMaster:
    """With `workers` workers of one core each, so that two tasks at once are on two of them. `python`: of drivers and executors."""

    def __init__(self, directory: Path, *, python: Path, workers: int = 2) -> None:
        self._directory = directory
        self._python = python
        self._workers = workers
        self._processes: list[Started] = []
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self.url = self._start("master", "master.Master").wait_for(r"Starting Spark master at (spark://\S+)")
            logs = [self._start(f"worker-{number}", "worker.Worker", *self._place(number)) for number in range(self._workers)]
            for log in logs:
                log.wait_for(r"Successfully registered with (master)")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):  # a worker ends its executors
            process.stop()

    def submit(self, *arguments: str | Path, conf: dict[str, str] | None = None) -> str:
        """spark-submit: what it wrote. Raises AssertionError with all of that when it ends with an error."""
        memory = {"spark.executor.memory": "512m", "spark.driver.memory": "512m"}
        settings = {**memory, "spark.executor.extraJavaOptions": QUICK_JVM, "spark.ui.enabled": "false", **(conf or {})}
        flags = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.url, *flags, *map(str, arguments)]
        environment = spark_environment(PYSPARK_PYTHON=str(self._python))
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SUBMIT_S, check=False)
        assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
        return ran.stdout

    def _place(self, number: int) -> tuple[str, ...]:
        return "--cores", "1", "--memory", "1g", "--work-dir", str(self._directory / f"work-{number}"), self.url

    def _start(self, name: str, role: str, *arguments: str) -> Started:
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{role}"]
        ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        environment = spark_environment(SPARK_DAEMON_MEMORY="256m", PYSPARK_PYTHON=str(self._python))
        self._processes.append(Started([*command, *ports, *arguments], self._directory / f"{name}.log", environment))
        return self._processes[-1]
