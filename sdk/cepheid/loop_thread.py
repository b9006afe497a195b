"""An event loop in its own thread, for blocking callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from cepheid.errors import ClosedError, UsageError
from cepheid.forks import close_inherited, generation, keep_inherited, sever_in_children

R = TypeVar("R")
STOP_LIMIT_S = 5.0
"""Time for cancelled calls to end."""
PARK_LIMIT_S = 1.0
"""Time that a fork waits for a loop to pause. It is exceeded only if the loop waits for what the forking thread holds."""


class LoopThread:
    """Runs coroutines for other threads. The thread is a daemon: a program that does not close it can still end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._lock = threading.Lock()  # no work is accepted once `_is_stopping` is set
        self._is_stopping = False
        self._generation = generation()
        self._thread.start()
        sever_in_children(self)
        _pauses.threads.add(self)

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread.name}, {'running' if self._thread.is_alive() else 'stopped'}>"

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked since. Threads are not forked: nothing runs the loop here."""
        return self._generation != generation()

    def sever(self) -> None:
        """In a forked child: leave the loop alone. It shares its event queue (epoll) with the parent: removing something here,
        such as the pipe that wakes the loop, would remove it for the parent as well.
        """
        keep_inherited(self._loop)
        queue = getattr(getattr(self._loop, "_selector", None), "fileno", None)  # absent with uvloop and select
        if queue is not None:
            with suppress(ValueError):  # the loop is closed
                close_inherited(queue())

    def park(self, parked: threading.Event, go_on: threading.Event) -> None:
        """Set `parked` once the loop is between two callbacks, and let it wait there for `go_on`."""

        def wait() -> None:
            parked.set()
            go_on.wait(2 * PARK_LIMIT_S)

        if self.is_of_parent or not self._thread.is_alive() or threading.current_thread() is self._thread:
            parked.set()
            return
        try:
            self._loop.call_soon_threadsafe(wait)
        except RuntimeError:  # closed meanwhile
            parked.set()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Return what `work` returns. If the caller is interrupted (Ctrl-C), the work is cancelled first."""
        if self.is_of_parent:
            work.close()
            raise UsageError("the client was created before this process was forked: call cepheid.sync.connect in each process")
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("a blocking call inside the client's own thread would wait for itself")
        if not self._thread.is_alive() or sys.is_finalizing():  # daemon threads do not run while the interpreter ends
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
        """Run a function on the loop and return what it returns."""

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
        """Let every call of another thread end before the loop does, as it waits for its result."""
        try:
            running = asyncio.all_tasks() - {asyncio.current_task()}
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=STOP_LIMIT_S)
        finally:
            self._loop.stop()


class _Pauses(threading.local):
    """Pauses the loops while this thread forks: locks held by a callback, such as that of a module being imported, would stay
    locked in the child for ever.
    """

    threads: ClassVar[weakref.WeakSet[LoopThread]] = weakref.WeakSet()  # of all threads that fork
    go_on: threading.Event | None = None

    def before_fork(self) -> None:
        go_on = self.go_on = threading.Event()
        threads = list(self.threads)
        parked = [threading.Event() for _ in threads]
        for thread, event in zip(threads, parked, strict=True):
            thread.park(event, go_on)
        deadline = time.monotonic() + PARK_LIMIT_S
        for event in parked:
            event.wait(max(0.0, deadline - time.monotonic()))

    def after_fork(self) -> None:
        if self.go_on is not None:
            self.go_on.set()
            self.go_on = None


_pauses = _Pauses()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_pauses.before_fork, after_in_parent=_pauses.after_fork)
