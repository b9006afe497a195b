"""Notify clients of created and deleted topics: one listing per watched namespace, however many clients watch it.

    a topic is created, deleted, grown ──► TopicCatalog.on_changed ──► poke ──► listing ──► difference ──► TopicWatch.tell
    another broker's mark (topic_changes.py), and now and then ────────────┘

Rules
1. Listings of a namespace run one after the other, and only the latest counts: no update is sent twice or out of order.
2. A watch begins with the listing that it is given, so nothing is missed between its first list and its updates.
3. Pokes during a listing cause one more, after LISTING_PAUSE_S: creating a thousand topics in a row causes only a few listings.
4. Updates for a client that does not read are merged into one difference, never queued.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import crc32c

from cepheid_broker.errors import NamespaceNotFoundError
from cepheid_broker.topics.topic_changes import TopicChangeMarks
from cepheid_broker.topics.topic_pattern import TopicPattern
from cepheid_metadata import TopicChanges, WatchedRecord
from cepheid_ports import CepheidError, TaskOwner
from cepheid_wire import NamespaceName, TopicName

log = logging.getLogger(__name__)

LISTING_PAUSE_S = 0.05
RETRY_S = 1.0
POLL_S = 60.0

ListTopics = Callable[[NamespaceName], Awaitable[Iterable[TopicName]]]
Tell = Callable[[Sequence[str], Sequence[str], str], bool]
"""Arguments: new topics, deleted topics, hash of all. False: not now; it is called again."""
Visible = Callable[[list[TopicName]], list[TopicName]]
"""Return those of these topics that the client may see."""


def topics_hash(topics: Iterable[str]) -> str:
    """Return the CRC32C of the sorted names joined by commas, its four bytes printed in little-endian order (protocol.md §21)."""
    return crc32c.crc32c(",".join(sorted(topics)).encode()).to_bytes(4, "little").hex()


class TopicWatch:
    """One client's watch."""

    def __init__(self, namespace: WatchedNamespace, pattern: TopicPattern, tell: Tell, visible: Visible) -> None:
        self._namespace = namespace
        self._pattern = pattern
        self._tell = tell
        self._visible = visible
        self.topics = {str(name): None for name in self._shown(namespace.topics)}
        self._new: dict[str, None] = {}
        self._deleted: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"<TopicWatch {self._pattern.text!r} in {self._namespace.name}, {len(self.topics)} topics>"

    @property
    def hash(self) -> str:
        return topics_hash(self.topics)

    @property
    def namespace(self) -> NamespaceName:
        return self._namespace.name

    def _shown(self, topics: Iterable[TopicName]) -> list[TopicName]:
        return self._visible([topic for topic in topics if self._pattern.matches(topic)])

    def look_again(self) -> None:
        """Update the list after the client's permissions changed."""
        shown = dict.fromkeys(self._shown(self._namespace.topics))
        names = {str(topic) for topic in shown}
        hidden = [topic for topic in self._namespace.topics if str(topic) in self.topics and str(topic) not in names]
        self.on_difference([topic for topic in shown if str(topic) not in self.topics], hidden)

    def on_difference(self, new: Iterable[TopicName], deleted: Iterable[TopicName]) -> None:
        for topic in deleted:
            if (name := str(topic)) in self.topics:
                del self.topics[name]
                if name in self._new:
                    del self._new[name]
                else:
                    self._deleted[name] = None
        for topic in self._shown(new):
            name = str(topic)
            self.topics[name] = None
            if name in self._deleted:
                del self._deleted[name]
            else:
                self._new[name] = None
        self.catch_up()

    def catch_up(self) -> None:
        """Send the pending difference, if the client accepts it (rule 4)."""
        if (self._new or self._deleted) and self._tell(list(self._new), list(self._deleted), self.hash):
            self._new, self._deleted = {}, {}

    def close(self) -> None:
        self._namespace.remove(self)


