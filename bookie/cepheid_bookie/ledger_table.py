"""Table of a bookie's ledgers: one object per ledger in use, the rest as records in the index.

    unknown ──first contact──► loaded ◄──load── known (a bitmap of ids; its record is in the index)
                                  └──clean, and too many──► known

The bitmap is filled after the start, a slice at a time, so that many ledgers in the index do not slow down a start.

Rule 1: one object per ledger. Check and act on it happen in one turn of the loop.
Rule 2: a state is evicted only when its record is in the index: a fence survives eviction.
Rule 3: once all ids are listed, an id that is not in the bitmap was never seen: that answer is certain, and needs no index
lookup. Until then such an id may be known, and the index is checked (`may_know`, then `load`).
Rule 4: adds have their own thread for such lookups and never wait for those of readers, not even for the same ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pyroaring import BitMap64

from cepheid_bookie.block_index import BlockIndex
from cepheid_bookie.ledger_record import NOT_DELETED, LedgerRecord
from cepheid_bookie.watched_worker import ReadWork
from cepheid_ports import Worker

log = logging.getLogger(__name__)

_BLANK_KEY = bytes(16)
_EVICTION_DELAY_S = 0.25
_SLICE_LEDGERS = 500  # about a millisecond, for which their thread holds the interpreter lock
_SLICE_PAUSE_S = 0.002
_LISTING_RETRY_S = 5.0

LISTED_AT_START = 2_000
"""Number of ledgers that a start lists itself, in a few milliseconds: most bookies are never without a complete list."""


class LedgerState:
    """State of a ledger.

    `fenced` refuses adds from the moment it is set; `fence_durable` permits the answer to the fencing request.
    """

    __slots__ = (
        "adds",
        "deleted_at_ms",
        "dirty",
        "explicit_lac",
        "fence_durable",
        "fenced",
        "flushing",
        "last_entry_id",
        "ledger_id",
        "master_key",
    )

    def __init__(self, ledger_id: int, record: LedgerRecord, last_entry_id: int = -1) -> None:
        self.ledger_id = ledger_id
        self.master_key = record.master_key
        self.fenced = record.fenced
        # False also where the index has the fence (of a tombstone, too): an add admitted before it may still wait for the journal,
        # and must be answered before the fence is. So the first fencing request goes through the journal, behind that add.
        self.fence_durable = False
        self.explicit_lac = record.explicit_lac
        self.deleted_at_ms = record.deleted_at_ms
        self.last_entry_id = last_entry_id
        self.adds = 0  # groups admitted since this object was created; starts at 0 again after eviction and reload
        self.dirty = False  # differs from the index
        self.flushing = False  # the difference is being written to it

    def __repr__(self) -> str:
        return f"<LedgerState {self.ledger_id}: last {self.last_entry_id}{', fenced' if self.fenced else ''}>"

    @property
    def deleted(self) -> bool:
        return self.deleted_at_ms != NOT_DELETED

    def record(self) -> LedgerRecord:
        return LedgerRecord(self.master_key, self.fenced, self.explicit_lac, self.deleted_at_ms)


class LedgerTable:
    """The table, changed on the loop only (and by replay, before the bookie serves).

    `worker` runs the listing and lookups for readers, `add_worker` lookups for adds.
    """

    def __init__(
        self, index: BlockIndex, worker: Worker, add_worker: Worker, cached_last: Callable[[int], int], *, limit: int
    ) -> None:
        self._index = index
        self._worker = worker
        self._add_worker = add_worker
        self._cached_last = cached_last
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None
        self._serving = False
        self._known = BitMap64()
        self._tombstones = BitMap64()
        self._loaded: dict[int, LedgerState] = {}
        self._dirty: dict[int, LedgerState] = {}
        self._flushing: dict[int, LedgerState] = {}
        self._loading: dict[int, _Loading] = {}
        self._largest_at_start = -1
        # Until all ids are listed:
        self._listed_to = -1  # ids up to this one are listed
        self._denied = BitMap64()  # ids that are not in the index, and were not created since it was read
        self._forgotten = BitMap64()  # ids that left the index, but may be in a slice that was read before
        self._listing_timer: asyncio.TimerHandle | None = None
        self._listing_waiters: list[asyncio.Future[None]] = []
        self.all_listed = False

    def __repr__(self) -> str:
        listing = "" if self.all_listed else f" up to {self._listed_to}"
        return f"<LedgerTable: {len(self._known)} known{listing}, {len(self._loaded)} loaded, {len(self._dirty)} dirty>"

    @property
    def count(self) -> int:
        """Number of living ledgers; those found so far until `all_listed`."""
        return len(self._known) - len(self._tombstones)

    @property
    def largest_id(self) -> int:
        """Return the largest id ever seen here, deleted ledgers included; -1: none. Complete from the start."""
        return max(self._largest_at_start, int(self._known.max()) if self._known else -1)

    @property
    def loaded_count(self) -> int:
        return len(self._loaded)

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty)

    def begin_listing(self, count: int) -> None:
        """List the largest id and the first `count` ledgers at start, blocking. `start` lists the rest."""
        largest = self._index.largest_ledger_id()
        self._largest_at_start = -1 if largest is None else largest
        self._take_slice(self._index.ledger_ids(-1, count), count)

    async def wait_listed(self) -> None:
        """Return when all ids are listed: from then on `ids`, `count` and `may_know` are complete."""
        if not self.all_listed:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._listing_waiters.append(done)
            await done

    def ids(self) -> list[int]:
        """Return the living ledgers; those found so far until `all_listed`."""
        return list(self._known - self._tombstones)

    def tombstones(self) -> list[int]:
        """Return deleted ledgers that are not forgotten; those found so far until `all_listed`."""
        return list(self._tombstones)

    def may_know(self, ledger_id: int) -> bool:
        """Return False if the ledger was certainly never seen here. If True, `load` finds out."""
        if ledger_id in self._known:
            return True
        return not self.all_listed and ledger_id > self._listed_to and ledger_id not in self._denied

    def is_deleted(self, ledger_id: int) -> bool:
        """Whether the ledger is known to be deleted. One that is neither listed nor loaded yet may be deleted, too."""
        return ledger_id in self._tombstones

    def needs_load(self, ledger_id: int) -> bool:
        """Whether only the index can tell if the ledger is known: it is not listed yet."""
        return ledger_id not in self._known and self.may_know(ledger_id)

    def is_settled(self, ledger_id: int) -> bool:
        """Whether the ledger is known to be fenced or deleted."""
        state = self._loaded.get(ledger_id)
        return ledger_id in self._tombstones or (state is not None and state.fenced)

    def get(self, ledger_id: int) -> LedgerState | None:
        """Return the state if it is loaded."""
        return self._loaded.get(ledger_id)

    def create(self, ledger_id: int, master_key: bytes) -> LedgerState:
        """Create the state at first contact. The key is journaled with the record that made the contact."""
        assert not self.may_know(ledger_id), f"ledger {ledger_id} is known"
        self._known.add(ledger_id)
        self._denied.discard(ledger_id)
        self._forgotten.discard(ledger_id)
        state = self._put(LedgerState(ledger_id, LedgerRecord(master_key)))
        self.mark_dirty(state)
        self._end_look(ledger_id, state)
        return state

    def get_or_load_now(self, ledger_id: int, master_key: bytes) -> LedgerState:
        """Return the state, blocking; for replay."""
        state = self._loaded.get(ledger_id)
        if state is not None:
            return state
        record = self._index.record(ledger_id) if self.may_know(ledger_id) else None
        if record is None:
            assert ledger_id not in self._known, f"the record of ledger {ledger_id} left the index"
            self._denied.add(ledger_id)
            return self.create(ledger_id, master_key)
        return self._put_found(ledger_id, record, self._index.last_entry_id(ledger_id))

    def load(self, ledger_id: int, *, for_add: bool = False) -> asyncio.Future[LedgerState | None]:
        """Load the state of a ledger that may be known. None: it was never seen here, and `may_know` then returns False.

        There is one index lookup for all callers; an add during a reader's lookup starts a second one.
        """
        loading = self._loading.get(ledger_id)
        if loading is None:
            loading = self._loading[ledger_id] = _Loading(asyncio.get_running_loop().create_future())
        elif loading.for_add or not for_add:
            return loading.future
        loading.for_add = for_add
        self._look(ledger_id, loading, for_add)
        return loading.future

    def _look(self, ledger_id: int, loading: _Loading, for_add: bool) -> None:
        # Taken before the index is read: an entry that leaves the cache meanwhile is in the index by then, or is counted here.
        cached_before = self._cached_last(ledger_id)

        def work() -> tuple[LedgerRecord | None, int]:
            return self._index.record(ledger_id), self._index.last_entry_id(ledger_id)

        def on_done(found: tuple[LedgerRecord | None, int] | None, error: BaseException | None) -> None:
            if self._loading.get(ledger_id) is not loading:
                return  # another lookup or `_end_look` was faster; this result may be out of date
            del self._loading[ledger_id]
            state = self._loaded.get(ledger_id)
            if state is None and found is not None:
                record, last = found
                if record is not None or ledger_id in self._known:
                    last = max(last, cached_before, self._cached_last(ledger_id))
                    state = self._put_found(ledger_id, record or LedgerRecord(_BLANK_KEY), last)
                elif not self.all_listed:
                    self._denied.add(ledger_id)
            if loading.future.cancelled():
                return
            if state is not None or found is not None:
                loading.future.set_result(state)
            else:
                assert error is not None
                loading.future.set_exception(error)
                loading.future.exception()  # retrieved, so that a failure without waiters is not reported as a leak

        if for_add:
            self._add_worker.submit(work, on_done)
        else:
            self._worker.submit(ReadWork(work), on_done)

    def _end_look(self, ledger_id: int, state: LedgerState | None) -> None:
        """Discard a lookup in progress: the ledger was created or forgotten meanwhile, so its result is out of date."""
        loading = self._loading.pop(ledger_id, None)
        if loading is not None and not loading.future.done():
            loading.future.set_result(state)

    def mark_dirty(self, state: LedgerState) -> None:
        state.dirty = True
        self._dirty[state.ledger_id] = state

    def take_dirty(self) -> dict[int, LedgerRecord]:
        """Return the records to write at a checkpoint; call `on_flushed` or `on_flush_failed` afterwards."""
        assert not self._flushing, "records are still being flushed"
        self._flushing, self._dirty = self._dirty, {}
        for state in self._flushing.values():
            state.dirty, state.flushing = False, True
        return {ledger_id: state.record() for ledger_id, state in self._flushing.items()}

    def on_flushed(self) -> None:
        for state in self._flushing.values():
            state.flushing = False
        self._flushing = {}
        if not self._serving:
            self._evict()
        elif len(self._loaded) > self._limit:
            self._evict_later()

    def on_flush_failed(self) -> None:
        for state in self._flushing.values():
            state.flushing = False
            self.mark_dirty(state)
        self._flushing = {}

    def start(self) -> None:
        """Start after the replay: from now on the loop owns the table."""
        self._serving = True
        if not self.all_listed:
            self._listing_timer = asyncio.get_running_loop().call_later(_SLICE_PAUSE_S, self._list_slice)

    def stop(self) -> None:
        self._serving = False
        for timer in (self._timer, self._listing_timer):
            if timer is not None:
                timer.cancel()
        waiters, self._listing_waiters = self._listing_waiters, []
        for waiter in waiters:
            waiter.cancel()

    def delete(self, state: LedgerState, now_ms: int) -> None:
        """Create a tombstone: fenced, without entries.

        It is dirty: until the index has it, a load would restore the living record.
        """
        state.fenced, state.deleted_at_ms, state.last_entry_id = True, now_ms, -1
        self._tombstones.add(state.ledger_id)
        self.mark_dirty(state)

    def on_delete_failed(self, state: LedgerState) -> None:
        """List the ledger again after a failed deletion, so that the next attempt finds it.

        Its blocks remain, and it stays refused.
        """
        self._tombstones.discard(state.ledger_id)

    def clear(self, state: LedgerState) -> None:
        """Forget the ledger's entries and keep its key, LAC and fence. A ledger that was not fenced is fenced by it.

        Unlike a tombstone, it takes recovery adds: a repair may choose this bookie again.
        """
        state.fenced, state.last_entry_id = True, -1
        self.mark_dirty(state)

    def forget(self, ledger_id: int) -> None:
        """Forget an expired tombstone; its record has left the index."""
        self._known.discard(ledger_id)
        self._tombstones.discard(ledger_id)
        if not self.all_listed:
            self._denied.add(ledger_id)
            self._forgotten.add(ledger_id)
        self._loaded.pop(ledger_id, None)
        self._dirty.pop(ledger_id, None)
        self._end_look(ledger_id, None)

    def _list_slice(self) -> None:
        self._listing_timer = None

        def on_done(found: list[tuple[int, bool]] | None, error: BaseException | None) -> None:
            if not self._serving:
                return
            pause_s = _SLICE_PAUSE_S
            if found is not None:
                self._take_slice(found, _SLICE_LEDGERS)
            else:
                log.warning("ledgers.listing_failed", extra={"error": repr(error), "hint": "it is tried again; check the disk"})
                pause_s = _LISTING_RETRY_S
            if not self.all_listed:
                self._listing_timer = asyncio.get_running_loop().call_later(pause_s, self._list_slice)

        above = self._listed_to
        self._worker.submit(ReadWork(lambda: self._index.ledger_ids(above, _SLICE_LEDGERS)), on_done)

    def _take_slice(self, found: list[tuple[int, bool]], wanted: int) -> None:
        """Take what the index had above `_listed_to` when it was read; memory is newer for ledgers used meanwhile."""
        for ledger_id, deleted in found:
            if ledger_id in self._forgotten:
                continue
            self._known.add(ledger_id)
            if deleted and ledger_id not in self._loaded:
                self._tombstones.add(ledger_id)
        if found:
            self._listed_to = found[-1][0]
        if len(found) < wanted:
            self.all_listed = True
            if self._serving:
                log.info("ledgers.listed", extra={"ledgers": self.count})
            self._denied.clear()
            self._forgotten.clear()
            waiters, self._listing_waiters = self._listing_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _put_found(self, ledger_id: int, record: LedgerRecord, last_entry_id: int) -> LedgerState:
        """Create the state of a ledger from the index."""
        self._known.add(ledger_id)
        if record.deleted:
            self._tombstones.add(ledger_id)
        return self._put(LedgerState(ledger_id, record, last_entry_id))

    def _put(self, state: LedgerState) -> LedgerState:
        self._loaded[state.ledger_id] = state
        if self._serving and len(self._loaded) > self._limit:
            self._evict_later()
        return state

    def _evict_later(self) -> None:
        """Evict in a later turn: callers must first use what they loaded, or loads would evict each other for ever."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_EVICTION_DELAY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._evict()  # dirty states stay; their flush calls this again

    def _evict(self) -> None:
        """Evict down to the limit, longest loaded first: a reload costs one index lookup, so usage is not tracked."""
        surplus = len(self._loaded) - self._limit
        if surplus > 0:
            clean = [state for state in self._loaded.values() if not state.dirty and not state.flushing]
            for state in clean[:surplus]:
                del self._loaded[state.ledger_id]


class _Loading:
    """An index lookup in progress, and the future that its callers wait for."""

    __slots__ = ("for_add", "future")

    def __init__(self, future: asyncio.Future[LedgerState | None]) -> None:
        self.future = future
        self.for_add = False  # whether the thread of the adds is reading it as well
