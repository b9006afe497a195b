"""What Exclusive and Failover subscriptions send, without I/O: to one consumer, strictly in order.

    first unacknowledged ──reads──► pending groups ──permits──► Send to the active consumer
            ▲                                                          │
            └──── rewind: another one is active, redelivery, seek ─────┘

Rules
1. Entries are sent in position order and once, until a rewind starts again.
2. An entry that is acknowledged when its turn comes is not sent.
3. An entry costs as many permits as it has messages; it is sent whole as soon as there is one permit.
4. The active consumer is chosen among those with the lowest priority number, ordered by name, then by arrival: the first one, and
   for partition p the one at index p modulo their number, so that the partitions of a topic spread over them (protocol.md §12.3).
5. A change of the active consumer is announced to all, and its role to a newcomer; announcements do not delay delivery.

6. A consumer that chose hash ranges gets only entries whose key has a hash in them; the others are passed over, and stay
   unacknowledged (protocol.md §12.3). Only readers choose ranges, and each is alone on its subscription.

An Exclusive subscription admits a single consumer, so it needs no announcements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cepheid_broker.dispatch.counted_group import CountedGroup, Run
from cepheid_broker.dispatch.effects import (
    AckView,
    Announce,
    DispatchLimits,
    DispatchPolicies,
    Effect,
    HashRange,
    Idle,
    Read,
    ReadBack,
    Send,
    Why,
)
from cepheid_broker.dispatch.forward_reader import ForwardReader
from cepheid_broker.dispatch.holders import COMES_AGAIN_ON
from cepheid_metadata import Position

_NO_LIMIT = 1 << 62


@dataclass(slots=True, eq=False)
class _Candidate:
    key: int
    name: str
    priority: int
    ranges: tuple[HashRange, ...] = ()  # in order; empty: all keys
    permits: int = 0
    writable: bool = True

    @property
    def order(self) -> tuple[int, str, int]:
        return self.priority, self.name, self.key


class FailoverDispatch:
    def __init__(self, acks: AckView, limits: DispatchLimits, *, partition_index: int = -1, announces: bool = True) -> None:
        self._acks = acks
        self._forward = ForwardReader(limits.read_ahead_bytes, acks.first_unacknowledged())
        self._partition_index = max(0, partition_index)
        self._announces = announces
        self._candidates: dict[int, _Candidate] = {}
        self._active: _Candidate | None = None
        self._news: deque[Announce] = deque()

    def __repr__(self) -> str:
        name = "nobody" if self._active is None else f"{self._active.name!r} with {self._active.permits} permits"
        return f"<FailoverDispatch at {self._forward.position}, {name} of {len(self._candidates)} active>"

    # Events: consumers

    def on_consumer_joined(
        self, consumer: int, *, name: str = "", priority: int = 0, hash_ranges: Sequence[HashRange] | None = None
    ) -> None:
        self._candidates[consumer] = _Candidate(consumer, name, priority, tuple(hash_ranges or ()))
        if not self._choose() and self._announces:
            self._news.append(Announce(consumer, is_active=False))

    def on_consumer_left(self, consumer: int) -> None:
        if self._candidates.pop(consumer, None) is not None:
            self._news = deque(news for news in self._news if news.consumer != consumer)
            self._choose()

    def _choose(self) -> bool:
        """Choose the active consumer; return True if it changed, which is announced to all (rule 5)."""
        in_order = sorted(self._candidates.values(), key=lambda candidate: candidate.order)
        best = [candidate for candidate in in_order if candidate.priority == in_order[0].priority]
        chosen = best[self._partition_index % len(best)] if best else None
        if chosen is self._active:
            return False
        self._active = chosen
        if self._announces:
            self._news = deque(Announce(key, candidate is chosen) for key, candidate in self._candidates.items())
        self.on_rewind()
        return True

    def on_permits(self, consumer: int, messages: int) -> bool:
        if (candidate := self._candidates.get(consumer)) is not None:
            candidate.permits += messages
        return candidate is self._active and (self._forward.can_read or self._forward.head() is not None)

    def on_writable(self, consumer: int, writable: bool) -> None:
        if (candidate := self._candidates.get(consumer)) is not None:
            candidate.writable = writable

    # Events: entries

    def on_appended(self, tail: CountedGroup | None = None) -> Send | None:
        active, forward = self._active, self._forward
        takes_all = active is not None and active.writable and not active.ranges
        if tail is not None and takes_all and not self._news and forward.stands_before(tail):
            assert active is not None
            messages = tail.messages
            if active.permits >= messages:
                whole = self._acks.unacknowledged_runs(tail.ledger_id, tail.first, tail.last)
                if len(whole) == 1 and whole[0] == (tail.first, tail.last):
                    active.permits -= messages
                    forward.pass_over(tail)
                    return Send(active.key, tail, whole, messages)
        forward.on_appended()
        return None

    def on_read(self, read: Read | ReadBack, groups: Sequence[CountedGroup], *, to_end: bool) -> None:
        assert isinstance(read, Read), "nothing is read back here"
        self._forward.on_read(read, groups, to_end=to_end)

    def on_read_failed(self, read: Read | ReadBack) -> bool:
        assert isinstance(read, Read), "nothing is read back here"
        return self._forward.on_read_failed(read)

    def on_retry(self) -> None:
        self._forward.on_retry()

    def on_acked(self, consumer: int | None, positions: Iterable[Position]) -> None:
        """Do nothing: rule 2 applies when an entry's turn comes."""

    def on_cursor_moved(self) -> None:
        self._forward.skip_to(self._acks.first_unacknowledged())

    def on_redeliver(self, consumer: int, positions: Iterable[Position] | None) -> None:
        """Send everything unacknowledged again, whatever was named; only the active consumer may ask (protocol.md §16)."""
        if self._active is not None and consumer == self._active.key:
            self.on_rewind()

    def on_rewind(self) -> None:
        self._forward.rewind(self._acks.first_unacknowledged())

    def on_policies(self, policies: DispatchPolicies) -> None:
        """Do nothing: none of them concerns one consumer that gets everything in order (protocol.md §13; §27, trap 42)."""

    def on_clock(self, now_ms: int) -> None:
        """Do nothing: entries are not delayed here."""

    # Decisions

    def next_effect(self) -> Effect | None:
        if self._news:
            return self._news.popleft()
        active = self._active
        if active is None or active.permits <= 0 or not active.writable:
            return None
        if (read := self._forward.plan_read()) is not None:
            return read
        while (head := self._forward.head()) is not None:
            counted = head.counted
            runs = list(self._acks.unacknowledged_runs(counted.ledger_id, head.next_entry_id, counted.last))
            if active.ranges:
                runs = _runs_within(active.ranges, counted, runs)
            taken, messages = counted.take(runs, active.permits, _NO_LIMIT)
            self._forward.advance(counted.last + 1 if taken == runs else taken[-1][1] + 1)
            if taken:
                active.permits -= messages
                return Send(active.key, counted, taken, messages)
            if (read := self._forward.plan_read()) is not None:
                return read
        return None

    def why(self) -> list[Why]:
        active, forward = self._active, self._forward
        if self._news:
            return []
        if active is None:
            return [Why(Idle.NO_CONSUMER)]
        if active.permits <= 0:
            return [self._why_active(Idle.NO_PERMITS, f"it has {active.permits} permits")]
        if not active.writable:
            return [self._why_active(Idle.SOCKET_FULL, f"it has {active.permits} permits")]
        if forward.head() is not None:
            return []
        if forward.reading:
            return [Why(Idle.READING, position=forward.position)]
        if forward.failed:
            return [Why(Idle.READ_FAILED, position=forward.position)]
        return [self._why_at_end(active)] if forward.at_end else []

    def _why_at_end(self, active: _Candidate) -> Why:
        first = self._acks.first_unacknowledged()
        if first >= self._forward.next_position:
            return Why(Idle.AT_END)
        until = f"an entry is appended; sent entries are redelivered on {COMES_AGAIN_ON}"
        details = "entries sent to it from this one on are not acknowledged"
        if active.ranges:
            details += ", or the hash of its key is outside of the ranges that this reader chose"
        return Why(Idle.AT_END, consumer=active.name, position=first, until=until, details=details)

    def _why_active(self, idle: Idle, details: str) -> Why:
        assert self._active is not None
        others = len(self._candidates) - 1
        if others:
            details += f"; it is the active one, and {others} more are connected"
        return Why(idle, consumer=self._active.name, position=self._forward.next_position, details=details)

    # Figures

    @property
    def active(self) -> int | None:
        return None if self._active is None else self._active.key

    @property
    def wake_at_ms(self) -> int | None:
        return None

    def permits(self, consumer: int) -> int:
        candidate = self._candidates.get(consumer)
        return 0 if candidate is None else candidate.permits

    def unacked_messages(self, consumer: int) -> int | None:
        return None if consumer == self.active else 0

    def hash_ranges(self, consumer: int) -> tuple[HashRange, ...]:
        candidate = self._candidates.get(consumer)
        return () if candidate is None else candidate.ranges

    def is_active(self, consumer: int) -> bool:
        return consumer == self.active

    def is_blocked(self, consumer: int) -> bool:
        return False

    @property
    def read_position(self) -> Position:
        return self._forward.next_position

    @property
    def delayed_entries(self) -> int:
        return 0

    @property
    def replay_entries(self) -> int:
        return 0

    @property
    def pending_bytes(self) -> int:
        return self._forward.pending_bytes


def _runs_within(ranges: Sequence[HashRange], counted: CountedGroup, runs: Sequence[Run]) -> list[Run]:
    """Return the parts of `runs` whose keys have a hash in one of `ranges`, which are sorted and do not overlap."""
    assert counted.hashes is not None, "the driver counts groups with hashes where a consumer chose ranges"
    starts = [first for first, _ in ranges]
    within: list[Run] = []
    for first, last in runs:
        for entry_id in range(first, last + 1):
            key_hash = counted.hashes[entry_id - counted.first]
            at = bisect_right(starts, key_hash) - 1
            if at < 0 or key_hash > ranges[at][1]:
                continue
            if within and within[-1][1] == entry_id - 1:
                within[-1] = within[-1][0], entry_id
            else:
                within.append((entry_id, entry_id))
    return within
