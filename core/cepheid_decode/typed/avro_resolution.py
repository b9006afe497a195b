"""Columns of one Avro schema shown as another: schema resolution of Avro's specification, for whole columns at once.

A plan is made once per pair of versions; it converts an array of the writer's type to one of the reader's, and returns the rows
whose value the reader's schema does not allow. As everywhere here, a null stays null, even if the reader's schema does not allow
null.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cepheid_decode.typed.arrow_types import arrow_type
from cepheid_decode.typed.avro_record import logical_converter
from cepheid_decode.typed.avro_scalar_resolution import DifferentSchemaError, Plan, plan_scalar, unchanged
from cepheid_decode.typed.avro_schema import (
    Array,
    Enum,
    Field,
    Fixed,
    Map,
    Node,
    Primitive,
    Record,
    Union,
    choices,
    is_null,
    node_name,
)
from cepheid_decode.typed.records import Mask


def plan_resolution(writer: Node, reader: Node, names: Collection[str] | None = None) -> Plan:
    """`names`: the needed fields of the reader; others are null in the result. Raises DifferentSchemaError."""
    if isinstance(writer, Record) and isinstance(reader, Record):
        return _record(writer, reader, (), (), names)
    return _plan(writer, reader, (), ())


def names_to_read(reader: Node, names: Collection[str] | None) -> Collection[str] | None:
    """Return the names that the needed fields may have in the writer's schema."""
    if names is None or not isinstance(reader, Record):
        return None
    return {name for field in reader.fields if field.name in names for name in (field.name, *field.aliases)}


def _plan(writer: Node, reader: Node, around_writer: tuple[Node, ...], around_reader: tuple[Node, ...]) -> Plan:
    if isinstance(writer, Record) and isinstance(reader, Record) and (writer in around_writer or reader in around_reader):
        if writer in around_writer and reader in around_reader:
            return unchanged  # both are JSON text
        raise DifferentSchemaError(f"record '{reader.name}' contains itself in one of the two")
    around = (around_writer, around_reader)
    if isinstance(writer, Union):
        return _from_union(writer, reader, *around)
    if isinstance(reader, Union):
        return _to_union(writer, reader, *around)
    match writer, reader:
        case Record(), Record():
            return _record(writer, reader, *around)
        case Array(own), Array(other):
            return partial(_resolve_list, _plan(own, other, *around), arrow_type(reader, around_reader))
        case Map(own), Map(other):
            return partial(_resolve_map, _plan(own, other, *around), arrow_type(reader, around_reader))
        case Enum(), Enum():
            return _enum(writer, reader)
        case ((Primitive() | Fixed()), (Primitive() | Fixed())):
            return plan_scalar(writer, reader)
    raise DifferentSchemaError(f"{node_name(writer)} is not {node_name(reader)}")


def _or(one: Mask | None, other: Mask | None) -> Mask | None:
    if one is None or other is None:
        return one if other is None else other
    return one | other


def _from_union(writer: Union, reader: Node, around_writer: tuple[Node, ...], around_reader: tuple[Node, ...]) -> Plan:
    several = choices(writer)
    if len(several) == 1:
        return _plan(several[0], reader, around_writer, around_reader)
    kind = arrow_type(reader, around_reader)
    plans: list[Plan | None] = []
    for branch in several:
        try:
            plans.append(_plan(branch, reader, around_writer, around_reader))
        except DifferentSchemaError:
            plans.append(None)
    if several and not any(plans):
        raise DifferentSchemaError(f"no branch of a union is {node_name(reader)}")

    def resolve(array: pa.Array) -> tuple[pa.Array, Mask | None]:
        parts, wrong = [pa.nulls(1, kind)], np.zeros(len(array), np.bool_)
        places = np.zeros(len(array), np.int64)  # 0: the null at the start
        # flatten() makes a member null if the whole union is null; field() would return whatever value is there.
        for child, plan in zip(array.flatten(), plans, strict=True):
            here = np.flatnonzero(child.is_valid().to_numpy(zero_copy_only=False))
            if plan is None:
                wrong[here] = True
                continue
            found, bad = plan(child.take(pa.array(here)))
            places[here] = sum(map(len, parts)) + np.arange(len(here))
            parts.append(found)
            if bad is not None:
                wrong[here] |= bad
        return pa.concat_arrays(parts).take(pa.array(places)), wrong

    if not several:
        return lambda array: (pa.nulls(len(array), kind), None)
    return resolve


def _to_union(writer: Node, reader: Union, around_writer: tuple[Node, ...], around_reader: tuple[Node, ...]) -> Plan:
    several = choices(reader)
    kind = arrow_type(reader, around_reader)
    if is_null(writer):
        return lambda array: (pa.nulls(len(array), kind), None)
    # First a branch of the same name or type, then one that it can be promoted to (Avro: "the first schema that matches").
    ranked = sorted(range(len(several)), key=lambda index: node_name(several[index]) != node_name(writer))
    for index in ranked:
        try:
            plan = _plan(writer, several[index], around_writer, around_reader)
        except DifferentSchemaError:
            continue
        return plan if len(several) == 1 else partial(_into_member, plan, index, kind)
    raise DifferentSchemaError(f"{node_name(writer)} is not a branch of a union")


