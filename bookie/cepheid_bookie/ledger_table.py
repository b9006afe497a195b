"""What a bookie knows of its ledgers: one object per ledger in use, the rest as records in the index.

    unknown ──first contact──► loaded ◄──load── known (a bitmap of ids; its record lies in the index)
                                  └──clean, and too many──► known

Rule 1: one object per ledger. Check and act on it happen in one turn of the loop.
Rule 2: a state is forgotten only when its record is in the index: a fence survives eviction.
Rule 3: an id that is not in the bitmap was never seen: that no is certain, and needs no look into the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pyroaring import BitMap64

from cepheid_bookie.block_index import BlockIndex
from cepheid_bookie.ledger_record import NOT_DELETED, LedgerRecord
from cepheid_ports import Worker

_BLANK_KEY = bytes(16)
_EVICTION_DELAY_S = 0.25


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
    """Changed in the loop only (and by replay, before the bookie serves)."""

    def __init__(self, index: BlockIndex, worker: Worker, cached_last: Callable[[int], int], *, limit: int) -> None:
        self._index = index
        self._worker = worker
        self._cached_last = cached_last
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None
        self._serving = False
        self._known = BitMap64()
        self._tombstones = BitMap64()
        self._loaded: dict[int, LedgerState] = {}
        self._dirty: dict[int, LedgerState] = {}
        self._flushing: dict[int, LedgerState] = {}
        self._loading: dict[int, asyncio.Future[LedgerState]] = {}

    def __repr__(self) -> str:
        return f"<LedgerTable: {len(self._known)} known, {len(self._loaded)} loaded, {len(self._dirty)} dirty>"

    @property
    def count(self) -> int:
        """Living ledgers."""
        return len(self._known) - len(self._tombstones)

    @property
    def largest_id(self) -> int:
        """Return the largest id that was ever seen here, deleted ledgers included; -1: none."""
        return int(self._known.max()) if self._known else -1

    @property
    def loaded_count(self) -> int:
        return len(self._loaded)

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty)

    def scan_index(self) -> None:
        """At start, blocking: which ids have records."""
        for ledger_id, record in self._index.records():
            self._known.add(ledger_id)
            if record.deleted:
                self._tombstones.add(ledger_id)

    def ids(self) -> list[int]:
        """Living ledgers."""
        return list(self._known - self._tombstones)

    def is_known(self, ledger_id: int) -> bool:
        return ledger_id in self._known

    def is_deleted(self, ledger_id: int) -> bool:
        return ledger_id in self._tombstones

    def is_settled(self, ledger_id: int) -> bool:
        """Known, and now, to be fenced or deleted."""
        state = self._loaded.get(ledger_id)
        return ledger_id in self._tombstones or (state is not None and state.fenced)

    def get(self, ledger_id: int) -> LedgerState | None:
        """The state, if it is loaded."""
        return self._loaded.get(ledger_id)

    def create(self, ledger_id: int, master_key: bytes) -> LedgerState:
        """First contact. The key is journaled with the record that made the contact."""
        assert ledger_id not in self._known, f"ledger {ledger_id} is known"
        self._known.add(ledger_id)
        state = self._put(LedgerState(ledger_id, LedgerRecord(master_key)))
        self.mark_dirty(state)
        return state

    def get_or_load_now(self, ledger_id: int, master_key: bytes) -> LedgerState:
        """For replay, blocking."""
        state = self._loaded.get(ledger_id)
        if state is not None:
            return state
        if ledger_id not in self._known:
            return self.create(ledger_id, master_key)
        record = self._index.record(ledger_id)
        assert record is not None, f"the record of ledger {ledger_id} left the index"
        return self._put(LedgerState(ledger_id, record, self._index.last_entry_id(ledger_id)))

    def load(self, ledger_id: int) -> asyncio.Future[LedgerState]:
        """Brings a known ledger's state in; one look into the index however many ask."""
        loading = self._loading.get(ledger_id)
        if loading is not None:
            return loading
        future: asyncio.Future[LedgerState] = asyncio.get_running_loop().create_future()
        self._loading[ledger_id] = future
        # Taken before the index is read: what leaves the cache meanwhile had reached the index by then, or is counted here.
        cached_before = self._cached_last(ledger_id)

        def work() -> tuple[LedgerRecord, int]:
            return self._index.record(ledger_id) or LedgerRecord(_BLANK_KEY), self._index.last_entry_id(ledger_id)

        def on_done(found: tuple[LedgerRecord, int] | None, error: BaseException | None) -> None:
            del self._loading[ledger_id]
            state = self._loaded.get(ledger_id)
            if state is None and found is not None:
                last = max(found[1], cached_before, self._cached_last(ledger_id))
                state = self._put(LedgerState(ledger_id, found[0], last))
            if future.cancelled():
                return
            if state is not None:
                future.set_result(state)
            else:
                assert error is not None
                future.set_exception(error)
                future.exception()  # whoever waits gets it; if nobody does, it is no leak

        self._worker.submit(work, on_done)
        return future

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

    def stop(self) -> None:
        self._serving = False
        if self._timer is not None:
            self._timer.cancel()

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
        self._loaded.pop(ledger_id, None)
        self._dirty.pop(ledger_id, None)

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
