"""Offsets of streams: one way to write each, every written one is read for ever, and where a batch begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_scan import MessagePosition
from cepheid_spark.offsets import BadOffsetError, EntryPosition, StreamOffset

GOLDEN_1, GOLDEN_2, GOLDEN = (
    (Path(__file__).parent / "golden" / f"offsets_v{number}.jsonl").read_text().splitlines() for number in (1, 2, 3)
)
A, B, C = (f"persistent://public/default/{name}" for name in "abc")


def text(offset: StreamOffset) -> str:
    """As Spark's runner writes it."""
    return json.dumps(offset.to_json())


def shuffled(document: Any, random: Any) -> Any:
    if not isinstance(document, dict):
        return document
    keys = list(document)
    random.shuffle(keys)
    return {key: shuffled(document[key], random) for key in keys}


@pytest.mark.parametrize("line", GOLDEN)
def test_every_offset_of_format_3_is_read_and_written_as_it_is(line: str) -> None:
    assert json.dumps(StreamOffset.from_json(json.loads(line)).to_json(), separators=(",", ":")) == line


@pytest.mark.parametrize("line", [*GOLDEN_1, *GOLDEN_2])
def test_every_offset_of_an_older_format_is_read_and_says_nothing_that_it_did_not(line: str) -> None:
    """Neither of incarnations, nor of the time that the query began with."""
    document = json.loads(line)
    assert StreamOffset.from_json(document).to_json() == {**document, "v": 3}


@pytest.mark.slow
@given(st.sampled_from(GOLDEN), st.randoms(use_true_random=False))
def test_the_order_of_keys_decides_nothing(line: str, random: Any) -> None:
    document = json.loads(line)
    assert text(StreamOffset.from_json(shuffled(document, random))) == text(StreamOffset.from_json(document))


positions = st.builds(MessagePosition, st.integers(0, 2**62), st.integers(0, 2**62), st.integers(-1, 100))
ends = st.builds(EntryPosition, st.integers(0, 2**62), st.integers(-1, 2**62))
topics = st.text(min_size=1, max_size=20)


@pytest.mark.slow
@given(
    st.dictionaries(topics, ends),
    st.dictionaries(topics, positions),
    st.dictionaries(topics, st.integers(1, 2**40)),
    st.none() | topics,
    st.dictionaries(topics, st.text(min_size=1)),
    st.none() | st.integers(0, 2**62),
)
def test_what_is_written_is_read_again(
    t: Any, starts: Any, cut: Any, subscription: str | None, incarnations: Any, since_ms: int | None
) -> None:
    offset = StreamOffset(t, starts, cut, subscription, incarnations, since_ms)
    assert StreamOffset.from_json(json.loads(text(offset))) == offset


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"v": 4, "t": {}}, r"format 4.* knows formats 1 to 3"),
        ({"v": "1", "t": {}}, r"format '1'.* knows formats 1 to 3"),
        ({"v": [1], "t": {}}, r"format \[1\].* knows formats 1 to 3"),
        ({"v": 1, "t": {}, "inc": {}}, "format 1 has no inc"),
        ({"v": 2, "t": {}, "since": 5}, "format 2 has no since"),
        ({"v": 3, "t": {}, "since": "now"}, "whole numbers"),
        ({"v": 3, "t": {}, "since": None}, "whole numbers"),
        ({"v": 2, "t": {}, "inc": {A: ""}}, "not an incarnation"),
        ({"v": 2, "t": {}, "inc": {A: 7}}, "not an incarnation"),
        ({"t": {}}, "not an offset of a Cepheid stream"),
        ([], "not an offset of a Cepheid stream"),
        ({"v": 1, "t": {}, "extra": 1}, "has no extra"),
        ({"v": 1}, "cannot be read"),
        ({"v": 1, "t": {A: [1]}}, "not a position"),
        ({"v": 1, "t": {A: [1, 2, 3]}}, "not a position"),
        ({"v": 1, "t": {A: [1, 2.5]}}, "whole numbers"),
        ({"v": 1, "t": {A: [1, True]}}, "whole numbers"),
        ({"v": 1, "t": {A: "1:2"}}, "not a position"),
        ({"v": 1, "t": {A: [1, -2]}}, "whole numbers"),
        ({"v": 1, "t": []}, "cannot be read"),
    ],
)
def test_another_offset_is_refused(document: Any, said: str) -> None:
    with pytest.raises(BadOffsetError, match=said):
        StreamOffset.from_json(document)


def test_the_first_batch_carries_where_it_began_and_later_ones_do_not() -> None:
    starts = {A: MessagePosition(7, 5, 2), B: MessagePosition(8, 0)}
    initial = StreamOffset.initial(starts, "s", {A: "i", B: "j"})
    assert initial.ends == {A: EntryPosition(7, 4), B: EntryPosition(8, -1)}
    assert initial.is_initial
    first = initial.moved_to({A: EntryPosition(7, 9)}, cut={A: 10}, found={}, incarnations={A: "i"})
    assert first.starts == starts
    assert not first.is_initial
    moved, found = {B: EntryPosition(8, 3), C: EntryPosition(20, 1)}, {C: MessagePosition(20, 0)}
    second = first.moved_to(moved, cut={B: 10}, found=found, incarnations={B: "j", C: "k"})
    assert second.starts == {C: MessagePosition(20, 0)}
    assert second.cut == {B: 10}
    assert second.subscription == "s"
    assert second.incarnations == {A: "i", B: "j", C: "k"}


def test_a_batch_begins_where_its_end_says_whatever_spark_thinks_the_start_is() -> None:
    initial = StreamOffset.initial({A: MessagePosition(7, 5)}, "s", {A: "i"})
    end = initial.moved_to({A: EntryPosition(7, 9)}, cut={A: 10}, found={}, incarnations={})
    computed_anew = StreamOffset.initial({A: MessagePosition(7, 8)}, "another", {A: "i"})
    assert end.first_message(A, computed_anew) == MessagePosition(7, 5)
    later = end.moved_to({A: EntryPosition(9, 0)}, cut={A: 10}, found={}, incarnations={})
    assert later.first_message(A, end) == MessagePosition(7, 10)


def test_a_topic_that_is_gone_leaves_the_offset() -> None:
    start = StreamOffset({A: EntryPosition(1, 1), B: EntryPosition(2, 2)}, incarnations={A: "i", B: "j"})
    left = start.moved_to({}, cut={}, found={}, incarnations={}, gone=frozenset([A]))
    assert (left.ends, left.incarnations) == ({B: EntryPosition(2, 2)}, {B: "j"})


def test_a_batch_whose_beginning_nobody_knows_is_an_error() -> None:
    with pytest.raises(BadOffsetError, match="do not say where"):
        StreamOffset({A: EntryPosition(1, 1)}).first_message(A, StreamOffset({}))
