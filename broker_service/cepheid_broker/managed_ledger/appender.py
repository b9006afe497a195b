"""Where appends go: the open ledger, and during a rollover two of them.

    append ──► writer of ledger 7 ──confirmed──► answered                        one queue, answered in its order
           switch_to(9)
    append ──► writer of ledger 9 ──confirmed──► held ──link()──► answered       9 is not in the chain yet
                    7: drained, closed, 7's end and 9 recorded in one write ─┘

Rules:
1. One answer for every append, in the order of the calls; after a failure every later one fails too.
2. Appends never wait for a rollover to be sent; what the next ledger confirms is answered only once the chain names it.
3. A failed append says nothing of its entries: they may be stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from cepheid_broker.managed_ledger.errors import ManagedLedgerError, ManagedLedgerFailedError, TooManyAppendsError
from cepheid_ledger import LedgerError, LedgerWriter
from cepheid_metadata import Position
from cepheid_rpc import Buffer, EntryGroup

log = logging.getLogger(__name__)

AppendDone = Callable[[Position | ManagedLedgerError, int], None]
"""(position of the first entry, or why it is not stored for certain; number of entries). Must not raise."""

_Append = tuple[AppendDone, int, int, Sequence[int] | None]
"""(on_done, entries, bytes, messages in each)"""


class Appender:
    def __init__(
        self,
        topic: str,
        writer: LedgerWriter,
        window_bytes: int,
        on_confirmed: Callable[[EntryGroup, Sequence[int] | None], None],
        on_answered: Callable[[], None],
        on_failed: Callable[[ManagedLedgerError], None],
    ) -> None:
        self._topic = topic
        self._window_bytes = window_bytes
        self._on_confirmed = on_confirmed
        self._on_answered = on_answered
        self._on_failed = on_failed
        self._pending: deque[_Append] = deque()  # of both ledgers
        self._current = _Segment(self, writer, linked=True)
        self._draining: _Segment | None = None
        self._drained: asyncio.Future[None] | None = None
        self.failure: ManagedLedgerError | None = None
        self.waiting_bytes = 0
        self._untold_refusals = 0

    def __repr__(self) -> str:
        return f"<Appender {self._topic} to {self._current.writer!r}, {len(self._pending)} groups, {self.waiting_bytes} B waiting>"

    @property
    def writer(self) -> LedgerWriter:
        """Of the ledger that appends are sent to now."""
        return self._current.writer

    @property
    def is_switching(self) -> bool:
        return self._draining is not None

    def append(self, payloads: Sequence[Buffer], on_done: AppendDone, messages: Sequence[int] | None = None) -> None:
        """`messages` in each payload; None: one."""
        size_bytes = sum(map(len, payloads))
        too_many = self._pending and self.waiting_bytes + size_bytes > self._window_bytes
        # Until a refusal is heard nothing is taken: a smaller append of the same producer would be stored before its retry (M5).
        if self.failure is not None or too_many or self._untold_refusals:
            self._untold_refusals += 1
            error = self.failure or self._too_many()
            asyncio.get_running_loop().call_soon(self._tell_refusal, on_done, error, len(payloads))
            return
        current = self._current
        self._pending.append((on_done, len(payloads), size_bytes, messages))
        self.waiting_bytes += size_bytes
        current.unconfirmed += 1
        current.writer.append(payloads, current.on_done)

    def switch_to(self, writer: LedgerWriter) -> LedgerWriter:
        """Later appends go to `writer`, unanswered until `link`. Returns the writer before."""
        assert self._draining is None, f"{self!r} is switching already"
        self._draining, self._current = self._current, _Segment(self, writer, linked=False)
        return self._draining.writer

    async def wait_drained(self) -> None:
        """Until everything appended before `switch_to` is answered (or before this call, without a switch).

        Raises what failed it."""
        segment = self._draining or self._current
        if segment.unconfirmed and self.failure is None:
            if self._drained is None:
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)
        if self.failure is not None:
            raise self.failure

    def _tell_drained(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    def link(self) -> None:
        """The chain names the ledger now: what it has confirmed is answered."""
        assert self._draining is not None
        assert self._draining.unconfirmed == 0, "the ledger before is not drained"
        self._draining = None
        current = self._current
        current.linked = True
        while current.held and self.failure is None:
            self._answer(current.held.popleft())

    def fail(self, error: ManagedLedgerError) -> None:
        """Everything waiting gets the error, in order; so does whatever is appended later."""
        if self.failure is not None:
            return
        self.failure = error
        self._current.held.clear()
        self._tell_drained()
        while self._pending:
            on_done, entries, _, _ = self._pending.popleft()
            self._call(on_done, error, entries)
        self.waiting_bytes = 0
        self._untold_refusals = 0
        self._on_failed(error)

    def on_outcome(self, segment: _Segment, outcome: EntryGroup | LedgerError) -> None:
        """For segments: a group was confirmed, or failed."""
        if self.failure is not None:
            return  # answered already
        segment.unconfirmed -= 1
        if isinstance(outcome, LedgerError):
            error = ManagedLedgerFailedError(f"{self._topic}: an append failed: {outcome}", topic=self._topic)
            error.__cause__ = outcome
            self.fail(error)
        elif segment.linked:
            self._answer(outcome)
            if segment.unconfirmed == 0:
                self._tell_drained()
        else:
            segment.held.append(outcome)

    def _answer(self, group: EntryGroup) -> None:
        on_done, entries, size_bytes, messages = self._pending.popleft()
        assert entries == len(group.ends), f"{group!r} answers an append of {entries} entries"
        self.waiting_bytes -= size_bytes
        self._on_confirmed(group, messages)
        self._call(on_done, Position(group.ledger_id, group.first_entry_id), entries)
        self._on_answered()

    def _call(self, on_done: AppendDone, outcome: Position | ManagedLedgerError, entries: int) -> None:
        try:
            on_done(outcome, entries)
        except Exception as error:  # a defect of one caller must not leave the others without answers
            log.exception("append.callback_failed", extra={"topic": self._topic, "error": repr(error)})

    def _tell_refusal(self, on_done: AppendDone, error: ManagedLedgerError, count: int) -> None:
        self._untold_refusals -= 1
        on_done(error, count)

    def _too_many(self) -> TooManyAppendsError:
        return TooManyAppendsError(
            f"{self._topic}: {self.waiting_bytes} bytes wait to be stored, the limit is {self._window_bytes}",
            topic=self._topic,
            waiting_bytes=self.waiting_bytes,
            window_bytes=self._window_bytes,
        )


class _Segment:
    """One of the two ledgers."""

    __slots__ = ("_appender", "held", "linked", "unconfirmed", "writer")

    def __init__(self, appender: Appender, writer: LedgerWriter, *, linked: bool) -> None:
        self._appender = appender
        self.writer = writer
        self.linked = linked
        self.unconfirmed = 0
        self.held: deque[EntryGroup] = deque()

    def on_done(self, outcome: EntryGroup | LedgerError) -> None:
        self._appender.on_outcome(self, outcome)
