"""A table view: the latest value of each key of a topic, kept up to date while it is open.

    topic from its start ──► latest message of each key ──► get, items, iteration
                                        └── watch: the keys that changed, each with its latest value

Messages without a key are ignored. A message without a value, or with an empty payload, removes its key, as in compaction. The
reader requests the compacted topic: if the topic was compacted, only the kept messages are read; otherwise everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cepheid.consumer import Consumer
from cepheid.ending import Ending
from cepheid.errors import ClosedError, ConnectError, Error, TimedOutError
from cepheid.message import Message
from cepheid_ports import TaskOwner

T = TypeVar("T")
RETRY_S = 0.05
READ_MESSAGES = 1000
"""Number of messages applied between two turns of the loop."""


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """A change of a key. `message` is its latest message; None: the key was removed."""

    key: str
    message: Message[T] | None

    @property
    def value(self) -> T | None:
        """The latest value; None if the key was removed. Raises UnreadableMessageError."""
        return None if self.message is None else self.message.value


class TableView(Mapping[str, T]):
    """A table view, created by `client.table_view(…)`: a mapping from keys to their latest values, updated while the loop runs.

    Reading raises the error that ended the view, or ClosedError; it never shows an old state as if it were the latest.
    A value that cannot be decoded raises UnreadableMessageError when it is accessed, and does not affect others.
    """

    def __init__(self, topic: str, consumer: Consumer[T], *, timeout_s: float, on_closed: Callable[[Any], None]) -> None:
        self.topic = topic
        self._consumer = consumer
        self._timeout_s = timeout_s
        self._on_closed = on_closed
        self._latest: dict[str, Message[T]] = {}
        self._watches: set[_Watch[T]] = set()
        self._applied: asyncio.Future[None] | None = None  # for callers that wait for the next messages
        self._failure: Error | None = None
        self._tasks = TaskOwner(f"cepheid/table view of {topic}")
        self._ending = Ending(self._close)

    def __repr__(self) -> str:
        return f"<TableView {self.topic}, {len(self._latest)} keys>"

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    # Reading

    def __getitem__(self, key: str) -> T:
        self._check()
        return self._latest[key].value

    def __contains__(self, key: object) -> bool:
        self._check()
        return key in self._latest

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys at this moment."""
        self._check()
        return iter(list(self._latest))

    def __len__(self) -> int:
        self._check()
        return len(self._latest)

    def message(self, key: str) -> Message[T] | None:
        """Return the latest message of a key, with its id, properties and times; None if the view does not have the key."""
        self._check()
        return self._latest.get(key)

    async def watch(self) -> AsyncIterator[Change[T]]:
        """Yield the keys that change from now on. Ends when the view is closed; raises the error that ended it.

        A caller that is slower than the topic gets each key once, with its latest value, so its backlog is limited by the
        number of keys.
        """
        self._check()
        watch: _Watch[T] = _Watch()
        self._watches.add(watch)
        try:
            while True:
                while watch.changed:
                    key = next(iter(watch.changed))
                    yield Change(key, watch.changed.pop(key))
                if self._failure is not None:
                    if isinstance(self._failure, ClosedError):
                        return
                    raise self._failure
                watch.waiter = asyncio.get_running_loop().create_future()
                await watch.waiter
        finally:
            self._watches.discard(watch)

    async def refresh(self) -> None:
        """Return when the view shows everything that was stored before this call.

        Raises TimedOutError, ClosedError, and the error that ended the view.
        """
        self._check()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    if self._applied is None:
                        self._applied = asyncio.get_running_loop().create_future()
                    applied = self._applied  # taken before the question: messages may be applied while it is answered
                    if not await self._is_behind():
                        return
                    await asyncio.shield(applied)
        except TimeoutError:
            raise TimedOutError(f"{self!r} did not catch up with its topic within {self._timeout_s} s") from None

    # Following the topic

    async def start(self) -> None:
        """Read what the topic has now, then follow it. Raises the errors of a reader."""
        while await self._is_behind():
            self._apply(await self._consumer.receive_many(READ_MESSAGES, self._timeout_s))
        self._tasks.start(self._follow(), name="follow")

    async def _is_behind(self) -> bool:
        """Return whether the topic has messages that are not applied yet."""
        if self._failure is not None:
            raise self._failure
        if self._consumer.queued_messages:
            return True
        while True:
            try:
                found = await asyncio.gather(*(link.has_message_available() for link in list(self._consumer.links.values())))
            except ConnectError:  # the topic moves: ask its new broker, for which each link has a time limit
                await asyncio.sleep(RETRY_S)
                continue
            return any(found) or self._consumer.queued_messages > 0

    async def _follow(self) -> None:
        try:
            while True:
                self._apply(await self._consumer.receive_many(READ_MESSAGES))
                await asyncio.sleep(0)  # a long topic does not block the loop
        except Error as error:
            self._end(error)

    def _apply(self, messages: list[Message[T]]) -> None:
        last: dict[str, Message[T]] = {}
        for message in messages:
            last[message.topic] = message
            key = message.key
            if key is None:
                continue
            removes = message._facts.problem is None and (message.is_null or not message._data)
            if removes and self._latest.pop(key, None) is None:
                continue
            if not removes:
                self._latest[key] = message
            for watch in self._watches:
                watch.add(key, None if removes else message)
        for message in last.values():  # so that the broker need not keep messages that were read
            self._consumer.ack_cumulative_nowait(message)
        self._wake()

    def _wake(self) -> None:
        applied, self._applied = self._applied, None
        if applied is not None and not applied.done():
            applied.set_result(None)

    def _end(self, error: Error) -> None:
        if self._failure is None:
            self._failure = error
        self._wake()
        for watch in self._watches:
            watch.wake()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Leave the topic. Cancelled: closing continues, and another call waits for its end."""
        self._end(ClosedError(f"the table view of {self.topic} is closed"))
        await self._ending.reach()

    async def _close(self) -> None:
        await self._tasks.aclose()
        await self._consumer.close()
        self._latest.clear()
        self._on_closed(self)


class _Watch(Generic[T]):
    """Changes that one `watch` has not yielded yet."""

    def __init__(self) -> None:
        self.changed: dict[str, Message[T] | None] = {}
        self.waiter: asyncio.Future[None] | None = None

    def add(self, key: str, message: Message[T] | None) -> None:
        self.changed.pop(key, None)  # moved to the end: changes are yielded in the order of their latest messages
        self.changed[key] = message
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
