"""The watches of one ZooKeeper session: one per key at the server, for any number of ours.

    watch(key)            exists, which reports creation, change and deletion
    watch_children(key)   getChildren, which reports changes of children and deletion; for a missing key: exists

A watch that is not waited for any more stays at the server for the next user, up to MAX_UNUSED of them; the oldest are removed.

kazoo drops its watches with the connection, so every watch fires when the connection is back (rule 5 of store.py: spurious is
allowed, missed is not), and its user arms it again if needed. With the session they fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kazoo.exceptions import KazooException, NoNodeError
from kazoo.protocol.states import EventType

from cepheid_metadata.request_lane import RequestLane
from cepheid_metadata.store import Versioned
from cepheid_metadata.watch import Watch, Watches
from cepheid_metadata.zookeeper_requests import RemoveWatches, refusal_of

MAX_UNUSED = 1_000


class ZooKeeperWatches:
    def __init__(self, lane: RequestLane, path: Callable[[str], str]) -> None:
        self._lane = lane
        self._path = path
        self._on_keys = Watches(self._note_use)
        self._on_children = Watches(self._note_use)
        self._armed_keys: dict[str, None] = {}  # at the server, without an event since
        self._armed_children: dict[str, None] = {}
        self._unused: dict[str, None] = {}  # armed keys without a watch of ours, least recently used first

    def __len__(self) -> int:
        return len(self._on_keys) + len(self._on_children)

    async def watch(self, key: str) -> Watch:
        watch = self._on_keys.arm(key)
        self._unused.pop(key, None)
        try:
            await self._arm_key(key)
        except BaseException:
            watch.cancel()
            raise
        return watch

    async def watch_and_get(self, key: str) -> tuple[Watch, Versioned | None]:
        watch = self._on_keys.arm(key)
        self._unused.pop(key, None)
        path = self._path(key)
        try:
            while True:
                on_event = None if key in self._armed_keys else partial(self._on_key_event, key)
                try:
                    send = partial(_get, path=path, watch=on_event)
                    value, stat = await self._ask(key, send, self._armed_keys if on_event is not None else {})
                    return watch, Versioned(value or b"", stat.version)
                except NoNodeError:  # and no watch: the server keeps that of a read only for an existing key
                    if on_event is None or await self._arm_key(key) is False:
                        return watch, None
        except BaseException:
            watch.cancel()
            raise

    async def watch_children(self, key: str) -> Watch:
        watch = self._on_children.arm(key)
        self._unused.pop(key, None)
        try:
            if key not in self._armed_children:
                await self._arm_children(key)
        except BaseException:
            watch.cancel()
            raise
        return watch

    def on_disconnected(self) -> None:
        """Drop all armed watches, as kazoo has."""
        self._armed_keys.clear()
        self._armed_children.clear()
        self._unused.clear()

    @property
    def armed(self) -> int:
        """The number of watches at the server."""
        return len(self._armed_keys) + len(self._armed_children)

    def on_reconnected(self) -> None:
        self._on_keys.fire_all()
        self._on_children.fire_all()

    def fail_all(self, error: Exception) -> None:
        self.on_disconnected()
        self._on_keys.fail_all(error)
        self._on_children.fail_all(error)

    async def _arm_key(self, key: str) -> bool | None:
        """Arm a key's watch; return whether the key exists. None: the watch was armed already, without a request."""
        if key in self._armed_keys:
            return None
        path, on_event = self._path(key), partial(self._on_key_event, key)
        stat = await self._ask(key, lambda client: client.exists_async(path, watch=on_event), self._armed_keys)
        return stat is not None

    async def _arm_children(self, key: str) -> None:
        path, on_event = self._path(key), partial(self._on_children_event, key)
        while True:
            was_armed = key in self._armed_keys
            try:
                await self._ask(key, lambda client: client.get_children_async(path, watch=on_event), self._armed_children)
                return
            except NoNodeError:
                # Its creation will be seen if its own watch was armed before, or just now with the answer that it does not exist.
                # Otherwise it may have been created in between, and its children can be watched after all.
                if was_armed or await self._arm_key(key) is False:
                    return

    async def _ask(self, key: str, send: Callable[[Any], Any], armed: dict[str, None]) -> Any:
        def on_success() -> None:
            armed[key] = None
            self._note_use(key)  # the caller may be gone

        try:
            return await self._lane.ask(send, f"watch {key}", on_success=on_success)
        except NoNodeError:
            raise
        except KazooException as error:
            raise refusal_of(key, error, is_write=False) from None

    # Events arrive before the answers to later requests.

    def _on_key_event(self, key: str, event: Any) -> None:
        if event.type == EventType.NONE:
            return  # the connection was lost: on_disconnected is called
        self._armed_keys.pop(key, None)
        self._on_keys.fire([key])
        if event.type != EventType.CHANGED:  # created or deleted: also a change for watches of its children
            self._on_children.fire([key])
        self._note_use(key)

    def _on_children_event(self, key: str, event: Any) -> None:
        if event.type != EventType.NONE:
            self._armed_children.pop(key, None)
            self._on_children.fire([key])
            self._note_use(key)

    # Watches that are not waited for

    def _note_use(self, key: str) -> None:
        is_armed = key in self._armed_keys or key in self._armed_children
        if not is_armed or key in self._on_keys or key in self._on_children:
            self._unused.pop(key, None)
            return
        self._unused[key] = None
        while len(self._unused) > MAX_UNUSED:
            self._remove(next(iter(self._unused)))

    def _remove(self, key: str) -> None:
        del self._unused[key]
        if key in self._armed_keys:
            del self._armed_keys[key]
            self._tell_removal(key, RemoveWatches.DATA)
        if key in self._armed_children:
            del self._armed_children[key]
            self._tell_removal(key, RemoveWatches.CHILDREN)

    def _tell_removal(self, key: str, kind: int) -> None:
        path = self._path(key)
        self._lane.tell(lambda client: RemoveWatches(client, path, kind).send(), f"unwatch {key}")


def _get(client: Any, *, path: str, watch: Callable[[Any], None] | None) -> Any:
    return client.get_async(path, watch=watch)
