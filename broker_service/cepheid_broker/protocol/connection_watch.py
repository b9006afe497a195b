"""Watchers of topic lists of one connection: WATCH_TOPIC_LIST and its close.

    WATCH_TOPIC_LIST ──► WATCH_TOPIC_LIST_SUCCESS (names, hash) ──► WATCH_TOPIC_UPDATE … in order

Used only by clients that ask: C++ and Go close the connection on these answers (protocol.md §21, trap 4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cepheid_broker.errors import TooManyError
from cepheid_broker.peer import Peer
from cepheid_broker.protocol.access import Access
from cepheid_broker.protocol.connection_lookup import check_frame
from cepheid_broker.protocol.requests import Requests
from cepheid_broker.protocol.services import Services
from cepheid_broker.protocol.wire_errors import error_text, server_error_of
from cepheid_broker.topics import TopicPattern, TopicWatch
from cepheid_wire import CommandType
from cepheid_wire import pulsar_api_pb2 as pb


class WatchCommands:
    def __init__(self, peer: Peer, services: Services, requests: Requests, access: Access) -> None:
        self._access = access
        self._peer = peer
        self._services = services
        self._requests = requests
        self._open: dict[int, TopicWatch] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self.table: Mapping[int, Callable[[Any], None]] = {
            CommandType.WATCH_TOPIC_LIST: self._on_watch,
            CommandType.WATCH_TOPIC_LIST_CLOSE: self._on_close,
        }

    def __repr__(self) -> str:
        return f"{len(self._open)} topic watchers"

    def _on_watch(self, ask: pb.CommandWatchTopicList) -> None:
        self._end(ask.watcher_id)  # a repeated request starts again
        self._opening[ask.watcher_id] = self._requests.start(self._watch(ask), name="watch-topics")

    async def _watch(self, ask: pb.CommandWatchTopicList) -> None:
        try:
            async with asyncio.timeout(self._services.settings.request_timeout_s):
                watch = await self._create(ask)
            names = [] if ask.topics_hash == watch.hash else sorted(watch.topics)
            success = pb.CommandWatchTopicListSuccess(
                request_id=ask.request_id, watcher_id=ask.watcher_id, topic=names, topics_hash=watch.hash
            )
            self._open[ask.watcher_id] = watch
            check_frame(success, ask.namespace, self._services.settings.max_frame_bytes)
        except Exception as error:  # answer every request, even after an internal error
            if (opened := self._open.pop(ask.watcher_id, None)) is not None:
                opened.close()
            self._peer.send_error(ask.request_id, server_error_of(error), error_text(error))
        else:
            self._peer.send(success)
        finally:
            if self._opening.get(ask.watcher_id) is asyncio.current_task():
                del self._opening[ask.watcher_id]

    async def _create(self, ask: pb.CommandWatchTopicList) -> TopicWatch:
        limit = self._services.settings.connection.max_topic_watchers
        if len(self._open) + len(self._opening) > limit:
            raise TooManyError(f"this connection has {len(self._open)} watchers of topics; {limit} are possible")
        namespace = self._access.namespace_named(CommandType.WATCH_TOPIC_LIST, ask.namespace)
        pattern = TopicPattern(ask.topics_pattern)
        await self._access.require(CommandType.WATCH_TOPIC_LIST, namespace)

        def tell(new: Sequence[str], deleted: Sequence[str], topics_hash: str) -> bool:
            if not self._peer.writable:
                return False
            self._peer.send(
                pb.CommandWatchTopicUpdate(
                    watcher_id=ask.watcher_id, new_topics=new, deleted_topics=deleted, topics_hash=topics_hash
                )
            )
            return True

        return await self._services.topic_watches.open(
            namespace, pattern, tell, lambda topics: self._access.visible(topics, namespace)
        )

    def _on_close(self, ask: pb.CommandWatchTopicListClose) -> None:
        self._end(ask.watcher_id)
        self._peer.send(pb.CommandSuccess(request_id=ask.request_id))

    def _end(self, watcher_id: int) -> None:
        if (task := self._opening.pop(watcher_id, None)) is not None:
            task.cancel()
        if (watch := self._open.pop(watcher_id, None)) is not None:
            watch.close()

    def on_writable(self, writable: bool) -> None:
        if writable:
            for watch in self._open.values():
                watch.catch_up()

    async def look_again(self, tenant: str | None) -> None:
        """Update watchers after permissions changed in this tenant (None: in any), one per loop turn, as each may list many
        topics."""
        for watcher_id, watch in list(self._open.items()):
            if tenant not in (None, watch.namespace.tenant):
                continue
            # It may have been closed meanwhile.
            if self._open.get(watcher_id) is watch and self._access.knows(watch.namespace):
                watch.look_again()
                await asyncio.sleep(0)

    def on_connection_lost(self) -> None:
        for watcher_id in list(self._open):
            self._end(watcher_id)
