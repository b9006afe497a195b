"""The requests of one ZooKeeper session, in order: those in flight, and those that wait for the connection, up to a time limit.

    ask ─► waiting ──(connected, fewer than WINDOW in flight)──► kazoo ──► answer
             │  SUSPENDED: they wait up to `patience_s` after the connection was lost, then fail: nothing was sent
             └── LOST, closed: fail at once: nothing was sent

A request given to kazoo may have reached the server: if its answer is lost or late, the outcome of a write is unknown. Nothing is
ever sent twice. A late answer for a caller that has gone is dropped; its place in the window is free only then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from kazoo.exceptions import (
    ConnectionLoss,
    KazooException,
    OperationTimeoutError,
    RequestTimeoutError,
    SessionExpiredError,
    SessionMovedError,
)

from cepheid_metadata.errors import MetadataError, SessionLostError, StoreUnavailableError

# kazoo wakes its thread by a byte in a socket pair, which holds about 270: with more in flight the loop would block.
WINDOW = 128
MAX_WAITING = 100_000
LOST_ANSWERS = (ConnectionLoss, OperationTimeoutError, RequestTimeoutError, SessionMovedError)
Send = Callable[[Any], Any]


@dataclass(slots=True, eq=False)
class Request:
    send: Send  # called with kazoo's client; returns kazoo's result
    what: str
    is_write: bool
    deadline: float
    answer: asyncio.Future[Any]
    on_success: Callable[[], None] | None
    was_sent: bool = False
    is_finished: bool = False


class RequestLane:
    """Orders the requests. Its owner replaces `client`. Errors of the connection are ours, others (no node, …) kazoo's own."""

    def __init__(self, where: str, request_timeout_s: float, patience_s: float) -> None:
        self.client: Any = None
        self.last_problem: Callable[[], str] = lambda: ""  # the connection's last problem, as the end of a sentence
        self._where = where
        self._timeout_s = request_timeout_s
        self._patience_s = patience_s
        self._waiting: deque[Request] = deque()
        self._by_age: deque[Request] = deque()
        self._on_their_way = 0
        self._connected = False
        self._refusal: MetadataError | None = None  # why requests are refused
        self._patience: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.requests = self.timeouts = 0

    def __repr__(self) -> str:
        state = "connected" if self._connected else "not connected"
        return f"<RequestLane {state}, {len(self._waiting)} waiting, {self._on_their_way} on their way>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def ask(
        self, send: Send, what: str, *, is_write: bool = False, on_success: Callable[[], None] | None = None, at_once: bool = False
    ) -> Any:
        """Send a request and return the answer. `on_success` is called as soon as it arrives, before whatever the server sent next.

        `at_once`: also while others are refused, for preparing a new session.
        """
        if self._refusal is not None and not at_once:
            raise _anew(self._refusal)
        if len(self._waiting) >= MAX_WAITING:
            raise StoreUnavailableError(
                f"{len(self._waiting)} requests wait for {self._where}, the limit", waiting=len(self._waiting)
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        request = Request(send, what, is_write, loop.time() + self._timeout_s, answer, on_success)
        self._by_age.append(request)
        if self._alarm is None:
            self._alarm = loop.call_at(request.deadline, self._on_alarm)
        if at_once:
            self._send(request)
        else:
            self._waiting.append(request)
            self.pump()
        return await answer

    def tell(self, send: Send, what: str) -> None:
        """Send a request without waiting for the answer; it is not sent if there is no connection."""
        if self._connected:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[Any] = loop.create_future()
            answer.cancel()
            self._send(Request(send, what, False, loop.time(), answer, None))

    def pump(self) -> None:
        """Send what may be sent. Called after each group of answers."""
        while self._connected and self._waiting and self._on_their_way < WINDOW:
            request = self._waiting.popleft()
            if not request.answer.done():
                self._send(request)
        while self._by_age and self._by_age[0].answer.done():
            self._by_age.popleft()

    def connect(self, first: Send) -> None:
        """Send `first` and then all waiting requests: the session is connected."""
        self._stop_patience()
        self._connected, self._refusal = True, None
        self.tell(first, "the first request of a connection")
        self.pump()

    def suspend(self) -> None:
        """Make requests wait for the lost connection, for a limited time."""
        self._connected = False
        if self._patience is None and self._refusal is None:
            self._patience = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience)

    def refuse(self, error: MetadataError) -> None:
        """Fail waiting and new requests with `error`, until `connect`."""
        self._stop_patience()
        self._connected, self._refusal = False, error
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if not request.answer.done():
                request.answer.set_exception(_anew(error))

    def fail_all(self, error: MetadataError) -> None:
        """Fail all requests, including those in flight, at the end."""
        self.refuse(error)
        for request in self._by_age:
            if not request.answer.done():
                request.answer.set_exception(_anew(error))
        self._by_age.clear()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _send(self, request: Request) -> None:
        request.was_sent = True
        self._on_their_way += 1
        self.requests += 1
        request.send(self.client).rawlink(partial(self._on_answer, request))

    def _on_answer(self, request: Request, result: Any) -> None:
        if request.is_finished:
            return  # kazoo reports a request twice that arrives while it closes
        request.is_finished = True
        self._on_their_way -= 1
        error = result.exception
        if isinstance(error, ConnectionLoss):
            self._connected = False  # the event for that follows; a request sent before it would stay in kazoo
        elif error is None and request.on_success is not None:
            request.on_success()
        if request.answer.done():
            return
        if error is None:
            request.answer.set_result(result.value)
        else:
            request.answer.set_exception(self._ours(request, error))

    def _ours(self, request: Request, error: Exception) -> Exception:
        if isinstance(error, LOST_ANSWERS):
            why = "the connection was lost before the answer" if isinstance(error, ConnectionLoss) else type(error).__name__
            return self._unavailable(request, why)
        if isinstance(error, SessionExpiredError):  # kazoo's ConnectionClosedError is one too
            message = f"{request.what}: the session on {self._where} ended before the answer"
            return SessionLostError(message, outcome_unknown=request.is_write)
        if not isinstance(error, KazooException):
            return self._unavailable(request, f"the answer was not understood: {error!r}")
        return cast(Exception, error)

    def _unavailable(self, request: Request, problem: str) -> StoreUnavailableError:
        unknown = request.is_write and request.was_sent
        fate = "; it is not known whether the change happened" if unknown else ""
        return StoreUnavailableError(f"{request.what}: {problem} from {self._where}{fate}", outcome_unknown=unknown)

    def _on_alarm(self) -> None:
        self._alarm = None
        loop = asyncio.get_running_loop()
        while self._by_age and (self._by_age[0].answer.done() or self._by_age[0].deadline <= loop.time()):
            request = self._by_age.popleft()
            if not request.answer.done():
                self.timeouts += 1
                request.answer.set_exception(self._unavailable(request, f"no answer within {self._timeout_s:g} s"))
        if self._by_age:
            self._alarm = loop.call_at(self._by_age[0].deadline, self._on_alarm)

    def _lose_patience(self) -> None:
        self._patience = None
        message = f"{self._where} could not be reached for {self._patience_s:g} s; nothing was sent{self.last_problem()}"
        self.refuse(StoreUnavailableError(message))

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _anew(error: MetadataError) -> MetadataError:
    """Return a copy, so that each caller gets its own exception with its own traceback."""
    return type(error)(error.args[0], **error.facts)
