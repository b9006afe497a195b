"""All orders of a few events, for Shared and Key_Shared: none goes wrong, none is stuck, nothing is remembered at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from cepheid_broker.dispatch.chunk_owners import ChunkOwners
from cepheid_broker.dispatch.counted_group import Chunk, CountedGroup, Run
from cepheid_broker.dispatch.dispatch_shared import SharedDispatch
from cepheid_broker.dispatch.effects import DispatchPolicies
from cepheid_broker.dispatch.holders import Holders
from cepheid_broker.dispatch.key_places import KeyPlaces
from cepheid_broker.dispatch.turns import Turns
from cepheid_broker.dispatch.waiting_keys import WaitingKey, WaitingKeys
from tests.broker.dispatch_scope import Story, key_shared, out_of_order, search, shared, sticky, walk
from tests.broker.dispatch_world import Entry

SOON_MS = 1_000_500


def of(key_hash: int, **fields: Any) -> Entry:
    return Entry(key_hash=key_hash, **fields)


def chunk(uuid: str, key_hash: int, *, is_last: bool) -> Entry:
    return of(key_hash, chunk=Chunk(uuid, is_last))


CHUNKS = (chunk("a", 1, is_last=False), of(1), chunk("a", 1, is_last=True))
TWO_MESSAGES = (
    chunk("a", 1, is_last=False),
    chunk("b", 0, is_last=False),
    chunk("a", 1, is_last=True),
    chunk("b", 0, is_last=True),
)

KEY_SHARED = {
    "two keys": Story(key_shared, (of(0), of(1), of(1)), permits=3, flow=(2,)),
    "keys move twice": Story(key_shared, (of(1), of(2), of(1)), join=3, permits=3, flow=(2,), nack=0),
    "batches": Story(key_shared, (of(1, messages=3), of(0), of(1)), permits=3, flow=(1,)),
    "appends and slow reads": Story(key_shared, (of(1), of(1)), there=1, permits=2, flow=(1,), slow_reads=True, fail=1),
    "acknowledged by others, skipped": Story(key_shared, (of(0), of(1), of(1)), permits=2, flow=(2,), foreign_ack=1, skip=1),
    "limits": Story(
        key_shared, (of(1), of(0), of(1)), permits=2, flow=(3,), nack=0, foreign_ack=1, skip=1, policies=DispatchPolicies(1, 2)
    ),
    "seek": Story(key_shared, (of(1), of(0)), permits=2, flow=(2,), seek=1, slow_reads=True),
    "chunks": Story(key_shared, CHUNKS, permits=3, flow=(2,)),
    "two chunked messages": Story(key_shared, TWO_MESSAGES, permits=2, flow=(1, 3), nack=0, ack=1, foreign_ack=1),
    "delayed": Story(key_shared, (of(1), of(1, deliver_at_ms=SOON_MS), of(1)), time=1, permits=3, flow=(2,)),
    "sockets": Story(key_shared, (of(0), of(1), of(1)), permits=2, flow=(2,), socket=1),
    "out of order": Story(out_of_order, (of(0), of(1), of(1)), permits=3, flow=(2,)),
    "sticky": Story(sticky, (of(0), of(1), of(1)), permits=2, join=3, ranges=((0, 0), (1, 5))),
}
SHARED = {
    "three entries": Story(shared, (of(0), of(0), of(0)), permits=3, flow=(2,)),
    "appends and slow reads": Story(shared, (of(0), of(0)), there=1, permits=2, flow=(1,), slow_reads=True, fail=1),
    "acknowledged by others, skipped": Story(shared, (of(0), of(0), of(0)), permits=2, flow=(2,), foreign_ack=1, skip=1),
    "limits": Story(shared, (of(0), of(0), of(0)), permits=2, flow=(3,), foreign_ack=1, skip=1, policies=DispatchPolicies(1, 2)),
    "chunks": Story(shared, CHUNKS, permits=3, flow=(2,)),
    "two chunked messages": Story(shared, TWO_MESSAGES, permits=2, flow=(1, 3), nack=0, foreign_ack=1),
    "delayed": Story(shared, (of(0), of(0, deliver_at_ms=SOON_MS), of(0)), time=1, permits=3, flow=(2,)),
    "sockets": Story(shared, (of(0), of(0)), permits=2, flow=(2,), socket=1),
}
STORIES = [*(("key-shared", name) for name in KEY_SHARED), *(("shared", name) for name in SHARED)]


def story_of(kind: str, name: str) -> Story:
    return (SHARED if kind == "shared" else KEY_SHARED)[name]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), STORIES)
def test_every_order_of_events_keeps_what_is_promised(kind: str, name: str) -> None:
    searched = search(story_of(kind, name), max_states=5000, every_end=8)
    assert searched.complete
    assert searched.states > 100


@pytest.mark.parametrize(("kind", "name"), STORIES)
def test_long_walks_too(kind: str, name: str) -> None:
    for seed in range(3):
        walk(story_of(kind, name).many_times(8), seed, events=100)


# A search that finds nothing proves nothing.


def _nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def any_waiting_entry_may_go() -> Iterator[None]:
    """Not only the first one of its key: another is read back for the sake of a neighbour."""
    with mock.patch.object(WaitingKey, "first", mock.ANY):
        yield


@contextlib.contextmanager
def refused_entries_wait_behind_later_ones() -> Iterator[None]:
    with mock.patch("cepheid_broker.dispatch.waiting_keys.insort", list.append):
        yield


@contextlib.contextmanager
def a_newcomer_gets_nothing_that_waits() -> Iterator[None]:
    with mock.patch.object(KeyPlaces, "join", lambda self, consumer, ranges: self.owners.join(consumer, ranges)):
        yield


@contextlib.contextmanager
def permits_do_not_open_a_door() -> Iterator[None]:
    with mock.patch.object(WaitingKeys, "open", lambda self, consumer: self._open.setdefault(consumer)):
        yield


@contextlib.contextmanager
def only_the_holder_can_acknowledge() -> Iterator[None]:
    with mock.patch.object(Holders, "holding", return_value=[]):
        yield


@contextlib.contextmanager
def an_acknowledged_chunk_keeps_its_consumer() -> Iterator[None]:
    with mock.patch.object(ChunkOwners, "on_acked", _nothing):
        yield


@contextlib.contextmanager
def reserved_chunks_are_not_recognized() -> Iterator[None]:
    def members(self: SharedDispatch, counted: CountedGroup, first: int) -> list[Run]:
        return self._replay.runs(counted.ledger_id, first, counted.last)

    with mock.patch.object(SharedDispatch, "_members", members):
        yield


@contextlib.contextmanager
def the_limit_of_all_stays() -> Iterator[None]:
    with mock.patch.object(Holders, "_unblock_all", _nothing):
        yield


@contextlib.contextmanager
def a_consumer_that_took_leaves_the_turns() -> Iterator[None]:
    def end(self: Turns, consumer: Any) -> None:
        self._queues[consumer.priority].remove(consumer)

    with mock.patch.object(Turns, "end", end):
        yield


MISTAKES: list[tuple[Callable[[], contextlib.AbstractContextManager[None]], Story]] = [
    (any_waiting_entry_may_go, Story(key_shared, (of(1), of(0), of(1)), permits=3, slow_reads=True, flow=(2,))),
    (refused_entries_wait_behind_later_ones, KEY_SHARED["two keys"]),
    (a_newcomer_gets_nothing_that_waits, KEY_SHARED["two keys"]),
    (permits_do_not_open_a_door, KEY_SHARED["two keys"]),
    (only_the_holder_can_acknowledge, KEY_SHARED["acknowledged by others, skipped"]),
    (an_acknowledged_chunk_keeps_its_consumer, KEY_SHARED["two chunked messages"]),
    (reserved_chunks_are_not_recognized, SHARED["two chunked messages"]),
    (the_limit_of_all_stays, SHARED["limits"]),
    (a_consumer_that_took_leaves_the_turns, SHARED["three entries"]),
]


@pytest.mark.parametrize(("mistake", "story"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES])
def test_a_mistake_is_found(mistake: Callable[[], contextlib.AbstractContextManager[None]], story: Story) -> None:
    with mistake(), pytest.raises(AssertionError, match="after"):
        search(story, max_states=5000)
