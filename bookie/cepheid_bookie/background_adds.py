"""Queue of background adds that wait for their turn: the driver of `BackgroundPace`.

    add ──► queue ──► slices ──(room, ledger loaded, pace)──► Admission._admit ──► journal ──► answers of ranges
              └─ full: the request's bytes are dropped, its refusal waits in its place

Rule 1: requests are admitted and refused in the order of arrival. So the answers of a ledger keep the order of its
requests on one stream, if all of these are background adds.
Rule 2: an overload refusal is answered after all earlier requests: its sender retries when there is room, not before.
Rule 3: foreground adds that wait for room come first, and a part of the write cache is theirs while a flush is under way.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from cepheid_bookie.add_answers import OnAnswers
from cepheid_bookie.background_pace import BackgroundPace
from cepheid_bookie.ledger_table import LedgerState, LedgerTable
from cepheid_bookie.settings import StorageSettings
from cepheid_bookie.write_cache import cached_size
from cepheid_rpc import AddRequest, EntryGroup, Status

Refuse = Callable[[OnAnswers, int, int, int, Status], None]
"""Answers entries `first..last` of a ledger: (on_answers, ledger_id, first, last, status)."""

_REFUSAL_BYTES = 512  # size of a waiting refusal


class _Held:
    """A request and its entries that still wait. `request` is None if it was refused and its refusal waits."""

    __slots__ = ("deadline", "first_entry_id", "last_entry_id", "ledger_id", "on_answers", "request", "size_bytes")

    def __init__(self, request: AddRequest, on_answers: OnAnswers, deadline: float, *, refused: bool) -> None:
        group = request.group
        self.ledger_id = group.ledger_id
        self.first_entry_id = group.first_entry_id
        self.last_entry_id = group.last_entry_id
        self.request = None if refused else request
        self.size_bytes = _REFUSAL_BYTES if refused else cached_size(group)
        self.on_answers = on_answers
        self.deadline = deadline


class BackgroundAdds:
    """Owns the queue. `has_room`, `admit` and `refuse` belong to the admission."""

    def __init__(
        self,
        pace: BackgroundPace,
        ledgers: LedgerTable,
        settings: StorageSettings,
        *,
        has_room: Callable[[], bool],
        admit: Callable[[AddRequest, OnAnswers], None],
        refuse: Refuse,
    ) -> None:
        self._pace = pace
        self._ledgers = ledgers
        self._limit_bytes = settings.background_waiting_bytes
        self._waiting_s = settings.waiting_s
        self._has_room = has_room
        self._admit = admit
        self._refuse = refuse
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Held] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loading: int | None = None  # the first request's ledger, while its state is loaded
        self.waiting_bytes = 0

    def __repr__(self) -> str:
        return f"<BackgroundAdds: {len(self._waiting)} waiting with {self.waiting_bytes} B>"

    def add(self, request: AddRequest, on_answers: OnAnswers) -> None:
        """Queue a request, or its refusal if too many bytes wait. The caller pumps after the last request of a message."""
        if self.waiting_bytes >= self._limit_bytes:
            self.pump()
        if self.waiting_bytes >= 2 * self._limit_bytes:  # refusals alone fill the queue
            self.refuse_waiting(Status.OVERLOADED)
        refused = self.waiting_bytes >= self._limit_bytes
        held = _Held(request, on_answers, self._loop.time() + self._waiting_s, refused=refused)
        self._waiting.append(held)
        self.waiting_bytes += held.size_bytes

    def pump(self) -> None:
        """Admit what may be admitted now. Called when a request arrived, a batch was synced, or room was freed."""
        if not self._waiting:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        if now >= self._waiting[0].deadline:
            self.refuse_waiting(Status.OVERLOADED)
            return
        delay_s: float | None = 0.0
        slice_bytes = self._pace.slice_bytes(now)
        while self._waiting:
            held = self._waiting[0]
            if held.request is None:
                self._refuse_first(Status.OVERLOADED)
                continue
            if not self._has_room() or self._loads(held.ledger_id):
                delay_s = None
            else:
                delay_s = self._pace.delay_s(now, min(slice_bytes, held.request.group.size_bytes))
            if delay_s != 0.0:
                break
            self._admit_slice(held, held.request, slice_bytes)
        if self._waiting:
            deadline = self._waiting[0].deadline
            self._timer = self._loop.call_at(deadline if delay_s is None else min(deadline, now + delay_s), self._on_timer)

    def refuse_waiting(self, status: Status) -> None:
        """Refuse all that waits, in order."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._refuse_first(status)

    def _refuse_first(self, status: Status) -> None:
        held = self._waiting.popleft()
        self.waiting_bytes -= held.size_bytes
        self._refuse(held.on_answers, held.ledger_id, held.first_entry_id, held.last_entry_id, status)

    def _admit_slice(self, held: _Held, request: AddRequest, slice_bytes: int) -> None:
        part = _next_slice(request.group, held.first_entry_id, slice_bytes)
        if part.last_entry_id == held.last_entry_id:
            self._waiting.popleft()
            self.waiting_bytes -= held.size_bytes
        else:
            held.first_entry_id = part.last_entry_id + 1
            size_bytes = min(held.size_bytes, cached_size(part))
            held.size_bytes -= size_bytes
            self.waiting_bytes -= size_bytes
        self._admit(AddRequest(part, request.master_key, request.recovery, background=True), held.on_answers)

    def _loads(self, ledger_id: int) -> bool:
        """Whether the ledger's state must be loaded first; starts the load. The queue waits, as an index lookup is short."""
        if self._ledgers.get(ledger_id) is not None or not self._ledgers.may_know(ledger_id):
            return False
        if self._loading != ledger_id:
            self._loading = ledger_id
            self._ledgers.load(ledger_id, for_add=True).add_done_callback(lambda loaded: self._on_loaded(ledger_id, loaded))
        return True

    def _on_loaded(self, ledger_id: int, loaded: asyncio.Future[LedgerState | None]) -> None:
        if self._loading == ledger_id:
            self._loading = None
        if loaded.exception() is not None and self._waiting and self._waiting[0].ledger_id == ledger_id:
            self._refuse_first(Status.IO_ERROR)
        self.pump()

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()


def _next_slice(group: EntryGroup, first_entry_id: int, slice_bytes: int) -> EntryGroup:
    """Return the entries from `first_entry_id` on that fit in that many bytes; at least one."""
    index = first_entry_id - group.first_entry_id
    start = group.ends[index - 1] if index else 0
    end = max(index + 1, bisect_right(group.ends, start + slice_bytes))
    return group.slice(first_entry_id, group.first_entry_id + end - 1)
