"""The real ZooKeeper server as a process on this machine, from the jars of the PySpark wheel.

    ZooKeeperServer(directory, port) ── start ──► java … zookeeper.cfg ── "srvr" on a plain socket tells its mode ──► ready

    directory/zookeeper.cfg    written at each start
    directory/data/            snapshots and logs, which a restarted server continues
    directory/zookeeper.log    its output in all runs

The process has its own session, so that it outlives its starter: `pid` and `command` identify it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cepheid_dev.java import find_java
from cepheid_ports import PRIVATE_UMASK, CepheidError, make_private

_PAUSE_LIMIT_S = 5.0

TICK_MS = 500  # sessions can be as short as two ticks
INIT_TICKS, SYNC_TICKS = 20, 4
"""Time of a follower to load the leader's data, and maximum delay before the leader counts as dead: 2 s."""
POLL_S = 0.02
LOG_TAIL_CHARS = 3_000
JARS = (
    "zookeeper-[0-9]*.jar", "zookeeper-jute-*.jar", "slf4j-api-*.jar", "log4j-api-*.jar", "log4j-core-*.jar",
    "log4j-slf4j2-impl-*.jar", "netty-*.jar", "metrics-core-*.jar", "snappy-java-*.jar",
)  # fmt: skip
JVM_FLAGS = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j2.level=warn")


class ZooKeeperJarsError(CepheidError):
    """The server's jars are not installed."""

    hint: ClassVar[str] = "pip install 'cepheid[server,cluster]': it brings PySpark, whose wheel carries the ZooKeeper server"


class ZooKeeperServerError(CepheidError):
    """The server did not start."""

    hint: ClassVar[str] = "its log is in zookeeper.log in its directory"


@dataclass(frozen=True, slots=True)
class EnsembleServer:
    """A server of an ensemble on this machine: its number from 1, and the ports for its peers."""

    number: int
    peer_port: int
    election_port: int


