"""Values of primitive schemas, and of key/value schemas, as Pulsar's clients write them."""

from __future__ import annotations

import json
import struct
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_decode import BadOptionError
from cepheid_decode.typed import typed_fields
from cepheid_decode.typed.key_value import split_inline
from tests.decode.typed.typed_support import avro_bytes, decode, record, schema_version

NANOS_A_DAY = 86_400 * 10**9
LAST_MILLI = datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC)


@pytest.mark.parametrize(
    ("kind", "encoded", "value"),
    [
        ("INT8", b"\x80", -128),
        ("INT16", b"\x01\x00", 256),
        ("INT32", b"\xff\xff\xff\xfe", -2),
        ("INT64", b"\x7f" + b"\xff" * 7, 2**63 - 1),
        ("FLOAT", struct.pack(">f", 1.5), 1.5),
        ("DOUBLE", struct.pack(">d", -0.1), -0.1),
        ("BOOLEAN", b"\x00", False),
        ("BOOLEAN", b"\x02", True),
        ("STRING", "é".encode(), "é"),
        ("STRING", b"", ""),
        ("BYTES", b"\xff\x00", b"\xff\x00"),
        ("DATE", struct.pack(">q", -1), LAST_MILLI),
        ("TIMESTAMP", struct.pack(">q", -1), LAST_MILLI),
        ("TIME", struct.pack(">q", 3_600_000), 3_600_000),
        ("INSTANT", struct.pack(">qi", -1, 999_000_999), LAST_MILLI),
        ("LOCAL_DATE", struct.pack(">q", -1), date(1969, 12, 31)),
        ("LOCAL_TIME", struct.pack(">q", 5), 5),
        ("LOCAL_DATE_TIME", struct.pack(">qq", 1, 1_500), datetime(1970, 1, 2, 0, 0, 0, 1)),  # noqa: DTZ001
    ],
)
def test_a_value_among_others(kind: str, encoded: bytes, value: Any) -> None:
    rows, errors = decode([schema_version(kind)], [encoded, None, encoded * 3 + b"\xff", encoded])
    shown = [row["value"] for row in rows]
    assert (shown[0], shown[1], shown[3]) == (value, None, value)
    if kind != "BYTES":
        assert list(errors) == [2]
        assert shown[2] is None


@pytest.mark.parametrize(
    ("kind", "encoded"),
    [
        ("INSTANT", struct.pack(">qi", 0, 10**9)),
        ("INSTANT", struct.pack(">qi", 0, -1)),
        ("INSTANT", struct.pack(">qi", 2**62, 0)),
        ("TIMESTAMP", struct.pack(">q", 2**63 - 1)),
        ("TIMESTAMP", struct.pack(">q", -(2**63))),
        ("LOCAL_DATE", struct.pack(">q", 2**31)),
        ("LOCAL_TIME", struct.pack(">q", NANOS_A_DAY)),
        ("LOCAL_TIME", struct.pack(">q", -1)),
        ("LOCAL_DATE_TIME", struct.pack(">qq", 0, NANOS_A_DAY)),
        ("LOCAL_DATE_TIME", struct.pack(">qq", 2**62, 0)),
    ],
)
def test_numbers_that_no_column_holds(kind: str, encoded: bytes) -> None:
    rows, errors = decode([schema_version(kind)], [encoded])
    assert rows == [{"value": None}]
    assert errors == {0: f"its {kind} is out of range"}


def test_empty_values_are_no_numbers() -> None:
    _, errors = decode([schema_version("INT64")], [b"", b""])
    assert errors == {0: "INT64 has 8 bytes, not 0", 1: "INT64 has 8 bytes, not 0"}


SIDES = (b"", json.dumps(record(("x", "int"))).encode())
KEY_VALUE = {"key.schema.type": "STRING", "value.schema.type": "AVRO"}


def packed(key: bytes | None, value: bytes | None) -> bytes:
    return b"".join(b"\xff\xff\xff\xff" if part is None else struct.pack(">i", len(part)) + part for part in (key, value))


def key_value(encoding: str = "INLINE", *, as_json: bool = False) -> Any:
    definition = json.dumps({"key": "", "value": record(("x", "int"))}).encode() if as_json else packed(*SIDES)
    return schema_version("KEY_VALUE", definition, **KEY_VALUE, **{"kv.encoding.type": encoding})


@pytest.mark.parametrize("as_json", [True, False])
def test_key_and_value_inline(as_json: bool) -> None:
    x = avro_bytes(record(("x", "int")), {"x": 5})
    values = [
        packed(b"k", x),
        packed(None, None),
        None,
        packed(b"", x),
        b"\x00\x00\x00\x09k",
        packed(b"k", b"\xff"),
        packed(b"k", x) + b"!",
    ]
    rows, errors = decode([key_value(as_json=as_json)], values)
    none = {"key": None, "value": None}
    assert rows == [{"key": "k", "value": {"x": 5}}, none, none, {"key": "", "value": {"x": 5}}, none, none, none]
    assert errors == {
        4: "its packing of key and value is broken",
        5: "value: field 'x': it ends inside a number",
        6: "its packing of key and value is broken",
    }


def test_key_and_value_apart() -> None:
    x = avro_bytes(record(("x", "int")), {"x": 5})
    rows, errors = decode([key_value("SEPARATED")], [x, None, x, b"\xff"], keys=[b"a", b"b", None, b"\xff"])
    assert rows[:3] == [{"key": "a", "value": {"x": 5}}, {"key": "b", "value": None}, {"key": None, "value": {"x": 5}}]
    assert errors == {3: "key: it is not UTF-8 text"}


def test_only_the_key_is_wanted() -> None:
    rows, errors = decode([key_value("SEPARATED")], [None], keys=[b"a"], columns=["key"])
    assert rows == [{"key": "a"}]
    assert not errors


parts = st.one_of(st.none(), st.binary(max_size=9))


@given(pairs=st.lists(st.tuples(parts, parts, st.binary(max_size=2)), max_size=12))
def test_any_packing_is_taken_apart(pairs: list[tuple[bytes | None, bytes | None, bytes]]) -> None:
    """A third part is what follows by mistake."""
    keys, values, errors = split_inline(pa.array([packed(key, value) + rest for key, value, rest in pairs], pa.binary()))
    assert list(errors) == [row for row, (_, _, rest) in enumerate(pairs) if rest]
    assert keys.to_pylist() == [None if rest else key for key, _, rest in pairs]
    assert values.to_pylist() == [None if rest else value for _, value, rest in pairs]


@given(values=st.lists(st.binary(max_size=20), min_size=1, max_size=12))
def test_any_bytes_are_taken_apart_or_refused(values: list[bytes]) -> None:
    keys, rests, errors = split_inline(pa.array(values, pa.binary()))
    for row, value in enumerate(values):
        if row not in errors:
            assert packed(keys[row].as_py(), rests[row].as_py()) == value


@pytest.mark.parametrize("definition", [b"", b"\x00\x00\x00\x05ab", b'{"key": 1', b'{"value": ""}'])
def test_a_key_value_schema_that_is_none(definition: bytes) -> None:
    with pytest.raises(BadOptionError, match="key/value schema cannot be read"):
        typed_fields([schema_version("KEY_VALUE", definition, **KEY_VALUE)], None)
