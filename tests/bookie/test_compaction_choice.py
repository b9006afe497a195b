"""Which logs are compacted, when, and together with which others."""

from __future__ import annotations

import pytest

from cepheid_bookie.compaction_choice import LogFigures, is_major_due, logs_of_output, logs_of_round, sparse_logs
from cepheid_bookie.entry_log import LOG_HEADER_BYTES

MB = 1_000_000


def log_of(log_id: int, live: int, *, size: int = 100, blocks: int = 1) -> LogFigures:
    """Sizes in megabytes."""
    return LogFigures(log_id, size * MB, live * MB, blocks)


def ids(logs: list[LogFigures]) -> list[int]:
    return [log.log_id for log in logs]


@pytest.mark.parametrize(
    ("live", "below_share", "expected"),
    [
        ({1: 19, 2: 20, 3: 5}, 0.2, [3, 1]),  # lowest first; at the bound it stays, since the header counts
        ({1: 59, 2: 100, 3: 1}, 0.6, [3, 1]),
        ({1: 5, 2: 5}, 0.2, [1, 2]),
        ({1: 5}, 0.0, []),  # switched off
    ],
)
def test_sparse_logs_come_lowest_share_first(live: dict[int, int], below_share: float, expected: list[int]) -> None:
    assert ids(sparse_logs([log_of(log_id, size) for log_id, size in live.items()], below_share)) == expected


def test_dead_logs_and_copies_of_few_blocks_are_not_copied() -> None:
    """The second is mostly header: its copy would be as large, and be chosen again in each pass."""
    dead, tiny = LogFigures(1, MB, 0, 0), LogFigures(2, LOG_HEADER_BYTES + 10, 10, 1)
    assert sparse_logs([dead, tiny], 1.0) == []


@pytest.mark.parametrize(
    ("log_bytes", "room", "expected"),
    [
        (100, 1000, [1, 2]),  # the third would make it larger than a log
        (1000, 1000, [1, 2, 3]),
        (1000, 50, [1]),  # what fits on the disk
        (10, 1000, [1]),  # one at least, though a log has grown beyond the setting since
        (1000, 30, [4]),  # the first does not fit: the one with the fewest live bytes
        (1000, 5, []),
    ],
)
def test_logs_are_merged_up_to_the_size_of_a_log_and_the_room_on_the_disk(log_bytes: int, room: int, expected: list[int]) -> None:
    logs = [log_of(1, 40), log_of(2, 45), log_of(3, 50), log_of(4, 20, size=25)]
    assert ids(logs_of_output(logs, log_bytes * MB, room * MB)) == (expected if expected != [1, 2, 3] else [1, 2, 3, 4])


def test_a_round_has_a_bounded_number_of_blocks_and_one_log_at_least() -> None:
    logs = [log_of(1, 1, blocks=500), log_of(2, 1, blocks=60), log_of(3, 1, blocks=60)]
    assert ids(logs_of_round(logs, 100)) == [1]
    assert ids(logs_of_round(logs[1:], 100)) == [2]
    assert ids(logs_of_round(logs[1:], 120)) == [2, 3]


@pytest.mark.parametrize(
    ("since_last_s", "low_space", "live", "expected"),
    [(3599, False, 60, False), (3600, False, 60, True), (0, True, 60, True), (0, False, 49, True)],
)
def test_a_major_compaction_is_due(since_last_s: float, low_space: bool, live: int, expected: bool) -> None:
    assert is_major_due(since_last_s, 3600, low_space=low_space, live_bytes=live, log_bytes=100) is expected
