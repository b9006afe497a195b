"""Partitions that other brokers serve, for who works on a partitioned topic as a whole (partitioned_topics.py).

What is asked are calls of the admin API on the partition's own name, so their owners close their clients and keep their books.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from cepheid_broker.ownership.ownership import Ownership, There
from cepheid_broker.ownership.peer_calls import PeerCalls, RemoteRefusedError, topic_path
from cepheid_wire import TopicName

_EARLIEST = {"ledgerId": -1, "entryId": -1}


def clients_in(stats: Mapping[str, Any]) -> int:
    """Producers, those that wait too, and consumers, as the statistics of a topic name them."""
    consumers = sum(len(found["consumers"]) for found in stats["subscriptions"].values())
    return len(stats["publishers"]) + int(stats.get("waitingPublishers", 0)) + consumers


class RemoteParts:
    def __init__(self, ownership: Ownership, peers: PeerCalls) -> None:
        self._ownership = ownership
        self._peers = peers

    def __repr__(self) -> str:
        return f"<RemoteParts by {self._peers!r}>"

    async def elsewhere(self, parts: Iterable[TopicName]) -> dict[TopicName, There]:
        """Those that another broker serves, or is to serve; the others are this broker's now. Raises as `Ownership.locate`."""
        if not self._ownership.is_shared:
            return {}
        names = list(parts)
        locations = await asyncio.gather(*map(self._ownership.locate, names))
        return {name: location for name, location in zip(names, locations, strict=True) if isinstance(location, There)}

    async def owner(self, topic: TopicName) -> There | None:
        """Of the name of a partitioned topic: that broker works on it as a whole. None: this one. Raises as `Ownership.locate`."""
        location = await self._ownership.locate(topic)
        return location if isinstance(location, There) else None

    async def finish_deleting(self, there: There, topic: TopicName) -> None:
        """If it is marked as deleted still: one that was made anew since is left alone. Raises as `remove`."""
        await self._delete(there, f"{topic_path(topic)}/partitions?force=true&onlyIfMarked=true")

    async def remove(self, there: There, part: TopicName) -> None:
        """By force, with its clients. Gone already is success. Raises RemoteRefusedError, PeerUnreachableError."""
        await self._delete(there, f"{topic_path(part)}?force=true")

    async def _delete(self, there: There, target: str) -> None:
        try:
            await self._peers.call(there, "DELETE", target)
        except RemoteRefusedError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    async def add_subscriptions(self, there: There, part: TopicName, subscriptions: Mapping[str, Mapping[str, str]]) -> None:
        """From its first entry on. Raises as `remove`."""
        for name, properties in subscriptions.items():
            body = json.dumps({**_EARLIEST, "properties": dict(properties)}).encode()
            segment = quote(quote(name, safe=""), safe="")  # decoded twice (admin/raw_path.py)
            try:
                await self._peers.call(there, "PUT", f"{topic_path(part)}/subscription/{segment}", body)
            except RemoteRefusedError as error:
                if error.status != HTTPStatus.CONFLICT:  # it has it
                    raise

    async def stats(self, there: There, part: TopicName) -> Mapping[str, Any]:
        """Raises as `remove`."""
        found: Mapping[str, Any] = await self._peers.call(there, "GET", f"{topic_path(part)}/stats")
        return found
