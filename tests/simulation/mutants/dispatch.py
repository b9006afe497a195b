"""Mistakes in deliveries and acknowledgements: a wake-up that gets lost, a key at two consumers, a seek that is one off.

Those that histories of single parts notice too are in tests/dispatch_mistakes.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from cepheid_broker.dispatch import dispatch_key_shared, dispatch_shared
from cepheid_broker.dispatch.dispatch_failover import FailoverDispatch
from cepheid_broker.dispatch.dispatch_shared import SharedDispatch
from cepheid_broker.dispatch.dispatcher import Dispatcher
from cepheid_broker.protocol import connection_consumer, consumer_acks
from cepheid_broker.publishing.producer import Producer
from cepheid_broker.topics.ack_saver import AckSaver, OnSaved
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_broker.topics.subscription import Subscription
from cepheid_broker.topics.topic_positions import position_at_time
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.cursor import Cursor
from cepheid_managed_ledger.managed_ledger import ManagedLedger
from cepheid_managed_ledger.tail_cache import TopicTail, front_of
from cepheid_metadata import EARLIEST, LATEST, Position
from cepheid_rpc import EntryGroup
from cepheid_wire import SendCommand, count_messages
from tests.dispatch_mistakes import (
    forget_what_a_leaver_held,
    give_a_key_to_two_consumers,
    keep_a_key_at_who_has_acknowledged,
    let_later_messages_of_a_key_pass,
    let_later_messages_pass_what_is_sent_again,
    take_over_without_going_back,
)
from tests.simulation.mutants.registry import mutant, scenario_mutant

mutant("V7", "H5", "H6", "H10")(forget_what_a_leaver_held)
mutant("H10")(give_a_key_to_two_consumers)
mutant("H10")(let_later_messages_of_a_key_pass)
mutant("H10")(let_later_messages_pass_what_is_sent_again)
mutant("V7")(keep_a_key_at_who_has_acknowledged)
mutant("H8", "V7")(take_over_without_going_back)


def _nothing(*_: Any, **__: Any) -> None: ...


@mutant("V7", "H5", "H8")
@contextlib.contextmanager
def skip_what_did_not_fit_into_a_read() -> Iterator[None]:
    """A group of the tail cache is cut, and the next one read though the rest of the first was not (found by seed 0x9)."""

    def read(self: TopicTail, position: Position, *, max_entries: int, max_bytes: int) -> list[EntryGroup] | None:
        found = original(self, position, max_entries=max_entries, max_bytes=max_bytes)
        if not found:
            return found
        last = Position(found[-1].ledger_id, found[-1].last_entry_id)
        index = next((index for index, key in enumerate(self._keys) if index >= self._head and key >= last), len(self._keys))
        left = max_bytes - sum(len(group.data) for group in found)
        if index + 1 < len(self._keys) and self._keys[index] > last and left > 0:
            group = self._groups[index + 1]
            assert group is not None
            if (front := front_of(group, 1, left, at_least_one=False)) is not None:
                found.append(front)
        return found

    original = TopicTail.read
    with mock.patch.object(TopicTail, "read", read):
        yield


@mutant("V7", "V9")  # V9: what was read ahead is given to nobody, nor given back
@contextlib.contextmanager
def permits_wake_nobody() -> Iterator[None]:
    """A FLOW is counted, and what waited for it goes on waiting, until something else happens."""

    def on_permits(self: Dispatcher, consumer: int, messages: int) -> None:
        self.core.on_permits(consumer, messages)

    with mock.patch.object(Dispatcher, "on_permits", on_permits):
        yield


@mutant("V7", "H5", "H8", "M3")
@contextlib.contextmanager
def find_nothing_behind_what_was_trimmed() -> Iterator[None]:
    """Whoever asks for an entry whose ledger has left the topic is told that it has come to the end."""
    entry_at = ManagedLedger._entry_at

    def exactly(self: ManagedLedger, position: Position) -> Position | None:
        is_gone = position.ledger_id < self.ledgers.first_position.ledger_id
        return None if is_gone else entry_at(self, position)

    with mock.patch.object(ManagedLedger, "_entry_at", exactly):
        yield


@mutant("V7", "H5", "H8", "M3")
@contextlib.contextmanager
def skip_the_first_behind_what_was_trimmed() -> Iterator[None]:
    """Whoever asks for an entry whose ledger has left the topic goes on with the second one that is there."""
    entry_at = ManagedLedger._entry_at

    def beyond(self: ManagedLedger, position: Position) -> Position | None:
        is_gone = position.ledger_id < self.ledgers.first_position.ledger_id
        first = entry_at(self, position)
        return self.next_position(first) if is_gone and first is not None else first

    with mock.patch.object(ManagedLedger, "_entry_at", beyond):
        yield


@mutant("H9", "V7", "H5", "H6")
@contextlib.contextmanager
def forget_what_is_given_back() -> Iterator[None]:
    """What a consumer of a Shared subscription gives back is held by nobody, and waits for nobody."""
    with (
        mock.patch.object(SharedDispatch, "_give_up", _nothing, create=True),
        mock.patch.object(SharedDispatch, "on_redeliver", _nothing),
    ):
        yield


@mutant("H9")
@contextlib.contextmanager
def deliver_to_a_newcomer_what_others_hold() -> Iterator[None]:
    """A Shared subscription starts over when a consumer joins, as an ordered one does."""
    on_consumer_joined = SharedDispatch.on_consumer_joined

    def start_over(self: SharedDispatch, consumer: int, **details: Any) -> None:
        on_consumer_joined(self, consumer, **details)
        self._forward.rewind(self._acks.first_unacknowledged())

    with mock.patch.object(SharedDispatch, "on_consumer_joined", start_over):
        yield


@mutant("H13", "C4", "H7", "H5", "H6", "H8", "V7", "M6")  # M6: what counts as acknowledged may be trimmed
@contextlib.contextmanager
def seek_one_off() -> Iterator[None]:
    """Delivery goes on behind the entry that was asked for."""
    reset = PersistentTopic.reset_subscription

    async def beyond(self: PersistentTopic, subscription: Subscription, position: Position, words: Sequence[int] = ()) -> None:
        await reset(self, subscription, Position(position.ledger_id, position.entry_id + 1), words)

    with mock.patch.object(PersistentTopic, "reset_subscription", beyond):
        yield


@mutant("C3", "H5", "H6", "H8", "M6")
@contextlib.contextmanager
def skip_one_too_many() -> Iterator[None]:
    """The entry behind the last one that was to be skipped counts as acknowledged too."""
    nth_unacknowledged = AckSet.nth_unacknowledged

    def the_next(self: AckSet, number: int) -> Position | None:
        return nth_unacknowledged(self, number + 1)

    with mock.patch.object(AckSet, "nth_unacknowledged", the_next):
        yield


@scenario_mutant
@contextlib.contextmanager
def seek_behind_a_time() -> Iterator[None]:
    """What was published in the very millisecond that was asked for counts as older.

    Random worlds miss it: none of their clients seeks a time or subscribes at the end.
    """

    async def behind(ledger: ManagedLedger, time_ms: int) -> Position:
        return await position_at_time(ledger, time_ms + 1)

    with mock.patch.object(connection_consumer, "position_at_time", behind):
        yield


@scenario_mutant
@contextlib.contextmanager
def begin_at_the_end_each_time() -> Iterator[None]:
    """Also a subscription that is there already, when a consumer comes that would begin at the end.

    Random worlds miss it: none of their clients seeks a time or subscribes at the end.
    """
    create_subscription = PersistentTopic.create_subscription

    async def skip_what_came(self: PersistentTopic, name: str, position: Position, **others: Any) -> Subscription:
        subscription = await create_subscription(self, name, position, **others)
        if position == LATEST:
            subscription.cursor.advance_to(self.ledger.last_confirmed)
        return subscription

    with mock.patch.object(PersistentTopic, "create_subscription", skip_what_came):
        yield


@scenario_mutant
@contextlib.contextmanager
def begin_with_the_topic_whatever_is_asked() -> Iterator[None]:
    """A new subscription gets what was published before it.

    Random worlds miss it: none of their clients seeks a time or subscribes at the end.
    """
    with mock.patch.object(connection_consumer, "LATEST", EARLIEST):
        yield


@mutant("M9")
@contextlib.contextmanager
def tell_another_last_entry_than_was_looked_at() -> Iterator[None]:
    """While the last entry is read, to see how many messages it has, another one is appended: its id is told, with the index of the
    message that was the last one before."""
    last_message = connection_consumer.last_message

    async def of_two(ledger: ManagedLedger) -> tuple[Position, int | None]:
        position, batch_index = await last_message(ledger)
        return (ledger.last_confirmed if ledger.is_valid(position) else position), batch_index

    with mock.patch.object(connection_consumer, "last_message", of_two):
        yield


@mutant("H5", "H6", "H10", "M6")
@contextlib.contextmanager
def acknowledge_cumulatively_on_shared_subscriptions() -> Iterator[None]:
    """What others hold, and what was never delivered, counts as acknowledged."""
    with mock.patch.object(consumer_acks, "shares_entries", return_value=False):
        yield


@mutant("H5", "H6", "H8", "M6")
@contextlib.contextmanager
def take_a_part_of_a_batch_for_all_of_it() -> Iterator[None]:
    """An acknowledgement with an ack set counts for the whole entry."""
    with mock.patch.object(consumer_acks, "_part_of", return_value=None):
        yield


@mutant("H5", "H6", "H8", "M6")
@contextlib.contextmanager
def hear_the_first_64_messages_of_a_batch_alone() -> Iterator[None]:
    """Of the words that acknowledge a part of a batch only the first is read: what comes after it counts as acknowledged."""
    words_of = consumer_acks.words_of

    def first_word(ident: Any) -> tuple[int, ...]:
        return words_of(ident)[:1]

    with mock.patch.object(consumer_acks, "words_of", first_word):
        yield


@mutant("H6", "C3", "C4", "C2")
@contextlib.contextmanager
def tell_the_first_64_messages_of_a_batch_alone() -> Iterator[None]:
    """A partly acknowledged batch is delivered with one word: the client takes what comes after it for acknowledged."""
    unacked_words = Cursor.unacked_words

    def first_word(self: Cursor, position: Position) -> tuple[int, ...] | None:
        words = unacked_words(self, position)
        return None if words is None else words[:1]

    with mock.patch.object(Cursor, "unacked_words", first_word):
        yield


@mutant("H5", "H6", "H8", "M6")
@contextlib.contextmanager
def acknowledge_all_of_a_batch_up_to_whose_middle_it_is() -> Iterator[None]:
    """A cumulative acknowledgement that ends inside a batch takes the rest of it along."""
    acknowledge_cumulative = Subscription.acknowledge_cumulative

    def wholly(self: Subscription, consumer: Any, position: Position, part: Any = None) -> None:
        acknowledge_cumulative(self, consumer, position, None)

    with mock.patch.object(Subscription, "acknowledge_cumulative", wholly):
        yield


@mutant("H7", "C2", "C4")
@contextlib.contextmanager
def ignore_parts_of_batches() -> Iterator[None]:
    """A consumer that acknowledged some messages of a batch gets them again: the ack set is not sent along."""
    with mock.patch.object(Cursor, "unacked_words", return_value=None):
        yield


@mutant("C2", "H7")
@contextlib.contextmanager
def say_saved_before_it_is() -> Iterator[None]:
    """The answer to an acknowledgement does not wait for the cursor."""

    def when_saved(self: AckSaver, on_saved: OnSaved) -> None:
        on_saved(None)

    with mock.patch.object(AckSaver, "when_saved", when_saved):
        yield


@mutant("H14")
@contextlib.contextmanager
def spend_no_permits() -> Iterator[None]:
    """A consumer that keeps up gets whatever is appended, however full its queue is."""
    on_appended = FailoverDispatch.on_appended

    def generous(self: FailoverDispatch, tail: Any = None) -> Any:
        send = on_appended(self, tail)
        if send is not None and self._active is not None:
            self._active.permits += send.messages
        return send

    with mock.patch.object(FailoverDispatch, "on_appended", generous):
        yield


@mutant("H8")
@contextlib.contextmanager
def start_over_with_some_permits() -> Iterator[None]:
    """Every eighth FLOW of an ordered subscription makes it deliver all that is unacknowledged once more."""
    on_permits, flows = FailoverDispatch.on_permits, itertools.count(1)

    def start_over(self: FailoverDispatch, consumer: int, messages: int) -> bool:
        wakes = on_permits(self, consumer, messages)
        if next(flows) % 8 == 0:
            self.on_rewind()
        return wakes

    with mock.patch.object(FailoverDispatch, "on_permits", start_over):
        yield


@mutant("H8")
@contextlib.contextmanager
def send_to_whoever_has_permits() -> Iterator[None]:
    """While the queue of the active consumer is full, what comes next goes to one that is not."""
    next_effect = FailoverDispatch.next_effect

    def to_another(self: FailoverDispatch) -> Any:
        active = self._active
        if active is not None and active.permits <= 0 and not self._news:
            self._active = next((each for each in self._candidates.values() if each.permits > 0 and each.writable), active)
        try:
            return next_effect(self)
        finally:
            self._active = active

    with mock.patch.object(FailoverDispatch, "next_effect", to_another):
        yield


@mutant("H9")
@contextlib.contextmanager
def tell_no_delivery_counts() -> Iterator[None]:
    """They are kept, and consumers of Shared and Key_Shared subscriptions never hear of them: nothing becomes a dead letter."""
    with (
        mock.patch.object(dispatch_shared, "counts_of", return_value={}),
        mock.patch.object(dispatch_key_shared, "counts_of", return_value={}),
    ):
        yield


@mutant("H1")
@contextlib.contextmanager
def store_what_is_refused() -> Iterator[None]:
    """A message whose checksum is wrong is answered with that, and appended with what came beside it."""
    take = Producer.take

    def take_all(self: Producer, send: SendCommand, tail: memoryview) -> None:
        refused = self.checksum_errors
        take(self, send, tail)
        if self.checksum_errors > refused:
            self.topic.publish([bytes(tail)], _nothing, [count_messages(tail)])

    with mock.patch.object(Producer, "take", take_all):
        yield
