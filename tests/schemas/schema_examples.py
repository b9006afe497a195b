"""Schemas to compare, written short."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from cepheid_broker.schemas import Schema, SchemaType
from cepheid_broker.schemas.key_value import join_key_value

F = FieldDescriptorProto
OPTIONAL, REQUIRED, REPEATED = F.LABEL_OPTIONAL, F.LABEL_REQUIRED, F.LABEL_REPEATED


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def record(*fields: dict[str, Any], name: str = "User") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def avro(document: Any, kind: SchemaType = SchemaType.AVRO) -> Schema:
    return Schema(kind, json.dumps(document).encode())


def user(*fields: dict[str, Any], kind: SchemaType = SchemaType.AVRO) -> Schema:
    return avro(record(*fields), kind)


def proto_field(number: int, name: str, kind: int, label: int = OPTIONAL, type_name: str = "") -> FieldDescriptorProto:
    made = F(name=name, number=number, type=kind, label=label)  # type: ignore[arg-type]
    if type_name:
        made.type_name = type_name
    return made


def protobuf(*fields: FieldDescriptorProto, root: str = "User", inner: tuple[DescriptorProto, ...] = ()) -> Schema:
    message = DescriptorProto(name=root, field=fields)
    files = FileDescriptorSet(file=[FileDescriptorProto(name="user.proto", package="t", message_type=[message, *inner])])
    definition = {
        "fileDescriptorSet": base64.b64encode(files.SerializeToString()).decode(),
        "rootMessageTypeName": f"t.{root}",
        "rootFileDescriptorName": "user.proto",
    }
    return Schema(SchemaType.PROTOBUF_NATIVE, json.dumps(definition).encode())


def key_value(key: Schema, value: Schema, encoding: str = "INLINE") -> Schema:
    properties = {"key.schema.type": key.type.value, "value.schema.type": value.type.value, "kv.encoding.type": encoding}
    return Schema(SchemaType.KEY_VALUE, join_key_value(key.data, value.data), properties)
