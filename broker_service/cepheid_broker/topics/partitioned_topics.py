"""Growing and deleting partitioned topics as a whole. Only their partitions can be opened; the topic itself is just a record.

    grow     new partitions get the subscriptions ──► the record has the new count ──► subscriptions created meanwhile
    delete   the record is marked ──► partitions, one by one ──► the record is deleted

Rules
1. Nothing can be published to a new partition before it has the durable subscriptions of partition 0, from its first entry on: a
   consumer that discovers the partition later misses nothing. The new count makes it known, so it is written second.
2. A marked topic and its partitions cannot be opened, created or grown: a client that was disconnected and reconnects is refused,
   and cannot create a deleted partition again as a plain topic. The record is deleted last.
3. An interrupted operation is repeated by asking again; deleting also finds what an interrupted growth left. An interrupted
   deletion (the record is marked, and no task works on it) is finished: the mark is set once the decision is final.
4. Without force no client is disconnected: partitions refuse new clients in the same step in which all of them are found idle.
   Those served by other brokers are checked just before: a client that connects between that check and the mark is disconnected.
5. A partition that clients know is changed by the broker that serves it (remote_parts.py); one that is not known yet, or no longer,
   by the broker that works on its topic.
6. Partitions are removed by the broker that owns the topic's own name, one removal at a time: a second broker could delete what was
   created again after the first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError, TopicChangedError, TopicNotFoundError
from cepheid_broker.ownership import RemoteParts, There, clients_in
from cepheid_broker.publishing import DEDUP_CURSOR
from cepheid_broker.topics.topic import Topic
from cepheid_broker.topics.topic_catalog import TopicCatalog, being_deleted
from cepheid_broker.topics.topics import Topics
from cepheid_managed_ledger import ChainNotDeletableError, finish
from cepheid_metadata import (
    BadVersionError,
    Found,
    MetadataStore,
    TopicRecord,
    chain_records,
    cursor_records,
    list_chains,
    list_cursors,
    list_topics,
)
from cepheid_ports import TaskOwner
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Partitions that one call works on concurrently."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition of a deletion, checked on open partitions, or on the statistics of those that other brokers serve."""

    holds: Callable[[Topic], bool]
    holds_elsewhere: Callable[[Mapping[str, Any]], bool]


NOT_IN_USE = Condition(lambda part: not part.in_use, lambda stats: clients_in(stats) == 0)


