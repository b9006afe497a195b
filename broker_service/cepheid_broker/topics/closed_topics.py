"""Work of topics that no client opens: offloading, retention and expiry of what was published long ago.

    each check_s ──► every topic of our bundles that is not open ──► its records: anything due? (closed_work.py)
                                                                             └──yes──► open ► wait until it is done ► unload

Rules
1. A topic is looked at by the broker that owns its bundle, or that would be given it if a client asked. Looking takes no bundle.
2. Whether anything is due is decided by records alone: those of the topic and its chain, and of its cursors where they matter. At
   most `_TOPICS_PER_S` topics are looked at per second, so a pass over very many topics takes longer than its interval.
3. At most `at_once` topics are open for this at a time. One that a client has begun to use meanwhile stays open.
4. A topic whose work fails, or that is still due after it was open, is left alone for a time that doubles. So neither a store that
   is away nor a wrong guess has topics opened in every pass.
5. While metadata was restored from a backup and that is not confirmed, nothing is opened: it may not know what is needed.
6. What is due and not done shows in `figures`, also while the object store is away: the alert on it must not depend on clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cepheid_broker.errors import NamespaceNotFoundError, NotAllowedError, TopicNotFoundError
from cepheid_broker.ownership import NotOwnerError
from cepheid_broker.policies import QuotaAction, TopicPolicies, ledger_config
from cepheid_broker.publishing import DEDUP_CURSOR
from cepheid_broker.topics.backlog_check import BacklogChecks
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_broker.topics.topic_catalog import TopicCatalog
from cepheid_broker.topics.topic_manifests import TopicManifests
from cepheid_broker.topics.topics import Topics
from cepheid_managed_ledger import ClosedWork, ManagedLedger, closed_work
from cepheid_metadata import (
    Chain,
    CorruptRecordError,
    MetadataStore,
    NewerFormatError,
    Position,
    cursor_records,
    list_cursors,
    list_namespaces,
    list_tenants,
    read_chain,
)
from cepheid_metadata.repositories import restored_record
from cepheid_ports import CepheidError, Ports, SteadyClock, TaskOwner
from cepheid_wire import NamespaceName, TopicName

if TYPE_CHECKING:
    from cepheid_managed_ledger import ManagedLedgers

log = logging.getLogger(__name__)

_TOPICS_PER_S = 200
_FIRST_POLL_S = 0.05
_MAX_POLL_S = 2.0
"""Between looks at what a topic still has to do: a look at a chain of 20,000 ledgers takes tens of milliseconds."""
_PATIENCE_S = 60.0
"""Time without any change after which a topic is let go although something is left to do."""
_LONG_S = 900.0
"""Time after which a topic makes room for others, between two uploads. The next pass comes back to it."""
_MAX_PAUSE_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class ClosedTopicFigures:
    """What closed topics have to do, as of the last pass."""

    passes: int
    opened: int
    """Topics that were opened for their work, since the start."""
    failed: int
    """Of these, those whose work failed or was not finished."""
    waiting: int
    """Closed topics with something due."""
    failing: int
    """Of these, those whose last attempt to offload failed."""
    due_ledgers: int
    oldest_due_age_ms: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A closed topic with something due."""

    due_ledgers: int
    oldest_ended_at_ms: int
    error: str | None = None
    not_before: float = 0.0
    """Loop time of the next attempt (rule 4)."""
    pause_s: float = 0.0


