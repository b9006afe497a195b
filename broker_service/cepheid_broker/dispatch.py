"""What the dispatch cores share: effects, reasons, and the narrow view of a cursor that they decide by.

    events ──► core ──next_effect()──► Send │ Read │ ReadBack │ None        one effect at a time, until None
                 └───why_idle()──► the reason for None, and which event ends it

A core is told everything (permits, appended entries, acknowledgements, sockets that fill up) and does nothing itself. Its driver,
`Subscription`, performs the effects and wakes it once per loop turn after events.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cepheid_broker.counted_group import CountedGroup, Run
from cepheid_broker.position import Position


class AckView(Protocol):
    """What a core asks of a cursor: memory only."""

    def first_unacknowledged(self) -> Position: ...

    def unacknowledged_runs(self, ledger_id: int, first: int, last: int) -> Sequence[Run]: ...


@dataclass(frozen=True, slots=True)
class Send:
    """Send these runs of the group to a consumer, in order. `redelivery_counts` by entry id, only those above 0."""

    consumer: int
    counted: CountedGroup
    runs: Sequence[Run]
    messages: int
    redelivery_counts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Read:
    """Read what comes at `position` or after, and answer with `on_read` or `on_read_failed` of this `ticket`."""

    position: Position
    ticket: int
    appended_before: int  # how many appends the core had heard of: an empty answer counts only if there was none since


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Read entries `first..last` of a ledger again, and answer with `on_read_back` or `on_read_failed` of this `ticket`."""

    ledger_id: int
    first: int
    last: int
    ticket: int


Effect = Send | Read | ReadBack


class Idle(enum.Enum):
    """Why nothing is sent, and the event that ends it."""

    NO_CONSUMER = ("no consumer is connected", "a consumer subscribes")
    NO_PERMITS = ("consumers have no permits", "a consumer sends FLOW")
    SOCKET_FULL = ("sockets of consumers with permits are full", "the client reads")
    TOO_MANY_UNACKED = ("consumers with permits reached the limit of unacknowledged messages", "acknowledgements arrive")
    READING = ("entries are being read from storage", "the read ends")
    READ_FAILED = ("the last read from storage failed", "the pause before the next attempt ends")
    CHUNKS_RESERVED = ("only chunks for a consumer that cannot take them are left", "that consumer can take messages again")
    AT_END = ("everything was sent", "an entry is appended, or redelivery is asked for")

    def __init__(self, reason: str, until: str) -> None:
        self.reason = reason
        self.until = until

    def __str__(self) -> str:
        return f"{self.reason}, until {self.until}"


@dataclass(slots=True)
class Pending:
    """A group that was read and is sent from `next_entry_id` on."""

    counted: CountedGroup
    next_entry_id: int


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    read_ahead_bytes: int
    max_unacked_messages: int  # per consumer of a Shared subscription; resumes at half
    round_robin_entries: int = 20  # how much one consumer gets before it is the next one's turn
    read_back_entries: int = 1000
    read_back_gap: int = 32
    max_chunked_messages: int = 10_000


class ForwardReader:
    """Where a core stands in the topic, and what was read ahead: what both cores do alike."""

    def __init__(self, read_ahead_bytes: int, position: Position) -> None:
        self.position = position  # of the next read
        self.pending: list[Pending] = []  # the next one to send is the last
        self.pending_bytes = 0
        self.reading = False
        self.failed = False
        self.at_end = False
        self._read_ahead_bytes = read_ahead_bytes
        self._ticket = 0
        self._appended = 0

    def rewind(self, position: Position) -> None:
        """Forgets what was read, also what a read under way will bring."""
        self.position = position
        self.pending.clear()
        self.pending_bytes = 0
        self.reading = self.failed = self.at_end = False
        self._ticket += 1

    def plan_read(self) -> Read | None:
        if self.reading or self.failed or self.at_end or self.pending_bytes >= self._read_ahead_bytes:
            return None
        self.reading = True
        self._ticket += 1
        return Read(self.position, self._ticket, self._appended)

    def on_read(self, read: Read, groups: Iterable[CountedGroup]) -> None:
        if read.ticket != self._ticket:
            return  # rewound meanwhile
        self.reading = False
        arrived = [Pending(counted, counted.first) for counted in groups]
        if arrived:
            last = arrived[-1].counted
            self.position = Position(last.ledger_id, last.last + 1)
            self.pending_bytes += sum(pending.counted.size_bytes for pending in arrived)
            self.pending[:0] = reversed(arrived)
        else:
            self.at_end = read.appended_before == self._appended

    def on_read_failed(self, ticket: int) -> bool:
        """True: the driver shall call `on_retry` after a pause."""
        if ticket != self._ticket:
            return False
        self.reading, self.failed = False, True
        return True

    def on_retry(self) -> None:
        self.failed = False

    def on_appended(self) -> None:
        self._appended += 1
        self.at_end = False

    def head(self) -> Pending | None:
        return self.pending[-1] if self.pending else None

    def advance(self, next_entry_id: int) -> None:
        """The head was sent (or found acknowledged) up to `next_entry_id`."""
        head = self.pending[-1]
        if next_entry_id > head.counted.last:
            self.pending.pop()
            self.pending_bytes -= head.counted.size_bytes
        else:
            head.next_entry_id = next_entry_id
