"""The schema says what the reference tables say, both ways, and the generated code says what the schema says."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from cepheid_wire import pulsar_api_pb2 as pb

TABLES = Path(__file__).parents[1] / "reference" / "pulsar-wire"
CORE = Path(__file__).parents[2] / "core"
PACKAGE = "pulsar.proto."
SCALARS = {value: name.removeprefix("TYPE_").lower() for name, value in vars(FieldDescriptor).items() if name.startswith("TYPE_")}


def _descriptors(messages: Any) -> Iterator[Descriptor]:
    for message in messages:
        yield message
        yield from _descriptors(message.nested_types)


def _fields_of_schema() -> set[tuple[str, ...]]:
    rows = set()
    for message in _descriptors(pb.DESCRIPTOR.message_types_by_name.values()):
        name = message.full_name.removeprefix(PACKAGE)
        rows.update((name, *_row(field)) for field in message.fields)
        if not message.fields:
            rows.add((name, "", "", "", "", "", ""))
    return rows


def _row(field: FieldDescriptor) -> tuple[str, ...]:
    label = "repeated" if field.is_repeated else "required" if field.is_required else "optional"
    if field.containing_oneof is not None:
        label = f"oneof {field.containing_oneof.name}"
    kind = field.message_type or field.enum_type
    type_name = kind.full_name.removeprefix(PACKAGE) if kind is not None else SCALARS[field.type]
    packed = str(field.is_packed).lower() if field.is_repeated else ""
    return field.name, str(field.number), label, type_name, _default(field), packed


def _default(field: FieldDescriptor) -> str:
    if not field.has_default_value:
        return ""
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[field.default_value].name)
    return str(field.default_value).lower()


def _enum_rows() -> set[tuple[str, str, str]]:
    enums: list[EnumDescriptor] = [*pb.DESCRIPTOR.enum_types_by_name.values()]
    for message in _descriptors(pb.DESCRIPTOR.message_types_by_name.values()):
        enums += message.enum_types
    return {(e.full_name.removeprefix(PACKAGE), v.name, str(v.number)) for e in enums for v in e.values}


def _table(name: str) -> list[tuple[str, ...]]:
    with (TABLES / name).open(newline="") as file:
        return [tuple(row) for row in csv.reader(file)][1:]


def test_messages_equal_the_table() -> None:
    table = _table("messages.csv")
    assert len(table) == len(set(table)) > 400
    assert _fields_of_schema() == set(table)


def test_enums_equal_the_table() -> None:
    table = _table("enums.csv")
    assert len(table) == len(set(table)) > 150
    assert _enum_rows() == set(table)


def test_generated_code_is_of_this_schema(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    out = tmp_path / "schema.bin"
    arguments = ["protoc", "-I", str(CORE), f"--descriptor_set_out={out}", f"--pyi_out={tmp_path}", "cepheid_wire/pulsar_api.proto"]
    assert protoc.main(arguments) == 0
    # Descriptors are compared, not files: the file names the compiler's version, which differs between machines.
    (compiled,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    for message in [*_walk(compiled.message_type), *_walk(committed.message_type)]:
        for field in message.field:
            field.ClearField("json_name")  # some compilers write it into a descriptor, others do not
    assert compiled == committed
    stub = (tmp_path / "cepheid_wire" / "pulsar_api_pb2.pyi").read_text()
    committed_stub = (CORE / "cepheid_wire" / "pulsar_api_pb2.pyi").read_text()
    assert _names(stub) == _names(committed_stub)


def _walk(messages: Any) -> Iterator[Any]:
    for message in messages:
        yield message
        yield from _walk(message.nested_type)


def _names(stub: str) -> list[str]:
    """What a stub declares, without the lines that the header of the schema says to delete."""
    return [line for line in re.findall(r"^ *(?:class )?\w+[:(].*", stub, re.M) if not line.lstrip().startswith("None:")]
