"""What is offloaded next, what may leave the bookies, and what becomes of a chain whose ledgers leave: worked examples."""

from __future__ import annotations

import pytest

from cepheid_managed_ledger import OffloadConfig
from cepheid_managed_ledger.chain_edits import (
    MAX_WAITING_OBJECTS,
    count_that_may_leave,
    has_room_for_objects,
    off_bookies,
    without_attempts,
    without_first,
)
from cepheid_managed_ledger.offload_plan import due_ledgers, plan_offload
from cepheid_metadata import Chain, ChainLedger, OffloadedLedger, Position

MB = 1_000_000
MINUTE_MS = 60_000
NOW_MS = 1_000 * MINUTE_MS
URL = "s3://bucket"


def ledger(ledger_id: int, age_min: int, *, entries: int = 10) -> ChainLedger:
    closed_at_ms = NOW_MS - age_min * MINUTE_MS
    return ChainLedger(ledger_id=ledger_id, entries=entries, size_bytes=40 * MB if entries else 0, closed_at_ms=closed_at_ms)


def attempt(ledger_id: int) -> OffloadedLedger:
    return OffloadedLedger(url=f"{URL}/{ledger_id}-x", started_at_ms=NOW_MS)


def complete(ledger_id: int, age_min: int = 0, *, on_bookies: bool = True) -> OffloadedLedger:
    done_at_ms = NOW_MS - age_min * MINUTE_MS
    return attempt(ledger_id).replace(complete=True, completed_at_ms=done_at_ms, on_bookies=on_bookies)


def chain(*offloaded: tuple[int, OffloadedLedger], waiting: int = 0) -> Chain:
    """Ledgers 5, 6 and 8 of 40 MB each, that ended 3, 2 and 1 h ago; 7 is empty; 9 is being written."""
    ledgers = (ledger(5, 180), ledger(6, 120), ledger(7, 90, entries=0), ledger(8, 60), ChainLedger(ledger_id=9))
    urls = tuple(f"{URL}/old-{number}" for number in range(waiting)) or None
    return Chain(incarnation="a", ledgers=ledgers, offloaded=dict(offloaded) or None, object_deletions=urls)


@pytest.mark.parametrize(
    ("after_mb", "after_min", "offloaded", "due"),
    [
        (-1, -1, (), []),  # neither by size nor by age
        (0, -1, (), [5, 6, 8]),
        (60, -1, (), [5]),  # 90 MB are newer than 5, and 50 MB than 6
        (50, -1, (), [5, 6]),
        (10, -1, (), [5, 6, 8]),  # the ledger being written counts
        (11, -1, (), [5, 6]),
        (-1, 120, (), [5, 6]),  # exactly as old counts
        (-1, 121, (), [5]),
        (50, 61, (), [5, 6]),
        (50, -1, ((6, complete(6)),), [5]),  # what is complete is not due, and counts while it is on the bookies
        (90, -1, ((6, complete(6)),), [5]),
        (90, -1, ((6, complete(6, on_bookies=False)),), []),  # only 50 MB on the bookies are newer than 5
        (0, -1, ((5, attempt(5)),), [5, 6, 8]),  # an attempt is no copy
    ],
)
def test_ledgers_that_are_due(
    after_mb: int, after_min: int, offloaded: tuple[tuple[int, OffloadedLedger], ...], due: list[int]
) -> None:
    after_bytes, after_ms = after_mb * MB if after_mb >= 0 else -1, after_min * MINUTE_MS if after_min >= 0 else -1
    config = OffloadConfig(URL, after_bytes, after_ms)
    found = due_ledgers(chain(*offloaded), last_size_bytes=10 * MB, config=config, now_ms=NOW_MS)
    assert [each.ledger_id for each in found] == due


@pytest.mark.parametrize(
    ("before", "due"),
    [
        (Position(5, 9), []),  # the last entry of 5 is not before this position
        (Position(5, 10), [5]),
        (Position(8, 0), [5, 6]),
        (Position(9, 0), [5, 6, 8]),
    ],
)
def test_a_command_makes_ledgers_before_its_position_due(before: Position, due: list[int]) -> None:
    found = due_ledgers(chain(), last_size_bytes=0, config=OffloadConfig(URL), now_ms=NOW_MS, before=before)
    assert [each.ledger_id for each in found] == due
    assert not due_ledgers(chain(), last_size_bytes=0, config=OffloadConfig(None), now_ms=NOW_MS, before=before), "it is off"


