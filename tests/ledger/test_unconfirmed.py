"""The queue of what is sent and not confirmed."""

from __future__ import annotations

import tracemalloc
from typing import Any

from cepheid_ledger import LedgerClosedError, LedgerError
from cepheid_ledger.unconfirmed import GROUP_BYTES, KeptBytes, Unconfirmed
from cepheid_rpc import EntryGroup, encode_group


def queue_of(*ranges: tuple[int, int]) -> tuple[Unconfirmed, list[Any]]:
    queue, seen = Unconfirmed(KeptBytes(10_000)), []
    for first, last in ranges:
        queue.push(last, encode_group(7, first, -1, 0, [b"x"] * (last - first + 1)), seen.append)
    return queue, seen


def ids(groups: list[EntryGroup]) -> list[tuple[int, int]]:
    return [(group.first_entry_id, group.last_entry_id) for group in groups]


def test_groups_are_answered_whole_and_in_order() -> None:
    queue, seen = queue_of((0, 2), (3, 3), (4, 6))
    queue.complete_through(1)
    assert seen == []
    queue.complete_through(5)
    assert ids(seen) == [(0, 2), (3, 3)]
    assert (len(queue), queue.size_bytes) == (1, 3 * 37)
    assert queue.first is not None
    assert queue.first.first_entry_id == 4


def test_a_view_shows_exactly_the_entries_asked_for_as_sent() -> None:
    queue, _ = queue_of((0, 2), (3, 3), (4, 6))
    assert ids(queue.view(1, 5)) == [(1, 2), (3, 3), (4, 5)]
    assert ids(queue.view(4, 6)) == [(4, 6)]
    for group in queue.view(1, 5):
        group.verify()


def test_what_is_pushed_by_a_callback_is_answered_later() -> None:
    queue, seen = queue_of((0, 0))

    def push_more(outcome: EntryGroup | LedgerError) -> None:
        seen.append(outcome)
        queue.push(2, encode_group(7, 2, -1, 0, [b"x"]), seen.append)

    queue.push(1, encode_group(7, 1, -1, 0, [b"x"]), push_more)
    queue.complete_through(1)
    assert ids(seen) == [(0, 0), (1, 1)]
    queue.fail(LedgerClosedError("over"))
    assert isinstance(seen[2], LedgerClosedError)
    assert (len(queue), queue.size_bytes) == (0, 0)


def test_what_is_confirmed_while_the_ensemble_changes_is_kept_for_the_newcomers() -> None:
    queue, _ = queue_of((0, 2), (3, 3), (4, 6))
    queue.complete_through(2)
    queue.keep()
    queue.complete_through(3)
    assert ids(queue.view(3, 6)) == [(3, 3), (4, 6)]
    assert ids(queue.view(0, 6)) == [(3, 3), (4, 6)], "what was confirmed before the change is gone"
    queue.let_go()
    assert ids(queue.view(3, 6)) == [(4, 6)]


def test_a_change_that_begins_anew_keeps_from_its_own_start_on() -> None:
    budget = KeptBytes(10_000)
    queue = Unconfirmed(budget)
    for entry_id in range(2):
        queue.push(entry_id, encode_group(7, entry_id, -1, 0, [b"x"]), lambda _: None)
    queue.keep()
    queue.complete_through(0)
    assert budget.used_bytes > 0
    queue.keep()
    assert (budget.used_bytes, ids(queue.view(0, 1))) == (0, [(1, 1)])


def test_what_is_kept_is_bounded_for_all_writers_together() -> None:
    size = 37 + GROUP_BYTES
    budget = KeptBytes(3 * size - 1)
    queues = [Unconfirmed(budget) for _ in range(2)]
    for queue in queues:
        for entry_id in range(2):
            queue.push(entry_id, encode_group(7, entry_id, -1, 0, [b"x"]), lambda _: None)
        queue.keep()
        queue.complete_through(0)
    assert (budget.used_bytes, budget.overflows) == (2 * size, 0)
    queues[0].complete_through(1)
    assert [queue.is_keeping for queue in queues] == [False, True], "the one that goes over lets everything go"
    assert (budget.used_bytes, budget.overflows) == (size, 1)
    queues[0].keep()
    queues[1].let_go()
    assert budget.used_bytes == 0


def test_what_is_kept_takes_the_memory_that_it_says_however_small_the_entries() -> None:
    """An outage of metadata in the middle of a change, and publishers of small messages that go on."""
    budget = KeptBytes(1 << 20)
    queue = Unconfirmed(budget)
    queue.keep()
    tracemalloc.start()
    try:
        entry_id = 0
        while not budget.overflows:
            peak_bytes = tracemalloc.get_traced_memory()[0]
            queue.push(entry_id, encode_group(7, entry_id, -1, 0, [b"x"]), lambda _: None)
            queue.complete_through(entry_id)
            entry_id += 1
    finally:
        tracemalloc.stop()
    assert 0.5 * budget.limit_bytes < peak_bytes < 1.25 * budget.limit_bytes
