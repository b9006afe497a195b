"""The metadata records of one broker's bundles: created, watched and deleted as `BundleStates` decides.

    acquire_soon ──► owner's record, history ──► one multi ──► watched ──► gone, or another's: dropped at once
    release ──► topics handed over to the heir, or unloaded ──► one multi: record deleted, history names the preferred broker
                                                                    └──► the heir is asked to take it (hand_over.py)

    /bundles/T/N/range            {broker, incarnation, epoch, addresses}    ephemeral, created once, never replaced
    /bundle-histories/T/N/range   {epoch, preferred}                         persistent, written in the same multi

Rules
1. To acquire or release, a broker writes the history with the version it read. Of two brokers that try, one succeeds, and a record
   that another broker has created since is never deleted (an ephemeral record alone always has version 0).
2. The record is watched while the bundle is owned. If it is deleted or another broker's, topics are dropped at once
   (`BundleUser.drop_unowned`).
3. A write of unknown outcome counts as not done. If it was done, the record is ours, and the next lookup finds it.
4. A record with our addresses and another incarnation is from an earlier process: two cannot listen at one address. It is
   replaced, so that a restarted broker does not wait for the end of its old session.
5. The record of a broker that is gone is replaced before its session ends (broker_liveness.py), unless it is registered again.
6. If a broker's id is registered at other addresses than in the record, the record is from an earlier process and is replaced as
   well: a process registers under an id only when no other does, and acquires bundles only after that. The registration is read
   after the record, so that the record of the newer process is never replaced.
7. A bundle whose history says that it was split is not acquired, unless the namespace has it again because it was deleted and
   created again since.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership.broker_directory import RETRY_S, BrokerDirectory
from cepheid_broker.ownership.broker_liveness import BrokerLiveness
from cepheid_broker.ownership.bundle_divisions import BundleDivisions
from cepheid_broker.ownership.bundle_states import BundleStates, Phase, Tenure
from cepheid_broker.ownership.bundles import Bundle, Division, is_in
from cepheid_broker.ownership.hand_over import Heir
from cepheid_broker.ownership.ownership import BundleUser, bundle_not_ready
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
    StoreClosedError,
    broker_records,
    bundle_histories,
    bundle_owners,
)
from cepheid_ports import CepheidError, TaskOwner
from cepheid_wire import NamespaceName

log = logging.getLogger(__name__)

_RELEASED_AT_ONCE = 4  # bundles; their topics are unloaded together


class BundleTenures:
    """The bundles that one broker acquires, owns and releases, with their records in metadata."""

    user: BundleUser
    broker_id = ""
    addresses: Mapping[str, str] = {}
    """Addresses of this broker. They and `broker_id` are known once the broker starts."""
    divisions: BundleDivisions
    directory: BrokerDirectory

    find_heir: Callable[[Tenure, str], Heir | None] = staticmethod(lambda tenure, broker_id: None)
    """Return the broker with this id if it can be asked to open topics; if None, bundles are released without notifying it."""
    on_heir_failed: Callable[[Heir, BaseException], None] = staticmethod(lambda heir, error: None)

    def __init__(
        self,
        store: MetadataStore,
        states: BundleStates,
        choose_heir: Callable[[Bundle], str],
        tasks: TaskOwner,
        liveness: BrokerLiveness | None = None,
    ) -> None:
        """`choose_heir` names the preferred broker for a bundle that is released without a destination. Without `liveness` other
        brokers count as gone only when their sessions have ended."""
        self._store = store
        self._states = states
        self._choose_heir = choose_heir
        self._tasks = tasks
        self._liveness = liveness
        self._owners = bundle_owners(store)
        self._histories = bundle_histories(store)
        self._registrations = broker_records(store)
        self._acquiring: dict[Bundle, asyncio.Task[None]] = {}
        self._releasing: dict[Bundle, asyncio.Task[ServiceNotReadyError | None]] = {}
        self._connected = asyncio.Event()
        self.heirs: dict[Bundle, Heir] = {}
        """Next owners of the bundles whose topics are being handed over."""
        self.released = self.topics_moved = self.hand_overs_failed = 0

    def __repr__(self) -> str:
        return f"<BundleTenures of {self.broker_id}, {self._states!r}>"

    async def owner_of(self, bundle: Bundle) -> BundleOwner | None:
        """Return the record of the bundle's owner, or None. Raises MetadataError."""
        found = await self._owners.get(bundle.noun)
        return None if found is None else found.record

    async def preferred_for(self, bundle: Bundle) -> str:
        """Return the id of the broker that the last owner named for the bundle, or "". Raises MetadataError."""
        history = await self._histories.get(bundle.noun)
        return "" if history is None else history.record.preferred

    def may_take(self, owner: BundleOwner) -> bool:
        """Return whether the owner's record may be replaced (rules 3 to 6). `_take` confirms rules 5 and 6 in metadata."""
        return (
            self._states.is_own(owner)
            or owner.addresses == self.addresses
            or self._is_gone(owner)
            or self._is_succeeded(self.directory.brokers.get(owner.broker_id), owner)
        )

    @staticmethod
    def _is_succeeded(registered: BrokerRegistration | None, owner: BundleOwner) -> bool:
        """Return whether another process is registered under the id of this owner (rule 6)."""
        return registered is not None and registered.addresses != owner.addresses

    def _is_gone(self, owner: BundleOwner) -> bool:
        return self._liveness is not None and self._liveness.is_gone(owner.broker_id)

    async def wait_settled(self, tenure: Tenure) -> None:
        """Wait until the bundle's acquisition, release or split has ended; look at its state for the outcome."""
        if tenure.phase is Phase.SPLITTING:
            await self.divisions.wait_free(tenure.bundle.namespace)
            return
        under_way = self._releasing if tenure.phase is Phase.RELEASING else self._acquiring
        await asyncio.wait([under_way[tenure.bundle]])

    # Acquire bundles and watch their records

    def acquire_soon(self, bundle: Bundle) -> None:
        """Begin to acquire a bundle that has no tenure. If the store fails, the next lookup finds the bundle without one."""
        tenure = self._states.begin_acquire(bundle)
        self._acquiring[bundle] = self._tasks.start(self._acquire(tenure), name=f"acquire {bundle}")

    async def _acquire(self, tenure: Tenure) -> None:
        bundle = tenure.bundle
        try:
            await self._take(tenure)
        except (MetadataError, ServiceNotReadyError) as error:
            self._states.on_not_acquired(tenure)  # rule 3
            log.warning("bundle.not_acquired", extra={"bundle": str(bundle), "error": str(error)})
        finally:
            if self._acquiring.get(bundle) is asyncio.current_task():
                del self._acquiring[bundle]

    async def _take(self, tenure: Tenure) -> None:
        bundle, incarnation = tenure.bundle, self._states.incarnation
        owner, history = await self._owners.get(bundle.noun), await self._histories.get(bundle.noun)
        if owner is not None and history is not None and self._states.is_own(owner.record):
            self._on_acquired(tenure, owner.record.epoch, history.version)
            return
        if owner is not None and not await self._is_free(owner.record):
            self._states.on_not_acquired(tenure)
            return
        if history is not None and history.record.split_at is not None and not await self._is_current(bundle):
            self._states.on_not_acquired(tenure)  # rule 7
            return
        epoch = 1 if history is None else history.record.epoch + 1
        record = BundleOwner(broker_id=self.broker_id, incarnation=incarnation, epoch=epoch, addresses=dict(self.addresses))
        try:
            results = await self._store.multi([self._history_op(bundle, history, epoch), *self._owner_ops(bundle, owner, record)])
        except (KeyExistsError, BadVersionError, NoSuchKeyError):  # another broker was faster
            self._states.on_not_acquired(tenure)
            return
        self._on_acquired(tenure, epoch, results[0] if isinstance(results[0], int) else 0)

    async def _is_current(self, bundle: Bundle) -> bool:
        """Return whether the namespace's record has this bundle now. Raises ServiceNotReadyError, NamespaceNotFoundError."""
        return is_in(bundle, await self.divisions.refresh(bundle.namespace))

    async def _is_free(self, owner: BundleOwner) -> bool:
        """Return whether the record may be replaced. Reads the owner's current registration: a broker that was gone may be back.
        Raises MetadataError."""
        if not self.may_take(owner):
            return False
        if self._states.is_own(owner) or owner.addresses == self.addresses:
            return True
        registered = await self._registrations.get(owner.broker_id)
        if registered is not None:
            if self._is_succeeded(registered.record, owner):
                return True
            if self._is_succeeded(self.directory.brokers.get(owner.broker_id), owner):
                await self.directory.refresh()  # it was read before the owner registered, and the next look needs it
        return self._liveness is not None and self._is_gone(owner) and not await self._liveness.has_come_back(owner.broker_id)

    def _history_op(self, bundle: Bundle, found: Found[BundleHistory] | None, epoch: int) -> Op:
        record = BundleHistory(epoch=epoch)  # the preferred broker is cleared: the bundle has found its owner
        if found is None:
            return self._histories.create_op(bundle.noun, record)
        return self._histories.replace_op(bundle.noun, record, found.version)

    def _owner_ops(self, bundle: Bundle, before: Found[BundleOwner] | None, record: BundleOwner) -> list[Op]:
        create = self._owners.create_op(bundle.noun, record, ephemeral=True)
        return [create] if before is None else [self._owners.delete_op(bundle.noun, before.version), create]

    def _on_acquired(self, tenure: Tenure, epoch: int, history_version: int) -> None:
        if self._states.on_acquired(tenure, epoch, history_version):
            log.info("bundle.acquired", extra={"bundle": str(tenure.bundle), "broker": self.broker_id, "epoch": epoch})
            self._follow_soon(tenure)

    def follow_parts(self, parts: Iterable[Tenure]) -> None:
        """Watch the records of bundles that a split has created."""
        for tenure in parts:
            self._follow_soon(tenure)

    def _follow_soon(self, tenure: Tenure) -> None:
        if self._states.holds(tenure):
            self._tasks.start(self._follow(tenure), name=f"follow {tenure.bundle}")

    async def _follow(self, tenure: Tenure) -> None:
        """Watch the record of an owned bundle (rule 2). The watch is set before the read, so that no change is missed."""
        key = self._owners.key_of(tenure.bundle.noun)
        while self._states.holds(tenure):
            try:
                watch = await self._store.watch(key)
                try:
                    owner = await self.owner_of(tenure.bundle)
                except BaseException:
                    watch.cancel()
                    raise
            except StoreClosedError:
                return
            except MetadataError:  # SUSPENDED: owned bundles are still served
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._connected.wait()
                continue
            self._on_record(tenure, owner)
            if self._states.holds(tenure):
                watch.call_when_settled(partial(self._follow_soon, tenure))
            else:
                watch.cancel()
            return

    def on_connected(self) -> None:
        """Read the records again at once, because metadata answers again. Until then a client that reconnects opens its topic
        here, although another broker may own it."""
        self._connected.set()
        self._connected.clear()

    def _on_record(self, tenure: Tenure, record: BundleOwner | None) -> None:
        if self._states.on_record(tenure, record):
            owner = "nobody" if record is None else record.broker_id
            log.warning("bundle.lost", extra={"bundle": str(tenure.bundle), "broker": self.broker_id, "owner": owner})
            self.user.drop_unowned()

    # Release bundles

    async def release(self, bundle: Bundle, *, to: str, reason: str) -> None:
        """Release the bundle as described at `Ownership.release`. Succeeds if this broker does not own it."""
        await self._wait_split(bundle)
        if (tenure := self._states.begin_release(bundle)) is not None:
            task = self._tasks.start(self._release_outcome(tenure, to, reason), name=f"release {bundle}")
            self._releasing[bundle] = task
            if (error := await asyncio.shield(task)) is not None:
                raise error

    @property
    def given_away(self) -> int:
        """Number of released bundles that their next owners have not acquired yet, as far as this broker knows."""
        return sum(self._states.find(bundle) is None for bundle in self._releasing)

    async def _wait_split(self, bundle: Bundle) -> None:
        """Wait until the bundle is not being split. Its parts are other bundles: to release it then does nothing."""
        while (tenure := self._states.find(bundle)) is not None and tenure.phase is Phase.SPLITTING:
            await self.wait_settled(tenure)

    def on_divided(self, namespace: NamespaceName, division: Division | None) -> None:
        """Release the bundles that the namespace no longer has after its division changed; all of them if it was deleted (None)."""
        reason = "its namespace is gone" if division is None else "it was split"
        for tenure in self._states.owned():
            if tenure.bundle.namespace == namespace and (division is None or not is_in(tenure.bundle, division)):
                work = self._release_quietly(tenure.bundle, reason)
                self._tasks.start(work, name=f"release {tenure.bundle}")

    async def release_all(self) -> None:
        """Release all bundles, including those being acquired. A failure is logged; that bundle is free when the session ends."""
        await asyncio.gather(*self._acquiring.values(), return_exceptions=True)
        await self.give_away("the broker stops")

    async def give_away(self, reason: str, until: Callable[[], bool] = lambda: False) -> bool:
        """Release the bundles that are owned now, until `until` returns true. Return whether all of these releases succeeded."""
        turns = asyncio.Semaphore(_RELEASED_AT_ONCE)

        async def release(bundle: Bundle) -> bool:
            async with turns:
                return until() or await self._release_quietly(bundle, reason)

        for tenure in self._states.owned():
            await self._wait_split(tenure.bundle)
        return all(await asyncio.gather(*(release(tenure.bundle) for tenure in list(self._states.owned()))))

    async def _release_quietly(self, bundle: Bundle, reason: str) -> bool:
        """Release the bundle and return whether that succeeded. A defect must not keep other bundles from being released; the
        failed task has logged it."""
        try:
            await self.release(bundle, to="", reason=reason)
        except CepheidError as error:
            log.warning("bundle.not_released", extra={"bundle": str(bundle), "error": str(error)})
        except Exception as error:
            log.error("bundle.not_released", extra={"bundle": str(bundle), "error": repr(error)})
        else:
            return True
        return False

    async def _release_outcome(self, tenure: Tenure, to: str, reason: str) -> ServiceNotReadyError | None:
        """Release the bundle and return the error, if any: as a result, because an exception would count as a failed task."""
        bundle = tenure.bundle
        try:
            return await self._release(tenure, to, reason)
        finally:
            self.heirs.pop(bundle, None)
            self._states.on_kept(tenure)  # does nothing if it was released or lost
            if self._releasing.get(bundle) is asyncio.current_task():
                del self._releasing[bundle]

    async def _release(self, tenure: Tenure, to: str, reason: str) -> ServiceNotReadyError | None:
        bundle = tenure.bundle
        heir = self.find_heir(tenure, to or self._choose_heir(bundle))
        preferred = to
        if heir is not None and await self._hand_over(tenure, heir, reason):
            preferred = heir.there.broker_id
        elif heir is not None and self.find_heir(tenure, heir.there.broker_id) is None:
            preferred = ""  # it does not answer, even if it is the requested destination
        await self.user.unload_bundle(bundle, reason)
        preferred = preferred or self._choose_heir(bundle)
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
            return bundle_not_ready(bundle, f"it could not be released: {error}")
        self._states.on_released(tenure)
        moved = 0 if heir is None else len(heir.moved)
        self.released += 1
        self.topics_moved += moved
        extra = {"bundle": str(bundle), "broker": self.broker_id, "preferred": preferred, "reason": reason, "topics_moved": moved}
        log.info("bundle.released", extra=extra)
        if heir is not None and heir.moved and preferred == heir.there.broker_id:
            await self._ask_to_take(heir)
        return None

    async def _hand_over(self, tenure: Tenure, heir: Heir, reason: str) -> bool:
        """Hand over the bundle's open topics. Return False if some were not moved: they are still to be unloaded."""
        self.heirs[tenure.bundle] = heir
        try:
            return await self.user.hand_over(tenure.bundle, heir, reason)
        except (CepheidError, TimeoutError) as error:
            self.on_heir_failed(heir, error)
            self.hand_overs_failed += 1
            facts = {"bundle": str(tenure.bundle), "heir": heir.there.broker_id, "topics_moved": len(heir.moved)}
            log.warning("bundle.hand_over_failed", extra={**facts, "error": str(error) or "it did not answer in time"})
        except Exception as error:
            self.hand_overs_failed += 1
            facts = {"bundle": str(tenure.bundle), "heir": heir.there.broker_id, "topics_moved": len(heir.moved)}
            log.exception("bundle.hand_over_defect", extra={**facts, "error": repr(error)})
        return False

    async def _ask_to_take(self, heir: Heir) -> None:
        try:
            await heir.take()
        except (CepheidError, TimeoutError) as error:  # it acquires the bundle when a client asks for one of its topics
            self.on_heir_failed(heir, error)
            log.info("bundle.not_taken_yet", extra={"heir": heir.there.broker_id, "error": str(error) or "timeout"})
        except Exception as error:
            log.exception("bundle.hand_over_defect", extra={"heir": heir.there.broker_id, "error": repr(error)})
