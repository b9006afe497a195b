"""H5 to H10 and H13: who got what, when, and what an acknowledgement ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from tests.history.events import Event, Position
from tests.history.verdict import Facts, Promises, Violation

GATHER_S = 0.5
"""So long an acknowledgement may be on its way: clients gather them for 0.1 s."""


def check_delivery(facts: Facts, promises: Promises) -> Iterator[Violation]:
    for name, events in facts.subscriptions().items():
        watch = _Watch(name, facts, promises)
        for event in events:
            yield from watch.on_event(event)
        if promises.drained:
            yield from watch.at_the_end()


@dataclass(slots=True)
class _Consumer:
    opened: Event
    last_rank: int | None = None  # of what it received last
    restarts: int = 1  # how often it may go back to the first unacknowledged, after what happened
    sought_from: int | None = None  # after a seek: the rank that must come next
    held: dict[int, Event] = field(default_factory=dict)  # received and neither acknowledged nor given back, by rank


class _Watch:
    """One subscription, event by event. What it knows is what the server may assume: acknowledgements said, consumers open."""

    def __init__(self, name: str, facts: Facts, promises: Promises) -> None:
        self._name = name
        self._facts = facts
        self._promises = promises
        self._consumers: dict[str, _Consumer] = {}
        self._type = ""
        self._acked: dict[int, Event] = {}
        self._moved = False  # an administrator moved it: what it skipped is not owed
        self._uncertain_until_s = -1.0  # after a break: what arrives may come from the client's own queue
        self._excused: set[int] = set()  # may come again though acknowledged: it was on its way to two consumers
        self._loose: set[int] = set()  # of a batch that came again because of one of its messages: two may hold the others
        self._received: dict[int, Event] = {}
        self._counts: dict[int, int] = {}
        self._first_of_key: dict[str, int] = {}
        self._since_last_open: set[int] = set()
        self._start_rank = 0

    def on_event(self, event: Event) -> Iterator[Violation]:
        if event.kind in ("restart", "restarted"):
            self._on_break(event)
            return
        if event.kind == "open":
            self._on_open(event)
            return
        if event.kind == "moved":
            self._moved = True
            self._break_sequences()
            return
        consumer = self._consumers.get(event.actor)
        if consumer is None:
            return
        if event.kind == "received":
            yield from self._on_received(consumer, event)
        elif event.kind == "opened":
            self._on_opened(consumer, event)
        elif event.kind == "ack":
            self._on_ack(consumer, event)
        elif event.kind == "nack":
            self._on_nack(consumer, event)
        elif event.kind == "sought":
            self._on_sought(consumer, event)
        elif event.kind == "close":
            del self._consumers[event.actor]
            self._on_active_change(event)

    # Events

    def _on_open(self, event: Event) -> None:
        if not self._received and not self._consumers:
            self._start_rank = int(event.details.get("start_rank", 0))
        self._type = event.type
        self._consumers[event.actor] = _Consumer(event)
        self._since_last_open.clear()
        self._on_active_change(event)

    def _on_break(self, event: Event) -> None:
        """Connections are gone: what is unacknowledged may come again, to anybody; acknowledgements just said may be lost."""
        self._break_sequences()
        self._counts.clear()
        self._uncertain_until_s = inf if event.kind == "restart" else event.at_s + self._promises.reconnect_s
        self._excuse_unacked(event.at_s, self._promises.ack_window_s)

    def _break_sequences(self) -> None:
        for consumer in self._consumers.values():
            consumer.held.clear()
        self._let_restart()

    def _excuse_unacked(self, now_s: float, ack_delay_s: float) -> None:
        """What is unacknowledged now, for all that the server can know, is delivered anew, while clients may still hold a copy."""
        self._excused.update(rank for rank, ack in self._acked.items() if now_s - ack.at_s <= ack_delay_s)
        stored = self._facts.stored_by(now_s + GATHER_S)
        self._excused.update(rank for rank in range(self._start_rank, stored) if rank not in self._acked)

    def _let_restart(self) -> None:
        for consumer in self._consumers.values():
            consumer.restarts += 1

    def _on_active_change(self, event: Event) -> None:
        """Of a Failover subscription another consumer may be active now; the one before still has what was on its way."""
        self._let_restart()
        if self._type == "Failover" and len(self._consumers) > 1:
            self._excuse_unacked(event.at_s, GATHER_S)

    def _on_opened(self, consumer: _Consumer, event: Event) -> None:
        """When the server made it the active one, between its opening and now, nobody knows."""
        if self._type == "Failover" and len(self._consumers) > 1:
            self._excuse_unacked(event.at_s, event.at_s - consumer.opened.at_s + GATHER_S)

    def _on_ack(self, consumer: _Consumer, event: Event) -> None:
        rank = self._rank_of(event)
        if rank is None:
            return
        ranks = range(self._start_rank, rank + 1) if event.cumulative else (rank,)
        for each in ranks:
            self._acked.setdefault(each, event)
            consumer.held.pop(each, None)
        if self._uncertain_until_s == inf:  # connections end sometime in this window, and what was just said may end with them
            self._excused.update(ranks)

    def _on_nack(self, consumer: _Consumer, event: Event) -> None:
        rank = self._rank_of(event)
        if self._type in ("Exclusive", "Failover"):
            consumer.restarts += 1  # everything unacknowledged comes again, behind what its queue still holds
            consumer.held.clear()
            self._excuse_unacked(event.at_s, GATHER_S)
        elif rank is not None:
            for other in self._facts.entry_of(rank):  # messages of one batch come again together
                consumer.held.pop(other, None)
                self._excused.add(other)
                self._loose.update((other, rank))

    def _on_sought(self, consumer: _Consumer, event: Event) -> None:
        """Everything from the target on is unacknowledged again, before it nothing is owed."""
        target = event.position
        assert target is not None, "a sought event says where to"
        rank = self._first_at_or_after(target)
        for each_consumer in self._consumers.values():
            each_consumer.last_rank = None
            each_consumer.restarts += 1  # a message given back before may still make it start over
            each_consumer.held.clear()
        consumer.sought_from = rank
        self._acked = {each: ack for each, ack in self._acked.items() if each < rank}
        for each in range(self._start_rank, rank):
            self._acked.setdefault(each, event)
        self._counts.clear()
        self._first_of_key.clear()
        self._excused.clear()
        if consumer.restarts > 1:
            self._excuse_unacked(event.at_s, GATHER_S)

    # Deliveries

    def _on_received(self, consumer: _Consumer, event: Event) -> Iterator[Violation]:
        rank = self._rank_of(event)
        if rank is None:
            yield Violation("H2", f"{self._name} delivered {event.position}, which the audit does not have", (event,))
            return
        yield from self._seek_is_exact(consumer, event, rank)
        yield from self._acknowledged_stays_away(event, rank)
        if self._type in ("Exclusive", "Failover"):
            yield from self._in_order(consumer, event, rank)
        else:
            yield from self._held_once(consumer, event, rank)
        if self._type == "Key_Shared" and event.key and not self._promises.out_of_order_allowed:
            yield from self._key_in_order(consumer, event, rank)
        self._received[rank] = event
        self._since_last_open.add(rank)
        consumer.last_rank = rank
        if rank not in self._acked and rank not in self._loose and event.at_s >= self._uncertain_until_s:
            consumer.held[rank] = event

    def _seek_is_exact(self, consumer: _Consumer, event: Event, rank: int) -> Iterator[Violation]:
        if consumer.sought_from is not None:
            expected, consumer.sought_from = consumer.sought_from, None
            if rank != expected:
                wanted = self._facts.audit[expected].position if expected < len(self._facts.audit) else None
                yield Violation("H13", f"after a seek {self._name} went on at {event.position}, not at {wanted}", (event,))

    def _acknowledged_stays_away(self, event: Event, rank: int) -> Iterator[Violation]:
        ack = self._acked.get(rank)
        if ack is not None and rank not in self._excused:
            yield Violation("H7", f"{self._name} delivered {event.position} again after its acknowledgement", (ack, event))

    def _in_order(self, consumer: _Consumer, event: Event, rank: int) -> Iterator[Violation]:
        """It goes on behind what it got last, leaving out only what is acknowledged; or it starts where something is owed."""
        last = consumer.last_rank
        goes_on = last is not None and rank > last
        if consumer.restarts and not goes_on:
            if rank <= self._first_unacked():
                consumer.restarts -= 1
                return
            if last is None and not self._moved:
                owed = self._facts.audit[self._first_unacked()].position
                yield Violation("H8", f"{event.actor} starts at {event.position}; {owed} is not acknowledged yet", (event,))
        if last is None:
            return
        if rank <= last:
            yield Violation("H8", f"{event.actor} got {event.position} behind a later one", (event,))
            return
        for between in range(last + 1, rank):
            if between not in self._acked and not self._moved:
                missed = self._facts.audit[between].position
                yield Violation("H8", f"{event.actor} got {event.position}, and {missed} before it was left out", (event,))
                return

    def _held_once(self, consumer: _Consumer, event: Event, rank: int) -> Iterator[Violation]:
        for other in self._consumers.values():
            if other is not consumer and rank in other.held:
                text = f"{event.actor} got {event.position} while {other.opened.actor} holds it"
                yield Violation("H9", text, (other.held[rank], event))
        if event.at_s < self._uncertain_until_s:
            return  # it may be from before the break, with a count that whoever serves next does not know
        before = self._counts.get(rank, 0)
        if event.redelivery_count < before:
            text = f"redelivery count of {event.position} fell from {before} to {event.redelivery_count}"
            yield Violation("H9", text, (self._received[rank], event))
        self._counts[rank] = event.redelivery_count

    def _key_in_order(self, consumer: _Consumer, event: Event, rank: int) -> Iterator[Violation]:
        """Not that what was given back comes before later messages: these may have been on their way already (rules_served.py)."""
        for other in self._consumers.values():
            if other is consumer:
                continue
            for held_rank, held in other.held.items():
                if held.key == event.key and held_rank < rank:
                    text = f"{event.actor} got {event.position} of key {event.key} while {other.opened.actor} holds an earlier one"
                    yield Violation("H10", text, (held, event))
        if rank not in self._received:
            if (last := self._first_of_key.get(event.key, -1)) > rank:
                later = self._received[last]
                yield Violation("H10", f"key {event.key}: {event.position} came first behind {later.position}", (later, event))
            self._first_of_key[event.key] = max(rank, self._first_of_key.get(event.key, -1))

    # The end

    def at_the_end(self) -> Iterator[Violation]:
        """The last consumer got everything that nobody acknowledged."""
        if self._moved:
            return
        for rank, stored in enumerate(self._facts.audit):
            if rank < self._start_rank or rank in self._acked:
                continue
            if rank not in self._received:
                yield Violation("H5", f"{self._name} never delivered {stored.position} ({stored.uid})")
            elif rank not in self._since_last_open and not any(rank in consumer.held for consumer in self._consumers.values()):
                yield Violation("H6", f"{stored.position} left {self._name} without an acknowledgement", (self._received[rank],))

    # Helpers

    def _rank_of(self, event: Event) -> int | None:
        return None if event.position is None else self._facts.rank.get(event.position)

    def _first_at_or_after(self, target: Position) -> int:
        for rank, stored in enumerate(self._facts.audit):
            assert stored.position is not None
            if stored.position >= target:
                return rank
        return len(self._facts.audit)

    def _first_unacked(self) -> int:
        rank = self._start_rank
        while rank in self._acked:
            rank += 1
        return rank
