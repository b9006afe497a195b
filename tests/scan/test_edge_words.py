"""Starts and ends of ranges as people write them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

import pytest

from cepheid_scan import EARLIEST, LATEST, BadOptionError, Edge, MessagePosition
from cepheid_scan.edge_words import EdgeWord, parse_edge, time_ms

ORDERS = "persistent://public/default/orders"
MARCH_MS = 1772323200000  # 2026-03-01T00:00:00Z


@pytest.mark.parametrize(
    ("word", "edge"),
    [
        ("earliest", EARLIEST),
        (" latest ", LATEST),
        (LATEST, LATEST),
        ("2026-03-01", Edge(publish_time_ms=MARCH_MS)),
        ("2026-03-01T00:00:00", Edge(publish_time_ms=MARCH_MS)),
        ("2026-03-01T01:00:00+01:00", Edge(publish_time_ms=MARCH_MS)),
        ("20260301T000000Z", Edge(publish_time_ms=MARCH_MS)),
        ("1772323200000", Edge(publish_time_ms=MARCH_MS)),
        (MARCH_MS, Edge(publish_time_ms=MARCH_MS)),
        (date(2026, 3, 1), Edge(publish_time_ms=MARCH_MS)),
        (datetime(2026, 3, 1, 1, tzinfo=timezone(timedelta(hours=1))), Edge(publish_time_ms=MARCH_MS)),
        ("12:345", Edge(positions=((ORDERS, MessagePosition(12, 345)),))),
        ("12:345:7", Edge(positions=((ORDERS, MessagePosition(12, 345, 7)),))),
        ("12:-1", Edge(positions=((ORDERS, MessagePosition(12, -1)),))),
        (MessagePosition(1, 2), Edge(positions=((ORDERS, MessagePosition(1, 2)),))),
        ({"orders": "1:2"}, Edge(positions=((ORDERS, MessagePosition(1, 2)),))),
        ("subscription:billing", Edge(subscription="billing")),
    ],
)
def test_a_word_is_an_edge(word: EdgeWord, edge: Edge) -> None:
    assert parse_edge(word, ORDERS) == edge


@pytest.mark.parametrize("word", ["yesterday", "", "2026-13-01", "1:2:3:4", "12:x"])
def test_other_words_are_refused_with_what_would_do(word: str) -> None:
    with pytest.raises(BadOptionError, match=r"earliest, latest, a time like|ledger:entry"):
        parse_edge(word, ORDERS)


def test_a_position_without_a_topic_means_nothing_among_several() -> None:
    with pytest.raises(BadOptionError, match="1:2 names no topic"):
        parse_edge("1:2", None)


def test_a_time_without_a_zone_is_utc() -> None:
    assert time_ms(datetime(2026, 3, 1)) == time_ms(datetime(2026, 3, 1, tzinfo=UTC)) == MARCH_MS  # noqa: DTZ001
