"""Avro values of one schema version as columns of the version to show: in lockstep if possible, otherwise record by record."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import pyarrow as pa

from cepheid_decode.typed.arrow_types import arrow_type, is_record
from cepheid_decode.typed.avro_lockstep import AvroLockstep, NoLockstepError
from cepheid_decode.typed.avro_record import AvroRecordDecoder
from cepheid_decode.typed.avro_resolution import names_to_read, plan_resolution
from cepheid_decode.typed.avro_schema import Node, Record
from cepheid_decode.typed.records import MIN_LOCKSTEP_ROWS, Decoded, ValueDecoder, complete, decode_each


class AvroDecoder:
    """`names`: the needed fields of the record; others may be null."""

    def __init__(self, writer: Node, names: Collection[str] | None = None) -> None:
        self.type: pa.DataType = arrow_type(writer)
        self.is_record = is_record(writer)
        self._records = AvroRecordDecoder(writer)
        self._lockstep = _lockstep(writer, names)

    def decode(self, values: pa.BinaryArray) -> Decoded:
        if self._lockstep is None or len(values) < MIN_LOCKSTEP_ROWS:
            return decode_each(values, self._records.decode, self.type)
        array, left = self._lockstep.decode(values)
        return complete(array, left, values, self._records.decode)


def _lockstep(writer: Node, names: Collection[str] | None) -> AvroLockstep | None:
    try:
        return AvroLockstep(writer, names) if isinstance(writer, Record) and writer.fields else None
    except NoLockstepError:
        return None


class ResolvingDecoder:
    """Values of one version, shown as another. `decoder`: the class that decodes the writer's values; `names`: the needed fields.

    The constructor raises DifferentSchemaError.
    """

    def __init__(
        self,
        decoder: Callable[[Node, Collection[str] | None], ValueDecoder],
        writer: Node,
        reader: Node,
        names: Collection[str] | None = None,
    ) -> None:
        self.type: pa.DataType = arrow_type(reader)
        self.is_record = is_record(reader)
        self._plan = plan_resolution(writer, reader, names)
        self._decoder = decoder(writer, names_to_read(reader, names))

    def decode(self, values: pa.BinaryArray) -> Decoded:
        found = self._decoder.decode(values)
        array, bad = self._plan(found.array)
        errors = dict(found.errors)
        if bad is not None:
            for row in np.flatnonzero(bad):
                errors.setdefault(int(row), "it has a value that the shown version of the schema does not allow")
        return Decoded(array, errors)
