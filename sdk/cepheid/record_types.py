"""Record types (dataclass, TypedDict, pydantic model) as Avro definitions, and conversion of their values to plain data and back.

    Python                        Avro                             JSON
    bool int float str            boolean long double string       the same
    Int32 Float32                 int float                        number
    bytes                         bytes                            not possible
    datetime date                 long timestamp-millis, int date  number
    an Enum of str                enum of its values               string
    X | None                      ["null", X]                      null or X
    list[X] dict[str, X]          array, map                       array, object
    a record type                 record                           object

`lower` converts a value to plain data, `lift` plain data to a value; both name the field that does not fit.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Union, get_args, get_origin

from cepheid.errors import UnreadableMessageError, UsageError

Int32 = Annotated[int, "avro:int"]
"""An `int` that is Avro's int, like `Integer` of Java and the official client, instead of long."""
Float32 = Annotated[float, "avro:float"]
"""A `float` that is Avro's float instead of double."""

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AVRO_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_INT_BOUNDS = {"int": 1 << 31, "long": 1 << 63}


class _MisfitError(Exception):
    """A value at a path does not fit."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"field {path!r}: {why}" if path else why)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """One type: its definition and conversions. Functions get the value, and the path for errors."""

    definition: Any
    lower: Callable[[Any, str], Any]
    lift: Callable[[Any, str], Any]
    is_optional: bool = False


class RecordCodec:
    """Definition and conversions of one record type. `binary`: bytes are supported. Raises UsageError, which names the field."""

    def __init__(self, record: Any, *, binary: bool) -> None:
        if not is_record_type(record):
            raise UsageError(f"{record!r} is not a dataclass, TypedDict or pydantic model")
        builder = _Builder(binary)
        self._kind = builder.kind_of(record, record.__name__)
        self.definition: dict[str, Any] = self._kind.definition

    def lower(self, value: Any) -> Any:
        """Return the value as plain data. Raises UsageError."""
        try:
            return self._kind.lower(value, "")
        except _MisfitError as error:
            raise UsageError(f"the value does not fit the schema of {self.definition['name']}: {error}") from None

    def lift(self, data: Any) -> Any:
        """Return a value of the record type. Raises UnreadableMessageError."""
        try:
            return self._kind.lift(data, "")
        except _MisfitError as error:
            raise UnreadableMessageError(f"the payload is not a {self.definition['name']}: {error}") from None


def is_record_type(record: Any) -> bool:
    return isinstance(record, type) and (
        dataclasses.is_dataclass(record) or typing.is_typeddict(record) or hasattr(record, "model_fields")
    )


class _Builder:
    def __init__(self, binary: bool) -> None:
        self._binary = binary
        self._records: dict[Any, _Kind] = {}
        self._names: dict[str, Any] = {}

    def kind_of(self, annotation: Any, path: str) -> _Kind:
        if get_origin(annotation) is Annotated:
            base, *notes = get_args(annotation)
            avro = next((note[5:] for note in notes if isinstance(note, str) and note.startswith("avro:")), None)
            return _number(base, avro) if avro in ("int", "float") else self.kind_of(base, path)
        if is_record_type(annotation):
            return self._record(annotation, path)
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return self._enum(annotation, path)
        if (plain := _PLAIN.get(annotation)) is not None:
            if annotation is bytes and not self._binary:
                raise UsageError(f"field {path!r}: JSON has no bytes: use AvroSchema, or text in the field")
            return plain
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin in (Union, types.UnionType):
            inner = [argument for argument in arguments if argument is not type(None)]
            if len(inner) == 1 and len(arguments) == 2:
                return _optional(self.kind_of(inner[0], path))
        elif origin is list and arguments:
            return _array(self.kind_of(arguments[0], path))
        elif origin is dict and len(arguments) == 2 and arguments[0] is str:
            return _map(self.kind_of(arguments[1], path))
        shown = getattr(annotation, "__name__", None) or str(annotation)
        raise UsageError(
            f"field {path!r}: {shown} has no Avro type; possible are bool, int, float, str, bytes, datetime, date, enums of str, "
            "X | None, list[X], dict[str, X] and record types"
        )

    def _enum(self, kind: type[enum.Enum], path: str) -> _Kind:
        values = [member.value for member in kind]
        if not all(isinstance(value, str) and value.isidentifier() for value in values):
            raise UsageError(f"field {path!r}: the values of enum {kind.__name__} must be names, for example 'NEW'")

        def lower(value: Any, where: str) -> Any:
            try:
                return kind(value).value
            except ValueError:
                raise _MisfitError(where, f"{value!r} is not a {kind.__name__}") from None

        def lift(value: Any, where: str) -> Any:
            try:
                return kind(value)
            except ValueError:
                raise _MisfitError(where, f"{value!r} is not a {kind.__name__}") from None

        definition: Any = {"type": "enum", "name": kind.__name__, "symbols": values}
        if kind.__name__ in self._names:
            definition = self._named(kind.__name__, kind, path)
        self._names[kind.__name__] = kind
        return _Kind(definition, lower, lift)

    def _named(self, name: str, kind: Any, path: str) -> str:
        if self._names[name] is not kind:
            raise UsageError(f"field {path!r}: two types are called {name}; names in a schema must differ")
        return name

    def _record(self, record: Any, path: str) -> _Kind:
        name = record.__name__
        if (known := self._records.get(record)) is not None:  # Avro defines a name once and refers to it afterwards
            return _Kind(self._named(name, record, path), known.lower, known.lift)
        if name in self._names:
            self._named(name, record, path)
        self._names[name] = record
        fields: list[_Field] = []
        made = _Record(record, fields)
        self._records[record] = _Kind(None, made.lower, made.lift)  # fields may have this type again
        definitions = []
        for names, annotation, has_default, default in _fields_of(record):
            field_path = f"{path}.{names.attribute}"
            if names.encoded != names.attribute and not _AVRO_NAME.fullmatch(names.encoded):
                raise UsageError(f"field {field_path!r}: an alias must consist of letters, digits and _, got {names.encoded!r}")
            kind = self.kind_of(annotation, field_path)
            may_be_absent = has_default and made.is_mapping
            if may_be_absent and not kind.is_optional:  # Avro has no absent fields
                kind = dataclasses.replace(_optional(kind), lower=kind.lower)
                absent: tuple[Any, ...] = (None,)
            else:
                absent = ()
            definition = {"name": names.encoded, "type": kind.definition}
            if has_default:
                _add_default(definition, kind, default)
            definitions.append(definition)
            fields.append(_Field(names, kind, has_default, absent))
        whole = {"type": "record", "name": name, "fields": definitions}
        return _Kind(whole, made.lower, made.lift)


@dataclasses.dataclass(frozen=True, slots=True)
class _Names:
    """Names of one field. `argument`: that of the constructor."""

    attribute: str
    encoded: str
    argument: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field of a record. `absent`: decoded values for which a TypedDict does not have the key."""

    names: _Names
    kind: _Kind
    has_default: bool
    absent: tuple[Any, ...]


