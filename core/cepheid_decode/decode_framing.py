"""Finds where the messages of batches begin.

    │size│SingleMessageMetadata│payload│size│SingleMessageMetadata│payload│ …        the chain is serial: `payload_size` in the
     ▲                                  ▲                                          metadata tells where the next message begins

    seek    sizes below 256 begin with three zero bytes: find all such places at once                        2 ms per 16 MB
            for the remaining batches, sizes below 1024: two zero bytes, and one below 4                    3 ms per 16 MB
    lanes   all batches advance in lockstep, one numpy step per message                                      0.1 µs a message
    hop     a loop over the messages of one batch                                                            0.3 µs a message

Rule 1: all of these guess. The guessed messages are parsed all at once. A guess is correct only if the first message begins where
its batch does, each ends where the next begins, and the last ends where the batch does: then it is the only possible chain.
Rule 2: a batch whose guess is wrong is parsed by the protobuf library, message by message, which returns it in plain form or tells
what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import numpy as np

from cepheid_decode.decode_fields import Bytes, Ints, big_endian_32, read_varints
from cepheid_decode.decode_records import RecordKind, plain_form
from cepheid_wire import pulsar_api_pb2 as pb

SIZE_BYTES = 4
MIN_MESSAGE_BYTES = 6  # size, and payload_size, which is required
_SEEK_BLOCK_BYTES = 1 << 18  # fits in the processor's cache
_FIRST_TAGS = np.zeros(256, bool)
_FIRST_TAGS[[0x0A, 0x12, 0x18]] = True  # properties, partition_key, payload_size: what encoders write first, in order of the fields
_PROPERTIES, _KEY, _PAYLOAD_SIZE = 0x0A, 0x12, 0x18
_MAX_SKIPPED = 64  # properties before a guess is given up: a step costs the same if only one message still takes part
_LANES_MIN = 64
_SEEK_MAX_MESSAGE_BYTES = 4096  # for longer ones, too many bytes are searched for each message
_SEEK_SIZES = 256  # of metadata: those that begin with three zero bytes
_SEEK_LONG_SIZES = 1024  # of metadata with long properties: more wrong places are found, and it takes longer
_size_at = Struct(">I").unpack_from


def guess_starts(data: Bytes, starts: Ints, ends: Ints, counts: Ints) -> Ints:
    """Return where each message may begin: `counts[i]` places for batch i, in order, -1 if unknown.

    `data[starts[i]:ends[i]]` are the batches, which do not overlap and are in order.
    """
    offsets = np.concatenate(([0], np.cumsum(counts)))
    total = int(offsets[-1])
    places = np.full(total, -1, np.int64)
    some = counts > 0
    places[offsets[:-1][some]] = starts[some]
    open_batches = np.flatnonzero(counts > 1)
    if not len(open_batches):
        return places
    message_bytes = int((ends - starts)[open_batches].sum()) // total
    if message_bytes <= _SEEK_MAX_MESSAGE_BYTES:
        for sizes, find in ((_SEEK_SIZES, _likely_starts), (_SEEK_LONG_SIZES, _likely_long_starts)):
            if (big_endian_32(data, starts[open_batches]) < sizes).any():
                open_batches = _seek(data, starts, ends, counts, offsets, places, open_batches, find)
    if len(open_batches) and _are_lanes(counts[open_batches]):
        open_batches = _lanes(data, starts, ends, counts, offsets, places, open_batches)
    if len(open_batches):
        view = data.data
        for batch in open_batches.tolist():
            start = int(offsets[batch])
            found = hop(view, int(starts[batch]), int(ends[batch]), int(counts[batch]))
            places[start : start + len(found)] = found
    return places


def _are_lanes(counts: Ints) -> bool:
    """Whether it is faster to advance all these batches in lockstep, up to the end of the longest, than one by one."""
    return len(counts) >= _LANES_MIN and int(counts.max()) <= 8 * len(counts)


def _seek(
    data: Bytes,
    starts: Ints,
    ends: Ints,
    counts: Ints,
    offsets: Ints,
    places: Ints,
    batches: Ints,
    find: Callable[[Bytes, int, int], Ints],
) -> Ints:
    """Search all likely places at once. A batch with exactly as many places as messages is done; in one with more places, each
    gives the next place, and only the chain from the batch's beginning is followed. Returns the batches that were not found."""
    found = find(data, int(starts[batches[0]]), int(ends[batches[-1]]))
    batch = np.searchsorted(starts, found, side="right") - 1
    inside = found < ends[batch]
    found, batch = found[inside], batch[inside]
    agree = np.bincount(batch, minlength=len(starts)) == counts
    agree &= counts > 1
    chosen = agree[batch]
    if agree.all():
        places[:] = found
    else:
        places[np.repeat(agree, counts)] = found[chosen]
    left: Ints = batches[~agree[batches]]
    more = np.bincount(batch, minlength=len(starts))[left] > counts[left]
    if not more.any():
        return left
    is_walked = np.zeros(len(starts), bool)
    is_walked[left[more]] = True
    among = is_walked[batch]
    lost = _walk(data, starts, ends, counts, offsets, places, left[more], found[among], batch[among])
    return np.sort(np.concatenate((left[~more], lost)))


