"""The values that dispatch reckons with: sets of positions, groups with their counts, what permits pay for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_broker.dispatch.counted_group import CountedGroup, count_group
from cepheid_broker.dispatch.delivery import encode_send
from cepheid_broker.dispatch.effects import Send
from cepheid_broker.dispatch.position_set import PositionSet
from cepheid_rpc import EntryGroup, encode_group
from cepheid_wire import FrameSplitter, MetadataShape, encode_tail, parse_command
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.scripted_client import message


@pytest.mark.slow
@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 40))), st.integers(0, 3), st.integers(0, 40), st.integers(0, 40))
def test_runs_of_a_position_set_are_its_members(members: set[tuple[int, int]], ledger: int, first: int, last: int) -> None:
    positions = PositionSet(members)
    runs = positions.runs(ledger, first, last)
    listed = [entry for a, b in runs for entry in range(a, b + 1)]
    assert listed == sorted(e for found, e in members if found == ledger and first <= e <= last)
    assert all(b + 1 < c for (_, b), (c, _) in pairwise(runs)), "runs are as long as they can be"
    assert [tuple(position) for position in positions] == sorted(members)
    positions.discard_range(ledger, first, last)
    assert set(map(tuple, positions)) == {(found, e) for found, e in members if not (found == ledger and first <= e <= last)}
    assert bool(positions) == bool(len(positions))


def test_a_span_ends_at_gaps_and_at_its_size() -> None:
    positions = PositionSet([(5, 0), (5, 1), (5, 4), (5, 20), (5, 21), (7, 0)])
    assert positions.first_span(max_entries=100, max_gap=5) == (5, 0, 4)
    assert positions.first_span(max_entries=2, max_gap=5) == (5, 0, 1)
    positions.discard_range(5, 0, 4)
    assert positions.first_span(max_entries=100, max_gap=5) == (5, 20, 21)
    positions.discard_range(5, 20, 21)
    assert positions.first_span(max_entries=100, max_gap=5) == (7, 0, 0)
    positions.discard(7, 0)
    assert positions.first_span(max_entries=100, max_gap=5) is None


def counted(counts: list[int], first: int = 10) -> CountedGroup:
    return CountedGroup(EntryGroup(1, first, [i + 1 for i in range(len(counts))], bytes(len(counts))), counts)


@pytest.mark.parametrize(
    ("runs", "permits", "max_entries", "taken", "cost"),
    [
        ([(10, 13)], 10, 99, [(10, 13)], 10),  # exactly paid for
        ([(10, 13)], 9, 99, [(10, 13)], 10),  # the last one is sent whole
        ([(10, 13)], 6, 99, [(10, 12)], 6),
        ([(10, 13)], 1, 99, [(10, 10)], 1),
        ([(10, 10), (12, 13)], 2, 99, [(10, 10), (12, 12)], 4),
        ([(10, 10), (12, 13)], 99, 2, [(10, 10), (12, 12)], 4),
        ([(10, 13)], 99, 1, [(10, 10)], 1),
        ([], 5, 99, [], 0),
    ],
)
def test_permits_pay_for_whole_entries(
    runs: list[tuple[int, int]], permits: int, max_entries: int, taken: list[tuple[int, int]], cost: int
) -> None:
    assert counted([1, 2, 3, 4]).take(runs, permits, max_entries) == (taken, cost)


def test_groups_are_counted_from_the_metadata_of_their_entries() -> None:
    tails = [message(0, b"a"), message(1, b"b", messages=1), message(2, b"c", messages=7), b"damaged"]
    group = count_group(encode_group(4, 0, -1, 0, tails))
    assert group.counts == [1, 1, 7, 1]
    assert group.chunks is None
    chunk = message(3, b"d", uuid="u", chunk_id=1, num_chunks_from_msg=2, total_chunk_msg_size=2)
    chunks = count_group(encode_group(4, 0, -1, 0, [tails[0], chunk])).chunks
    assert chunks is not None
    assert {entry: (found.uuid, found.is_last) for entry, found in chunks.items()} == {1: ("u", True)}
    assert count_group(encode_group(4, 0, -1, 0, [tails[0]] * 3)).counts is None, "the usual case is remembered shortly"


@pytest.mark.parametrize(
    "odd",
    [{"messages": 7}, {"uuid": "u", "chunk_id": 1, "num_chunks_from_msg": 2}, {"deliver_at_time": 9}],
)
def test_what_is_known_of_an_entry_does_not_depend_on_those_before_it(odd: dict[str, Any]) -> None:
    shape = MetadataShape()
    for tails in ([message(n) for n in range(50)], [message(n, **odd) for n in range(50)]):
        group = count_group(encode_group(4, 0, -1, 0, tails), shape=shape)
        alone = [count_group(encode_group(4, n, -1, 0, [tail])) for n, tail in enumerate(tails)]
        assert [group.messages_in(n, n) for n in range(50)] == [each.messages for each in alone]
        assert group.chunks == ({n: chunk for each in alone for n, chunk in (each.chunks or {}).items()} or None)
        assert group.deliver_at_ms == ({n: at for each in alone for n, at in (each.deliver_at_ms or {}).items()} or None)


def test_an_impossible_count_that_was_stored_earlier_uses_up_no_permits() -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=(1 << 31) - 1)
    group = count_group(encode_group(4, 0, -1, 0, [message(0), encode_tail(metadata, bytes(100)), message(2, messages=3)]))
    assert group.counts == [1, 1, 3]


def test_delivered_frames_are_the_stored_bytes_behind_a_header() -> None:
    tails = [message(n, b"x" * n, messages=3) for n in range(6)]
    group = count_group(encode_group(9, 200, -1, 0, tails))
    send = Send(1, group, [(201, 202), (204, 204)], 9, {202: 3})
    buffers, entries, size_bytes = encode_send(77, send, lambda at: (-1, 5) if at == (9, 204) else None, partition=6)
    stream = b"".join(buffers)
    assert (entries, size_bytes) == (3, sum(len(tails[n]) for n in (1, 2, 4)))
    frames = FrameSplitter(1 << 20).feed(stream)
    assert [bytes(frame.tail) for frame in frames] == [tails[1], tails[2], tails[4]]
    messages = [parse_command(frame.command).message for frame in frames]
    assert [(m.consumer_id, m.message_id.ledgerId, m.message_id.entryId) for m in messages] == [
        (77, 9, 201),
        (77, 9, 202),
        (77, 9, 204),
    ]
    assert [m.message_id.partition for m in messages] == [6, 6, 6]
    assert [m.redelivery_count for m in messages] == [0, 3, 0]
    assert [list(m.ack_set) for m in messages] == [[], [], [-1, 5]]
    assert isinstance(messages[0], pb.CommandMessage)
