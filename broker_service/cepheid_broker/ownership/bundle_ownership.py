"""Ownership among many brokers: which broker a lookup leads to, and when this one is given bundles at all.

    locate ──► ours already? ──► owner's record ──► another's: There
                                     └── none ──► preference(bundle, registered brokers) ──► another: There, chosen
                                                                          └── this one ──► `BundleTenures`: acquired ──► Here
    start ──► registered ──► bundles are given to it            release_all ──► deregistered, bundles given away

Rules
1. A broker is given bundles while it is registered: `start` returns then, and whoever stops leaves first.
2. A session that is LOST takes everything along, before anything else happens; SUSPENDED takes nothing: what is owned goes on, and
   nothing is acquired.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership.broker_directory import BrokerDirectory
from cepheid_broker.ownership.broker_liveness import BrokerLiveness
from cepheid_broker.ownership.bundle_counts import BundleCounts
from cepheid_broker.ownership.bundle_states import BundleStates, Phase
from cepheid_broker.ownership.bundle_tenures import BundleTenures
from cepheid_broker.ownership.bundles import Bundle, bundle_of, preference
from cepheid_broker.ownership.owner_reach import OwnerReach
from cepheid_broker.ownership.ownership import (
    KEEPS_CONNECTION,
    BundleUser,
    Here,
    Location,
    NotOwnerError,
    OwnershipFigures,
    There,
    bundle_not_ready,
    health_topic,
)
from cepheid_metadata import (
    BrokerRegistration,
    BundleOwner,
    MetadataError,
    MetadataStore,
    Registration,
    SessionState,
    broker_records,
)
from cepheid_ports import Ports, SingleFlight, TaskOwner
from cepheid_wire import NamespaceName, TopicName

log = logging.getLogger(__name__)

_ATTEMPTS = 5  # of a lookup that meets others who acquire and release at the same time


class BundleOwnership:
    """`start` once its ports are open, `aclose` once. Implements `Ownership`."""

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
        liveness: BrokerLiveness | None = None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Without `reach` an owner is taken at its record's word, and without `liveness` until its session ends. Another broker's
        registration under our id is waited for during `patience_s`; once started `on_failed` hears that it stayed."""
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
        self._counts = BundleCounts(store, self._tasks, self._tenures.on_namespace_gone)
        self._registered = asyncio.Event()
        self._reads: SingleFlight[Bundle, BundleOwner | None] = SingleFlight("owner-reads", _stopped)
        self._stopping = False
        self._unsubscribe = store.subscribe(self.on_session)

    def __repr__(self) -> str:
        return f"<BundleOwnership of {self.broker_id}, {self.states!r}>"

    @property
    def broker_id(self) -> str:
        """Known once started: it may be an address with a port that the system chose."""
        return self._tenures.broker_id

    @property
    def user(self) -> BundleUser:
        return self._tenures.user

    @user.setter
    def user(self, user: BundleUser) -> None:
        self._tenures.user = user

    # Lifetime

    async def start(self, broker_id: str, addresses: Mapping[str, str]) -> None:
        """Registers the broker: from here on it is given bundles. Raises MetadataError, and may be called again then."""
        self._tenures.broker_id, self._tenures.addresses = broker_id, dict(addresses)
        self._own_topic = health_topic(broker_id)  # whoever owns its bundle: a broker must be able to try itself
        await self.directory.start()
        if self._registration is None:
            self._registration = await self._register()
        await self.directory.refresh()
        if self._liveness is not None:
            self._liveness.start(broker_id, self.directory)
        self._registered.set()

    async def _register(self) -> Registration[BrokerRegistration]:
        own = BrokerRegistration(
            broker_id=self.broker_id,
            addresses=dict(self._tenures.addresses),
            release=self._release_name,
            started_at_ms=self._ports.wall_ms(),
        )

        def is_past(found: BrokerRegistration) -> bool:
            """Two cannot listen at one address. One that started after us has taken ours: ours is the past."""
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

    async def _deregister(self) -> None:
        registration, self._registration = self._registration, None
        if registration is not None:
            await registration.aclose()

    def on_session(self, state: SessionState) -> None:
        """Rule 2."""
        if state is SessionState.LOST:
            lost = self.states.on_session_lost()
            log.warning("bundles.lost", extra={"broker": self.broker_id, "bundles": len(lost), "reason": "the session ended"})
            self.user.drop_unowned()

    async def release_all(self) -> None:
        self._stopping = True
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
        self._counts.close()

    # Whose is it?

    def owns(self, topic: TopicName) -> bool:
        if topic == self._own_topic:
            return self._store.session_state is not SessionState.LOST
        count = self._counts.known(topic.namespace)
        return count is not None and self.states.owns(bundle_of(topic, count))

    def keeps(self, topic: TopicName) -> bool:
        count = self._counts.known(topic.namespace)
        return self.owns(topic) or (count is not None and self.states.keeps(bundle_of(topic, count)))

    async def locate(self, topic: TopicName, *, authoritative: bool = False) -> Location:
        if topic == self._own_topic and self.owns(topic):
            return Here()
        bundle = await self.bundle_of(topic)
        look = partial(self.locate_bundle, bundle, authoritative=authoritative)
        return await look() if self._reach is None else await self._reach.reachable(bundle, await look(), look)

    async def would_own(self, topics: Sequence[TopicName]) -> list[TopicName]:
        counts: dict[NamespaceName, int] = {}
        asked: dict[Bundle, bool] = {}
        found: list[TopicName] = []
        for topic in topics:
            if not self.owns(topic):
                if topic.namespace not in counts:
                    counts[topic.namespace] = await self._counts.look_up(topic.namespace)
                bundle = bundle_of(topic, counts[topic.namespace])
                if bundle not in asked:
                    asked[bundle] = await self._would_take(bundle)
                if not asked[bundle]:
                    continue
            found.append(topic)
        return found

    async def _would_take(self, bundle: Bundle) -> bool:
        """Whether it is served here, or is served by no broker and this one is the first choice."""
        if self._stopping or not self._registered.is_set():
            return False
        owner = await self.owner_of(bundle)
        if owner is not None:
            return isinstance(owner, Here)
        try:
            return await self._choose(bundle, authoritative=False) is None
        except MetadataError as error:
            raise bundle_not_ready(bundle, f"metadata cannot be asked who is to have it: {error}") from error

    async def require(self, topic: TopicName) -> None:
        if topic == self._own_topic and self.owns(topic):
            return
        location = await self.locate_bundle(await self.bundle_of(topic))
        if isinstance(location, There):
            message = f"topic {topic} is served by broker {location.broker_id}, not by {self.broker_id} ({KEEPS_CONNECTION})"
            raise NotOwnerError(message, location, topic=str(topic))

    @property
    def brokers(self) -> Mapping[str, Mapping[str, str]]:
        return {name: record.addresses for name, record in self.directory.brokers.items()}

    def statistics(self) -> OwnershipFigures:
        states = self.states
        return OwnershipFigures(len(self.directory.brokers), len(list(states.owned())), states.acquired, states.lost)

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
        await self._tenures.release(bundle, to=to, reason=reason)

    async def bundle_of(self, topic: TopicName) -> Bundle:
        """Raises NamespaceNotFoundError, ServiceNotReadyError."""
        return bundle_of(topic, await self._counts.get(topic.namespace))

    async def locate_bundle(self, bundle: Bundle, *, authoritative: bool = False) -> Location:
        """As `locate`."""
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
        """None: something changed meanwhile, look again."""
        if (tenure := self.states.find(bundle)) is not None:
            if (
                tenure.phase is not Phase.OWNED
            ):  # a wait instead of a refusal: clients that are refused wait twice as long each time
                await self._tenures.wait_settled(tenure)
            return Here() if self.states.owns(bundle) else None
        if self._store.session_state is not SessionState.CONNECTED:
            raise bundle_not_ready(bundle, "this broker has no session with the metadata store")
        if not self._registered.is_set():  # it just starts
            await self._registered.wait()
            return None
        # One read for all that ask at the same time: after a failover a client looks up thousands of topics of few bundles.
        owner = await self._reads.run(bundle, self._tenures.owner_of)
        if owner is not None and not self._tenures.may_take(owner):
            return There(owner.broker_id, owner.addresses)
        if owner is None and (there := await self._choose(bundle, authoritative=authoritative)) is not None:
            return there
        if self._stopping:
            raise bundle_not_ready(bundle, "this broker stops")
        if self.states.find(bundle) is None:  # still, after all this waiting
            self._tenures.acquire_soon(bundle)
        return None

    async def _choose(self, bundle: Bundle, *, authoritative: bool) -> There | None:
        """Who is to have what nobody has; None: this broker."""
        brokers = {
            name: record for name, record in self.directory.brokers.items() if not (self._stopping and name == self.broker_id)
        }
        if authoritative and not self._stopping:
            return None
        order = preference(bundle, brokers, await self._tenures.preferred_for(bundle))
        if not order or order[0] == self.broker_id:
            return None
        return There(order[0], brokers[order[0]].addresses, chosen=True)

    def _choose_heir(self, bundle: Bundle) -> str:
        """Who is to have what this broker gives away; empty: there is nobody else."""
        others = [name for name in self.directory.brokers if name != self.broker_id]
        return next(iter(preference(bundle, others)), "")

    def _what_takes_so_long(self, bundle: Bundle) -> str:
        if not self._registered.is_set():
            return "this broker is not registered yet"
        tenure = self.states.find(bundle)
        releasing = tenure is not None and tenure.phase is Phase.RELEASING
        return "it is being unloaded" if releasing else "metadata cannot be asked who owns it: timeout"


def _stopped() -> ServiceNotReadyError:
    return ServiceNotReadyError(f"this broker stops ({KEEPS_CONNECTION})")
