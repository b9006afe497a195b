"""What a local cluster knows and does of its processes, with members that only sleep. Real ones: tests/cli/test_dev_commands.py."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cepheid_dev import member_commands
from cepheid_dev.cluster_file import ClusterFile, ClusterState, Member
from cepheid_dev.local_cluster import LocalCluster, LocalClusterError, StartFailedError, UnknownMemberError

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
        monkeypatch.setattr(member_commands, "is_ready", lambda own, member: self.ready(own / member.name / f"{member.kind}.log"))

    def state(self, name: str = "bookie-1") -> str:
        return {status.name: status.state for status in self.cluster.status()}[name]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    for name in world.cluster.names():
        world.cluster.kill(name)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
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
    starting.join(20)
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
        thread.join(20)
    assert len(pids) == 4
    assert len(set(pids)) == 1
    assert (world.cluster.log_path("bookie-1")).read_text() == "slept\n"


def test_a_member_that_does_not_serve_in_time_goes_on(world: World) -> None:
    world.ready = lambda _: False
    with pytest.raises(StartFailedError, match="does not serve yet; it goes on trying"):
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
