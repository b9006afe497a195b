"""The requests of one ZooKeeper session, in order: which are on their way, which wait for the connection, which waited too long.

    ask ─► waiting ──(connected, fewer than WINDOW on their way)──► kazoo ──► answer
             │  SUSPENDED: they wait up to `patience_s` after the connection went, then fail: nothing was sent
             └── LOST, closed: fail at once: nothing was sent

What was given to kazoo may have reached the server: when its answer is lost or late, the outcome of a write is unknown. Nothing is
ever sent twice. A late answer of a caller that is gone is dropped; its place in the window is free only then.
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

# kazoo wakes its thread by a byte in a socket pair, which holds about 270: with more on their way the loop would block.
WINDOW = 128
MAX_WAITING = 100_000
LOST_ANSWERS = (ConnectionLoss, OperationTimeoutError, RequestTimeoutError, SessionMovedError)
Send = Callable[[Any], Any]


@dataclass(slots=True, eq=False)
class Request:
    send: Send  # called with kazoo's client; gives kazoo's result
    what: str
    is_write: bool
    deadline: float
    answer: asyncio.Future[Any]
    on_success: Callable[[], None] | None
    was_sent: bool = False
    is_finished: bool = False


class RequestLane:
    """`client` is kazoo's, replaced by its owner. Errors of the connection are ours, others (no node, …) kazoo's own."""

    def __init__(self, where: str, request_timeout_s: float, patience_s: float) -> None:
        self.client: Any = None
        self.last_problem: Callable[[], str] = lambda: ""  # of the connection, as the end of a sentence
        self._where = where
        self._timeout_s = request_timeout_s
        self._patience_s = patience_s
        self._waiting: deque[Request] = deque()
        self._by_age: deque[Request] = deque()
        self._on_their_way = 0
        self._connected = False
        self._refusal: MetadataError | None = None  # why nothing is taken in
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
        """The answer. `on_success` is called as soon as it is there, before whatever the server said next. `at_once`: also while
        others are refused, for who makes a new session ready."""
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
        """A request whose answer nobody needs; not sent at all when there is no connection."""
        if self._connected:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[Any] = loop.create_future()
            answer.cancel()
            self._send(Request(send, what, False, loop.time(), answer, None))

    def pump(self) -> None:
        """Sends what may be sent. Called after each group of answers."""
        while self._connected and self._waiting and self._on_their_way < WINDOW:
            request = self._waiting.popleft()
            if not request.answer.done():
                self._send(request)
        while self._by_age and self._by_age[0].answer.done():
            self._by_age.popleft()

    def connect(self, first: Send) -> None:
        """The session is there: what waited is sent, behind `first`."""
        self._stop_patience()
        self._connected, self._refusal = True, None
        self.tell(first, "the first request of a connection")
        self.pump()

    def suspend(self) -> None:
        """The connection is gone. Requests wait for it, but not for long."""
        self._connected = False
        if self._patience is None and self._refusal is None:
            self._patience = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience)

    def refuse(self, error: MetadataError) -> None:
        """What waits fails with `error`, and so does whoever asks, until `connect`."""
        self._stop_patience()
        self._connected, self._refusal = False, error
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if not request.answer.done():
                request.answer.set_exception(_anew(error))

    def fail_all(self, error: MetadataError) -> None:
        """For the end: also what is on its way fails."""
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
            return  # kazoo tells twice of a request that comes while it closes
        request.is_finished = True
        self._on_their_way -= 1
        error = result.exception
        if isinstance(error, ConnectionLoss):
            self._connected = False  # the event that says so comes next; a request sent before it would sit in kazoo
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
    """Each caller gets an exception of its own, with its own traceback."""
    return type(error)(error.args[0], **error.facts)
