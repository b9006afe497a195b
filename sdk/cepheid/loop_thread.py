"""An event loop in a thread of its own, for blocking callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cepheid.errors import ClosedError, UsageError

R = TypeVar("R")


class LoopThread:
    """Runs coroutines for other threads. The thread is a daemon: a program that forgets to close it can still end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread.name}, {'running' if self._thread.is_alive() else 'stopped'}>"

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Return what `work` returns. When the caller is interrupted (Ctrl-C), the work is cancelled first."""
        if not self._thread.is_alive():
            work.close()
            raise ClosedError("the client is closed")
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("a blocking call inside the client's own thread would wait for itself")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=5.0)
            raise

    def call(self, work: Callable[[], R]) -> R:
        """Return what a function returns that must run on the loop."""

        async def run() -> R:
            return work()

        return self.run(run())

    def stop(self) -> None:
        """End the loop and the thread. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
