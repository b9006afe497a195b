"""Encodes records as Avro or JSON: columns are checked against the topic's schema, rows become payloads. No I/O.

    definition_of(columns) ──► an Avro definition        if the topic has no schema yet; JSON schemas are defined in Avro, too
    RecordEncoder(kind, definition, columns)             a column that does not fit is an error here, before any task runs
        .encode(record) ──► payload                      a value that does not fit is a ValueError, which names the field

| Spark | Avro, and JSON |
| boolean, tinyint to bigint, float, double, string, binary | boolean, int, long, float, double, string, bytes (base64 in JSON) |
| date; timestamp; timestamp_ntz; decimal | int, long, long, bytes with the logical type (a text in JSON: decimal) |
| struct; array; map<string, …> | record; array; map |
A nullable column is a union with null. Fields without a column get their default, or null.
"""

from __future__ import annotations

import base64
import difflib
import io
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from cepheid_decode import BadOptionError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Converter = Callable[[Any], Any]
"""Converts a value of pyarrow's `to_pylist` for encoding. Raises ValueError."""

AVRO, JSON = "AVRO", "JSON"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SMALL = ("tinyint", "smallint", "int")
_ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "boolean": ("boolean",),
    "int": _SMALL,
    "long": (*_SMALL, "bigint"),
    "float": ("float",),
    "double": ("float", "double"),
    "string": ("string",),
    "bytes": ("binary",),
    "date": ("date",),
    "timestamp-millis": ("timestamp",),
    "timestamp-micros": ("timestamp",),
    "timestamp-nanos": ("timestamp",),
    "local-timestamp-millis": ("timestamp_ntz",),
    "local-timestamp-micros": ("timestamp_ntz",),
    "local-timestamp-nanos": ("timestamp_ntz",),
}
"""Accepted types of columns, by the logical type of a field, or its type."""
_WRITTEN = {"tinyint": "int", "smallint": "int", "int": "int", "bigint": "long", "binary": "bytes"}
_WRITTEN |= {name: name for name in ("boolean", "float", "double", "string")}
_WRITTEN_LOGICAL = {
    "date": {"type": "int", "logicalType": "date"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros"},
    "timestamp_ntz": {"type": "long", "logicalType": "local-timestamp-micros"},
}


class RecordEncoder:
    """Encodes records. Raises BadOptionError if the columns do not fit the definition, MissingExtraError without fastavro."""

    def __init__(self, kind: str, definition: Mapping[str, Any], columns: StructType) -> None:
        self._is_json = kind == JSON
        self._convert = _Fitting(self._is_json).record(dict(definition), columns, "")
        if not self._is_json:
            try:
                import fastavro
            except ImportError:
                from cepheid import MissingExtraError

                raise MissingExtraError(
                    "encode=avro needs the library fastavro: pip install 'cepheid[avro]', for executors too"
                ) from None
            self._write = fastavro.schemaless_writer
            self._parsed = fastavro.parse_schema(dict(definition))

    def encode(self, record: dict[str, Any]) -> bytes:
        """Return the payload. Raises ValueError."""
        converted = self._convert(record)
        if self._is_json:
            return json.dumps(converted, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        buffer = io.BytesIO()
        self._write(buffer, self._parsed, converted)
        return buffer.getvalue()


class _Fitting:
    """Matches columns with a definition. `path` names a column in errors."""

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self._named: dict[str, Any] = {}

    def record(self, avro: dict[str, Any], columns: StructType, path: str) -> Converter:
        if avro.get("type") != "record":
            raise BadOptionError(
                f"the topic's schema is not a record, but {avro.get('type')}: write a column value with the payload"
            )
        self._named[avro["name"]] = avro
        given = {field.name: field for field in columns.fields}
        fields = {field["name"]: field for field in avro["fields"]}
        if extra := [name for name in given if name not in fields]:
            near = difflib.get_close_matches(extra[0], fields, n=1)
            advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(fields)}"
            raise BadOptionError(f"the topic's schema has no field {path}{extra[0]}; {advice}", column=extra[0])
        converters: dict[str, Converter] = {}
        constants: dict[str, Any] = {}
        for name, field in fields.items():
            if name in given:
                converters[name] = self.value(field["type"], given[name].dataType, path + name)
            elif "default" in field:
                constants[name] = field["default"]
            elif isinstance(field["type"], list) and "null" in field["type"]:
                constants[name] = None
            else:
                raise BadOptionError(
                    f"the topic's schema has a field {path}{name} without a default: give a column {path}{name}", column=name
                )

        def convert(record: dict[str, Any]) -> dict[str, Any]:
            return {**constants, **{name: convert_field(record[name]) for name, convert_field in converters.items()}}

        return convert

    def value(self, avro: Any, given: DataType, path: str) -> Converter:
        """Return the converter of a field of this type. Raises BadOptionError."""
        if isinstance(avro, list):
            others = [each for each in avro if each != "null"]
            if len(others) != 1:
                raise BadOptionError(f"the field {path} is a union of several types, which writes do not support", column=path)
            inner = self.value(others[0], given, path)
            return (lambda value: None if value is None else inner(value)) if len(others) < len(avro) else inner
        convert = self._present(avro, given, path)

        def refuse_null(value: Any) -> Any:
            if value is None:
                raise ValueError(f"{path} is null, and the schema does not allow it")
            return convert(value)

        return refuse_null

    def _present(self, avro: Any, given: DataType, path: str) -> Converter:
        if isinstance(avro, str):
            avro = self._named.get(avro, {"type": avro})
        if isinstance(avro.get("type"), dict | list):
            return self.value(avro["type"], given, path)
        kind, found = avro["type"], given.typeName()
        logical = avro.get("logicalType", "")
        if kind == "record" and found == "struct":
            return self.record(avro, given, f"{path}.")  # type: ignore[arg-type]  # a struct's type is a StructType
        if kind == "array" and found == "array":
            item = self.value(avro["items"], given.elementType, f"{path}[]")  # type: ignore[attr-defined]
            return lambda value: [item(each) for each in value]
        if kind == "map" and found == "map" and given.keyType.typeName() == "string":  # type: ignore[attr-defined]
            entry = self.value(avro["values"], given.valueType, f"{path}[]")  # type: ignore[attr-defined]
            return lambda value: {name: entry(each) for name, each in sorted(value)}
        if kind == "enum" and found == "string":
            return _symbol(path, avro)
        if kind == "fixed" and found == "binary" and not logical:
            return _fixed(path, avro["size"], self._bytes)
        if logical == "decimal" and found == "decimal":
            return self._decimal(avro, given, path)
        accepted = _ACCEPTED.get(logical) or _ACCEPTED.get(kind, ())
        if given.simpleString() in accepted:
            return self._bytes if kind == "bytes" else _converter(logical)
        wanted = " or ".join(accepted) if accepted else f"Avro's {logical or kind}"
        raise BadOptionError(
            f"column {path} must be {wanted}, as the topic's schema says, and is {given.simpleString()}", column=path
        )

    def _bytes(self, value: bytes) -> Any:
        return base64.b64encode(value).decode() if self._is_json else value

    def _decimal(self, avro: Mapping[str, Any], given: Any, path: str) -> Converter:
        precision, scale = avro["precision"], avro.get("scale", 0)
        if given.scale > scale or given.precision - given.scale > precision - scale:
            raise BadOptionError(
                f"column {path} must be at most decimal({precision},{scale}), as the topic's schema says, and is "
                f"{given.simpleString()}",
                column=path,
            )
        return str if self._is_json else lambda value: value


def definition_of(columns: StructType, name: str = "Row") -> dict[str, Any]:
    """Return the Avro definition of records with these columns. Raises BadOptionError."""
    fields = []
    for field in columns.fields:
        if not _NAME.fullmatch(field.name):
            raise BadOptionError(
                f"column {field.name!r} is not a valid name of a field: letters, digits and _, not a digit first", column=field.name
            )
        kind = _definition(field.dataType, f"{name}_{field.name}", field.name)
        fields.append(
            {"name": field.name, "type": ["null", kind], "default": None} if field.nullable else {"name": field.name, "type": kind}
        )
    return {"type": "record", "name": name, "fields": fields}


def _definition(given: Any, name: str, path: str) -> Any:
    text, kind = given.simpleString(), given.typeName()
    if text in _WRITTEN:
        return _WRITTEN[text]
    if text in _WRITTEN_LOGICAL:
        return _WRITTEN_LOGICAL[text]
    match kind:
        case "decimal":
            return {"type": "bytes", "logicalType": "decimal", "precision": given.precision, "scale": given.scale}
        case "struct":
            return definition_of(given, name)
        case "array":
            return {"type": "array", "items": _inner(given.elementType, given.containsNull, name, path)}
        case "map" if given.keyType.typeName() == "string":
            return {"type": "map", "values": _inner(given.valueType, given.valueContainsNull, name, path)}
    raise BadOptionError(f"column {path} is {text}, for which there is no type in Avro: cast it to another one", column=path)


def _inner(given: Any, may_be_null: bool, name: str, path: str) -> Any:
    kind = _definition(given, name, path)
    return ["null", kind] if may_be_null else kind


def _symbol(path: str, avro: Mapping[str, Any]) -> Converter:
    symbols = frozenset(avro["symbols"])

    def convert(value: str) -> str:
        if value not in symbols:
            raise ValueError(f"{path} is {value[:40]!r}, and the schema has {', '.join(avro['symbols'])}")
        return value

    return convert


def _fixed(path: str, size: int, encode: Converter) -> Converter:
    def convert(value: bytes) -> Any:
        if len(value) != size:
            raise ValueError(f"{path} has {len(value)} bytes, and the schema says {size}")
        return encode(value)

    return convert


def _converter(logical: str) -> Converter:
    if logical == "date":
        return days
    if logical.endswith("-millis") and "timestamp" in logical:
        return lambda value: micros(value) // 1000
    if logical.endswith("-micros") and "timestamp" in logical:
        return micros
    if logical.endswith("-nanos") and "timestamp" in logical:
        return lambda value: micros(value) * 1000
    return lambda value: value


def days(value: date) -> int:
    """Return days since 1970."""
    return (value - date(1970, 1, 1)).days


def micros(value: datetime) -> int:
    """Return microseconds since 1970 for a time with or without a zone."""
    return (value - (_EPOCH if value.tzinfo is not None else _EPOCH.replace(tzinfo=None))) // timedelta(microseconds=1)
