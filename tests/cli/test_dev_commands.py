"""`cepheid dev` against real processes: each command, what it prints, and what it says to what it cannot do."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unittest import mock

import pytest

from cepheid_cli.app import run
from cepheid_cli.dev.log_follower import followed, last_lines
from cepheid_cli.dev.status_table import duration
from cepheid_dev.cluster_file import ClusterFileError
from cepheid_dev.local_cluster import LocalCluster
from tests.wire_client import WireClient

CEPHEID = (sys.executable, "-m", "cepheid_cli")
TOPIC = "persistent://public/default/t"


class Shell:
    """Runs commands on one cluster directory, in this process: starting Python for each takes longer than most of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        plain = {name: value for name, value in os.environ.items() if not name.startswith("CEPHEID_")}
        self.environment = {**plain, "CEPHEID_DEV_DIR": str(directory), "COLUMNS": "140"}

    def run(self, *arguments: str) -> tuple[int, str]:
        said = io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["cepheid", "dev", *arguments]),
            mock.patch.dict(os.environ, self.environment, clear=True),
            redirect_stdout(said),
            redirect_stderr(said),
        ):
            try:
                run()
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else ended.code is not None
        return code, said.getvalue()

    def ok(self, *arguments: str) -> str:
        code, said = self.run(*arguments)
        assert code == 0, said
        return said

    def refused(self, *arguments: str) -> str:
        code, said = self.run(*arguments)
        assert code != 0, said
        return said

    def states(self) -> dict[str, str]:
        lines = self.ok("status").splitlines()[1:]
        return {line.split()[0]: line.split()[1] for line in lines}


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path / "cluster")
    yield shell
    cluster = LocalCluster(shell.directory)
    with suppress(ClusterFileError):
        for name in cluster.names() if cluster.exists else ():
            cluster.kill(name)


def published(cluster: LocalCluster, count: int) -> list[bytes]:
    sent = [b"m%d" % number for number in range(count)]
    with WireClient(f"pulsar://127.0.0.1:{cluster.broker_ports['broker-1']}", TOPIC) as client:
        client.subscribe("kept", shared=False, earliest=True)  # without a subscription nothing is kept
        client.close_consumer()
        client.open_producer()
        for number, payload in enumerate(sent):
            client.send(number, payload)
    return sent


def received(cluster: LocalCluster, count: int, subscription: str) -> list[bytes]:
    found: list[bytes] = []
    with WireClient(f"pulsar://127.0.0.1:{cluster.broker_ports['broker-1']}", TOPIC) as client:
        client.subscribe(subscription, shared=False, earliest=True)
        for message in client.receive():
            found.append(message.payload)
            if len(found) == count:
                break
    return found


