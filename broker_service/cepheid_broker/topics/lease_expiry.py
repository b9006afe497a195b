"""Leases: subscriptions with an expiry, by which readers that bypass the brokers (Spark) retain what they still have to read.

    property cepheid-lease-expires = wall-clock ms, renewed each minute by its holder
    tick ──► each open topic: expired, silent, without consumers ──► deleted, if it still is: its entries may be trimmed

Rules
1. A lease is over when its time has passed by a clock that cannot jump ahead (SteadyClock), *and* it was not renewed for
   `silence_s` by the loop's clock while this broker has had the topic open. So a broker started with a wrong clock takes nothing
   from a live holder: it sees the renewals, whatever they say. A consumer also counts as a sign of life: it may reconnect.
2. The last check and the refusal of new consumers are one step: a renewal or a consumer before it saves the lease, even a renewal
   whose record is not written yet, as it will be acknowledged.
3. Only open topics are judged: a closed topic is not trimmed either.
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
    """A lease's property, and since when (loop time) it has had this value."""

    subscription: Subscription
    text: str
    since: float


def expiry_ms(subscription: Subscription) -> int | None:
    """Return the expiry, or None if it is not a lease. A malformed number never expires, so that a typing error deletes nothing."""
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
        """Number of leases in open topics at the last check."""
        return len(self._sights)

    def on_tick(self, window_s: float) -> None:
        self._since_check_s += window_s
        if self._since_check_s >= self._check_s and (self._checking is None or self._checking.done()):
            self._since_check_s = 0.0
            self._checking = self._tasks.start(self.check(), name="lease-expiry")

    async def check(self) -> None:
        """Check all open topics once, and delete the leases that are over."""
        for topic, sight in self._due(asyncio.get_running_loop().time()):
            name = sight.subscription.name
            extra = {"topic": str(topic.name), "subscription": name, "expired_at_ms": sight.text}
            try:
                deleted = await topic.delete_subscription_if(name, partial(_is_over, topic, sight))
            except CepheidError as error:  # the next check tries again
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
    """Return whether the lease is over; checked again in the step that deletes (rule 2)."""
    if found is not sight.subscription or found.consumers or found.in_seek or found.cursor.properties_changing or not found.durable:
        return False
    if found.cursor.properties.get(LEASE_PROPERTY) != sight.text:
        return False
    expires_ms = expiry_ms(found)
    return expires_ms is not None and topic.ledger.steady_ms() > expires_ms
