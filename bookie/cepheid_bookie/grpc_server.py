"""A bookie's gRPC server, which passes requests to the storage code.

    Add stream:  read message ──► verify digests ──► Bookie.add ──► journal ──► on_answers ──► one answer message per loop turn
                     ▲                                                              │
                     └──────── not read while too many bytes are unanswered ◄───────┘

Rule 1: a damaged group never reaches the storage; it is answered BAD_DIGEST, which may overtake answers of earlier groups of its
ledger (a refusal fails the bookie for that ledger in any case) but never follows those of later ones.
Rule 2: unanswered bytes of a client are bounded per stream: the server stops reading, and HTTP/2 stops the client's writes.
Rule 3: answers of reads are sent in pieces of 256 KiB, one per turn of the loop, so that an add waits for one piece, however many
readers there are. Encoding and sending 1 MB takes the loop half a millisecond, whole or in pieces.
Rule 4: the role in the caller's certificate is checked before a request is decoded (access.py). A refused request is then decoded
only for the audit log.
Rule 5: fences and first reads of recoveries share a stream: a call for each would cost more than the request itself. They are
answered when they are done, in any order. An answer has one piece of a read; the client requests more with a call. A large answer
keeps its place until it was sent, so that for a client that does not read only a few pieces are read.
Rule 6: a call with a certificate that is revoked, or has expired since the handshake, is refused. Streams then end after admitted
requests were answered; brokers whose certificate was replaced in time have another stream by then
(cepheid_ledger/grpc_connection.py). gRPC itself does not support revocation lists.
New lists are read in a thread.
Rule 7: to stop, the server stops reading, waits for admitted requests, sends their answers, and then ends the streams.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, NoReturn, Protocol
from urllib.parse import unquote

import grpc
import grpc.aio

from cepheid_bookie.access import FENCE, OPEN_ACCESS, SCAN, BookieAccess
from cepheid_bookie.denials import Caller, Denials, asking
from cepheid_bookie.entry_reader import refuse_range, split_answer
from cepheid_bookie.errors import PortInUseError
from cepheid_bookie.scan_server import ScanServer
from cepheid_bookie.scans import LoopTurns
from cepheid_bookie.settings import BookieServerSettings
from cepheid_ports import Ports, TaskOwner, host_port, keep_large_buffers
from cepheid_rpc import (
    ADD,
    READ,
    READ_LAC,
    RECOVER,
    SCAN_PORT,
    SERVICE,
    WRITE_LAC,
    AddAnswer,
    AddRequest,
    DigestMismatchError,
    EntryGroup,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    MessageKind,
    MissingEntries,
    ReadAnswer,
    ReadRequest,
    Status,
    decode_add_message,
    decode_explicit_lac,
    decode_lac_request,
    decode_numbered,
    decode_read_request,
    encode_add_answers,
    encode_lac_answer,
    encode_numbered,
    encode_read_answer,
    encode_scan_port,
    encode_status,
    kind_of,
    server_options,
)
from cepheid_security.certificate_revocations import FOLLOW_S, RevokedCertificates
from cepheid_security.grpc_tls import expires_at_ms, is_encrypted, peer_certificate, peer_role
from cepheid_security.tls import CertificateRule

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext, whose stubs know neither read nor EOF
_PIECE_BYTES = 256 << 10
_RECOVERIES_AT_ONCE = 1_000
"""Maximum of concurrent requests of one stream; the next one waits."""
_UNSENT_BYTES = 16 * _PIECE_BYTES
"""Limit of unsent answers of one stream of recoveries; beyond it the next request waits."""
_READS_AT_ONCE = _UNSENT_BYTES // _PIECE_BYTES
"""Maximum of reads of one stream of recoveries that run or wait to be sent, so that their answers fit `_UNSENT_BYTES`."""
_SMALL_READ_BYTES = _UNSENT_BYTES // _RECOVERIES_AT_ONCE
"""Answers of reads that need neither a turn of the loop nor a place until they were sent: as many as there may be fit
`_UNSENT_BYTES` as well. Most are, and they share messages."""
_DENIAL_WAITS_S = 10.0
"""How long a denied stream of adds or recoveries waits for its first message."""
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_CERTIFICATE_LOOKS_S = FOLLOW_S
"""Interval of checks whether the certificate of a stream's client has expired or is revoked. The wall clock may be set."""
_EXPIRED = "the certificate of this connection has expired: connect again with a new one"

