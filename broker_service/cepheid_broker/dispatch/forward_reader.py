"""A dispatch core's place in the topic, and what it has read ahead: shared by all cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cepheid_broker.dispatch.counted_group import CountedGroup
from cepheid_broker.dispatch.effects import Read
from cepheid_metadata import Position


@dataclass(slots=True)
class Pending:
    """A group that was read; `next_entry_id` is the next to send."""

    counted: CountedGroup
    next_entry_id: int


class ForwardReader:
    """Reads ahead, with a limit that is soft by one read: it reads on while fewer than `read_ahead_bytes` are pending."""

    def __init__(self, read_ahead_bytes: int, position: Position) -> None:
        self.position = position  # position of the next read
        self.pending: list[Pending] = []  # in reverse order: the next one to send is last
        self.pending_bytes = 0
        self.reading = False
        self.failed = False
        self.at_end = False
        self._read_ahead_bytes = read_ahead_bytes
        self._ticket = 0
        self._appended = 0

    def rewind(self, position: Position) -> None:
        """Continue at `position`; forget what was read and the answer of a pending read."""
        self.position = position
        self.pending.clear()
        self.pending_bytes = 0
        self.reading = self.failed = self.at_end = False
        self._ticket += 1

    def skip_to(self, first: Position) -> None:
        """Skip what is before `first`, as it is acknowledged, without reading it.

        What was read after it is kept and not read twice: a core may have put some of it elsewhere already.
        """
        if self.position < first:
            self.rewind(first)
        while (head := self.head()) is not None and (head.counted.ledger_id, head.next_entry_id) < first:
            is_past = (head.counted.ledger_id, head.counted.last) < first
            self.advance(head.counted.last + 1 if is_past else first.entry_id)

    @property
    def can_read(self) -> bool:
        return not (self.reading or self.failed or self.at_end) and self.pending_bytes < self._read_ahead_bytes

    def plan_read(self) -> Read | None:
        if not self.can_read:
            return None
        self.reading = True
        self._ticket += 1
        return Read(self.position, self._ticket, self._appended)

    def awaits(self, read: Read) -> bool:
        """Return whether this read is still expected; False after a rewind."""
        return read.ticket == self._ticket

    def on_read(self, read: Read, groups: Sequence[CountedGroup], *, to_end: bool) -> None:
        """Take the answer to a read. `to_end`: nothing followed when this was read."""
        if self.awaits(read):
            position = Position(groups[-1].ledger_id, groups[-1].last + 1) if groups else self.position
            self.on_read_up_to(read, position, groups, to_end=to_end)

    def on_read_up_to(self, read: Read, position: Position, groups: Sequence[CountedGroup], *, to_end: bool) -> None:
        """Take the answer up to `position`, of which `groups`, perhaps none, are to be sent."""
        self.reading = False
        self.position = position
        self.at_end = to_end and read.appended_before == self._appended
        self.pending_bytes += sum(counted.size_bytes for counted in groups)
        self.pending[:0] = [Pending(counted, counted.first) for counted in reversed(groups)]

    def on_read_failed(self, read: Read) -> bool:
        if read.ticket != self._ticket:
            return False
        self.reading, self.failed = False, True
        return True

    def on_retry(self) -> None:
        self.failed = False

    def on_appended(self) -> None:
        self._appended += 1
        self.at_end = False

    def stands_before(self, group: CountedGroup) -> bool:
        """Return whether the group is next and nothing is pending."""
        return self.position == (group.ledger_id, group.first) and not (self.pending or self.reading or self.failed)

    def pass_over(self, group: CountedGroup) -> None:
        """Note that the group just appended is sent without having been read."""
        self._appended += 1
        self.position = group.after
        self.at_end = True

    def head(self) -> Pending | None:
        return self.pending[-1] if self.pending else None

    def advance(self, next_entry_id: int) -> None:
        """Note that the head was sent, or found acknowledged, up to `next_entry_id`."""
        head = self.pending[-1]
        if next_entry_id > head.counted.last:
            self.pending.pop()
            self.pending_bytes -= head.counted.size_bytes
        else:
            head.next_entry_id = next_entry_id

    @property
    def next_position(self) -> Position:
        """The next entry that this reader provides."""
        head = self.head()
        return Position(head.counted.ledger_id, head.next_entry_id) if head is not None else self.position
