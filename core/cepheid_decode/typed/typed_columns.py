"""Messages of a topic with a schema as its columns, whatever versions they were written with.

    values, versions ──► rows by version ──► that version's decoder ──► columns of the version to show ──► rows in order

A message without a version (its producer had no schema) is decoded as the version to show, or as the newest of its own topic if
that topic does not have it; a tombstone is a row of nulls. A message whose version is not in the topic's history, or which does not
match its schema, is a bad record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cepheid_decode.counters import ScanCounters
from cepheid_decode.errors import BadOptionError, BadRecordError
from cepheid_decode.history import SchemaVersion
from cepheid_decode.scan_request import OnBadRecord
from cepheid_decode.typed.key_value import KeyValueDecoder, is_separated, split_schema
from cepheid_decode.typed.records import Mask, ValueDecoder, decode_present, replace_rows
from cepheid_decode.typed.value_decoder import DifferentSchemaError, value_decoder

NO_VERSION = b""
VALUE = "value"


@dataclass(frozen=True, slots=True)
class TypedResult:
    """`arrays`: one per wanted field. `bad`: rows that could not be decoded, all their fields null; `errors`: why, per row."""

    arrays: list[pa.Array]
    bad: Mask | None = None
    errors: pa.StringArray | None = None


def typed_fields(schemas: Sequence[SchemaVersion], reader_version: bytes | None) -> list[pa.Field]:
    """Return the columns of a topic with these schemas, oldest version first. `reader_version` None: the newest.

    Raises BadOptionError if the topic has no schema, not that version, or one of a kind that cannot be shown as columns.
    """
    return rows_decoder(*(shown_schema(schemas, reader_version),) * 2).fields


def shown_schema(schemas: Sequence[SchemaVersion], reader_version: bytes | None) -> SchemaVersion:
    if not schemas:
        raise BadOptionError("the topic has no schema: read with readMode=messages, or upload one (`cepheid schemas upload`)")
    if reader_version is None:
        return schemas[-1]
    for schema in schemas:
        if schema.version == reader_version:
            return schema
    known = ", ".join(_shown(schema.version) for schema in schemas[-10:])
    raise BadOptionError(f"the topic has no schema version {_shown(reader_version)}; it has {known}")


class RowsDecoder(Protocol):
    """Decodes the rows of one version: returns an array for each of `fields`, and errors by row."""

    fields: list[pa.Field]

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray | None) -> tuple[list[pa.Array], dict[int, str]]: ...


class TypedColumns:
    def __init__(
        self,
        schemas: Sequence[SchemaVersion],
        reader_version: bytes | None,
        on_bad_record: OnBadRecord,
        counters: ScanCounters,
        columns: Sequence[str] | None = None,
        writers: Sequence[SchemaVersion] | None = None,
    ) -> None:
        """`columns`: names of the wanted fields, in that order; None: all. `writers`: the schema history of the messages' topic;
        None: `schemas`, which contain the version to show. Raises BadOptionError."""
        self._shown = shown_schema(schemas, reader_version)
        self._schemas = {schema.version: schema for schema in (schemas if writers is None else writers)}
        # For messages without a version: the version to show as long as their topic has it, even if newer versions are added there.
        has_shown = not writers or any(each.content == self._shown.content for each in writers)
        self._unversioned = self._shown if has_shown else writers[-1]  # type: ignore[index]
        self._on_bad_record = on_bad_record
        self._counters = counters
        fields = {field.name: field for field in typed_fields(schemas, self._shown.version)}
        names = list(fields) if columns is None else list(columns)
        if unknown := [name for name in names if name not in fields]:
            raise BadOptionError(f"the topic's schema has no field '{unknown[0]}'; it has {', '.join(fields)}")
        self.fields: list[pa.Field] = [fields[name] for name in names]
        self._decoders: dict[bytes, RowsDecoder | str] = {}

    def columns(
        self, values: pa.BinaryArray, keys: pa.BinaryArray | None, version_codes: npt.NDArray[np.int32], versions: Sequence[bytes]
    ) -> TypedResult:
        """Return one row per value. `version_codes`: each row's version, an index into `versions`. FAIL: raises BadRecordError."""
        arrays, errors = self._decode(values, keys, version_codes, versions)
        if not errors:
            return TypedResult(arrays)
        rows = np.array(sorted(errors), np.intp)
        if self._on_bad_record is OnBadRecord.FAIL:
            first = int(rows[0])
            raise BadRecordError(
                f"row {first} cannot be decoded by the topic's schema: {errors[first]}", row=first, bad_rows=len(rows)
            )
        self._counters.bad_records += len(rows)
        bad = np.zeros(len(values), np.bool_)
        bad[rows] = True
        texts = np.full(len(values), None, object)
        texts[rows] = [errors[int(row)] for row in rows]
        arrays = [replace_rows(array, rows, pa.nulls(len(rows), array.type)) for array in arrays]
        return TypedResult(arrays, bad, pa.array(texts, pa.string()))

    def _decode(
        self, values: pa.BinaryArray, keys: pa.BinaryArray | None, version_codes: npt.NDArray[np.int32], versions: Sequence[bytes]
    ) -> tuple[list[pa.Array], dict[int, str]]:
        present = np.unique(version_codes)
        if len(present) == 1:
            return self._decode_version(versions[present[0]], values, keys)
        parts: list[list[pa.Array]] = [[pa.array([], field.type)] for field in self.fields]
        errors: dict[int, str] = {}
        order = []
        for code in present:
            rows = np.flatnonzero(version_codes == code)
            picked = pa.array(rows)
            arrays, wrong = self._decode_version(
                versions[code], values.take(picked), keys.take(picked) if keys is not None else None
            )
            for part, array in zip(parts, arrays, strict=True):
                part.append(array)
            errors |= {int(rows[row]): text for row, text in wrong.items()}
            order.append(rows)
        places = np.empty(len(values), np.int64)
        if order:
            places[np.concatenate(order)] = np.arange(len(values))
        return [pa.concat_arrays(part).take(pa.array(places)) for part in parts], errors

    def _decode_version(
        self, version: bytes, values: pa.BinaryArray, keys: pa.BinaryArray | None
    ) -> tuple[list[pa.Array], dict[int, str]]:
        decoder = self._decoder(version)
        if isinstance(decoder, str):
            return [pa.nulls(len(values), field.type) for field in self.fields], dict.fromkeys(range(len(values)), decoder)
        return decoder.decode(values, keys)

    def _decoder(self, version: bytes) -> RowsDecoder | str:
        """Return the decoder of a version, created for its first row; a text: why its rows cannot be decoded."""
        found = self._decoders.get(version)
        if found is None:
            found = self._decoders[version] = self._make_decoder(version)
        return found

    def _make_decoder(self, version: bytes) -> RowsDecoder | str:
        writer = self._unversioned if version == NO_VERSION else self._schemas.get(version)
        if writer is None:
            return f"its schema version {_shown(version)} is not in the topic's history of {len(self._schemas)} versions"
        try:
            return rows_decoder(writer, self._shown, [field.name for field in self.fields])
        except (DifferentSchemaError, BadOptionError) as error:
            return f"its schema version {_shown(version)} cannot be shown as version {_shown(self._shown.version)}: {error}"


