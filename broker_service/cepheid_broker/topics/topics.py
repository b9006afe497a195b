"""The open topics of this broker: each is opened once, however many requests ask for it, then closed, unloaded or deleted.

    get ──► ours? ──► open already? ──► opening? wait with the others ──► its record and policies ──► ManagedLedgers.open ──► Topic
                                                                             └──none──► catalog: may it be created? ──► again
A failed topic is opened again by the next request for it, after a pause that doubles while opening keeps failing.

Only topics that this broker owns are opened (ownership.py), except partitions that are prepared before they are published. Topics
that it no longer owns are closed: in order when ownership is handed over, at once and without writing to the stores when it was
lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from cepheid_broker.dispatch import CatchUpTurns, ReadAheadBudget, SharedDispatch
from cepheid_broker.errors import NamespaceNotFoundError, NotAllowedError, ServiceNotReadyError, TopicNotFoundError
from cepheid_broker.ownership import OPEN_LIMIT_S, Bundle, Heir, Ownership, SoleOwnership
from cepheid_broker.policies import PolicyFollower, TopicPolicies, ledger_config
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics.non_persistent_topic import NonPersistentTopic
from cepheid_broker.topics.opening_turns import OpeningTurns
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_broker.topics.topic import Topic
from cepheid_broker.topics.topic_catalog import TopicCatalog, being_deleted
from cepheid_broker.traffic import BrokerTraffic
from cepheid_managed_ledger import ManagedLedgerFailedError
from cepheid_metadata import EARLIEST, MetadataError
from cepheid_ports import CepheidError, Ports, TaskOwner
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid_managed_ledger import ManagedLedgers

log = logging.getLogger(__name__)

RETRY_MAX_S = 10.0
_UNLOADED_AT_ONCE = 64
MOVED_AT_ONCE = 8
"""Topics in one group of a hand-over. A larger group needs fewer round trips, but producers wait for each other's topics."""


