"""Starts and ends of ranges as people write them."""

from __future__ import annotations

import re
import time
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest

from cepheid_decode import EARLIEST, LATEST, BadOptionError, Edge, MessagePosition
from cepheid_scan.edge_words import MAX_TIME_MS, EdgeWord, parse_edge, time_ms

ORDERS = "persistent://public/default/orders"
MARCH_MS = 1772323200000  # 2026-03-01T00:00:00Z


@pytest.mark.parametrize(
    ("word", "edge"),
    [
        ("earliest", EARLIEST),
        (" latest ", LATEST),
        (LATEST, LATEST),
        ("2026-03-01", Edge(publish_time_ms=MARCH_MS)),
        ("2026-03-01T01:00:00+01:00", Edge(publish_time_ms=MARCH_MS)),
        ("20260301T000000Z", Edge(publish_time_ms=MARCH_MS)),
        ("1772323200000", Edge(publish_time_ms=MARCH_MS)),
        (MARCH_MS, Edge(publish_time_ms=MARCH_MS)),
        (date(2026, 3, 1), Edge(publish_time_ms=MARCH_MS)),
        (datetime(2026, 3, 1, 1, tzinfo=timezone(timedelta(hours=1))), Edge(publish_time_ms=MARCH_MS)),
        ("12:345", Edge(positions=((ORDERS, MessagePosition(12, 345)),))),
        ("12:345:7", Edge(positions=((ORDERS, MessagePosition(12, 345, 7)),))),
        (" 12:345 ", Edge(positions=((ORDERS, MessagePosition(12, 345)),))),
        (f"12:{(1 << 63) - 1}", Edge(positions=((ORDERS, MessagePosition(12, (1 << 63) - 1)),))),
        ("9999-12-31T23:59:59.999999Z", Edge(publish_time_ms=MAX_TIME_MS)),
        ("12:-1", Edge(positions=((ORDERS, MessagePosition(12, -1)),))),
        (MessagePosition(1, 2), Edge(positions=((ORDERS, MessagePosition(1, 2)),))),
        ({"orders": "1:2"}, Edge(positions=((ORDERS, MessagePosition(1, 2)),))),
        ("subscription:billing", Edge(subscription="billing")),
    ],
)
def test_a_word_is_an_edge(word: EdgeWord, edge: Edge) -> None:
    assert parse_edge(word, ORDERS) == edge


@pytest.mark.parametrize(("word", "ms"), [("-90s", 90_000), ("-15m", 900_000), (" -6h ", 21_600_000), ("-7d", 604_800_000)])
def test_a_time_before_now(word: str, ms: int) -> None:
    now_ms = time.time_ns() // 1_000_000
    assert 0 <= time_ms(word) - (now_ms - ms) < 60_000
    assert time_ms("-999999999d") == 0


@pytest.mark.parametrize("word", ["yesterday", "-6", "-6y", "- 6h", "", "2026-13-01", "1:2:3:4", "12:x"])
def test_other_words_are_refused_with_what_would_do(word: str) -> None:
    with pytest.raises(BadOptionError, match=r"earliest, latest, a time like|ledger:entry"):
        parse_edge(word, ORDERS)


@pytest.mark.parametrize(
    "word",
    [
        *("--5:1", "5:--1", "-5:1", "5:-2", "5:1:-2", "١:٢", f"{1 << 63}:0", f"0:{1 << 63}", f"0:0:{1 << 31}", "1:" + "9" * 5000),
        *(
            {"orders": "--5:1"},
            {"orders": 5},
            {"orders": None},
            MessagePosition(10**30, 0),
            MessagePosition(1, 10**5000),
            {"o": []},
        ),
        *(
            -5,
            10**30,
            10**5000,
            MAX_TIME_MS + 1,
            True,
            1.5,
            None,
            "9" * 30,
            "9" * 5000,
            date(1, 1, 1),
            datetime.min.replace(tzinfo=UTC),
            b"5",
        ),
    ],
    ids=lambda word: type(word).__name__,
)
def test_what_no_topic_can_have_is_refused_in_a_short_line(word: Any) -> None:
    with pytest.raises(BadOptionError) as caught:
        parse_edge(word, ORDERS)
    assert re.search(r"is (no|not a) ", str(caught.value))
    assert len(str(caught.value)) < 300


def test_a_position_without_a_topic_means_nothing_among_several() -> None:
    with pytest.raises(BadOptionError, match="1:2 does not name a topic"):
        parse_edge("1:2", None)


@pytest.mark.parametrize("value", ["2026-03-01T00:00:00", "2026-03-01 08:00", datetime(2026, 3, 1)])  # noqa: DTZ001
def test_a_time_without_a_zone_is_refused(value: str | datetime) -> None:
    """Whoever writes one may mean the local time, and would get the rows of other hours."""
    with pytest.raises(BadOptionError, match="the zone is missing: give the time with its zone, such as 2026-03-01T08:00:00Z"):
        time_ms(value)
