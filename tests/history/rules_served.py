"""H5 to H10 and H13 for histories that were noted at the servers' end of every connection: exact, without allowances of time.

A topic is served in *openings*, one after the other: a server opens it, others are deposed and may notice late. An `open` event
names the opening of its consumer; what is promised within an opening, and from one to the next, are two things:

    within      what was acknowledged does not come again; order; nobody holds what another one holds; counts do not fall
    to later    what was answered as saved is acknowledged; nothing is that nobody acknowledged

Beside the events of clients there are `saving` and `saved` (an ACK that asks for an answer, and that answer), `seeking` before
`sought`, and `moving` before `moved`: between the two nobody knows where the subscription stands, and if the second never
comes, nobody ever will: the server that was asked, and gave no answer, may do it at any later moment, and void what it heard
before. Positions name entries (index -1); `details["left"]` is the mask of a batch's messages that are not acknowledged, absent
for none: all are acknowledged by such an ack, all are delivered by such a message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.history.events import Event, Position
from tests.history.verdict import Facts, Promises, Violation

ORDERED = ("Exclusive", "Failover")
Opening = tuple[str, int]
"""The server's process, and the epoch in which it opened the topic."""


def check_served(facts: Facts, promises: Promises) -> Iterator[Violation]:
    stored = Stored(facts)
    for name, events in facts.subscriptions().items():
        watch = _Subscription(name, stored, promises)
        for event in events:
            yield from watch.on_event(event)
        if promises.drained:
            yield from watch.at_the_end()


class Stored:
    """Entries of the audit, and the ranks of their messages."""

    def __init__(self, facts: Facts) -> None:
        self.events = facts.audit
        self.ranks: dict[tuple[int, int], range] = {}
        for rank, event in enumerate(facts.audit):
            assert event.position is not None, "an audit event says where"
            place = event.position[:2]
            first = self.ranks[place].start if place in self.ranks else rank
            self.ranks[place] = range(first, rank + 1)
        self._places = list(self.ranks)

    def first_from(self, position: Position) -> int:
        """The rank of the first message at or after it."""
        index = bisect_left(self._places, position[:2])
        return self.ranks[self._places[index]].start if index < len(self._places) else len(self.events)

    def messages(self, event: Event, *, left: bool) -> list[int]:
        """Of the entry that the event names: those that are `left`, or those that are not."""
        assert event.position is not None
        ranks = self.ranks.get(event.position[:2], range(0))
        mask = event.details.get("left")
        if mask is None:
            return list(ranks)
        return [rank for index, rank in enumerate(ranks) if bool(mask >> index & 1) is left]


@dataclass(slots=True)
class _Consumer:
    opened: Event
    opening: _Opening
    held: dict[int, Event] = field(default_factory=dict)  # received and neither acknowledged nor given back, by rank


@dataclass(slots=True)
class _Opening:
    name: Opening
    kept: dict[int, None]  # acknowledged before it, and saved
    acked: dict[int, Event] = field(default_factory=dict)  # by rank: what this opening was told
    consumers: dict[str, _Consumer] = field(default_factory=dict)
    certain: bool = True  # False: somebody may have moved the subscription under it
    last_rank: int = -1  # of what was delivered last
    last_actor: str = ""  # and to whom
    restarts: int = 1  # how often it may go back to the first unacknowledged, after what happened
    sought_from: int | None = None  # after a seek: the rank that must come next
    counts: dict[int, int] = field(default_factory=dict)
    received: dict[int, Event] = field(default_factory=dict)
    first_of_key: dict[str, int] = field(default_factory=dict)
    covered: dict[int, list[int]] = field(default_factory=dict)  # by request: what its answer will say is saved