def _walk(
    data: Bytes, starts: Ints, ends: Ints, counts: Ints, offsets: Ints, places: Ints, batches: Ints, found: Ints, batch: Ints
) -> Ints:
    following = _next_message(data, found, ends[batch])
    link = np.minimum(np.searchsorted(found, following), len(found) - 1)
    links = [*np.where(found[link] == following, link, -1).tolist(), -1]  # so that -1 leads to itself
    lost: list[int] = []
    for walked, at in zip(batches.tolist(), np.searchsorted(found, starts[batches]).tolist(), strict=True):
        chain = [at]
        for _ in range(int(counts[walked]) - 1):
            at = links[at]
            chain.append(at)
        if at >= 0:
            places[offsets[walked] : offsets[walked] + len(chain)] = found[chain]
        else:
            lost.append(walked)
    return np.array(lost, np.int64)


def _likely_starts(data: Bytes, start: int, end: int) -> Ints:
    """Return all positions of a possible size below `_SEEK_SIZES`, followed by a tag that metadata can begin with.

    Two of its three zero bytes are a pair at an even position, and pairs are compared as 16-bit numbers. No size is 0: if four
    bytes are zero, a size begins at the pair, not before it."""
    found = []
    end -= SIZE_BYTES
    for block in range(start & ~1, end, _SEEK_BLOCK_BYTES):
        pairs = data[block : min(block + _SEEK_BLOCK_BYTES, end + 2) & ~1].view("<u2")
        even = np.flatnonzero(pairs == 0) * 2 + block
        begins = data[even + 2] == 0
        places = even - 1 + begins
        places = places[(begins | (data[even - 1] == 0)) & _FIRST_TAGS[data[places + SIZE_BYTES]]]
        found.append(places[np.searchsorted(places, start) :])
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _likely_long_starts(data: Bytes, start: int, end: int) -> Ints:
    """The same for `_SEEK_LONG_SIZES`: its two zero bytes are such a pair, or the second of them and the byte after it are one."""
    found = []
    end -= SIZE_BYTES
    for block in range(start & ~1, end, _SEEK_BLOCK_BYTES):
        pairs = data[block : min(block + _SEEK_BLOCK_BYTES, end + 2) & ~1].view("<u2")
        even = np.flatnonzero(pairs & 0xFCFF == 0) * 2 + block
        begins = even[(data[even + 1] == 0) & (data[even + 2] < 4)]
        before = even[data[even - 1] == 0] - 1
        places = np.sort(np.concatenate((begins, before)))
        places = places[_FIRST_TAGS[data[places + SIZE_BYTES]]]
        found.append(places[np.searchsorted(places, start) :])
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _lanes(data: Bytes, starts: Ints, ends: Ints, counts: Ints, offsets: Ints, places: Ints, batches: Ints) -> Ints:
    """Advance all batches in lockstep; return those in which a next message could not be found."""
    lost: list[Ints] = []
    lane, at = batches, starts[batches]
    for index in range(int(counts[batches].max())):
        going = counts[lane] > index
        if not going.all():
            lane, at = lane[going], at[going]
        places[offsets[lane] + index] = at
        at = _next_message(data, at, ends[lane])
        strayed = (at < 0) & (counts[lane] > index + 1)
        if strayed.any():
            lost.append(lane[strayed])
            lane, at = lane[~strayed], at[~strayed]
        if not len(lane):
            break
    return np.concatenate(lost) if lost else np.zeros(0, np.int64)


