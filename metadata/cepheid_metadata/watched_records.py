"""Records kept as current as the store's watches allow, each read once for all its users.

    use ──► armed, then read ──► record            watch fires ──► armed again, then read ──► differs? each user is notified

Watches, not a poll: a change is seen in one round trip, and unchanged records cost the store nothing. There is one watch for each
record in use, so their number is bounded by the users.

Rules
1. Armed, then read: no change is missed. What fires meanwhile is read once more, what fires often is read once.
2. A record that is deleted or cannot be read stays as last read; the next change is read again. With `forget_deleted` a deleted one
   becomes None.
3. A store that cannot be reached is tried again every second; until then everything stays as last read.
4. `stale_since` is the time from which a record may be out of date: when its watch fired, when it could not be read, or when its
   user called `suspect_all` because the store was unavailable. A read that starts after that clears it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, cast

from cepheid_metadata.errors import CorruptRecordError, MetadataError, NewerFormatError, StoreClosedError
from cepheid_metadata.record import Record
from cepheid_metadata.store import MetadataStore, watch_and_get
from cepheid_metadata.watch import Watch
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)

RETRY_S = 1.0
READS_AT_ONCE = 100

R = TypeVar("R", bound=Record)


class WatchedRecord(Generic[R]):
    """One record. Created by `WatchedRecords.use`. `record` None: there was none at any read."""

    def __init__(self, key: str, record_type: type[R], *, forget_deleted: bool = False) -> None:
        self.key = key
        self.record: R | None = None
        self.stale_since: float | None = None
        """Time of the loop; None: the record is the store's present one (rule 4)."""
        self.suspicions = 0
        self.users: dict[Hashable, Callable[[], None]] = {}
        self.watch: Watch | None = None
        self.reading = asyncio.Lock()
        self._record_type = record_type
        self._forget_deleted = forget_deleted

    def __repr__(self) -> str:
        return f"<WatchedRecord {self.key}, {len(self.users)} users>"

    def suspect(self) -> None:
        self.suspicions += 1
        if self.stale_since is None:
            self.stale_since = asyncio.get_running_loop().time()

    def take(self, value: bytes | None) -> bool:
        """Take a value; return whether it differs. Raises NewerFormatError, CorruptRecordError."""
        if value is None:
            changed = self._forget_deleted and self.record is not None
            if self._forget_deleted:
                self.record = None
            return changed
        found = self._record_type.decode(value, self.key)
        changed, self.record = found != self.record, found
        return changed


class WatchedRecords:
    def __init__(self, store: MetadataStore, tasks: TaskOwner, *, on_suspected: Callable[[], None] = lambda: None) -> None:
        """`on_suspected` is called whenever a record may be out of date from then on."""
        self._store = store
        self._tasks = tasks
        self._on_suspected = on_suspected
        self._by_key: dict[str, WatchedRecord[Record]] = {}
        self._stale: dict[str, None] = {}
        self._refreshing = False
        self._unreachable = 0
        """Failures since the store last answered: an outage is one line in the log, however many records there are."""

    def __repr__(self) -> str:
        return f"<WatchedRecords {len(self._by_key)}, {len(self._stale)} to be read>"

    def __len__(self) -> int:
        return len(self._by_key)

    async def use(
        self,
        key: str,
        record_type: type[R],
        user: Hashable,
        on_change: Callable[[], None],
        *,
        forget_deleted: bool = False,
    ) -> WatchedRecord[R]:
        """Read a record, and call `on_change` after each later change. Raises MetadataError.

        `forget_deleted` is that of the record's first user.
        """
        watched = self._by_key.get(key)
        if watched is None:
            made = WatchedRecord(key, record_type, forget_deleted=forget_deleted)
            watched = self._by_key[key] = cast("WatchedRecord[Record]", made)
        watched.users[user] = on_change
        try:
            async with watched.reading:  # by the first user
                if watched.watch is None:
                    await self._read(watched)
        except BaseException:
            self.leave(watched, user)
            raise
        return cast("WatchedRecord[R]", watched)

    def leave(self, watched: WatchedRecord[R], user: Hashable) -> None:
        """Remove a user; the watch is removed with the last one. Idempotent."""
        watched.users.pop(user, None)
        if not watched.users and self._by_key.get(watched.key) is watched:
            del self._by_key[watched.key]
            self._stale.pop(watched.key, None)
            if watched.watch is not None:
                watched.watch.cancel()

    def suspect_all(self) -> None:
        """Read every record again: the store was unavailable, or is now."""
        for key, watched in self._by_key.items():
            watched.suspect()
            self._refresh_soon(key)
        if self._by_key:
            self._on_suspected()

    async def _read(self, watched: WatchedRecord[Record]) -> bool:
        """Arm, then read (rule 1). Return whether the record changed."""
        suspicions = watched.suspicions
        watch, found = await watch_and_get(self._store, watched.key)
        try:
            changed = watched.take(None if found is None else found.value)
        except (NewerFormatError, CorruptRecordError) as error:
            log.warning("record.unreadable", extra={"key": watched.key, "error": str(error)})
            changed = False
            watched.suspect()
            self._on_suspected()
        if self._by_key.get(watched.key) is not watched:  # all users left meanwhile
            watch.cancel()
            return False
        if watched.suspicions == suspicions:
            watched.stale_since = None
        if watched.watch is not None:
            watched.watch.cancel()  # still armed, if only a suspicion led here
        watched.watch = watch
        watch.call_when_settled(lambda: self._on_settled(watched, watch))
        return changed

    def _on_settled(self, watched: WatchedRecord[Record], watch: Watch) -> None:
        if self._by_key.get(watched.key) is watched and watched.watch is watch:
            watched.suspect()
            self._refresh_soon(watched.key)
            self._on_suspected()

    def _refresh_soon(self, key: str) -> None:
        if key in self._by_key:
            self._stale[key] = None
            if not self._refreshing:
                self._refreshing = True
                self._tasks.start(self._refresh(), name="refresh-records")

    async def _refresh(self) -> None:
        try:
            while self._stale:
                some = [self._by_key[key] for key in list(self._stale)[:READS_AT_ONCE]]
                for watched in some:
                    del self._stale[watched.key]
                for outcome in await asyncio.gather(*map(self._refresh_one, some), return_exceptions=True):
                    if isinstance(outcome, BaseException):
                        raise outcome  # a defect, reported to the owner of the tasks
        finally:
            self._refreshing = False

    async def _refresh_one(self, watched: WatchedRecord[Record]) -> None:
        try:
            async with watched.reading:
                changed = await self._read(watched)
        except StoreClosedError:
            return  # no other writes will follow either
        except MetadataError as error:
            self._unreachable += 1
            if self._unreachable == 1:
                log.warning("records.unreachable", extra={"key": watched.key, "error": str(error), "retry_s": RETRY_S})
            asyncio.get_running_loop().call_later(RETRY_S, self._refresh_soon, watched.key)  # rule 3
            return
        if self._unreachable:
            log.info("records.reachable", extra={"failures": self._unreachable})
            self._unreachable = 0
        if changed:
            for on_change in list(watched.users.values()):
                on_change()
