"""Encodes entries as MESSAGE frames: a header before each, the stored bytes unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cepheid_broker.dispatch.effects import Send
from cepheid_broker.peer import Buffer
from cepheid_metadata import Position
from cepheid_rpc import HEADER_BYTES
from cepheid_wire import SharedMessage, encode_message_header

_WORD = (1 << 64) - 1

SMALL_BYTES = 4096
"""An entry up to this size is copied after its header: one buffer less saves more than the copy costs."""

FEW_ENTRIES = 4
"""A group up to this size is likely to be sent whole to many subscriptions that keep up."""

UnackedWords = Callable[[Position], Sequence[int] | None]


def encode_send(
    consumer_id: int, send: Send, unacked_words: UnackedWords, *, partition: int, epoch: int | None = None
) -> tuple[list[Buffer], int, int]:
    """Return buffers for one `writelines`, the number of entries in them, and their payload size in bytes.

    `partition` is the topic's index, -1 when it is not a partition; clients copy it into the message id (protocol.md §14).
    `epoch`: set if the consumer gave one; its client drops messages with a smaller one (protocol.md §14)."""
    counted, counts = send.counted, send.redelivery_counts
    group = counted.group
    ledger_id, base, ends = group.ledger_id, group.first_entry_id, group.ends
    view = memoryview(group.data)
    # No redelivery counts, no partly acknowledged batch.
    plain = not counts and counted.counts is None and epoch is None
    if (
        plain
        and len(ends) <= FEW_ENTRIES
        and len(view) <= FEW_ENTRIES * SMALL_BYTES
        and send.runs == [(counted.first, counted.last)]
    ):
        if counted.shared is None:
            counted.shared = [SharedMessage(ledger_id, base + i, bytes(tail), partition) for i, tail in enumerate(group.payloads())]
        return [shared.frame(consumer_id) for shared in counted.shared], len(ends), len(view) - HEADER_BYTES * len(ends)
    buffers: list[Buffer] = []
    entries = size_bytes = 0
    for first, last in send.runs:
        start = ends[first - base - 1] if first > base else 0
        entries += last - first + 1
        for entry_id in range(first, last + 1):
            end = ends[entry_id - base]
            start += HEADER_BYTES
            if plain:
                header = encode_message_header(consumer_id, ledger_id, entry_id, end - start, partition=partition)
            else:
                header = encode_message_header(
                    consumer_id,
                    ledger_id,
                    entry_id,
                    end - start,
                    partition=partition,
                    redelivery_count=counts.get(entry_id, 0),
                    consumer_epoch=epoch,
                    ack_set=[word & _WORD for word in unacked_words(Position(ledger_id, entry_id)) or ()],
                )
            if end - start <= SMALL_BYTES:
                buffers.append(header + view[start:end])
            else:
                buffers += (header, view[start:end])
            size_bytes += end - start
            start = end
    return buffers, entries, size_bytes
