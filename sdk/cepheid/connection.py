"""One connection to a broker, shared by all producers and consumers of a client that use this broker.

    received bytes ──► frames ──┬─ answers of requests ──► the future of the request id
                                ├─ receipts, errors, closes of producers ──► ProducerEnd by producer id
                                ├─ messages, closes of consumers ──────────► ConsumerEnd by consumer id
                                └─ PING ──► PONG

Rules
 1. Everything that arrives is handled in order, synchronously. Producers and consumers never wait in a callback.
 2. When the connection ends, all requests fail with ConnectError, and every producer and consumer is notified once.
 3. A peer that sends nothing for two keep-alive intervals, although it was pinged, counts as dead.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from google.protobuf.message import DecodeError

from cepheid.credentials import Security
from cepheid.errors import ClosedError, ConnectError, Error, TimedOutError, UntrustedBrokerError, refused
from cepheid.forks import close_inherited, keep_inherited, sever_in_children
from cepheid.service_url import Address
from cepheid_wire import (
    BODY_FIELDS,
    PING_FRAME,
    PONG_FRAME,
    CommandType,
    Frame,
    FrameSplitter,
    ServerError,
    WireError,
    encode_body,
    parse_command,
)
from cepheid_wire import pulsar_api_pb2 as pb

log = logging.getLogger(__name__)

CLIENT_VERSION = "cepheid-python"
PROTOCOL_VERSION = 20
DEFAULT_MAX_MESSAGE_BYTES = 5 * 1024 * 1024
FRAME_PADDING_BYTES = 64 * 1024
"""Maximum excess of a frame over the largest message, for its command and metadata. Pulsar's own allowance is 10 KiB."""
WRITE_BUFFER_BYTES = 4 << 20

_RECEIPT_PREFIX = b"\x08\x07\x3a"
"""First bytes of a BaseCommand of type SEND_RECEIPT: its type, and the tag of its body. A length of one byte follows."""

Request = tuple[int, asyncio.Future[Any]]
"""Request id and future of the answer."""


class ProducerEnd(Protocol):
    """Callbacks of a connection to a producer."""

    def on_receipt(self, receipt: pb.CommandSendReceipt) -> None: ...
    def on_send_error(self, error: pb.CommandSendError) -> None: ...
    def on_closed_by_broker(self, broker_url: str) -> None: ...
    def on_connection_lost(self) -> None: ...


class ConsumerEnd(Protocol):
    """Callbacks of a connection to a consumer."""

    def on_message(self, message: pb.CommandMessage, tail: memoryview) -> None: ...
    def on_active_change(self, is_active: bool) -> None: ...
    def on_closed_by_broker(self, broker_url: str) -> None: ...
    def on_connection_lost(self) -> None: ...


class WatcherEnd(Protocol):
    """Callbacks of a connection to a watcher of topics."""

    def on_update(self, update: pb.CommandWatchTopicUpdate) -> None: ...
    def on_connection_lost(self) -> None: ...


