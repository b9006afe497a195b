from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire import BODY_FIELDS, BadCommandError, CommandType, FrameSplitter, encode_body, encode_command, parse_command
from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.varint import varint
from tests.wire.strategies import messages, shuffled


@st.composite
def commands(draw: st.DrawFn) -> pb.BaseCommand:
    command_type = draw(st.sampled_from(CommandType))
    command = pb.BaseCommand(type=int(command_type))
    body = getattr(command, BODY_FIELDS[command_type])
    body.CopyFrom(draw(messages(type(body))))
    body.SetInParent()
    return command


def _bytes(command_type: int, body: bytes) -> bytes:
    """A command whose body may be broken."""
    return b"\x08" + varint(command_type) + varint(command_type << 3 | 2) + varint(len(body)) + body


@given(commands(), st.binary(max_size=20))
def test_every_command_survives_a_frame(command: pb.BaseCommand, tail: bytes) -> None:
    (frame,) = FrameSplitter(1_000_000).feed(encode_command(command, tail))
    assert frame.type == command.type
    assert parse_command(frame.command) == command
    assert frame.tail == tail


@given(commands())
def test_a_body_alone_makes_the_same_frame(command: pb.BaseCommand) -> None:
    body = getattr(command, BODY_FIELDS[command.type])
    assert encode_body(body) == encode_command(command)


@pytest.mark.slow
@given(st.data())
def test_order_and_unknown_fields_make_no_difference(data: st.DataObject) -> None:
    command = data.draw(commands())
    written = data.draw(shuffled(command))
    (frame,) = FrameSplitter(1_000_000).feed(len(b"1234" + written).to_bytes(4, "big") + len(written).to_bytes(4, "big") + written)
    assert frame.type == command.type
    parsed = parse_command(frame.command)
    parsed.DiscardUnknownFields()
    assert parsed == command


def test_every_command_type_has_a_body() -> None:
    bodies = {field.number: field.name for field in pb.BaseCommand.DESCRIPTOR.fields if field.message_type is not None}
    assert bodies == BODY_FIELDS
    kinds = [field.message_type.name for field in pb.BaseCommand.DESCRIPTOR.fields if field.message_type is not None]
    assert len(kinds) == len(set(kinds))  # so a body says which command it is
    assert {int(t): t.name for t in CommandType} == {v.number: v.name for v in pb.BaseCommand.Type.DESCRIPTOR.values}


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (b"\xff", "are not a valid command"),
        (bytes.fromhex("08065205"), "are not a valid command"),  # cut off
        (b"", "without a known type"),
        (bytes.fromhex("0863"), "without a known type"),
        (bytes.fromhex("0812"), "PING without its body `ping`"),
        (bytes.fromhex("08129a0100"), "PING without its body `ping`"),
        (_bytes(CommandType.FLOW, b"\x08\x01"), "FLOW lacks required fields: flow.messagePermits"),
        (_bytes(CommandType.ACK, bytes.fromhex("080010001a020801")), r"ACK lacks required fields: ack.message_id\[0\].entryId"),
        (_bytes(CommandType.ACK, bytes.fromhex("08001005")), "ACK lacks required fields: ack.ack_type"),  # unknown number
        (_bytes(CommandType.LOOKUP, b"\x0a\x02\xff\xfe\x10\x01"), "LOOKUP: field topic is not UTF-8"),
        (
            _bytes(CommandType.ACK, b"\x08\x00\x10\x00\x2a\x05\x0a\x01\xff\x10\x01"),
            "ACK: field properties.key is not UTF-8",
        ),
        (
            _bytes(CommandType.GET_TOPICS_OF_NAMESPACE_RESPONSE, b"\x08\x01\x12\x01a\x12\x01\xff"),
            "field topics is not UTF-8",
        ),
    ],
)
def test_a_broken_command_is_refused(command: bytes, reason: str) -> None:
    with pytest.raises(BadCommandError, match=reason):
        parse_command(command)


@given(st.binary(max_size=60))
def test_random_bytes_are_a_command_or_refused(noise: bytes) -> None:
    try:
        command = parse_command(noise)
    except BadCommandError:
        return
    assert command.IsInitialized()


@given(st.data())
def test_damaged_commands_are_a_command_or_refused(data: st.DataObject) -> None:
    encoded = bytearray(data.draw(commands()).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        command = parse_command(bytes(encoded))
    except BadCommandError:
        return
    assert command.HasField(BODY_FIELDS[command.type])


def test_nesting_without_end_is_refused() -> None:
    inner = b""
    for _ in range(2000):
        inner = b"\x08\x01\x10\x01" + (b"\x3a" + varint(len(inner)) + inner if inner else b"")
    with pytest.raises(BadCommandError):
        parse_command(_bytes(CommandType.SEEK, b"\x08\x01\x10\x01\x1a" + varint(len(inner)) + inner))
