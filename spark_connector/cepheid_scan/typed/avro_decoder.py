"""Avro values of one schema version as columns of the version that is shown: lockstep where it can, record by record where not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cepheid_scan.typed.arrow_types import arrow_type, is_record
from cepheid_scan.typed.avro_record import AvroRecordDecoder
from cepheid_scan.typed.avro_resolution import plan_resolution
from cepheid_scan.typed.avro_schema import Node
from cepheid_scan.typed.records import Decoded, ValueDecoder, decode_each


class AvroDecoder:
    def __init__(self, writer: Node) -> None:
        self.type: pa.DataType = arrow_type(writer)
        self.is_record = is_record(writer)
        self._records = AvroRecordDecoder(writer)

    def decode(self, values: pa.BinaryArray) -> Decoded:
        return decode_each(values, self._records.decode, self.type)


class ResolvingDecoder:
    """Values of one version, shown as another. Raises DifferentSchemaError when made."""

    def __init__(self, decoder: ValueDecoder, writer: Node, reader: Node) -> None:
        self.type: pa.DataType = arrow_type(reader)
        self.is_record = is_record(reader)
        self._decoder = decoder
        self._plan = plan_resolution(writer, reader)

    def decode(self, values: pa.BinaryArray) -> Decoded:
        found = self._decoder.decode(values)
        array, bad = self._plan(found.array)
        errors = dict(found.errors)
        if bad is not None:
            for row in np.flatnonzero(bad):
                errors.setdefault(int(row), "it has a value that the shown version of the schema does not allow")
        return Decoded(array, errors)
