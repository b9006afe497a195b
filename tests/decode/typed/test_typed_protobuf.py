"""Protobuf values as columns: what the library reads, whatever the version they were written with."""

from __future__ import annotations

import base64
import json
import random
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_decode import SchemaVersion
from cepheid_decode.typed import typed_fields
from cepheid_decode.typed.protobuf_schema import native_descriptor
from tests.decode.typed.typed_support import decode, schema_version

F = FieldDescriptorProto
FLAT = {
    "i32": (1, F.TYPE_INT32),
    "s64": (2, F.TYPE_SINT64),
    "u32": (3, F.TYPE_UINT32),
    "u64": (4, F.TYPE_UINT64),
    "f32": (5, F.TYPE_FIXED32),
    "sf64": (6, F.TYPE_SFIXED64),
    "real": (7, F.TYPE_DOUBLE),
    "single": (8, F.TYPE_FLOAT),
    "yes": (9, F.TYPE_BOOL),
    "text": (16, F.TYPE_STRING),
    "raw": (17, F.TYPE_BYTES),
}


def flat_file(syntax: str = "proto3") -> FileDescriptorProto:
    file = FileDescriptorProto(name="flat.proto", package="p", syntax=syntax)
    message = file.message_type.add(name="Flat")
    for name, (number, kind) in FLAT.items():
        message.field.add(name=name, number=number, type=kind, label=F.LABEL_OPTIONAL)
    color = file.enum_type.add(name="Color")
    for color_name, number in (("RED", 0), ("BLUE", 5), ("BLACK", -3)):
        color.value.add(name=color_name, number=number)
    message.field.add(name="color", number=20, type=F.TYPE_ENUM, label=F.LABEL_OPTIONAL, type_name=".p.Color")
    if syntax == "proto3":
        message.oneof_decl.add(name="_maybe")
        message.field.add(name="maybe", number=300, type=F.TYPE_SINT32, label=F.LABEL_OPTIONAL, oneof_index=0, proto3_optional=True)
    return file


def rich_file() -> FileDescriptorProto:
    """enum, Timestamp, repeated, map, message inside itself, presence."""
    file = FileDescriptorProto(name="rich.proto", package="p", syntax="proto3", dependency=["google/protobuf/timestamp.proto"])
    color = file.enum_type.add(name="Color")
    color.value.add(name="RED", number=0)
    color.value.add(name="BLUE", number=5)
    message = file.message_type.add(name="Rich")
    entry = message.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=F.TYPE_INT32, label=F.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=F.TYPE_UINT64, label=F.LABEL_OPTIONAL)
    part = message.nested_type.add(name="Part")
    part.field.add(name="n", number=1, type=F.TYPE_INT32, label=F.LABEL_OPTIONAL)
    fields: list[tuple[str, int, int, str]] = [
        ("color", 1, F.TYPE_ENUM, ".p.Color"),
        ("at", 2, F.TYPE_MESSAGE, ".google.protobuf.Timestamp"),
        ("part", 3, F.TYPE_MESSAGE, ".p.Rich.Part"),
        ("next", 4, F.TYPE_MESSAGE, ".p.Rich"),
    ]
    for name, number, kind, type_name in fields:
        message.field.add(name=name, number=number, type=F.Type.ValueType(kind), label=F.LABEL_OPTIONAL, type_name=type_name)
    message.field.add(name="numbers", number=5, type=F.TYPE_INT64, label=F.LABEL_REPEATED)
    message.field.add(name="parts", number=6, type=F.TYPE_MESSAGE, label=F.LABEL_REPEATED, type_name=".p.Rich.Part")
    message.field.add(name="counts", number=7, type=F.TYPE_MESSAGE, label=F.LABEL_REPEATED, type_name=".p.Rich.CountsEntry")
    message.oneof_decl.add(name="_maybe")
    message.field.add(name="maybe", number=8, type=F.TYPE_INT32, label=F.LABEL_OPTIONAL, oneof_index=0, proto3_optional=True)
    return file


def native(root: str, *files: FileDescriptorProto, number: int = 0) -> SchemaVersion:
    encoded = base64.b64encode(FileDescriptorSet(file=files).SerializeToString()).decode()
    document = {"fileDescriptorSet": encoded, "rootMessageTypeName": root, "rootFileDescriptorName": files[0].name}
    return schema_version("PROTOBUF_NATIVE", document, number)


def message_class(schema: SchemaVersion) -> Any:
    return GetMessageClass(native_descriptor(schema.definition))


def rich() -> SchemaVersion:
    timestamp = FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(timestamp)
    return native("p.Rich", rich_file(), timestamp)  # what is imported comes last, as some clients send it


def test_what_a_message_may_hold() -> None:
    schema = rich()
    message = message_class(schema)(color=5, numbers=[1, -2], maybe=0, counts={7: 2**64 - 1})
    message.at.seconds, message.at.nanos = 1, 2_999
    message.part.n = 3
    message.next.part.n = 4
    message.parts.add(n=5)
    rows, errors = decode([schema], [message.SerializeToString(), b"", None])
    assert not errors
    text = rows[0].pop("next")
    assert json.loads(text) == {"part": {"n": 4}}
    assert rows[0] == {
        "color": "BLUE",
        "at": datetime(1970, 1, 1, 0, 0, 1, 2, UTC),
        "part": {"n": 3},
        "numbers": [1, -2],
        "parts": [{"n": 5}],
        "counts": [(7, Decimal(2**64 - 1))],
        "maybe": 0,
    }
    absent = {"color": "RED", "at": None, "part": None, "next": None, "numbers": [], "parts": [], "counts": [], "maybe": None}
    assert rows[1] == absent
    assert rows[2] == dict.fromkeys(absent)


