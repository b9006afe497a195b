"""What the dispatch cores share: effects, reasons, and the narrow view of a cursor on which they decide.

    events ──► core ──next_effect()──► Send │ SendAll │ Read │ ReadBack │ Announce │ None        one at a time, until None
                 ├──why()──► what blocks it, for which consumer, and the event that ends it; empty while it has work
                 └──wake_at_ms──► when it needs `on_clock`, even without other events

A core receives every event (permits, appended entries, acknowledgements, sockets that fill up, the time) and performs nothing
itself. Its driver, `Dispatcher`, performs the effects and wakes it once per loop turn after events.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cepheid_broker.dispatch.counted_group import CountedGroup, Run
from cepheid_metadata import Position

HashRange = tuple[int, int]
"""Key hashes `first..last`, inclusive."""


class AckView(Protocol):
    """The part of a cursor that a core uses: memory only."""

    def first_unacknowledged(self) -> Position: ...

    def unacknowledged_runs(self, ledger_id: int, first: int, last: int) -> Sequence[Run]: ...

    def redelivery_counts_in(self, ledger_id: int) -> Mapping[int, int]:
        """Return counts by entry id, only those above 0. They last until the entry is acknowledged."""

    def count_redelivery(self, ledger_id: int, entry_id: int) -> None: ...


_NO_COUNTS: dict[int, int] = {}


class Send(NamedTuple):
    """Send these runs of the group to a consumer, in order. `redelivery_counts` by entry id, only those above 0.

    A tuple, as a hundred thousand are created per second: it takes a third of the time of a frozen dataclass.
    """

    consumer: int
    counted: CountedGroup
    runs: Sequence[Run]
    messages: int
    redelivery_counts: Mapping[int, int] = _NO_COUNTS


def counts_of(acks: AckView, ledger_id: int, runs: Sequence[Run]) -> Mapping[int, int]:
    """Return the redelivery counts of these entries, as `Send` has them."""
    counts = acks.redelivery_counts_in(ledger_id)
    if not counts:
        return _NO_COUNTS
    return {e: counts[e] for first, last in runs for e in range(first, last + 1) if e in counts}


@dataclass(frozen=True, slots=True)
class SendAll:
    """Sends decided in one step and performed in one, with nothing in between; at most one for each consumer."""

    sends: Sequence[Send]


@dataclass(frozen=True, slots=True)
class Read:
    """Read entries at `position` or after it, and answer with `on_read` or `on_read_failed`."""

    position: Position
    ticket: int
    appended_before: int  # appends seen by the core; "this was the end" holds only if there was none since


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Read entries `first..last` of a ledger again, and answer with `on_read` or `on_read_failed`."""

    ledger_id: int
    first: int
    last: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell a consumer of a Failover subscription whether it is the active one (protocol.md §19)."""

    consumer: int
    is_active: bool


Effect = Send | SendAll | Read | ReadBack | Announce


class Idle(enum.Enum):
    """Why nothing is sent, and the event that ends it."""

    NO_CONSUMER = ("no consumer is connected", "a consumer subscribes")
    NO_PERMITS = ("consumers have no permits", "a consumer sends FLOW: its application receives")
    SOCKET_FULL = ("sockets of consumers with permits are full", "the client reads")
    TOO_MANY_UNACKED = ("consumers with permits reached the limit of unacknowledged messages", "acknowledgements arrive")
    SUBSCRIPTION_UNACKED = ("the subscription reached its limit of unacknowledged messages", "acknowledgements arrive")
    READING = ("entries are being read from storage", "the read ends")
    READ_FAILED = ("the last read from storage failed", "the pause before the next attempt ends")
    OBJECT_FAILED = (
        "the object store does not give the next entries, and the bookies do not have them any more",
        "the object store gives them: see cepheid tiered status and cepheid tiered verify",
    )
    UNREADABLE = (
        "the next entry has no valid copy",
        "a bookie has a valid copy again, or an operator skips it: cepheid subscriptions skip TOPIC SUBSCRIPTION --unreadable",
    )
    CHUNKS_RESERVED = ("only chunks for a consumer that cannot take them are left", "that consumer can take messages again")
    KEY_DRAINING = (
        "the key moved to another consumer while an earlier one still holds messages of it",
        "that consumer acknowledges them or leaves",
    )
    RANGE_HOLE = ("no consumer has the range of this key's hash", "a consumer with that range subscribes")
    TOO_MANY_WAITING = ("the limit of waiting entries is reached", "a consumer or key that they wait for can continue")
    DELAYED = ("entries wait for the time that their producer set", "that time is reached")
    TOO_MANY_DELAYED = ("the limit of delayed entries is reached", "the first of them is due")
    AT_END = ("there is nothing more to send", "an entry is appended, or redelivery is requested")
    SEEKING = ("the subscription is being moved: its consumers were closed", "the seek ends, and a consumer subscribes again")
    PUBLISH_BLOCKED = (
        "nothing new can be published: the backlog of the topic is above its quota",
        "enough is acknowledged, skipped or expired, or the quota is raised",
    )
    NO_OPEN_LEDGER = ("nothing new can be published: the topic has no open ledger", "enough bookies take new entries")

    def __init__(self, reason: str, until: str) -> None:
        self.reason = reason
        self.until = until

    def __str__(self) -> str:
        return f"{self.reason}, until {self.until}"


@dataclass(frozen=True, slots=True)
class Why:
    """One reason that holds a subscription up. `position`: the entry that waits, or that is waited for (see `details`)."""

    idle: Idle
    consumer: str | None = None
    key: str | None = None
    position: Position | None = None
    until: str = ""
    since_s: float | None = None
    details: str = ""

    def __post_init__(self) -> None:
        if not self.until:
            object.__setattr__(self, "until", self.idle.until)

    def __str__(self) -> str:
        about = [f"consumer {self.consumer!r}"] if self.consumer is not None else []
        about += [f"key {self.key}"] if self.key is not None else []
        about += [f"entry {self.position}"] if self.position is not None else []
        named = f" ({', '.join(about)})" if about else ""
        return f"{self.idle.reason}{named}, until {self.until}"


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one core, fixed for its life."""

    read_ahead_bytes: int
    round_robin_entries: int = 20  # entries that one consumer gets in its turn
    read_back_entries: int = 1000
    read_back_gap: int = 32
    max_chunked_messages: int = 10_000
    max_waiting_entries: int = 20_000  # Key_Shared: not sent, as their consumer or key is blocked
    max_delayed_entries: int = 100_000