def rows_decoder(writer: SchemaVersion, reader: SchemaVersion, names: Sequence[str] | None = None) -> RowsDecoder:
    """Raises BadOptionError (no columns at all), DifferentSchemaError (not as the reader's)."""
    if "KEY_VALUE" not in (writer.kind, reader.kind):
        return _ValueRows(value_decoder(writer, reader, names), names)
    if writer.kind != reader.kind:
        raise DifferentSchemaError(f"{writer.kind} is not {reader.kind}")
    sides = [value_decoder(own, shown) for own, shown in zip(split_schema(writer), split_schema(reader), strict=True)]
    return _KeyValueRows(KeyValueDecoder(*sides, separated=is_separated(writer)), names)


class _ValueRows:
    """The fields of a record, or one column for any other value."""

    def __init__(self, decoder: ValueDecoder, names: Sequence[str] | None) -> None:
        self._decoder = decoder
        self._is_record = decoder.is_record
        every = list(decoder.type) if self._is_record else [pa.field(VALUE, decoder.type)]
        self._picked = _picked(every, names)
        self.fields = [every[index] for index in self._picked]

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray | None) -> tuple[list[pa.Array], dict[int, str]]:
        found = decode_present(self._decoder, values)
        every = found.array.flatten() if self._is_record else [found.array]
        return [every[index] for index in self._picked], dict(found.errors)


class _KeyValueRows:
    def __init__(self, decoder: KeyValueDecoder, names: Sequence[str] | None) -> None:
        self._decoder = decoder
        self._picked = _picked(decoder.fields, names)
        self.fields = [decoder.fields[index] for index in self._picked]

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray | None) -> tuple[list[pa.Array], dict[int, str]]:
        arrays, errors = self._decoder.decode(values, keys)
        return [arrays[index] for index in self._picked], errors


def _picked(fields: Sequence[pa.Field], names: Sequence[str] | None) -> list[int]:
    places = {field.name: index for index, field in enumerate(fields)}
    return list(range(len(fields))) if names is None else [places[name] for name in names]


def _shown(version: bytes) -> str:
    return str(int.from_bytes(version, "big", signed=True)) if len(version) == 8 else version.hex() or "none"
