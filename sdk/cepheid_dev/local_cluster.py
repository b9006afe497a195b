"""A cluster of processes on this machine: the real ZooKeeper server, bookies, brokers; and failures to try out.

cluster = LocalCluster(directory)
cluster.up(bookies=4, brokers=2)
client = pulsar.Client(cluster.service_url)
cluster.kill("bookie-1")                             # SIGKILL: nothing is flushed, no goodbye
cluster.start("bookie-1")                            # the same data, the same ports
cluster.down()

    directory/cluster.json    the members with ports and pids: another process finds the same cluster
    directory/NAME/           data, settings.toml and log of one member

Rule 1: processes outlive the caller; each call checks what really runs, and no thread runs here.
Rule 2: a member keeps its ports for ever: its name in metadata and clients' addresses stay valid over restarts.
"""

from __future__ import annotations

import difflib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from cepheid_dev import member_commands as commands
from cepheid_dev.cluster_file import Asked, ClusterFile, ClusterFileError, ClusterState, Kind, Member
from cepheid_dev.free_ports import free_port, is_taken
from cepheid_dev.processes import ProcessState, spawn
from cepheid_ports import CepheidError, Ports

BOOKIES, BROKERS = 4, 2  # defaults of a new cluster
POLL_S = 0.02
LOG_TAIL_LINES = 25

_KINDS: tuple[Kind, ...] = ("zookeeper", "bookie", "broker")  # in the order of starting
Shown = Literal["ready", "starting", "paused", "stopped", "killed", "died"]


class LocalClusterError(CepheidError):
    """The local cluster cannot do what was requested."""


class UnknownMemberError(LocalClusterError):
    """No member has this name."""


class StartFailedError(LocalClusterError):
    """A member did not become ready."""


class PortTakenError(LocalClusterError):
    """Another process listens on a member's port."""

    hint: ClassVar[str] = "end that process; if it is another local cluster: cepheid dev down --dir ITS_DIRECTORY"


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """State of a member. `since_ms`: wall clock of the last start, stop or kill; `died`: it ended without a request.

    `role`: `leader` or `follower` for a ZooKeeper server in an ensemble.
    """

    name: str
    kind: Kind
    state: Shown
    pid: int | None
    ports: Mapping[str, int]
    since_ms: int
    role: str = ""


