"""`cepheid broker --processes N`: several broker processes on one machine under a supervisor.

    supervisor ── listening sockets of the admin port ──► process 0: id ID-0, port 6650, own admin port 8081
        │   │                          └────────────────► process 1: id ID-1, port 6651, own admin port 8082
        │   └── a socket pair for each: a byte means "I serve", its end means "the supervisor is gone"
        └── restarts ended processes after a doubling pause; passes signals on, and kills after the deadline

Rules
1. All processes accept from the shared admin port, since any broker can answer any call (docs/ownership.md). The supervisor holds
   the port, so requests wait while no process runs, and a second supervisor is refused.
2. A process whose supervisor is gone stops in good order. Otherwise its ports and its id would be in use for the next supervisor.
3. A process that ends before all of them have served once ends the supervisor: wrong settings do not become valid by repetition.
4. Afterwards no failure of one process stops the others. A start that the system refuses, for lack of memory or because of process
or
   file limits, is repeated after the same pauses.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cepheid_cli.log_lines import start_logging
from cepheid_cli.role_process import allow_open_files
from cepheid_ports import CepheidError, host_port, make_new_files_private

if TYPE_CHECKING:
    from cepheid_broker.admin import SharedAdminPorts
    from cepheid_broker.settings import BrokerRoleSettings

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
WELL_AFTER_S = 60.0


class BrokerProcessError(CepheidError):
    """A process of the supervisor could not start, or had to be killed."""

    hint: ClassVar[str] = "its own lines in the log say why"


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """The inheritance of a process from its supervisor: its number, and file descriptors."""

    index: int
    supervisor_fd: int
    admin_fd: int | None = None
    tls_admin_fd: int | None = None

    @classmethod
    def parse(cls, text: str) -> ProcessPlace:
        index, supervisor, admin, tls_admin = text.split(",")
        return cls(int(index), int(supervisor), int(admin) if admin else None, int(tls_admin) if tls_admin else None)

    def __str__(self) -> str:
        numbers = (self.index, self.supervisor_fd, self.admin_fd, self.tls_admin_fd)
        return ",".join("" if number is None else str(number) for number in numbers)

    def supervisor(self) -> socket.socket:
        return _inherited(self.supervisor_fd)

    def shared_admin(self) -> SharedAdminPorts:
        from cepheid_broker.admin import SharedAdminPorts

        plain, tls = (None if fd is None else _inherited(fd) for fd in (self.admin_fd, self.tls_admin_fd))
        return SharedAdminPorts(plain, tls)


class RestartPauses:
    """Pauses before an ended process is restarted: doubled each time, and short again after it has run for a minute."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def after(self, lived_s: float) -> float:
        self._pause_s = FIRST_PAUSE_S if lived_s >= WELL_AFTER_S else min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        return self._pause_s


def run_processes(settings: BrokerRoleSettings, arguments: Sequence[str], started: float) -> None:
    """Supervise until a signal; return after a clean stop. `arguments`: the command line, which the processes get, too.

    Raises PortInUseError, and BrokerProcessError if a process could not start or did not stop in time.
    """
    from cepheid_broker.admin import open_admin_port

    gc.enable()
    start_logging()
    make_new_files_private()
    allow_open_files()
    command = [sys.executable, "-m", "cepheid_cli", *arguments]

    def say_ready() -> None:
        print(f"cepheid broker, {settings.processes} processes, ready after {time.monotonic() - started:.2f} s", flush=True)
        for scheme, listening in (("http", plain), ("https", tls)):
            if listening is not None:
                host = settings.shown_host
                print(f"  admin     {scheme}://{host_port(host, listening.getsockname()[1])} (answered by all)", flush=True)
        print("  stop with Ctrl-C", flush=True)

    with ExitStack() as opened:
        plain = tls = None
        if settings.has_plain_ports:
            plain = opened.enter_context(open_admin_port(settings.host, settings.admin_port))
        if settings.tls.enabled:
            tls = opened.enter_context(open_admin_port(settings.host, settings.tls.admin_port))
        supervisor = Supervisor(command, settings.processes, plain, tls, settings.processes_stop_s)
        asyncio.run(supervisor.run(say_ready))


