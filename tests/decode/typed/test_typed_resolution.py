"""Values of one Avro schema shown as another: as fastavro resolves them, and what it has no word for."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from fastavro.read import SchemaResolutionError
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_decode.typed.avro_decoder import AvroDecoder, ResolvingDecoder
from cepheid_decode.typed.avro_resolution import plan_resolution
from cepheid_decode.typed.avro_scalar_resolution import DifferentSchemaError
from cepheid_decode.typed.avro_schema import Node, parse_avro
from tests.decode.typed.typed_support import avro_bytes, record


def node(schema: Any) -> Node:
    return parse_avro(json.dumps(schema).encode())


def resolve(writer: Any, reader: Any, values: list[Any]) -> tuple[list[Any], dict[int, str]]:
    decoder = ResolvingDecoder(AvroDecoder, node(writer), node(reader))
    found = decoder.decode(pa.array([avro_bytes(writer, value) for value in values], pa.binary()))
    found.array.validate(full=True)
    assert found.array.type == decoder.type
    return found.array.to_pylist(), dict(found.errors)


def one(writer: Any, reader: Any, value: Any) -> Any:
    rows, errors = resolve(record(("x", writer)), record(("x", reader)), [{"x": value}])
    return errors[0] if errors else rows[0]["x"]


ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}
FEWER = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}
MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
UUID = {"type": "string", "logicalType": "uuid"}
DAY = {"type": "int", "logicalType": "date"}
MILLIS_OF_DAY = {"type": "int", "logicalType": "time-millis"}
MOMENT = datetime(2024, 2, 29, 1, 2, 3, 4000, UTC)
NOT_ALLOWED = "it has a value that the shown version of the schema does not allow"


@pytest.mark.parametrize(
    ("writer", "reader", "value", "shown"),
    [
        ("int", "long", -5, -5),
        ("int", "double", 5, 5.0),
        ("long", "float", 1 << 40, float(1 << 40)),
        ("float", "double", 0.5, 0.5),
        ("string", "bytes", "é", "é".encode()),
        ("bytes", "string", b"ok", "ok"),
        ("bytes", "string", b"\xff", NOT_ALLOWED),
        ("int", ["null", "long"], 5, 5),
        (["null", "int"], "long", 5, 5),
        (["null", "int"], "long", None, None),  # more than Avro allows: nulls stay
        (["null", "int"], ["long", "null"], 5, 5),
        (["int", "string"], "string", "s", "s"),
        (["int", "string"], "string", 5, NOT_ALLOWED),
        (["null", "int", "string"], ["null", "string", "long"], 5, {"member0": None, "member1": 5}),
        (["null", "int", "string"], ["null", "string", "long"], "s", {"member0": "s", "member1": None}),
        (["null", "int", "string"], ["null", "string", "long"], None, None),
        ("int", ["string", "double", "long"], 5, {"member0": None, "member1": 5.0, "member2": None}),
        ("long", ["string", "double", "long"], 5, {"member0": None, "member1": None, "member2": 5}),
        (ENUM, FEWER, "A", "A"),
        (ENUM, FEWER, "C", NOT_ALLOWED),
        (ENUM, {**FEWER, "default": "B"}, "C", "B"),
        ({"type": "array", "items": "int"}, {"type": "array", "items": "double"}, [1, 2], [1.0, 2.0]),
        ({"type": "array", "items": ENUM}, {"type": "array", "items": FEWER}, ["A", "C"], NOT_ALLOWED),
        ({"type": "map", "values": "int"}, {"type": "map", "values": "long"}, {"a": 1}, [("a", 1)]),
        ({"type": "map", "values": ENUM}, {"type": "map", "values": FEWER}, {"a": "C"}, NOT_ALLOWED),
        (MILLIS, MICROS, MOMENT, MOMENT),
        (MILLIS, "long", MOMENT, int(MOMENT.timestamp() * 1000)),
        ("long", MILLIS, 1000, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),
        ("long", MILLIS, 1 << 62, NOT_ALLOWED),
        (UUID, "string", "0-1", "0-1"),
        ("string", UUID, "0-1", "0-1"),
        (UUID, "bytes", "0-1", b"0-1"),
        (DAY, "long", date(1970, 1, 3), 2),
        ("int", DAY, 2, date(1970, 1, 3)),
        ("int", DAY, 2**31 - 1, NOT_ALLOWED),
        (MILLIS_OF_DAY, "long", time(0, 0, 1), 1000),
        (DECIMAL, {**DECIMAL, "precision": 10, "scale": 4}, Decimal("1.25"), Decimal("1.2500")),
    ],
)
def test_a_value_is_shown_as_another(writer: Any, reader: Any, value: Any, shown: Any) -> None:
    assert one(writer, reader, value) == shown


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("long", "int"),
        ("string", "int"),
        (["null", "string"], "int"),
        ("int", ["null", "string"]),
        (DECIMAL, {**DECIMAL, "scale": 1}),
        (DECIMAL, "bytes"),
        (MILLIS_OF_DAY, {"type": "long", "logicalType": "time-micros"}),
        ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "F", "size": 3}),
        ({"type": "array", "items": "int"}, {"type": "map", "values": "int"}),
    ],
)
def test_what_cannot_be_shown_is_refused_by_the_fields_name(writer: Any, reader: Any) -> None:
    with pytest.raises(DifferentSchemaError, match=r"field 'x'"):
        plan_resolution(node(record(("x", writer))), node(record(("x", reader))))


def with_fields(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": list(fields)}


@pytest.mark.parametrize(
    ("kind", "default", "shown"),
    [
        ("int", 5, 5),
        ("string", "d", "d"),
        ("bytes", "\u00ff", b"\xff"),
        (["null", "int"], None, None),
        (["int", "null"], 5, 5),
        (["int", "string"], 5, {"member0": 5, "member1": None}),
        (ENUM, "B", "B"),
        ({"type": "array", "items": "int"}, [1], [1]),
        ({"type": "map", "values": "int"}, {"a": 1}, [("a", 1)]),
        (record(("a", "int"), ("b", "string"), name="In"), {"a": 1, "b": "c"}, {"a": 1, "b": "c"}),
        (MILLIS, 1000, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),
        (DECIMAL, "\u007d", Decimal("1.25")),
    ],
)
def test_a_field_that_was_not_there_has_its_default(kind: Any, default: Any, shown: Any) -> None:
    reader = with_fields({"name": "new", "type": kind, "default": default}, {"name": "x", "type": "int"})
    rows, errors = resolve(record(("x", "int")), reader, [{"x": row} for row in range(30)])
    assert not errors
    assert rows == [{"new": shown, "x": row} for row in range(30)]


def test_a_field_without_default_is_missing() -> None:
    with pytest.raises(DifferentSchemaError, match="field 'y' is missing and has no default"):
        plan_resolution(node(record(("x", "int"))), node(record(("x", "int"), ("y", "int"))))


def test_a_renamed_field_is_found_by_its_alias() -> None:
    reader = with_fields({"name": "new", "aliases": ["other", "x"], "type": "long"})
    assert resolve(record(("x", "int")), reader, [{"x": 5}]) == ([{"new": 5}], {})


def test_fields_of_records_inside() -> None:
    inner = record(("a", "int"), ("gone", "string"), name="In")
    later = {"type": "record", "name": "In", "fields": [{"name": "b", "type": "int", "default": 7}, {"name": "a", "type": "long"}]}
    value = {"x": {"a": 1, "gone": "g"}}
    rows, _ = resolve(record(("x", ["null", inner])), record(("x", ["null", later])), [value, {"x": None}])
    assert rows == [{"x": {"b": 7, "a": 1}}, {"x": None}]


def test_a_record_inside_itself_stays_text() -> None:
    schema = record(("x", "int"), ("next", ["null", "R"]))
    later = with_fields({"name": "x", "type": "long"}, {"name": "next", "type": ["null", "R"]})
    rows, _ = resolve(schema, later, [{"x": 1, "next": {"x": 2, "next": None}}])
    assert rows == [{"x": 1, "next": '{"x": 2, "next": null}'}]


KINDS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("int", st.integers(-9, 9)),
    ("long", st.integers(-(2**24), 2**24)),  # which a float holds exactly
    ("float", st.sampled_from([0.5, -2.0])),
    ("double", st.sampled_from([0.25, 1e300])),
    ("string", st.text(max_size=4)),
    (["null", "int"], st.one_of(st.none(), st.integers(-9, 9))),
    (["null", "string"], st.one_of(st.none(), st.text(max_size=4))),
    ({"type": "array", "items": "int"}, st.lists(st.integers(-9, 9), max_size=3)),
    ({"type": "map", "values": "long"}, st.dictionaries(st.text(max_size=2), st.integers(-9, 9), max_size=2)),
]
NAMES = ("a", "b", "c", "d")


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_unrelated_schemas_are_shown_or_refused_as_by_fastavro(data: st.DataObject) -> None:
    fields = {name: data.draw(st.sampled_from(KINDS)) for name in NAMES[: data.draw(st.integers(1, 4))]}
    writer = record(*((name, kind) for name, (kind, _) in fields.items()))
    reader_fields = []
    for name in data.draw(st.permutations(NAMES)):
        kind = fields[name][0] if name in fields and data.draw(st.booleans()) else data.draw(st.sampled_from(KINDS))[0]
        if data.draw(st.booleans()):
            reader_fields.append({"name": name, "type": kind} | ({} if name in fields else {"default": default_of(kind)}))
    reader = with_fields(*reader_fields)
    written = data.draw(
        st.lists(st.fixed_dictionaries({name: values for name, (_, values) in fields.items()}), min_size=1, max_size=3)
    )
    expected = [as_fastavro(writer, reader, value) for value in written]
    try:
        rows, errors = resolve(writer, reader, written * 8)
    except DifferentSchemaError:
        # What cannot be planned, fastavro refuses in every value, but for nulls of a type that cannot be shown: for those alone
        # nobody wants a column that fails at the first value.
        assert all(found is REFUSED or None in value.values() for value, found in zip(written, expected, strict=True))
        return
    for row, value in enumerate(expected * 8):
        if value is not REFUSED:
            assert row not in errors
            assert without_members(reader, rows[row]) == value


def default_of(kind: Any) -> Any:
    if isinstance(kind, list):
        return None
    empty: dict[str, Callable[[], Any]] = {"array": list, "map": dict}
    return empty[kind["type"]]() if isinstance(kind, dict) else "d" if kind == "string" else 3


# What fastavro does otherwise than the specification, and no comparison can show:
# - float: it keeps the digits of an int or long that no float has, so numbers here have at most 24 bits;
# - bytes and string: the first of the two in a reader's union takes either, and bytes that are not UTF-8 are a UnicodeDecodeError.
#   So all text here is UTF-8, and `as_text` makes no difference between the two. (Which of them is right the column's type says.)
FLOAT_BITS = 24
TEXT = st.text(max_size=4)
BYTES = TEXT.map(str.encode)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "int": st.integers(-(2**FLOAT_BITS), 2**FLOAT_BITS),
    "long": st.integers(-(2**FLOAT_BITS), 2**FLOAT_BITS),
    "float": st.sampled_from([0.5, -2.0]),
    "double": st.sampled_from([0.25, 1e300]),
    "string": TEXT,
    "bytes": BYTES,
}
PROMOTED = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
DEFAULTS = {"boolean": True, "int": 7, "long": 7, "float": 0.5, "double": 0.5, "string": "d", "bytes": "d"}


class Evolution:
    """A random schema, values of it, and a random later version that can show what was written."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw
        self._names = 0

    def record(self, depth: int = 0) -> tuple[Any, st.SearchStrategy[Any], Any]:
        """The writer's schema, its values, and the reader's schema; the same of every other type."""
        name, fields = self._name(), [self._type(depth + 1) for _ in range(self._draw(st.integers(1 if depth == 0 else 0, 3)))]
        written = [(f"f{place}", writer) for place, (writer, _, _) in enumerate(fields)]
        values = st.fixed_dictionaries({f"f{place}": values for place, (_, values, _) in enumerate(fields)})
        shown = [{"name": f"f{place}", "type": reader} for place, (_, _, reader) in enumerate(fields) if self._draw(st.booleans())]
        if self._draw(st.booleans()):
            kind = self._draw(st.sampled_from(sorted(SCALARS)))
            shown.append({"name": "new", "type": [kind, "null"], "default": DEFAULTS[kind]})
        return record(*written, name=name), values, with_fields(*self._draw(st.permutations(shown))) | {"name": name}

    def _type(self, depth: int) -> tuple[Any, st.SearchStrategy[Any], Any]:
        match self._draw(st.sampled_from(["union", "null", *(["scalar"] if depth > 2 else ["array", "map", "plain"])])):
            case "union":
                return self._union(depth + 1)
            case "null":
                writer, values, reader = self._plain(depth)
                return ["null", writer], st.one_of(st.none(), values), self._draw(st.permutations(["null", reader]))
            case "scalar":
                return self._scalar()
            case "array":
                writer, values, reader = self._type(depth + 1)
                return {"type": "array", "items": writer}, st.lists(values, max_size=3), {"type": "array", "items": reader}
            case "map":
                writer, values, reader = self._type(depth + 1)
                return (
                    {"type": "map", "values": writer},
                    st.dictionaries(TEXT, values, max_size=2),
                    {"type": "map", "values": reader},
                )
        return self._plain(depth)

    def _plain(self, depth: int) -> tuple[Any, st.SearchStrategy[Any], Any]:
        """Neither null nor a union: what may be a branch of one."""
        match self._draw(st.sampled_from(["scalar", "scalar", "enum", "fixed", *(["record"] if depth < 3 else [])])):
            case "enum":
                name = self._name()
                later = {"type": "enum", "name": name, "symbols": ["B", "C", "A"]}
                if self._draw(st.booleans()):
                    later |= {"symbols": ["B", "C"], "default": "C"}
                return {"type": "enum", "name": name, "symbols": ["A", "B"]}, st.sampled_from("AB"), later
            case "fixed":
                fixed = {"type": "fixed", "name": self._name(), "size": 2}
                return fixed, st.sampled_from([b"ab", b"cd"]), fixed
            case "record":
                return self.record(depth)
        return self._scalar()

    def _scalar(self) -> tuple[Any, st.SearchStrategy[Any], Any]:
        kind = self._draw(st.sampled_from(sorted(SCALARS)))
        return kind, SCALARS[kind], self._draw(st.sampled_from([kind, *PROMOTED.get(kind, ())]))

    def _union(self, depth: int) -> tuple[Any, st.SearchStrategy[Any], Any]:
        """Null and two types or more. The later version may lack some, whose rows are then refused, and may have another one."""
        several = [self._plain(depth) for _ in range(self._draw(st.integers(2, 3)))]
        several = [each for place, each in enumerate(several) if each[0] not in [other for other, _, _ in several[:place]]]
        values = st.one_of(st.none(), *(values for _, values, _ in several))
        readers: list[Any] = ["null"] if self._draw(st.booleans()) else []
        for writer, _, reader in several:
            if writer is several[0][0] or self._draw(st.booleans()):
                readers += [] if reader in readers else [reader]
        more = self._draw(st.sampled_from(sorted(SCALARS)))
        readers += [more] if more not in readers and self._draw(st.booleans()) else []
        return ["null", *(writer for writer, _, _ in several)], values, self._draw(st.permutations(readers))

    def _name(self) -> str:
        self._names += 1
        return f"N{self._names}"


