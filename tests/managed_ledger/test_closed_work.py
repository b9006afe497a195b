"""Whether a topic that is not open has anything to do: worked examples over chain records."""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_managed_ledger import ManagedLedgerConfig, OffloadConfig, Reason, Retention, closed_work
from cepheid_metadata import Chain, ChainLedger, OffloadedLedger, Position

MINUTE_MS = 60_000
NOW_MS = 1_000 * MINUTE_MS
KEEP = Retention(-1, -1)
OFFLOAD = OffloadConfig("s3://bucket", after_ms=90 * MINUTE_MS, keep_ms=30 * MINUTE_MS)
LAST = Position(8, 9)


def chain(*, is_open: bool = False, offloaded: dict[int, OffloadedLedger] | None = None, **fields: Any) -> Chain:
    """Ledgers 5, 6 and 8 of 10 entries and 40 MB each, that ended 3, 2 and 1 h ago, and an empty one that the last owner closed."""
    ledgers = [
        ChainLedger(ledger_id=number, entries=10, size_bytes=40 << 20, closed_at_ms=NOW_MS - hours * 60 * MINUTE_MS)
        for number, hours in ((5, 3), (6, 2), (8, 1))
    ]
    if "terminated_at" not in fields:
        ledgers.append(ChainLedger(ledger_id=9, entries=None if is_open else 0, closed_at_ms=0 if is_open else NOW_MS))
    return Chain(incarnation="a", ledgers=tuple(ledgers), offloaded=offloaded, **fields)


def copy(*, complete: bool = True, age_min: int = 0, on_bookies: bool = True) -> OffloadedLedger:
    done_at_ms = NOW_MS - age_min * MINUTE_MS if complete else 0
    return OffloadedLedger(
        url="s3://bucket/x", started_at_ms=1, complete=complete, completed_at_ms=done_at_ms, on_bookies=on_bookies
    )


def reasons(chain: Chain, offload: OffloadConfig | None = None, retention: Retention = KEEP, **options: Any) -> list[Reason]:
    config = ManagedLedgerConfig(retention=retention, offload=offload or OffloadConfig())
    return list(closed_work(chain, config, NOW_MS, **options).reasons)


def test_a_topic_with_nothing_due_has_no_reason_whatever_its_empty_ledgers() -> None:
    assert reasons(chain()) == []
    assert reasons(chain(is_open=True)) == [], "what is kept for ever need not be ended"
    done = {number: copy(on_bookies=False) for number in (5, 6)}
    assert reasons(chain(offloaded=done), OFFLOAD) == []
    empty = Chain(incarnation="a", ledgers=(ChainLedger(ledger_id=9, entries=0, closed_at_ms=1),))
    assert reasons(empty, OFFLOAD, Retention(0, 0)) == []


def test_what_offloading_has_to_do() -> None:
    work = closed_work(chain(), ManagedLedgerConfig(retention=KEEP, offload=OFFLOAD), NOW_MS)
    assert [ledger.ledger_id for ledger in work.due] == [5, 6]
    assert work.reasons == (Reason.OFFLOAD,)
    assert reasons(chain(is_open=True), OFFLOAD) == [Reason.LEFT_OPEN, Reason.OFFLOAD]
    assert reasons(chain(offloaded={5: copy(complete=False)}), OFFLOAD) == [Reason.OFFLOAD, Reason.ATTEMPTS]
    kept = {5: copy(age_min=31), 6: copy(age_min=29)}
    assert reasons(chain(offloaded=kept), OFFLOAD) == [Reason.OFF_BOOKIES]


def test_without_an_object_store_what_is_due_shows_and_is_no_reason() -> None:
    config = ManagedLedgerConfig(retention=KEEP, offload=OFFLOAD)
    work = closed_work(chain(object_deletions=("s3://bucket/y",)), config, NOW_MS, can_offload=False)
    assert (len(work.due), work.reasons) == (2, ())


def test_what_waits_for_its_deletion_is_a_reason() -> None:
    assert reasons(chain(deletions=(3,))) == [Reason.DELETIONS]
    assert reasons(chain(object_deletions=("s3://bucket/y",))) == [Reason.DELETIONS]


@pytest.mark.parametrize(
    ("retention", "positions", "due"),
    [
        (Retention(0, 0), None, True),  # some position would let them go
        (Retention(0, 0), {}, False),  # nobody has subscribed, and no retention was set
        (Retention(0, 0), {"internal": LAST}, False),
        (Retention(100 * MINUTE_MS, -1), {}, True),  # what was set holds without subscriptions, too
        (Retention(0, 0), {"s": LAST}, True),
        (Retention(0, 0), {"s": Position(5, 8)}, False),  # the first ledger is not acknowledged
        (Retention(0, 0), {"s": Position(5, 9)}, True),
        (Retention(0, 0), {"s": LAST, "slow": Position(4, 9)}, False),
        (Retention(200 * MINUTE_MS, -1), {"s": LAST}, False),  # none is so old
        (Retention(100 * MINUTE_MS, -1), {"s": LAST}, True),
        (Retention(-1, 100 << 20), {"s": LAST}, False),  # 80 MB would be left
        (Retention(-1, 80 << 20), {"s": LAST}, True),
    ],
)
def test_retention_goes_by_the_slowest_cursor(retention: Retention, positions: dict[str, Position] | None, due: bool) -> None:
    assert (Reason.RETENTION in reasons(chain(), None, retention, positions=positions, not_expired=("internal",))) is due


def test_what_nobody_subscribed_to_is_left_to_the_next_client() -> None:
    """Opening it would trim all of it."""
    assert reasons(chain(is_open=True), None, Retention(0, 0), positions={}) == []
    assert Reason.LEFT_OPEN in reasons(chain(is_open=True), None, Retention(0, 0), positions={"s": LAST})


def test_the_last_ledger_with_entries_goes_unless_the_topic_is_terminated() -> None:
    only = chain().ledgers[2]
    assert reasons(Chain(incarnation="a", ledgers=(only,)), None, Retention(0, 0)) == [Reason.RETENTION]
    ended = Chain(incarnation="a", ledgers=(only,), terminated_at=LAST)
    assert reasons(ended, None, Retention(0, 0)) == []


@pytest.mark.parametrize(
    ("age_min", "positions", "due"),
    [
        (150, None, True),
        (150, {}, False),  # no subscription has a backlog
        (150, {"s": Position(5, 8)}, True),
        (150, {"s": Position(5, 9)}, False),  # what is left is younger
        (100, {"s": Position(5, 9)}, True),
        (200, {"s": Position(4, 0)}, False),
        (150, {"internal": Position(4, 0)}, False),
    ],
)
def test_messages_expire_with_the_ledger_that_holds_them(age_min: int, positions: dict[str, Position] | None, due: bool) -> None:
    found = reasons(chain(), expire_after_ms=age_min * MINUTE_MS, positions=positions, not_expired=("internal",))
    assert (Reason.EXPIRY in found) is due


def test_positions_are_asked_for_only_where_they_decide() -> None:
    config = ManagedLedgerConfig(retention=Retention(0, 0))
    assert closed_work(chain(), config, NOW_MS).depends_on_positions
    assert not closed_work(chain(deletions=(3,)), config, NOW_MS).depends_on_positions
    assert not closed_work(chain(), ManagedLedgerConfig(retention=KEEP), NOW_MS).depends_on_positions
