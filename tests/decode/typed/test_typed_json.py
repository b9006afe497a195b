"""JSON values as columns: what a text means, and that many at once mean what each means alone."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_decode.typed.avro_schema import parse_avro
from cepheid_decode.typed.json_decoder import JsonDecoder
from cepheid_decode.typed.json_lines import CHUNK_BYTES, MIN_ROWS
from cepheid_decode.typed.records import decode_each
from tests.decode.typed.typed_support import decode, record, same, schema_version

FLIGHT = record(
    ("carrier", ["null", "string"]),
    ("hour", "int"),
    ("distance", "long"),
    ("delay", ["null", "double"]),
    ("late", "boolean"),
    ("at", {"type": "long", "logicalType": "timestamp-millis"}),
    ("legs", {"type": "array", "items": "int"}),
    ("plane", ["null", record(("tail", "string"), ("day", {"type": "int", "logicalType": "date"}), name="Plane")]),
)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "carrier": st.one_of(st.none(), st.text(max_size=8)),
        "hour": st.integers(-(2**31), 2**31 - 1),
        "distance": st.integers(-(2**63), 2**63 - 1),
        "delay": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-9, 9)),
        "late": st.booleans(),
        "at": st.integers(0, 4 * 10**12),
        "legs": st.lists(st.one_of(st.none(), st.integers(-9, 9)), max_size=3),
        "plane": st.one_of(st.none(), st.fixed_dictionaries({"tail": st.text(max_size=5), "day": st.integers(0, 20_000)})),
        "unknown": st.recursive(st.one_of(st.none(), st.text(max_size=3), st.floats(allow_nan=False)), st.lists, max_leaves=4),
    },
)


def decoder_of(schema: Any) -> JsonDecoder:
    return JsonDecoder(parse_avro(json.dumps(schema).encode()))


def same_as_one_by_one(decoder: JsonDecoder, encoded: list[bytes]) -> dict[int, str]:
    values = pa.array(encoded, pa.binary())
    together, alone = decoder.decode(values), decode_each(values, decoder._records.decode, decoder.type)
    together.array.validate(full=True)
    assert dict(sorted(together.errors.items())) == alone.errors
    assert same(together.array, alone.array)
    return dict(together.errors)


@settings(max_examples=60)
@given(values=st.lists(VALUES, min_size=1, max_size=8), indent=st.sampled_from([None, True, 2]), is_ascii=st.booleans())
def test_many_at_once_are_what_each_is_alone(values: list[dict[str, Any]], indent: int | None, is_ascii: bool) -> None:
    """Also when they are spread over lines, as Pulsar's Python client writes them."""
    encoded = [json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode() for value in values] * (MIN_ROWS // len(values) + 9)
    assert not same_as_one_by_one(decoder_of(FLIGHT), encoded)


ODD = [
    b"",
    b"{}",
    b"null",
    b"[1]",
    b"5",
    b"{",
    b'{"hour": 1',
    b',"late": true}',
    b'{"hour":1}{"hour":2}',
    b'{"hour":1}\n{"hour":2}',
    b'{"plane":{"tail":"x"}',
    b'{"carrier":"x}',
    b'{"carrier":"a\nb"}',
    b'{"carrier":"\xff"}',
    b'{"unknown":"\xff"}',
    b'{"carrier":"\\ud800"}',
    b'{"unknown":"\\ud800"}',
    b'{"carrier":"\\u0000"}',
    b'{"hour":1,"hour":2}',
    b'{"hour":1.0}',
    b'{"hour":1.5}',
    b'{"hour":2147483648}',
    b'{"hour":true}',
    b'{"hour":"1"}',
    b'{"carrier":1}',
    b'{"delay":"NaN"}',
    b'{"delay":Infinity}',
    b'{"delay":1e999}',
    b'{"distance":1e3}',
    b'{"distance":99999999999999999999}',
    b'{"distance":NaN}',
    b'{"at":"2020-01-01T00:00:00Z"}',
    b'{"at":"2020-01-01T00:00:00"}',
    b'{"at":9223372036854775807}',
    b'{"plane":{"day":"2020-02-29"}}',
    b'{"plane":{"day":"2020-02-30"}}',
    b'{"plane":[]}',
    b'{"legs":{}}',
    b'{"legs":["x"]}',
    b'  {"hour": 3}\n',
    b'\xef\xbb\xbf{"hour":1}',
    b'{"hour":1}\x00{"hour":1}',
    b'{"hour":01}',
    b'{"hour":1,}',
    b'{"hour":1}//',
]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_one_odd_value_leaves_its_neighbours_alone(odd: bytes) -> None:
    encoded = [json.dumps({"hour": row}).encode() for row in range(3 * MIN_ROWS)]
    encoded[MIN_ROWS] = odd
    decoder = decoder_of(FLIGHT)
    errors = same_as_one_by_one(decoder, encoded)
    assert set(errors) <= {MIN_ROWS}
    hours = decoder.decode(pa.array(encoded, pa.binary())).array.field("hour").to_pylist()
    assert [hour for row, hour in enumerate(hours) if row != MIN_ROWS] == [row for row in range(3 * MIN_ROWS) if row != MIN_ROWS]


def test_a_value_nested_deeply_leaves_its_neighbours_alone() -> None:
    """Where nobody looks at it, it may be as deep as it likes; else the parser's depth is the bound."""
    deep = b"[" * 100_000 + b"]" * 100_000
    encoded = [b'{"hour": 1}'] * MIN_ROWS + [b'{"unknown":' + deep + b"}", b'{"legs":' + deep + b"}"]
    rows, errors = decode([schema_version("JSON", FLIGHT)], encoded)
    assert set(errors) <= {MIN_ROWS, MIN_ROWS + 1}
    assert MIN_ROWS + 1 in errors
    assert [row["hour"] for row in rows[:MIN_ROWS]] == [1] * MIN_ROWS


@pytest.mark.parametrize("pair", [(8, 4), (8, 6), (10, 0), (4, 8), (9, 10)])
def test_two_objects_in_one_value_and_half_of_one_in_another_do_not_cancel_out(pair: tuple[int, int]) -> None:
    """As many objects as values, yet not one in each."""
    encoded = [json.dumps({"hour": row}).encode() for row in range(2 * MIN_ROWS)]
    encoded[10], encoded[11] = ODD[pair[0]], ODD[pair[1]]
    decoder = decoder_of(FLIGHT)
    assert set(same_as_one_by_one(decoder, encoded)) == {10, 11}
    hours = decoder.decode(pa.array(encoded, pa.binary())).array.field("hour").to_pylist()
    assert hours[:10] + hours[12:] == [*range(10), *range(12, 2 * MIN_ROWS)], "the neighbours are where they were"


@pytest.mark.slow
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), values=st.lists(VALUES, min_size=3, max_size=8))
def test_mutated_bytes_give_what_one_by_one_gives(seed: int, values: list[dict[str, Any]]) -> None:
    rng = random.Random(seed)
    encoded = [bytearray(json.dumps(value, indent=rng.choice([None, 1])).encode()) for value in values * MIN_ROWS]
    mutated: set[int] = set()
    for _ in range(rng.randrange(1, 5)):
        row = rng.randrange(len(encoded))
        mutated.add(row)
        value = encoded[row]
        place = rng.randrange(len(value) + 1)
        match rng.randrange(4):
            case 0:
                del value[place:]
            case 1:
                value[place : place + 1] = rng.choice([b'"', b"{", b"}", b"\n", b",", b"\\", b"\x00", b"\xc3", b"1", b"]"])
            case 2:
                value[place:place] = rng.choice([b'{"hour":1}', b"}{", b"}\n{", b'","', b"\xff"])
            case _:
                del value[place : place + 2]
    errors = same_as_one_by_one(decoder_of(FLIGHT), [bytes(value) for value in encoded])
    assert set(errors) <= mutated, "a broken value breaks itself alone"


