"""Columns of one scalar Avro type shown as another: promotions, and logical types that were added, removed or changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cepheid_decode.errors import ScanError
from cepheid_decode.typed.arrow_types import MAX_DAYS, MAX_MICROS, MIN_DAYS, MIN_MICROS, arrow_type
from cepheid_decode.typed.avro_schema import Fixed, Logical, Primitive, is_null, node_name
from cepheid_decode.typed.records import Mask
from cepheid_decode.typed.utf8 import text_array

Plan = Callable[[pa.Array], tuple[pa.Array, Mask | None]]
"""Converts an array of the writer's type to one of the reader's, and returns the rows that have no valid value there."""

_PROMOTIONS = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
_MICROS_A_MILLI = 1000


class DifferentSchemaError(ScanError):
    """Values of the writer's schema cannot be shown with the reader's; the text names the field."""


def unchanged(array: pa.Array) -> tuple[pa.Array, Mask | None]:
    return array, None


def plan_scalar(writer: Primitive | Fixed, reader: Primitive | Fixed) -> Plan:
    """Raises DifferentSchemaError."""
    own, other = _base(writer), _base(reader)
    if is_null(writer):
        return lambda array: (pa.nulls(len(array), arrow_type(reader)), None)
    if isinstance(writer, Fixed) and isinstance(reader, Fixed) and writer.size != reader.size:
        raise DifferentSchemaError(f"fixed of {writer.size} bytes is not fixed of {reader.size}")
    if own != other and other not in _PROMOTIONS.get(own, ()):
        raise DifferentSchemaError(f"{own} is not {other}")
    kind = arrow_type(reader)
    if writer.logical != reader.logical and own != "string":  # uuid, for which the column of a string is the same
        return _relabel(writer.logical, reader.logical, kind, f"{node_name(writer)} is not {node_name(reader)}")
    if own == other:
        return unchanged
    if other == "string":
        return _to_text
    return lambda array: (array.cast(kind, safe=False), None)


def _to_text(array: pa.Array) -> tuple[pa.Array, Mask | None]:
    text, wrong = text_array(array)
    bad = np.zeros(len(array), np.bool_)
    bad[wrong] = True
    return text, bad


def _relabel(writer: Logical | None, reader: Logical | None, kind: pa.DataType, differ: str) -> Plan:
    """A logical type was added, removed, or changed. Times stay the same times; plain numbers are interpreted as the new type."""
    before, after = (logical.name if logical else "" for logical in (writer, reader))
    families = {name.rpartition("-")[0] for name in (before, after)}
    if families in ({"timestamp"}, {"local-timestamp"}):
        return unchanged
    if families != {"time"} and not {before, after} & {"decimal", "uuid"} and "nanos" not in before + after:
        return partial(_renumber, _unit(before), _unit(after), kind)
    if writer is not None and reader is not None and before == after == "decimal" and _holds(reader, writer):
        return lambda array: (array.cast(kind), None)
    raise DifferentSchemaError(differ)


def _holds(reader: Logical, writer: Logical) -> bool:
    return reader.scale >= writer.scale and reader.precision - reader.scale >= writer.precision - writer.scale


def _unit(name: str) -> int:
    """The factor by which the stored number was multiplied for its column."""
    return _MICROS_A_MILLI if name in ("timestamp-millis", "local-timestamp-millis") else 1


def _renumber(before: int, after: int, kind: pa.DataType, array: pa.Array) -> tuple[pa.Array, Mask | None]:
    plain = array.cast(pa.int32()) if pa.types.is_date32(array.type) else array
    numbers = pc.divide(plain.cast(pa.int64()), before)
    bad = None
    if pa.types.is_temporal(kind):
        first, last = (MIN_DAYS, MAX_DAYS) if pa.types.is_date32(kind) else (MIN_MICROS // after, MAX_MICROS // after)
        far = pc.fill_null(pc.or_(pc.less(numbers, first), pc.greater(numbers, last)), False)
        bad = far.to_numpy(zero_copy_only=False)
        numbers = pc.multiply(pc.if_else(far, pa.scalar(None, pa.int64()), numbers), after)
    if pa.types.is_date32(kind):
        return numbers.cast(pa.int32()).cast(kind), bad
    return numbers.cast(kind, safe=False), bad


def _base(node: Primitive | Fixed) -> str:
    return node.name if isinstance(node, Primitive) else "fixed"
