"""What a local cluster knows and does of its processes, with members that only sleep. Real ones: tests/cli/test_dev_commands.py."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cepheid_cli.dev.status_table import status_table
from cepheid_dev import local_cluster, member_commands
from cepheid_dev.cluster_file import ClusterFile, ClusterFileError, ClusterState, Member
from cepheid_dev.local_cluster import (
    LocalCluster,
    LocalClusterError,
    PortTakenError,
    ProcessStatus,
    StartFailedError,
    UnknownMemberError,
)
from cepheid_dev.processes import DetachedProcess

SLEEP = "import time; print('slept', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('slept', flush=True); time.sleep(60)"


class World:
    """Members `bookie-1` and `broker-1`; each serves once `ready` says so."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program = SLEEP
        self.ready: Callable[[Path], bool] = lambda log: log.exists() and "slept" in log.read_text()
        self.cluster = LocalCluster(directory)
        with (file := ClusterFile(directory)).locked():
            members = (Member("bookie-1", "bookie", {"grpc": 1, "http": 2}), Member("broker-1", "broker", {"pulsar": 3, "http": 4}))
            file.save(ClusterState(founded=True, members=members))
        monkeypatch.setattr(member_commands, "command", lambda *_, **__: [sys.executable, "-c", self.program])
        monkeypatch.setattr(member_commands, "prepare", lambda own, _, member: (own / member.name).mkdir(exist_ok=True))
        log = "{}.log".format
        monkeypatch.setattr(member_commands, "is_ready", lambda own, _, member: self.ready(own / member.name / log(member.kind)))

    def state(self, name: str = "bookie-1") -> str:
        return {status.name: status.state for status in self.cluster.status()}[name]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    for name in world.cluster.names() if world.cluster.exists else ():
        world.cluster.kill(name)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_was_asked_of_a_member_tells_how_it_ended(world: World) -> None:
    cluster = world.cluster
    assert world.state() == "stopped"
    cluster.start("bookie-1")
    assert world.state() == "ready"
    cluster.pause("bookie-1")
    assert world.state() == "paused"
    with pytest.raises(LocalClusterError, match="cepheid dev resume bookie-1"):
        cluster.start("bookie-1")
    cluster.stop("bookie-1")  # also while it is paused
    assert world.state() == "stopped"
    cluster.start("bookie-1")
    cluster.kill("bookie-1")
    assert world.state() == "killed"
    world.program, world.ready = "pass", lambda _: False
    with pytest.raises(StartFailedError, match="bookie-1 ended"):
        cluster.start("bookie-1")
    assert world.state() == "died"
    assert cluster.pid("bookie-1") is None


def test_another_instance_finds_the_same_cluster(world: World) -> None:
    world.cluster.start("bookie-1")
    other = LocalCluster(world.cluster.directory)
    assert other.pid("bookie-1") == world.cluster.pid("bookie-1")
    other.kill("bookie-1")
    assert world.state() == "killed"


def test_what_hangs_in_its_start_can_be_killed(world: World) -> None:
    world.ready = lambda _: False
    failures: list[StartFailedError] = []

    def start() -> None:
        try:
            world.cluster.start("bookie-1")
        except StartFailedError as error:
            failures.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    wait_until(lambda: world.cluster.pid("bookie-1") is not None)
    assert world.state() == "starting"
    LocalCluster(world.cluster.directory).kill("bookie-1")
    starting.join(60)
    assert "bookie-1 ended" in str(failures[0])
    assert world.state() == "killed"


def test_two_starts_at_once_start_one_process(world: World) -> None:
    pids: list[int | None] = []

    def start() -> None:
        cluster = LocalCluster(world.cluster.directory)
        cluster.start("bookie-1")
        pids.append(cluster.pid("bookie-1"))

    starting = [threading.Thread(target=start) for _ in range(4)]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join(60)
    assert len(pids) == 4
    assert len(set(pids)) == 1
    assert (world.cluster.log_path("bookie-1")).read_text() == "slept\n"


