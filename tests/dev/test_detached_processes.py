"""Processes found again by pid and start time, and what a local cluster keeps of them on disk."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_dev.cluster_file import ClusterFile, ClusterFileError, ClusterState, Member
from cepheid_dev.free_ports import free_port
from cepheid_dev.processes import DetachedProcess, ProcessState, spawn
from cepheid_dev.toml_text import toml_text

FIRST_THREAD_ENDS = """
import ctypes, threading, time

threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
SLEEP = "import sys, time; print('hello', flush=True); time.sleep(60)"


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[DetachedProcess]:
    process = spawn([sys.executable, "-c", SLEEP], tmp_path / "log", dict(os.environ))
    yield process
    process.send(signal.SIGKILL)
    assert process.wait_gone(10)


def wait_for(process: DetachedProcess, state: ProcessState) -> None:
    deadline = time.monotonic() + 60
    while process.state() is not state:
        assert time.monotonic() < deadline, process.state()
        time.sleep(0.005)


def test_it_runs_in_a_session_of_its_own_is_paused_and_ends(sleeper: DetachedProcess, tmp_path: Path) -> None:
    assert sleeper.state() is ProcessState.RUNNING
    assert os.getsid(sleeper.pid) == sleeper.pid
    sleeper.send(signal.SIGSTOP)
    wait_for(sleeper, ProcessState.PAUSED)
    sleeper.send(signal.SIGCONT)
    wait_for(sleeper, ProcessState.RUNNING)
    assert not sleeper.wait_gone(0.05)
    sleeper.send(signal.SIGKILL)
    assert sleeper.wait_gone(10)
    sleeper.send(signal.SIGTERM)  # to nobody


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="asks for threads in /proc")
def test_it_is_gone_when_its_last_thread_is(tmp_path: Path) -> None:
    """Until then it has its ports: who started its successor now would hear that they are taken."""
    process = spawn([sys.executable, "-c", FIRST_THREAD_ENDS], tmp_path / "log", dict(os.environ))
    try:
        stat = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + 60
        while ") Z " not in stat.read_text():
            assert time.monotonic() < deadline, stat.read_text()
            time.sleep(0.005)
        assert process.state() is ProcessState.RUNNING
        assert not process.wait_gone(0.05)
    finally:
        process.send(signal.SIGKILL)
    assert process.wait_gone(10)


def test_a_pid_that_somebody_else_has_now_is_not_ours(sleeper: DetachedProcess) -> None:
    recycled = DetachedProcess(sleeper.pid, "another time")
    assert recycled.state() is ProcessState.GONE
    recycled.send(signal.SIGKILL)
    assert sleeper.state() is ProcessState.RUNNING


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="here ps is asked anyway")
def test_ps_tells_the_same_where_there_is_no_proc(sleeper: DetachedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    from cepheid_dev import processes

    letter, born = processes._look(sleeper.pid)
    again = DetachedProcess(sleeper.pid, born)
    assert (letter in "SR", born.count(":") == 2, again.state()) == (True, True, ProcessState.RUNNING)
    sleeper.send(signal.SIGSTOP)  # by the other way of looking it is somebody else: nothing is sent
    again.send(signal.SIGSTOP)
    wait_for(again, ProcessState.PAUSED)
    again.send(signal.SIGCONT)
    assert DetachedProcess(2**22 + 1, born).state() is ProcessState.GONE


def test_the_state_of_a_cluster_survives_its_file(tmp_path: Path) -> None:
    file = ClusterFile(tmp_path / "new")
    with file.locked():
        assert file.load() is None
        state = ClusterState(3.0, {"bookie": {"storage": {"gc_interval_s": 5.0}}}, True)
        state = state.with_member(Member("b1", "bookie", {"grpc": 1, "http": 2})).with_member(
            Member("br1", "broker", {"pulsar": 3, "http": 4})
        )
        state = state.with_member(Member("b1", "bookie", {"grpc": 1, "http": 2}, 7, "then", "up", 99))
        file.save(state)
    assert file.load() == state
    assert [member.name for member in state.members] == ["b1", "br1"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "members": [{}]}', '{"format": 7, "members": []}']
)
def test_what_is_no_state_of_a_cluster_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(ClusterFileError, match=r"cluster\.json"):
        ClusterFile(tmp_path).load()


def test_a_port_is_free_and_given_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) != port
    given: list[int] = []
    for _ in range(20):
        given.append(free_port(taken=given))
    assert len(set(given)) == 20
    assert free_port(given[0]) == given[0]
    assert free_port(given[0], taken=given) != given[0]


_VALUES = st.one_of(
    st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)
)
_NAMES = st.text("abc_.- \"'", min_size=1, max_size=4)
_TABLES: Any = st.recursive(
    st.dictionaries(_NAMES, _VALUES | st.lists(_VALUES, max_size=3), max_size=4),
    lambda inner: st.dictionaries(_NAMES, _VALUES | inner, max_size=4),
    max_leaves=6,
)


@given(_TABLES)
def test_settings_come_back_from_toml(settings: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(settings)) == settings


def test_ports_may_be_kept_to_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEPHEID_FREE_PORTS", "31000-31099")
    assert all(31_000 <= free_port() <= 31_099 for _ in range(20))


@pytest.mark.parametrize("given", ["31000", "a-b", "5-4", "0-9", "60000-70000"])
def test_what_is_no_range_of_ports(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("CEPHEID_FREE_PORTS", given)
    with pytest.raises(ValueError, match="write it like 20000-32000"):
        free_port()
