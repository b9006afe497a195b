"""Avro schemas, parsed from JSON into nodes, with errors that name the place.

This is a parser of its own, as the Avro libraries name no field when they refuse, and a hostile megabyte must neither recurse
without bound nor take seconds. As in Pulsar, defaults are not checked against their types (old clients send wrong ones), and names
of generated classes may contain `$`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from cepheid_broker.errors import InvalidSchemaError
from cepheid_broker.schemas.mismatch import shown

TOO_DEEP = "the definition is nested too deeply"
MAX_DEPTH = 100  # of schemas inside schemas; real ones nest below ten
PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")


# Nodes compare by identity: a record may contain itself.
@dataclass(slots=True, eq=False)
class Primitive:
    name: str


@dataclass(slots=True, eq=False)
class Array:
    items: Node


@dataclass(slots=True, eq=False)
class Map:
    values: Node


@dataclass(slots=True, eq=False)
class Union:
    branches: tuple[Node, ...]


@dataclass(slots=True, eq=False)
class Fixed:
    name: str
    aliases: tuple[str, ...]
    size: int


@dataclass(slots=True, eq=False)
class Enum:
    name: str
    aliases: tuple[str, ...]
    symbols: tuple[str, ...]
    default: str | None


@dataclass(slots=True, eq=False)
class Field:
    name: str
    aliases: tuple[str, ...]
    type: Node
    has_default: bool


@dataclass(slots=True, eq=False)
class Record:
    name: str
    aliases: tuple[str, ...]
    fields: tuple[Field, ...] = ()


Node = Primitive | Array | Map | Union | Fixed | Enum | Record


def parse_avro(text: bytes) -> tuple[Node, bytes]:
    """Return the schema, and bytes that are equal for schemas of the same meaning. Raises InvalidSchemaError."""
    document = load_json(text)
    node = _Parser().parse(document, namespace="", where="the schema", depth=0)
    return node, canonical_json(document)


def load_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidSchemaError(TOO_DEEP) from None
    except ValueError as error:  # also bytes that are not UTF-8
        raise InvalidSchemaError(f"the definition ({len(text)} bytes) is not JSON: {error}") from None


def canonical_json(document: Any) -> bytes:
    """Return the JSON without key order, white space and documentation."""
    try:
        return json.dumps(_without_docs(document), sort_keys=True, separators=(",", ":")).encode()
    except RecursionError:
        raise InvalidSchemaError(TOO_DEEP) from None


def _without_docs(document: Any) -> Any:
    if isinstance(document, list):
        return [_without_docs(item) for item in document]
    if isinstance(document, dict):
        # A default is a value, whose "doc" would be data.
        return {key: value if key == "default" else _without_docs(value) for key, value in document.items() if key != "doc"}
    return document


class _Parser:
    KINDS: ClassVar[frozenset[str]] = frozenset({"record", "error", "enum", "fixed", "array", "map"})

    def __init__(self) -> None:
        self._named: dict[str, Record | Enum | Fixed] = {}

    def parse(self, document: Any, *, namespace: str, where: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise InvalidSchemaError(f"{where}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(document, str):
            return self._by_name(document, namespace, where)
        if isinstance(document, list):
            return self._union(document, namespace, where, depth)
        if not isinstance(document, dict):
            raise InvalidSchemaError(f"{where}: {shown(document)} is not a type")
        kind = document.get("type")
        if isinstance(kind, dict | list):
            return self.parse(kind, namespace=namespace, where=where, depth=depth + 1)
        if not isinstance(kind, str):
            raise InvalidSchemaError(f'{where}: its "type" is {shown(kind)}')
        if kind in self.KINDS:
            return self._complex(kind, document, namespace, where, depth)
        return self._by_name(kind, namespace, where)

    def _by_name(self, name: str, namespace: str, where: str) -> Node:
        if name in PRIMITIVES:
            return Primitive(name)
        full_name = name if "." in name or not namespace else f"{namespace}.{name}"
        found = self._named.get(full_name) or self._named.get(name)
        if found is None:
            raise InvalidSchemaError(f"{where}: unknown type {shown(name)}")
        return found

    def _union(self, branches: list[Any], namespace: str, where: str, depth: int) -> Union:
        nodes = [self.parse(branch, namespace=namespace, where=where, depth=depth + 1) for branch in branches]
        seen: set[str] = set()
        for node in nodes:
            if isinstance(node, Union):
                raise InvalidSchemaError(f"{where}: a union directly inside a union")
            kind = node.name if isinstance(node, Primitive | Fixed | Enum | Record) else type(node).__name__
            if kind in seen:
                raise InvalidSchemaError(f"{where}: {shown(kind)} is in the union twice")
            seen.add(kind)
        return Union(tuple(nodes))

    def _complex(self, kind: str, document: dict[str, Any], namespace: str, where: str, depth: int) -> Node:
        if kind in ("array", "map"):
            part = "items" if kind == "array" else "values"
            if part not in document:
                raise InvalidSchemaError(f'{where}: the {kind} has no "{part}"')
            inner = self.parse(document[part], namespace=namespace, where=f"{where}, {part}", depth=depth + 1)
            return Array(inner) if kind == "array" else Map(inner)
        name = self._full_name(kind, document, namespace, where)
        inside = name.rpartition(".")[0]
        aliases = tuple(_qualified(alias, inside) for alias in _names(document, "aliases", where))
        if name in self._named:
            raise InvalidSchemaError(f"{where}: {shown(name)} is defined twice")
        if kind == "fixed":
            size = document.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise InvalidSchemaError(f"fixed {shown(name)}: its size is {shown(size)}")
            self._named[name] = fixed = Fixed(name, aliases, size)
            return fixed
        if kind == "enum":
            self._named[name] = enum = self._enum(name, aliases, document)
            return enum
        self._named[name] = record = Record(name, aliases)  # before its fields: they may refer to it
        record.fields = self._fields(name, document, inside, depth)
        return record

    def _enum(self, name: str, aliases: tuple[str, ...], document: dict[str, Any]) -> Enum:
        where = f"enum {shown(name)}"
        if "symbols" not in document:
            raise InvalidSchemaError(f"{where} has no symbols")
        symbols = _names(document, "symbols", where)
        if len(set(symbols)) != len(symbols):
            raise InvalidSchemaError(f"{where} has a symbol twice")
        default = document.get("default")
        if default is not None and default not in symbols:
            raise InvalidSchemaError(f"{where}: its default {shown(default)} is not one of its symbols")
        return Enum(name, aliases, symbols, default)

    def _fields(self, record: str, document: dict[str, Any], namespace: str, depth: int) -> tuple[Field, ...]:
        found = document.get("fields")
        if not isinstance(found, list):
            raise InvalidSchemaError(f"record {shown(record)} has no list of fields")
        fields: dict[str, Field] = {}
        for field in found:
            name = field.get("name") if isinstance(field, dict) else None
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise InvalidSchemaError(f"record {shown(record)}: {shown(name)} is not a field name")
            where = f"record {shown(record)}, field {shown(name)}"
            if name in fields:
                raise InvalidSchemaError(f"{where}: it is defined twice")
            if "type" not in field:
                raise InvalidSchemaError(f"{where}: it has no type")
            node = self.parse(field["type"], namespace=namespace, where=where, depth=depth + 1)
            fields[name] = Field(name, _names(field, "aliases", where), node, "default" in field)
        return tuple(fields.values())

    def _full_name(self, kind: str, document: dict[str, Any], namespace: str, where: str) -> str:
        name = document.get("name")
        if not isinstance(name, str) or not all(map(_NAME.fullmatch, name.split("."))):
            raise InvalidSchemaError(f"{where}: {shown(name)} is not a type name (kind: {kind})")
        own = document.get("namespace", namespace)
        return _qualified(name, own if isinstance(own, str) else "")


def _qualified(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _names(document: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    names = document.get(key) or []
    if not (isinstance(names, list) and all(isinstance(name, str) and name for name in names)):
        raise InvalidSchemaError(f"{where}: its {key} are not a list of names")
    return tuple(names)
