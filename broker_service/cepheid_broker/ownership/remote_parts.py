"""Partitions that other brokers serve, for work on a partitioned topic as a whole (partitioned_topics.py).

Each operation is a call of the owner's admin API with the partition's name, so that the owner closes clients and updates its state.
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
    """Return the number of producers, including waiting ones, and consumers in a topic's statistics."""
    consumers = sum(len(found["consumers"]) for found in stats["subscriptions"].values())
    return len(stats["publishers"]) + int(stats.get("waitingPublishers", 0)) + consumers


class RemoteParts:
    """Calls to the owners of partitions that this broker does not serve."""

    def __init__(self, ownership: Ownership, peers: PeerCalls) -> None:
        self._ownership = ownership
        self._peers = peers

    def __repr__(self) -> str:
        return f"<RemoteParts by {self._peers!r}>"

    async def elsewhere(self, parts: Iterable[TopicName]) -> dict[TopicName, There]:
        """Return the partitions that other brokers serve or should serve; this broker now owns the rest. Raises what
        `Ownership.locate` raises."""
        if not self._ownership.is_shared:
            return {}
        names = list(parts)
        locations = await asyncio.gather(*map(self._ownership.locate, names))
        return {name: location for name, location in zip(names, locations, strict=True) if isinstance(location, There)}

    async def owner(self, topic: TopicName) -> There | None:
        """Return the broker that works on a partitioned topic as a whole: the owner of its name. None: this broker. Raises what
        `Ownership.locate` raises."""
        location = await self._ownership.locate(topic)
        return location if isinstance(location, There) else None

    async def finish_deleting(self, there: There, topic: TopicName) -> None:
        """Finish deleting a topic, unless it was created again since its deletion was marked. Raises what `remove` raises."""
        await self._delete(there, f"{topic_path(topic)}/partitions?force=true&onlyIfMarked=true")

    async def remove(self, there: There, part: TopicName) -> None:
        """Delete a partition by force, closing its clients. Succeeds if it does not exist. Raises RemoteRefusedError,
        PeerUnreachableError."""
        await self._delete(there, f"{topic_path(part)}?force=true")

    async def _delete(self, there: There, target: str) -> None:
        try:
            await self._peers.call(there, "DELETE", target)
        except RemoteRefusedError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    async def add_subscriptions(self, there: There, part: TopicName, subscriptions: Mapping[str, Mapping[str, str]]) -> None:
        """Create the subscriptions at the partition's first entry. Raises what `remove` raises."""
        for name, properties in subscriptions.items():
            body = json.dumps({**_EARLIEST, "properties": dict(properties)}).encode()
            segment = quote(quote(name, safe=""), safe="")  # decoded twice (admin/raw_path.py)
            try:
                await self._peers.call(there, "PUT", f"{topic_path(part)}/subscription/{segment}", body)
            except RemoteRefusedError as error:
                if error.status != HTTPStatus.CONFLICT:  # the subscription exists already
                    raise

    async def stats(self, there: There, part: TopicName) -> Mapping[str, Any]:
        """Return the partition's statistics. Raises what `remove` raises."""
        found: Mapping[str, Any] = await self._peers.call(there, "GET", f"{topic_path(part)}/stats")
        return found
