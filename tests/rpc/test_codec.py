"""Messages between ledger client and bookie: round trips, hostile bytes, versions, cutting of large groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_rpc import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    SCAN_CHUNK_BYTES,
    AddAnswer,
    AddRequest,
    Buffer,
    EntryGroup,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    MessageKind,
    MissingEntries,
    NewerFormatError,
    ReadAnswer,
    ReadRequest,
    Status,
    decode_add_answers,
    decode_add_message,
    decode_explicit_lac,
    decode_group,
    decode_lac_answer,
    decode_lac_request,
    decode_numbered,
    decode_read_answer,
    decode_read_request,
    decode_status,
    encode_add_answers,
    encode_add_message,
    encode_explicit_lac,
    encode_group,
    encode_group_to,
    encode_lac_answer,
    encode_lac_request,
    encode_numbered,
    encode_read_answer,
    encode_read_request,
    encode_status,
    split_requests,
)

KEY = b"k" * 16
ids = st.integers(0, 2**62)
keys = st.binary(min_size=16, max_size=16)
statuses = st.sampled_from(Status)


@st.composite
def groups(draw: st.DrawFn, max_entries: int = 5) -> EntryGroup:
    payloads = draw(st.lists(st.binary(max_size=40), min_size=1, max_size=max_entries))
    first = draw(ids)
    return encode_group(draw(ids), first, draw(st.integers(-1, first)), draw(st.integers(0, 2**40)), payloads)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int]:
    first = draw(ids)
    return first, first + draw(st.integers(0, 2**20))


add_requests = st.builds(AddRequest, groups(), keys, st.booleans(), st.booleans())
add_answers = st.builds(lambda ledger, run, status: AddAnswer(ledger, *run, status), ids, ranges(), statuses)
lac_requests = st.builds(LacRequest, ids, keys, st.booleans()) | st.builds(
    LacRequest, ids, keys, st.booleans(), st.integers(-1, 2**62), st.integers(1, 2**32 - 1), st.binary(max_size=300)
)
missing = st.builds(lambda run, status: MissingEntries(*run, status), ranges(), statuses)

Codec = tuple[Callable[[Any], bytes], Callable[[Buffer], Any], st.SearchStrategy[Any]]
CODECS: dict[str, Codec] = {
    "add": (encode_add_message, decode_add_message, st.lists(add_requests, max_size=4)),
    "add_answers": (encode_add_answers, decode_add_answers, st.lists(add_answers, max_size=6)),
    "lac_request": (encode_lac_request, decode_lac_request, lac_requests),
    "lac_answer": (
        encode_lac_answer,
        decode_lac_answer,
        st.builds(LacAnswer, statuses, st.integers(-1, 2**62), st.integers(-1, 2**62), st.none() | groups(max_entries=1)),
    ),
    "read_request": (
        encode_read_request,
        decode_read_request,
        st.builds(
            lambda ledger, run, size, fence, key, ticket, scan, disk: ReadRequest(
                ledger, *run, size, fence, key, ticket, *scan, from_disk=disk
            ),
            ids,
            ranges(),
            st.integers(0, 2**40),
            st.booleans(),
            st.just(b"") | keys,
            st.binary(max_size=300),
            st.just((False, MAX_MESSAGE_BYTES)) | st.tuples(st.just(True), st.sampled_from(SCAN_CHUNK_BYTES)),
            st.booleans(),
        ),
    ),
    "read_answer": (
        encode_read_answer,
        decode_read_answer,
        st.builds(
            ReadAnswer,
            st.lists(groups(), max_size=3).map(tuple),
            st.lists(missing, max_size=3).map(tuple),
            st.integers(0, 2**62),
            st.integers(0, 2**32 - 1),
        ),
    ),
    "explicit_lac": (encode_explicit_lac, decode_explicit_lac, st.builds(ExplicitLac, ids, st.integers(-1, 2**62), keys)),
    "status": (encode_status, decode_status, statuses),
    "recovery_requests": (
        partial(encode_numbered, MessageKind.RECOVERY_REQUESTS),
        partial(decode_numbered, kind=MessageKind.RECOVERY_REQUESTS),
        st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=40)), max_size=4),
    ),
    "recovery_answers": (
        partial(encode_numbered, MessageKind.RECOVERY_ANSWERS),
        partial(decode_numbered, kind=MessageKind.RECOVERY_ANSWERS),
        st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=40)), max_size=4),
    ),
}
every_codec = pytest.mark.parametrize("name", CODECS)


@pytest.mark.slow
@every_codec
@given(data=st.data())
def test_a_message_comes_back_as_it_was(name: str, data: st.DataObject) -> None:
    encode, decode, values = CODECS[name]
    value = data.draw(values)
    assert decode(encode(value)) == value


@pytest.mark.slow
@every_codec
@given(data=st.data())
def test_hostile_bytes_are_refused_or_understood_but_never_crash(name: str, data: st.DataObject) -> None:
    encode, decode, values = CODECS[name]
    damaged = bytearray(encode(data.draw(values)))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(2, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))]) + data.draw(st.just(b"") | st.binary(max_size=20))
    try:
        value = decode(cut)
    except MalformedGroupError:
        return
    assert decode(encode(value)) == value  # rule 1: whatever was accepted can be sent on


@every_codec
@given(tail=st.binary(max_size=200))
def test_random_bytes_behind_a_good_head_never_crash(name: str, tail: bytes) -> None:
    encode, decode, _ = CODECS[name]
    kind = list(CODECS).index(name) + 1
    for version in range(FORMAT_VERSION, FORMAT_VERSION + 3):
        try:
            value = decode(bytes([version, kind]) + tail)
        except MalformedGroupError:
            continue
        assert decode(encode(value)) == value


@every_codec
def test_a_newer_format_is_refused_by_name(name: str) -> None:
    decode = CODECS[name][1]
    known = {"lac_request": 3, "read_answer": 2}.get(name, FORMAT_VERSION)
    with pytest.raises(NewerFormatError, match=f"format {known + 1}, this process knows formats up to {known}"):
        decode(bytes([known + 1]) + b"\xff" * 30)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x00\x01" + bytes(20), encode_status(Status.OK)])
def test_bytes_that_are_no_such_message_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedGroupError):
        decode_add_message(data)


def test_bytes_behind_the_end_of_a_message_are_refused() -> None:
    with pytest.raises(MalformedGroupError, match="a message of 4 bytes should have 3"):
        decode_status(encode_status(Status.OK) + b"\x00")


def test_decoded_groups_are_views_of_the_message() -> None:
    message = encode_add_message([AddRequest(encode_group(1, 0, -1, 0, [b"payload"]), KEY)])
    (request,) = decode_add_message(message)
    assert isinstance(request.group.data, memoryview)
    assert request.group.data.obj is message


def test_entry_ids_that_could_not_be_answered_are_refused() -> None:
    parts: list[Buffer] = []
    encode_group_to(parts, EntryGroup(1, 2**63 - 1, [HEADER_BYTES, 2 * HEADER_BYTES], bytes(2 * HEADER_BYTES)))
    with pytest.raises(MalformedGroupError):
        decode_group(memoryview(b"".join(parts)), 0)
    answers = encode_add_answers([AddAnswer(1, 0, 2**63 - 1, Status.OK)])
    missing = encode_read_answer(ReadAnswer((), (MissingEntries(0, 2**63 - 1, Status.NO_ENTRY),), 0))
    with pytest.raises(MalformedGroupError, match="not a range of entries"):
        decode_add_answers(answers)
    with pytest.raises(MalformedGroupError, match="not a range of entries"):
        decode_read_answer(missing)


@pytest.mark.parametrize("scan", [True, False])
def test_a_read_is_answered_with_the_entry_behind_it_so_the_last_id_of_all_is_refused(scan: bool) -> None:
    last = 2**63 - 2
    request = decode_read_request(encode_read_request(ReadRequest(1, 0, last, scan=scan)))
    assert decode_read_answer(encode_read_answer(ReadAnswer((), (), request.last_entry_id + 1))).next_entry_id == last + 1
    for first in (0, last, last + 1):
        with pytest.raises(MalformedGroupError, match="not a range of entries"):
            decode_read_request(encode_read_request(ReadRequest(1, first, last + 1, scan=scan)))


@given(
    st.lists(st.tuples(groups(max_entries=8), st.booleans(), st.booleans()), max_size=6),
    st.integers(1, 400),
)
def test_splitting_keeps_every_entry_in_order_and_the_bound(choices: list[tuple[EntryGroup, bool, bool]], max_bytes: int) -> None:
    requests = [AddRequest(group, KEY, recovery, background) for group, recovery, background in choices]
    parts = list(split_requests(requests, max_bytes))

    def entries(of: list[AddRequest]) -> list[tuple[int, int, bool, bool, bytes]]:
        return [
            (r.group.ledger_id, e, r.recovery, r.background, bytes(r.group.entry(e)))
            for r in of
            for e in range(r.group.first_entry_id, r.group.last_entry_id + 1)
        ]

    assert entries([request for part in parts for request in part]) == entries(requests)
    for part in parts:
        size_bytes = sum(request.group.size_bytes for request in part)
        assert size_bytes <= max_bytes or sum(len(request.group) for request in part) == 1


def test_only_a_long_poll_needs_a_bookie_of_this_release() -> None:
    group = encode_group(1, 0, -1, 0, [b"payload"])
    messages = [
        encode_add_message([AddRequest(group, KEY)]),
        encode_add_answers([AddAnswer(1, 0, 0, Status.OK)]),
        encode_lac_request(LacRequest(1, KEY, fence=True)),
        encode_lac_answer(LacAnswer(Status.OK, 3, 3, group)),
        encode_read_request(ReadRequest(1, 0, 9)),
        encode_read_answer(ReadAnswer((group,), (), 1)),
        encode_explicit_lac(ExplicitLac(1, 3, KEY)),
        encode_status(Status.OK),
    ]
    assert {message[0] for message in messages} == {1}
    poll = encode_lac_request(LacRequest(1, KEY, above=7, wait_ms=500))
    assert poll[0] == 2
    with pytest.raises(MalformedGroupError, match="should have"):  # what format 1 makes of the same bytes
        decode_lac_request(b"\x01" + poll[1:])


@pytest.mark.parametrize("recovery", [True, False])
def test_a_background_add_is_an_ordinary_add_to_a_bookie_that_knows_none(recovery: bool) -> None:
    """Such a bookie looks at bit 0 of the flags alone."""
    group = encode_group(1, 0, -1, 0, [b"payload"])
    plain = encode_add_message([AddRequest(group, KEY, recovery)])
    background = encode_add_message([AddRequest(group, KEY, recovery, background=True)])
    changed = [(index, old ^ new) for index, (old, new) in enumerate(zip(plain, background, strict=True)) if old != new]
    assert changed == [(6, 2)], "nothing but bit 1 of the flags"


def test_a_scan_is_an_ordinary_read_to_a_bookie_that_knows_none() -> None:
    """Such a bookie looks at bit 0 of the flags alone; only who asked for a scan is told when to come back."""
    plain = encode_read_request(ReadRequest(1, 0, 9, ticket=b"t"))
    for place, chunk_bytes in enumerate(SCAN_CHUNK_BYTES):
        scan = encode_read_request(ReadRequest(1, 0, 9, ticket=b"t", scan=True, chunk_bytes=chunk_bytes))
        changed = [(index, new) for index, (old, new) in enumerate(zip(plain, scan, strict=True)) if old != new]
        assert changed == [(34, 2 + 4 * place)], "nothing but the flags"
    assert decode_read_request(plain).chunk_bytes == MAX_MESSAGE_BYTES
    refusal = encode_read_answer(ReadAnswer((), (MissingEntries(0, 9, Status.OVERLOADED),), 10, retry_after_ms=500))
    assert refusal[0] == 2
