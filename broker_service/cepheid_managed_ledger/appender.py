"""Sends appends to the open ledger, to two ledgers during a rollover, and after a failure to the next ledger.

    append ──► writer of ledger 7 ──confirmed──► answered                        one queue, answered in its order
           switch_to(9)
    append ──► writer of ledger 9 ──confirmed──► held ──link()──► answered       9 is not in the chain yet
                    7: drained, closed, 7's end and 9 recorded in one write ─┘

    7 breaks ──► appends queue ──break_off()──► settle(7's end) ──► resume(11)
                                 7, 9: late     what is in 7 is     11 is in the chain: the rest is sent to it, in order
                                 answers void   answered

Rules:
1. Every append gets one answer, in the order of the calls; after `fail` every later append fails too.
2. Appends never wait for a rollover to be sent; what the next ledger confirms is answered only once the chain names it.
3. A broken ledger fails no append. Recovery alone decides what is in it; that is answered, and none of it is sent again.
4. A group that the end of a ledger cuts in two is answered once, when the rest is stored: `SplitPosition`. The part in the closed
   ledger is counted at once, because it is in the chain, and becomes visible (`on_confirmed`) together with the rest.
5. Memory: an append keeps the frozen group that its ledger's writer sends anyway; while there is no ledger, the caller's buffers.
   All of it is bounded by `window_bytes`; beyond that appends are refused.
6. A failed append says nothing about its entries: they may be stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cepheid_ledger import LedgerError, LedgerWriter
from cepheid_managed_ledger.errors import ManagedLedgerError, TooManyAppendsError
from cepheid_managed_ledger.settings import MIB
from cepheid_metadata import Position
from cepheid_rpc import Buffer, EntryGroup

log = logging.getLogger(__name__)

AppendDone = Callable[[Position | ManagedLedgerError, int], None]
"""Called with the position of the first entry, or the error after which it may not be stored, and the number of entries; must not
raise."""

RESEND_BYTES = 8 * MIB
"""Bytes of one topic resent to its next ledger at once: more would fill the bookies' windows if many topics lose a ledger."""


class SplitPosition(Position):
    """The position of a group that lies in more than one ledger: its first entry, and `runs` for all of it."""

    runs: tuple[tuple[Position, int], ...]
    """(first entry, number of entries), in order."""

    def __new__(cls, runs: Sequence[tuple[Position, int]]) -> SplitPosition:
        made = super().__new__(cls, *runs[0][0])
        made.runs = tuple(runs)
        return made


@dataclass(frozen=True, slots=True)
class AppendHooks:
    """Callbacks about the outcome of appends; the first three are called in this order for each group."""

    on_stored: Callable[[EntryGroup, Sequence[int] | None], None]
    """The group is in the ledger for certain and is counted."""
    on_confirmed: Callable[[EntryGroup], None]
    """The group is the end of the topic from now on."""
    on_answered: Callable[[], None]
    """The caller has been answered."""
    on_broken: Callable[[], None]
    """A ledger accepts nothing more, and its end is undecided: `break_off` or `fail` follows. May be called twice."""
    on_failed: Callable[[ManagedLedgerError], None]
    """Everything was answered with this error."""


class BrokenOff(NamedTuple):
    """Result of `break_off`: a ledger of the chain whose end is undecided, and perhaps one that the chain does not name."""

    linked: LedgerWriter
    unlinked: LedgerWriter | None


