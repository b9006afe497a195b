"""A role in the foreground: logging, loop and signals of the process, until Ctrl-C or SIGTERM, or until it fails for good."""

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

SWITCH_INTERVAL_S = 0.0005  # journal and reader threads need the interpreter for microseconds, but at once (default: 5 ms)


R = TypeVar("R", bound=Role)


def run_role(
    name: str,
    make: Callable[[], R],
    facts: Callable[[R], Sequence[str]],
    started: float,
    supervisor: socket.socket | None = None,
) -> None:
    """Serves until a signal; returns after a clean stop. `make` is called in the loop; `facts` gives lines about what serves.

    `started`: `time.monotonic()` when the command began. `supervisor`: a socket to the supervisor of several processes; it gets a
    byte when this one serves, and this one stops at its end. Raises CepheidError when the role cannot start or has to give up.
    """
    start_logging()
    make_new_files_private()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    allow_open_files()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(name, make, facts, started, supervisor))


def allow_open_files() -> None:
    """As many as this process may have: it starts with 1024 for old programs' sake, and a thousand clients would end a bookie."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS says that there is no limit, and has one
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

        loop.add_reader(supervisor, on_supervisor_gone)  # it sends nothing: what can be read is the end
    role = make()
    if not await _started(role, stop):
        return
    try:
        _say(f"cepheid {name}, ready after {time.monotonic() - started:.2f} s")
        for fact in facts(role):
            _say(f"  {fact}")
        _say("  stop with Ctrl-C")
        if supervisor is not None:
            with suppress(OSError):  # gone: the reader above hears of it
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
    """As far as it goes: on a broken disk not even closing works, and the reason of the end is the first failure."""
    _say("stopping")
    try:
        await role.aclose()
    except Exception as error:
        log.warning("stop.failed", extra={"error": repr(error)})


async def _started(role: Role, stop: asyncio.Event) -> bool:
    """False when a signal came first: a start may wait for long, for a metadata store that is away."""
    starting, stopping = asyncio.ensure_future(role.start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            await role.aclose()  # it came to serve in the same moment
        return False
    await starting
    return True


def _tame_garbage_collector() -> None:
    """What exists now lives as long as the process, and entries make no cycles: young collections stay short, full ones rare.

    A young generation of 100,000 objects was seen to stop the loop for 21 ms at each collection. What outlives two collections is
    kept: with ten, topics that open by the thousand were looked at twice, and every tenth collection took 20 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 1, 5_000)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:  # not on every platform; asyncio's own loop serves, slower
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _say(line: str) -> None:
    print(line, flush=True)
