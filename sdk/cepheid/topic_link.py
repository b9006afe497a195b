"""Keeps one producer or consumer attached to the broker that serves its topic.

open ──► attached ──on_connection_lost, on_closed_by_broker──► detached ──lookup, attach again──► attached
            └── close                                              └── a permanent error ──► failed
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any

from cepheid.backoff import Backoff
from cepheid.connection import Connection
from cepheid.errors import BusyError, ClosedError, ConnectError, Error, QuotaError, RefusedError, UsageError, is_transient
from cepheid.forks import generation
from cepheid.lookup import Lookup, retrying
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)


class TopicLink(ABC):
    """A producer or consumer of one topic. `what` names it in errors. Subclasses define how to attach, and how to fail."""

    def __init__(self, topic: str, what: str, lookup: Lookup, timeout_s: float) -> None:
        self.topic = topic
        self.what = what
        self.connection: Connection | None = None  # set while attached
        self.failure: Error | None = None
        self.is_closed = False
        self._lookup = lookup
        self._timeout_s = timeout_s
        self._incarnation = 0  # incremented when the broker or the connection ends the attachment
        self._opened = False
        self._generation = generation()
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner(f"cepheid/{what}", on_error=self._on_bug)
        self._reattaching = False
        self._reattach_backoff = Backoff(0.05)  # reset by the subclass once it works

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "failed" if self.failure else "attached" if self.connection else "detached"
        return f"<{type(self).__name__} {self.what}, {state}>"

    @abstractmethod
    async def _attach(self, connection: Connection) -> None:
        """Open it at this broker. Raises Error; the broker must then not keep it."""

    @abstractmethod
    def _on_failed(self, error: Error) -> None:
        """Handle a permanent failure: it cannot be attached again."""

    @property
    def _opening_limit_s(self) -> float | None:
        return self._timeout_s

    async def open(self) -> None:
        """Attach for the first time. Raises Error."""
        await retrying(self._attach_to_owner, f"opening {self.what}", self._opening_limit_s)
        self._opened = True
        if self.connection is None:
            self._reattach_soon("")  # lost between the answer and this line

    async def stop(self) -> None:
        """End all background work. The broker is not notified."""
        self.is_closed = True
        await self._tasks.aclose()

    def check_usable(self) -> None:
        """Raise ClosedError or the error that ended it, if it is not usable."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # the same object each time: tracebacks must not accumulate
        if self.is_closed:
            raise ClosedError(f"{self.what} is closed")
        self.check_process()

    @property
    def is_of_parent(self) -> bool:
        """Whether it was opened by a parent of this forked process."""
        return self._generation != generation()

    def check_process(self) -> None:
        """Raise UsageError in a forked child, another thread or another event loop: waiters would never be woken there."""
        if self.is_of_parent:
            raise UsageError(f"{self.what} was opened before this process was forked: call cepheid.connect in each process")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop:
            raise UsageError(
                f"{self.what} belongs to another event loop or thread: call cepheid.connect in each, or use cepheid.sync"
            )

    def on_connection_lost(self) -> None:
        self._detach("")

    def on_closed_by_broker(self, broker_url: str) -> None:
        self._detach(broker_url)

    def _detach(self, broker_url: str) -> None:
        self._incarnation += 1
        self.connection = None
        if self._opened and not self.is_closed and self.failure is None:
            self._reattach_soon(broker_url)

    def _reattach_soon(self, broker_url: str) -> None:
        if not self._reattaching:
            self._reattaching = True
            self._tasks.start(self._reattach(broker_url), name="reattach")

    async def _reattach(self, broker_url: str) -> None:
        backoff = Backoff()
        try:
            await self._before_reattach()
            while self.connection is None:
                try:
                    await self._attach_to_owner(broker_url)
                except Error as error:
                    if not _may_pass(error):
                        self._fail(error)
                        return
                    log.info("client.reattach_failed", extra={"what": self.what, "error": str(error)})
                    broker_url = ""
                    await asyncio.sleep(backoff.next_s())
        finally:
            self._reattaching = False

    async def _before_reattach(self) -> None:
        """Pause, so that the topic can find its new broker."""
        await asyncio.sleep(self._reattach_backoff.next_s())

    async def _attach_to_owner(self, broker_url: str = "") -> None:
        connection = await (self._lookup.at(broker_url) if broker_url else self._lookup.broker_of(self.topic))
        incarnation = self._incarnation
        await self._attach(connection)
        if incarnation != self._incarnation or not connection.is_open:
            raise ConnectError(f"{self.what}: the broker closed it right after it was opened")
        self.connection = connection
        self._on_attached(connection)

    @abstractmethod
    def _on_attached(self, connection: Connection) -> None:
        """Handle the attachment. Called without an await after the check that it still exists."""

    def _fail(self, error: Error) -> None:
        self.failure = error
        self._on_failed(error)

    def _on_bug(self, error: BaseException) -> None:
        self._fail(Error(f"{self.what}: unexpected error of the client: {error!r}"))

    async def _request(self, connection: Connection, body: Any, what: str) -> Any:
        return await connection.request(body, what, self._timeout_s)


def _may_pass(error: Error) -> bool:
    """Return whether attaching may succeed later. The broker may not have noticed yet that the old connection is gone."""
    if isinstance(error, RefusedError):
        return is_transient(error) or isinstance(error, BusyError | QuotaError)
    return error.retriable