class LocalCluster:
    """A local cluster with blocking calls. The directory's lock is held to change its file, never while waiting, so that hanging
    members can be killed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._file = ClusterFile(self.directory)
        self._wall_ms = Ports().wall_ms

    def __repr__(self) -> str:
        return f"<LocalCluster in {self.directory}>"

    # The whole

    def up(
        self,
        bookies: int | None = None,
        brokers: int | None = None,
        *,
        zookeepers: int | None = None,
        session_timeout_s: float | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        usual_ports: bool = False,
        secure: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        """Create a cluster, or restart the existing one, with at least this many bookies and brokers. Return when all serve.

        `settings`: by role "broker" or "bookie", as in their TOML files. Not given: as before. `usual_ports`: a new cluster's
        first broker gets 6650 and 8080 if they are free; two clusters that start at the same moment could both want them.
        `secure`: a new cluster has TLS on all ports but ZooKeeper's, and clients must authenticate. `zookeepers`: servers of a
        new cluster; their number cannot change later.
        """
        with self._file.locked():
            state = self._file.load() or ClusterState()
            if session_timeout_s is not None:
                state = replace(state, session_timeout_s=session_timeout_s)
            if settings is not None:
                state = replace(state, settings={role: dict(values) for role, values in settings.items()})
            new = not state.members
            if secure and not new and not state.secure:
                raise LocalClusterError(f"the cluster in {self.directory} was created without security; create a new one elsewhere")
            state = replace(state, secure=state.secure or secure)
            present = len([member for member in state.members if member.kind == "zookeeper"])
            if zookeepers is not None and present not in (0, zookeepers):
                raise LocalClusterError(
                    f"the cluster in {self.directory} has {present} ZooKeeper servers for good; create a new one elsewhere"
                )
            state = _with_members(state, "zookeeper", present or zookeepers or 1)
            state = _with_members(state, "bookie", bookies if bookies is not None else BOOKIES if new else 0)
            state = _with_members(
                state,
                "broker",
                brokers if brokers is not None else BROKERS if new else 0,
                usual_ports=usual_ports and not state.secure,
            )
            self._file.save(state)
        self._check_ports([member.name for member in state.members])  # before anything is started
        for member in state.members:
            if member.process is not None:
                member.process.send(signal.SIGCONT)  # paused ones are resumed, too
        if self._state().secure:
            self._secure(timeout_s)
        self._start([member.name for member in state.members if member.kind == "zookeeper"], timeout_s)
        self._found(timeout_s)
        self._start([member.name for member in state.members], timeout_s)

    def down(self, timeout_s: float = 30.0) -> None:
        """Stop everything gracefully: brokers, bookies, ZooKeeper. The data stays; `up` continues with it."""
        for kind in reversed(_KINDS):
            self._stop([member for member in self._state().members if member.kind == kind], timeout_s)

    def delete(self) -> None:
        """Delete a cluster that is down, with its data and logs. Other files in the directory stay."""
        for name in [*self.names(), *([commands.SECURE] if self._state().secure else [])]:
            _delete_tree(self.directory / name)
        self.client_environment.unlink(missing_ok=True)
        self._file.delete()

    def status(self) -> list[ProcessStatus]:
        return [
            ProcessStatus(
                member.name, member.kind, self._shown(member), member.pid, member.ports, member.since_ms, self._role(member)
            )
            for member in self._state().members
        ]

    # One member

    def start(self, name: str, *, accept_empty_disk: bool = False, timeout_s: float = 60.0) -> None:
        """Start it and return when it serves, also if it already did. Raises StartFailedError with the end of its log."""
        self._start([name], timeout_s, accept_empty_disk=accept_empty_disk)

    def stop(self, name: str, timeout_s: float = 30.0) -> None:
        """Stop it gracefully (SIGTERM). Raises LocalClusterError if it must be killed."""
        self._stop([self._require(name)], timeout_s)

    def restart(self, name: str, timeout_s: float = 60.0) -> None:
        """Stop it gracefully and start it again; return when it serves."""
        self.stop(name)
        self.start(name, timeout_s=timeout_s)

    def kill(self, name: str) -> None:
        """Kill it with SIGKILL: nothing is flushed."""
        self._kill(self._require(name))

    def pause(self, name: str) -> None:
        """Suspend it with SIGSTOP: its connections stay, but it does not answer."""
        self._signal(name, signal.SIGSTOP, lambda state: state is ProcessState.PAUSED)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._signal(name, signal.SIGCONT, lambda state: state is ProcessState.RUNNING)

    def wipe(self, name: str) -> None:
        """Destroy a bookie's disk: it is killed if it runs, and its data is deleted. Its cookie stays in metadata."""
        member = self._require(name)
        if member.kind != "bookie":
            raise LocalClusterError(f"{name} is a {member.kind}: only bookies have a disk that can be wiped")
        self._kill(member)
        _delete_tree(self.directory / name / "data")

    def add(self, kind: Literal["bookie", "broker"], timeout_s: float = 60.0) -> str:
        """Add a member; return its name once it serves."""
        self._state()  # nothing is created without a cluster
        with self._file.locked():
            state = self._state()
            count = len([member for member in state.members if member.kind == kind])
            self._file.save(_with_members(state, kind, count + 1))
        name = f"{kind}-{count + 1}"
        self._start([name], timeout_s)
        return name

    # What is where

    @property
    def secure_directory(self) -> Path | None:
        """The directory of a secured cluster's certificates, keys and tokens; None: it is open."""
        return self.directory / commands.SECURE if self._state().secure else None

    @property
    def client_environment(self) -> Path:
        """The file that a shell sources to reach a secured cluster."""
        return self.directory / "client.env"

    @property
    def exists(self) -> bool:
        return self._file.load() is not None

    def names(self) -> list[str]:
        return [member.name for member in self._state().members]

    @property
    def service_url(self) -> str:
        """The addresses of all brokers, separated by commas."""
        return commands.service_url(self._state())

    @property
    def admin_urls(self) -> list[str]:
        return commands.admin_urls(self._state())

    @property
    def metadata_url(self) -> str:
        return commands.metadata_url(self._state())

    @property
    def zookeeper_leader(self) -> str:
        """The name of the ensemble's leader; empty if there is none now, or it is a single server."""
        return next((member.name for member in self._state().members if self._role(member) == "leader"), "")

    @property
    def broker_ports(self) -> dict[str, int]:
        """Ports of the binary protocol, by broker name."""
        return {member.name: member.ports["pulsar"] for member in self._state().members if member.kind == "broker"}

    @property
    def bookie_ports(self) -> dict[str, int]:
        """gRPC ports, by bookie name."""
        return {member.name: member.ports["grpc"] for member in self._state().members if member.kind == "bookie"}

    def pid(self, name: str) -> int | None:
        """Return the process id; None: it does not run."""
        process = self._require(name).process
        return None if process is None or process.state() is ProcessState.GONE else process.pid

    def log_path(self, name: str) -> Path:
        return self._log_path(self._require(name))

    def _log_path(self, member: Member) -> Path:
        return self.directory / member.name / f"{member.kind}.log"

    # Underneath

    def _state(self) -> ClusterState:
        state = self._file.load()
        if state is None:
            raise LocalClusterError(f"there is no local cluster in {self.directory}; create one: cepheid dev up")
        return state

    def _require(self, name: str) -> Member:
        members = {member.name: member for member in self._state().members}
        if name not in members:
            near = difflib.get_close_matches(name, members, n=1, cutoff=0.5)
            known = f"did you mean {near[0]}?" if near else f"there are {', '.join(members)}"
            raise UnknownMemberError(f"no member of the cluster is called {name!r}; {known}", name=name)
        return members[name]

    def _shown(self, member: Member) -> Shown:
        process = member.process
        state = ProcessState.GONE if process is None else process.state()
        if state is ProcessState.GONE:
            return "died" if member.asked == "up" else member.asked
        if state is ProcessState.PAUSED:
            return "paused"
        return "ready" if commands.is_ready(self.directory, self._state(), member) else "starting"

    def _role(self, member: Member) -> str:
        process = member.process
        if process is None or process.state() is not ProcessState.RUNNING:
            return ""
        return commands.role(self.directory, self._state(), member)

    def _note(self, member: Member, asked: Asked) -> None:
        """Record the request, unless the member was started again meanwhile."""
        with self._file.locked():
            found = self._require(member.name)
            if found.process == member.process:
                self._file.save(self._state().with_member(replace(found, asked=asked, since_ms=self._wall_ms())))

    def _start(self, names: Sequence[str], timeout_s: float, *, accept_empty_disk: bool = False) -> None:
        """Start all at once; members that run are only waited for."""
        self._check_ports(names)
        logged = {name: _size(self.log_path(name)) for name in names}
        for name in names:
            self._spawn(name, accept_empty_disk=accept_empty_disk)
        deadline = time.monotonic() + timeout_s
        for name in names:
            self._wait_ready(self._require(name), deadline, logged[name])

    def _check_ports(self, names: Sequence[str]) -> None:
        """Check the ports of members that do not run: another process on such a port could look like a ready member."""
        for member in map(self._require, names):
            if member.process is None or member.process.state() is ProcessState.GONE:
                for use, port in member.ports.items():
                    if is_taken(port):
                        raise PortTakenError(f"port {port} ({use}) of {member.name} is taken by another process", port=port)

    def _spawn(self, name: str, *, accept_empty_disk: bool) -> None:
        """Start a member unless it runs. The lock is held until its pid is recorded, so that it is not started twice."""
        with self._file.locked():
            state, member = self._state(), self._require(name)
            found = ProcessState.GONE if member.process is None else member.process.state()
            if found is ProcessState.PAUSED:
                raise LocalClusterError(f"{name} is paused; resume it: cepheid dev resume {name}")
            if found is ProcessState.GONE:
                try:
                    commands.prepare(self.directory, state, member)
                    command = commands.command(self.directory, state, member, accept_empty_disk=accept_empty_disk)
                    process = spawn(command, self._log_path(member), commands.environment())
                except OSError as error:
                    raise StartFailedError(f"{name} cannot be started: {error}", name=name) from None
                started = replace(member, pid=process.pid, born=process.born, asked="up", since_ms=self._wall_ms())
                try:
                    self._file.save(state.with_member(started))
                except ClusterFileError:  # on a full disk the process would be unknown, and its ports taken
                    process.send(signal.SIGKILL)
                    raise

    def _wait_ready(self, member: Member, deadline: float, logged: int) -> None:
        assert member.process is not None, f"{member.name} was started"
        while True:
            ready = commands.is_ready(self.directory, self._state(), member)
            gone = member.process.state() is ProcessState.GONE
            if ready and not gone:
                return
            if gone or time.monotonic() > deadline:
                what = "ended" if gone else "does not serve yet; it keeps trying"
                message = f"{member.name} {what}; the end of {self._log_path(member)}:\n{self._log_tail(member, logged)}"
                raise StartFailedError(message, name=member.name)
            time.sleep(POLL_S)

    def _log_tail(self, member: Member, start: int) -> str:
        """Return the last lines since `start`, where this run began."""
        with self._log_path(member).open("rb") as log:
            log.seek(start)
            return "\n".join(log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _secure(self, timeout_s: float) -> None:
        _run(commands.secure_init_command(self.directory), "certificates could not be created", timeout_s)
        self.client_environment.write_text(commands.client_environment(self.directory, self._state()))

    def _found(self, timeout_s: float) -> None:
        if self._state().founded:
            return
        _run(commands.init_command(self.directory, self._state()), "the cluster could not be created", timeout_s)
        with self._file.locked():
            self._file.save(replace(self._state(), founded=True))

    def _stop(self, members: Sequence[Member], timeout_s: float) -> None:
        for member in members:
            if member.process is not None:
                member.process.send(signal.SIGTERM)
                member.process.send(signal.SIGCONT)  # a paused one receives the first signal only after this
        deadline = time.monotonic() + timeout_s
        stubborn: list[str] = []
        for member in members:
            if member.process is not None and not member.process.wait_gone(deadline - time.monotonic()):
                stubborn.append(member.name)
                self._kill(member)
            elif member.asked == "up":
                self._note(member, "stopped")
        if stubborn:
            raise LocalClusterError(f"{', '.join(stubborn)} did not stop within {timeout_s:g} s and were killed; see the log")

    def _kill(self, member: Member) -> None:
        if member.process is None:
            return
        runs = member.process.state() is not ProcessState.GONE
        if runs:
            member.process.send(signal.SIGKILL)
            if not member.process.wait_gone(10.0):
                raise LocalClusterError(f"{member.name} (pid {member.pid}) still exists 10 s after SIGKILL: does its disk hang?")
        if runs or member.asked == "up":
            self._note(member, "killed")

    def _signal(self, name: str, number: signal.Signals, done: Callable[[ProcessState], bool]) -> None:
        member = self._require(name)
        if member.process is None or member.process.state() is ProcessState.GONE:
            raise LocalClusterError(f"{name} does not run; start it: cepheid dev start {name}")
        member.process.send(number)
        deadline = time.monotonic() + 5.0
        while not done(member.process.state()):  # a thread in the middle of a sync stops after it
            if time.monotonic() > deadline:
                raise LocalClusterError(f"{name} did not react to {number.name} within 5 s")
            time.sleep(POLL_S)


def _run(command: Sequence[str], problem: str, timeout_s: float) -> None:
    """Raises StartFailedError."""
    try:
        done = subprocess.run(command, env=commands.environment(), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise StartFailedError(f"{problem} within {timeout_s:g} s; check ZooKeeper's log") from None
    if done.returncode != 0:
        raise StartFailedError(f"{problem}: {done.stderr.strip()}")


def _delete_tree(directory: Path) -> None:
    """Raises LocalClusterError."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise LocalClusterError(f"{directory} cannot be deleted: {error}") from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _with_members(state: ClusterState, kind: Kind, count: int, *, usual_ports: bool = False) -> ClusterState:
    """Return the state with at least `count` members of this kind."""
    present = len([member for member in state.members if member.kind == kind])
    alone = kind == "zookeeper" and max(present, count) == 1
    for number in range(present + 1, count + 1):
        taken = [port for member in state.members for port in member.ports.values()]
        name = kind if alone else f"{kind}-{number}"
        ports = _new_ports(kind, taken, usual=usual_ports and number == 1, alone=alone)
        state = state.with_member(Member(name, kind, ports))
    return replace(state, members=tuple(sorted(state.members, key=lambda member: _KINDS.index(member.kind))))


def _new_ports(kind: Kind, taken: list[int], *, usual: bool, alone: bool) -> dict[str, int]:
    """Return free ports; those that brokers usually have if wanted and free. `alone`: it has no peers."""
    wishes: dict[Kind, dict[str, int | None]] = {
        "zookeeper": {"client": None} if alone else {"client": None, "peer": None, "election": None},
        "bookie": {"grpc": None, "http": None},
        "broker": {"pulsar": 6650 if usual else None, "http": 8080 if usual else None},
    }
    ports: dict[str, int] = {}
    for use, wanted in wishes[kind].items():
        ports[use] = free_port(wanted, taken=[*taken, *ports.values()])
    return ports