class _Record:
    def __init__(self, record: Any, fields: list[_Field]) -> None:
        self.is_mapping = typing.is_typeddict(record)
        self._record = record
        self._fields = fields

    def lower(self, value: Any, path: str) -> Any:
        if not isinstance(value, dict if self.is_mapping else self._record):
            raise _MisfitError(path, f"expected a {self._record.__name__}, got {type(value).__name__}")
        lowered = {}
        for field in self._fields:
            name = field.names.attribute
            where = f"{path}.{name}" if path else name
            if self.is_mapping:
                if name not in value:
                    if field.has_default:
                        continue
                    if not field.kind.is_optional:
                        raise _MisfitError(where, "it is missing")
                inner = value.get(name)
            else:
                inner = getattr(value, name)
            lowered[field.names.encoded] = field.kind.lower(inner, where)
        return lowered

    def lift(self, data: Any, path: str) -> Any:
        if not isinstance(data, dict):
            raise _MisfitError(path, f"expected an object, got {type(data).__name__}")
        values = {}
        for field in self._fields:
            name = field.names.encoded
            where = f"{path}.{name}" if path else name
            if name not in data and field.names.attribute in data:
                name = field.names.attribute  # earlier versions did not write aliases
            if name in data:
                inner = field.kind.lift(data[name], where)
                if inner not in field.absent:
                    values[field.names.argument] = inner
            elif not field.has_default:
                if not field.kind.is_optional:
                    raise _MisfitError(where, "it is missing")
                values[field.names.argument] = None
        if self.is_mapping:
            return values
        try:
            return self._record(**values)
        except (TypeError, ValueError) as error:
            raise _MisfitError(path, str(error)) from None


def _fields_of(record: Any) -> list[tuple[_Names, Any, bool, Any]]:
    """Return names, type, whether there is a default, and the default, of each field; None for the default of a factory.

    A key that a TypedDict does not require has the default None.
    """
    try:
        hints = typing.get_type_hints(record, include_extras=True)
    except NameError as error:
        raise UsageError(f"{record.__name__}: a type of its fields cannot be found: {error}; define it in the module") from None
    if dataclasses.is_dataclass(record):
        missing = dataclasses.MISSING
        return [
            (
                _Names(field.name, field.name, field.name),
                hints[field.name],
                field.default is not missing or field.default_factory is not missing,
                None if field.default is missing else field.default,
            )
            for field in dataclasses.fields(record)
            if field.init
        ]
    if typing.is_typeddict(record):
        keys = []
        for name, hint in hints.items():
            may_be_absent = name in record.__optional_keys__
            if (origin := get_origin(hint)) in (typing.Required, typing.NotRequired):  # written as text, Python did not resolve it
                may_be_absent = origin is typing.NotRequired
                (hint,) = get_args(hint)
            keys.append((_Names(name, name, name), hint, may_be_absent, None))
        return keys
    return [
        (_model_names(name, field), hints[name], not field.is_required(), None if field.default_factory else field.default)
        for name, field in record.model_fields.items()
    ]


