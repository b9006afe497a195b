"""Mistakes of deduplication: which sequence ids are saved, found again and believed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cepheid_broker.publishing.deduplication import NOTHING, ProducerSequence, SequenceIds
from cepheid_broker.publishing.topic_deduplication import DEDUP_CURSOR, TopicDeduplication
from cepheid_managed_ledger.appender import Appender
from cepheid_metadata import Position
from tests.simulation.mutants.registry import mutant, scenario_mutant


@mutant("H3", "H1")  # H1: told stored, as a repetition
@contextlib.contextmanager
def name_what_was_pushed_when_saving_sequence_ids() -> Iterator[None]:
    """A snapshot of deduplication has sequence ids whose entries are still under way (apache/pulsar#5218)."""

    def snapshot(self: SequenceIds) -> dict[str, int]:
        return {name: sequence.pushed.ends for name, sequence in self._names.items() if sequence.pushed.ends >= 0}

    with mock.patch.object(SequenceIds, "snapshot", snapshot):
        yield


@mutant("H3", "H2")  # H2: a message is stored twice
@contextlib.contextmanager
def believe_the_snapshot_of_sequence_ids_alone() -> Iterator[None]:
    """The entries behind it are not looked at when the topic is opened."""

    async def replay(self: TopicDeduplication, mark_delete: Position) -> None: ...

    with mock.patch.object(TopicDeduplication, "_replay", replay):
        yield


@mutant("H3")
@contextlib.contextmanager
def save_no_chunks_with_sequence_ids() -> Iterator[None]:
    """Of a message that is not whole, those before a snapshot are not known after a crash, and are stored again."""
    snapshot = SequenceIds.snapshot

    def without_chunks(self: SequenceIds) -> dict[str, int]:
        return {name: sequence_id for name, sequence_id in snapshot(self).items() if not name.startswith("\0\0")}

    with mock.patch.object(SequenceIds, "snapshot", without_chunks):
        yield


@mutant("H3")
@contextlib.contextmanager
def let_producers_in_while_chunks_are_under_way() -> Iterator[None]:
    """Nobody waits for the append of chunks that are not the last of their message."""

    def is_settled(self: ProducerSequence) -> bool:
        return all(mark == NOTHING for mark in self._under_way)

    with mock.patch.object(ProducerSequence, "is_settled", property(is_settled)):
        yield


@scenario_mutant
@contextlib.contextmanager
def look_for_lost_sequence_ids_behind_the_position_alone() -> Iterator[None]:
    """What a position has in front of it is in the sequence ids with which it was saved; but those are gone.

    Random worlds miss it: nobody deletes a ledger of a topic that removes duplicates.
    """
    open_topic = TopicDeduplication.open

    async def trust_the_position(self: TopicDeduplication) -> None:
        cursor = self._ledger.cursors.get(DEDUP_CURSOR)
        if cursor is not None:
            cursor.is_rewound = False
        await open_topic(self)

    with mock.patch.object(TopicDeduplication, "open", trust_the_position):
        yield


@mutant("V9", "H3")
@contextlib.contextmanager
def keep_as_pushed_what_was_never_appended() -> Iterator[None]:
    """A connection breaks while messages wait for their append: sent again, they are taken for repetitions."""
    with mock.patch.object(ProducerSequence, "abandon"):
        yield


@mutant("M5", "H3", "H4")
@contextlib.contextmanager
def take_appends_behind_a_refusal_that_is_not_heard() -> Iterator[None]:
    """What fits is taken: the producer of what did not will send that again, behind it."""
    append = Appender.append

    def take(self: Appender, *call: Any) -> None:
        untold, self._untold_refusals = self._untold_refusals, 0
        append(self, *call)
        self._untold_refusals += untold

    with mock.patch.object(Appender, "append", take):
        yield