class Connection(asyncio.Protocol):
    """A connection to a broker, created by `dial`."""

    def __init__(
        self, address: Address, security: Security, *, keep_alive_s: float, on_closed: Callable[[Connection], None]
    ) -> None:
        self.address = address
        self._security = security
        self.max_message_bytes = DEFAULT_MAX_MESSAGE_BYTES
        self.server_version = ""
        self.producers: dict[int, ProducerEnd] = {}
        self.consumers: dict[int, ConsumerEnd] = {}
        self.watchers: dict[int, WatcherEnd] = {}
        self.has_topic_watchers = False
        self.is_open = False
        self._keep_alive_s = keep_alive_s
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._splitter = FrameSplitter(DEFAULT_MAX_MESSAGE_BYTES + FRAME_PADDING_BYTES)
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._last_request_id = 0
        self._handshake: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._heard = True
        self._pinged = False
        self._keep_alive: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reason = "the connection was closed"

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Connection {self.address} {state}, {len(self._requests)} requests>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the same methods but another base class
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        sever_in_children(self)

    async def shake_hands(self, *, proxy_to: Address | None) -> None:
        """Send CONNECT and wait for the answer. Raises ConnectError, NotAllowedError."""
        connect = pb.CommandConnect(client_version=CLIENT_VERSION, protocol_version=PROTOCOL_VERSION)
        connect.feature_flags.supports_auth_refresh = True
        connect.feature_flags.supports_topic_watchers = True
        connect.auth_method_name, connect.auth_data = await self._security.show()
        if proxy_to is not None:
            connect.proxy_to_broker_url = str(proxy_to)
        self.write(encode_body(connect))
        connected = await self._handshake
        if connected.max_message_size > 0:
            self.max_message_bytes = connected.max_message_size
            self._splitter.max_frame_bytes = connected.max_message_size + FRAME_PADDING_BYTES
        self.server_version = connected.server_version
        self.has_topic_watchers = connected.feature_flags.supports_topic_watchers
        self.is_open = True
        self._keep_alive = asyncio.get_running_loop().call_later(self._keep_alive_s, self._check_alive)

    async def request(self, body: Any, what: str, timeout_s: float | None) -> Any:
        """Send a command with a request id and return the body of its answer. `what` names it in errors.

        Raises RefusedError (or a subclass), ConnectError, TimedOutError. Cancelled: the answer is ignored.
        """
        return await self.answer_to(self.begin_request(body, what), what, timeout_s)

    def begin_request(self, body: Any, what: str) -> Request:
        """Send a command now; `answer_to` waits for its answer. Raises ConnectError."""
        self._last_request_id += 1
        request_id = body.request_id = self._last_request_id
        if not self.is_open:
            raise ConnectError(f"{what}: {self._reason}")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests[request_id] = answer
        self.write(encode_body(body))
        return request_id, answer

    async def answer_to(self, request: Request, what: str, timeout_s: float | None) -> Any:
        """Return the body of the answer to a request that was sent. Raises the errors of `request`."""
        request_id, answer = request
        try:
            async with asyncio.timeout(timeout_s):
                result = await answer
        except TimeoutError:
            raise TimedOutError(f"{what}: {self.address} did not answer within {timeout_s} s") from None
        finally:
            self._requests.pop(request_id, None)
        if isinstance(result, pb.CommandError):
            raise refused(result.error, result.message, what)
        return result

    def tell(self, body: Any) -> None:
        """Send a command and ignore its answer."""
        self._last_request_id += 1
        body.request_id = self._last_request_id
        self.write(encode_body(body))

    def write(self, data: bytes) -> None:
        """Send whole frames. Does nothing on a closed connection, as its users are notified separately."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def write_parts(self, parts: Iterable[bytes | memoryview]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(parts)

    def sever(self) -> None:
        """In a forked child: close its copy of the socket, so that nothing is sent. The connection belongs to the parent."""
        self.is_open = False
        transport, self._transport = self._transport, None
        for users in (self.producers, self.consumers, self.watchers):  # they belong to the parent, too, and never attach again here
            users.clear()
        if transport is not None and not transport.is_closing():
            keep_inherited(transport)
            close_inherited(transport.get_extra_info("socket").fileno())
        self._reason = f"the connection to {self.address} belongs to the process that this one was forked from"

    def abort(self, reason: str) -> None:
        """Close at once. Users are notified as if the broker had closed the connection."""
        self._reason = f"the connection to {self.address} was closed: {reason}"
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        """Close after all written data was passed to the system, and wait for the end."""
        self._reason = f"the connection to {self.address} was closed by its client"
        if self._transport is None:
            return
        self._transport.close()
        try:
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._ended)
        except TimeoutError:
            self._transport.abort()
            await self._ended

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            frames = self._splitter.feed(data)
            for frame in frames:
                self._on_frame(frame)
        except WireError as error:
            log.warning("connection.broken", extra={"peer": str(self.address), "error": str(error)})
            self.abort(str(error.args[0]))

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and self.is_open:
            self._reason = f"the connection to {self.address} broke: {error}"
        elif self.is_open and self._reason == "the connection was closed":
            self._reason = f"{self.address} closed the connection"
        elif not self._handshake.done() and self._reason == "the connection was closed":
            self._reason = f"{self.address} closed the connection before it answered"
            if self.address.over_tls:  # brokers that end the TLS handshake for this reason do not report it
                self._reason += "; it may ask for a client certificate that it accepts (tls_certificate_file)"
            else:
                self._reason += "; its port may be one for TLS (pulsar+ssl:// instead of pulsar://)"
        self.is_open = False
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
        if (refusal := _refused_certificate(error, self.address)) is not None:
            _set_exception(self._handshake, refusal)  # TLS 1.3: a server checks certificates after its client has begun to send
        for answer in (self._handshake, *self._requests.values()):
            if not answer.done():
                answer.set_exception(ConnectError(self._reason))
        if self._handshake.done() and not self._handshake.cancelled():
            self._handshake.exception()  # retrieved, so that an unused handshake is not reported as an unhandled error
        self._requests.clear()
        if not self._ended.done():
            self._ended.set_result(None)
        self._on_closed(self)
        users: tuple[ProducerEnd | ConsumerEnd | WatcherEnd, ...] = (
            *self.producers.values(), *self.consumers.values(), *self.watchers.values(),
        )  # fmt: skip
        self.producers.clear()
        self.consumers.clear()
        self.watchers.clear()
        for user in users:
            user.on_connection_lost()

    def _on_frame(self, frame: Frame) -> None:
        encoded = frame.command
        if encoded[:3] == _RECEIPT_PREFIX and encoded[3] == len(encoded) - 4:  # most frames that a producer receives
            try:
                receipt = pb.CommandSendReceipt.FromString(encoded[4:])
            except DecodeError:
                pass  # `parse_command` reports the error
            else:
                if producer := self.producers.get(receipt.producer_id):
                    producer.on_receipt(receipt)
                return
        command = parse_command(encoded)
        body = getattr(command, BODY_FIELDS[command.type])
        match command.type:
            case CommandType.MESSAGE:
                if consumer := self.consumers.get(body.consumer_id):
                    consumer.on_message(body, frame.tail)
            case CommandType.SEND_RECEIPT:
                if producer := self.producers.get(body.producer_id):
                    producer.on_receipt(body)
            case CommandType.SEND_ERROR:
                if producer := self.producers.get(body.producer_id):
                    producer.on_send_error(body)
            case CommandType.CLOSE_PRODUCER:
                if producer := self.producers.pop(body.producer_id, None):
                    producer.on_closed_by_broker(self._url_of(body))
            case CommandType.CLOSE_CONSUMER:
                if consumer := self.consumers.pop(body.consumer_id, None):
                    consumer.on_closed_by_broker(self._url_of(body))
            case CommandType.ACTIVE_CONSUMER_CHANGE:
                if consumer := self.consumers.get(body.consumer_id):
                    consumer.on_active_change(body.is_active)
            case CommandType.WATCH_TOPIC_UPDATE:
                if watcher := self.watchers.get(body.watcher_id):
                    watcher.on_update(body)
            case CommandType.PING:
                self.write(PONG_FRAME)
            case CommandType.CONNECTED:
                _set_result(self._handshake, body)
            case CommandType.PRODUCER_SUCCESS if not body.producer_ready:
                pass  # queued for exclusive access: a second answer to the same request follows
            case CommandType.ERROR if not self._handshake.done():
                _set_exception(self._handshake, refused(body.error, body.message, f"the connection to {self.address}"))
            case CommandType.AUTH_CHALLENGE:
                self._renewing = asyncio.get_running_loop().create_task(self._answer_challenge(), name="cepheid/renew-credentials")
            case _:
                if answer := self._requests.get(getattr(body, "request_id", 0)):
                    _set_result(answer, body)

    def _url_of(self, closed: pb.CommandCloseProducer | pb.CommandCloseConsumer) -> str:
        """Return the URL of the broker that serves the topic from now on, with TLS if this connection has it; "" if unknown."""
        return closed.assignedBrokerServiceUrlTls if self.address.over_tls else closed.assignedBrokerServiceUrl

    async def _answer_challenge(self) -> None:
        """Answer the broker's request for new credentials, sent when the known ones have expired."""
        answer = pb.CommandAuthResponse(client_version=CLIENT_VERSION, protocol_version=PROTOCOL_VERSION)
        try:
            answer.response.auth_method_name, answer.response.auth_data = await self._security.show(renew=True)
        except Error as error:
            log.warning("authentication.not_renewed", extra={"peer": str(self.address), "error": str(error)})
            self.abort(f"the broker asked for new credentials: {error.args[0]}")
            return
        self.write(encode_body(answer))

    def _check_alive(self) -> None:
        if self._pinged and not self._heard:
            self.abort(f"nothing arrived for {2 * self._keep_alive_s:g} s")
            return
        self._heard, self._pinged = False, True
        self.write(PING_FRAME)
        self._keep_alive = asyncio.get_running_loop().call_later(self._keep_alive_s, self._check_alive)


