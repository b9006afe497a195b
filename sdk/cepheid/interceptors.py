"""Hooks for every message that a client publishes or processes, for example for tracing (`cepheid.telemetry`).

An interceptor never prevents a message from being sent, processed or acknowledged: its errors are logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from cepheid.message import Message
from cepheid.message_id import MessageId
from cepheid.producer import Producer, T

log = logging.getLogger(__name__)

Outcome = MessageId | BaseException | None
"""Outcome of a send: the id, the error or cancellation, or None if `send_nowait` accepted the message."""
OnEnded = Callable[[Outcome], None]


class Interceptor:
    """Base class of interceptors; override what you need.

    The task that sends or processes calls the methods, which must not block.
    """

    def on_send(self, topic: str, properties: dict[str, str]) -> OnEnded | None:
        """Called before a message is published; may add properties. The returned function is called with the outcome."""
        return None

    def processing(self, message: Message[Any]) -> AbstractContextManager[object]:
        """Return a context manager entered around the block of `message.processing()` and each handler of `consumer.run`."""
        return nullcontext()


class InterceptedProducer(Producer[T]):
    """A producer of a client with interceptors."""

    interceptors: Sequence[Interceptor] = ()

    async def send(self, value: T | None, *, properties: Mapping[str, str] | None = None, **arguments: Any) -> MessageId:
        given = dict(properties or {})
        on_ended = self._on_send(given)
        try:
            message_id = await super().send(value, properties=given or None, **arguments)
        except BaseException as error:
            _tell(on_ended, error)
            raise
        _tell(on_ended, message_id)
        return message_id

    def send_nowait(self, value: T | None, *, properties: Mapping[str, str] | None = None, **arguments: Any) -> None:
        given = dict(properties or {})
        on_ended = self._on_send(given)
        try:
            super().send_nowait(value, properties=given or None, **arguments)
        except BaseException as error:
            _tell(on_ended, error)
            raise
        _tell(on_ended, None)

    def _on_send(self, properties: dict[str, str]) -> list[OnEnded]:
        called = []
        for interceptor in self.interceptors:
            try:
                if (on_ended := interceptor.on_send(self.topic, properties)) is not None:
                    called.append(on_ended)
            except Exception as error:
                _log_failed(interceptor, error)
        return called


@contextmanager
def intercepted(interceptors: Sequence[Interceptor], message: Message[Any]) -> Iterator[None]:
    """Enter `processing` of all interceptors. They see the block's exceptions but cannot suppress them."""
    with ExitStack() as entered:
        for interceptor in interceptors:
            guarded = _Guarded(interceptor, message)
            entered.enter_context(guarded)
        yield


class _Guarded(AbstractContextManager[None]):
    """The `processing` of one interceptor, with its own errors logged."""

    def __init__(self, interceptor: Interceptor, message: Message[Any]) -> None:
        self._interceptor = interceptor
        self._message = message
        self._entered: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        try:
            context = self._interceptor.processing(self._message)
            context.__enter__()
            self._entered = context
        except Exception as error:
            _log_failed(self._interceptor, error)

    def __exit__(self, *raised: Any) -> None:
        if self._entered is None:
            return
        try:
            self._entered.__exit__(*raised)
        except Exception as error:
            if error is not raised[1]:
                _log_failed(self._interceptor, error)


def _tell(on_ended: list[OnEnded], outcome: Outcome) -> None:
    for each in on_ended:
        try:
            each(outcome)
        except Exception as error:
            _log_failed(each, error)


def _log_failed(interceptor: object, error: Exception) -> None:
    log.warning("client.interceptor_failed", extra={"interceptor": repr(interceptor), "error": repr(error)}, exc_info=error)
