"""The audit log: one JSON line for each change and each denial, written outside the event loop.

    record ──► waiting lines (bounded) ──► one write for all of them, in a worker ──► a file that rotates, or standard output

Rules
1. `record` never waits and never fails. Lines that cannot be written are lost and counted, and a line reports their number as soon
   as lines can be written again.
2. A line says who did what from where, and the outcome. It never contains a body, a query or credentials; `change` has the names
   and actions that a handler took from them.
3. Clients can cause denials and failures at will. For each address, and each role there, only `REFUSALS_PER_WINDOW` are written in
   a window; the others are counted and reported in one line at its end, so that a flood does not push older lines out of the
   files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cepheid_ports import Ports, Worker
from cepheid_security.failed_attempts import network_of
from cepheid_security.principal import Principal, SecurityConfigurationError

if TYPE_CHECKING:
    from cepheid_security.settings import AuditSettings

log = logging.getLogger(__name__)

Result = Literal["done", "failed", "denied", "invalid"]
"""`done`: the change was made. `failed`: the role may do it, but the operation failed. `denied`: the role or client may not.
`invalid`: the request contains an invalid name; permissions were not checked."""

TLS_HANDSHAKE = "tls.handshake"
"""Operation of a line about a TLS handshake that failed, or that a client began on a port without TLS."""

REFUSALS_PER_WINDOW = 200
WINDOW_MS = 10_000
_MAX_ADDRESSES = 1000
MAX_CHANGE_CHARACTERS = 4000
_MAX_FIELD_CHARACTERS = 500
_FAILURE_LOG_MS = 30_000
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class AuditFigures:
    """Numbers of lines since the process started; `waiting` is the current number."""

    written: int
    lost: int
    """Lines not written, because too many waited or the file could not be written."""
    suppressed: int
    """Denials and failures without a line of their own (rule 3)."""
    waiting: int


class AuditLog:
    """The audit log of a process. `write` takes complete lines and may block: it runs in `worker`, which the log closes. With None
    nothing is recorded."""

    def __init__(
        self,
        write: Callable[[bytes], None] | None = None,
        worker: Worker | None = None,
        wall_ms: Callable[[], int] = lambda: 0,
        max_waiting_lines: int = 10_000,
    ) -> None:
        assert (write is None) == (worker is None)
        self._write = write
        self._worker = worker
        self._wall_ms = wall_ms
        self._max_waiting_lines = max_waiting_lines
        self._refusals = RefusalBudget()
        self._waiting: list[bytes] = []
        self._in_flight = 0  # lines being written by the worker
        self._is_scheduled = self._closed = False
        self._unreported = 0  # lost lines that no line reports yet
        self._failure_logged_ms = -_FAILURE_LOG_MS
        self._written = self._lost = 0
        self._summing: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<AuditLog {'off' if self._write is None else self.figures()}>"

    @property
    def enabled(self) -> bool:
        return self._write is not None

    def figures(self) -> AuditFigures:
        return AuditFigures(self._written, self._lost, self._refusals.suppressed, len(self._waiting) + self._in_flight)

    def record(
        self,
        principal: Principal | None,
        peer: str,
        operation: str,
        object: str,
        result: Result,
        detail: str = "",
        *,
        original_role: str = "",
        change: str = "",
    ) -> None:
        """Queue one line. Call in the event loop.

        `principal` is None if the client is unknown. `peer` is its address, `operation` a command or an admin call, `object` its
        object (such as a topic), `detail` the reason of a denial or failure. `original_role` is the role for which a proxy or
        another broker acts. `change` describes the change if `object` does not, without secrets.
        """
        if self._write is None:
            return
        now_ms = self._wall_ms()
        if result != "done":
            is_written = self._refusals.take(_budget_of(principal, peer), now_ms)
            self._sum_up(now_ms)
            if not is_written:
                self._sum_up_later()
                return
        self._queue(_line(now_ms, principal, peer, operation, object, result, detail, original_role, change))

    def _sum_up(self, now_ms: int) -> None:
        for who, count in self._refusals.due(now_ms):
            self._queue(_summary(now_ms, who, count))

    def _sum_up_later(self) -> None:
        if self._summing is None and not self._closed:
            self._summing = asyncio.get_running_loop().call_later(WINDOW_MS / 1000, self._on_summing)

    def _on_summing(self) -> None:
        self._summing = None
        self._sum_up(self._wall_ms())
        if self._refusals.has_suppressed:
            self._sum_up_later()

    def _queue(self, line: bytes) -> None:
        if self._closed or len(self._waiting) + self._in_flight >= self._max_waiting_lines:
            self._lose(1)
            return
        self._waiting.append(line)
        if not self._is_scheduled and not self._in_flight:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        if not self._waiting or self._in_flight:
            return
        self._submit()

    def _submit(self) -> None:
        assert self._write is not None
        assert self._worker is not None
        lines, self._waiting = self._waiting, []
        reported, self._unreported = self._unreported, 0
        if reported:
            lost = f"{reported} lines before this one were lost"
            lines.insert(0, _line(self._wall_ms(), None, "", "audit.lines_lost", "", "failed", lost))
        self._in_flight += len(lines)
        write, count = self._write, len(lines)

        def on_done(_: None, error: BaseException | None) -> None:
            self._in_flight -= count
            if error is None:
                self._written += count
            else:
                self._unreported += reported
                self._lose(count - bool(reported))
                self._log_failure(error)
            if not self._closed:
                self._flush()

        self._worker.submit(lambda: write(b"".join(lines)), on_done)

    def _lose(self, lines: int) -> None:
        self._lost += lines
        self._unreported += lines

    def _log_failure(self, error: BaseException) -> None:
        now_ms = self._wall_ms()
        if now_ms - self._failure_logged_ms >= _FAILURE_LOG_MS:
            self._failure_logged_ms = now_ms
            hint = "lines of the audit log are lost: free space on its disk, or set audit.file to a place that can be written"
            log.error("audit.not_written", extra={"error": str(error), "lost": self._lost, "hint": hint})

    async def aclose(self) -> None:
        """Write the waiting lines, then close the worker."""
        if self._closed:
            return
        if self._summing is not None:
            self._summing.cancel()
        if self._write is not None:
            now_ms = self._wall_ms()
            for who, count in self._refusals.rest():
                self._queue(_summary(now_ms, who, count))
        self._closed = True
        if self._worker is not None:
            if self._waiting:
                self._submit()
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._worker.aclose()
            except TimeoutError:  # standard output is not read, or the disk hangs
                log.error("audit.not_closed", extra={"waiting": self._in_flight, "hint": "the last lines may be lost"})


class RefusalBudget:
    """Numbers of denials and failures of each client in a window, written and suppressed. Without I/O.

    A client is the network of an unauthenticated client, or an authenticated role at an address: the former do not use up the
    lines of the latter.
    """

    def __init__(self) -> None:
        self.suppressed = 0
        self._windows: OrderedDict[str, _Window] = OrderedDict()  # oldest first
        self._due: list[tuple[str, int]] = []

    @property
    def has_suppressed(self) -> bool:
        return any(window.suppressed for window in self._windows.values())

    def take(self, who: str, now_ms: int) -> bool:
        """Count a denial or failure, and return whether to write it."""
        window = self._windows.get(who)
        if window is None or not 0 <= now_ms - window.since_ms < WINDOW_MS:
            self._end(who)
            window = self._windows[who] = _Window(now_ms)
            if len(self._windows) > _MAX_ADDRESSES:
                self._end(next(iter(self._windows)))
        if window.taken < REFUSALS_PER_WINDOW:
            window.taken += 1
            return True
        window.suppressed += 1
        self.suppressed += 1
        return False

    def due(self, now_ms: int) -> list[tuple[str, int]]:
        """Return the suppressed numbers to report now, by client: of windows that ended or were dropped."""
        while self._windows:
            who, window = next(iter(self._windows.items()))
            if 0 <= now_ms - window.since_ms < WINDOW_MS:
                break
            self._end(who)
        found, self._due = self._due, []
        return found

    def rest(self) -> list[tuple[str, int]]:
        """Return all suppressed numbers not reported yet, by client, and clear them."""
        for who in list(self._windows):
            self._end(who)
        found, self._due = self._due, []
        return found

    def _end(self, who: str) -> None:
        window = self._windows.pop(who, None)
        if window is not None and window.suppressed:
            self._due.append((who, window.suppressed))


@dataclass(slots=True)
class _Window:
    since_ms: int
    taken: int = 0
    suppressed: int = 0


def _line(
    now_ms: int,
    principal: Principal | None,
    peer: str,
    operation: str,
    object: str,
    result: Result,
    detail: str,
    original_role: str = "",
    change: str = "",
) -> bytes:
    seconds, milliseconds = divmod(now_ms, 1000)
    fields = {
        "time": f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{milliseconds:03}Z",
        "role": "" if principal is None else principal.role,
        "original_role": original_role,
        "method": "" if principal is None else principal.method,
        "peer": peer,
        "operation": operation,
        "object": object,
        "change": change,
        "result": result,
        "reason": detail,
    }
    # Clients may send names of any length. ASCII only, so that no control character or unusual line end gets into the file.
    limits = {"change": MAX_CHANGE_CHARACTERS}
    cut = {name: value[: limits.get(name, _MAX_FIELD_CHARACTERS)] for name, value in fields.items() if value}
    return json.dumps(cut).encode("ascii") + b"\n"


def _summary(now_ms: int, who: str, suppressed: int) -> bytes:
    return _line(now_ms, None, who, "audit.suppressed", "", "denied", f"{suppressed} more denials and failures")


def _budget_of(principal: Principal | None, peer: str) -> str:
    """Return the client whose lines are counted together: a role at an address, or an address (of IPv6 the /64 network)."""
    host = network_of(_host(peer))
    return host if principal is None else f"{host} {principal.role}"


def _host(peer: str) -> str:
    """Return `peer` without its port, if it has one, as in `10.0.0.1:5000` and `[::1]:5000`."""
    host, colon, port = peer.rpartition(":")
    return host.strip("[]") if colon and port.isdecimal() and (":" not in host or host.endswith("]")) else peer


class AuditFile:
    """A file of lines that is renamed to `NAME.1` when it is full, then to `NAME.2`, and so on. Blocking: use it in a worker."""

    def __init__(self, path: Path, *, max_bytes: int, max_files: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file: int | None = None
        self._size_bytes = 0

    def __repr__(self) -> str:
        return f"<AuditFile {self._path}>"

    def write(self, lines: bytes) -> None:
        """Append complete lines. Raises OSError."""
        if self._file is None or self._was_moved():
            self.open()
        if self._size_bytes and self._size_bytes + len(lines) > self._max_bytes:
            self._rotate()
        assert self._file is not None
        view = memoryview(lines)
        try:
            while view:
                count = os.write(self._file, view)
                self._size_bytes += count
                view = view[count:]
        except OSError:
            self.close()  # part of a line may have been written: `open` ends it before the next one
            raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def open(self) -> None:
        """Open the file, creating it if needed. `write` opens it by itself. Raises OSError."""
        self.close()
        self._path.parent.mkdir(0o750, parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            self._size_bytes = os.fstat(file).st_size
            if self._size_bytes and os.pread(file, 1, self._size_bytes - 1) != b"\n":
                self._size_bytes += os.write(file, b"\n")  # a crash cut off the last line: keep the next one separate
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def _was_moved(self) -> bool:
        """Return whether another program renamed or deleted the file, as logrotate does."""
        assert self._file is not None
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        ours = os.fstat(self._file)
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def _rotate(self) -> None:
        self.close()
        if self._max_files == 1:
            self._path.unlink(missing_ok=True)
        for number in range(self._max_files - 1, 0, -1):
            newer = self._path if number == 1 else self._numbered(number - 1)
            if newer.exists():
                newer.replace(self._numbered(number))
        self.open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def open_audit_log(
    settings: AuditSettings, data_dir: Path | None, is_enabled: bool, ports: Ports, opened: AsyncExitStack
) -> AuditLog:
    """Return the audit log of a process, which `opened` closes. It records nothing if it is not enabled.

    `is_enabled` is the default for an unset `settings.enabled`. `data_dir` is the directory of the process's own data, or None.
    Raises SecurityConfigurationError.
    """
    if not (is_enabled if settings.enabled is None else settings.enabled):
        return AuditLog()
    path = None if data_dir is None else data_dir / "audit" / "audit.log"
    if settings.file is not None:
        path = None if settings.file == "-" else Path(settings.file)
    write = write_to_stdout
    if path is not None:
        file = AuditFile(path, max_bytes=settings.max_bytes, max_files=settings.max_files)
        opened.callback(file.close)
        try:
            file.open()
        except OSError as error:
            raise SecurityConfigurationError(f"the audit log {path} cannot be written: {error}; set audit.file") from None
        write = file.write
    audit = AuditLog(write, ports.new_worker("audit", 1), ports.wall_ms, settings.max_waiting_lines)
    opened.push_async_callback(audit.aclose)
    return audit


def write_to_stdout(lines: bytes) -> None:
    """Write lines to standard output, where containers collect them. The process's own log is on standard error. Blocking."""
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()
