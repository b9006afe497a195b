"""The message type that a Protobuf schema describes.

PROTOBUF_NATIVE   {"fileDescriptorSet": base64, "rootMessageTypeName": "pkg.Message", "rootFileDescriptorName": "file.proto"}
PROTOBUF          as old Java clients send it: the definition is an Avro schema, which has no field numbers; those are in the
                  property `__PARSING_INFO__`, for the fields of the message itself, not for those of nested messages
                  (ProtobufSchema of the Java client). Nested messages and enums are shown as their bytes and numbers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from cepheid_decode.errors import BadOptionError

PARSING_INFO = "__PARSING_INFO__"
_ROOT = "cepheid.Shown"
_F = FieldDescriptorProto
# Not decoded further: the schema does not describe their contents.
_OPAQUE = {"MESSAGE": _F.TYPE_BYTES, "GROUP": None, "ENUM": _F.TYPE_INT32}


def native_descriptor(definition: bytes) -> Descriptor:
    """Raises BadOptionError."""
    try:
        document = json.loads(definition)
        files = FileDescriptorSet.FromString(base64.b64decode(document["fileDescriptorSet"]))
        return _pool(files).FindMessageTypeByName(document["rootMessageTypeName"])
    except Exception as error:  # the library raises TypeError, KeyError, DecodeError and its own, depending on its version
        raise BadOptionError(
            f"the schema's definition is not a valid Protobuf descriptor ({error!r}); read with readMode=messages"
        ) from None


def _pool(files: FileDescriptorSet) -> DescriptorPool:
    """Add every file after those that it imports, whatever their order in the set."""
    waiting = {file.name: file for file in files.file}
    pool = DescriptorPool()

    def add(name: str) -> None:
        if (file := waiting.pop(name, None)) is not None:
            for dependency in file.dependency:
                add(dependency)
            pool.AddSerializedFile(file.SerializeToString())

    for name in list(waiting):
        add(name)
    return pool


def old_descriptor(properties: Mapping[str, str]) -> Descriptor:
    """Raises BadOptionError."""
    try:
        infos = json.loads(properties[PARSING_INFO])
        file = FileDescriptorProto(name="cepheid_shown.proto", package="cepheid", syntax="proto2")
        message = file.message_type.add(name="Shown")
        for info in infos:
            if (kind := _field_type(info)) is not None:
                label = _F.LABEL_REPEATED if "REPEATED" in str(info.get("label", "")) else _F.LABEL_OPTIONAL
                message.field.add(name=info["name"], number=int(info["number"]), type=kind, label=label)
        return _pool(FileDescriptorSet(file=[file])).FindMessageTypeByName(_ROOT)
    except Exception as error:  # see above
        raise BadOptionError(
            f"the schema is of type PROTOBUF without usable field numbers in its property {PARSING_INFO} ({error!r}); "
            "read with readMode=messages, or let producers use PROTOBUF_NATIVE"
        ) from None


def _field_type(info: Mapping[str, Any]) -> _F.Type.ValueType | None:
    name = str(info["type"]).removeprefix("TYPE_")
    return _OPAQUE[name] if name in _OPAQUE else _F.Type.Value(f"TYPE_{name}")
