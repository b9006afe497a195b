"""Encodes MESSAGE: a header encoded by hand, followed by the stored bytes, which are sent unchanged.

writelines([encode_message_header(...), tail, encode_message_header(...), tail, ...])
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

from cepheid_wire.varint import varint

_sizes = Struct(">II").pack
_MAX_VARINT_BYTES = 10
_CONSUMER_ID_AT = 13  # after two sizes, the command's type, tag and size (one byte: it is short) of its body, and the id's tag


def encode_message_header(
    consumer_id: int,
    ledger_id: int,
    entry_id: int,
    tail_bytes: int,
    *,
    partition: int = -1,
    redelivery_count: int = 0,
    ack_set: Sequence[int] = (),
    consumer_epoch: int | None = None,
) -> bytes:
    """Return a MESSAGE frame up to its tail of `tail_bytes`, which begins with 0x0e01 and is sent unchanged.

    `ack_set`: 64-bit words, a bit is 1 for a message of the batch that is *not* yet acknowledged; empty: none is acknowledged.
    Fields that equal the default (partition -1, no redelivery) are omitted. `consumer_epoch` only for subscribers that sent one.
    Source: protocol.md §14.
    """
    entry = varint(entry_id)
    if not redelivery_count and not ack_set and consumer_epoch is None:
        command_bytes, before, after = _around_entry(consumer_id, ledger_id, partition)[len(entry)]
        return _sizes(4 + command_bytes + tail_bytes, command_bytes) + before + entry + after
    message_id = b"\x08" + varint(ledger_id) + b"\x10" + entry
    if partition >= 0:
        message_id += b"\x18" + varint(partition)
    body = b"\x08" + varint(consumer_id) + b"\x12" + varint(len(message_id)) + message_id
    if redelivery_count:
        body += b"\x18" + varint(redelivery_count)
    if ack_set:
        body += b"".join([b"\x20" + varint(word) for word in ack_set])
    if consumer_epoch is not None:
        body += b"\x28" + varint(consumer_epoch)
    command = b"\x08\x09\x4a" + varint(len(body)) + body
    return _sizes(4 + len(command) + tail_bytes, len(command)) + command


class SharedMessage:
    """An entry as MESSAGE for any consumer: everything but the consumer's id is encoded once. For non-persistent topics and others
    that send an entry to many consumers."""

    __slots__ = ("_entry_id", "_ledger_id", "_partition", "_parts", "_tail")

    def __init__(self, ledger_id: int, entry_id: int, tail: bytes, partition: int = -1) -> None:
        self._ledger_id = ledger_id
        self._entry_id = entry_id
        self._partition = partition
        self._tail = tail
        self._parts: dict[int, tuple[bytes, bytes]] = {}  # before and after the consumer's id, by the size of that id

    def frame(self, consumer_id: int) -> bytes:
        """Return the whole frame."""
        consumer = varint(consumer_id)
        parts = self._parts.get(len(consumer))
        if parts is None:
            header = encode_message_header(consumer_id, self._ledger_id, self._entry_id, len(self._tail), partition=self._partition)
            parts = header[:_CONSUMER_ID_AT], header[_CONSUMER_ID_AT + len(consumer) :] + self._tail
            self._parts[len(consumer)] = parts
        return parts[0] + consumer + parts[1]


@lru_cache(maxsize=4096)
def _around_entry(consumer_id: int, ledger_id: int, partition: int) -> tuple[tuple[int, bytes, bytes], ...]:
    """Return a command without optional fields (its size, the bytes before and after the entry id), by the size of that id: only
    the entry id differs between the entries of a ledger."""
    consumer, ledger = varint(consumer_id), varint(ledger_id)
    after = b"\x18" + varint(partition) if partition >= 0 else b""
    around = []
    for entry_bytes in range(_MAX_VARINT_BYTES + 1):
        message_id_bytes = 2 + len(ledger) + entry_bytes + len(after)
        body_bytes = 3 + len(consumer) + message_id_bytes
        before = b"\x08\x09\x4a%c\x08%b\x12%c\x08%b\x10" % (body_bytes, consumer, message_id_bytes, ledger)
        around.append((4 + body_bytes, before, after))
    return tuple(around)
