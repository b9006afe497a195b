"""Whether a reader with one Avro schema can read what a writer with another wrote (Avro 1.11 specification, "Schema Resolution").

    long ← int · float ← int, long · double ← int, long, float · string ← bytes · bytes ← string
    record: a field that only the reader has needs a default; one that only the writer has is skipped
    enum: the reader knows every symbol, or has a default
    union of the writer: every branch must be readable; union of the reader: one branch must fit

As in Pulsar's broker (which uses Avro's own resolver), and unlike the specification, names of records are compared only to choose
among the branches of a union: classes are renamed, and clients align the names before they decode.
"""

from __future__ import annotations

from cepheid_broker.errors import InvalidSchemaError
from cepheid_broker.schemas.avro_schema import Array, Enum, Field, Fixed, Map, Node, Primitive, Record, Union
from cepheid_broker.schemas.mismatch import Mismatch, joined, shown

MAX_COMPARISONS = 100_000  # about 0.1 s; real schemas need a few hundred
MAX_DEPTH = 150

_PROMOTED_FROM: dict[str, frozenset[str]] = {
    "long": frozenset({"int"}),
    "float": frozenset({"int", "long"}),
    "double": frozenset({"int", "long", "float"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}


def avro_mismatch(reader: Node, writer: Node) -> Mismatch | None:
    """Return why the reader cannot read all that the writer may write, or None. Raises InvalidSchemaError beyond the bounds."""
    return _Comparison().compare(reader, writer, "", 0)


class _Comparison:
    def __init__(self) -> None:
        self._compared: dict[tuple[int, int], Mismatch | None] = {}
        self._comparisons = 0

    def compare(self, reader: Node, writer: Node, path: str, depth: int) -> Mismatch | None:
        pair = (id(reader), id(writer))
        if pair in self._compared:
            return self._compared[pair]
        self._comparisons += 1
        if self._comparisons > MAX_COMPARISONS or depth > MAX_DEPTH:
            raise InvalidSchemaError(f"the schema is too large to be compared (at field {shown(path)})")
        self._compared[pair] = None  # a record that contains itself: it fits unless something else in it does not
        found = self._compare(reader, writer, path, depth + 1)
        self._compared[pair] = found
        return found

    def _compare(self, reader: Node, writer: Node, path: str, depth: int) -> Mismatch | None:
        if isinstance(writer, Union):
            return self._writer_union(reader, writer, path, depth)
        if isinstance(reader, Union):
            return self._reader_union(reader, writer, path, depth)
        match reader, writer:
            case Primitive(), Primitive():
                fits = reader.name == writer.name or writer.name in _PROMOTED_FROM.get(reader.name, ())
                return None if fits else _types_differ(reader, writer, path)
            case Array(), Array():
                return self.compare(reader.items, writer.items, path + "[]", depth)
            case Map(), Map():
                return self.compare(reader.values, writer.values, path + "{}", depth)
            case Fixed(), Fixed():
                fits = reader.size == writer.size and _same_name(reader, writer)
                return None if fits else _types_differ(reader, writer, path)
            case Enum(), Enum():
                return _enums(reader, writer, path)
            case Record(), Record():
                return self._records(reader, writer, path, depth)
        return _types_differ(reader, writer, path)

    def _records(self, reader: Record, writer: Record, path: str, depth: int) -> Mismatch | None:
        written = {field.name: field for field in writer.fields}
        for field in reader.fields:
            where = joined(path, field.name)
            source = _source_of(field, written)
            if source is not None:
                if (found := self.compare(field.type, source.type, where, depth)) is not None:
                    return found
            elif not field.has_default:
                return Mismatch(where, f"{described(field.type)} without a default", "no such field")
        return None

    def _writer_union(self, reader: Node, writer: Union, path: str, depth: int) -> Mismatch | None:
        for branch in writer.branches:
            if (found := self.compare(reader, branch, path, depth)) is not None:
                # At this place the user wrote the whole union; deeper down, the field says more.
                return found if found.field != path else _types_differ(reader, writer, path)
        return None

    def _reader_union(self, reader: Union, writer: Node, path: str, depth: int) -> Mismatch | None:
        candidates = [branch for branch in reader.branches if _is_meant_by(branch, writer)] or list(reader.branches)
        first: Mismatch | None = None
        for branch in candidates:
            found = self.compare(branch, writer, path, depth)
            if found is None:
                return None
            if first is None and type(branch) is type(writer):
                first = found  # names an inner field, if there is one
        return first if first is not None and first.field != path else _types_differ(reader, writer, path)


def _is_meant_by(branch: Node, writer: Node) -> bool:
    """Return whether a reader's decoder chooses this branch for the writer's type, even if it cannot then read it."""
    if isinstance(branch, Array | Map | Union) or isinstance(writer, Array | Map | Union):
        return type(branch) is type(writer)
    return type(branch) is type(writer) and branch.name == writer.name


def _enums(reader: Enum, writer: Enum, path: str) -> Mismatch | None:
    if not _same_name(reader, writer):
        return _types_differ(reader, writer, path)
    known = frozenset(reader.symbols)
    unknown = [symbol for symbol in writer.symbols if symbol not in known]
    if not unknown or reader.default is not None:
        return None
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return Mismatch(path, f"an enum without {shown(unknown[0])}{more} and without a default", "an enum with it")


def _same_name(reader: Enum | Fixed, writer: Enum | Fixed) -> bool:
    own, other = reader.name.rpartition(".")[2], writer.name.rpartition(".")[2]
    return own == other or writer.name in reader.aliases


def _source_of(field: Field, written: dict[str, Field]) -> Field | None:
    for name in (field.name, *field.aliases):
        if name in written:
            return written[name]
    return None


def _types_differ(reader: Node, writer: Node, path: str) -> Mismatch:
    return Mismatch(path, described(reader), described(writer))


def described(node: Node) -> str:
    match node:
        case Array():
            return f"array of {_kind(node.items)}"
        case Map():
            return f"map of {_kind(node.values)}"
        case Union():
            kinds = [_kind(branch) for branch in node.branches[:5]]
            return f"[{', '.join(kinds)}{', …' if len(node.branches) > 5 else ''}]"
        case Fixed():
            return f"fixed {shown(node.name)} of {node.size} bytes"
    return _kind(node)


def _kind(node: Node) -> str:
    match node:
        case Primitive():
            return node.name
        case Array() | Map() | Union():
            return type(node).__name__.lower()
    return f"{type(node).__name__.lower()} {shown(node.name)}"
