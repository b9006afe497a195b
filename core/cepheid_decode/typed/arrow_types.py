"""How values of a schema are shown as columns, as Arrow types that Spark also has.

Avro, and JSON, whose definitions are Avro schemas       Arrow                     Spark
null, boolean, int, long, float, double                  string (always null),     string, boolean, int, bigint, float, double
                                                         bool, int32, int64, …
string, enum, uuid (of string or of 16 bytes)            string                    string
bytes, fixed                                             binary                    binary
decimal of at most 38 digits                             decimal128                decimal
date                                                     date32                    date
time-millis, time-micros                                 int32, int64 (the number) int, bigint, as Spark's own from_avro
timestamp-millis, -micros, -nanos (cut to micros)        timestamp us, UTC         timestamp
local-timestamp-millis, -micros, -nanos                  timestamp us              timestamp_ntz
record                                                   struct                    struct
array, map                                               list, map<string, …>      array, map
union of null and one type                               that type
union of several types                                   struct member0, member1 … struct, one member not null (as from_avro)
record inside itself                                     string: the value as JSON string

Everything is nullable. A time or date outside the years 1 to 9999 makes a bad record: neither Spark nor Python supports it.
A top-level record is shown as its fields; any other value as one column `value`.

Protobuf                                                 Arrow
int32, sint32, sfixed32 · int64 … · float, double, bool  the same
uint32, fixed32 · uint64, fixed64                        int64 · decimal128(20, 0)
string, enum (its name; the number of an unknown one)    string
bytes                                                    binary
google.protobuf.Timestamp                                timestamp us, UTC
message · repeated · map                                 struct · list · map (keys that are numbers stay numbers)
message inside itself                                    string: the value as JSON

Primitive schemas (column `value`)                       Arrow
INT8, INT16, INT32, INT64, FLOAT, DOUBLE, BOOLEAN        int8 … bool
STRING, BYTES                                            string, binary
DATE, TIMESTAMP, INSTANT (nanoseconds cut to micros)     timestamp us, UTC (DATE is Java's java.util.Date, an instant)
LOCAL_DATE · LOCAL_DATE_TIME                             date32 · timestamp us
TIME · LOCAL_TIME                                        int64: milliseconds as sent · nanoseconds of the day

KEY_VALUE: two columns `key` and `value`, each as its own schema defines, records as structs.
"""

from __future__ import annotations

import pyarrow as pa

from cepheid_decode.typed.avro_schema import Array, Enum, Fixed, Logical, Map, Node, Primitive, Record, Union, choices

TIMESTAMP = pa.timestamp("us", tz="UTC")
LOCAL_TIMESTAMP = pa.timestamp("us")
MIN_MICROS, MAX_MICROS = -62_135_596_800 * 10**6, 253_402_300_800 * 10**6 - 1
MIN_DAYS, MAX_DAYS = -719_162, 2_932_896
"""The years 1 to 9999, since 1970: the range of Spark's timestamp and date, and of Python's datetime."""

_PRIMITIVES = {
    "null": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}


def arrow_type(node: Node, inside: tuple[Node, ...] = ()) -> pa.DataType:
    """`inside`: the records around this node; a nested one of these is JSON text, because a column type cannot contain itself."""
    match node:
        case Primitive(name, logical):
            return _PRIMITIVES[name] if logical is None else logical_type(logical, _PRIMITIVES[name])
        case Fixed(logical=logical):
            return pa.binary() if logical is None else logical_type(logical, pa.binary())
        case Enum():
            return pa.string()
        case Array(items):
            return list_of(arrow_type(items, inside))
        case Map(values):
            return map_of(pa.string(), arrow_type(values, inside))
        case Union():
            return _union_type(node, inside)
        case Record():
            if node in inside:
                return pa.string()
            return pa.struct([pa.field(field.name, arrow_type(field.node, (*inside, node))) for field in node.fields])


def is_record(node: Node) -> bool:
    """Whether the fields of a value become columns of their own."""
    if isinstance(node, Union) and len(choices(node)) == 1:
        return is_record(choices(node)[0])
    return isinstance(node, Record) and bool(node.fields)


def _union_type(node: Union, inside: tuple[Node, ...]) -> pa.DataType:
    several = choices(node)
    if not several:
        return pa.string()
    if len(several) == 1:
        return arrow_type(several[0], inside)
    return pa.struct([pa.field(f"member{index}", arrow_type(branch, inside)) for index, branch in enumerate(several)])


def logical_type(logical: Logical, plain: pa.DataType) -> pa.DataType:
    if logical.name.startswith("timestamp-"):
        return TIMESTAMP
    if logical.name.startswith("local-timestamp-"):
        return LOCAL_TIMESTAMP
    match logical.name:
        case "date":
            return pa.date32()
        case "decimal":
            return pa.decimal128(logical.precision, logical.scale)
        case "uuid":
            return pa.string()
    return plain


# Names of the inner fields as in Spark's to_arrow_schema.
def list_of(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item))


def map_of(key: pa.DataType, value: pa.DataType) -> pa.DataType:
    return pa.map_(pa.field("key", key, nullable=False), pa.field("value", value))