def test_a_member_that_does_not_serve_in_time_goes_on(world: World) -> None:
    world.ready = lambda _: False
    with pytest.raises(StartFailedError, match="does not serve yet; it keeps trying"):
        world.cluster.start("bookie-1", timeout_s=0.05)
    assert world.state() == "starting"


def test_a_failed_start_shows_the_log_of_that_start(world: World) -> None:
    world.cluster.start("bookie-1")
    world.cluster.kill("bookie-1")
    world.program, world.ready = "print('no'); raise SystemExit(1)", lambda _: False
    with pytest.raises(StartFailedError, match=r"bookie\.log:\nno$"):
        world.cluster.start("bookie-1")


def test_who_does_not_stop_is_killed_and_named(world: World) -> None:
    world.program = STUBBORN
    world.cluster.start("bookie-1")
    with pytest.raises(LocalClusterError, match=r"bookie-1 did not stop within 0\.1 s"):
        world.cluster.stop("bookie-1", timeout_s=0.1)
    assert world.state() == "killed"


def test_only_bookies_lose_disks_and_only_members_are_known(world: World) -> None:
    data = world.cluster.directory / "bookie-1/data"
    world.cluster.start("bookie-1")
    data.mkdir()
    world.cluster.wipe("bookie-1")
    assert (world.state(), data.exists()) == ("killed", False)
    with pytest.raises(LocalClusterError, match="broker-1 is a broker"):
        world.cluster.wipe("broker-1")
    with pytest.raises(UnknownMemberError, match="did you mean bookie-1"):
        world.cluster.kill("bookie1")
    with pytest.raises(UnknownMemberError, match="there are bookie-1, broker-1"):
        world.cluster.log_path("x")
    with pytest.raises(LocalClusterError, match="does not run"):
        world.cluster.resume("broker-1")


def test_a_port_that_somebody_else_has_is_no_sign_of_serving(world: World) -> None:
    """Another local cluster's broker answers on 8080 while ours is down: ours does not serve because of that."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = ClusterFile(world.cluster.directory)
        with file.locked():
            state = file.load()
            assert state is not None
            file.save(state.with_member(Member("broker-1", "broker", {"pulsar": 3, "http": port})))
        world.ready = lambda _: True
        with pytest.raises(PortTakenError, match=rf"port {port} \(http\) of broker-1 is taken"):
            world.cluster.start("broker-1")
        with pytest.raises(PortTakenError):
            world.cluster.up()
        assert (world.state("bookie-1"), world.state("broker-1")) == ("stopped", "stopped")  # nothing was begun


def test_who_ends_is_not_ready_whoever_answers(world: World) -> None:
    world.program = "pass"
    pid: list[int | None] = []

    def ready(_: Path) -> bool:
        wait_until(lambda: world.cluster.pid("bookie-1") is None)
        pid.append(None)
        return True

    world.ready = ready
    with pytest.raises(StartFailedError, match="bookie-1 ended"):
        world.cluster.start("bookie-1")
    assert pid


def test_a_kill_finds_who_was_started_by_another_command_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note about an earlier process must not make the present one unkillable."""
    cluster, other = world.cluster, LocalCluster(world.cluster.directory)
    cluster.start("bookie-1")
    wait_gone = DetachedProcess.wait_gone

    def start_in_between(process: DetachedProcess, timeout_s: float) -> bool:
        gone = wait_gone(process, timeout_s)
        monkeypatch.setattr(DetachedProcess, "wait_gone", wait_gone)
        other.start("bookie-1")
        return gone

    monkeypatch.setattr(DetachedProcess, "wait_gone", start_in_between)
    cluster.kill("bookie-1")
    assert world.state() == "ready"  # the other command's
    cluster.kill("bookie-1")
    assert world.state() == "killed"


