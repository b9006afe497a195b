"""Avro values as columns: against fastavro, in lockstep and one by one, and with bytes that are no Avro."""

from __future__ import annotations

import json
import random
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_decode.typed.avro_decoder import AvroDecoder
from cepheid_decode.typed.avro_schema import parse_avro
from cepheid_decode.typed.lanes import BLOCK_LANES
from cepheid_decode.typed.records import decode_each
from tests.decode.typed.typed_support import avro_bytes, decode, record, same, schema_version

MOMENTS = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1))  # noqa: DTZ001 (made aware below)
SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", st.one_of(st.integers(-3, 70), st.integers(-(2**31), 2**31 - 1))),
    ("long", st.one_of(st.integers(-3, 70), st.integers(-(2**63), 2**63 - 1))),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("bytes", st.binary(max_size=20)),
    ("string", st.text(max_size=20)),
    ({"type": "int", "logicalType": "date"}, st.dates()),
    ({"type": "long", "logicalType": "timestamp-micros"}, MOMENTS.map(lambda moment: moment.replace(tzinfo=UTC))),
    (
        {"type": "long", "logicalType": "timestamp-millis"},
        MOMENTS.map(lambda moment: moment.replace(tzinfo=UTC, microsecond=moment.microsecond // 1000 * 1000)),
    ),
    ({"type": "long", "logicalType": "local-timestamp-micros"}, MOMENTS),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 3},
        st.integers(-(10**12) + 1, 10**12 - 1).map(lambda unscaled: Decimal(unscaled).scaleb(-3)),
    ),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 0},
        st.integers(-(10**37), 10**37).map(Decimal),
    ),
    ({"type": "string", "logicalType": "uuid"}, st.uuids()),
]


class Names:
    def __init__(self) -> None:
        self.given = 0

    def new(self) -> str:
        self.given += 1
        return f"N{self.given}"


@st.composite
def typed(draw: st.DrawFn, names: Names, depth: int = 0, *, flat: bool) -> tuple[Any, st.SearchStrategy[Any]]:
    """A schema and its values."""
    kinds = ["scalar", "nullable", "enum", "fixed", "record", "union"] + ([] if flat else ["array", "map"])
    kind = draw(st.sampled_from(kinds if depth < 3 else kinds[:4]))
    match kind:
        case "nullable":
            inner, values = draw(st.sampled_from(SCALARS[1:]))
            return draw(st.sampled_from([["null", inner], [inner, "null"]])), st.one_of(st.none(), values)
        case "enum":
            symbols = ["A", "B", "C"][: draw(st.integers(1, 3))]
            return {"type": "enum", "name": names.new(), "symbols": symbols}, st.sampled_from(symbols)
        case "fixed":
            size = draw(st.integers(1, 9))
            return {"type": "fixed", "name": names.new(), "size": size}, st.binary(min_size=size, max_size=size)
        case "record":
            schema, values = draw(records(names, depth + 1, flat=flat))
            return schema, values
        case "union":
            return ["null", "long", "string"], st.one_of(st.none(), st.integers(-5, 2**40), st.text(max_size=5))
        case "array":
            inner, values = draw(typed(names, depth + 1, flat=flat))
            return {"type": "array", "items": inner}, st.lists(values, max_size=4)
        case "map":
            inner, values = draw(typed(names, depth + 1, flat=flat))
            return {"type": "map", "values": inner}, st.dictionaries(st.text(max_size=4), values, max_size=3)
    return draw(st.sampled_from(SCALARS))


@st.composite
def records(draw: st.DrawFn, names: Names, depth: int = 0, *, flat: bool) -> tuple[Any, st.SearchStrategy[Any]]:
    fields = {f"f{index}": draw(typed(names, depth, flat=flat)) for index in range(draw(st.integers(0 if depth else 1, 4)))}
    schema = record(*((name, kind) for name, (kind, _) in fields.items()), name=names.new())
    return schema, st.fixed_dictionaries({name: values for name, (_, values) in fields.items()})


