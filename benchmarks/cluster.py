"""The cluster under test: ZooKeeper, bookies and brokers as processes of their own, as `cepheid dev up` starts them.

For what only a cluster has: bookies that die while others live, brokers that take over. `server.py` is for everything else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.server import ServerFailedError
from cepheid_dev.local_cluster import LocalCluster
from cepheid_testkit.metadata_view import MetadataView

READY_LIMIT_S = 60.0
START_LIMIT_S = 180.0
POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser, *, bookies: int = 3, brokers: int = 1, session_timeout_s: float = 4.0) -> None:
    parser.add_argument("--bookies", type=int, default=bookies)
    parser.add_argument("--brokers", type=int, default=brokers)
    parser.add_argument("--session-timeout-s", type=float, default=session_timeout_s, help="of bookies and brokers with ZooKeeper")
    parser.add_argument("--data", help="parent directory of the cluster's data (default: the system's temporary one)")
    parser.add_argument("--keep", action="store_true", help="leave data and logs behind")


class Cluster:
    """Use as a context manager. `settings`: of each role, on top of their defaults."""

    def __init__(self, arguments: argparse.Namespace, settings: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._arguments = arguments
        self._settings = settings or {}
        self.root = Path(tempfile.mkdtemp(prefix="cepheid-bench-", dir=arguments.data))
        self.processes = LocalCluster(self.root)
        self.view: MetadataView

    def __enter__(self) -> Self:
        given = self._arguments
        try:
            self.processes.up(
                given.bookies,
                given.brokers,
                session_timeout_s=given.session_timeout_s,
                settings=self._settings,
                timeout_s=START_LIMIT_S,
            )
        except BaseException:
            self._end()
            raise
        self.view = MetadataView(self.processes.metadata_url)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            print(self.last_words(), file=sys.stderr)
        self._end()

    def _end(self) -> None:
        self.processes.down()
        if self._arguments.keep:
            print(f"data and logs are in {self.root}", file=sys.stderr)
        else:
            shutil.rmtree(self.root, ignore_errors=True)

    @property
    def url(self) -> str:
        return self.processes.service_url

    @property
    def settings(self) -> dict[str, object]:
        """For the JSON line."""
        given = self._arguments
        return {
            "server": "ZooKeeper, bookies and brokers in processes of their own",
            "bookies": given.bookies,
            "brokers": given.brokers,
            "session_timeout_s": given.session_timeout_s,
            **self._settings,
        }

    def topic(self, name: str) -> str:
        return f"persistent://public/default/bench-{name}-{os.getpid()}"

    def cpu_s(self) -> float:
        """Processor time that all brokers have used."""
        return sum(self.cpu_of_s(name) for name in self.processes.names() if name.startswith("broker"))

    def cpu_of_s(self, name: str) -> float:
        fields = Path(f"/proc/{self._pid(name)}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self, name: str) -> float:
        """Resident memory of a process now (MB = 10^6 bytes)."""
        for line in Path(f"/proc/{self._pid(name)}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise ServerFailedError(f"{name} has no memory: it is gone")

    def pauser(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """Stops a process, and lets it run: without a look at its state each time."""
        pid = self._pid(name)
        return lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT)

    def wait_until(self, condition: Callable[[], bool], what: str, within_s: float = READY_LIMIT_S) -> float:
        """Returns how long it took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > within_s:
                raise ServerFailedError(f"not within {within_s} s: {what}")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def last_words(self) -> str:
        """The end of every log."""
        parts = []
        for name in self.processes.names():
            path = self.processes.log_path(name)
            parts += [f"---- {name}", *(path.read_text(errors="replace").splitlines()[-20:] if path.exists() else ())]
        return "\n".join(parts)

    def _pid(self, name: str) -> int:
        pid = self.processes.pid(name)
        if pid is None:
            raise ServerFailedError(f"{name} is gone")
        return pid
