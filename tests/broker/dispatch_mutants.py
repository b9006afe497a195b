"""Plausible mistakes in the dispatch cores, put in from outside: their random histories must notice each of them. What whole worlds
notice too is in tests/dispatch_mistakes.py.

The stuck cases of brokers of this kind are among them: a drain that nobody ends, permits that wake nobody, skipped entries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from cepheid_broker.dispatch.delayed_entries import DelayedEntries
from cepheid_broker.dispatch.dispatch_failover import FailoverDispatch
from cepheid_broker.dispatch.dispatch_key_shared import KeySharedDispatch
from cepheid_broker.dispatch.forward_reader import ForwardReader
from cepheid_broker.dispatch.holders import Holders
from cepheid_broker.dispatch.key_places import KeyPlaces
from cepheid_broker.dispatch.turns import Turns
from cepheid_metadata import Position
from tests.dispatch_mistakes import (
    forget_what_a_leaver_held,
    give_a_key_to_two_consumers,
    keep_a_key_at_who_has_acknowledged,
    let_later_messages_of_a_key_pass,
    let_later_messages_pass_what_is_sent_again,
    take_over_without_going_back,
)

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def _nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def redelivery_forgotten() -> Iterator[None]:
    with mock.patch.object(FailoverDispatch, "on_redeliver", _nothing):
        yield


@contextlib.contextmanager
def an_append_during_a_read_forgotten() -> Iterator[None]:
    """The read that was under way finds nothing, and the end is believed."""

    def on_appended(self: ForwardReader) -> None:
        self.at_end = False

    with mock.patch.object(ForwardReader, "on_appended", on_appended):
        yield


@contextlib.contextmanager
def the_last_to_come_is_active() -> Iterator[None]:
    sort = sorted

    def last_first(items: Any, key: Any = None) -> list[Any]:
        return sort(items, key=lambda candidate: (candidate.priority, -candidate.key))

    with mock.patch("cepheid_broker.dispatch.dispatch_failover.sorted", last_first, create=True):
        yield


@contextlib.contextmanager
def nobody_hears_who_is_active() -> Iterator[None]:
    original = FailoverDispatch.__init__

    def quiet(self: FailoverDispatch, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "announces": False})

    with mock.patch.object(FailoverDispatch, "__init__", quiet):
        yield


@contextlib.contextmanager
def redelivered_while_outstanding() -> Iterator[None]:
    """It is sent again, and still counted as held by who refused it."""
    settle = Holders.settle

    def settle_and_hold(self: Holders, holder: Any, ledger_id: int, entry_id: int) -> Any:
        held = holder.outstanding.get(ledger_id, {}).get(entry_id)
        result = settle(self, holder, ledger_id, entry_id)
        if held is not None:
            holder.outstanding.setdefault(ledger_id, {})[entry_id] = held
        return result

    with mock.patch.object(Holders, "settle", settle_and_hold):
        yield


@contextlib.contextmanager
def blocked_for_ever() -> Iterator[None]:
    """A consumer at its limit is let go, but nobody looks at it again."""

    def queue_only_new(self: Turns, consumer: Any) -> None:
        if consumer.can_take and not consumer.queued and consumer.unacked_messages == 0:
            consumer.queued = True
            self._queues[consumer.priority].append(consumer)

    with mock.patch.object(Turns, "queue", queue_only_new):
        yield


@contextlib.contextmanager
def delayed_entries_never_due() -> Iterator[None]:
    with mock.patch.object(DelayedEntries, "take_due", return_value=[]):
        yield


@contextlib.contextmanager
def delayed_entries_sent_at_once() -> Iterator[None]:
    with mock.patch.object(DelayedEntries, "hold_back", lambda self, counted, acks, now_ms: [counted]):
        yield


@contextlib.contextmanager
def due_entries_do_not_wait_for_their_key() -> Iterator[None]:
    """The owner of its key gets an entry when it is due, whoever holds earlier ones."""

    def on_clock(self: KeySharedDispatch, now_ms: int) -> None:
        self._holders.now_ms = now_ms
        for due in self._delayed.take_due(now_ms):
            key = self._places.wait(due.key_hash, due.ledger_id, due.entry_id)
            owner = self._places._owner(due.key_hash)
            if key.door is None and owner is not None:
                self._waiting.move(key, owner.key)

    with mock.patch.object(KeySharedDispatch, "on_clock", on_clock):
        yield


@contextlib.contextmanager
def due_entries_pass_earlier_ones_of_their_key() -> Iterator[None]:
    """They are read back again and again: they stand first, and may not be sent."""

    def on_clock(self: KeySharedDispatch, now_ms: int) -> None:
        self._holders.now_ms = now_ms
        for due in self._delayed.take_due(now_ms):
            positions = self._places.wait(due.key_hash, due.ledger_id, due.entry_id).positions
            positions.remove(Position(due.ledger_id, due.entry_id))
            positions.insert(0, Position(due.ledger_id, due.entry_id))

    with mock.patch.object(KeySharedDispatch, "on_clock", on_clock):
        yield


@contextlib.contextmanager
def skipped_entries_keep_a_key_draining() -> Iterator[None]:
    with mock.patch.object(KeySharedDispatch, "on_cursor_moved", _nothing):
        yield


@contextlib.contextmanager
def chunks_follow_their_key() -> Iterator[None]:
    """A key moves in the middle of a chunked message: its first chunks are never acknowledged, the others never sent."""
    with mock.patch.object(KeyPlaces, "note_chunk", _nothing):
        yield


EXCLUSIVE: list[Mutant] = [redelivery_forgotten, an_append_during_a_read_forgotten]
FAILOVER: list[Mutant] = [take_over_without_going_back, the_last_to_come_is_active, nobody_hears_who_is_active]
SHARED: list[Mutant] = [
    forget_what_a_leaver_held,
    redelivered_while_outstanding,
    blocked_for_ever,
    delayed_entries_never_due,
    delayed_entries_sent_at_once,
]
KEY_SHARED: list[Mutant] = [
    forget_what_a_leaver_held,
    give_a_key_to_two_consumers,
    keep_a_key_at_who_has_acknowledged,
    let_later_messages_of_a_key_pass,
    let_later_messages_pass_what_is_sent_again,
    due_entries_do_not_wait_for_their_key,
    due_entries_pass_earlier_ones_of_their_key,
    skipped_entries_keep_a_key_draining,
    chunks_follow_their_key,
]
