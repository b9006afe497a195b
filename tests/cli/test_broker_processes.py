"""The supervisor of `cepheid broker --processes N`, with processes that only sleep. Real brokers: test_role_processes.py."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from pydantic import ValidationError

from cepheid_broker.protocol import PortInUseError
from cepheid_broker.settings import BrokerRoleSettings
from cepheid_cli import broker_processes
from cepheid_cli.broker_processes import BrokerProcessError, ProcessPlace, RestartPauses, Supervisor
from cepheid_dev.free_ports import is_taken
from tests.support import free_port, wait_until

CHILD = """
import os, signal, socket, sys, time
index, fd, *_ = sys.argv[-1].partition("=")[2].split(",")
here = sys.argv[1]
with open(f"{here}/pids-{index}", "a") as pids:
    print(os.getpid(), file=pids)
{before}
supervisor = socket.socket(fileno=int(fd))
supervisor.send(b"r")
supervisor.recv(1)  # until the supervisor is gone
open(f"{here}/orphan-{index}", "w").close()
"""


def test_without_the_second_shared_port_the_first_one_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for setup in ("start_logging", "make_new_files_private", "allow_open_files"):
        monkeypatch.setattr(broker_processes, setup, lambda: None)
    port = free_port()  # of both: the second one finds it in use
    tls = SimpleNamespace(enabled=True, admin_port=port)
    settings = SimpleNamespace(host="127.0.0.1", has_plain_ports=True, admin_port=port, tls=tls)
    with pytest.raises(PortInUseError):
        broker_processes.run_processes(cast(BrokerRoleSettings, settings), [], 0.0)
    assert not is_taken(port)


class World:
    def __init__(self, here: Path, before: str = "", stop_within_s: float = 60.0) -> None:
        self._here = here
        command = [sys.executable, "-c", CHILD.replace("{before}", before), str(here)]
        self.supervisor = Supervisor(command, 2, None, None, stop_within_s)
        self.ready = False

    async def run(self, until: Callable[[], bool] = lambda: True) -> None:
        """Stop it by a signal when all are ready and `until` holds."""
        running = asyncio.create_task(self.supervisor.run(self._on_ready))
        try:
            await wait_until(lambda: running.done() or (self.ready and until()), 60)
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            running.cancel()
            raise
        await running

    async def run_through_a_kill(self, index: int) -> None:
        """Kill this process once all are ready, and stop when another one has been started in its place."""
        killed = False

        def is_back() -> bool:
            nonlocal killed
            if not killed:
                killed = True
                os.kill(self.pids(index)[0], signal.SIGKILL)
            return len(self.pids(index)) == 2

        await self.run(is_back)

    def _on_ready(self) -> None:
        self.ready = True

    def pids(self, index: int) -> list[int]:
        path = self._here / f"pids-{index}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def runs(self, pid: int) -> bool:
        return os.path.isdir(f"/proc/{pid}")


async def test_a_signal_ends_all_processes(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.run()
    assert [len(world.pids(index)) for index in (0, 1)] == [1, 1]
    assert not any(world.runs(pid) for index in (0, 1) for pid in world.pids(index))


async def test_a_process_that_ends_is_started_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.run_through_a_kill(1)
    assert len(world.pids(0)) == 1


async def test_a_failed_start_leaves_the_other_processes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    failures: list[OSError] = []
    spawn = asyncio.create_subprocess_exec

    async def fail_once(*arguments: Any, **options: Any) -> Any:
        if world.ready and not failures:
            failures.append(BlockingIOError(errno.EAGAIN, "planted"))
            raise failures[0]
        return await spawn(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail_once)
    await world.run_through_a_kill(1)
    assert failures
    assert len(world.pids(0)) == 1


async def test_a_first_start_that_fails_ends_the_supervisor_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", AsyncMock(side_effect=OSError(errno.ENOMEM, "planted")))
    with pytest.raises(BrokerProcessError, match=r"broker process \d could not be started: .*planted"):
        await World(tmp_path).supervisor.run(lambda: None)


async def test_a_process_that_cannot_start_ends_the_others_too(tmp_path: Path) -> None:
    world = World(tmp_path, before="if index == '1': sys.exit(7)")
    with pytest.raises(BrokerProcessError, match="broker process 1 ended with 7 before all 2 processes served"):
        await world.supervisor.run(lambda: None)
    assert not any(world.runs(pid) for pid in world.pids(0))


async def test_a_process_that_does_not_stop_in_time_is_killed_and_named(tmp_path: Path) -> None:
    world = World(tmp_path, before="if index == '0': signal.signal(signal.SIGTERM, signal.SIG_IGN)", stop_within_s=0.3)
    with pytest.raises(BrokerProcessError, match=r"process 0 did not stop within 0.3 s \(processes_stop_s\)"):
        await world.run()
    assert not world.runs(world.pids(0)[0])


@pytest.mark.parametrize(
    ("lives_s", "pauses_s"),
    [
        ([1, 1, 1], [0.5, 1.0, 2.0]),
        ([1, 1, 1, 1, 1, 1, 1, 1], [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        ([1, 1, 61, 1], [0.5, 1.0, 0.5, 1.0]),  # it was well for long enough
    ],
)
def test_pauses_grow_while_a_process_keeps_ending(lives_s: list[float], pauses_s: list[float]) -> None:
    pauses = RestartPauses()
    assert [pauses.after(lived_s) for lived_s in lives_s] == pauses_s


def test_a_place_survives_the_command_line() -> None:
    for place in (ProcessPlace(0, 5, 6, 7), ProcessPlace(3, 9, None, 4), ProcessPlace(1, 2)):
        assert ProcessPlace.parse(str(place)) == place


def settings(**given: object) -> BrokerRoleSettings:
    return BrokerRoleSettings.model_validate({"metadata": "zk://h:1", **given})


def test_each_process_has_its_own_id_ports_and_audit_file() -> None:
    whole = settings(
        processes=2,
        broker_id="b",
        port=7000,
        admin_port=9000,
        advertised_port=100,
        advertised_admin_port=200,
        tls={"port": 7100, "admin_port": 9100},
        audit={"file": "/var/log/audit.log"},
    )
    own = whole.for_process(1)
    assert (own.processes, own.broker_id, own.port, own.admin_port) == (1, "b-1", 7001, 9002)
    assert (own.advertised_port, own.advertised_admin_port) == (101, 202)
    assert (own.tls.port, own.tls.admin_port) == (7101, 9102)
    assert own.audit.file == "/var/log/audit-1.log"
    anywhere = settings(processes=2, port=0, admin_port=0, audit={"file": "-"}).for_process(1)
    assert (anywhere.broker_id, anywhere.port, anywhere.admin_port, anywhere.audit.file) == (None, 0, 0, "-")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"processes": 2, "port": 8081}, "would use port 8081 twice, counted from port and from admin_port"),
        ({"processes": 3, "port": 65534}, "need the ports 65534 to 65536 from port on"),
        (
            {"processes": 2, "tls": {"certificate_file": "c", "key_file": "k", "plain_ports": True}},
            "would use port 6651 twice, counted from port and from tls.port: set these at least 3 apart",
        ),
    ],
)
def test_ports_that_two_processes_would_use_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        settings(**given)


def test_one_process_may_have_ports_side_by_side() -> None:
    assert settings(port=8079).processes == 1
    assert settings(processes=2, port=0, admin_port=0).processes == 2
