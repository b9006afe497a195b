"""What must, and what may, be true of a topic and its cursors, as their clients were told.

    memory ≤ allowed     what one live cursor object was given to acknowledge; what anybody ever was
    must ≤ allowed       what was reported as saved: it holds after every crash, until a reset

A save or a reset whose outcome nobody was told leaves both outcomes open: what is allowed grows, `must` shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cepheid_managed_ledger import Retention
from cepheid_metadata import Position

BATCH_MESSAGES = 72  # more than a word of the protocol has bits
WHOLE = (1 << BATCH_MESSAGES) - 1
NOWHERE = Position(-1, -1)
DEDUP = "pulsar.dedup"
"""The cursor that moves only together with sequence ids that name its position."""


@dataclass(slots=True)
class Acked:
    """A set of acknowledgements: everything up to a position, single entries, single messages of batches (bit i: message i);
    and how often entries that are not acknowledged were delivered again, at least."""

    upto: Position = NOWHERE
    entries: dict[Position, None] = field(default_factory=dict)
    messages: dict[Position, int] = field(default_factory=dict)
    counts: dict[Position, int] = field(default_factory=dict)

    def covers(self, position: Position) -> bool:
        return position <= self.upto or position in self.entries or self.messages.get(position, 0) == WHOLE

    def messages_of(self, position: Position) -> int:
        return WHOLE if self.covers(position) else self.messages.get(position, 0)

    def add(self, other: Acked) -> None:
        self.upto = max(self.upto, other.upto)
        self.entries.update(other.entries)
        for position, mask in other.messages.items():
            self.messages[position] = self.messages.get(position, 0) | mask
        for position, count in other.counts.items():
            self.counts[position] = max(self.counts.get(position, 0), count)

    def copy(self) -> Acked:
        return Acked(self.upto, dict(self.entries), dict(self.messages), dict(self.counts))

    def before(self, position: Position) -> Acked:
        """The part that a reset to `position` leaves acknowledged as well."""
        return Acked(
            min(self.upto, Position(position.ledger_id, position.entry_id - 1)),
            {entry: None for entry in self.entries if entry < position},
            {entry: mask for entry, mask in self.messages.items() if entry < position},
        )  # and no counts: delivery starts anew


def reset_to(position: Position, left: int) -> Acked:
    """What a reset leaves acknowledged: all before the entry, and of its messages those that are not `left`."""
    return Acked(Position(position.ledger_id, position.entry_id - 1), messages={position: WHOLE & ~left})


@dataclass(slots=True)
class CursorModel:
    """`layers` together are what is allowed. A reset begins a new one; once it is known to be done, those below are void:
    not what somebody else, who owns the topic by then, acknowledged since."""

    name: str
    certain: bool = False  # False: its creation or deletion has an unknown outcome
    layers: list[Acked] = field(default_factory=lambda: [Acked()])
    must: Acked = field(default_factory=Acked)
    resets: int = 0  # begun: what was asked before one says nothing after it
    losses: int = 0  # of its saved state, by an operator's hand: the same
    resetting: int = 0  # under way: until its end nobody knows which acknowledgements it makes void
    redelivered: dict[Position, int] = field(default_factory=dict)  # ever, by anybody: no count is above this
    created_at: Position = NOWHERE

    @property
    def voids(self) -> tuple[int, int]:
        """Whatever is asked with one value and answered with another says nothing of what is saved by then."""
        return self.resets, self.losses

    def allow(self, acked: Acked) -> None:
        self.layers[-1].add(acked)

    def allowed_messages_of(self, position: Position) -> int:
        messages = 0
        for layer in self.layers:
            messages |= layer.messages_of(position)
        return messages

    def begin_reset(self, position: Position, left: int = WHOLE) -> Acked:
        """`left`: of that entry, what is owed again. Returns what `end_reset` wants."""
        self.resets += 1
        self.resetting += 1
        kept = self.must.messages_of(position) & ~left  # whatever becomes of it
        self.must = self.must.before(position)
        self.must.add(Acked(messages={position: kept}))
        self.layers.append(reset_to(position, left))
        return self.layers[-1]

    def end_reset(self, layer: Acked, position: Position, left: int = WHOLE) -> None:
        """It is known to be done: nothing from `position` on is acknowledged, but by what came after."""
        self.layers = self.layers[next(index for index, other in enumerate(self.layers) if other is layer) :]
        self.must.add(reset_to(position, left))


@dataclass(slots=True)
class TopicModel:
    name: str
    key: str  # of its chain's record
    sent: dict[bytes, None] = field(default_factory=dict)  # payloads of all append calls
    appended: dict[tuple[str, int], dict[bytes, None]] = field(default_factory=dict)  # by opening, in the order of the calls
    stored: dict[Position, bytes] = field(default_factory=dict)  # acknowledged to the producer
    trimmed: dict[int, None] = field(default_factory=dict)  # ledgers that left the chain
    # by process, what it was given to go by, from its first opening on: any of them may have decided about a trim
    policies: dict[str, list[Retention]] = field(default_factory=dict)
    closed_at_ms: dict[int, int] = field(default_factory=dict)  # ledger → true time, where the record says nearly the same
    timely: dict[tuple[str, int], None] = field(default_factory=dict)  # openings by a process whose clock was right then
    keeps_on_bookies_ms: int = 0  # after a ledger was offloaded
    cursors: dict[str, CursorModel] = field(default_factory=dict)
    # (number of the append, its last position) that was answered last, by opening: only within one opening is the order of
    # answers that of entries. A process that slept tells late what was stored before its successor began.
    answered: dict[tuple[str, int], tuple[int, Position]] = field(default_factory=dict)
    # Of appends that were refused, by opening: its number, and the last one's that was called before its caller heard of it.
    refused: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)

    def note_policy(self, process: str, retention: Retention) -> None:
        """It may trim by this one from now on."""
        self.policies.setdefault(process, []).append(retention)

    def note_refusal(self, opening: tuple[str, int], number: int, last_called: int) -> None:
        self.refused.setdefault(opening, []).append((number, last_called))

    def behind_refused(self, opening: tuple[str, int], number: int) -> bool:
        """It was appended behind one that was refused, by a producer that did not know yet: it would change the order."""
        return any(refused < number <= last_called for refused, last_called in self.refused.get(opening, ()))

    def may_be_gone(self, position: Position) -> bool:
        return position.ledger_id in self.trimmed

    def is_consumed(self, position: Position) -> bool:
        """Every cursor that surely exists may have acknowledged it: retention may take it."""
        return all(cursor.allowed_messages_of(position) == WHOLE for cursor in self.cursors.values() if cursor.certain)
