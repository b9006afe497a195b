"""The records of the bundles that one broker has: made, followed and deleted as `BundleStates` decides.

    acquire_soon ──► owner's record, history ──► one multi ──► followed ──► gone, or another's: dropped at once
    release ──► topics handed over to the heir, or unloaded ──► one multi: the record goes, the history says who is preferred
                                                                    └──► the heir is asked to take it (hand_over.py)

    /bundles/T/N/range            {broker, incarnation, epoch, addresses}    ephemeral, made once, never replaced
    /bundle-histories/T/N/range   {epoch, preferred}                         persistent, written in the same multi

Rules
1. Whoever acquires or releases writes the history with the version it read: of two that try, one comes through, and a record that
   was made by somebody else since is never deleted (an ephemeral record alone always has version 0).
2. The record is watched while it is owned. Gone, or somebody else's: topics are dropped at once (`BundleUser.drop_unowned`).
3. A write whose outcome is unknown counts as not done. If it was done, the record is ours, and whoever asks next finds that.
4. A record with our addresses and another incarnation is that of a process before us: two cannot listen at one address. It is
   replaced, so that a broker that was restarted does not wait for the end of its old session.
5. The record of a broker that is gone is replaced before its session ends (broker_liveness.py), unless it is registered again.
6. The record of a broker whose id is registered at other addresses is that of an earlier process, and is replaced as well: a
   process registers under an id only when no other one is, and acquires bundles only after that. The registration is read after the
   record, so that the record of the newer process is never replaced.
7. A bundle whose history says that it was split is not acquired, unless the namespace has it all the same: it was deleted and
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
    user: BundleUser
    broker_id = ""
    addresses: Mapping[str, str] = {}
    """Both known once the broker starts."""
    divisions: BundleDivisions
    directory: BrokerDirectory

    find_heir: Callable[[Tenure, str], Heir | None] = staticmethod(lambda tenure, broker_id: None)
    """The broker with this id, if it can be asked to open topics; else bundles are given up without a word to it."""
    on_heir_failed: Callable[[Heir, BaseException], None] = staticmethod(lambda heir, error: None)

    def __init__(
        self,
        store: MetadataStore,
        states: BundleStates,
        choose_heir: Callable[[Bundle], str],
        tasks: TaskOwner,
        liveness: BrokerLiveness | None = None,
    ) -> None:
        """`choose_heir` names who is preferred for a bundle that is released to nobody in particular. Without `liveness` other
        brokers are gone when their sessions have ended."""
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
        """Of bundles whose topics are moving away from here."""
        self.released = self.topics_moved = self.hand_overs_failed = 0

    def __repr__(self) -> str:
        return f"<BundleTenures of {self.broker_id}, {self._states!r}>"

    async def owner_of(self, bundle: Bundle) -> BundleOwner | None:
        """By its record. Raises MetadataError."""
        found = await self._owners.get(bundle.noun)
        return None if found is None else found.record

    async def preferred_for(self, bundle: Bundle) -> str:
        """Who is to have it by the word of its last owner; empty: nobody in particular. Raises MetadataError."""
        history = await self._histories.get(bundle.noun)
        return "" if history is None else history.record.preferred

    def may_take(self, owner: BundleOwner) -> bool:
        """Rules 3 to 6; of the last two `_take` makes sure."""
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
        """Until its acquisition, release or split has ended; how shows a look at the states."""
        if tenure.phase is Phase.SPLITTING:
            await self.divisions.wait_free(tenure.bundle.namespace)
            return
        under_way = self._releasing if tenure.phase is Phase.RELEASING else self._acquiring
        await asyncio.wait([under_way[tenure.bundle]])

    # Acquiring, and following what was acquired

    def acquire_soon(self, bundle: Bundle) -> None:
        """Of a bundle without a tenure. What stores raise reaches whoever looks next."""
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
        except (KeyExistsError, BadVersionError, NoSuchKeyError):  # somebody else was faster
            self._states.on_not_acquired(tenure)
            return
        self._on_acquired(tenure, epoch, results[0] if isinstance(results[0], int) else 0)

    async def _is_current(self, bundle: Bundle) -> bool:
        """Whether the namespace has this bundle, as its record says now. Raises ServiceNotReadyError, NamespaceNotFoundError."""
        return is_in(bundle, await self.divisions.refresh(bundle.namespace))

    async def _is_free(self, owner: BundleOwner) -> bool:
        """Whether the record may be replaced, by the owner's registration as it is now: a gone broker may have come back since.
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
        record = BundleHistory(epoch=epoch)  # nobody is preferred any more: this is where the bundle was to go
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
        """Follow the records of bundles that a split has made."""
        for tenure in parts:
            self._follow_soon(tenure)

    def _follow_soon(self, tenure: Tenure) -> None:
        if self._states.holds(tenure):
            self._tasks.start(self._follow(tenure), name=f"follow {tenure.bundle}")

    async def _follow(self, tenure: Tenure) -> None:
        """Rule 2. Armed, then read: no change is missed."""
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
            except MetadataError:  # SUSPENDED: what is owned goes on
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
        """Metadata answers again: look now who owns what. Until then a client that comes back opens its topic here, although
        another broker may have it."""
        self._connected.set()
        self._connected.clear()

    def _on_record(self, tenure: Tenure, record: BundleOwner | None) -> None:
        if self._states.on_record(tenure, record):
            owner = "nobody" if record is None else record.broker_id
            log.warning("bundle.lost", extra={"bundle": str(tenure.bundle), "broker": self.broker_id, "owner": owner})
            self.user.drop_unowned()

    # Releasing

    async def release(self, bundle: Bundle, *, to: str, reason: str) -> None:
        """As `Ownership.release`. Not owned is success."""
        await self._wait_split(bundle)
        if (tenure := self._states.begin_release(bundle)) is not None:
            task = self._tasks.start(self._release_outcome(tenure, to, reason), name=f"release {bundle}")
            self._releasing[bundle] = task
            if (error := await asyncio.shield(task)) is not None:
                raise error

    @property
    def given_away(self) -> int:
        """Bundles that are free, and that their heirs have not taken yet, as far as this broker knows."""
        return sum(self._states.find(bundle) is None for bundle in self._releasing)

    async def _wait_split(self, bundle: Bundle) -> None:
        """Until it is not being split. Its parts are other bundles: whoever releases it releases nothing then."""
        while (tenure := self._states.find(bundle)) is not None and tenure.phase is Phase.SPLITTING:
            await self.wait_settled(tenure)

    def on_divided(self, namespace: NamespaceName, division: Division | None) -> None:
        """The namespace is divided otherwise: give up the bundles that it no longer has. None: it is gone, and all of them go."""
        reason = "its namespace is gone" if division is None else "it was split"
        for tenure in self._states.owned():
            if tenure.bundle.namespace == namespace and (division is None or not is_in(tenure.bundle, division)):
                work = self._release_quietly(tenure.bundle, reason)
                self._tasks.start(work, name=f"release {tenure.bundle}")

    async def release_all(self) -> None:
        """Those that are being acquired too. What cannot be released is logged, and ends with the session."""
        await asyncio.gather(*self._acquiring.values(), return_exceptions=True)
        await self.give_away("the broker stops")

    async def give_away(self, reason: str, until: Callable[[], bool] = lambda: False) -> bool:
        """Release what is owned now, in turn, while not `until`. Return whether all of these releases succeeded."""
        turns = asyncio.Semaphore(_RELEASED_AT_ONCE)

        async def release(bundle: Bundle) -> bool:
            async with turns:
                return until() or await self._release_quietly(bundle, reason)

        for tenure in self._states.owned():
            await self._wait_split(tenure.bundle)
        return all(await asyncio.gather(*(release(tenure.bundle) for tenure in list(self._states.owned()))))

    async def _release_quietly(self, bundle: Bundle, reason: str) -> bool:
        """Release the bundle and return whether that succeeded. A defect must not keep other bundles from being released; the task
        that it ended has logged it."""
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
        """An error is a result here: it is no failed task."""
        bundle = tenure.bundle
        try:
            return await self._release(tenure, to, reason)
        finally:
            self.heirs.pop(bundle, None)
            self._states.on_kept(tenure)  # unless it was released, or lost
            if self._releasing.get(bundle) is asyncio.current_task():
                del self._releasing[bundle]

    async def _release(self, tenure: Tenure, to: str, reason: str) -> ServiceNotReadyError | None:
        bundle = tenure.bundle
        heir = self.find_heir(tenure, to or self._choose_heir(bundle))
        preferred = to
        if heir is not None and await self._hand_over(tenure, heir, reason):
            preferred = heir.there.broker_id
        elif heir is not None and self.find_heir(tenure, heir.there.broker_id) is None:
            preferred = ""  # it does not answer, although it may be the one that was asked for
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
        """Move the bundle's open topics. False: not all of them are there; the rest is still to be unloaded."""
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
        except (CepheidError, TimeoutError) as error:  # it takes the bundle when a client asks for one of its topics
            self.on_heir_failed(heir, error)
            log.info("bundle.not_taken_yet", extra={"heir": heir.there.broker_id, "error": str(error) or "timeout"})
        except Exception as error:
            log.exception("bundle.hand_over_defect", extra={"heir": heir.there.broker_id, "error": repr(error)})