_Callers = Mapping[type[LacRequest] | type[ReadRequest], Caller]
"""Caller of a stream of recoveries, by the kind of request."""


class ServedBookie(Protocol):
    """The methods of the storage code that the server calls."""

    def add(self, requests: Sequence[AddRequest], on_answers: Callable[[Sequence[AddAnswer]], None]) -> None: ...

    async def read_lac(self, request: LacRequest) -> LacAnswer: ...

    def read(self, request: ReadRequest) -> AsyncGenerator[ReadAnswer, None]: ...

    async def write_lac(self, request: ExplicitLac) -> Status: ...


class BookieServer:
    """Serves one bookie on one port, until `aclose`. Port 0 lets the system choose: see `port`. `scans` is started and closed with
    it; without one all scans are served here.

    `credentials`: `grpc.ServerCredentials`, which make it a port with TLS. `plain_port`: one without TLS beside it.
    `revoked`: certificates that are refused.
    `access` says what callers may do, and `denials` receives what was refused. `wall_ms` is the wall clock.
    """

    def __init__(
        self,
        bookie: ServedBookie,
        host: str,
        port: int,
        settings: BookieServerSettings | None = None,
        *,
        scans: ScanServer | None = None,
        credentials: Any = None,
        revoked: RevokedCertificates | None = None,
        plain_port: int | None = None,
        access: BookieAccess = OPEN_ACCESS,
        denials: Denials | None = None,
        wall_ms: Callable[[], int] | None = None,
    ) -> None:
        self._wall_ms = wall_ms or Ports().wall_ms
        self._credentials = credentials
        self._revoked = revoked
        self.plain_port = plain_port
        self._access = access
        self._denials = denials or Denials()
        self._bookie = bookie
        self._scans = scans
        self._host = host
        self.port = port
        self._settings = settings or BookieServerSettings()
        self._server: grpc.aio.Server | None = None
        self._add_streams: dict[_AddStream, None] = {}
        self._recovery_streams: dict[_RecoveryStream, None] = {}
        self._long_polls: dict[asyncio.Future[LacAnswer], None] = {}
        self._read_turns = LoopTurns()
        self._tasks = TaskOwner("bookie-server")

    def __repr__(self) -> str:
        return f"<BookieServer {self._host}:{self.port}, {len(self._add_streams)} add streams>"

    @property
    def in_flight_bytes(self) -> int:
        """Add bytes received over the network and not yet answered."""
        return sum(stream.in_flight_bytes for stream in self._add_streams)

    async def start(self) -> None:
        """Open all ports, or none if it fails or is cancelled. Raises PortInUseError."""
        keep_large_buffers()
        server = grpc.aio.server(options=server_options(self._max_connections(), self._settings.handshake_timeout_s))
        server.add_generic_rpc_handlers((self._handlers(),))
        starting: asyncio.Future[None] | None = None
        try:
            self.port = self._listen(server, self.port, self._credentials)
            if self.plain_port is not None:
                self.plain_port = self._listen(server, self.plain_port, None)
            if self._scans is not None:
                await self._scans.start()
            starting = asyncio.ensure_future(server.start())
            await asyncio.shield(starting)  # a gRPC server whose start is cancelled has opened its ports, and fails
        except BaseException:
            # Shielded from a second cancellation.
            await asyncio.shield(asyncio.ensure_future(self._end_start(server, starting)))
            raise
        self._server = server
        if self._revoked is not None:
            self._tasks.start(self._follow_revoked_certificates(self._revoked), name="revoked-certificates")

    async def _follow_revoked_certificates(self, revoked: RevokedCertificates) -> None:
        while True:
            await revoked.follow_in_thread()

    def _max_connections(self) -> int:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        bound = self._settings.max_connections
        return bound if files == resource.RLIM_INFINITY else min(bound, files // 2)

    async def _end_start(self, server: grpc.aio.Server, starting: asyncio.Future[None] | None) -> None:
        if self._scans is not None:
            await self._scans.aclose()
        await (starting or server.start())  # gRPC closes the ports only of servers that were started
        await server.stop(None)

    def _listen(self, server: grpc.aio.Server, port: int, credentials: Any) -> int:
        """Listen, and return the port. Raises PortInUseError."""
        address = host_port(self._host, port)
        try:
            return server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise PortInUseError(f"cannot listen on {self._host}:{port}: {error}", port=port) from error

    async def aclose(self) -> None:
        """Stop reading requests, answer admitted ones within the grace time of the settings, and close the ports."""
        server, self._server = self._server, None
        if server is None:
            return
        for stream in self._add_streams:
            stream.stop_reading()
        for recoveries in self._recovery_streams:
            recoveries.stop_reading()
        for poll in self._long_polls:
            poll.cancel()
        await self._tasks.aclose()
        if self._scans is not None:
            await self._scans.aclose()
        await server.stop(self._settings.stop_grace_s)

    def _handlers(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        return grpc.method_handlers_generic_handler(SERVICE, self._methods())

    def _methods(self) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        """Return the calls that are served, by name; access.py has a row for each."""
        checked = self._with_valid_certificate
        return {
            ADD: grpc.stream_stream_rpc_method_handler(checked(ADD, self._serve_add)),
            READ_LAC: grpc.unary_unary_rpc_method_handler(checked(READ_LAC, self._serve_read_lac)),
            READ: grpc.unary_stream_rpc_method_handler(checked(READ, self._serve_read)),
            WRITE_LAC: grpc.unary_unary_rpc_method_handler(checked(WRITE_LAC, self._serve_write_lac)),
            SCAN_PORT: grpc.unary_unary_rpc_method_handler(checked(SCAN_PORT, self._serve_scan_port)),
            RECOVER: grpc.stream_stream_rpc_method_handler(checked(RECOVER, self._serve_recover)),
        }

    def _with_valid_certificate(
        self, method: str, serve: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """Return `serve` for callers with a valid certificate; others are refused (rule 6)."""

        async def checked(request: Any, context: Context) -> Any:
            certificate = peer_certificate(context.auth_context())
            if certificate is not None and (reason := self._why_invalid(certificate)) is not None:
                await self._refuse_certificate(context, method, reason)
            return await serve(request, context)

        return checked

    def _why_invalid(self, certificate: bytes) -> str | None:
        """Return why a certificate that the handshake accepted is no longer valid, or None."""
        if self._wall_ms() >= expires_at_ms(certificate):
            return _EXPIRED
        if self._revoked is not None and (reason := self._revoked.why_revoked(certificate)) is not None:
            return f"{reason}: connect again with a new one"
        return None

    async def _refuse_certificate(self, context: Context, method: str, reason: str) -> NoReturn:
        self._denials.role(_caller_of(context, method, self._access.certificate_role), "", reason)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        raise AssertionError("abort raises")

    async def _serve_while_valid(self, stream: _AddStream | _RecoveryStream, context: Context, method: str) -> None:
        """Serve a stream, and end it when its client's certificate expires or is revoked."""
        certificate = peer_certificate(context.auth_context())
        if certificate is None:
            await stream.serve()
            return
        loop = asyncio.get_running_loop()
        reason: str | None = None
        timer: asyncio.Handle

        def look() -> None:
            nonlocal timer, reason
            reason = self._why_invalid(certificate)
            if reason is None:
                left_s = (expires_at_ms(certificate) - self._wall_ms()) / 1000
                timer = loop.call_later(min(left_s, _CERTIFICATE_LOOKS_S), look)
            else:
                stream.stop_reading()

        timer = loop.call_soon(look)
        try:
            await stream.serve()
        finally:
            timer.cancel()
        if reason is not None:
            await self._refuse_certificate(context, method, reason)

    def _refusal(self, context: Context, operation: str, *, has_ticket: bool = False) -> str | None:
        """Return why the caller may not do this, or None if it may."""
        caller = context.auth_context()
        role = peer_role(caller, self._access.certificate_role)
        return self._access.refusal(operation, role, is_encrypted=is_encrypted(caller), has_ticket=has_ticket)

    async def _require(self, context: Context, method: str, operation: str, object: str = "", *, has_ticket: bool = False) -> None:
        """End a call that its caller may not make. `operation`: the method, or the kind of request of access.py."""
        if (reason := self._refusal(context, operation, has_ticket=has_ticket)) is not None:
            await self._deny(context, method, object, reason)

    async def _deny(self, context: Context, method: str, object: str, reason: str) -> NoReturn:
        caller = _caller_of(context, method, self._access.certificate_role)
        self._denials.role(caller, object, reason)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"role {caller.role!r}: {reason}")
        raise AssertionError("abort raises")

    async def _serve_add(self, _messages: object, context: Context) -> None:
        if (reason := self._refusal(context, ADD)) is not None:
            await self._deny_adds(context, reason)
        stream = _AddStream(self._bookie, context, self._settings.stream_in_flight_bytes)
        self._add_streams[stream] = None
        try:
            await self._serve_while_valid(stream, context, ADD)
        finally:
            del self._add_streams[stream]
        if stream.refusal is not None:
            await _refuse(context, ADD, stream.refusal)

    async def _deny_adds(self, context: Context, reason: str) -> NoReturn:
        """Deny after the first message: if a stream ends while a client is sending, gRPC reports INTERNAL, not the reason."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DENIAL_WAITS_S):
                await context.read()
        await self._deny(context, ADD, "", reason)

    async def _serve_recover(self, _messages: object, context: Context) -> None:
        rule = self._access.certificate_role
        callers = {LacRequest: _caller_of(context, READ_LAC, rule), ReadRequest: _caller_of(context, READ, rule)}
        if (reason := self._refusal(context, RECOVER)) is not None:
            await self._deny_recoveries(context, callers, reason)
        stream = _RecoveryStream(self._bookie, context, self._read_turns, callers)
        self._recovery_streams[stream] = None
        try:
            await self._serve_while_valid(stream, context, RECOVER)
        finally:
            del self._recovery_streams[stream]
        if stream.refusal is not None:
            await _refuse(context, RECOVER, stream.refusal)

    async def _deny_recoveries(self, context: Context, callers: _Callers, reason: str) -> NoReturn:
        """Record a denial for each request of the first message, as for calls, and end the stream."""
        try:
            async with asyncio.timeout(_DENIAL_WAITS_S):
                data = await context.read()
            messages = [] if data is _EOF else list(decode_numbered(data, MessageKind.RECOVERY_REQUESTS))
            requests = [_recovery_request(message) for _, message in messages]
        except TimeoutError:
            requests = []
        except MalformedGroupError as error:
            await _refuse(context, RECOVER, error)
        for request in requests[:-1]:
            self._denials.role(callers[type(request)], f"ledger {request.ledger_id}", reason)
        if not requests:
            await self._deny(context, RECOVER, "", reason)
        last = requests[-1]
        await self._deny(context, callers[type(last)].operation, f"ledger {last.ledger_id}", reason)

    async def _serve_read_lac(self, data: bytes, context: Context) -> bytes:
        try:
            request = decode_lac_request(data)
        except MalformedGroupError as error:
            await _refuse(context, READ_LAC, error)
        operation, has_ticket = FENCE if request.fence else READ_LAC, bool(request.ticket)
        await self._require(context, READ_LAC, operation, f"ledger {request.ledger_id}", has_ticket=has_ticket)
        with asking(_caller_of(context, READ_LAC, self._access.certificate_role)):
            return encode_lac_answer(await (self._wait_for_lac(request) if request.wait_ms else self._bookie.read_lac(request)))

    async def _wait_for_lac(self, request: LacRequest) -> LacAnswer:
        """Wait for the LAC to advance, which may take a minute. A stop ends the wait."""
        if self._server is None:
            return LacAnswer(Status.STOPPED)
        poll = asyncio.ensure_future(self._bookie.read_lac(request))
        self._long_polls[poll] = None
        try:
            return await poll
        except asyncio.CancelledError:
            if self._server is not None:
                raise  # cancelled by the client
            return LacAnswer(Status.STOPPED)
        finally:
            del self._long_polls[poll]

    async def _serve_read(self, data: bytes, context: Context) -> None:
        try:
            request = decode_read_request(data)
        except MalformedGroupError as error:
            await _refuse(context, READ, error)
        operation = FENCE if request.fence else SCAN if request.scan else READ
        await self._require(context, READ, operation, f"ledger {request.ledger_id}")
        with asking(_caller_of(context, READ, self._access.certificate_role)):
            await self._send_answers(request, context)

    async def _send_answers(self, request: ReadRequest, context: Context) -> None:
        certificate = peer_certificate(context.auth_context())
        async with aclosing(self._bookie.read(request)) as answers:
            async for answer in answers:
                if certificate is not None and (reason := self._why_invalid(certificate)) is not None:
                    await self._refuse_certificate(context, READ, reason)
                for piece in (answer,) if request.scan else split_answer(answer, _PIECE_BYTES):
                    if not request.scan:  # scans have waited for their turn already (scans.py)
                        await self._read_turns.wait()
                    await context.write(encode_read_answer(piece))  # waits while the client does not read: one chunk is in memory

    async def _serve_scan_port(self, _data: bytes, context: Context) -> bytes:
        await self._require(context, SCAN_PORT, SCAN_PORT)
        if self._scans is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "scans are served here")
            raise AssertionError("abort raises")
        return encode_scan_port(self._scans.port, self._scans.token)

    async def _serve_write_lac(self, data: bytes, context: Context) -> bytes:
        await self._require(context, WRITE_LAC, WRITE_LAC)
        try:
            request = decode_explicit_lac(data)
        except MalformedGroupError as error:
            await _refuse(context, WRITE_LAC, error)
        return encode_status(await self._bookie.write_lac(request))


def _caller_of(context: Context, method: str, rule: CertificateRule) -> Caller:
    """Return the caller. gRPC names peers as `ipv4:10.0.0.1:5000` and `ipv6:%5B::1%5D:5000`."""
    kind, _, address = str(context.peer()).partition(":")
    peer = unquote(address) if kind in ("ipv4", "ipv6") else ""
    return Caller(peer_role(context.auth_context(), rule), peer, method)


async def _refuse(context: Context, method: str, error: MalformedGroupError) -> NoReturn:
    """End a call that cannot be decoded. The client gets the reason and treats the outcome as unknown."""
    log.warning("bookie.request.refused", extra={"method": method, "peer": context.peer(), "error": str(error)})
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    raise AssertionError("abort raises")


class _AddStream:
    """One client's adds: their bound on unanswered bytes, and answers, collected during a loop turn and sent as one message."""

    def __init__(self, bookie: ServedBookie, context: Context, limit_bytes: int) -> None:
        self._bookie = bookie
        self._context = context
        self._limit_bytes = limit_bytes
        self.in_flight_bytes = 0
        self._answers: list[AddAnswer] = []
        self._answers_due = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._reading_ended = False
        self._reader: asyncio.Task[None] | None = None
        self.refusal: MalformedGroupError | None = None

    async def serve(self) -> None:
        """Serve until reading has ended (by the client, `stop_reading` or `refusal`) and all admitted adds are answered."""
        async with asyncio.TaskGroup() as tasks:
            self._reader = tasks.create_task(self._read(), name="bookie-server/add-requests")
            tasks.create_task(self._write(), name="bookie-server/add-answers")

    def stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        try:
            while (data := await self._context.read()) is not _EOF:
                self._admit(data)
                await self._room.wait()
        except MalformedGroupError as error:
            self.refusal = error
        finally:
            self._reading_ended = True
            self._answers_due.set()

    def _admit(self, data: bytes) -> None:
        message = _InFlightMessage(self, len(data))
        good: list[AddRequest] = []
        bad: list[AddAnswer] = []
        for request in decode_add_message(data):
            try:
                request.group.verify()
            except (DigestMismatchError, MalformedGroupError) as error:
                group = request.group
                log.warning("bookie.group.damaged", extra={"ledger_id": group.ledger_id, "error": str(error)})
                bad.append(AddAnswer(group.ledger_id, group.first_entry_id, group.last_entry_id, Status.BAD_DIGEST))
            else:
                good.append(request)
        message.unanswered_entries = sum(len(request.group) for request in good)
        if bad:
            self._on_answers(bad)
        if good:
            self._take(message.size_bytes)
            self._bookie.add(good, message.on_answers)

    def _take(self, size_bytes: int) -> None:
        self.in_flight_bytes += size_bytes
        if self.in_flight_bytes >= self._limit_bytes:
            self._room.clear()

    def give_back(self, size_bytes: int) -> None:
        self.in_flight_bytes -= size_bytes
        if self.in_flight_bytes < self._limit_bytes:
            self._room.set()
        if self.in_flight_bytes == 0:
            self._answers_due.set()

    def _on_answers(self, answers: Sequence[AddAnswer]) -> None:
        self._answers += answers
        self._answers_due.set()

    async def _write(self) -> None:
        """Send answers. Those that arrive while a message is being sent share the next one."""
        while True:
            while self._answers:
                answers, self._answers = self._answers, []
                await self._context.write(encode_add_answers(answers))
            if self._reading_ended and self.in_flight_bytes == 0:
                return
            self._answers_due.clear()
            await self._answers_due.wait()


class _InFlightMessage:
    """The bytes of one add message, given back when the last of its entries is answered."""

    __slots__ = ("_stream", "size_bytes", "unanswered_entries")

    def __init__(self, stream: _AddStream, size_bytes: int) -> None:
        self._stream = stream
        self.size_bytes = size_bytes
        self.unanswered_entries = 0

    def on_answers(self, answers: Sequence[AddAnswer]) -> None:
        for answer in answers:
            self.unanswered_entries -= answer.last_entry_id - answer.first_entry_id + 1
        assert self.unanswered_entries >= 0, f"the bookie answered {-self.unanswered_entries} entries too many"
        self._stream._on_answers(answers)
        if self.unanswered_entries == 0:
            self._stream.give_back(self.size_bytes)


class _RecoveryStream:
    """Fences and recovery reads of one client. Answers that are ready at the time of a write share a message."""

    def __init__(self, bookie: ServedBookie, context: Context, read_turns: LoopTurns, callers: _Callers) -> None:
        self._bookie = bookie
        self._context = context
        self._read_turns = read_turns
        self._callers = callers
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)
        self.at_once = 0
        self.messages_read = 0
        self._unsent: list[tuple[int, bytes, asyncio.Future[None] | None]] = []
        self.unsent_bytes = 0
        self._due = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._reading_ended = False
        self._reader: asyncio.Task[None] | None = None
        self.refusal: MalformedGroupError | None = None

    async def serve(self) -> None:
        """Serve until reading has ended and all requests are answered."""
        async with asyncio.TaskGroup() as tasks:
            self._reader = tasks.create_task(self._read(tasks), name="bookie-server/recovery-requests")
            tasks.create_task(self._write(), name="bookie-server/recovery-answers")

    def stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        try:
            while (data := await self._context.read()) is not _EOF:
                self.messages_read += 1
                for number, message in decode_numbered(data, MessageKind.RECOVERY_REQUESTS):
                    request = _recovery_request(message)
                    await self._room.wait()
                    self.at_once += 1
                    self._look_for_room()
                    tasks.create_task(self._answer(number, request), name="bookie-server/recovery")
        except MalformedGroupError as error:
            self.refusal = error
        finally:
            self._reading_ended = True
            self._due.set()

    async def _answer(self, number: int, request: LacRequest | ReadRequest) -> None:
        try:
            with asking(self._callers[type(request)]):
                await self._answer_well(number, request)
        except (Exception, asyncio.CancelledError) as error:  # a defect ends one recovery, not all that share the stream
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            log.error("bookie.recovery.failed", extra={"ledger_id": request.ledger_id, "error": repr(error)}, exc_info=error)
            self._send(number, _unknown(request))
        finally:
            self.at_once -= 1
            self._look_for_room()
            self._due.set()

    async def _answer_well(self, number: int, request: LacRequest | ReadRequest) -> None:
        if isinstance(request, LacRequest):
            self._send(number, encode_lac_answer(await self._bookie.read_lac(request)))
        else:
            async with self._reads:
                message = await self._read_first(request)
                sent: asyncio.Future[None] | None = None
                if len(message) > _SMALL_READ_BYTES:
                    sent = asyncio.get_running_loop().create_future()
                self._send(number, message, sent)
                if sent is not None:
                    await sent

    def _send(self, number: int, message: bytes, sent: asyncio.Future[None] | None = None) -> None:
        """Queue an answer. `sent` is done when gRPC has accepted the message, which it does not while the client does not read."""
        self._unsent.append((number, message, sent))
        self.unsent_bytes += len(message)
        self._look_for_room()
        self._due.set()

    async def _read_first(self, request: ReadRequest) -> bytes:
        request = replace(request, max_bytes=min(request.max_bytes, _PIECE_BYTES))
        groups: list[EntryGroup] = []
        missing: list[MissingEntries] = []
        next_entry_id = request.first_entry_id
        async with aclosing(self._bookie.read(request)) as answers:
            async for answer in answers:
                groups += answer.groups
                missing += answer.missing
                next_entry_id = answer.next_entry_id
                if sum(len(group.data) for group in groups) >= _PIECE_BYTES:
                    break  # otherwise continue to the missing entries after the last one, which a recovery needs to know
        if sum(len(group.data) for group in groups) > _SMALL_READ_BYTES:
            await self._read_turns.wait()
        return encode_read_answer(next(split_answer(ReadAnswer(tuple(groups), tuple(missing), next_entry_id), _PIECE_BYTES)))

    def _look_for_room(self) -> None:
        if self.at_once < _RECOVERIES_AT_ONCE and self.unsent_bytes < _UNSENT_BYTES:
            self._room.set()
        else:
            self._room.clear()

    async def _write(self) -> None:
        while True:
            while self._unsent:
                some, size_bytes = 0, 0
                while some < len(self._unsent) and (some == 0 or size_bytes + len(self._unsent[some][1]) <= _PIECE_BYTES):
                    size_bytes += len(self._unsent[some][1])
                    some += 1
                answers, self._unsent = self._unsent[:some], self._unsent[some:]
                messages = [(number, message) for number, message, _ in answers]
                await self._context.write(encode_numbered(MessageKind.RECOVERY_ANSWERS, messages))
                self.unsent_bytes -= size_bytes
                for _, _, sent in answers:
                    if sent is not None and not sent.done():
                        sent.set_result(None)
                self._look_for_room()
            if self._reading_ended and self.at_once == 0:
                return
            self._due.clear()
            await self._due.wait()


def _is_cancelled() -> bool:
    """Return whether this task itself is being cancelled, and not something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _recovery_request(message: memoryview) -> LacRequest | ReadRequest:
    """Return the decoded request. Raises MalformedGroupError."""
    is_lac = kind_of(message) == MessageKind.LAC_REQUEST
    request: LacRequest | ReadRequest = decode_lac_request(message) if is_lac else decode_read_request(message)
    if not request.fence:
        raise MalformedGroupError(f"a request for ledger {request.ledger_id} without a fence among those of recoveries")
    return request


def _unknown(request: LacRequest | ReadRequest) -> bytes:
    if isinstance(request, LacRequest):
        return encode_lac_answer(LacAnswer(Status.UNKNOWN))
    return encode_read_answer(refuse_range(request, Status.UNKNOWN))
