"""The ephemeral record by which a process shows that it runs: created, kept, moved, created again; never two for one name.

    start / move / session back / record changed ──► look at the wanted place
        no record ──► create           mine ──► remove my records from the other places: registered
        mine from before an update ──► replace in place
        one of an earlier process of mine ──► delete, create
        another process's ──► wait until it vanishes; if it stays for `patience_s` ──► RegistrationTakenError

Rule 1: a record is that of an earlier process only if `is_past` proves that this process has ended; otherwise its session may live.
Rule 2: the new place is taken before the old one is left, so that a process that moves is always registered.
Rule 3: an outage of the store changes nothing: what was registered counts as registered until the session is lost.
Rule 4: bytes that are not a record do not count as a registration. They are replaced, and logged with their key: no process of ours
writes them, and another living process with this name finds our record then, and ends. A record of a newer release is another's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from cepheid_metadata.errors import (
    BadVersionError,
    CorruptRecordError,
    KeyExistsError,
    MetadataError,
    NewerFormatError,
    NoSuchKeyError,
    SessionLostError,
    StoreClosedError,
    StoreUnavailableError,
)
from cepheid_metadata.record import Record
from cepheid_metadata.repositories import Records
from cepheid_metadata.store import MetadataStore, SessionState
from cepheid_metadata.watch import Watch
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

_RETRY_S = 0.5
_LEAVE_TIMEOUT_S = 2.0


class RegistrationTakenError(MetadataError):
    """Another living process has this name."""

    hint: ClassVar[str] = "stop the other process, or give this one a name (`--id`) of its own"


class Registration(Generic[R]):
    """Keeps one process registered. `start` once, `aclose` once. `places[0]` is used first. `on_failed` is called if it gives
    up."""

    def __init__(
        self,
        store: MetadataStore,
        name: str,
        places: Sequence[Records[str, R]],
        record: R,
        *,
        is_past: Callable[[R], bool],
        patience_s: float,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._store = store
        self._name = name
        self._places = places
        self._record = record
        self._outdated: list[R] = []  # records that this process may have registered before an update
        self._is_past = is_past
        self._patience_s = patience_s
        self._tasks = TaskOwner(f"registration {name}", on_failed)
        self._wanted: int | None = 0
        self._taken: int | None = 0
        self._due = asyncio.Event()
        self._unsubscribe: Callable[[], None] | None = None
        self._watch: Watch | None = None
        self.registered = False

    def __repr__(self) -> str:
        state = "registered" if self.registered else "not registered"
        return f"<Registration {self.key}: {state}>"

    @property
    def key(self) -> str:
        """The key of the wanted place; the first place's if it should not be registered."""
        return self._places[self._wanted or 0].key_of(self._name)

    async def start(self, place: int = 0) -> None:
        """Return once registered, through any outage of the store. Raises RegistrationTakenError."""
        self._wanted = place
        self._unsubscribe = self._store.subscribe(self._on_session)
        while not await self._registered():  # noqa: ASYNC110 - a store that is away tells nobody when it is back
            await asyncio.sleep(_RETRY_S)
        self._tasks.start(self._keep(), name="keep")

    def move(self, place: int | None) -> None:
        """Request another place, or no registration (None). It takes effect as soon as the store answers."""
        if place != self._wanted:
            self._wanted = place
            self._due.set()

    def update(self, record: R) -> None:
        """Replace the record in place as soon as the store answers. The process stays registered meanwhile."""
        if record != self._record:
            self._outdated.append(self._record)
            self._record = record
            self._due.set()

    async def aclose(self) -> None:
        """Remove the registration if the store answers at once; otherwise the end of the session does it."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._tasks.aclose()
        self._disarm()
        self.registered = False
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                for place in self._places:
                    await self._leave(place)
        except (TimeoutError, MetadataError) as error:
            log.warning("registration.not_removed", extra={"key": self.key, "error": str(error)})

    def _on_session(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self.registered = False
        elif state is SessionState.CONNECTED:
            self._due.set()

    async def _keep(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                done = await self._registered()
            except StoreClosedError:
                return
            if not done:
                try:
                    async with asyncio.timeout(_RETRY_S):  # or until the session is back
                        await self._due.wait()
                except TimeoutError:
                    self._due.set()

    async def _registered(self) -> bool:
        """Register; return False if the store is not available."""
        try:
            await self._register()
        except (StoreUnavailableError, SessionLostError) as error:
            log.warning("registration.retried", extra={"key": self.key, "error": str(error)})
            return False
        return True

    async def _register(self) -> None:
        wanted, record = self._wanted, self._record
        if wanted is None:
            await self._withdraw()
            return
        place = self._places[wanted]
        await self._take(place)
        for other in self._places:
            if other is not place:
                await self._leave(other)
        if not self.registered or wanted != self._taken:
            log.info("registration.made", extra={"key": place.key_of(self._name)})
        self.registered, self._taken = True, wanted
        if record is self._record:
            self._outdated.clear()
        if wanted != self._wanted:
            self._due.set()

    async def _withdraw(self) -> None:
        self._disarm()
        if self.registered:
            log.info("registration.withdrawn", extra={"key": self.key})
        self.registered = False
        for place in self._places:
            await self._leave(place)
        if self._wanted is not None:
            self._due.set()

    async def _take(self, place: Records[str, R]) -> None:
        key = place.key_of(self._name)
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            watch = self._arm(await self._store.watch(key))
            try:
                found = await place.get(self._name)
            except CorruptRecordError as error:
                await self._delete_damaged(place, error)
                continue
            except NewerFormatError as error:
                await self._wait_for(watch, key, str(error), deadline)
                continue
            if found is None:
                await self._create(place)
            elif found.record == self._record:
                watch.call_when_settled(self._due.set)  # if it is deleted, it is created again
                return
            elif found.record in self._outdated:
                await self._replace(place, found.version)
            elif self._is_past(found.record):
                await self._delete(place, found.version)
            else:
                await self._wait_for(watch, key, str(found.record), deadline)

    async def _wait_for(self, watch: Watch, key: str, found: str, deadline: float) -> None:
        """Return when another process's record has changed."""
        log.warning("registration.waits", extra={"key": key, "found": found, "patience_s": self._patience_s})
        try:
            async with asyncio.timeout_at(deadline):
                await watch.wait()
        except TimeoutError:
            message = f"{key} is held by another process after {self._patience_s:g} s: {found}"
            raise RegistrationTakenError(message, key=key) from None

    async def _delete_damaged(self, place: Records[str, R], error: CorruptRecordError) -> None:
        """Delete and log bytes that are not a record (rule 4)."""
        key = place.key_of(self._name)
        hint = "it is replaced; find out what wrote there, and make sure that only Cepheid writes to this metadata store"
        log.error("registration.damaged", extra={"key": key, "error": error.args[0], "hint": hint})
        assert error.version is not None, f"{key} was read"
        await self._delete(place, error.version)

    def _arm(self, watch: Watch) -> Watch:
        self._disarm()
        self._watch = watch
        return watch

    def _disarm(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _create(self, place: Records[str, R]) -> None:
        try:
            await place.create(self._name, self._record, ephemeral=True)
        except KeyExistsError:
            pass  # the next look shows whose it is

    async def _leave(self, place: Records[str, R]) -> None:
        try:
            found = await place.get(self._name)
        except CorruptRecordError as error:
            await self._delete_damaged(place, error)
            return
        except NewerFormatError:
            return  # another process's
        if found is None:
            return
        if found.record in (self._record, *self._outdated) or self._is_past(found.record):
            await self._delete(place, found.version)

    async def _replace(self, place: Records[str, R], version: int) -> None:
        try:
            await place.replace(self._name, self._record, version)
        except (NoSuchKeyError, BadVersionError):
            pass  # it changed meanwhile: the next look shows how

    async def _delete(self, place: Records[str, R], version: int) -> None:
        try:
            await place.delete(self._name, version)
        except (NoSuchKeyError, BadVersionError):
            pass  # it changed meanwhile: the caller looks again
