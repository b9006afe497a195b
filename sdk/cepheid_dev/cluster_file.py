"""The state of a local cluster between two commands: `cluster.json` in its directory.

    {"format": 1, "founded": true, "secure": false, "session_timeout_s": 4.0, "settings": {"broker": {…}, "bookie": {…}},
     "members": [{"name": "bookie-1", "kind": "bookie", "ports": {"grpc": …, "http": …}, "pid": …, "born": "…", "asked": "up", …}]}

Rule: change it only under the lock of the directory, and replace it as a whole.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from cepheid_dev.processes import DetachedProcess
from cepheid_ports import CepheidError

FORMAT = 1
_FILE, _LOCK = "cluster.json", "cluster.lock"

Kind = Literal["zookeeper", "bookie", "broker"]
Asked = Literal["up", "stopped", "killed"]
_PORTS: Mapping[str, tuple[frozenset[str], ...]] = {
    "zookeeper": (frozenset({"client"}), frozenset({"client", "peer", "election"})),  # alone, and in an ensemble
    "bookie": (frozenset({"grpc", "http"}),),
    "broker": (frozenset({"pulsar", "http"}),),
}


class ClusterFileError(CepheidError):
    """The directory's cluster file is unusable."""

    hint: ClassVar[str] = "choose another directory, or delete this one if nothing in it is needed"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the cluster. `asked`: the last request for it; a process that is gone although "up" was requested has died."""

    name: str
    kind: Kind
    ports: Mapping[str, int]
    pid: int | None = None
    born: str = ""
    asked: Asked = "stopped"
    since_ms: int = 0

    @property
    def process(self) -> DetachedProcess | None:
        return None if self.pid is None else DetachedProcess(self.pid, self.born)


@dataclass(frozen=True, slots=True)
class ClusterState:
    session_timeout_s: float = 4.0  # the default of the roles
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    founded: bool = False
    secure: bool = False
    """Whether it uses the certificates, keys and settings of `cepheid secure init` in its directory `secure`."""
    members: tuple[Member, ...] = ()

    def with_member(self, member: Member) -> ClusterState:
        """Return the state with `member` replacing the one of the same name, or appended."""
        names = [known.name for known in self.members]
        if member.name not in names:
            return replace(self, members=(*self.members, member))
        return replace(self, members=tuple(member if known.name == member.name else known for known in self.members))


class ClusterFile:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / _FILE

    def __repr__(self) -> str:
        return f"<ClusterFile {self._path}>"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Run one command at a time. The lock ends with the process that holds it. Raises ClusterFileError."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ClusterFileError(f"{self._directory} cannot hold a cluster: {error}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def load(self) -> ClusterState | None:
        """Return the state; None: there is no cluster yet. Raises ClusterFileError."""
        try:
            fields = json.loads(self._path.read_text())
            found = fields.pop("format")
            if found != FORMAT:
                raise ClusterFileError(f"{self._path} has format {found}, this release knows {FORMAT}")
            members = tuple(Member(**member) for member in fields.pop("members"))
            state = ClusterState(**fields, members=members)
            _check(state)
            return state
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ClusterFileError(f"{self._directory} is not a directory") from None
        except OSError as error:
            raise ClusterFileError(f"{self._path} cannot be read: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ClusterFileError(f"{self._path} is not the file of a local cluster: {error}") from None

    def save(self, state: ClusterState) -> None:
        """Replace the file. If it raises ClusterFileError, the old content is unchanged."""
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps({"format": FORMAT, **asdict(state)}, indent=1) + "\n")
            new.replace(self._path)
        except OSError as error:
            raise ClusterFileError(f"{self._path} cannot be written: {error}") from None

    def delete(self) -> None:
        """Delete the file, and the directory if nothing else is in it."""
        for path in (self._path, self._path.with_suffix(".new"), self._directory / _LOCK):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # it contains other files
            self._directory.rmdir()


def _check(state: ClusterState) -> None:
    """Check the state from a file that may be edited or damaged. Raises ValueError, TypeError, AttributeError."""
    names = [member.name for member in state.members]
    for member in state.members:
        numbers = [number for number in member.ports.values() if type(number) is int and 0 < number < 65_536]
        if frozenset(member.ports) not in _PORTS.get(member.kind, ()) or len(numbers) != len(member.ports):
            raise ValueError(f"{member.name!r} of kind {member.kind!r} with ports {member.ports} is not a member")
        if "/" in member.name or member.name in ("", ".", ".."):  # it is the name of a directory
            raise ValueError(f"{member.name!r} is not a valid name of a member")
        if not isinstance(member.pid, int | None) or type(member.since_ms) is not int:
            raise ValueError(f"the process of {member.name!r} is unreadable")
    if len(set(names)) != len(names):
        raise ValueError(f"a cluster has each name once, not {names}")
    zookeepers = [member for member in state.members if member.kind == "zookeeper"]
    if len(zookeepers) > 1 and any("peer" not in member.ports for member in zookeepers):
        raise ValueError("several ZooKeeper servers need ports for each other")
    if not 0 < float(state.session_timeout_s) <= 3600 or not isinstance(state.settings, Mapping):
        raise ValueError("its session timeout or settings are unreadable")