class ClosedTopics:
    """`start` once, `aclose` once."""

    def __init__(
        self,
        store: MetadataStore,
        catalog: TopicCatalog,
        topics: Topics,
        managed_ledgers: ManagedLedgers,
        backlogs: BacklogChecks,
        manifests: TopicManifests | None,
        ports: Ports,
        *,
        check_s: float,
        at_once: int,
    ) -> None:
        """`check_s` 0: no passes."""
        self._store = store
        self._catalog = catalog
        self._topics = topics
        self._managed_ledgers = managed_ledgers
        self._backlogs = backlogs
        self._manifests = manifests
        self._ports = ports
        self._check_s = check_s
        self._at_once = at_once
        self._tasks = TaskOwner("closed-topics")
        self._clock: SteadyClock | None = None
        self._waiting: dict[TopicName, _Waiting] = {}
        self._passes = self._opened = self._failed = 0

    def __repr__(self) -> str:
        return f"<ClosedTopics {self._passes} passes, {len(self._waiting)} waiting, {self._opened} opened>"

    def start(self) -> None:
        if self._check_s:
            self._tasks.start(self._run(), name="run")

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def figures(self) -> ClosedTopicFigures:
        """Topics that are open at this moment are left out: they have figures of their own."""
        waiting = [found for name, found in self._waiting.items() if self._topics.find(name) is None]
        oldest_ms = min((found.oldest_ended_at_ms for found in waiting if found.due_ledgers), default=None)
        return ClosedTopicFigures(
            passes=self._passes,
            opened=self._opened,
            failed=self._failed,
            waiting=len(waiting),
            failing=sum(found.error is not None for found in waiting),
            due_ledgers=sum(found.due_ledgers for found in waiting),
            oldest_due_age_ms=0 if oldest_ms is None else max(0, self._now_ms() - oldest_ms),
        )

    def _now_ms(self) -> int:
        if self._clock is None:
            self._clock = SteadyClock(self._ports)
        return self._clock.now_ms()

    async def _run(self) -> None:
        self._now_ms()  # from here on a wall clock that jumps ahead makes nothing old
        await asyncio.sleep(self._ports.random.uniform(0.1, 1.0) * self._check_s)  # not all brokers of a cluster at once
        while True:
            try:
                await self.check()
            except (CepheidError, TimeoutError) as error:  # metadata is away: the next pass begins again
                log.warning("closed_topics.pass_failed", extra={"error": str(error) or repr(error)})
            except Exception as error:  # a defect must not end the passes for good
                log.exception("closed_topics.defect", extra={"error": repr(error)})
            await asyncio.sleep(self._check_s)

    async def check(self) -> None:
        """Look once at every closed topic of ours, and do what is due. Raises what the metadata store raises."""
        if await restored_record(self._store).exists(None):
            return  # rule 5
        turns = asyncio.Semaphore(self._at_once)
        seen: dict[TopicName, None] = {}
        for tenant in await list_tenants(self._store):
            for local_name in await list_namespaces(self._store, tenant):
                try:
                    await self._check_namespace(NamespaceName(tenant, local_name), turns, seen)
                except NamespaceNotFoundError:
                    continue  # it was deleted meanwhile
        for _ in range(self._at_once):  # until all that were opened are done
            await turns.acquire()
        self._waiting = {name: found for name, found in self._waiting.items() if name in seen}
        self._passes += 1

    async def _check_namespace(self, namespace: NamespaceName, turns: asyncio.Semaphore, seen: dict[TopicName, None]) -> None:
        async for policies in self._catalog.topics_with_policies(namespace):
            for name in await self._topics.ownership.would_own(list(policies)):
                await asyncio.sleep(1 / _TOPICS_PER_S)  # rule 2
                if not self._topics.is_loaded(name):
                    await self._check_topic(name, policies[name], turns, seen)

    async def _check_topic(
        self, name: TopicName, policies: TopicPolicies, turns: asyncio.Semaphore, seen: dict[TopicName, None]
    ) -> None:
        try:
            work = await self._work_of(name, policies)
        except (CorruptRecordError, NewerFormatError) as error:  # of this topic alone
            log.warning("closed_topic.not_readable", extra={"topic": str(name), "error": str(error)})
            return
        if not work.reasons and not work.due:
            return
        seen[name] = None
        before = self._waiting.get(name) or _Waiting(0, 0)
        oldest_ms = work.due[0].closed_at_ms if work.due else 0
        self._waiting[name] = replace(before, due_ledgers=len(work.due), oldest_ended_at_ms=oldest_ms)
        if work.reasons and asyncio.get_running_loop().time() >= before.not_before:
            await turns.acquire()
            self._tasks.start(self._visit(name, policies, work, turns), name=f"visit {name}")

    async def _work_of(self, name: TopicName, policies: TopicPolicies) -> ClosedWork:
        found = await read_chain(self._store, name)
        if found is None or not found.record.ledgers:
            return ClosedWork()
        work = self._decide(found.record, policies, None)
        if work.depends_on_positions:
            work = self._decide(found.record, policies, await self._positions(name))
        return work

    def _decide(self, chain: Chain, policies: TopicPolicies, positions: Mapping[str, Position] | None) -> ClosedWork:
        return closed_work(
            chain,
            ledger_config(policies),
            self._now_ms(),
            expire_after_ms=_expire_after_ms(policies),
            positions=positions,
            not_expired=(DEDUP_CURSOR,),
            can_offload=self._managed_ledgers.has_object_stores,
        )

    async def _positions(self, name: TopicName) -> dict[str, Position]:
        records = cursor_records(self._store)
        positions: dict[str, Position] = {}
        for cursor in await list_cursors(self._store, name):
            found = await records.get((name, cursor))
            if found is not None:
                positions[cursor] = found.record.mark_delete
        return positions

    # Doing it

    async def _visit(self, name: TopicName, policies: TopicPolicies, work: ClosedWork, turns: asyncio.Semaphore) -> None:
        error: str | None = None
        left = work
        try:
            if not self._topics.is_loaded(name):
                self._opened += 1
                left, error = await self._maintain(name, policies)
        except (TopicNotFoundError, NamespaceNotFoundError, NotOwnerError):
            left = ClosedWork()  # it was deleted, or another broker has it: that one does it
        except (CepheidError, TimeoutError) as failure:
            error = str(failure) or repr(failure)
        finally:
            turns.release()
        self._note_visit(name, work, left, error)

    def _note_visit(self, name: TopicName, work: ClosedWork, left: ClosedWork, error: str | None) -> None:
        fields = {"topic": str(name), "reason": ", ".join(reason.value for reason in work.reasons)}
        if error is None and not left.reasons:
            if not left.due:
                self._waiting.pop(name, None)
            log.info("closed_topic.maintained", extra=fields)
            return
        if error is None and len(left.due) < len(work.due):
            return  # a long history: the next pass goes on with it
        self._failed += 1
        before = self._waiting.get(name) or _Waiting(len(work.due), work.due[0].closed_at_ms if work.due else 0)
        pause_s = min(_MAX_PAUSE_S, 2 * before.pause_s or self._check_s or _PATIENCE_S)
        not_before = asyncio.get_running_loop().time() + pause_s
        self._waiting[name] = replace(before, error=error, pause_s=pause_s, not_before=not_before)
        still = ", ".join(reason.value for reason in left.reasons)
        log.warning("closed_topic.not_maintained", extra={**fields, "error": error or f"left to do: {still}", "retry_s": pause_s})

    async def _maintain(self, name: TopicName, policies: TopicPolicies) -> tuple[ClosedWork, str | None]:
        """Open the topic, let it do its work, and unload it. Return what is left to do, and why offloading failed."""
        topic = await self._topics.get(name, may_create=False)
        assert isinstance(topic, PersistentTopic), f"{name} has a chain"
        ledger = topic.ledger
        try:
            if _expire_after_ms(policies) is not None:
                await self._backlogs.check(topic)
                await asyncio.gather(*(cursor.saved() for cursor in list(ledger.cursors.values())))
            await self._wait_until_done(topic)
            positions = {cursor: found.mark_delete for cursor, found in ledger.cursors.items()}
            return self._decide(_ended(ledger), topic.policies, positions), ledger.offload_statistics().last_error
        finally:
            await self._let_go(topic)

    async def _wait_until_done(self, topic: PersistentTopic) -> None:
        loop = asyncio.get_running_loop()
        began = changed_at = loop.time()
        before: object = None
        poll_s = _FIRST_POLL_S
        while not topic.closed and (topic.ledger.has_maintenance or self._is_manifest_late(topic)):
            uploading = topic.ledger.uploading_ledger_id
            state = topic.ledger.chain, uploading
            now = loop.time()
            if state != before:
                if before is not None and now - began >= _LONG_S:
                    return
                before, changed_at = state, now
            elif uploading is None and now - changed_at >= _PATIENCE_S:
                return
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)
            topic.ledger.tick()

    def _is_manifest_late(self, topic: PersistentTopic) -> bool:
        """Whether the bucket does not say yet what was offloaded. A closed topic writes no manifest."""
        if self._manifests is None:
            return False
        self._manifests.on_tick()
        return self._manifests.is_late(topic)

    async def _let_go(self, topic: PersistentTopic) -> None:
        try:
            # In one step: a client that connects from here on waits for the topic to be opened again.
            self._topics.close_to_newcomers([topic.name], lambda found: found is topic and not found.in_use)
        except NotAllowedError:
            return  # rule 3
        await self._topics.unload(topic.name, "its work without clients is done")


def _expire_after_ms(policies: TopicPolicies) -> int | None:
    """The age from which some policy gives messages up."""
    limits = [policies.message_ttl_s] if policies.message_ttl_s else []
    if policies.age_quota is not None and policies.age_quota.action is QuotaAction.EVICT:
        limits.append(policies.age_quota.limit)
    return 1_000 * min(limits) if limits else None


def _ended(ledger: ManagedLedger) -> Chain:
    """The chain without the ledger that opening the topic added."""
    chain = ledger.chain.replace(deletions=())  # an open topic deletes these by itself
    return chain.replace(ledgers=tuple(each for each in chain.ledgers if not each.is_open))
