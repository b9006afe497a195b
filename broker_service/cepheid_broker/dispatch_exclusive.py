"""What an Exclusive subscription sends, without I/O: one consumer, strictly in order.

    first unacknowledged ──reads──► pending groups ──permits──► Send        a rewind starts again at the first unacknowledged entry

Rules
1. Entries go out in position order and once, until a rewind (redelivery, a new consumer, seek) starts over.
2. What is acknowledged when its turn comes is not sent.
3. An entry costs as many permits as it has messages; it is sent whole as soon as one permit is there.
"""

from __future__ import annotations

from cepheid_broker.counted_group import CountedGroup
from cepheid_broker.dispatch import AckView, DispatchLimits, Effect, ForwardReader, Idle, Read, Send
from cepheid_broker.position import Position

_NO_LIMIT = 1 << 62


class ExclusiveDispatch:
    def __init__(self, acks: AckView, limits: DispatchLimits) -> None:
        self._acks = acks
        self._forward = ForwardReader(limits.read_ahead_bytes, acks.first_unacknowledged())
        self._consumer: int | None = None
        self._permits = 0
        self._writable = True

    def __repr__(self) -> str:
        return f"<ExclusiveDispatch at {self._forward.position}, {self._permits} permits, idle: {self.why_idle()}>"

    # Events

    def on_consumer_joined(self, consumer: int, *, priority: int = 0) -> None:
        assert self._consumer is None, "rule: one consumer; the subscription refuses a second"
        self._consumer, self._permits, self._writable = consumer, 0, True
        self.on_rewind()

    def on_consumer_left(self, consumer: int) -> None:
        if consumer == self._consumer:
            self._consumer, self._permits = None, 0
            self.on_rewind()

    def on_permits(self, consumer: int, messages: int) -> None:
        if consumer == self._consumer:
            self._permits += messages

    def on_writable(self, consumer: int, writable: bool) -> None:
        if consumer == self._consumer:
            self._writable = writable

    def on_appended(self) -> None:
        self._forward.on_appended()

    def on_read(self, read: Read, groups: list[CountedGroup]) -> None:
        self._forward.on_read(read, groups)

    def on_read_failed(self, ticket: int) -> bool:
        return self._forward.on_read_failed(ticket)

    def on_retry(self) -> None:
        self._forward.on_retry()

    def on_acked(self, consumer: int | None, positions: list[Position]) -> None:
        """Nothing to free: rule 2 is applied when an entry's turn comes."""

    def on_redeliver(self, consumer: int, positions: list[Position] | None) -> None:
        """Whatever was named: everything unacknowledged is sent again (protocol.md §16)."""
        if consumer == self._consumer:
            self.on_rewind()

    def on_rewind(self) -> None:
        self._forward.rewind(self._acks.first_unacknowledged())

    # Decisions

    def next_effect(self) -> Effect | None:
        if self._consumer is None or self._permits <= 0 or not self._writable:
            return None
        if (read := self._forward.plan_read()) is not None:
            return read
        while (head := self._forward.head()) is not None:
            counted = head.counted
            runs = list(self._acks.unacknowledged_runs(counted.ledger_id, head.next_entry_id, counted.last))
            taken, messages = counted.take(runs, self._permits, _NO_LIMIT)
            self._forward.advance(counted.last + 1 if taken == runs else taken[-1][1] + 1)
            if taken:
                self._permits -= messages
                return Send(self._consumer, counted, taken, messages)
            if (read := self._forward.plan_read()) is not None:
                return read
        return None

    def why_idle(self) -> Idle | None:
        """None: there is something to do."""
        if self._consumer is None:
            return Idle.NO_CONSUMER
        if self._permits <= 0:
            return Idle.NO_PERMITS
        if not self._writable:
            return Idle.SOCKET_FULL
        forward = self._forward
        if forward.head() is not None:
            return None
        if forward.reading:
            return Idle.READING
        if forward.failed:
            return Idle.READ_FAILED
        return Idle.AT_END if forward.at_end else None

    # Figures

    def permits(self, consumer: int) -> int:
        return self._permits if consumer == self._consumer else 0

    def unacked_messages(self, consumer: int) -> int | None:
        """None: not counted per consumer here; the backlog in front of the read position says it."""
        return None

    def is_blocked(self, consumer: int) -> bool:
        return False

    @property
    def read_position(self) -> Position:
        """The next entry to be sent."""
        head = self._forward.head()
        return Position(head.counted.ledger_id, head.next_entry_id) if head is not None else self._forward.position

    @property
    def pending_bytes(self) -> int:
        return self._forward.pending_bytes