class WatchedNamespace:
    """A namespace's topics as last listed, and its watches."""

    def __init__(
        self,
        name: NamespaceName,
        list_topics: ListTopics,
        tasks: TaskOwner,
        *,
        on_opening: Callable[[WatchedNamespace], Awaitable[None]],
        on_unwatched: Callable[[WatchedNamespace], None],
    ) -> None:
        self.name = name
        self.topics: dict[TopicName, None] = {}
        self._list_topics = list_topics
        self._tasks = tasks
        self._on_opening = on_opening
        self._on_unwatched = on_unwatched
        self._watches: dict[TopicWatch, None] = {}
        self._opening = 0
        self._listing = asyncio.Lock()  # rule 1
        self._poked = False
        self._following: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<WatchedNamespace {self.name}, {len(self._watches)} watches>"

    def __len__(self) -> int:
        return len(self._watches)

    async def open(self, pattern: TopicPattern, tell: Tell, visible: Visible = list) -> TopicWatch:
        """Add a watch. Nothing is awaited between its list and its return (rule 2). Raises NamespaceNotFoundError,
        MetadataError."""
        self._opening += 1
        try:
            await self._on_opening(self)  # first: a mark set during the listing causes another one
            await self._refresh()
            watch = TopicWatch(self, pattern, tell, visible)
            self._watches[watch] = None
            if self._poked:
                self.poke()  # poked during the listing, when there was no watch yet to follow for
            return watch
        finally:
            self._opening -= 1
            self._end_if_unwatched()

    def remove(self, watch: TopicWatch) -> None:
        self._watches.pop(watch, None)
        self._end_if_unwatched()

    def poke(self) -> None:
        """List again: the topics may have changed."""
        self._poked = True
        if self._following is None:
            self._following = self._tasks.start(self._follow(), name=f"list {self.name}")

    async def _follow(self) -> None:
        try:
            while self._poked and self._watches:
                self._poked = False
                try:
                    await self._refresh()
                    pause_s = LISTING_PAUSE_S
                except NamespaceNotFoundError:
                    self._apply({})
                    pause_s = LISTING_PAUSE_S
                except CepheidError as error:
                    log.warning("topic_watch.listing_failed", extra={"namespace": str(self.name), "error": str(error)})
                    self._poked, pause_s = True, RETRY_S
                await asyncio.sleep(pause_s)
        finally:
            self._following = None

    async def _refresh(self) -> None:
        async with self._listing:
            self._apply(dict.fromkeys(await self._list_topics(self.name)))

    def _apply(self, topics: dict[TopicName, None]) -> None:
        new = [topic for topic in topics if topic not in self.topics]
        deleted = [topic for topic in self.topics if topic not in topics]
        self.topics = topics
        if new or deleted:
            for watch in list(self._watches):
                watch.on_difference(new, deleted)

    def _end_if_unwatched(self) -> None:
        if not self._watches and not self._opening:
            self._on_unwatched(self)


class TopicWatches:
    """Watches of all connections. `marks` is given if there are other brokers."""

    def __init__(self, list_topics: ListTopics, tasks: TaskOwner, marks: TopicChangeMarks | None = None) -> None:
        self._list_topics = list_topics
        self._marks = marks
        self._followed: dict[WatchedNamespace, WatchedRecord[TopicChanges]] = {}
        self._tasks = tasks
        self._namespaces: dict[NamespaceName, WatchedNamespace] = {}
        self._since_poll_s = 0.0

    def __repr__(self) -> str:
        return f"<TopicWatches {len(self)} in {len(self._namespaces)} namespaces>"

    def __len__(self) -> int:
        return sum(map(len, self._namespaces.values()))

    async def open(self, namespace: NamespaceName, pattern: TopicPattern, tell: Tell, visible: Visible = list) -> TopicWatch:
        """Add a watch, as `WatchedNamespace.open`."""
        watched = self._namespaces.get(namespace)
        if watched is None:
            watched = self._namespaces[namespace] = WatchedNamespace(
                namespace, self._list_topics, self._tasks, on_opening=self._follow, on_unwatched=self._forget
            )
        return await watched.open(pattern, tell, visible)

    async def _follow(self, watched: WatchedNamespace) -> None:
        if self._marks is not None and watched not in self._followed:
            self._followed[watched] = await self._marks.follow(watched.name, watched.poke)

    def _forget(self, watched: WatchedNamespace) -> None:
        if self._namespaces.get(watched.name) is watched:
            del self._namespaces[watched.name]
        if self._marks is not None and (followed := self._followed.pop(watched, None)) is not None:
            self._marks.leave(followed, watched.poke)

    def on_changed(self, topic: TopicName) -> None:
        """Note that this broker created, deleted or grew the topic."""
        if (watched := self._namespaces.get(topic.namespace)) is not None:
            watched.poke()

    def on_tick(self, window_s: float) -> None:
        self._since_poll_s += window_s
        if self._since_poll_s >= POLL_S:
            self._since_poll_s = 0.0
            for watched in self._namespaces.values():
                watched.poke()
