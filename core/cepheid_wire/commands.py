"""Commands as protobuf messages: all but the two that carry entries.

Protobuf's parser (upb, C) takes 0.2 µs for a command, so there is no parser written by hand. What it does not check is checked
here, so that the rest of the broker never gets an incomplete command:
 1. Required fields and the body that belongs to the type are present; an unknown enum number counts as absent.
 2. Text is UTF-8. For proto2 the parser does not check, and the attribute would be `bytes` instead of `str`.
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

# Their bodies are empty but must be present (protocol.md §28), so the frames are constant.
PING_FRAME = bytes.fromhex("00000009 00000005 0812 920100")
PONG_FRAME = bytes.fromhex("00000009 00000005 0813 9a0100")

MAX_MESSAGE_ID = (1 << 63) - 1  # ledger and entry of "latest"; for "earliest" both are -1 (protocol.md §12.2)


def parse_command(command: bytes) -> pb.BaseCommand:
    """Return the command of a frame, complete and with the body of its type. Raises BadCommandError."""
    try:
        parsed = pb.BaseCommand.FromString(command)
    except DecodeError as error:
        raise BadCommandError(f"{len(command)} bytes are not a valid command: {error}", command_bytes=len(command)) from None
    if not parsed.HasField("type"):
        raise BadCommandError("a command without a known type", command_bytes=len(command))
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
    """Return one frame. It copies the tail: for tools and tests; brokers send `encode_message_header` and the tail separately."""
    encoded = command.SerializeToString()
    return b"".join((_sizes(4 + len(encoded) + len(tail), len(encoded)), encoded, tail))


def encode_body(body: Message) -> bytes:
    """Return the frame of the command that has this body: `encode_body(pb.CommandSuccess(request_id=2))`. Every body belongs to
    only one command, so the type is not a parameter; and nothing is copied into a BaseCommand."""
    command_type = _TYPES_BY_BODY[body.DESCRIPTOR.name]
    encoded = body.SerializeToString()
    command = b"".join((b"\x08", varint(command_type), varint(command_type << 3 | 2), varint(len(encoded)), encoded))
    return _sizes(4 + len(command), len(command)) + command


def _name(command: pb.BaseCommand) -> str:
    return CommandType(command.type).name


# Command number → name of its body in BaseCommand. The names differ (LOOKUP is in `lookupTopic`), the numbers are the same.
BODY_FIELDS: dict[int, str] = {int(t): pb.BaseCommand.DESCRIPTOR.fields_by_number[int(t)].name for t in CommandType}
_TYPES_BY_BODY: dict[str, int] = {getattr(pb.BaseCommand(), field).DESCRIPTOR.name: t for t, field in BODY_FIELDS.items()}


@cache
def _text_fields(message: Descriptor) -> tuple[FieldDescriptor, ...]:
    """Return the fields that are text or contain text. Only these are visited: an ACK of 1,000 ids has none there."""
    return tuple(field for field in message.fields if _leads_to_text(field, frozenset()))


def _leads_to_text(field: FieldDescriptor, seen: frozenset[str]) -> bool:
    if field.message_type is None:
        return bool(field.type == FieldDescriptor.TYPE_STRING)
    name = field.message_type.full_name
    return name not in seen and any(_leads_to_text(inner, seen | {name}) for inner in field.message_type.fields)


def _find_broken_text(message: Message) -> str:
    """Return the path of the first text field that is not UTF-8, or an empty string."""
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
