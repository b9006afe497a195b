"""The appender against a model: whatever breaks when, every append is answered once, in order, and stored once, in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cepheid_ledger import LedgerError, LedgerWriteError
from cepheid_managed_ledger import ManagedLedgerError, ManagedLedgerFailedError, SplitPosition
from cepheid_managed_ledger import appender as appender_module
from cepheid_managed_ledger.appender import Appender, AppendHooks
from cepheid_metadata import Position
from cepheid_rpc import Buffer, EntryGroup, encode_group


class FakeWriter:
    """A ledger in memory. Everything sent is `pushed`; what of it is `confirmed`, and when it breaks, others say."""

    def __init__(self, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self.pushed: list[bytes] = []
        self.unconfirmed: list[tuple[EntryGroup, Callable[[EntryGroup | LedgerError], None]]] = []
        self.confirmed = -1
        self.broken = False
        self.untold: list[Callable[[], None]] = []
        self.failed: list[tuple[EntryGroup, Callable[[EntryGroup | LedgerError], None]]] = []

    def append(self, payloads: Sequence[Buffer], on_done: Any) -> EntryGroup | None:
        if self.broken:
            self.untold.append(lambda: on_done(LedgerWriteError("it broke")))
            return None
        group = encode_group(self.ledger_id, len(self.pushed), self.confirmed, 0, payloads)
        self.pushed += [bytes(payload) for payload in payloads]
        self.unconfirmed.append((group, on_done))
        return group

    @property
    def in_flight_bytes(self) -> int:
        return sum(len(group.data) for group, _ in self.unconfirmed)

    def confirm_one(self) -> None:
        group, on_done = self.unconfirmed.pop(0)
        self.confirmed = group.last_entry_id
        on_done(group)

    def break_down(self) -> None:
        self.broken = True
        unconfirmed, self.unconfirmed = self.unconfirmed, []
        self.failed += unconfirmed
        self.untold += [lambda done=done: done(LedgerWriteError("it broke")) for _, done in unconfirmed]  # type: ignore[misc]

    def tell(self) -> None:
        untold, self.untold = self.untold, []
        for tell in untold:
            tell()


class Topic:
    """An appender, what its listener would know, and what storage would have."""

    def __init__(self) -> None:
        self.writers = [FakeWriter(0)]
        self.chain: dict[int, int | None] = {0: None}  # recorded ends, None: open
        self.stored: list[Position] = []
        self.end: list[Position] = []
        self.sent: list[tuple[int, list[bytes]]] = []
        self.answers: list[tuple[int, Position | ManagedLedgerError]] = []
        self.broken = 0
        hooks = AppendHooks(self.on_stored, self.on_confirmed, lambda: None, self.on_broken, lambda _: None)
        self.appender = Appender("t", self.writers[0], 1 << 20, hooks)  # type: ignore[arg-type]

    def on_stored(self, group: EntryGroup, messages: Sequence[int] | None) -> None:
        assert messages is not None
        assert list(messages) == [int(bytes(payload).split(b".")[1]) for payload in group.payloads()]
        self.stored += positions_of(group)

    def on_confirmed(self, group: EntryGroup) -> None:
        self.end += positions_of(group)
        assert set(self.end) <= set(self.stored)

    def on_broken(self) -> None:
        self.broken += 1

    def new_writer(self) -> FakeWriter:
        self.writers.append(FakeWriter(len(self.writers)))
        return self.writers[-1]

    def append(self, entries: int) -> None:
        number = len(self.sent)
        payloads = [b"%d.%d" % (number, entry + 1) for entry in range(entries)]
        self.sent.append((number, payloads))
        messages = [entry + 1 for entry in range(entries)]
        self.appender.append(payloads, lambda outcome, _: self.answers.append((number, outcome)), messages)

    def content(self) -> list[tuple[Position, bytes]]:
        """What a reader of the chain would see."""
        return [
            (Position(ledger_id, entry), payload)
            for ledger_id, end in self.chain.items()
            for entry, payload in enumerate(self.writers[ledger_id].pushed[: None if end is None else end + 1])
        ]


def positions_of(group: EntryGroup) -> list[Position]:
    return [Position(group.ledger_id, entry) for entry in range(group.first_entry_id, group.last_entry_id + 1)]


def places_of(outcome: Position, count: int) -> list[Position]:
    runs = outcome.runs if isinstance(outcome, SplitPosition) else ((outcome, count),)
    return [Position(first.ledger_id, first.entry_id + n) for first, size in runs for n in range(size)]


class AppenderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        asyncio._set_running_loop(self.loop)  # it asks for the time
        self.topic = Topic()
        self.draining: FakeWriter | None = None
        self.current = self.topic.writers[0]
        self.late: list[FakeWriter] = []

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            asyncio._set_running_loop(None)
            self.loop.close()

    @property
    def linked(self) -> FakeWriter:
        return self.draining or self.current

    @rule(entries=st.integers(1, 4))
    def append(self, entries: int) -> None:
        self.topic.append(entries)

    @rule(count=st.integers(1, 5))
    def confirm(self, count: int) -> None:
        for writer in [writer for writer in (self.draining, self.current) if writer is not None]:
            for _ in range(min(count, len(writer.unconfirmed))):
                writer.confirm_one()

    @rule(count=st.integers(1, 5))
    def confirm_the_next_ledger_first(self, count: int) -> None:
        for _ in range(min(count, len(self.current.unconfirmed))):
            self.current.confirm_one()

    @precondition(lambda self: self.draining is None and self.topic.appender.may_switch)
    @rule()
    def switch(self) -> None:
        self.draining, self.current = self.current, self.topic.new_writer()
        assert self.topic.appender.switch_to(self.current) is self.draining  # type: ignore[arg-type]

    @precondition(lambda self: self.draining is not None and not self.draining.broken and not self.draining.unconfirmed)
    @rule()
    def link(self) -> None:
        assert self.draining is not None
        self.topic.chain[self.draining.ledger_id] = self.draining.confirmed
        self.topic.chain[self.current.ledger_id] = None
        self.draining = None
        self.topic.appender.link()

    @rule(whose=st.booleans(), told=st.booleans())
    def break_down(self, whose: bool, told: bool) -> None:
        writer = self.linked if whose else self.current
        writer.break_down()
        if told:
            writer.tell()

    @precondition(lambda self: self.linked.broken or self.draining is None)
    @precondition(lambda self: self.topic.appender.is_broken)
    @rule(found=st.floats(0, 1), late=st.booleans(), appended=st.booleans())
    def fail_over(self, found: float, late: bool, appended: bool) -> None:
        topic, linked = self.topic, self.linked
        topic.appender.break_off()
        if late:
            self.tell_late_news(linked)
        last = linked.confirmed + round(found * (len(linked.pushed) - 1 - linked.confirmed))
        topic.appender.settle(linked.confirmed, last)
        if appended:
            topic.append(2)
        self.draining, self.current = None, topic.new_writer()
        topic.chain[linked.ledger_id] = last
        topic.chain[self.current.ledger_id] = None
        self.late += topic.writers[:-1]
        topic.appender.resume(self.current)  # type: ignore[arg-type]

    @precondition(lambda self: self.late)
    @rule()
    def hear_late_news(self) -> None:
        for writer in self.late:
            self.tell_late_news(writer)

    def tell_late_news(self, writer: FakeWriter) -> None:
        writer.tell()
        if writer is not self.current:
            for group, on_done in writer.unconfirmed + writer.failed:
                on_done(group)
            writer.unconfirmed.clear()
            writer.failed.clear()

    @invariant()
    def answers_come_once_and_in_order(self) -> None:
        numbers = [number for number, _ in self.topic.answers]
        assert numbers == list(range(len(numbers)))

    @invariant()
    def answered_is_where_it_was_said_to_be(self) -> None:
        content = dict(self.topic.content())
        for number, outcome in self.topic.answers:
            assert isinstance(outcome, Position)
            payloads = self.topic.sent[number][1]
            assert [content[place] for place in places_of(outcome, len(payloads))] == payloads

    @invariant()
    def what_is_the_end_was_stored_in_order_and_once(self) -> None:
        assert self.topic.end == sorted(set(self.topic.end))
        assert self.topic.stored == sorted(set(self.topic.stored))
        assert self.topic.stored[: len(self.topic.end)] == self.topic.end

    def finish(self) -> None:
        """Once nothing breaks any more, everything is answered, and storage has it all once, in order."""
        topic = self.topic
        for writer in topic.writers:
            writer.tell()
        for _ in range(1000):
            if topic.appender.is_broken and (self.draining is None or self.draining.broken):
                self.fail_over(0.5, late=True, appended=False)
            elif self.draining is not None and not self.draining.unconfirmed:
                self.link()
            elif self.linked.unconfirmed:
                self.linked.confirm_one()
            elif self.current.unconfirmed and self.draining is None:
                self.current.confirm_one()
            else:
                break
        assert [number for number, _ in topic.answers] == list(range(len(topic.sent)))
        assert [payload for _, payload in topic.content()] == [payload for _, sent in topic.sent for payload in sent]
        assert topic.stored == topic.end == [position for position, _ in topic.content()]
        assert topic.appender.waiting_bytes == 0
        self.answered_is_where_it_was_said_to_be()


def run_machine(examples: int, *, for_mutant: bool = False) -> None:
    phases = [Phase.generate] if for_mutant else [Phase.generate, Phase.shrink]
    options = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        derandomize=for_mutant,  # it is found always, or never
    )
    run_state_machine_as_test(AppenderMachine, settings=options)  # type: ignore[no-untyped-call]


@pytest.mark.slow
def test_whatever_breaks_when_every_append_is_stored_and_answered_once_and_in_order() -> None:
    with mock.patch.object(appender_module, "RESEND_BYTES", 200):
        run_machine(200)


# Mutants: what a plausible mistake would do


@contextlib.contextmanager
def hear_late_news_of_ledgers_that_are_over() -> Iterator[None]:
    """apache/pulsar#5588"""
    on_outcome = Appender.on_outcome

    def hear(self: Appender, segment: Any, outcome: Any) -> None:
        over, segment.is_over = segment.is_over, False
        on_outcome(self, segment, outcome)
        segment.is_over = over

    with mock.patch.object(Appender, "on_outcome", hear):
        yield


