"""When a read that nobody answers tries again, and when it gives up."""

from __future__ import annotations

import pytest

from cepheid_rpc import Status
from cepheid_scan import ReadSettings
from cepheid_scan.read_rounds import GivenUpError, ReadRounds
from cepheid_scan.striped_source import ReplicaFailure


def failures(*statuses: Status | None, retry_after_s: float = 0.0) -> list[ReplicaFailure]:
    names = ["silent" if status is None else status.name for status in statuses]
    return [
        ReplicaFailure(position, "abc"[position], 5, name, status, retry_after_s)
        for position, (name, status) in enumerate(zip(names, statuses, strict=True))
    ]


def seconds_until_it_gives_up(rounds: ReadRounds, *statuses: Status | None) -> tuple[float, int]:
    now, count = 0.0, 0
    while count < 10_000:
        failed = failures(*statuses)
        for failure in failed:
            rounds.on_failed(failure, now)
        try:
            now += rounds.end_round(5, failed, now)
        except GivenUpError as error:
            return now, error.rounds
        count += 1
    raise AssertionError("it never gives up")


def test_default_settings_outlast_ten_seconds_without_any_replica() -> None:
    settings = ReadSettings()
    waited_s, rounds = seconds_until_it_gives_up(ReadRounds(settings.read_attempts, settings.unreachable_s), None, None)
    assert 10 < waited_s < 20
    assert rounds > settings.read_attempts


@pytest.mark.parametrize(
    ("statuses", "rounds"),
    [
        ((Status.NO_LEDGER, Status.NO_ENTRY), 1),  # certain: waiting helps nobody
        ((Status.BAD_DIGEST, Status.BAD_DIGEST), 5),
        ((Status.UNAUTHORIZED, Status.NO_LEDGER), 5),
    ],
)
def test_what_does_not_pass_is_not_waited_for(statuses: tuple[Status, ...], rounds: int) -> None:
    waited_s, made = seconds_until_it_gives_up(ReadRounds(5, 15.0), *statuses)
    assert made == rounds
    assert waited_s < 1.0


def test_one_that_may_come_back_is_worth_waiting_for() -> None:
    assert seconds_until_it_gives_up(ReadRounds(5, 15.0), Status.NO_ENTRY, None)[0] >= 15.0
    assert seconds_until_it_gives_up(ReadRounds(5, 15.0), Status.BAD_DIGEST, Status.IO_ERROR)[0] >= 15.0


def test_a_bookie_that_says_later_is_waited_for_longer_than_a_silent_one() -> None:
    assert seconds_until_it_gives_up(ReadRounds(5, 15.0), Status.OVERLOADED)[0] >= 200.0


def test_pauses_grow_to_two_seconds_and_obey_who_says_later() -> None:
    rounds = ReadRounds(100, 1000.0)
    pauses = [rounds.end_round(5, failures(None), 0.0) for _ in range(9)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert ReadRounds(5, 15.0).end_round(5, failures(Status.OVERLOADED, retry_after_s=0.7), 0.0) == 0.7


def test_an_entry_that_comes_makes_everything_good() -> None:
    rounds = ReadRounds(2, 1.0)
    for now in (0.0, 10.0, 20.0, 30.0):
        (failure,) = failures(None)
        rounds.on_failed(failure, now)
        rounds.end_round(5, [failure], now)
        rounds.on_progress()
        assert rounds.failures == {}
