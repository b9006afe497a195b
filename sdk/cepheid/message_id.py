"""The id of a message: its place in the topic."""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from cepheid.errors import UsageError
from cepheid_wire import MAX_MESSAGE_ID, signed64
from cepheid_wire import pulsar_api_pb2 as pb


class MessageId(NamedTuple):
    """Ledger, entry, and index in the batch (-1: not in a batch). Ids of one partition compare in the order of the topic."""

    ledger_id: int
    entry_id: int
    batch_index: int = -1
    partition: int = -1
    batch_size: int = 0

    def __str__(self) -> str:
        inside = f":{self.batch_index}" if self.batch_index >= 0 else ""
        where = f" of partition {self.partition}" if self.partition >= 0 else ""
        return f"{self.ledger_id}:{self.entry_id}{inside}{where}"

    def to_bytes(self) -> bytes:
        """Return the id in the serialization of the official clients."""
        return as_protobuf(self).SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes) -> MessageId:
        """Return the id from the result of `to_bytes`, or of `serialize` of an official client. Raises UsageError."""
        try:
            parsed = pb.MessageIdData.FromString(data)
        except DecodeError:
            parsed = pb.MessageIdData()
        if not parsed.IsInitialized():
            raise UsageError(f"{data!r} is not a serialized message id")
        return cls(signed64(parsed.ledgerId), signed64(parsed.entryId), parsed.batch_index, parsed.partition, parsed.batch_size)


EARLIEST = MessageId(-1, -1)
"""The place before the first message that the topic still has."""
LATEST = MessageId(MAX_MESSAGE_ID, MAX_MESSAGE_ID)
"""The place after the last message that the topic has when the broker is asked."""


def as_protobuf(message_id: MessageId) -> pb.MessageIdData:
    mask = (1 << 64) - 1  # the protocol stores -1 in unsigned fields
    data = pb.MessageIdData(ledgerId=message_id.ledger_id & mask, entryId=message_id.entry_id & mask)
    if message_id.partition >= 0:
        data.partition = message_id.partition
    if message_id.batch_index >= 0:
        data.batch_index = message_id.batch_index
        data.batch_size = message_id.batch_size
    return data
