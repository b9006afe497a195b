"""Ownership among many brokers: one ephemeral record for each bundle that is served, made and followed here.

    locate ──► ours already? ──► owner's record ──► another's: There
                                     └── none ──► preference(bundle, registered brokers) ──► another: There, chosen
                                                                          └── this one ──► acquire: one multi ──► Here
    release ──► topics unloaded ──► one multi: the record goes, the history says who is preferred

    /bundles/T/N/range            {broker, incarnation, epoch, addresses}    ephemeral, made once, never replaced
    /bundle-histories/T/N/range   {epoch, preferred}                         persistent, written in the same multi

Rules
1. Whoever acquires or releases writes the history with the version it read: of two that try, one comes through, and a record that
   was made by somebody else since is never deleted (an ephemeral record alone always has version 0).
2. The record is watched while it is owned. Gone, or somebody else's: topics are dropped at once (`BundleUser.drop_unowned`).
3. A session that is LOST takes everything along, before anything else happens; SUSPENDED takes nothing: what is owned goes on, and
   nothing is acquired.
4. A write whose outcome is unknown counts as not done. If it was done, the record is ours, and whoever asks next finds that.
5. A record with our addresses and another incarnation is that of a process before us: two cannot listen at one address. It is
   replaced, so that a broker that was restarted does not wait for the end of its old session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from cepheid_broker.broker_directory import RETRY_S, BrokerDirectory
from cepheid_broker.bundle_counts import BundleCounts
from cepheid_broker.bundle_states import BundleStates, Phase, Tenure
from cepheid_broker.bundles import Bundle, bundle_of, preference
from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.owner_reach import OwnerReach
from cepheid_broker.ownership import (
    KEEPS_CONNECTION,
    BundleUser,
    Here,
    Location,
    NotOwnerError,
    OwnershipFigures,
    There,
    health_topic,
)
from cepheid_metadata import (
    BadVersionError,
    BrokerRegistration,
    BundleHistory,
    BundleOwner,
    Found,
    KeyExistsError,
    MetadataError,
    MetadataStore,
    NoSuchKeyError,
    Op,
    Registration,
    SessionState,
    StoreClosedError,
    broker_records,
    bundle_histories,
    bundle_owners,
)
from cepheid_ports import CepheidError, Ports, SingleFlight, TaskOwner
from cepheid_wire import NamespaceName, TopicName

log = logging.getLogger(__name__)

_ATTEMPTS = 5  # of a lookup that meets others who acquire and release at the same time
_RELEASED_AT_ONCE = 4  # bundles; their topics are unloaded together


class BundleOwnership:
    """`start` once its ports are open, `aclose` once. Implements `Ownership`."""

    is_shared = True
    user: BundleUser

    def __init__(
        self,
        store: MetadataStore,
        ports: Ports,
        *,
        release: str = "",
        timeout_s: float = 10.0,
        patience_s: float = 20.0,
        reach: OwnerReach | None = None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Without `reach` an owner is taken at its record's word. Another broker's registration under our id is waited for during
        `patience_s`; once started `on_failed` hears that it stayed."""
        self.broker_id = ""
        """Known once started: it may be an address with a port that the system chose."""
        self.states = BundleStates(f"{ports.random.getrandbits(64):016x}")
        self._store = store
        self._ports = ports
        self._release_name = release
        self._patience_s = patience_s
        self._on_failed = on_failed
        self._timeout_s = timeout_s
        self._reach = reach
        self._addresses: dict[str, str] = {}
        self._own_topic: TopicName | None = None
        self._tasks = TaskOwner("ownership")
        self.directory = BrokerDirectory(store, self._tasks)
        self._owners = bundle_owners(store)
        self._histories = bundle_histories(store)
        self._registration: Registration[BrokerRegistration] | None = None
        self._counts = BundleCounts(store, self._tasks, self._on_namespace_gone)
        self._acquiring: dict[Bundle, asyncio.Task[None]] = {}
        self._releasing: dict[Bundle, asyncio.Task[ServiceNotReadyError | None]] = {}
        self._registered = asyncio.Event()
        self._reads: SingleFlight[Bundle, Found[BundleOwner] | None] = SingleFlight("owner-reads", _stopped)
        self._stopping = False
        self._unsubscribe = store.subscribe(self.on_session)

    def __repr__(self) -> str:
        return f"<BundleOwnership of {self.broker_id}, {self.states!r}>"

    # Lifetime

    async def start(self, broker_id: str, addresses: Mapping[str, str]) -> None:
        """Registers the broker: from here on it is given bundles. Raises MetadataError, and may be called again then."""
        self.broker_id, self._addresses = broker_id, dict(addresses)
        self._own_topic = health_topic(broker_id)  # whoever owns its bundle: a broker must be able to try itself
        await self.directory.start()
        if self._registration is None:
            self._registration = await self._register()
        await self.directory.refresh()
        self._registered.set()

    async def _register(self) -> Registration[BrokerRegistration]:
        own = BrokerRegistration(
            broker_id=self.broker_id,
            addresses=self._addresses,
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
        """Rule 3."""
        if state is SessionState.LOST:
            lost = self.states.on_session_lost()
            log.warning("bundles.lost", extra={"broker": self.broker_id, "bundles": len(lost), "reason": "the session ended"})
            self.user.drop_unowned()

    async def release_all(self) -> None:
        self._stopping = True
        await self._deregister()
        turns = asyncio.Semaphore(_RELEASED_AT_ONCE)

        async def release(bundle: Bundle) -> None:
            async with turns:
                try:
                    await self.release(bundle, reason="the broker stops")
                except CepheidError as error:
                    log.warning("bundle.not_released", extra={"bundle": str(bundle), "error": str(error)})

        await asyncio.gather(*self._acquiring.values(), return_exceptions=True)
        await asyncio.gather(*(release(tenure.bundle) for tenure in self.states.owned()))

    async def aclose(self) -> None:
        self._stopping = True
        self._unsubscribe()
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
            found = await self._owners.get(bundle.noun)
        except MetadataError as error:
            raise self._not_now(bundle, f"metadata cannot be asked who owns it: {error}") from error
        if found is None:
            return None
        return Here() if self.states.is_own(found.record) else There(found.record.broker_id, found.record.addresses)

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
            raise self._not_now(bundle, f"metadata cannot be asked who owns it: {error}") from error
        except TimeoutError:
            raise self._not_now(bundle, self._what_takes_so_long(bundle)) from None
        raise self._not_now(bundle, "others acquire and release it at the same time")

    async def _look(self, bundle: Bundle, *, authoritative: bool) -> Location | None:
        """None: something changed meanwhile, look again."""
        if (tenure := self.states.find(bundle)) is not None:
            if tenure.phase is Phase.RELEASING:  # clients that are refused wait twice as long each time
                await asyncio.wait([self._releasing[bundle]])
                return None
            if tenure.phase is Phase.ACQUIRING:
                await asyncio.wait([self._acquiring[bundle]])
                return Here() if self.states.owns(bundle) else None
            return Here()
        if self._store.session_state is not SessionState.CONNECTED:
            raise self._not_now(bundle, "this broker has no session with the metadata store")
        if not self._registered.is_set():  # it just starts
            await self._registered.wait()
            return None
        # One read for all that ask at the same time: after a failover a client looks up thousands of topics of few bundles.
        found = await self._reads.run(bundle, self._read_owner)
        if found is not None and not self._may_take(found.record):
            return There(found.record.broker_id, found.record.addresses)
        if found is None and (there := await self._choose(bundle, authoritative=authoritative)) is not None:
            return there
        if self._stopping:
            raise self._not_now(bundle, "this broker stops")
        if self.states.find(bundle) is None:  # still, after all this waiting
            tenure = self.states.begin_acquire(bundle)
            self._acquiring[bundle] = self._tasks.start(self._acquire(tenure), name=f"acquire {bundle}")
        return None

    async def _read_owner(self, bundle: Bundle) -> Found[BundleOwner] | None:
        return await self._owners.get(bundle.noun)

    async def _choose(self, bundle: Bundle, *, authoritative: bool) -> There | None:
        """Who is to have what nobody has; None: this broker."""
        brokers = {
            name: record for name, record in self.directory.brokers.items() if not (self._stopping and name == self.broker_id)
        }
        if authoritative and not self._stopping:
            return None
        history = await self._histories.get(bundle.noun)
        order = preference(bundle, brokers, "" if history is None else history.record.preferred)
        if not order or order[0] == self.broker_id:
            return None
        return There(order[0], brokers[order[0]].addresses, chosen=True)

    def _may_take(self, record: BundleOwner) -> bool:
        """Rules 4 and 5."""
        return self.states.is_own(record) or record.addresses == self._addresses

    def _what_takes_so_long(self, bundle: Bundle) -> str:
        if not self._registered.is_set():
            return "this broker is not registered yet"
        tenure = self.states.find(bundle)
        releasing = tenure is not None and tenure.phase is Phase.RELEASING
        return "it is being unloaded" if releasing else "metadata cannot be asked who owns it: timeout"

    def _not_now(self, bundle: Bundle, why: str) -> ServiceNotReadyError:
        return ServiceNotReadyError(f"bundle {bundle}: {why} ({KEEPS_CONNECTION})", bundle=str(bundle))

    def _on_namespace_gone(self, namespace: NamespaceName) -> None:
        for tenure in self.states.owned():
            if tenure.bundle.namespace == namespace:
                self._tasks.start(self._release_quietly(tenure.bundle), name=f"release {tenure.bundle}")

    # Acquiring, and following what was acquired

    async def _acquire(self, tenure: Tenure) -> None:
        """What stores raise reaches whoever looks next."""
        bundle = tenure.bundle
        try:
            await self._take(tenure)
        except MetadataError as error:
            self.states.on_not_acquired(tenure)  # rule 4
            log.warning("bundle.not_acquired", extra={"bundle": str(bundle), "error": str(error)})
        finally:
            if self._acquiring.get(bundle) is asyncio.current_task():
                del self._acquiring[bundle]

    async def _take(self, tenure: Tenure) -> None:
        bundle, incarnation = tenure.bundle, self.states.incarnation
        owner, history = await self._owners.get(bundle.noun), await self._histories.get(bundle.noun)
        if owner is not None and history is not None and self.states.is_own(owner.record):
            self._on_acquired(tenure, owner.record.epoch, history.version)
            return
        if owner is not None and not self._may_take(owner.record):
            self.states.on_not_acquired(tenure)
            return
        epoch = 1 if history is None else history.record.epoch + 1
        record = BundleOwner(broker_id=self.broker_id, incarnation=incarnation, epoch=epoch, addresses=self._addresses)
        try:
            results = await self._store.multi([self._history_op(bundle, history, epoch), *self._owner_ops(bundle, owner, record)])
        except (KeyExistsError, BadVersionError, NoSuchKeyError):  # somebody else was faster
            self.states.on_not_acquired(tenure)
            return
        self._on_acquired(tenure, epoch, results[0] if isinstance(results[0], int) else 0)

    def _history_op(self, bundle: Bundle, found: Found[BundleHistory] | None, epoch: int) -> Op:
        record = BundleHistory(epoch=epoch)  # nobody is preferred any more: this is where the bundle was to go
        if found is None:
            return self._histories.create_op(bundle.noun, record)
        return self._histories.replace_op(bundle.noun, record, found.version)

    def _owner_ops(self, bundle: Bundle, before: Found[BundleOwner] | None, record: BundleOwner) -> list[Op]:
        create = self._owners.create_op(bundle.noun, record, ephemeral=True)
        return [create] if before is None else [self._owners.delete_op(bundle.noun, before.version), create]

    def _on_acquired(self, tenure: Tenure, epoch: int, history_version: int) -> None:
        if self.states.on_acquired(tenure, epoch, history_version):
            log.info("bundle.acquired", extra={"bundle": str(tenure.bundle), "broker": self.broker_id, "epoch": epoch})
            self._follow_soon(tenure)

    def _follow_soon(self, tenure: Tenure) -> None:
        if self.states.holds(tenure):
            self._tasks.start(self._follow(tenure), name=f"follow {tenure.bundle}")

    async def _follow(self, tenure: Tenure) -> None:
        """Rule 2. Armed, then read: no change is missed."""
        key = self._owners.key_of(tenure.bundle.noun)
        while self.states.holds(tenure):
            try:
                watch = await self._store.watch(key)
                try:
                    found = await self._owners.get(tenure.bundle.noun)
                except BaseException:
                    watch.cancel()
                    raise
            except StoreClosedError:
                return
            except MetadataError:
                await asyncio.sleep(RETRY_S)  # SUSPENDED: rule 3
                continue
            self._on_record(tenure, None if found is None else found.record)
            if self.states.holds(tenure):
                watch.call_when_settled(partial(self._follow_soon, tenure))
            else:
                watch.cancel()
            return

    def _on_record(self, tenure: Tenure, record: BundleOwner | None) -> None:
        if self.states.on_record(tenure, record):
            owner = "nobody" if record is None else record.broker_id
            log.warning("bundle.lost", extra={"bundle": str(tenure.bundle), "broker": self.broker_id, "owner": owner})
            self.user.drop_unowned()

    # Releasing

    async def release(self, bundle: Bundle, *, to: str = "", reason: str = "its bundle is unloaded") -> None:
        """Not owned is success."""
        if (tenure := self.states.begin_release(bundle)) is not None:
            task = self._tasks.start(self._release_outcome(tenure, to, reason), name=f"release {bundle}")
            self._releasing[bundle] = task
            if (error := await asyncio.shield(task)) is not None:
                raise error

    async def _release_quietly(self, bundle: Bundle) -> None:
        try:
            await self.release(bundle, reason="its namespace is gone")
        except CepheidError as error:
            log.warning("bundle.not_released", extra={"bundle": str(bundle), "error": str(error)})

    async def _release_outcome(self, tenure: Tenure, to: str, reason: str) -> ServiceNotReadyError | None:
        """An error is a result here: it is no failed task."""
        bundle = tenure.bundle
        try:
            return await self._release(tenure, to, reason)
        finally:
            self.states.on_kept(tenure)  # unless it was released, or lost
            if self._releasing.get(bundle) is asyncio.current_task():
                del self._releasing[bundle]

    async def _release(self, tenure: Tenure, to: str, reason: str) -> ServiceNotReadyError | None:
        bundle = tenure.bundle
        await self.user.unload_bundle(bundle, reason)
        others = [name for name in self.directory.brokers if name != self.broker_id]
        preferred = to or next(iter(preference(bundle, others)), "")
        history = BundleHistory(epoch=tenure.epoch, preferred=preferred)
        try:
            await self._store.multi(
                [
                    self._histories.replace_op(bundle.noun, history, tenure.history_version),
                    self._owners.delete_op(bundle.noun, 0),
                ]
            )
        except (BadVersionError, NoSuchKeyError):
            pass  # it is not ours any more
        except MetadataError as error:
            self._follow_soon(tenure)
            return self._not_now(bundle, f"it could not be released: {error}")
        self.states.on_released(tenure)
        log.info(
            "bundle.released", extra={"bundle": str(bundle), "broker": self.broker_id, "preferred": preferred, "reason": reason}
        )
        return None


def _stopped() -> ServiceNotReadyError:
    return ServiceNotReadyError(f"this broker stops ({KEEPS_CONNECTION})")
