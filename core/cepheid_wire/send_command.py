"""Parses SEND and encodes SEND_RECEIPT, the two commands of every published entry.

Parsing uses protobuf: reading all fields of a SEND takes 0.85 µs. A parser in Python, without the handling of invalid input, took
0.6 µs, which does not justify a second parser. Receipts are encoded by hand, from a template that receipts with close ids share,
and for a whole group into one buffer: 0.2 µs each instead of protobuf's 0.9, and one write.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

from google.protobuf.message import DecodeError

from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.errors import BadCommandError
from cepheid_wire.varint import varint, varints_of_block

_parse = pb.BaseCommand.FromString
_new_tuple = tuple.__new__

# Four varints of at most 10 bytes, their tags, and the message id's tag and size: every length takes one byte, so that all
# prefixes fit in tables.
_MAX_MESSAGE_ID_BYTES = 22
_MAX_BODY_BYTES = 11 + 11 + 2 + _MAX_MESSAGE_ID_BYTES + 11
_MESSAGE_ID_PREFIXES = tuple(bytes((0x1A, size)) for size in range(_MAX_MESSAGE_ID_BYTES + 1))
_FRAME_PREFIXES = tuple(
    Struct(">II").pack(8 + size, 4 + size) + bytes((0x08, 7, 0x3A, size)) for size in range(_MAX_BODY_BYTES + 1)
)


class SendCommand(NamedTuple):
    """CommandSend. None means absent, which differs from 0: a field that was not sent is not echoed."""

    producer_id: int
    sequence_id: int
    num_messages: int | None
    highest_sequence_id: int | None
    is_chunk: bool
    txnid_least_bits: int | None
    txnid_most_bits: int | None
    is_marker: bool


_NO_OTHER_FIELDS = (None, None, False, None, None, False)  # the other fields of a SEND that has only the required ones


class Receipt(NamedTuple):
    """One SEND_RECEIPT. Ledger and entry are -1 for a duplicate that was not stored again (protocol.md §10.3)."""

    producer_id: int
    sequence_id: int  # as in the SEND
    ledger_id: int
    entry_id: int
    highest_sequence_id: int | None = None  # as in the SEND


def parse_send(command: bytes) -> SendCommand:
    """Return the SEND in a frame of that type. Raises BadCommandError."""
    try:
        send = _parse(command).send
    except DecodeError as error:
        raise BadCommandError(f"{len(command)} bytes are not a valid SEND: {error}", command_bytes=len(command)) from None
    present = send.HasField
    if not (present("producer_id") and present("sequence_id")):
        raise BadCommandError("SEND without producer_id or sequence_id", command_bytes=len(command))
    fields = (
        send.producer_id,
        send.sequence_id,
        send.num_messages if present("num_messages") else None,
        send.highest_sequence_id if present("highest_sequence_id") else None,
        send.is_chunk,
        send.txnid_least_bits if present("txnid_least_bits") else None,
        send.txnid_most_bits if present("txnid_most_bits") else None,
        send.marker,
    )
    return _new_tuple(SendCommand, fields)


class SendReader:
    """Parses the SENDs of one connection. One that continues the numbering of the previous SEND is recognized without parsing.

    Clients number the messages of a producer without gaps, so the bytes of the next SEND of a producer that does not batch are
    known. Comparing takes 0.2 µs, including the tuple; parsing takes 0.8.
    """

    __slots__ = ("_after", "_before", "_last_producer_id", "_next_sequence_id", "_starts")

    def __init__(self) -> None:
        self._last_producer_id = -1
        self._next_sequence_id = 0
        self._before = b""  # the expected SEND up to its sequence id,
        self._starts: tuple[bytes, ...] = ()  # the first byte of the id by its low 7 bits,
        self._after: bytes | None = None  # and the rest; None: no SEND is expected

    def read(self, command: bytes) -> SendCommand:
        """Like `parse_send`. Raises BadCommandError."""
        sequence_id = self._next_sequence_id
        if self._after is None or command != self._before + self._starts[sequence_id & 127] + self._after:
            send = parse_send(command)
            self._expect(send, command)
            return send
        self._next_sequence_id = sequence_id + 1
        if not self._next_sequence_id & 127:
            self._after = None  # the bytes after the first one change
        return _new_tuple(SendCommand, (self._last_producer_id, sequence_id, *_NO_OTHER_FIELDS))

    def _expect(self, send: SendCommand, command: bytes) -> None:
        """Expect the next number if this is the second SEND of its producer in a row and has only the required fields."""
        producer_id, self._last_producer_id, self._after = self._last_producer_id, send.producer_id, None
        if producer_id != send.producer_id or send.num_messages is not None:
            return  # a batch, or alternating producers: supporting more would cost more than it saves
        sequence_id = self._next_sequence_id = send.sequence_id + 1
        self._starts, after = varints_of_block(sequence_id >> 7)
        before = b"\x08" + varint(producer_id) + b"\x10"
        self._before = bytes((0x08, 6, 0x32, len(before) + 1 + len(after))) + before
        if command == self._before + self._starts[send.sequence_id & 127] + after:
            self._after = after


def encode_send_receipt(
    producer_id: int, sequence_id: int, ledger_id: int, entry_id: int, highest_sequence_id: int | None = None
) -> bytes:
    """Return the frame of one SEND_RECEIPT."""
    return encode_send_receipts(((producer_id, sequence_id, ledger_id, entry_id, highest_sequence_id),))


def encode_send_receipts(receipts: Iterable[tuple[int, int, int, int, int | None]]) -> bytes:
    """Return the frames of many receipts (`Receipt`, or plain tuples in its order), in one buffer."""
    parts: list[bytes] = []
    template: tuple[int, int, int, int] | None = None  # receipts that share one differ in one byte of each id
    producer = between = entry_rest = b""
    body_bytes = 0
    for producer_id, sequence_id, ledger_id, entry_id, highest_sequence_id in receipts:
        wanted = (producer_id, sequence_id >> 7, ledger_id, entry_id >> 7)
        if wanted != template:
            template = wanted
            sequence_starts, sequence_rest = varints_of_block(sequence_id >> 7)
            entry_starts, entry_rest = varints_of_block(entry_id >> 7)
            producer = b"\x08" + varint(producer_id) + b"\x10"
            ledger = b"\x08" + varint(ledger_id) + b"\x10"
            between = sequence_rest + _MESSAGE_ID_PREFIXES[len(ledger) + 1 + len(entry_rest)] + ledger
            body_bytes = len(producer) + 1 + len(between) + 1 + len(entry_rest)
        highest = b"" if highest_sequence_id is None else b"\x20" + varint(highest_sequence_id)
        start = _FRAME_PREFIXES[body_bytes + len(highest)]
        parts += (start, producer, sequence_starts[sequence_id & 127], between, entry_starts[entry_id & 127], entry_rest, highest)
    return b"".join(parts)