@dataclass(frozen=True, slots=True)
class DispatchPolicies:
    """Policies that may change while consumers are connected. 0: no limit. Used only by Shared and Key_Shared."""

    max_unacked_per_consumer: int = 50_000
    max_unacked_per_subscription: int = 200_000
    delayed_delivery: bool = True


class DispatchCore(Protocol):
    """The events and questions of a driver to a core."""

    def on_consumer_joined(
        self, consumer: int, *, name: str = "", priority: int = 0, hash_ranges: Sequence[HashRange] | None = None
    ) -> None:
        """Add a consumer. `hash_ranges`: those it chose itself (Key_Shared, sticky; Exclusive), sorted and without overlaps."""

    def on_consumer_left(self, consumer: int) -> None: ...

    def on_permits(self, consumer: int, messages: int) -> bool:
        """Add permits. Return False if they alone give the core nothing to do."""

    def on_writable(self, consumer: int, writable: bool) -> None: ...

    def on_appended(self, tail: CountedGroup | None = None) -> Send | None:
        """Note appended entries; `tail`: these, if they form one group.

        A core positioned right before it that can send all of it in order may return it as a Send, without a read: this makes a
        thousand subscriptions that keep up affordable.
        """

    def on_read(self, read: Read | ReadBack, groups: Sequence[CountedGroup], *, to_end: bool) -> None:
        """Take the answer to a read. `to_end`: nothing follows what was read, or there was nothing at all."""

    def on_read_failed(self, read: Read | ReadBack) -> bool:
        """Note a failed read. Return True if the driver has to call `on_retry` after a pause."""

    def on_retry(self) -> None: ...

    def on_acked(self, consumer: int | None, positions: Iterable[Position]) -> None:
        """Note acknowledged entries, which `AckView` already shows as acknowledged."""

    def on_cursor_moved(self) -> None:
        """Note entries acknowledged by no consumer: skipped, expired, cleared, trimmed. Consumers stay."""

    def on_redeliver(self, consumer: int, positions: Iterable[Position] | None) -> None:
        """Send entries again; None: all that the consumer holds."""

    def on_rewind(self) -> None:
        """Start over after the cursor was reset. Nothing is outstanding, as consumers were closed."""

    def on_policies(self, policies: DispatchPolicies) -> None: ...

    def on_clock(self, now_ms: int) -> None:
        """Note the wall-clock time; called before every round of effects, and at `wake_at_ms`."""

    def next_effect(self) -> Effect | None: ...

    def why(self) -> list[Why]:
        """Return what holds delivery up; empty if there is something to do, or it is done in this turn."""

    @property
    def wake_at_ms(self) -> int | None: ...

    def permits(self, consumer: int) -> int: ...

    def unacked_messages(self, consumer: int) -> int | None:
        """Return the number of unacknowledged messages; None: not counted per consumer (use the backlog before the read
        position)."""

    def is_blocked(self, consumer: int) -> bool: ...

    def hash_ranges(self, consumer: int) -> tuple[HashRange, ...]:
        """Return the ranges of key hashes that it gets; none where keys do not matter."""

    def is_active(self, consumer: int) -> bool:
        """Return whether it receives messages: where only one does, whether it is that one."""

    @property
    def read_position(self) -> Position:
        """The next entry to be sent for the first time."""

    @property
    def pending_bytes(self) -> int: ...

    @property
    def delayed_entries(self) -> int:
        """Entries held back until they are due."""

    @property
    def replay_entries(self) -> int:
        """Entries waiting to be redelivered."""
