"""Decodes JSON values one by one, in Python, with a schema whose definition is Avro's. For rows that pyarrow.json leaves.

Fields are found by their exact names; a missing one is null, one that is not in the schema is ignored, of duplicate ones the last
counts (as in Jackson and Python). Numbers and texts are not converted to each other, except:
- NaN, Infinity and -Infinity may be quoted in float and double (as Jackson does), and 3.0 is an int;
- times may be text in ISO 8601; decimals may be text;
- a string that is a BigDecimal or BigInteger in Java is a number in its JSON: shown as text with all its digits;
- bytes and fixed are the bytes of the text as it was sent. Jackson writes base64: use `unbase64(column)` in Spark.
For a union of several types, the first one that fits counts. Symbols of an enum are not checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Context, Decimal, InvalidOperation
from typing import Any

from cepheid_decode.typed.arrow_types import arrow_type
from cepheid_decode.typed.avro_record import checked_days, checked_micros
from cepheid_decode.typed.avro_schema import Array, Enum, Fixed, Logical, Map, Node, Primitive, Record, Union, choices
from cepheid_decode.typed.records import RecordError

Converter = Callable[[Any], Any]
_EXACT = 1 << 53  # up to here a double holds every integer exactly
_MAX_FLOAT = 3.4028235677973366e38  # from here on, rounding to 32 bits gives infinity
_MICROS = {"millis": (1000, 1), "micros": (1, 1), "nanos": (1, 1000)}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WIDE = Context(prec=100)


class _Constant(str):
    """NaN, Infinity or -Infinity without quotes: a number, although JSON does not have these."""


class JsonRecordDecoder:
    def __init__(self, node: Node) -> None:
        self.type = arrow_type(node)
        self._convert = converter(node, ())
        # Exact digits take time, and only decimals and numbers that are shown as text need them.
        exact = Decimal if has_exact(node, ()) else None
        self._parse = json.JSONDecoder(parse_float=exact, parse_constant=_Constant).decode

    def decode(self, record: bytes) -> Any:
        """Raises RecordError."""
        try:
            document = self._parse(record.decode())
        except UnicodeDecodeError:
            raise RecordError("it is not UTF-8 text") from None
        except ValueError as error:
            raise RecordError(f"it is not JSON: {error}") from None
        if document is None:
            raise RecordError("it is the JSON value null")
        return self._convert(document)


def has_exact(node: Node, inside: tuple[Node, ...]) -> bool:
    """Whether all digits of a number are needed, and not only those that a double holds."""
    match node:
        case Primitive(is_number=True):
            return True
        case Primitive(logical=logical) | Fixed(logical=logical):
            return logical is not None and logical.name == "decimal"
        case Array(inner) | Map(inner):
            return has_exact(inner, inside)
        case Union(branches):
            return any(has_exact(branch, inside) for branch in branches)
        case Record(fields=fields):
            return node not in inside and any(has_exact(field.node, (*inside, node)) for field in fields)
    return False


def converter(node: Node, inside: tuple[Node, ...]) -> Converter:
    plain = _converter(node, inside)
    return lambda value: None if value is None else plain(value)


def _converter(node: Node, inside: tuple[Node, ...]) -> Converter:
    match node:
        case Primitive(is_number=True):
            return _number_text
        case Primitive(name, logical):
            return _PRIMITIVES[name] if logical is None else _logical(logical, name)
        case Fixed(logical=logical):
            return _bytes if logical is None else _logical(logical, "fixed")
        case Enum():
            return _string
        case Array(items):
            return _array(converter(items, inside))
        case Map(values):
            return _map(converter(values, inside))
        case Union():
            return _union([_converter(branch, inside) for branch in choices(node)])
        case Record():
            return _as_json if node in inside else _record(node, inside)


def _kind(value: Any) -> str:
    return {
        bool: "boolean",
        int: "number",
        float: "number",
        Decimal: "number",
        _Constant: "number",
        str: "text",
        list: "array",
    }.get(type(value), "object")


def _wrong(value: Any, wanted: str) -> RecordError:
    shown = f" {value}" if type(value) in (int, float, Decimal) else ""
    return RecordError(f"{_kind(value)}{shown[:40]} instead of {wanted}")


def _null(value: Any) -> None:
    raise _wrong(value, "null")


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise _wrong(value, "boolean")
    return value


def _integer(bits: int) -> Converter:
    bound = 1 << (bits - 1)

    def convert(value: Any) -> int:
        if type(value) in (float, Decimal) and -_EXACT <= value <= _EXACT and value == int(value):
            value = int(value)
        if type(value) is not int or not -bound <= value < bound:
            raise _wrong(value, f"an integer of {bits} bits")
        return value

    return convert


def _floating(bound: float) -> Converter:
    def convert(value: Any) -> float:
        if type(value) in (_Constant, str) and value in ("NaN", "Infinity", "-Infinity"):
            return float(value)
        if type(value) not in (int, float, Decimal):
            raise _wrong(value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not abs(number) < bound:
            raise RecordError("a number is too large")
        return number

    return convert


def _string(value: Any) -> str:
    if type(value) is not str:
        raise _wrong(value, "text")
    if not value.isascii():
        _utf8(value)
    return value


def _number_text(value: Any) -> str:
    return str(value) if type(value) in (int, Decimal) else _string(value)


def _utf8(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise RecordError("a text has half of a surrogate pair") from None


def _bytes(value: Any) -> bytes:
    if type(value) is not str:
        raise _wrong(value, "bytes, as text")
    return _utf8(value)


_PRIMITIVES: dict[str, Converter] = {
    "null": _null,
    "boolean": _boolean,
    "int": _integer(32),
    "long": _integer(64),
    "float": _floating(_MAX_FLOAT),
    "double": _floating(math.inf),
    "bytes": _bytes,
    "string": _string,
}


def _array(items: Converter) -> Converter:
    def convert(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _wrong(value, "an array")
        return [items(item) for item in value]

    return convert


def _map(values: Converter) -> Converter:
    def convert(value: Any) -> list[tuple[str, Any]]:
        if type(value) is not dict:
            raise _wrong(value, "a map")
        return [(_string(key), values(inner)) for key, inner in value.items()]

    return convert


def _record(node: Record, inside: tuple[Node, ...]) -> Converter:
    fields = [(field.name, converter(field.node, (*inside, node))) for field in node.fields]

    def convert(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _wrong(value, "an object")
        found: dict[str, Any] = {}
        name = ""
        try:
            for name, field in fields:
                found[name] = field(value.get(name))
        except RecordError as error:
            raise RecordError(f"field '{name}': {error}") from None
        return found

    return convert


def _union(branches: list[Converter]) -> Converter:
    if not branches:
        return _null
    if len(branches) == 1:
        return branches[0]

    def convert(value: Any) -> dict[str, Any]:
        for index, branch in enumerate(branches):
            try:
                return {f"member{index}": branch(value)}
            except RecordError:
                continue
        raise _wrong(value, f"one of {len(branches)} types")

    return convert


def _as_json(value: Any) -> str:
    text = json.dumps(value, default=float, ensure_ascii=False)
    _utf8(text)
    return text


def _logical(logical: Logical, plain: str) -> Converter:
    name, _, unit = logical.name.rpartition("-")
    if name in ("timestamp", "local-timestamp"):
        return _timestamp(*_MICROS[unit], is_local=name == "local-timestamp")
    match logical.name:
        case "date":
            return _date
        case "decimal":
            return _decimal(logical)
        case "uuid":
            return _string
    return _PRIMITIVES[plain]


def _date(value: Any) -> int:
    if type(value) is not str:
        return checked_days(int(_PRIMITIVES["int"](value)))
    try:
        return (date.fromisoformat(value) - _EPOCH.date()).days
    except ValueError:
        raise RecordError("a text is not an ISO 8601 date") from None


def _timestamp(times: int, parts: int, *, is_local: bool) -> Converter:
    def convert(value: Any) -> int:
        if type(value) is not str:
            micros = int(_PRIMITIVES["long"](value)) * times // parts
        else:
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                raise RecordError("a text is not an ISO 8601 time") from None
            if is_local != (moment.tzinfo is None):
                raise RecordError(
                    "a time has a time zone, which the schema does not allow" if is_local else "a time has no time zone"
                )
            between = moment.replace(tzinfo=UTC) - _EPOCH if is_local else moment - _EPOCH
            micros = (between.days * 86_400 + between.seconds) * 10**6 + between.microseconds
        return checked_micros(micros)

    return convert


def _decimal(logical: Logical) -> Converter:
    step, bound = Decimal((0, (1,), -logical.scale)), Decimal((0, (1,), logical.precision - logical.scale))

    def convert(value: Any) -> Decimal:
        if type(value) not in (int, str, Decimal):
            raise _wrong(value, "a decimal")
        try:
            number = Decimal(value)
            if not number.is_finite() or number.copy_abs() >= bound:
                raise RecordError(f"a number does not fit a decimal of {logical.precision} digits")
            shown = number.quantize(step, context=_WIDE)
        except InvalidOperation:
            raise RecordError("a text is not a decimal") from None
        if shown != number:
            raise RecordError(f"a number has more than {logical.scale} digits after its point")
        return shown

    return convert
