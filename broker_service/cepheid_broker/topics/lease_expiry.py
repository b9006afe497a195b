"""Leases: subscriptions with an end, by which readers past the brokers (Spark) keep what they have still to read.

    property cepheid-lease-expires = wall-clock ms, renewed each minute by whoever holds it
    tick ──► each open topic: expired, silent, without consumers ──► deleted, if it still is: what it held may be trimmed

Rules
1. A lease is over when its time has come by a clock that cannot jump ahead (SteadyClock), *and* nobody has renewed it for
   `silence_s` by the loop's clock since this broker has the topic open: a broker that was started with a wrong clock takes nothing
   from a holder that lives, since its renewals are seen, whatever they say. A consumer is a sign of life too: it may come again.
2. The last look and the closing to newcomers are one step: a renewal or a consumer before it saves the lease, also a renewal
   whose record is still to be written: it will be acknowledged.
3. Only open topics are judged: of a closed one nothing is trimmed either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_broker.topics.subscription import Subscription
from cepheid_broker.topics.topic import Topic
from cepheid_ports import CepheidError, TaskOwner

log = logging.getLogger(__name__)

LEASE_PROPERTY = "cepheid-lease-expires"


@dataclass(frozen=True, slots=True)
class _Sight:
    """A lease's property, and since when (loop time) it has been that."""

    subscription: Subscription
    text: str
    since: float


def expiry_ms(subscription: Subscription) -> int | None:
    """None: it is no lease. What is no number never expires: nothing is deleted for a typing error."""
    text = subscription.cursor.properties.get(LEASE_PROPERTY, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


class LeaseExpiry:
    def __init__(self, loaded: Callable[[], Iterable[Topic]], tasks: TaskOwner, check_s: float, silence_s: float) -> None:
        self._loaded = loaded
        self._tasks = tasks
        self._check_s = check_s
        self._silence_s = silence_s
        self._since_check_s = 0.0
        self._checking: asyncio.Task[None] | None = None
        self._sights: dict[tuple[str, str], _Sight] = {}
        self.expired = 0

    def __repr__(self) -> str:
        return f"<LeaseExpiry {self.leases} leases, {self.expired} expired>"

    @property
    def leases(self) -> int:
        """In open topics, at the last look."""
        return len(self._sights)

    def on_tick(self, window_s: float) -> None:
        self._since_check_s += window_s
        if self._since_check_s >= self._check_s and (self._checking is None or self._checking.done()):
            self._since_check_s = 0.0
            self._checking = self._tasks.start(self.check(), name="lease-expiry")

    async def check(self) -> None:
        """One look at all open topics; deletes the leases that are over."""
        for topic, sight in self._due(asyncio.get_running_loop().time()):
            name = sight.subscription.name
            extra = {"topic": str(topic.name), "subscription": name, "expired_at_ms": sight.text}
            try:
                deleted = await topic.delete_subscription_if(name, partial(_is_over, topic, sight))
            except CepheidError as error:  # the next look tries again
                log.warning("lease.not_deleted", extra={**extra, "error": str(error)})
                continue
            if deleted:
                self.expired += 1
                log.warning("lease.expired", extra=extra)

    def _due(self, now: float) -> list[tuple[PersistentTopic, _Sight]]:
        sights: dict[tuple[str, str], _Sight] = {}
        due: list[tuple[PersistentTopic, _Sight]] = []
        for topic in self._loaded():
            if not isinstance(topic, PersistentTopic) or topic.closed:
                continue
            for name, subscription in topic.subscriptions.items():
                if expiry_ms(subscription) is None:
                    continue
                key = str(topic.name), name
                sight = self._seen_again(self._sights.get(key), subscription, now)
                sights[key] = sight
                if now - sight.since >= self._silence_s and _is_over(topic, sight, subscription):
                    due.append((topic, sight))
        self._sights = sights
        return due

    def _seen_again(self, before: _Sight | None, subscription: Subscription, now: float) -> _Sight:
        text = subscription.cursor.properties[LEASE_PROPERTY]
        if before is not None and before.subscription is subscription and before.text == text and not subscription.consumers:
            return before
        return _Sight(subscription, text, now)


def _is_over(topic: PersistentTopic, sight: _Sight, found: Subscription) -> bool:
    """Rule 2: asked again in the step that deletes."""
    if found is not sight.subscription or found.consumers or found.in_seek or found.cursor.properties_changing or not found.durable:
        return False
    if found.cursor.properties.get(LEASE_PROPERTY) != sight.text:
        return False
    expires_ms = expiry_ms(found)
    return expires_ms is not None and topic.ledger.steady_ms() > expires_ms