class ZooKeeperServer:
    """A server with blocking calls and no threads. `pid` given: a server that another process started in this directory.

    `ensemble`: all its servers, of which this one is `number`. Empty: this server is alone.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        *,
        pid: int | None = None,
        ensemble: Sequence[EnsembleServer] = (),
        number: int = 1,
    ) -> None:
        self.directory = directory
        self.port = port
        self.pid = pid
        self._ensemble = ensemble
        self._number = number
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<ZooKeeperServer {self.address} in {self.directory}, pid {self.pid}>"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        return self.directory / "zookeeper.log"

    @property
    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:] if self.log_path.exists() else ""

    def command(self) -> list[str]:
        """Return the command. Raises JavaNotFoundError, ZooKeeperJarsError."""
        main = "org.apache.zookeeper.server." + ("quorum.QuorumPeerMain" if self._ensemble else "ZooKeeperServerMain")
        return [str(find_java()), *JVM_FLAGS, "-cp", ":".join(map(str, find_jars())), main, str(self.directory / "zookeeper.cfg")]

    def write_config(self) -> None:
        lines: dict[str, object] = {
            "tickTime": TICK_MS,
            "dataDir": self.directory / "data",
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "minSessionTimeout": 2 * TICK_MS,
            "maxSessionTimeout": 60_000,
            "maxClientCnxns": 0,
            "4lw.commands.whitelist": "srvr,mntr,cons,wchs",
            "admin.enableServer": "false",
            "preAllocSize": 4_096,  # KB; the default of 64 MB is for rotating disks
            "autopurge.snapRetainCount": 3,
            "autopurge.purgeInterval": 1,
        }
        (self.directory / "data").mkdir(0o750, parents=True, exist_ok=True)
        if self._ensemble:
            (self.directory / "data" / "myid").write_text(f"{self._number}\n")
            lines |= {"initLimit": INIT_TICKS, "syncLimit": SYNC_TICKS}
            for server in self._ensemble:
                lines[f"server.{server.number}"] = f"127.0.0.1:{server.peer_port}:{server.election_port}"
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        (self.directory / "zookeeper.cfg").write_text(text)
        make_private(self.directory)  # records of ledgers contain their master keys

    def start(self, timeout_s: float = 60.0) -> float:
        """Start it; return the seconds until it answered. Raises ZooKeeperServerError, with the end of its log."""
        assert self._process is None, f"{self!r} runs already"
        began = time.monotonic()
        self._check_port_is_free()  # otherwise another server could answer
        self.write_config()
        with open(self.log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o640)) as output:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=PRIVATE_UMASK,
            )
        self.pid = self._process.pid
        while not self.is_ready():
            ended = self._process.poll()
            if ended is not None or time.monotonic() - began > timeout_s:
                self.kill()
                problem = f"ended with {ended}" if ended is not None else f"did not answer within {timeout_s} s"
                message = f"the ZooKeeper server on {self.address} {problem}; the end of {self.log_path}:\n{self.log_tail}"
                raise ZooKeeperServerError(message, address=self.address)
            time.sleep(POLL_S)
        return time.monotonic() - began

    def is_ready(self, timeout_s: float = 2.0) -> bool:
        return bool(self.mode(timeout_s))

    def mode(self, timeout_s: float = 2.0) -> str:
        """Return `standalone`, `leader` or `follower`; empty while it does not serve."""
        # "ruok" is answered before sessions are; so is "srvr", but only a serving server reports its mode.
        lines = (self.ask("srvr", timeout_s) or "").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("Mode:")), "")

    def ask(self, word: str, timeout_s: float = 2.0) -> str | None:
        """Return the answer to a four-letter word; None: there was none."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout_s) as connection:
                connection.sendall(word.encode())
                answer = bytearray()
                while chunk := connection.recv(65_536):
                    answer += chunk
                return answer.decode()
        except OSError:
            return None

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop it with SIGTERM, then SIGKILL if it does not react."""
        self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL, 10.0)

    def pause(self) -> None:
        """Suspend it with SIGSTOP: the kernel still accepts connections, but nothing answers.

        Return when all threads are stopped.
        """
        self.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + _PAUSE_LIMIT_S
        while not _stands_still(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        assert self.pid is not None, f"{self!r} does not run"
        os.kill(self.pid, number)

    def _end(self, number: signal.Signals, timeout_s: float) -> None:
        if self.pid is None:
            return
        try:
            os.kill(self.pid, number)
            os.kill(self.pid, signal.SIGCONT)  # a paused process receives SIGTERM only then
        except ProcessLookupError:
            pass
        deadline = time.monotonic() + timeout_s
        while self._is_running() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self._is_running():
            os.kill(self.pid, signal.SIGKILL)
            while self._is_running():
                time.sleep(POLL_S)
        self.pid = self._process = None

    def _is_running(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        assert self.pid is not None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _check_port_is_free(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise ZooKeeperServerError(f"port {self.port} is taken: {error}", address=self.address) from None


def find_jars() -> list[Path]:
    """Return the server's jars and its dependencies, nothing else of Spark. Raises ZooKeeperJarsError."""
    spec = importlib.util.find_spec("pyspark")  # found, not imported
    for folder in (spec.submodule_search_locations if spec else None) or ():
        jars = Path(folder) / "jars"
        found = [sorted(jars.glob(pattern)) for pattern in JARS]
        if all(found):
            return [jar for group in found for jar in group]
        missing = [pattern for pattern, group in zip(JARS, found, strict=True) if not group]
        raise ZooKeeperJarsError(f"{jars} has no {', '.join(missing)}")
    raise ZooKeeperJarsError("pyspark is not installed")


def _stands_still(pid: int | None) -> bool:
    """Return whether every thread is stopped according to /proc;

    a signal reaches the threads of a busy process one after another.
    """
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended meanwhile
        return False
    return all(state in "Tt" for state in states)