class Appender:
    def __init__(self, topic: str, writer: LedgerWriter, window_bytes: int, hooks: AppendHooks) -> None:
        self._topic = topic
        self._window_bytes = window_bytes
        self._hooks = hooks
        self._pending: deque[_Append] = deque()  # all appends without an answer
        self._unsent: deque[_Append] = deque()  # the last of these, which no writer has; while not empty, new appends queue as well
        self._current = _Segment(self, writer, linked=True)
        self._draining: _Segment | None = None
        self._queueing = False  # `_current` accepts nothing, or earlier appends wait to be sent
        self._changed: asyncio.Future[None] | None = None
        self.failure: ManagedLedgerError | None = None
        self.waiting_bytes = 0
        self._untold_refusals = 0

    def __repr__(self) -> str:
        waiting = f"{len(self._pending)} groups ({len(self._unsent)} unsent), {self.waiting_bytes} B waiting"
        return f"<Appender {self._topic} to {self._current.writer!r}, {waiting}{', broken' if self.is_broken else ''}>"

    @property
    def writer(self) -> LedgerWriter:
        """The writer of the ledger that appends are sent to now."""
        return self._current.writer

    @property
    def started_at(self) -> float:
        """Loop time of the ledger's first append, or earlier."""
        return self._current.started_at

    @property
    def is_waited_for(self) -> bool:
        """Whether an append has no answer yet."""
        return bool(self._pending)

    @property
    def is_switching(self) -> bool:
        return self._draining is not None

    @property
    def is_broken(self) -> bool:
        """Whether `break_off` is due, or `settle` and `resume` after it."""
        return self.broken_by is not None and self.failure is None

    @property
    def broken_by(self) -> LedgerError | None:
        return self._current.broken or (None if self._draining is None else self._draining.broken)

    def append(self, payloads: Sequence[Buffer], on_done: AppendDone, messages: Sequence[int] | None = None) -> None:
        """Send a group. `messages`: messages in each payload; None: one. The payloads must not change until `on_done`."""
        size_bytes = sum(map(len, payloads))
        too_many = self._pending and self.waiting_bytes + size_bytes > self._window_bytes
        # Until a refusal is delivered no append is accepted: a later, smaller one would be stored before the producer's retry (M5).
        if self.failure is not None or too_many or self._untold_refusals:
            self._untold_refusals += 1
            error = self.failure or self._too_many()
            asyncio.get_running_loop().call_soon(self._tell_refusal, on_done, error, len(payloads))
            return
        item = _Append(payloads, on_done, messages, size_bytes)
        self._pending.append(item)
        self.waiting_bytes += size_bytes
        if self._queueing:
            self._unsent.append(item)
        else:
            self._send(item)

    def _send(self, item: _Append) -> None:
        current = self._current
        current.unconfirmed += 1
        item.group = current.writer.append(item.payloads, current.on_done)
        if item.group is not None:
            item.payloads = ()

    # Rollover

    def switch_to(self, writer: LedgerWriter) -> LedgerWriter:
        """Send later appends to `writer`, unanswered until `link`. Return the previous writer."""
        assert self._draining is None, f"{self!r} is switching already"
        assert not self._queueing, f"{self!r} has something to send first"
        self._draining, self._current = self._current, _Segment(self, writer, linked=False)
        return self._draining.writer

    @property
    def may_switch(self) -> bool:
        return not self._queueing and self.failure is None

    async def wait_drained(self) -> None:
        """Wait until everything appended before `switch_to` is answered. Raises the error that failed or broke it."""
        draining = self._draining
        assert draining is not None
        while draining.unconfirmed and draining.broken is None and self.failure is None:
            await self._change()
        if self.failure is not None:
            raise self.failure
        if draining.broken is not None:
            raise draining.broken

    async def wait_answered(self) -> None:
        """Wait until every append is answered. Raises the error that failed them."""
        while self._pending and self.failure is None:
            await self._change()
        if self.failure is not None:
            raise self.failure

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _tell_changed(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    def link(self) -> None:
        """Answer what the current ledger has confirmed: the chain names it now."""
        assert self._draining is not None
        assert self._draining.unconfirmed == 0, "the ledger before is not drained"
        self._draining = None
        current = self._current
        current.linked = True
        while current.held and self.failure is None:
            self._answer(current.held.popleft())
        self._tell_changed()

    # Failover

    def break_off(self) -> BrokenOff:
        """Ignore all later reports of the present ledgers (a late callback would complete another attempt)."""
        linked = self._draining or self._current
        unlinked = None if self._draining is None else self._current.writer
        for segment in (linked, self._current):
            segment.is_over = True
            segment.held.clear()
        linked.broken = linked.broken or self._current.broken
        self._draining, self._current, self._queueing = None, linked, True
        return BrokenOff(linked.writer, unlinked)

    def settle(self, confirmed: int, last: int) -> None:
        """Answer what the recovery of the broken ledger found, and queue the rest to be sent again.

        `last` is the ledger's last entry, `confirmed` the last one that was answered.
        """
        assert self._current.is_over
        ledger_id = self._current.writer.ledger_id
        while self._pending and self.failure is None and confirmed < last:
            item = self._pending[0]
            group = item.group
            assert group is not None, f"ledger {ledger_id} ends at {last}, nothing was sent behind {confirmed}"
            assert (group.ledger_id, group.first_entry_id) == (ledger_id, confirmed + 1), f"{group!r} behind {confirmed}"
            confirmed = min(last, group.last_entry_id)
            if group.last_entry_id <= last:
                self._answer(group)
            else:
                self._hooks.on_stored(item.split(last), item.messages_of_last_part)
        assert confirmed == last or self.failure is not None, f"ledger {ledger_id} ends at {last}, sent was only {confirmed}"
        for item in self._pending:
            item.take_back()
        self._unsent = deque(self._pending)
        self._tell_changed()

    def resume(self, writer: LedgerWriter) -> None:
        """Send what is queued to `writer`, whose ledger follows the settled one in the chain."""
        assert self._current.is_over
        self._current = _Segment(self, writer, linked=True)
        self._pump()

    def _pump(self) -> None:
        current = self._current
        while self._unsent and current.writer.in_flight_bytes < RESEND_BYTES and current.broken is None:
            self._send(self._unsent.popleft())
        self._queueing = bool(self._unsent) or current.broken is not None

    # The end

    def fail(self, error: ManagedLedgerError) -> None:
        """Answer everything that waits with the error, in order, and all later appends too."""
        if self.failure is not None:
            return
        self.failure = error
        self._current.held.clear()
        self._unsent.clear()
        self._tell_changed()
        while self._pending:
            item = self._pending.popleft()
            self._call(item.on_done, error, item.entries)
        self.waiting_bytes = 0
        self._untold_refusals = 0
        self._hooks.on_failed(error)

    def on_outcome(self, segment: _Segment, outcome: EntryGroup | LedgerError) -> None:
        """Take the report of a segment: a group was confirmed, or its ledger broke."""
        if self.failure is not None or segment.is_over:
            return
        if isinstance(outcome, LedgerError):
            self._break(segment, outcome)
            return
        segment.unconfirmed -= 1
        if not segment.linked:
            segment.held.append(outcome)
            return
        self._answer(outcome)
        if segment.unconfirmed == 0:
            self._tell_changed()
        if self._unsent and segment is self._current:
            self._pump()

    def _break(self, segment: _Segment, error: LedgerError) -> None:
        if segment.broken is None:
            segment.broken = error
            self._queueing = True
            fields = {"topic": self._topic, "ledger_id": segment.writer.ledger_id, "error": str(error)}
            log.warning("append.ledger_broken", extra=fields)
            self._tell_changed()
            self._hooks.on_broken()

    def _answer(self, group: EntryGroup) -> None:
        item = self._pending.popleft()
        self.waiting_bytes -= item.size_bytes
        first: Position = Position(group.ledger_id, group.first_entry_id)
        hooks = self._hooks
        hooks.on_stored(group, item.messages)
        if item.parts:
            first = item.split_position(first, len(group.ends))
            for part in item.parts:
                hooks.on_confirmed(part)
        else:
            assert item.entries == len(group.ends), f"{group!r} answers an append of {item.entries} entries"
        hooks.on_confirmed(group)
        self._call(item.on_done, first, item.entries)
        hooks.on_answered()

    def _call(self, on_done: AppendDone, outcome: Position | ManagedLedgerError, entries: int) -> None:
        try:
            on_done(outcome, entries)
        except Exception as error:  # a defect in one caller must not leave the others without answers
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


class _Append:
    """One append: unsent entries in `payloads`, then in `group`; entries already stored in closed ledgers are in `parts`."""

    __slots__ = ("entries", "group", "messages", "messages_of_last_part", "on_done", "parts", "payloads", "size_bytes")

    def __init__(self, payloads: Sequence[Buffer], on_done: AppendDone, messages: Sequence[int] | None, size_bytes: int) -> None:
        self.payloads = payloads
        self.entries = len(payloads)
        self.on_done = on_done
        self.messages = messages  # of the entries that are not in a part
        self.size_bytes = size_bytes
        self.group: EntryGroup | None = None
        self.parts: tuple[EntryGroup, ...] = ()

    def split(self, last: int) -> EntryGroup:
        """Split off everything up to `last`, which is stored in a ledger that ends there (rule 4)."""
        group = self.group
        assert group is not None
        part = group.slice(group.first_entry_id, last)
        self.group = group.slice(last + 1, group.last_entry_id)
        self.parts += (part,)
        self.messages_of_last_part: Sequence[int] | None = None
        if self.messages is not None:
            self.messages_of_last_part, self.messages = self.messages[: len(part)], self.messages[len(part) :]
        return part

    def take_back(self) -> None:
        """Make what was sent ready to be sent again."""
        if self.group is not None:
            self.payloads, self.group = list(self.group.payloads()), None

    def split_position(self, rest: Position, entries: int) -> SplitPosition:
        runs = [(Position(part.ledger_id, part.first_entry_id), len(part)) for part in self.parts]
        assert sum(count for _, count in runs) + entries == self.entries, f"{runs} and {entries} are not {self.entries} entries"
        return SplitPosition([*runs, (rest, entries)])


class _Segment:
    """One ledger that appends are sent to."""

    __slots__ = ("_appender", "broken", "held", "is_over", "linked", "started_at", "unconfirmed", "writer")

    def __init__(self, appender: Appender, writer: LedgerWriter, *, linked: bool) -> None:
        self._appender = appender
        self.writer = writer
        self.linked = linked
        self.started_at = asyncio.get_running_loop().time()
        self.unconfirmed = 0
        self.held: deque[EntryGroup] = deque()
        self.broken: LedgerError | None = None
        self.is_over = False  # broken off

    def on_done(self, outcome: EntryGroup | LedgerError) -> None:
        self._appender.on_outcome(self, outcome)
