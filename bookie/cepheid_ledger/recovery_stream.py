"""The fences and first reads of all recoveries at one bookie, on one stream.

    ask ──► numbered ──► sender task: all that arrived meanwhile is one message ──► bookie
     ▲                                                                             │
     └────────── by number, in any order ◄── reader task ◄── answers ◄─────────────┘

A broker that takes over thousands of topics fences and reads each of their last ledgers at each bookie. As separate calls these
cost the broker a third of its time, and the bookies nearly all of theirs.

Rule 1: an answer is a bounded message: for a read, its first piece. So it need not hold back the answers of others.
Rule 2: a stream ends once, with an error for all waiting requests: their outcome is unknown. The next request gets another stream.
Rule 3: an answer that takes longer than `timeout_s` is an error for its caller. If it arrives later, it is dropped.
Rule 4: the bookie continues a request that its client gave up, as long as the stream lasts. So the stream ends if requests are
open and none was answered for `timeout_s`: the bookie gives them up as well. Requests that were not sent yet are never sent then.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from cepheid_ports import TaskOwner
from cepheid_rpc import Buffer, MalformedGroupError, MessageKind, decode_numbered, encode_numbered

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class RecoveryStream:
    def __init__(self, call: Any, bookie_id: str, timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s
        self._numbers = 0
        self._waiting: dict[int, tuple[asyncio.Future[Buffer | BaseException], float]] = {}  # and deadlines, in order of requests
        self._unsent: dict[int, bytes] = {}
        self._unanswered: set[int] = set()  # including those that were given up
        self._last_progress = 0.0
        self._due = asyncio.Event()
        self.error: BaseException | None = None
        """Why the stream has ended; None: it has not."""
        self._is_last = False
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner(f"recovery-stream-{bookie_id}", on_error=self.end)
        self._tasks.start(self._send(), name="send")
        self._tasks.start(self._receive(), name="receive")
        self._watchdog = self._loop.call_later(timeout_s / 4, self._look_for_late)

    def __repr__(self) -> str:
        return f"<RecoveryStream, {len(self._waiting)} waiting{'' if self.error is None else ', ended'}>"

    @property
    def is_running(self) -> bool:
        """Whether its tasks have not all ended."""
        return bool(self._tasks)

    async def ask(self, request: bytes) -> Buffer | BaseException:
        """Send a request and return the answer, or the reason why there is none."""
        if self.error is not None:
            return self.error
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[Buffer | BaseException] = self._loop.create_future()
        self._waiting[number] = answer, self._loop.time() + self._timeout_s
        if not self._unanswered:
            self._last_progress = self._loop.time()
        self._unanswered.add(number)
        self._unsent[number] = request
        self._due.set()
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)
            if self._unsent.pop(number, None) is not None:
                self._unanswered.discard(number)
            if self._is_last and not self._waiting:
                self.end(ConnectionError("the connection was closed"))

    def end_when_idle(self) -> None:
        """End the stream once all waiting requests are answered."""
        self._is_last = True
        if not self._waiting:
            self.end(ConnectionError("the connection was closed"))

    def end(self, error: BaseException) -> None:
        if self.error is not None:
            return
        self.error = error
        self._watchdog.cancel()
        self._call.cancel()
        self._due.set()
        for answer, _ in self._waiting.values():
            if not answer.done():
                answer.set_result(error)

    async def aclose(self) -> None:
        self.end(ConnectionError("the connection was closed"))
        await self._tasks.aclose()

    async def _send(self) -> None:
        try:
            while self.error is None:
                await self._due.wait()
                self._due.clear()
                while self._unsent and self.error is None:
                    messages, self._unsent = self._unsent, {}
                    await self._call.write(encode_numbered(MessageKind.RECOVERY_REQUESTS, list(messages.items())))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            await self._end_of_call(error)

    async def _receive(self) -> None:
        try:
            while (data := await self._call.read()) is not _EOF:
                self._last_progress = self._loop.time()
                for number, message in decode_numbered(data, MessageKind.RECOVERY_ANSWERS):
                    self._unanswered.discard(number)
                    if (waiting := self._waiting.get(number)) is not None and not waiting[0].done():
                        waiting[0].set_result(message)
            await self._end_of_call(ConnectionError("the bookie ended the stream"))
        except (grpc.aio.AioRpcError, MalformedGroupError) as error:
            await self._end_of_call(error)

    async def _end_of_call(self, error: BaseException) -> None:
        """End the stream with the status of the call, which says more than the error of a write or a read."""
        if self.error is None and not isinstance(error, grpc.aio.AioRpcError | MalformedGroupError):
            code, details = await self._call.code(), await self._call.details()
            error = StreamEndedError(code, details or "no reason given")
        self.end(error)

    def _look_for_late(self) -> None:
        """Check all waiting requests with one timer."""
        now = self._loop.time()
        if self._unanswered and now - self._last_progress >= self._timeout_s:
            self.end(TimeoutError(f"{len(self._unanswered)} requests unanswered for {self._timeout_s} s"))
            return
        for answer, deadline in self._waiting.values():
            if deadline > now:
                break
            if not answer.done():
                answer.set_result(TimeoutError("no answer in time"))
        self._watchdog = self._loop.call_later(self._timeout_s / 4, self._look_for_late)


class StreamEndedError(ConnectionError):
    """The bookie ended the stream."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code


def is_unknown_method(error: BaseException) -> bool:
    """Whether the bookie is of a release without this stream."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return isinstance(error, StreamEndedError) and error.code is grpc.StatusCode.UNIMPLEMENTED
