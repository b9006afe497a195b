"""`cepheid standalone` as a user runs it: a process, its words, its signals, and what it says when it cannot start."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cepheid_metadata.rocks_tree import RocksTree
from cepheid_ports import CepheidError
from tests.support import free_port
from tests.wire_client import WireClient

pytestmark = pytest.mark.slow

TOPIC = "persistent://public/default/t"


class Server:
    def __init__(self, data: Path, *flags: str, port: int | None = None, environment: dict[str, str] | None = None) -> None:
        self.port, self.admin_port = port or free_port(), free_port()
        command = [sys.executable, "-m", "cepheid_cli", "standalone", "--data", str(data), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--admin-port", str(self.admin_port), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("CEPHEID_")} | (environment or {}),
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._pumps = [
            threading.Thread(target=lambda stream, lines: lines.extend(stream), args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for pump in self._pumps:
            pump.start()

    def stores_a_message(self) -> bool:
        """Publish one message. False while the server does not acknowledge it."""
        try:
            with WireClient(f"pulsar://127.0.0.1:{self.port}", TOPIC, timeout_s=5) as client:
                client.open_producer()
                client.send(0, b"probe")
                return True
        except CepheidError:
            return False

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.stores_a_message():
            assert self.process.poll() is None, f"the server ended: {self.text()}"
            assert time.monotonic() < deadline, f"not ready within {timeout_s} s: {self.text()}"
            time.sleep(0.01)

    def text(self) -> str:
        return "".join(self.out) + "".join(self.err)

    def end(self, number: int = signal.SIGINT, timeout_s: float = 120.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        for pump in self._pumps:
            pump.join(60)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


@contextmanager
def running(data: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server(data, *flags, environment=environment)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end(signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_to_connect_and_stops_cleanly(tmp_path: Path, number: int) -> None:
    with running(tmp_path / "data") as server:
        assert server.end(number) == 0, server.text()
        text = "".join(server.out)
        assert re.search(r"cepheid standalone, ready after \d+\.\d\d s", text)
        assert f"pulsar://127.0.0.1:{server.port}" in text
        assert f"http://127.0.0.1:{server.admin_port}" in text
        assert str(tmp_path / "data") in text
        assert text.rstrip().endswith("stopped")


def test_what_was_acknowledged_is_there_after_sigkill(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--bookies", "3") as server:
        with WireClient(f"pulsar://127.0.0.1:{server.port}", TOPIC) as client:
            client.subscribe("s", shared=False, earliest=True)
            client.close_consumer()
        with WireClient(f"pulsar://127.0.0.1:{server.port}", TOPIC) as client:
            client.open_producer()
            stored = [(*client.send(number, b"m%d" % number), b"m%d" % number) for number in range(50)]
        server.end(signal.SIGKILL)
    with running(tmp_path / "data", "--bookies", "3") as server:
        with WireClient(f"pulsar://127.0.0.1:{server.port}", TOPIC) as client:
            client.subscribe("s", shared=False, earliest=True)
            received = []
            for message in client.receive():
                if message.payload != b"probe":
                    received.append((message.ledger_id, message.entry_id, message.payload))
                if len(received) == len(stored):
                    break
        assert received == stored


def open_to_others(directory: Path) -> list[str]:
    """Paths with more than 0640 (files) or 0750 (directories)."""
    return [
        f"{path} {path.lstat().st_mode:o}"
        for path in (directory, *directory.rglob("*"))
        if path.lstat().st_mode & (0o777 & ~(0o750 if path.is_dir() else 0o640))
    ]


def test_no_other_user_can_read_the_data_directory(tmp_path: Path) -> None:
    """Its databases hold the master keys of all ledgers."""
    data = tmp_path / "data"
    with running(data) as server:
        assert open_to_others(data) == []
        server.end()
    for path in (data, *data.rglob("*")):  # as an older release left them
        path.chmod(0o755 if path.is_dir() else 0o644)
    with running(data):
        assert open_to_others(data) == []


def test_settings_of_file_and_environment_reach_the_process(tmp_path: Path) -> None:
    """Those of the broker, of the admin API, and of the bookies; an old name is accepted with a warning."""
    with running(tmp_path / "data") as server:
        server.end()  # a new bookie would refuse the disk, which has less than what is to stay free below
    file = tmp_path / "settings.toml"
    file.write_text(
        "topic_creation = true\nadvertised_port = 7001\n[storage]\nmin_free_data_bytes = 0\n[dispatch]\nmax_permits = 5\n"
    )
    environment = {
        "CEPHEID_STANDALONE_ADMIN__MAX_PARTITIONS": "7",
        "CEPHEID_STANDALONE_STORAGE__MIN_FREE_JOURNAL_BYTES": str(1 << 60),
        "CEPHEID_STANDALONE_POLICIES__SUBSCRIPTION_TYPES": "Shared,Exclusive",
    }
    server = Server(tmp_path / "data", "--config", str(file), environment=environment)
    try:
        deadline = time.monotonic() + 120
        while True:  # publishing would tell that it serves; its disk has too little room for that
            try:
                runtime = json.loads(get(server.admin_port, "/admin/v2/brokers/configuration/runtime")[1])
                break
            except OSError:
                assert server.process.poll() is None, server.text()
                assert time.monotonic() < deadline, server.text()
                time.sleep(0.05)
        names = ("admin.max_partitions", "topic_creation.allowed", "dispatch.max_permits", "advertised_port")
        assert [runtime[name] for name in names] == ["7", "true", "5", "7001"]
        assert runtime["policies.subscription_types"] == '["Shared", "Exclusive"]'
        path = "/admin/v2/persistent/public/default/many/partitions"
        assert get(server.admin_port, path, method="PUT", body="8")[0] == 406
        assert get(server.admin_port, path, method="PUT", body="7")[0] == 204
        assert 'cepheid_bookie_writable{bookie="bookie-1"} 0' in get(server.admin_port, "/metrics")[1]
        assert server.end() == 0, server.text()
    finally:
        server.end(signal.SIGKILL)
    out, err = "".join(server.out), "".join(server.err)
    assert "clients   pulsar://127.0.0.1:7001" in out
    assert f"cepheid: warning: setting 'topic_creation' in file {file} was renamed: call it 'topic_creation.allowed'" in err


def get(port: int, path: str, method: str = "GET", body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        server = Server(tmp_path / "data", port=port)
        assert server.process.wait(120) == 1
        assert server.end() == 1
        (line,) = [line for line in server.err if line.startswith("cepheid: ")]
        assert str(port) in line
        assert "in use" in line
        assert "choose another: `--port`" in line


def test_a_data_directory_in_use_is_named(tmp_path: Path) -> None:
    with running(tmp_path / "data"):
        second = Server(tmp_path / "data")
        assert second.process.wait(120) == 1
        assert second.end() == 1
        (line,) = [line for line in second.err if line.startswith("cepheid: ")]
        assert str(tmp_path / "data") in line
        assert "another process" in line


def test_a_data_directory_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        assert server.end() == 0
    version = tmp_path / "data" / "bookie-1" / "VERSION"
    newer = version.read_text().replace('"format_version": 1', '"format_version": 99')
    version.write_text(newer)
    server = Server(tmp_path / "data")
    assert server.process.wait(120) == 1
    assert server.end() == 1
    (line,) = [line for line in server.err if line.startswith("cepheid: ")]
    assert "bookie-1" in line
    assert "format 99" in line
    assert version.read_text() == newer


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("left", ["nothing", "an empty directory", "a new database"])
def test_data_without_its_metadata_is_refused_and_nothing_is_written(tmp_path: Path, left: str) -> None:
    data = tmp_path / "data"
    with running(data) as server:
        server.end()
    shutil.rmtree(data / "metadata")
    if left == "an empty directory":
        (data / "metadata").mkdir()
    elif left == "a new database":
        tree = RocksTree(data / "metadata")
        tree.open()
        tree.close()
    looked_at = data / "bookie-1" if left == "a new database" else data  # opening a database writes to its log
    before = contents(looked_at)
    server = Server(data)
    assert server.process.wait(120) == 1
    assert server.end() == 1
    (line,) = [line for line in server.err if line.startswith("cepheid: ")]
    assert "metadata holds no cluster, but there is data of bookie-1" in line
    assert "put the metadata directory back" in line
    assert "Traceback" not in server.text()
    assert contents(looked_at) == before


def test_a_wrong_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", "--bookies", "0")
    assert server.process.wait(120) == 1
    assert server.end() == 1
    assert "setting bookies must be a whole number from 1 to 9, got 0 from the command line" in "".join(server.err)
    assert not (tmp_path / "data").exists()


def test_the_loss_of_a_bookies_disk_is_refused_until_it_is_accepted_for_one_start(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data) as server:
        assert server.end() == 0
    shutil.rmtree(data / "bookie-1")
    refused = Server(data)
    assert refused.process.wait(60) == 1
    refused.end()
    assert "its data is gone" in refused.text()
    assert "--accept-empty-disk" in refused.text()
    with running(data, "--accept-empty-disk") as server:
        assert server.end() == 0
    with running(data):
        pass