def asked(cluster: LocalCluster, *words: str) -> tuple[int, str]:
    """`cepheid ledgers …`, with no broker's help."""
    command = [*CEPHEID, "ledgers", *words, "--metadata", cluster.metadata_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_from_up_to_down(shell: Shell) -> None:
    said = shell.ok("up", "--bookies", "3", "--brokers", "1", "--session-timeout", "5", "--any-ports")
    cluster = LocalCluster(shell.directory)
    assert f"clients   {cluster.service_url}" in said
    assert f"metadata  {cluster.metadata_url}" in said
    everybody = ["zookeeper", "bookie-1", "bookie-2", "bookie-3", "broker-1"]
    assert shell.states() == dict.fromkeys(everybody, "ready")
    sent = published(cluster, 20)

    for number in (1, 2, 3):
        shell.ok("kill", f"bookie-{number}")
    code, said = asked(cluster, "verify", "--all")
    assert "its end is not known: bookie-" in said, "nobody told how far the open ledger goes: that is not sound"
    assert "the end of 1 open ledger is not known" in said
    assert code == 3, "nothing is bad for certain"
    code, said = asked(cluster, "read", "1")
    assert "may have entries above -1" in said
    assert code == 1
    shell.ok("up")
    assert asked(cluster, "verify", "--all")[0] == 0

    pid = cluster.pid("bookie-1")
    assert "cepheid dev start bookie-1" in shell.ok("kill", "bookie-1")
    assert shell.states()["bookie-1"] == "killed"
    assert "bookie-1 is ready" in shell.ok("start", "bookie-1")
    assert cluster.pid("bookie-1") not in (None, pid)
    assert "bookie-1 is ready" in shell.ok("start", "bookie-1")  # again changes nothing

    shell.ok("pause", "bookie-2")
    assert shell.states()["bookie-2"] == "paused"
    assert "is paused" in shell.refused("start", "bookie-2")
    shell.ok("resume", "bookie-2")
    shell.ok("stop", "bookie-2")
    assert shell.states()["bookie-2"] == "stopped"
    assert "does not run; start it: cepheid dev start bookie-2" in shell.refused("pause", "bookie-2")
    shell.ok("start", "bookie-2")

    said = shell.ok("wipe", "bookie-3")
    assert "Its cookie stays in metadata" in said
    assert "--accept-empty-disk" in said
    said = shell.refused("start", "bookie-3")
    assert "bookie-3 ended" in said
    assert "its data is gone" in said
    assert shell.states()["bookie-3"] == "died"
    shell.ok("start", "bookie-3", "--accept-empty-disk")
    assert "bookie-4 is ready" in shell.ok("add", "bookie")
    assert "broker-2 is ready" in shell.ok("add", "broker")

    assert len(shell.ok("logs", "broker-1", "-n", "3").splitlines()) == 3
    assert "did you mean broker-1?" in shell.refused("kill", "broker1")
    assert "there are zookeeper, bookie-1" in shell.refused("logs", "x")
    assert "broker-1 is a broker" in shell.refused("wipe", "broker-1")

    shell.ok("pause", "bookie-1")
    shell.ok("kill", "bookie-4")
    shell.ok("up")
    assert set(shell.states().values()) == {"ready"}
    shell.ok("down")
    assert set(shell.states().values()) == {"stopped"}
    shell.ok("up")
    assert shell.states() == dict.fromkeys([*everybody[:4], "bookie-4", "broker-1", "broker-2"], "ready")
    shell.ok("stop", "broker-2")  # what reads below knows one broker
    assert received(cluster, len(sent), "kept") == sent
    shell.ok("down", "--delete")
    assert not shell.directory.exists()


@pytest.mark.slow
def test_an_ensemble_of_zookeepers_survives_the_loss_of_its_leader(shell: Shell) -> None:
    shell.ok("up", "--bookies", "1", "--brokers", "1", "--zookeepers", "3", "--any-ports")
    cluster = LocalCluster(shell.directory)
    servers = ["zookeeper-1", "zookeeper-2", "zookeeper-3"]
    assert shell.states() == dict.fromkeys([*servers, "bookie-1", "broker-1"], "ready")
    assert cluster.metadata_url.count(",") == 2
    said = shell.ok("status")
    assert [said.count(f"ready {role}") for role in ("leader", "follower")] == [1, 2]
    leader = cluster.zookeeper_leader
    shell.ok("kill", leader)
    deadline = time.monotonic() + 60
    while cluster.zookeeper_leader == "":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    sent = published(cluster, 5)  # a new topic: metadata is written
    shell.ok("start", leader)
    assert f"{leader} is ready" in shell.ok("restart", leader)
    assert received(cluster, len(sent), "kept") == sent
    assert "has 3 ZooKeeper servers" in shell.refused("up", "--zookeepers", "1")


@pytest.mark.slow
def test_nothing_is_there_yet(shell: Shell) -> None:
    for command in (["status"], ["kill", "bookie-1"], ["down"], ["add", "bookie"], ["logs", "zookeeper"]):
        assert "cepheid dev up" in shell.refused(*command), command
    assert not (shell.directory / "cluster.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--bookies", "0"], "bookies"),
        (["up", "--session-timeout", "0.1"], "session-timeout"),
        (["add", "zookeeper"], "'bookie'"),
        (["up", "--bookie-config", "/nowhere.toml"], "cannot read settings file /nowhere.toml"),
        (["logs", "bookie-1", "-n", "-1"], "-n"),
    ],
)
def test_bad_input_starts_nothing(shell: Shell, arguments: list[str], words: str) -> None:
    assert words in shell.refused(*arguments)
    assert not (shell.directory / "cluster.json").exists()