def _next_message(data: Bytes, at: Ints, end: Ints) -> Ints:
    """Return where the message after the one at `at` begins; -1 if it is unknown. `at` may not be a message at all."""
    tag_at = at + SIZE_BYTES
    body_at = tag_at + big_endian_32(data, at)
    limit = np.minimum(body_at, end)
    for _ in range(_MAX_SKIPPED):
        tag = data[tag_at]
        skip = np.flatnonzero(((tag == _KEY) | (tag == _PROPERTIES)) & (tag_at < limit))
        if not len(skip):
            break
        length, behind = read_varints(data, tag_at[skip] + 1)
        tag_at[skip] = np.minimum(behind + np.clip(length, 0, 1 << 31), limit[skip])
    payload, _ = read_varints(data, tag_at + 1)
    following = body_at + np.clip(payload, 0, 1 << 31)
    plain = (data[tag_at] == _PAYLOAD_SIZE) & (tag_at < limit) & (payload >= 0) & (following < end)
    return np.where(plain, following, -1)


def hop(data: memoryview, start: int, end: int, count: int) -> list[int]:
    """Return where the messages of one batch begin, up to the first that cannot be found."""
    places: list[int] = []
    at = start
    last = end - MIN_MESSAGE_BYTES
    for _ in range(count):
        if at > last:
            break
        places.append(at)
        tag_at = at + SIZE_BYTES
        body_at = tag_at + _size_at(data, at)[0]
        if body_at > end:
            break
        tag = data[tag_at]
        while tag in (_KEY, _PROPERTIES) and tag_at < body_at:
            length = data[tag_at + 1]
            if length < 0x80:
                tag_at += 2 + length
            else:
                length, tag_at = _varint(data, tag_at + 1)
                tag_at += length
            if tag_at >= body_at:
                break
            tag = data[tag_at]
        if tag != _PAYLOAD_SIZE or tag_at >= body_at:
            break
        payload = data[tag_at + 1]
        if payload >= 0x80:
            payload, _ = _varint(data, tag_at + 1)
        at = body_at + payload
    return places


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            break
        shift += 7
    return value, at


def plain_batch(payload: bytes, count: int, kind: RecordKind) -> tuple[bytes, list[int]] | str:
    """Return a batch with its metadata in plain form and where its messages begin, or what is wrong with it."""
    parts: list[bytes] = []
    starts: list[int] = []
    at = size = 0
    for index in range(count):
        if len(payload) - at < SIZE_BYTES:
            return f"a batch of {count} ends before message {index}"
        metadata_start = at + SIZE_BYTES
        body_start = metadata_start + _size_at(payload, at)[0]
        if body_start > len(payload):
            return f"metadata of message {index} of {count} reaches beyond the batch"
        form = plain_form(payload[metadata_start:body_start], kind.message)
        if isinstance(form, str):
            return f"message {index} of {count}: {form}"
        payload_size = pb.SingleMessageMetadata.FromString(form).payload_size
        at = body_start + payload_size
        if payload_size < 0 or at > len(payload):
            return f"message {index} of {count} claims {payload_size} bytes, {len(payload) - body_start} are left"
        starts.append(size)
        parts += (len(form).to_bytes(SIZE_BYTES, "big"), form, payload[body_start:at])
        size += SIZE_BYTES + len(form) + payload_size
    if at != len(payload):
        return f"{len(payload) - at} bytes after a batch of {count}"
    return b"".join(parts), starts
