"""`cepheid standalone` as a separate process: for blocking clients, and for tests that kill it.

with ProcessCluster(data_dir) as cluster:
    client = pulsar.Client(cluster.service_url)
    cluster.kill()                                   # SIGKILL: nothing is flushed
    cluster.start()                                  # the same data, the same ports
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from cepheid_dev.free_ports import free_port

STARTED = "ready after"
POLL_S = 0.01


class ProcessCluster:
    """A cluster in a process. Without `data_dir` the data is deleted with it. `log_text` has the log of all its runs."""

    def __init__(self, data_dir: Path | None = None, *, bookies: int = 1, flags: tuple[str, ...] = ()) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="cepheid-") if data_dir is None else None
        self.data_dir = Path(self._temporary.name) if self._temporary else Path(data_dir or "")
        self._flags = ("--bookies", str(bookies), *flags)
        self._log_path = Path(tempfile.mkstemp(prefix="cepheid-log-")[1])
        self.port = free_port()
        self.admin_port = free_port(taken=[self.port])
        self.process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<ProcessCluster {self.service_url}, data in {self.data_dir}>"

    @property
    def service_url(self) -> str:
        return f"pulsar://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def log_text(self) -> str:
        return self._log_path.read_text(errors="replace")

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._remove_files()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            self._remove_files()

    def start(self, timeout_s: float = 60.0) -> float:
        """Start it; return the time until it served."""
        assert self.process is None, "it runs already"
        began = time.monotonic()
        ready_before = self.log_text.count(STARTED)
        command = [sys.executable, "-m", "cepheid_cli", "standalone", "--data", str(self.data_dir)]
        ports = ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CEPHEID_")}
        with self._log_path.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, *ports, *self._flags], stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        while self.log_text.count(STARTED) == ready_before:
            if self.process.poll() is not None or time.monotonic() - began > timeout_s:
                self.kill()
                raise RuntimeError(f"the cluster did not start within {timeout_s} s:\n{self.log_text[-4000:]}")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop it gracefully. Raises RuntimeError if it must be killed, or ends with an error."""
        if self.process is None:
            return
        process, self.process = self.process, None
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"the cluster did not stop within {timeout_s} s:\n{self.log_text[-4000:]}") from None
        if code != 0:
            raise RuntimeError(f"the cluster ended with code {code}:\n{self.log_text[-4000:]}")

    def _remove_files(self) -> None:
        self._log_path.unlink(missing_ok=True)
        if self._temporary is not None:
            self._temporary.cleanup()
