"""The server of the demo: a `cepheid standalone` process that the demo kills and restarts on the same data."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import cepheid.sync
from cepheid_ports import CepheidError

PROBE_TOPIC = "persistent://public/default/demo-probe"


class ServerDidNotStartError(CepheidError):
    """The server process ended, or did not answer in time."""


class PortTakenError(CepheidError):
    """Another process has the demo's port."""

    hint = "`ss -ltnp` shows which process it is; an earlier demo that was killed leaves its server running"


@dataclass
class ServerProcess:
    """A standalone cluster on `data_dir`. `start_times_s`: from starting the process to its first acknowledged publish."""

    data_dir: Path
    port: int
    admin_port: int
    bookies: int
    start_timeout_s: float = 60.0
    start_times_s: list[float] = field(default_factory=list)
    killed_at_s: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def service_url(self) -> str:
        return f"pulsar://127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        return self.data_dir.parent / "server.log"

    def check_ports(self) -> None:
        """Raise PortTakenError if another server listens on a port, because it would answer instead of this one."""
        for port, option in ((self.port, "--port"), (self.admin_port, "--admin-port")):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    raise PortTakenError(
                        f"another process listens on 127.0.0.1:{port}: stop it, or choose another port with {option}"
                    )

    def start(self) -> None:
        """Start the process and wait for its first acknowledged publish."""
        started = time.monotonic()
        command = [sys.executable, "-m", "cepheid_cli", "standalone", "--data", str(self.data_dir)]
        command += ["--port", str(self.port), "--admin-port", str(self.admin_port), "--bookies", str(self.bookies)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = started + self.start_timeout_s
        while not self._serves():
            if (code := self._process.poll()) is not None:
                raise ServerDidNotStartError(f"the server ended with exit code {code}: see {self.log_path}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerDidNotStartError(f"the server did not start within {self.start_timeout_s:.0f} s: see {self.log_path}")
            time.sleep(0.01)
        self.start_times_s.append(time.monotonic() - started)

    def kill(self) -> None:
        """Send SIGKILL, so that the server can neither flush nor notify its clients."""
        process = self._require_process()
        self.note_memory()
        self.killed_at_s.append(time.monotonic())
        process.kill()
        process.wait()

    def stop(self) -> int:
        """Stop the server like Ctrl-C; return the exit code."""
        process = self._require_process()
        self.note_memory()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            return process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def note_memory(self) -> None:
        if (process := self._process) is not None and process.poll() is None:
            self.peak_memory_bytes = max(self.peak_memory_bytes, resident_bytes(process.pid))

    def _serves(self) -> bool:
        """Publish a message and return whether it was acknowledged, the simplest proof that the server works."""
        try:
            with cepheid.sync.connect(self.service_url, request_timeout_s=10.0) as client, client.producer(PROBE_TOPIC) as producer:
                producer.send(b"probe")
                return True
        except CepheidError:
            return False

    def _require_process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "call start() first"
        return self._process


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, from /proc or ps; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        answer = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return int(answer.stdout.strip() or 0) * 1024
