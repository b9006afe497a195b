"""Deletes topics that no client uses, where a policy says so (`inactive_topics`; off unless set).

    tick ──► each open topic: inactive? ──► since when, without any sign of use ──► long enough ──► deleted, if it still is inactive

An inactive topic has no producer and no consumer and, as the policy says, no subscription or none with a backlog. Partitions are
judged together: only if all are inactive are they deleted, and then the record of the partitioned topic.

Rules
1. The last check and the refusal of new clients are one step: a client that connects before it saves the topic; one that connects
   later is refused, tries again, and creates the topic again if that is allowed.
2. Only open topics are judged: the backlogs of others are unknown. If the other partitions of a topic are inactive, a closed one is
   opened for this check, unless it has no subscription.
3. What retention keeps is kept: a topic is not deleted before its retention time is over, and never if it has no limit.
4. Brokers that delete the same partitioned topic at the same time block each other: each has closed its own partitions and asks for
   the other's. So a broker that fails tries again after a random time, not in step with the other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cepheid_broker.errors import NotAllowedError
from cepheid_broker.ownership import NotOwnerError, clients_in
from cepheid_broker.policies import InactiveDeletion, TopicPolicies
from cepheid_broker.topics.partitioned_topics import Condition, PartitionedTopics
from cepheid_broker.topics.topic import Topic
from cepheid_broker.topics.topic_catalog import TopicCatalog
from cepheid_broker.topics.topics import Topics
from cepheid_ports import CepheidError, TaskOwner
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

MOST_LOOKS_LEFT_OUT = 5


@dataclass(frozen=True, slots=True)
class _Idle:
    """Since when a topic is idle. `signs`: values that change if the topic was used between two checks."""

    since: float  # loop time
    signs: tuple[int, ...]


def is_inactive(topic: Topic) -> bool:
    policy = topic.policies.inactive_topics
    if policy is None or topic.in_use:
        return False
    if policy.when is InactiveDeletion.NO_SUBSCRIPTIONS:
        return not topic.subscriptions
    return all(subscription.cursor.backlog_entries == 0 for subscription in topic.subscriptions.values())


def is_inactive_elsewhere(stats: Mapping[str, Any]) -> bool:
    """Return whether a partition on another broker has no client and no backlog, by its statistics.

    This is stricter than the policy, as the time of its last use is not known here.
    """
    return clients_in(stats) == 0 and all(found["msgBacklog"] == 0 for found in stats["subscriptions"].values())


def inactive_for_s(policies: TopicPolicies) -> float:
    """Return how long a topic must be inactive before it is deleted (rule 3)."""
    if policies.inactive_topics is None or policies.retention.time_ms < 0 or policies.retention.size_bytes < 0:
        return float("inf")
    return max(float(policies.inactive_topics.after_s), policies.retention.time_ms / 1000)


class InactiveTopics:
    def __init__(
        self,
        catalog: TopicCatalog,
        topics: Topics,
        partitioned: PartitionedTopics,
        tasks: TaskOwner,
        check_s: float,
        random: random.Random,
    ) -> None:
        self.deleted = 0
        self._catalog = catalog
        self._topics = topics
        self._partitioned = partitioned
        self._tasks = tasks
        self._check_s = check_s
        self._random = random
        self._since_check_s = 0.0
        self._idle: dict[TopicName, _Idle] = {}
        self._not_before: dict[TopicName, float] = {}  # loop time; for topics that could not be deleted (rule 4)
        self._checking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<InactiveTopics {len(self._idle)} idle, {self.deleted} deleted>"

    def on_tick(self, window_s: float) -> None:
        self._since_check_s += window_s
        if self._since_check_s >= self._check_s and (self._checking is None or self._checking.done()):
            self._since_check_s = 0.0
            self._checking = self._tasks.start(self.check(), name="inactive-topics")

    async def check(self) -> None:
        """Check all open topics once, and delete those inactive for long enough."""
        now = asyncio.get_running_loop().time()
        self._not_before = {name: when for name, when in self._not_before.items() if when > now}
        for name in self._due(now):
            if name in self._not_before:
                continue
            try:
                await self._delete(name)
            except NotAllowedError as error:
                self._idle.pop(name, None)
                log.info("topic.not_inactive_any_more", extra={"topic": str(name), "reason": str(error)})
            except CepheidError as error:  # the next check tries again
                self._not_before[name] = now + self._random.uniform(0, MOST_LOOKS_LEFT_OUT * self._check_s)
                log.warning("topic.inactive_not_deleted", extra={"topic": str(name), "error": str(error)})

    def _due(self, now: float) -> list[TopicName]:
        groups: dict[TopicName, list[Topic]] = {}
        for topic in self._topics.loaded():
            if topic.policies.inactive_topics is not None:
                groups.setdefault(topic.name.base, []).append(topic)
        idle: dict[TopicName, _Idle] = {}
        due: list[TopicName] = []
        for name, group in groups.items():
            if not all(map(is_inactive, group)):
                continue
            signs, before = _signs(group), self._idle.get(name)
            if before is None or before.signs != signs:
                idle[name] = _Idle(now, signs)
                continue
            idle[name] = before
            if now - before.since >= max(inactive_for_s(topic.policies) for topic in group):
                due.append(name)
        self._idle = idle
        return due

    async def _delete(self, name: TopicName) -> None:
        found = await self._catalog.find(name)
        if found is not None and found.record.partitions:
            if await self._open_missing(name, found.record.partitions):
                return  # judged at the next check
            await self._partitioned.delete_inactive(name, Condition(is_inactive, is_inactive_elsewhere))
        else:  # plain, even if it is named like a partition
            for topic in self._topics.loaded():
                if topic.name.base == name and is_inactive(topic):
                    await self._topics.delete_open(topic.name, is_inactive)
        self.deleted += 1
        self._idle.pop(name, None)
        log.info("topic.inactive_deleted", extra={"topic": str(name)})

    async def _open_missing(self, name: TopicName, partitions: int) -> bool:
        opened = False
        for index in range(partitions):
            part = name.partition(index)
            if self._topics.find(part) is None and await self._partitioned.has_subscriptions(part):
                try:
                    await self._topics.get(part, may_create=False)
                    opened = True
                except NotOwnerError:
                    continue  # its broker is asked before anything is deleted
        return opened


def _signs(group: list[Topic]) -> tuple[int, ...]:
    subscriptions = [subscription for topic in group for subscription in topic.subscriptions.values()]
    return (
        len(group),
        sum(topic.published.entries for topic in group),
        len(subscriptions),
        sum(subscription.delivered.entries for subscription in subscriptions),
        sum(subscription.joins for subscription in subscriptions),
    )