def test_the_oldest_ledger_is_uploaded_first_and_one_that_failed_is_passed_over() -> None:
    config = OffloadConfig(URL, after_bytes=0)
    plan = plan_offload(chain(), last_size_bytes=0, config=config, now_ms=NOW_MS)
    assert plan.upload == ledger(5, 180)
    plan = plan_offload(chain(), last_size_bytes=0, config=config, now_ms=NOW_MS, skipped=[5])
    assert plan.upload == ledger(6, 120)


@pytest.mark.parametrize("url", [URL, None])
def test_attempts_are_cleared_also_when_offloading_is_off(url: str | None) -> None:
    found = chain((5, attempt(5)), (6, complete(6)))
    assert plan_offload(found, last_size_bytes=0, config=OffloadConfig(url), now_ms=NOW_MS).clear == (5,)


def test_nothing_is_uploaded_while_too_many_objects_wait_for_their_deletion() -> None:
    config = OffloadConfig(URL, after_bytes=0)
    assert plan_offload(chain(waiting=MAX_WAITING_OBJECTS), last_size_bytes=0, config=config, now_ms=NOW_MS).upload is None


@pytest.mark.parametrize(
    ("copy", "keep_min", "read", "leaves"),
    [
        (complete(5, 30), 30, False, True),  # exactly as long
        (complete(5, 29), 30, False, False),
        (complete(5, 30), 30, True, False),  # somebody reads it from the bookies
        (complete(5, 30), -1, False, False),  # both copies stay
        (complete(5, 30, on_bookies=False), 30, False, False),  # it has left
        (attempt(5), 0, False, False),
    ],
)
def test_what_may_leave_the_bookies(copy: OffloadedLedger, keep_min: int, read: bool, leaves: bool) -> None:
    config = OffloadConfig(URL, keep_ms=keep_min * MINUTE_MS)
    plan = plan_offload(chain((5, copy)), last_size_bytes=0, config=config, now_ms=NOW_MS, is_read_from_bookies=lambda _: read)
    assert plan.leave == ((5,) if leaves else ())


def test_what_leaves_the_chain_enters_a_queue_in_the_same_record() -> None:
    found = chain((5, complete(5, on_bookies=False)), (6, complete(6)), (8, attempt(8)))
    found = found.replace(deletions=(5,))
    gone = without_first(found, 4)
    assert [each.ledger_id for each in gone.ledgers] == [9]
    assert gone.deletions == (5, 6, 7, 8)  # 5 waited already; a ledger that bookies do not have is not queued again
    assert gone.object_deletions == (f"{URL}/5-x", f"{URL}/6-x", f"{URL}/8-x")
    assert gone.offloaded is None


def test_cleared_attempts_and_ledgers_that_leave_the_bookies() -> None:
    found = without_attempts(chain((5, attempt(5)), (6, complete(6))), [5, 6])
    assert (found.offloaded, found.object_deletions) == ({6: complete(6)}, (f"{URL}/5-x",))
    found = off_bookies(found, [6])
    assert found.deletions == (6,)
    assert not found.is_on_bookies(6)


@pytest.mark.parametrize(
    ("waiting", "url_bytes", "may_leave"), [(0, 100, 5), (998, 100, 3), (1_000, 100, 0), (2, 100_000, 0), (1, 198_500, 1)]
)
def test_what_waits_for_its_deletion_is_limited_in_number_and_bytes(waiting: int, url_bytes: int, may_leave: int) -> None:
    """Three ledgers have objects with URLs of 1,000 bytes."""
    copies = {number: complete(number).replace(url="u" * 1_000) for number in (5, 6, 8)}
    urls = tuple(f"{number:0{url_bytes}d}" for number in range(waiting)) or None
    before = chain().replace(offloaded=copies, object_deletions=urls)
    assert count_that_may_leave(before) == may_leave
    assert has_room_for_objects(before) is (may_leave > 0)
