"""Runs a role in the foreground: logging, loop and signals of the process, until Ctrl-C, SIGTERM or a permanent failure."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from cepheid_cli.log_lines import start_logging
from cepheid_ports import Role, make_new_files_private

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # journal and reader threads need the interpreter for microseconds, but immediately (default: 5 ms)


R = TypeVar("R", bound=Role)


def begin_role() -> float:
    """Return `time.monotonic()`. Garbage is not collected until the role is made: imports leave none, and are a tenth faster so."""
    gc.disable()
    return time.monotonic()


def run_role(
    name: str,
    make: Callable[[], R],
    facts: Callable[[R], Sequence[str]],
    started: float,
    supervisor: socket.socket | None = None,
) -> None:
    """Serve until a signal; return after a clean stop. `make` is called in the loop; `facts` returns lines about the running role.

    `started`: of `begin_role`. `supervisor`: a socket to the supervisor of several processes; it gets a
    byte when this one serves, and this one stops when it is closed. Raises CepheidError if the role cannot start or must give up.
    """
    start_logging()
    make_new_files_private()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    allow_open_files()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(name, make, facts, started, supervisor))


def allow_open_files() -> None:
    """Raise the limit of open files as far as allowed: the default of 1024 suits old programs, and a thousand clients exceed it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports no limit, but has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    name: str,
    make: Callable[[], R],
    facts: Callable[[R], Sequence[str]],
    started: float,
    supervisor: socket.socket | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if supervisor is not None:

        def on_supervisor_gone() -> None:
            loop.remove_reader(supervisor)
            stop.set()

        loop.add_reader(supervisor, on_supervisor_gone)  # it sends nothing: being readable means its end
    role = make()
    gc.enable()
    if not await _started(role, stop):
        return
    try:
        _say(f"cepheid {name}, ready after {time.monotonic() - started:.2f} s")
        for fact in facts(role):
            _say(f"  {fact}")
        _say("  stop with Ctrl-C")
        if supervisor is not None:
            with suppress(OSError):  # gone: the reader above handles it
                supervisor.send(b"r")
        _tame_garbage_collector()
        await role.wait_until_stopped(stop)
    except BaseException:
        await _close_failed(role)
        raise
    _say("stopping")
    await role.aclose()
    _say("stopped")


async def _close_failed(role: Role) -> None:
    """Close as far as possible: on a broken disk even closing fails, and the first failure is the reason to report."""
    _say("stopping")
    try:
        await role.aclose()
    except Exception as error:
        log.warning("stop.failed", extra={"error": repr(error)})


async def _started(role: Role, stop: asyncio.Event) -> bool:
    """Return False if a signal came first: a start may wait long for an unavailable metadata store."""
    starting, stopping = asyncio.ensure_future(role.start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            await role.aclose()  # it began to serve at the same moment
        return False
    await starting
    return True


def _tame_garbage_collector() -> None:
    """Tune garbage collection: existing objects live as long as the process, and entries create no cycles.

    A young generation of 100,000 objects was seen to stop the loop for 21 ms at each collection. Objects that survive two
    collections are kept: with ten, topics that open by the thousand were visited twice, and every tenth collection took 20 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 1, 5_000)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:  # not on every platform; asyncio's own loop is slower
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _say(line: str) -> None:
    print(line, flush=True)
