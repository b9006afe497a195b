"""Codec of the Pulsar binary protocol: frames, commands, tails, names. No I/O, clock or connection."""

from cepheid_wire import pulsar_api_pb2
from cepheid_wire.batch import decode_batch, encode_batch
from cepheid_wire.checksum import add_checksum, crc32c_of, has_checksum, verify_tail
from cepheid_wire.command_type import CommandType
from cepheid_wire.commands import (
    BODY_FIELDS,
    MAX_MESSAGE_ID,
    PING_FRAME,
    PONG_FRAME,
    encode_body,
    encode_command,
    parse_command,
)
from cepheid_wire.compression import decompress
from cepheid_wire.errors import (
    BadCommandError,
    BadTailError,
    ChecksumMismatchError,
    InvalidTopicNameError,
    WireError,
)
from cepheid_wire.frames import BadFrameError, Frame, FrameSplitter, FrameTooLargeError
from cepheid_wire.message_command import SharedMessage, encode_message_header
from cepheid_wire.message_metadata import (
    MAX_BATCH_MESSAGES,
    SMALLEST_MESSAGE_BYTES,
    MetadataShape,
    MetadataView,
    count_messages,
    encode_tail,
    messages_in,
    parse_metadata,
    read_metadata,
    split_tail,
)
from cepheid_wire.send_command import (
    Receipt,
    SendCommand,
    SendReader,
    encode_send_receipt,
    encode_send_receipts,
    parse_send,
)
from cepheid_wire.server_errors import ServerError
from cepheid_wire.topic_name import NON_PERSISTENT, PATH_STEPS, PERSISTENT, NamespaceName, TopicName, check_tenant
from cepheid_wire.varint import signed64

__all__ = [
    "BODY_FIELDS",
    "MAX_BATCH_MESSAGES",
    "MAX_MESSAGE_ID",
    "NON_PERSISTENT",
    "PATH_STEPS",
    "PERSISTENT",
    "PING_FRAME",
    "PONG_FRAME",
    "SMALLEST_MESSAGE_BYTES",
    "BadCommandError",
    "BadFrameError",
    "BadTailError",
    "ChecksumMismatchError",
    "CommandType",
    "Frame",
    "FrameSplitter",
    "FrameTooLargeError",
    "InvalidTopicNameError",
    "MetadataShape",
    "MetadataView",
    "NamespaceName",
    "Receipt",
    "SendCommand",
    "SendReader",
    "ServerError",
    "SharedMessage",
    "TopicName",
    "WireError",
    "add_checksum",
    "check_tenant",
    "count_messages",
    "crc32c_of",
    "decode_batch",
    "decompress",
    "encode_batch",
    "encode_body",
    "encode_command",
    "encode_message_header",
    "encode_send_receipt",
    "encode_send_receipts",
    "encode_tail",
    "has_checksum",
    "messages_in",
    "parse_command",
    "parse_metadata",
    "parse_send",
    "pulsar_api_pb2",
    "read_metadata",
    "signed64",
    "split_tail",
    "verify_tail",
]
