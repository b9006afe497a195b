"""Options of a write, as texts, and what is refused."""

from __future__ import annotations

import pytest

from cepheid_scan import BadOptionError
from cepheid_spark.sink_identity import SinkIdentity, SinkNameTakenError, TaskPlace, identity_of
from cepheid_spark.sink_options import SinkOptions, parse_sink_options

NEEDED = {"service.url": "pulsar://localhost:6650", "topic": "t"}
OF_SPARK = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "3"}


def parse(streaming: bool = False, **options: str) -> SinkOptions:
    return parse_sink_options({**NEEDED, **options}, streaming=streaming)


def test_a_write_is_exactly_once_and_sorted_unless_it_says_otherwise() -> None:
    options = parse()
    assert (options.topic, options.exactly_once, options.is_sorted) == ("persistent://public/default/t", True, True)
    assert options.memory_s == 7 * 86400
    assert not parse(exactlyOnce="false").is_sorted
    assert not parse(order="asis").is_sorted
    assert parse(streaming=True, checkpointLocation="/tmp/x", sink_memory="30d").memory_s == 30 * 86400


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"startingOffsets": "earliest"}, "is only for reading"),
        ({"topics": "a,b"}, "a column topic"),
        ({"exactlyonse": "true"}, "did you mean exactlyOnce?"),
        ({"service.url": "http://localhost:8080"}, "pulsar://host:port"),
        ({"path": "t"}, "no path"),
        ({"exactlyOnce": "false", "sinkName": "x"}, "has no effect with exactlyOnce=false"),
        ({"sinkName": "x"}, "belong together"),
        ({"batchId": "3"}, "belong together"),
        ({"sinkMemory": "5s"}, "option sinkMemory"),
        ({"topic": "a/b/c/d/e"}, "a/b/c/d/e"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(BadOptionError) as caught:
        parse_sink_options({**NEEDED, **options}, streaming=False)
    assert said in str(caught.value)


def test_a_streaming_query_numbers_its_batches_itself() -> None:
    with pytest.raises(BadOptionError, match="numbers its micro-batches itself"):
        parse(streaming=True, batchId="3")


def test_no_repr_shows_the_token() -> None:
    assert "secret-token" not in repr(parse(token="secret-token"))


@pytest.mark.parametrize(
    ("options", "place", "job", "identity"),
    [
        ({}, TaskPlace(2, OF_SPARK), None, SinkIdentity("q", "q", 3, 2)),
        ({"sinkName": "x"}, TaskPlace(2, OF_SPARK), None, SinkIdentity("x", "q", 3, 2)),
        ({}, TaskPlace(2, {}), "job", SinkIdentity("job", "job", 0, 2)),
        ({"sinkName": "x", "batchId": "7"}, TaskPlace(2, {}), "job", SinkIdentity("x", "x", 7, 2)),
    ],
)
def test_what_a_task_is(options: dict[str, str], place: TaskPlace, job: str | None, identity: SinkIdentity) -> None:
    assert identity_of(parse_sink_options({**NEEDED, **options}, streaming=job is None), place, job) == identity


@pytest.mark.parametrize(
    ("last", "stored"),
    [(-1, 0), ((2 << 32) + 99, 0), (3 << 32, 1), ((3 << 32) + 41, 42)],
)
def test_what_is_stored_of_a_batch(last: int, stored: int) -> None:
    identity = SinkIdentity("q", "q", 3, 2)
    assert identity.stored_rows(last, "t") == stored
    assert identity.producer_name(0) == "spark-q-2"
    assert identity.producer_name(8) == "spark-q-2-p8"


def test_a_later_batch_that_is_stored_is_of_another_query() -> None:
    with pytest.raises(SinkNameTakenError, match="has stored batch 4, and this is batch 3"):
        SinkIdentity("q", "q", 3, 2).stored_rows(4 << 32, "t")