async def dial(
    address: Address,
    *,
    timeout_s: float,
    keep_alive_s: float,
    on_closed: Callable[[Connection], None],
    security: Security,
    tls: ssl.SSLContext | None,
    proxy_to: Address | None = None,
) -> Connection:
    """Connect to a broker and shake hands. Raises ConnectError, NotAllowedError, UntrustedBrokerError."""
    loop = asyncio.get_running_loop()
    connection = Connection(address, security, keep_alive_s=keep_alive_s, on_closed=on_closed)
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: connection, address.host, address.port, ssl=tls)
            await connection.shake_hands(proxy_to=proxy_to)
    except TimeoutError:
        connection.abort("no answer")
        raise ConnectError(f"{address} did not answer within {timeout_s} s") from None
    except ssl.SSLCertVerificationError as error:
        raise UntrustedBrokerError(f"the certificate of {address} is not accepted: {error.verify_message}") from None
    except OSError as error:
        if (refusal := _refused_certificate(error, address)) is not None:
            raise refusal from None
        raise ConnectError(f"cannot connect to {address}: {_why_not(error, address)}") from None
    except BaseException:
        connection.abort("the handshake failed")
        raise
    return connection


class ConnectionPool:
    """The connections of one client, one per broker."""

    def __init__(self, *, connect_timeout_s: float, keep_alive_s: float, security: Security) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._keep_alive_s = keep_alive_s
        self._security = security
        self._tls: ssl.SSLContext | None = None
        self._open: dict[tuple[Address, Address | None], Connection] = {}
        self._dialing: dict[tuple[Address, Address | None], asyncio.Task[Connection]] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<ConnectionPool {len(self._open)} open, {len(self._dialing)} being opened>"

    async def get(self, address: Address, *, proxy_to: Address | None = None) -> Connection:
        """Return the connection to a broker; open it if there is none. Concurrent callers share the attempt."""
        key = (address, proxy_to)
        if self._closed:
            raise ClosedError("the client is closed")
        if (connection := self._open.get(key)) is not None and connection.is_open:
            return connection
        if (task := self._dialing.get(key)) is None:
            task = asyncio.get_running_loop().create_task(self._dial(key), name=f"cepheid/dial {address}")
            self._dialing[key] = task
            task.add_done_callback(lambda done: self._on_dialed(key, done))
        try:
            return await asyncio.shield(task)  # cancelling one caller does not end the attempt of the others
        except asyncio.CancelledError:
            if task.cancelled():
                raise ClosedError("the client was closed while it connected") from None
            raise

    async def aclose(self) -> None:
        self._closed = True
        dialing = list(self._dialing.values())
        for task in dialing:
            task.cancel()
        await asyncio.gather(*dialing, return_exceptions=True)
        await asyncio.gather(*(connection.aclose() for connection in list(self._open.values())))

    async def _dial(self, key: tuple[Address, Address | None]) -> Connection:
        if key[0].over_tls and self._tls is None:
            self._tls = self._security.tls_context()
        connection = await dial(
            key[0],
            timeout_s=self._connect_timeout_s,
            keep_alive_s=self._keep_alive_s,
            on_closed=lambda closed: self._forget(key, closed),
            security=self._security,
            tls=self._tls if key[0].over_tls else None,
            proxy_to=key[1],
        )
        self._open[key] = connection
        return connection

    def _on_dialed(self, key: tuple[Address, Address | None], task: asyncio.Task[Connection]) -> None:
        del self._dialing[key]
        if not task.cancelled():
            task.exception()  # retrieved: every caller may have been cancelled

    def _forget(self, key: tuple[Address, Address | None], connection: Connection) -> None:
        if self._open.get(key) is connection:
            del self._open[key]


def _why_not(error: OSError, address: Address) -> str:
    """Return why there is no connection. A broker's port without TLS closes it, or sends an answer that is not TLS."""
    reason = str(error) or "it closed the connection"
    is_closed = isinstance(error, ConnectionResetError | ConnectionAbortedError | BrokenPipeError)
    if address.over_tls and (is_closed or (isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER")):
        return f"{reason} during the TLS handshake; its port may be one without TLS (pulsar:// instead of pulsar+ssl://)"
    return reason


def _refused_certificate(error: Exception | None, address: Address) -> Error | None:
    """Return the error for a broker that rejects the client's certificate, or requires one; None for other errors."""
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if "ALERT" not in reason or not any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA")):
        return None
    said = reason.lower().replace("_", " ")
    why = f"it accepts no client without a valid certificate ({said}): check tls_certificate_file and tls_key_file"
    return refused(ServerError.AUTHENTICATION_ERROR, why, f"the connection to {address}")


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Error) -> None:
    if not future.done():
        future.set_exception(error)
