"""A cluster whose connections go through proxies: what is between its processes can be cut and stalled, while all of them live.

broker-1 ──► proxy of bookie-1 ──► bookie-1              lookups of a bookie tell its proxy's port
broker-1 ──► its proxy of ZooKeeper ──► ZooKeeper ◄── bookies
client, broker-2 ──► proxy of broker-1 ──► broker-1      so do lookups of topics
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from cepheid_dev.free_ports import free_port
from cepheid_dev.processes import DetachedProcess, spawn
from cepheid_dev.toml_text import toml_text
from cepheid_dev.zookeeper_server import ZooKeeperServer
from cepheid_testkit.metadata_view import MetadataView
from tests.integration.chaos_cluster import KEEP, SETTINGS, BrokenOnPurpose, keep_everything
from tests.tcp_proxy import TcpProxy

READY = "ready after"
STOP_LIMIT_S = 30.0
SESSION_TIMEOUT_S = 10.0
"""Longer than anything here is cut off that is to keep its session, also on a busy machine."""


class ProxiedCluster(BrokenOnPurpose):
    """`with ProxiedCluster() as cluster:`"""

    def __init__(self, bookies: int = 4, brokers: int = 1) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="cepheid-proxied-"))
        self.bookies: dict[str, TcpProxy] = {}
        self.brokers: dict[str, TcpProxy] = {}
        self.zookeepers: dict[str, TcpProxy] = {}
        """Of each broker one, to the same server."""
        self._count = bookies
        self._processes: dict[str, DetachedProcess] = {}
        self._opened = ExitStack()
        self._brokers = [f"broker-{number}" for number in range(1, brokers + 1)]
        self.admin_port = free_port()

    @property
    def service_url(self) -> str:
        return f"pulsar://{','.join(proxy.address for proxy in self.brokers.values())}"

    def log_paths(self) -> Mapping[str, Path]:
        return {name: self.directory / f"{name}.log" for name in self._processes}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._opened.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()
        if error is None and not KEEP:
            shutil.rmtree(self.directory, ignore_errors=True)

    def heal(self) -> None:
        for proxy in (*self.zookeepers.values(), *self.brokers.values(), *self.bookies.values()):
            proxy.heal()
        self.wait_until(lambda: len(self.writable()) == self._count, "every bookie is registered")

    def _start(self) -> None:
        server = ZooKeeperServer(self.directory / "zookeeper", free_port())
        server.start()
        self._opened.callback(server.kill)
        direct = f"zk://{server.address}"
        self.view = MetadataView(direct)
        self._opened.callback(self._stop_all)
        self._run("init", "init", "--metadata", direct)
        self._wait_gone("init")
        for number in range(1, self._count + 1):
            name, port = f"bookie-{number}", free_port()
            proxy = self.bookies[name] = self._opened.enter_context(TcpProxy(f"127.0.0.1:{port}"))
            data = str(self.directory / name)
            ports = ["--port", str(port), "--advertised-port", str(proxy.port), "--http-port", "0"]
            self._run(name, "bookie", "--metadata", direct, "--id", name, "--data", data, *ports, *self._session)
        settings = self.directory / "broker.toml"
        settings.write_text(toml_text(SETTINGS["broker"]))
        for name in self._brokers:
            zookeeper = self.zookeepers[name] = self._opened.enter_context(TcpProxy(server.address))
            port, admin_port = free_port(), self.admin_port if name == self._brokers[0] else free_port()
            proxy = self.brokers[name] = self._opened.enter_context(TcpProxy(f"127.0.0.1:{port}"))
            ports = ["--port", str(port), "--advertised-port", str(proxy.port), "--admin-port", str(admin_port)]
            rest = ["--id", name, "--config", str(settings), *ports, *self._session]
            self._run(name, "broker", "--metadata", f"zk://{zookeeper.address}", *rest)
        for name in (*self.brokers, *self.bookies):
            self.wait_until(lambda name=name: READY in self.log(name), f"{name} is ready")  # type: ignore[misc]
        keep_everything(f"http://127.0.0.1:{self.admin_port}")

    @property
    def _session(self) -> list[str]:
        return ["--metadata-session-timeout-s", str(SESSION_TIMEOUT_S)]

    def _run(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "cepheid_cli", *arguments]
        self._processes[name] = spawn(command, self.directory / f"{name}.log", dict(os.environ))

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _wait_gone(self, name: str) -> None:
        assert self._processes.pop(name).wait_gone(STOP_LIMIT_S), f"{name} does not end: {self.log(name)}"

    def _stop_all(self) -> None:
        for process in self._processes.values():
            process.send(signal.SIGKILL)
        for process in self._processes.values():
            process.wait_gone(STOP_LIMIT_S)