class Topics:
    def __init__(
        self,
        catalog: TopicCatalog,
        managed_ledgers: ManagedLedgers,
        policies: PolicyFollower,
        settings: BrokerSettings,
        cluster: str,
        tasks: TaskOwner,
        ports: Ports,
        ownership: Ownership | None = None,
    ) -> None:
        self.ownership = ownership or SoleOwnership()
        self.ownership.user = self
        self.totals = BrokerTraffic()
        self.dispatch = SharedDispatch(
            ReadAheadBudget(settings.dispatch.read_ahead_total_bytes),
            CatchUpTurns(settings.dispatch.catch_up_share, self.totals, ports.seconds),
        )
        self._catalog = catalog
        self._managed_ledgers = managed_ledgers
        self._policies = policies
        self._settings = settings
        self._tasks = tasks
        self._open: dict[TopicName, Topic] = {}
        self._opening: dict[TopicName, asyncio.Task[Topic | Exception | None]] = {}
        self._turns = OpeningTurns()
        self._hasty: dict[TopicName, None] = {}  # of hand-overs: producers wait until the old owner knows that they are open
        self._closing: dict[TopicName, asyncio.Task[Exception | None]] = {}
        self._retry: dict[TopicName, tuple[float, float]] = {}  # earliest loop time of the next attempt; the pause before it
        self._name_prefix = f"{cluster}-{ports.random.getrandbits(40):010x}"
        self._names_given = 0
        self._stopping = False
        self.failures = 0
        self._held: dict[TopicName, None] = {}
        self._prepared: dict[TopicName, None] = {}  # opened without being owned
        self._removed = 0
        self._moving = asyncio.Semaphore(1)
        self.on_deleting: list[Callable[[TopicName], Awaitable[None]]] = []
        """Awaited before a topic's record is deleted; each hook must be repeatable after an error or interruption."""

    def __repr__(self) -> str:
        return f"<Topics {len(self._open)} open, {len(self._opening)} opening, {len(self._closing)} closing>"

    def new_producer_name(self) -> str:
        """Return a name that stays unique in the cluster across restarts: clients reconnect with the name they got (protocol.md
        §9.2)."""
        self._names_given += 1
        return f"{self._name_prefix}-{self._names_given}"

    def loaded(self) -> Iterable[Topic]:
        return list(self._open.values())

    def is_loaded(self, name: TopicName) -> bool:
        """Return whether the topic is open, or is being opened or closed."""
        return name in self._open or name in self._opening or name in self._closing

    def find(self, name: TopicName) -> Topic | None:
        """Return the topic if it is open."""
        return self._open.get(name)

    async def get(self, name: TopicName, *, may_create: bool) -> Topic:
        """Return the topic; open it, and create it if allowed. Raises NotOwnerError and the errors of `TopicCatalog.require` and
        of opening a managed ledger."""
        exists = asked = False
        while True:
            self._check_not_stopping(name)
            if not self.ownership.owns(name):
                await self.ownership.require(name)
                continue  # ownership may be lost again during the await
            if name in self._held or name.base in self._held:
                raise being_deleted(name)
            if (topic := self._open.get(name)) is not None and not topic.closed:
                return topic
            if (closing := self._closing.get(name)) is not None:
                await asyncio.wait([closing])
                exists = False  # it may have been deleted
            elif exists or not (asked or name.is_partition):
                if (topic := await self._opened_once(name, exists=exists)) is not None:
                    return topic
                asked = True
            else:
                removed = self._removed
                await self._catalog.require(name, may_create=may_create)
                exists = removed == self._removed  # else it may have been deleted meanwhile

    async def _opened_once(self, name: TopicName, *, exists: bool) -> Topic | None:
        """Open the topic once for all callers. None if `exists` is false and no record was found: ask the catalog."""
        opening = self._opening.get(name)
        if opening is None:
            opening = self._opening[name] = self._tasks.start(self._load(name, exists), name=f"open {name}")
        # Shielded: a client that gives up must not cancel the opening that others wait for.
        outcome = await asyncio.shield(opening)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _load(self, name: TopicName, exists: bool) -> Topic | Exception | None:
        """Return an error instead of raising it: all waiting callers receive it, and the task itself has not failed."""
        turn = None
        try:
            if name not in self._hasty and name not in self._retry:  # one that failed before pauses, and may fail again
                turn = await self._turns.take(name)
                self._check_not_stopping(name)
                self._check_owned(name)  # opening a topic that another broker owns by now would stop it there
            if (policies := await self._follow(name, exists)) is None:
                return None
            return await self._load_governed(name, policies)
        except Exception as error:
            self.failures += 1
            # A topic that was given away meanwhile did not fail: if it comes back, open it at once.
            retry_s = self._plan_retry(name) if self.ownership.owns(name) else 0.0
            log.warning("topic.open_failed", extra={"topic": str(name), "error": str(error), "retry_s": retry_s})
            return error
        finally:
            self._opening.pop(name, None)
            if turn is not None:
                self._turns.give_back(turn)

    async def _follow(self, name: TopicName, exists: bool) -> TopicPolicies | None:
        """Return the effective policies and follow them from now on; None, without following, if `_opened_once` is to return
        None."""
        try:
            policies = await self._policies.follow(name)
        except (NamespaceNotFoundError, MetadataError):
            if exists:
                raise
            return None
        if exists or self._policies.shows_topic(name):
            return policies
        self._policies.release(name)
        return None

    async def _load_governed(self, name: TopicName, policies: TopicPolicies) -> Topic:
        """Load the topic; it receives every change of its policies until it leaves `_open`."""
        try:
            topic = await self._load_topic(name, policies)
        except BaseException:
            self._policies.release(name)
            raise
        self._policies.attach(topic)
        return topic

    async def _load_topic(self, name: TopicName, policies: TopicPolicies) -> Topic:
        await self._wait_for_retry(name)
        if not name.is_persistent:
            self._check_owned(name)
            return self._add(NonPersistentTopic(name, policies, self._settings, self._tasks, self.totals))
        ledger = await self._managed_ledgers.open(name, ledger_config(policies))
        topic = PersistentTopic(
            name,
            ledger,
            policies,
            self._settings,
            self.dispatch,
            self._tasks,
            self.totals,
            on_failed=self._on_topic_failed,
        )
        try:
            await topic.open()
            self._check_not_stopping(name)
            self._check_owned(name)
        except BaseException:
            await asyncio.shield(self._start_closing(name, ledger.aclose))
            raise
        log.info("topic.opened", extra={"topic": str(name), "last_confirmed": str(ledger.last_confirmed)})
        return self._add(topic)

    def _check_not_stopping(self, name: TopicName) -> None:
        if self._stopping:
            raise ServiceNotReadyError(f"topic {name} is being unloaded: the broker stops", topic=str(name))

    def _check_owned(self, name: TopicName) -> None:
        if name not in self._prepared and not self.ownership.owns(name):
            raise ServiceNotReadyError(f"topic {name} is being unloaded: its bundle moved while it was opened", topic=str(name))

    def _add(self, topic: Topic) -> Topic:
        self._open[topic.name] = topic
        return topic

    async def _wait_for_retry(self, name: TopicName) -> None:
        if name in self._retry:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, self._retry[name][0] - now))

    def _plan_retry(self, name: TopicName) -> float:
        now = asyncio.get_running_loop().time()
        last_at, last_pause_s = self._retry.get(name, (0.0, 0.0))
        recent = now - last_at < RETRY_MAX_S
        pause_s = min(2 * last_pause_s, RETRY_MAX_S) if recent and last_pause_s else self._settings.topic_retry_s
        if len(self._retry) >= 10_000:  # entries of topics that were not requested again
            self._retry.clear()
        self._retry[name] = (now + pause_s, pause_s)
        return pause_s

    def _on_topic_failed(self, topic: Topic, error: BaseException) -> None:
        self.failures += 1
        if topic.published.entries:
            self._retry.pop(topic.name, None)  # it served clients: pauses grow only while opening leads to nothing
        if self.ownership.owns(topic.name):
            self._plan_retry(topic.name)
        if self._open.get(topic.name) is topic:
            del self._open[topic.name]
            self._policies.release(topic.name)
            self._start_closing(topic.name, topic.ledger.aclose)

    def _start_closing(self, name: TopicName, work: Callable[[], Awaitable[None]]) -> asyncio.Task[Exception | None]:
        async def run() -> Exception | None:
            """Return the stores' errors to the waiting callers: an outage is not a bug here."""
            try:
                await work()
            except (CepheidError, TimeoutError) as error:
                log.warning("topic.close_failed", extra={"topic": str(name), "error": str(error)})
                return error
            finally:
                self._closing.pop(name, None)
            return None

        task = self._tasks.start(run(), name=f"close {name}")
        self._closing[name] = task
        return task

    async def _close(self, name: TopicName, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` to its end, even if the caller gives up. Raises the stores' errors."""
        if (error := await asyncio.shield(self._start_closing(name, work))) is not None:
            raise error

    async def unload(self, name: TopicName, reason: str = "the topic is unloaded") -> None:
        """Close the topic in order; the next request opens it again. Succeeds if it is not open."""
        topic = self._open.pop(name, None)
        if topic is None:
            return
        self._policies.release(name)
        await self._close(name, partial(topic.unload, reason))
        log.info("topic.unloaded", extra={"topic": str(name), "reason": reason})

    async def delete(self, name: TopicName, *, force: bool = False) -> None:
        """Delete the topic with everything in it. Raises TopicNotFoundError; NotOwnerError; NotAllowedError if it is in use
        (unless `force`); ServiceNotReadyError if it takes long and continues in the background. Repeat it after any other error."""
        if await self._catalog.partitions(name) is None:
            raise TopicNotFoundError(f"topic {name} does not exist", topic=str(name))
        await self.ownership.require(name)
        await self._wait_until_settled(name)
        if not force:
            self.close_to_newcomers([name], lambda topic: not topic.in_use)
        await self._remove_in_time(name)

    # Bundles (BundleUser)

    def drop_unowned(self) -> None:
        """Close the topics that this broker no longer owns.

        There is no grace period: another broker may already serve them. Pending publishes fail, and clients look the topics up
        again.
        """
        reason = "its bundle moved to another broker"
        for topic in self.loaded():
            if topic.name in self._prepared or self.ownership.keeps(topic.name):
                continue
            if isinstance(topic, PersistentTopic):
                error = ManagedLedgerFailedError(f"{topic.name}: {reason}", topic=str(topic.name))
                topic.ledger.fail(error)  # its failure hooks remove it from `_open`
            if self._open.get(topic.name) is topic:
                del self._open[topic.name]
                self._policies.release(topic.name)
                topic.close_clients(reason)

    async def unload_bundle(self, bundle: Bundle, reason: str) -> None:
        """Unload until no topic of the bundle is left, or stop if they may be opened meanwhile: a sole broker's topics return at
        once."""
        turns = asyncio.Semaphore(_UNLOADED_AT_ONCE)

        async def unload(name: TopicName) -> None:
            async with turns:
                await self._wait_until_settled(name)
                await self._unload_quietly(name, reason)

        def left() -> list[TopicName]:
            known = dict.fromkeys((*self._open, *self._opening, *self._closing))
            return [name for name in known if bundle.holds(name) and name not in self._prepared]

        while names := left():
            self._turns.hurry(bundle.holds)
            await asyncio.gather(*map(unload, names))
            if any(map(self.ownership.owns, names)):
                return

    async def hand_over(self, bundle: Bundle, heir: Heir, reason: str) -> bool:
        """Hand the topics over in groups, those with clients first, so that a producer waits only for its own group. Raises as
        `Heir`."""
        self._turns.hurry(bundle.holds)
        await self.wait_until_settled([name for name in (*self._opening, *self._closing) if bundle.holds(name)])
        names = [name for name, topic in self._open.items() if bundle.holds(name) and not topic.closed]
        names = [name for name in names if name not in self._prepared]
        names.sort(key=lambda name: not self._open[name].in_use)
        if names:
            await heir.prepare()
        for start in range(0, len(names), MOVED_AT_ONCE):
            async with self._moving:
                heir.check_time()
                if not await self._move(names[start : start + MOVED_AT_ONCE], heir, reason):
                    return False
        return True

    async def _move(self, names: Iterable[TopicName], heir: Heir, reason: str) -> bool:
        """Move these topics; whatever fails, their clients are closed so that they reconnect."""
        topics = {name: topic for name in names if (topic := self._open.get(name)) is not None and not topic.closed}
        stops = {}
        for name, topic in topics.items():
            del self._open[name]
            self._policies.release(name)
            stops[name] = self._start_closing(name, topic.stop)
        opened: list[TopicName] = []
        try:
            if stops:
                await asyncio.wait(stops.values(), timeout=OPEN_LIMIT_S)
                opened = await heir.open([name for name, stop in stops.items() if stop.done()])
        finally:
            for name, topic in topics.items():
                topic.close_clients(reason, heir.addresses if name in opened else None)
        fields = {"topics": len(topics), "moved": len(opened), "heir": heir.there.broker_id, "reason": reason}
        log.info("topics.moved", extra=fields)
        return len(opened) == len(topics)

    async def take_in(self, topics: Sequence[TopicName]) -> list[TopicName]:
        """Open these topics; one that fails is left out of the result, and its client gets the error when it connects."""
        self._hasty.update(dict.fromkeys(topics))
        try:
            outcomes = await asyncio.gather(*(self.get(name, may_create=False) for name in topics), return_exceptions=True)
        finally:
            for name in topics:
                self._hasty.pop(name, None)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, CepheidError | TimeoutError):
                raise outcome
        return [name for name, outcome in zip(topics, outcomes, strict=True) if not isinstance(outcome, BaseException)]

    async def delete_open(self, name: TopicName, condition: Callable[[Topic], bool]) -> None:
        """Delete the topic if it is open and `condition` holds. A closed topic is refused: its condition can no longer be
        checked. Raises the errors of `delete`."""
        await self._wait_until_settled(name)
        if name not in self._open:
            raise NotAllowedError(f"topic {name} is no longer open", topic=str(name))
        self.close_to_newcomers([name], condition)
        await self._remove_in_time(name)

    async def _remove_in_time(self, name: TopicName) -> None:
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                await self._remove(name, name)
        except TimeoutError:
            message = f"topic {name} is still being deleted after {self._settings.request_timeout_s:g} s; ask again"
            raise ServiceNotReadyError(message, topic=str(name)) from None

    def close_to_newcomers(self, names: Iterable[TopicName], condition: Callable[[Topic], bool]) -> None:
        """Refuse new clients on those topics that are open; then call `remove` or `unload`.

        Check and closing are one step, so that no client connects in between. Raises NotAllowedError, and closes none, if
        `condition` does not hold for one of them.
        """
        topics = [topic for name in names if (topic := self._open.get(name)) is not None]
        if (busy := next((topic for topic in topics if not condition(topic)), None)) is not None:
            raise NotAllowedError(f"topic {busy.name} is in use by {busy.clients}", topic=str(busy.name))
        for topic in topics:
            topic.closed = True

    @contextmanager
    def hold(self, name: TopicName) -> Iterator[None]:
        """Refuse to open the topic or any partition of it inside this context."""
        self._held[name] = None
        try:
            yield
        finally:
            del self._held[name]

    async def wait_until_settled(self, names: Iterable[TopicName]) -> None:
        """Wait until none of these topics is being opened or closed."""
        for name in names:
            await self._wait_until_settled(name)

    async def remove(self, name: TopicName, owned: TopicName) -> None:
        """Delete as `delete` with `force` does, including remains of an interrupted operation that have no record.

        It works while this broker owns the topic `owned`.
        """
        await self._wait_until_settled(name)
        await self._remove(name, owned)

    async def prepare(self, name: TopicName, subscriptions: Mapping[str, Mapping[str, str]]) -> None:
        """Create a partition with these durable subscriptions (name → properties) at its first entry, before clients know of it."""
        await self._wait_until_settled(name)
        self._prepared[name] = None
        try:
            topic = self._open.get(name) or await self._opened_once(name, exists=True)
            assert topic is not None, f"{name} was not opened"
            for subscription, properties in subscriptions.items():
                await topic.create_subscription(subscription, EARLIEST, properties=dict(properties))
            await self.unload(name, "the partition is prepared")  # reopened, it gets the policies of its partitioned topic
        finally:
            self._prepared.pop(name, None)

    async def _wait_until_settled(self, name: TopicName) -> None:
        while (work := self._closing.get(name) or self._opening.get(name)) is not None:
            await asyncio.wait([work])

    async def _remove(self, name: TopicName, owned: TopicName) -> None:
        await self._close(name, partial(self._delete, name, owned))

    async def _delete(self, name: TopicName, owned: TopicName) -> None:
        """Delete in steps while this broker owns `owned`: the next owner may already have clients on the topic, whose entries
        must stay."""

        def check() -> None:
            if not self.ownership.keeps(owned):
                message = f"the deletion of topic {name} has stopped: its bundle moved to another broker; ask again"
                raise ServiceNotReadyError(message, topic=str(name))

        if (topic := self._open.pop(name, None)) is not None:
            self._policies.release(name)
            await topic.unload("the topic is deleted")
        if name.is_persistent:
            await self._managed_ledgers.delete(name, check)
        for hook in self.on_deleting:
            check()
            await hook(name)
        check()
        await self._catalog.delete(name)
        self._removed += 1
        self._retry.pop(name, None)
        log.info("topic.deleted", extra={"topic": str(name)})

    def on_tick(self, window_s: float) -> None:
        self.totals.on_tick(window_s)
        for topic in self._open.values():
            topic.on_tick(window_s)

    async def aclose(self) -> None:
        """Unload all topics concurrently, after those being opened."""
        self._stopping = True
        for opening in list(self._opening.values()):
            await asyncio.wait([opening])
        unloads = [asyncio.ensure_future(self._unload_quietly(name, "the broker stops")) for name in list(self._open)]
        await asyncio.gather(*unloads, *list(self._closing.values()), return_exceptions=True)

    async def _unload_quietly(self, name: TopicName, reason: str) -> None:
        try:
            await self.unload(name, reason)
        except (CepheidError, TimeoutError):
            pass  # logged; closed as far as possible