def test_more_than_one_chunk_with_an_odd_value_in_each() -> None:
    text = "x" * 1000
    count = 3 * CHUNK_BYTES // 1000
    encoded = [json.dumps({"hour": row, "carrier": text}).encode() for row in range(count)]
    odd = list(range(50, count, 1500))
    for row in odd:
        encoded[row] = b'{"hour":1,"hour":2}'
    encoded[-1] = b"no json"
    rows, errors = decode([schema_version("JSON", FLIGHT)], encoded, columns=["hour"])
    assert list(errors) == [count - 1]
    assert [row["hour"] for row in rows[:-1]] == [2 if row in set(odd) else row for row in range(count - 1)]


def one(kind: Any, text: str) -> Any:
    rows, errors = decode([schema_version("JSON", record(("x", kind)))], [f'{{"x": {text}}}'.encode()])
    return errors.get(0, rows[0]["x"])


BIG = {"type": "string", "java-class": "java.math.BigDecimal"}
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (DECIMAL, "12.30", Decimal("12.30")),
        (DECIMAL, '"12.3"', Decimal("12.30")),
        (DECIMAL, "12", Decimal("12.00")),
        (DECIMAL, "12.345", "field 'x': a number has more than 2 digits after its point"),
        (DECIMAL, "12345", "field 'x': a number does not fit a decimal of 6 digits"),
        (DECIMAL, "1e999999999", "field 'x': a number does not fit a decimal of 6 digits"),
        (DECIMAL, '"NaN"', "field 'x': a number does not fit a decimal of 6 digits"),
        (DECIMAL, '"abc"', "field 'x': a text is not a decimal"),
        (BIG, "1234567890123456789.123456789012345678900", "1234567890123456789.123456789012345678900"),
        (BIG, '"0.1"', "0.1"),
        (BIG, "true", "field 'x': boolean instead of text"),
        (["null", BIG], "10", "10"),
        ("bytes", '"aGk="', b"aGk="),
        ({"type": "fixed", "name": "F", "size": 2}, '"é"', "é".encode()),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, '"B"', "B"),
        ({"type": "map", "values": "int"}, '{"a": 1, "b": null}', [("a", 1), ("b", None)]),
        ({"type": "map", "values": "int"}, '{"a": "x"}', "field 'x': text instead of an integer of 32 bits"),
        (["null", "int", "string"], '"q"', {"member0": None, "member1": "q"}),
        (["null", "int", "string"], "5", {"member0": 5, "member1": None}),
        (["null", "int", "string"], "true", "field 'x': boolean instead of one of 2 types"),
        ({"type": "long", "logicalType": "timestamp-micros"}, '"2020-01-01T01:00:00+01:00"', datetime(2020, 1, 1, tzinfo=UTC)),
        ({"type": "long", "logicalType": "local-timestamp-millis"}, '"2020-01-01T01:00:00"', datetime(2020, 1, 1, 1)),  # noqa: DTZ001
        ({"type": "int", "logicalType": "date"}, '"2020-01-01"', date(2020, 1, 1)),
        ("float", "1e39", "field 'x': a number is too large"),
        ("double", "true", "field 'x': boolean instead of a number"),
        ("null", "1", "field 'x': number 1 instead of null"),
    ],
)
def test_what_a_text_means(kind: Any, text: str, value: Any) -> None:
    assert one(kind, text) == value