def test_a_disk_that_cannot_be_emptied_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    data = world.cluster.directory / "bookie-1" / "data"
    world.cluster.wipe("bookie-1")  # there is none yet
    data.mkdir(parents=True)
    monkeypatch.setattr("shutil.rmtree", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(LocalClusterError, match=r"bookie-1/data cannot be deleted: .*Permission denied"):
        world.cluster.wipe("bookie-1")


def test_deleting_a_cluster_leaves_what_is_not_its_own(world: World) -> None:
    directory = world.cluster.directory
    world.cluster.start("bookie-1")
    world.cluster.kill("bookie-1")
    (directory / "thesis.txt").write_text("years of work")
    world.cluster.delete()
    assert [path.name for path in directory.iterdir()] == ["thesis.txt"]


MEMBER = {"name": "bookie-1", "kind": "bookie", "ports": {"grpc": 1, "http": 2}}


@pytest.mark.parametrize(
    "fields",
    [
        {"members": [MEMBER, MEMBER]},
        {"members": [{**MEMBER, "kind": "zoo"}]},
        {"members": [{**MEMBER, "ports": {"grpc": "x", "http": 2}}]},
        {"members": [{**MEMBER, "ports": {"grpc": 1}}]},
        {"members": [{**MEMBER, "ports": {"grpc": 1, "http": 70_000}}]},
        {"members": [{**MEMBER, "ports": 7}]},
        {"members": [{**MEMBER, "pid": "y"}]},
        {"members": [{**MEMBER, "since_ms": None}]},
        {"members": [{**MEMBER, "name": "bookie-/../../etc"}]},
        {"members": [{**MEMBER, "name": 7}]},
        {"members": [{**MEMBER, "other": 1}]},
        {"members": 7},
        {"members": [], "session_timeout_s": "x"},
        {"members": [], "settings": []},
        {},
    ],
)
def test_a_damaged_record_of_the_cluster_is_refused_and_not_acted_on(tmp_path: Path, fields: dict[str, object]) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps({"format": 1, **fields}))
    with pytest.raises(ClusterFileError, match="is not the file of a local cluster"):
        LocalCluster(tmp_path).status()


def test_a_directory_that_cannot_hold_a_cluster_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ClusterFileError, match=rf"{directory} (cannot hold a cluster|is no directory)"):
            LocalCluster(directory).up()
    (tmp_path / "cluster.json").mkdir()
    with pytest.raises(ClusterFileError, match="cannot be read"):
        LocalCluster(tmp_path).status()


def test_where_no_cluster_is_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(LocalClusterError, match="cepheid dev up"):
        LocalCluster(tmp_path / "nowhere").add("bookie")
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_loses_no_record_and_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.cluster.start("bookie-1")
    before = (world.cluster.directory / "cluster.json").read_text()

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(ClusterFileError, match="No space left"):
            world.cluster.kill("bookie-1")
        patched.setattr(member_commands, "prepare", full)
        with pytest.raises(StartFailedError, match=r"bookie-1 cannot be started: .*No space left"):
            world.cluster.start("bookie-1")
    assert (world.cluster.directory / "cluster.json").read_text() == before
    assert world.state() == "died"


def test_who_cannot_be_written_down_is_not_left_running(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[DetachedProcess] = []
    spawn = local_cluster.spawn

    def spawn_noted(*arguments: object) -> DetachedProcess:
        spawned.append(spawn(*arguments))  # type: ignore[arg-type]
        return spawned[-1]

    def full(*_: object) -> None:
        raise ClusterFileError("cluster.json cannot be written: No space left on device")

    monkeypatch.setattr(local_cluster, "spawn", spawn_noted)
    with monkeypatch.context() as patched:
        patched.setattr(ClusterFile, "save", full)
        with pytest.raises(ClusterFileError, match="No space left"):
            world.cluster.start("bookie-1")
    assert [process.wait_gone(10) for process in spawned] == [True]


def test_who_was_never_started_is_there_since_never() -> None:
    table = status_table([ProcessStatus("bookie-1", "bookie", "stopped", None, {"grpc": 1, "http": 2}, 0)], 1_700_000_000_000)
    assert [list(column.cells) for column in table.columns][-1] == ["-"]
