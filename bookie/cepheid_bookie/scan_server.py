"""Serve scans outside gRPC: blocks are sent from the entry log to the reader unchanged, a megabyte at a time.

    connection ──► nonce: proof ──► token? ──► request ──► Bookie.scan ──┬─ answer ──► frame
                                      │ no                               └─ run ─────► head of a frame, then pieces of the file by
                                      ▼                                                a scan thread, as many as the socket takes;
                                    closed                                             when it is full, the loop waits

A reader on the Unix socket that runs as the bookie's own user gets no pieces: it receives the file and the place of the run in it,
and reports when it has read that.

Rule 1: a connection carries one request. A client without a valid `token`, or silent for `_REQUEST_S`, is not answered, and few of
these may wait at a time: in all, and of one address.
Rule 2: a reader that does not read occupies its socket's buffer in the kernel, or `PLACES_AHEAD` runs of files, and one of the
open scans until everything is sent, but no thread.
Rule 3: a frame that was begun is completed, or the connection ends, so that no reader takes half a run for a whole one.
Rule 4: a log is passed only to processes of the same user, or root, in the same network namespace; and only if every ticket is
accepted, since a log also has other ledgers.
Rule 5: with TLS the handshake comes first and counts as part of rule 1. It demands a client certificate, as the gRPC port does.
A scan ends when the certificate expires or is revoked.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import os
import resource
import socket
import ssl
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol

from cepheid_bookie.access import SCAN
from cepheid_bookie.denials import Caller, Denials, address_of, asking
from cepheid_bookie.entry_reader import StoredRun
from cepheid_bookie.errors import LogGoneError, LogUnreadableError, PortInUseError
from cepheid_bookie.listening import listening_socket
from cepheid_bookie.run_sender import RunSender
from cepheid_bookie.scan_streams import ScanStream, TlsScanStream
from cepheid_ports import Ports, RefusalLog, TaskOwner
from cepheid_rpc import (
    FRAME_HEAD,
    MAX_SCAN_REQUEST_BYTES,
    PLACES_AHEAD,
    REQUEST_LENGTH,
    RUN_PLACE,
    SCAN_NONCE_BYTES,
    SCAN_TOKEN_BYTES,
    FrameKind,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    decode_read_request,
    encode_read_answer,
    local_scan_address,
    scan_proof,
)
from cepheid_security.connection_limits import Arrivals, Place
from cepheid_security.handshakes import failure_of, is_refusal
from cepheid_security.tls import CertificateRule

log = logging.getLogger(__name__)

_REQUEST_S = 10.0
_ACCEPT_PAUSE_S = 1.0  # if the process has no file descriptors left
_KEEPALIVE_S = 10
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CONNECTIONS = 1024
"""Maximum of open connections, far above that of scans, so that excess scans get a refusal with a reason. At most a quarter of the
process's open files: its journal and logs need some as well."""
_STRANGERS = 128
"""Maximum of connections without a token yet. The Unix socket has as many again, so that other machines cannot use them up."""
_STRANGERS_PER_ADDRESS = 32
_SHARE_OF_ADDRESS = 2
"""One address may have at most one part in this many of all connections, since several Spark executors may share it."""
_NOBODY = 65534
"""Of this user may be processes of several users: where a number has no name in a container, Linux shows it as this one."""


class ScannedBookie(Protocol):
    runs: RunSender

    def scan(self, request: ReadRequest) -> AsyncGenerator[ReadAnswer | StoredRun, None]: ...


