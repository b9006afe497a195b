from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cepheid_decode import BadRecordError, OnBadRecord, Piece, ReadMode, RowFilter, ScanCounters, ScanSpec
from cepheid_decode.chunked import Chunk, ChunkAssembler
from cepheid_decode.message_decoder import MessageDecoder
from cepheid_rpc import EntryGroup
from cepheid_wire import encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.decode.decode_reference import compress, decode, groups_of, metadata, piece, single


def chunks(payload: bytes, count: int, uuid: str = "p-1", *, codec: int = pb.NONE, **fields: Any) -> list[bytes]:
    """A message in `count` entries, as producers send it: compressed as a whole, then cut."""
    described = metadata(uuid=uuid, num_chunks_from_msg=count, compression=codec, **fields)
    packed = compress(codec, payload, described)
    described.total_chunk_msg_size = len(packed)
    step = -(-len(packed) // count)
    tails = []
    for chunk_id in range(count):
        described.chunk_id = chunk_id
        tails.append(encode_tail(described, packed[chunk_id * step : (chunk_id + 1) * step]))
    return tails


@pytest.mark.parametrize("codec", [pb.NONE, pb.LZ4, pb.ZSTD, pb.ZLIB, pb.SNAPPY])
@pytest.mark.parametrize("per_group", [1, 2, 100])
def test_a_message_in_chunks_is_one_row_at_its_last(codec: int, per_group: int) -> None:
    payload = bytes(range(256)) * 10
    tails = [*chunks(payload, 3, codec=codec, partition_key="k", properties={"a": "b"}), single(b"after")]
    rows = decode(tails, ["key", "value", "entry_id", "batch_index", "properties"], per_group=per_group)
    assert rows == [
        {"key": "k", "value": payload, "entry_id": 2, "batch_index": None, "properties": {"a": "b"}},
        {"key": None, "value": b"after", "entry_id": 3, "batch_index": None, "properties": {}},
    ]


def test_chunks_of_several_producers_lie_among_each_other() -> None:
    a, b = chunks(b"a" * 30, 3, "a-1"), chunks(b"b" * 20, 2, "b-1")
    tails = [a[0], b[0], single(b"m"), a[1], b[1], a[2]]
    assert [row["value"] for row in decode(tails, ["value"])] == [b"m", b"b" * 20, b"a" * 30]


def test_a_chunk_that_came_twice_counts_once() -> None:
    first, second, third = chunks(b"0123456789ab", 3)
    for tails in (
        [first, first, second, third],
        [first, second, second, third],
        [first, second, third, third],
        [first, second, first, second, third],
    ):
        assert [row["value"] for row in decode(tails, ["value"])] == [b"0123456789ab"]


def test_the_task_with_the_last_chunk_looks_back_for_the_others() -> None:
    first, second, third = chunks(b"0123456789ab", 3)
    of_piece = piece(2, first_entry_id=10, last_entry_id=12)
    rows = decode([single(b"m"), third], ["value", "entry_id"], of_piece=of_piece, before=[single(b"x"), first, second])
    assert rows == [{"value": b"m", "entry_id": 10}, {"value": b"0123456789ab", "entry_id": 11}]


def test_the_task_without_the_last_chunk_gives_nothing_for_it() -> None:
    first, second, _ = chunks(b"0123456789ab", 3)
    counters = ScanCounters()
    assert decode([first, single(b"m"), second], ["value"], counters=counters) == [{"value": b"m"}]
    assert counters.bad_records == 0


def test_what_came_whole_before_the_piece_is_not_looked_for_again() -> None:
    first, second = chunks(b"0123", 2)
    assert decode([second, single(b"m")], ["value"], before=[first, second]) == [{"value": b"m"}]


@pytest.mark.parametrize(
    ("tails", "reason"),
    [
        (chunks(b"0123456789ab", 3)[1:], "the chunks before the last of 3 were not found"),
        (chunks(b"0123456789ab", 3)[::2], "chunk 1 of 3 is missing before chunk 2 of 3"),
        ([chunks(b"0123456789ab", 3)[0], chunks(b"0123", 2)[1]], "chunk 1 of 3 is missing before chunk 1 of 2"),
        ([chunks(b"0123", 2)[0], chunks(b"0123456789", 2)[1]], "have 7 bytes, 10 are announced"),
        ([chunks(b"0123456789", 2)[0], chunks(b"0123", 2)[1]], "4 bytes are announced"),
        ([single(num_chunks_from_msg=2, chunk_id=5, uuid="u")], "chunk 5 of 2"),
        ([single(num_chunks_from_msg=2, chunk_id=1)], "without uuid"),
        ([single(num_chunks_from_msg=2, chunk_id=0, uuid="u", total_chunk_msg_size=-1)], "its chunks have -1 bytes"),
    ],
)
def test_a_message_whose_chunks_do_not_add_up_is_a_bad_record(tails: list[bytes], reason: str) -> None:
    with pytest.raises(BadRecordError, match=reason):
        decode([*tails, single(b"m")], ["value"])
    counters = ScanCounters()
    assert decode([*tails, single(b"m")], ["value"], on_bad_record=OnBadRecord.SKIP, counters=counters) == [{"value": b"m"}]
    assert counters.bad_records == 1
    assert decode([*tails, single(b"m")], ["value"], on_bad_record=OnBadRecord.NULL) == [{"value": None}, {"value": b"m"}]


def test_an_encrypted_message_in_chunks_is_shown_whole() -> None:
    described = metadata(uuid="u", num_chunks_from_msg=2, total_chunk_msg_size=6, compression=pb.LZ4, uncompressed_size=90)
    described.encryption_keys.add(key="team", value=b"\xff")
    tails = []
    for chunk_id, part in enumerate((b"sec", b"ret")):
        described.chunk_id = chunk_id
        tails.append(encode_tail(described, part))
    (row,) = decode(tails, ["value", "properties"], on_bad_record=OnBadRecord.NULL)
    assert row["value"] == b"secret"
    assert row["properties"]["encryption.compression"] == "LZ4"
    with pytest.raises(BadRecordError, match=r"12:1 of .* its payload is encrypted"):
        decode(tails)


def test_chunks_outside_the_filter_s_time_are_left_out() -> None:
    tails = [*chunks(b"0123", 2, publish_time=5), *chunks(b"4567", 2, "p-2", publish_time=9)]
    assert decode(tails, ["value"], row_filter=RowFilter(publish_from_ms=6)) == [{"value": b"4567"}]


def test_what_is_held_of_incomplete_messages_is_bounded() -> None:
    assembler = ChunkAssembler(limit_bytes=100)
    for number in range(30):
        assert assembler.add(Chunk(b"%d" % number, 0, 2, 20, b"x" * 10)) is None
    assert assembler.held_bytes <= 100
    assert assembler.add(Chunk(b"29", 1, 2, 20, b"y" * 10)) == b"x" * 10 + b"y" * 10
    assert assembler.add(Chunk(b"0", 1, 2, 20, b"y" * 10)) == "the chunks before the last of 2 were not found"


def test_the_chunks_of_a_message_may_lie_on_both_sides_of_a_cut() -> None:
    first, second, third = chunks(b"0123456789ab", 3)
    of_piece = piece(2, first_entry_id=10, last_entry_id=11)
    rows = decode([second, third], ["value", "entry_id"], of_piece=of_piece, before=[first])
    assert rows == [{"value": b"0123456789ab", "entry_id": 11}]


def test_every_piece_of_a_task_looks_back() -> None:
    messages = {10: chunks(b"of the one", 2, "p-1"), 20: chunks(b"of the other", 2, "p-2")}

    def look_back(asked: Piece, _: int) -> Iterator[EntryGroup]:
        yield from groups_of(messages[asked.first_entry_id][:1], first_entry_id=asked.first_entry_id - 1)

    decoder = MessageDecoder(ScanSpec(ReadMode.MESSAGES, ("value",)), ScanCounters(), look_back)
    found = []
    for entry_id, (_, last) in messages.items():
        of_piece = piece(1, first_entry_id=entry_id, last_entry_id=entry_id)
        for batch in (*decoder.decode(of_piece, groups_of([last], first_entry_id=entry_id)), *decoder.finish(of_piece)):
            found += batch["value"].to_pylist()
    assert found == [b"of the one", b"of the other"]
