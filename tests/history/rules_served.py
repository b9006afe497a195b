"""H5 to H10, H13 and M6 for histories that were noted at the servers' end of every connection: exact, without allowances of time.

A topic is served in *openings*, one after the other: a server opens it, others are deposed and may notice late. An `open` event
names the opening of its consumer; what is promised within an opening, and from one to the next, are two things:

    within      what was acknowledged does not come again; order; nobody holds what another one holds; counts do not fall
    to later    what was answered as saved is acknowledged; nothing is that nobody acknowledged

Beside the events of clients there are `active` (a Failover consumer is told that it is the one that receives from now on), `saving`
and `saved` (an ACK that asks for an answer, and that answer), `seeking` before `sought`, and `moving` before `moved`: where the
subscription stands meanwhile, and if the second never comes, says standing.py. All four name the opening that was asked, and where
to; a skip, how many entries (`details["skips"]`), and the last one that the opening has: which they are is judged here. `trimmed`:
what is before its position has left the topic. `deleted`: so has the topic with its subscriptions, by an operator's word; who comes
again makes it anew, behind that position and in openings of later epochs than the event names. Positions name entries (index -1),
but where a seek or reset begins inside a batch; `details["left"]` is the mask of a batch's messages that are not acknowledged,
absent for none: all are acknowledged by such an ack, all are delivered by such a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.history.events import Event
from tests.history.standing import Move, Standing, Stored, moves_in
from tests.history.verdict import Facts, Promises, Violation

ORDERED = ("Exclusive", "Failover")
Opening = tuple[str, int]
"""The server's process, and the epoch in which it opened the topic."""


def check_served(facts: Facts, promises: Promises, asked: Counter[str]) -> Iterator[Violation]:
    """`asked` counts for each rule the subscriptions that could have broken it."""
    stored = Stored(facts)
    for name, events in facts.subscriptions().items():
        watch, moves = _Subscription(name, stored, promises), moves_in(events, stored)
        for number, event in enumerate(events):
            if (move := moves.get(number)) is None:
                yield from watch.on_event(event)
            elif move.began == number:
                watch.begin(move)
            else:
                watch.end(move, event)
        if promises.drained:
            yield from watch.at_the_end()
        asked.update(list(watch.asked))


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
    active: str = ""  # who receives, of an ordered subscription
    has_changed: bool = False  # somebody came or went since it was chosen
    starts: bool = False  # at the first that is owed: it was chosen, or gave back what it had, and nothing came since
    last_rank: int = -1  # of what was delivered last
    was_moved: bool = False  # when it was deposed already: where it stands since is its own affair
    sought_from: int | None = None  # after a seek: the rank that must come next
    counts: dict[int, int] = field(default_factory=dict)
    received: dict[int, Event] = field(default_factory=dict)
    end: int = -1  # the highest rank that it delivered, so has
    first_of_key: dict[str, int] = field(default_factory=dict)
    to_send_again: dict[str, dict[int, None]] = field(default_factory=dict)
    """By key, ranks: who held them gave them back or left, and they did not come again yet."""
    covered: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """By consumer and request: what the answer will say is saved. Each connection numbers its requests itself."""
    skipped: int = 0  # all before this rank, by a skip that was answered

    @property
    def epoch(self) -> int:
        return self.name[1]

    def let_go(self, move: Move) -> None:
        """It was asked for one: what that makes owed again is acknowledged no longer."""
        self.acked = {rank: ack for rank, ack in self.acked.items() if not move.reopens(rank)}
        self.kept = {rank: None for rank in self.kept if not move.reopens(rank)}
        self.covered = {ask: [rank for rank in ranks if not move.reopens(rank)] for ask, ranks in self.covered.items()}
        self.sought_from = None
        if move.resets:
            self.counts.clear()
            self.skipped = min(self.skipped, move.target)
        self.to_send_again.clear()
        for consumer in self.consumers.values():
            consumer.held.clear()  # what is skipped nobody holds, from the moment on when it is asked for

    def start_over(self, move: Move, event: Event, *, ordered: bool) -> None:
        """It was moved back or forth, and said so."""
        self.acked = dict.fromkeys(range(move.target), event)
        self.sought_from = move.target if ordered else None
        self.starts = True
        self.counts.clear()
        self.first_of_key.clear()
        self.to_send_again.clear()
        self.received.clear()
        for consumer in self.consumers.values():
            consumer.held.clear()


