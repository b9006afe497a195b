"""Ownership in a cluster of several brokers: which broker a lookup leads to, and when this broker takes bundles.

    locate ──► ours already? ──► owner's record ──► another's: There
                                     └── none ──► placement (load, hash, policies) ──► another: There, chosen
                                                                          └── this one ──► `BundleTenures`: acquired ──► Here
    start ──► registered ──► may be given bundles               release_all ──► deregistered, bundles given away
    drain ──► registered as draining, no longer chosen ──► bundles given away until `undrain`
    on_hand_over ──► another broker's topics are opened here, before this broker owns the bundle (hand_over.py)

Rules
1. A broker is given bundles while it is registered: `start` returns once it is, and a broker that stops deregisters first.
2. When the session is LOST, all bundles are lost before anything else happens. While it is SUSPENDED, owned bundles are still
   served, and none is acquired.
3. A draining broker is chosen only when all brokers are draining. The mark is in its registration, so it ends with the process;
   draining continues when the client that asked for it disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial

from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError
from cepheid_broker.ownership.broker_directory import BrokerDirectory
from cepheid_broker.ownership.broker_liveness import BrokerLiveness
from cepheid_broker.ownership.bundle_divisions import BundleDivisions
from cepheid_broker.ownership.bundle_split import BundleSplits
from cepheid_broker.ownership.bundle_states import BundleStates, Phase, Tenure
from cepheid_broker.ownership.bundle_tenures import BundleTenures
from cepheid_broker.ownership.bundles import Bundle, Division, bundle_of, is_in
from cepheid_broker.ownership.hand_over import OWNER_LOOK_S, HandOverCall, Heir, SilentBrokers, TopicsAhead
from cepheid_broker.ownership.isolation import IsolationRules
from cepheid_broker.ownership.owner_reach import OwnerReach
from cepheid_broker.ownership.ownership import (
    KEEPS_CONNECTION,
    BundleSplitError,
    BundleUser,
    DestinationRefusedError,
    Here,
    Location,
    NotOwnerError,
    OwnershipFigures,
    There,
    bundle_not_ready,
    health_topic,
)
from cepheid_broker.ownership.peer_calls import PeerCalls
from cepheid_broker.ownership.placement import Placement
from cepheid_metadata import (
    BrokerRegistration,
    BundleOwner,
    IsolationPolicies,
    MetadataError,
    MetadataStore,
    Registration,
    SessionState,
    WatchedRecord,
    WatchedRecords,
    broker_records,
    keys,
)
from cepheid_ports import Ports, SingleFlight, TaskOwner
from cepheid_wire import NamespaceName, TopicName

log = logging.getLogger(__name__)

_DRAIN_POLL_S, _LONGEST_DRAIN_PAUSE_S = 0.2, 5.0
_ATTEMPTS = 5  # of a lookup, while other brokers acquire and release the bundle at the same time


class BundleOwnership:
    """`Ownership` in a cluster of several brokers. Call `start` once the broker's ports are open, and `aclose` once."""

    is_shared = True

    def __init__(
        self,
        store: MetadataStore,
        ports: Ports,
        *,
        release: str = "",
        timeout_s: float = 10.0,
        patience_s: float = 20.0,
        reach: OwnerReach | None = None,
        placement: Placement | None = None,
        liveness: BrokerLiveness | None = None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Without `reach` an owner is believed to be as its record says, and without `liveness` until its session ends. If another
        broker is registered under our id, wait up to `patience_s` for that to end; after the start, report it to `on_failed`."""
        self.states = BundleStates(f"{ports.random.getrandbits(64):016x}")
        self._store = store
        self._ports = ports
        self._release_name = release
        self._patience_s = patience_s
        self._on_failed = on_failed
        self._timeout_s = timeout_s
        self._reach = reach
        self._liveness = liveness
        self._own_topic: TopicName | None = None
        self._tasks = TaskOwner("ownership")
        self.directory = BrokerDirectory(store, self._tasks)
        self._tenures = BundleTenures(store, self.states, self._choose_heir, self._tasks, liveness)
        self._registration: Registration[BrokerRegistration] | None = None
        self._divisions = BundleDivisions(store, self._tasks, self._tenures.on_divided)
        self._tenures.divisions, self._tenures.directory = self._divisions, self.directory
        self._splits = BundleSplits(store, self._tenures, self.states, self._divisions)
        self.placement = placement or Placement()
        self._watched = WatchedRecords(store, self._tasks)
        self._isolation: WatchedRecord[IsolationPolicies] | None = None
        self._registered = asyncio.Event()
        # Concurrent lookups share one read: after a failover clients look up thousands of topics in a few bundles.
        self._reads: SingleFlight[Bundle, BundleOwner | None] = SingleFlight("owner-reads", _stopped)
        self._preferences: SingleFlight[Bundle, str] = SingleFlight("preference-reads", _stopped)
        self._stopping = False
        self.peers: PeerCalls | None = None
        self._silent = SilentBrokers()
        self._ahead = TopicsAhead()
        self._hands_over_until: float | None = None
        self._waiting = self._waited = 0  # lookups that wait now, and that have waited so far
        self.draining = False
        self._must_drain = False  # even when no other broker can take the bundles
        self._drain_task: asyncio.Task[None] | None = None
        self._tenures.find_heir, self._tenures.on_heir_failed = self._find_heir, self._on_heir_failed
        self._unsubscribe = store.subscribe(self.on_session)

    def __repr__(self) -> str:
        return f"<BundleOwnership of {self.broker_id}, {self.states!r}>"

    @property
    def broker_id(self) -> str:
        """Id of this broker, known once it has started: it may be an address with a port that the system chose."""
        return self._tenures.broker_id

    @property
    def user(self) -> BundleUser:
        return self._tenures.user

    @user.setter
    def user(self, user: BundleUser) -> None:
        self._tenures.user = user

    # Lifetime

    async def start(self, broker_id: str, addresses: Mapping[str, str]) -> None:
        """Register the broker, which is given bundles from here on. Raises MetadataError, and may then be called again."""
        self._tenures.broker_id, self._tenures.addresses = broker_id, dict(addresses)
        self._own_topic = health_topic(broker_id)  # ours whichever broker owns its bundle: a broker must be able to test itself
        await self.directory.start()
        await self._follow_isolation()
        if self._registration is None:
            self._registration = await self._register()
        await self.directory.refresh()
        if self._liveness is not None:
            self._liveness.start(broker_id, self.directory)
        self._registered.set()

    async def _register(self) -> Registration[BrokerRegistration]:
        own = self._record = BrokerRegistration(
            broker_id=self.broker_id,
            addresses=dict(self._tenures.addresses),
            release=self._release_name,
            started_at_ms=self._ports.wall_ms(),
        )

        def is_past(found: BrokerRegistration) -> bool:
            """Return whether the registration is from an earlier process at our address: two cannot listen there at once. If that
            process started after us, ours is the earlier one."""
            return found.addresses == own.addresses and found.started_at_ms <= own.started_at_ms

        registration = Registration(
            self._store,
            self.broker_id,
            (broker_records(self._store),),
            own,
            is_past=is_past,
            patience_s=self._patience_s,
            on_failed=self._on_failed,
        )
        try:
            await registration.start()
        except BaseException:
            await registration.aclose()
            raise
        return registration

    async def _follow_isolation(self) -> None:
        """Apply the isolation policies, now and whenever they change. Raises MetadataError."""
        if self._isolation is not None:
            return

        def on_change() -> None:
            if self._isolation is not None:
                self.placement.isolation = IsolationRules(self._isolation.record)

        self._isolation = await self._watched.use(
            keys.ISOLATION_POLICIES_KEY, IsolationPolicies, self, on_change, forget_deleted=True
        )
        on_change()

    async def _deregister(self) -> None:
        registration, self._registration = self._registration, None
        if registration is not None:
            await registration.aclose()

    @property
    def bundles_held(self) -> int:
        ahead = sum(self.states.find(bundle) is None for bundle in self._ahead.bundles)
        return self.states.held + self._tenures.given_away + ahead

    def drain(self, *, force: bool = False) -> None:
        """Give all bundles away until `undrain` (rule 3). `force` drains even when no other broker can take them."""
        if self._stopping or self._registration is None:
            raise ServiceNotReadyError(f"broker {self.broker_id} is starting or stopping")
        if not force and not self._takers():
            others = ", ".join(f"{name} (being drained)" for name in self.directory.brokers if name != self.broker_id)
            message = f"broker {self.broker_id} is the last one that takes bundles; others: {others or 'none'}"
            raise NotAllowedError(f"{message}. Start another broker first, or force it: its topics are not served then")
        self._must_drain = force
        if not self.draining:
            self.draining = True
            self._registration.update(self._record.replace(draining=True))
            log.info("broker.draining", extra={"broker": self.broker_id, "bundles": len(list(self.states.owned()))})
        if self._drain_task is None or self._drain_task.done():
            self._drain_task = self._tasks.start(self._drain(), name="drain")

    def undrain(self) -> None:
        if self.draining:
            self.draining = self._must_drain = False
            if self._registration is not None:
                self._registration.update(self._record)
            log.info("broker.not_draining", extra={"broker": self.broker_id})

    async def _drain(self) -> None:
        """Give bundles away for as long as the broker drains: other brokers may not know yet, and send clients here. Unless forced,
        keep the bundles while no other broker takes any. Retry failed releases after growing pauses."""

        def pauses() -> bool:
            return not self.draining or self._stopping or not (self._must_drain or self._takers())

        pause_s = _DRAIN_POLL_S
        while self.draining and not self._stopping:
            try:
                released = await self._tenures.give_away("the broker is drained", until=pauses)
            except Exception as error:
                log.exception("broker.drain_defect", extra={"broker": self.broker_id, "error": repr(error)})
                released = False
            pause_s = _DRAIN_POLL_S if released else min(2 * pause_s, _LONGEST_DRAIN_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _takers(self) -> dict[str, BrokerRegistration]:
        """Return the other brokers that take bundles."""
        return {name: record for name, record in self.directory.brokers.items() if name != self.broker_id and not record.draining}

    def on_session(self, state: SessionState) -> None:
        """Drop all bundles when the session is lost, and read their records again when it is connected (rule 2)."""
        if state is SessionState.LOST:
            lost = self.states.on_session_lost()
            self._ahead.clear()
            log.warning("bundles.lost", extra={"broker": self.broker_id, "bundles": len(lost), "reason": "the session ended"})
            self.user.drop_unowned()
        elif state is SessionState.CONNECTED:
            self._tenures.on_connected()

    async def release_all(self, limit_s: float = 0.0) -> None:
        self._stopping = True
        self._hands_over_until = asyncio.get_running_loop().time() + limit_s
        await self._deregister()
        await self._tenures.release_all()

    async def aclose(self) -> None:
        self._stopping = True
        self._unsubscribe()
        if self._liveness is not None:
            await self._liveness.aclose()
        if self._reach is not None:
            await self._reach.aclose()
        await self._deregister()
        await self._tasks.aclose()
        self._divisions.close()
        if self._isolation is not None:
            self._watched.leave(self._isolation, self)

    # Lookups

    def owns(self, topic: TopicName) -> bool:
        if topic == self._own_topic:
            return self._store.session_state is not SessionState.LOST
        if self._ahead.holds(topic):
            return True
        division = self._divisions.known(topic.namespace)
        return division is not None and self.states.owns(bundle_of(topic, division))

    def keeps(self, topic: TopicName) -> bool:
        division = self._divisions.known(topic.namespace)
        return self.owns(topic) or (division is not None and self.states.keeps(bundle_of(topic, division)))

    async def locate(self, topic: TopicName, *, authoritative: bool = False) -> Location:
        if topic == self._own_topic and self.owns(topic):
            return Here()
        if self._ahead.holds(topic):
            return Here()

        async def locate(bundle: Bundle) -> Location:
            if (heir := self._tenures.heirs.get(bundle)) is not None and topic in heir.moved:
                return heir.there  # while the rest of its bundle is still on its way
            look = partial(self.locate_bundle, bundle, authoritative=authoritative)
            return await look() if self._reach is None else await self._reach.reachable(bundle, await look(), look)

        return await self._in_bundle_of(topic, locate)

    async def _in_bundle_of(self, topic: TopicName, locate: Callable[[Bundle], Awaitable[Location]]) -> Location:
        """Locate the bundle of a topic. If the bundle is split meanwhile, locate the part that has the topic."""
        for _ in range(_ATTEMPTS):
            try:
                return await locate(bundle := await self.bundle_of(topic))
            except BundleSplitError:
                continue
        raise bundle_not_ready(bundle, "it is split again and again")

    async def would_own(self, topics: Sequence[TopicName]) -> list[TopicName]:
        divisions: dict[NamespaceName, Division] = {}
        asked: dict[Bundle, bool] = {}
        found: list[TopicName] = []
        for topic in topics:
            if not self.owns(topic):
                if topic.namespace not in divisions:
                    divisions[topic.namespace] = await self._divisions.look_up(topic.namespace)
                bundle = bundle_of(topic, divisions[topic.namespace])
                if bundle not in asked:
                    asked[bundle] = await self._would_take(bundle)
                if not asked[bundle]:
                    continue
            found.append(topic)
        return found

    async def _would_take(self, bundle: Bundle) -> bool:
        """Return whether this broker serves the bundle, or is the first choice for it while no broker does."""
        if self._stopping or self.draining or not self._registered.is_set():
            return self.states.owns(bundle)
        owner = await self.owner_of(bundle)
        if owner is not None:
            return isinstance(owner, Here)
        try:
            return await self._choose(bundle, authoritative=False) is None
        except MetadataError as error:
            raise bundle_not_ready(bundle, f"metadata cannot be asked who is to have it: {error}") from error

    async def require(self, topic: TopicName) -> None:
        if (topic == self._own_topic and self.owns(topic)) or self._ahead.holds(topic):
            return
        location = await self._in_bundle_of(topic, self.locate_bundle)
        if isinstance(location, There):
            message = f"topic {topic} is served by broker {location.broker_id}, not by {self.broker_id} ({KEEPS_CONNECTION})"
            raise NotOwnerError(message, location, topic=str(topic))

    @property
    def brokers(self) -> Mapping[str, Mapping[str, str]]:
        return {name: record.addresses for name, record in self.directory.brokers.items()}

    @property
    def leaving(self) -> list[str]:
        """Ids of the registered brokers that take no bundles because they are draining."""
        return [name for name, record in self.directory.brokers.items() if record.draining]

    def statistics(self) -> OwnershipFigures:
        states, tenures, reach, liveness = self.states, self._tenures, self._reach, self._liveness
        return OwnershipFigures(
            brokers=len(self.directory.brokers),
            bundles_owned=len(list(states.owned())),
            bundles_acquired=states.acquired,
            bundles_lost=states.lost,
            bundles_released=tenures.released,
            topics_moved=tenures.topics_moved,
            hand_overs_failed=tenures.hand_overs_failed,
            sessions_lost=states.sessions - 1,
            lookups_waiting=self._waiting + (0 if reach is None else reach.waiting),
            lookups_waited=self._waited + (0 if reach is None else reach.waited),
            peers_heard=0 if liveness is None else liveness.heard,
            peers_challenged=0 if liveness is None else liveness.challenges,
            peers_gone=0 if liveness is None else liveness.found_gone,
        )

    def owned_bundles(self) -> list[Bundle]:
        return [tenure.bundle for tenure in self.states.owned()]

    async def owner_of(self, bundle: Bundle) -> Location | None:
        if self.states.owns(bundle):
            return Here()
        try:
            owner = await self._tenures.owner_of(bundle)
        except MetadataError as error:
            raise bundle_not_ready(bundle, f"metadata cannot be asked who owns it: {error}") from error
        if owner is None:
            return None
        return Here() if self.states.is_own(owner) else There(owner.broker_id, owner.addresses)

    async def release(self, bundle: Bundle, *, to: str = "", reason: str = "its bundle is unloaded") -> None:
        if to:
            self._check_destination(bundle, to)
        await self._tenures.release(bundle, to=to, reason=reason)

    def _check_destination(self, bundle: Bundle, to: str) -> None:
        """Raise DestinationRefusedError if lookups would not lead to that broker, so that another one would get the bundle."""
        brokers = self.directory.brokers
        if to not in brokers:
            raise DestinationRefusedError(f"broker {to[:200]!r} does not run: choose one of {', '.join(brokers)}")
        if self.draining if to == self.broker_id else brokers[to].draining:
            raise DestinationRefusedError(f"broker {to} is being drained, and takes no bundles")
        if not self.placement.allows(bundle, to, self.brokers, now_s=asyncio.get_running_loop().time()):
            raise DestinationRefusedError(f"an isolation policy does not allow broker {to} to serve namespace {bundle.namespace}")

    # Hand-over (hand_over.py)

    def _find_heir(self, tenure: Tenure, broker_id: str) -> Heir | None:
        """Return the broker to hand the bundle to, or None if the bundle is released without notifying that broker."""
        now_s = asyncio.get_running_loop().time()
        record = self.directory.brokers.get(broker_id)
        if self.peers is None or record is None or broker_id == self.broker_id or self._silent.are(broker_id, now_s):
            return None
        if self._hands_over_until is not None and now_s >= self._hands_over_until:
            return None  # this broker has to stop now
        there = There(broker_id, record.addresses)
        if there.admin_url(over_tls=False) is None:
            return None
        return Heir(there, tenure.bundle, self.broker_id, tenure.epoch, self.peers, until_s=self._hands_over_until)

    def _on_heir_failed(self, heir: Heir, error: BaseException) -> None:
        self._silent.note(heir.there.broker_id, error, asyncio.get_running_loop().time())

    async def on_hand_over(self, call: HandOverCall) -> list[TopicName]:
        bundle, now_s = call.bundle, asyncio.get_running_loop().time()
        topics = [name for name in map(TopicName.parse, call.topics) if bundle.holds(name)]
        if call.step == "prepare":
            await self._begin_ahead(call)
            return []
        if call.step == "take":
            return await self._take(bundle)
        self._ahead.renew(bundle, call.giver, call.epoch, now_s)
        self._ahead.add(bundle, topics)
        opened = await self.user.take_in(topics)
        for topic in topics:
            if topic not in opened:
                self._ahead.remove(bundle, topic)
        return opened

    async def _begin_ahead(self, call: HandOverCall) -> None:
        """Agree to open topics of a bundle before it is released (hand_over.py, rule 1). Raises ServiceNotReadyError."""
        bundle = call.bundle
        if self._stopping or self.draining or not self._registered.is_set():
            state = "stops" if self._stopping else "is being drained" if self.draining else "is not registered"
            raise bundle_not_ready(bundle, f"broker {self.broker_id} {state}, and takes no bundles")
        await self._check_current(bundle)
        try:
            owner = await self._tenures.owner_of(bundle)
        except MetadataError as error:
            raise bundle_not_ready(bundle, f"metadata cannot be asked who owns it: {error}") from error
        if owner is None or (owner.broker_id, owner.epoch) != (call.giver, call.epoch):
            raise bundle_not_ready(
                bundle, f"broker {call.giver} does not own it in epoch {call.epoch}; its owner's record is {owner}"
            )
        if self._ahead.begin(bundle, call.giver, call.epoch, asyncio.get_running_loop().time()):
            self._tasks.start(self._end_ahead(bundle), name=f"hand-over {bundle}")

    async def _take(self, bundle: Bundle) -> list[TopicName]:
        """Acquire a bundle that its owner has released. If that fails, topics opened ahead stay open until their time is over.
        Raises ServiceNotReadyError."""
        await self.locate_bundle(bundle, authoritative=True)
        self._stop_ahead(bundle)
        return []

    def _stop_ahead(self, bundle: Bundle) -> None:
        """Stop serving topics ahead of the bundle: from now on its owner serves them."""
        if not self._stopping:  # a broker that stops closes them in good order
            self._ahead.end(bundle)
            self.user.drop_unowned()

    async def _end_ahead(self, bundle: Bundle) -> None:
        """Stop serving topics ahead when their time is over or a third broker owns the bundle (hand_over.py, rule 3)."""
        loop = asyncio.get_running_loop()
        while wait_s := self._ahead.ends_in(bundle, loop.time()):  # each call of the owner moves the end
            await asyncio.sleep(min(wait_s, OWNER_LOOK_S))
            if await self._went_elsewhere(bundle):
                self._stop_ahead(bundle)
                return
        if wait_s is not None:
            log.warning("bundle.hand_over_ended", extra={"bundle": str(bundle), "reason": "its owner was not heard of any more"})
            try:
                await self._take(bundle)
            except ServiceNotReadyError as error:
                log.warning("bundle.not_acquired", extra={"bundle": str(bundle), "error": str(error)})
                self._stop_ahead(bundle)

    async def _went_elsewhere(self, bundle: Bundle) -> bool:
        """Return whether a third broker owns the bundle: the giver died, and a client asked that broker first."""
        giver = self._ahead.giver_of(bundle)
        if giver is None:
            return False
        try:
            owner = await self._tenures.owner_of(bundle)
        except MetadataError:
            return False
        return owner is not None and owner.broker_id != self.broker_id and (owner.broker_id, owner.epoch) != giver

    async def bundle_of(self, topic: TopicName) -> Bundle:
        """Return the bundle that holds the topic. Raises NamespaceNotFoundError, ServiceNotReadyError."""
        return bundle_of(topic, await self._divisions.get(topic.namespace))

    async def division(self, namespace: NamespaceName) -> Division:
        return await self._divisions.get(namespace)

    async def split(self, bundle: Bundle, starts: Sequence[int], *, reason: str = "an operator split it") -> list[Bundle]:
        return await self._splits.split(bundle, starts, reason)

    async def locate_bundle(self, bundle: Bundle, *, authoritative: bool = False) -> Location:
        """Return the broker that serves the bundle, as `locate` does for a topic."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(_ATTEMPTS):
                    if (location := await self._look(bundle, authoritative=authoritative)) is not None:
                        return location
        except MetadataError as error:
            raise bundle_not_ready(bundle, f"metadata cannot be asked who owns it: {error}") from error
        except TimeoutError:
            raise bundle_not_ready(bundle, self._what_takes_so_long(bundle)) from None
        raise bundle_not_ready(bundle, "others acquire and release it at the same time")

    async def _look(self, bundle: Bundle, *, authoritative: bool) -> Location | None:
        """Return the owner of the bundle, or None if something changed meanwhile: look again."""
        await self._check_current(bundle)
        if (tenure := self.states.find(bundle)) is not None:
            if not self.states.owns(bundle):  # wait rather than refuse: clients double their pause after each refusal
                with self._waits(counted=tenure.phase is not Phase.ACQUIRING):
                    await self._tenures.wait_settled(tenure)
            return Here() if self.states.owns(bundle) else None
        if self._store.session_state is not SessionState.CONNECTED:
            raise bundle_not_ready(bundle, "this broker has no session with the metadata store")
        if not self._registered.is_set():  # this broker is still starting
            with self._waits():
                await self._registered.wait()
            return None
        owner = await self._reads.run(bundle, self._tenures.owner_of)
        if owner is not None and not self._tenures.may_take(owner):
            return There(owner.broker_id, owner.addresses)
        if owner is None and (there := await self._choose(bundle, authoritative=authoritative)) is not None:
            return there
        if self._stopping:
            raise bundle_not_ready(bundle, "this broker stops")
        if self.states.find(bundle) is None:  # another lookup may have begun to acquire it during the awaits above
            self._tenures.acquire_soon(bundle)
        return None

    @contextlib.contextmanager
    def _waits(self, *, counted: bool = True) -> Iterator[None]:
        """Count a lookup as waiting inside this context. Waits for an acquisition, which every first lookup of a bundle has, are
        not `counted`."""
        self._waited += counted
        self._waiting += counted
        try:
            yield
        finally:
            self._waiting -= counted

    async def _check_current(self, bundle: Bundle) -> None:
        """Raise BundleSplitError if the namespace does not have this bundle, or no longer has it, according to metadata."""
        namespace = bundle.namespace
        division = await self._divisions.get(namespace)
        if not is_in(bundle, division) and not is_in(bundle, await self._divisions.refresh(namespace)):
            raise BundleSplitError(f"{bundle} is not a bundle of its namespace any more ({KEEPS_CONNECTION})", bundle=str(bundle))

    async def _choose(self, bundle: Bundle, *, authoritative: bool) -> There | None:
        """Return the broker that should acquire a bundle without an owner, or None if it is this one."""
        brokers = {
            name: record for name, record in self.directory.brokers.items() if not (self._stopping and name == self.broker_id)
        }
        if authoritative and not self._stopping and bundle in self._ahead.bundles:
            return None  # even if this broker drains by now: topics that are open here are handed on instead of dropped
        takers = {
            name: record for name, record in brokers.items() if not (self.draining if name == self.broker_id else record.draining)
        }
        if takers:
            brokers = takers
        elif self._must_drain:
            raise bundle_not_ready(bundle, "this broker is drained, and no other one takes bundles")
        if authoritative and not self._stopping and (not self.draining or self.broker_id in brokers):
            return None
        preferred = await self._preferences.run(bundle, self._tenures.preferred_for)
        addresses = {name: record.addresses for name, record in brokers.items()}
        order = self.placement.order(bundle, addresses, preferred, now_s=asyncio.get_running_loop().time())
        if not order or order[0] == self.broker_id:
            return None
        return There(order[0], brokers[order[0]].addresses, chosen=True)

    def _choose_heir(self, bundle: Bundle) -> str:
        """Return the id of the broker that should get a bundle this one gives away, or "" if there is no other broker."""
        others = self._takers() or {name: found for name, found in self.directory.brokers.items() if name != self.broker_id}
        now_s = asyncio.get_running_loop().time()
        order = self.placement.order(bundle, {name: found.addresses for name, found in others.items()}, now_s=now_s)
        return next((name for name in order if not self._silent.are(name, now_s)), next(iter(order), ""))

    def _what_takes_so_long(self, bundle: Bundle) -> str:
        if not self._registered.is_set():
            return "this broker is not registered yet"
        tenure = self.states.find(bundle)
        releasing = tenure is not None and tenure.phase is Phase.RELEASING
        return "it is being unloaded" if releasing else "metadata cannot be asked who owns it: timeout"


def _stopped() -> ServiceNotReadyError:
    return ServiceNotReadyError(f"this broker stops ({KEEPS_CONNECTION})")
