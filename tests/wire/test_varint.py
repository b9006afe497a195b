from __future__ import annotations

import pytest
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire.varint import read_varint, signed64, varint


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 2**63, 2**64 - 1])
def test_varint_at_the_limits_of_its_tables(value: int) -> None:
    assert varint(value) == _VarintBytes(value)


@given(st.integers(0, 2**64 - 1))
def test_varint_equals_protobuf(value: int) -> None:
    assert varint(value) == _VarintBytes(value)
    assert read_varint(b"ab" + varint(value) + b"c", 2) == (value, 2 + len(varint(value)))


@given(st.integers(-(2**63), -1))
def test_a_negative_number_is_its_twos_complement(value: int) -> None:
    assert varint(value) == _VarintBytes(value + 2**64)


@given(st.integers(-(2**63), 2**63 - 1))
def test_signed64_reads_what_a_uint64_field_says_of_an_id(value: int) -> None:
    assert signed64(value % 2**64) == value
