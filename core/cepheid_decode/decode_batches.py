"""Parses the messages of many batches at once, and verifies where `decode_framing` guessed that they begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cepheid_decode.decode_fields import PADDING_BYTES, Bools, Bytes, FieldTable, Ints, big_endian_32
from cepheid_decode.decode_framing import MIN_MESSAGE_BYTES, SIZE_BYTES, guess_starts, plain_batch
from cepheid_decode.decode_payloads import joined
from cepheid_decode.decode_records import SINGLE_MESSAGE_METADATA, Properties, parse_in_lockstep

PAYLOAD_SIZE = 3


@dataclass(slots=True)
class BatchMessages:
    """All messages of all valid batches, in order. `refused`: why, for the invalid ones."""

    data: Bytes  # spans and payloads refer to it: the given bytes, perhaps followed by batches in plain form
    batch: Ints
    index: Ints
    fields: FieldTable
    properties: Properties
    payload_starts: Ints
    payload_ends: Ints
    refused: dict[int, str]


def parse_batches(data: Bytes, starts: Ints, ends: Ints, counts: Ints) -> BatchMessages:
    """Batch i is at `data[starts[i]:ends[i]]`, not compressed, and claims to have `counts[i]` ≥ 1 messages. Batches do not overlap;
    `data` must end with `PADDING_BYTES` of padding."""
    refused: dict[int, str] = {}
    lying = counts * MIN_MESSAGE_BYTES > ends - starts  # before allocating memory for the claimed count
    if lying.any():
        counts = counts.copy()
        for batch in np.flatnonzero(lying).tolist():
            refused[batch] = f"a batch of {counts[batch]} messages in {ends[batch] - starts[batch]} bytes"
        counts[lying] = 0
    ordered = bool((starts[1:] >= ends[:-1]).all())
    places = guess_starts(data, starts, ends, counts) if ordered else _guess_unordered(data, starts, ends, counts)
    messages, wrong = _parse_at(data, starts, ends, counts, places)
    if wrong.any():
        data, starts, ends, counts, places = _judge(data, starts, ends, counts, places, wrong, refused)
        messages, wrong = _parse_at(data, starts, ends, counts, places)
        assert not wrong.any(), f"batches {np.flatnonzero(wrong)} in plain form are not understood"
    messages.refused = refused
    return messages


def _guess_unordered(data: Bytes, starts: Ints, ends: Ints, counts: Ints) -> Ints:
    order = np.argsort(starts, kind="stable")
    places = guess_starts(data, starts[order], ends[order], counts[order])
    offsets = np.cumsum(counts) - counts
    sorted_counts = counts[order]
    within = np.arange(len(places)) - np.repeat(np.cumsum(sorted_counts) - sorted_counts, sorted_counts)
    result = np.empty_like(places)
    result[np.repeat(offsets[order], sorted_counts) + within] = places
    return result


def _parse_at(data: Bytes, starts: Ints, ends: Ints, counts: Ints, places: Ints) -> tuple[BatchMessages, Bools]:
    """Return the messages at `places`, and the batches for which the places are wrong."""
    batch = np.repeat(np.arange(len(counts)), counts)
    limit = ends[batch]
    known = (places >= 0) & (places + SIZE_BYTES <= limit)
    where = places if known.all() else np.where(known, places, 0)
    begins = where + SIZE_BYTES
    body = begins + big_endian_32(data, where)
    known &= body <= limit
    if not known.all():
        begins, body = np.where(known, begins, 0), np.where(known, body, 0)
    fields, properties = parse_in_lockstep(data, begins, body, SINGLE_MESSAGE_METADATA)
    sizes = fields.number(PAYLOAD_SIZE)
    following = body + sizes
    last = np.cumsum(counts) - 1
    expected = np.empty_like(places)
    expected[:-1] = places[1:]
    has_some = counts > 0
    expected[last[has_some]] = ends[has_some]
    stands = known & ~fields.odd & (sizes >= 0) & (following == expected)
    wrong = np.zeros(len(counts), bool)
    wrong[has_some] = places[(last + 1 - counts)[has_some]] != starts[has_some]
    if not stands.all():
        wrong[batch[~stands]] = True
    index = np.arange(len(batch)) - np.repeat(last + 1 - counts, counts)
    return BatchMessages(data, batch, index, fields, properties, body, following, {}), wrong


def _judge(
    data: Bytes, starts: Ints, ends: Ints, counts: Ints, places: Ints, wrong: Bools, refused: dict[int, str]
) -> tuple[Bytes, Ints, Ints, Ints, Ints]:
    """Return the same batches; those that were wrong are in plain form after the others, or are rejected and have no messages."""
    starts, ends, kept_counts = starts.copy(), ends.copy(), counts.copy()
    offsets = np.cumsum(counts) - counts
    parts: list[bytes] = []
    size = len(data) - PADDING_BYTES
    keep = np.ones(len(places), bool)
    places = places.copy()
    for batch in np.flatnonzero(wrong).tolist():
        count, offset = int(counts[batch]), int(offsets[batch])
        plain = plain_batch(data[starts[batch] : ends[batch]].tobytes(), count, SINGLE_MESSAGE_METADATA)
        if isinstance(plain, str):
            refused[batch], kept_counts[batch] = plain, 0
            keep[offset : offset + count] = False
            continue
        form, message_starts = plain
        places[offset : offset + count] = np.asarray(message_starts) + size
        starts[batch], ends[batch] = size, size + len(form)
        parts.append(form)
        size += len(form)
    if parts:
        data = joined((data[:-PADDING_BYTES], *parts))
    return data, starts, ends, kept_counts, places[keep]
