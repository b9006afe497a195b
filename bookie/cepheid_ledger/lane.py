"""One writer's entries in flight to one bookie.

send ──►│ queue │──next_message──►│ unanswered │──OK──► listener.on_added
           ▲                            │
           └────── repeat, in order ────┴── refused, and everything sent after it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cepheid_rpc import AddRequest, Status, merge_groups

_LONGEST_DELAY = 25  # times the first delay
_SMALL_BYTES = 4096  # above this, copying costs as much as it saves


class LaneListener(Protocol):
    """A writer. Called in the loop; may close its lanes and send from within these calls."""

    def on_added(self, bookie_id: str, last_entry_id: int) -> None:
        """Note that the bookie holds everything sent up to this entry, which rises from call to call."""

    def on_add_failed(self, bookie_id: str, reason: str) -> None:
        """Note that the lane failed and is closed; the outcome of unanswered entries is unknown."""

    def on_refused_for_good(self, bookie_id: str, status: Status) -> None:
        """Note a final FENCED or UNAUTHORIZED: this writer is shut out, and the lane is closed."""

    def can_do_without(self, bookie_id: str) -> bool:
        """Whether giving up this bookie would cost copies, not progress."""


class LeftLane:
    """The listener of a lane whose writer has ended: its remaining entries complete the copies, and no caller waits for them.

    `on_missed` is called if the bookie fails before it has them all.
    """

    def __init__(self, on_missed: Callable[[str], None]) -> None:
        self._on_missed = on_missed

    def on_added(self, bookie_id: str, last_entry_id: int) -> None:
        pass

    def on_add_failed(self, bookie_id: str, reason: str) -> None:
        self._on_missed(bookie_id)

    def on_refused_for_good(self, bookie_id: str, status: Status) -> None:
        self._on_missed(bookie_id)

    def can_do_without(self, bookie_id: str) -> bool:
        return True


class Lane:
    """The queue of one writer at one bookie. Created by `BookieChannel.open_lane`, and changed only by the channel."""

    __slots__ = (
        "acked_through",
        "closed",
        "delay_s",
        "ledger_id",
        "left",
        "listener",
        "queue",
        "refused",
        "refused_since",
        "seen",
        "unanswered",
    )

    def __init__(self, ledger_id: int, listener: LaneListener) -> None:
        self.ledger_id = ledger_id
        self.listener = listener
        self.closed = False
        self.left = False  # closes itself once everything is answered
        self.queue: list[AddRequest] = []
        self.unanswered = 0  # requests that the transport took
        self.refused: list[AddRequest] | None = None  # sent again once everything sent is answered; nothing is sent meanwhile
        self.refused_since: float | None = None  # until the next OK
        self.delay_s = 0.0
        self.acked_through = -1  # as reported to the listener
        self.seen = 0  # the channel's tick at the last progress

    def __repr__(self) -> str:
        state = "closed" if self.closed else "refused" if self.refused is not None else "open"
        return f"<Lane of ledger {self.ledger_id}, {state}: {len(self.queue)} queued, {self.unanswered} unanswered>"

    @property
    def waits(self) -> bool:
        return bool(self.queue or self.unanswered or self.refused)

    def start_refusal(self, now: float, first_delay_s: float) -> None:
        self.refused = []
        if self.refused_since is None:
            self.refused_since, self.delay_s = now, first_delay_s
        else:
            self.delay_s = min(2 * self.delay_s, _LONGEST_DELAY * first_delay_s)

    def take(self, room_bytes: int) -> list[AddRequest]:
        """Take the requests for the next message: all, or up to `room_bytes` (may be exceeded by one request)."""
        queue = self.queue
        for count, request in enumerate(queue, 1):
            room_bytes -= len(request.group.data)
            if room_bytes <= 0:
                taken, self.queue = queue[:count], queue[count:]
                return taken
        self.queue = []
        return queue

    def repeat(self) -> None:
        """Put the refused requests back at the front of the queue."""
        assert self.refused is not None
        assert not self.unanswered
        self.queue[:0] = self.refused
        self.refused = None


def merge_small(requests: list[AddRequest]) -> list[AddRequest]:
    """Return a lane's requests with runs of small adjacent groups merged: the bytes are the same, a bookie's work is per group.

    Measured at 1 KB with a bookie in this process: 8 instead of 12.7 µs of CPU per entry at E = 1, 17 instead of 33 at E = 3.
    """
    if len(requests) == 1:
        return requests
    merged: list[AddRequest] = []
    run: list[AddRequest] = []
    next_entry_id = -1  # after the run; a striped ledger's groups leave gaps at each bookie
    for request in requests:
        group = request.group
        if len(group.data) <= _SMALL_BYTES:
            if run and (group.first_entry_id != next_entry_id or request.background is not run[0].background):
                merged.append(_merge(run))
                run = []
            run.append(request)
            next_entry_id = group.first_entry_id + len(group.ends)
            continue
        if run:
            merged.append(_merge(run))
            run = []
        merged.append(request)
    if run:
        merged.append(_merge(run))
    return merged


def _merge(run: list[AddRequest]) -> AddRequest:
    if len(run) == 1:
        return run[0]
    first = run[0]
    return AddRequest(merge_groups([request.group for request in run]), first.master_key, first.recovery, first.background)