def shown(schema: Any, value: Any) -> Any:
    """What Arrow gives back for a value that fastavro was given."""
    if isinstance(schema, list):
        several = [branch for branch in schema if branch != "null"]
        if value is None or len(several) == 1:
            return None if value is None else shown(several[0], value)
        return {"member0": value if isinstance(value, int) else None, "member1": value if isinstance(value, str) else None}
    if isinstance(schema, dict):
        match schema["type"]:
            case "record":
                return {field["name"]: shown(field["type"], value[field["name"]]) for field in schema["fields"]}
            case "array":
                return [shown(schema["items"], item) for item in value]
            case "map":
                return [(key, shown(schema["values"], item)) for key, item in value.items()]
    return str(value) if isinstance(value, uuid.UUID) else value


@pytest.mark.slow
@pytest.mark.parametrize("flat", [True, False])
@settings(max_examples=60)
@given(data=st.data())
def test_columns_are_what_was_written(flat: bool, data: st.DataObject) -> None:
    schema, values = data.draw(records(Names(), flat=flat))
    written = data.draw(st.lists(values, min_size=1, max_size=4))
    repeated = [written[place % len(written)] for place in range(60)]  # enough for lockstep, also in a second round of arrays
    encoded = [avro_bytes(schema, value) for value in repeated]
    rows, errors = decode([schema_version("AVRO", schema)], encoded)
    assert not errors
    assert rows == [shown(schema, value) for value in repeated]
    wanted = data.draw(st.lists(st.sampled_from(list(rows[0])), unique=True, min_size=1))
    some, errors = decode([schema_version("AVRO", schema)], encoded, columns=wanted)
    assert not errors
    assert some == [{name: row[name] for name in wanted} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("flat", [True, False])
@settings(max_examples=60)
@given(data=st.data())
def test_mutated_bytes_give_what_one_by_one_gives(flat: bool, data: st.DataObject) -> None:
    """No crash, no other rows: lockstep gives a value only where the slow way gives the same, and leaves the neighbours alone."""
    schema, values = data.draw(records(Names(), flat=flat))
    encoded = [avro_bytes(schema, value) for value in data.draw(st.lists(values, min_size=3, max_size=6))] * 20
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(rng.randrange(1, 20)):
        row = rng.randrange(len(encoded))
        encoded[row] = mutate(encoded[row], rng)
    decoder = AvroDecoder(parse_avro(json.dumps(schema).encode()))
    array = pa.array(encoded, pa.binary())
    lockstep, one_by_one = decoder.decode(array), decode_each(array, decoder._records.decode, decoder.type)
    lockstep.array.validate(full=True)
    assert lockstep.errors == one_by_one.errors
    assert same(lockstep.array, one_by_one.array)


def mutate(value: bytes, rng: random.Random) -> bytes:
    changed = bytearray(value)
    place = rng.randrange(len(changed) + 1)
    match rng.randrange(5):
        case 0:
            return bytes(changed[:place])
        case 1:
            changed[place:place] = rng.randbytes(rng.randrange(1, 12))
        case 2:
            changed[place : place + 1] = b"\xff" * rng.randrange(1, 12)
        case 3:
            del changed[place : place + rng.randrange(1, 3)]
        case _:
            for at in range(len(changed)):
                if rng.random() < 0.2:
                    changed[at] = rng.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("repeat", [1, 20])
def test_an_int_has_32_bits(repeat: int) -> None:
    numbers = [2**31 - 1, 2**31, -(2**31), -(2**31) - 1]
    values = [avro_bytes(record(("x", "long")), {"x": number}) for number in numbers] * repeat
    rows, errors = decode([schema_version("AVRO", record(("x", "int")))], values)
    assert [row["x"] for row in rows] == [2**31 - 1, None, -(2**31), None] * repeat
    assert "is not an int of 32 bits" in errors[1]


@pytest.mark.parametrize("repeat", [1, 20])
def test_a_decimal_has_as_many_digits_as_its_schema_says(repeat: int) -> None:
    schema = record(("d", {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}))
    unscaled = [9999, 10_000, -9999, -10_000, 2**70, 0]
    plain = [avro_bytes(record(("d", "bytes")), {"d": number.to_bytes(9, "big", signed=True)}) for number in unscaled]
    short = [avro_bytes(record(("d", "bytes")), {"d": number.to_bytes(3, "big", signed=True)}) for number in unscaled[:4]]
    rows, errors = decode([schema_version("AVRO", schema)], (plain + short) * repeat)
    expected = [Decimal("99.99"), None, Decimal("-99.99"), None, None, Decimal("0.00")]
    assert [row["d"] for row in rows] == (expected + expected[:4]) * repeat
    assert "a decimal has more than 4 digits" in errors[1]


LONGS = sorted({sign * (1 << bits) + off for bits in range(64) for sign in (1, -1) for off in (-1, 0, 1)})


def test_numbers_of_every_length() -> None:
    numbers = [number for number in LONGS if -(2**63) <= number < 2**63]
    schema = record(("x", "long"), ("y", ["null", "long"]))
    pairs = [{"x": number, "y": None if place % 3 == 0 else numbers[-place]} for place, number in enumerate(numbers)]
    rows, errors = decode([schema_version("AVRO", schema)], [avro_bytes(schema, pair) for pair in pairs])
    assert not errors
    assert rows == pairs


@pytest.mark.parametrize(
    ("encoded", "wrong"),
    [
        (b"\xff" * 9 + b"\x02", "larger than 64 bits"),
        (b"\xff" * 10 + b"\x01", "more than ten bytes"),
        (b"\xff" * 9, "ends inside a number"),
        (b"", "ends inside a number"),
        (b"\x02\x00", "of which its schema takes 1"),
    ],
)
def test_numbers_that_are_none(encoded: bytes, wrong: str) -> None:
    good = avro_bytes(record(("x", "long")), {"x": 7})
    values = [good] * 20 + [encoded] + [good] * 20
    rows, errors = decode([schema_version("AVRO", record(("x", "long")))], values)
    assert list(errors) == [20]
    assert wrong in errors[20]
    assert [row["x"] for row in rows] == [7] * 20 + [None] + [7] * 20


@pytest.mark.parametrize("claim", [4, 30, 200, 100_000, 1 << 31, 1 << 62, -1, -(1 << 63)])
def test_a_length_beyond_the_value_does_not_take_the_neighbours_bytes(claim: int) -> None:
    schema = record(("s", "string"), ("n", "int"))
    good = avro_bytes(schema, {"s": "abc", "n": 1})
    beyond = avro_bytes("long", claim) + good[1:]
    rows, errors = decode([schema_version("AVRO", schema)], [good] * 10 + [beyond] + [good] * 10 + [beyond])
    assert sorted(errors) == [10, 21]
    assert [row["s"] for row in rows] == ["abc"] * 10 + [None] + ["abc"] * 10 + [None]


def test_a_last_value_that_ends_early() -> None:
    """Behind it is nothing but padding, less than its schema would have."""
    names = [f"f{index}" for index in range(12)]
    schema = record(*((name, "double") for name in names), ("n", "long"), ("s", "string"))
    good = avro_bytes(schema, {**dict.fromkeys(names, 0.5), "n": 1, "s": "x"})
    for last in (b"", good[:8], good[:-1]):
        rows, errors = decode([schema_version("AVRO", schema)], [good] * 20 + [last])
        assert list(errors) == [20]
        assert [row["n"] for row in rows] == [1] * 20 + [None]


@pytest.mark.parametrize("repeat", [1, 30])
def test_of_a_key_that_is_there_twice_the_last_value_counts(repeat: int) -> None:
    schema = record(("m", {"type": "map", "values": "int"}), ("n", "int"))
    twice = b"\x06\x02k\x02\x02x\x04\x02k\x06\x00" + b"\x0e"
    plain = avro_bytes(schema, {"m": {"k": 1, "x": 2}, "n": 7})
    rows, errors = decode([schema_version("AVRO", schema)], [twice, plain] * repeat)
    assert not errors
    assert rows == [{"m": [("k", 3), ("x", 2)], "n": 7}, {"m": [("k", 1), ("x", 2)], "n": 7}] * repeat


@pytest.mark.parametrize("repeat", [1, 40])
def test_blocks_that_tell_their_size(repeat: int) -> None:
    """As some writers make them: a negative count, the bytes, the items; and more than one block."""
    schema = record(("a", {"type": "array", "items": "int"}))
    blocks = b"\x03\x04\x02\x04" + b"\x02\x06" + b"\x00"  # -2 items of 2 bytes: 1, 2; one item: 3; end
    rows, errors = decode([schema_version("AVRO", schema)], [blocks, b"\x00"] * repeat)
    assert not errors
    assert rows == [{"a": [1, 2, 3]}, {"a": []}] * repeat


def test_text_that_is_no_utf8_is_bad_alone() -> None:
    schema = record(("s", "string"))
    values = [avro_bytes(schema, {"s": f"é{row}"}) for row in range(40)]
    values[13] = b"\x04\xc3\x28"
    rows, errors = decode([schema_version("AVRO", schema)], values)
    assert list(errors) == [13]
    assert "field 's': a string is not UTF-8" in errors[13]
    assert [row["s"] for row in rows] == [None if row == 13 else f"é{row}" for row in range(40)]


def test_more_rows_than_one_block() -> None:
    schema = record(("x", "long"), ("s", ["null", "string"]))
    count = BLOCK_LANES + 100
    values = [avro_bytes(schema, {"x": row, "s": None if row % 2 else str(row)}) for row in range(count)]
    values[BLOCK_LANES + 3] = b"\x01"
    rows, errors = decode([schema_version("AVRO", schema)], values)
    assert list(errors) == [BLOCK_LANES + 3]
    for row in (0, 1, BLOCK_LANES - 1, BLOCK_LANES, count - 2, count - 1):
        assert rows[row] == {"x": row, "s": None if row % 2 else str(row)}


@pytest.mark.parametrize("repeat", [1, 40])
def test_items_without_bytes_cannot_claim_a_quintillion(repeat: int) -> None:
    schema = record(("a", {"type": "array", "items": "null"}))
    claim = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f\x00"
    least = b"\xff" * 9 + b"\x01\x00\x00"  # a count that has no positive twin
    rows, errors = decode([schema_version("AVRO", schema)], [claim, avro_bytes(schema, {"a": [None, None]}), least] * repeat)
    assert sorted(errors) == [row for row in range(3 * repeat) if row % 3 != 1]
    assert [row["a"] for row in rows[1::3]] == [[None, None]] * repeat


def test_a_record_inside_itself_is_text_there() -> None:
    schema = record(("x", "int"), ("next", ["null", "R"]))
    value = {"x": 1, "next": {"x": 2, "next": {"x": 3, "next": None}}}
    rows, errors = decode([schema_version("AVRO", schema)], [avro_bytes(schema, value)])
    assert not errors
    assert rows[0]["x"] == 1
    assert json.loads(rows[0]["next"]) == value["next"]


def test_a_chain_that_never_ends_is_a_bad_record() -> None:
    schema = record(("x", "int"), ("next", ["null", "R"]))
    endless = b"\x00\x02" * 100_000
    _, errors = decode([schema_version("AVRO", schema)], [endless])
    assert errors == {0: "it is nested too deeply"}


@pytest.mark.parametrize(
    ("logical", "plain", "good", "bad"),
    [
        ("timestamp-millis", "long", [-62_135_596_800_000, 253_402_300_799_999], [2**63 - 1, -(2**63), 253_402_300_800_000]),
        ("timestamp-micros", "long", [0, 253_402_300_799_999_999], [-62_135_596_800_000_001, 253_402_300_800_000_000]),
        ("timestamp-nanos", "long", [2**63 - 1, -(2**63)], []),
        ("local-timestamp-millis", "long", [0], [-62_135_596_800_001]),
        ("date", "int", [-719_162, 2_932_896], [-719_163, 2_932_897]),
    ],
)
@pytest.mark.parametrize("repeat", [1, 20])
def test_times_are_within_the_years_that_spark_has(logical: str, plain: str, good: list[int], bad: list[int], repeat: int) -> None:
    schema = record(("t", {"type": plain, "logicalType": logical}))
    numbers = (good + bad) * repeat
    rows, errors = decode([schema_version("AVRO", schema)], [avro_bytes(record(("t", plain)), {"t": number}) for number in numbers])
    assert sorted(errors) == [row for row, number in enumerate(numbers) if number in bad]
    assert all("not within the years 1 to 9999" in text for text in errors.values())
    texts = [json.dumps({"t": number}).encode() for number in numbers * 5]
    as_json, errors = decode([schema_version("JSON", schema)], texts)
    assert sorted(errors) == [row for row, number in enumerate(numbers * 5) if number in bad]
    assert as_json == rows * 5


def test_logical_types_that_mean_nothing_are_the_plain_type() -> None:
    schema = record(
        ("a", {"type": "string", "logicalType": "date"}),
        ("b", {"type": "bytes", "logicalType": "decimal", "precision": 50}),
        ("c", {"type": "long", "logicalType": "from-the-future"}),
    )
    rows, _ = decode([schema_version("AVRO", schema)], [avro_bytes(record(*PLAIN), {"a": "x", "b": b"\x01", "c": 5})])
    assert rows == [{"a": "x", "b": b"\x01", "c": 5}]


PLAIN = (("a", "string"), ("b", "bytes"), ("c", "long"))


def test_a_uuid_of_sixteen_bytes_is_text() -> None:
    own = uuid.UUID(int=0x0123456789ABCDEF0123456789ABCDEF)
    schema = record(("u", ["null", {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}]))
    plain = record(("u", ["null", {"type": "fixed", "name": "U", "size": 16}]))
    values = [avro_bytes(plain, {"u": own.bytes if row % 2 else None}) for row in range(30)]
    assert decode([schema_version("AVRO", schema)], values)[0] == [{"u": str(own) if row % 2 else None} for row in range(30)]
    assert decode([schema_version("AVRO", schema)], values[:3])[0][1] == {"u": str(own)}  # one by one


def test_an_array_that_is_a_slice() -> None:
    """Whoever calls may have cut the values out of a larger array."""
    schema = record(("x", "int"), ("s", "string"))
    values = pa.array([avro_bytes(schema, {"x": row, "s": "s" * row}) for row in range(60)], pa.binary())
    decoder = AvroDecoder(parse_avro(json.dumps(schema).encode()))
    found = decoder.decode(values[20:50]).array
    assert found.field(0).to_pylist() == list(range(20, 50))
    assert found.field(1).to_pylist() == ["s" * row for row in range(20, 50)]


def test_only_wanted_fields_are_made() -> None:
    schema = record(("x", "int"), ("s", "string"), ("d", "double"))
    values = [avro_bytes(schema, {"x": row, "s": "abc", "d": 0.5}) for row in range(30)]
    rows, errors = decode([schema_version("AVRO", schema)], values, columns=["d", "x"])
    assert not errors
    assert rows == [{"d": 0.5, "x": row} for row in range(30)]
    assert list(rows[0]) == ["d", "x"]


@pytest.mark.parametrize("schema", ["long", {"type": "array", "items": "long"}, ["null", "long", "string"]])
def test_what_is_no_record_is_one_column(schema: Any) -> None:
    value = [1, 2] if isinstance(schema, dict) else 5
    rows, _ = decode([schema_version("AVRO", schema)], [avro_bytes(schema, value)])
    assert rows == [{"value": shown(schema, value)}]


@pytest.mark.parametrize("repeat", [1, 30])
def test_a_record_without_fields_is_null_only_where_its_union_is(repeat: int) -> None:
    schema = record(("x", record(name="E")), ("y", ["null", "E"]))
    written = [{"x": {}, "y": None}, {"x": {}, "y": {}}]
    rows, errors = decode([schema_version("AVRO", schema)], [avro_bytes(schema, value) for value in written] * repeat)
    assert (rows, errors) == (written * repeat, {})


def test_no_rows() -> None:
    schema = record(("x", "int"))
    assert decode([schema_version("AVRO", schema)], []) == ([], {})
    assert decode([schema_version("AVRO", schema)], [None, None])[0] == [{"x": None}, {"x": None}]


def test_dates_are_dates() -> None:
    schema = record(("d", {"type": "int", "logicalType": "date"}))
    days = [date(1969, 12, 31), date(2024, 2, 29)] * 10
    rows, _ = decode([schema_version("AVRO", schema)], [avro_bytes(schema, {"d": day}) for day in days])
    assert [row["d"] for row in rows] == days
