"""One-shot watches, and the registry in which an embedded store keeps them.

watch = await store.watch(key)      armed: from now on no change is missed
record = await store.get(key)       decide; then, if there is nothing to do yet:
await watch.wait()                  returns at once if something changed since the first line
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType


class Watch:
    """Armed by a store; fires once, or fails when the session ends. `with` cancels it at the end."""

    def __init__(self, key: str, on_cancel: Callable[[Watch], None]) -> None:
        self.key = key
        self._on_cancel = on_cancel
        self._settled = asyncio.Event()
        self._on_settled: Callable[[], None] | None = None
        self._error: Exception | None = None
        self._cancelled = False

    def __repr__(self) -> str:
        settled = "cancelled" if self._cancelled else repr(self._error) if self._error else "fired"
        return f"<Watch {self.key}: {settled if self._settled.is_set() else 'armed'}>"

    @property
    def has_fired(self) -> bool:
        return self._settled.is_set() and self._error is None and not self._cancelled

    async def wait(self) -> None:
        """Return once something changed since arming. Raises SessionLostError or StoreClosedError: it will never fire."""
        await self._settled.wait()
        assert not self._cancelled, f"{self!r}: waited for after its owner cancelled it"
        if self._error is not None:
            raise self._error

    def call_when_settled(self, call: Callable[[], None]) -> None:
        """Call `call` in the loop, once, after it fired or failed. An alternative to waiting, if there are more watches than
        tasks."""
        self._on_settled = call
        if self._settled.is_set():
            self._settle()

    def cancel(self) -> None:
        """Remove it from the store. Idempotent; a fired watch needs no cancel."""
        if not self._settled.is_set():
            self._cancelled = True
            self._settled.set()
            self._on_cancel(self)

    def fire(self) -> None:
        """Fire, for stores."""
        self._settle()

    def fail(self, error: Exception) -> None:
        """Fail, for stores, as the session ended."""
        if not self._settled.is_set():
            self._error = error
            self._settle()

    def _settle(self) -> None:
        self._settled.set()
        if self._on_settled is not None:
            call, self._on_settled = self._on_settled, None
            asyncio.get_running_loop().call_soon(call)  # not now: the store is in the middle of a write

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()


class Watches:
    """The armed watches of one session, by key. A dict keeps their order, so that they fire in the order of arming.

    `on_unwatched(key)` is called after a key's last watch was cancelled.
    """

    def __init__(self, on_unwatched: Callable[[str], None] = lambda key: None) -> None:
        self._armed: dict[str, dict[Watch, None]] = {}
        self._on_unwatched = on_unwatched

    def __len__(self) -> int:
        return sum(map(len, self._armed.values()))

    def __contains__(self, key: str) -> bool:
        return key in self._armed

    def arm(self, key: str) -> Watch:
        watch = Watch(key, self._forget)
        self._armed.setdefault(key, {})[watch] = None
        return watch

    def fire(self, keys: Iterable[str]) -> None:
        if self._armed:
            for key in keys:
                for watch in self._armed.pop(key, ()):
                    watch.fire()

    def fire_all(self) -> None:
        self.fire(list(self._armed))

    def fail_all(self, error: Exception) -> None:
        armed, self._armed = self._armed, {}
        for watches in armed.values():
            for watch in watches:
                watch.fail(error)

    def _forget(self, watch: Watch) -> None:
        watches = self._armed[watch.key]
        del watches[watch]
        if not watches:
            del self._armed[watch.key]
            self._on_unwatched(watch.key)
