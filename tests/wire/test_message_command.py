from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire import FrameSplitter, SharedMessage, encode_command, encode_message_header, parse_command
from cepheid_wire import pulsar_api_pb2 as pb

Type = pb.BaseCommand.Type
ids = st.integers(0, 300) | st.integers(0, 2**63 - 1)


@given(
    consumer_id=st.integers(0, 2**64 - 1) | st.integers(0, 300),
    ledger_id=ids,
    entry_id=ids,
    partition=st.integers(-1, 2**31 - 1) | st.integers(-1, 3),
    redelivery_count=st.integers(0, 2**32 - 1) | st.integers(0, 2),
    ack_set=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    consumer_epoch=st.none() | st.integers(0, 2**64 - 1),
    tail=st.binary(max_size=50),
)
def test_a_header_and_its_tail_are_what_protobuf_writes(
    consumer_id: int,
    ledger_id: int,
    entry_id: int,
    partition: int,
    redelivery_count: int,
    ack_set: list[int],
    consumer_epoch: int | None,
    tail: bytes,
) -> None:
    body = pb.CommandMessage(consumer_id=consumer_id, ack_set=ack_set, consumer_epoch=consumer_epoch)
    body.message_id.ledgerId, body.message_id.entryId = ledger_id, entry_id
    if partition >= 0:
        body.message_id.partition = partition
    if redelivery_count:
        body.redelivery_count = redelivery_count
    header = encode_message_header(
        consumer_id,
        ledger_id,
        entry_id,
        len(tail),
        partition=partition,
        redelivery_count=redelivery_count,
        ack_set=ack_set,
        consumer_epoch=consumer_epoch,
    )
    assert header + tail == encode_command(pb.BaseCommand(type=Type.MESSAGE, message=body), tail)


@pytest.mark.slow
@given(st.lists(st.tuples(ids, st.binary(max_size=20)), max_size=5))
def test_messages_written_one_after_the_other_are_read_as_frames(entries: list[tuple[int, bytes]]) -> None:
    written = b"".join(encode_message_header(7, 12, entry_id, len(tail)) + tail for entry_id, tail in entries)
    frames = FrameSplitter(1000).feed(written)
    assert [(parse_command(f.command).message.message_id.entryId, f.tail) for f in frames] == entries


def test_words_of_an_ack_set_may_be_given_unsigned() -> None:
    assert encode_message_header(1, 1, 1, 0, ack_set=[2**64 - 1]) == encode_message_header(1, 1, 1, 0, ack_set=[-1])


@given(
    ledger_id=st.integers(0, 2**63 - 1),
    entry_id=st.integers(0, 2**63 - 1),
    partition=st.integers(-1, 2**31 - 1),
    consumer_ids=st.lists(st.sampled_from([0, 1, 127, 128, 16383, 16384, 2**21, 2**32, 2**64 - 1]), min_size=1),
    tail=st.binary(max_size=300),
)
def test_a_message_for_many_is_the_frame_of_each(
    ledger_id: int, entry_id: int, partition: int, consumer_ids: list[int], tail: bytes
) -> None:
    shared = SharedMessage(ledger_id, entry_id, tail, partition)
    for consumer_id in consumer_ids:
        header = encode_message_header(consumer_id, ledger_id, entry_id, len(tail), partition=partition)
        assert shared.frame(consumer_id) == header + tail
