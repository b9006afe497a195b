"""What rules share: violations, and indexes over a history that each is asked from."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.history.events import Event, Position

NOT_STORED = frozenset({"ChecksumError", "NotAllowedError"})
"""Answers to a SEND with which a server promises that it has not stored it: it looked at the message and refused it (protocol.md
§10.4). Behind every other failure it may be stored: PersistenceError and ServiceNotReady say that something broke on the way, and
clients themselves say TopicTerminated of what they sent before they heard of that, as they say Timeout or AlreadyClosed."""


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    text: str
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.rule}: {self.text}", *(f"    {event}" for event in self.events)])


@dataclass(frozen=True, slots=True)
class Promises:
    """What the server and the clients promised in this run."""

    deduplication: bool = False
    ack_window_s: float = 2.0
    """An acknowledgement without response may be lost by a crash so long after it: the client gathers for 0.1 s, the broker saves
    within half a second; the rest is for a busy machine."""
    reconnect_s: float = 5.0
    """So long after a restart a client may still hand out what it had fetched before."""
    key_batches: bool = False
    """Producers batch by key: they keep the order of each key alone."""
    out_of_order_allowed: bool = False
    """Key_Shared consumers asked for it."""
    drained: bool = True
    """The last consumer of each subscription received until nothing more came."""
    noted_at_servers: bool = False
    """Deliveries and acknowledgements were noted at the servers' end of the connections (rules_served.py): none of the allowances
    above is made for them."""


class Facts:
    """Indexes of one history, made once."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.audit = [event for event in events if event.kind == "audit"]
        self.rank: dict[Position, int] = {}
        self.copies: dict[str, list[Position]] = defaultdict(list)
        """Where a message is stored; more than once after resends."""
        for rank, event in enumerate(self.audit):
            assert event.position is not None, "an audit event says where"
            self.rank[event.position] = rank
            self.copies[event.uid].append(event.position)
        self.sends: dict[str, Event] = {event.uid: event for event in events if event.kind == "send"}
        self.sent_ok = [event for event in events if event.kind == "sent" and not event.error]
        self.refused = [event for event in events if event.kind == "sent" and event.error.rpartition(".")[2] in NOT_STORED]
        self.restarts = [event for event in events if event.kind == "restart"]
        self.resends: Counter[str] = Counter(event.uid for event in events if event.kind == "resend")

        self._stored_at: list[tuple[float, int]] = []  # when it was known that so many are stored
        for sent in self.sent_ok:
            rank = -1 if sent.position is None else self.rank.get(sent.position, -1)
            self._stored_at.append((sent.at_s, max(rank + 1, self._stored_at[-1][1] if self._stored_at else 0)))

    def stored_by(self, at_s: float) -> int:
        """How many messages of the audit were answered by then."""
        index = bisect_right(self._stored_at, (at_s, len(self.audit)))
        return self._stored_at[index - 1][1] if index else 0

    def entry_of(self, rank: int) -> Iterator[int]:
        """The messages that are stored in one entry with this one."""
        for step in (-1, 1):
            near = rank if step > 0 else rank - 1
            while 0 <= near < len(self.audit) and self._entry(near) == self._entry(rank):
                yield near
                near += step

    def _entry(self, rank: int) -> tuple[int, ...]:
        position = self.audit[rank].position
        assert position is not None
        return position[:2]

    def subscriptions(self) -> dict[str, list[Event]]:
        """Events of each subscription in order, and those of the whole topic among them."""
        found: dict[str, list[Event]] = {event.subscription: [] for event in self.events if event.kind == "open"}
        for event in self.events:
            if event.subscription in found:
                found[event.subscription].append(event)
            elif event.kind in ("restart", "restarted", "trimmed", "deleted"):
                for events in found.values():
                    events.append(event)
        return found


def grouped(events: Iterable[Event], name: Callable[[Event], Hashable]) -> dict[Hashable, list[Event]]:
    found: dict[Hashable, list[Event]] = defaultdict(list)
    for event in events:
        found[name(event)].append(event)
    return found


def actor_of(event: Event) -> str:
    return event.actor


def actor_and_key_of(event: Event) -> tuple[str, str]:
    return (event.actor, event.key)
