"""An event loop in a thread of its own, for blocking callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cepheid.errors import ClosedError, UsageError
from cepheid.forks import generation

R = TypeVar("R")
STOP_LIMIT_S = 5.0
"""How long calls may take to end after they were cancelled."""


class LoopThread:
    """Runs coroutines for other threads. The thread is a daemon: a program that forgets to close it can still end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._lock = threading.Lock()  # no work is taken once `_is_stopping` is set
        self._is_stopping = False
        self._generation = generation()
        self._thread.start()

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread.name}, {'running' if self._thread.is_alive() else 'stopped'}>"

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked since. Threads are not forked: nothing runs the loop here."""
        return self._generation != generation()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Return what `work` returns. When the caller is interrupted (Ctrl-C), the work is cancelled first."""
        if self.is_of_parent:
            work.close()
            raise UsageError("the client was made before this process was forked: call cepheid.sync.connect in each process")
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("a blocking call inside the client's own thread would wait for itself")
        if not self._thread.is_alive():
            work.close()
            raise ClosedError("the client is closed")
        with self._lock:
            if self._is_stopping:
                work.close()
                raise ClosedError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._is_stopping:
                raise ClosedError("the client was closed during the call") from None
            raise
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
        """Cancel what still runs, and end the loop and the thread. A second call does nothing."""
        if not self._thread.is_alive():
            return
        with self._lock:
            if not self._is_stopping:
                self._is_stopping = True
                asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join()
        with self._lock:
            self._loop.close()

    async def _end(self) -> None:
        """Let every call of another thread end before the loop does: it waits for its result."""
        try:
            running = asyncio.all_tasks() - {asyncio.current_task()}
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=STOP_LIMIT_S)
        finally:
            self._loop.stop()