def _model_names(name: str, field: Any) -> _Names:
    """Return the names of a pydantic model's field: it is written under its alias, and may have another one for reading."""
    alias = field.validation_alias
    choices = getattr(alias, "choices", [alias])  # of AliasChoices
    argument = next((choice for choice in choices if isinstance(choice, str)), name)
    return _Names(name, field.serialization_alias or name, argument)


def _add_default(definition: dict[str, Any], kind: _Kind, default: Any) -> None:
    """Add a default. That of a union must be of its first branch, so only None qualifies (Avro specification, "Unions")."""
    if kind.is_optional:
        if default is None:
            definition["default"] = None
    elif default is not None and not isinstance(default, bytes):
        definition["default"] = kind.lower(default, definition["name"])


def _exactly(expected: type, avro: str, *, also: tuple[type, ...] = ()) -> _Kind:
    def check(value: Any, path: str) -> Any:
        if type(value) is not expected and (isinstance(value, bool) or not isinstance(value, (expected, *also))):
            raise _MisfitError(path, f"expected {expected.__name__}, got {value!r:.100}")
        return value

    return _Kind(avro, check, check)


def _number(base: Any, avro: str | None) -> _Kind:
    if base is float:
        return _exactly(float, avro or "double", also=(int,))
    bound = _INT_BOUNDS[avro or "long"]

    def check(value: Any, path: str) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _MisfitError(path, f"expected int, got {value!r:.100}")
        if not -bound <= value < bound:
            raise _MisfitError(path, f"{value} does not fit into Avro's {avro or 'long'}")
        return value

    return _Kind(avro or "long", check, check)


def _optional(kind: _Kind) -> _Kind:
    def lower(value: Any, path: str) -> Any:
        return None if value is None else kind.lower(value, path)

    def lift(value: Any, path: str) -> Any:
        return None if value is None else kind.lift(value, path)

    return _Kind(["null", kind.definition], lower, lift, is_optional=True)


def _array(kind: _Kind) -> _Kind:
    def both(convert: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def each(value: Any, path: str) -> Any:
            if not isinstance(value, list | tuple):
                raise _MisfitError(path, f"expected a list, got {type(value).__name__}")
            return [convert(item, f"{path}[{index}]") for index, item in enumerate(value)]

        return each

    return _Kind({"type": "array", "items": kind.definition}, both(kind.lower), both(kind.lift))


def _map(kind: _Kind) -> _Kind:
    def both(convert: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def each(value: Any, path: str) -> Any:
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise _MisfitError(path, f"expected a dict with str keys, got {value!r:.100}")
            return {key: convert(item, f"{path}[{key!r}]") for key, item in value.items()}

        return each

    return _Kind({"type": "map", "values": kind.definition}, both(kind.lower), both(kind.lift))


def _datetime_to_ms(value: Any, path: str) -> int:
    if not isinstance(value, datetime):
        raise _MisfitError(path, f"expected a datetime, got {value!r:.100}")
    if value.tzinfo is None:
        raise _MisfitError(path, f"the datetime {value} has no time zone: use datetime.now(UTC)")
    return (value - _EPOCH) // timedelta(milliseconds=1)


def _datetime_of(value: Any, path: str) -> datetime:
    if isinstance(value, datetime):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise _MisfitError(path, f"expected milliseconds since 1970, got {value!r:.100}")
    try:
        return _EPOCH + timedelta(milliseconds=value)
    except OverflowError:
        raise _MisfitError(path, f"{value} ms since 1970 is not a date that Python knows") from None


def _date_to_days(value: Any, path: str) -> int:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise _MisfitError(path, f"expected a date, got {value!r:.100}")
    return value.toordinal() - _EPOCH_DAY


def _date_of(value: Any, path: str) -> date:
    if isinstance(value, date):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise _MisfitError(path, f"expected days since 1970, got {value!r:.100}")
    try:
        return date.fromordinal(value + _EPOCH_DAY)
    except (ValueError, OverflowError):
        raise _MisfitError(path, f"{value} days since 1970 is not a date that Python knows") from None


_PLAIN: dict[Any, _Kind] = {
    bool: _Kind("boolean", lambda v, p: _boolean(v, p), lambda v, p: _boolean(v, p)),
    int: _number(int, None),
    float: _number(float, None),
    str: _exactly(str, "string"),
    bytes: _exactly(bytes, "bytes"),
    datetime: _Kind({"type": "long", "logicalType": "timestamp-millis"}, _datetime_to_ms, _datetime_of),
    date: _Kind({"type": "int", "logicalType": "date"}, _date_to_days, _date_of),
}


def _boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise _MisfitError(path, f"expected bool, got {value!r:.100}")
    return value
