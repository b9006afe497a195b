"""`cepheid secure enable` on a cluster of processes with official clients at work: four rolling restarts, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pulsar
import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

from cepheid_dev.free_ports import free_port
from cepheid_dev.local_cluster import LocalCluster
from cepheid_security import client_context
from tests.e2e.official_client import client_of
from tests.previous_release.traffic import Traffic

pytestmark = pytest.mark.slow

PATIENCE_S = 240.0
BOOKIES, BROKERS = ("bookie-1", "bookie-2"), ("broker-1", "broker-2")
OPEN_TOPIC = "persistent://public/default/open"
TOPIC = "persistent://public/default/secured"


class Cluster:
    """Bookies and brokers with fixed ports, which are restarted with or without `--secure`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.secure = directory, directory / "secure"
        self._zookeeper = LocalCluster(directory / "zookeeper")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        taken: list[int] = []
        for _ in range(4 * len(BROKERS) + 2 * len(BOOKIES)):
            taken.append(free_port(taken=taken))
        numbers = iter(taken)
        self._ports = {name: [next(numbers) for _ in range(2)] for name in BOOKIES}
        self._ports |= {name: [next(numbers) for _ in range(4)] for name in BROKERS}

    def up(self) -> None:
        self._zookeeper.up(bookies=0, brokers=0)
        self.metadata_url = self._zookeeper.metadata_url
        for name in (*BOOKIES, *BROKERS):
            self.start(name)

    def down(self) -> None:
        for name in list(self._running):
            self.stop(name)
        self._zookeeper.down()

    def url(self, *, tls: bool) -> str:
        ports = [self._ports[name][2 if tls else 0] for name in BROKERS]
        return ("pulsar+ssl://" if tls else "pulsar://") + ",".join(f"localhost:{port}" for port in ports)

    def admin_url(self, *, tls: bool) -> str:
        port = self._ports["broker-1"][3 if tls else 1]
        return f"{'https' if tls else 'http'}://localhost:{port}"

    def start(self, name: str, *, secured: bool = False) -> None:
        kind, ports, own = name.partition("-")[0], self._ports[name], self.directory / name
        own.mkdir(exist_ok=True)
        if kind == "bookie":
            text = f'data_dir = "{own / "data"}"\nport = {ports[0]}\nhttp_port = {ports[1]}\n'
        else:
            text = f"port = {ports[0]}\nadmin_port = {ports[1]}\nensemble_size = 2\nwrite_quorum = 2\nack_quorum = 1\n"
            text += f"[tls]\nport = {ports[2]}\nadmin_port = {ports[3]}\n"
        (own / "own.toml").write_text(text)
        command = [sys.executable, "-m", "cepheid_cli", kind, "--metadata", self.metadata_url, "--id", name]
        command += ["--config", str(own / "own.toml"), *(["--secure", str(self.secure)] if secured else [])]
        with (own / "log").open("ab") as log:
            self._running[name] = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_ready(name):
            text = (own / "log").read_text(errors="replace")[-4000:]
            assert self._running[name].poll() is None, f"{name} ended:\n{text}"
            assert time.monotonic() < deadline, f"{name} is not ready:\n{text}"
            time.sleep(0.1)

    def stop(self, name: str) -> None:
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)

    def restart(self, *names: str) -> None:
        for name in names:
            self.stop(name)
            self.start(name, secured=True)

    def _is_ready(self, name: str) -> bool:
        if name in BOOKIES:
            urls = [f"http://127.0.0.1:{self._ports[name][1]}/ready", f"https://localhost:{self._ports[name][1]}/ready"]
        else:
            urls = [f"http://127.0.0.1:{self._ports[name][1]}/ready", f"https://localhost:{self._ports[name][3]}/ready"]
        for url in urls:
            context = None
            if url.startswith("https"):
                if not self.secure.exists():
                    continue
                context = client_context(ca_file=str(self.secure / "ca.pem"))
            with suppress(OSError), urllib.request.urlopen(url, timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        return False

    def cepheid(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cepheid_cli", *words]
        return subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=PATIENCE_S)

    def as_admin(self, *words: str) -> str:
        """A command over TLS with the administrator's token."""
        variables = {
            "CEPHEID_ADMIN_URL": self.admin_url(tls=True),
            "CEPHEID_TLS_CA_FILE": str(self.secure / "ca.pem"),
            "CEPHEID_TLS_CERTIFICATE_FILE": str(self.secure / "admin.pem"),
            "CEPHEID_TLS_KEY_FILE": str(self.secure / "admin-key.pem"),
            "CEPHEID_TOKEN_FILE": str(self.secure / "admin.token"),
        }
        done = self.cepheid(*words, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def enable(self, *words: str) -> str:
        return self.as_admin("secure", "enable", str(self.secure), *words)

    def log_of(self, name: str) -> str:
        return (self.directory / name / "log").read_text(errors="replace")


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("CEPHEID_")}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.mark.timeout(1500)
def test_a_running_cluster_is_secured_while_clients_work(cluster: Cluster) -> None:
    made = cluster.cepheid("secure", "init", str(cluster.secure))
    assert made.returncode == 0, made.stderr
    token = cluster.cepheid("tokens", "create", "app", "--secret-key", str(cluster.secure / "token.key")).stdout.strip()
    credentials: dict[str, Any] = {
        "authentication": pulsar.AuthenticationToken(token),
        "tls_trust_certs_file_path": str(cluster.secure / "ca.pem"),
    }
    with Traffic(cluster.url(tls=False), OPEN_TOPIC) as old:
        old.goes_on()
        old.acknowledge_half(20)
        first = cluster.cepheid("secure", "enable", str(cluster.secure), "--admin-url", cluster.admin_url(tls=False))
        assert "is in stage 1 of 4" in first.stdout, first.stderr
        early = cluster.cepheid("secure", "enable", str(cluster.secure), "--admin-url", cluster.admin_url(tls=False))
        assert early.returncode != 0
        assert "stage 1 is not in force everywhere" in early.stderr
        for name in (*BOOKIES, *BROKERS):
            cluster.restart(name)
            old.goes_on()
        read_history(cluster, OPEN_TOPIC, at_least=50, tls=False)

        with Traffic(cluster.url(tls=True), TOPIC, **credentials) as new:
            new.goes_on()
            new.acknowledge_half(20)
            wait_logged(cluster, "authorization.would_deny")
            cluster.as_admin("permissions", "grant", "app", TOPIC, "produce", "consume")
            assert "is in stage 2 of 4" in cluster.enable()
            for name in (*BOOKIES, *BROKERS):
                cluster.restart(name)
                old.goes_on()
                new.goes_on()
            old.finish()  # it has no credentials, and does not come along

            assert "is in stage 3 of 4" in cluster.enable("--metadata", cluster.metadata_url)
            no_node_is_open(cluster)
            cluster.restart(*BROKERS)
            new.goes_on()
            with client_of(cluster.url(tls=False)) as stranger, pytest.raises(pulsar.PulsarException):
                stranger.create_producer(OPEN_TOPIC)

            assert "is in stage 4 of 4" in cluster.enable()
            for name in (*BOOKIES, *BROKERS):
                cluster.restart(name)
                new.goes_on()
            new.finish()
    status = cluster.as_admin("secure", "status")
    problems = {line.strip() for line in status.splitlines() if "problem" in line}
    assert {problem.partition(",")[0] for problem in problems} == {"problem: the connection to ZooKeeper is without TLS"}
    for line in status.splitlines()[1:]:
        words = line.split()
        if words[0] == "problem:":
            continue
        assert words[2:4] == ["yes", "no"], line  # TLS, and no open port
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(f"{cluster.admin_url(tls=False)}/ready", timeout=5)
    read_history(cluster, TOPIC, at_least=50, tls=True)
    read_history(cluster, OPEN_TOPIC, at_least=50, tls=True)  # of before: no data was copied, and none is lost
    assert all("Traceback" not in cluster.log_of(name) for name in (*BOOKIES, *BROKERS))


def read_history(cluster: Cluster, topic: str, *, at_least: int, tls: bool) -> None:
    """Read from the bookies: without certificates while they have open ports, with the administrator's afterwards."""
    words = ("read", topic, "--format", "csv", "--columns", "value")
    if tls:
        text = cluster.as_admin(*words)
    else:
        done = cluster.cepheid(*words, CEPHEID_ADMIN_URL=cluster.admin_url(tls=False))
        assert done.returncode == 0, done.stderr
        text = done.stdout
    assert len(text.splitlines()) > at_least


def wait_logged(cluster: Cluster, event: str) -> None:
    deadline = time.monotonic() + 10
    while not any(event in cluster.log_of(name) for name in BROKERS):
        assert time.monotonic() < deadline, event
        time.sleep(0.1)


def no_node_is_open(cluster: Cluster) -> None:
    """Not even those that were made before the cluster had a user."""
    client = KazooClient(hosts=cluster.metadata_url.removeprefix("zk://"))
    client.start()
    try:
        names = [name for name in client.get_children("/") if name != "zookeeper"]
        assert {"ledgers", "secrets", "topics"} <= set(names)
        for name in names:
            with pytest.raises(NoAuthError):
                client.get_children(f"/{name}")
    finally:
        client.stop()
        client.close()
