"""Commands as protobuf messages: everything but the two that carry entries.

Protobuf's parser (upb, C) takes 0.2 µs for a command, so there is no hand-written parser beside it. What it lets pass is checked
here, so that nothing behind it meets a half-filled command:
 1. Required fields are there, the body that belongs to the type is there, an unknown enum number counts as absent.
 2. Text is UTF-8. For proto2 the parser does not look, and the attribute would silently be `bytes` instead of `str`.
"""

from __future__ import annotations

from functools import cache
from struct import Struct

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.command_type import CommandType
from cepheid_wire.errors import BadCommandError
from cepheid_wire.varint import varint

_sizes = Struct(">II").pack

# Their bodies are empty but must be present (protocol.md §28), so the frames never change.
PING_FRAME = bytes.fromhex("00000009 00000005 0812 920100")
PONG_FRAME = bytes.fromhex("00000009 00000005 0813 9a0100")

MAX_MESSAGE_ID = (1 << 63) - 1  # ledger and entry of "latest"; of "earliest" both are -1 (protocol.md §12.2)


def parse_command(command: bytes) -> pb.BaseCommand:
    """The command of a frame, complete and with the body of its type. Raises BadCommandError."""
    try:
        parsed = pb.BaseCommand.FromString(command)
    except DecodeError as error:
        raise BadCommandError(f"{len(command)} bytes are no command: {error}", command_bytes=len(command)) from None
    if not parsed.HasField("type"):
        raise BadCommandError("a command without a type that we know", command_bytes=len(command))
    field = BODY_FIELDS[parsed.type]
    if not parsed.HasField(field):
        raise BadCommandError(f"{_name(parsed)} without its body `{field}`", command_type=parsed.type)
    if not parsed.IsInitialized():
        missing = ", ".join(parsed.FindInitializationErrors())  # type: ignore[attr-defined]  # types-protobuf lacks it
        raise BadCommandError(f"{_name(parsed)} lacks required fields: {missing}", command_type=parsed.type)
    body = getattr(parsed, field)
    if _text_fields(body.DESCRIPTOR) and (path := _find_broken_text(body)):
        raise BadCommandError(f"{_name(parsed)}: field {path} is not UTF-8", command_type=parsed.type)
    return parsed


def encode_command(command: pb.BaseCommand, tail: bytes | memoryview = b"") -> bytes:
    """One frame. With a tail it is copied: for tools and tests; brokers send `encode_message_header` and the tail apart."""
    encoded = command.SerializeToString()
    return b"".join((_sizes(4 + len(encoded) + len(tail), len(encoded)), encoded, tail))


def encode_body(body: Message) -> bytes:
    """The frame of the command whose body this is: `encode_body(pb.CommandSuccess(request_id=2))`. Every body belongs to one
    command only, so the type need not be said again; and nothing is copied into a BaseCommand."""
    command_type = _TYPES_BY_BODY[body.DESCRIPTOR.name]
    encoded = body.SerializeToString()
    command = b"".join((b"\x08", varint(command_type), varint(command_type << 3 | 2), varint(len(encoded)), encoded))
    return _sizes(4 + len(command), len(command)) + command


def _name(command: pb.BaseCommand) -> str:
    return CommandType(command.type).name


# Command number → name of its body in BaseCommand. The names do not agree (LOOKUP is in `lookupTopic`), the numbers do.
BODY_FIELDS: dict[int, str] = {int(t): pb.BaseCommand.DESCRIPTOR.fields_by_number[int(t)].name for t in CommandType}
_TYPES_BY_BODY: dict[str, int] = {getattr(pb.BaseCommand(), field).DESCRIPTOR.name: t for t, field in BODY_FIELDS.items()}


@cache
def _text_fields(message: Descriptor) -> tuple[FieldDescriptor, ...]:
    """The fields through which text can be reached. Only they are visited: an ACK of 1,000 ids has none there."""
    return tuple(field for field in message.fields if _leads_to_text(field, frozenset()))


def _leads_to_text(field: FieldDescriptor, seen: frozenset[str]) -> bool:
    if field.message_type is None:
        return bool(field.type == FieldDescriptor.TYPE_STRING)
    name = field.message_type.full_name
    return name not in seen and any(_leads_to_text(inner, seen | {name}) for inner in field.message_type.fields)


def _find_broken_text(message: Message) -> str:
    """Path of the first text field that is not UTF-8, or nothing."""
    for field in _text_fields(message.DESCRIPTOR):
        if not field.is_repeated and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        for item in value if field.is_repeated else (value,):
            if field.message_type is None:
                if not isinstance(item, str):
                    return field.name
            elif path := _find_broken_text(item):
                return f"{field.name}.{path}"
    return ""