@pytest.mark.slow
def test_a_file_that_is_no_cluster_is_left_alone(shell: Shell) -> None:
    shell.directory.mkdir()
    (shell.directory / "cluster.json").write_text("{}")
    assert "is not the file of a local cluster" in shell.refused("status")
    (shell.directory / "cluster.json").write_text('{"format": 2}')
    assert "has format 2" in shell.refused("up")


@pytest.mark.slow
def test_a_misspelt_setting_ends_the_start_with_its_words(shell: Shell) -> None:
    config = shell.directory.parent / "bookie.toml"
    config.write_text("[storage]\ngc_intervall_s = 5\n")
    said = shell.refused("up", "--bookies", "1", "--brokers", "1", "--bookie-config", str(config))
    assert "bookie-1 ended" in said
    assert "did you mean 'storage.gc_interval_s'?" in said


def test_logs_are_followed(shell: Shell, tmp_path: Path) -> None:
    shell.directory.mkdir()
    (shell.directory / "bookie-1").mkdir()
    log = shell.directory / "bookie-1/bookie.log"
    log.write_text("one\ntwo\n")
    member = '{"name": "bookie-1", "kind": "bookie", "ports": {"grpc": 1, "http": 2}}'
    (shell.directory / "cluster.json").write_text(f'{{"format": 1, "members": [{member}]}}')
    command = [*CEPHEID, "dev", "logs", "bookie-1", "-n", "1", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=shell.environment) as following:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(following.stdout or ()), daemon=True)
        reader.start()
        deadline = time.monotonic() + 120
        while not lines and time.monotonic() < deadline:
            time.sleep(0.02)
        with log.open("a") as more:
            more.write("three\n")
        while lines[-1:] != ["three\n"] and time.monotonic() < deadline:
            time.sleep(0.02)
        following.kill()
        reader.join(60)
    assert lines == ["two\n", "three\n"]


def test_looking_is_cheap() -> None:
    """What a command does not need it does not import."""
    code = (
        "import sys; from cepheid_cli.app import app; from cepheid_dev.local_cluster import LocalCluster;"
        "import cepheid_cli.dev.status_table;"
        "print([name for name in ('grpc', 'fastapi', 'kazoo', 'rocksdict', 'uvicorn', 'cepheid_broker', 'pydantic')"
        " if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("ms", "words"), [(0, "0s"), (-5, "0s"), (59_999, "59s"), (200_000, "3m 20s"), (7_500_000, "2h 5m"), (273_600_000, "3d 4h")]
)
def test_how_long_is_told_in_two_units(ms: int, words: str) -> None:
    assert duration(ms) == words


def test_nothing_falls_between_the_last_lines_and_what_follows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n")
    following = followed(log, 1)
    assert next(following) == "two\n"
    with log.open("a") as more:
        more.write("three\n")
    assert next(following) == "three\n", "written after the last lines were read, and before more was looked for"


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log, 3) == []
    log.write_bytes(b"one\ntw\xff\nthree")
    assert last_lines(log, 2) == ["tw\N{REPLACEMENT CHARACTER}\n", "three"]
    assert last_lines(log, 0) == []


@pytest.mark.slow
def test_help_names_every_command() -> None:
    said = subprocess.run([*CEPHEID, "dev", "--help"], capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"^[│|]?\s*(\w+) ", said, re.MULTILINE))
    assert {"up", "status", "logs", "kill", "pause", "resume", "wipe", "start", "stop", "add", "down"} <= named
