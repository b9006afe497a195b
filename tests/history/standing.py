"""Where a subscription stands: what it owes for certain, what for certain not, and what may be either.

    owed ◄──delivered── doubtful ──acknowledged──► done            a move that has begun makes doubtful what it would change;
      └──────────── acknowledged, moved over ────────┘             its answer says what became of it

Rules
1. A move is done at some moment between its question and its answer. One that is never answered is done at any later moment of the
   opening that was asked, or never.
2. The next opening of the topic ends that: what an earlier one was asked for is done by then, or never (C7). So what is
   acknowledged from then on counts, and only what the move would have changed is in doubt.
3. An opening does in turn what it is asked: an answered reset comes behind what was asked before it and never answered. Of two that
   were both under way nobody knows which came last.
4. What is acknowledged is done again, what the latest opening delivers is owed again.
5. What has left the topic is done for ever.
6. A skip names how many entries, and its opening knows which these are. It has as acknowledged what it was told, what was saved
   before it, and perhaps what anybody else was told. Where that leaves two places to end, what is between them stays in doubt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from tests.history.events import Event, Position
from tests.history.verdict import Facts

BEGINS, ENDS = ("moving", "seeking"), ("moved", "sought")


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
        """The rank of the first message at or after it. Inside a batch it says which message; else it is the whole entry."""
        index = bisect_left(self._places, position[:2])
        if index == len(self._places):
            return len(self.events)
        ranks = self.ranks[self._places[index]]
        is_inside = self._places[index] == position[:2] and position[2] > 0
        return min(ranks.start + position[2], ranks.stop) if is_inside else ranks.start

    def messages(self, event: Event, *, left: bool) -> list[int]:
        """Of the entry that the event names: those that are `left`, or those that are not."""
        assert event.position is not None
        ranks = self.ranks.get(event.position[:2], range(0))
        mask = event.details.get("left")
        if mask is None:
            return list(ranks)
        return [rank for index, rank in enumerate(ranks) if bool(mask >> index & 1) is left]

    def key_of(self, rank: int) -> str:
        return self.events[rank].key

    def at(self, rank: int) -> Position | None:
        return self.events[rank].position if rank < len(self.events) else None


@dataclass(slots=True, eq=False)
class Move:
    """A reset (a seek is one): everything from the target on is owed again, nothing before it. Else a skip: nothing before it is
    owed, and the rest stays as it is; how far it goes is known to lie between `target` and `farthest` (rule 6)."""

    opening: tuple[str, int]
    actor: str
    position: Position
    target: int
    resets: bool
    began: int
    skips: int = 0
    """So many entries that are not (wholly) acknowledged, of those before its position."""
    farthest: int = 0
    ended: int | None = None
    """The number of the event that answers it. None: nobody ever heard."""
    contested: bool = False
    """Rule 3: another one was under way."""
    acked: dict[int, None] = field(default_factory=dict)
    """Meanwhile, of what it makes owed: before it, or behind it?"""

    @property
    def epoch(self) -> int:
        return self.opening[1]

    @property
    def deletes(self) -> bool:
        """The subscription: who comes next makes it anew, from the beginning."""
        return self.resets and self.position < (0, 0, 0)

    def reopens(self, rank: int) -> bool:
        return self.resets and rank >= self.target

    def skip_from(self, stored: Stored, *, surely: Collection[int], perhaps: Collection[int]) -> None:
        """Where it goes, if its opening has these as acknowledged, surely or perhaps."""
        self.target, self.farthest = (self._skips_to(stored, acknowledged) for acknowledged in (surely, perhaps))

    def _skips_to(self, stored: Stored, acknowledged: Collection[int]) -> int:
        left, last = self.skips, self.position[:2]
        for place, ranks in stored.ranks.items():
            if place > last or not left:
                return ranks.start
            left -= any(rank not in acknowledged for rank in ranks)
        return len(stored.events)

    def is_answered_by(self, event: Event) -> bool:
        return (self.opening, self.actor, self.position) == (event.details["opening"], event.actor, event.position)


def moves_in(events: Sequence[Event], stored: Stored) -> dict[int, Move]:
    """By the numbers of the events that begin and end them."""
    found: dict[int, Move] = {}
    unanswered: list[Move] = []
    for number, event in enumerate(events):
        if event.kind in BEGINS:
            found[number] = _begun_by(event, number, stored)
            unanswered.append(found[number])
        elif event.kind in ENDS:
            found[number] = move = next(move for move in unanswered if move.is_answered_by(event))
            move.ended = number
            unanswered.remove(move)
    for move, later in combinations(dict.fromkeys(found.values()), 2):
        overlap = move.ended is not None and later.began < move.ended
        if overlap and move.epoch == later.epoch and (move.resets or later.resets):
            move.contested = later.contested = True
    return found


def _begun_by(event: Event, number: int, stored: Stored) -> Move:
    assert event.position is not None, "a move says where to; a skip, what is the last entry that its opening has"
    skips, target = event.details.get("skips", 0), stored.first_from(event.position)
    return Move(event.details["opening"], event.actor, event.position, target, not skips, number, skips)


class Standing:
    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.done: dict[int, None] = {}
        """Acknowledged by somebody, or moved over: no opening must deliver it."""
        self.doubtful: dict[int, None] = {}
        self.moved_in = -1
        """The epoch of the last opening that was asked for a move. Earlier ones stand where they stood, whatever is said here."""
        self.trimmed = 0
        """So many messages, from the first on, have left the topic."""
        self._latest = -1
        self._unsettled: list[Move] = []
        self._moves: list[Move] = []
        """All that began, but those that a reset ended for certain: whoever held something may have lost it to one of them."""

    def on_opening(self, epoch: int) -> None:
        self._latest = max(epoch, self._latest)

    def is_deposed(self, epoch: int) -> bool:
        return epoch < self._latest

    def is_moving(self, epoch: int) -> bool:
        """It may yet do what it was asked."""
        return any(move.epoch == epoch for move in self._unsettled)

    def may_be_passed(self, earlier: int, rank: int, epoch: int) -> bool:
        """Whether an opening may deliver `rank` and not `earlier`, since it did what it was asked, or may have."""
        moves = [move for move in self._moves if move.epoch == epoch and rank >= move.target]
        return any(earlier < (move.target if move.resets else move.farthest) for move in moves)

    def may_be_reopened(self, rank: int, epoch: int) -> bool:
        """Whether it may come though later ones came before."""
        return any(move.epoch == epoch and move.reopens(rank) for move in self._moves)

    def trim(self, rank: int) -> list[int]:
        """What is before it leaves the topic. Which of it is owed for certain."""
        owed = [each for each in range(rank) if each not in self.done and each not in self.doubtful]
        for each in range(rank):
            self.done[each] = None
            self.doubtful.pop(each, None)
        self.trimmed = max(self.trimmed, rank)
        return [] if self.is_moving(self._latest) else owed

    def delete(self, rank: int, epoch: int) -> None:
        """The topic: what is before goes with it, owed or not. Openings before that epoch speak of what is no more."""
        self.trim(rank)
        self.on_opening(epoch)
        self.moved_in = max(epoch, self.moved_in)

    def begin(self, move: Move) -> bool:
        """False: it can change nothing any more, outside its own opening (rule 2)."""
        self.on_opening(move.epoch)
        self._unsettled.append(move)
        self._moves.append(move)
        if self.is_deposed(move.epoch):
            return False
        self.moved_in = move.epoch
        for rank in range(self.trimmed, len(self._stored.events)):
            if move.reopens(rank):
                if rank in self.done:
                    self._doubt(rank)
            elif rank < (move.target if move.resets else move.farthest) and rank not in self.done:
                self._doubt(rank)
        return True

    def end(self, move: Move) -> bool:
        """Whether it is known now where the subscription stands."""
        if move not in self._unsettled:
            return False  # one that was asked for later has ended before
        self._unsettled.remove(move)
        if move.contested:
            return False
        if move.resets:
            self._unsettled = [other for other in self._unsettled if other.epoch != move.epoch]
        if self.is_deposed(move.epoch):
            return False  # it may be what the next opening began with
        if move.resets:
            self._moves = [other for other in self._moves if other.epoch != move.epoch]
        for rank in range(self.trimmed, len(self._stored.events)):
            if rank < move.target:
                self.acknowledge(rank, move.epoch)
            elif rank in move.acked:
                self._doubt(rank)
            elif move.resets:
                self.done.pop(rank, None)
                self.doubtful.pop(rank, None)
        return True

    def acknowledge(self, rank: int, epoch: int) -> bool:
        """False: a move may make it owed again, or did."""
        moves = [move for move in self._unsettled if move.epoch == epoch and move.reopens(rank)]
        for move in moves:
            move.acked[rank] = None
        if moves and not self.is_deposed(epoch):
            self._doubt(rank)
        else:
            self.done[rank] = None
            self.doubtful.pop(rank, None)
        return not moves

    def deliver(self, rank: int, epoch: int) -> None:
        if not (self.is_deposed(epoch) or self.is_moving(epoch)):
            self.doubtful.pop(rank, None)

    def first_owed(self, rank: int) -> int:
        """The first one from there that is owed for certain."""
        while rank in self.done or rank in self.doubtful:
            rank += 1
        return rank

    def _doubt(self, rank: int) -> None:
        self.done.pop(rank, None)
        self.doubtful[rank] = None
