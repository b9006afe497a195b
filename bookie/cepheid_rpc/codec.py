"""The encoding of the messages between ledger client and bookie: the content of gRPC messages, without gRPC.

    AddMessage    │1│1│requests n│ n × ( flags │ master key │ group )│
    AddAnswers    │1│2│answers n │ n × ( ledger │ first │ last │ status )│

Every message starts with two bytes: format version and kind. All integers are little-endian; -1 means "none" if
a field is signed (`q`). The tables are at the encoders. Groups are laid end to end as `encode_group_to` writes them.

Rule 1: bytes of a peer raise MalformedGroupError or decode to a value that can be encoded again; nothing else is ever raised.
Rule 2: a newer format is refused explicitly (NewerFormatError): guessing its meaning could lose data.
Rule 3: digests are not checked here: `EntryGroup.verify` does that, once, at the edge.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any

from cepheid_rpc.bookie_connection import (
    MASTER_KEY_BYTES,
    SCAN_CHUNK_BYTES,
    AddAnswer,
    AddRequest,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MissingEntries,
    ReadAnswer,
    ReadRequest,
)
from cepheid_rpc.entry_group import NO_ENTRY_ID, Buffer, EntryGroup, MalformedGroupError, decode_group, encode_group_to
from cepheid_rpc.status import Status

FORMAT_VERSION = 1


class MessageKind(IntEnum):
    """Second byte of every message: a message for another method is refused, not misread."""

    ADD = 1
    ADD_ANSWERS = 2
    LAC_REQUEST = 3
    LAC_ANSWER = 4
    READ_REQUEST = 5
    READ_ANSWER = 6
    EXPLICIT_LAC = 7
    STATUS = 8
    RECOVERY_REQUESTS = 9
    RECOVERY_ANSWERS = 10


class NewerFormatError(MalformedGroupError):
    """The peer writes a format that this process does not know."""

    hint = "upgrade this process before its peers"


_WAITING_FORMAT = 2
"""Format of a LAC request that waits. All others are written in format 1, so that a bookie of an older release refuses only long
polls, and its readers ask without waiting."""

_TICKET_FORMAT = 3
"""Format of a LAC request with a read ticket. Only the plan service of a secured cluster issues those, and its bookies know it."""

_DELAYING_FORMAT = 2
"""Format of a read answer with `retry_after_ms`. Sent only to scans, and every client that can scan can decode it."""

_NEWEST_FORMAT = {MessageKind.LAC_REQUEST: _TICKET_FORMAT, MessageKind.READ_ANSWER: _DELAYING_FORMAT}

_FLAG = 1  # bit 0 of a flags byte: `recovery` of an add, `fence` of a read, `has highest entry` of a LAC answer

_BACKGROUND = 2  # bit 1 of an add request's flags, which older bookies ignore

_SCAN = 2  # bit 1 of a read request's flags, which older bookies ignore; bits 2 and 3 then: index in SCAN_CHUNK_BYTES
_SCAN_CHUNK_SHIFT, _SCAN_CHUNK_MASK = 2, 3

_FROM_DISK = 16  # bit 4 of a read request's flags, which older bookies ignore

_COUNTED = struct.Struct("<BBI")
_ADD_REQUEST = struct.Struct(f"<B{MASTER_KEY_BYTES}s")
_ADD_ANSWER = struct.Struct("<qqqB")
_LAC_REQUEST = struct.Struct("<BBqBB")
_LAC_WAIT = struct.Struct("<qI")
_LAC_TICKET = struct.Struct("<H")
_LAC_ANSWER = struct.Struct("<BBBBqq")
_READ_REQUEST = struct.Struct("<BBqqqQBBH")
_READ_ANSWER = struct.Struct("<BBIIq")
_RETRY_AFTER = struct.Struct("<I")
_MISSING = struct.Struct("<qqB")
_EXPLICIT_LAC = struct.Struct("<BBqqB")
_STATUS = struct.Struct("<BBB")
_NUMBERED = struct.Struct("<QI")

_ENTRY_IDS_END = (1 << 63) - 1  # limit of a signed field, which must also hold the id after a range

_STATUSES: dict[int, Status] = {int(status): status for status in Status}


def encode_add_message(requests: Sequence[AddRequest]) -> bytes:
    """Encode many groups, of many ledgers, in the order in which they are to be admitted.

    offset  size  field
    0       1     format version
    1       1     kind = 1
    2       4     requests n
    6       …     n × flags (1; bit 0: recovery add, bit 1: background add), master key (16), group
    """
    parts: list[Buffer] = [_COUNTED.pack(FORMAT_VERSION, MessageKind.ADD, len(requests))]
    pack = _ADD_REQUEST.pack
    for request in requests:
        assert len(request.master_key) == MASTER_KEY_BYTES, (
            f"a master key has {MASTER_KEY_BYTES} bytes, not {len(request.master_key)}"
        )
        flags = (_FLAG if request.recovery else 0) | (_BACKGROUND if request.background else 0)
        parts.append(pack(flags, request.master_key))
        encode_group_to(parts, request.group)
    return b"".join(parts)


def decode_add_message(data: Buffer) -> list[AddRequest]:
    """Decode the requests of an add message; their groups are views of `data`."""
    view = memoryview(data)
    (count,) = _unpack_head(_COUNTED, view, MessageKind.ADD)
    offset, requests = _COUNTED.size, []
    for _ in range(count):
        flags, master_key = _unpack(_ADD_REQUEST, view, offset)
        group, offset = decode_group(view, offset + _ADD_REQUEST.size)
        requests.append(AddRequest(group, master_key, bool(flags & _FLAG), bool(flags & _BACKGROUND)))
    _check_end(view, offset)
    return requests


def split_requests(requests: Sequence[AddRequest], max_bytes: int) -> Iterator[Sequence[AddRequest]]:
    """Yield the same entries in the same order in lists of at most `max_bytes` (exceeded by one entry), cutting groups as needed.

    A group may be larger than a message: a transport must not break on it.
    """
    if sum(request.group.size_bytes for request in requests) <= max_bytes:
        if requests:
            yield requests
        return
    part: list[AddRequest] = []
    room = max_bytes
    for request in requests:
        for group in _cut(request.group, max_bytes):
            if part and group.size_bytes > room:
                yield part
                part, room = [], max_bytes
            part.append(AddRequest(group, request.master_key, request.recovery, request.background))
            room -= group.size_bytes
    yield part


def _cut(group: EntryGroup, max_bytes: int) -> Iterator[EntryGroup]:
    if group.size_bytes <= max_bytes:
        yield group
        return
    start, first = 0, group.first_entry_id
    for index, end in enumerate(group.ends):
        entry_id = group.first_entry_id + index
        if end - start > max_bytes and entry_id > first:
            yield group.slice(first, entry_id - 1)
            start, first = group.ends[index - 1], entry_id
    yield group.slice(first, group.last_entry_id)


def encode_add_answers(answers: Iterable[AddAnswer]) -> bytes:
    """Encode the outcomes of ranges, in the order in which they became known.

    offset  size  field
    0       1     format version
    1       1     kind = 2
    2       4     answers n
    6       25×n  ledger id (8), first entry id (8), last entry id (8), status (1)
    """
    pack = _ADD_ANSWER.pack
    packed = [pack(answer.ledger_id, answer.first_entry_id, answer.last_entry_id, answer.status) for answer in answers]
    return _COUNTED.pack(FORMAT_VERSION, MessageKind.ADD_ANSWERS, len(packed)) + b"".join(packed)


def decode_add_answers(data: Buffer) -> list[AddAnswer]:
    view = memoryview(data)
    (count,) = _unpack_head(_COUNTED, view, MessageKind.ADD_ANSWERS)
    _check_end(view, _COUNTED.size + count * _ADD_ANSWER.size)
    answers = []
    for ledger_id, first, last, status in _ADD_ANSWER.iter_unpack(view[_COUNTED.size :]):
        _check_range(ledger_id, first, last)
        answers.append(AddAnswer(ledger_id, first, last, _status(status)))
    return answers


def encode_lac_request(request: LacRequest) -> bytes:
    """Encode: version (1), kind = 3 (1), ledger id (8), flags (1; bit 0: fence), key bytes k (1), master key (k).

    In formats 2 and 3 these follow: above (8, signed), wait in milliseconds (4). In format 3: ticket bytes t (2), ticket (t).
    """
    version = _TICKET_FORMAT if request.ticket else _WAITING_FORMAT if request.wait_ms > 0 else FORMAT_VERSION
    flags = _FLAG if request.fence else 0
    head = _LAC_REQUEST.pack(version, MessageKind.LAC_REQUEST, request.ledger_id, flags, len(request.master_key))
    wait = _LAC_WAIT.pack(request.above, request.wait_ms) if version != FORMAT_VERSION else b""
    ticket = _LAC_TICKET.pack(len(request.ticket)) + request.ticket if version == _TICKET_FORMAT else b""
    return head + request.master_key + wait + ticket


def decode_lac_request(data: Buffer) -> LacRequest:
    view = memoryview(data)
    ledger_id, flags, key_bytes = _unpack_head(_LAC_REQUEST, view, MessageKind.LAC_REQUEST)
    _check_range(ledger_id, 0, 0)
    key_end = _LAC_REQUEST.size + key_bytes
    above, wait_ms, ticket, end = NO_ENTRY_ID, 0, b"", key_end
    if view[0] != FORMAT_VERSION:
        above, wait_ms = _unpack(_LAC_WAIT, view, key_end)
        end += _LAC_WAIT.size
        if above < NO_ENTRY_ID or (wait_ms == 0 and view[0] == _WAITING_FORMAT):
            raise MalformedGroupError(f"invalid wait for a LAC above {above} within {wait_ms} ms")
    if view[0] == _TICKET_FORMAT:
        (ticket_bytes,) = _unpack(_LAC_TICKET, view, end)
        end += _LAC_TICKET.size
        ticket = bytes(view[end : end + ticket_bytes])
        end += ticket_bytes
        if not ticket:
            raise MalformedGroupError("a LAC request of format 3 without a ticket: that is format 1 or 2")
    _check_end(view, end)
    master_key = bytes(view[_LAC_REQUEST.size : key_end])
    return LacRequest(ledger_id, master_key, bool(flags & _FLAG), above, wait_ms, ticket)


def encode_lac_answer(answer: LacAnswer) -> bytes:
    """Encode: version (1), kind = 4 (1), status (1), flags (1; bit 0: a group of one entry follows), LAC (8), explicit LAC (8),
    [group]."""
    parts: list[Buffer] = [
        _LAC_ANSWER.pack(
            FORMAT_VERSION,
            MessageKind.LAC_ANSWER,
            answer.status,
            _FLAG if answer.highest_entry is not None else 0,
            answer.last_add_confirmed,
            answer.explicit_lac,
        )
    ]
    if answer.highest_entry is not None:
        encode_group_to(parts, answer.highest_entry)
    return b"".join(parts)


def decode_lac_answer(data: Buffer) -> LacAnswer:
    view = memoryview(data)
    status, flags, lac, explicit_lac = _unpack_head(_LAC_ANSWER, view, MessageKind.LAC_ANSWER)
    highest, offset = None, _LAC_ANSWER.size
    if flags & _FLAG:
        highest, offset = decode_group(view, offset)
        if len(highest) != 1:
            raise MalformedGroupError(f"the group of the highest entry has {len(highest)} entries, not one")
    _check_end(view, offset)
    if lac < -1 or explicit_lac < -1:
        raise MalformedGroupError(f"LAC {lac}, explicit LAC {explicit_lac}: below -1, which means none")
    return LacAnswer(_status(status), lac, explicit_lac, highest)


def encode_read_request(request: ReadRequest) -> bytes:
    """Encode: version (1), kind = 5 (1), ledger id (8), first (8), last (8), max bytes (8), flags (1; bit 0: fence; bit 1: scan,
    and then
    bits 2..3: place of its chunks' size in SCAN_CHUNK_BYTES; bit 4: blocks are read from disk), key bytes k (1),
    ticket bytes t (2), master key (k), ticket (t)."""
    flags = _FLAG if request.fence else 0
    if request.scan:
        flags |= _SCAN | SCAN_CHUNK_BYTES.index(request.chunk_bytes) << _SCAN_CHUNK_SHIFT
    if request.from_disk:
        flags |= _FROM_DISK
    head = _READ_REQUEST.pack(
        FORMAT_VERSION,
        MessageKind.READ_REQUEST,
        request.ledger_id,
        request.first_entry_id,
        request.last_entry_id,
        request.max_bytes,
        flags,
        len(request.master_key),
        len(request.ticket),
    )
    return head + request.master_key + request.ticket


def decode_read_request(data: Buffer) -> ReadRequest:
    view = memoryview(data)
    ledger_id, first, last, max_bytes, flags, key_bytes, ticket_bytes = _unpack_head(_READ_REQUEST, view, MessageKind.READ_REQUEST)
    _check_range(ledger_id, first, last)
    key_end = _READ_REQUEST.size + key_bytes
    _check_end(view, key_end + ticket_bytes)
    scan = bool(flags & _SCAN)
    chunk = SCAN_CHUNK_BYTES[flags >> _SCAN_CHUNK_SHIFT & _SCAN_CHUNK_MASK if scan else 0]
    return ReadRequest(
        ledger_id,
        first,
        last,
        max_bytes,
        fence=bool(flags & _FLAG),
        master_key=bytes(view[_READ_REQUEST.size : key_end]),
        ticket=bytes(view[key_end:]),
        scan=scan,
        chunk_bytes=chunk,
        from_disk=bool(flags & _FROM_DISK),
    )


def encode_read_answer(answer: ReadAnswer) -> bytes:
    """Encode one chunk.

    offset  size  field
    0       1     format version
    1       1     kind = 6
    2       4     groups g
    6       4     missing ranges m
    10      8     next entry id
    18      17×m  first entry id (8), last entry id (8), status (1)
    …       …     g groups
    …       4     in format 2: milliseconds after which to try again
    """
    version = _DELAYING_FORMAT if answer.retry_after_ms else FORMAT_VERSION
    parts: list[Buffer] = [
        _READ_ANSWER.pack(version, MessageKind.READ_ANSWER, len(answer.groups), len(answer.missing), answer.next_entry_id)
    ]
    parts += [_MISSING.pack(missing.first_entry_id, missing.last_entry_id, missing.status) for missing in answer.missing]
    for group in answer.groups:
        encode_group_to(parts, group)
    if version == _DELAYING_FORMAT:
        parts.append(_RETRY_AFTER.pack(answer.retry_after_ms))
    return b"".join(parts)


def decode_read_answer(data: Buffer) -> ReadAnswer:
    """Decode a chunk; its groups are views of `data`."""
    view = memoryview(data)
    group_count, missing_count, next_entry_id = _unpack_head(_READ_ANSWER, view, MessageKind.READ_ANSWER)
    missing, offset = [], _READ_ANSWER.size
    for _ in range(missing_count):
        first, last, status = _unpack(_MISSING, view, offset)
        _check_range(0, first, last)
        missing.append(MissingEntries(first, last, _status(status)))
        offset += _MISSING.size
    groups = []
    for _ in range(group_count):
        group, offset = decode_group(view, offset)
        groups.append(group)
    retry_after_ms = 0
    if view[0] == _DELAYING_FORMAT:
        (retry_after_ms,) = _unpack(_RETRY_AFTER, view, offset)
        offset += _RETRY_AFTER.size
        if retry_after_ms == 0:
            raise MalformedGroupError("a read answer of format 2 asks to try again at once: that is format 1")
    _check_end(view, offset)
    if next_entry_id < 0:
        raise MalformedGroupError(f"a read answer continues at entry {next_entry_id}")
    return ReadAnswer(tuple(groups), tuple(missing), next_entry_id, retry_after_ms)


def encode_explicit_lac(request: ExplicitLac) -> bytes:
    """Encode: version (1), kind = 7 (1), ledger id (8), LAC (8), key bytes k (1), master key (k)."""
    head = _EXPLICIT_LAC.pack(
        FORMAT_VERSION, MessageKind.EXPLICIT_LAC, request.ledger_id, request.last_add_confirmed, len(request.master_key)
    )
    return head + request.master_key


def decode_explicit_lac(data: Buffer) -> ExplicitLac:
    view = memoryview(data)
    ledger_id, lac, key_bytes = _unpack_head(_EXPLICIT_LAC, view, MessageKind.EXPLICIT_LAC)
    if ledger_id < 0 or lac < -1:
        raise MalformedGroupError(f"invalid LAC of a ledger: ledger {ledger_id}, LAC {lac}")
    _check_end(view, _EXPLICIT_LAC.size + key_bytes)
    return ExplicitLac(ledger_id, lac, bytes(view[_EXPLICIT_LAC.size :]))


def encode_status(status: Status) -> bytes:
    """Encode: version (1), kind = 8 (1), status (1)."""
    return _STATUS.pack(FORMAT_VERSION, MessageKind.STATUS, status)


def decode_status(data: Buffer) -> Status:
    view = memoryview(data)
    (status,) = _unpack_head(_STATUS, view, MessageKind.STATUS)
    _check_end(view, _STATUS.size)
    return _status(status)


def encode_numbered(kind: MessageKind, messages: Sequence[tuple[int, Buffer]]) -> bytes:
    """Encode messages, each with a number that its answer repeats.

    offset  size  field
    0       1     format version
    1       1     kind = 9 (requests) or 10 (answers)
    2       4     messages n
    6       …     n × number (8), bytes b (4), message (b)
    """
    parts: list[Buffer] = [_COUNTED.pack(FORMAT_VERSION, kind, len(messages))]
    for number, message in messages:
        parts.append(_NUMBERED.pack(number, len(message)))
        parts.append(message)
    return b"".join(parts)


def decode_numbered(data: Buffer, kind: MessageKind) -> list[tuple[int, memoryview]]:
    """Decode numbered messages; they are views of `data`."""
    view = memoryview(data)
    (count,) = _unpack_head(_COUNTED, view, kind)
    offset, messages = _COUNTED.size, []
    for _ in range(count):
        number, size_bytes = _unpack(_NUMBERED, view, offset)
        offset += _NUMBERED.size
        if offset + size_bytes > len(view):
            raise MalformedGroupError(f"a message of {len(view)} bytes is cut off: {size_bytes} bytes are due at {offset}")
        messages.append((number, view[offset : offset + size_bytes]))
        offset += size_bytes
    _check_end(view, offset)
    return messages


def kind_of(message: Buffer) -> int:
    """Return the second byte of a message; 0: it has none."""
    return message[1] if len(message) > 1 else 0


def _unpack_head(layout: struct.Struct, view: memoryview, kind: MessageKind) -> tuple[int, ...]:
    """Return the fields after version and kind, which are checked first: a newer format may have another layout."""
    if len(view) < 2:
        raise MalformedGroupError(f"{len(view)} bytes are not a message: expected {kind.name}")
    version, actual_kind = view[0], view[1]
    newest = _NEWEST_FORMAT.get(kind, FORMAT_VERSION)
    if version > newest:
        raise NewerFormatError(
            f"{kind.name} message has format {version}, this process knows formats up to {newest}", version=version
        )
    if version == 0 or actual_kind != kind:
        raise MalformedGroupError(f"message of format {version} and kind {actual_kind}: expected {kind.name} ({int(kind)})")
    fields: tuple[int, ...] = _unpack(layout, view, 0)
    return fields[2:]


def _unpack(layout: struct.Struct, view: memoryview, offset: int) -> tuple[Any, ...]:
    if offset + layout.size > len(view):
        raise MalformedGroupError(f"a message of {len(view)} bytes is cut off: {layout.size} bytes are due at {offset}")
    return layout.unpack_from(view, offset)


def _check_end(view: memoryview, end: int) -> None:
    if end != len(view):
        raise MalformedGroupError(f"a message of {len(view)} bytes should have {end}")


def _check_range(ledger_id: int, first: int, last: int) -> None:
    if ledger_id < 0 or not 0 <= first <= last < _ENTRY_IDS_END:
        raise MalformedGroupError(f"not a range of entries: ledger {ledger_id}, entries {first}..{last}")


def _status(number: int) -> Status:
    status = _STATUSES.get(number)
    if status is None:
        raise MalformedGroupError(f"status {number} is not one of {_STATUSES.keys()}")
    return status