def _into_member(plan: Plan, index: int, kind: pa.StructType, array: pa.Array) -> tuple[pa.Array, Mask | None]:
    found, bad = plan(array)
    children = [found if place == index else pa.nulls(len(array), field.type) for place, field in enumerate(kind)]
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=found.is_null()), bad


def _record(
    writer: Record,
    reader: Record,
    around_writer: tuple[Node, ...],
    around_reader: tuple[Node, ...],
    names: Collection[str] | None = None,
) -> Plan:
    places = {field.name: place for place, field in enumerate(writer.fields)}
    inside = ((*around_writer, writer), (*around_reader, reader))
    kind = arrow_type(reader, around_reader)
    sources: list[tuple[int, Plan] | pa.Array] = []
    for field in reader.fields:
        if names is not None and field.name not in names:
            sources.append(pa.nulls(1, arrow_type(field.node, inside[1])))
            continue
        place = next((places[name] for name in (field.name, *field.aliases) if name in places), None)
        if place is None:
            sources.append(_default_array(field, inside[1]))
            continue
        try:
            sources.append((place, _plan(writer.fields[place].node, field.node, *inside)))
        except DifferentSchemaError as error:
            raise DifferentSchemaError(f"field '{field.name}': {error}") from None

    def resolve(array: pa.Array) -> tuple[pa.Array, Mask | None]:
        given, bad = array.flatten(), None
        children = []
        for source in sources:
            if isinstance(source, tuple):
                child, wrong = source[1](given[source[0]])
                bad = _or(bad, wrong)
            else:
                child = source.take(pa.array(np.zeros(len(array), np.int64)))
            children.append(child)
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null()), bad

    return resolve


def _default_array(field: Field, inside: tuple[Node, ...]) -> pa.Array:
    if not field.has_default:
        raise DifferentSchemaError(f"field '{field.name}' is missing and has no default")
    try:
        return pa.array([default_value(field.node, field.default)], arrow_type(field.node, inside))
    except (ValueError, TypeError, KeyError, AttributeError, pa.ArrowException):
        raise DifferentSchemaError(f"field '{field.name}' is missing, and its default is not a value of its type") from None


def default_value(node: Node, default: Any) -> Any:
    """Convert a default of the schema's JSON to what `pa.array` accepts (bytes are text of code points below 256)."""
    match node:
        case Union(branches):
            return _union_default(node, branches, default)
        case Record(fields=fields):
            return {field.name: default_value(field.node, default.get(field.name, field.default)) for field in fields}
        case Array(items):
            return [default_value(items, item) for item in default]
        case Map(values):
            return [(key, default_value(values, value)) for key, value in default.items()]
        case Fixed(logical=logical) | Primitive("bytes", logical):
            value = default.encode("latin-1")
            return value if logical is None else logical_converter(logical)(value)
        case Primitive(_, logical):
            return default if logical is None or default is None else logical_converter(logical)(default)
    return default


def _union_default(node: Union, branches: tuple[Node, ...], default: Any) -> Any:
    if default is None:
        return None
    several = choices(node)
    for index, branch in enumerate(several):
        try:
            value = default_value(branch, default)
            pa.array([value], arrow_type(branch))
        except (ValueError, TypeError, KeyError, AttributeError, pa.ArrowException):
            continue
        return value if len(several) == 1 else {f"member{index}": value}
    raise ValueError(f"a default of no branch among {len(branches)}")


def _resolve_list(items: Plan, kind: pa.DataType, array: pa.Array) -> tuple[pa.Array, Mask | None]:
    found, bad = items(array.flatten())
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    return pa.ListArray.from_arrays(_offsets(lengths), found, type=kind, mask=array.is_null()), _parents(bad, lengths)


def _resolve_map(values: Plan, kind: pa.DataType, array: pa.Array) -> tuple[pa.Array, Mask | None]:
    pairs = array.cast(pa.list_(pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", array.type.item_type)])))
    inner, lengths = pairs.flatten(), pc.fill_null(pc.list_value_length(pairs), 0).to_numpy()
    found, bad = values(inner.field(1))
    made = pa.MapArray.from_arrays(_offsets(lengths), inner.field(0), found, type=kind, mask=array.is_null())
    return made, _parents(bad, lengths)


def _offsets(lengths: Any) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


def _parents(bad: Mask | None, lengths: Any) -> Mask | None:
    if bad is None:
        return None
    rows = np.repeat(np.arange(len(lengths)), lengths)
    found = np.zeros(len(lengths), np.bool_)
    found[rows[bad]] = True
    return found


def _enum(writer: Enum, reader: Enum) -> Plan:
    unknown = set(writer.symbols) - set(reader.symbols)
    if not unknown:
        return unchanged

    def resolve(array: pa.Array) -> tuple[pa.Array, Mask | None]:
        strange = pc.and_(array.is_valid(), pc.invert(pc.is_in(array, pa.array(reader.symbols, pa.string()))))
        if reader.default is not None:
            return pc.if_else(strange, pa.scalar(reader.default), array), None
        return array, strange.to_numpy(zero_copy_only=False)

    return resolve
