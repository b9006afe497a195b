"""A reader: messages of a topic from a position on, without a lasting subscription."""

from __future__ import annotations

from typing import Generic, Self, TypeVar

from cepheid.consumer import Consumer, SeekTarget
from cepheid.errors import ClosedError
from cepheid.message import Message

T = TypeVar("T")


class Reader(Generic[T]):
    """A reader, created by `client.reader(…)`. Messages need no acknowledgement."""

    def __init__(self, consumer: Consumer[T]) -> None:
        self._consumer = consumer

    def __repr__(self) -> str:
        return f"<Reader {', '.join(self._consumer.topics)}>"

    async def read(self, timeout: float | None = None) -> Message[T]:
        """Return the next message.

        Raises TimedOutError after `timeout` seconds, ClosedError, and the error that ended the reader.
        """
        message = await self._consumer.receive(timeout)
        self._consumer.ack_cumulative_nowait(message)  # so that the broker need not keep messages that were read
        return message

    async def has_message_available(self) -> bool:
        """Return whether `read` would return a message that is in the topic now. Raises TimedOutError, ConnectError."""
        if self._consumer.queued_messages:
            return True
        for link in list(self._consumer.links.values()):
            if await link.has_message_available():
                return True
        return False

    async def seek(self, to: SeekTarget, *, inclusive: bool = False) -> None:
        """Continue from another position; see `Consumer.seek`."""
        await self._consumer.seek(to, inclusive=inclusive)

    async def close(self) -> None:
        await self._consumer.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message[T]:
        try:
            return await self.read()
        except ClosedError:
            raise StopAsyncIteration from None
