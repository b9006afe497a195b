from __future__ import annotations

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire import BadTailError, ChecksumMismatchError, add_checksum, has_checksum, verify_tail


def test_the_crc_is_crc32c() -> None:
    assert crc32c.crc32c(b"123456789") == 0xE3069283  # the check value of the Castagnoli polynomial
    assert add_checksum(b"123456789") == bytes.fromhex("0e01e3069283") + b"123456789"


@given(st.binary(max_size=100))
def test_a_tail_that_was_given_a_checksum_verifies(body: bytes) -> None:
    tail = add_checksum(b"\x00\x00" + body)
    assert has_checksum(tail)
    verify_tail(tail)
    verify_tail(memoryview(tail))
    assert tail[6:] == b"\x00\x00" + body


@given(st.binary(min_size=1, max_size=100), st.data())
def test_one_changed_bit_is_found(body: bytes, data: st.DataObject) -> None:
    tail = bytearray(add_checksum(b"\x00\x00" + body))
    tail[data.draw(st.integers(2, len(tail) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ChecksumMismatchError) as caught:
        verify_tail(bytes(tail))
    assert caught.value.facts["crc"] != caught.value.facts["expected"]


@pytest.mark.parametrize("tail", [b"", b"\x0e", b"\x0e\x01\x00\x00\x00", b"\x00\x00\x00\x02ab"])
def test_a_tail_without_checksum_is_tolerated(tail: bytes) -> None:
    assert not has_checksum(tail)
    verify_tail(tail)


def test_a_checksum_is_not_added_twice() -> None:
    with pytest.raises(BadTailError):
        add_checksum(add_checksum(b"\x00\x00\x00\x00"))
