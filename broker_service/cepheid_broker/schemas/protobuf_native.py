"""Protobuf schemas as descriptors: parsed from clients' definitions, and compared by what the wire format allows.

    {"fileDescriptorSet": base64, "rootMessageTypeName": "pkg.Message", "rootFileDescriptorName": "file.proto"}

Fields are identified by number. Compatible: fields are added and removed, unless one is `required`; a field is renamed; a type
changes within its group: int32, uint32, int64, uint64, bool, enum · sint32, sint64 · string, bytes · fixed32, sfixed32 · fixed64,
sfixed64.
Incompatible: another type under a number, another number for a name, repeated or not, another root message.
Source of the groups: protobuf.dev, "Updating A Message Type".
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from google.protobuf.message import DecodeError

from cepheid_broker.errors import InvalidSchemaError
from cepheid_broker.schemas.avro_schema import load_json
from cepheid_broker.schemas.mismatch import Mismatch, joined, shown

MAX_COMPARISONS = 100_000
MAX_DEPTH = 150

F = FieldDescriptorProto
_GROUPS: tuple[frozenset[int], ...] = (
    frozenset({F.TYPE_INT32, F.TYPE_UINT32, F.TYPE_INT64, F.TYPE_UINT64, F.TYPE_BOOL, F.TYPE_ENUM}),
    frozenset({F.TYPE_SINT32, F.TYPE_SINT64}),
    frozenset({F.TYPE_STRING, F.TYPE_BYTES}),
    frozenset({F.TYPE_FIXED32, F.TYPE_SFIXED32}),
    frozenset({F.TYPE_FIXED64, F.TYPE_SFIXED64}),
)
_INNER = (F.TYPE_MESSAGE, F.TYPE_GROUP)


@dataclass(frozen=True, slots=True)
class ProtobufSchema:
    root: str
    messages: Mapping[str, DescriptorProto]
    """By full name with a leading dot, as fields refer to them."""


def parse_protobuf(text: bytes) -> tuple[ProtobufSchema, bytes]:
    """Return the schema, and bytes that are equal for schemas of the same meaning. Raises InvalidSchemaError."""
    document = load_json(text)
    if not isinstance(document, dict):
        raise InvalidSchemaError("the definition is not a JSON object with fileDescriptorSet and rootMessageTypeName")
    encoded, root = _text(document, "fileDescriptorSet"), _text(document, "rootMessageTypeName")
    try:
        files = FileDescriptorSet.FromString(base64.b64decode(encoded, validate=True))
    except (ValueError, DecodeError) as error:
        raise InvalidSchemaError(f"fileDescriptorSet is not the base64 of a FileDescriptorSet: {error}") from None
    _check_texts(files)
    messages = {name: message for file in files.file for name, message in _messages(_prefix(file), file.message_type, 0)}
    enums = {name for file in files.file for name in _enums(file, messages)}
    if f".{root}" not in messages:
        raise InvalidSchemaError(f"rootMessageTypeName {shown(root)} is in none of the {len(files.file)} files")
    schema = ProtobufSchema(f".{root}", messages)
    _check_references(schema, enums)
    return schema, root.encode() + b"\0" + _canonical(files.file)


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidSchemaError(f"the definition has no {key}")
    return value


def _check_texts(files: FileDescriptorSet) -> None:
    """Check that all names are UTF-8: for proto2 the parser does not, and returns `bytes` for other text."""
    pending: list[DescriptorProto] = []
    for file in files.file:
        _require_text(file.name, file.package, *(enum.name for enum in file.enum_type))
        pending.extend(file.message_type)
    while pending:
        message = pending.pop()
        _require_text(message.name, *(enum.name for enum in message.enum_type))
        for field in message.field:
            _require_text(field.name, field.type_name)
        pending.extend(message.nested_type)


def _require_text(*texts: str | bytes) -> None:
    for text in texts:
        if isinstance(text, bytes):
            raise InvalidSchemaError(f"a name in fileDescriptorSet is not UTF-8: {text[:40]!r}")


def _prefix(file: FileDescriptorProto) -> str:
    return f".{file.package}" if file.package else ""


def _messages(prefix: str, found: Iterable[DescriptorProto], depth: int) -> Iterable[tuple[str, DescriptorProto]]:
    if depth > MAX_DEPTH:
        raise InvalidSchemaError(f"messages are nested deeper than {MAX_DEPTH} levels")
    for message in found:
        name = f"{prefix}.{message.name}"
        yield name, message
        yield from _messages(name, message.nested_type, depth + 1)


def _enums(file: FileDescriptorProto, messages: Mapping[str, DescriptorProto]) -> Iterable[str]:
    yield from (f"{_prefix(file)}.{enum.name}" for enum in file.enum_type)
    for name, message in _messages(_prefix(file), file.message_type, 0):
        yield from (f"{name}.{enum.name}" for enum in message.enum_type)


def _check_references(schema: ProtobufSchema, enums: set[str]) -> None:
    for name, message in schema.messages.items():
        for field in message.field:
            known = schema.messages if field.type in _INNER else enums if field.type == F.TYPE_ENUM else None
            if known is not None and field.type_name not in known:
                raise InvalidSchemaError(
                    f"message {shown(name[1:])}, field {shown(field.name)}: {shown(field.type_name[1:])} is in none of the files"
                )


def _canonical(files: Iterable[FileDescriptorProto]) -> bytes:
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        bare = FileDescriptorProto()
        bare.CopyFrom(file)
        bare.ClearField("source_code_info")
        encoded = bare.SerializeToString(deterministic=True)
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()


def protobuf_mismatch(reader: ProtobufSchema, writer: ProtobufSchema) -> Mismatch | None:
    """Return why the reader cannot read all that the writer may write, or None. Raises InvalidSchemaError beyond the bounds."""
    if reader.root != writer.root:
        return Mismatch("", f"root message {shown(reader.root[1:])}", f"root message {shown(writer.root[1:])}")
    return _Comparison(reader, writer).compare(reader.root, writer.root, "", 0)


class _Comparison:
    def __init__(self, reader: ProtobufSchema, writer: ProtobufSchema) -> None:
        self._reader = reader.messages
        self._writer = writer.messages
        self._compared: dict[tuple[str, str], None] = {}
        self._comparisons = 0

    def compare(self, reader: str, writer: str, path: str, depth: int) -> Mismatch | None:
        if (reader, writer) in self._compared:
            return None  # the first mismatch ends everything, so this pair fits or is being compared
        self._compared[reader, writer] = None
        own, other = self._reader[reader], self._writer[writer]
        written = {field.number: field for field in other.field}
        numbers = {field.name: field.number for field in other.field}
        for field in own.field:
            self._comparisons += 1
            if self._comparisons > MAX_COMPARISONS or depth > MAX_DEPTH:
                raise InvalidSchemaError(f"the schema is too large to be compared (at field {shown(path)})")
            where = joined(path, field.name)
            source = written.get(field.number)
            number = numbers.get(field.name, field.number)
            if number != field.number:
                return Mismatch(where, f"number {field.number}", f"number {number}")
            if source is None:
                if field.label == F.LABEL_REQUIRED:
                    return Mismatch(where, "a required field", "no such field")
            elif (found := self._fields(field, source, where, depth)) is not None:
                return found
        return None

    def _fields(self, own: F, source: F, where: str, depth: int) -> Mismatch | None:
        group = next((group for group in _GROUPS if own.type in group), frozenset({own.type}))
        if source.type not in group or (own.label == F.LABEL_REPEATED) != (source.label == F.LABEL_REPEATED):
            return Mismatch(where, _described(own), _described(source))
        if own.label == F.LABEL_REQUIRED and source.label != F.LABEL_REQUIRED:
            return Mismatch(where, "a required field", "an optional field")
        if own.type in _INNER:
            return self.compare(own.type_name, source.type_name, where, depth + 1)
        return None


def _described(field: F) -> str:
    kind = F.Type.Name(field.type).removeprefix("TYPE_").lower()
    named = f" {shown(field.type_name[1:])}" if field.type_name else ""
    repeated = "repeated " if field.label == F.LABEL_REPEATED else ""
    return f"{repeated}{kind}{named} as number {field.number}"
