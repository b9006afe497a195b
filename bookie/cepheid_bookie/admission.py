"""Admission of adds, the heart of the bookie. One synchronous step per group, in this order:

    room? ─no─► waits, first come first served, up to a bound, then OVERLOADED
      │
    key ─► fence ─► limbo ─► space ─► write cache ─► journal queue ──batch synced──► answer
     ▲
     └── background adds (copies of repair), from a queue of their own, at the pace that the others leave: background_adds.py

Rule 1: check and act are one turn of the loop: a fence is seen by every add that is admitted after it.
Rule 2: add to the cache *before* the journal is written. A fencing read must see what was admitted, or it would deny an entry that
is acknowledged a moment later; and the log mark must never pass an entry that only the journal holds.
Rule 3: refusals pass through the journal's queue as markers: the answers of a ledger keep the order of its requests on one stream.
The background and the foreground adds of a ledger overtake each other, so a stream carries only one kind of a ledger.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from cepheid_bookie.add_answers import AddCompletion, OnAnswers, deliver
from cepheid_bookie.background_adds import BackgroundAdds
from cepheid_bookie.background_pace import BackgroundPace
from cepheid_bookie.checkpoint import Checkpointer
from cepheid_bookie.disk_space import DiskSpace
from cepheid_bookie.journal import Journal
from cepheid_bookie.journal_format import encode_entries_to
from cepheid_bookie.ledger_table import LedgerState, LedgerTable
from cepheid_bookie.limbo import Limbo
from cepheid_bookie.settings import StorageSettings
from cepheid_bookie.write_cache import WriteCache, cached_size
from cepheid_rpc import MASTER_KEY_BYTES, AddRequest, Buffer, Status

MAX_ENTRY_ID = (1 << 62) - 1
_BACKGROUND_SHARE = 0.75  # of the half being filled while the other one is flushed; the rest is for foreground adds


@dataclass(slots=True)
class AddCounters:
    groups: int = 0
    entries: int = 0
    bytes: int = 0
    background_bytes: int = 0
    refused: int = 0
    fenced: int = 0
    overloaded: int = 0
    no_space: int = 0
    read_only: int = 0


class Admission:
    """Owns the adds that wait for room, and the order of the admission steps."""

    def __init__(
        self,
        ledgers: LedgerTable,
        cache: WriteCache,
        journal: Journal,
        checkpointer: Checkpointer,
        space: DiskSpace,
        settings: StorageSettings,
        limbo: Limbo,
        pace: BackgroundPace,
        on_room: Callable[[], None],
    ) -> None:
        self._ledgers = ledgers
        self._cache = cache
        self._journal = journal
        self._checkpointer = checkpointer
        self._space = space
        self._settings = settings
        self._limbo_below = limbo.below
        self._on_room = on_room
        self._waiting: deque[tuple[AddRequest, OnAnswers, float]] = deque()  # the last element: when it has waited too long
        self._awaiting_load: dict[int, list[tuple[AddRequest, OnAnswers]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.waiting_bytes = 0
        self.counters = AddCounters()
        self.background = BackgroundAdds(
            pace, ledgers, settings, has_room=self._has_background_room, admit=self._admit, refuse=self._refuse_range
        )

    def __repr__(self) -> str:
        return f"<Admission: {len(self._waiting)} waiting for room, {len(self._awaiting_load)} ledgers loading>"

    @property
    def is_full(self) -> bool:
        """Whether adds wait for room; callers that can apply backpressure should do so."""
        return bool(self._waiting)

    def add(self, requests: Sequence[AddRequest], on_answers: OnAnswers) -> None:
        background = False
        for request in requests:
            if request.background:
                self.background.add(request, on_answers)
                background = True
                continue
            refused_anyway = self._space.read_only and not request.recovery
            if self._waiting or not (refused_anyway or self._has_room()):
                self._wait(request, on_answers)
            else:
                self._admit(request, on_answers)
        if background:
            self.background.pump()
        self._space.touch(self.counters.bytes)

    def pump(self) -> None:
        """Admit waiting adds in order, as far as there is room now."""
        if self._waiting:
            self._pump_foreground()
        self.background.pump()

    def _pump_foreground(self) -> None:
        while self._waiting and self._has_room():
            request, on_answers, _ = self._waiting.popleft()
            self.waiting_bytes -= cached_size(request.group)
            self._admit(request, on_answers)
        if not self._waiting:
            self._cancel_timer()
            self._on_room()

    def refuse_waiting(self, status: Status) -> None:
        """Refuse everything that waits."""
        self._refuse_foreground(status)
        self.background.refuse_waiting(status)

    def _refuse_foreground(self, status: Status) -> None:
        self._cancel_timer()
        # Within one ledger, adds that wait for its load came before adds that wait for room.
        waiting = [*chain.from_iterable(self._awaiting_load.values()), *(held[:2] for held in self._waiting)]
        self._awaiting_load.clear()
        self._waiting.clear()
        self.waiting_bytes = 0
        for request, on_answers in waiting:
            self._refuse(request, on_answers, status)
        self._on_room()

    def _has_room(self) -> bool:
        return (not self._cache.half_full or self._checkpointer.make_room()) and (
            self._journal.queued_bytes < self._settings.journal_queue_bytes
        )

    def _has_background_room(self) -> bool:
        if self._space.read_only:
            return True  # so that it is refused
        cache = self._cache
        if self._waiting or (cache.flushing is not None and cache.active.used_bytes >= _BACKGROUND_SHARE * cache.half_bytes):
            return False
        return self._has_room()

    def _admit(self, request: AddRequest, on_answers: OnAnswers) -> None:
        group = request.group
        ledger_id, first, count = group.ledger_id, group.first_entry_id, len(group.ends)
        state = self._ledgers.get(ledger_id)
        if ledger_id in self._awaiting_load or (state is None and self._ledgers.may_know(ledger_id)):
            self._wait_for_load(request, on_answers)  # may be loaded by now, but earlier adds have their turn first
            return
        if state is None:
            if len(request.master_key) != MASTER_KEY_BYTES:
                self._refuse(request, on_answers, Status.BAD_REQUEST)
                return
            if ledger_id < self._limbo_below and not request.recovery:
                self._refuse(request, on_answers, Status.READ_ONLY)
                return
            if self._space.read_only and not _may_use_reserve(request):
                self._refuse(request, on_answers, self._space.refusal)
                return
            state = self._ledgers.create(ledger_id, request.master_key)
        refusal = self._refusal(state, request, first + count)
        if refusal is not None:
            self._refuse(request, on_answers, refusal)
            return
        last = first + count - 1
        self._cache.add(group)
        state.adds += 1
        if last > state.last_entry_id:
            state.last_entry_id = last
        parts: list[Buffer] = []
        size = encode_entries_to(parts, state.master_key, group)
        self._journal.append(parts, size, AddCompletion(on_answers, ledger_id, first, last, Status.OK), request.background)
        counters = self.counters
        counters.groups += 1
        counters.entries += count
        counters.bytes += len(group.data)
        if request.background:
            counters.background_bytes += len(group.data)

    def _refusal(self, state: LedgerState, request: AddRequest, end: int) -> Status | None:
        if state.master_key != request.master_key:
            return Status.UNAUTHORIZED
        if state.fenced and (state.deleted or not request.recovery):
            return Status.FENCED
        if state.ledger_id < self._limbo_below and not request.recovery:
            return Status.READ_ONLY  # the lost data may include a fence
        if end > MAX_ENTRY_ID:
            return Status.BAD_REQUEST
        if self._space.read_only and not _may_use_reserve(request):
            return self._space.refusal
        return None

    def _refuse(self, request: AddRequest, on_answers: OnAnswers, status: Status) -> None:
        group = request.group
        self._refuse_range(on_answers, group.ledger_id, group.first_entry_id, group.last_entry_id, status)

    def _refuse_range(self, on_answers: OnAnswers, ledger_id: int, first: int, last: int, status: Status) -> None:
        counters = self.counters
        counters.refused += 1
        counters.fenced += status is Status.FENCED
        counters.overloaded += status is Status.OVERLOADED
        counters.no_space += status is Status.NO_SPACE
        counters.read_only += status is Status.READ_ONLY
        self._journal.append_marker(AddCompletion(on_answers, ledger_id, first, last, status))

    def _wait(self, request: AddRequest, on_answers: OnAnswers) -> None:
        if not self._may_wait(request, on_answers):
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.waiting_s
        self._waiting.append((request, on_answers, deadline))
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._on_waited)

    def _may_wait(self, request: AddRequest, on_answers: OnAnswers) -> bool:
        if self.waiting_bytes >= self._settings.waiting_bytes:
            # An earlier request of this ledger may be waiting and must be answered first, so refuse all that wait together.
            self._refuse_foreground(Status.OVERLOADED)
            self._refuse(request, on_answers, Status.OVERLOADED)
            return False
        self.waiting_bytes += cached_size(request.group)
        return True

    def _on_waited(self) -> None:
        """Set the timer for the first in the queue; the request for which it was set may no longer wait."""
        loop = asyncio.get_running_loop()
        deadline = self._waiting[0][2]
        if loop.time() < deadline:
            self._timer = loop.call_at(deadline, self._on_waited)
        else:
            self._timer = None
            self._refuse_foreground(Status.OVERLOADED)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait_for_load(self, request: AddRequest, on_answers: OnAnswers) -> None:
        if not self._may_wait(request, on_answers):
            return
        ledger_id = request.group.ledger_id
        held = self._awaiting_load.get(ledger_id)
        if held is not None:
            held.append((request, on_answers))
            return
        self._awaiting_load[ledger_id] = [(request, on_answers)]
        self._ledgers.load(ledger_id, for_add=True).add_done_callback(lambda loaded: self._on_loaded(ledger_id, loaded))

    def _on_loaded(self, ledger_id: int, loaded: asyncio.Future[LedgerState | None]) -> None:
        for request, on_answers in self._awaiting_load.pop(ledger_id, ()):
            self.waiting_bytes -= cached_size(request.group)
            if loaded.exception() is not None:
                self._refuse(request, on_answers, Status.IO_ERROR)
            else:
                self._admit(request, on_answers)


def _may_use_reserve(request: AddRequest) -> bool:
    """Whether an add may use the space that is kept free: recovery must be able to close ledgers, repair has other bookies."""
    return request.recovery and not request.background


def refuse_all(requests: Sequence[AddRequest], on_answers: OnAnswers, status: Status) -> None:
    """Answer a whole message at once, for a bookie that no longer takes part."""
    deliver(
        [
            AddCompletion(on_answers, request.group.ledger_id, request.group.first_entry_id, request.group.last_entry_id, status)
            for request in requests
        ],
        status,
    )
