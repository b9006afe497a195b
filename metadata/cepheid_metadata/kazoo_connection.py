"""The connection to kazoo: its thread puts results into a queue, and the loop takes them from there in groups.

    kazoo's connection thread ── put(call) ──► LoopInbox ── one call_soon_threadsafe per group ──► call(), call(), … in the loop

Answers, watch events and connection changes use the same queue, in the order in which the server sent them: a watch that a write
triggers fires before that write is answered. Of kazoo's three threads only that of the connection exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from cepheid_metadata.kazoo_sockets import BufferedStream, Wake
from cepheid_metadata.session import log as session_log
from cepheid_security import ClientTls, SecurityConfigurationError

MAX_CONNECT_S = 2.0  # for one address; then the next one is tried
RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.05, 0.5
HANDSHAKE_SHARE = 1 / 3
"""Share of the session timeout allowed for a handshake; leaves time for two more attempts before the session expires."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A user with a password. If `private`, only this user can access the nodes that it creates; otherwise every user can."""

    user: str
    password: str
    private: bool = True

    def __repr__(self) -> str:
        return f"<Digest {self.user}>"


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """A change of the connection. `state` is kazoo's internal one, which tells an expired session from a client that gave up."""

    state: str
    session_id: int


class LoopInbox:
    """Makes calls from any thread in the loop. `on_group` follows each group. Once closed, or without its loop, it drops them."""

    def __init__(self, on_group: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_group = on_group
        self._calls: deque[Callable[[], object]] = deque()
        self._due = False
        self._lock = threading.Lock()
        self._closed = False

    def put(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._closed:
                return
            self._calls.append(call)
            wake, self._due = not self._due, True
        if wake:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to notify
                self._loop.call_soon_threadsafe(self._run_group)

    def run(self) -> None:
        """Make the waiting calls, in the loop."""
        with self._lock:
            calls, self._calls = self._calls, deque()
            self._due = False
        for call in calls:
            try:
                call()
            except Exception as error:  # one call's bug must not lose the answers after it
                self._loop.call_exception_handler({"message": f"{call!r} failed", "exception": error})

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._calls.clear()

    def _run_group(self) -> None:
        self.run()
        self._on_group()


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """A handler that puts callbacks into the inbox instead of running them in threads of kazoo."""

    def __init__(self, inbox: LoopInbox, handshake_limit_s: float, tls: ClientTls | None) -> None:
        super().__init__()
        self._tls = tls
        self._handshake_limit_s = handshake_limit_s
        self._answered = False  # by the server, on this connection
        self.callback_queue = self.completion_queue = inbox
        self._running = True  # always: otherwise kazoo makes the last callbacks in its own thread
        self._socket: socket.socket | None = None
        self._stream: BufferedStream | None = None  # on the same socket; None with TLS
        self._wake: Wake | None = None

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def spawn(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> threading.Thread:
        thread: threading.Thread = super().spawn(func, *args, **kwargs)
        thread.name = "zookeeper"
        return thread

    def create_socket_pair(self) -> tuple[Wake, Wake]:
        self._wake = wake = Wake()
        return wake, wake

    def create_connection(self, *args: Any, timeout: float, **kwargs: Any) -> socket.socket | BufferedStream:
        limit_s = min(timeout, MAX_CONNECT_S)
        if self._tls is None:
            made: socket.socket = super().create_connection(*args, timeout=limit_s, **kwargs)
        else:
            made = _connect_tls(self._tls, kwargs["address"], kwargs["hostname"], limit_s)
        self._socket = made
        self._stream = BufferedStream(made) if self._tls is None else None
        self._answered = False
        return made if self._stream is None else self._stream

    def select(self, readers: list[Any], writers: list[Any], _: list[Any], timeout: float | None) -> tuple[list[Any], ...]:
        """Select as kazoo does, but with one system call instead of a new epoll each time, and none if it is known what is
        ready."""
        stream, wake = self._stream, self._wake
        if stream is not None and writers == [stream] and not stream.is_full:
            return [], writers, []
        known: list[Any] = [stream] if stream is not None and stream in readers and stream.pending() else []
        if wake is not None and wake in readers and wake.is_set:
            known.append(wake)
        if known:
            return known, [], []
        if not self._answered and timeout is not None:
            # A starting server may accept a connection and never answer on it. kazoo would wait for as long as the session may be
            # silent, and the session would be over at the next attempt.
            timeout = min(timeout, self._handshake_limit_s)
        if stream is not None and (stream in readers or stream in writers) and not stream.flush(timeout):
            raise self.timeout_exception("the server accepted nothing for too long")
        poll = select.poll()
        for reader in readers:
            poll.register(reader, select.POLLIN)
        for writer in writers:
            poll.register(writer, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(None if timeout is None else max(timeout, 0) * 1_000)}
        readable = [each for each in readers if each.fileno() in ready]
        self._answered = self._answered or any(each is self._socket or each is stream for each in readable)
        return readable, [each for each in writers if each.fileno() in ready], []

    def cut(self) -> None:
        """End whatever kazoo's thread waits for on its connection."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _connect_tls(tls: ClientTls, address: tuple[str, int], host: str, timeout_s: float) -> socket.socket:
    """Connect with the present certificate files. kazoo would not check that the server's certificate has the host's name.

    Raises OSError.
    """
    plain = socket.create_connection(address, timeout_s)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return tls.context().wrap_socket(plain, server_hostname=host)
    except SecurityConfigurationError as error:
        raise OSError(str(error)) from error
    finally:
        plain.close()  # without effect once TLS has taken the socket over


class KazooConnection:
    """One kazoo client. It reconnects, and opens a new session after an expiry; `on_event` is called in the loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        session_timeout_s: float,
        digest: Digest | None,
        inbox: LoopInbox,
        on_event: Callable[[ConnectionEvent], None],
        *,
        tls: ClientTls | None = None,
    ) -> None:
        self._handler = _Handler(inbox, session_timeout_s * HANDSHAKE_SHARE, tls)
        self._problems = _Problems()
        # kazoo tries a request once; this is about connecting, which never ends.
        retry = KazooRetry(max_tries=-1, delay=RETRY_DELAY_S, max_delay=MAX_RETRY_DELAY_S, sleep_func=self._handler.sleep_func)
        self.client: Any = KazooClient(
            hosts=",".join(addresses),
            timeout=session_timeout_s,
            handler=self._handler,
            connection_retry=retry,
            auth_data=[("digest", f"{digest.user}:{digest.password}")] if digest else None,
            default_acl=CREATOR_ALL_ACL if digest and digest.private else None,
            logger=_quiet_logger(self._problems),
            use_ssl=tls is not None,
        )
        self._inbox = inbox
        self._on_event = on_event
        self.client.add_listener(self._on_state)

    def last_problem(self) -> str:
        """Return the connection's last problem as the end of a sentence; empty if there was none."""
        return f" ({self._problems.last})" if self._problems.last else ""

    def start(self) -> None:
        self.client.start_async()

    def stop(self) -> None:
        """End the session and the thread. Blocks until the server has answered or `cut` was called."""
        try:
            self.client.stop()
        except (OSError, AttributeError):
            pass  # its thread ended before, with the sockets that wake it
        with contextlib.suppress(Exception):
            self.client.close()

    def cut(self) -> None:
        self._handler.cut()

    def _on_state(self, _: str) -> None:
        # In kazoo's thread, so that the session is read before it can change again.
        event = ConnectionEvent(self.client.client_state, (self.client.client_id or (0, b""))[0])
        self._inbox.put(lambda: self._on_event(event))


class _Problems(logging.Filter):
    """Keeps kazoo's last warning for our own messages, instead of a line for each attempt to connect."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR and record.msg != "Transition to CONNECTING":
            self.last = record.getMessage()
        return record.levelno >= logging.ERROR


def _quiet_logger(problems: _Problems) -> logging.Logger:
    """Return a logger for errors only. Below warnings kazoo logs the credentials with each request; this logger is outside of the
    registry, so that no configuration can lower its level."""
    logger = logging.Logger("cepheid_metadata.kazoo", logging.WARNING)
    logger.addFilter(problems)
    logger.parent = session_log
    return logger
