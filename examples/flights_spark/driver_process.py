"""A Spark driver as a process. It is killed together with its JVM, as if the machine had failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from cepheid_ports import CepheidError

REPOSITORY = Path(__file__).parents[2]
LOG_LINES_SHOWN = 30
_KILL_LIMIT_S = 60.0


class DriverFailedError(CepheidError):
    """A Spark driver ended with an error, or did not end in time."""


class DriverProcess:
    """Runs a module of this package in a new process, with its output appended to `log_path`."""

    def __init__(self, module: str, arguments: list[str], log_path: Path) -> None:
        self._log_path = log_path
        self._module = module
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.{module}", *arguments],
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,  # here `-m` finds the package `examples`, whatever the caller's directory is
                start_new_session=True,  # a process group with the JVM, so that one signal reaches both
            )

    def check_alive(self) -> None:
        """Raise DriverFailedError if the process has ended with an error."""
        code = self._process.poll()
        if code is not None and code != 0:
            raise DriverFailedError(f"{self._module} ended with exit code {code}; end of {self._log_path}:\n{self._log_tail()}")

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process. Raises DriverFailedError."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DriverFailedError(f"{self._module} did not end within {timeout_s:.0f} s: see {self._log_path}") from None
        self.check_alive()

    def kill(self) -> int:
        """Send SIGKILL to Python and its JVM, if they still run. Returns the exit code."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return self._process.wait(_KILL_LIMIT_S)

    def _log_tail(self) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
