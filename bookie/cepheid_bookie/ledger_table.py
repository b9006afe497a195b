"""What a bookie knows of its ledgers: one object per ledger in use, the rest as records in the index.

    unknown ──first contact──► loaded ◄──load── known (a bitmap of ids; its record lies in the index)
                                  └──clean, and too many──► known

The bitmap is filled after the start, a slice at a time, so that a start takes no longer because the index has many ledgers.

Rule 1: one object per ledger. Check and act on it happen in one turn of the loop.
Rule 2: a state is forgotten only when its record is in the index: a fence survives eviction.
Rule 3: once all ids are listed, an id that is not in the bitmap was never seen: that no is certain, and needs no look into the
index. Until then such an id may be known, and the index is asked about it (`may_know`, then `load`).
Rule 4: adds have a thread of their own for such looks. They never wait behind those of readers, not even for the same ledger.
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
_SLICE_LEDGERS = 500  # a millisecond or so, for which their thread holds the interpreter
_SLICE_PAUSE_S = 0.002
_LISTING_RETRY_S = 5.0

LISTED_AT_START = 2_000
"""Ledgers that a start lists itself, in a few milliseconds: most bookies never know a time in which a part is missing."""


class LedgerState:
    """`fenced` decides about adds from the moment it is set; `fence_durable` about answers to whoever fenced."""

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
        self.adds = 0  # groups admitted since this object was created: an evicted and reloaded ledger counts from 0 again
        self.dirty = False  # differs from the index
        self.flushing = False  # the difference is on its way there

    def __repr__(self) -> str:
        return f"<LedgerState {self.ledger_id}: last {self.last_entry_id}{', fenced' if self.fenced else ''}>"

    @property
    def deleted(self) -> bool:
        return self.deleted_at_ms != NOT_DELETED

    def record(self) -> LedgerRecord:
        return LedgerRecord(self.master_key, self.fenced, self.explicit_lac, self.deleted_at_ms)


class LedgerTable:
    """Changed in the loop only (and by replay, before the bookie serves).

    `worker` does what readers ask for and the listing, `add_worker` what adds ask for.
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
        self._denied = BitMap64()  # ids that are not in the index, nor were created since it was asked
        self._forgotten = BitMap64()  # ids that left the index, and may be in a slice that was read before
        self._listing_timer: asyncio.TimerHandle | None = None
        self._listing_waiters: list[asyncio.Future[None]] = []
        self.all_listed = False

    def __repr__(self) -> str:
        listing = "" if self.all_listed else f" up to {self._listed_to}"
        return f"<LedgerTable: {len(self._known)} known{listing}, {len(self._loaded)} loaded, {len(self._dirty)} dirty>"

    @property
    def count(self) -> int:
        """Living ledgers; those found so far until `all_listed`."""
        return len(self._known) - len(self._tombstones)

    @property
    def largest_id(self) -> int:
        """Return the largest id that was ever seen here, deleted ledgers included; -1: none. Complete from the start on."""
        return max(self._largest_at_start, int(self._known.max()) if self._known else -1)

    @property
    def loaded_count(self) -> int:
        return len(self._loaded)

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty)

    def begin_listing(self, count: int) -> None:
        """At start, blocking: the largest id, and the first `count` ledgers. `start` goes on with the rest."""
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
        """Living ledgers; those found so far until `all_listed`."""
        return list(self._known - self._tombstones)

    def tombstones(self) -> list[int]:
        """Deleted ledgers that are not forgotten; those found so far until `all_listed`."""
        return list(self._tombstones)

    def may_know(self, ledger_id: int) -> bool:
        """False: it was never seen here, for certain. True: it was, or `load` finds out."""
        if ledger_id in self._known:
            return True
        return not self.all_listed and ledger_id > self._listed_to and ledger_id not in self._denied

    def is_deleted(self, ledger_id: int) -> bool:
        """Whether it is known to be deleted. A ledger that is neither listed nor loaded yet may be deleted nevertheless."""
        return ledger_id in self._tombstones

    def needs_load(self, ledger_id: int) -> bool:
        """Whether only the index can tell if the ledger is known: it is not listed yet."""
        return ledger_id not in self._known and self.may_know(ledger_id)

    def is_settled(self, ledger_id: int) -> bool:
        """Known, and now, to be fenced or deleted."""
        state = self._loaded.get(ledger_id)
        return ledger_id in self._tombstones or (state is not None and state.fenced)

    def get(self, ledger_id: int) -> LedgerState | None:
        """The state, if it is loaded."""
        return self._loaded.get(ledger_id)

    def create(self, ledger_id: int, master_key: bytes) -> LedgerState:
        """First contact. The key is journaled with the record that made the contact."""
        assert not self.may_know(ledger_id), f"ledger {ledger_id} is known"
        self._known.add(ledger_id)
        self._denied.discard(ledger_id)
        self._forgotten.discard(ledger_id)
        state = self._put(LedgerState(ledger_id, LedgerRecord(master_key)))
        self.mark_dirty(state)
        self._end_look(ledger_id, state)
        return state

    def get_or_load_now(self, ledger_id: int, master_key: bytes) -> LedgerState:
        """For replay, blocking."""
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
        """Bring in the state of a ledger that may be known. None: it was never seen here, and `may_know` says so now.

        One look into the index however many ask; an add that comes while a reader's look is under way starts another one.
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
        # Taken before the index is read: what leaves the cache meanwhile had reached the index by then, or is counted here.
        cached_before = self._cached_last(ledger_id)

        def work() -> tuple[LedgerRecord | None, int]:
            return self._index.record(ledger_id), self._index.last_entry_id(ledger_id)

        def on_done(found: tuple[LedgerRecord | None, int] | None, error: BaseException | None) -> None:
            if self._loading.get(ledger_id) is not loading:
                return  # another look was faster, or `_end_look`; what this one saw may be out of date by now
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
                loading.future.exception()  # whoever waits gets it; if nobody does, it is no leak

        if for_add:
            self._add_worker.submit(work, on_done)
        else:
            self._worker.submit(ReadWork(work), on_done)

    def _end_look(self, ledger_id: int, state: LedgerState | None) -> None:
        """The ledger was created or forgotten while the index was read: what a slow look may find of it is out of date."""
        loading = self._loading.pop(ledger_id, None)
        if loading is not None and not loading.future.done():
            loading.future.set_result(state)

    def mark_dirty(self, state: LedgerState) -> None:
        state.dirty = True
        self._dirty[state.ledger_id] = state

    def take_dirty(self) -> dict[int, LedgerRecord]:
        """The records to write at a checkpoint; `on_flushed` or `on_flush_failed` follows."""
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
        """Replay is over: from now on the loop owns the table."""
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
        """Makes a tombstone: fenced, without entries. Dirty: until the index has it, a load would bring the living record back."""
        state.fenced, state.deleted_at_ms, state.last_entry_id = True, now_ms, -1
        self._tombstones.add(state.ledger_id)
        self.mark_dirty(state)

    def on_delete_failed(self, state: LedgerState) -> None:
        """Its blocks are still there: it is listed again, so that whoever deletes finds it again. It stays refused."""
        self._tombstones.discard(state.ledger_id)

    def clear(self, state: LedgerState) -> None:
        """Forget the ledger's entries and keep its key, LAC and fence. A ledger that was not fenced is fenced by it.

        Unlike a tombstone, it takes recovery adds: a repair may choose this bookie again.
        """
        state.fenced, state.last_entry_id = True, -1
        self.mark_dirty(state)

    def forget(self, ledger_id: int) -> None:
        """A tombstone that has served its time; its record has left the index."""
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
        """What the index had above `_listed_to` when it was read; memory knows better of what was in use meanwhile."""
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
        """A state from the index."""
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
        """Not in this turn: whoever asked for a load still has to use it, and loads that push each other out would never end."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_EVICTION_DELAY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._evict()  # what is dirty stays; its flush comes back here

    def _evict(self) -> None:
        """Down to the limit, longest loaded first: coming back costs one look into the index, so nothing is kept about use."""
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
        self.for_add = False  # whether the thread of the adds is looking it up as well
