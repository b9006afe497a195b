"""The server under test: a `cepheid standalone` process of our own, or anybody's by URL. The only place that knows the command.

A server of our own gets a fresh directory and free ports. An external one (`--url`) is only talked to: what needs its process
(memory, restart, processor time) is refused or left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType

START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0


class ServerFailedError(Exception):
    """The server did not start, or ended by itself; the message has the last lines it said."""


def add_arguments(parser: argparse.ArgumentParser, *, bookies: int = 1) -> None:
    parser.add_argument("--url", help="a running server (pulsar://host:port); default: start one of our own")
    parser.add_argument("--admin-url", help="http://host:port of that server, for its metrics")
    parser.add_argument(
        "--server-pid", type=int, help="the process of that server, where it runs here: its processor time is measured"
    )
    parser.add_argument("--bookies", type=int, default=bookies, help="bookies of our own server")
    parser.add_argument("--data", help="parent directory of our own server's data (default: the system's temporary one)")
    parser.add_argument("--server-python", default=sys.executable, help="the interpreter that runs our own server")
    parser.add_argument("--keep", action="store_true", help="leave data and log of our own server behind")


class Server:
    """Use as a context manager. `start` may be called again after `stop` or `kill`: the data stays until the end."""

    def __init__(self, arguments: argparse.Namespace, *, start_now: bool = True) -> None:
        self._start_now = start_now
        self.external = arguments.url is not None
        self._keep = arguments.keep
        self._python: str = arguments.server_python
        self._external_pid: int | None = arguments.server_pid
        self._process: subprocess.Popen[bytes] | None = None
        self.bookies = arguments.bookies
        if self.external:
            self.url: str = arguments.url
            self.admin_url: str | None = arguments.admin_url
        else:
            self.port, self._admin_port = free_port(), free_port()
            self.url = f"pulsar://127.0.0.1:{self.port}"
            self.admin_url = f"http://127.0.0.1:{self._admin_port}"
            self.root = Path(tempfile.mkdtemp(prefix="cepheid-bench-", dir=arguments.data))

    def __enter__(self) -> Server:
        if not self.external and self._start_now:
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.external:
            return
        if self._process is not None:
            self.kill()
        if self._keep:
            print(f"data and log are in {self.root}", file=sys.stderr)
        else:
            shutil.rmtree(self.root, ignore_errors=True)

    def topic(self, name: str) -> str:
        """A topic that no earlier run has used, so that nothing of it is counted."""
        return f"persistent://public/default/bench-{name}-{os.getpid()}"

    @property
    def settings(self) -> dict[str, object]:
        """For the JSON line."""
        return {"url": self.url} if self.external else {"server": "cepheid standalone", "bookies": self.bookies}

    def command(self) -> list[str]:
        return [
            *(self._python, "-m", "cepheid_cli", "standalone"),
            *("--data", str(self.root / "data"), "--bookies", str(self.bookies)),
            *("--port", str(self.port), "--admin-port", str(self._admin_port)),
        ]

    def start(self, *, wait: bool = True) -> None:
        assert self._process is None, "it runs"
        with open(self.root / "log", "ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT)
        if wait:
            self.wait_until_listening()

    def wait_until_listening(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not is_listening("127.0.0.1", self.port):
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServerFailedError(f"nobody listens on port {self.port} after {START_LIMIT_S} s\n{self._last_words()}")
            time.sleep(0.005)

    def wait_until_admin_answers(self) -> None:
        """It opens a moment after the protocol's port."""
        _read_when_served(f"{self.admin_url}/ready")

    def check_alive(self) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise ServerFailedError(f"the server ended with {code}\n{self._last_words()}")

    def stop(self) -> None:
        """As an operator does: SIGTERM, and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_LIMIT_S)
        finally:
            self._process = None

    def _last_words(self) -> str:
        return "\n".join((self.root / "log").read_text(errors="replace").splitlines()[-20:])

    def cpu_s(self) -> float:
        """Processor time the server has used so far; 0 for an external one whose process is not known."""
        pid = self.pid
        if pid is None:
            return 0.0
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def pid(self) -> int | None:
        return self._external_pid if self._process is None else self._process.pid

    def rss_mb(self) -> float:
        """Resident memory of our own server now (MB = 10^6 bytes)."""
        assert self._process is not None
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise ServerFailedError("the server has no memory: it is gone")

    def metric(self, name: str) -> float | None:
        """The sum of a metric over its labels, from /metrics. None when there is no admin URL, or nobody knows the name."""
        if self.admin_url is None:
            return None
        lines = _read_when_served(f"{self.admin_url}/metrics").splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0].partition("{")[0] == name]
        return sum(values) if values else None


def _read_when_served(url: str) -> str:
    """The admin API opens a moment after the protocol's port."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def is_listening(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
