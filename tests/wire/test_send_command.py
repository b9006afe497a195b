from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire import (
    BadCommandError,
    Receipt,
    SendCommand,
    SendReader,
    encode_command,
    encode_send_receipt,
    encode_send_receipts,
    parse_send,
    send_command,
)
from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.varint import varint
from tests.wire.strategies import messages, shuffled

Type = pb.BaseCommand.Type
ids = st.integers(0, 300) | st.integers(0, 2**64 - 1)
positions = st.integers(-1, 300) | st.integers(-1, 2**63 - 1)
receipts = st.builds(Receipt, ids, ids, positions, positions, st.none() | ids)


@pytest.mark.slow
@given(st.data())
def test_parse_send_equals_protobuf(data: st.DataObject) -> None:
    send = data.draw(messages(pb.CommandSend))
    parsed = parse_send(data.draw(shuffled(pb.BaseCommand(type=Type.SEND, send=send))))

    def optional(name: str) -> int | None:
        return getattr(send, name) if send.HasField(name) else None

    assert (parsed.producer_id, parsed.sequence_id) == (send.producer_id, send.sequence_id)
    assert (parsed.is_chunk, parsed.is_marker) == (send.is_chunk, send.marker)
    for name in ("num_messages", "highest_sequence_id", "txnid_least_bits", "txnid_most_bits"):
        assert getattr(parsed, name) == optional(name)


@pytest.mark.parametrize("command", ["", "ff", "0806", "08063200", "080632020801", "080632021001", "080632040800"])
def test_a_broken_send_is_refused(command: str) -> None:
    with pytest.raises(BadCommandError):
        parse_send(bytes.fromhex(command))


@given(st.binary(max_size=40))
def test_random_bytes_are_a_send_or_refused(noise: bytes) -> None:
    parsed = parsed_or_refused(noise)
    if isinstance(parsed, BadCommandError):
        assert parsed.facts["command_bytes"] == len(noise)
    else:
        assert parsed == parse_send(pb.BaseCommand.FromString(noise).SerializeToString())


def parsed_or_refused(command: bytes) -> SendCommand | BadCommandError:
    try:
        return parse_send(command)
    except BadCommandError as error:
        return error


@st.composite
def runs_of_sends(draw: st.DrawFn) -> list[pb.CommandSend]:
    """What producers of one connection send: numbers that follow each other, also where their varints grow, and exceptions."""
    sends = []
    for _ in range(draw(st.integers(1, 4))):
        producer_id = draw(st.sampled_from([0, 1, 300, 2**64 - 1]))
        first = draw(st.sampled_from([0, 120, 16_380, 2**32, 2**63 - 2, 2**64 - 6]))
        sends += [pb.CommandSend(producer_id=producer_id, sequence_id=first + n) for n in range(draw(st.integers(0, 6)))]
        sends += draw(st.lists(messages(pb.CommandSend), max_size=1))
    return sends


@given(st.lists(runs_of_sends(), max_size=3), st.sampled_from([b"", b"\x10\x05", b"\x18\x02"]))
def test_a_reader_returns_what_parsing_each_send_returns(runs: list[list[pb.CommandSend]], more: bytes) -> None:
    reader = SendReader()
    for send in [send for run in runs for send in run]:
        body = send.SerializeToString() + more  # a field that comes twice: the last one counts
        command = b"\x08\x06\x32" + varint(len(body)) + body
        assert reader.read(command) == parse_send(command)


def test_a_reader_parses_few_of_many_sends_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    monkeypatch.setattr(send_command, "parse_send", lambda command: parsed.append(command) or parse_send(command))
    reader = SendReader()
    for sequence_id in range(1000):
        send = pb.CommandSend(producer_id=300, sequence_id=sequence_id)
        command = pb.BaseCommand(type=Type.SEND, send=send).SerializeToString()
        assert reader.read(command).sequence_id == sequence_id
    assert len(parsed) < 20


def test_a_reader_refuses_a_broken_send() -> None:
    with pytest.raises(BadCommandError):
        SendReader().read(b"\x08\x06")


def by_protobuf(receipt: Receipt) -> bytes:
    message_id = pb.MessageIdData(ledgerId=receipt.ledger_id % 2**64, entryId=receipt.entry_id % 2**64)
    body = pb.CommandSendReceipt(producer_id=receipt.producer_id, sequence_id=receipt.sequence_id, message_id=message_id)
    if receipt.highest_sequence_id is not None:
        body.highest_sequence_id = receipt.highest_sequence_id
    return encode_command(pb.BaseCommand(type=Type.SEND_RECEIPT, send_receipt=body))


@given(receipts)
def test_a_receipt_is_what_protobuf_writes(receipt: Receipt) -> None:
    assert encode_send_receipt(*receipt) == by_protobuf(receipt)


@given(st.lists(receipts, max_size=8))
def test_many_receipts_are_their_frames_in_order(group: list[Receipt]) -> None:
    assert encode_send_receipts(group) == b"".join(by_protobuf(receipt) for receipt in group)


def test_receipts_of_ids_that_follow_each_other_are_their_frames() -> None:
    group = [Receipt(1, 120 + n, 7, -5 + n, None if n % 7 else 16_380 + n) for n in range(300)]
    assert encode_send_receipts(group) == b"".join(by_protobuf(receipt) for receipt in group)


def test_the_largest_receipt_fits_the_tables() -> None:
    largest = Receipt(2**64 - 1, 2**64 - 1, -1, -1, 2**64 - 1)
    assert encode_send_receipt(*largest) == by_protobuf(largest)