@contextlib.contextmanager
def send_again_what_was_found() -> Iterator[None]:
    """apache/pulsar#7490"""
    settle = Appender.settle
    with mock.patch.object(Appender, "settle", lambda self, confirmed, last: settle(self, confirmed, confirmed)):
        yield


@contextlib.contextmanager
def let_new_appends_pass_those_to_be_sent_again() -> Iterator[None]:
    pump = Appender._pump

    def eager(self: Appender) -> None:
        pump(self)
        self._queueing = self._current.broken is not None

    with mock.patch.object(Appender, "_pump", eager):
        yield


@contextlib.contextmanager
def forget_what_the_next_ledger_held() -> Iterator[None]:
    settle = Appender.settle

    def partial(self: Appender, confirmed: int, last: int) -> None:
        settle(self, confirmed, last)
        self._unsent = type(self._unsent)(item for item in self._unsent if item.messages is None or len(item.messages) != 3)

    with mock.patch.object(Appender, "settle", partial):
        yield


@contextlib.contextmanager
def answer_before_the_chain_names_the_ledger() -> Iterator[None]:
    on_outcome = Appender.on_outcome

    def hasty(self: Appender, segment: Any, outcome: Any) -> None:
        segment.linked = True
        on_outcome(self, segment, outcome)

    with mock.patch.object(Appender, "on_outcome", hasty):
        yield


@pytest.mark.parametrize(
    "mutant",
    [
        hear_late_news_of_ledgers_that_are_over,
        send_again_what_was_found,
        let_new_appends_pass_those_to_be_sent_again,
        forget_what_the_next_ledger_held,
        answer_before_the_chain_names_the_ledger,
    ],
    ids=lambda mutant: mutant.__name__.replace("_", " "),
)
def test_the_model_notices_a_mistake(mutant: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    with mutant(), mock.patch.object(appender_module, "RESEND_BYTES", 60), pytest.raises(BaseException):  # noqa: B017
        run_machine(5000, for_mutant=True)


async def test_a_failure_answers_everything_in_order_and_what_comes_later() -> None:
    topic = Topic()
    topic.append(2)
    topic.writers[0].break_down()
    topic.writers[0].tell()
    topic.append(1)
    assert topic.broken == 1
    assert topic.answers == []
    topic.appender.fail(ManagedLedgerFailedError("over"))
    topic.append(1)
    await asyncio.sleep(0)
    assert [number for number, _ in topic.answers] == [0, 1, 2]
    assert all(isinstance(outcome, ManagedLedgerFailedError) for _, outcome in topic.answers)
    assert topic.appender.waiting_bytes == 0
