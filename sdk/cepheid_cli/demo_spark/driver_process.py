"""A Spark driver as a process of its own, with what it says in a log; killed with its JVM, as a machine's end would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from cepheid_ports import CepheidError

_STOP_LIMIT_S = 60.0


class DriverFailedError(CepheidError):
    """A Spark driver ended with an error."""


class DriverProcess:
    def __init__(self, module: str, arguments: list[str], log_path: Path) -> None:
        self._log_path = log_path
        self._module = module
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"cepheid_cli.demo_spark.{module}", *arguments],
                stdout=log,
                stderr=log,
                start_new_session=True,  # a process group with the JVM: one signal reaches both
            )

    def check_alive(self) -> None:
        code = self._process.poll()
        if code is not None and code != 0:
            raise DriverFailedError(f"{self._module} ended with {code}; the end of {self._log_path}:\n{self._last_words()}")

    @property
    def has_ended(self) -> bool:
        self.check_alive()
        return self._process.poll() is not None

    def kill(self) -> int:
        """SIGKILL for Python and its JVM; returns the exit code. Nothing when it is gone."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return self._process.wait(_STOP_LIMIT_S)

    def wait(self, timeout_s: float) -> None:
        """For its end. Raises DriverFailedError."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DriverFailedError(f"{self._module} did not end within {timeout_s:.0f} s; see {self._log_path}") from None
        self.check_alive()

    def _last_words(self) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-30:])