class _Subscription:
    def __init__(self, name: str, stored: Stored, promises: Promises) -> None:
        self.asked: dict[str, None] = {}
        """Rules that this history could have broken."""
        self._name = name
        self._stored = stored
        self._promises = promises
        self._standing = Standing(stored)
        self._openings: dict[Opening, _Opening] = {}
        self._consumers: dict[str, _Consumer] = {}
        self._type = ""
        self._exists = False  # for certain: until somebody subscribes nothing is kept for it
        self._saved: dict[int, int] = {}  # by rank: the epoch of the opening that answered for it
        self._delivered: dict[int, Event] = {}
        self._gone = 0  # so many messages were in the topic when it was last deleted

    def on_event(self, event: Event) -> Iterator[Violation]:
        if event.kind == "open":
            self._on_open(event)
        elif event.kind == "trimmed":
            yield from self._on_trimmed(event)
        elif event.kind == "deleted":
            self._on_deleted(event)
        elif (consumer := self._consumers.get(event.actor)) is not None:
            yield from self._on_consumer_event(consumer, event)

    def _on_consumer_event(self, consumer: _Consumer, event: Event) -> Iterator[Violation]:
        opening = consumer.opening
        if event.kind == "received":
            yield from self._on_received(consumer, event)
        elif event.kind == "active":
            yield from self._on_active(opening, event)
        elif event.kind == "ack":
            self._on_ack(opening, event)
        elif event.kind == "saving":
            opening.covered[event.actor, event.details["ask"]] = list(opening.acked)
        elif event.kind == "saved":
            self._on_saved(opening, event)
        elif event.kind == "nack":
            self._on_nack(consumer, event)
        elif event.kind == "close":
            del self._consumers[event.actor], opening.consumers[event.actor]
            opening.has_changed = True
            for rank in consumer.held:
                self._waits_again(opening, rank)

    # Consumers, openings

    def _opening(self, name: Opening) -> _Opening:
        if name not in self._openings:
            self._openings[name] = _Opening(name, {rank: None for rank, saved_in in self._saved.items() if saved_in < name[1]})
            self._standing.on_opening(name[1])
        return self._openings[name]

    def _on_open(self, event: Event) -> None:
        self._type = event.type
        opening = self._opening(event.details["opening"])
        self._consumers[event.actor] = opening.consumers[event.actor] = _Consumer(event, opening)
        opening.has_changed = True
        self._exists |= not self._standing.is_deposed(opening.epoch)
        if event.type == "Exclusive":
            self._choose(opening, event.actor)
        if len(opening.consumers) == 1:
            opening.first_of_key.clear()  # nobody was there: delivery begins anew

    def _on_active(self, opening: _Opening, event: Event) -> Iterator[Violation]:
        if not opening.has_changed:
            text = f"{event.actor} is told to be the active consumer after {opening.active}, and nobody has come or gone"
            yield Violation("H8", text, (event,))
        self._choose(opening, event.actor)

    def _choose(self, opening: _Opening, actor: str) -> None:
        opening.active, opening.starts, opening.has_changed = actor, True, False

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
            has = rank <= opening.end or not self._standing.is_deposed(opening.epoch)
            if self._standing.acknowledge(rank, opening.epoch) and has:  # nothing acknowledges what is not there yet
                opening.acked.setdefault(rank, event)
            for consumer in opening.consumers.values():
                consumer.held.pop(rank, None)
            self._waits_no_more(opening, rank)

    def _on_saved(self, opening: _Opening, event: Event) -> None:
        epoch = opening.epoch
        for rank in opening.covered.pop((event.actor, event.details["ask"]), ()):
            if rank in opening.acked and epoch >= self._standing.moved_in:  # else it was sought over meanwhile, or may yet be
                self._saved[rank] = min(epoch, self._saved.get(rank, epoch))

    def _on_nack(self, consumer: _Consumer, event: Event) -> None:
        opening = consumer.opening
        if self._type in ORDERED:
            opening.starts |= opening.active == event.actor  # nobody else has anything to give back
        else:
            named = list(consumer.held) if event.position is None else self._stored.ranks.get(event.position[:2], ())
            for rank in named:
                if consumer.held.pop(rank, None) is not None:  # what it does not hold it cannot give back
                    opening.counts[rank] = opening.counts.get(rank, 0) + 1
                    self._waits_again(opening, rank)

    def _waits_again(self, opening: _Opening, rank: int) -> None:
        if key := self._stored.key_of(rank):
            opening.to_send_again.setdefault(key, {})[rank] = None

    def _waits_no_more(self, opening: _Opening, rank: int) -> None:
        opening.to_send_again.get(self._stored.key_of(rank), {}).pop(rank, None)

    # Moves, retention

    def _on_trimmed(self, event: Event) -> Iterator[Violation]:
        assert event.position is not None
        edge = self._stored.first_from(event.position)
        owed = self._standing.trim(edge)
        if self._exists:
            self.asked["M6"] = None
            if owed:
                text = f"{self._stored.at(owed[0])} left the topic, and {self._name} has not acknowledged it"
                yield Violation("M6", text, (event,))
        for opening in self._openings.values():
            for rank in range(edge):
                self._waits_no_more(opening, rank)

    def _on_deleted(self, event: Event) -> None:
        assert event.position is not None
        edge = self._stored.first_from(event.position)
        self._standing.delete(edge, event.details["epoch"])
        self._exists = False
        self._gone = max(edge, self._gone)
        for opening in self._openings.values():
            for rank in range(edge):
                self._waits_no_more(opening, rank)

    def begin(self, move: Move) -> None:
        opening, standing = self._opening(move.opening), self._standing
        if move.skips:
            surely = {*opening.acked, *opening.kept, *range(max(opening.skipped, standing.trimmed))}
            move.skip_from(self._stored, surely=surely, perhaps={*surely, *standing.done, *standing.doubtful})
        opening.let_go(move)
        self._exists &= not move.deletes
        if self._standing.begin(move):
            self._saved = {rank: epoch for rank, epoch in self._saved.items() if not move.reopens(rank)}
        else:
            opening.was_moved = True

    def end(self, move: Move, event: Event) -> None:
        if not self._standing.end(move):
            return
        opening = self._opening(move.opening)
        if move.skips:
            opening.skipped = max(opening.skipped, move.target)
        else:
            opening.start_over(move, event, ordered=self._type in ORDERED)
            self._saved = dict.fromkeys(range(move.target), move.epoch)

    def _is_judged(self, opening: _Opening) -> bool:
        """By what is owed: another one may have been moved since."""
        return opening.epoch >= self._standing.moved_in and not opening.was_moved

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
        if ranks[0] < self._gone and not self._standing.is_deposed(opening.epoch):
            yield Violation("H2", f"{self._name} delivered {event.position}, which was deleted with its topic", (event,))
            return
        yield from self._acknowledged_stays_away(opening, event, ranks)
        if self._type in ORDERED:
            yield from self._seek_is_exact(opening, event, ranks[0])
            yield from self._in_order(opening, event, ranks)
        else:
            yield from self._held_once(consumer, event, ranks)
        if self._type == "Key_Shared" and not self._promises.out_of_order_allowed:
            yield from self._key_in_order(consumer, event, ranks[0])
        opening.end = max(opening.end, ranks[-1])
        for rank in ranks:
            opening.received[rank] = self._delivered[rank] = event
            self._standing.deliver(rank, opening.epoch)
            self._waits_no_more(opening, rank)
            if rank not in opening.acked:
                consumer.held[rank] = event

    def _acknowledged_stays_away(self, opening: _Opening, event: Event, ranks: list[int]) -> Iterator[Violation]:
        if opening.acked or opening.kept:
            self.asked["H7"] = None
        for rank in ranks:
            ack = opening.acked.get(rank)
            if ack is not None and ack.at_s < event.at_s:  # within one step of a server both are true
                yield Violation("H7", f"{self._name} delivered {event.position} again after its acknowledgement", (ack, event))
                return
            if rank in opening.kept:
                text = f"{self._name} delivered {event.position}, whose acknowledgement was answered as saved before {opening.name}"
                yield Violation("H7", text, (event,))
                return
        if self._is_judged(opening) and "left" in event.details:
            self.asked["H6"] = None
            for rank in self._stored.messages(event, left=False):
                if rank not in self._standing.done and rank not in self._standing.doubtful:
                    yield Violation("H6", f"{self._name}: nobody acknowledged message {rank} of {event.position}", (event,))
                    return

    def _seek_is_exact(self, opening: _Opening, event: Event, rank: int) -> Iterator[Violation]:
        if opening.sought_from is not None and self._is_judged(opening):
            self.asked["H13"] = None
            expected, opening.sought_from = opening.sought_from, None
            owed = self._standing.first_owed(expected)  # what was acknowledged since, by ids from before, does not come
            if not expected <= rank <= owed:
                wanted = self._stored.at(expected)
                yield Violation("H13", f"after a seek {self._name} went on at {event.position}, not at {wanted}", (event,))

    def _in_order(self, opening: _Opening, event: Event, ranks: list[int]) -> Iterator[Violation]:
        """One consumer receives. It starts where something is owed, and goes on behind what was delivered last, leaving out only
        what is acknowledged, until another one is chosen or it gives back what it has."""
        rank, last, starts = ranks[0], opening.last_rank, opening.starts
        opening.last_rank, opening.starts = ranks[-1], False
        self.asked["H8"] = None
        if event.actor != opening.active:
            text = f"{event.actor} got {event.position}, and {opening.active or 'nobody'} is the active consumer"
            yield Violation("H8", text, (event,))
        elif not starts and rank <= last:
            yield Violation("H8", f"{event.actor} got {event.position} behind {self._stored.at(last)}", (event,))
        elif self._is_judged(opening) and rank > (owed := self._standing.first_owed(0 if starts else last + 1)):
            how = "starts at" if starts else f"goes on behind {self._stored.at(last)} at"
            text = f"{event.actor} {how} {event.position}; {self._stored.at(owed)} is not acknowledged yet"
            yield Violation("H8", text, (event,))

    def _held_once(self, consumer: _Consumer, event: Event, ranks: list[int]) -> Iterator[Violation]:
        opening = consumer.opening
        if len(opening.consumers) > 1 or ranks[0] in opening.counts:
            self.asked["H9"] = None
        for other in opening.consumers.values():
            for rank in ranks:
                if other is not consumer and (held := other.held.get(rank)) is not None:
                    text = f"{event.actor} got {event.position} while {other.opened.actor} holds it"
                    yield Violation("H9", text, (held, event))
                    return
        before = opening.counts.get(ranks[0], 0)
        if event.redelivery_count < before and not self._standing.is_moving(opening.epoch):
            text = f"redelivery count of {event.position} is {event.redelivery_count}, and was to be {before} at least"
            yield Violation("H9", text, (event,))
        opening.counts.update(dict.fromkeys(ranks, event.redelivery_count))

    def _key_in_order(self, consumer: _Consumer, event: Event, rank: int) -> Iterator[Violation]:
        """Messages that a producer delayed promise no order: in these histories they have no key."""
        opening, key = consumer.opening, self._stored.key_of(rank)
        if not key:
            return
        self.asked["H10"] = None

        def comes_first(earlier: int) -> bool:
            return earlier < rank and not self._standing.may_be_passed(earlier, rank, opening.epoch)

        for other in opening.consumers.values():
            if other is consumer:
                continue
            for held_rank, held in other.held.items():
                if self._stored.key_of(held_rank) == key and comes_first(held_rank):
                    text = f"{event.actor} got {event.position} of key {key} while {other.opened.actor} holds an earlier one"
                    yield Violation("H10", text, (held, event))
                    return
        if rank not in opening.received:
            last = opening.first_of_key.get(key, -1)
            if last > rank and not self._standing.may_be_reopened(rank, opening.epoch):
                text = f"key {key}: {event.position} came first behind {self._stored.at(last)}"
                yield Violation("H10", text, (opening.received[last], event))
            if (earlier := min(filter(comes_first, opening.to_send_again.get(key, ())), default=rank)) < rank:
                text = f"key {key}: {event.position} came first, and {self._stored.at(earlier)} was to be sent again before it"
                yield Violation("H10", text, (opening.received[earlier], event))
            opening.first_of_key[key] = max(rank, last)

    # The end

    def at_the_end(self) -> Iterator[Violation]:
        """What nobody acknowledged came in the end."""
        standing = self._standing
        for rank, stored in enumerate(self._stored.events):
            if rank in standing.doubtful:
                continue
            self.asked["H5"] = None
            if rank in self._delivered:
                self.asked["H6"] = None
            if rank in standing.done:
                continue
            if rank not in self._delivered:
                yield Violation("H5", f"{self._name} never delivered {stored.position} ({stored.uid})")
                return
            text = f"{stored.position} ({stored.uid}) of {self._name} was delivered, never acknowledged, and does not come again"
            yield Violation("H6", text, (self._delivered[rank],))
            return
