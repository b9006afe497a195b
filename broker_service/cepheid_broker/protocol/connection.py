"""One client connection: passes frames to the commands that serve them, and keeps the rules of the connection itself.

    data_received ──► FrameSplitter ──► SEND: gathered per producer ─┐ one append and one write of receipts per producer and turn
                                   └──► table: command → method      └──► before the next other command, and at the end
    pause_writing ──► consumers of this connection get nothing until resume_writing; no others are affected

Rules
1. CONNECT comes first, once, and in time; any other command before it closes the connection (protocol.md §2.1). Where clients are
   authenticated, CONNECT is answered after that. A client whose credentials expire is asked for new ones (§3).
2. Whatever a peer sends, no exception reaches the loop: the connection closes with a reason, which is logged once.
3. A silent peer gets a PING and is closed if it stays silent. A peer that is no longer read, as it does not read its answers, is
   closed if it goes on so. Each connection has one timer, which only the timer itself moves.
4. Reading stops while too many bytes are unanswered (publish window), or while the peer does not read its answers.
5. A peer that begins with HTTP is redirected to the admin API (http_redirect.py): no frame begins like that, it would have a
   gigabyte.
6. One connection has a limited part of each loop turn: commands served (COMMANDS_PER_TURN) and pending slow requests (requests.py)
   are bounded. Reading stops while received frames are not served.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from google.protobuf.message import Message

from cepheid_broker.errors import ProtocolViolationError
from cepheid_broker.peer import Buffer
from cepheid_broker.protocol.access import COMMAND_NEEDS, Access
from cepheid_broker.protocol.connection_consumer import ConsumerCommands
from cepheid_broker.protocol.connection_lookup import LookupCommands
from cepheid_broker.protocol.connection_producer import ProducerCommands
from cepheid_broker.protocol.connection_schema import SchemaCommands
from cepheid_broker.protocol.connection_unserved import UnservedCommands
from cepheid_broker.protocol.connection_watch import WatchCommands
from cepheid_broker.protocol.http_redirect import HttpRedirect, is_http
from cepheid_broker.protocol.requests import Requests
from cepheid_broker.protocol.services import Services
from cepheid_broker.publish_window import PublishWindow
from cepheid_ports import CepheidError, without_details
from cepheid_security import AuthenticationError, Credentials, Principal, certificate_expires_at_ms, certificate_names
from cepheid_security.audit import TLS_HANDSHAKE
from cepheid_security.authorization import original_role_problem
from cepheid_security.certificate_revocations import why_revoked
from cepheid_security.connection_limits import Place
from cepheid_security.handshakes import TLS_HELLO
from cepheid_wire import (
    BODY_FIELDS,
    PING_FRAME,
    PONG_FRAME,
    BadFrameError,
    CommandType,
    Frame,
    FrameSplitter,
    ServerError,
    encode_body,
    parse_command,
)
from cepheid_wire import pulsar_api_pb2 as pb

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 21  # subscriptions may carry the schema type AUTO_CONSUME (protocol.md §2.2)
FEATURES = pb.FeatureFlags(supports_topic_watchers=True, supports_get_partitioned_metadata_without_auto_creation=True)
SERVER_VERSION = "Cepheid-0.1.0"
CLOSE_LINGER_S = 5.0  # for the peer to read what was written before the close
UNREAD_ANSWERS_FACTOR = 4  # times `write_high_bytes`: above it, the peer is not read until it reads


COMMANDS_PER_TURN = 64
"""Most commands of one connection, except SEND, in one turn of the loop: the rest waits for its next turn, so that other
connections are served. SENDs cost little, and are appended together."""

_SEND = int(CommandType.SEND)  # as an int: a lookup in an Enum takes as long as all other work here for an entry
SMALL_BYTES = 4096
GATHER_BYTES = 64 * 1024
"""Gathered buffers above this size are written at once, so that the socket's own limit applies."""


MAX_CONNECT_BYTES = 64 * 1024
"""Limit of frames before a client is authenticated, where that is required: unknown clients get little memory."""
NO_REQUEST = (1 << 64) - 1
"""-1, as in the reference broker: the request id of an error that answers CONNECT (protocol.md §2.1)."""
REFRESH_MARK = b"PulsarAuthRefresh"
"""Data of the challenge for new credentials (protocol.md §3)."""


