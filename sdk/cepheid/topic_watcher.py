"""Follows the creation of topics that match a pattern, while a consumer of the pattern is open.

not watching ──WATCH_TOPIC_LIST, answered with all topics──► watching ──connection lost──► not watching
                   ├── the broker refuses the pattern: all topics of the namespace are watched
                   └── the broker has no watchers, or refuses: it is asked again rarely, since another broker may support them

The results are hints. The consumer matches names itself and lists the topics periodically, so that it does no harm if a
broker's regular expressions differ from Python's. Deletions are not followed: a consumer leaves a topic when its broker
answers that it does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable

from cepheid.backoff import Backoff
from cepheid.connection import Connection
from cepheid.errors import Error, RefusedError, is_transient
from cepheid.lookup import Lookup
from cepheid_wire import pulsar_api_pb2 as pb

log = logging.getLogger(__name__)

UNSUPPORTED_S = 300.0
_SAME_EVERYWHERE = re.compile(r"(?:[-\w./*+|)\]:=]|\\[-.]|\[(?!\^)|\((?!\?))*", re.ASCII)
"""Characters that mean the same in Python's and RE2's regular expressions."""


class TopicWatcher:
    """Watches topics: `run` watches; `wait_found` returns the results."""

    def __init__(self, lookup: Lookup, namespace: str, pattern: re.Pattern[str], watcher_id: int, timeout_s: float) -> None:
        self._lookup = lookup
        self._namespace = namespace
        is_same = pattern.flags == re.UNICODE and _SAME_EVERYWHERE.fullmatch(pattern.pattern)
        self._everything = f"{namespace}/.*"
        self._pattern = pattern.pattern if is_same else self._everything
        self._watcher_id = watcher_id
        self._timeout_s = timeout_s
        self._found: dict[str, None] = {}
        self._is_found = asyncio.Event()
        self._lost = asyncio.Event()

    def __repr__(self) -> str:
        return f"<TopicWatcher {self._pattern}, {'lost' if self._lost.is_set() else 'open'}>"

    async def wait_found(self) -> list[str]:
        """Wait for at least one topic;

        return the full names of existing topics and partitions and of those created since the last call.
        """
        await self._is_found.wait()
        self._is_found.clear()
        found, self._found = self._found, {}
        return list(found)

    async def run(self) -> None:
        """Watch until cancelled."""
        backoff = Backoff()
        while True:
            connection: Connection | None = None
            try:
                connection = await self._lookup.any_broker()
                if connection.has_topic_watchers:
                    await self._open(connection)
                    backoff.reset()
                    await self._lost.wait()
                delay_s = backoff.next_s() if connection.has_topic_watchers else UNSUPPORTED_S
            except Error as error:
                log.info("client.topics_not_watched", extra={"namespace": self._namespace, "error": str(error)})
                is_refused = isinstance(error, RefusedError) and not is_transient(error)
                delay_s = UNSUPPORTED_S if is_refused else backoff.next_s()
                if is_refused and self._pattern != self._everything:  # Apache Pulsar accepts up to 50 characters
                    self._pattern, delay_s = self._everything, 0.0
            finally:
                self._leave(connection)
            await asyncio.sleep(delay_s)

    def on_update(self, update: pb.CommandWatchTopicUpdate) -> None:
        self._on_found(update.new_topics)

    def on_connection_lost(self) -> None:
        self._lost.set()

    async def _open(self, connection: Connection) -> None:
        self._lost.clear()
        connection.watchers[self._watcher_id] = self
        ask = pb.CommandWatchTopicList(watcher_id=self._watcher_id, namespace=self._namespace, topics_pattern=self._pattern)
        answer = await connection.request(ask, f"watching the topics of {self._namespace}", self._timeout_s)
        self._on_found(answer.topic)

    def _on_found(self, names: Iterable[str]) -> None:
        self._found.update(dict.fromkeys(names))
        if self._found:
            self._is_found.set()

    def _leave(self, connection: Connection | None) -> None:
        if connection is not None and connection.watchers.pop(self._watcher_id, None) is not None:
            connection.tell(pb.CommandWatchTopicListClose(watcher_id=self._watcher_id))