def test_an_enum_number_without_name() -> None:
    assert decode([rich()], [b"\x08\x09"])[0][0]["color"] == "9"


def test_the_types() -> None:
    types = {field.name: field.type for field in typed_fields([native("p.Flat", flat_file())], None)}
    assert types["u32"] == types["f32"] == pa.int64()
    assert types["u64"] == pa.decimal128(20, 0)
    assert types["raw"] == pa.binary()


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "i32": st.integers(-(2**31), 2**31 - 1),
        "s64": st.integers(-(2**63), 2**63 - 1),
        "u32": st.integers(0, 2**32 - 1),
        "u64": st.integers(0, 2**64 - 1),
        "f32": st.integers(0, 2**32 - 1),
        "sf64": st.integers(-(2**63), 2**63 - 1),
        "real": st.floats(allow_nan=False),
        "single": st.floats(allow_nan=False, width=32),
        "yes": st.booleans(),
        "text": st.text(max_size=9),
        "raw": st.binary(max_size=9),
        "color": st.sampled_from([0, 5, -3]),
    },
)


@pytest.mark.slow
@pytest.mark.parametrize("syntax", ["proto2", "proto3"])
@settings(max_examples=50)
@given(values=st.lists(VALUES, min_size=1, max_size=6))
def test_flat_messages(syntax: str, values: list[dict[str, Any]]) -> None:
    schema = native("p.Flat", flat_file(syntax))
    make = message_class(schema)
    rows, errors = decode([schema], [make(**value).SerializeToString() for value in values * 12])
    assert not errors
    assert rows == [columns_of(make(**value)) for value in values * 12]
    some, _ = decode([schema], [make(**value).SerializeToString() for value in values * 12], columns=["color", "text"])
    assert some == [{name: row[name] for name in ("color", "text")} for row in rows]


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), values=st.lists(VALUES, min_size=2, max_size=6))
def test_mutated_bytes_are_what_the_library_says(seed: int, values: list[dict[str, Any]]) -> None:
    schema = native("p.Flat", flat_file())
    make, rng = message_class(schema), random.Random(seed)
    encoded = [bytearray(make(**value).SerializeToString()) for value in values * 12]
    for _ in range(rng.randrange(1, 12)):
        value = rng.choice(encoded)
        place = rng.randrange(len(value) + 1)
        value[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    rows, errors = decode([schema], [bytes(value) for value in encoded])
    for row, value in enumerate(encoded):
        try:
            message = make.FromString(bytes(value))
        except Exception:  # whatever it raises
            assert row in errors
            continue
        assert row not in errors
        assert repr(rows[row]) == repr(columns_of(message))


def columns_of(message: Any) -> dict[str, Any]:
    """What the library says that a flat message holds."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            value = None
        elif field.name == "u64":
            value = Decimal(value)
        elif field.name == "color":
            value = {0: "RED", 5: "BLUE", -3: "BLACK"}.get(value, str(value))
        found[field.name] = value
    return found


def test_fields_late_twice_or_unknown() -> None:
    schema = native("p.Flat", flat_file())
    make = message_class(schema)
    a, b = make(i32=7, text="a").SerializeToString(), make(i32=9, u64=1, color=5).SerializeToString()
    values = [a, b, a + b, b + a, a + b"\xf8\x07\x01", b"\x08", b"\xa0\x01\x09"] * 6
    rows, errors = decode([schema], values)
    assert sorted(errors) == list(range(5, 42, 7))
    good = [row for row in range(42) if row % 7 != 5]
    assert [rows[row] for row in good] == [columns_of(make.FromString(values[row])) for row in good]


def test_messages_of_another_version_are_read_with_the_shown_one() -> None:
    more = flat_file()
    more.message_type[0].field.add(name="later", number=40, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    schemas = [native("p.Flat", flat_file(), number=0), native("p.Flat", more, number=1)]
    old = message_class(schemas[0])(i32=3).SerializeToString()
    rows, errors = decode(schemas, [old], written_with=[schemas[0].version])
    assert not errors
    assert (rows[0]["i32"], rows[0]["later"]) == (3, "")


def test_a_schema_of_old_clients_knows_numbers_by_its_properties() -> None:
    infos = [
        {"number": 1, "name": "i32", "type": "INT32", "label": "LABEL_OPTIONAL", "definition": None},
        {"number": 16, "name": "text", "type": "STRING", "label": "LABEL_OPTIONAL", "definition": None},
        {"number": 30, "name": "inner", "type": "MESSAGE", "label": "LABEL_OPTIONAL", "definition": None},
        {"number": 31, "name": "many", "type": "SINT32", "label": "LABEL_REPEATED", "definition": None},
    ]
    schema = schema_version("PROTOBUF", b'{"type":"record"}', __PARSING_INFO__=json.dumps(infos))
    written = message_class(native("p.Flat", flat_file()))(i32=3, text="é").SerializeToString()
    rows, errors = decode([schema], [written, b"\xf2\x01\x02\x08\x01", b"\xff"])
    assert rows[0] == {"i32": 3, "text": "é", "inner": None, "many": []}
    assert rows[1]["inner"] == b"\x08\x01"
    assert list(errors) == [2]
