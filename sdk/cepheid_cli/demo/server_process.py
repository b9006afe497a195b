"""The server of the demo: `cepheid standalone` as a process of its own, which the demo kills and starts again on the same data."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cepheid_cli.wire_client import probe_produce
from cepheid_ports import CepheidError


class ServerDidNotStartError(CepheidError):
    """The server process ended, or did not answer in time."""

    hint = "its log is named in the message"


class PortTakenError(CepheidError):
    """Another process has the demo's port."""

    hint = "`ss -ltnp` names it; a demo that was killed may have left its server behind"


@dataclass
class ServerProcess:
    """One standalone cluster on `data_dir`. `start_times_s`: from spawning the process to its first acknowledged publish."""

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
        """Raises PortTakenError: a foreign server would answer in the place of this one."""
        for port, option in ((self.port, "--port"), (self.admin_port, "--admin-port")):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    raise PortTakenError(
                        f"something else listens on 127.0.0.1:{port}; stop it, or choose another port with {option}"
                    )

    def start(self) -> None:
        """Spawns the process and waits for its first acknowledged publish."""
        started = time.monotonic()
        command = [sys.executable, "-m", "cepheid_cli", "standalone", "--data", str(self.data_dir)]
        command += ["--port", str(self.port), "--admin-port", str(self.admin_port), "--bookies", str(self.bookies)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = started + self.start_timeout_s
        while not probe_produce("127.0.0.1", self.port, "persistent://public/default/demo-probe", timeout_s=10.0):
            if (code := self._process.poll()) is not None:
                raise ServerDidNotStartError(f"the server ended with exit code {code}, see {self.log_path}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerDidNotStartError(f"the server did not start within {self.start_timeout_s:.0f} s, see {self.log_path}")
            time.sleep(0.01)
        self.start_times_s.append(time.monotonic() - started)

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nothing is said."""
        process = self._require_process()
        self.note_memory()
        self.killed_at_s.append(time.monotonic())
        process.kill()
        process.wait()

    def stop(self) -> int:
        """Ctrl-C, as a user would; returns the exit code."""
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

    def _require_process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start() first"
        return self._process


def resident_bytes(pid: int) -> int:
    """Resident memory of a process: from /proc where it exists, else from ps. 0 when the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        answer = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return int(answer.stdout.strip() or 0) * 1024