class PartitionedTopics:
    def __init__(
        self,
        store: MetadataStore,
        catalog: TopicCatalog,
        topics: Topics,
        remote: RemoteParts,
        tasks: TaskOwner,
        timeout_s: float,
    ) -> None:
        self._remote = remote
        self._store = store
        self._catalog = catalog
        self._topics = topics
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._deleting: dict[TopicName, asyncio.Task[Exception | None]] = {}
        self._turns: dict[TopicName, tuple[asyncio.Lock, int]] = {}  # lock and number of users

    def __repr__(self) -> str:
        return f"<PartitionedTopics {len(self._deleting)} being deleted>"

    # Growing

    async def grow(self, topic: TopicName, partitions: int) -> None:
        """Grow the topic. Raises TopicNotFoundError, NotAllowedError (fewer, not partitioned), TooManyError, TopicChangedError."""
        now = (await self._require(topic)).record.partitions
        if partitions < now:
            raise NotAllowedError(f"topic {topic} has {now} partitions; it cannot have only {partitions}", topic=str(topic))
        if partitions > now:
            await self._catalog.require_room(topic, partitions - now)
            await finish(self._tasks, self._grow(topic, now, partitions), name=f"grow {topic}")

    async def _grow(self, topic: TopicName, before: int, partitions: int) -> None:
        async with self._turn_on(topic):
            await self._grow_alone(topic, before, partitions)

    async def _grow_alone(self, topic: TopicName, before: int, partitions: int) -> None:
        found = await self._require_count(topic, before)
        new = [topic.partition(index) for index in range(before, partitions)]
        await self._prepare(topic, new)
        while True:
            try:
                await self._catalog.replace(topic, found, partitions=partitions)
                break
            except BadVersionError:
                found = await self._require_count(topic, before)
        log.info("topic.grown", extra={"topic": str(topic), "partitions": partitions, "before": before})
        await self._prepare_known(topic, new)  # for subscriptions created on partition 0 since the first pass

    async def create_missing(self, topic: TopicName) -> None:
        """Create partitions that were never opened, with the subscriptions of partition 0. Raises as `grow`."""
        found = await self._require(topic)
        chains = chain_records(self._store)  # only the first record: a chain without ledgers has no further pages
        parts = [topic.partition(index) for index in range(1, found.record.partitions)]
        missed = [part for part in parts if (chain := await chains.get(part)) is None or not chain.record.ledgers]
        await finish(self._tasks, self._prepare_alone(topic, missed), name=f"create partitions of {topic}")

    async def _prepare_alone(self, topic: TopicName, parts: Iterable[TopicName]) -> None:
        async with self._turn_on(topic):
            await self._require(topic)
            await self._prepare_known(topic, parts)

    async def _prepare(self, topic: TopicName, parts: Iterable[TopicName]) -> None:
        """Give partitions that clients do not know yet their missing subscriptions (rule 1)."""
        for part, missing in (await self._missing_subscriptions(topic, parts)).items():
            await self._topics.prepare(part, missing)

    async def _prepare_known(self, topic: TopicName, parts: Iterable[TopicName]) -> None:
        """Do the same for partitions that clients may be connected to (rule 5)."""
        missing = await self._missing_subscriptions(topic, parts)
        elsewhere = await self._remote.elsewhere(missing)
        for part, subscriptions in missing.items():
            if part in elsewhere:
                await self._remote.add_subscriptions(elsewhere[part], part, subscriptions)
            else:
                await self._topics.prepare(part, subscriptions)

    async def _missing_subscriptions(
        self, topic: TopicName, parts: Iterable[TopicName]
    ) -> dict[TopicName, dict[str, dict[str, str]]]:
        """Return, by partition, the subscriptions of partition 0 that it lacks."""
        if not topic.is_persistent:
            return {}
        subscriptions = await self._durable_subscriptions(topic.partition(0))
        missing: dict[TopicName, dict[str, dict[str, str]]] = {}
        for part in parts:
            there = await list_cursors(self._store, part)
            if found := {name: properties for name, properties in subscriptions.items() if name not in there}:
                missing[part] = found
        return missing

    async def _durable_subscriptions(self, part: TopicName) -> dict[str, dict[str, str]]:
        """Return name → properties, from the records, so that no topic is opened."""
        cursors = cursor_records(self._store)
        subscriptions: dict[str, dict[str, str]] = {}
        for name in await list_cursors(self._store, part):
            if name != DEDUP_CURSOR and (found := await cursors.get((part, name))) is not None:
                subscriptions[name] = found.record.subscription_properties
        return subscriptions

    async def has_subscriptions(self, part: TopicName) -> bool:
        """Return whether the records show a durable subscription."""
        return bool(await self._durable_subscriptions(part))

    # Deleting

    async def is_marked(self, topic: TopicName) -> bool:
        """Return whether the topic's deletion has begun and not finished."""
        found = await self._catalog.find(topic)
        return found is not None and bool(found.record.deleted)

    async def delete(self, topic: TopicName, *, force: bool = False) -> None:
        """Delete the topic with its partitions; a call during a running deletion waits for it.

        Raises TopicNotFoundError; NotAllowedError (in use, and not `force`; not partitioned); ServiceNotReadyError if it takes long
        and continues in the background: ask again. Repeat it after any other error.
        """
        await self._delete_once(topic, None if force else NOT_IN_USE)

    async def delete_inactive(self, topic: TopicName, condition: Condition) -> None:
        """Delete the topic if `condition` holds for all open partitions, and the others have no subscription. Raises as
        `delete`."""
        await self._delete_once(topic, condition, unsubscribed=True)

    def finish_deleting(self, topic: TopicName) -> None:
        """Continue the deletion of a topic found marked, unless it is running here: the broker that began it has crashed."""
        if topic not in self._deleting:
            self._start_deleting(topic, None, unsubscribed=False)

    async def _delete_once(self, topic: TopicName, condition: Condition | None, *, unsubscribed: bool = False) -> None:
        if (running := self._deleting.get(topic)) is None:
            await self._require(topic, deleted_too=True)
            running = self._deleting.get(topic) or self._start_deleting(topic, condition, unsubscribed=unsubscribed)
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome = await asyncio.shield(running)
        except TimeoutError:
            message = f"topic {topic} is still being deleted after {self._timeout_s:g} s; ask again"
            raise ServiceNotReadyError(message, topic=str(topic)) from None
        if outcome is not None:
            raise outcome

    def _start_deleting(
        self, topic: TopicName, condition: Condition | None, *, unsubscribed: bool
    ) -> asyncio.Task[Exception | None]:
        work = self._delete_alone(topic, condition, unsubscribed=unsubscribed)
        task = self._deleting[topic] = self._tasks.start(work, name=f"delete {topic}")
        return task

    async def _delete_alone(self, topic: TopicName, condition: Condition | None, *, unsubscribed: bool) -> Exception | None:
        """Return an error instead of raising it: all waiting callers receive it, and the task itself has not failed."""
        try:
            async with self._turn_on(topic):
                with self._topics.hold(topic):
                    await self._delete(topic, condition, unsubscribed=unsubscribed)
        except NotAllowedError as error:
            return error
        except Exception as error:
            log.warning("topic.delete_failed", extra={"topic": str(topic), "error": str(error), "hint": "delete it again"})
            return error
        finally:
            del self._deleting[topic]
        return None

    async def _delete(self, topic: TopicName, condition: Condition | None, *, unsubscribed: bool) -> None:
        found = await self._require(topic, deleted_too=True)
        parts = [topic.partition(index) for index in range(found.record.partitions)]
        if condition is not None and not found.record.deleted:
            ours = await self._require_elsewhere(parts, condition)
            await self._topics.wait_until_settled(ours)
            if unsubscribed:
                await self._require_unsubscribed(ours)
            self._topics.close_to_newcomers(ours, condition.holds)
        try:
            await self._mark(topic)
        except BaseException:
            for part in parts:  # they refuse clients now
                await self._topics.unload(part, "its deletion failed")
            raise
        if (there := await self._remote.owner(topic)) is not None:  # rule 6
            await self._remote.finish_deleting(there, topic)
            return
        await self._remove_all(topic, parts, await self._remote.elsewhere(parts))
        await self._remove_all(topic, await self._remains(topic, parts), {})
        await self._topics.remove(topic, topic)
        log.info("topic.partitions_deleted", extra={"topic": str(topic), "partitions": found.record.partitions})

    async def _remove_all(self, topic: TopicName, parts: Iterable[TopicName], elsewhere: Mapping[TopicName, There]) -> None:
        """Remove these partitions while this broker owns the topic's name (rule 6); its next owner continues, and may have
        finished."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def remove(part: TopicName) -> None:
            async with turns:
                if part in elsewhere:
                    await self._remote.remove(elsewhere[part], part)
                else:
                    await self._topics.remove(part, topic)

        outcomes = await asyncio.gather(*map(remove, parts), return_exceptions=True)
        if (error := next((outcome for outcome in outcomes if outcome is not None), None)) is not None:
            if isinstance(error, ChainNotDeletableError):
                message = f"the deletion of topic {topic} has begun, and others of its partitions may be gone: {error}"
                raise ChainNotDeletableError(message, **error.facts) from error
            raise error

    async def _require_elsewhere(self, parts: Iterable[TopicName], condition: Condition) -> list[TopicName]:
        """Check the condition on partitions served by other brokers (rule 4). Return those served here."""
        names = list(parts)
        elsewhere = await self._remote.elsewhere(names)
        turns = asyncio.Semaphore(AT_ONCE)

        async def require(part: TopicName, there: There) -> None:
            async with turns:
                stats = await self._remote.stats(there, part)
                if not condition.holds_elsewhere(stats):
                    message = f"topic {part} is in use at broker {there.broker_id} by {clients_in(stats)} clients"
                    raise NotAllowedError(message, topic=str(part), broker=there.broker_id)

        outcomes = await asyncio.gather(*(require(part, there) for part, there in elsewhere.items()), return_exceptions=True)
        if (error := next((outcome for outcome in outcomes if outcome is not None), None)) is not None:
            raise error
        return [part for part in names if part not in elsewhere]

    async def _require_unsubscribed(self, parts: Iterable[TopicName]) -> None:
        for part in parts:
            if self._topics.find(part) is None and await self.has_subscriptions(part):
                raise NotAllowedError(f"topic {part} is closed and has subscriptions whose backlog is unknown", topic=str(part))

    async def _mark(self, topic: TopicName) -> None:
        while not (found := await self._require(topic, deleted_too=True)).record.deleted:
            try:
                await self._catalog.replace(topic, found, deleted=True)
            except BadVersionError:
                continue

    async def _remains(self, topic: TopicName, parts: list[TopicName]) -> list[TopicName]:
        """Return partitions prepared by an interrupted growth: they have a chain, but are above the count and have no record of
        their own, as a plain topic of such a name would."""
        namespace = topic.namespace
        chains = await list_chains(self._store, namespace.tenant, namespace.local_name, topic.domain)
        plain = await list_topics(self._store, namespace.tenant, namespace.local_name, topic.domain)
        known = {*parts, *plain}
        return [found for found in chains if found.is_partition and found.base == topic and found not in known]

    # Checks

    @asynccontextmanager
    async def _turn_on(self, topic: TopicName) -> AsyncIterator[None]:
        """Allow one growth or deletion at a time, so that neither misses what the other prepares."""
        lock, wanted = self._turns.get(topic, (asyncio.Lock(), 0))
        self._turns[topic] = lock, wanted + 1
        try:
            async with lock:
                yield
        finally:
            lock, wanted = self._turns[topic]
            self._turns[topic] = lock, wanted - 1
            if wanted == 1:
                del self._turns[topic]

    async def _require(self, topic: TopicName, *, deleted_too: bool = False) -> Found[TopicRecord]:
        found = None if topic.is_partition else await self._catalog.find(topic)
        if found is None:
            raise TopicNotFoundError(f"topic {topic} does not exist", topic=str(topic))
        if found.record.partitions == 0:
            raise NotAllowedError(f"topic {topic} is not partitioned", topic=str(topic))
        if found.record.deleted and not deleted_too:
            raise being_deleted(topic)
        return found

    async def _require_count(self, topic: TopicName, partitions: int) -> Found[TopicRecord]:
        found = await self._require(topic)
        if found.record.partitions != partitions:
            message = f"topic {topic} was grown to {found.record.partitions} partitions by another request meanwhile"
            raise TopicChangedError(message, topic=str(topic))
        return found
