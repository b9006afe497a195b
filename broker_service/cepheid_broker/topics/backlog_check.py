"""Limit backlogs by age and size: messages expire; quotas hold producers back or move subscriptions.

    every check_s, for each open topic with such a policy
    time to live ──► each subscription ──► its first entries, while they are too old ──► expired
    quotas ────────► the slowest subscription ──► above? ──┬─► hold or refuse: Topic.set_publish_blocked, until it is below
                                                           └─► evict: every subscription above it moves on, exactly far enough

Rules
1. Expiry ends where an entry is too old and the next is not: the first such place after the subscription's position if publish
   times do not rise steadily. Times come from producers' clocks: an entry dated in the future retains those after it.
2. Quotas count what must be kept: bytes after the mark-delete position, holes included; seconds since the first unacknowledged
   entry was published. Readers retain nothing and are not counted; nor is `pulsar.dedup`.
3. Entries are given up by a clock that cannot jump ahead (SteadyClock) and by the policies of that moment: if these change during a
   search, its result is dropped.
4. A check costs a lookup in memory, plus one entry read where memory lacks it; a search reads at most 2 × 64 entries. Failures are
   repeated at the next check.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cepheid_broker.policies import BacklogQuota, QuotaAction, TopicPolicies
from cepheid_broker.topics.backlog import oldest_publish_time_ms
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_metadata import Position
from cepheid_ports import CepheidError, TaskOwner

if TYPE_CHECKING:
    from cepheid_broker.topics.subscription import Subscription
    from cepheid_broker.topics.topic import Topic
    from cepheid_managed_ledger import ManagedLedger

log = logging.getLogger(__name__)

_TOPICS_AT_ONCE = 32
_LOOKED_AT_IN_ONE_GO = 1_000


@dataclass(frozen=True, slots=True)
class BacklogState:
    """Backlog of the slowest subscription, where quotas need it."""

    size_bytes: int = 0
    age_s: float = 0.0


def publish_action(policies: TopicPolicies, state: BacklogState) -> QuotaAction | None:
    """Return the action on producers. Refusing takes precedence over holding: it informs the client."""
    actions = [quota.action for quota in (_above_size(policies, state), _above_age(policies, state)) if quota is not None]
    return next((action for action in (QuotaAction.REFUSE, QuotaAction.HOLD) if action in actions), None)


def _above_size(policies: TopicPolicies, state: BacklogState) -> BacklogQuota | None:
    quota = policies.size_quota
    return quota if quota is not None and state.size_bytes > quota.limit else None


def _above_age(policies: TopicPolicies, state: BacklogState) -> BacklogQuota | None:
    quota = policies.age_quota
    return quota if quota is not None and state.age_s > quota.limit else None


class BacklogChecks:
    """The backlog checks of a broker."""

    def __init__(self, loaded: Callable[[], Iterable[Topic]], check_s: float, timeout_s: float) -> None:
        self._loaded = loaded
        self._check_s = check_s
        self._timeout_s = timeout_s
        self._tasks = TaskOwner("backlog-checks")
        self._turn = asyncio.Lock()
        self.expired_entries = 0
        self.evicted_entries = 0
        self.failures = 0
        self.rounds = 0

    def __repr__(self) -> str:
        return f"<BacklogChecks {self.expired_entries} entries expired, {self.evicted_entries} evicted>"

    def start(self) -> None:
        self._tasks.start(self._run(), name="run")

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._check_s)
            await self.check_all()

    async def check_all(self) -> None:
        """Check every open topic with a policy once. Concurrent calls run one after the other."""
        async with self._turn:
            await self._check_all()
            self.rounds += 1

    async def _check_all(self) -> None:
        due: list[PersistentTopic] = []
        for number, topic in enumerate(self._loaded(), 1):
            if isinstance(topic, PersistentTopic) and not topic.closed and _has_policy(topic):
                due.append(topic)
            if number % _LOOKED_AT_IN_ONE_GO == 0:
                await asyncio.sleep(0)
        for start in range(0, len(due), _TOPICS_AT_ONCE):
            await asyncio.gather(*(self._check_quietly(topic) for topic in due[start : start + _TOPICS_AT_ONCE]))

    async def _check_quietly(self, topic: PersistentTopic) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.check(topic)
        except (CepheidError, TimeoutError) as error:
            if not topic.closed:
                self.failures += 1
                log.warning("backlog.check_failed", extra={"topic": str(topic.name), "error": str(error) or repr(error)})
        except Exception as error:  # a defect in one topic must not stop the others
            self.failures += 1
            log.exception("backlog.check_defect", extra={"topic": str(topic.name), "error": repr(error)})

    async def check(self, topic: PersistentTopic) -> None:
        """Check one topic. Raises the errors of reading and moving."""
        policies = topic.policies
        subscriptions = [found for found in topic.subscriptions.values() if not found.closed]
        if policies.message_ttl_s:
            await self._expire(topic, policies, subscriptions, policies.message_ttl_s, "expired")
        durable = [subscription for subscription in subscriptions if subscription.durable]
        await self._apply_quotas(topic, durable)

    # Time to live

    async def _expire(
        self, topic: PersistentTopic, policies: TopicPolicies, subscriptions: Sequence[Subscription], max_age_s: int, event: str
    ) -> None:
        ledger = topic.ledger
        before_ms = ledger.steady_ms() - 1_000 * max_age_s
        for subscription in subscriptions:
            if subscription.closed or not subscription.cursor.backlog_entries:
                continue
            last = await last_published_before(ledger, subscription.cursor.first_unacknowledged(), before_ms)
            if last is not None:
                await self._move(topic, policies, subscription, last, event)

    async def _move(
        self, topic: PersistentTopic, policies: TopicPolicies, subscription: Subscription, last: Position, event: str
    ) -> None:
        if topic.policies is not policies:
            return  # rule 3; the next check uses the new ones
        entries = await subscription.expire_until(last)
        if event == "expired":
            self.expired_entries += entries
        else:
            self.evicted_entries += entries
        extra = {"topic": str(topic.name), "subscription": subscription.name, "entries": entries, "position": str(last)}
        log.info(f"backlog.{event}", extra=extra)

    # Quotas

    async def _apply_quotas(self, topic: PersistentTopic, durable: Sequence[Subscription]) -> None:
        policies, ledger = topic.policies, topic.ledger
        state = await self._state(topic, policies, durable)
        size_quota, age_quota = _above_size(policies, state), _above_age(policies, state)
        if size_quota is not None and size_quota.action is QuotaAction.EVICT:
            edge = await ledger.counts.position_leaving(size_quota.limit)
            for subscription in durable:
                if ledger.count_between(subscription.cursor.mark_delete, edge):
                    await self._move(topic, policies, subscription, edge, "evicted")
        if age_quota is not None and age_quota.action is QuotaAction.EVICT:
            await self._expire(topic, policies, durable, age_quota.limit, "evicted")
        if topic.policies is policies:
            self._block(topic, publish_action(policies, state))

    async def _state(self, topic: PersistentTopic, policies: TopicPolicies, durable: Sequence[Subscription]) -> BacklogState:
        ledger = topic.ledger
        if not durable or (policies.size_quota is None and policies.age_quota is None):
            return BacklogState()
        slowest = min((subscription.cursor for subscription in durable), key=lambda cursor: ledger.ledgers.rank(cursor.mark_delete))
        size_bytes, age_s = 0, 0.0
        if policies.size_quota is not None:
            size_bytes = await ledger.counts.bytes_after(slowest.mark_delete)
        if policies.age_quota is not None:
            published_ms = await oldest_publish_time_ms(ledger, slowest)
            age_s = 0.0 if published_ms is None else max(0, ledger.steady_ms() - published_ms) / 1000
        return BacklogState(size_bytes, age_s)

    def _block(self, topic: PersistentTopic, action: QuotaAction | None) -> None:
        if topic.closed or action is topic.publish_blocked:
            return
        extra = {"topic": str(topic.name), "action": None if action is None else action.value}
        log.warning("backlog.quota_exceeded" if action is not None else "backlog.quota_kept_again", extra=extra)
        topic.set_publish_blocked(action)


def _has_policy(topic: Topic) -> bool:
    policies = topic.policies
    quotas = policies.size_quota is not None or policies.age_quota is not None
    return policies.message_ttl_s > 0 or quotas or topic.publish_blocked is not None


async def last_published_before(ledger: ManagedLedger, first: Position, before_ms: int) -> Position | None:
    """Return the last entry, from `first` on, that is too old (rule 1); None if `first` itself is not.

    Searches in doubling steps, then by halves: the place is near the start, and entries far after it must not be read.
    """
    ledgers, times = ledger.ledgers.copy(), ledger.publish_times  # a copy: a concurrent trim would renumber the entries
    end = ledgers.rank(ledger.last_confirmed)  # entries after it are not readable yet and have no age

    async def is_old(rank: int) -> bool:
        published_ms = await times.at(ledgers.at_rank(rank))
        return published_ms is None or published_ms < before_ms  # None: trimmed, as every subscription has acknowledged it

    old = ledgers.rank(first)
    if not ledgers.is_valid(first) or old > end or not await is_old(old):
        return None
    step = 1
    while old + step <= end and await is_old(old + step):
        old, step = old + step, 2 * step
    young = min(old + step, end + 1)
    while young - old > 1:
        middle = (old + young) // 2
        if await is_old(middle):
            old = middle
        else:
            young = middle
    return ledgers.at_rank(old)