class ScanServer:
    """Serves scans of one bookie until `aclose`. Port 0 lets the system choose: see `port`. `tls`: the port's context; None: plain.

    `certificate_role`: which name in a certificate is the role. `denials` receives what was refused.
    """

    def __init__(
        self,
        bookie: ScannedBookie,
        host: str,
        port: int,
        ports: Ports,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        certificate_role: CertificateRule = "common_name",
        denials: Denials | None = None,
    ) -> None:
        self._ports = ports
        self._tls = tls
        self._certificate_role = certificate_role
        self._bookie = bookie
        self._host = host
        self.port = port
        self.token = ports.random.getrandbits(8 * SCAN_TOKEN_BYTES).to_bytes(SCAN_TOKEN_BYTES, "big")
        self._tasks = TaskOwner("scan-server")
        self._denials = denials or Denials()
        self._listeners: list[socket.socket] = []
        self._connections = 0
        self._arrivals = {way: _new_arrivals() for way in (socket.AF_UNIX, socket.AF_INET)}  # IPv6 is as IPv4
        self._refusals = RefusalLog()

    def __repr__(self) -> str:
        return f"<ScanServer {self._host}:{self.port}, {self._connections} connections>"

    async def start(self) -> None:
        """Open the ports. Raises PortInUseError."""
        try:
            listener = listening_socket(self._host, self.port)
        except OSError as error:
            raise PortInUseError(f"cannot listen for scans on {self._host}:{self.port}: {error}", port=self.port) from error
        self.port = listener.getsockname()[1]
        self._listen(listener)
        if self._bookie.runs.can_share:
            self._listen_on_machine()

    def _listen_on_machine(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(local_scan_address(self.token))
            listener.listen(128)
        except OSError as error:  # a system that forbids it: all goes by the port
            log.warning("scan_server.not_on_unix_socket", extra={"error": str(error)})
            listener.close()
            return
        self._listen(listener)

    def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def aclose(self) -> None:
        """Close the ports and all connections. Their readers continue at another replica."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        await self._tasks.aclose()

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection. A callback, since a task cancelled right after accepting would leave the connection open."""
        try:
            connection, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client disconnected meanwhile
        except OSError as error:
            log.warning("scan_server.accept_failed", extra={"error": str(error)})
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listener)
            return
        host = str(address[0]) if isinstance(address, tuple) else ""
        full = f"{self._connections:,} connections are open"
        place = full if self._connections >= _connection_limit() else self._arrivals[_way(connection)].admit(host)
        if not isinstance(place, Place):
            connection.close()
            facts = {"peer": host, "port": self.port, "reason": place}
            self._refusals.note("scan_server.connection_refused", host, level=logging.WARNING, **facts)
            return
        self._connections += 1
        # Closes the connection even if the task is cancelled before its first step.
        task = self._tasks.start(self._serve(connection, place), name="connection")
        task.add_done_callback(partial(self._on_served, connection, place))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # else it was closed meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _on_served(self, connection: socket.socket, place: Place, _: object) -> None:
        self._connections -= 1
        place.free()
        connection.close()

    async def _serve(self, connection: socket.socket, place: Place) -> None:
        try:
            connection.setblocking(False)
            is_local = _way(connection) is socket.AF_UNIX
            if is_local and not (self._bookie.runs.can_share and _may_read_logs(connection)):
                return  # the reader connects again by the port
            if not is_local:
                _watch_peer(connection)
            peer = "" if is_local else address_of(connection.getpeername())
            stream = ScanStream(connection)
            try:
                if self._tls is not None and not is_local:
                    stream = TlsScanStream(connection, self._tls(), self._certificate_role)  # takes the socket out of `connection`
                request = await self._read_request(stream, place, peer)
                if request is not None:
                    with asking(Caller(stream.role, peer, SCAN)):
                        async with asyncio.timeout(self._valid_s(stream)):
                            await self._answer(stream, request, peer, places=is_local)
            finally:
                stream.connection.close()
        except LogGoneError as error:  # deleted since the index was read; the reader asks again over gRPC
            log.info("scan_server.log_gone", extra={"error": str(error), **error.facts})
        except LogUnreadableError as error:  # the reader asks again over gRPC, which reports each block
            log.warning("scan_server.log_unreadable", extra={"error": str(error), **error.facts})
        except (OSError, EOFError, TimeoutError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                log.warning("scan_server.no_files_left", extra={"error": str(error)})
            else:  # of the reader, which went away
                log.debug("scan_server.connection_lost", extra={"error": repr(error)})
        except MalformedGroupError as error:
            log.warning("scan_server.request_refused", extra={"error": str(error)})

    def _valid_s(self, stream: ScanStream) -> float | None:
        """Return the seconds for which the reader's certificate is valid; the scan ends with it. None: no limit."""
        expires_at_ms = stream.expires_at_ms
        return None if expires_at_ms is None else (expires_at_ms - self._ports.wall_ms()) / 1000

    async def _read_request(self, stream: ScanStream, place: Place, peer: str) -> ReadRequest | None:
        """Return the request, or None if it was not meant for this bookie. Raises MalformedGroupError, EOFError, TimeoutError,
        OSError."""
        is_open = False
        try:
            async with asyncio.timeout(_REQUEST_S):
                await stream.open()
                is_open = True
                nonce = await stream.receive(SCAN_NONCE_BYTES)
                await stream.send_all(scan_proof(self.token, nonce))
                if not hmac.compare_digest(await stream.receive(SCAN_TOKEN_BYTES), self.token):
                    return None
                place.settle()
                (size_bytes,) = REQUEST_LENGTH.unpack(await stream.receive(REQUEST_LENGTH.size))
                if size_bytes > MAX_SCAN_REQUEST_BYTES:
                    raise MalformedGroupError(f"a request of {size_bytes} bytes, {MAX_SCAN_REQUEST_BYTES} are taken")
                request = decode_read_request(await stream.receive(size_bytes))
        except OSError as error:
            if not is_open and is_refusal(error):
                reason = failure_of(error, _REQUEST_S, "readers learn from the plan that this cluster has TLS")
                self._denials.handshake(peer, f"scan port {self.port}", reason)
            raise
        if not request.scan:
            raise MalformedGroupError("a read that is no scan")
        return request

    async def _answer(self, stream: ScanStream, request: ReadRequest, peer: str, *, places: bool) -> None:
        told = _Places(self._bookie.runs, stream)
        async with aclosing(self._bookie.scan(request)) as parts:
            async for part in parts:
                if (reason := stream.why_revoked()) is not None:
                    self._denials.role(Caller(stream.role, peer, SCAN), f"ledger {request.ledger_id}", reason)
                    return
                if isinstance(part, StoredRun) and places:
                    await told.tell(part)
                elif isinstance(part, StoredRun):
                    head = FRAME_HEAD.pack(FrameKind.BLOCKS, part.size_bytes, part.first_entry_id, part.last_entry_id)
                    await stream.send_all(head)
                    await self._send_run(stream, part)
                else:
                    body = encode_read_answer(part)
                    await stream.send_all(FRAME_HEAD.pack(FrameKind.ANSWER, len(body), 0, 0))
                    await stream.send_all(body)
            await stream.send_all(FRAME_HEAD.pack(FrameKind.END, 0, 0, 0))
            await told.wait_read(0)

    async def _send_run(self, stream: ScanStream, run: StoredRun) -> None:
        done_bytes = 0
        while True:
            done_bytes += await self._bookie.runs.send(run, done_bytes, stream.connection)
            if done_bytes == run.size_bytes:
                return
            await stream.wait_writable()


class _Places:
    """Sends the places of one answer's runs to a reader on this machine."""

    def __init__(self, runs: RunSender, stream: ScanStream) -> None:
        self._runs = runs
        self._stream = stream
        self._unread: deque[int] = deque()  # bytes of each
        self._given_log: int | None = None

    async def tell(self, run: StoredRun) -> None:
        """Send the place of a run, with its log unless the reader got that last. Wait while too many are unread."""
        await self.wait_read(PLACES_AHEAD - 1)
        frame = FRAME_HEAD.pack(FrameKind.PLACE, RUN_PLACE.size, run.first_entry_id, run.last_entry_id)
        frame += RUN_PLACE.pack(run.offset, run.size_bytes)
        if run.log_id == self._given_log:
            await self._stream.send_all(frame)
        else:
            while not await self._runs.share(run.log_id, frame, self._stream.connection):
                await self._stream.wait_writable()
            self._given_log = run.log_id
        self._unread.append(run.size_bytes)

    async def wait_read(self, left: int) -> None:
        """Wait until at most `left` places are unread. Raises EOFError if the reader is gone."""
        while len(self._unread) > left:
            read = await self._stream.receive_some(len(self._unread))
            if not read:
                raise EOFError("the reader closed the connection")
            for _ in read:
                self._runs.shared_bytes += self._unread.popleft()


def _new_arrivals() -> Arrivals:
    return Arrivals(
        max_arriving=_STRANGERS,
        max_arriving_per_address=_STRANGERS_PER_ADDRESS,
        max_per_address=max(1, _connection_limit() // _SHARE_OF_ADDRESS),
        names_settings=False,
    )


def _connection_limit() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _CONNECTIONS if files == resource.RLIM_INFINITY else min(_CONNECTIONS, files // 4)


def _way(connection: socket.socket) -> socket.AddressFamily:
    return socket.AF_UNIX if connection.family == socket.AF_UNIX else socket.AF_INET


def _may_read_logs(connection: socket.socket) -> bool:
    user: int
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user == 0 or (user == os.geteuid() and user != _NOBODY)


def _watch_peer(connection: socket.socket) -> None:
    """Detect a peer that vanished without closing its connection, as gRPC does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _KEEPALIVE_S), ("TCP_KEEPINTVL", _KEEPALIVE_S), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