class _Subscription:
    def __init__(self, name: str, stored: Stored, promises: Promises) -> None:
        self._name = name
        self._stored = stored
        self._promises = promises
        self._openings: dict[Opening, _Opening] = {}
        self._consumers: dict[str, _Consumer] = {}
        self._type = ""
        self._heard: dict[int, None] = {}  # acknowledged by somebody, so that no opening must deliver it
        self._saved: dict[int, int] = {}  # by rank: the epoch of the opening that answered for it
        self._lost_track = False  # a move whose outcome nobody knows
        self._moves = 0  # under way, or lost
        self._moving: dict[Opening, int] = {}  # as many of them in each opening: it may yet do what it was asked
        self._moved_in = -1  # the epoch of the last one that is known: earlier openings stand where they stood
        self._contested = False  # it went somewhere while another move was under way: who came last?
        self._delivered: dict[int, Event] = {}
        self._since_drain: dict[int, None] = {}

    def on_event(self, event: Event) -> Iterator[Violation]:
        if event.kind == "open":
            self._on_open(event)
        elif event.kind in ("moving", "moved", "drain"):
            self._on_move(event)
        elif (consumer := self._consumers.get(event.actor)) is not None:
            yield from self._on_consumer_event(consumer, event)

    def _on_consumer_event(self, consumer: _Consumer, event: Event) -> Iterator[Violation]:
        opening = consumer.opening
        if event.kind == "received":
            yield from self._on_received(consumer, event)
        elif event.kind == "ack":
            self._on_ack(opening, event)
        elif event.kind == "saving":
            opening.covered[event.details["ask"]] = list(opening.acked)
        elif event.kind == "saved":
            self._on_saved(opening, event)
        elif event.kind == "nack":
            self._on_nack(consumer, event)
        elif event.kind == "seeking":
            self._lose_track(opening.name)
        elif event.kind == "sought":
            assert event.position is not None
            self._end_move(opening.name)
            self._move_to(self._stored.first_from(event.position), opening, event)
        elif event.kind == "close":
            del self._consumers[event.actor], opening.consumers[event.actor]
            opening.restarts += 1

    # Consumers, openings

    def _on_open(self, event: Event) -> None:
        self._type = event.type
        process, epoch = event.details["opening"]
        opening = self._openings.get((process, epoch))
        if opening is None:
            kept = {rank: None for rank, saved_in in self._saved.items() if saved_in < epoch}
            opening = self._openings[process, epoch] = _Opening((process, epoch), kept, certain=self._is_known(epoch))
        self._consumers[event.actor] = opening.consumers[event.actor] = _Consumer(event, opening)
        opening.restarts += 1
        if len(opening.consumers) == 1:
            # Nobody was there: delivery begins anew. A type may change then, and with it what order means.
            opening.first_of_key.clear()
            opening.last_rank = -1

    def _is_known(self, epoch: int) -> bool:
        return not (self._moves or self._contested) and epoch >= self._moved_in

    # Acknowledgements

    def _on_ack(self, opening: _Opening, event: Event) -> None:
        if event.cumulative:
            if self._type not in ORDERED:
                return  # a server ignores it there
            assert event.position is not None
            before = range(self._stored.first_from(event.position))
            ranks: Iterable[int] = (*before, *self._stored.messages(event, left=False))
        else:
            ranks = self._stored.messages(event, left=False)
        for rank in ranks:
            opening.acked.setdefault(rank, event)
            self._heard[rank] = None
            for consumer in opening.consumers.values():
                consumer.held.pop(rank, None)

    def _on_saved(self, opening: _Opening, event: Event) -> None:
        epoch, in_doubt = opening.name[1], self._moving.get(opening.name, 0) > 0
        for rank in opening.covered.pop(event.details["ask"], ()):
            if rank in opening.acked and not in_doubt:  # else it was sought over meanwhile, or may yet be
                self._saved[rank] = min(epoch, self._saved.get(rank, epoch))

    def _on_nack(self, consumer: _Consumer, event: Event) -> None:
        if self._type in ORDERED:
            consumer.opening.restarts += 1
            consumer.held.clear()
        else:
            named = list(consumer.held) if event.position is None else self._stored.ranks.get(event.position[:2], ())
            for rank in named:
                if consumer.held.pop(rank, None) is not None:  # what it does not hold it cannot give back
                    consumer.opening.counts[rank] = consumer.opening.counts.get(rank, 0) + 1

    # Moves

    def _on_move(self, event: Event) -> None:
        if event.kind == "moving":
            self._lose_track(event.details.get("opening"))
        elif event.kind == "drain":
            self._since_drain.clear()
        elif event.details.get("reset"):
            assert event.position is not None
            opening = self._openings.get(event.details["opening"])
            self._end_move(event.details["opening"])
            self._moved_in = max(self._moved_in, event.details["opening"][1])
            self._move_to(self._stored.first_from(event.position), opening, event)
        else:
            assert event.position is not None
            self._end_move(event.details["opening"])
            for rank in range(self._rank_behind(event.position)):
                self._heard[rank] = None
            self._regain(self._openings.get(event.details["opening"]))

    def _rank_behind(self, position: Position) -> int:
        return self._stored.first_from((position[0], position[1] + 1, -1))

    def _end_move(self, name: Opening) -> None:
        self._moves -= 1
        if self._moving.get(name):
            self._moving[name] -= 1

    def _lose_track(self, name: Opening | None) -> None:
        """Until it is known what became of it, all that was said about this subscription is void."""
        self._moves += 1
        if name is not None:
            self._moving[name] = self._moving.get(name, 0) + 1
        self._void(name)

    def _void(self, name: Opening | None) -> None:
        self._saved.clear()
        for opening in self._openings.values():
            opening.certain = False
            opening.acked.clear()
            opening.kept.clear()
            opening.covered.clear()
            opening.counts.clear()
            opening.restarts += 1
            if name in (None, opening.name):
                for consumer in opening.consumers.values():
                    consumer.held.clear()  # what is skipped nobody holds, from the moment on when it is asked for

    def _move_to(self, target: int, opening: _Opening | None, event: Event) -> None:
        """Everything from the target on is unacknowledged again, before it nothing is owed."""
        self._contested = self._moves > 0
        if opening is not None:
            self._moved_in = max(self._moved_in, opening.name[1])
            opening.counts.clear()
        if self._contested:
            self._void(None if opening is None else opening.name)  # also what was said since it was asked for
            return
        self._heard = dict.fromkeys(range(target))
        if opening is not None:
            opening.acked = dict.fromkeys(range(target), event)
            opening.sought_from = target if self._type in ORDERED else None
            opening.first_of_key.clear()
            opening.received.clear()
            opening.last_rank = -1
            for consumer in opening.consumers.values():
                consumer.held.clear()
            self._saved = dict.fromkeys(range(target), opening.name[1])
        self._regain(opening)

    def _regain(self, opening: _Opening | None) -> None:
        if opening is not None and self._is_known(opening.name[1]):
            opening.certain = True
            opening.restarts += 1

    # Deliveries

    def _on_received(self, consumer: _Consumer, event: Event) -> Iterator[Violation]:
        assert event.position is not None
        ranks = self._stored.messages(event, left=True)
        if event.position[:2] not in self._stored.ranks:
            yield Violation("H2", f"{self._name} delivered {event.position}, which the audit does not have", (event,))
            return
        if not ranks:
            yield Violation("H7", f"{self._name} delivered {event.position}, all of it acknowledged", (event,))
            return
        opening = consumer.opening
        yield from self._acknowledged_stays_away(opening, event, ranks)
        if self._type in ORDERED:
            yield from self._seek_is_exact(opening, event, ranks[0])
            yield from self._in_order(consumer, event, ranks[0])
        else:
            yield from self._held_once(consumer, event, ranks)
        if self._type == "Key_Shared" and not self._promises.out_of_order_allowed:
            yield from self._key_in_order(consumer, event, ranks[0])
        opening.last_rank, opening.last_actor = ranks[-1], event.actor
        for rank in ranks:
            opening.received[rank] = self._delivered[rank] = event
            self._since_drain[rank] = None
            if rank not in opening.acked and not self._moves:
                consumer.held[rank] = event

    def _acknowledged_stays_away(self, opening: _Opening, event: Event, ranks: list[int]) -> Iterator[Violation]:
        in_doubt = self._moving.get(opening.name, 0) > 0
        for rank in ranks:
            ack = None if in_doubt else opening.acked.get(rank)
            if ack is not None and ack.at_s < event.at_s:  # within one step of a server both are true
                yield Violation("H7", f"{self._name} delivered {event.position} again after its acknowledgement", (ack, event))
                return
            if rank in opening.kept:
                text = f"{self._name} delivered {event.position}, whose acknowledgement was answered as saved before {opening.name}"
                yield Violation("H7", text, (event,))
                return
        if opening.certain and not self._moves:
            for rank in self._stored.messages(event, left=False) if "left" in event.details else ():
                if rank not in self._heard:
                    yield Violation("H6", f"{self._name}: nobody acknowledged message {rank} of {event.position}", (event,))
                    return

    def _seek_is_exact(self, opening: _Opening, event: Event, rank: int) -> Iterator[Violation]:
        if opening.sought_from is not None and opening.certain and not self._moves:
            expected, opening.sought_from = opening.sought_from, None
            owed = self._first_owed(expected)  # what was acknowledged since, by ids from before, does not come
            if not expected <= rank <= owed:
                wanted = self._at(expected)
                yield Violation("H13", f"after a seek {self._name} went on at {event.position}, not at {wanted}", (event,))

    def _in_order(self, consumer: _Consumer, event: Event, rank: int) -> Iterator[Violation]:
        """All consumers of an opening together: it goes on behind what was delivered last, or starts at what is owed, as whoever
        comes next does."""
        opening = consumer.opening
        last = opening.last_rank
        certain = opening.certain and not self._moves
        if 0 <= last < rank <= self._first_owed(last + 1) and opening.last_actor == event.actor:
            return
        if opening.restarts:
            opening.restarts -= 1
            if certain and rank > (owed := self._first_owed(0)):
                text = f"{event.actor} starts at {event.position}; {self._at(owed)} is not acknowledged yet"
                yield Violation("H8", text, (event,))
            return
        if rank <= last:
            yield Violation("H8", f"{event.actor} got {event.position} behind {self._at(last)}", (event,))
        elif certain:
            missed = self._at(self._first_owed(last + 1))
            yield Violation("H8", f"{event.actor} got {event.position}, and {missed} before it was left out", (event,))

    def _held_once(self, consumer: _Consumer, event: Event, ranks: list[int]) -> Iterator[Violation]:
        opening = consumer.opening
        for other in opening.consumers.values():
            for rank in ranks:
                if other is not consumer and (held := other.held.get(rank)) is not None:
                    text = f"{event.actor} got {event.position} while {other.opened.actor} holds it"
                    yield Violation("H9", text, (held, event))
                    return
        before = opening.counts.get(ranks[0], 0)
        if event.redelivery_count < before and not self._moving.get(opening.name):
            text = f"redelivery count of {event.position} is {event.redelivery_count}, and was to be {before} at least"
            yield Violation("H9", text, (event,))
        opening.counts.update(dict.fromkeys(ranks, event.redelivery_count))

    def _key_in_order(self, consumer: _Consumer, event: Event, rank: int) -> Iterator[Violation]:
        opening, key = consumer.opening, self._stored.events[rank].key
        if not key:
            return
        for other in opening.consumers.values():
            if other is consumer:
                continue
            for held_rank, held in other.held.items():
                if held_rank < rank and self._stored.events[held_rank].key == key:
                    text = f"{event.actor} got {event.position} of key {key} while {other.opened.actor} holds an earlier one"
                    yield Violation("H10", text, (held, event))
                    return
        if rank not in opening.received:
            if (last := opening.first_of_key.get(key, -1)) > rank:
                text = f"key {key}: {event.position} came first behind {self._at(last)}"
                yield Violation("H10", text, (opening.received[last], event))
            opening.first_of_key[key] = max(rank, last)

    # The end

    def at_the_end(self) -> Iterator[Violation]:
        """What nobody acknowledged came in the end."""
        if self._moves or self._contested:
            return
        for rank, stored in enumerate(self._stored.events):
            if rank in self._heard:
                continue
            if rank not in self._delivered:
                yield Violation("H5", f"{self._name} never delivered {stored.position} ({stored.uid})")
                return
            text = f"{stored.position} ({stored.uid}) of {self._name} was delivered, never acknowledged, and does not come again"
            yield Violation("H6", text, (self._delivered[rank],))
            return

    # Helpers

    def _first_owed(self, rank: int) -> int:
        """The first one from there that nobody acknowledged."""
        while rank in self._heard:
            rank += 1
        return rank

    def _at(self, rank: int) -> Position | None:
        return self._stored.events[rank].position if rank < len(self._stored.events) else None
