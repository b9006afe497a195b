"""Reads entries again that a core has to send again or passed over: one span at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cepheid_broker.dispatch.counted_group import CountedGroup
from cepheid_broker.dispatch.effects import ReadBack
from cepheid_broker.dispatch.forward_reader import Pending


class BackReader:
    def __init__(self) -> None:
        self.pending: deque[Pending] = deque()  # in order
        self.reading = False
        self.failed = False
        self._ticket = 0

    @property
    def is_free(self) -> bool:
        """Whether another span may be requested."""
        return not (self.reading or self.failed or self.pending)

    @property
    def pending_bytes(self) -> int:
        return sum(pending.counted.size_bytes for pending in self.pending)

    def rewind(self) -> None:
        """Forget what was read and the answer of a pending read."""
        self.pending.clear()
        self.reading = self.failed = False
        self._ticket += 1

    def plan(self, ledger_id: int, first: int, last: int) -> ReadBack:
        assert self.is_free
        self.reading = True
        self._ticket += 1
        return ReadBack(ledger_id, first, last, self._ticket)

    def on_read(self, read: ReadBack, groups: Iterable[CountedGroup]) -> list[tuple[int, int]]:
        """Take the answer; `groups` may start later than requested and end earlier. Return the parts of the span that were
        trimmed."""
        if read.ticket != self._ticket:
            return []
        self.reading = False
        missing: list[tuple[int, int]] = []
        expected = read.first
        for counted in groups:
            if counted.ledger_id != read.ledger_id or counted.first > read.last:
                break
            if counted.first > expected:
                missing.append((expected, counted.first - 1))
            self.pending.append(Pending(counted, max(read.first, counted.first)))
            expected = counted.last + 1
        if expected == read.first:  # nothing of the span is left
            missing.append((read.first, read.last))
        return missing

    def on_read_failed(self, read: ReadBack) -> bool:
        if read.ticket != self._ticket:
            return False
        self.reading, self.failed = False, True
        return True