@pytest.mark.parametrize("text", ["1e999999999", "1e-999999999", "-1e999999999", "1.5", "1" * 5000])
def test_no_number_is_too_much_for_a_schema_of_exact_digits(text: str) -> None:
    schema = record(("i", ["null", "int"]), ("f", ["null", "double"]), ("d", ["null", DECIMAL]))
    values = [f'{{"{name}": {text}}}'.encode() for name in ("i", "f", "d")] + [b'{"i": 1}']
    rows, errors = decode([schema_version("JSON", schema)], values)
    assert rows[3] == {"i": 1, "f": None, "d": None}
    assert 0 in errors
    assert 3 not in errors


def test_a_record_inside_itself_is_the_text_that_was_sent() -> None:
    schema = record(("x", "int"), ("next", ["null", "R"]))
    rows, _ = decode([schema_version("JSON", schema)], [b'{"x":1,"next":{"x":2,"other":[1.5,null]}}'])
    assert json.loads(rows[0]["next"]) == {"x": 2, "other": [1.5, None]}


def test_only_wanted_fields_are_parsed() -> None:
    values = [json.dumps({"hour": row, "late": True, "at": 0}).encode() for row in range(2 * MIN_ROWS)]
    rows, errors = decode([schema_version("JSON", FLIGHT)], values, columns=["late", "hour"])
    assert not errors
    assert rows == [{"late": True, "hour": row} for row in range(2 * MIN_ROWS)]
    assert decode([schema_version("JSON", FLIGHT)], values, columns=[])[1] == {}


def test_a_later_version_needs_no_defaults() -> None:
    old, new = record(("x", "int")), record(("x", "long"), ("y", "string"))
    schemas = [schema_version("JSON", old, 0), schema_version("JSON", new, 1)]
    rows, errors = decode(schemas, [b'{"x":1}', b'{"x":2,"y":"b"}'], written_with=[schemas[0].version, schemas[1].version])
    assert not errors
    assert rows == [{"x": 1, "y": None}, {"x": 2, "y": "b"}]