class _Hold(enum.IntFlag):
    """Reasons to stop reading."""

    WINDOW = 1
    UNREAD_ANSWERS = 2
    UNSERVED = 4


class Connection(asyncio.Protocol):
    def __init__(self, services: Services, on_made: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self._services = services
        self._settings = services.settings.connection
        self._on_made = on_made
        self._on_lost = on_lost
        asks = services.authenticator is not None
        self._splitter = FrameSplitter(MAX_CONNECT_BYTES if asks else services.settings.max_frame_bytes)
        self._requests = Requests(services.tasks, self._settings.max_waiting_requests)
        self.window = PublishWindow(
            self._settings.publish_window_bytes,
            services.publish_budget,
            lambda: self._hold(_Hold.WINDOW),
            lambda: self._release(_Hold.WINDOW),
        )
        access = Access(self, services.authorizer, services.audit)
        self._producers = ProducerCommands(self, services, self._requests, access)
        self._consumers = ConsumerCommands(self, services, self._requests, access)
        self._watches = WatchCommands(self, services, self._requests, access)
        table: Mapping[int, Callable[[Any], None]] = {
            CommandType.CONNECT: self._on_connect,
            CommandType.PONG: self._on_pong,
            CommandType.AUTH_RESPONSE: self._on_auth_response,
            **UnservedCommands(self).table,
            **LookupCommands(self, services, self._requests, access).table,
            **SchemaCommands(self, services, self._requests, access).table,
            **self._producers.table,
            **self._consumers.table,
            **self._watches.table,
        }
        self._table = {kind: serve for kind, serve in table.items() if kind in COMMAND_NEEDS}
        self._unserved: list[Frame] = []  # received frames for a later turn of the loop
        self._broken: BadFrameError | None = None  # an invalid frame after them
        self._gathered: list[Buffer] = []  # written at the end of this turn of the loop
        self._gathered_bytes = 0
        self._ready = False
        self._authenticating = False
        self._may_refresh = self._challenged = False
        self.principal: Principal | None = None
        self.over_tls = False
        self._certificate_names: tuple[str, ...] = ()
        self._certificate_expires_at_ms: int | None = None
        self._tls: ssl.SSLObject | None = None
        self._is_first = True  # only the first piece starts at a frame boundary
        self._left_to_http = False
        self._heard = False
        self._ping_unanswered = False
        self._holds = _Hold(0)
        self._unread_bytes: int | None = None  # at the timer's last check, while the peer does not read its answers
        self._unread_for_s = 0.0
        self._probe: asyncio.Future[None] | None = None
        self.closed = False
        self.writable = True
        self.client_version = ""
        self.protocol_version = 0
        self.address = self.reached_host = "?"
        self.host = ""
        self.place: Place | None = None
        """Its share of the listener's limits; None before it is admitted."""
        self.connected_at_ms = services.ports.wall_ms()

    def __repr__(self) -> str:
        return f"<Connection {self.address} {self.client_version}, {self._producers!r}, {self._consumers!r}>"

    @property
    def ending(self) -> bool:
        return self.closed or self._transport.is_closing()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(self._settings.write_high_bytes, self._settings.write_high_bytes // 4)
        peer = self._transport.get_extra_info("peername")
        self.address, self.host = _host_port(peer), _host(peer)
        self.reached_host = _host(self._transport.get_extra_info("sockname"))
        tls = self._transport.get_extra_info("ssl_object")
        self.over_tls, self._tls = tls is not None, tls
        if tls is not None:
            certificate = tls.getpeercert()
            self._certificate_names = certificate_names(certificate, self._services.settings.authentication.certificate_role)
            self._certificate_expires_at_ms = certificate_expires_at_ms(certificate)
        self._timer = self._loop.call_later(self._settings.handshake_timeout_s, self._on_timer)
        self._on_made(self)

    def abandon(self) -> None:
        """Abort a connection that is not admitted, without logging: the listener has counted and logged it."""
        self.closed = True
        self._timer.cancel()
        self._free()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_first:
            self._is_first = False
            if is_http(data):
                self._leave_to_http(data)
                return
            if data.startswith(TLS_HELLO) and not self.over_tls:
                port = self._services.tls_port()
                where = f"TLS is on port {port}" if port else "this broker has no TLS"
                reason = f"it speaks TLS to the port without TLS; {where}"
                self._services.audit.record(
                    None, self.address, TLS_HANDSHAKE, f"port {self._services.listening_port()}", "denied", reason
                )
                self.close(reason)
                return
        self._heard = True
        if self._probe is not None and not self._probe.done():
            self._probe.set_result(None)
        try:
            frames = self._splitter.feed(data)
        except BadFrameError as error:
            frames, self._broken = error.frames_before, error
        if self._unserved:
            self._unserved += frames  # received before reading stopped
        else:
            self._serve_turn(frames)

    def _serve_turn(self, frames: Sequence[Frame]) -> None:
        try:
            self._unserved = self._serve(frames)
            self._producers.flush()
            if self._broken is not None and not self._unserved:
                raise self._broken
        except CepheidError as error:  # a WireError or a ProtocolViolationError: the peer's fault
            self._audit_stranger(str(error))
            self.close(str(error), **error.facts)
        except Exception as error:
            log.exception("connection.failed", extra={"peer": self.address, "error": repr(error)})
            self.close(f"internal error ({type(error).__name__})")
        if not self.writable and not self.closed:
            unread_bytes = self._transport.get_write_buffer_size()
            if unread_bytes > UNREAD_ANSWERS_FACTOR * self._settings.write_high_bytes:
                self._hold(_Hold.UNREAD_ANSWERS)
        if self._unserved and not self.closed:
            self._hold(_Hold.UNSERVED)
            self._loop.call_soon(self._serve_more)
        else:
            self._release(_Hold.UNSERVED)

    def _serve_more(self) -> None:
        if self._unserved:  # else it was closed meanwhile
            self._serve_turn(self._unserved)

    def _leave_to_http(self, data: bytes) -> None:
        """Pass the socket to the redirect. The connection has opened nothing yet, and is closed for all others."""
        admin_url = self._services.admin_url(self.reached_host, self.over_tls)
        redirect = HttpRedirect(admin_url, self._settings.handshake_timeout_s, lambda: self._on_lost(self))
        self.closed = self._left_to_http = True
        self._log_closed(f"it speaks HTTP: sent to {admin_url or 'nowhere'}")
        self._timer.cancel()
        self._free()
        self._transport.set_protocol(redirect)
        redirect.connection_made(self._transport)
        redirect.data_received(data)

    def pause_writing(self) -> None:
        self.writable = False
        self._consumers.on_writable(False)

    def resume_writing(self) -> None:
        self.writable = True
        self._release(_Hold.UNREAD_ANSWERS)
        self._consumers.on_writable(True)
        self._watches.on_writable(True)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            self._log_closed("the peer closed the connection" if error is None else f"the connection broke: {error}")
        self._timer.cancel()
        self._free()
        self._on_lost(self)

    # Commands

    def _serve(self, frames: Sequence[Frame]) -> list[Frame]:
        """Serve the frames of one turn, and return the rest."""
        served, coming = 0, iter(frames)
        for kind, command, tail in coming:
            if self.closed:
                return []
            if kind == _SEND and self._ready:
                self._producers.take_send(command, tail)
                continue
            if served == COMMANDS_PER_TURN:
                return [Frame(kind, command, tail), *coming]
            served += 1
            self._producers.flush()  # the SENDs before a command must be taken before it
            if kind == CommandType.PING and self._ready:
                self.write(PONG_FRAME)
                continue
            if not self._ready and kind != CommandType.CONNECT:
                raise ProtocolViolationError(f"command {kind} came before CONNECT", command_type=kind)
            body = getattr(parse_command(command), BODY_FIELDS[kind])
            serve = self._table.get(kind)
            if serve is None:
                raise ProtocolViolationError(f"{CommandType(kind).name} is not a command for brokers", command_type=kind)
            serve(body)
        return []

    def _on_connect(self, connect: pb.CommandConnect) -> None:
        if self._ready or self._authenticating:
            raise ProtocolViolationError("a second CONNECT")
        self.client_version = connect.client_version[:200]
        self.protocol_version = connect.protocol_version
        if self._services.authenticator is None:
            self._accept()
            return
        self._authenticating = True
        self._may_refresh = connect.feature_flags.supports_auth_refresh
        credentials = self._credentials(connect.auth_method_name, connect.auth_data)
        self._services.tasks.start(self._admit(credentials, connect.original_principal), name="authenticate")

    def _credentials(self, method: str, data: bytes) -> Credentials:
        return Credentials(method, data, self._certificate_names, self._certificate_expires_at_ms, self.host)

    async def _admit(self, credentials: Credentials, original_principal: str) -> None:
        authenticator, authorizer = self._services.authenticator, self._services.authorizer
        assert authenticator is not None
        try:
            if original_principal and authorizer is None:
                raise AuthenticationError("it speaks for somebody else, which only a proxy may, and this cluster has none")
            principal = replace(await authenticator.authenticate(credentials), original_role=original_principal or None)
            authenticator.revoked.check(principal)  # again: the role that a proxy speaks for
        except AuthenticationError as error:
            await self._refuse_late(credentials, error)
            return
        if authorizer is not None and authorizer.enforced:
            problem = original_role_problem(authorizer.roles, principal.role, principal.original_role)
            if problem is not None:
                self._refuse_original_role(principal, problem)
                return
        if not self.closed:
            self._authenticating, self.principal = False, principal
            self._accept()

    async def _refuse_late(self, credentials: Credentials, error: AuthenticationError) -> None:
        """Refuse credentials, after a while when this address has failed often: whoever guesses has to wait."""
        if credentials.method not in ("", "none") and not error.retriable:
            delay_s = self._services.failed_attempts.note(self.host, self._loop.time())
            if delay_s:
                await asyncio.sleep(delay_s)
        self._refuse_credentials(error)

    def _refuse_original_role(self, principal: Principal, problem: str) -> None:
        """An error of authorization, as Pulsar answers: the credentials themselves are valid."""
        if self.closed:
            return
        log.warning("authorization.failed", extra={"peer": self.address, "role": principal.role, "error": problem})
        self._services.audit.record(
            principal,
            self.address,
            CommandType.CONNECT.name,
            "",
            "denied",
            problem,
            original_role=principal.original_role or "",
        )
        self.send_error(NO_REQUEST, ServerError.AUTHORIZATION_ERROR, problem)
        self.close(f"authorization failed: {problem}")

    def _audit_stranger(self, reason: str) -> None:
        """Record why a connection ends before its client is known, such as a token that is larger than a frame may be."""
        if self._services.authenticator is not None and not self._ready and not self.closed:
            self._services.audit.record(None, self.address, CommandType.CONNECT.name, "", "denied", reason)

    def _refuse_credentials(self, error: AuthenticationError) -> None:
        """What passes by itself is no denial, and is answered as such: an error of authentication makes Java clients give up."""
        if self.closed:
            return
        self._services.refusals.note(
            "authentication.unavailable" if error.retriable else "authentication.failed",
            (self.host, without_details(str(error))),
            level=logging.WARNING,
            peer=self.address,
            error=str(error),
        )
        if error.retriable:
            self.send_error(NO_REQUEST, ServerError.SERVICE_NOT_READY, str(error))
            self.close(f"authentication is not possible at this moment: {error}")
            return
        self._services.audit.record(self.principal, self.address, CommandType.CONNECT.name, "", "denied", str(error))
        self.send_error(NO_REQUEST, ServerError.AUTHENTICATION_ERROR, str(error))
        self.close(f"authentication failed: {error}")

    def _on_auth_response(self, answer: pb.CommandAuthResponse) -> None:
        if not self._challenged or self._authenticating:
            raise ProtocolViolationError("AUTH_RESPONSE without a challenge")
        self._authenticating = True
        credentials = self._credentials(answer.response.auth_method_name, answer.response.auth_data)
        self._services.tasks.start(self._renew(credentials), name="authenticate")

    async def _renew(self, credentials: Credentials) -> None:
        authenticator, before = self._services.authenticator, self.principal
        assert authenticator is not None
        assert before is not None
        try:
            principal = await authenticator.authenticate(credentials)
            if principal.role != before.role:
                raise AuthenticationError(
                    f"the new credentials are those of {principal.role!r}, the connection is {before.role!r}'s"
                )
        except AuthenticationError as error:
            await self._refuse_late(credentials, error)
            return
        self.principal = replace(principal, original_role=before.original_role)
        self._authenticating = self._challenged = False

    def on_permissions_changed(self, tenant: str | None) -> None:
        """Close producers and consumers that are no longer permitted, in this tenant or (None) in any; then call
        `update_watchers`."""
        if self.principal is not None and not self.closed:
            self._producers.on_permissions_changed(tenant)
            self._consumers.on_permissions_changed(tenant)

    async def update_watchers(self, tenant: str | None) -> None:
        """Notify watchers of topics that the client may now use or no longer use, with a pause after each watcher."""
        await self._watches.look_again(tenant)

    def end_if_revoked(self) -> None:
        """Close the connection when the token or the certificate that it showed was revoked."""
        authenticator = self._services.authenticator
        if (reason := why_revoked(self._tls)) is not None:
            self._refuse_credentials(AuthenticationError(f"{reason}: connect again with a new one"))
            return
        if authenticator is None or self.principal is None:
            return
        try:
            authenticator.revoked.check(self.principal)
        except AuthenticationError as error:
            self._refuse_credentials(error)

    def _credentials_hold(self) -> bool:
        """Whether the client may go on. Asks it for new credentials when those it showed have expired."""
        expires_at_ms = None if self.principal is None else self.principal.expires_at_ms
        if expires_at_ms is None or self._services.ports.wall_ms() < expires_at_ms:
            return True
        assert self.principal is not None
        if self._challenged or not self._may_refresh or self.principal.method == "tls":
            # A connection keeps its certificate: the client shows another one when it connects again.
            self.close("its certificate has expired" if self.principal.method == "tls" else "its credentials have expired")
            return False
        self._challenged = True
        challenge = pb.CommandAuthChallenge(server_version=SERVER_VERSION, protocol_version=PROTOCOL_VERSION)
        challenge.challenge.auth_method_name = self.principal.wire_method
        challenge.challenge.auth_data = REFRESH_MARK
        self.send(challenge)
        return True

    def _accept(self) -> None:
        self._ready = True
        if self.place is not None:
            self.place.settle()
        self._splitter.max_frame_bytes = self._services.settings.max_frame_bytes
        self._timer.cancel()
        self._timer = self._loop.call_later(self._settings.keepalive_s, self._on_timer)
        self.send(
            pb.CommandConnected(
                server_version=SERVER_VERSION,
                protocol_version=min(PROTOCOL_VERSION, self.protocol_version),
                max_message_size=self._services.settings.max_message_bytes,
                feature_flags=FEATURES,
            )
        )
        extra = {"peer": self.address, "client_version": self.client_version, "protocol_version": self.protocol_version}
        if self.principal is not None:
            extra["role"] = self.principal.role
            if self.principal.original_role is not None:
                extra["original_role"] = self.principal.original_role
        log.info("connection.opened", extra=extra)

    def _on_pong(self, pong: pb.CommandPong) -> None:
        """Do nothing: receiving it counted already."""

    # Keepalive

    def _on_timer(self) -> None:
        if not self._ready:
            reason = f"no CONNECT within {self._settings.handshake_timeout_s:g} s"
            self._audit_stranger(reason)
            self.close(reason)
            return
        if not self._credentials_hold():
            return
        if self._unread_for_too_long():
            self.close(f"did not read its answers for {2 * self._settings.keepalive_s:g} s", unread_bytes=self._unread_bytes)
            return
        if self._holds:
            # While reading is stopped its PINGs wait. C++ takes any PONG as an answer, and would close otherwise (protocol.md §4).
            self.write(PONG_FRAME)
            self._ping_unanswered = False
        elif self._heard:
            self._heard = self._ping_unanswered = False
        elif self._ping_unanswered:
            self.close(f"silent for {2 * self._settings.keepalive_s:g} s in spite of a PING")
            return
        else:
            self._ping_unanswered = True
            self.write(PING_FRAME)
        self._timer = self._loop.call_later(self._settings.keepalive_s, self._on_timer)

    def _unread_for_too_long(self) -> bool:
        """Return whether the peer has not read for too long. TCP alone would wait forever: it only checks that the host is
        reachable."""
        if not self._holds & _Hold.UNREAD_ANSWERS:
            self._unread_bytes = None
            return False
        unread_bytes = self._transport.get_write_buffer_size()
        is_stuck = self._unread_bytes is not None and unread_bytes >= self._unread_bytes
        self._unread_for_s = self._unread_for_s + self._settings.keepalive_s if is_stuck else 0.0
        self._unread_bytes = unread_bytes
        return self._unread_for_s >= 2 * self._settings.keepalive_s

    async def is_alive(self) -> bool:
        if self.closed or self._holds:
            return not self.closed
        if self._probe is None or self._probe.done():
            self._probe = self._loop.create_future()
            self.write(PING_FRAME)
        try:
            async with asyncio.timeout(self._settings.liveness_probe_s):
                await asyncio.shield(self._probe)
        except TimeoutError:
            waited_s = self._settings.liveness_probe_s
            self.close(f"a new connection takes over from this one, which did not answer a PING for {waited_s:g} s")
            return False
        return not self.closed

    # Answers

    def send(self, body: Message) -> None:
        self.write(encode_body(body))

    def send_error(self, request_id: int, error: ServerError, message: str) -> None:
        self.send(pb.CommandError(request_id=request_id, error=cast(Any, int(error)), message=message))

    def write(self, frames: bytes) -> None:
        if self._gathered:
            self._write_gathered()
        if not self.ending:
            self._transport.write(frames)

    def write_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Write buffers together with others of this turn: a thousand subscriptions may send one entry each."""
        if not self._gathered:
            self._loop.call_soon(self._write_gathered)
        self._gathered += buffers
        self._gathered_bytes += sum(map(len, buffers))
        if self._gathered_bytes >= GATHER_BYTES:
            self._write_gathered()

    def _write_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        size_bytes, self._gathered_bytes = self._gathered_bytes, 0
        if gathered and not self.ending:
            if size_bytes <= len(gathered) * SMALL_BYTES:
                self._transport.write(b"".join(gathered))
            else:
                self._transport.writelines(gathered)

    # The end

    def close(self, reason: str, **facts: Any) -> None:
        if self._left_to_http:
            self._transport.abort()
        if self.closed:
            return
        self.closed = True
        self._log_closed(reason, **facts)
        self._timer.cancel()
        self._free()
        self._transport.close()
        self._timer = self._loop.call_later(CLOSE_LINGER_S, self._transport.abort)

    def _free(self) -> None:
        """Free everything at once, whatever the socket still does (protocol.md §26, rule 8); repeatable."""
        self._unserved = []
        self._requests.cancel_all()
        self._producers.on_connection_lost()
        self._consumers.on_connection_lost()
        self._watches.on_connection_lost()
        self.window.close()
        if self._probe is not None and not self._probe.done():
            self._probe.set_result(None)

    def _log_closed(self, reason: str, **facts: Any) -> None:
        extra: dict[str, Any] = {"peer": self.address, "client_version": self.client_version, "reason": reason, "facts": facts}
        if self._ready or self._services.authenticator is None:
            log.info("connection.closed", extra=extra)
        else:  # unauthenticated clients can repeat it at will
            self._services.refusals.note("connection.closed", (self.host, without_details(reason)), **extra)

    def _hold(self, hold: _Hold) -> None:
        if not self._holds and not self._transport.is_closing():
            self._transport.pause_reading()
        self._holds |= hold

    def _release(self, hold: _Hold) -> None:
        if self._holds and not self._holds & ~hold and not self._transport.is_closing():
            self._transport.resume_reading()
        self._holds &= ~hold


def _host_port(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "?"


def _host(address: Any) -> str:
    return str(address[0]) if isinstance(address, tuple) else "127.0.0.1"
