"""Avro schemas for readers of stored values: nodes with defaults and logical types.

The broker checks definitions before it stores them, so errors here are short. Nodes compare by identity: records may be recursive.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cepheid_decode.errors import BadOptionError

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
MAX_DECIMAL_PRECISION = 38  # of Arrow's decimal128, and of Spark


@dataclass(frozen=True, slots=True)
class Logical:
    name: str
    precision: int = 0
    scale: int = 0


_JAVA_NUMBERS = ("java.math.BigDecimal", "java.math.BigInteger")
# The types that a logical type may annotate; on others it must be ignored (Avro specification, "Logical Types").
_STANDS_ON = {
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "local-timestamp-nanos": ("long",),
    "decimal": ("bytes", "fixed"),
    "uuid": ("string", "fixed"),
}


@dataclass(slots=True, eq=False)
class Primitive:
    name: str
    logical: Logical | None = None
    is_number: bool = False  # a string that is a number in Java, so that it is a number in JSON


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
    logical: Logical | None = None


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
    node: Node
    has_default: bool
    default: Any


@dataclass(slots=True, eq=False)
class Record:
    name: str
    aliases: tuple[str, ...]
    fields: tuple[Field, ...] = ()


Node = Primitive | Array | Map | Union | Fixed | Enum | Record
NULL = Primitive("null")


def is_null(node: Node) -> bool:
    return isinstance(node, Primitive) and node.name == "null"


def node_name(node: Node) -> str:
    """The name in errors, also used to distinguish the branches of a union."""
    match node:
        case Primitive(name, logical):
            return name if logical is None else f"{name} ({logical.name})"
        case Record(name=name) | Enum(name=name) | Fixed(name=name):
            return name
    return type(node).__name__.lower()


def choices(node: Union) -> tuple[Node, ...]:
    """Return the branches of a union that hold a value."""
    return tuple(branch for branch in node.branches if not is_null(branch))


def parse_avro(definition: bytes) -> Node:
    """Raises BadOptionError: the definition is not valid Avro."""
    try:
        return _Parser().node(json.loads(definition), "")
    except RecursionError:
        raise BadOptionError("the schema is nested too deeply to be shown as columns; read with readMode=messages") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadOptionError(
            f"the schema's definition is not a valid Avro schema ({error!r}); read with readMode=messages"
        ) from None


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, Node] = {}

    def node(self, document: Any, namespace: str) -> Node:
        if isinstance(document, str):
            return Primitive(document) if document in PRIMITIVES else self._reference(document, namespace)
        if isinstance(document, list):
            return Union(tuple(self.node(branch, namespace) for branch in document))
        kind = document["type"]
        if not isinstance(kind, str):
            return self.node(kind, namespace)
        match kind:
            case "array":
                return Array(self.node(document["items"], namespace))
            case "map":
                return Map(self.node(document["values"], namespace))
            case "record" | "error" | "enum" | "fixed":
                return self._named_type(kind, document, namespace)
        if kind in PRIMITIVES:
            return Primitive(kind, _logical(document, kind, None), kind == "string" and document.get("java-class") in _JAVA_NUMBERS)
        return self._reference(kind, namespace)

    def _reference(self, name: str, namespace: str) -> Node:
        found = self._named.get(_qualified(name, namespace)) or self._named.get(name)
        if found is None:
            raise ValueError(f"unknown type '{name}'")
        return found

    def _named_type(self, kind: str, document: dict[str, Any], namespace: str) -> Node:
        own = document.get("namespace", namespace) or ""
        name = _qualified(document["name"], own)
        inside = name.rpartition(".")[0]
        aliases = tuple(_qualified(alias, inside) for alias in document.get("aliases") or ())
        if kind == "enum":
            made: Node = Enum(name, aliases, tuple(document["symbols"]), document.get("default"))
        elif kind == "fixed":
            made = Fixed(name, aliases, int(document["size"]), _logical(document, kind, int(document["size"])))
        else:
            made = Record(name, aliases)
        self._named[name] = made  # before its fields, which may refer to it
        if isinstance(made, Record):
            made.fields = tuple(self._field(field, inside) for field in document["fields"])
        return made

    def _field(self, document: dict[str, Any], namespace: str) -> Field:
        node = self.node(document["type"], namespace)
        return Field(document["name"], tuple(document.get("aliases") or ()), node, "default" in document, document.get("default"))


def _qualified(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _logical(document: dict[str, Any], kind: str, size: int | None) -> Logical | None:
    """None if it has no meaning for this type: then readers must use the plain type (Avro specification)."""
    name = document.get("logicalType")
    if not isinstance(name, str) or kind not in _STANDS_ON.get(name, ()) or (name == "uuid" and size not in (None, 16)):
        return None
    if name != "decimal":
        return Logical(name)
    precision, scale = document.get("precision"), document.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision <= MAX_DECIMAL_PRECISION:
        return None
    return Logical(name, precision, scale) if precision > 0 else None
