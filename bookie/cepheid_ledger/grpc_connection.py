"""A connection to one bookie over gRPC.

    AddSource ──next_message──► sender task ──write──► HTTP/2 ──► bookie
        ▲                          ▲ wake()                          │
        └──on_answers── reader task ◄──────── answers ◄──────────────┘

Rule 1: the next add message is built only after the previous write returned, so that requests that arrive meanwhile are sent
together. Rule 2: any failure on the way is a BookieUnavailableError: the outcome is unknown, never negative.
Rule 3: a stream breaks once. It also breaks after `silent_stream_s` without any answer to adds: a silent bookie is treated as
failed. Adds and reads have a TCP connection each, so that a reader of old data does not delay a publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from cepheid_ledger.recovery_stream import RecoveryStream, is_unknown_method
from cepheid_ledger.settings import LedgerSettings
from cepheid_ports import TaskOwner
from cepheid_rpc import (
    ADD,
    MAX_MESSAGE_BYTES,
    READ,
    READ_LAC,
    RECOVER,
    TLS_MARK,
    WRITE_LAC,
    AddAnswer,
    AddRequest,
    AddSource,
    BookieUnavailableError,
    Buffer,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    Status,
    channel_options,
    decode_add_answers,
    decode_lac_answer,
    decode_read_answer,
    decode_status,
    encode_add_message,
    encode_explicit_lac,
    encode_lac_request,
    encode_read_request,
    method_path,
    split_requests,
)
from cepheid_security import ClientTls, SecurityConfigurationError
from cepheid_security.grpc_tls import channel_credentials

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


def _channel(address: str, credentials: Any) -> Any:  # the stubs demand serializers, which bytes do not need
    if not address.startswith(TLS_MARK):
        return grpc.aio.insecure_channel(address, options=channel_options())
    return grpc.aio.secure_channel(address.removeprefix(TLS_MARK), credentials, options=channel_options())


class GrpcConnection:
    """A BookieConnection. Connects when first used, and reconnects after a failure, which each affected call reports.

    `tls`: the certificate to present if `address` says that the bookie uses TLS. Raises SecurityConfigurationError.
    """

    def __init__(
        self, bookie_id: str, address: str, settings: LedgerSettings | None = None, *, tls: ClientTls | None = None
    ) -> None:
        self._bookie_id = bookie_id
        self.address = address
        self._tls = tls or ClientTls()
        self._tls_state = self._tls.state()
        credentials = channel_credentials(self._tls) if address.startswith(TLS_MARK) else None
        settings = settings or LedgerSettings()
        self._silent_stream_s, self._silent_call_s = settings.silent_stream_s, settings.silent_call_s
        self._adds = _channel(address, credentials)
        self._reads = _channel(address, credentials)
        self._read_lac = self._adds.unary_unary(method_path(READ_LAC))
        self._write_lac = self._adds.unary_unary(method_path(WRITE_LAC))
        self._read = self._reads.unary_stream(method_path(READ))
        self._recover = self._reads.stream_stream(method_path(RECOVER))
        self._recoveries: RecoveryStream | None = None
        self._ended_recoveries: list[RecoveryStream] = []  # streams whose tasks may not have ended yet
        self._recovers_by_stream = True  # False after the bookie reported over this TCP connection that it does not know the stream
        self._tasks = TaskOwner(f"bookie-connection-{bookie_id}")
        self._add_streams: dict[GrpcAddStream, None] = {}
        self._broken_streams: list[GrpcAddStream] = []  # streams whose tasks may not have ended yet
        self._given_up: str | None = None  # why it accepts no new requests
        self._is_closed = False  # a new call would fail; running calls have some time left
        self._unsettled = 0  # requests that may still start a call
        self._settled = asyncio.Event()
        self._settled.set()

    def __repr__(self) -> str:
        return f"<GrpcConnection to bookie {self._bookie_id} at {self.address}, {len(self._add_streams)} add streams>"

    @property
    def bookie_id(self) -> str:
        return self._bookie_id

    @property
    def is_outdated(self) -> bool:
        """Whether its certificate files were replaced since it was opened."""
        return self.address.startswith(TLS_MARK) and self._tls.state() != self._tls_state

    @property
    def should_move(self) -> bool:
        """Whether its certificate files were replaced by usable ones, so that its streams should move to a new connection."""
        if not self.is_outdated:
            return False
        try:
            self._tls.context()
        except SecurityConfigurationError:  # the files may be in the middle of being copied
            return False
        return True

    @property
    def is_adding(self) -> bool:
        """Whether it carries a stream of adds."""
        return bool(self._add_streams)

    def open_add_stream(self, source: AddSource) -> GrpcAddStream:
        self._check_open(ADD)
        stream = GrpcAddStream(self, self._adds.stream_stream(method_path(ADD))(), source, self._silent_stream_s)
        self._add_streams[stream] = None
        return stream

    def forget(self, stream: GrpcAddStream) -> None:
        if stream in self._add_streams:
            del self._add_streams[stream]
            self._broken_streams = [*(broken for broken in self._broken_streams if broken.is_running), stream]

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        self._check_open(READ_LAC)
        message = encode_lac_request(request)
        with self._settling():
            data = await self._ask_for_recovery(message, READ_LAC) if request.fence else None
            if data is None:
                timeout_s = self._silent_call_s + request.wait_ms / 1000
                data = await self._call(self._begin(READ_LAC, self._read_lac, message, timeout_s), READ_LAC)
        try:
            return decode_lac_answer(data)
        except MalformedGroupError as error:
            raise self.unavailable(READ_LAC, error) from error

    async def write_lac(self, request: ExplicitLac) -> Status:
        self._check_open(WRITE_LAC)
        data = await self._call(self._write_lac(encode_explicit_lac(request), timeout=self._silent_call_s), WRITE_LAC)
        try:
            return decode_status(data)
        except MalformedGroupError as error:
            raise self.unavailable(WRITE_LAC, error) from error

    async def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        self._check_open(READ)
        with self._settling():
            if request.fence and (first := await self._read_first(request)) is not None:
                yield first
                if not request.first_entry_id < first.next_entry_id <= request.last_entry_id:
                    return
                request = replace(request, first_entry_id=first.next_entry_id)
            call = self._begin(READ, self._read, encode_read_request(request))
        try:
            while True:
                async with asyncio.timeout(self._silent_call_s):
                    data = await call.read()
                if data is _EOF:
                    return
                yield decode_read_answer(data)
        except (grpc.aio.AioRpcError, TimeoutError, MalformedGroupError) as error:
            raise self.unavailable(READ, error) from error
        except asyncio.CancelledError:
            self._check_cancelled(READ)
            raise
        finally:
            call.cancel()  # no effect if it has ended; otherwise the bookie would go on reading in vain

    async def _read_first(self, request: ReadRequest) -> ReadAnswer | None:
        """Return the first piece of a recovery read. None: see `_ask_for_recovery`."""
        data = await self._ask_for_recovery(encode_read_request(request), READ)
        try:
            return None if data is None else decode_read_answer(data)
        except MalformedGroupError as error:
            raise self.unavailable(READ, error) from error

    async def _ask_for_recovery(self, message: bytes, method: str) -> Buffer | None:
        """Send a request on the recovery stream. None: the bookie's release takes each request of a recovery as its own call."""
        if not self._recovers_by_stream:
            return None
        stream = self._recoveries
        if stream is None or stream.error is not None:
            if stream is not None:
                self._ended_recoveries = [*(ended for ended in self._ended_recoveries if ended.is_running), stream]
            stream = self._recoveries = RecoveryStream(self._recover(), self._bookie_id, self._silent_call_s)
        answer = await stream.ask(message)
        if not isinstance(answer, BaseException):
            return answer
        if is_unknown_method(answer):
            if self._recovers_by_stream:
                self._recovers_by_stream = False
                self._tasks.start(self._await_next_connection(), name="await-next-connection")
            return None
        raise self.unavailable(method, answer) from answer

    async def _await_next_connection(self) -> None:
        """Try the recovery stream again after the connection is lost: the bookie may be a newer release then."""
        with suppress(grpc.aio.UsageError):  # closed
            while self._reads.get_state() is grpc.ChannelConnectivity.READY:
                await self._reads.wait_for_state_change(grpc.ChannelConnectivity.READY)
        self._recovers_by_stream = True

    async def aclose(self) -> None:
        self._given_up = self._given_up or "the connection was closed"
        self._is_closed = True
        self._settled.set()
        for recoveries in filter(None, (self._recoveries, *self._ended_recoveries)):
            await recoveries.aclose()
        for stream in [*self._add_streams, *self._broken_streams]:
            await stream.aclose()
        await self._tasks.aclose()
        await self._adds.close()
        await self._reads.close()

    async def abandon(self, reason: str) -> None:
        """Close a connection to an address that the bookie has left. Streams of adds break.

        Running requests get time to end, also those of a recovery that need a call after their answer on the stream.
        """
        self._given_up = reason
        deadline = asyncio.get_running_loop().time() + self._silent_call_s
        for stream in list(self._add_streams):
            stream._break(ConnectionError(reason))
        if self._recoveries is not None:
            self._recoveries.end_when_idle()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._settled.wait()
        self._is_closed = True
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.gather(self._adds.close(left_s), self._reads.close(left_s))

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Keep `abandon` from closing the channels before this request has started the call that it may need."""
        self._unsettled += 1
        self._settled.clear()
        try:
            yield
        finally:
            self._unsettled -= 1
            if not self._unsettled:
                self._settled.set()

    def _begin(self, method: str, call: Any, message: bytes, timeout_s: float | None = None) -> Any:
        """Start a call of an accepted request. On a closed channel the library would raise an error of its own."""
        if self._is_closed:
            raise self.unavailable(method, ConnectionError(self._given_up))
        return call(message, timeout=timeout_s)

    async def _call(self, call: Awaitable[bytes], method: str) -> bytes:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self.unavailable(method, error) from error
        except asyncio.CancelledError:
            self._check_cancelled(method)
            raise

    def _check_open(self, method: str) -> None:
        if self._given_up is not None:
            raise self.unavailable(method, ConnectionError(self._given_up))

    def _check_cancelled(self, method: str) -> None:
        """Raise BookieUnavailableError if the connection ended: the library reports that as a cancellation of the caller."""
        task = asyncio.current_task()
        if self._given_up is not None and (task is None or not task.cancelling()):
            raise self.unavailable(method, ConnectionError(self._given_up))

    def unavailable(self, method: str, error: BaseException) -> BookieUnavailableError:
        reason: Any = error
        if isinstance(error, grpc.aio.AioRpcError):
            reason = f"{error.code().name}: {error.details()}"
        elif isinstance(error, TimeoutError):
            reason = "no answer in time"
        return BookieUnavailableError(
            f"bookie {self._bookie_id} at {self.address}: {method} failed: {reason}", bookie=self._bookie_id, address=self.address
        )


class GrpcAddStream:
    """Takes add messages from one AddSource, and passes the answers to it."""

    def __init__(self, connection: GrpcConnection, call: Any, source: AddSource, timeout_s: float) -> None:
        self._connection = connection
        self._call = call
        self._source = source
        self._timeout_s = timeout_s
        self._due = asyncio.Event()
        self._ended = False
        self._is_moving = False
        self._unanswered_entries = 0
        self._last_progress = 0.0
        self._tasks = TaskOwner(f"add-stream-{connection.bookie_id}", on_error=self._break)
        self._tasks.start(self._send(), name="send")
        self._tasks.start(self._receive(), name="receive")
        self._loop = asyncio.get_running_loop()
        self._watchdog = self._loop.call_later(timeout_s / 4, self._check_progress)

    def __repr__(self) -> str:
        return f"<GrpcAddStream to bookie {self._connection.bookie_id}, {self._unanswered_entries} entries unanswered>"

    @property
    def is_running(self) -> bool:
        """Whether its tasks have not all ended."""
        return bool(self._tasks)

    def wake(self) -> None:
        self._due.set()

    async def aclose(self) -> None:
        """End the stream; the source gets no more reports from it."""
        self._end()
        await self._tasks.aclose()

    async def _send(self) -> None:
        try:
            while not self._ended:
                await self._due.wait()
                self._due.clear()
                while not self._ended and not self._is_moving and (requests := self._source.next_message(MAX_MESSAGE_BYTES)):
                    self._count_sent(requests)
                    for part in split_requests(requests, 2 * MAX_MESSAGE_BYTES):
                        await self._call.write(encode_add_message(part))
        except grpc.aio.AioRpcError as error:
            self._break(error)
        except asyncio.InvalidStateError:  # the bookie has ended the stream, which `_receive` is about to notice
            self._break(await self._end_of_call())

    async def _receive(self) -> None:
        try:
            while (data := await self._call.read()) is not _EOF:
                answers = decode_add_answers(data)
                self._count_answered(answers)
                self._source.on_answers(answers)
                if self._is_moving and not self._unanswered_entries:
                    self._move()
            self._break(await self._end_of_call())
        except (grpc.aio.AioRpcError, MalformedGroupError) as error:
            self._break(error)

    async def _end_of_call(self) -> BaseException:
        code = await self._call.code()
        return ConnectionError(f"the bookie ended the stream with {code.name}: {await self._call.details() or 'no reason given'}")

    def _count_sent(self, requests: Sequence[AddRequest]) -> None:
        if self._unanswered_entries == 0:
            self._last_progress = self._loop.time()
        self._unanswered_entries += sum(len(request.group) for request in requests)

    def _count_answered(self, answers: Sequence[AddAnswer]) -> None:
        self._unanswered_entries -= sum(answer.last_entry_id - answer.first_entry_id + 1 for answer in answers)
        self._last_progress = self._loop.time()
        if self._unanswered_entries < 0:
            raise MalformedGroupError(f"{-self._unanswered_entries} more entries were answered than sent")

    def _move(self) -> None:
        """End the stream while no entry is in flight, so that the source opens one with the new certificate and loses nothing.

        The bookie would end it at any moment once the old certificate expires.
        """
        self._break(ConnectionError("the certificate of this process was replaced"))

    def _check_progress(self) -> None:
        """Check for progress with one timer per stream, however much is in flight."""
        self._is_moving = self._is_moving or self._connection.should_move
        if self._is_moving and not self._unanswered_entries:
            self._move()
        elif self._unanswered_entries and self._loop.time() - self._last_progress >= self._timeout_s:
            self._break(TimeoutError(f"{self._unanswered_entries} entries unanswered for {self._timeout_s} s"))
        else:
            self._watchdog = self._loop.call_later(self._timeout_s / 4, self._check_progress)

    def _break(self, error: BaseException) -> None:
        if not self._ended:
            self._end()
            self._source.on_broken(self._connection.unavailable(ADD, error))

    def _end(self) -> None:
        self._ended = True
        self._watchdog.cancel()
        self._call.cancel()
        self._due.set()
        self._connection.forget(self)