class Supervisor:
    """Runs the processes: `run` once. A task for each process restarts it until the stop."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        admin: socket.socket | None,
        tls_admin: socket.socket | None,
        stop_within_s: float,
    ) -> None:
        self._command = list(command)
        self._count = count
        self._admin = admin
        self._tls_admin = tls_admin
        self._stop_within_s = stop_within_s
        self._running: dict[int, Process] = {}
        self._ready_once: set[int] = set()
        self._all_ready = asyncio.Event()
        self._stopping = False

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Return when a signal has arrived and all processes have ended. Raises BrokerProcessError."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        keeping = [asyncio.create_task(self._keep(index), name=f"process {index}") for index in range(self._count)]
        waiting = [asyncio.create_task(stop.wait()), asyncio.create_task(self._tell_ready(on_ready))]
        try:
            await asyncio.wait([waiting[0], *keeping], return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in keeping if task.done()]
        finally:
            print("stopping", flush=True)
            killed = await self._stop(keeping)
            for task in waiting:
                task.cancel()
        for failure in failures:
            if failure is not None:
                raise failure
        if killed:
            names = ", ".join(f"process {index}" for index in killed)
            raise BrokerProcessError(
                f"{names} did not stop within {self._stop_within_s:g} s (processes_stop_s) and had to be killed"
            )
        print("stopped", flush=True)

    async def _tell_ready(self, on_ready: Callable[[], None]) -> None:
        await self._all_ready.wait()
        on_ready()

    async def _keep(self, index: int) -> None:
        """Run process `index` repeatedly until the stop. Raises BrokerProcessError (rule 3)."""
        pauses = RestartPauses()
        loop = asyncio.get_running_loop()
        while not self._stopping:
            began = loop.time()
            try:
                code: int | None = await self._run_one(index)
                event, outcome = "broker_process.ended", f"ended with {code}"
            except OSError as error:  # rule 4
                event, outcome, code = "broker_process.not_started", f"could not be started: {error}", None
            if self._stopping:
                return
            if not self._all_ready.is_set():
                raise BrokerProcessError(f"broker process {index} {outcome} before all {self._count} processes served")
            pause_s = pauses.after(loop.time() - began)
            log.warning(event, extra={"index": index, "code": code, "outcome": outcome, "starts_again_s": pause_s})
            await asyncio.sleep(pause_s)

    async def _run_one(self, index: int) -> int:
        """Start it and return its exit code; negative: the signal that ended it. Raises OSError if it could not be started."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            shared = [None if listening is None else listening.fileno() for listening in (self._admin, self._tls_admin)]
            place = ProcessPlace(index, theirs.fileno(), *shared)
            process = await asyncio.create_subprocess_exec(
                *self._command,
                f"--as-process={place}",
                pass_fds=[theirs.fileno(), *(fd for fd in shared if fd is not None)],
                stdin=asyncio.subprocess.DEVNULL,
            )
            theirs.close()
            self._running[index] = process
            with suppress(ConnectionError):  # it ended before it served
                if await asyncio.get_running_loop().sock_recv(ours, 1):
                    self._on_ready(index)
            return await process.wait()
        finally:
            self._running.pop(index, None)
            theirs.close()
            ours.close()

    def _on_ready(self, index: int) -> None:
        self._ready_once.add(index)
        if len(self._ready_once) == self._count:
            self._all_ready.set()

    async def _stop(self, keeping: Sequence[asyncio.Task[None]]) -> list[int]:
        """End everything; return the processes that had to be killed."""
        self._stopping = True
        for process in self._running.values():
            _signal(process, signal.SIGTERM)
        for index, task in enumerate(keeping):
            if index not in self._running:
                task.cancel()  # it is pausing before a restart, or starting a process, which ends with it
        await asyncio.wait(keeping, timeout=self._stop_within_s)
        killed = sorted(self._running)
        for process in self._running.values():
            _signal(process, signal.SIGKILL)
        await asyncio.gather(*keeping, return_exceptions=True)
        return killed


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def _inherited(fd: int) -> socket.socket:
    inherited = socket.socket(fileno=fd)
    inherited.set_inheritable(False)
    inherited.setblocking(False)
    return inherited