def compare_with_fastavro(data: st.DataObject) -> None:
    writer, values, reader = Evolution(data).record()
    written = data.draw(st.lists(values, min_size=1, max_size=4))
    for copies in (1, 64 // len(written)):  # one by one, and in lockstep, also in a second round of an array
        rows, errors = resolve(writer, reader, written * copies)
        for row, value in enumerate(written * copies):
            expected = as_fastavro(writer, reader, value)
            if expected is not REFUSED:
                assert row not in errors
                assert as_text(without_members(reader, rows[row])) == as_text(expected)


@settings(max_examples=40, derandomize=True)
@given(data=st.data())
def test_an_evolved_schema_shows_what_fastavro_shows(data: st.DataObject) -> None:
    compare_with_fastavro(data)


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data())
def test_many_evolved_schemas_show_what_fastavro_shows(data: st.DataObject) -> None:
    compare_with_fastavro(data)


REFUSED = object()


def as_fastavro(writer: Any, reader: Any, value: Any) -> Any:
    """What fastavro reads, or REFUSED. It gives defaults as the schema's JSON has them, which `as_text` makes equal."""
    try:
        return fastavro.schemaless_reader(
            io.BytesIO(avro_bytes(writer, value)), fastavro.parse_schema(writer), fastavro.parse_schema(reader)
        )
    except SchemaResolutionError:
        return REFUSED


def without_members(schema: Any, value: Any) -> Any:
    """A value of ours as Python has it: of a union the value itself instead of a struct of one member a branch, maps as dicts."""
    if value is None:
        return None
    if isinstance(schema, list):
        several = [branch for branch in schema if branch != "null"]
        if len(several) == 1:
            return without_members(several[0], value)
        (index,) = (place for place, member in enumerate(value.values()) if member is not None)
        return without_members(several[index], value[f"member{index}"])
    match schema:
        case {"type": "record", "fields": fields}:
            return {field["name"]: without_members(field["type"], value[field["name"]]) for field in fields}
        case {"type": "array", "items": items}:
            return [without_members(items, item) for item in value]
        case {"type": "map", "values": values}:
            return {key: without_members(values, item) for key, item in value}
    return value


def as_text(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode()
        case dict():
            return {key: as_text(item) for key, item in value.items()}
        case list():
            return [as_text(item) for item in value]
    return value
