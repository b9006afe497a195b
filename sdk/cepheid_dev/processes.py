"""Processes that outlive their starter: found again by pid and start time, since pids are reused.

On Linux both come from `/proc`, elsewhere from `ps`.
"""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cepheid_ports import PRIVATE_UMASK

POLL_S = 0.01


class ProcessState(enum.Enum):
    RUNNING = "running"
    PAUSED = "paused"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class DetachedProcess:
    """A process. `born` is the start time in the system's format: the same pid with another start time is another process."""

    pid: int
    born: str

    def state(self) -> ProcessState:
        _reap(self.pid)
        letter, born = _look(self.pid)
        if letter in ("", "Z", "X") or born != self.born:
            return ProcessState.GONE
        return ProcessState.PAUSED if letter in ("T", "t") else ProcessState.RUNNING

    def send(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process is gone."""
        if self.state() is not ProcessState.GONE:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def wait_gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.state() is not ProcessState.GONE:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def spawn(command: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> DetachedProcess:
    """Start `command` in its own session, so that neither Ctrl-C nor the end of a terminal reaches it."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    before = os.umask(PRIVATE_UMASK)  # inherited: ZooKeeper has no setting for the modes of its files
    try:
        # Not subprocess: its objects must be waited for, and this process is to be left alone.
        pid = os.posix_spawn(
            command[0],
            list(command),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log_path), append, 0o640),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
    finally:
        os.umask(before)
    return DetachedProcess(pid, _look(pid)[1])


def _reap(pid: int) -> None:
    """Reap a child that ended, which is a zombie until then."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _look(pid: int) -> tuple[str, str]:
    """Return state letter and start time; empty if there is no such process."""
    if os.path.isdir("/proc/self"):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return "", ""
        fields = stat.rpartition(")")[2].split()  # a name may contain anything, also parentheses; proc(5) counts from the pid
        letter, threads, born = fields[0], int(fields[17]), fields[19]
        # The first thread of a killed process ends before the others, which hold its ports and files for a moment longer.
        return "D" if letter == "Z" and threads > 1 else letter, born
    # LC_ALL: the format of lstart must not depend on the caller's language.
    asked = subprocess.run(
        ["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    state, _, born = asked.stdout.strip().partition(" ")
    return state[:1], " ".join(born.split())
