"""Which ledgers go: the worked examples of retention."""

from __future__ import annotations

import pytest

from cepheid_managed_ledger.trim import Retention, plan_trim
from cepheid_metadata import ChainLedger

MB = 1_000_000
MINUTE_MS = 60_000
NOW_MS = 1_000 * MINUTE_MS


def chain(*ages_min: int) -> list[ChainLedger]:
    ended = [
        ChainLedger(ledger_id=5 + index, entries=10, size_bytes=40 * MB, closed_at_ms=NOW_MS - age * MINUTE_MS)
        for index, age in enumerate(ages_min)
    ]
    return [*ended, ChainLedger(ledger_id=99)]


def trimmed(
    time_min: int, size_mb: int, *, acknowledged: int | None = 30, in_use: int = -1, ledgers: list[ChainLedger] | None = None
) -> int:
    return plan_trim(
        ledgers or chain(180, 120, 60),
        last_size_bytes=10 * MB,
        acknowledged_entries=acknowledged,
        retention=Retention(time_min * MINUTE_MS if time_min >= 0 else -1, size_mb * MB if size_mb >= 0 else -1),
        now_ms=NOW_MS,
        is_in_use=lambda ledger_id: ledger_id == in_use,
    )


@pytest.mark.parametrize(
    ("time_min", "size_mb", "count"),
    [
        (0, 0, 3),
        (150, -1, 1),
        (-1, 80, 1),  # 130 - 40 = 90 >= 80; then 50 < 80
        (150, 100, 1),  # the first by time; the second stays: 130 - 80 = 50 < 100, and 2 h < 150 min
        (-1, -1, 0),
        (0, -1, 3),  # one limit 0: by the formula everything acknowledged goes
        (-1, 0, 3),
        (150, 10, 3),
        (59, -1, 3),
        (60, -1, 2),  # exactly as old as allowed: stays
    ],
)
def test_retention_of_acknowledged_ledgers(time_min: int, size_mb: int, count: int) -> None:
    assert trimmed(time_min, size_mb) == count


@pytest.mark.parametrize(("acknowledged", "count"), [(0, 0), (9, 0), (10, 1), (19, 1), (20, 2), (35, 3), (None, 3)])
def test_what_a_cursor_needs_stays(acknowledged: int | None, count: int) -> None:
    assert trimmed(0, 0, acknowledged=acknowledged) == count


def test_a_ledger_being_read_stays_and_so_do_those_after_it() -> None:
    assert trimmed(0, 0, in_use=6) == 1


def test_the_last_ledger_stays_even_when_it_has_ended() -> None:
    assert trimmed(0, 0, ledgers=chain(180, 120)[:2]) == 1


def test_only_a_prefix_goes() -> None:
    assert trimmed(150, -1, ledgers=chain(200, 100, 300)) == 1
