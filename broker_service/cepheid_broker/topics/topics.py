"""The open topics of this broker: opened once however many ask, closed, unloaded, deleted.

    get ──► ours? ──► open already? ──► opening? wait with the others ──► its record and policies ──► ManagedLedgers.open ──► Topic
                                                                             └──none──► catalog: may it be created? ──► again
A topic that failed is opened again by whoever asks for it next, after a pause that doubles while it keeps failing.

Only what this broker owns is opened (ownership.py), but for partitions that are prepared before anybody knows of them. What it
owns no more is closed: in good order when it is given away, at once and without a word to the stores when it was lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from cepheid_broker.dispatch import ReadAheadBudget
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
"""Topics of one group of a hand-over. More: fewer round trips, and producers wait for each other's topics."""


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
        self.read_ahead_budget = ReadAheadBudget(settings.dispatch.read_ahead_total_bytes)
        self._catalog = catalog
        self._managed_ledgers = managed_ledgers
        self._policies = policies
        self._settings = settings
        self._tasks = tasks
        self._open: dict[TopicName, Topic] = {}
        self._opening: dict[TopicName, asyncio.Task[Topic | Exception | None]] = {}
        self._turns = OpeningTurns()
        self._hasty: dict[TopicName, None] = {}  # their producers stand still until another broker has heard that they are open
        self._closing: dict[TopicName, asyncio.Task[Exception | None]] = {}
        self._retry: dict[TopicName, tuple[float, float]] = {}  # not before this loop time; the pause that led to it
        self._name_prefix = f"{cluster}-{ports.random.getrandbits(40):010x}"
        self._names_given = 0
        self._stopping = False
        self.totals = BrokerTraffic()
        self.failures = 0
        self._held: dict[TopicName, None] = {}
        self._prepared: dict[TopicName, None] = {}  # opened without being owned
        self._removed = 0
        self._moving = asyncio.Semaphore(1)
        self.on_deleting: list[Callable[[TopicName], Awaitable[None]]] = []
        """Awaited before a topic's record goes: what fails or is interrupted can be repeated."""

    def __repr__(self) -> str:
        return f"<Topics {len(self._open)} open, {len(self._opening)} opening, {len(self._closing)} closing>"

    def new_producer_name(self) -> str:
        """Unique in the cluster, also after a restart: clients come back with the name they were given (protocol.md §9.2)."""
        self._names_given += 1
        return f"{self._name_prefix}-{self._names_given}"

    def loaded(self) -> Iterable[Topic]:
        return list(self._open.values())

    def is_loaded(self, name: TopicName) -> bool:
        """Whether it is open, or is being opened or closed."""
        return name in self._open or name in self._opening or name in self._closing

    def find(self, name: TopicName) -> Topic | None:
        """The topic if it is open."""
        return self._open.get(name)

    async def get(self, name: TopicName, *, may_create: bool) -> Topic:
        """The topic, opened and perhaps created. Raises NotOwnerError, what `TopicCatalog.require` and opening a managed ledger
        raise."""
        exists = asked = False
        while True:
            self._check_not_stopping(name)
            if not self.ownership.owns(name):
                await self.ownership.require(name)
                continue  # it may have gone again
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
        """`exists`: the catalog knows the topic. Without it, None means that the record does not show it: ask the catalog."""
        opening = self._opening.get(name)
        if opening is None:
            opening = self._opening[name] = self._tasks.start(self._load(name, exists), name=f"open {name}")
        # Shielded: one client that gives up must not stop the opening that others wait for.
        outcome = await asyncio.shield(opening)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _load(self, name: TopicName, exists: bool) -> Topic | Exception | None:
        """An error is a result here: everybody who waits gets it, and it is no failed task."""
        turn = None
        try:
            if name not in self._hasty:
                turn = await self._turns.take()
                self._check_not_stopping(name)
                self._check_owned(name)  # to open what somebody else owns by now would stop them
            if (policies := await self._follow(name, exists)) is None:
                return None
            return await self._load_governed(name, policies)
        except Exception as error:
            self.failures += 1
            # What went away meanwhile is no failure of the topic's: when it comes back it is opened at once.
            retry_s = self._plan_retry(name) if self.ownership.owns(name) else 0.0
            log.warning("topic.open_failed", extra={"topic": str(name), "error": str(error), "retry_s": retry_s})
            return error
        finally:
            self._opening.pop(name, None)
            if turn is not None:
                self._turns.give_back(turn)

    async def _follow(self, name: TopicName, exists: bool) -> TopicPolicies | None:
        """The policies that hold, which are followed from now on. None: they are not, as `_opened_once` says."""
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
        """Told of every change of its policies until it leaves `_open`."""
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
            self.read_ahead_budget,
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
            raise ServiceNotReadyError(f"topic {name} is being unloaded: its bundle went while it was opened", topic=str(name))

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
        if len(self._retry) >= 10_000:  # entries of topics that nobody asked for again
            self._retry.clear()
        self._retry[name] = (now + pause_s, pause_s)
        return pause_s

    def _on_topic_failed(self, topic: Topic, error: BaseException) -> None:
        self.failures += 1
        if topic.published.entries:
            self._retry.pop(topic.name, None)  # it served: pauses grow only while opening it brings nothing
        if self.ownership.owns(topic.name):
            self._plan_retry(topic.name)
        if self._open.get(topic.name) is topic:
            del self._open[topic.name]
            self._policies.release(topic.name)
            self._start_closing(topic.name, topic.ledger.aclose)

    def _start_closing(self, name: TopicName, work: Callable[[], Awaitable[None]]) -> asyncio.Task[Exception | None]:
        async def run() -> Exception | None:
            """What stores raise is a result, for whoever waits: an outage is no defect of ours."""
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
        """To its end, whoever gives up. Raises what the stores raise."""
        if (error := await asyncio.shield(self._start_closing(name, work))) is not None:
            raise error

    async def unload(self, name: TopicName, reason: str = "the topic is unloaded") -> None:
        """Closes it in good order; it is opened again by whoever asks. Not open is success."""
        topic = self._open.pop(name, None)
        if topic is None:
            return
        self._policies.release(name)
        await self._close(name, partial(topic.unload, reason))
        log.info("topic.unloaded", extra={"topic": str(name), "reason": reason})

    async def delete(self, name: TopicName, *, force: bool = False) -> None:
        """The topic with everything in it. Raises TopicNotFoundError, NotOwnerError, NotAllowedError when it is in use (unless
        `force`), ServiceNotReadyError: it takes long, and goes on. Repeat it after any other error."""
        if await self._catalog.partitions(name) is None:
            raise TopicNotFoundError(f"topic {name} does not exist", topic=str(name))
        await self.ownership.require(name)
        await self._wait_until_settled(name)
        if not force:
            self.close_to_newcomers([name], lambda topic: not topic.in_use)
        await self._remove_in_time(name)

    # Bundles (BundleUser)

    def drop_unowned(self) -> None:
        """No grace: another broker may have begun to serve them. Publishes under way fail, and clients look the topics up again."""
        reason = "its bundle went to another broker"
        for topic in self.loaded():
            if topic.name in self._prepared or self.ownership.keeps(topic.name):
                continue
            if isinstance(topic, PersistentTopic):
                error = ManagedLedgerFailedError(f"{topic.name}: {reason}", topic=str(topic.name))
                topic.ledger.fail(error)  # its hooks take it out of `_open`
            if self._open.get(topic.name) is topic:
                del self._open[topic.name]
                self._policies.release(topic.name)
                topic.close_clients(reason)

    async def unload_bundle(self, bundle: Bundle, reason: str) -> None:
        """Again until nothing is left, unless it may be opened meanwhile: a sole broker's topics come back at once."""
        turns = asyncio.Semaphore(_UNLOADED_AT_ONCE)

        async def unload(name: TopicName) -> None:
            async with turns:
                await self._wait_until_settled(name)
                await self._unload_quietly(name, reason)

        def left() -> list[TopicName]:
            known = dict.fromkeys((*self._open, *self._opening, *self._closing))
            return [name for name in known if bundle.holds(name) and name not in self._prepared]

        while names := left():
            await asyncio.gather(*map(unload, names))
            if any(map(self.ownership.owns, names)):
                return

    async def hand_over(self, bundle: Bundle, heir: Heir, reason: str) -> bool:
        """Groups of them, so that no producer waits for more than its own group: those with clients first. Raises as `Heir`."""
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
        """Whatever happens on the way, their clients are told to go somewhere."""
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
        """What cannot be opened is left out; its client finds out why when it comes."""
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
        """If it is open and `condition` holds: of one that was closed meanwhile nobody knows whether it still does. Raises as
        `delete`."""
        await self._wait_until_settled(name)
        if name not in self._open:
            raise NotAllowedError(f"topic {name} is not open any more", topic=str(name))
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
        """From here on nobody connects to those that are open: `remove` or `unload` them. Nothing is closed, and NotAllowedError
        raised, when `condition` does not hold for one of them: so nobody comes in between the look and the deed."""
        topics = [topic for name in names if (topic := self._open.get(name)) is not None]
        if (busy := next((topic for topic in topics if not condition(topic)), None)) is not None:
            raise NotAllowedError(f"topic {busy.name} is in use by {busy.clients}", topic=str(busy.name))
        for topic in topics:
            topic.closed = True

    @contextmanager
    def hold(self, name: TopicName) -> Iterator[None]:
        """Meanwhile it, or a partition of it, is opened for nobody."""
        self._held[name] = None
        try:
            yield
        finally:
            del self._held[name]

    async def wait_until_settled(self, names: Iterable[TopicName]) -> None:
        """None of these is being opened or closed."""
        for name in names:
            await self._wait_until_settled(name)

    async def remove(self, name: TopicName, owned: TopicName) -> None:
        """As `delete` by force, also of what no record speaks of: remains of something that was interrupted. By whoever serves the
        topic `owned`, for as long as it does."""
        await self._wait_until_settled(name)
        await self._remove(name, owned)

    async def prepare(self, name: TopicName, subscriptions: Mapping[str, Mapping[str, str]]) -> None:
        """Before anybody knows of it, a partition gets these durable subscriptions (name → properties), from its first entry on."""
        await self._wait_until_settled(name)
        self._prepared[name] = None
        try:
            topic = self._open.get(name) or await self._opened_once(name, exists=True)
            assert topic is not None, f"{name} was not opened"
            for subscription, properties in subscriptions.items():
                await topic.create_subscription(subscription, EARLIEST, properties=dict(properties))
            await self.unload(name, "the partition is prepared")  # opened again, it has the policies of its partitioned topic
        finally:
            self._prepared.pop(name, None)

    async def _wait_until_settled(self, name: TopicName) -> None:
        while (work := self._closing.get(name) or self._opening.get(name)) is not None:
            await asyncio.wait([work])

    async def _remove(self, name: TopicName, owned: TopicName) -> None:
        await self._close(name, partial(self._delete, name, owned))

    async def _delete(self, name: TopicName, owned: TopicName) -> None:
        """Step by step while it is ours: who has it next may have clients on it by now, and what they publish stays."""

        def check() -> None:
            if not self.ownership.keeps(owned):
                message = f"the deletion of topic {name} has stopped: its bundle went to another broker; ask again"
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
        """Unloads everything, together; what is being opened is waited for."""
        self._stopping = True
        for opening in list(self._opening.values()):
            await asyncio.wait([opening])
        unloads = [asyncio.ensure_future(self._unload_quietly(name, "the broker stops")) for name in list(self._open)]
        await asyncio.gather(*unloads, *list(self._closing.values()), return_exceptions=True)

    async def _unload_quietly(self, name: TopicName, reason: str) -> None:
        try:
            await self.unload(name, reason)
        except (CepheidError, TimeoutError):
            pass  # it is logged, and closed as far as that is possible
